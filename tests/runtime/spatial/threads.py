"""One layer, divided over ranks that are threads and do exchange: what each of them has after forward and backward.

Each rank has leaves of its own, so that what flows back on it is seen apart.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from planner.ir.box import Box, whole
from planner.ir.graph import Layer, TensorSpec
from planner.ir.plan import Placement
from planner.layers.division import Division, LayerDivision
from profiler.capture.kinds import kind_of
from runtime.pipeline.routing import slices
from runtime.spatial.deferred import DeferredGradients
from runtime.spatial.exchange import PeerGroup
from runtime.spatial.layer_shard import LayerShard, group_of
from runtime.spatial.op_rules import form
from runtime.transport import InProcessTransport
from tests.runtime.ranks import on_ranks

Cuts = Mapping[str, tuple[int, ...]]
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """One call of an operator.

    Attributes:
        arguments: by name, whole.
        values: those that are values of the graph, in order, with their specs.
        parameters: those that are parameters, in order; what else is a tensor is a constant.
    """

    layer: Layer
    target: Callable[..., Tensor]
    arguments: Mapping[str, Any]
    values: Mapping[str, TensorSpec]
    parameters: tuple[str, ...] = ()

    def whole(self) -> tuple[Tensor, Tensors]:
        """What one device makes, and what of: the tensors, which are copies."""
        tensors = leaves(self.arguments, (*self.values, *self.parameters))
        return self.target(**{**self.arguments, **tensors}), tensors

    def division(self, cuts: Cuts, margin: int) -> LayerDivision:
        """How a plan divides it."""
        parameters = [spec_of(self.arguments[name], "feature " * self.arguments[name].ndim) for name in self.parameters]
        specs = tuple(self.values.values())
        samples = specs[0].shape[specs[0].dims.index("sample")]
        return LayerDivision.of(self.layer, specs, tuple(parameters), Placement(0, cuts, margin=margin), samples)


@dataclass(frozen=True)
class Part:
    """What one rank has.

    Attributes:
        result: of the layer, and ``dy``, what flowed back to it.
        tensors: its parts of the tensors among the arguments, afterwards, and ``boxes`` where they lie.
        gradients: of values and parameters; None where nothing flowed back.
        reached: the values that backward came to, be it with nothing: an exchange before the layer would have run.
    """

    step: LayerShard
    result: Tensor
    dy: Tensor
    tensors: Tensors
    boxes: dict[str, Box]
    gradients: dict[str, Tensor | None]
    reached: frozenset[str]


def case(
    target: Callable[..., Tensor], arguments: dict[str, Any], values: dict[str, str], dims: str, *parameters: str
) -> Case:
    """The case of an operator as the capture would find it.

    Args:
        values: names of the dims of each value, by argument.
        dims: those of the result.
    """
    graph = fx.Graph()
    given = dict(arguments)
    for name, tensor in arguments.items():
        if isinstance(tensor, Tensor):
            given[name] = graph.placeholder(name)
            given[name].meta["val"] = tensor
    node = graph.call_function(target, kwargs=given)
    result = target(**{**arguments, **leaves(arguments, ())})
    node.meta["val"] = result
    kind, attributes = kind_of(node)
    specs = {name: spec_of(arguments[name], names) for name, names in values.items()}
    return Case(
        Layer("layer", kind, tuple(specs), (spec_of(result, dims),), parameters, attributes),
        target,
        arguments,
        specs,
        parameters,
    )


def run_on_threads(
    one: Case,
    cuts: Cuts,
    margin: int = 0,
    *,
    by_channel: Collection[str] = (),
    training: bool = True,
    later: Callable[[], DeferredGradients] | None = None,
    transport: type[InProcessTransport] = InProcessTransport,
) -> list[Part]:
    """Forward, and backward of gradients of its own, on each rank.

    Args:
        by_channel: constants of which each rank has its own channels.
    """
    division = one.division(cuts, margin)
    ranks = tuple(range(len(division.own)))
    stage = Division({one.layer.name: division}, len(ranks), division.samples)

    def run(end: InProcessTransport) -> Part:
        torch.set_num_threads(1)
        step = LayerShard(PeerGroup(end, ranks), stage, division, group_of(division, ranks, end.rank), training)
        step.inputs_of = {name: index for index, name in enumerate(one.values)}
        step.later = None if later is None else later()
        boxes = {name: whole(tuple(each.shape)) for name, each in one.arguments.items() if isinstance(each, Tensor)}
        boxes |= dict.fromkeys(by_channel, (step.own[1],))
        boxes |= {name: step.held(index) for index, name in enumerate(one.values)}
        boxes |= {name: division.weights[index][end.rank] for index, name in enumerate(one.parameters)}
        parts = {
            name: one.arguments[name][slices(box, whole(one.arguments[name].shape))] for name, box in boxes.items()
        }
        parts = leaves(parts, (*one.values, *one.parameters))
        reached: set[str] = set()
        made = {name: _Made.apply(parts[name], lambda name=name: reached.add(name)) for name in one.values}
        arguments = {**one.arguments, **parts, **made}
        result = form(one.layer.kind)(step, lambda **named: one.target(**named), arguments)
        dy = torch.ones(())
        if result.ndim:
            dy = torch.randn(result.shape, generator=torch.Generator().manual_seed(end.rank), dtype=torch.float64)
        if result.requires_grad:
            result.backward(dy.to(result.dtype))
        gradients = {name: parts[name].grad for name in (*one.values, *one.parameters)}
        return Part(step, result.detach(), dy, parts, boxes, gradients, frozenset(reached))

    return on_ranks(len(ranks), run, transport=transport)


class _Made(torch.autograd.Function):
    """Stands for the layer that made a value."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, reached: Callable[[], None]) -> Tensor:
        ctx.reached = reached
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.reached()
        return gradient, None


def leaves(tensors: Mapping[str, Any], trained: Collection[str]) -> Tensors:
    """Copies of tensors, of which the floating ones that are trained get a gradient."""
    return {
        name: tensor.detach().clone().requires_grad_(name in trained and tensor.is_floating_point())
        for name, tensor in tensors.items()
        if isinstance(tensor, Tensor)
    }


def spec_of(tensor: Tensor, dims: str) -> TensorSpec:
    """With the names of its dims."""
    return TensorSpec(tuple(dims.split()), tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def added_up(shape: tuple[int, ...], pieces: list[tuple[Box, Tensor | None]]) -> Tensor:
    """Pieces, added where they lie."""
    total = torch.zeros(shape, dtype=torch.float64)
    for box, piece in pieces:
        if piece is not None:
            total[slices(box, whole(shape))] += piece
    return total


def gradient_of(name: str, one: Case, parts: list[Part]) -> Tensor:
    """Of a value or parameter, from all ranks."""
    return added_up(tuple(one.arguments[name].shape), [(part.boxes[name], part.gradients[name]) for part in parts])


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    """Equal up to rounding."""
    scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * scale, equal_nan=True)
