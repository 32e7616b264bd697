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
        nodes = len(self.starts) - 1
        edges = len(self.neighbours)
        if not 0 < nodes < _MOST_NODES:
            raise GraphError(f"a graph of {nodes} nodes; from 1 to {_MOST_NODES - 1} are possible")
        if str(self.starts.dtype) != "int64" or str(self.neighbours.dtype) != "int32":
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
        source = np.asarray(source)
        target = np.asarray(target)
        nodes = len(labels)
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
        arrays = {name: np.load(Path(folder) / f"{name}.npy", mmap_mode="c") for name in _ARRAYS}
        return cls(**arrays, folder=str(Path(folder).resolve()))

    def __reduce__(self) -> tuple[Any, ...]:
        if self.folder:
            return NodeGraph.open, (self.folder,)
        return NodeGraph, tuple(getattr(self, name) for name in _ARRAYS)

    def __deepcopy__(self, memo: dict[int, Any]) -> NodeGraph:
        return self  # nobody writes to it
