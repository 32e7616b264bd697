"""Which neighbours of a node are drawn, as a function of (seed, draw, layer, node) alone.

Whoever samples the neighbours of a node in the same draw gets the same ones, whatever else is sampled with it: so the
result for a seed is the same however seeds are shared out to micro-batches and ranks.  Numbers are SplitMix64's
(Steele, Lea and Flood 2014) of a counter; ``k`` of ``d`` neighbours without replacement come from ``k`` of them by
Floyd's algorithm (Bentley and Floyd 1987), where every subset is as likely as another, but for 2^-32 of a number's
range.  The compiled version gives the same bits as the plain one, which is used where there is no compiler, and as the
test of the other.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import threading
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cuda_ops.device.compiling import CannotCompileError, LibrarySources, compiled
from cuda_ops.extras.sampling.graph import GraphError, NodeGraph

_LOGGER = logging.getLogger(__name__)
NodeIds = NDArray[np.int64]
_STEP = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def base_of(seed: int, draw: int, layer: int) -> int:
    """What the numbers of one layer of a draw begin with."""
    return functools.reduce(lambda before, number: _mixed_int((before + number) & _WORD), (seed, draw, layer), _STEP)


def _mixed_int(z: int) -> int:
    z = (z ^ z >> 30) * _FIRST & _WORD
    z = (z ^ z >> 27) * _SECOND & _WORD
    return z ^ z >> 31


def _mixed(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ z >> np.uint64(30)) * np.uint64(_FIRST)
    z = (z ^ z >> np.uint64(27)) * np.uint64(_SECOND)
    return z ^ z >> np.uint64(31)


class NeighbourDraws(Protocol):
    """How neighbours are drawn, and what was drawn becomes rows."""

    def sample(
        self, graph: NodeGraph, nodes: NodeIds, fanout: int, base: int, *, with_self: bool
    ) -> tuple[NodeIds, NodeIds]:
        """How many neighbours each node has, (nodes,), and all of them, those of a node together.

        Args:
            fanout: the most of each; negative: all.
            base: from :func:`base_of`.
            with_self: whether each node comes after its own neighbours.
        """

    def relabel(self, graph: NodeGraph, targets: NodeIds, sampled: NodeIds) -> tuple[NodeIds, NodeIds, NodeIds]:
        """The distinct nodes, those of ``targets`` first, and the rows of ``targets`` and ``sampled`` among them."""

    def gather(self, values: NDArray[Any], nodes: NodeIds) -> NDArray[Any]:
        """Rows of features."""


class PlainDraws:
    """In numpy."""

    def sample(
        self, graph: NodeGraph, nodes: NodeIds, fanout: int, base: int, *, with_self: bool
    ) -> tuple[NodeIds, NodeIds]:
        """See :class:`NeighbourDraws`."""
        first = graph.starts[nodes]
        degrees = graph.starts[nodes + 1] - graph.starts[nodes]
        num_sampled = degrees if fanout < 0 else np.minimum(degrees, fanout)
        counts = num_sampled + with_self
        begins = np.cumsum(counts) - counts
        owner = np.repeat(np.arange(len(nodes)), counts)
        place = np.arange(len(owner)) - begins[owner]
        many = degrees > num_sampled
        if many.any():
            keys = _mixed(np.uint64(base) + nodes[many].astype(np.uint64))
            chosen = np.full((len(keys), fanout), -1, np.int64)
            for number in range(fanout):
                bound = (degrees[many] - fanout + number + 1).astype(np.uint64)
                drawn = _mixed(keys + np.uint64(_STEP * number & _WORD)) >> np.uint64(32)
                drawn_places = (drawn * bound >> np.uint64(32)).astype(np.int64)
                is_taken = (chosen[:, :number] == drawn_places[:, None]).any(1)
                chosen[:, number] = np.where(is_taken, bound.astype(np.int64) - 1, drawn_places)
            inside = many[owner] & (place < num_sampled[owner])
            place[inside] = chosen.ravel()
        is_self = np.zeros(len(owner), np.bool_)
        if with_self:
            is_self[begins + counts - 1] = True
        at = np.where(is_self, 0, first[owner] + place)
        neighbours = graph.neighbours[at].astype(np.int64) if len(graph.neighbours) else np.zeros(len(owner), np.int64)
        return counts, np.where(is_self, nodes[owner], neighbours)

    def relabel(self, graph: NodeGraph, targets: NodeIds, sampled: NodeIds) -> tuple[NodeIds, NodeIds, NodeIds]:
        """See :class:`NeighbourDraws`."""
        both = np.concatenate([targets, sampled])
        values, first, inverse = np.unique(both, return_index=True, return_inverse=True)
        order = np.argsort(first, kind="stable")
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        rows = rank[inverse]
        return values[order], rows[: len(targets)], rows[len(targets) :]

    def gather(self, values: NDArray[Any], nodes: NodeIds) -> NDArray[Any]:
        """See :class:`NeighbourDraws`."""
        return np.asarray(values[nodes])


class CompiledDraws:
    """In C++, without Python's lock: a thread draws while another computes."""

    def __init__(self, loaded: ctypes.CDLL) -> None:
        self._sample, self._relabel, self._gather = (
            getattr(loaded, f"halopipe_{name}") for name in ("sample", "relabel", "gather")
        )
        self._own = threading.local()
        pointer = ctypes.c_void_p
        number = ctypes.c_int64
        self._sample.restype = self._relabel.restype = number
        graph = pointer, pointer, number, number
        drawn = pointer, number, number, ctypes.c_int32, ctypes.c_uint64
        self._sample.argtypes = (*graph, *drawn, pointer, pointer)
        self._relabel.argtypes = (pointer, number, pointer, number, *(pointer,) * 4)
        self._gather.restype = None
        self._gather.argtypes = (pointer, pointer, number, number, pointer)

    def sample(
        self, graph: NodeGraph, nodes: NodeIds, fanout: int, base: int, *, with_self: bool
    ) -> tuple[NodeIds, NodeIds]:
        """See :class:`NeighbourDraws`."""
        nodes = np.ascontiguousarray(nodes)
        most = fanout * len(nodes) if fanout >= 0 else int((graph.starts[nodes + 1] - graph.starts[nodes]).sum())
        counts = np.empty(len(nodes), np.int64)
        neighbours = np.empty(most + with_self * len(nodes), np.int64)
        total = self._sample(
            graph.starts.ctypes.data,
            graph.neighbours.ctypes.data,
            graph.num_nodes,
            len(graph.neighbours),
            nodes.ctypes.data,
            len(nodes),
            fanout,
            with_self,
            base,
            counts.ctypes.data,
            neighbours.ctypes.data,
        )
        if total < 0:
            raise GraphError("starts or neighbours of the graph point outside of it: its files are damaged")
        return counts, neighbours[:total]

    def relabel(self, graph: NodeGraph, targets: NodeIds, sampled: NodeIds) -> tuple[NodeIds, NodeIds, NodeIds]:
        """See :class:`NeighbourDraws`."""
        targets = np.ascontiguousarray(targets)
        sampled = np.ascontiguousarray(sampled)
        nodes = np.empty(len(targets) + len(sampled), np.int64)
        target_rows = np.empty(len(targets), np.int64)
        rows = np.empty(len(sampled), np.int64)
        table = self._table(graph.num_nodes)
        size = self._relabel(
            targets.ctypes.data,
            len(targets),
            sampled.ctypes.data,
            len(sampled),
            table.ctypes.data,
            nodes.ctypes.data,
            target_rows.ctypes.data,
            rows.ctypes.data,
        )
        return nodes[:size].copy(), target_rows, rows

    def _table(self, nodes: int) -> NDArray[np.int32]:
        """-1 for each node, which every call leaves as it was; one a thread."""
        table: NDArray[np.int32] | None = getattr(self._own, "table", None)
        if table is None or len(table) < nodes:
            table = self._own.table = np.full(nodes, -1, np.int32)
        return table

    def gather(self, values: NDArray[Any], nodes: NodeIds) -> NDArray[Any]:
        """See :class:`NeighbourDraws`."""
        if not values.flags.c_contiguous:
            return np.asarray(values[nodes])
        nodes = np.ascontiguousarray(nodes)
        gathered = np.empty((len(nodes), *values.shape[1:]), values.dtype)
        width = values.dtype.itemsize * int(np.prod(values.shape[1:], dtype=np.int64))
        self._gather(values.ctypes.data, nodes.ctypes.data, len(nodes), width, gathered.ctypes.data)
        return gathered


@functools.cache
def fastest() -> NeighbourDraws:
    """Compiled, at first use; plain where that cannot be, which is said once."""
    try:
        sources = LibrarySources("sampling", Path(__file__).parent / "source", levels={"sampling": "-O3"})
        return CompiledDraws(ctypes.CDLL(str(compiled(dict(os.environ), sources))))
    except (CannotCompileError, OSError) as error:
        _LOGGER.warning("neighbours are sampled in numpy: %s", error)
        return PlainDraws()
