"""A part of one layer: its operator, and the pieces of tensors that it is called with.

The part lies in the middle of space, where it has neighbours on both sides: its inputs hold the halo that the access
relation says, and its operator does not pad there.  A convolution for which torch would take a plain loop runs in
oneDNN, as it does on the ranks of a divided stage.  Pieces are of what the whole network really computes, so that
indices, labels and the zeros behind a ReLU are as they are; of parameters and running statistics likewise.

Parts of layers as a network of their own, in which nothing flows from one to the next.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from cuda_ops._torch import OpOverload
from cuda_ops.calls import argument_names, arguments_of, changed_call
from cuda_ops.dense.conv_kernels import onednn_convolution, runs_in_a_loop
from cuda_ops.dense.recurrent import autocast
from planner.ir.box import volume, whole
from planner.ir.graph import Graph, Layer, TensorSpec, value_name
from planner.ir.profile import PartShape
from profiler.capture.graph import parameter_spec
from profiler.capture.layers import is_output_of
from profiler.capture.operators import node_argument, overload_of
from profiler.measure.noise import LapClock
from profiler.measure.timing import LayerSegment, SegmentedPass, segments
from profiler.shards.arguments import INPUT, PARAMETER, NoPieceError, Operand, PartReads, ValueOf, local_arguments
from runtime.captured import CapturedModule

_OPTIONS = ("stride", "padding", "dilation", "groups")
_ATTRIBUTES = {"padding", "output_padding", "groups"}
"""Arguments that are attributes as well."""
_REFUSALS = (RuntimeError, ValueError, TypeError, IndexError)  # what operators raise for shapes they cannot take


@dataclass(frozen=True, slots=True, eq=False)
class LocalPart:
    """A part that can be run.

    Attributes:
        layer: with local attributes and outputs; ``inputs`` and ``parameters`` are the whole layer's names.
        main: the node of the whole network that makes the outputs; ``outputs``: those that pick one.
        target, args, keywords: the call; tensors are operands.
        share: of the work of the whole layer, at as many samples as the pieces are cut from.
    """

    layer: Layer
    main: fx.Node
    outputs: tuple[fx.Node, ...]
    target: Callable[..., Any]
    args: tuple[Any, ...]
    keywords: dict[str, Any]
    share: float


def local_part(
    captured: CapturedModule, value_of: ValueOf, samples: int, segment: LayerSegment, shape: PartShape
) -> LocalPart | None:
    """The part of ``segment`` that ``shape`` says; None where its operator cannot be run on a piece alone.

    Args:
        samples: of the pass that ``value_of`` knows, at least those of the part.
    """
    main = _main(segment)
    if main is None:
        return None
    try:
        pieces = PartReads.of(captured.graph, value_of, samples, segment.name, shape)
        return _made(captured, segment, main, pieces)
    except NoPieceError:
        return None


def _main(segment: LayerSegment) -> fx.Node | None:
    """The operator that makes the outputs, if it needs no other of its layer (others only count batches, say)."""
    made = {node_argument(node, 0) if is_output_of(node) else node for node in segment.results}
    main = made.pop() if made else None
    if made or main is None or not isinstance(main.target, OpOverload):
        return None
    return main if not set(main.all_input_nodes) & set(segment.calls) else None


def _made(captured: CapturedModule, segment: LayerSegment, main: fx.Node, pieces: PartReads) -> LocalPart | None:
    arguments = arguments_of(main)
    changed = local_arguments(pieces, arguments) if pieces.reads else None
    if changed is None:
        return None
    attributes = {**pieces.layer.attributes, **{name: _plain(changed[name]) for name in _ATTRIBUTES & changed.keys()}}
    args, keywords = fx.node.map_arg((main.args, dict(main.kwargs)), pieces.operand)
    named: dict[str, Any] = {**dict(zip(argument_names(main.target), args, strict=False)), **keywords}
    args, keywords = changed_call(main.target, args, keywords, changed)
    target: Callable[..., Any] = overload_of(main)
    if isinstance(arguments.get("padding"), str):
        target = overload_of(main).overloadpacket.default  # ``same`` and ``valid`` as numbers
    if pieces.layer.kind == "conv" and captured.autocast is None:
        tensors = [named["input"], named["weight"]]
        options = [attributes[name] for name in _OPTIONS]
        if runs_in_a_loop(*(each.value for each in tensors), *options):
            target = onednn_convolution
            args = (*tensors, named.get("bias"), *options)
            keywords = {}
    part = LocalPart(
        replace(pieces.layer, attributes=attributes),
        main,
        tuple(node for node in segment.calls if is_output_of(node) and node.args[0] is main),
        target,
        args,
        keywords,
        volume(pieces.box) / max(1, volume(whole(pieces.work.shape))),
    )
    results = _tried(captured, part)
    same = pieces.work.shape == pieces.layer.outputs[0].shape and pieces.work.dims == pieces.layer.outputs[0].dims
    if not results or (same and tuple(results[0].shape) != tuple(len(interval) for interval in pieces.box)):
        return None
    specs = tuple(replace(a, shape=tuple(b.shape)) for a, b in zip(pieces.layer.outputs, results, strict=False))
    return replace(part, layer=replace(part.layer, outputs=specs))


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, (tuple, list)) else value


@torch.no_grad()
def _tried(captured: CapturedModule, part: LocalPart) -> tuple[Tensor, ...]:
    """What the call gives; nothing if the operator refuses such pieces."""
    args, keywords = fx.node.map_aggregate((part.args, part.keywords), tensor_of)
    device = next((each.value.device.type for each in operands(part)), "cpu")
    with autocast(device, captured.autocast):
        try:
            outputs = part.target(*args, **keywords)
        except _REFUSALS:
            return ()
    return (outputs,) if isinstance(outputs, Tensor) else tuple(each for each in outputs if isinstance(each, Tensor))


def operands(part: LocalPart) -> list[Operand]:
    """All of a part's operands, each once, in the order of the call."""
    distinct: dict[Operand, None] = {}
    fx.node.map_aggregate(
        (part.args, part.keywords), lambda each: distinct.setdefault(each) if isinstance(each, Operand) else None
    )
    return list(distinct)


def tensor_of(argument: Any) -> Any:
    """An operand's tensor; anything else as it is."""
    return argument.value if isinstance(argument, Operand) else argument


@dataclass(frozen=True, slots=True)
class PartNetwork:
    """Parts in a row, to be run by a :class:`PartPass`.

    Attributes:
        captured: has a layer for each part.
        tensors: its inputs.
        shapes: of the parts, by layer; ``shares``: of the work of their whole layers.
    """

    captured: CapturedModule
    tensors: Mapping[str, Tensor]
    shapes: Mapping[str, PartShape]
    shares: Mapping[str, float]


class PartPass(SegmentedPass):
    """As its base, but that inputs and gradients do not come from neighbours: both are fresh, as if just made."""

    def __init__(self, network: PartNetwork, clock: LapClock | None = None, split: bool = False) -> None:
        super().__init__(network.captured, network.tensors, network.captured.graph.samples, clock, split)

    def forward(self, segment: LayerSegment) -> None:
        """Runs ``segment``, and times its operators."""
        for node in segment.reads:
            value = self._values[node]
            self._values[node] = value.detach().clone().requires_grad_(value.requires_grad)
        super().forward(segment)

    def start_backward(self) -> None:
        """Nothing: every part has a gradient of its own."""

    def gradients_of(self, segment: LayerSegment) -> tuple[list[Tensor], list[Tensor]]:
        """Outputs of ``segment`` that can have a gradient, and one for each."""
        for node in segment.results:
            value = self._values[node]
            if node not in self._gradients and value.requires_grad:
                self._gradients[node] = torch.ones_like(value)
        return super().gradients_of(segment)


def part_network(captured: CapturedModule, value_of: ValueOf, samples: int, shapes: Iterable[PartShape]) -> PartNetwork:
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
        nodes = {each: self._placeholder(each, f"{name}_{index}") for index, each in enumerate(operands(part))}

        def node_of(argument: Any) -> Any:
            return nodes[argument] if isinstance(argument, Operand) else argument

        args, keywords = fx.node.map_aggregate((part.args, part.keywords), node_of)
        main = self.nodes.call_function(part.target, args, keywords)
        self._made(main, part.main, name, None if part.outputs else 0)
        for output in part.outputs:
            index = cast("int", output.args[1])
            picked = self.nodes.call_function(operator.getitem, (main, index))
            self._made(picked, output, name, index)
        inputs = tuple(str(node.target) for each, node in nodes.items() if each.role == INPUT)
        parameters = tuple(str(node.target) for each, node in nodes.items() if each.role == PARAMETER)
        self.layers.append(replace(part.layer, name=name, inputs=inputs, parameters=parameters))
        self.shapes[name] = shape
        self.shares[name] = part.share

    def network(self, samples: int, autocast: torch.dtype | None) -> PartNetwork:
        """All parts."""
        last = next(iter(reversed(self.nodes.nodes)), None)
        self.nodes.output(last)
        graph = Graph(samples, self.inputs, tuple(self.layers), self.parameters, self.layers[-1].name if last else "")
        module = fx.GraphModule(self.root, self.nodes)
        captured = CapturedModule(graph, module, self.layer_of_node, self.node_of_value, False, autocast=autocast)
        return PartNetwork(captured, self.tensors, self.shapes, self.shares)

    def _placeholder(self, operand: Operand, name: str) -> fx.Node:
        spec = parameter_spec(operand.value)
        if operand.role == INPUT:
            self.inputs[name] = spec
            self.tensors[name] = operand.value
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
