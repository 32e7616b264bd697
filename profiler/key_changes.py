"""Where layers change their back end as the micro-batch grows: found exactly by asking, nothing is timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from planner.ir.profile import Measurement

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
    works = {size for size, found in measured.items() if found}
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
    known: dict[int, Keys] = {}

    def keys(size: int) -> Keys:
        if size not in known:
            known[size] = keys_at(size)
        return known[size]

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
