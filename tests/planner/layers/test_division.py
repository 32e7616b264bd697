"""The division of a stage: the same boxes as the planner's arrays, and what moves is what they count."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from planner.costs.cost_model import CostModel
from planner.costs.shards.sharding_spec import ShardingSpec
from planner.costs.stages.layouts import LayoutPrices
from planner.ir.box import Box, Interval, intersect, subtract, volume, whole
from planner.ir.graph import Layer, TensorSpec
from planner.ir.plan import Decision, Placement, Stage
from planner.layers.backward_halo import BackwardHalo, backward_halo
from planner.layers.boxes import as_tuples, moved
from planner.layers.division import Division, LayerDivision, divides
from tests.oracles.boxes import parts, transfers
from tests.planner.networks import Named, Network, mesh_like, priced, residual

FAMILIES = ("sample", "spatial", "channel")


def prices_of(made: tuple[Network, Named], ranks: int, samples: int) -> LayoutPrices:
    network, end = made
    profile = priced(network, end, (1.0,) * ranks)
    return LayoutPrices(CostModel(profile), tuple(range(ranks)), samples, FAMILIES, halo_depth=2)


def decided(prices: LayoutPrices, options: list[ShardingSpec]) -> Decision:
    layers = {
        layer.name: Placement(0, dict(option.cuts), margin=option.margin)
        for layer, option in zip(prices.layers, options, strict=True)
    }
    ranks = prices.ranks
    return Decision("gpipe", (prices.samples,), (Stage(ranks, tuple("d" for _ in ranks)),), layers, ())


@pytest.mark.parametrize("ranks", [2, 4, 6])
@pytest.mark.parametrize("network", [residual, mesh_like])
def test_boxes_are_those_that_the_planner_prices(network: type, ranks: int) -> None:
    rng = random.Random(ranks)
    prices = prices_of(network(samples=4, height=19), ranks, 4)
    graph = prices.cost_model.profile.graph
    for _ in range(5):
        chosen = [rng.choice(prices.options(index)) for index in range(len(graph.layers))]
        division = Division.of(graph, decided(prices, chosen), 0, 4)
        for index, layer in enumerate(graph.layers):
            shards = prices.shards(index, (chosen[index],))
            mine = division.layers[layer.name]
            for output in range(len(layer.outputs)):
                assert same(mine.owned[output], shards.owned[output][0])
                assert same(mine.held[output], shards.held[output][0])
            for parameter, boxes in enumerate(mine.weights):
                assert same(boxes, shards.weights[parameter][0])
            assert same(mine.done, shards.done[0])
            for position in range(len(layer.inputs)):
                assert same(division.wanted(layer.name, position), shards.wanted[position][0])


@pytest.mark.parametrize("seed", range(6))
def test_what_moves_is_what_the_planner_counts(seed: int) -> None:
    rng = random.Random(seed)
    ranks = (2, 3, 4)[seed % 3]
    prices = prices_of(residual(samples=4, height=17), ranks, 4)
    graph = prices.cost_model.profile.graph
    number = {layer.name: index for index, layer in enumerate(graph.layers)}
    chosen = [rng.choice(prices.options(index)) for index in range(len(graph.layers))]
    division = Division.of(graph, decided(prices, chosen), 0, 4)
    for index, layer in enumerate(graph.layers):
        for position, value in enumerate(layer.inputs):
            if value not in number:
                assert not division.moves(layer.name, position)
                continue
            maker, reader = (prices.shards(at, (chosen[at],)) for at in (number[value], index))
            counted = moved(maker.owned[0], maker.held[0], reader.wanted[position])[0, 0]
            found = np.zeros((ranks, ranks))
            for move in division.moves(layer.name, position):
                found[move.src, move.dst] += volume(move.box)
            assert np.array_equal(found, counted)


def test_every_rank_gets_just_what_it_lacks() -> None:
    rng = random.Random(5)
    prices = prices_of(mesh_like(samples=3, height=23), 4, 3)
    graph = prices.cost_model.profile.graph
    chosen = [rng.choice(prices.options(index)) for index in range(len(graph.layers))]
    division = Division.of(graph, decided(prices, chosen), 0, 3)
    for layer in graph.layers:
        for position, value in enumerate(layer.inputs):
            held = division.held(value)
            wanted = division.wanted(layer.name, position)
            for rank in range(4):
                came = [move.box for move in division.moves(layer.name, position) if move.dst == rank]
                kept = intersect(held[rank], wanted[rank])
                pieces = came + ([] if kept is None else [kept])
                assert sum(map(volume, pieces)) == volume(wanted[rank])
                assert all(intersect(a, b) is None for k, a in enumerate(pieces) for b in pieces[:k])


def test_copies_are_counted_once() -> None:
    network, end = mesh_like(samples=2, height=16)
    graph = priced(network, end).graph
    cuts = {"height": (0, 1, 2), "replica": (0, 1, 2)}
    layers = {layer.name: Placement(0, cuts) for layer in graph.layers}
    decision = Decision("gpipe", (2,), (Stage((0, 1, 2, 3), ("d",) * 4),), layers, ())
    assert divides(decision, 0, graph)
    assert Division.of(graph, decision, 0, 2).layers["conv0"].is_first == (True, False, True, False)


@pytest.mark.parametrize("shape", [(), (3,)])
def test_what_has_no_dim_that_is_cut_is_done_whole_by_every_rank(shape: tuple[int, ...]) -> None:
    spec = TensorSpec(("channel",) * len(shape), shape, "float32")
    layer = Layer("scale", "pointwise", ("x", "y"), (spec,))
    division = LayerDivision.of(layer, (spec, spec), (), Placement(0, {"sample": (0, 1, 2)}), 2)
    assert division.own == division.done == division.needed[1] == division.owned[0] == (whole(shape),) * 2
    assert (division.rows, division.is_first) == ((2, 2), (True, False))


def test_what_is_outside_is_held_as_far_as_it_is_read() -> None:
    network, end = mesh_like(samples=2, height=16, groups=(4,))
    graph = priced(network, end).graph
    layers = {layer.name: Placement(0, {"height": (0, 1, 2)}) for layer in graph.layers}
    decision = Decision("gpipe", (2,), (Stage((0, 1), ("d", "d")),), layers, ())
    division = Division.of(graph, decision, 0, 2)
    assert [box[2] for box in division.held("x")] == [Interval(0, 8), Interval(7, 16)]  # 3-wide windows, two apart


def test_a_stage_cut_by_samples_alone_needs_no_division() -> None:
    network, end = mesh_like(samples=2, height=16, groups=(4,))
    graph = priced(network, end).graph
    two = Stage((0, 1), ("d", "d"))
    halves = {"sample": (0, 1, 2)}
    layers = {layer.name: Placement(0, halves) for layer in graph.layers}
    decision = Decision("gpipe", (2,), (two,), layers, ())
    assert not divides(decision, 0, graph)
    odd = {**layers, "conv0": Placement(0, {"sample": (0, 1, 3)})}
    assert divides(replace(decision, layers=odd), 0, graph)
    alone = {name: Placement(0, {"height": (0, 1)}) for name in layers}
    assert not divides(replace(decision, stages=(Stage((0,), ("d",)),), layers=alone), 0, graph)


def test_a_term_of_a_loss_that_is_read_is_a_sum_over_ranks() -> None:
    network, end = mesh_like(samples=2, height=16, groups=(4,))
    graph = priced(network, end).graph
    root = Layer("root", "pointwise", ("loss",), graph.layers[-1].outputs)
    graph = replace(graph, layers=(*graph.layers, root), loss="root")
    layers = {layer.name: Placement(0, {"sample": (0, 1, 2)}) for layer in graph.layers}
    assert divides(Decision("gpipe", (2,), (Stage((0, 1), ("d", "d")),), layers, ()), 0, graph)


@pytest.mark.parametrize("seed", range(20))
def test_a_box_without_another(seed: int) -> None:
    rng = random.Random(seed)
    box, other = (tuple(_interval(rng) for _ in range(3)) for _ in range(2))
    parts = subtract(box, other)
    shared = intersect(box, other)
    assert sum(map(volume, parts)) == volume(box) - (volume(shared) if shared else 0)
    assert all(intersect(part, other) is None for part in parts)
    assert all(intersect(a, b) is None for k, a in enumerate(parts) for b in parts[:k])
    assert transfers({0: box}, {1: other}) == () or shared is not None


def same(boxes: tuple[Box, ...], array: object) -> bool:
    """Equal, empty ones apart."""
    others = as_tuples(array)
    return all(a == b or (not volume(a) and not volume(b)) for a, b in zip(boxes, others, strict=True))


def _interval(rng: random.Random) -> Interval:
    start = rng.randrange(6)
    return Interval(start, start + rng.randint(1, 5))


DIMS = ("sample", "channel", "height", "width")


def halo(
    *,
    channels: tuple[int, int] = (4, 16),
    height: int = 12,
    kernel: int = 3,
    stride: int = 1,
    cuts: dict[str, tuple[int, ...]] | None = None,
    held: dict[str, tuple[int, ...]] | None = None,
    margin: int = 0,
    ways: int = 1,
    groups: int = 1,
) -> BackwardHalo | None:
    """Of a convolution whose input is cut as its output unless ``held`` says otherwise."""
    padding = kernel // 2
    below = (height + 2 * padding - kernel) // stride + 1
    data = TensorSpec(DIMS, (2, channels[0], height, 5), "float32")
    output = TensorSpec(DIMS, (2, channels[1], below, 5), "float32")
    numbers = {"kernel": (kernel, 1), "stride": (stride, 1), "padding": (padding, 0), "dilation": (1, 1)}
    layer = Layer("conv", "conv", ("x",), (output,), ("w",), {**numbers, "groups": groups})
    weight = TensorSpec(("feature",) * 4, (channels[1], channels[0] // groups, kernel, 1), "float32")
    own = Placement(0, cuts or {"height": (0, 1, 2)}, ways=ways, margin=margin)
    division = LayerDivision.of(layer, (data,), (weight,), own, 2)
    boxes = parts(Placement(0, held or own.cuts).layout, data, 2)
    wanted = [tuple(a & Interval(0, n) for a, n in zip(box, data.shape, strict=True)) for box in division.needed[0]]
    moves = [
        move
        for move in transfers(dict(enumerate(boxes)), dict(enumerate(wanted)))
        if move.src != move.dst and subtract(move.box, boxes[move.dst])
    ]
    return backward_halo(division, boxes, moves)


def test_rows_are_as_many_and_channels_decide() -> None:
    found = halo(channels=(4, 16))
    assert (found.dx_elements, found.dy_elements, found.is_dy) == (2 * 2 * 4 * 5, 2 * 2 * 16 * 5, False)
    assert halo(channels=(16, 4)).is_dy
    assert not halo(channels=(8, 8)).is_dy  # of equal ones the adjoint


def test_a_strided_window_reads_a_row_of_one_neighbour_only() -> None:
    found = halo(stride=2, channels=(4, 4))  # output 3 reads rows 5, 6 and 7; rank 1 holds 6 and 7
    assert found.dx_elements == found.dy_elements == 2 * 4 * 5
    assert [(move.src, move.dst, move.box[2]) for move in found.moves] == [(1, 0, Interval(3, 4))]


def test_large_kernels_reach_over_a_neighbour() -> None:
    found = halo(kernel=7, height=8, cuts={"height": (0, 1, 2, 3, 4)})
    assert found.dx_elements * 4 == found.dy_elements
    assert [box[2] for box in found.reached] == [Interval(0, 5), Interval(0, 7), Interval(1, 8), Interval(3, 8)]


@pytest.mark.parametrize(
    "case",
    [
        {"margin": 1},  # rows of dy are partial sums
        {"cuts": {"replica": (0, 1, 2), "height": (0, 1, 2)}},  # likewise
        {"cuts": {"channel": (0, 1, 2)}},  # others' filters read what is held
        {"cuts": {"channel": (0, 1, 2)}, "ways": 2},
        {"held": {"sample": (0, 1, 2)}},  # other samples
        {"cuts": {"height": (0, 12, 12)}},  # nothing to make
        {"cuts": {"sample": (0, 1, 2)}},  # nothing moves
    ],
)
def test_only_dx_can_move(case: dict[str, object]) -> None:
    assert halo(**case) is None


def test_filters_of_whole_groups_do_not_matter_to_others() -> None:
    cuts = {"channel": (0, 1, 2), "height": (0, 1, 2)}
    found = halo(channels=(8, 4), groups=2, cuts=cuts)
    assert found is not None
    assert found.is_dy
