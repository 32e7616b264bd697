"""What a network's layers cost on the sites of a micro-batch, for its balance, from the graph alone.

A pair of a kernel map is worth its layers' multiply-adds, forward and backward; a site those that a core does while it
moves what the other layers read and write there.  Only proportions matter: who shares out work compares blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from planner.ir.graph import Graph, is_sites
from planner.sites.keys import AnyInts
from planner.sites.work import BlockWork, SiteLevel, SiteLoad, block_work

MEMORY = 8.0
"""Multiply-adds that a core does while it reads and writes one number."""


@dataclass(frozen=True, slots=True)
class SitePrices:
    """Of a network's layers.

    Attributes:
        pair: by the graph input that holds a map's neighbours, a pair, summed over the layers that read the map.
        site: by the name of a level (``sites``, ``sites_1``, ...), a site, summed over the other layers there.
    """

    pair: Mapping[str, float]
    site: Mapping[str, float]


@dataclass(frozen=True, slots=True, eq=False)
class NeighbourPairs:
    """How many neighbours the sites of a map's two ends have.

    Attributes:
        source, target: names of the levels.
        inputs, outputs: [sites of the source], [sites of the target].
    """

    source: str
    target: str
    inputs: AnyInts
    outputs: AnyInts


def prices(graph: Graph) -> SitePrices:
    """The prices of ``graph``'s layers."""
    values = graph.values()
    pair: dict[str, float] = {}
    site: dict[str, float] = {}
    for layer in graph.layers:
        out = layer.outputs[0]
        if not out.dims or not is_sites(out.dims[0]):
            continue
        channels = prod(out.shape[1:])
        maps = [name for name in layer.inputs[1:] if name in graph.inputs and len(values[name].dims) == 2]
        if "pairs" in layer.attributes and maps:
            reads = values[layer.inputs[0]].shape[-1] if layer.parameters else MEMORY
            pair[maps[0]] = pair.get(maps[0], 0.0) + channels * reads
        else:
            site[out.dims[0]] = site.get(out.dims[0], 0.0) + MEMORY * channels
    return SitePrices(pair, site)


def network_work(levels: Mapping[str, SiteLevel], maps: Mapping[str, NeighbourPairs], price: SitePrices) -> BlockWork:
    """The work of every block of a micro-batch, all layers together.

    Args:
        levels: by name.
        maps: by the graph input that holds their neighbours, those of ``price``.
    """
    places = {name: place for place, name in enumerate(levels)}
    loads = []
    for name, cost in price.pair.items():
        pairs = maps[name]  # forward and the weights' gradient go by outputs, the inputs' gradient by inputs
        loads.append(SiteLoad(places[pairs.target], pairs.outputs, 2 * cost))
        loads.append(SiteLoad(places[pairs.source], pairs.inputs, cost))
    for name, cost in price.site.items():
        nothing = np.zeros(len(levels[name].samples), np.int64)
        loads.append(SiteLoad(places[name], nothing, 0.0, cost))
    return block_work(list(levels.values()), loads)
