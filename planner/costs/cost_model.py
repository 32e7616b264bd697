"""All that a profile says of prices, looked up once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import InitVar, dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from planner.costs.calibration.apply_corrections import Factors, StepResidual, corrected
from planner.costs.communication.collectives import norm_s
from planner.costs.communication.links import NetworkPrices
from planner.costs.layers.cost_table import Array, CostTables, Run, SizeTable, layers_of, running
from planner.costs.memory.levels import LevelTables
from planner.costs.stages.gradient_overlap import Bucket, buckets, least_sums_s
from planner.costs.stages.input_pipeline import Preparations
from planner.costs.stages.stage_sums import RecomputeMask, StageSums, of_those
from planner.ir.cluster import Cluster, RankIds
from planner.ir.extras import extras
from planner.ir.graph import Graph
from planner.ir.lazy import once, once_by
from planner.ir.planner_extra import PlannerExtra, StageExchanges
from planner.ir.profile import BACKWARD, FORWARD, Profile
from planner.layers import check_samples_apart, takes_statistics

_STATISTIC_BYTES = 8
_TIMES = ("forward_s", "backward_s", "backward_input_s", "backward_weight_s")


Prices = TypeVar("Prices")


@dataclass(eq=False)
class CostModel:
    """Every price that a profile gives; looked up once and shared by all plans made from it.

    Attributes:
        profile: with its corrections in its figures (:mod:`planner.costs.calibration.apply_corrections`); it has the
            graph and the cluster.
        stage_exchanges: what extras know of exchanges among the ranks of a stage.
        excess: what they add to layers of stages of one rank, or of stages that ranks share; put on here alone.
    """

    source: InitVar[Profile]
    profile: Profile = field(init=False)
    graph: Graph = field(init=False)
    cluster: Cluster = field(init=False)
    excess: StepResidual = field(init=False)
    tables: CostTables = field(init=False)
    levels: LevelTables = field(init=False)
    network: NetworkPrices = field(init=False)
    preparations: Preparations = field(init=False)
    stage_exchanges: tuple[StageExchanges, ...] = field(init=False)

    def __post_init__(self, source: Profile) -> None:
        self.profile = corrected(source)
        self.graph = self.profile.graph
        self.cluster = self.profile.cluster
        self.excess = StepResidual(Factors.of(source.calibration.corrections))
        self.tables = CostTables(self.profile)
        self.levels = LevelTables(self.profile)
        self.network = NetworkPrices(self.cluster)
        preparations = (extra.preparations(self.profile) for extra in extras(PlannerExtra))
        self.preparations = next(filter(None, preparations), None) or Preparations(self.profile)
        exchanges = (extra.stage_exchanges(self.profile) for extra in extras(PlannerExtra))
        self.stage_exchanges = tuple(each for each in exchanges if each is not None)

    def kind(self, rank: int) -> str:
        """The kind of the rank's device; of costs for several memories (:meth:`main_kind`) the least."""
        return self.cluster.devices[rank].kind

    @once
    def main_kind(self, rank: int) -> str:
        """As :meth:`kind`, with parameters in the device's main memory, where a profile has other costs for that."""
        kinds = (extra.main_memory_kind(self.kind(rank)) for extra in extras(PlannerExtra))
        return next((kind for kind in kinds if kind and kind in self.profile.measurements), self.kind(rank))

    @once
    def mixing(self) -> frozenset[str]:
        """The layers that do not keep samples apart, as :func:`planner.layers.check_samples_apart` names them."""
        return frozenset(check_samples_apart(self.profile.graph))

    @once
    def beside(self, prices: Callable[[CostModel], Prices]) -> Prices:
        """The prices that a rare feature has of its own, made of these when they are first asked for."""
        return prices(self)

    @once
    def buckets(self, runs: tuple[Run, ...], apart: frozenset[str]) -> tuple[Bucket, ...]:
        """In which the gradients of a stage's layers are summed, parameters ``apart`` left out."""
        return buckets(self.graph, layers_of(runs), apart)

    @once_by(lambda self, ranks: self.cluster.group_alike(ranks))
    def least_sums_s(self, ranks: RankIds) -> Array:
        """Before each layer, what ``ranks`` take at least to sum gradients of earlier layers (``gradient_overlap``)."""
        return running(least_sums_s(self.profile, lambda sizes: self.network.all_reduces_s(ranks, sizes)))

    @once
    def sums(self, kind: str, samples: float, shared: bool, recompute: RecomputeMask) -> StageSums:
        """What actions take on a rank with ``samples`` samples of a stage that recomputes activations of ``recompute``.

        Raises:
            MissingMeasurementError: as ``tables.at``.
        """
        return StageSums.of(self.at(kind, samples, shared), self.accumulate_s(kind, shared), recompute)

    @once
    def at(self, kind: str, samples: float, shared: bool) -> SizeTable:
        """``tables.at`` with what corrections add to layers of stages of one rank, or of stages that ranks share.

        Raises:
            MissingMeasurementError: as ``tables.at``.
        """
        table = self.tables.at(kind, samples)
        added = self.added(kind, shared)
        if (added == 1).all():
            return table
        return replace(table, **{name: getattr(table, name) * more for name, more in zip(_TIMES, added, strict=True)})

    @once
    def slowed(self, kind: str, samples: float, shared: bool, recompute: RecomputeMask) -> StageSums | None:
        """By how much :meth:`sums` grow where the other devices of the host compute throughout; None: not at all.

        Raises:
            MissingMeasurementError: as ``tables.at``.
        """
        factors = {one.layer: (one.forward, one.backward) for one in self.profile.slowdowns.get(kind, ())}
        if not factors:
            return None
        rows = [factors.get(layer.name, (1.0, 1.0)) for layer in self.graph.layers]
        forward, backward = np.array(rows).T - 1
        table = self.at(kind, samples, shared)
        more = (forward, backward, backward, backward)
        longer: dict[str, Any] = {
            name: running(np.diff(getattr(table, name)) * by) for name, by in zip(_TIMES, more, strict=True)
        }
        return StageSums.of(replace(table, **longer), np.zeros_like(table.forward_s), recompute)

    def added(self, kind: str, shared: bool) -> Array:
        """By how much corrections lengthen F, B, I and W of such stages beyond the corrected profile."""
        forward, backward = (self.excess(what, kind, shared) for what in (FORWARD, BACKWARD))
        return np.array([forward, backward, backward, backward])

    def accumulate_s(self, kind: str, shared: bool) -> Array:
        """What adding into gradients takes: a running sum over layers."""
        return self.tables.parameters(kind).accumulate_s * self.excess(BACKWARD, kind, shared)

    @once_by(
        lambda self, ranks, samples, recompute=False, trains=True: (
            self.cluster.group_alike(ranks),
            samples,
            recompute,
            trains,
        )
    )
    def exchanges_s(
        self, ranks: RankIds, samples: int, recompute: RecomputeMask = False, trains: bool = True
    ) -> tuple[Array, Array]:
        """All that ``ranks`` exchange inside a stage of a micro-batch of ``samples``, in F and in B: running sums.

        Statistics of normalisations, and ``stage_exchanges``; where activations are computed again, B exchanges what F
        does once more.  W exchanges nothing.

        Args:
            trains: as :func:`planner.layers.takes_statistics`.
        """
        forward, backward = self.norms_s(ranks, trains)
        for exchanges in self.stage_exchanges if len(ranks) > 1 else ():
            there, back = exchanges.seconds(ranks, samples)
            forward = forward + running(there)
            backward = backward + running(back)
        return forward, backward + of_those(forward, recompute) if recompute else backward

    @once_by(lambda self, ranks, trains=True: (self.cluster.group_alike(ranks), trains))
    def norms_s(self, ranks: RankIds, trains: bool = True) -> tuple[Array, Array]:
        """Exchanges of statistics over ``ranks``, forward and backward: running sums over layers."""
        takes = np.array([takes_statistics(layer, trains) for layer in self.graph.layers])
        channels = takes * self.tables.graph.norm_channels
        element = self.tables.graph.norm_bytes
        sizes = (len(ranks) * (channels > 0) * (1 + 2 * channels) * _STATISTIC_BYTES, 2 * channels * element)
        forward, backward = (norm_s(self.cluster, ranks, size) for size in sizes)
        return running(forward), running(backward)
