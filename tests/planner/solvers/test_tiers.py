"""Plans for clusters with NVLink islands in hosts in racks: every solver, the checker, exhaustive search."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from benchmarks.chains import chain_profile
from planner.ir.cluster import HOST, Cluster, Link, Tier
from planner.ir.errors import InfeasibleError
from planner.ir.problem import Problem
from planner.solvers import names, solver
from planner.solvers.candidates.candidate import like_groups, pools
from tests.oracles.plans import check
from tests.planner.solvers.instances import best_by_exhaustion, random_problem
from tests.sampling import everything, some

TIERS = (Tier("nvlink", "island"), Tier("board", HOST), Tier("leaf", "rack"), Tier("spine"))


def nested(cluster: Cluster, where: Sequence[str], rates: Sequence[float], latency_s: float = 0.0) -> Cluster:
    """The cluster with its devices at ``rack/host/island``, and a link of each rate, innermost first."""
    devices = tuple(
        replace(
            device,
            name=f"{place.rpartition('/')[0]}/cpu{rank}",
            host=place.rpartition("/")[0],
            groups={"island": place, "rack": place.partition("/")[0]},
        )
        for rank, (device, place) in enumerate(zip(cluster.devices, where, strict=True))
    )
    links = {tier.name: Link(latency_s, rate) for tier, rate in zip(TIERS, rates, strict=True)}
    return Cluster(devices, links, tiers=TIERS)


def nested_problem(seed: int) -> Problem:
    """Three devices in random places of a tree; one time in five outer links are the faster ones."""
    problem, draw = random_problem(seed), random.Random(1000 + seed)
    profile = problem.profile
    devices = profile.cluster.devices
    while len(devices) < 3:
        devices = (*devices, devices[0])
    rates = sorted((draw.choice([1e5, 1e6, 1e7, 1e9]) for _ in TIERS), reverse=draw.random() < 0.8)
    where = sorted("/".join(f"{level}{draw.randint(0, 1)}" for level in "rhi") for _ in devices)
    cluster = nested(replace(profile.cluster, devices=devices), where, rates, draw.choice([0.0, 1e-5]))
    return replace(problem, profile=replace(profile, cluster=cluster), schedules=("gpipe", "1f1b"))


@pytest.mark.parametrize("first", range(0, 24, 6))
def test_the_plan_is_the_best_of_all_plans(first: int) -> None:
    num_tiers = set()
    for seed in some(range(first, first + 6), 2):
        problem = nested_problem(seed)
        num_tiers.add(problem.profile.cluster.tiers_used())
        best, _ = best_by_exhaustion(problem)
        for name in ("best-first", "span-ilp"):
            try:
                plan = solver(name)(problem)
            except InfeasibleError:
                assert best is None, (name, seed)
                continue
            assert plan.search.status == "proven", (name, seed)
            assert best is not None, (name, seed)
            assert plan.prediction.step_s == pytest.approx(best.step_s, rel=1e-9), (name, seed)
            assert check(plan, problem.profile) == (), (name, seed)
    assert len(num_tiers) > 2 or not everything


def two_racks() -> Problem:
    """Eight devices: racks of two hosts of one island of two; gradients are dear across racks."""
    profile = chain_profile(6, 8, forward_s=(1e-3, 2e-3, 1e-3, 3e-3, 1e-3, 1e-3), parameter_bytes=2**18, latency_s=1e-5)
    where = [f"{rack}/{host}/i" for rack in "ab" for host in "xy" for _ in range(2)]
    cluster = nested(profile.cluster, where, (1e10, 1e9, 1e8, 1e7), 1e-5)
    return Problem(replace(profile, cluster=cluster), 8)


@pytest.mark.parametrize("name", names())
def test_every_solver_plans_for_tiers_and_its_plan_is_checked(name: str) -> None:
    problem = two_racks()
    plan = solver(name)(replace(problem, time_limit_s=4.0) if name == "span-ilp" else problem)  # more would not do
    assert check(plan, problem.profile) == ()
    best = solver("best-first")(problem)
    assert best.search.status == "proven"
    assert best.prediction.step_s <= plan.prediction.step_s * (1 + 1e-9)


def test_a_group_of_gradients_stays_where_links_are_fast() -> None:
    problem = two_racks()
    plan = solver("best-first")(problem)
    cluster = problem.profile.cluster
    for stage in plan.decision.stages:
        assert cluster.group_link_class(stage.ranks) in ("nvlink", "leaf")
    fast = replace(cluster, links={**cluster.links, "spine": cluster.links["nvlink"], "leaf": cluster.links["nvlink"]})
    other = solver("best-first")(replace(problem, profile=replace(problem.profile, cluster=fast)))
    assert other.prediction.step_s < plan.prediction.step_s


def places(*where: str) -> Problem:
    profile = chain_profile(2, len(where))
    return Problem(replace(profile, cluster=nested(profile.cluster, where, (4e9, 3e9, 2e9, 1e9))), 4)


@pytest.mark.parametrize(
    ("where", "alike"),
    [
        (("a/x/0", "a/x/0", "a/x/1", "a/x/1"), (((0,), (1,)),)),
        (("a/x/0", "a/y/0", "b/x/0", "b/y/0"), (((0,), (1,)), ((2,), (3,)), ((0, 1), (2, 3)))),
        (("a/x/0", "a/x/1", "a/y/0"), (((0,), (1,)),)),  # a host of two islands is unlike one of one
        (("a/x/0", "a/x/0", "a/x/1"), ()),
        (("a/x/0", "b/y/1"), (((0,), (1,)),)),
    ],
)
def test_groups_change_places_with_all_that_is_in_them(where: tuple[str, ...], alike: object) -> None:
    assert like_groups(pools(places(*where))) == alike
