from __future__ import annotations

import pytest

from benchmarks.chains import chain_graph
from planner.ir.graph import INTERLEAVES_SAMPLES, MIXES_SAMPLES, Attribute, Graph, Layer, TensorSpec
from planner.layers import check_samples_apart

X = TensorSpec(("sample", "feature"), (4, 3), "float32")


def graph_of(*layers: Layer) -> Graph:
    return Graph(4, {"x": X}, layers, {}, layers[-1].name)


def layer(kind: str, names: tuple[str, ...], shape: tuple[int, ...], **attributes: Attribute) -> Layer:
    return Layer(kind, kind, ("x",), (TensorSpec(names, shape, "float32"),), attributes=attributes)


def test_a_network_whose_loss_alone_joins_samples_is_fine() -> None:
    assert check_samples_apart(chain_graph(3)) == ()


@pytest.mark.parametrize(
    "mixing",
    [
        layer("opaque", ("feature",), (3,)),
        layer("opaque", ("sample", "sample"), (4, 4)),
        layer("concat", ("sample", "feature"), (8, 3), dim=0),
        layer("softmax", ("sample", "feature"), (4, 3), dim=0),
        layer("layer_norm", ("sample", "feature"), (4, 3), dims=(0, 1)),
    ],
    ids=lambda layer: f"{layer.kind} {layer.outputs[0].dims}",
)
def test_a_layer_that_mixes_samples_is_named(mixing: Layer) -> None:
    assert check_samples_apart(graph_of(mixing)) == (mixing.name,)


@pytest.mark.parametrize(
    "apart",
    [
        layer("concat", ("sample", "feature"), (4, 6), dim=1),
        layer("softmax", ("sample", "feature"), (4, 3), dim=1),
        layer("layer_norm", ("sample", "feature"), (4, 3), dims=(1,)),
        layer("batch_norm", ("sample", "feature"), (4, 3)),
        layer("reshape", ("sample",), (12,)),
    ],
    ids=lambda layer: layer.kind,
)
def test_a_layer_that_keeps_them_apart_is_not(apart: Layer) -> None:
    assert check_samples_apart(graph_of(apart)) == ()


def test_one_of_several_outputs_without_samples_is_enough() -> None:
    total = TensorSpec(("feature",), (3,), "float32")
    assert check_samples_apart(graph_of(Layer("two", "opaque", ("x",), (X, total)))) == ("two",)


def test_a_constant_has_no_samples_to_mix() -> None:
    constant = Layer("range", "opaque", (), (TensorSpec(("time",), (3,), "int64"),))
    assert check_samples_apart(graph_of(constant)) == ()


def test_what_the_capture_found_to_mix_is_named_even_if_it_is_the_loss() -> None:
    weighted = Layer("loss", "loss", ("x",), (TensorSpec((), (), "float32"),), attributes={MIXES_SAMPLES: True})
    assert check_samples_apart(graph_of(weighted)) == ("loss",)


def test_what_interleaves_samples_is_named_with_its_readers() -> None:
    turned = Layer("turned", "reshape", ("x",), (X,), attributes={INTERLEAVES_SAMPLES: True})
    reader = Layer("reader", "pointwise", ("turned",), (X,))
    after = Layer("after", "pointwise", ("reader",), (X,))
    assert check_samples_apart(graph_of(turned, reader, after)) == ("turned", "reader")
