"""Graphs that are made, not read: for tests and demonstrations, written once into the cache folder."""

from __future__ import annotations

import functools
import os

import numpy as np

from cuda_ops.device.compiling import cache_folder
from cuda_ops.extras.sampling.graph import NodeGraph

_VERSION = 1  # of what is generated


def power_law(
    nodes: int, seed: int = 0, degree: float = 10.0, channels: int = 32, classes: int = 8, exponent: float = 2.5
) -> NodeGraph:
    """A random graph with degrees by a power law (Chung and Lu 2002), whose labels can be learnt.

    Half of the edges join nodes of one class; features are noisy marks of the class.  No node is its own neighbour;
    each edge goes both ways, and none occurs twice.

    Args:
        degree: neighbours of a node, on average, before those that occur twice are left out.
        exponent: of the law of degrees.
    """
    draw = np.random.default_rng(seed)
    labels = draw.integers(0, classes, nodes)
    weights = (np.arange(nodes) + 10.0) ** (-1 / (exponent - 1))
    ends = np.cumsum(weights) / weights.sum()
    count = int(nodes * degree / 2)
    source, target = (np.searchsorted(ends, draw.random(count)).clip(0, nodes - 1) for _ in range(2))
    by_class = np.argsort(labels, kind="stable")
    first = np.searchsorted(labels[by_class], np.arange(classes))
    size = np.bincount(labels, minlength=classes)
    alike = draw.random(count) < 0.5
    own = labels[source[alike]]
    target[alike] = by_class[first[own] + (draw.random(len(own)) * size[own]).astype(np.int64)]
    both = np.unique(np.concatenate([source * nodes + target, target * nodes + source]))
    source, target = np.divmod(both[both // nodes != both % nodes], nodes)
    marks = draw.standard_normal((classes, channels), np.float32)
    features = draw.standard_normal((nodes, channels), np.float32) * 2 + marks[labels]
    return NodeGraph.of_edges(source, target, features, labels)


@functools.lru_cache(maxsize=4)
def generated(nodes: int, seed: int = 0, degree: float = 10.0, channels: int = 32, classes: int = 8) -> NodeGraph:
    """:func:`power_law`, from the cache folder; made and written there (1M nodes: 220 MB) if it is not there yet."""
    name = f"power-law-{nodes}-{seed}-{degree:g}-{channels}-{classes}-v{_VERSION}"
    folder = cache_folder(dict(os.environ)) / "graphs" / name
    if folder.is_dir():
        return NodeGraph.open(folder)
    return power_law(nodes, seed, degree, channels, classes).save(folder)
