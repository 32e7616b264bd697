"""Piper's planner beside all plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from planner.extras.baselines.common.answer import INFEASIBLE, OPTIMAL
from planner.extras.baselines.piper.format import Machine, PiperInstance, PiperNode, PiperOption
from planner.extras.baselines.piper.planner import depth_first, solve
from planner.extras.baselines.piper.stages import PiperStage, value_of
from tests.planner.extras.baselines.peers.pipelines import best_equal_plan, best_plan, random_instance


def machine_of(instance: PiperInstance) -> Machine:
    return Machine(instance.devices, instance.memory_bytes, instance.bandwidth_bytes_per_s)


def stages_of(instance: PiperInstance, plan: Mapping[str, Any]) -> list[PiperStage]:
    number = {node.number: k for k, node in enumerate(instance.nodes)}
    stages = []
    for stage in plan["stages"]:
        nodes = tuple(number[n] for n in stage["nodes"])
        degree = stage["tensor_degree"]
        picked = []
        for n in nodes:
            names = [option.name for option in instance.nodes[n].options[degree]]
            name = stage["options"].get(str(instance.nodes[n].number))
            picked.append(names.index(name) if name in names else 0)
        stages.append(PiperStage(nodes, stage["data_degree"], degree, tuple(picked)))
    return stages


@pytest.mark.parametrize("degrees", [(1,), (1, 2), (2,), (1, 2, 3)])
@pytest.mark.parametrize("block", range(5))
def test_no_plan_is_better(block: int, degrees: tuple[int, ...]) -> None:
    for seed in range(8 * block, 8 * block + 8):
        instance = random_instance(seed, 4 if len(degrees) < 3 else 3, degrees)
        by_rule, by_any = best_plan(instance, machine_of(instance))
        answer = solve(instance)
        assert answer.value == pytest.approx(by_rule, rel=2e-9), seed
        assert answer.status == (INFEASIBLE if by_rule == inf else OPTIMAL), seed
        if answer.has_plan:
            assert value_of(instance, machine_of(instance), stages_of(instance, answer.plan)) == answer.value
        released = solve(instance, variant="released")
        assert released.bound <= by_any * (1 + 1e-9) <= answer.value * (1 + 2e-9), seed
        assert released.value <= answer.value


@pytest.mark.parametrize("degrees", [(1,), (1, 2), (2, 3)])
@pytest.mark.parametrize("seed", range(40))
def test_equi_partitions_are_the_best_of_all_of_them_and_never_better_than_pipers_plan(
    seed: int, degrees: tuple[int, ...]
) -> None:
    instance = random_instance(seed, 5, degrees)
    equal = solve(instance, variant="equal")
    best = solve(instance)
    assert equal.value == pytest.approx(best_equal_plan(instance, machine_of(instance), depth_first(instance)))
    assert equal.value >= best.value * (1 - 1e-9)
    if equal.has_plan:
        stages = stages_of(instance, equal.plan)
        sizes = [len(stage.nodes) for stage in stages if stage.nodes]
        assert max(sizes) - min(sizes) <= 1
        assert len({(stage.replicas, stage.degree) for stage in stages}) == 1


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 6, 12])
def test_of_alike_layers_an_equi_partition_is_pipers_own_optimum(devices: int) -> None:
    edges = tuple((k, k + 1, 0.0) for k in range(11))
    nodes = []
    for k in range(12):
        reads, readers = ({j: 0.0 for j in (k + away,) if 0 <= j < 12} for away in (-1, 1))
        nodes.append(PiperNode(k, f"n{k}", {1: (PiperOption("vanilla", 1.0, 2.0, 1.0, 1.0, reads, readers),)}))
    instance = PiperInstance("alike", devices, 30.0, 1e9, 24, tuple(nodes), edges)
    assert solve(instance, variant="equal").value == pytest.approx(solve(instance).value)
    assert solve(instance).value == pytest.approx(12 / devices)


@pytest.mark.parametrize("seed", range(15))
def test_options_of_every_kind_are_planned_with(seed: int) -> None:
    """Three of a degree, which need not be alike but for time and memory."""
    instance = replace(random_instance(seed, 4, (1, 2), alike=False), devices=4, memory_bytes=5.0 + 2 * seed)
    by_rule, _ = best_plan(instance, machine_of(instance))
    answer = solve(instance)
    assert answer.value == pytest.approx(by_rule, rel=2e-9)
    if answer.has_plan:
        assert value_of(instance, machine_of(instance), stages_of(instance, answer.plan)) == answer.value
