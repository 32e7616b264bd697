from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.chains import chain_graph
from planner.ir.box import Box, Interval, whole
from planner.ir.graph import Graph, Layer, TensorSpec
from planner.ir.layout import Layout
from planner.ir.plan import Decision, Placement
from planner.layers import check_samples_apart, has_halo, kind, kinds, over_sites, prepared_inputs
from planner.layers.boundary import Boundaries
from planner.layers.division import divides
from tests.planner.factories import chain_decision
from tests.planner.sparse_networks import SparseNetwork, classifier, segmenter, sparse_profile


def specs(graph: Graph, layer: Layer) -> tuple[TensorSpec, ...]:
    values = graph.values()
    return tuple(values[name] for name in layer.inputs)


def read(graph: Graph, name: str, box: Box) -> tuple[Box, ...]:
    layer = graph.by_name()[name]
    return kind(layer.kind).input_boxes(layer, specs(graph, layer), box)


def test_a_strided_convolution_reads_its_own_rows_of_the_finer_level_and_of_both_maps() -> None:
    graph = classifier(samples=4, sites=1000)
    strided = next(layer for layer in graph.layers if layer.outputs[0].shape == (1000, 16))
    x, neighbours, reverse = read(graph, strided.name, (Interval(250, 500), Interval(0, 16)))
    assert x == (Interval(1000, 2000), Interval(0, 8))
    assert neighbours == (Interval(0, 8), Interval(250, 500))
    assert reverse == (Interval(0, 8), Interval(1000, 2000))
    weights = kind("sparse_conv").weight_boxes(strided, (TensorSpec(("k", "i", "o"), (8, 8, 16), "float32"),), ())
    assert weights == (whole((8, 8, 16)),)


@pytest.mark.parametrize("name", ["sparse_conv", "sparse_pool", "segment", "segment_expand"])
def test_kinds_over_sites_are_registered_and_those_with_neighbours_say_so(name: str) -> None:
    assert name in kinds()
    assert has_halo(name) == name.startswith("sparse")
    assert (kind(name).REDUCTION == "sum") == (name == "segment")


def test_no_dense_kind_has_a_halo_that_boxes_do_not_tell() -> None:
    assert not any(has_halo(name) for name in kinds() if not name.startswith("sparse"))


def test_a_segment_divides_its_rows_and_reads_where_all_samples_start() -> None:
    graph = classifier(samples=4, sites=1000)
    layer = next(layer for layer in graph.layers if layer.kind == "segment")
    assert kind("segment").work(layer, specs(graph, layer)) == specs(graph, layer)[0]
    x, starts, lengths = read(graph, layer.name, (Interval(100, 300), Interval(0, 16)))
    assert x == (Interval(100, 300), Interval(0, 16))
    assert starts == lengths == (Interval(0, 4),)


def test_what_is_expanded_is_read_whole() -> None:
    net = SparseNetwork(2, 10)
    expanded = net.expand(net.segment("features"))
    graph = net.graph(expanded)
    assert read(graph, expanded, (Interval(0, 5), Interval(0, 4)))[0] == (Interval(0, 2), Interval(0, 4))


def test_operations_are_counted_by_pairs() -> None:
    graph = classifier(samples=4, sites=1000, channels=4)
    first = graph.layers[0]
    assert kind("sparse_conv").forward_flops(first, specs(graph, first)) == 2 * 24_000 * 4 * 8
    pooled = replace(first, kind="sparse_pool")
    assert kind("sparse_pool").forward_flops(pooled, specs(graph, first)) == 24_000 * 4


def test_normalisations_and_losses_of_sites_are_divided_by_rows() -> None:
    graph = segmenter(samples=2, sites=50)
    norm = next(layer for layer in graph.layers if layer.kind == "batch_norm")
    box = (Interval(20, 60), Interval(0, 8))
    assert read(graph, norm.name, box) == (box,)
    assert kind("batch_norm").weight_boxes(norm, specs(graph, norm), box) == ((Interval(0, 8),),)
    assert read(graph, "loss", (Interval(20, 60), Interval(0, 5)))[1] == (Interval(20, 60),)


def test_layers_over_sites_keep_samples_apart() -> None:
    assert check_samples_apart(classifier()) == check_samples_apart(segmenter()) == ()


@pytest.mark.parametrize(
    ("name", "attributes"),
    [
        ("opaque", {"mixes_samples": True}),
        ("reshape", {}),
        ("softmax", {"dim": 0}),
        ("concat", {"dim": 0}),
        ("reduce", {"dims": (0,)}),
    ],
)
def test_what_joins_rows_of_different_sites_is_named(name: str, attributes: dict[str, int]) -> None:
    x = TensorSpec(("sites", "channel"), (40, 3), "float32")
    out = TensorSpec(("channel",), (3,), "float32") if name == "reduce" else x
    layer = Layer("joins", name, ("x",), (out,), attributes=attributes)
    assert check_samples_apart(Graph(2, {"x": x}, (layer,), {}, "joins")) == ("joins",)


@pytest.mark.parametrize(
    ("name", "attributes"),
    [("pointwise", {}), ("opaque", {}), ("reshape", {"kept": (0, 1)}), ("softmax", {"dim": 1}), ("concat", {"dim": 1})],
)
def test_what_treats_each_site_by_itself_is_not(name: str, attributes: dict[str, int]) -> None:
    x = TensorSpec(("sites", "channel"), (40, 3), "float32")
    layer = Layer("apart", name, ("x",), (x,), attributes=attributes)
    assert check_samples_apart(Graph(2, {"x": x}, (layer,), {}, "apart")) == ()


def test_maps_and_starts_are_prepared_and_features_and_targets_are_not() -> None:
    graph = classifier()
    found = prepared_inputs(graph)
    assert {name for name in graph.inputs if name not in found} == {"lengths", "features", "target"}
    assert prepared_inputs(segmenter()) == ("neighbours_0_0", "reverse_0_0")  # but not the targets of sites
    assert prepared_inputs(chain_graph(3)) == ()


def test_layers_over_sites_are_found() -> None:
    graph = classifier()
    assert {layer.kind for layer in graph.layers if layer.name not in over_sites(graph)} == {"linear", "loss"}
    assert over_sites(chain_graph(2)) == frozenset()


def boundaries(layouts: tuple[Layout, Layout], cut: int = 2) -> Boundaries:
    graph = segmenter(samples=2, sites=500)
    stage_of = {layer.name: int(index >= cut) for index, layer in enumerate(graph.layers)}
    return Boundaries.of(graph, stage_of, layouts, ((0, 1), (2, 3)))


def test_at_a_boundary_every_rank_needs_its_own_rows() -> None:
    found = boundaries((Layout({"sample": (0, 1, 4)}), Layout({"sample": (0, 1, 2)})))
    (edge,) = found.edges()
    (value,) = edge.values
    channels = Interval(0, 8)
    assert found.owned(value, 2) == {0: (Interval(0, 250), channels), 1: (Interval(250, 1000), channels)}
    assert found.needed(value, 1, 2) == {2: (Interval(0, 500), channels), 3: (Interval(500, 1000), channels)}
    sizes = {(m.src, m.dst): m.forward_bytes for m in found.messages(edge, 2)}
    assert sizes == {(0, 2): 250 * 32, (1, 2): 250 * 32, (1, 3): 500 * 32}


def test_explicit_cut_points_of_a_level_are_heeded_on_both_sides() -> None:
    cuts = {"sample": (0, 1, 2), "sites": (0, 300, 1000)}
    found = boundaries((Layout(cuts), Layout({**cuts, "sites": (0, 800, 1000)})))
    (value,) = found.edges()[0].values
    assert [len(box[0]) for box in found.owned(value, 2).values()] == [300, 700]
    assert [len(box[0]) for box in found.needed(value, 1, 2).values()] == [800, 200]


def test_rows_of_a_rank_whose_part_of_the_reader_is_empty_are_still_its_own() -> None:
    """A coarser level may give a rank nothing, but others fetch its rows of the finer one from it."""
    net = SparseNetwork(2, 4)
    first = net.conv("features", 4)
    graph = net.graph(net.conv(first, 4, stride=2))
    cuts = {"sample": (0, 1, 2), "sites": (0, 4, 8), "sites_1": (0, 2, 2)}
    stage_of = {layer.name: int(index > 0) for index, layer in enumerate(graph.layers)}
    found = Boundaries.of(graph, stage_of, (Layout(cuts), Layout(cuts)), ((0, 1), (2, 3)))
    assert [len(box[0]) for box in found.needed(first, 1, 2).values()] == [4, 4]


def test_stages_that_read_maps_prepare_them() -> None:
    found = boundaries((Layout(), Layout()))
    assert found.prepares() == (0, 1)
    assert boundaries((Layout(), Layout()), cut=5).prepares() == (0,)


def test_a_stage_over_sites_that_is_cut_by_samples_shares_its_batch() -> None:
    profile = sparse_profile(classifier())
    decision = chain_decision(profile, micro_batches=(4,), ranks=((0, 1),))
    assert not divides(decision, 0, profile.graph)
    assert divides(_channels(decision, profile.graph.layers[0].name), 0, profile.graph)


def _channels(decision: Decision, name: str) -> Decision:
    placed = {**decision.layers, name: Placement(0, {"channel": (0, 1, 2)})}
    return replace(decision, layers=placed)
