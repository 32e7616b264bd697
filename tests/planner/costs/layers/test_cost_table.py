from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.chains import chain_profile
from planner.costs.layers.cost_table import CostTables, runs_of, span
from planner.costs.layers.interpolation import layer_cost
from planner.ir.errors import MissingMeasurementError


def test_a_stretch_of_layers_costs_the_sum_of_its_layers() -> None:
    profile = chain_profile(5, forward_s=(1e-3, 2e-3, 3e-3, 4e-3, 5e-3))
    table = CostTables(profile).at("kind-1", 3)
    expected = [
        layer_cost([m for m in profile.measurements["kind-1"] if m.layer == f"l{i}"], 3).values for i in range(5)
    ]
    assert span(table.forward_s, ((1, 4),)) == pytest.approx(sum(values[0] for values in expected[1:4]))
    assert span(table.saved_bytes, ((0, 1), (3, 5))) == pytest.approx(sum(expected[i][4] for i in (0, 3, 4)))


def test_layers_are_grouped_in_runs() -> None:
    assert runs_of([4, 0, 1, 2, 7]) == ((0, 3), (4, 5), (7, 8))
    assert runs_of([]) == ()


def test_a_kind_of_device_without_measurements_is_named() -> None:
    with pytest.raises(MissingMeasurementError, match="5 of 5 layers were not measured on toaster"):
        CostTables(chain_profile(4)).at("toaster", 1)


def test_parameters_without_a_cost_are_refused() -> None:
    profile = replace(chain_profile(3), parameters={})
    with pytest.raises(MissingMeasurementError, match="parameters of l0"):
        CostTables(profile).parameters("kind-1")


def test_a_tied_parameter_counts_once() -> None:
    profile = chain_profile(3, parameter_bytes=400)
    layers = tuple(replace(layer, parameters=("l0.weight",)) for layer in profile.graph.layers[:3])
    graph = replace(profile.graph, layers=(*layers, profile.graph.layers[3]))
    assert CostTables(replace(profile, graph=graph)).graph.parameter_bytes.tolist() == [0, 400, 400, 400, 400]
