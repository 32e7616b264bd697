"""All that a profile says of prices, looked up once."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field, replace

import numpy as np

from planner.costs.calibration.apply_corrections import Excess, Factors, corrected
from planner.costs.communication.collectives import collective_s
from planner.costs.communication.halo import site_exchanges_s
from planner.costs.communication.links import Network
from planner.costs.layers.cost_table import Array, CostTables, Run, SizeTable, layers_of
from planner.costs.memory.levels import LevelTables
from planner.costs.stages.gradient_overlap import Bucket, buckets
from planner.costs.stages.input_pipeline import Preparations
from planner.ir.cluster import STATISTICS
from planner.ir.profile import BACKWARD, FORWARD, Profile
from planner.layers import over_sites

_STATISTIC_BYTES = 8


@dataclass(slots=True, eq=False)
class PriceBook:
    """Every price that a profile gives; looked up once and shared by all plans made from it.

    Attributes:
        profile: with its corrections in its figures (:mod:`planner.costs.calibration.apply_corrections`).
        excess: what they add where a stage is priced.
    """

    source: InitVar[Profile]
    profile: Profile = field(init=False)
    excess: Excess = field(init=False)
    tables: CostTables = field(init=False)
    levels: LevelTables = field(init=False)
    network: Network = field(init=False)
    preparations: Preparations = field(init=False)
    has_sites: bool = field(init=False)
    _sites: dict[tuple[object, int], tuple[Array, Array]] = field(init=False, default_factory=dict, repr=False)
    _sized: dict[tuple[str, float, bool], SizeTable] = field(init=False, default_factory=dict, repr=False)
    _norms: dict[tuple[object, ...], tuple[Array, Array]] = field(init=False, default_factory=dict, repr=False)

    _buckets: dict[tuple[tuple[Run, ...], frozenset[str]], tuple[Bucket, ...]] = field(
        init=False, default_factory=dict, repr=False
    )

    def __post_init__(self, source: Profile) -> None:
        self.profile = corrected(source)
        self.excess = Excess(Factors.of(source.calibration.corrections))
        self.tables = CostTables(self.profile)
        self.levels = LevelTables(self.profile)
        self.network = Network(self.profile.cluster)
        self.preparations = Preparations(self.profile)
        self.has_sites = bool(over_sites(self.profile.graph))

    def kind(self, rank: int) -> str:
        """The kind of the rank's device."""
        return self.profile.cluster.devices[rank].kind

    def buckets(self, runs: tuple[Run, ...], apart: frozenset[str]) -> tuple[Bucket, ...]:
        """In which the gradients of a stage's layers are summed, parameters ``apart`` left out."""
        found = self._buckets.get((runs, apart))
        if found is None:
            found = self._buckets[runs, apart] = buckets(self.profile.graph, layers_of(runs), apart)
        return found

    def at(self, kind: str, samples: float, shared: bool) -> SizeTable:
        """``tables.at`` with what corrections add to layers of stages of one rank, or of stages that ranks share.

        Raises:
            MissingMeasurementError: as ``tables.at``.
        """
        forward, backward = (self.excess(what, kind, shared) for what in (FORWARD, BACKWARD))
        table = self.tables.at(kind, samples)
        if forward == backward == 1:
            return table
        found = self._sized.get((kind, samples, shared))
        if found is None:
            found = self._sized[kind, samples, shared] = replace(
                table,
                forward_s=table.forward_s * forward,
                backward_s=table.backward_s * backward,
                backward_input_s=table.backward_input_s * backward,
                backward_weight_s=table.backward_weight_s * backward,
            )
        return found

    def accumulate_s(self, kind: str, shared: bool) -> Array:
        """What adding into gradients takes: a running sum over layers."""
        return self.tables.parameters(kind).accumulate_s * self.excess(BACKWARD, kind, shared)

    def exchanges_s(self, ranks: tuple[int, ...], samples: int) -> tuple[Array, Array]:
        """All that ``ranks`` exchange inside a stage of a micro-batch of ``samples``, both ways: running sums.

        Statistics of normalisations, and of layers over sites what :mod:`planner.costs.communication.halo` says.
        """
        norms = self.norms_s(ranks)
        if not self.has_sites:
            return norms
        key = (self.profile.cluster.group_alike(ranks), samples)
        found = self._sites.get(key)
        if found is None:
            forward, backward = (
                of_norms + np.concatenate(([0.0], np.cumsum(of_sites)))
                for of_norms, of_sites in zip(norms, site_exchanges_s(self.profile, ranks, samples), strict=True)
            )
            found = self._sites[key] = (forward, backward)
        return found

    def norms_s(self, ranks: tuple[int, ...]) -> tuple[Array, Array]:
        """Exchanges of statistics over ``ranks``, forward and backward: running sums over layers."""
        key = self.profile.cluster.group_alike(ranks)
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
