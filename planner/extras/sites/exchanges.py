"""What ranks that share sites exchange inside a stage: rows beside their own, and what is known of whole samples.

    sparse_conv, sparse_pool      forward: the halo, as many rows of x from each other rank, one after another;
                                  backward: its gradient, back again, where x has one
    segment, segment_expand       forward and backward: a sum over the ranks of [samples, channels]

and what each computes around it (``call_s``; of gradients of the network's inputs, which nobody wants, nothing).

The rows of a halo depend on how finely a cloud is cut, so they are read by parts a sample, q = parts / samples: between
measured q in log-log, below as at the smallest (ranks cut few samples, whatever their number), beyond the largest in
proportion to q^(-2/3), the surface of a part.  Of a layer that was not measured they are 6 n^(2/3), the surface of a
cube of a rank's n rows.  Where none was counted, since samples stay whole, nothing is exchanged.  Ignored: that samples
of other sizes than the profile's might be cut all the same, and memory of halos.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from planner.costs.communication.collectives import call_s, group_links, partial_sum_s
from planner.costs.communication.tables import Array, transfer_s
from planner.ir.cluster import PARTIAL_SUMS, SITES, Cluster, RankIds
from planner.ir.graph import BYTES_PER_ELEMENT, Graph
from planner.ir.profile import Profile, SiteHalo
from planner.layers import has_halo, over_sites, throughout_sites

_LEAST_ROWS = 0.5
"""Fewer are none: ranks have whole samples, and nothing is exchanged, nor computed around it."""

SITES_DEVIATION = 0.3
"""Standard deviation of the factor by which such plans are off: 0.3 and 0.45 in ``python -m benchmarks.accuracy`` and
``benchmarks.sparse_vgg``."""

SUMMED = ("segment", "segment_expand")
"""Kinds that go from sites to samples, or back."""


def exchanges_of(profile: Profile) -> SiteExchanges | None:
    """Those of a network; None where no layer is over sites."""
    return SiteExchanges(profile) if over_sites(profile.graph) else None


@dataclass(frozen=True, slots=True, eq=False)
class SiteExchanges:
    """What the ranks of a stage exchange."""

    profile: Profile

    def seconds(self, ranks: RankIds, samples: int) -> tuple[Array, Array]:
        """(forward, backward) seconds by layer, of a micro-batch of ``samples`` whose sites ``ranks`` share."""
        graph = self.profile.graph
        cluster = self.profile.cluster
        measured = halos_by_layer(self.profile)
        values = graph.values()
        seconds = np.zeros((2, len(graph.layers)))
        for index, layer in enumerate(graph.layers if len(ranks) > 1 else ()):
            if has_halo(layer.kind):
                x = values[layer.inputs[0]]
                rows = halo_rows(measured.get(layer.name, ()), graph, x.shape[0], len(ranks), samples)
                size = rows * x.shape[-1] * BYTES_PER_ELEMENT[x.dtype]
                seconds[:, index] = _apart_s(cluster, ranks, size) + float(call_s(cluster, SITES, size))
                if layer.inputs[0] in graph.inputs:
                    seconds[1, index] = 0.0
            elif layer.kind in SUMMED:
                size = samples * math.prod((y := layer.outputs[0]).shape[1:]) * BYTES_PER_ELEMENT[y.dtype]
                seconds[:, index] = float(partial_sum_s(cluster, ranks, size))
        return seconds[0], seconds[1]

    def errors(self) -> Iterator[tuple[str, float]]:
        """What all plans share whose ranks share sites, beyond errors of other plans: a factor, its deviation."""
        if throughout_sites(self.profile.graph):
            yield "sites", SITES_DEVIATION

    def around(self, kinds: set[str], has_layouts: bool) -> Iterator[str]:
        """What layers of these kinds exchange, in the words of :data:`planner.ir.cluster.AROUND`."""
        if not has_layouts and any(map(has_halo, kinds)):
            yield SITES
        if kinds.intersection(SUMMED):
            yield PARTIAL_SUMS


def halos_by_layer(profile: Profile) -> dict[str, list[SiteHalo]]:
    """What was measured of each layer."""
    measured: dict[str, list[SiteHalo]] = {}
    for halo in profile.site_halos:
        measured.setdefault(halo.layer, []).append(halo)
    return measured


def halo_rows(measured: Sequence[SiteHalo], graph: Graph, rows: int, parts: int, samples: int) -> float:
    """Rows that a rank receives; ``rows``: of the input, at the graph's own samples."""
    if not measured:
        of_all = rows * samples / graph.samples
        own = of_all / parts
        return float(min(of_all - own, 6.0 * own ** (2 / 3)))
    cut = parts / samples
    points = sorted((halo.parts / halo.samples, float(halo.rows)) for halo in measured)
    at = np.array([point[0] for point in points])
    rows_at = np.maximum(np.array([point[1] for point in points]), 1e-9)
    inside = float(np.exp(np.interp(np.log(cut), np.log(at), np.log(rows_at))))
    rows_of_others = inside * float(min(1.0, at[-1] / cut) ** (2 / 3))
    return rows_of_others if rows_of_others >= _LEAST_ROWS else 0.0


def _apart_s(cluster: Cluster, ranks: RankIds, size: float) -> float:
    """Seconds of receiving ``size`` bytes, as much from each other rank."""
    others = len(ranks) - 1
    links = group_links(cluster, ranks)
    each_s = max(float(transfer_s(link, size / others)) for link in links)
    return others * each_s * (1 if all(link.duplex for link in links) else 2)
