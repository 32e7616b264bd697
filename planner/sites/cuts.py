"""Where a row of items is cut, so that neighbouring ranks of given speeds get intervals of nearly equal time.

    minimise  max_r  (prefix[c_{r+1}] - prefix[c_r]) / speed_r      over  0 = c_0 <= c_1 <= ... <= c_n = items

The least such bottleneck is found by bisection with a greedy probe (Pinar and Aykanat, "Fast optimal load balancing
algorithms for 1D partitioning", 2004, section 3).  Of the cuts that attain it, those nearest the proportional ones are
taken: there the k-d order has its large, plane cuts.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np

from planner.sites.keys import Ints

_CLOSE = 1e-9


def bottleneck(prefix: Ints, cuts: Sequence[int], speeds: Sequence[float]) -> float:
    """The longest time of a rank; 0 for a rank with nothing, infinite for one that has work and no speed."""
    times = [0.0]
    for rank, speed in enumerate(speeds):
        load = int(prefix[cuts[rank + 1]] - prefix[cuts[rank]])
        times.append(load / speed if speed else inf if load else 0.0)
    return max(times)


def balanced_cuts(prefix: Ints, speeds: Sequence[float]) -> list[int]:
    """Cuts [n + 1] with the least bottleneck, nearest the proportional ones.

    ``prefix`` [items + 1] is the work before each item, from 0 on, in whole units; a speed may be 0, not all of them.
    """
    room = _room(_least_bottleneck(prefix, speeds) * (1 + _CLOSE), speeds)
    earliest = _earliest(prefix, room)
    total, shares = int(prefix[-1]), np.cumsum(speeds) / sum(speeds)
    cuts = [0]
    for rank in range(len(speeds) - 1):
        last = _reach(prefix, cuts[-1], room[rank])
        first = max(cuts[-1], earliest[rank + 1])
        cuts.append(min(max(_nearest(prefix, total * float(shares[rank])), first), last))
    return [*cuts, len(prefix) - 1]


def _least_bottleneck(prefix: Ints, speeds: Sequence[float]) -> float:
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


def _earliest(prefix: Ints, room: Sequence[int]) -> list[int]:
    """The first place [n + 1] for each cut from which the later ranks still carry all that follows."""
    places = [len(prefix) - 1]
    for load in reversed(room):
        places.append(int(np.searchsorted(prefix, int(prefix[places[-1]]) - load)))
    return places[::-1]


def _reach(prefix: Ints, start: int, load: int) -> int:
    """The last place up to which no more than ``load`` lies behind ``start``."""
    return int(np.searchsorted(prefix, int(prefix[start]) + load, side="right")) - 1


def _nearest(prefix: Ints, work: float) -> int:
    """The place before which there is nearest to ``work``; of equal ones the first."""
    place = int(np.searchsorted(prefix, work))
    if place == len(prefix) or (place and work - prefix[place - 1] <= prefix[place] - work):
        return int(np.searchsorted(prefix, prefix[place - 1]))
    return place
