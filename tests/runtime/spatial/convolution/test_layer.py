"""Chains of convolutions on ranks that are threads, with the exchanges of the runtime, against one device."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from planner.ir.box import volume, whole
from planner.ir.graph import Layer, TensorSpec
from planner.ir.plan import Placement
from planner.layers.division import Division, LayerDivision
from runtime.pipeline.routing import slices
from runtime.spatial.convolution.layer import HaloMode, HaloSettings, convolve
from runtime.spatial.exchange import Exchange, PeerGroup
from runtime.spatial.layer_shard import LayerShard
from runtime.transport import InProcessTransport
from tests.runtime.ranks import on_ranks
from tests.runtime.spatial.convolution.chains import Chain, Conv, check, images, part_of, random_chain, run
from tests.runtime.spatial.threads import Cuts, close

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


@pytest.mark.parametrize("mode", ["linear", "blocking"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_chain_of_convolutions_is_what_one_device_computes(name: str, mode: HaloMode) -> None:
    chain = Chain(NET, images())
    for most_extra in (0.25, 1e9):
        check(chain, [Placement(0, cuts) for cuts in LAYOUTS[name][:7]], HaloSettings(mode, most_extra))


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_with_little_to_do_may_fetch_first_while_others_overlap(name: str) -> None:
    chain = Chain(NET, images())
    placements = [Placement(0, cuts) for cuts in LAYOUTS[name][:7]]
    for fewest in (2_000, 10_000, 2**40):  # some parts, most, all
        check(chain, placements, HaloSettings(most_extra=1e9, fewest=fewest))
        check(chain, placements, HaloSettings(most_extra=1e9, fewest=fewest, backward="dy"))


@pytest.mark.parametrize("mode", ["linear", "blocking"])
def test_margins_are_held_and_their_gradients_add_up(mode: HaloMode) -> None:
    chain = Chain((Conv(4), Conv(4), Conv(4, kernel=5, padding=2)), images())
    cuts = {"height": (0, 1, 2), "width": (0, 2, 3)}
    check(chain, [Placement(0, cuts, margin=margin) for margin in (3, 2, 0)], HaloSettings(mode, 1e9))


@pytest.mark.parametrize("name", ["height", "grid", "uneven"])
def test_the_halo_of_dy_serves_as_well_as_that_of_dx(name: str) -> None:
    chain = Chain(NET, images(height=26, width=23))
    cuts = {"uneven": {"height": (0, 4, 7, 11)}}.get(name, LAYOUTS[name][0])
    settings = HaloSettings(most_extra=1e9, backward="dy")
    check(chain, [Placement(0, cuts)] * len(NET), settings)
    chain.has_norm = True
    assert all(each.num_put_off == len(NET) for each in check(chain, [Placement(0, cuts)] * len(NET), settings))


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


@pytest.mark.parametrize("seed", range(20))
def test_random_chains_are_what_one_device_computes(seed: int) -> None:
    numbers = random.Random(seed)
    chain, placements = random_chain(numbers)
    mode = numbers.choice(("linear", "linear", "blocking"))
    backward = numbers.choice(("fewest", "dx", "dy"))
    check(chain, placements, HaloSettings(mode, numbers.choice((0.25, 1e9)), backward))


@pytest.mark.parametrize("fewest", [0, 2**40])
@pytest.mark.parametrize("has_norm", [False, True])
def test_weight_gradients_wait_where_statistics_are_waited_for(has_norm: bool, fewest: int) -> None:
    chain = Chain(NET, images(), has_norm=has_norm)
    settings = HaloSettings(most_extra=1e9, fewest=fewest)
    found = check(chain, [Placement(0, cuts) for cuts in LAYOUTS["grid"]], settings)
    assert all(each.num_put_off == (len(NET) if has_norm else 0) for each in found)


def test_gradients_of_a_weight_of_two_layers_do_not_wait() -> None:
    chain = Chain((Conv(4), Conv(4), Conv(4)), images(), has_norm=True)
    division = chain.division([Placement(0, {"height": (0, 1, 2)})] * 3)
    tied = replace(division.layers["l2"].layer, parameters=division.layers["l1"].layer.parameters)
    layers = {**division.layers, "l2": replace(division.layers["l2"], layer=tied)}
    found = run(chain, Division(layers, 2, 2), HaloSettings())
    assert all(each.num_put_off == 1 for each in found)


@pytest.mark.parametrize("ways", [2, 4])
def test_input_channels_may_be_shared(ways: int) -> None:
    chain = Chain((Conv(8), Conv(8, stride=2), Conv(8, kernel=2, stride=2, padding=0, transposed=True)), images())
    placements = [Placement(0, {"channel": (0, 1, 2, 3, 4)})]
    placements += [Placement(0, {"channel": (0, 1, 2, 3, 4)}, ways=ways)] * 2
    check(chain, placements, HaloSettings())


def test_a_block_without_filters_shares_nothing() -> None:
    chain = Chain((Conv(8), Conv(8), Conv(8)), images())
    cuts = {"channel": (0, 0, 0, 3, 4), "height": (0, 1, 1)}
    check(chain, [Placement(0, cuts), *[Placement(0, cuts, ways=2)] * 2], HaloSettings())


def test_shared_channels_and_cut_rows_go_together() -> None:
    chain = Chain((Conv(8), Conv(8), Conv(8, kernel=5, padding=2)), images())
    cuts = {"channel": (0, 1, 2), "height": (0, 1, 2)}
    check(chain, [Placement(0, cuts), Placement(0, cuts, ways=2), Placement(0, cuts, ways=2)], HaloSettings())


@pytest.mark.parametrize("mode", ["linear", "blocking"])
def test_no_more_moves_than_must(mode: HaloMode) -> None:
    chain = Chain(NET, images())
    division = chain.division([Placement(0, cuts) for cuts in LAYOUTS["grid"]])
    found = run(chain, division, HaloSettings(mode))
    moved = sum(volume(move.box) for name in division.layers for move in division.moves(name, 0))
    assert sum(each.sent_bytes for each in found) == 2 * 8 * moved  # forward and its adjoint, float64


def test_what_is_exchanged_is_the_adjoint_of_what_was() -> None:
    chain = Chain(NET, images())
    division = chain.division([Placement(0, cuts) for cuts in LAYOUTS["uneven"]])

    def products(end: InProcessTransport) -> list[tuple[float, float]]:
        peers = PeerGroup(end, tuple(range(division.num_ranks)))
        found = []
        generator = torch.Generator().manual_seed(end.rank)
        for name in division.layers:
            value = division.layers[name].layer.inputs[0]
            held = division.held(value)
            wanted = division.wanted(name, 0)
            exchange = Exchange.of(peers, held, wanted, division.moves(name, 0))
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
    layers: Sequence[Layer], inputs: Sequence[TensorSpec], cuts: Cuts, run: Callable[[list[LayerShard]], Any]
) -> list[Any]:
    """What ``run`` gives on each rank, of steps without parameters, each reading what the one before makes."""
    placement = Placement(0, cuts)
    specs = [*inputs]
    divided = {}
    for layer in layers:
        divided[layer.name] = LayerDivision.of(layer, tuple(specs), (), placement, 1)
        specs[0] = layer.outputs[0]
    division = Division(divided, 2, 1)

    def on_rank(end: InProcessTransport) -> Any:
        torch.set_num_threads(1)
        peers = PeerGroup(end, (0, 1))
        names = {"input": 0, **({"weight": 1} if len(inputs) > 1 else {})}
        return run([LayerShard(peers, division, each, (0, 1), inputs_of=names) for each in divided.values()])

    return on_ranks(2, on_rank)


def plain(spec: TensorSpec, *inputs: str) -> Layer:
    numbers = {"kernel": (3, 3), "stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}
    return Layer(f"after_{inputs[0]}", "conv", inputs, (spec,), (), numbers)


def op(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.conv2d(input, weight, bias, padding=1)


def test_an_image_without_a_dim_of_samples() -> None:
    x = torch.randn(4, 9, 5).double()
    weight = torch.randn(4, 4, 3, 3).double()
    spec = TensorSpec(("channel", "height", "width"), (4, 9, 5), "float64")
    layers = [plain(spec, "x"), plain(spec, "after_x")]

    def run(steps: list[LayerShard]) -> tuple[Any, Tensor]:
        value = part_of(x, steps[0].held(0))
        for step in steps:
            value = convolve(step, op, {"input": value, "weight": weight, "bias": None}, False)
        return steps[-1].done, value.detach()

    y = op(op(x, weight, None), weight, None)
    for box, found in on_two_ranks(layers, [spec], {"height": (0, 4, 9)}, run):
        close(found, y[slices(box, whole(tuple(y.shape)))])


@pytest.mark.parametrize("cuts", [{"height": (0, 4, 9)}, {"channel": (0, 1, 4)}])
def test_a_weight_that_is_computed_is_read_whole(cuts: Cuts) -> None:
    x = torch.randn(1, 4, 9, 5).double()
    weight = torch.randn(4, 4, 3, 3).double().requires_grad_()
    spec = TensorSpec(("sample", "channel", "height", "width"), (1, 4, 9, 5), "float64")
    of_weight = TensorSpec(("feature",) * 4, (4, 4, 3, 3), "float64")
    layers = [plain(spec, "x", "weight"), plain(spec, "after_x", "weight")]

    def run(steps: list[LayerShard]) -> Tensor:
        value = part_of(x, steps[0].held(0))
        mine = weight.detach().clone().requires_grad_()
        for step in steps:
            value = convolve(step, op, {"input": value, "weight": mine, "bias": None}, False)
        value.sum().backward()
        assert mine.grad is not None
        return mine.grad

    found = on_two_ranks(layers, [spec, of_weight], cuts, run)
    op(op(x, weight, None), weight, None).sum().backward()
    close(torch.stack(found).sum(0), weight.grad)


def test_under_autocast_halos_are_sent_in_its_precision() -> None:
    x = torch.randn(1, 4, 9, 5)
    weight = torch.randn(4, 4, 3, 3)
    spec = TensorSpec(("sample", "channel", "height", "width"), (1, 4, 9, 5), "float32")

    def run(steps: list[LayerShard]) -> tuple[Any, Tensor, int]:
        value = part_of(x, steps[0].held(0))
        with torch.autocast("cpu", torch.bfloat16):
            for step in steps:
                value = convolve(step, op, {"input": value, "weight": weight, "bias": None}, False)
        assert value.dtype == torch.bfloat16
        value.sum().backward()
        return steps[-1].done, value.detach(), steps[0].peers.sent_bytes

    with torch.autocast("cpu", torch.bfloat16):
        y = op(op(x, weight, None), weight, None)
    for box, found, sent in on_two_ranks(
        [plain(spec, "x"), plain(spec, "after_x")], [spec], {"height": (0, 4, 9)}, run
    ):
        there = y[slices(box, whole(tuple(y.shape)))]
        assert torch.allclose(found.float(), there.float(), rtol=0.05, atol=0.2)
        assert sent == 2 * 2 * 4 * 5  # a row of four channels each way, two bytes a number
