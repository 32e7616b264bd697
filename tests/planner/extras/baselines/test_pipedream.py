"""PipeDream's and SparsePipe's planners beside all plans, and beside the sets that the public code walks."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise, product
from math import ceil, inf
from pathlib import Path

import pytest

from planner.extras.baselines.common.answer import INFEASIBLE, OPTIMAL
from planner.extras.baselines.pipedream.format import LayerGraph, LayerNode, read, states_of
from planner.extras.baselines.pipedream.planner import PipeDreamOptions
from planner.extras.baselines.pipedream.planner import solve as solve_pipedream
from planner.extras.baselines.sparsepipe import DeviceType
from planner.extras.baselines.sparsepipe import best_pipeline as solve_sparsepipe
from tests.planner.extras.baselines.peers.graphs import (
    best_by_exhaustion,
    chains,
    closed_sets,
    output_bytes,
    random_graph,
    walked_sets,
    whole,
)


def some_options(seed: int) -> PipeDreamOptions:
    draw = random.Random(seed)
    memory = draw.choice([inf, inf, draw.uniform(5, 60)])
    return PipeDreamOptions(draw.random() < 0.7, draw.random() < 0.2, memory)


@pytest.mark.parametrize("seed", range(40))
def test_several_sources_equal_brute_force_over_the_sets_that_the_public_code_walks(seed: int) -> None:
    graph = random_graph(seed, 7, sources=2)
    options = some_options(seed)
    sets = walked_sets(graph)
    if any(len(found) == len(graph.nodes) for found in sets):
        assert states_of(graph).num_states == len(sets)
        expected = best_by_exhaustion(graph, sets, [3], [3.0], options)
        assert solve_pipedream(graph, [3], [3.0], options).value == pytest.approx(expected)


@pytest.mark.cases(12)
@pytest.mark.parametrize("levels", [1, 2])
@pytest.mark.parametrize("seed", range(60))
def test_no_plan_of_pipedreams_is_better(seed: int, levels: int) -> None:
    graph = random_graph(seed, 7 - levels)
    options = some_options(seed)
    machines = [1 + seed % (5 - levels), 1 + seed // 3 % 3][:levels]
    bandwidths = [5.0, 2.0][:levels]
    expected = best_by_exhaustion(graph, closed_sets(graph), machines, bandwidths, options)
    answer = solve_pipedream(graph, machines, bandwidths, options)
    assert answer.value == pytest.approx(expected)
    assert (answer.status, answer.bound) == (OPTIMAL if expected < inf else INFEASIBLE, answer.value)


@pytest.mark.parametrize("seed", range(60))
def test_released_is_the_best_over_every_number_of_machines_and_every_ideal(seed: int) -> None:
    graph = random_graph(seed, 6, sources=1 + seed % 2)
    options = some_options(seed)
    expected = min(
        best_by_exhaustion(graph, closed_sets(graph), [machines], [3.0], options) for machines in range(1, 5)
    )
    assert solve_pipedream(graph, [4], [3.0], options, released=True).value == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(40))
def test_released_never_loses_by_topology(seed: int) -> None:
    graph = random_graph(seed)
    options = some_options(seed)
    two_hosts = solve_pipedream(graph, [2, 2], [5.0, 2.0], options, released=True).value
    for machines, bandwidths in (([2, 2], [5.0, 2.0]), ([4], [2.0])):
        assert two_hosts <= solve_pipedream(graph, machines, bandwidths, options).value * (1 + 1e-12)


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("seed", range(30))
def test_the_plan_holds_every_layer_once_and_costs_what_the_answer_says(seed: int, released: bool) -> None:
    graph = random_graph(seed)
    answer = solve_pipedream(graph, [4], [3.0], PipeDreamOptions(communication=False), released)
    stages = answer.plan["stages"]
    assert isinstance(stages, list)
    names = [name for stage in stages for name in stage["layers"]]
    assert sorted(names) == sorted(node.name for node in graph.nodes)
    by_name = {node.name: node for node in graph.nodes}
    slowest = 0.0
    for stage in stages:
        layers = [by_name[name] for name in stage["layers"]]
        m = stage["machines"]
        work = sum(node.forward_s + node.backward_s for node in layers)
        slowest = max(slowest, (work + 4 * (m - 1) * sum(n.parameter_bytes for n in layers) / (3.0 * m)) / m)
    assert slowest == pytest.approx(answer.value)
    json.dumps(answer.plan)


def test_a_part_of_the_network_with_no_edge_to_the_rest_is_planned_too() -> None:
    nodes = tuple(LayerNode(name, "layer", 1.0, 0.0, 0.0, 0.0) for name in "abcd")
    graph = LayerGraph("two parts", nodes, ((0, 1), (2, 3)))
    assert solve_pipedream(graph, [2], [1.0]).value == pytest.approx(2.0)
    assert states_of(graph).done[-1].bit_count() == 4


PROFILES = Path(__file__).parents[3] / "data" / "profiles" / "sparsepipe"


def scaled(graph: LayerGraph, seed: int) -> LayerGraph:
    """The same network on another type of device, faster for some layers and slower for others."""
    factors = [1 + ((seed + k * k) % 7 - 3) / 5 for k in range(len(graph.nodes))]
    nodes = tuple(replace(node, forward_s=node.forward_s * f) for node, f in zip(graph.nodes, factors, strict=True))
    return replace(graph, nodes=nodes)


def groups(counts: tuple[int, ...], stages: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every way to give devices to stages, one at least to each."""
    if not stages:
        yield ()
        return
    for group in product(*(range(count + 1) for count in counts)):
        if any(group):
            rest = tuple(count - mine for count, mine in zip(counts, group, strict=True))
            yield from ((group, *others) for others in groups(rest, stages - 1))


def cost(
    types: Sequence[LayerGraph], chain: Sequence[frozenset[int]], devices: Sequence[tuple[int, ...]], memory: float
) -> float:
    value = 0.0
    for stage, (a, b) in enumerate(pairwise(chain)):
        m = sum(devices[stage])
        used = [graph for graph, count in zip(types, devices[stage], strict=True) if count]
        slowest = max(sum(g.nodes[k].forward_s + g.nodes[k].backward_s for k in b - a) for g in used)
        parameters = sum(types[0].nodes[k].parameter_bytes for k in b - a)
        stash = parameters + sum(types[0].nodes[k].activation_bytes for k in b - a)
        if ceil(sum(map(sum, devices[stage + 1 :])) / m) * stash > memory:
            return inf
        value = max(value, (slowest + 2 * (m - 1) * parameters / (4.0 * m)) / m)
        if b != whole(types[0]):
            value = max(value, 2 * output_bytes(types[0], b) / 4.0)
    return value


def instance(seed: int, most: int) -> list[DeviceType]:
    graph = random_graph(seed, 5)
    counts = (1 + seed % 2, 1 + seed // 2 % most)
    return [
        DeviceType(f"t{k}", each, n)
        for k, (each, n) in enumerate(zip((graph, scaled(graph, seed)), counts, strict=True))
    ]


@pytest.mark.parametrize("seed", range(50))
def test_no_plan_of_sparsepipes_is_better(seed: int) -> None:
    types = instance(seed, 2)
    graphs = [each.graph for each in types]
    counts = tuple(each.count for each in types)
    memory = inf if seed % 3 else 20.0
    expected = min(
        cost(graphs, chain, devices, memory)
        for chain in chains(closed_sets(graphs[0]), frozenset(), whole(graphs[0]))
        for devices in groups(counts, len(chain) - 1)
    )
    assert solve_sparsepipe(types, 4.0, memory_bytes=memory).value == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(50))
def test_no_plan_in_sparsepipes_fixed_order_is_better(seed: int) -> None:
    types = instance(seed, 4)
    graphs = [each.graph for each in types]
    counts = tuple(each.count for each in types)
    row = sorted((kind for kind in (0, 1) for _ in range(counts[kind])), key=lambda kind: (-counts[kind], kind))
    expected = inf
    for chain in chains(closed_sets(graphs[0]), frozenset(), whole(graphs[0])):
        for devices in groups(counts, len(chain) - 1):
            sizes = [sum(group) for group in devices]
            starts = [0, *accumulate(sizes)]
            in_row = [(row[a:b].count(0), row[a:b].count(1)) for a, b in pairwise(starts)]
            grows = all(m < before for m, before in zip(sizes[1:], starts[1:], strict=False))
            legal = len(sizes) == 1 or (grows and all(m == 1 or m % 2 == 0 for m in sizes[1:]))
            if starts[-1] == len(row) and in_row == list(devices) and legal:
                expected = min(expected, cost(graphs, chain, devices, inf))
    assert solve_sparsepipe(types, 4.0, fixed_order=True).value == pytest.approx(expected)


def test_a_plan_of_sparsepipes_has_every_layer_and_no_more_devices_than_there_are() -> None:
    counts = {"txp": 3, "tv": 4, "RTX": 0}
    types = [DeviceType(kind, read(PROFILES / f"b64_{kind}.graph.txt"), count) for kind, count in counts.items()]
    answer = solve_sparsepipe(types)
    stages = answer.plan["stages"]
    layers = [name for stage in stages for name in stage["layers"]]
    assert len(layers) == len(set(layers)) == 52
    assert all(sum(stage["devices"].get(kind, 0) for stage in stages) <= count for kind, count in counts.items())
    assert solve_sparsepipe(types[::-1]).value == answer.value
