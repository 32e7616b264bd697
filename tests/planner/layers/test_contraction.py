"""Who contracts what, beside the sums themselves."""

from __future__ import annotations

import numpy as np
import pytest

from planner.costs.shards.sharding_spec import ShardingSpec
from planner.ir.box import Interval, volume
from planner.ir.errors import UnsupportedModelError
from planner.ir.graph import Graph, Layer, TensorSpec
from planner.ir.layout import Layout
from planner.ir.plan import Placement
from planner.layers.boxes import as_tuples
from planner.layers.contraction import Contraction, contracted_dims
from planner.layers.division import LayerDivision, layer_division
from planner.layers.shards import shards_of
from planner.layers.sized import SizedLayer

SAMPLES = 4
IMAGE = ("sample", "channel", "height", "width")
SQUARE = {"kernel": (3, 3), "stride": (1, 1), "padding": (1, 1), "dilation": (1, 1)}


def graph_of(layer: Layer, given: TensorSpec, *parameters: TensorSpec) -> Graph:
    return Graph(SAMPLES, {"x": given}, (layer,), dict(zip(layer.parameters, parameters, strict=True)), layer.name)


def spec(*shape: int, dims: tuple[str, ...] = ()) -> TensorSpec:
    return TensorSpec(dims or tuple(f"dim{k}" for k in range(len(shape))), shape, "float64")


def conv(channels: int, filters: int, **attributes: object) -> Graph:
    output = spec(SAMPLES, filters, 6, 8, dims=IMAGE)
    layer = Layer("conv", "conv", ("x",), (output,), ("w", "b"), {**SQUARE, "groups": 1, **attributes})
    weight = spec(filters, channels // layer.attributes["groups"], 3, 3)
    return graph_of(layer, spec(SAMPLES, channels, 6, 8, dims=IMAGE), weight, spec(filters))


def transposed(channels: int, filters: int) -> Graph:
    output = spec(SAMPLES, filters, 6, 8, dims=IMAGE)
    layer = Layer("up", "transposed_conv", ("x",), (output,), ("w", "b"), {**SQUARE, "groups": 1})
    return graph_of(layer, spec(SAMPLES, channels, 6, 8, dims=IMAGE), spec(channels, filters, 3, 3), spec(filters))


def linear(channels: int, filters: int) -> Graph:
    dims = ("sample", "time", "feature")
    layer = Layer("fc", "linear", ("x",), (spec(SAMPLES, 5, filters, dims=dims),), ("w", "b"))
    return graph_of(layer, spec(SAMPLES, 5, channels, dims=dims), spec(filters, channels), spec(filters))


GRAPHS = {"conv": conv(10, 12), "transposed": transposed(10, 12), "linear": linear(10, 12)}
GRIDS = {
    "filters": {"f": (0, 1, 2)},
    "uneven": {"f": (0, 1, 3, 4)},
    "four": {"f": (0, 2, 5, 9, 12)},
    "samples and filters": {"sample": (0, 1, 4), "f": (0, 1, 2, 3, 4)},
    "filters and copies": {"f": (0, 1, 2), "replica": (0, 1, 2)},
}


QUARTERS = Layout({"channel": (0, 3, 6, 9, 12)})


def layout_of(graph: Graph, grid: str) -> Layout:
    name = "feature" if graph.layers[0].kind == "linear" else "channel"
    return Layout({name if dim == "f" else dim: points for dim, points in GRIDS[grid].items()})


def contraction(graph: Graph, layout: Layout, ways: int) -> tuple[LayerDivision, Contraction]:
    (layer,) = graph.layers
    division = layer_division(graph, layer, graph.values(), Placement(0, layout.cuts, ways), SAMPLES)
    assert division.contraction is not None
    return division, division.contraction


def parts_of(graph: Graph, layout: Layout) -> int:
    return len(layout.cuts["feature" if graph.layers[0].kind == "linear" else "channel"]) - 1


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)
def test_planners_look_at_every_number_of_ranks_that_divides_the_parts(graph: Graph, grid: str) -> None:
    (layer,) = graph.layers
    layout = layout_of(graph, grid)
    sized = SizedLayer.of(graph, layer, graph.values(), SAMPLES, False)
    (ways,) = shards_of(sized, (ShardingSpec.of(layout),)).contractions
    parts = parts_of(graph, layout)
    assert [each.ways for each in ways] == [c for c in range(2, parts + 1) if parts % c == 0]
    for each in ways:
        division, one = contraction(graph, layout, each.ways)
        assert division.needed[0] == as_tuples(one.needed) == as_tuples(each.needed)
        assert division.weights[0] == as_tuples(one.weight) == as_tuples(each.weight)
        moved = [(src, dst) for dst, src in np.argwhere(each.scattered.T).tolist()]
        assert one.pairs() == moved
        assert all(each.scattered[src, dst] == volume(division.own[dst]) for src, dst in moved)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)
def test_every_product_is_made_once_and_arrives_where_it_is_kept(graph: Graph, grid: str) -> None:
    """Counts, for each filter and input channel, the products in what each rank keeps."""
    layout = layout_of(graph, grid)
    for ways in range(2, parts_of(graph, layout) + 1):
        if parts_of(graph, layout) % ways:
            continue
        division, found = contraction(graph, layout, ways)
        dims = found.dims
        made = as_tuples(found.made)
        for rank, box in enumerate(division.own):
            products = np.zeros((12, 10), dtype=int)
            for src in np.flatnonzero(found.together[rank]).tolist():
                filters = made[src][dims.filters]
                channels = division.needed[0][src][dims.channels]
                assert src == rank or (src, rank) in found.pairs()
                products[filters.start : filters.stop, channels.start : channels.stop] += 1
            kept = box[dims.filters]
            assert (products[kept.start : kept.stop] == 1).all()


def test_weights_are_the_blocks_filters_and_the_own_channels_and_biases_the_own_filters() -> None:
    weights, biases = contraction(GRAPHS["conv"], QUARTERS, 2)[0].weights
    kernel = (Interval(0, 3), Interval(0, 3))
    assert (weights[1], biases[1]) == ((Interval(0, 6), Interval(5, 10), *kernel), (Interval(3, 6),))
    assert (weights[2], biases[2]) == ((Interval(6, 12), Interval(0, 5), *kernel), (Interval(6, 9),))
    weights, biases = contraction(GRAPHS["transposed"], QUARTERS, 2)[0].weights
    assert (weights[1], biases[1]) == ((Interval(5, 10), Interval(0, 6), *kernel), (Interval(3, 6),))


def test_a_convolution_whose_weight_is_computed_contracts_nothing_by_its_bias() -> None:
    given = spec(SAMPLES, 10, 6, 8, dims=IMAGE)
    output = spec(SAMPLES, 12, 6, 8, dims=IMAGE)
    layer = Layer("conv", "conv", ("x", "standardised"), (output,), ("b",), {**SQUARE, "groups": 1})
    assert contracted_dims(layer, (given, spec(12, 10, 3, 3)), (spec(12),)) is None


def test_weights_do_not_depend_on_the_number_of_samples() -> None:
    graph = GRAPHS["conv"]
    layout = Layout({"sample": (0, 1, 9), "channel": (0, 1, 2)})
    none_for_the_first, _ = contraction(graph, layout, 2)
    assert volume(none_for_the_first.own[0]) == 0
    for boxes in none_for_the_first.weights:
        assert boxes[:2] == boxes[2:]
    assert none_for_the_first.weights[0][0][0] == Interval(0, 12)


@pytest.mark.parametrize(
    ("graph", "ways", "why"),
    [
        (conv(10, 12), 3, "3 ranks would share 10 channels, and its parts are 4 along channel"),
        (conv(2, 12), 4, "4 ranks would share 2 channels"),
        (conv(10, 20, groups=2), 2, "of one group"),
        (conv(10, 1), 2, "2 ranks would share 10 channels"),
    ],
)
def test_what_cannot_be_shared_is_refused(graph: Graph, ways: int, why: str) -> None:
    with pytest.raises(UnsupportedModelError, match="layer conv") as caught:
        contraction(graph, Layout({"channel": (0, 1, 2, 3, 4)}), ways)
    assert why in caught.value.details[0]
