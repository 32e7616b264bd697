"""A transformer's training step on a cluster of GPUs: what it takes, what it holds, and which way is the best.

Read ``shape`` (the network, and the ways to divide it), ``cluster`` (devices and tiers of links, sums of estimates),
``layers`` (kernels and exchanges of a block, of embedding and head), ``pipeline`` and ``step`` (what is around them),
``memory``, ``pools`` (of GPUs that are not alike), then ``search`` and, for its stages, ``division``.  Times come from
:mod:`planner.kernels`; nothing here is fitted to a run.
"""

from __future__ import annotations

from planner.transformers.cluster import Cluster, Cost, clusters, named_cluster, of_machines
from planner.transformers.layers import Layers, Pass, Timed, layers_of
from planner.transformers.memory import Memory, memory_of
from planner.transformers.pools import Pool, Pools, pools_of
from planner.transformers.search import Choice, Found, Space, search
from planner.transformers.shape import TRANSFORMERS, Fusion, Recompute, Sends, Transformer, Ways, named_transformer
from planner.transformers.step import OPTIMISER, Prediction, predict

__all__ = [
    "OPTIMISER",
    "TRANSFORMERS",
    "Choice",
    "Cluster",
    "Cost",
    "Found",
    "Fusion",
    "Layers",
    "Memory",
    "Pass",
    "Pool",
    "Pools",
    "Prediction",
    "Recompute",
    "Sends",
    "Space",
    "Timed",
    "Transformer",
    "Ways",
    "clusters",
    "layers_of",
    "memory_of",
    "named_cluster",
    "named_transformer",
    "of_machines",
    "pools_of",
    "predict",
    "search",
]
