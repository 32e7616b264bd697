"""What every stretch of layers costs at least as a stage of a group: matrices over pairs of cuts.

Admissible for the simulator: on the way to another stage the shortest F and B of any member and micro-batch count, of
a stage's own work all of the busiest member's.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass

import numpy as np

from planner.costs.network import collective_s
from planner.costs.stage import PriceBook
from planner.costs.tables import Array, SizeTable
from planner.ir.cluster import ALL_REDUCE
from planner.ir.schedule import Op, Pipeline, StageGraph
from planner.schedules import schedule as schedule_named
from planner.solvers.candidates.shares import samples_of
from planner.solvers.ilp.crossing import Crossing
from planner.solvers.ilp.groups import Group


@dataclass(frozen=True, slots=True, eq=False)
class Prices:
    """By (first cut, last cut).

    Attributes:
        forward_s, backward_s: the shortest F, and the shortest B (or I, where backwards are cut in two).
        turn_s: what the busiest member certainly does between the start of its first F and the end of its last B (I).
        work_s: all of its F and B, or F, I and W.
        last_s: reduction and update after the last of them.
        always_bytes, each_bytes, each_rest_bytes: what the fullest member holds: throughout (workspace included), for
            every micro-batch in flight, and for the smaller last one.
    """

    forward_s: Array
    backward_s: Array
    turn_s: Array
    work_s: Array
    last_s: Array
    always_bytes: Array
    each_bytes: Array
    each_rest_bytes: Array

    def needed_bytes(self, in_flight: int, micro_batches: tuple[int, ...]) -> Array:
        """What the stage needs at least with so many micro-batches in flight at once."""
        rest = int(micro_batches[-1] != micro_batches[0] and in_flight == len(micro_batches))
        return self.always_bytes + (in_flight - rest) * self.each_bytes + rest * self.each_rest_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Pricing:
    """Prices of stages between ``cuts``, for one way to cut the batch.

    Attributes:
        splits: whether backwards may be cut in two.
    """

    book: PriceBook
    cuts: tuple[int, ...]
    crossing: Crossing
    micro_batches: tuple[int, ...]
    splits: bool

    def of(self, group: Group, recompute: bool) -> Prices:
        """Of all stretches on ``group``.

        Raises:
            MissingMeasurementError: a layer's cost at the group's sizes is not known.
        """
        book, count = self.book, len(self.micro_batches)
        overhead = book.tables.overhead_s(group.kind)
        tables = {
            rows: [book.tables.at(group.kind, n) for n in samples_of(group.shares, rows)]
            for rows in set(self.micro_batches)
        }
        forwards = {rows: [self._matrix(t.forward_s) for t in found] for rows, found in tables.items()}
        ways_back = {
            rows: [self._matrix(_way_back(t, self.splits, recompute)) for t in found] for rows, found in tables.items()
        }
        backwards = {
            rows: [self._matrix(_whole_backward(t, self.splits, recompute)) for t in found]
            for rows, found in tables.items()
        }
        exchange_there, exchange_back = self._exchange_s(group, recompute)
        sends, receives = self.crossing.forward_bytes > 0, self.crossing.backward_bytes > 0
        messages = overhead * count * (sends.astype(np.float64) + receives)
        fixed = count * (exchange_there + exchange_back + 2 * overhead) + messages
        accumulated = (count - 1) * self._matrix(book.tables.parameters(group.kind).accumulate_s)
        turn = self._busiest(forwards, ways_back) + fixed
        work = self._busiest(forwards, backwards) + fixed + accumulated
        return Prices(
            forward_s=_shortest(forwards) + exchange_there + overhead,
            backward_s=_shortest(ways_back) + exchange_back + overhead,
            turn_s=turn if self.splits else work,
            work_s=work,
            last_s=self._last_s(group, overhead),
            **self._memory(group, recompute),
        )

    def _last_s(self, group: Group, overhead: float) -> Array:
        update = self._matrix(self.book.tables.parameters(group.kind).update_s) + overhead
        if group.size == 1:
            return update
        size = self._matrix(self.book.tables.graph.parameter_bytes)
        return update + overhead + collective_s(self.book.profile.cluster, ALL_REDUCE, group.ranks, size)

    def _memory(self, group: Group, recompute: bool) -> dict[str, Array]:
        """Lower bounds, as the simulator counts: receive buffers and gradients on their way apart."""
        member = max(range(group.size), key=group.shares.__getitem__)
        largest, rest = group.shares[member], samples_of(group.shares, self.micro_batches[-1])[member]
        graph, book = self.book.tables.graph, self.book
        state = 2 + book.profile.optimizer.state_bytes_per_parameter_byte
        table = book.tables.at(group.kind, largest)
        saved = self._matrix(table.saved_bytes)
        saved_rest = self._matrix(book.tables.at(group.kind, rest).saved_bytes)
        always = state * self._matrix(graph.parameter_bytes) + self._matrix(graph.buffer_bytes)
        always = always + largest_between(table.workspace_bytes, self.cuts)
        sent = self.crossing.forward_bytes
        received = self.crossing.least(sent)[:, None]
        handed = sent + np.where(np.isfinite(received), received, 0.0) * self._surely_fed()[:, None]
        if recompute:
            least_again = np.minimum(saved, saved_rest) if self.micro_batches[-1] != self.micro_batches[0] else saved
            return {
                "always_bytes": always + least_again,
                "each_bytes": handed * largest,
                "each_rest_bytes": handed * rest,
            }
        return {
            "always_bytes": always,
            "each_bytes": saved + handed * largest,
            "each_rest_bytes": saved_rest + handed * rest,
        }

    def _surely_fed(self) -> Array:
        """By cut: 1 where whatever stage ends there feeds the one that starts there, else 0."""
        at = np.arange(len(self.cuts))
        before = at[:, None] < at[None, :]
        fed = np.asarray((self.crossing.linked | ~before).all(axis=0)) & (at > 0)
        return fed.astype(np.float64)

    def _exchange_s(self, group: Group, recompute: bool) -> tuple[Array, Array]:
        """Exchanges of statistics in an F and in a B."""
        if group.size == 1:
            nothing = np.zeros((len(self.cuts), len(self.cuts)))
            return nothing, nothing
        there, back = (self._matrix(sums) for sums in self.book.norms_s(group.ranks))
        return there, back + there if recompute else back

    def _busiest(self, forwards: dict[int, list[Array]], backwards: dict[int, list[Array]]) -> Array:
        """All F and B of the member that has most to do."""
        members, times = len(next(iter(forwards.values()))), Counter(self.micro_batches).items()
        found = np.zeros((len(self.cuts), len(self.cuts)))
        for k in range(members):
            found = np.maximum(found, sum(n * (forwards[rows][k] + backwards[rows][k]) for rows, n in times))
        return found

    def _matrix(self, sums: Array) -> Array:
        """[a, b] = the sum over layers cuts[a] to cuts[b], of running sums over layers."""
        at = sums[list(self.cuts)]
        return at[None, :] - at[:, None]


def largest_between(by_layer: Array, cuts: tuple[int, ...]) -> Array:
    """[a, b] = the largest of layers cuts[a] to cuts[b]."""
    of_block = np.maximum.reduceat(by_layer, cuts[:-1])
    found = np.zeros((len(cuts), len(cuts)))
    for a in range(len(cuts) - 1):
        found[a, a + 1 :] = np.maximum.accumulate(of_block[a:])
    return found


@functools.lru_cache(maxsize=1024)
def in_flight(schedule: str, most_stages: int, num_microbatches: int) -> tuple[int, ...]:
    """The fewest micro-batches that a stage ever has in flight, by stages downstream (itself included) from 1.

    Of all chains of at most ``most_stages`` stages.
    """
    fewest = [num_microbatches] * most_stages
    for depth in range(1, most_stages + 1):
        rows = schedule_named(schedule)(Pipeline(StageGraph.chain(depth, num_microbatches))).rows
        for stage, row in enumerate(rows):
            held = most = 0
            for action in row:
                held += {Op.FORWARD: 1, Op.BACKWARD: -1, Op.BACKWARD_WEIGHT: -1}.get(action.op, 0)
                most = max(most, held)
            fewest[depth - stage - 1] = min(fewest[depth - stage - 1], most)
    return tuple(fewest)


def splits_backwards(schedule: str) -> bool:
    """Whether the schedule cuts backwards into I and W."""
    rows = schedule_named(schedule)(Pipeline(StageGraph.chain(2, 2))).rows
    return any(action.op is Op.BACKWARD_INPUT for row in rows for action in row)


def _shortest(by_size: dict[int, list[Array]]) -> Array:
    return np.asarray(np.minimum.reduce([matrix for found in by_size.values() for matrix in found]))


def _way_back(table: SizeTable, splits: bool, recompute: bool) -> Array:
    """Running sum of what a gradient passes through: B, or I where that is quicker."""
    own = _least(table.backward_s, table.backward_input_s) if splits else table.backward_s
    return own + table.forward_s if recompute else own


def _whole_backward(table: SizeTable, splits: bool, recompute: bool) -> Array:
    """Running sum of B, or of I and W where that is quicker."""
    halves = table.backward_input_s + table.backward_weight_s
    own = _least(table.backward_s, halves) if splits else table.backward_s
    return own + table.forward_s if recompute else own


def _least(one: Array, two: Array) -> Array:
    """Running sum of the lesser, layer by layer."""
    return np.concatenate(([0.0], np.cumsum(np.minimum(np.diff(one), np.diff(two)))))
