from __future__ import annotations

import pytest

from benchmarks.chains import chain_graph
from planner.ir.graph import BYTES_PER_ELEMENT, Graph, Layer, TensorSpec, producer, value_name

STEPS = TensorSpec(("sample", "time"), (4, 3), "float32")


def two_outputs() -> Graph:
    layers = (
        Layer("a", "lstm", ("x",), (STEPS, STEPS), ("shared", "w")),
        Layer("b", "pointwise", ("a",), (STEPS,), ("shared",)),
        Layer("c", "pointwise", ("a:1", "b", "x"), (STEPS,)),
    )
    parameters = {"shared": TensorSpec(("dim0",), (10,), "float32"), "w": TensorSpec(("dim0",), (5,), "float64")}
    return Graph(4, {"x": STEPS}, layers, parameters, "c")


def test_bytes_count_occupied_sites_of_the_dtype() -> None:
    assert STEPS.num_bytes == 48
    assert TensorSpec(("x", "y"), (10, 10), "float16", occupancy=0.25).num_bytes == 50
    assert TensorSpec((), (), "int64").num_bytes == 8


@pytest.mark.parametrize("dtype", BYTES_PER_ELEMENT)
def test_gradients_flow_through_floats_alone(dtype: str) -> None:
    assert TensorSpec((), (), dtype).is_float == ("float" in dtype or "complex" in dtype)


def test_another_number_of_samples_scales_the_sample_dim_alone() -> None:
    tokens = TensorSpec(("time", "sample"), (4, 12), "float32")  # 3 rows for each of 4 samples
    assert tokens.at(2, captured=4).shape == (4, 6)
    assert tokens.at(4, captured=4) is tokens
    constant = TensorSpec(("time",), (4,), "float32")
    assert constant.at(2, captured=4) is constant
    assert not constant.has_samples


def test_values_are_inputs_and_every_output() -> None:
    assert list(two_outputs().values()) == ["x", "a", "a:1", "b", "c"]
    assert value_name("a", 0) == "a"
    assert value_name("a", 1) == "a:1"
    assert producer("a:1") == producer("a") == "a"


def test_tied_parameters_count_once() -> None:
    graph = two_outputs()
    assert graph.parameter_bytes() == 80
    assert graph.parameter_bytes(frozenset("b")) == 40
    assert graph.parameter_bytes(frozenset("c")) == 0


def test_a_cut_names_what_crosses_it_in_order_of_making() -> None:
    graph = two_outputs()
    assert [graph.cut(position) for position in range(4)] == [(), ("a", "a:1"), ("a:1", "b"), ()]
    assert chain_graph(4, skips=((0, 3),)).cut(3) == ("l0", "l2")
