"""Which dims a layer may be cut along follows from its access relation."""

from __future__ import annotations

import pytest

from planner.ir.graph import Attribute, Graph, Layer, TensorSpec
from planner.layers.sized import SizedLayer

IMAGE = ("sample", "channel", "height", "width")
ROWS = ("sample", "time", "feature")
CONV: dict[str, Attribute] = {"kernel": (3, 3), "stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}
POOL: dict[str, Attribute] = {"kernel": (2, 2), "stride": (2, 2), "padding": (0, 0), "dilation": (1, 1)}
HEADS = ("sample", "head", "time", "feature")


def sized(
    kind: str,
    inputs: list[tuple[tuple[str, ...], tuple[int, ...]]],
    output: tuple[tuple[str, ...], tuple[int, ...]],
    weights: tuple[tuple[int, ...], ...] = (),
    attributes: dict[str, Attribute] | None = None,
    mixes: bool = False,
) -> SizedLayer:
    specs = {f"x{k}": TensorSpec(dims, shape, "float32") for k, (dims, shape) in enumerate(inputs)}
    parameters = {f"w{k}": TensorSpec(("dim",) * len(shape), shape, "float32") for k, shape in enumerate(weights)}
    out = TensorSpec(*output, "float32")
    layer = Layer("l", kind, tuple(specs), (out,), tuple(parameters), attributes or {})
    graph = Graph(4, specs, (layer,), parameters, "l")
    return SizedLayer.of(graph, layer, graph.values(), 4, mixes)


@pytest.mark.parametrize(
    ("layer", "dims"),
    [
        (sized("conv", [(IMAGE, (4, 8, 6, 6))], (IMAGE, (4, 16, 6, 6)), ((16, 8, 3, 3),), CONV), set(IMAGE)),
        (sized("pool", [(IMAGE, (4, 8, 6, 6))], (IMAGE, (4, 8, 3, 3)), (), POOL), set(IMAGE)),
        (sized("pointwise", [(IMAGE, (4, 8, 6, 6))], (IMAGE, (4, 8, 6, 6))), set(IMAGE)),
        (sized("batch_norm", [(IMAGE, (4, 8, 6, 6))], (IMAGE, (4, 8, 6, 6)), ((8,), (8,))), set(IMAGE)),
        (sized("linear", [(ROWS, (4, 5, 8))], (ROWS, (4, 5, 16)), ((16, 8),)), set(ROWS)),
        (sized("softmax", [(ROWS, (4, 5, 8))], (ROWS, (4, 5, 8)), (), {"dim": 2}), {"sample", "time"}),
        (sized("layer_norm", [(ROWS, (4, 5, 8))], (ROWS, (4, 5, 8)), ((8,),), {"dims": (2,)}), {"sample", "time"}),
        (sized("reshape", [(IMAGE, (4, 8, 6, 6))], (("sample", "feature"), (4, 288))), {"sample"}),
        (sized("opaque", [(ROWS, (4, 5, 8))], (ROWS, (4, 5, 8))), {"sample"}),
        (sized("loss", [(ROWS, (4, 5, 8)), (("sample",), (4,))], ((), ())), {"sample"}),
        (sized("attention", [(HEADS, (4, 2, 6, 8))] * 3, (HEADS, (4, 2, 6, 8))), {"sample", "head"}),
        (sized("concat", [(IMAGE, (4, 2, 6, 6))] * 2, (IMAGE, (4, 4, 6, 6)), (), {"dim": 1}), set(IMAGE)),
        (sized("embedding", [(("sample", "time"), (4, 5))], (ROWS, (4, 5, 8)), ((100, 8),)), set(ROWS)),
    ],
    ids=lambda value: value.layer.kind if isinstance(value, SizedLayer) else "",
)
def test_the_dims_of_each_kind(layer: SizedLayer, dims: set[str]) -> None:
    assert layer.divisible == dims


def test_a_layer_that_mixes_samples_is_not_cut_by_samples() -> None:
    layer = sized("pointwise", [(ROWS, (4, 5, 8))], (ROWS, (4, 5, 8)), mixes=True)
    assert layer.divisible == {"time", "feature"}


def test_a_dim_of_extent_one_is_not_cut() -> None:
    layer = sized("pointwise", [(IMAGE, (4, 8, 1, 6))], (IMAGE, (4, 8, 1, 6)))
    assert layer.divisible == {"sample", "channel", "width"}
