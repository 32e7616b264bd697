"""Lower bounds on what a stage costs, for every stretch of layers at once, on a group of like devices.

All matrices are over pairs of cuts ``(a, b)`` and admissible for the simulator: where members of the group or
micro-batches differ, times on the way to another stage take the least and a rank's own work the most.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from planner.costs.network import collective_s
from planner.costs.stage import PriceBook
from planner.costs.tables import Array, SizeTable
from planner.ir.cluster import Link
from planner.ir.problem import Problem
from planner.solvers.candidates.shares import equal_shares, samples_of, usable
from planner.solvers.candidates.space import Pool
from planner.solvers.search.crossing import Crossings, Flags


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """``size`` devices of a pool as one stage.

    Attributes:
        pool: number of the pool.
        shares: samples of each member in a full micro-batch.
        work_s: all F and B of the slowest member, from its first F to its last B.
        least_work_s: the same of the fastest member, without exchanges and the executor's overhead.
        head_s, back_s: the shortest F, the shortest B.
        longest_head_s, longest_back_s: the longest, with what comes with them: sending the activation, receiving the
            gradient and adding to earlier gradients.
        last_s: reduction and update after the last B.
        resident_bytes, saved_bytes, saved_rest_bytes, workspace_bytes: of the member that holds most.
        allowed: False where a layer mixes samples and the group has several members.
        overhead_s: of the executor, per action.
    """

    pool: int
    shares: tuple[int, ...]
    work_s: Array
    least_work_s: Array
    head_s: Array
    back_s: Array
    longest_head_s: Array
    longest_back_s: Array
    last_s: Array
    resident_bytes: Array
    saved_bytes: Array
    saved_rest_bytes: Array
    workspace_bytes: Array
    allowed: Flags
    overhead_s: float

    @property
    def size(self) -> int:
        """Number of devices."""
        return len(self.shares)


@dataclass(frozen=True, slots=True, eq=False)
class Stretches:
    """What all groups of a search share.

    Attributes:
        cuts: positions in the list of layers, ends included.
        crossing: what certainly crosses between stages.
        mixing: running count of layers that mix samples.
        splits: whether an allowed schedule cuts backwards in two, I and W.
    """

    cuts: tuple[int, ...]
    crossing: Crossings
    mixing: Array
    splits: bool = False

    def matrix(self, sums: Array) -> Array:
        """The running sum's difference for every pair of cuts; negative below the diagonal, where it has no meaning."""
        at = sums[list(self.cuts)]
        return np.asarray(at[None, :] - at[:, None])


def group(
    problem: Problem,
    book: PriceBook,
    stretches: Stretches,
    pool: tuple[int, Pool],
    size: int,
    micro_batches: tuple[int, ...],
) -> Group | None:
    """The bounds of ``size`` devices of the pool, None if a member would have no sample or more than was measured.

    Raises:
        MissingMeasurementError: the profile does not say what a layer costs at a size this needs.
    """
    number, (kind, ranks) = pool[0], (pool[1].kind, pool[1].ranks[:size])
    shares = equal_shares(micro_batches[0], size)
    if not usable(problem, book, ranks, shares, micro_batches):
        return None
    tables, matrix = book.tables, stretches.matrix
    parameters, always = tables.parameters(kind), tables.graph
    exchange_f, exchange_b = book.norms_s(ranks) if size > 1 else (np.zeros(1), np.zeros(1))
    exchange = [matrix(sums) if size > 1 else np.zeros(1) for sums in (exchange_f, exchange_b)]
    count, overhead = len(micro_batches), tables.overhead_s(kind)
    members = {tuple(samples_of(shares, rows)[member] for rows in micro_batches) for member in range(size)}
    by_size = {n: tables.at(kind, n) for samples in members for n in samples}
    work = [
        sum(samples.count(n) * (by_size[n].forward_s + _backward_s(by_size[n], stretches.splits)) for n in set(samples))
        for samples in members
    ]
    works = [matrix(np.asarray(sums) + (count - 1) * parameters.accumulate_s) for sums in work]
    forwards = [matrix(t.forward_s) + exchange[0] + overhead for t in by_size.values()]
    backwards = [matrix(t.backward_s) + exchange[1] + overhead for t in by_size.values()]
    largest, rest = max(samples[0] for samples in members), max(samples[-1] for samples in members)
    parameter_bytes = matrix(always.parameter_bytes)
    state = 2 + problem.profile.optimizer.state_bytes_per_parameter_byte
    reduce_s = collective_s(problem.profile.cluster, "all_reduce", ranks, np.maximum(parameter_bytes, 0.0))
    return Group(
        pool=number,
        shares=shares,
        least_work_s=np.minimum.reduce(works),
        work_s=np.maximum.reduce(works) + count * (exchange[0] + exchange[1] + 2 * overhead),
        head_s=np.minimum.reduce(forwards),
        back_s=np.minimum.reduce(backwards),
        longest_head_s=np.maximum.reduce(forwards) + overhead,
        longest_back_s=np.maximum.reduce(backwards) + matrix(parameters.accumulate_s) + overhead,
        last_s=matrix(parameters.update_s) + overhead + (reduce_s + overhead if size > 1 else 0.0),
        resident_bytes=state * parameter_bytes + matrix(always.buffer_bytes),
        saved_bytes=matrix(by_size[largest].saved_bytes),
        saved_rest_bytes=matrix(by_size[rest].saved_bytes),
        workspace_bytes=_largest(by_size[largest].workspace_bytes, stretches.cuts),
        allowed=np.asarray(matrix(stretches.mixing) <= (0 if size > 1 else np.inf)),
        overhead_s=overhead,
    )


def least_link(link: Link) -> Link:
    """The link with a table that never falls, below the measured one: what at least so many bytes take."""
    if not link.points:
        return link
    seconds = np.minimum.accumulate([s for _, s in link.points][::-1])[::-1]
    points = tuple((size, float(s)) for (size, _), s in zip(link.points, seconds, strict=True))
    return Link(link.latency_s, link.bandwidth_bytes_per_s, points, link.duplex, link.evidence)


@functools.lru_cache(maxsize=4096)
def pieces(source: tuple[int, ...], destination: tuple[int, ...], micro_batches: tuple[int, ...]) -> tuple[int, int]:
    """Samples that a message between two groups has at least: on the way to the next F, and on the way to the next B.

    An F waits for all pieces of its rank, hence for the largest; a B follows from a piece, perhaps the smallest.
    """
    forward, backward = [], []
    for rows in set(micro_batches):
        overlaps = _overlaps(samples_of(source, rows), samples_of(destination, rows))
        forward += [max(column) for column in zip(*overlaps, strict=True)]
        backward += [piece for row in overlaps for piece in row if piece]
    return min(forward), min(backward)


def _backward_s(table: SizeTable, splits: bool) -> Array:
    """Running sum of the backwards, of the faster form layer by layer where schedules may choose."""
    if not splits:
        return table.backward_s
    halves = np.diff(table.backward_input_s) + np.diff(table.backward_weight_s)
    return np.concatenate(([0.0], np.cumsum(np.minimum(np.diff(table.backward_s), halves))))


def _overlaps(source: tuple[int, ...], destination: tuple[int, ...]) -> list[list[int]]:
    starts, ends = np.cumsum([0, *source]), np.cumsum([0, *destination])
    return [
        [int(max(0, min(starts[i + 1], ends[j + 1]) - max(starts[i], ends[j]))) for j in range(len(destination))]
        for i in range(len(source))
    ]


def _largest(by_layer: Array, cuts: tuple[int, ...]) -> Array:
    """The largest of each stretch of layers."""
    of_block = np.maximum.reduceat(by_layer, cuts[:-1])
    found = np.zeros((len(cuts), len(cuts)))
    for a in range(len(cuts) - 1):
        found[a, a + 1 :] = np.maximum.accumulate(of_block[a:])
    return found
