"""The k-d order of blocks: each sample's space is halved by work, again and again, until a block is alone.

    work     5  1  1  1        order     0  2  6  9        A node is cut where its two halves' work differs least; of
             1  1  1  1                  1  3  8 10        the three axes it takes the one whose cut has the smallest
             1  1  1  1                  4  7 12 14        surface, x before y before z.
             1  1  1  1                  5 11 13 15

Any interval of the order is a few boxes of space, and a half, a quarter, an eighth of the work is one box (with a step
of one plane of blocks, since a cut may pass through a plane).  Where it is known that ranks will meet, at the *goals*,
a node that holds one is cut there instead of in its middle (at the one nearest the middle): then thirds and fifths are
single boxes too.  Any number of ranks may cut any such order; the goals only spare halo.

All nodes of one depth are cut at once: each axis keeps its own sorted order of blocks, in which every node is a
segment, and a cut splits segments stably (as k-d trees are built in O(n log n), e.g. Brown, "Building a balanced k-d
tree in O(kn log n) time", 2015).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.sites.keys import Numbers, pack, unpack

Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class _Cuts:
    """One axis' best cut of every node.

    Attributes:
        at: [nodes], position of the second half's first block.
        surface: [nodes], blocks in the two planes that touch at the cut; 0 where a gap lies between them.
    """

    at: Numbers
    surface: Numbers


def bisection(keys: Numbers, work: Numbers, goals: Numbers | None = None) -> Numbers:
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


def _wanted(work: Numbers, starts: Numbers, stops: Numbers, goals: Numbers | None) -> Numbers:
    """Twice the work that each node's first half should have: up to the goal nearest its middle, or half of all."""
    before = np.concatenate([[0], np.cumsum(work)])
    low: Numbers = before[starts]
    high: Numbers = before[stops]
    whole: Numbers = high - low
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
    wanted: Numbers = np.where(first <= last, 2 * (nearest - low), whole)
    return wanted


def _cuts(plane: Numbers, work: Numbers, wanted: Numbers, heads: Flags, starts: Numbers, stops: Numbers) -> _Cuts:
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


def _second_halves(orders: Sequence[Numbers], axes: Numbers, at: Numbers, num_blocks: int) -> Flags:
    """Whether each block falls after its node's cut; ``axes`` and ``at`` are the node's, by position."""
    second = np.zeros(num_blocks, np.bool_)
    is_after = np.arange(len(axes)) >= at
    for axis, order in enumerate(orders):
        second[order[is_after & (axes == axis)]] = True
    return second


def _partitioned(order: Numbers, second: Flags, node: Numbers, starts: Numbers, at: Numbers) -> Numbers:
    """The order with each node's second half after its first, either in the order that it had."""
    seconds: Numbers = np.cumsum(second) - second
    seconds -= seconds[starts][node]
    firsts = np.arange(len(order)) - starts[node] - seconds
    places = np.where(second, at[node] + seconds, starts[node] + firsts)
    result = np.empty_like(order)
    result[places] = order
    return result
