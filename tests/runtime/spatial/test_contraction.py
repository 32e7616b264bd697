"""Shared input channels: ranks keep and send back what one device makes, and send no byte more than planned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from planner.costs.shards.sharding_spec import ShardingSpec
from planner.ir.box import Box, whole
from planner.ir.graph import Graph, Layer, TensorSpec
from planner.ir.plan import Placement
from planner.layers.division import Division, LayerDivision, layer_division
from planner.layers.shards import shards_of
from planner.layers.sized import SizedLayer
from runtime.pipeline.routing import slices
from runtime.spatial.contraction import contract
from runtime.spatial.exchange import PeerGroup
from runtime.spatial.layer_shard import LayerShard
from runtime.spatial.op_rules.products import run_embedding, run_linear
from runtime.transport import InProcessTransport
from tests.runtime.ranks import on_ranks

SAMPLES = 4
CHANNELS = 7
FILTERS = 9
Compute = Callable[[LayerShard, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Operator:
    """A layer with its tensors, and how a rank and one device compute it."""

    graph: Graph
    x: Tensor
    weight: Tensor
    bias: Tensor
    compute: Compute
    filters: str
    call: Callable[[Tensor, Tensor, Tensor | None], Tensor]


def operator(
    kind: str,
    dims: tuple[str, ...],
    shapes: tuple[tuple[int, ...], ...],
    call: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    compute: Compute,
    attributes: Mapping[str, object],
) -> Operator:
    torch.manual_seed(1)
    x, weight, bias = (torch.randn(shape, dtype=torch.float64) for shape in (*shapes, (FILTERS,)))
    if kind == "embedding":
        x = torch.randint(0, CHANNELS, shapes[0])
    output = TensorSpec(dims, tuple(call(x, weight, bias).shape), "float64")
    given = TensorSpec(dims[: x.ndim], tuple(x.shape), "float64")
    specs = [TensorSpec(("feature",) * each.ndim, tuple(each.shape), "float64") for each in (weight, bias)]
    names = ("weight",) if kind == "embedding" else ("weight", "bias")
    layer = Layer("layer", kind, ("x",), (output,), names, attributes)
    graph = Graph(SAMPLES, {"x": given}, (layer,), dict(zip(layer.parameters, specs, strict=False)), "layer")
    name = "feature" if "feature" in dims else "channel"
    return Operator(graph, x, weight, bias, compute, name, call)


def by_form(step: LayerShard, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    step.inputs_of = {"input": 0}
    arguments = {"input": x, "weight": weight, "bias": bias}
    return run_linear(step, lambda input, weight, bias: F.linear(input, weight, bias), arguments)


def by_table(step: LayerShard, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    step.inputs_of = {"indices": 0}
    arguments = {"weight": weight, "indices": x, "padding_idx": 2}
    return run_embedding(step, lambda **given: torch.ops.aten.embedding(**given), arguments)


def look_up(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.embedding(x, weight, 2)


def convolved(run: Callable[..., Tensor]) -> Compute:
    def compute(step: LayerShard, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y = contract(step, step.get(0, x), weight, lambda x, weight: run(x, weight, None))
        return y + bias.view(-1, 1, 1)

    return compute


def conv(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.conv2d(x, weight, bias, padding=1)


def transposed(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.conv_transpose2d(x, weight, bias, padding=1)


IMAGE = ("sample", "channel", "height", "width")
SQUARE = {"kernel": (3, 3), "stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}
ENTRIES = ((SAMPLES, 3), (CHANNELS, FILTERS))
ROWS = ((SAMPLES, 3, CHANNELS), (FILTERS, CHANNELS))
IMAGES = ((SAMPLES, CHANNELS, 4, 3), (FILTERS, CHANNELS, 3, 3))
TURNED = ((SAMPLES, CHANNELS, 4, 3), (CHANNELS, FILTERS, 3, 3))
OPERATORS = {
    "embedding": lambda: operator("embedding", ("sample", "time", "feature"), ENTRIES, look_up, by_table, {}),
    "linear": lambda: operator("linear", ("sample", "time", "feature"), ROWS, F.linear, by_form, {}),
    "conv": lambda: operator("conv", IMAGE, IMAGES, conv, convolved(conv), SQUARE),
    "transposed": lambda: operator("transposed_conv", IMAGE, TURNED, transposed, convolved(transposed), SQUARE),
}
CUTS = {
    "x, two": ({"f": (0, 1, 2)}, 2),
    "x, three uneven": ({"f": (0, 1, 5, 9)}, 3),
    "x, four": ({"f": (0, 1, 2, 3, 4)}, 4),
    "w, four": ({"f": (0, 2, 4, 5, 9)}, 2),
    "a rank keeps nothing": ({"f": (0, 4, 4, 9)}, 3),
    "a rank keeps all of its block": ({"f": (0, 4, 4, 8, 9)}, 2),
    "samples and x": ({"sample": (0, 1, 4), "f": (0, 2, 3)}, 2),
    "x and no samples": ({"f": (0, 1, 3), "sample": (0, 4, 4)}, 2),
    "copies of x": ({"replica": (0, 1, 2), "f": (0, 1, 2)}, 2),
}
ALONG_TIME = {
    "time, three uneven": ({"time": (0, 1, 2, 3)}, 3),
    "samples and time": ({"sample": (0, 1, 4), "time": (0, 2, 3)}, 2),
    "copies of time": ({"time": (0, 1, 3), "replica": (0, 1, 2)}, 2),
    "a rank keeps no place": ({"time": (0, 1, 1, 3)}, 3),
    "two of four": ({"time": (0, 1, 1, 2, 3)}, 2),
}
EVERY = [(name, cuts) for name in OPERATORS for cuts in CUTS]
EVERY += [(name, cuts) for name in ("linear", "embedding") for cuts in (*ALONG_TIME, *CUTS)]
CUTS |= ALONG_TIME


@dataclass
class Ran:
    """What one rank has, and in which boxes; bytes sent forward, and in all."""

    y: Tensor
    gradients: list[Tensor | None]
    boxes: list[Box]
    forward_bytes: int
    sent_bytes: int


def divided(one: Operator, cuts: Mapping[str, tuple[int, ...]], ways: int) -> LayerDivision:
    named = {one.filters if dim == "f" else dim: points for dim, points in cuts.items()}
    (layer,) = one.graph.layers
    return layer_division(one.graph, layer, one.graph.values(), Placement(0, named, ways), SAMPLES)


def leaf(x: Tensor) -> Tensor:
    return x.clone().requires_grad_(x.is_floating_point())


def run(one: Operator, division: LayerDivision, dy: Tensor) -> list[Ran]:
    """Forward and backward on all ranks; each counts the gradient of what it is the first to keep."""
    ranks = tuple(range(len(division.own)))
    stage = Division({"layer": division}, len(ranks), SAMPLES)

    def on_rank(end: InProcessTransport) -> Ran:
        peers = PeerGroup(end, ranks)
        step = LayerShard(peers, stage, division, ranks)
        boxes = [step.held(0), *(boxes[end.rank] for boxes in division.weights)]
        tensors = [
            leaf(each[slices(box, whole(each.shape))])
            for each, box in zip((one.x, one.weight, one.bias), boxes, strict=False)
        ]
        y = one.compute(step, *tensors, *[one.bias] * (3 - len(tensors)))
        forward_bytes = peers.sent_bytes
        y.backward(dy[slices(step.own, whole(dy.shape))] * float(step.is_first))
        return Ran(y.detach(), [each.grad for each in tensors], boxes, forward_bytes, peers.sent_bytes)

    return on_ranks(len(ranks), on_rank)


@pytest.mark.parametrize(("name", "cuts"), dict.fromkeys(EVERY))
def test_ranks_keep_and_send_back_what_one_device_makes(name: str, cuts: str) -> None:
    one = OPERATORS[name]()
    division = divided(one, *CUTS[cuts])
    tensors = [leaf(each) for each in (one.x, one.weight, one.bias)]
    y = one.call(*tensors)
    dy = torch.randn(y.shape, dtype=y.dtype)
    y.backward(dy)
    totals = [torch.zeros_like(each, dtype=torch.float64) for each in tensors]
    for rank, ran in enumerate(run(one, division, dy)):
        expected = y.detach()[slices(division.own[rank], whole(y.shape))]
        torch.testing.assert_close(ran.y, expected, rtol=0, atol=1e-12)
        for total, box, gradient in zip(totals, ran.boxes, ran.gradients, strict=False):
            if gradient is not None:  # a rank that has nothing to do
                total[slices(box, whole(total.shape))] += gradient
    for total, tensor in zip(totals, tensors, strict=True):
        if tensor.grad is not None:
            torch.testing.assert_close(total, tensor.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "cuts"), [each for each in dict.fromkeys(EVERY) if not {"nothing", "all", "no"} & {*each[1].split()}]
)
def test_the_bytes_are_those_that_the_planner_counts(name: str, cuts: str) -> None:
    one = OPERATORS[name]()
    named, ways = CUTS[cuts]
    division = divided(one, named, ways)
    sized = SizedLayer.of(one.graph, one.graph.layers[0], one.graph.values(), SAMPLES, False)
    shards = shards_of(sized, (ShardingSpec(tuple(division.layout.cuts.items()), ways=ways),))
    scattered = shards.contractions[0][0].scattered if ways > 1 else np.zeros((len(division.own),) * 2)
    elements = scattered.sum(axis=1)
    dy = torch.zeros(sized.work.shape, dtype=torch.float64)
    for rank, ran in enumerate(run(one, division, dy)):
        assert ran.forward_bytes == 8 * elements[rank]
        assert ran.sent_bytes - ran.forward_bytes == 8 * scattered[:, rank].sum()


def test_what_others_keep_is_on_its_way_before_the_own_is_computed() -> None:
    one = OPERATORS["linear"]()
    division = divided(one, {"f": (0, 1, 2, 3)}, 3)
    stage = Division({"layer": division}, 3, SAMPLES)

    def on_rank(end: InProcessTransport) -> list[tuple[int, int]]:
        step = LayerShard(PeerGroup(end, (0, 1, 2)), stage, division, (0, 1, 2))
        calls: list[tuple[int, int]] = []

        def multiply(x: Tensor, weight: Tensor) -> Tensor:
            calls.append((weight.shape[0], step.peers.num_messages))
            return F.linear(x, weight)

        x = one.x[slices(step.held(0), whole(one.x.shape))]
        contract(step, x, one.weight[slices(division.weights[0][end.rank], whole(one.weight.shape))], multiply)
        return calls

    assert on_ranks(3, on_rank) == [[(6, 0), (3, 2)]] * 3


def test_nothing_is_sent_backward_where_nothing_wants_a_gradient() -> None:
    one = OPERATORS["linear"]()
    division = divided(one, {"f": (0, 1, 2)}, 2)
    stage = Division({"layer": division}, 2, SAMPLES)

    def on_rank(end: InProcessTransport) -> tuple[bool, int]:
        step = LayerShard(PeerGroup(end, (0, 1)), stage, division, (0, 1))
        parts = [one.x[slices(step.held(0), whole(one.x.shape))]]
        parts += [
            each[slices(boxes[end.rank], whole(each.shape))]
            for each, boxes in zip((one.weight, one.bias), division.weights, strict=True)
        ]
        bias = parts[2].clone().requires_grad_()
        by_form(step, parts[0], parts[1], bias).sum().backward()
        return bias.grad is not None, step.peers.num_messages

    assert on_ranks(2, on_rank) == [(True, 1)] * 2
