"""Graph networks on sampled neighbours: data, and the names of ``halopipe.graphs``.

Modules:

    seeds   Batches of seeds of a graph, shuffled anew in every pass; each batch is a draw of its own
"""

from __future__ import annotations

from typing import ClassVar

from halopipe.extra import FaceExtra

_SAMPLING = "cuda_ops.extras.sampling"
_SEEDS = "halopipe.extras.sampled_graphs.seeds"
_MODULES = {
    "sampler": ("Block", "NeighbourSampler", "SampledGraph"),
    "graph": ("GraphError", "NodeGraph"),
    "generated": ("generated", "power_law"),
}


class SampledGraphData(FaceExtra):
    """Graph networks on sampled neighbours."""

    public: ClassVar = {
        "halopipe.data": {name: f"{_SEEDS}:{name}" for name in ("graph_seeds", "seed_batches", "small_graph_seeds")},
        "halopipe.graphs": {
            "seed_batches": f"{_SEEDS}:seed_batches",
            **{f"{name}": f"{_SAMPLING}.{module}:{name}" for module, names in _MODULES.items() for name in names},
        },
    }


EXTRA = SampledGraphData()
