"""What each action of a program lasts on each rank.

F, B, I and W are the sums of the stage's layers at the rank's own number of samples, plus the executor's overhead.  A
stage that recomputes runs its forward once more in B or I.  Every backward but a rank's first also adds its gradients
into those that are there.  On a stage of several ranks each normalisation over the batch exchanges statistics
(``runtime.normalisation``: one all-reduce of 1 + 2 channels float64 numbers a rank forward, one of 2 channels
backward), so its ranks go at the pace of the slowest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from planner.costs.evidence import weakest
from planner.costs.network import Network, collective_s
from planner.costs.tables import Array, CostTables, Run, SizeTable, runs_of, span
from planner.ir.cluster import STATISTICS, Evidence
from planner.ir.plan import Decision
from planner.ir.profile import Profile
from planner.ir.schedule import COMPUTE, Action, Op

_STATISTIC_BYTES = 8


@dataclass(slots=True, eq=False)
class PriceBook:
    """Every price that a profile gives; looked up once and shared by all plans made from it."""

    profile: Profile
    tables: CostTables = field(init=False)
    network: Network = field(init=False)
    _norms: dict[tuple[str, int], tuple[Array, Array]] = field(init=False, default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.tables = CostTables(self.profile)
        self.network = Network(self.profile.cluster)

    def kind(self, rank: int) -> str:
        """The kind of the rank's device."""
        return self.profile.cluster.devices[rank].kind

    def norms_s(self, ranks: tuple[int, ...]) -> tuple[Array, Array]:
        """Exchanges of statistics over ``ranks``, forward and backward: running sums over layers."""
        key = (self.profile.cluster.group_link_class(ranks), len(ranks))
        found = self._norms.get(key)
        if found is None:
            channels, element = self.tables.graph.norm_channels, self.tables.graph.norm_bytes
            sizes = (len(ranks) * (channels > 0) * (1 + 2 * channels) * _STATISTIC_BYTES, 2 * channels * element)
            forward, backward = (collective_s(self.profile.cluster, STATISTICS, ranks, size) for size in sizes)
            found = self._norms[key] = (
                np.concatenate(([0.0], np.cumsum(forward))),
                np.concatenate(([0.0], np.cumsum(backward))),
            )
        return found


@dataclass(frozen=True, slots=True, eq=False)
class StagePlacement:
    """A stage as the prices see it.

    Attributes:
        runs: its layers, as runs of indices.
        ranks: its ranks.
        samples: of each rank, by samples of the micro-batch.
        parameter_bytes: of its distinct parameters.
        recompute: whether its activations are computed again before the backward.
    """

    runs: tuple[Run, ...]
    ranks: tuple[int, ...]
    samples: Mapping[int, tuple[int, ...]]
    parameter_bytes: int
    recompute: bool = False


def placements(profile: Profile, decision: Decision) -> tuple[StagePlacement, ...]:
    """The stages of a plan."""
    index = {layer.name: position for position, layer in enumerate(profile.graph.layers)}
    found = []
    for stage, group in enumerate(decision.stages):
        names = frozenset(decision.layers_of(stage))
        layout = decision.layout_of(stage)
        found.append(
            StagePlacement(
                runs_of(index[name] for name in names),
                group.ranks,
                {rows: layout.samples(rows) for rows in set(decision.micro_batches)},
                profile.graph.parameter_bytes(names),
                group.recompute,
            )
        )
    return tuple(found)


@dataclass(slots=True, eq=False)
class StageCosts:
    """Prices of the actions of one plan."""

    book: PriceBook
    stages: tuple[StagePlacement, ...]
    micro_batches: tuple[int, ...]
    _local: dict[tuple[int, int, Op, int, bool], float] = field(init=False, default_factory=dict, repr=False)

    def action_s(self, rank: int, action: Action, accumulates: bool = False) -> float:
        """Seconds that ``action`` keeps ``rank`` busy, waiting for messages or members not included.

        Args:
            accumulates: whether gradients of an earlier micro-batch are there to add to.
        """
        stage = self.stages[action.stage]
        overhead = self.book.tables.overhead_s(self.book.kind(rank))
        if action.microbatch is not None and action.op in COMPUTE:
            return overhead + self._compute_s(action.stage, rank, action.op, action.microbatch, accumulates)
        if action.op is Op.REDUCE_GRAD:
            return overhead + self.book.network.all_reduce_s(stage.ranks, stage.parameter_bytes)
        if action.op is Op.UPDATE:
            return overhead + span(self.book.tables.parameters(self.book.kind(rank)).update_s, stage.runs)
        return overhead

    def table(self, stage: int, member: int, microbatch: int) -> SizeTable:
        """Costs of all layers on the stage's rank number ``member`` at its share of the micro-batch."""
        placed = self.stages[stage]
        samples = placed.samples[self.micro_batches[microbatch]][member]
        return self.book.tables.at(self.book.kind(placed.ranks[member]), samples)

    def evidence(self) -> Evidence:
        """The weakest evidence behind the prices of layers in this plan."""
        found = {
            (stage.runs, self.book.kind(rank), samples[member])
            for stage in self.stages
            for samples in stage.samples.values()
            for member, rank in enumerate(stage.ranks)
        }
        return weakest(self.book.tables.evidence(kind, samples, runs) for runs, kind, samples in found)

    def _compute_s(self, stage: int, rank: int, op: Op, microbatch: int, accumulates: bool) -> float:
        placed = self.stages[stage]
        exchanged_s = self._exchange_s(placed, op)
        if not exchanged_s:
            return self._local_s(stage, placed.ranks.index(rank), op, microbatch, accumulates)
        members = range(len(placed.ranks))
        return exchanged_s + max(self._local_s(stage, member, op, microbatch, accumulates) for member in members)

    def exchange_s(self, action: Action) -> float:
        """The part of a compute action in which statistics of a normalisation are exchanged."""
        return self._exchange_s(self.stages[action.stage], action.op)

    def _exchange_s(self, placed: StagePlacement, op: Op) -> float:
        if op not in (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT) or len(placed.ranks) < 2:
            return 0.0
        forward, backward = self.book.norms_s(placed.ranks)
        if op is Op.FORWARD:
            return span(forward, placed.runs)
        return span(backward, placed.runs) + (span(forward, placed.runs) if placed.recompute else 0.0)

    def _local_s(self, stage: int, member: int, op: Op, microbatch: int, accumulates: bool) -> float:
        key = (stage, member, op, self.micro_batches[microbatch], accumulates)
        found = self._local.get(key)
        if found is None:
            runs = self.stages[stage].runs
            table = self.table(stage, member, microbatch)
            found = span(_column(table, op), runs)
            if self.stages[stage].recompute and op in (Op.BACKWARD, Op.BACKWARD_INPUT):
                found += span(table.forward_s, runs)
            if accumulates and op in (Op.BACKWARD, Op.BACKWARD_WEIGHT):
                kind = self.book.kind(self.stages[stage].ranks[member])
                found += span(self.book.tables.parameters(kind).accumulate_s, runs)
            self._local[key] = found
        return found


def _column(table: SizeTable, op: Op) -> Array:
    match op:
        case Op.FORWARD:
            return table.forward_s
        case Op.BACKWARD_INPUT:
            return table.backward_input_s
        case Op.BACKWARD_WEIGHT:
            return table.backward_weight_s
        case _:
            return table.backward_s
