"""All that a profile says of prices, looked up once."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from planner.costs.network import Network, collective_s
from planner.costs.preparing import Preparations
from planner.costs.site_exchanges import site_exchanges_s
from planner.costs.tables import Array, CostTables
from planner.ir.cluster import STATISTICS
from planner.ir.profile import Profile
from planner.layers import over_sites

_STATISTIC_BYTES = 8


@dataclass(slots=True, eq=False)
class PriceBook:
    """Every price that a profile gives; looked up once and shared by all plans made from it."""

    profile: Profile
    tables: CostTables = field(init=False)
    network: Network = field(init=False)
    preparations: Preparations = field(init=False)
    has_sites: bool = field(init=False)
    _sites: dict[tuple[str, int, int], tuple[Array, Array]] = field(init=False, default_factory=dict, repr=False)
    _norms: dict[tuple[str, int], tuple[Array, Array]] = field(init=False, default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.tables = CostTables(self.profile)
        self.network = Network(self.profile.cluster)
        self.preparations = Preparations(self.profile)
        self.has_sites = bool(over_sites(self.profile.graph))

    def kind(self, rank: int) -> str:
        """The kind of the rank's device."""
        return self.profile.cluster.devices[rank].kind

    def exchanges_s(self, ranks: tuple[int, ...], samples: int) -> tuple[Array, Array]:
        """All that ``ranks`` exchange inside a stage of a micro-batch of ``samples``, both ways: running sums.

        Statistics of normalisations, and of layers over sites what :mod:`planner.costs.site_exchanges` says.
        """
        norms = self.norms_s(ranks)
        if not self.has_sites:
            return norms
        key = (self.profile.cluster.group_link_class(ranks), len(ranks), samples)
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
