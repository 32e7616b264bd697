"""What the nodes of a network hold on a device, as planners that count memory see it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.costs.stage import PriceBook
from planner.costs.tables import Array
from planner.solvers.published.network import Network


@dataclass(frozen=True, slots=True)
class Held:
    """By node of a network, in bytes.

    Attributes:
        always: parameters, their gradients and optimiser state, and buffers.
        saved: activations of one micro-batch.
        inputs: of those, what comes from other nodes: enough to compute the rest again.
    """

    always: tuple[float, ...]
    saved: tuple[float, ...]
    inputs: tuple[float, ...]


def held(book: PriceBook, found: Network, kind: str, size: int) -> Held:
    """What each node holds on a device of ``kind`` with micro-batches of ``size`` samples."""
    each = 2 + book.profile.optimizer.state_bytes_per_parameter_byte
    nodes = found.graph.nodes
    reads = [0.0] * len(nodes)
    for src, dst in found.graph.edges:
        reads[dst] += nodes[src].activation_bytes
    saved = _by_node(book.tables.at(kind, size).saved_bytes, found)
    buffers = _by_node(book.tables.graph.buffer_bytes, found)
    always = tuple(each * node.parameter_bytes + kept for node, kept in zip(nodes, buffers, strict=True))
    return Held(always, saved, tuple(min(a, b) for a, b in zip(reads, saved, strict=True)))


def _by_node(sums: Array, found: Network) -> tuple[float, ...]:
    by_layer = np.diff(sums)
    return tuple(float(by_layer[list(found.members[node.name])].sum()) for node in found.graph.nodes)
