"""A captured model, as the runtime takes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import fx

from planner.ir.graph import Graph, producer


@dataclass(frozen=True, slots=True)
class CapturedModel:
    """What the profiler's capture gives; see ``profiler.capture`` for the contract.

    Attributes:
        graph_module: forward and loss; its parameters and buffers are those of the user's module.
        layer_of_node: the layer of each node that makes tensors.
        node_of_value: the node of each value, graph inputs included.
        autocast: the dtype that operators run in where torch's autocast says so; None: no autocast.
        sizes: sizes that vary beside the number of samples: by placeholder, the graph input and the dim they are of.
    """

    graph: Graph
    graph_module: fx.GraphModule
    layer_of_node: Mapping[str, str]
    node_of_value: Mapping[str, str]
    autocast: torch.dtype | None = None
    sizes: Mapping[str, tuple[str, int]] = field(default_factory=dict)

    @property
    def judged(self) -> tuple[str, ...]:
        """The values that layers make and the loss is computed from."""
        loss = self.graph.by_name()[producer(self.graph.loss)]
        return tuple(value for value in loss.inputs if value not in self.graph.inputs)


class Captured(Protocol):
    """What a capture has, and more."""

    @property
    def graph(self) -> Graph: ...
    @property
    def graph_module(self) -> fx.GraphModule: ...
    @property
    def layer_of_node(self) -> Mapping[str, str]: ...
    @property
    def node_of_value(self) -> Mapping[str, str]: ...
    @property
    def autocast(self) -> torch.dtype | None: ...
    @property
    def sizes(self) -> Mapping[str, tuple[str, int]]: ...


def captured_model(captured: Captured) -> CapturedModel:
    """What the runtime needs of a capture."""
    return CapturedModel(
        captured.graph,
        captured.graph_module,
        captured.layer_of_node,
        captured.node_of_value,
        captured.autocast,
        captured.sizes,
    )
