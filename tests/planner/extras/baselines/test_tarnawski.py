"""Tarnawski et al.'s planner beside all placements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from planner.extras.baselines.common.answer import INFEASIBLE, OPTIMAL
from planner.extras.baselines.common.ideals import Ideals, lattice_of
from planner.extras.baselines.tarnawski.format import TarnawskiInstance, TarnawskiNode, blocks_of
from planner.extras.baselines.tarnawski.max_load import Loads, TarnawskiDevices, direct, lower_bound, search, value_of
from planner.extras.baselines.tarnawski.planner import load_of, solve
from planner.solvers.budget import Budget
from tests.planner.extras.baselines.peers.placements import best_load, in_order, random_instance


def check_plan(instance: TarnawskiInstance, value: float, plan: Mapping[str, Any], contiguous: bool = True) -> None:
    """The plan is one, and has the value."""
    number = {node.number: k for k, node in enumerate(instance.nodes)}
    devices = plan["devices"]
    placed = [-1] * len(instance.nodes)
    for at, device in enumerate(devices):
        nodes = [number[n] for n in device["nodes"]]
        assert nodes
        assert all(placed[node] < 0 for node in nodes)
        for node in nodes:
            placed[node] = at
        assert device["load_ms"] == pytest.approx(load_of(instance, nodes, str(device["kind"])))
        if device["kind"] == "accelerator":
            assert sum(instance.nodes[node].size_bytes for node in nodes) <= instance.memory_bytes * (1 + 1e-9)
            assert all(instance.nodes[node].on_accelerator for node in nodes)
    assert min(placed) >= 0
    assert len({(node.colour, at) for node, at in zip(instance.nodes, placed, strict=True)}) == len(
        {node.colour for node in instance.nodes}
    )
    assert not contiguous or in_order(instance, placed)
    kinds = [device["kind"] for device in devices]
    assert kinds.count("accelerator") <= instance.accelerators
    assert kinds.count("cpu") <= instance.cpus
    assert max(device["load_ms"] for device in devices) == pytest.approx(value)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("block", range(10))
def test_no_placement_is_better(block: int, training: bool) -> None:
    for seed in range(20 * block, 20 * block + 20):
        instance = random_instance(seed, 4 if training else 6, training)
        if not instance.accelerators + instance.cpus:
            continue
        answer = solve(instance)
        best = best_load(instance)
        assert answer.value == pytest.approx(best, rel=2e-9), seed
        assert answer.status == (INFEASIBLE if best == inf else OPTIMAL), seed
        if best < inf:
            check_plan(instance, answer.value, answer.plan)


@pytest.mark.parametrize("seed", range(12))
def test_no_placement_without_contiguity_is_better(seed: int) -> None:
    instance = replace(random_instance(seed, 5), accelerators=2, cpus=1)
    answer = solve(instance, variant="free")
    assert answer.value == pytest.approx(best_load(instance, contiguous=False), rel=1e-6)
    assert answer.value <= solve(instance).value * (1 + 1e-9)
    check_plan(instance, answer.value, answer.plan, contiguous=False)
    for variant in ("linearized", "pipedream"):
        other = solve(instance, variant=variant)
        assert other.value >= answer.value * (1 - 1e-9)
        if other.has_plan:
            check_plan(instance, other.value, other.plan)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_the_walk_finds_what_the_table_of_all_pairs_has(seed: int, training: bool) -> None:
    instance = random_instance(1000 + seed, 12, training)
    a = 2 + seed % 4
    c = instance.cpus if seed % 3 else 0
    blocks = blocks_of(instance, instance.memory_bytes).blocks
    lattice = lattice_of(Ideals.of(blocks.successors), 10_000)
    assert lattice is not None
    loads = Loads.of(blocks, lattice, instance.memory_bytes)
    devices = TarnawskiDevices(a, c, instance.memory_bytes, Budget(inf))
    plain = direct(loads, a, c)
    found, bound = search(blocks, loads, devices, None, lower_bound(blocks, a, c))
    assert (found is None) == (plain is None)
    if found is None or plain is None:
        assert bound == inf
        return
    assert found.value == pytest.approx(plain.value, rel=2e-9)
    assert value_of(blocks, plain.stages) == pytest.approx(plain.value)
    assert bound == pytest.approx(found.value)
    assert lower_bound(blocks, a, c) <= found.value * (1 + 1e-9)


def test_a_node_without_time_stays_where_moving_it_would_close_a_cycle() -> None:
    """0 feeds 1 feeds 2, and 3, which takes no time, reads 0 and 2: with 0 it would join all to one block."""
    nodes = tuple(
        TarnawskiNode(k, f"n{k}", ms, ms, 0.0, 1.0, True, False, k) for k, ms in enumerate((4.0, 4.0, 4.0, 0.0))
    )
    instance = TarnawskiInstance("triangle", 3, 0, 1e9, nodes, ((0, 1), (1, 2), (2, 3), (0, 3)))
    assert solve(instance).value == 4.0
