"""At which micro-batch sizes whole layers are measured: few where costs are smooth, all that matter where they jump.

    the ends               1 (or the least size at which the model runs) and the example's batch
    changes of back end    both sides of every one: where it is, is asked of torch (:func:`key_changes`), not timed
    in between             the middle of every stretch longer than a factor of 2, and on by halves where reading it off
                           the sizes outside of the stretch, as plans are priced, and measuring it disagree

They disagree if the whole step, or a layer that makes up more than ``Limits.share`` of it, is off by more than
``Limits.error`` and by more than the two differ by chance.  A stretch of a factor of 2 is not looked into unless there
is a jump nearby, more than a + b n could be off by: read in log-log between its ends that is off by 1.5 % at most.

Divisors of the batch are preferred as middles, since plans need them.  The number of sizes is limited, and so is the
time: where passes take long, sizes are left out that would take it above ``Limits.most_s`` (never the ends).  What
matters most goes first: changes of back end by the share of the step that they concern, then middles by error.

The decision depends on nothing but what was measured: asked again with the same, it says the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import cosh, inf, log, sqrt
from typing import Protocol

from planner.ir.errors import MissingMeasurementError
from planner.ir.profile import Measurement


class InterpolatedCost(Protocol):
    """What a layer costs at a size that was not measured."""

    @property
    def values(self) -> Sequence[float]:
        """Seconds of forward, seconds of backward, and what else is read."""


ReadBetween = Callable[[Sequence[Measurement], float], InterpolatedCost]
"""Reads what a layer costs at so many samples off its measurements, which ascend; as plans will be priced by it.

It raises MissingMeasurementError where they say nothing.  Other processes must be able to import it.
"""

TESTED_RATIO = 2.0
_MIDDLE_HALF = 0.25


@dataclass(frozen=True, slots=True)
class Limits:
    """When to stop.

    Attributes:
        error: what reading may be off by.
        share: of the step, that a layer must have to be looked at by itself.
        most_sizes: sizes in all.
        most_s: seconds that all passes over whole layers may take, as far as those measured tell.
        passes: over each size, in all processes.
    """

    error: float = 0.03
    share: float = 0.02
    most_sizes: int = 12
    most_s: float = 1200.0
    passes: int = 30


def next_size(
    batch: int, measured: BySize, changes: Sequence[KeyChange], limits: Limits, read: ReadBetween
) -> int | None:
    """The size to measure next; None if there is enough.

    Args:
        batch: of the example: the largest size.
        measured: so far.
    """
    ends = _ends(batch, measured)
    missing = [size for size in ends if size not in measured]
    if missing or not ends:
        return missing[0] if missing else None
    return next(iter(_between(batch, ends, measured, changes, limits, read)), None)


def likely_sizes(
    batch: int, measured: BySize, changes: Sequence[KeyChange], limits: Limits, read: ReadBetween
) -> tuple[int, ...]:
    """The sizes that :func:`next_size` is likely to say, one after another, by what it would say now."""
    ends = _ends(batch, measured)
    if all(size in measured for size in ends):
        return _between(batch, ends, measured, changes, limits, read) if ends else ()
    sides = [size for change in changes for size in (change.samples, change.samples + 1)]
    forced = sorted({*ends, *sides[: max(0, limits.most_sizes - 2)]})
    middles = [middle(low, high, batch) for low, high in pairwise(forced) if high > TESTED_RATIO * low]
    sizes = dict.fromkeys((*ends, *forced, *(size for size in middles if size is not None)))
    return tuple(size for size in sizes if size not in measured)[: limits.most_sizes - len(measured)]


def _between(
    batch: int, ends: Sequence[int], measured: BySize, changes: Sequence[KeyChange], limits: Limits, read: ReadBetween
) -> tuple[int, ...]:
    """The sizes that are wanted between the ends, what matters most first; as many as there is room and time for."""
    works = {size: measurements for size, measurements in measured.items() if measurements}
    wanted = _bracketing(ends, works, changes, limits)
    forced = sorted({*ends, *wanted})
    sizes = dict.fromkeys((*wanted, *_middles(forced, measured, works, batch, limits, read)))
    waiting = [size for size in sizes if size not in measured and _is_affordable(size, works, limits)]
    return tuple(waiting[: max(0, limits.most_sizes - len(works))])


def reading_error(
    at: Sequence[Measurement], others: Mapping[str, Sequence[Measurement]], limits: Limits, read: ReadBetween
) -> float:
    """By how many times what is allowed reading is off at the measured size ``at``; infinite if it cannot be read.

    Args:
        others: by layer, measurements at other sizes, ascending.
    """
    step_s = _step_s(at)
    read_s = 0.0
    worst = 0.0
    chance_s = 0.0
    for one in at:
        if not others.get(one.layer):
            return inf
        try:
            found_s = sum(read(others[one.layer], one.samples).values[:2])
        except MissingMeasurementError:
            return inf
        read_s += found_s
        own_s = one.passes_s
        chance = _chance(one, others[one.layer])
        chance_s += chance * own_s
        if own_s > limits.share * step_s:
            worst = max(worst, abs(found_s / own_s - 1) / max(limits.error, chance))
    if step_s <= 0:
        return 0.0
    return max(worst, abs(read_s / step_s - 1) / max(limits.error, chance_s / step_s))


def middle(low: int, high: int, batch: int, without: Collection[int] = ()) -> int | None:
    """The size to measure between two: a divisor of ``batch`` near the geometric mean, else the nearest to it."""
    inside = [size for size in range(low + 1, high) if size not in without]
    if not inside:
        return None

    def distance(size: int) -> float:
        return abs(log(size / low) / log(high / low) - 0.5)

    divisors = [size for size in inside if batch % size == 0 and distance(size) <= _MIDDLE_HALF]
    return min(divisors or inside, key=distance)


def _ends(batch: int, measured: BySize) -> tuple[int, ...]:
    """The least and the largest divisor of ``batch`` at which the model runs, as far as is known; one, if they meet."""
    divisors = [size for size in range(1, batch + 1) if batch % size == 0]
    runs = [size for size in divisors if size not in measured or measured[size]]
    return tuple(dict.fromkeys((runs[0], runs[-1]))) if runs else ()


def _bracketing(ends: Sequence[int], works: BySize, changes: Sequence[KeyChange], limits: Limits) -> list[int]:
    """Both sides of the changes of back end, those of most of the step first, as many as there is room for."""

    def share(change: KeyChange) -> float:
        names = set(change.layers)
        return sum(
            sum(one.passes_s for one in works[end] if one.layer in names)
            / max(1e-12, sum(one.passes_s for one in works[end]))
            for end in ends
        )

    sides: dict[int, None] = dict.fromkeys(ends)
    for change in sorted(changes, key=share, reverse=True):
        pair = [size for size in (change.samples, change.samples + 1) if ends[0] <= size <= ends[-1]]
        if len({*sides, *pair}) <= limits.most_sizes and len(pair) == 2:
            sides.update(dict.fromkeys(pair))
    return [size for size in sides if size not in ends]


def _middles(
    forced: Sequence[int], measured: BySize, works: BySize, batch: int, limits: Limits, read: ReadBetween
) -> list[int]:
    """Sizes to measure between those of ``forced``, the stretch in greatest need first."""
    waiting: list[tuple[float, int]] = []

    def halve(low: int, high: int, need: float) -> None:
        failed = {size for size, measurements in measured.items() if not measurements}
        at = middle(low, high, batch, failed)
        if at is None:
            return
        if at not in works:
            waiting.append((need, at))
            return
        outside = {size: measurements for size, measurements in works.items() if size <= low or size >= high}
        error = reading_error(works[at], _by_layer(outside), limits, read)
        bend = cosh(log(high / low) / 4) - 1  # the most that costs a + b n, a, b >= 0, read in log-log are off there by
        jumps = error > 1 + bend / limits.error
        for start, stop in ((low, at), (at, high)):
            if error > 1 and (jumps or stop > TESTED_RATIO * start):
                halve(start, stop, error)

    for low, high in pairwise(forced):
        if high > TESTED_RATIO * low:
            halve(low, high, inf)
    return [size for _, size in sorted(waiting, key=lambda each: (-each[0], each[1]))]


def _is_affordable(size: int, works: BySize, limits: Limits) -> bool:
    """Whether all passes, those at ``size`` included, stay below the limit."""
    steps_s = {at: _step_s(measurements) for at, measurements in works.items()}
    above = [at for at in steps_s if at >= size]
    near = min(above) if above else max(steps_s)
    return limits.passes * (sum(steps_s.values()) + steps_s[near] * size / near) <= limits.most_s


def _chance(one: Measurement, others: Sequence[Measurement]) -> float:
    """How far two measurements of the same may be apart: twice the standard error of their difference."""
    near = sorted(others, key=lambda other: abs(log(other.samples / one.samples)))[:2]
    variances = [_standard_error(other) ** 2 / len(near) ** 2 for other in near]
    return 2 * sqrt(_standard_error(one) ** 2 + sum(variances))


def _standard_error(one: Measurement) -> float:
    """Of the median, relative, from the interquartile range of a normal distribution."""
    return 1.25 * one.spread / 1.35 / sqrt(max(1, one.num_runs))


def _by_layer(works: BySize) -> dict[str, list[Measurement]]:
    by_layer: dict[str, list[Measurement]] = {}
    for size in sorted(works):
        for one in works[size]:
            by_layer.setdefault(one.layer, []).append(one)
    return by_layer


def _step_s(measurements: Sequence[Measurement]) -> float:
    return sum(one.passes_s for one in measurements)


BySize = Mapping[int, Sequence[Measurement]]
"""What was measured of all layers, by number of samples; nothing where the model does not run."""

Keys = Mapping[str, str]
"""The back end by layer."""

_ASKED_ALL = 256  # sizes up to this are asked one by one; beyond, every tenth more, and by halves where two differ


@dataclass(frozen=True, slots=True)
class KeyChange:
    """Layers that run on another back end from ``samples + 1`` on than up to ``samples``."""

    samples: int
    layers: tuple[str, ...]


def not_bracketed(measured: BySize, changes: Sequence[KeyChange]) -> tuple[KeyChange, ...]:
    """The changes of back end of which a side was not measured, between the least and the largest size."""
    works = {size for size, measurements in measured.items() if measurements}
    inside = [change for change in changes if works and min(works) <= change.samples < max(works)]
    return tuple(change for change in inside if not {change.samples, change.samples + 1} <= works)


def key_changes(keys_at: Callable[[int], Keys], batch: int) -> tuple[KeyChange, ...]:
    """All changes of back end between 1 and ``batch``; beyond 256 such as last for a tenth more samples.

    Args:
        keys_at: the back end of every layer at so many samples; it is asked, nothing runs.
    """
    asked = list(range(1, min(batch, _ASKED_ALL) + 1))
    while asked[-1] < batch:
        asked.append(min(batch, asked[-1] + asked[-1] // 10))
    keys_of: dict[int, Keys] = {}

    def keys(size: int) -> Keys:
        if size not in keys_of:
            keys_of[size] = keys_at(size)
        return keys_of[size]

    return tuple(change for low, high in pairwise(asked) for change in _changes(keys, low, high))


def _changes(keys: Callable[[int], Keys], low: int, high: int) -> Iterator[KeyChange]:
    after = keys(high)
    changed = tuple(name for name, key in keys(low).items() if after[name] != key)
    if changed and high - low == 1:
        yield KeyChange(low, changed)
    elif changed:
        half = (low + high) // 2
        yield from _changes(keys, low, half)
        yield from _changes(keys, half, high)
