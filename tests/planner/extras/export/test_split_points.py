from __future__ import annotations

import pytest

from planner.extras.export.torch_pipelining import BEGINNING, END, SplitPoint, is_loss, split_points
from planner.ir.graph import Graph, Layer, TensorSpec

SPEC = TensorSpec(("sample", "feature"), (2, 4), "float32")


def graph(*layers: str) -> Graph:
    """Layers in a row, each ``name operator`` or ``name operator parameter``; a loss follows."""
    found, value = [], "inputs"
    for text in (*layers, "loss cross_entropy_loss"):
        name, operator, *parameters = text.split()
        attributes = {"op": f"aten.{operator}.default"}
        found.append(Layer(name, "pointwise", (value,), (SPEC,), tuple(parameters), attributes))
        value = name
    return Graph(2, {"inputs": SPEC}, tuple(found), {}, "loss")


def cut(model: Graph, *after: str) -> list[tuple[str, str]]:
    """(module, point) of stages that end with the layers ``after``."""
    stage, stage_of = 0, {}
    for layer in model.layers:
        stage_of[layer.name] = stage
        stage += layer.name in after
    return [(point.module, point.point) for point in split_points(model, stage_of)]


BLOCK = graph(
    "block.conv conv2d block.conv.weight",
    "block.bn batch_norm block.bn.weight",
    "block.relu relu",
    "block.add add",
    "block.relu_2 relu",
    "pool max_pool2d",
    "flatten flatten",
    "features.1 relu",
    "fc linear fc.weight fc.bias",
)


@pytest.mark.parametrize(
    ("after", "module", "point"),
    [
        ("block.conv", "block.bn", BEGINNING),  # a layer with parameters is a call of its module
        ("block.bn", "block.bn", END),  # relu may be a part of block or an operator that it calls
        ("block.relu", "", BEGINNING),
        ("block.add", "", BEGINNING),
        ("block.relu_2", "pool", BEGINNING),  # it is not called like its operator
        ("pool", "pool", END),
        ("flatten", "features.1", BEGINNING),
        ("features.1", "fc", BEGINNING),
    ],
)
def test_a_cut_is_told_by_a_module_that_certainly_begins_or_ends_there(after: str, module: str, point: str) -> None:
    assert cut(BLOCK, after) == [(module, point)]


def test_a_module_around_what_it_computes_itself_ends_there() -> None:
    model = graph("a.conv conv2d a.conv.weight", "a.add add", "b.add add", "b.conv conv2d b.conv.weight")
    assert cut(model, "a.add") == [("b", BEGINNING)]
    model = graph("a.conv conv2d a.conv.weight", "a.add add", "flatten flatten", "fc linear fc.weight")
    assert cut(model, "a.add") == [("a", END)]


def test_a_module_that_is_called_twice_tells_nothing() -> None:
    model = graph("sin sin", "act relu", "act_2 relu", "fc linear fc.weight", "cos cos", "fc_2 linear fc.weight")
    assert cut(model, "sin") == [("", BEGINNING)]
    assert cut(model, "act") == [("", BEGINNING)]
    assert cut(model, "cos") == [("", BEGINNING)]


def test_weights_of_another_module_make_no_call_of_it() -> None:
    model = graph("token embedding token.weight", "sin sin", "linear linear token.weight", "cos cos")
    assert cut(model, "sin") == [("", BEGINNING)]


def test_a_module_is_named_once_even_if_it_is_a_stage_of_its_own() -> None:
    model = graph("a linear a.weight", "b linear b.weight", "sin sin", "c linear c.weight")
    assert cut(model, "a", "b") == [("b", BEGINNING), ("", BEGINNING)]


def test_stages_that_are_no_runs_of_layers_begin_nowhere() -> None:
    model = graph("a linear a.weight", "b linear b.weight", "c linear c.weight")
    points = split_points(model, {"a": 0, "b": 1, "c": 0, "loss": 1})
    assert {point.module for point in points} == {""}
    assert points[0] == SplitPoint(1, "", BEGINNING, "a", "b")


def test_what_the_loss_computes_is_no_part_of_the_model() -> None:
    assert [is_loss(BLOCK, name) for name in ("loss", "loss.flatten", "lossy", "fc")] == [True, True, False, False]
