from __future__ import annotations

import csv
import json
from dataclasses import replace
from math import inf
from pathlib import Path

import numpy as np
import pytest

from planner.extras.baselines.common.answer import INFEASIBLE, OPTIMAL, TIME_LIMIT
from planner.extras.baselines.common.ideals import Ideals, lattice_of
from planner.extras.baselines.tarnawski import format as dnn_partitioning
from planner.extras.baselines.tarnawski.format import TarnawskiInstance, TarnawskiNode, blocks_of, depth_first
from planner.extras.baselines.tarnawski.max_load import Loads, TarnawskiDevices, direct, lower_bound, search, value_of
from planner.extras.baselines.tarnawski.planner import VARIANTS, load_of, solve
from planner.ir.errors import UnknownNameError, UsageError
from planner.solvers.budget import Budget
from tests.planner.extras.baselines.peers.placements import best_load, in_order, random_instance

DATA = Path(__file__).parents[4] / "data"
VARIANT_OF = {
    "Tarnawski DP (dp.exe)": "contiguous",
    "exact ideal-lattice DP with window pruning (prototype)": "contiguous",
    "dp.exe -linearize (DPL)": "linearized",
    "dp.exe -oneFpga (single device)": "single",
    "dp.exe -pipeDream baseline": "pipedream",
}


def reference() -> list[dict[str, str]]:
    with (DATA / "reference" / "planner.csv").open(encoding="utf-8", newline="") as stream:
        return [row for row in csv.DictReader(stream) if row["instance"].startswith("dnn-partitioning/")]


def instance_of(row: dict[str, str]) -> TarnawskiInstance:
    name = row["instance"].removeprefix("dnn-partitioning/").replace("/", "_")
    words = row["devices"].split()
    found = dnn_partitioning.read(DATA / "profiles" / "dnn-partitioning" / f"{name}.json")
    return replace(found, accelerators=int(words[0]), cpus=int(words[3]) if len(words) > 3 else 0)


def printed(row: dict[str, str]) -> float:
    """Half of the last digit that the row gives, and 1e-6 of rounding."""
    return 0.5 * 10.0 ** -len(row["value"].partition(".")[2]) + 1e-6 * float(row["value"])


def endless() -> bool:
    return False


def stages_of(instance: TarnawskiInstance, plan: object) -> list[dict[str, object]]:
    assert isinstance(plan, dict)
    return list(plan["devices"])


def check_plan(instance: TarnawskiInstance, value: float, plan: object, contiguous: bool = True) -> None:
    """The plan is one, and has the value."""
    number = {node.number: k for k, node in enumerate(instance.nodes)}
    devices = stages_of(instance, plan)
    placed = [-1] * len(instance.nodes)
    for at, device in enumerate(devices):
        nodes = [number[n] for n in device["nodes"]]  # type: ignore[attr-defined]
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
    assert max(device["load_ms"] for device in devices) == pytest.approx(value)  # type: ignore[type-var]


def test_the_reference_has_as_many_rows_as_it_had() -> None:
    assert len(reference()) == 42


@pytest.mark.parametrize("row", reference(), ids=lambda row: f"{row['instance']} {row['devices']} {row['solver']}")
def test_every_reference_value_is_found(row: dict[str, str]) -> None:
    instance = instance_of(row)
    if row["solver"] in VARIANT_OF:
        answer = solve(instance, variant=VARIANT_OF[row["solver"]])
        assert answer.value == pytest.approx(float(row["value"]), abs=printed(row))
    else:  # integer programs stopped within 1 %
        answer = solve(instance, variant="free" if "noncontig" in row["objective"] else "contiguous")
        assert answer.value <= float(row["value"]) + printed(row)
    assert answer.status == OPTIMAL
    assert answer.bound == answer.value


@pytest.mark.parametrize("row", reference()[:16:4], ids=lambda row: row["instance"])
def test_the_plan_of_a_published_instance_has_its_value(row: dict[str, str]) -> None:
    instance = instance_of(row)
    coloured = tuple(
        replace(node, colour=10_000 + k if node.colour is None else node.colour)
        for k, node in enumerate(instance.nodes)
    )
    answer = solve(instance)
    check_plan(replace(instance, nodes=coloured), answer.value, answer.plan)
    json.dumps(dict(answer.plan))


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
    instance = random_instance(seed, 5)
    instance = replace(instance, accelerators=2, cpus=1)
    answer = solve(instance, variant="free")
    assert answer.value == pytest.approx(best_load(instance, contiguous=False), rel=1e-6)
    assert answer.value <= solve(instance).value * (1 + 1e-9)
    check_plan(instance, answer.value, answer.plan, contiguous=False)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_the_walk_finds_what_the_table_of_all_pairs_has(seed: int, training: bool) -> None:
    instance = random_instance(1000 + seed, 12, training)
    a, c = 2 + seed % 4, instance.cpus if seed % 3 else 0
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


@pytest.mark.parametrize("seed", range(10))
def test_the_table_of_loads_has_each_stage_s_load(seed: int) -> None:
    instance = random_instance(seed, 7, training=True)
    blocks = blocks_of(instance, instance.memory_bytes).blocks
    lattice = lattice_of(Ideals.of(blocks.successors), 10_000)
    assert lattice is not None
    loads = Loads.of(blocks, lattice, instance.memory_bytes)
    every = np.arange(len(lattice.bits))
    on_accelerator, on_cpu = loads.accelerator(every, every), loads.cpu(every, every)
    for i, below in enumerate(lattice.bits):
        for j, above in enumerate(lattice.bits):
            inside = above & ~below
            fits = blocks.size(inside) <= instance.memory_bytes
            nested = not below & ~above
            assert on_cpu[i, j] == pytest.approx(blocks.cpu_load(inside) if nested else inf)
            expected = blocks.accelerator_load(inside) if nested and fits else inf
            assert on_accelerator[i, j] == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("seed", range(15))
def test_more_of_anything_is_never_worse(seed: int) -> None:
    instance = replace(random_instance(seed, 8), accelerators=2, cpus=1)
    value = solve(instance).value
    margin = value * (1 + 1e-9)
    assert solve(instance, accelerators=3).value <= margin
    assert solve(instance, cpus=2).value <= margin
    assert solve(instance, memory_bytes=2 * instance.memory_bytes).value <= margin
    cheaper = tuple(replace(node, transfer_ms=node.transfer_ms / 2) for node in instance.nodes)
    assert solve(replace(instance, nodes=cheaper)).value <= margin
    assert solve(instance, variant="linearized").value >= value * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(10))
def test_the_order_of_nodes_in_the_file_changes_nothing(seed: int) -> None:
    instance = replace(random_instance(seed, 8, training=True), accelerators=3)
    count = len(instance.nodes)
    backwards = replace(
        instance,
        nodes=instance.nodes[::-1],
        edges=tuple((count - 1 - a, count - 1 - b) for a, b in reversed(instance.edges)),
    )
    assert solve(backwards).value == pytest.approx(solve(instance).value)


def test_a_node_without_time_stays_where_moving_it_would_close_a_cycle() -> None:
    """0 feeds 1 feeds 2, and 3, which takes no time, reads 0 and 2: with 0 it would join all to one block."""
    nodes = tuple(
        TarnawskiNode(k, f"n{k}", ms, ms, 0.0, 1.0, True, False, k) for k, ms in enumerate((4.0, 4.0, 4.0, 0.0))
    )
    instance = TarnawskiInstance("triangle", 3, 0, 1e9, nodes, ((0, 1), (1, 2), (2, 3), (0, 3)))
    assert solve(instance).value == 4.0


def parallel(width: int, length: int) -> TarnawskiInstance:
    """Chains side by side: ``(length + 1) ** width`` ideals."""
    nodes = tuple(
        TarnawskiNode(k, f"n{k}", 1.0 + k % 7, 9.0, 0.1, 1.0, True, False, None) for k in range(width * length)
    )
    edges = tuple((k, k + 1) for k in range(width * length) if (k + 1) % length)
    return TarnawskiInstance("parallel", 3, 0, 1e9, nodes, edges)


def test_too_many_ideals_still_give_a_plan_and_a_bound() -> None:
    instance = parallel(12, 5)
    answer = solve(instance)
    assert answer.status == TIME_LIMIT
    total = sum(node.accelerator_ms for node in instance.nodes)
    assert total / 3 - 1e-6 <= answer.bound <= answer.value < total
    check_plan(
        replace(instance, nodes=tuple(replace(n, colour=n.number) for n in instance.nodes)), answer.value, answer.plan
    )


def test_no_time_still_gives_a_plan_and_a_bound() -> None:
    answer = solve(parallel(4, 6), time_limit_s=0.0)
    assert answer.status == TIME_LIMIT
    assert 0 < answer.bound <= answer.value < inf


def test_the_linear_order_is_topological() -> None:
    for seed in range(20):
        coloured = blocks_of(random_instance(seed, 9), inf)
        for largest_first in (False, True):
            at = {block: k for k, block in enumerate(depth_first(coloured, largest_first))}
            assert all(at[a] < at[b] for a, found in enumerate(coloured.blocks.successors) for b in found)


def test_devices_that_do_not_exist_are_refused() -> None:
    instance = random_instance(1)
    for counts in ({"accelerators": 0, "cpus": 0}, {"accelerators": -1, "cpus": 2}):
        with pytest.raises(UsageError, match="nothing to place on"):
            solve(instance, **counts)
    with pytest.raises(UnknownNameError, match="no variant 'best'"):
        solve(instance, variant="best")
    assert set(VARIANTS) == {"contiguous", "linearized", "pipedream", "single", "free"}
