from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations, pairwise
from math import inf
from pathlib import Path

import pytest

from planner.extras.baselines.common.problem import ChainCosts, chain_of, coarse_ends, merged
from planner.extras.baselines.dapple import (
    Assignment,
    Hosts,
    Suffix,
    as_good,
    assignments,
    best_pipeline,
    most_first,
    prepended,
    real_hosts,
)
from planner.extras.baselines.pipedream import format as graph_format
from planner.ir.errors import UsageError
from tests.planner.extras.baselines.peers.chains import latency_s, random_chain

PROFILES = Path(__file__).parents[3] / "data" / "profiles" / "pipedream"


def placements(
    taken: tuple[int, ...], hosts: Hosts, stages: int, policies: tuple[str, ...] = ()
) -> Iterator[tuple[Assignment, ...]]:
    """Every way to give all devices to ``stages`` stages by the policies."""
    free = hosts.hosts * hosts.per_host - sum(taken)
    if stages == 0:
        if free == 0:
            yield ()
        return
    for replicas in range(1, free + 1):
        for found in assignments(taken, replicas, hosts.per_host):
            yield from ((found, *rest) for rest in placements(most_first(found.after), hosts, stages - 1))


def costs(chain: ChainCosts, hosts: Hosts, count: int, bounds: tuple[int, ...], placed: tuple[Assignment, ...]) -> list:
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
                best = min(best, latency_s(costs(chain, hosts, count, bounds, placed), count))
    return best


@pytest.mark.parametrize("seed", range(120))
def test_equals_brute_force(seed: int) -> None:
    draw = random.Random(seed)
    hosts = Hosts(*draw.choice([(1, 1), (1, 3), (1, 4), (2, 2), (3, 1)]), draw.uniform(1, 9), draw.uniform(0.5, 2))
    count = draw.choice([1, 2, 4, 16])
    chain = random_chain(seed)
    answer = best_pipeline(chain, hosts, count)
    assert answer.value == pytest.approx(best_by_exhaustion(chain, hosts, count), rel=1e-9, abs=1e-12)
    assert answer.bound == answer.value


def test_the_latency_of_one_stage_is_its_work_and_its_all_reduce() -> None:
    assert latency_s([(1.0, 2.0, 0.5)], 4) == 4 * 3.0 + 0.5


def test_the_latency_of_equal_stages_is_that_of_gpipe() -> None:
    m, p, f, b = 8, 4, 1.0, 2.0
    assert latency_s([(f, b, 0.0)] * p, m) == (m + p - 1) * (f + b)


def test_the_pivot_moves_to_the_slowest_stage() -> None:
    # stage 0 is the slowest: warm-up 3, steady 3 x 6, ending 3; what follows ends before
    assert latency_s([(3.0, 3.0, 0.0), (1.0, 1.0, 0.0)], 4) == 3 + 3 * 6 + 3


def test_an_all_reduce_behind_the_pivot_hides_behind_what_comes_before() -> None:
    slow, quick = (3.0, 3.0, 0.0), (1.0, 1.0, 2.0)
    assert latency_s([slow, quick], 4) == latency_s([slow, (1.0, 1.0, 0.0)], 4)
    assert latency_s([slow, (1.0, 1.0, 5.0)], 4) == 3 + 3 * 6 + 5


def random_stage(draw: random.Random) -> tuple[float, float, float]:
    return draw.uniform(0, 1), draw.uniform(0, 2), draw.choice([0.0, draw.uniform(0, 9)])


@pytest.mark.parametrize("seed", range(200))
def test_four_numbers_of_a_suffix_give_its_latency(seed: int) -> None:
    draw = random.Random(seed)
    count, stages = draw.choice([1, 2, 8]), [random_stage(draw) for _ in range(draw.randint(1, 7))]
    assert folded(stages, count)[1] == pytest.approx(latency_s(stages, count))


def folded(stages: list[tuple[float, float, float]], count: int) -> tuple[float, float, float, float]:
    numbers = None
    for stage in reversed(stages):
        numbers = prepended(numbers, *stage, count)
    assert numbers is not None
    return numbers


def test_a_suffix_that_is_as_good_in_all_four_stays_so() -> None:
    draw, compared = random.Random(0), 0
    for _ in range(3000):
        count = draw.choice([2, 8])
        suffixes = [[random_stage(draw) for _ in range(draw.randint(1, 3))] for _ in range(2)]
        before = [random_stage(draw) for _ in range(draw.randint(1, 3))]
        one, other = (folded(suffix, count) for suffix in suffixes)
        if all(a <= b for a, b in zip(one, other, strict=True)):
            compared += 1
            one, other = (folded(before + suffix, count) for suffix in suffixes)
            assert all(a <= b + 1e-12 for a, b in zip(one, other, strict=True))
    assert compared > 300


@pytest.mark.parametrize("larger", range(4))
def test_a_suffix_that_is_larger_in_one_number_is_not_as_good(larger: int) -> None:
    whole = Assignment((0,), (1,), "fresh first")
    plain = Suffix(1.0, 1.0, 1.0, 1.0, 0, whole, None)
    other = Suffix(*(2.0 if k == larger else 1.0 for k in range(4)), 0, whole, None)  # type: ignore[arg-type]
    assert as_good(plain, other)
    assert not as_good(other, plain)
    assert as_good(plain, plain)


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


def test_a_plan_holds_every_layer_once_and_every_device() -> None:
    chain = chain_of(graph_format.read(PROFILES / "vgg16.graph.txt"))
    answer = best_pipeline(chain, Hosts(2, 4, 1e10, 1.25e9), 32)
    stages = answer.plan["stages"]
    assert isinstance(stages, list)
    assert [name for stage in stages for name in stage["layers"]] == list(chain.names)  # type: ignore[index,call-overload,union-attr]
    devices = [stage["devices"] for stage in stages]  # type: ignore[index,call-overload]
    assert [sum(host) for host in zip(*devices, strict=True)] == [4, 4]  # type: ignore[arg-type]


def test_better_links_are_never_worse() -> None:
    fine = chain_of(graph_format.read(PROFILES / "vgg16.graph.txt"))
    chain = merged(fine, coarse_ends(fine, 12))
    values = [best_pipeline(chain, Hosts(2, 2, within, 1e9), 16).value for within in (1e9, 1e10, 1e11)]
    assert values == sorted(values, reverse=True)


def test_when_time_is_up_the_bound_is_a_bound() -> None:
    chain = chain_of(graph_format.read(PROFILES / "gnmt.graph.txt"))
    exact = best_pipeline(chain, Hosts(1, 4, 1e9, 1e9), 16)
    answer = best_pipeline(chain, Hosts(1, 4, 1e9, 1e9), 16, time_limit_s=0.0)
    assert answer.status in ("time limit", "infeasible")
    assert answer.bound <= exact.value or not answer.has_plan


def test_a_coarse_chain_has_the_same_totals() -> None:
    chain = chain_of(graph_format.read(PROFILES / "resnet50.graph.txt"))
    found = merged(chain, coarse_ends(chain, 20))
    assert found.num_layers <= 20
    assert sum(found.forward_s) == pytest.approx(sum(chain.forward_s))
    assert sum(found.parameter_bytes) == pytest.approx(sum(chain.parameter_bytes))
    assert found.crossing_bytes[-1] == 0.0


@pytest.mark.parametrize("wrong", [Hosts(0, 4, 1.0, 1.0), Hosts(1, 0, 1.0, 1.0), Hosts(1, 1, 0.0, 1.0)])
def test_no_devices_and_no_bandwidth_are_refused(wrong: Hosts) -> None:
    with pytest.raises(UsageError):
        best_pipeline(random_chain(0), wrong, 4)
