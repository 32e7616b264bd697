"""Graph networks on sampled neighbours, for users: graphs, samplers, batches of seeds.

    import halopipe.graphs as hg

    graph = hg.NodeGraph.open("folder")                  or hg.NodeGraph.of_edges(source, target, features, labels)
    sampler = hg.NeighbourSampler(graph, (15, 10, 5))    fan-outs by layer, the first applied first
    batch = sampler.sample(seeds)                        network(batch.x, batch.blocks)

A factory that returns ``(network, (batch, labels), loss)`` is profiled, planned and run as any other (docs/sparse.md).
"""

from __future__ import annotations

from planner.ir.extras import public

__all__ = [
    "Block",
    "GraphError",
    "NeighbourSampler",
    "NodeGraph",
    "SampledGraph",
    "generated",
    "power_law",
    "seed_batches",
]

__getattr__, __dir__ = public(__name__)
