"""Chains of convolutions on ranks that are threads, with the exchanges of the runtime, against one device."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from planner.ir.box import volume, whole
from planner.ir.graph import Layer, TensorSpec
from planner.ir.plan import Placement
from planner.layers.division import Division, LayerDivision
from runtime.decomposition.conv_layer import convolve
from runtime.decomposition.convolve import HaloSettings, Mode
from runtime.decomposition.exchange import Exchange, Wire
from runtime.decomposition.later import Later
from runtime.decomposition.step import Step
from runtime.pieces import slices
from runtime.transport import InProcessTransport
from tests.runtime.ranks import on_ranks

ATEN = torch.ops.aten
Cuts = Mapping[str, tuple[int, ...]]


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
        return Division(layers, len(next(iter(layers.values())).own), self.x.shape[0])


@dataclass
class Ran:
    """What one rank has afterwards."""

    y: Tensor
    dx: Tensor | None
    gradients: list[list[Tensor | None]]
    sent_bytes: int


def run(chain: Chain, division: Division, settings: HaloSettings, later: bool = False) -> list[Ran]:
    ranks = tuple(range(division.num_ranks))

    def on_rank(end: InProcessTransport) -> Ran:
        torch.set_num_threads(1)
        wire, put_off = Wire(end, ranks, 20.0), Later(most_kept=100) if later else None
        leaf = value = part_of(chain.x, division.held("x")[end.rank])
        parameters = []
        for index, layer in enumerate(division.layers.values()):
            step = Step(wire, division, layer, ranks, inputs_of={"input": 0}, later=put_off)
            boxes = [each[end.rank] for each in layer.weights]
            parameters.append([part_of(t, box) for t, box in zip(chain.parameters[index], boxes, strict=True)])
            value = convolve(step, *_call(chain.convs[index], value, parameters[-1]), settings)
            assert tuple(value.shape) == tuple(map(len, step.done))
        last = list(division.layers.values())[-1]
        dy = torch.zeros_like(value)
        if last.is_first[end.rank]:
            own = last.own[end.rank]
            dy[slices(own, last.done[end.rank])] = chain.dy[slices(own, whole(tuple(chain.dy.shape)))]
        value.backward(dy)
        if put_off is not None:
            assert len(put_off), "nothing was put off"
            put_off.run()
        return Ran(value.detach(), leaf.grad, [[each.grad for each in those] for those in parameters], wire.sent_bytes)

    return on_ranks(division.num_ranks, on_rank)


def _call(conv: Conv, x: Tensor, parameters: list[Tensor]) -> tuple[Callable[..., Tensor], dict[str, Any], bool]:
    def op(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        found: Tensor = ATEN.convolution(input, weight, bias, *conv.options())
        return found

    bias = parameters[1] if conv.bias else None
    return op, {"input": x, "weight": parameters[0], "bias": bias}, conv.transposed


def part_of(tensor: Tensor, box: Any) -> Tensor:
    return tensor.detach()[slices(box, whole(tuple(tensor.shape)))].clone().requires_grad_()


def check(chain: Chain, placements: Sequence[Placement], settings: HaloSettings, later: bool = False) -> None:
    division = chain.division(placements)
    found = run(chain, division, settings, later)
    last = list(division.layers.values())[-1]
    for rank, each in enumerate(found):
        close(each.y, chain.values[-1].detach()[slices(last.done[rank], whole(tuple(chain.dy.shape)))])
    close(added(chain.x, [(division.held("x")[r], each.dx) for r, each in enumerate(found)]), chain.x.grad)
    for index, layer in enumerate(division.layers.values()):
        for place, parameter in enumerate(chain.parameters[index]):
            pieces = [(layer.weights[place][r], each.gradients[index][place]) for r, each in enumerate(found)]
            close(added(parameter, pieces), parameter.grad)


def added(like: Tensor, pieces: list[tuple[Any, Tensor | None]]) -> Tensor:
    total = torch.zeros_like(like)
    for box, piece in pieces:
        if piece is not None:
            total[slices(box, whole(tuple(like.shape)))] += piece
    return total


def close(found: Tensor, expected: Tensor | None) -> None:
    assert expected is not None
    scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12 * scale)


def images(samples: int = 2, channels: int = 4, height: int = 13, width: int = 11) -> Tensor:
    return torch.randn(samples, channels, height, width)


NET = (
    Conv(4),
    Conv(6, kernel=5, stride=2, padding=2),
    Conv(6, groups=3, dilation=2, bias=False),
    Conv(8, kernel=2, padding=0),
    Conv(4, kernel=4, stride=2, transposed=True),
    Conv(6, kernel=3, stride=2, groups=2, transposed=True, output_padding=1),
    Conv(3, kernel=1, padding=0),
)
LAYOUTS: dict[str, list[Cuts]] = {
    "height": [{"height": (0, 1, 2)}] * 7,
    "uneven": [{"height": (0, 2, 3, 9)}] * 7,
    "empty": [{"height": (0, 1, 1, 2, 20)}] * 7,
    "grid": [{"height": (0, 3, 5), "width": (0, 1, 2)}] * 7,
    "narrow": [{"height": tuple(range(9))}] * 7,
    "switch": [{"sample": (0, 1, 2)}, {"height": (0, 1, 2)}, {"width": (0, 1, 3)}, {"channel": (0, 1, 2)}] * 2,
    "replica": [{"replica": (0, 1, 2), "height": (0, 1, 2)}] * 7,
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("mode", ["linear", "blocking", "interior"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_chain_of_convolutions_is_what_one_device_computes(name: str, mode: Mode) -> None:
    chain = Chain(NET, images())
    for most_extra in (0.25, 1e9):
        check(chain, [Placement(0, cuts) for cuts in LAYOUTS[name][:7]], HaloSettings(mode, most_extra))


@pytest.mark.parametrize("mode", ["linear", "blocking"])
def test_margins_are_held_and_their_gradients_add_up(mode: Mode) -> None:
    chain = Chain((Conv(4), Conv(4), Conv(4, kernel=5, padding=2)), images())
    cuts = {"height": (0, 1, 2), "width": (0, 2, 3)}
    check(chain, [Placement(0, cuts, margin=margin) for margin in (3, 2, 0)], HaloSettings(mode, 1e9))


@pytest.mark.parametrize("name", ["height", "grid", "uneven"])
def test_the_halo_of_dy_serves_as_well_as_that_of_dx(name: str) -> None:
    chain = Chain(NET, images(height=26, width=23))
    cuts = {"uneven": {"height": (0, 4, 7, 11)}}.get(name, LAYOUTS[name][0])
    settings = HaloSettings(most_extra=1e9, backward="dy")
    check(chain, [Placement(0, cuts)] * len(NET), settings)
    check(chain, [Placement(0, cuts)] * len(NET), settings, later=True)


def test_the_smaller_halo_moves_backward() -> None:
    chain = Chain((Conv(4), Conv(16), Conv(4), Conv(16)), images())
    division = chain.division([Placement(0, {"height": (0, 1, 2)})] * 4)
    found = {
        way: sum(each.sent_bytes for each in run(chain, division, HaloSettings(most_extra=1e9, backward=way)))
        for way in ("fewest", "dx", "dy")
    }
    row = 2 * 11 * 8  # samples, width, bytes; both ranks send one
    forward = 2 * row * (4 + 16 + 4)
    assert found == {
        "dx": 2 * forward,
        "dy": forward + 2 * row * (16 + 4 + 16),
        "fewest": forward + 2 * row * (4 + 4 + 4),
    }
    check(chain, [Placement(0, {"height": (0, 1, 2)})] * 4, HaloSettings(most_extra=1e9))


def random_chain(numbers: random.Random) -> tuple[Chain, list[Placement]]:
    """Three convolutions; half of the time all cut alike, else each in its own way."""
    convs, channels = [], 4
    for _ in range(3):
        groups = numbers.choice((1, 1, 2, channels))
        stride, dilation, transposed = numbers.choice((1, 1, 2, 3)), numbers.choice((1, 1, 2)), numbers.random() < 0.25
        more = numbers.randrange(max(stride, dilation)) if transposed else 0
        kernel, padding = numbers.choice((1, 2, 3, 3, 4, 5, 7)), numbers.choice((0, 1, 2, 3))
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
    return Chain(convs, images(numbers.choice((1, 2)), **sizes)), placements


def random_cuts(numbers: random.Random, ranks: int) -> Cuts:
    dims = numbers.sample(["height", "width", "height", "width", "sample", "channel"], 2)
    first = numbers.choice([ways for ways in range(1, ranks + 1) if ranks % ways == 0])
    found = {}
    for dim, ways in zip(dims, (first, ranks // first), strict=True):
        if dim in found:
            return {dim: tuple(range(ranks + 1))}
        found[dim] = (0, *sorted(numbers.randint(0, 12) for _ in range(ways - 1)), 12)
    return found


@pytest.mark.parametrize("seed", range(20))
def test_random_chains_are_what_one_device_computes(seed: int) -> None:
    numbers = random.Random(seed)
    while True:
        try:
            chain, placements = random_chain(numbers)
            break
        except RuntimeError:  # nothing is left of the image
            continue
    mode, backward = (
        numbers.choice(("linear", "linear", "interior", "blocking")),
        numbers.choice(("fewest", "dx", "dy")),
    )
    check(chain, placements, HaloSettings(mode, numbers.choice((0.25, 1e9)), backward), later=False)


def test_weight_gradients_may_wait() -> None:
    chain = Chain(NET, images())
    check(chain, [Placement(0, cuts) for cuts in LAYOUTS["grid"]], HaloSettings(most_extra=1e9), later=True)


@pytest.mark.parametrize("ways", [2, 4])
def test_input_channels_may_be_shared(ways: int) -> None:
    chain = Chain((Conv(8), Conv(8, stride=2), Conv(8, kernel=2, stride=2, padding=0, transposed=True)), images())
    placements = [Placement(0, {"channel": (0, 1, 2, 3, 4)})]
    placements += [Placement(0, {"channel": (0, 1, 2, 3, 4)}, ways=ways)] * 2
    check(chain, placements, HaloSettings())


def test_shared_channels_and_cut_rows_go_together() -> None:
    chain = Chain((Conv(8), Conv(8), Conv(8, kernel=5, padding=2)), images())
    cuts = {"channel": (0, 1, 2), "height": (0, 1, 2)}
    check(chain, [Placement(0, cuts), Placement(0, cuts, ways=2), Placement(0, cuts, ways=2)], HaloSettings())


@pytest.mark.parametrize("mode", ["linear", "blocking", "interior"])
def test_no_more_moves_than_must(mode: Mode) -> None:
    chain = Chain(NET, images())
    division = chain.division([Placement(0, cuts) for cuts in LAYOUTS["grid"]])
    found = run(chain, division, HaloSettings(mode))
    moved = sum(volume(move.box) for name in division.layers for move in division.moves(name, 0))
    assert sum(each.sent_bytes for each in found) == 2 * 8 * moved  # forward and its adjoint, float64


def test_what_is_exchanged_is_the_adjoint_of_what_was() -> None:
    chain = Chain(NET, images())
    division = chain.division([Placement(0, cuts) for cuts in LAYOUTS["uneven"]])

    def products(end: InProcessTransport) -> list[tuple[float, float]]:
        wire, found = Wire(end, tuple(range(division.num_ranks)), 20.0), []
        generator = torch.Generator().manual_seed(end.rank)
        for name in division.layers:
            value = division.layers[name].layer.inputs[0]
            held, wanted = division.held(value), division.wanted(name, 0)
            exchange = Exchange.of(wire, held, wanted, division.moves(name, 0))
            x = torch.randn(tuple(map(len, exchange.held)), dtype=torch.float64, generator=generator)
            came = exchange.start(x).wait()
            back = [torch.randn(piece.shape, dtype=torch.float64, generator=generator) for _, piece in came]
            returned = exchange.start_adjoint(back, x).wait()
            forward = sum(float((piece * other).sum()) for (_, piece), other in zip(came, back, strict=True))
            backward = sum(float((x[slices(box, exchange.held)] * piece).sum()) for box, piece in returned)
            found.append((forward, backward))
        return found

    for pairs in zip(*on_ranks(division.num_ranks, products), strict=True):
        forward, backward = (sum(each) for each in zip(*pairs, strict=True))
        assert abs(forward - backward) <= 1e-13 * max(1.0, abs(forward))


def on_two_ranks(
    layers: Sequence[Layer], inputs: Sequence[TensorSpec], cuts: Cuts, run: Callable[[list[Step]], Any]
) -> list[Any]:
    """What ``run`` gives on each rank, of steps without parameters, each reading what the one before makes."""
    placement, specs = Placement(0, cuts), [*inputs]
    divided = {}
    for layer in layers:
        divided[layer.name] = LayerDivision.of(layer, tuple(specs), (), placement, 1)
        specs[0] = layer.outputs[0]
    division = Division(divided, 2, 1)

    def on_rank(end: InProcessTransport) -> Any:
        torch.set_num_threads(1)
        wire = Wire(end, (0, 1), 20.0)
        names = {"input": 0, **({"weight": 1} if len(inputs) > 1 else {})}
        return run([Step(wire, division, each, (0, 1), inputs_of=names) for each in divided.values()])

    return on_ranks(2, on_rank)


def plain(spec: TensorSpec, *inputs: str) -> Layer:
    numbers = {"kernel": (3, 3), "stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}
    return Layer(f"after_{inputs[0]}", "conv", inputs, (spec,), (), numbers)


def op(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.conv2d(input, weight, bias, padding=1)


def test_an_image_without_a_dim_of_samples() -> None:
    x, weight = torch.randn(4, 9, 5).double(), torch.randn(4, 4, 3, 3).double()
    spec = TensorSpec(("channel", "height", "width"), (4, 9, 5), "float64")
    layers = [plain(spec, "x"), plain(spec, "after_x")]

    def run(steps: list[Step]) -> tuple[Any, Tensor]:
        value = part_of(x, steps[0].held(0))
        for step in steps:
            value = convolve(step, op, {"input": value, "weight": weight, "bias": None}, False)
        return steps[-1].done, value.detach()

    y = op(op(x, weight, None), weight, None)
    for box, found in on_two_ranks(layers, [spec], {"height": (0, 4, 9)}, run):
        close(found, y[slices(box, whole(tuple(y.shape)))])


@pytest.mark.parametrize("cuts", [{"height": (0, 4, 9)}, {"channel": (0, 1, 4)}])
def test_a_weight_that_is_computed_is_read_whole(cuts: Cuts) -> None:
    x, weight = torch.randn(1, 4, 9, 5).double(), torch.randn(4, 4, 3, 3).double().requires_grad_()
    spec = TensorSpec(("sample", "channel", "height", "width"), (1, 4, 9, 5), "float64")
    of_weight = TensorSpec(("feature",) * 4, (4, 4, 3, 3), "float64")
    layers = [plain(spec, "x", "weight"), plain(spec, "after_x", "weight")]

    def run(steps: list[Step]) -> Tensor:
        value, mine = part_of(x, steps[0].held(0)), weight.detach().clone().requires_grad_()
        for step in steps:
            value = convolve(step, op, {"input": value, "weight": mine, "bias": None}, False)
        value.sum().backward()
        assert mine.grad is not None
        return mine.grad

    found = on_two_ranks(layers, [spec, of_weight], cuts, run)
    op(op(x, weight, None), weight, None).sum().backward()
    close(torch.stack(found).sum(0), weight.grad)


def test_under_autocast_halos_are_sent_in_its_precision() -> None:
    x, weight = torch.randn(1, 4, 9, 5), torch.randn(4, 4, 3, 3)
    spec = TensorSpec(("sample", "channel", "height", "width"), (1, 4, 9, 5), "float32")

    def run(steps: list[Step]) -> tuple[Any, Tensor, int]:
        value = part_of(x, steps[0].held(0))
        with torch.autocast("cpu", torch.bfloat16):
            for step in steps:
                value = convolve(step, op, {"input": value, "weight": weight, "bias": None}, False)
        assert value.dtype == torch.bfloat16
        value.sum().backward()
        return steps[-1].done, value.detach(), steps[0].wire.sent_bytes

    with torch.autocast("cpu", torch.bfloat16):
        y = op(op(x, weight, None), weight, None)
    for box, found, sent in on_two_ranks(
        [plain(spec, "x"), plain(spec, "after_x")], [spec], {"height": (0, 4, 9)}, run
    ):
        there = y[slices(box, whole(tuple(y.shape)))]
        assert torch.allclose(found.float(), there.float(), rtol=0.05, atol=0.2)
        assert sent == 2 * 2 * 4 * 5  # a row of four channels each way, two bytes a number
