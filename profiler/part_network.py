"""Parts of layers as a network of their own, in which nothing flows from one to the next."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from planner.ir.graph import Graph, Layer, TensorSpec, value_name
from planner.ir.profile import PartShape
from profiler.capture import Captured
from profiler.clocks import Clock
from profiler.local_part import LocalPart, local_part, operands
from profiler.pieces import INPUT, PARAMETER, Operand, ValueOf
from profiler.segments import Segment, SegmentedPass, segments


@dataclass(frozen=True, slots=True)
class PartNetwork:
    """Parts in a row, to be run by a :class:`PartPass`.

    Attributes:
        captured: has a layer for each part.
        tensors: its inputs.
        shapes: of the parts, by layer; ``shares``: of the work of their whole layers.
    """

    captured: Captured
    tensors: Mapping[str, Tensor]
    shapes: Mapping[str, PartShape]
    shares: Mapping[str, float]


class PartPass(SegmentedPass):
    """As its base, but that inputs and gradients do not come from neighbours: both are fresh, as if just made."""

    def __init__(self, network: PartNetwork, clock: Clock | None = None, split: bool = False) -> None:
        super().__init__(network.captured, network.tensors, network.captured.graph.samples, clock, split)

    def forward(self, segment: Segment) -> None:
        """Runs ``segment``, and times its operators."""
        for node in segment.reads:
            value = self._values[node]
            self._values[node] = value.detach().clone().requires_grad_(value.requires_grad)
        super().forward(segment)

    def start_backward(self) -> None:
        """Nothing: every part has a gradient of its own."""

    def gradients_of(self, segment: Segment) -> tuple[list[Tensor], list[Tensor]]:
        """Outputs of ``segment`` that can have a gradient, and one for each."""
        for node in segment.results:
            value = self._values[node]
            if node not in self._gradients and value.requires_grad:
                self._gradients[node] = torch.ones_like(value)
        return super().gradients_of(segment)


def part_network(captured: Captured, value_of: ValueOf, samples: int, shapes: Iterable[PartShape]) -> PartNetwork:
    """``shapes`` as far as they can be run.

    Args:
        value_of: of a pass with ``samples`` samples, at least as many as any shape has.
    """
    of_layer = {segment.name: segment for segment in segments(captured)}
    builder = _Builder()
    for shape in shapes:
        part = local_part(captured, value_of, samples, of_layer[shape.layers[0]], shape)
        if part is not None:
            builder.add(part, shape)
    return builder.network(samples, captured.autocast)


@dataclass(eq=False)
class _Builder:
    root: nn.Module = field(default_factory=nn.Module)
    nodes: fx.Graph = field(default_factory=fx.Graph)
    layers: list[Layer] = field(default_factory=list)
    inputs: dict[str, TensorSpec] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, TensorSpec] = field(default_factory=dict)
    layer_of_node: dict[str, str] = field(default_factory=dict)
    node_of_value: dict[str, str] = field(default_factory=dict)
    shapes: dict[str, PartShape] = field(default_factory=dict)
    shares: dict[str, float] = field(default_factory=dict)

    def add(self, part: LocalPart, shape: PartShape) -> None:
        """One more part."""
        name = f"part{len(self.layers)}"
        given = {each: self._given(each, f"{name}_{index}") for index, each in enumerate(operands(part))}

        def node_of(argument: Any) -> Any:
            return given[argument] if isinstance(argument, Operand) else argument

        args, keywords = fx.node.map_aggregate((part.args, part.keywords), node_of)
        main = self.nodes.call_function(part.target, args, keywords)
        self._made(main, part.main, name, None if part.outputs else 0)
        for output in part.outputs:
            picked = self.nodes.call_function(operator.getitem, (main, output.args[1]))
            self._made(picked, output, name, output.args[1])
        inputs = tuple(str(node.target) for each, node in given.items() if each.role == INPUT)
        parameters = tuple(str(node.target) for each, node in given.items() if each.role == PARAMETER)
        self.layers.append(replace(part.layer, name=name, inputs=inputs, parameters=parameters))
        self.shapes[name], self.shares[name] = shape, part.share

    def network(self, samples: int, autocast: torch.dtype | None) -> PartNetwork:
        """All parts."""
        last = next(reversed(self.nodes.nodes), None)
        self.nodes.output(last)
        graph = Graph(samples, self.inputs, tuple(self.layers), self.parameters, self.layers[-1].name if last else "")
        module = fx.GraphModule(self.root, self.nodes)
        captured = Captured(graph, module, self.layer_of_node, self.node_of_value, False, autocast=autocast)
        return PartNetwork(captured, self.tensors, self.shapes, self.shares)

    def _given(self, operand: Operand, name: str) -> fx.Node:
        spec = _spec(operand.value)
        if operand.role == INPUT:
            self.inputs[name], self.tensors[name] = spec, operand.value
            node = self.nodes.placeholder(name)
        else:
            if operand.role == PARAMETER:
                self.parameters[name] = spec
                trained = operand.value.requires_grad
                self.root.register_parameter(name, nn.Parameter(operand.value.detach(), requires_grad=trained))
            else:
                self.root.register_buffer(name, operand.value)
            node = self.nodes.get_attr(name)
        node.meta["val"] = operand.value
        return node

    def _made(self, node: fx.Node, original: fx.Node, layer: str, output: int | None) -> None:
        node.meta["val"] = original.meta.get("val")
        self.layer_of_node[node.name] = layer
        if output is not None:
            self.node_of_value[value_name(layer, output)] = node.name


def _spec(value: Tensor) -> TensorSpec:
    dims = tuple(f"dim{dim}" for dim in range(value.ndim))
    return TensorSpec(dims, tuple(value.shape), str(value.dtype).removeprefix("torch."))
