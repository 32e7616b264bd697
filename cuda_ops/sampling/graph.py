"""A graph of many nodes: neighbours by node, features and labels, in memory or in files that are mapped.

    starts      int64 (nodes + 1,)      the neighbours of node v are neighbours[starts[v] : starts[v + 1]]
    neighbours  int32 (edges,)          whose messages v gets
    features    (nodes, channels)       labels  int64 (nodes,)

A folder holds them as ``starts.npy`` and so on; whoever opens it maps the files, so that processes share one copy and
only rows that are read are in memory.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_ARRAYS = ("starts", "neighbours", "features", "labels")
_MOST_NODES = 1 << 31


class GraphError(ValueError):
    """Arrays that make no graph, or seeds that are none of its nodes."""


@dataclass(frozen=True, slots=True, eq=False)
class NodeGraph:
    """See the module; arrays are not written to.

    Attributes:
        folder: where the files are; empty: it is in memory alone.

    Raises:
        GraphError: the arrays do not belong together.
    """

    starts: NDArray[np.int64]
    neighbours: NDArray[np.int32]
    features: NDArray[Any]
    labels: NDArray[np.int64]
    folder: str = ""

    def __post_init__(self) -> None:
        nodes, edges = len(self.starts) - 1, len(self.neighbours)
        if not 0 < nodes < _MOST_NODES:
            raise GraphError(f"a graph of {nodes} nodes; from 1 to {_MOST_NODES - 1} are possible")
        if (self.starts.dtype, self.neighbours.dtype) != (np.int64, np.int32):
            raise GraphError(f"starts are {self.starts.dtype}, neighbours {self.neighbours.dtype}: int64 and int32")
        if (int(self.starts[0]), int(self.starts[-1])) != (0, edges):
            raise GraphError(f"starts go from {self.starts[0]} to {self.starts[-1]}, there are {edges} neighbours")
        for name in ("features", "labels"):
            if len(getattr(self, name)) != nodes:
                raise GraphError(f"{len(getattr(self, name))} {name} of {nodes} nodes")

    @property
    def num_nodes(self) -> int:
        """Nodes."""
        return len(self.starts) - 1

    @property
    def degrees(self) -> NDArray[np.int64]:
        """int64 (nodes,): neighbours of each."""
        return np.diff(self.starts)

    @classmethod
    def of_edges(cls, source: Any, target: Any, features: Any, labels: Any) -> NodeGraph:
        """The graph whose edges send messages from ``source`` (edges,) to ``target`` (edges,).

        Raises:
            GraphError: an end is no node.
        """
        source, target, nodes = np.asarray(source), np.asarray(target), len(labels)
        for ends in (source, target):
            if len(ends) and not 0 <= int(ends.min()) <= int(ends.max()) < nodes:
                raise GraphError(f"edges join nodes {int(ends.min())} to {int(ends.max())}, there are {nodes}")
        order = np.argsort(target, kind="stable")
        starts = np.zeros(nodes + 1, np.int64)
        np.cumsum(np.bincount(target, minlength=nodes), out=starts[1:])
        return cls(starts, source[order].astype(np.int32), np.asarray(features), np.asarray(labels, np.int64))

    def save(self, folder: str | Path) -> NodeGraph:
        """Writes the files, whole or not at all, and opens them."""
        place = Path(folder)
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent) as made:
            for name in _ARRAYS:
                np.save(Path(made) / f"{name}.npy", getattr(self, name))
            if not place.is_dir():
                os.makedirs(Path(made) / "whole")
                for name in _ARRAYS:
                    (Path(made) / f"{name}.npy").rename(Path(made) / "whole" / f"{name}.npy")
                try:
                    (Path(made) / "whole").rename(place)
                except OSError:  # another process was first
                    if not place.is_dir():
                        raise
        return NodeGraph.open(place)

    @classmethod
    def open(cls, folder: str | Path) -> NodeGraph:
        """The graph of a folder; its files are mapped.

        Raises:
            FileNotFoundError: a file is not there.
        """
        arrays = (np.load(Path(folder) / f"{name}.npy", mmap_mode="c") for name in _ARRAYS)
        return cls(*arrays, str(Path(folder).resolve()))

    def __reduce__(self) -> tuple[Any, ...]:
        if self.folder:
            return NodeGraph.open, (self.folder,)
        return NodeGraph, tuple(getattr(self, name) for name in _ARRAYS)

    def __deepcopy__(self, memo: dict[int, Any]) -> NodeGraph:
        return self  # nobody writes to it


def power_law(
    nodes: int, seed: int = 0, degree: float = 10.0, channels: int = 32, classes: int = 8, exponent: float = 2.5
) -> NodeGraph:
    """A random graph with degrees by a power law (Chung and Lu 2002), whose labels can be learnt.

    Half of the edges join nodes of one class; features are noisy marks of the class.  No node is its own neighbour; each
    edge goes both ways, and none occurs twice.

    Args:
        degree: neighbours of a node, on average, before those that occur twice are left out.
        exponent: of the law of degrees.
    """
    draw = np.random.default_rng(seed)
    labels = draw.integers(0, classes, nodes)
    weights = (np.arange(nodes) + 10.0) ** (-1 / (exponent - 1))
    ends = np.cumsum(weights) / weights.sum()
    count = int(nodes * degree / 2)
    source = np.searchsorted(ends, draw.random(count)).clip(0, nodes - 1)
    target = np.searchsorted(ends, draw.random(count)).clip(0, nodes - 1)
    by_class = np.argsort(labels, kind="stable")
    first, size = np.searchsorted(labels[by_class], np.arange(classes)), np.bincount(labels, minlength=classes)
    alike = draw.random(count) < 0.5
    own = labels[source[alike]]
    target[alike] = by_class[first[own] + (draw.random(len(own)) * size[own]).astype(np.int64)]
    both = np.unique(np.concatenate([source * nodes + target, target * nodes + source]))
    source, target = np.divmod(both[both // nodes != both % nodes], nodes)
    marks = draw.standard_normal((classes, channels), np.float32)
    features = draw.standard_normal((nodes, channels), np.float32) * 2 + marks[labels]
    return NodeGraph.of_edges(source, target, features, labels)
