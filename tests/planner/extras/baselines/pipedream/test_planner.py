from __future__ import annotations

import csv
import json
import random
import re
from math import inf, prod
from pathlib import Path

import pytest

from planner.extras.baselines.common.answer import OPTIMAL
from planner.extras.baselines.pipedream import format as graph_format
from planner.extras.baselines.pipedream.format import LayerGraph, LayerNode, states_of
from planner.extras.baselines.pipedream.planner import PipeDreamOptions, data_parallel_s, solve
from planner.ir.errors import FormatError, UsageError
from tests.planner.extras.baselines.peers.graphs import best_by_exhaustion, closed_sets, random_graph, walked_sets

DATA = Path(__file__).parents[4] / "data"


def reference() -> list[dict[str, str]]:
    with (DATA / "reference" / "planner.csv").open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream))
    return [row for row in rows if row["instance"].startswith("pipedream/") and "machines bw" in row["devices"]]


def graph_of(name: str) -> LayerGraph:
    return graph_format.read(DATA / "profiles" / "pipedream" / f"{name}.graph.txt")


def levels(row: dict[str, str]) -> tuple[list[int], list[float]]:
    match = re.match(r"(\[.*?\]) machines bw=(\[.*?\])", row["devices"])
    assert match
    return json.loads(match[1]), json.loads(match[2])


def options_of(row: dict[str, str]) -> PipeDreamOptions:
    memory = inf if row["memory_limit"] == "none" else 1e9 * float(row["memory_limit"].removesuffix("GB"))
    return PipeDreamOptions("ignored" not in row["objective"], "straight" in row["objective"], memory)


def some_options(seed: int) -> PipeDreamOptions:
    draw = random.Random(seed)
    memory = draw.choice([inf, inf, draw.uniform(5, 60)])
    return PipeDreamOptions(draw.random() < 0.7, draw.random() < 0.2, memory)


def test_the_reference_has_as_many_rows_as_it_had() -> None:
    assert len(reference()) == 83


@pytest.mark.parametrize("row", reference(), ids=lambda row: f"{row['instance']} {row['solver']} {row['objective']}")
def test_every_reference_value_is_found(row: dict[str, str]) -> None:
    graph = graph_of(row["instance"].removeprefix("pipedream/"))
    machines, bandwidths = levels(row)
    if "data-parallel" in row["objective"]:
        assert data_parallel_s(graph, machines, bandwidths) == pytest.approx(float(row["value"]), abs=1e-6)
        return
    answer = solve(graph, machines, bandwidths, options_of(row))
    assert answer.value == pytest.approx(float(row["value"]), abs=1e-6)
    assert (answer.bound, answer.status) == (answer.value, OPTIMAL)
    states = re.search(r"states=(\d+)", row["provenance"])
    if states:
        assert states_of(graph).num_states == int(states[1])


@pytest.mark.parametrize("row", reference(), ids=lambda row: f"{row['instance']} {row['solver']} {row['objective']}")
def test_without_the_restrictions_no_reference_value_is_better(row: dict[str, str]) -> None:
    machines, bandwidths = levels(row)
    if "data-parallel" not in row["objective"]:
        graph, options = graph_of(row["instance"].removeprefix("pipedream/")), options_of(row)
        answer = solve(graph, machines, bandwidths, options, released=True)
        assert answer.value <= float(row["value"]) + 1e-6
        work_s = sum(graph.nodes[k].forward_s + graph.nodes[k].backward_s for k in graph.kept())
        assert work_s / prod(machines) * (1 - 1e-9) <= answer.bound <= answer.value


@pytest.mark.parametrize("seed", range(120))
def test_flat_equals_brute_force(seed: int) -> None:
    graph, options = random_graph(seed), some_options(seed)
    machines = 1 + seed % 4
    expected = best_by_exhaustion(graph, closed_sets(graph), [machines], [3.0], options)
    assert solve(graph, [machines], [3.0], options).value == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(40))
def test_several_sources_equal_brute_force_over_the_sets_that_the_public_code_walks(seed: int) -> None:
    graph, options = random_graph(seed, 7, sources=2), some_options(seed)
    sets = walked_sets(graph)
    if any(len(found) == len(graph.nodes) for found in sets):
        assert states_of(graph).num_states == len(sets)
        expected = best_by_exhaustion(graph, sets, [3], [3.0], options)
        assert solve(graph, [3], [3.0], options).value == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(40))
def test_levels_equal_brute_force(seed: int) -> None:
    graph, options = random_graph(seed, 5), some_options(seed)
    machines = [1 + seed % 3, 1 + seed // 3 % 3]
    expected = best_by_exhaustion(graph, closed_sets(graph), machines, [5.0, 2.0], options)
    assert solve(graph, machines, [5.0, 2.0], options).value == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(60))
def test_released_is_the_best_over_every_number_of_machines_and_every_ideal(seed: int) -> None:
    graph, options = random_graph(seed, 6, sources=1 + seed % 2), some_options(seed)
    expected = min(
        best_by_exhaustion(graph, closed_sets(graph), [machines], [3.0], options) for machines in range(1, 5)
    )
    assert solve(graph, [4], [3.0], options, released=True).value == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(40))
def test_released_never_loses_by_topology_machines_or_bandwidth(seed: int) -> None:
    graph, options = random_graph(seed), some_options(seed)

    def value(machines: list[int], bandwidths: list[float]) -> float:
        return solve(graph, machines, bandwidths, options, released=True).value

    two_hosts = value([2, 2], [5.0, 2.0])
    assert two_hosts <= solve(graph, [2, 2], [5.0, 2.0], options).value * (1 + 1e-12)
    assert two_hosts <= value([4], [2.0]) * (1 + 1e-12)
    assert value([2, 2], [6.0, 2.0]) <= two_hosts * (1 + 1e-12)
    assert value([2, 2], [5.0, 3.0]) <= two_hosts * (1 + 1e-12)
    assert value([5], [2.0]) <= value([4], [2.0]) * (1 + 1e-12)


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("seed", range(30))
def test_the_plan_holds_every_layer_once_and_costs_what_the_answer_says(seed: int, released: bool) -> None:
    graph = random_graph(seed)
    answer = solve(graph, [4], [3.0], PipeDreamOptions(communication=False), released)
    stages = answer.plan["stages"]
    assert isinstance(stages, list)
    names = [name for stage in stages for name in stage["layers"]]  # type: ignore[index,call-overload,union-attr]
    assert sorted(names) == sorted(node.name for node in graph.nodes)
    by_name = {node.name: node for node in graph.nodes}
    slowest = 0.0
    for stage in stages:
        layers = [by_name[name] for name in stage["layers"]]  # type: ignore[index,call-overload,union-attr]
        m = stage["machines"]  # type: ignore[index,call-overload]
        work = sum(node.forward_s + node.backward_s for node in layers)
        slowest = max(slowest, (work + 4 * (m - 1) * sum(n.parameter_bytes for n in layers) / (3.0 * m)) / m)
    assert slowest == pytest.approx(answer.value)
    json.dumps(answer.plan)


def test_levels_plan_a_pipeline_inside_every_stage() -> None:
    answer = solve(graph_of("vgg16"), [4, 2], [1e10, 1.25e9])
    stages = answer.plan["stages"]
    assert isinstance(stages, list)
    assert [stage["machines"] for stage in stages] == [1, 1]  # type: ignore[index,call-overload]
    inner = [[part["machines"] for part in stage["each"]] for stage in stages]  # type: ignore[index,call-overload,union-attr]
    assert inner == [[4], [1, 1, 1, 1]]


def test_a_part_of_the_network_with_no_edge_to_the_rest_is_planned_too() -> None:
    nodes = tuple(LayerNode(name, "layer", 1.0, 0.0, 0.0, 0.0) for name in "abcd")
    graph = LayerGraph("two parts", nodes, ((0, 1), (2, 3)))
    assert solve(graph, [2], [1.0]).value == pytest.approx(2.0)
    assert states_of(graph).done[-1].bit_count() == 4


def test_too_little_memory_is_infeasible() -> None:
    answer = solve(graph_of("vgg16"), [4], [1e9], PipeDreamOptions(straight=True, memory_bytes=1.0))
    assert (answer.status, answer.has_plan) == ("infeasible", False)


def test_more_stages_than_there_are_states_are_infeasible() -> None:
    graph = LayerGraph("one", (LayerNode("a", "layer", 1.0, 1.0, 0.0, 0.0),), ())
    assert not solve(graph, [2], [1.0], PipeDreamOptions(straight=True)).has_plan
    assert solve(graph, [2], [1.0], PipeDreamOptions(straight=True), released=True).value == 2.0


def test_a_network_of_inputs_alone_is_refused() -> None:
    graph = LayerGraph("inputs", (LayerNode("a", "Input0", 1.0, 1.0, 0.0, 0.0),), ())
    with pytest.raises(FormatError, match="no layers besides inputs"):
        solve(graph, [2], [1.0])


@pytest.mark.parametrize(("machines", "bandwidths"), [([], []), ([0], [1.0]), ([2], [0.0]), ([2, 2], [1.0])])
def test_levels_without_machines_or_bandwidth_are_refused(machines: list[int], bandwidths: list[float]) -> None:
    with pytest.raises(UsageError):
        solve(random_graph(0), machines, bandwidths)


def test_too_many_states_are_refused_with_their_number() -> None:
    nodes = tuple(LayerNode(f"n{k}", "layer", 1.0, 1.0, 0.0, 0.0) for k in range(20))
    fan = LayerGraph("fan", nodes, tuple((0, k) for k in range(1, 20)))
    with pytest.raises(UsageError, match="too many states"):
        states_of(fan)
