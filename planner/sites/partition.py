"""Cuts of an order for ranks of given speeds: which fall between samples, where these balance, and which in space.

A *stretch* is a run of whole samples owned by a run of ranks: one rank, which then owns whole samples, or several,
which share the stretch in space in proportion to their speeds and cut ``ranks - 1`` times through samples.

    minimise  (cuts through samples, then the longest time)      over rows of stretches
    such that work of a stretch <= most * (speeds of its ranks)

Both parts of the objective are monotone under extension, hence a forward recursion over (ranks used, samples done) is
exact.  Only states that leave enough speed on both sides are visited, few of them where ``most`` is tight.

Where a row of items is cut, so that neighbouring ranks of given speeds get intervals of nearly equal time.

    minimise  max_r  (prefix[c_{r+1}] - prefix[c_r]) / speed_r      over  0 = c_0 <= c_1 <= ... <= c_n = items

The least such bottleneck is found by bisection with a greedy probe (Pinar and Aykanat, "Fast optimal load balancing
algorithms for 1D partitioning", 2004, section 3).  Of the cuts that attain it, those nearest the proportional ones are
taken: there the k-d order has its large, plane cuts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import numpy as np

from planner.sites.keys import Floats, Numbers


@dataclass(frozen=True, slots=True)
class Stretch:
    """Samples ``first_sample`` up to ``last_sample`` (excluded), owned by such ranks, places in the order both."""

    first_sample: int
    last_sample: int
    first_rank: int
    last_rank: int


@dataclass(frozen=True, slots=True)
class Stretches:
    """A row of stretches, its cuts through samples, and its longest time (as if space could be cut anywhere)."""

    row: tuple[Stretch, ...]
    num_cuts: int
    time: float


class _StretchState(NamedTuple):
    """The first samples owned by the first ranks, by number; ``origin``: the number of the state before."""

    samples: int
    ranks: int
    num_cuts: int
    time: float
    origin: int


def best_stretches(before: Numbers, speeds: Sequence[float], most: float) -> Stretches:
    """The best row of stretches; ``before`` [S + 1] is the work before each sample of the order.

    ``most`` is at least all work over all speeds, so that one stretch of everything is a solution.
    """
    ahead: Floats = np.concatenate([[0.0], np.cumsum(speeds)])
    total = int(before[-1])
    slack = 1e-9 * total
    states = [_StretchState(0, 0, 0, 0.0, -1)]
    for rank in range(1, len(speeds) + 1):
        low = np.searchsorted(before, total - most * (ahead[-1] - ahead[rank]) - slack)
        high = np.searchsorted(before, most * ahead[rank] + slack, side="right")
        targets = range(int(low), int(high)) if rank < len(speeds) else [len(before) - 1]
        samples, ranks, num_cuts, time, _ = (np.array(column) for column in zip(*states, strict=True))
        speed = ahead[rank] - ahead[ranks]
        for target in targets:
            load = before[target] - before[samples]
            fits = np.flatnonzero((samples <= target) & (load <= most * speed + slack))
            if len(fits):
                cuts = num_cuts + np.where(samples < target, rank - ranks - 1, 0)
                longest = np.maximum(time, np.divide(load, speed, out=np.zeros(len(load)), where=speed > 0))
                best = int(fits[np.lexsort((ranks[fits], longest[fits], cuts[fits]))[0]])
                states.append(_StretchState(target, rank, int(cuts[best]), float(longest[best]), best))
    return Stretches(_row_to(states), states[-1].num_cuts, states[-1].time)


def _row_to(states: Sequence[_StretchState]) -> tuple[Stretch, ...]:
    """The stretches that lead to the last state."""
    row: list[Stretch] = []
    state = states[-1]
    while state.origin >= 0:
        past = states[state.origin]
        row.append(Stretch(past.samples, state.samples, past.ranks, state.ranks))
        state = past
    return tuple(reversed(row))


_CLOSE = 1e-9


def bottleneck(prefix: Numbers, cuts: Sequence[int], speeds: Sequence[float]) -> float:
    """The longest time of a rank; 0 for a rank with nothing, infinite for one that has work and no speed."""
    times = [0.0]
    for rank, speed in enumerate(speeds):
        load = int(prefix[cuts[rank + 1]] - prefix[cuts[rank]])
        times.append(load / speed if speed else inf if load else 0.0)
    return max(times)


def balanced_cuts(prefix: Numbers, speeds: Sequence[float]) -> list[int]:
    """Cuts [n + 1] with the least bottleneck, nearest the proportional ones.

    ``prefix`` [items + 1] is the work before each item, from 0 on, in whole units; a speed may be 0, not all of them.
    """
    room = _room(_least_bottleneck(prefix, speeds) * (1 + _CLOSE), speeds)
    earliest = _earliest(prefix, room)
    total = int(prefix[-1])
    shares = np.cumsum(speeds) / sum(speeds)
    cuts = [0]
    for rank in range(len(speeds) - 1):
        last = _reach(prefix, cuts[-1], room[rank])
        first = max(cuts[-1], earliest[rank + 1])
        cuts.append(min(max(_nearest(prefix, total * float(shares[rank])), first), last))
    return [*cuts, len(prefix) - 1]


def _least_bottleneck(prefix: Numbers, speeds: Sequence[float]) -> float:
    low = int(prefix[-1]) / sum(speeds)
    high = int(prefix[-1]) / max(speeds)  # the fastest takes all
    while high - low > _CLOSE * high:
        tried = (low + high) / 2
        cuts = [0]
        for load in _room(tried, speeds):
            cuts.append(_reach(prefix, cuts[-1], load))
        if cuts[-1] == len(prefix) - 1:
            high = min(tried, bottleneck(prefix, cuts, speeds))
        else:
            low = tried
    return high


def _room(time: float, speeds: Sequence[float]) -> list[int]:
    """Whole units of work that each rank does in this time."""
    return [int(time * speed) for speed in speeds]


def _earliest(prefix: Numbers, room: Sequence[int]) -> list[int]:
    """The first place [n + 1] for each cut from which the later ranks still carry all that follows."""
    places = [len(prefix) - 1]
    for load in reversed(room):
        places.append(int(np.searchsorted(prefix, int(prefix[places[-1]]) - load)))
    return places[::-1]


def _reach(prefix: Numbers, start: int, load: int) -> int:
    """The last place up to which no more than ``load`` lies after ``start``."""
    return int(np.searchsorted(prefix, int(prefix[start]) + load, side="right")) - 1


def _nearest(prefix: Numbers, work: float) -> int:
    """The place before which there is nearest to ``work``; of equal ones the first."""
    place = int(np.searchsorted(prefix, work))
    if place == len(prefix) or (place and work - prefix[place - 1] <= prefix[place] - work):
        return int(np.searchsorted(prefix, prefix[place - 1]))
    return place
