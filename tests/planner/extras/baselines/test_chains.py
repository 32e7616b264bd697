"""Planners of chains, BaPipe's and DAPPLE's, beside all of their plans; BaPipe's closed forms beside the simulator."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations, pairwise
from math import ceil, inf
from pathlib import Path

import pytest

from planner.costs.memory.memory_bound import kept_by
from planner.extras.baselines.bapipe import AS, FBP, SNO, SO, BapipePipeline, DeviceRow, kept, minibatch_s
from planner.extras.baselines.bapipe import best_pipeline as best_bapipe
from planner.extras.baselines.common.problem import ChainCosts, chain_of, coarse_ends, merged
from planner.extras.baselines.dapple import Assignment, Hosts, assignments, most_first, real_hosts
from planner.extras.baselines.dapple import best_pipeline as best_dapple
from planner.extras.baselines.pipedream import format as graph_format
from tests.planner.costs.simulator.test_streaming import MIB, REGIMES, boards, step_s
from tests.planner.extras.baselines.peers.chains import latency_s, random_chain

PROFILES = Path(__file__).parents[3] / "data" / "profiles" / "pipedream"


def even(layers: int, crossing: float = 0.0) -> ChainCosts:
    """Layers of F = 1 and B = 2 each."""
    names = tuple(f"l{k}" for k in range(layers))
    ones = (1.0,) * layers
    return ChainCosts(names, ones, (2.0,) * layers, ones, ones, (*(crossing,) * (layers - 1), 0.0))


@pytest.mark.parametrize("schedule", [SNO, SO, AS, FBP])
@pytest.mark.parametrize("seed", range(40))
def test_no_pipeline_of_bapipes_is_better(seed: int, schedule: str) -> None:
    draw = random.Random(seed)
    chain = random_chain(seed, 6)
    speeds = tuple(draw.choice([1.0, 1.0, 2.5]) for _ in range(draw.randint(1, 4)))
    row = DeviceRow(speeds, draw.uniform(0.5, 8), draw.choice([inf, draw.uniform(4, 40)]))
    counts = (1, 2, 8)
    inner = combinations(range(1, chain.num_layers), len(speeds) - 1)
    expected = min(
        (
            minibatch_s(chain, row, BapipePipeline(schedule, count, tuple(map(float, cuts))))
            for cuts in inner
            for count in counts
        ),
        default=inf,
    )
    assert best_bapipe(chain, row, counts, (schedule,)).value == pytest.approx(expected)


@pytest.mark.parametrize(("p", "m"), [(1, 4), (2, 8), (4, 4), (4, 16)])
@pytest.mark.parametrize("c", [0.0, 0.5])
def test_every_schedule_takes_its_closed_form(p: int, m: int, c: float) -> None:
    """Of stages that take 3 s each and hand on what takes ``c``; streaming schedules see below."""
    chain = even(p, c).scaled(m)
    row = DeviceRow((1.0,) * p, 1.0)
    cuts = tuple(map(float, range(1, p)))
    transfers_s = {SO: 2 * (p - 1) * c, SNO: 2 * (m + p - 2 - ceil((m - 1) / p)) * c} if p > 1 else {}
    for schedule in (SNO, SO) if c else (SNO, SO, AS, FBP):
        value = minibatch_s(chain, row, BapipePipeline(schedule, m, cuts))
        assert value == pytest.approx((m + p - 1) * 3.0 + transfers_s.get(schedule, 0.0))


def test_little_memory_takes_overlap_away() -> None:
    chain = even(4, 0.5).scaled(8)
    wide = DeviceRow((1.0,) * 4, 1.0)
    narrow = DeviceRow((1.0,) * 4, 1.0, memory_bytes=2 + 4.0)
    assert best_bapipe(chain, wide, (8,)).plan["schedule"] == SO
    assert best_bapipe(chain, narrow, (8,)).plan["schedule"] == SNO
    assert not best_bapipe(chain, DeviceRow((1.0,) * 4, 1.0, memory_bytes=2 + 3.9), (8,)).has_plan


def test_a_cut_inside_a_layer_balances() -> None:
    chain = even(3)
    assert best_bapipe(chain, DeviceRow((1.0, 1.0), 1.0), (1,)).value == 2 * 6.0
    answer = best_bapipe(chain, DeviceRow((1.0, 1.0), 1.0), (1,), intra_layer=True)
    assert answer.value == pytest.approx(2 * 4.5)
    assert answer.plan["cuts"] == [1.5]


def test_data_parallelism_is_the_fall_back() -> None:
    chain = chain_of(graph_format.read(PROFILES / "resnet50.graph.txt"))
    row = DeviceRow((1.0,) * 4, 1e10)
    pipeline = best_bapipe(chain, row, (4, 8))
    either = best_bapipe(chain, row, (4, 8), data_parallel=True)
    assert either.plan["schedule"] == "data-parallel"
    assert either.value < pipeline.value


OURS = {SNO: "1f1b-sno", SO: "1f1b-so", AS: "1f1b-as", FBP: "fbp-as"}


@pytest.mark.parametrize("transfer", REGIMES.values(), ids=REGIMES)
@pytest.mark.parametrize("schedule", [AS, FBP])
@pytest.mark.parametrize(("p", "m"), [(2, 3), (3, 8), (4, 4)])
def test_a_step_is_what_its_closed_form_says(p: int, m: int, schedule: str, transfer: float) -> None:
    ones = (1.0 * m,) * p
    chain = ChainCosts(tuple(map(str, range(p))), ones, (2.0 * m,) * p, ones, ones, (*(MIB * m,) * (p - 1), 0.0))
    pipeline = BapipePipeline(schedule, m, tuple(map(float, range(1, p))))
    closed_s = minibatch_s(chain, DeviceRow((1.0,) * p, MIB / transfer), pipeline)
    assert step_s(boards(p, transfer), OURS[schedule], m) == pytest.approx(closed_s)


@pytest.mark.parametrize("schedule", OURS)
@pytest.mark.parametrize(("p", "m"), [(1, 4), (4, 3), (4, 9), (7, 40)])
def test_a_stage_keeps_the_features_of_as_many_micro_batches_as_the_table_says(schedule: str, p: int, m: int) -> None:
    assert kept_by(OURS[schedule], p, m) == tuple(kept(schedule, number, p, m) for number in range(1, p + 1))


def placements(taken: tuple[int, ...], hosts: Hosts, stages: int) -> Iterator[tuple[Assignment, ...]]:
    """Every way to give all devices to ``stages`` stages by the policies."""
    free = hosts.hosts * hosts.per_host - sum(taken)
    if stages == 0:
        if free == 0:
            yield ()
        return
    for replicas in range(1, free + 1):
        for found in assignments(taken, replicas, hosts.per_host):
            yield from ((found, *rest) for rest in placements(most_first(found.after), hosts, stages - 1))


def costs_of(
    chain: ChainCosts, hosts: Hosts, count: int, bounds: tuple[int, ...], placed: tuple[Assignment, ...]
) -> list:
    """(F, B, AR) of stages and boundaries, on hosts that keep their names."""
    real = real_hosts(placed)
    found = []
    for stage, (first, last) in enumerate(pairwise(bounds)):
        replicas = sum(real[stage])
        used = [host for host, n in enumerate(real[stage]) if n]
        if stage:
            before = [host for host, n in enumerate(real[stage - 1]) if n]
            near = before == used and len(used) == 1
            bandwidth = hosts.within_bytes_per_s if near else hosts.across_bytes_per_s
            link = chain.crossing_bytes[first - 1] / count / (bandwidth * min(replicas, sum(real[stage - 1])))
            found.append((link, link, 0.0))
        bandwidth = hosts.within_bytes_per_s if len(used) == 1 else hosts.across_bytes_per_s
        reduction = 2 * (replicas - 1) / replicas * sum(chain.parameter_bytes[first:last]) / bandwidth
        seconds = [sum(values[first:last]) / count / replicas for values in (chain.forward_s, chain.backward_s)]
        found.append((*seconds, reduction))
    return found


def best_by_exhaustion(chain: ChainCosts, hosts: Hosts, count: int) -> float:
    best = inf
    for stages in range(1, min(chain.num_layers, hosts.hosts * hosts.per_host) + 1):
        for placed in placements((0,) * hosts.hosts, hosts, stages):
            for inner in combinations(range(1, chain.num_layers), stages - 1):
                bounds = (0, *inner, chain.num_layers)
                best = min(best, latency_s(costs_of(chain, hosts, count, bounds, placed), count))
    return best


@pytest.mark.parametrize("seed", range(120))
def test_no_pipeline_of_dapples_is_better(seed: int) -> None:
    draw = random.Random(seed)
    hosts = Hosts(*draw.choice([(1, 1), (1, 3), (1, 4), (2, 2), (3, 1)]), draw.uniform(1, 9), draw.uniform(0.5, 2))
    count = draw.choice([1, 2, 4, 16])
    chain = random_chain(seed)
    answer = best_dapple(chain, hosts, count)
    assert answer.value == pytest.approx(best_by_exhaustion(chain, hosts, count), rel=1e-9, abs=1e-12)
    assert answer.bound == answer.value
    stages = answer.plan["stages"]
    assert [name for stage in stages for name in stage["layers"]] == list(chain.names)
    used = [sum(host) for host in zip(*(stage["devices"] for stage in stages), strict=True)]
    assert used == [hosts.per_host] * hosts.hosts


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("taken", "replicas", "expected"),
    [
        ((0, 0), 2, {"fresh first": (2, 0), "scatter first": (1, 1)}),
        ((1, 0), 3, {"fresh first": (1, 3), "append first": (3, 1)}),
        ((2, 1, 0), 2, {"fresh first": (2, 1, 2), "append first": (3, 2, 0), "scatter first": (3, 2, 0)}),
    ],
)
def test_the_three_policies(taken: tuple[int, ...], replicas: int, expected: dict[str, tuple[int, ...]]) -> None:
    found = {a.policy: a.after for a in assignments(taken, replicas, 3)}
    assert found.items() <= expected.items()
    assert set(found.values()) == set(expected.values()) or len(found) == len(set(expected.values()))


def test_a_coarse_chain_has_the_same_totals() -> None:
    chain = chain_of(graph_format.read(PROFILES / "resnet50.graph.txt"))
    found = merged(chain, coarse_ends(chain, 20))
    assert found.num_layers <= 20
    assert sum(found.forward_s) == pytest.approx(sum(chain.forward_s))
    assert sum(found.parameter_bytes) == pytest.approx(sum(chain.parameter_bytes))
    assert found.crossing_bytes[-1] == 0.0
