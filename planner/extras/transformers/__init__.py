"""A transformer's training step on a cluster of GPUs: what it takes, what it holds, and which way is the best.

Read ``shape`` (the network, and the ways to divide it), ``passes`` (times by what they are spent on), ``cluster``
(devices and tiers of links), ``layers`` (kernels and exchanges of a block, of embedding and head), ``pipeline`` and
``step`` (what is around them), ``memory``, ``pools`` (of GPUs that are not alike), then ``space``, ``search`` and,
for its stages, ``division``.  Times come from :mod:`planner.extras.kernels`; nothing here is fitted to a run.

Besides:

    placement   How a captured network's layers are placed by a way: stages of blocks, and each layer's cuts over tensor
                ranks
"""

from __future__ import annotations

from planner.extras.transformers.cluster import GpuCluster, clusters, named_cluster
from planner.extras.transformers.layers import layers_of
from planner.extras.transformers.memory import Memory, memory_of
from planner.extras.transformers.passes import Cost, Layers, Pass, Timed, timed
from planner.extras.transformers.pools import GpuPool, Pools, pools_of
from planner.extras.transformers.search import BestDegrees, PricedDegrees, search
from planner.extras.transformers.shape import (
    TRANSFORMERS,
    Fusion,
    ParallelDegrees,
    Recompute,
    Sends,
    Transformer,
    named_transformer,
)
from planner.extras.transformers.space import DegreesSpace
from planner.extras.transformers.step import StepPrediction, predict

__all__ = [
    "TRANSFORMERS",
    "BestDegrees",
    "Cost",
    "DegreesSpace",
    "Fusion",
    "GpuCluster",
    "GpuPool",
    "Layers",
    "Memory",
    "ParallelDegrees",
    "Pass",
    "Pools",
    "PricedDegrees",
    "Recompute",
    "Sends",
    "StepPrediction",
    "Timed",
    "Transformer",
    "clusters",
    "layers_of",
    "memory_of",
    "named_cluster",
    "named_transformer",
    "pools_of",
    "predict",
    "search",
    "timed",
]
