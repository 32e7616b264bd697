"""The one order of a micro-batch's blocks, and the intervals of it that the ranks of a stage own.

    samples   | A            | B     | C    | D  |       A order of blocks within each sample is ``bisection``'s,
    ranks     | 0    | 1     | 2            | 3  |       the order of samples is the one below.

Every stage cuts the same order, each by its own speeds.  So two stages exchange intervals, whether those are whole
samples or parts of one, and a rank that owns the same share in both keeps its sites.  All of it is integers and single
IEEE operations in a fixed order: every rank that computes it from the same counts gets the same bits.

The owner of a block owns its sites at every stride.

Samples are ordered by longest processing time first (Graham 1969; on unequal speeds Gonzalez, Ibarra and Sahni 1977):
by falling work, each to the rank that would finish it first.  On equal ranks the longest time is at most 4/3 - 1/(3 n)
of the best.  A sample too large for any one rank takes several to itself from the first rank on, and what is left over
of it counts as the first load of the last of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import fsum, inf

import numpy as np
from numpy.typing import NDArray

from planner.ir.errors import UsageError
from planner.sites.bisection import bisection
from planner.sites.keys import AnyInts, Numbers, samples_of
from planner.sites.partition import balanced_cuts, best_stretches, bottleneck
from planner.sites.work import BlockWork

_NOTHING = 1e-9
TOLERANCE = 0.06
"""By how much the slowest rank may exceed the mean where that saves cutting a sample."""
_UNITS = float(1 << 50)

SiteOrder = Callable[[Numbers, Numbers, Numbers], Numbers]
"""Blocks [B], their work [B] in whole units, and the work before each place where ranks will meet, both with samples
ascending -> a permutation [B] with samples ascending."""


@dataclass(frozen=True, slots=True, eq=False)
class Arrangement:
    """Blocks in their order.

    Attributes:
        keys: [B], the blocks.
        before: [B + 1], the work before each block, in whole units; the last is all work.
        sample_ends: [S + 1], where each sample that has blocks begins, then B.
        unit_s: seconds of one unit.
    """

    keys: Numbers
    before: Numbers
    sample_ends: Numbers
    unit_s: float

    @property
    def samples(self) -> Numbers:
        """The samples [S] that have blocks, in their order."""
        return samples_of(self.keys[self.sample_ends[:-1]])


def arrange(
    work: BlockWork, speeds: Sequence[float] = (1.0,), tolerance: float = TOLERANCE, order: SiteOrder = bisection
) -> Arrangement:
    """The order of a micro-batch's blocks.

    Samples in which no ranks of that stage will meet keep their blocks in the order of their keys: to cut those well
    too would take most of the time.  Other stages cut them in slabs along x.

    Args:
        work: from :func:`planner.sites.work.block_work`; without any work at all, each block counts the same.
        speeds: of the ranks of the stage that the order should suit best: by whole samples, and by plane cuts.
        tolerance: see :func:`cut_places`.
        order: of blocks within a sample.

    Raises:
        UsageError: no speed, or work that is not a number.
    """
    _require_speeds(speeds, tolerance)
    total_s = fsum(work.work_s.tolist())  # exact, hence of no order
    if not 0 <= total_s < inf or (len(work.work_s) and work.work_s.min() < 0):
        raise UsageError("work is not in seconds", [f"{total_s} s in all, {work.work_s.min()} s at least"])
    units = np.rint(work.work_s / total_s * _UNITS).astype(np.int64) if total_s else np.ones(len(work.keys), np.int64)
    samples, rows = np.unique(samples_of(work.keys), return_inverse=True)
    by_sample = np.zeros(len(samples), np.int64)
    np.add.at(by_sample, rows, units)
    sequence_of_samples = sample_order(by_sample, speeds, tolerance)
    goals = _goals(by_sample, sequence_of_samples, speeds, tolerance)
    ascending = _within_samples(work.keys, units, _sums(by_sample), rows, goals, order)
    ends = np.cumsum(np.bincount(rows, minlength=len(samples)))[:-1]
    parts = np.split(ascending, ends)
    parts = [parts[sample] for sample in sequence_of_samples]
    sequence = np.concatenate([np.zeros(0, np.int64), *parts])
    return Arrangement(
        keys=work.keys[sequence],
        before=_sums(units[sequence]),
        sample_ends=_sums(np.array([len(part) for part in parts], np.int64)),
        unit_s=total_s / max(int(units.sum()), 1),
    )


def cut_places(arrangement: Arrangement, speeds: Sequence[float], tolerance: float = TOLERANCE) -> list[int]:
    """The cuts [n + 1] of intervals that ranks of ``speeds`` own: ``places[r]`` up to ``places[r + 1]`` of the order.

    As few samples as possible are cut in space, while the slowest rank takes at most ``1 + tolerance`` of the best
    that any intervals reach; a tolerance of 0 gives those best ones.  A rank may own nothing; one of speed 0 owns no
    work.

    Raises:
        UsageError: no speed above 0, one below, or a tolerance below 0.
    """
    _require_speeds(speeds, tolerance)
    before = arrangement.before
    ends = arrangement.sample_ends
    best = balanced_cuts(before, speeds)
    most = (1 + tolerance) * bottleneck(before, best, speeds)
    places = [0]
    for stretch in best_stretches(before[ends], speeds, most).row:
        first = int(ends[stretch.first_sample])
        last = int(ends[stretch.last_sample])
        own = speeds[stretch.first_rank : stretch.last_rank]
        inside = balanced_cuts(before[first : last + 1] - before[first], own) if sum(own) else [0] * (len(own) + 1)
        places += [first + place for place in inside[1:]]
    # space cannot be cut through a block: a stretch may take longer than its share
    return places if bottleneck(before, places, speeds) <= most else best


def _goals(work: Numbers, order: Sequence[int], speeds: Sequence[float], tolerance: float) -> Numbers:
    """Where ranks will meet inside samples: the work before these places, samples ascending.

    ``work`` is that of each sample; the same stretches are found once more by :func:`cut_places`, among whole blocks.
    """
    if not len(work):
        return work
    before = _sums(work[np.array(order)])
    ascending = _sums(work)
    most = (1 + tolerance) * int(before[-1]) / sum(speeds)
    goals = []
    for stretch in best_stretches(before, speeds, most).row:
        own = speeds[stretch.first_rank : stretch.last_rank]
        low = int(before[stretch.first_sample])
        high = int(before[stretch.last_sample])
        for speed in np.cumsum(own)[:-1].tolist() if high > low else ():
            place = low + int(speed / sum(own) * (high - low))
            sample = int(np.searchsorted(before, place, side="right")) - 1
            if low < place < high:
                goals.append(place - int(before[sample]) + int(ascending[order[sample]]))
    return np.array(sorted(goals), np.int64)


def _within_samples(
    keys: Numbers, work: Numbers, before: Numbers, samples: Numbers, goals: Numbers, order: SiteOrder
) -> Numbers:
    """The blocks, samples ascending, and within those that hold a goal in ``order``.

    Args:
        keys, work: of each block, in any order.
        before: the work before each sample, and all.
        samples: of each block, by number.
        goals: the work before each, ascending.
    """
    ascending = np.argsort(keys)
    held = np.searchsorted(before, goals, side="right") - 1  # the sample that each goal is in
    holding = np.unique(held)
    meets = np.isin(samples[ascending], holding)
    chosen = ascending[meets]
    shift = before[holding] - _sums(before[holding + 1] - before[holding])[:-1]  # of the work of samples left out
    inside = order(keys[chosen], work[chosen], goals - shift[np.searchsorted(holding, held)])
    ascending[meets] = chosen[inside]
    return ascending


def _sums(counts: Numbers) -> Numbers:
    sums: Numbers = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    return sums


def _require_speeds(speeds: Sequence[float], tolerance: float) -> None:
    if not len(speeds) or not all(0 <= speed < inf for speed in speeds) or not 0 < sum(speeds) < inf:
        raise UsageError("no rank has a speed", [f"speeds {list(speeds)}"], ["give numbers, one of them above 0"])
    if not 0 <= tolerance < inf:
        raise UsageError("not a tolerance", [f"{tolerance}"], ["give a number from 0 on, such as 0.06"])


RankOfSites = NDArray[np.int32]


def longest_first(work: Sequence[int], speeds: Sequence[float], loads: Sequence[float] | None = None) -> list[int]:
    """The rank of each item of ``work``; ``loads`` is what ranks have to do already."""
    busy = [0.0] * len(speeds) if loads is None else list(loads)
    able = [rank for rank, speed in enumerate(speeds) if speed > 0]
    ranks = [able[0]] * len(work)
    for item in sorted(range(len(work)), key=lambda item: (-work[item], item)):
        ranks[item] = min(able, key=lambda rank: (busy[rank] + work[item]) / speeds[rank])
        busy[ranks[item]] += work[item]
    return ranks


def sample_order(work: Numbers, speeds: Sequence[float], tolerance: float) -> list[int]:
    """The samples in the order for ranks of these ``speeds``: the one with fewest cuts in space, then the fastest."""
    most = (1 + tolerance) * int(work.sum()) / sum(speeds)
    large = [item for item in range(len(work)) if work[item] > most * max(speeds)]
    orders = [_by_rank(ranks) for ranks in _assignments(work.tolist(), speeds, large)]
    orders.append(list(range(len(work))))

    def worth(order: Sequence[int]) -> tuple[int, float]:
        stretches = best_stretches(np.concatenate([[0], np.cumsum(work[list(order)])]), speeds, most)
        return stretches.num_cuts, stretches.time

    return min(orders, key=worth)


def _assignments(work: Sequence[int], speeds: Sequence[float], large: Sequence[int]) -> list[list[int]]:
    """The first rank of each sample: without regard to large samples, and with these laid out first, in two ways."""
    assignments = [longest_first(work, speeds)]
    for shared in (False, True) if large else ():
        ranks = _large_first(work, speeds, large, shared)
        if ranks is not None:
            assignments.append(ranks)
    return assignments


def _large_first(work: Sequence[int], speeds: Sequence[float], large: Sequence[int], shared: bool) -> list[int] | None:
    """Large samples one after another from rank 0 on, each from a new rank on unless ranks are ``shared``."""
    fair = sum(work) / sum(speeds)
    loads = [0.0] * len(speeds)
    first = {}
    rank = 0
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


def halo_sites(source: RankOfSites, target: RankOfSites, neighbours: AnyInts, num_ranks: int) -> Numbers:
    """Input rows [n, n] that go from rank to rank, given the owners of input [N] and of output rows [M]."""
    needed: NDArray[np.bool_] = np.zeros((len(source) + 1) * num_ranks, np.bool_)
    for rows in neighbours:  # row -1 (absent) falls on the last, which is not counted
        needed[np.asarray(rows, dtype=np.int64) * num_ranks + target] = True
    pairs = np.flatnonzero(needed[: len(source) * num_ranks])
    src = source[pairs // num_ranks].astype(np.int64)
    dst = pairs % num_ranks
    counts = np.bincount(src * num_ranks + dst, minlength=num_ranks**2).reshape(num_ranks, num_ranks)
    np.fill_diagonal(counts, 0)
    return counts
