"""Whole samples where they balance: which cuts of an order of samples fall between samples, and which in space.

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

Work of each block: the seconds that a network spends on the sites in it, all levels and layers together.

    work_s(block) = sum over loads of  pair_s * (pairs of the block's sites)  +  site_s * (the block's sites)

A load is what the layers that write the sites of one level cost there.  A forward pass and a weight gradient read the
pairs of output sites; an input gradient those of input sites, a load of its own.  Pairs and sites are counted exactly,
in integers, before any price is applied, so that the sums do not depend on the order of sites.

The k-d order of blocks: each sample's space is halved by work, again and again, until a block is alone.

    work     5  1  1  1        order     0  2  6  9        A node is cut where its two halves' work differs least; of
             1  1  1  1                  1  3  8 10        the three axes it takes the one whose cut has the smallest
             1  1  1  1                  4  7 12 14        surface, x before y before z.
             1  1  1  1                  5 11 13 15

Any interval of the order is a few boxes of space, and a half, a quarter, an eighth of the work is one box (with a step
of one plane of blocks, since a cut may pass through a plane).  Where it is known that ranks will meet, at the *goals*,
a node that holds one is cut there instead of in its middle (at the one nearest the middle): then thirds and fifths are
single boxes too.  Any number of ranks may cut any such order; the goals only spare halo.

All nodes of one depth are cut at once: each axis keeps
its own sorted order of blocks, in which every node is a segment, and a cut splits segments stably (as k-d trees are
built in O(n log n), e.g. Brown, "Building a balanced k-d tree in O(kn log n) time", 2015).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.ir.errors import UsageError
from planner.sites.keys import AnyInts, Floats, Ints, block_keys, pack, unpack


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


class _Reached(NamedTuple):
    """The first samples owned by the first ranks, so many of each; ``origin``: the number of the state before."""

    samples: int
    ranks: int
    num_cuts: int
    time: float
    origin: int


def best_stretches(before: Ints, speeds: Sequence[float], most: float) -> Stretches:
    """The best row of stretches; ``before`` [S + 1] is the work before each sample of the order.

    ``most`` is at least all work over all speeds, so that one stretch of everything is a solution.
    """
    ahead: Floats = np.concatenate([[0.0], np.cumsum(speeds)])
    total = int(before[-1])
    slack = 1e-9 * total
    states = [_Reached(0, 0, 0, 0.0, -1)]
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
                states.append(_Reached(target, rank, int(cuts[best]), float(longest[best]), best))
    return Stretches(_row_to(states), states[-1].num_cuts, states[-1].time)


def _row_to(states: Sequence[_Reached]) -> tuple[Stretch, ...]:
    """The stretches that lead to the last state."""
    row: list[Stretch] = []
    state = states[-1]
    while state.origin >= 0:
        past = states[state.origin]
        row.append(Stretch(past.samples, state.samples, past.ranks, state.ranks))
        state = past
    return tuple(reversed(row))


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
    total = int(prefix[-1])
    shares = np.cumsum(speeds) / sum(speeds)
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


@dataclass(frozen=True, slots=True, eq=False)
class SiteLevel:
    """The sites of a micro-batch at one stride.

    Attributes:
        samples: [N], which sample each site belongs to.
        coordinates: [N, 3], in units of the level.
        stride: finest voxels a unit, one number or one an axis.
    """

    samples: AnyInts
    coordinates: AnyInts
    stride: int | tuple[int, int, int] = 1


@dataclass(frozen=True, slots=True, eq=False)
class SiteLoad:
    """What layers cost on the sites of a level.

    Attributes:
        level: its place in the list of levels.
        pairs: [N], neighbours of each site that are there.
        pair_s: seconds a pair; summed over the layers that use these pairs.
        site_s: seconds a site (normalisation, activation), summed likewise.
    """

    level: int
    pairs: AnyInts
    pair_s: float
    site_s: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class BlockWork:
    """Blocks that hold a site of any level, and what they cost.

    Attributes:
        keys: [B], ascending.
        work_s: [B], not negative.
    """

    keys: Ints
    work_s: Floats


def block_work(levels: Sequence[SiteLevel], loads: Sequence[SiteLoad]) -> BlockWork:
    """The work of every block that holds a site of ``levels``.

    Raises:
        UsageError: a load that does not fit its level, or has a price below 0.
    """
    for load in loads:
        _require_load(levels, load)
    runs = [_runs(block_keys(level.samples, level.coordinates, level.stride)) for level in levels]
    empty = np.zeros(0, np.int64)
    keys = np.unique(np.concatenate([empty, *(run_keys for run_keys, _ in runs)]))
    rows = [np.searchsorted(keys, run_keys) for run_keys, _ in runs]
    work_s = np.zeros(len(keys))
    for load in loads:
        starts = runs[load.level][1]
        row = rows[load.level]
        if not len(row):
            continue
        pairs = np.add.reduceat(np.asarray(load.pairs, dtype=np.int64), starts)
        sites = np.diff(starts, append=len(load.pairs))
        # bincount adds in float64: whole numbers below 2^53, hence exactly
        work_s += load.pair_s * np.bincount(row, pairs, minlength=len(keys))
        if load.site_s:
            work_s += load.site_s * np.bincount(row, sites, minlength=len(keys))
    return BlockWork(keys, work_s)


def _runs(keys: Ints) -> tuple[Ints, Ints]:
    """Keys of runs of equal keys, and where they start; sorted sites have few runs a block."""
    starts = np.flatnonzero(np.diff(keys, prepend=-1))
    return keys[starts], starts


def _require_load(levels: Sequence[SiteLevel], load: SiteLoad) -> None:
    if not 0 <= load.level < len(levels):
        raise UsageError("a load names no level", [f"level {load.level} of {len(levels)}"])
    sites = len(levels[load.level].samples)
    pairs = np.shape(load.pairs)
    if pairs != (sites,):
        raise UsageError(
            "a load does not fit its level", [f"level {load.level}: {sites} sites, pairs of shape {list(pairs)}"]
        )
    if not (0 <= load.pair_s < np.inf and 0 <= load.site_s < np.inf):
        raise UsageError("a load has no price", [f"{load.pair_s} s a pair, {load.site_s} s a site"])
    least = int(np.min(load.pairs, initial=0))
    if least < 0:
        raise UsageError("pairs are counts", [f"level {load.level}: {least} is one"])


Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class _Cuts:
    """One axis' best cut of every node.

    Attributes:
        at: [nodes], position of the second half's first block.
        surface: [nodes], blocks in the two planes that touch at the cut; 0 where a gap lies between them.
    """

    at: Ints
    surface: Ints


def bisection(keys: Ints, work: Ints, goals: Ints | None = None) -> Ints:
    """The permutation [B] that puts blocks in k-d order, samples ascending.

    Args:
        keys: [B], of blocks, distinct, in any order.
        work: [B], not negative, in whole units (sums are exact, so that the order of the arguments does not matter).
        goals: ascending, where ranks will meet: the work before that place, samples ascending.
    """
    samples, blocks = unpack(keys)
    rotated = (pack(samples, np.roll(blocks, -axis, axis=1)) for axis in range(3))
    orders = [np.argsort(key) for key in rotated]
    heads = np.diff(samples[orders[0]], prepend=-1) > 0  # whether a node begins at each position
    result = orders[0].copy()
    places = np.arange(len(keys))
    while True:
        alone = heads & np.append(heads, True)[1:]
        result[places] = orders[0]
        orders = [order[~alone] for order in orders]
        heads = heads[~alone]
        places = places[~alone]
        if not len(places):
            return result
        starts = np.flatnonzero(heads)
        stops = np.append(starts[1:], len(heads))
        wanted = _wanted(work[result], places[starts], places[stops - 1] + 1, goals)
        cuts = [
            _cuts(blocks[order, axis], work[order], wanted, heads, starts, stops) for axis, order in enumerate(orders)
        ]
        axes = np.argmin([cut.surface for cut in cuts], axis=0)
        at = np.choose(axes, [cut.at for cut in cuts])
        node = np.repeat(np.arange(len(starts)), stops - starts)
        second = _second_halves(orders, axes[node], at[node], len(keys))
        orders = [_partitioned(order, second[order], node, starts, at) for order in orders]
        heads[at] = True


def _wanted(work: Ints, starts: Ints, stops: Ints, goals: Ints | None) -> Ints:
    """Twice the work that each node's first half should have: up to the goal nearest its middle, or half of all."""
    before = np.concatenate([[0], np.cumsum(work)])
    low: Ints = before[starts]
    high: Ints = before[stops]
    whole: Ints = high - low
    if goals is None or not len(goals):
        return whole
    # one within a block of the node's end was met by the cut that made that end
    heaviest = np.maximum.reduceat(np.append(work, 0), np.stack([starts, stops], axis=1).ravel())[::2]
    first = np.searchsorted(goals, low + heaviest, side="right")
    last = np.searchsorted(goals, high - heaviest) - 1
    right = np.clip(np.searchsorted(2 * goals, low + high), first, np.maximum(first, last))
    left = np.maximum(right - 1, first)
    left = np.minimum(left, len(goals) - 1)
    right = np.minimum(right, len(goals) - 1)
    nearest = np.where(low + high - 2 * goals[left] <= 2 * goals[right] - low - high, goals[left], goals[right])
    wanted: Ints = np.where(first <= last, 2 * (nearest - low), whole)
    return wanted


def _cuts(plane: Ints, work: Ints, wanted: Ints, heads: Flags, starts: Ints, stops: Ints) -> _Cuts:
    """Best cuts, given the blocks' coordinates along the axis and their work, sorted by node and coordinate."""
    before = np.concatenate([[0], np.cumsum(work)])
    twice = 2 * before[starts] + wanted
    at = np.searchsorted(before, (twice + 1) // 2)
    nearer = np.abs(2 * before[at - 1] - twice) <= np.abs(2 * before[at] - twice)
    at = np.where(before[starts] == before[stops], (starts + stops) // 2, at - nearer)
    at = np.clip(at, starts + 1, stops - 1)
    new_run = heads | (np.diff(plane, prepend=plane[0]) > 0)
    run = np.cumsum(new_run) - 1
    sizes = np.diff(np.flatnonzero(new_run), append=len(plane))
    touching = plane[at] - plane[at - 1] <= 1
    return _Cuts(at, np.where(touching, sizes[run[at - 1]] + sizes[run[at]], 0))


def _second_halves(orders: Sequence[Ints], axes: Ints, at: Ints, num_blocks: int) -> Flags:
    """Whether each block falls behind its node's cut; ``axes`` and ``at`` are the node's, by position."""
    second = np.zeros(num_blocks, np.bool_)
    behind = np.arange(len(axes)) >= at
    for axis, order in enumerate(orders):
        second[order[behind & (axes == axis)]] = True
    return second


def _partitioned(order: Ints, second: Flags, node: Ints, starts: Ints, at: Ints) -> Ints:
    """The order with each node's second half behind its first, either in the order that it had."""
    seconds: Ints = np.cumsum(second) - second
    seconds -= seconds[starts][node]
    firsts = np.arange(len(order)) - starts[node] - seconds
    places = np.where(second, at[node] + seconds, starts[node] + firsts)
    result = np.empty_like(order)
    result[places] = order
    return result
