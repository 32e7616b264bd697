from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from dataclasses import replace
from math import inf
from pathlib import Path

import numpy as np
import pytest

from planner.extras.baselines.common.answer import INFEASIBLE, OPTIMAL, TIME_LIMIT
from planner.extras.baselines.common.ideals import Ideals, chain_of, lattice_of
from planner.extras.baselines.piper import format as piper_format
from planner.extras.baselines.piper.format import Machine, PiperInstance, PiperNode, PiperOption, Room
from planner.extras.baselines.piper.planner import depth_first, solve
from planner.extras.baselines.piper.stages import (
    IdealCosts,
    PiperStage,
    PlainPairs,
    are_alike,
    choose_options,
    value_of,
)
from planner.ir.errors import UnknownNameError, UsageError
from tests.planner.extras.baselines.peers.pipelines import best_equal_plan, best_plan, plain_programme, random_instance

DATA = Path(__file__).parents[4] / "data"
GIB = 2**30


def reference() -> list[dict[str, str]]:
    with (DATA / "reference" / "planner.csv").open(encoding="utf-8", newline="") as stream:
        return [row for row in csv.DictReader(stream) if row["instance"].startswith("piper/resnet.json")]


@pytest.fixture(scope="module")
def resnet() -> PiperInstance:
    return piper_format.read(DATA / "profiles" / "piper" / "resnet.json")


def machine_of(instance: PiperInstance) -> Machine:
    return Machine(instance.devices, instance.memory_bytes, instance.bandwidth_bytes_per_s)


def stages_of(instance: PiperInstance, plan: Mapping[str, object]) -> list[PiperStage]:
    number = {node.number: k for k, node in enumerate(instance.nodes)}
    listed = plan["stages"]
    assert isinstance(listed, list)
    stages = []
    for stage in listed:
        nodes = tuple(number[n] for n in stage["nodes"])
        choices = [instance.nodes[n].options[stage["tensor_degree"]] for n in nodes]
        names = [stage["options"].get(str(instance.nodes[n].number)) for n in nodes]
        picked = tuple(
            next((k for k, option in enumerate(each) if option.name == name), 0)
            for each, name in zip(choices, names, strict=True)
        )
        stages.append(PiperStage(nodes, stage["data_degree"], stage["tensor_degree"], picked))
    return stages


def test_the_reference_has_as_many_rows_as_it_had() -> None:
    assert len(reference()) == 46


@pytest.mark.parametrize("row", reference(), ids=lambda row: f"{row['devices']} {row['memory_limit']} {row['solver']}")
def test_every_reference_value_is_found(resnet: PiperInstance, row: dict[str, str]) -> None:
    devices, memory = int(row["devices"].split()[0]), float(row["memory_limit"].split()[0]) * GIB
    variant = "piper" if row["solver"].startswith("Piper DP") else "equal"
    answer = solve(
        replace(resnet, devices=devices, memory_bytes=memory, bandwidth_bytes_per_s=25 * GIB), variant=variant
    )
    if row["value"] == "OOM":
        assert (answer.status, answer.value, answer.plan) == (INFEASIBLE, inf, {})
        return
    assert answer.value == pytest.approx(float(row["value"]), abs=0.00051)
    assert answer.status == OPTIMAL
    assert value_of(resnet, Machine(devices, memory, 25 * GIB), stages_of(resnet, answer.plan)) == pytest.approx(
        answer.value
    )
    json.dumps(dict(answer.plan))


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
    equal, best = solve(instance, variant="equal"), solve(instance)
    assert equal.value == pytest.approx(best_equal_plan(instance, machine_of(instance), depth_first(instance)))
    assert equal.value >= best.value * (1 - 1e-9)
    if equal.has_plan:
        stages = stages_of(instance, equal.plan)
        sizes = [len(stage.nodes) for stage in stages if stage.nodes]
        assert max(sizes) - min(sizes) <= 1
        assert len({(stage.replicas, stage.degree) for stage in stages}) == 1


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 6, 12])
def test_of_alike_layers_an_equi_partition_is_pipers_own_optimum(devices: int) -> None:
    option = PiperOption("vanilla", 1.0, 2.0, 1.0, 1.0, {}, {})
    nodes = tuple(
        PiperNode(k, f"n{k}", {1: (replace(option, sync_forward_bytes=reads(k), sync_backward_bytes=readers(k)),)})
        for k in range(12)
    )
    edges = tuple((k, k + 1, 0.0) for k in range(11))
    instance = PiperInstance("alike", devices, 30.0, 1e9, 24, nodes, edges)
    assert solve(instance, variant="equal").value == pytest.approx(solve(instance).value)
    assert solve(instance).value == pytest.approx(12 / devices)


def reads(node: int) -> dict[int, float]:
    return {node - 1: 0.0} if node else {}


def readers(node: int) -> dict[int, float]:
    return {node + 1: 0.0} if node < 11 else {}


@pytest.mark.parametrize("degrees", [(1,), (1, 2), (1, 2, 4)])
@pytest.mark.parametrize("seed", range(15))
def test_the_published_programme_finds_the_same(seed: int, degrees: tuple[int, ...]) -> None:
    instance = replace(random_instance(seed, 6, degrees), devices=7, micro_batches=24)
    for each in (instance, replace(instance, memory_bytes=4.0 + seed)):
        assert solve(each).value == pytest.approx(plain_programme(each, machine_of(each)), rel=2e-9)


@pytest.mark.parametrize("seed", range(15))
def test_options_of_every_kind_are_planned_with(seed: int) -> None:
    instance = replace(random_instance(seed, 5, (1, 2), alike=False), devices=4, memory_bytes=5.0 + 2 * seed)
    answer = solve(instance)
    assert answer.value == pytest.approx(plain_programme(instance, machine_of(instance)), rel=2e-9)
    if answer.has_plan:
        assert value_of(instance, machine_of(instance), stages_of(instance, answer.plan)) == answer.value


def test_there_are_options_of_every_kind() -> None:
    found = [random_instance(seed, 5, (1, 2), alike=False) for seed in range(15)]
    assert not all(are_alike(instance) for instance in found)
    assert any(len(options) > 2 for instance in found for node in instance.nodes for options in node.options.values())


@pytest.mark.parametrize("seed", range(20))
def test_the_table_of_stages_has_each_stage_s_time(seed: int) -> None:
    instance = random_instance(seed, 6, (1, 2))
    machine = replace(machine_of(instance), memory_bytes=12.0 + seed)
    reads = [[src for src, dst, _ in instance.edges if dst == k] for k in range(len(instance.nodes))]
    lattice = lattice_of(Ideals.of(reads), 10_000)
    assert lattice is not None
    in_flight = np.arange(1, 9)
    for degree in (1, 2):
        room = Room.of(instance, machine.with_endless_memory(), lattice, inf, (1,))
        table = IdealCosts.of(instance, machine, lattice, degree).pairs(
            replace(room, devices=99, most=np.full_like(room.most, 8)), 1
        )
        for above in range(1, len(lattice.bits)):
            quick, plain = table.of(above), PlainPairs.of(instance, machine, lattice, degree, above)
            assert quick.below.tolist() == plain.below.tolist()
            every = np.arange(len(quick.below))
            for replicas in (1, 2, 4):
                assert quick.fastest(replicas) == pytest.approx(plain.fastest(replicas))
                # The quick table already takes the better choice for more in flight.
                found = plain.times(every, replicas, in_flight)
                expected = np.minimum.accumulate(found[:, ::-1], axis=1)[:, ::-1]
                assert quick.times(every, replicas, in_flight) == pytest.approx(expected)


def test_a_better_choice_for_more_in_flight_is_taken_for_fewer() -> None:
    instance = replace(random_instance(0, 6), memory_bytes=16.0, edges=())
    machine, every = machine_of(instance), tuple(range(len(instance.nodes)))
    by_rule = [choose_options(instance, machine, every, 1, 1, y) for y in (2, 3)]
    assert by_rule[0] is not None
    assert by_rule[1] is not None
    assert by_rule[0][1] > by_rule[1][1]
    lattice = chain_of(every)
    room = replace(Room.of(instance, machine, lattice, inf, (1,)), devices=9, most=np.full(len(lattice.bits), 4))
    whole = IdealCosts.of(instance, machine, lattice, 1).pairs(room, 1).of(len(every))
    assert whole.times(np.array([0]), 1, np.array([2, 3]))[0] == pytest.approx([by_rule[1][1]] * 2)


@pytest.mark.parametrize("seed", range(12))
def test_more_of_anything_is_never_worse(seed: int) -> None:
    instance = random_instance(seed, 6, (1, 2))
    margin = solve(instance, variant="piper").value * (1 + 1e-9)
    assert solve(replace(instance, devices=instance.devices + 1)).value <= margin
    assert solve(replace(instance, bandwidth_bytes_per_s=2 * instance.bandwidth_bytes_per_s)).value <= margin
    assert solve(replace(instance, memory_bytes=inf)).value <= margin
    assert solve(instance, variant="equal").value >= margin / (1 + 1e-9) * (1 - 1e-9)


def test_no_time_still_gives_a_plan_and_a_bound(resnet: PiperInstance) -> None:
    answer = solve(replace(resnet, devices=8, memory_bytes=8 * GIB), time_limit_s=0.0)
    assert answer.status == TIME_LIMIT
    assert 0 < answer.bound < answer.value < inf


def test_what_does_not_exist_is_refused() -> None:
    instance = random_instance(3)
    for wrong in ({"devices": 0}, {"bandwidth_bytes_per_s": 0.0}, {"memory_bytes": -1.0}):
        with pytest.raises(UsageError, match="nothing to plan for"):
            solve(replace(instance, **wrong))
    with pytest.raises(UnknownNameError, match="no variant 'best'"):
        solve(instance, variant="best")
