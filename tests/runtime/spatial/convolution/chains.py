"""Chains of convolutions, what one device makes of them, and what ranks that are threads make together."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from planner.ir.box import whole
from planner.ir.graph import Layer, TensorSpec
from planner.ir.plan import Placement
from planner.layers.division import Division, LayerDivision
from runtime.pipeline.routing import slices
from runtime.spatial.convolution.layer import HaloSettings, convolve
from runtime.spatial.deferred import DeferredGradients
from runtime.spatial.exchange import PeerGroup
from runtime.spatial.layer_shard import LayerShard
from runtime.transport import InProcessTransport
from tests.runtime.ranks import on_ranks
from tests.runtime.spatial.threads import Cuts, added_up, close

ATEN = torch.ops.aten


@dataclass(frozen=True)
class Conv:
    """One layer of a chain, with as many channels as the one before unless it says otherwise."""

    channels: int
    kernel: int = 3
    stride: int = 1
    padding: int = 1
    dilation: int = 1
    groups: int = 1
    transposed: bool = False
    output_padding: int = 0
    bias: bool = True

    def options(self) -> tuple[Any, ...]:
        numbers = ([number] * 2 for number in (self.stride, self.padding, self.dilation, self.output_padding))
        stride, padding, dilation, more = numbers
        return stride, padding, dilation, self.transposed, more, self.groups

    def weight_shape(self, inputs: int) -> tuple[int, ...]:
        first, second = (inputs, self.channels) if self.transposed else (self.channels, inputs)
        return (first, second // self.groups, self.kernel, self.kernel)


@dataclass
class Chain:
    """The layers, their parameters and what one device makes of them."""

    convs: Sequence[Conv]
    x: Tensor
    parameters: list[list[Tensor]] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    has_norm: bool = False

    def __post_init__(self) -> None:
        torch.manual_seed(3)
        self.x = self.x.double().requires_grad_()
        self.values = [self.x]
        for conv in self.convs:
            weight = torch.randn(conv.weight_shape(self.values[-1].shape[1])).double().requires_grad_()
            bias = torch.randn(conv.channels).double().requires_grad_()
            self.parameters.append([weight, bias] if conv.bias else [weight])
            self.values.append(ATEN.convolution(self.values[-1], weight, bias if conv.bias else None, *conv.options()))
        self.dy = torch.randn_like(self.values[-1])
        self.values[-1].backward(self.dy)

    def division(self, placements: Sequence[Placement]) -> Division:
        specs = [TensorSpec(("sample", "channel", "height", "width"), tuple(v.shape), "float64") for v in self.values]
        layers = {}
        for index, (conv, placement) in enumerate(zip(self.convs, placements, strict=True)):
            attributes = {name: (getattr(conv, name),) * 2 for name in ("kernel", "stride", "padding", "dilation")}
            names = tuple(f"l{index}.{name}" for name in ("weight", "bias")[: 1 + conv.bias])
            kind = "transposed_conv" if conv.transposed else "conv"
            made = f"l{index - 1}" if index else "x"
            layer = Layer(f"l{index}", kind, (made,), (specs[index + 1],), names, {**attributes, "groups": conv.groups})
            used = tuple(TensorSpec(("feature",) * t.ndim, tuple(t.shape), "float64") for t in self.parameters[index])
            layers[layer.name] = LayerDivision.of(layer, (specs[index],), used, placement, self.x.shape[0])
        if self.has_norm:  # it is not run
            norm = Layer("norm", "batch_norm", (list(layers)[-1],), (specs[-1],))
            layers["norm"] = LayerDivision.of(norm, (specs[-1],), (), placements[-1], self.x.shape[0])
        return Division(layers, len(next(iter(layers.values())).own), self.x.shape[0])


@dataclass
class Ran:
    """What one rank has afterwards."""

    y: Tensor
    dx: Tensor | None
    gradients: list[list[Tensor | None]]
    sent_bytes: int
    num_put_off: int


def run(chain: Chain, division: Division, settings: HaloSettings) -> list[Ran]:
    ranks = tuple(range(division.num_ranks))

    def on_rank(end: InProcessTransport) -> Ran:
        torch.set_num_threads(1)
        peers = PeerGroup(end, ranks)
        put_off = DeferredGradients(most_kept=100)
        leaf = value = part_of(chain.x, division.held("x")[end.rank])
        parameters = []
        for index, layer in enumerate(convolutions(division)):
            step = LayerShard(peers, division, layer, ranks, inputs_of={"input": 0}, later=put_off)
            boxes = [each[end.rank] for each in layer.weights]
            parameters.append([part_of(t, box) for t, box in zip(chain.parameters[index], boxes, strict=True)])
            value = convolve(step, *_call(chain.convs[index], value, parameters[-1]), settings)
            assert tuple(value.shape) == tuple(map(len, step.done))
        last = convolutions(division)[-1]
        dy = torch.zeros_like(value)
        if last.is_first[end.rank]:
            own = last.own[end.rank]
            dy[slices(own, last.done[end.rank])] = chain.dy[slices(own, whole(tuple(chain.dy.shape)))]
        value.backward(dy)
        num_put_off = len(put_off)
        put_off.run()
        gradients = [[each.grad for each in those] for those in parameters]
        return Ran(value.detach(), leaf.grad, gradients, peers.sent_bytes, num_put_off)

    return on_ranks(division.num_ranks, on_rank)


def convolutions(division: Division) -> list[LayerDivision]:
    return [layer for layer in division.layers.values() if layer.layer.kind != "batch_norm"]


def _call(conv: Conv, x: Tensor, parameters: list[Tensor]) -> tuple[Callable[..., Tensor], dict[str, Any], bool]:
    def op(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        found: Tensor = ATEN.convolution(input, weight, bias, *conv.options())
        return found

    bias = parameters[1] if conv.bias else None
    return op, {"input": x, "weight": parameters[0], "bias": bias}, conv.transposed


def part_of(tensor: Tensor, box: Any) -> Tensor:
    return tensor.detach()[slices(box, whole(tuple(tensor.shape)))].clone().requires_grad_()


def check(chain: Chain, placements: Sequence[Placement], settings: HaloSettings) -> list[Ran]:
    division = chain.division(placements)
    found = run(chain, division, settings)
    last = convolutions(division)[-1]
    for rank, each in enumerate(found):
        close(each.y, chain.values[-1].detach()[slices(last.done[rank], whole(tuple(chain.dy.shape)))])
    close(
        added_up(tuple(chain.x.shape), [(division.held("x")[r], each.dx) for r, each in enumerate(found)]), chain.x.grad
    )
    for index, layer in enumerate(convolutions(division)):
        for place, parameter in enumerate(chain.parameters[index]):
            pieces = [(layer.weights[place][r], each.gradients[index][place]) for r, each in enumerate(found)]
            close(added_up(tuple(parameter.shape), pieces), parameter.grad)
    return found


def images(samples: int = 2, channels: int = 4, height: int = 13, width: int = 11) -> Tensor:
    return torch.randn(samples, channels, height, width)


def random_chain(numbers: random.Random) -> tuple[Chain, list[Placement]]:
    """Three convolutions that leave some of the image; half of the time all cut alike, else each in its own way."""
    while True:
        with contextlib.suppress(RuntimeError):  # nothing is left of the image
            return _random_chain(numbers)


def _random_chain(numbers: random.Random) -> tuple[Chain, list[Placement]]:
    convs = []
    channels = 4
    for _ in range(3):
        groups = numbers.choice((1, 1, 2, channels))
        stride = numbers.choice((1, 1, 2, 3))
        dilation = numbers.choice((1, 1, 2))
        transposed = numbers.random() < 0.25
        more = numbers.randrange(max(stride, dilation)) if transposed else 0
        kernel = numbers.choice((1, 2, 3, 3, 4, 5, 7))
        padding = numbers.choice((0, 1, 2, 3))
        channels = groups * numbers.choice((1, 2, 3)) if channels % groups == 0 else channels
        convs.append(
            Conv(channels, kernel, stride, padding, dilation, groups, transposed, more, numbers.random() < 0.5)
        )
    ranks = numbers.choice((2, 3, 4, 6))
    cuts = [random_cuts(numbers, ranks) for _ in convs]
    alike = numbers.random() < 0.5
    margins = [numbers.choice((0, 0, 0, 1, 2)) for _ in convs]
    placements = [Placement(0, cuts[0] if alike else own, margin=m) for own, m in zip(cuts, margins, strict=True)]
    sizes = {"height": numbers.randint(12, 24), "width": numbers.randint(12, 20)}
    return Chain(convs, images(numbers.choice((1, 2)), **sizes), has_norm=numbers.random() < 0.5), placements


def random_cuts(numbers: random.Random, ranks: int) -> Cuts:
    dims = numbers.sample(["height", "width", "height", "width", "sample", "channel"], 2)
    first = numbers.choice([ways for ways in range(1, ranks + 1) if ranks % ways == 0])
    found = {}
    for dim, ways in zip(dims, (first, ranks // first), strict=True):
        if dim in found:
            return {dim: tuple(range(ranks + 1))}
        found[dim] = (0, *sorted(numbers.randint(0, 12) for _ in range(ways - 1)), 12)
    return found
