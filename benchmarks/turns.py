"""Sides of a comparison by turns: what else the machine does hits all of them alike."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

K = TypeVar("K")
T = TypeVar("T")
WARM_UP = 3


def turns(
    names: Iterable[K], rounds: int, warm_up: int = 0, between: Callable[[], object] = lambda: None
) -> Iterator[tuple[int, K]]:
    """The number of a round, negative to warm up, and a name: each once a round, in changing order.

    Args:
        between: called after each round.
    """
    ordered = list(names)
    for number in range(warm_up + rounds):
        for name in ordered[:: 1 if number % 2 else -1]:
            yield number - warm_up, name
        between()


def by_turns(rounds: int, sides: Mapping[K, Callable[[], T]]) -> dict[K, list[T]]:
    """What each gives in each round."""
    found: dict[K, list[T]] = {name: [] for name in sides}
    for _, name in turns(sides, rounds):
        found[name].append(sides[name]())
    return found


def medians(
    sides: Mapping[K, Callable[[], object]],
    rounds: int,
    meet: Callable[[], object],
    clocks: Sequence[Callable[[], float]] = (time.perf_counter,),
) -> list[dict[K, float]]:
    """Of each clock the median seconds of each side.

    Args:
        meet: called before each turn, and not counted: what one rank waits for another is not for who comes next.
    """
    seconds: list[dict[K, list[float]]] = [{name: [] for name in sides} for _ in clocks]
    with no_collector():
        for number, name in turns(sides, rounds, WARM_UP):
            meet()
            before = [clock() for clock in clocks]
            sides[name]()
            after = [clock() for clock in clocks]
            if number >= 0:
                for of_clock, start, stop in zip(seconds, before, after, strict=True):
                    of_clock[name].append(stop - start)
    return [{name: statistics.median(values) for name, values in of_clock.items()} for of_clock in seconds]


@contextmanager
def no_collector() -> Iterator[None]:
    """Python's collector of cycles runs before, and not inside: it would hit one side or the other."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def require_equal(results: Mapping[str, Mapping[str, Tensor | None]]) -> None:
    """Raises RuntimeError unless all sides compute the same, by name and to a thousandth."""
    (first, ours), *others = results.items()
    for side, theirs in others:
        if ours.keys() != theirs.keys():
            raise RuntimeError(f"{first} has {', '.join(sorted(ours))}, {side} {', '.join(sorted(theirs))}")
        for name, value in ours.items():
            other = theirs[name]
            if value is None or other is None or not value.allclose(other, 1e-3, 1e-3 * float(value.abs().max())):
                raise RuntimeError(f"{first} and {side} disagree on {name}")
