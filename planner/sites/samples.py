"""The order of samples: those of one rank side by side, so that whole samples are intervals.

Longest processing time first (Graham 1969; on unequal speeds Gonzalez, Ibarra and Sahni 1977): samples by falling
work, each to the rank that would finish it first.  On equal ranks the longest time is at most 4/3 - 1/(3 n) of the
best.  A sample too large for any one rank takes several to itself from the first rank on, and what is left over of it
counts as the first load of the last of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.sites.keys import Ints
from planner.sites.partition import best_stretches

_NOTHING = 1e-9


def longest_first(work: Sequence[int], speeds: Sequence[float], loads: Sequence[float] | None = None) -> list[int]:
    """The rank of each item of ``work``; ``loads`` is what ranks have to do already."""
    busy = [0.0] * len(speeds) if loads is None else list(loads)
    able = [rank for rank, speed in enumerate(speeds) if speed > 0]
    ranks = [able[0]] * len(work)
    for item in sorted(range(len(work)), key=lambda item: (-work[item], item)):
        ranks[item] = min(able, key=lambda rank: (busy[rank] + work[item]) / speeds[rank])
        busy[ranks[item]] += work[item]
    return ranks


def sample_order(work: Ints, speeds: Sequence[float], tolerance: float) -> list[int]:
    """The samples in the order for ranks of these ``speeds``: the one with fewest cuts in space, then the fastest."""
    most = (1 + tolerance) * int(work.sum()) / sum(speeds)
    large = [item for item in range(len(work)) if work[item] > most * max(speeds)]
    orders = [_by_rank(ranks) for ranks in _assignments(work.tolist(), speeds, large)]
    orders.append(list(range(len(work))))

    def worth(order: Sequence[int]) -> tuple[int, float]:
        found = best_stretches(np.concatenate([[0], np.cumsum(work[list(order)])]), speeds, most)
        return found.num_cuts, found.time

    return min(orders, key=worth)


def _assignments(work: Sequence[int], speeds: Sequence[float], large: Sequence[int]) -> list[list[int]]:
    """The first rank of each sample: without regard to large samples, and with these laid out first, in two ways."""
    found = [longest_first(work, speeds)]
    for shared in (False, True) if large else ():
        ranks = _large_first(work, speeds, large, shared)
        if ranks is not None:
            found.append(ranks)
    return found


def _large_first(work: Sequence[int], speeds: Sequence[float], large: Sequence[int], shared: bool) -> list[int] | None:
    """Large samples one after another from rank 0 on, each from a new rank on unless ranks are ``shared``."""
    fair = sum(work) / sum(speeds)
    loads = [0.0] * len(speeds)
    first, rank = {}, 0
    for item in sorted(large, key=lambda item: (-work[item], item)):
        left = float(work[item])
        while rank < len(speeds) and loads[rank] >= fair * speeds[rank]:
            rank += 1
        first[item] = rank
        while left > _NOTHING * sum(work):
            if rank == len(speeds):
                return None
            piece = min(left, fair * speeds[rank] - loads[rank])
            loads[rank] += piece
            left -= piece
            rank += left > _NOTHING * sum(work)
        rank += not shared
    small = [item for item in range(len(work)) if item not in first]
    first |= dict(zip(small, longest_first([work[item] for item in small], speeds, loads), strict=True))
    return [first[item] for item in range(len(work))]


def _by_rank(ranks: Sequence[int]) -> list[int]:
    return sorted(range(len(ranks)), key=lambda item: (ranks[item], item))
