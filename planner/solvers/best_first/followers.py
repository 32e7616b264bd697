"""Layers that cost nothing and stay with another one, so that there are fewer places to cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.costs.cost_model import CostModel
from planner.costs.layers.cost_table import Array
from planner.ir.graph import Graph, producer, value_name
from planner.layers.boundary import without_gradient


def followers(cost_model: CostModel) -> dict[int, int]:
    """(the one that stays, with which).

    A layer stays with the one it reads from if it reads only what that makes for it alone, and hands on no more bytes;
    and with its only reader, or its first one that all others depend on, if it reads no more bytes than it hands on;
    of gradients likewise.  Cutting between the two moves no work and sends no less.
    """
    graph = cost_model.graph
    flow = _ValueFlow.of(graph)
    free = _free_layers(cost_model)
    followed = ((layer, flow.followed_by(layer)) for layer in range(len(graph.layers) - 1) if free[layer])
    return {layer: other for layer, other in followed if other is not None}


@dataclass(frozen=True, slots=True, eq=False)
class _ValueFlow:
    """What layers hand to one another, by layer.

    Attributes:
        makers: of the values of other layers that it reads.
        readers: of its values, once for each of them.
        dependants: all that depend on it, as a bit set.
        read_bytes, handed_bytes: of these values, and of their gradients.
    """

    makers: list[list[int]]
    readers: list[list[int]]
    dependants: list[int]
    read_bytes: list[Array]  # [layers][there and back]
    handed_bytes: list[Array]  # [layers][there and back]

    @classmethod
    def of(cls, graph: Graph) -> _ValueFlow:
        """The graph's."""
        index = {layer.name: position for position, layer in enumerate(graph.layers)}
        silent = without_gradient(graph)
        both_ways = {
            value: np.array([1, spec.is_float and value not in silent]) * spec.num_bytes
            for value, spec in graph.values().items()
        }
        readers: list[list[int]] = [[] for _ in graph.layers]
        sources = [list(dict.fromkeys(v for v in layer.inputs if producer(v) in index)) for layer in graph.layers]
        outputs = [[value_name(layer.name, number) for number in range(len(layer.outputs))] for layer in graph.layers]
        for position, values in enumerate(sources):
            for value in values:
                readers[index[producer(value)]].append(position)
        return cls(
            [[index[producer(value)] for value in values] for values in sources],
            readers,
            _dependants(readers),
            *([sum((both_ways[v] for v in own), np.zeros(2)) for own in values] for values in (sources, outputs)),
        )

    def followed_by(self, layer: int) -> int | None:
        """The layer that this one stays with, as it costs nothing; None if there is none."""
        read = self.read_bytes[layer]
        handed = self.handed_bytes[layer]
        makers = self.makers[layer]
        if len(makers) == 1 and self.readers[makers[0]] == [layer] and (handed <= read).all():
            return makers[0]
        readers = dict.fromkeys(self.readers[layer])
        first = next((r for r in readers if all(o == r or self.dependants[r] >> o & 1 for o in readers)), None)
        is_cheap = not makers or (len(readers) == 1 and bool((read <= handed).all()))
        return first if is_cheap else None


def _dependants(readers: Sequence[Sequence[int]]) -> list[int]:
    """By layer, all that depend on it, as a bit set."""
    dependants = [0] * len(readers)
    for layer in range(len(readers) - 1, -1, -1):
        for reader in readers[layer]:
            dependants[layer] |= dependants[reader] | 1 << reader
    return dependants


def _free_layers(cost_model: CostModel) -> list[bool]:
    measured: dict[str, bool] = {layer.name: not layer.parameters for layer in cost_model.graph.layers}
    for measurements in cost_model.profile.measurements.values():
        for m in measurements:
            costs = (m.forward_s, m.backward_s, m.backward_input_s, m.backward_weight_s, m.saved_bytes)
            if any(costs) or m.workspace_bytes:
                measured[m.layer] = False
    return list(measured.values())
