"""The registry of layer kinds, which of them mix samples, views of reshapes, and kinds over sites."""

from __future__ import annotations

import inspect
import random
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.chains import chain_graph
from planner.ir.box import Box, Interval, whole
from planner.ir.errors import UnknownNameError
from planner.ir.graph import INTERLEAVES_SAMPLES, MIXES_SAMPLES, Attribute, Graph, Layer, TensorSpec
from planner.layers import Kind, check_samples_apart, has_halo, kind, kinds, over_sites, prepared_inputs
from planner.layers.data_movement import copied_at
from tests.planner.sparse_networks import SparseNetwork, classifier, segmenter


def test_the_registry_has_every_class_of_every_family() -> None:
    home = Path(inspect.getfile(Kind)).parent
    texts = [path.read_text("utf-8") for path in home.glob("*.py")]
    named = {name for text in texts for name in re.findall(r'\(Kind, name="(\w+)"', text)}
    assert list(kinds()) == sorted(named)
    with pytest.raises(UnknownNameError, match="no layer kind 'convolution'") as caught:
        kind("convolution")
    assert "conv" in caught.value.details[0]
    with pytest.raises(ValueError, match="there are two layer kinds 'conv'"):
        type("Conv", (Kind,), {}, name="conv", dims="space")
    with pytest.raises(TypeError, match="dims"):
        type("Shift", (Kind,), {}, name="shift")


@pytest.mark.every_case
@pytest.mark.parametrize("name", kinds())
def test_a_kind_explains_itself_and_says_whether_it_has_a_halo_that_no_box_tells(name: str) -> None:
    assert len((inspect.getdoc(kind(name)) or "").split()) > 4
    assert kind(name).REDUCTION in {"", "sum", "statistics"}
    assert has_halo(name) == name.startswith("sparse")


def layer(kind: str, names: str, shape: tuple[int, ...], **attributes: Attribute) -> Layer:
    return Layer(kind, kind, ("x",), (TensorSpec(tuple(names.split()), shape, "float32"),), attributes=attributes)


ROWS = TensorSpec(("sample", "feature"), (4, 3), "float32")
SITES = TensorSpec(("sites", "channel"), (40, 3), "float32")

X = "sample feature"
PLACES = "sites channel"


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("spec", "found", "mixes"),
    [
        (ROWS, layer("opaque", "feature", (3,)), True),
        (ROWS, layer("opaque", "sample sample", (4, 4)), True),
        (ROWS, layer("concat", X, (8, 3), dim=0), True),
        (ROWS, layer("softmax", X, (4, 3), dim=0), True),
        (ROWS, layer("layer_norm", X, (4, 3), dims=(0, 1)), True),
        (
            ROWS,
            layer("loss", "", (), **{MIXES_SAMPLES: True}),
            True,
        ),  # as the capture found, even if it is the loss
        (ROWS, Layer("two", "opaque", ("x",), (ROWS, TensorSpec(("feature",), (3,), "float32"))), True),
        (ROWS, layer("concat", X, (4, 6), dim=1), False),
        (ROWS, layer("softmax", X, (4, 3), dim=1), False),
        (ROWS, layer("layer_norm", X, (4, 3), dims=(1,)), False),
        (ROWS, layer("batch_norm", X, (4, 3)), False),
        (ROWS, layer("reshape", "sample", (12,)), False),
        (ROWS, layer("loss", "", ()), False),
        (ROWS, Layer("range", "opaque", (), (TensorSpec(("time",), (3,), "int64"),)), False),  # has none to mix
        (SITES, layer("opaque", PLACES, (40, 3), mixes_samples=True), True),
        (SITES, layer("reshape", PLACES, (40, 3)), True),
        (SITES, layer("softmax", PLACES, (40, 3), dim=0), True),
        (SITES, layer("concat", PLACES, (40, 3), dim=0), True),
        (SITES, layer("reduce", "channel", (3,), dims=(0,)), True),
        (SITES, layer("pointwise", PLACES, (40, 3)), False),
        (SITES, layer("opaque", PLACES, (40, 3)), False),
        (SITES, layer("reshape", PLACES, (40, 3), kept=(0, 1)), False),
        (SITES, layer("softmax", PLACES, (40, 3), dim=1), False),
        (SITES, layer("concat", PLACES, (40, 3), dim=1), False),
    ],
)
def test_a_layer_that_mixes_samples_or_rows_of_sites_is_named(spec: TensorSpec, found: Layer, mixes: bool) -> None:
    assert check_samples_apart(Graph(4, {"x": spec}, (found,), {}, found.name)) == (found.name,) * mixes


def test_what_interleaves_samples_is_named_with_its_readers_and_whole_networks_keep_them_apart() -> None:
    turned = layer("reshape", X, (4, 3), **{INTERLEAVES_SAMPLES: True})
    reader = replace(layer("pointwise", X, (4, 3)), name="reader", inputs=("reshape",))
    after = replace(reader, name="after", inputs=("reader",))
    graph = Graph(4, {"x": ROWS}, (turned, reader, after), {}, "after")
    assert check_samples_apart(graph) == ("reshape", "reader")
    assert check_samples_apart(chain_graph(3)) == check_samples_apart(classifier()) == ()
    assert check_samples_apart(segmenter()) == ()


def read(graph: Graph, name: str, *box: tuple[int, int]) -> tuple[Box, ...]:
    values = graph.values()
    made = graph.by_name()[name]
    specs = tuple(values[name] for name in made.inputs)
    return kind(made.kind).input_boxes(made, specs, tuple(Interval(*ends) for ends in box))


def test_a_strided_convolution_reads_its_own_rows_of_the_finer_level_and_of_both_maps() -> None:
    graph = classifier(samples=4, sites=1000)
    strided = next(layer for layer in graph.layers if layer.outputs[0].shape == (1000, 16))
    x, neighbours, reverse = read(graph, strided.name, (250, 500), (0, 16))
    assert x == (Interval(1000, 2000), Interval(0, 8))
    assert neighbours == (Interval(0, 8), Interval(250, 500))
    assert reverse == (Interval(0, 8), Interval(1000, 2000))
    weights = kind("sparse_conv").weight_boxes(strided, (TensorSpec(("k", "i", "o"), (8, 8, 16), "float32"),), ())
    assert weights == (whole((8, 8, 16)),)


def test_a_segment_divides_its_rows_and_what_is_expanded_is_read_whole() -> None:
    graph = classifier(samples=4, sites=1000)
    segment = next(layer for layer in graph.layers if layer.kind == "segment")
    specs = tuple(graph.values()[name] for name in segment.inputs)
    assert (kind("segment").work(segment, specs), kind("segment").REDUCTION) == (specs[0], "sum")
    x, starts, lengths = read(graph, segment.name, (100, 300), (0, 16))
    assert x == (Interval(100, 300), Interval(0, 16))
    assert starts == lengths == (Interval(0, 4),)
    net = SparseNetwork(2, 10)
    expanded = net.expand(net.segment("features"))
    assert read(net.graph(expanded), expanded, (0, 5), (0, 4))[0] == (Interval(0, 2), Interval(0, 4))


def test_operations_over_sites_are_counted_by_pairs() -> None:
    graph = classifier(samples=4, sites=1000, channels=4)
    first = graph.layers[0]
    values = graph.values()
    specs = tuple(values[name] for name in first.inputs)
    assert kind("sparse_conv").forward_flops(first, specs) == 2 * 24_000 * 4 * 8
    assert kind("sparse_pool").forward_flops(replace(first, kind="sparse_pool"), specs) == 24_000 * 4


def test_normalisations_and_losses_of_sites_are_divided_by_rows() -> None:
    graph = segmenter(samples=2, sites=50)
    norm = next(layer for layer in graph.layers if layer.kind == "batch_norm")
    box = (Interval(20, 60), Interval(0, 8))
    assert read(graph, norm.name, (20, 60), (0, 8)) == (box,)
    weight = TensorSpec(("dim",), (8,), "float32")
    assert kind("batch_norm").weight_boxes(norm, (weight,), box) == ((Interval(0, 8),),)
    assert read(graph, "loss", (20, 60), (0, 5))[1] == (Interval(20, 60),)


def test_layers_over_sites_are_found_and_maps_and_starts_are_prepared() -> None:
    graph = classifier()
    assert {layer.kind for layer in graph.layers if layer.name not in over_sites(graph)} == {"linear", "loss"}
    assert {*graph.inputs} - {*prepared_inputs(graph)} == {"lengths", "features", "target"}
    assert prepared_inputs(segmenter()) == ("neighbours_0_0", "reverse_0_0")  # but not the targets of sites
    assert (over_sites(chain_graph(2)), prepared_inputs(chain_graph(3))) == (frozenset(), ())


Shape = tuple[int, ...]


def reshape(kept: Shape, made: Shape) -> Layer:
    spec = TensorSpec(tuple(f"dim{dim}" for dim in range(len(made))), made, "float32")
    return Layer("view", "reshape", ("x",), (spec,), attributes={"kept": kept})


def test_a_permutation_alone_is_a_view_and_what_it_splits_is_copied() -> None:
    """[tokens, features] -> [tokens, heads, size] -> [heads, tokens, size], as attention has its queries."""
    split = reshape((0, -1, -1), (6, 4, 8))
    swapped = reshape((1, 0, 2), (4, 6, 8))
    assert copied_at([split], [(6, 32)]) is None
    assert copied_at([swapped], [(6, 4, 8)]) is None
    assert copied_at([split, swapped], [(6, 32), (6, 4, 8)]) == 0
    assert copied_at([], []) is None


@pytest.mark.parametrize("seed", range(40))
def test_what_numpy_copies_is_copied(seed: int) -> None:
    draw = random.Random(seed)
    shapes: list[Shape] = [tuple(draw.choice([1, 2, 3, 4]) for _ in range(draw.randint(1, 4)))]
    chain = []
    for _ in range(draw.randint(1, 4)):
        data = shapes[-1]
        if draw.random() < 0.5:
            kept = tuple(draw.sample(range(len(data)), len(data)))
            made = tuple(data[dim] for dim in kept)
        else:
            made = random_split(draw, int(np.prod(data)))
            kept = (-1,) * len(made)
        chain.append(reshape(kept, made))
        shapes.append(made)
    whole = gradient = np.zeros(shapes[-1])
    expected = None
    for place in reversed(range(len(chain))):
        kept = tuple(chain[place].attributes["kept"])  # type: ignore[arg-type]
        if sorted(kept) == list(range(len(shapes[place]))):
            gradient = gradient.transpose(np.argsort(kept))
        else:
            gradient = gradient.reshape(shapes[place])
        if not np.shares_memory(whole, gradient):
            expected = place
            break
    assert copied_at(chain, shapes[:-1]) == expected


def random_split(draw: random.Random, total: int) -> Shape:
    found = []
    for _ in range(draw.randint(0, 3)):
        found.append(draw.choice([each for each in range(1, total + 1) if total % each == 0]))
        total //= found[-1]
    return (*found, total)
