"""Whole samples where they balance: which cuts of an order of samples fall between samples, and which in space.

A *stretch* is a run of whole samples owned by a run of ranks: one rank, which then owns whole samples, or several,
which share the stretch in space in proportion to their speeds and cut ``ranks - 1`` times through samples.

    minimise  (cuts through samples, then the longest time)      over rows of stretches
    such that work of a stretch <= most * (speeds of its ranks)

Both parts of the objective are monotone under extension, hence a forward recursion over (ranks used, samples done) is
exact.  Only states that leave enough speed on both sides are visited, few of them where ``most`` is tight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.sites.keys import Floats, Ints


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


def best_stretches(before: Ints, speeds: Sequence[float], most: float) -> Stretches:
    """The best row of stretches; ``before`` [S + 1] is the work before each sample of the order.

    ``most`` is at least all work over all speeds, so that one stretch of everything is a solution.
    """
    ahead: Floats = np.concatenate([[0.0], np.cumsum(speeds)])
    total, num_ranks, num_samples = int(before[-1]), len(speeds), len(before) - 1
    slack = 1e-9 * total
    done, used, cuts, time, origin = [0], [0], [0], [0.0], [-1]
    for rank in range(1, num_ranks + 1):
        low = np.searchsorted(before, total - most * (ahead[-1] - ahead[rank]) - slack)
        high = np.searchsorted(before, most * ahead[rank] + slack, side="right")
        targets = range(int(low), int(high)) if rank < num_ranks else [num_samples]
        past = len(done)
        starts, ranks = np.array(done[:past]), np.array(used[:past])
        past_cuts, past_time = np.array(cuts[:past]), np.array(time[:past])
        speed = ahead[rank] - ahead[ranks]
        for target in targets:
            load = before[target] - before[starts]
            fits = (starts <= target) & (load <= most * speed + slack) & (ranks < rank)
            if not fits.any():
                continue
            several = np.where(starts < target, rank - ranks - 1, 0)
            alone = np.divide(load, speed, out=np.zeros(past), where=speed > 0)
            found_cuts = np.where(fits, past_cuts + several, num_ranks)
            found_time = np.maximum(past_time, alone)
            best = int(np.lexsort((ranks, found_time, found_cuts))[0])
            done.append(target)
            used.append(rank)
            cuts.append(int(found_cuts[best]))
            time.append(float(found_time[best]))
            origin.append(best)
    row: list[Stretch] = []
    state = len(done) - 1
    while origin[state] >= 0:
        past = origin[state]
        row.append(Stretch(done[past], done[state], used[past], used[state]))
        state = past
    return Stretches(tuple(reversed(row)), cuts[-1], time[-1])
