from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product
from math import ceil, inf
from pathlib import Path

import pytest

from planner.extras.baselines.pipedream import format as graph_format
from planner.extras.baselines.pipedream.format import LayerGraph
from planner.extras.baselines.sparsepipe import DeviceType, best_pipeline
from planner.ir.errors import FormatError, UsageError
from tests.planner.extras.baselines.peers.graphs import chains, closed_sets, output_bytes, random_graph, whole

PROFILES = Path(__file__).parents[3] / "data" / "profiles" / "sparsepipe"


def published(**counts: int) -> list[DeviceType]:
    return [DeviceType(k, graph_format.read(PROFILES / f"b64_{k}.graph.txt"), n) for k, n in counts.items()]


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


@pytest.mark.parametrize(
    ("counts", "own", "best"),
    [
        ({"txp": 3, "tv": 4}, 0.2016, 0.1595),
        ({"tv": 4}, 0.2555, 0.2555),
        ({"txp": 4, "RTX": 4}, 0.1250, 0.1250),
    ],
)
def test_published_profiles(counts: dict[str, int], own: float, best: float) -> None:
    assert best_pipeline(published(**counts), fixed_order=True).value == pytest.approx(own, abs=5e-5)
    answer = best_pipeline(published(**counts))
    assert answer.value <= best + 5e-5
    assert answer.value == pytest.approx(best, abs=5e-5)
    assert answer.bound == answer.value


@pytest.mark.parametrize("seed", range(50))
def test_any_order_equals_brute_force(seed: int) -> None:
    graph = random_graph(seed, 5)
    types = [graph, scaled(graph, seed)]
    counts = (1 + seed % 2, 1 + seed // 2 % 2)
    memory = inf if seed % 3 else 20.0
    expected = min(
        cost(types, chain, devices, memory)
        for chain in chains(closed_sets(graph), frozenset(), whole(graph))
        for devices in groups(counts, len(chain) - 1)
    )
    instance = [DeviceType(f"t{k}", kind, count) for k, (kind, count) in enumerate(zip(types, counts, strict=True))]
    assert best_pipeline(instance, 4.0, memory_bytes=memory).value == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(50))
def test_the_fixed_order_equals_brute_force(seed: int) -> None:
    graph = random_graph(seed, 5)
    types, counts = [graph, scaled(graph, seed)], (1 + seed % 2, 2 + seed // 2 % 3)
    row = [1] * counts[1] + [0] * counts[0] if counts[1] > counts[0] else [0] * counts[0] + [1] * counts[1]
    expected = inf
    for chain in chains(closed_sets(graph), frozenset(), whole(graph)):
        for devices in groups(counts, len(chain) - 1):
            sizes = [sum(group) for group in devices]
            starts = [sum(sizes[:k]) for k in range(len(sizes) + 1)]
            in_row = [(row[a:b].count(0), row[a:b].count(1)) for a, b in pairwise(starts)]
            legal = all(m == 1 or m % 2 == 0 for m in sizes[1:]) and all(
                m < before for m, before in zip(sizes[1:], starts[1:], strict=False)
            )
            legal = legal or len(sizes) == 1
            if starts[-1] == len(row) and in_row == list(devices) and legal:
                expected = min(expected, cost(types, chain, devices, inf))
    instance = [DeviceType(f"t{k}", kind, count) for k, (kind, count) in enumerate(zip(types, counts, strict=True))]
    assert best_pipeline(instance, 4.0, fixed_order=True).value == pytest.approx(expected)


def test_every_layer_and_no_more_devices_than_there_are() -> None:
    stages = best_pipeline(published(txp=3, tv=4)).plan["stages"]
    assert isinstance(stages, list)
    layers = [name for stage in stages for name in stage["layers"]]  # type: ignore[index,call-overload,union-attr]
    assert len(layers) == len(set(layers)) == 52
    for kind, count in (("txp", 3), ("tv", 4)):
        assert sum(stage["devices"].get(kind, 0) for stage in stages) <= count  # type: ignore[index,call-overload,union-attr]


def test_the_order_in_which_types_are_given_changes_nothing() -> None:
    assert best_pipeline(published(txp=3, tv=4)).value == best_pipeline(published(tv=4, txp=3)).value


def test_more_devices_and_more_bandwidth_are_never_worse() -> None:
    value = best_pipeline(published(txp=2, tv=2)).value
    assert best_pipeline(published(txp=3, tv=2)).value <= value
    assert best_pipeline(published(txp=2, tv=2), 2e9).value <= value
    assert best_pipeline(published(txp=2, tv=2), communication=False).value <= value


def test_a_type_without_devices_counts_for_nothing() -> None:
    assert best_pipeline(published(tv=4, txp=0)).value == best_pipeline(published(tv=4)).value


def test_profiles_of_different_networks_and_no_devices_are_refused() -> None:
    other = DeviceType("other", random_graph(1), 2)
    with pytest.raises(FormatError, match="not a profile of the same network"):
        best_pipeline([*published(tv=2), other])
    for wrong in ([], published(tv=0)):
        with pytest.raises(UsageError):
            best_pipeline(wrong)
    with pytest.raises(UsageError):
        best_pipeline(published(tv=1), 0.0)
    assert best_pipeline(
        published(tv=2), memory_bytes=0.0
    ).has_plan  # the last stage keeps nothing in PipeDream's count
