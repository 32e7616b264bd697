"""A transformer's training step on a cluster of GPUs: what it takes, what it holds, and which way is the best.

Read ``shape`` (the network, and the ways to divide it), ``cluster`` (devices and tiers of links, sums of estimates),
``layers`` (kernels and exchanges of a block, of embedding and head), ``step`` (the pipeline around them), ``memory``,
then ``search``.  Times come from :mod:`planner.kernels`; nothing here is fitted to a run.
"""

from __future__ import annotations

from planner.transformers.cluster import Cluster, Cost, clusters, named_cluster, of_machines
from planner.transformers.layers import Layers, Pass, layers_of
from planner.transformers.memory import Memory, memory_of
from planner.transformers.search import Choice, Found, Space, search
from planner.transformers.shape import TRANSFORMERS, Fusion, Recompute, Sends, Transformer, Ways, named_transformer
from planner.transformers.step import Prediction, predict

__all__ = [
    "TRANSFORMERS",
    "Choice",
    "Cluster",
    "Cost",
    "Found",
    "Fusion",
    "Layers",
    "Memory",
    "Pass",
    "Prediction",
    "Recompute",
    "Sends",
    "Space",
    "Transformer",
    "Ways",
    "clusters",
    "layers_of",
    "memory_of",
    "named_cluster",
    "named_transformer",
    "of_machines",
    "predict",
    "search",
]
