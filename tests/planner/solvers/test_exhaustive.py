"""Every solver that proves its plans, beside exhaustive search over all plans of small problems of every family."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import pytest

from benchmarks.chains import chain_profile
from planner.costs.candidate import Candidate
from planner.costs.cost_model import CostModel
from planner.costs.predict import predict
from planner.ir.cluster import HOST, Cluster, Link, Tier
from planner.ir.constraints import parse_rule
from planner.ir.problem import ALWAYS, AUTO, SELECTIVE, Problem
from planner.ir.profile import Measurement, Optimizer
from planner.schedules import names as schedules
from planner.schedules import traits
from planner.solvers import names, solver
from planner.solvers.candidates.candidate import decision_of, like_groups, pools
from planner.solvers.candidates.evaluate import Evaluator
from tests.oracles.plans import check
from tests.planner.corrections import random_corrections
from tests.planner.solvers.instances import (
    asked_of_branches,
    asked_problem,
    assert_best_of_all,
    assert_nothing_is_faster,
    attention_problem,
    best_by_exhaustion,
    branching_problem,
    heavy_problem,
    plans,
    random_problem,
    several_a_position,
    streaming,
    tied_branches,
    tied_problem,
    uneven_problem,
    virtual_plans,
    with_branches,
    with_fewer_plans,
)

PLAIN = ("1f1b", "gpipe")
SEVERAL = tuple(name for name in schedules() if traits(name).trains and traits(name).stages_per_position != 1)
RULES = (
    *("l1=stage:0", "l1=stage:1", "l0=replicas:1", "l*=replicas:1", "l[01]=together", "l0=together"),
    *("l1=device:n?/cpu0", "l1=kind:kind-*", "*=sample:1"),
)


def under_rules(seed: int) -> Problem:
    """A chain, with recomputation or not, of which one or two rules are fixed or forbidden."""
    draw = random.Random(seed)
    rules = [tuple(map(parse_rule, draw.sample(RULES, count))) for count in draw.choice([(1, 0), (0, 1), (1, 1)])]
    problem = replace(random_problem(seed), schedules=PLAIN, recompute=draw.choice(["never", "never", AUTO, ALWAYS]))
    return replace(problem, fix=rules[0], forbid=rules[1])


def divided(seed: int) -> Problem:
    """What ranks of a stage have is divided among them, and there is much of it."""
    problem = (random_problem if seed % 3 else branching_problem)(seed)
    profile = replace(problem.profile, optimizer=Optimizer("Adam", {}, 2.0))
    return replace(problem, profile=profile, shard=ALWAYS, zero=1 + seed % 3)


def tied_and_divided(seed: int) -> Problem:
    """The same, but for what other stages use too."""
    return replace(tied_problem(seed), shard=ALWAYS, zero=1 + seed % 3)


def recomputed(seed: int) -> Problem:
    return replace((random_problem if seed % 2 else branching_problem)(seed), recompute=AUTO)


def attention(seed: int) -> Problem:
    """What attention saves may be computed again, alone or not."""
    return replace(attention_problem(seed), recompute=AUTO if seed % 2 else SELECTIVE, schedules=PLAIN)


def corrected(seed: int) -> Problem:
    """What was observed of runs corrects what is predicted, also of stages that share a host."""
    problem = (random_problem, branching_problem, heavy_problem)[seed % 3](seed)
    corrections = random_corrections(random.Random(seed), problem.profile)
    return replace(problem, profile=problem.profile.corrected_by(corrections))


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


def in_tiers(seed: int) -> Problem:
    """Three devices in random places of a tree; one time in five outer links are the faster ones."""
    problem = random_problem(seed)
    draw = random.Random(1000 + seed)
    profile = problem.profile
    devices = profile.cluster.devices
    while len(devices) < 3:
        devices = (*devices, devices[0])
    rates = sorted((draw.choice([1e5, 1e6, 1e7, 1e9]) for _ in TIERS), reverse=draw.random() < 0.8)
    where = sorted("/".join(f"{level}{draw.randint(0, 1)}" for level in "rhi") for _ in devices)
    cluster = nested(replace(profile.cluster, devices=devices), where, rates, draw.choice([0.0, 1e-5]))
    return replace(problem, profile=replace(profile, cluster=cluster), schedules=("gpipe", "1f1b"))


def many_shares(seed: int) -> Problem:
    """Two unlike devices, whose ratio differs from layer to layer and from size to size, and many samples."""
    draw = random.Random(seed)
    layers = 2
    profile = chain_profile(
        layers,
        2,
        forward_s=[draw.uniform(1e-4, 1e-3) for _ in range(layers)],
        parameter_bytes=[4 * draw.randint(1, 5000) for _ in range(layers)],
        activation_bytes=[4 * draw.randint(1, 2000) for _ in range(layers)],
        speeds=[1.0, draw.choice([0.4, 0.7, 1.9])],
        memory_bytes=draw.choice([2**30, 2**30, (2**30, 400_000), (300_000, 2**30)]),
        latency_s=draw.choice([0.0, 1e-4]),
        bandwidth_bytes_per_s=draw.choice([1e7, 1e9]),
        update_s=draw.choice([0.0, 3e-4]),
        sizes=(1, 2, 4, 8, 16, 32, 64),
    )

    def uneven(one: Measurement) -> Measurement:
        names = ("forward_s", "backward_s", "backward_input_s", "backward_weight_s")
        return replace(one, **{name: draw.uniform(0.8, 1.2) * getattr(one, name) + 2e-5 for name in names})

    measured = {kind: tuple(map(uneven, found)) for kind, found in profile.measurements.items()}
    size = draw.randint(38, 48)
    batch = draw.choice([size, 2 * size, 2 * size - 5])
    return Problem(
        replace(profile, measurements=measured),
        batch,
        schedules=("1f1b",),
        micro_batch_sizes=(size,),
        memory_margin=0.0,
        confidence=0.0,
    )


def several_kinds(seed: int) -> Problem:
    """Three or four devices of two or three kinds, on hosts of their own or not, some with little memory."""
    draw = random.Random(seed)
    count = draw.choice([3, 3, 4])
    layers = 3 if count == 3 else 2
    profile = chain_profile(
        layers,
        count,
        forward_s=[draw.uniform(1e-4, 1e-3) for _ in range(layers)],
        parameter_bytes=[4 * draw.randint(1, 500) for _ in range(layers)],
        activation_bytes=[4 * draw.randint(1, 400) for _ in range(layers)],
        saved_bytes=[4 * draw.randint(1, 400) for _ in range(layers)],
        speeds=[1.0, *(draw.choice([1.0, 0.5, 1.7]) for _ in range(count - 2)), 0.7],
        hosts=[draw.choice(["n0", "n1"]) for _ in range(count)] if draw.random() < 0.5 else None,
        memory_bytes=[draw.choice([9_000, 15_000, 2**30]) for _ in range(count)] if draw.random() < 0.5 else 2**30,
        latency_s=draw.choice([0.0, 1e-4]),
        bandwidth_bytes_per_s=draw.choice([1e6, 1e7, 1e9]),
        duplex=draw.random() < 0.8,
        all_reduce_latency_s=draw.choice([0.0, 1e-4]),
        sizes=(1, 2, 4, 8),
    )
    size = draw.choice([5, 6, 7]) if count == 3 else 5
    schedule = draw.choice(["1f1b", "gpipe", "1f1b-so"])
    more = draw.choice([0, 4, size])
    return Problem(
        profile,
        size + more,
        schedules=(schedule,),
        micro_batch_sizes=(size,),
        memory_margin=0.0,
        max_stages=6 - count,
        confidence=0.0,
    )


def several_stages_a_device(seed: int) -> Problem:
    """Under each schedule of that sort in turn; every second time with branches.

    Where pipelines run both ways samples are halved, and on unlike devices moved in the end: those are alike here.
    """
    name = SEVERAL[seed % len(SEVERAL)]
    problem = several_a_position(seed, name)
    cluster = problem.profile.cluster
    if traits(name).bidirectional:
        alike = tuple(replace(device, kind=cluster.devices[0].kind) for device in cluster.devices)
        problem = replace(problem, profile=replace(problem.profile, cluster=replace(cluster, devices=alike)))
    if len(cluster.devices) > 2:
        problem = replace(problem, global_batch=2)  # else plans are many
    return with_branches(problem, seed) if seed // len(SEVERAL) % 2 else problem


FEW_PLANS = [
    seed
    for seed in range(240)
    for profile in [several_a_position(seed, SEVERAL[seed % len(SEVERAL)]).profile]
    if len(profile.graph.layers) * len(profile.cluster.devices) <= 12
]
"""Of these the other seeds have so many that one takes half a minute."""


def anything(seed: int) -> Problem:
    """Most with two stages at most: there are many plans with every share of samples."""
    problem = uneven_problem(seed)
    return replace(problem, max_stages=2) if seed % 4 else problem


@dataclass(frozen=True)
class Family:
    """Problems by seed, all plans of one, and who has to find the best of them."""

    make: Callable[[int], Problem]
    seeds: Sequence[int] = range(60)
    every: Callable[[Problem], Iterator[Candidate]] = plans
    solvers: tuple[str, ...] = ("best-first",)


BOTH = ("best-first", "span-ilp")
FAMILIES: Mapping[str, Family] = {
    "chains": Family(random_problem),
    "branches": Family(branching_problem),
    "heavy": Family(heavy_problem),
    "streams": Family(streaming),
    "ties": Family(tied_problem),
    "branches with ties": Family(tied_branches),
    "ties beside ZeRO": Family(tied_and_divided),
    "ZeRO": Family(divided, solvers=BOTH),
    "recomputed": Family(recomputed),
    "attention": Family(attention, (4, 6, 16, 58, 206, 234, 293, 319, 352, 378), solvers=BOTH),
    "corrected": Family(corrected, solvers=BOTH),
    "tiers": Family(in_tiers, solvers=BOTH),
    "rules": Family(under_rules, range(120), solvers=BOTH),
    "many shares": Family(many_shares),
    "several kinds": Family(several_kinds),
    "anything": Family(anything, range(120), partial(plans, every_share=True)),
    "several stages a device": Family(several_stages_a_device, FEW_PLANS, virtual_plans),
}


def smaller(problem: Problem, seed: int) -> Problem:
    """On three devices a batch of three samples, and mostly two stages at most: else plans are very many."""
    if len(problem.profile.cluster.devices) > 2 and not problem.max_stages:
        problem = replace(problem, global_batch=min(3, problem.global_batch), max_stages=2 if seed % 4 else 0)
    return problem


@pytest.mark.cases(48)
@pytest.mark.parametrize(("name", "seed"), [(name, seed) for name, family in FAMILIES.items() for seed in family.seeds])
def test_the_plan_is_the_best_of_all_plans(name: str, seed: int) -> None:
    family = FAMILIES[name]
    problem = family.make(seed)
    assert_best_of_all(smaller(problem, seed) if family.every is plans else problem, family.every, family.solvers)


@pytest.mark.cases(30)
@pytest.mark.parametrize("seed", range(300))
def test_whatever_is_asked_no_plan_is_faster_than_one_that_is_proven(seed: int) -> None:
    assert_nothing_is_faster(with_fewer_plans(asked_problem(seed)))


@pytest.mark.cases(30)
@pytest.mark.parametrize("seed", range(300))
def test_of_a_network_with_branches_none_is_either(seed: int) -> None:
    assert_nothing_is_faster(with_fewer_plans(asked_of_branches(seed)))


@pytest.mark.parametrize("seed", [5, 30])
def test_fewer_plans_are_simulated_than_there_are(seed: int) -> None:
    problem = random_problem(seed)
    assert solver("best-first")(problem).search.num_simulated < sum(1 for _ in plans(problem))


@pytest.mark.parametrize("seed", [5, 13, 17, 30])
def test_some_of_the_best_plans_part_layers_that_share_a_parameter(seed: int) -> None:
    problem = tied_problem(seed)
    placed = solver("best-first")(problem).decision.layers
    layers = problem.profile.graph.layers
    users = problem.profile.graph.tied_layers().values()
    assert any(len({placed[layers[index].name].stage for index in own}) > 1 for own in users)


@pytest.mark.parametrize("seed", range(24))
def test_the_fast_evaluation_is_what_predict_says(seed: int) -> None:
    problem = replace((random_problem, tied_problem)[seed % 2](seed // 2), recompute=AUTO)
    evaluator = Evaluator(problem, CostModel(problem.profile))
    for candidate in list(plans(problem))[::397]:
        found = evaluator.evaluate(candidate)
        prediction, _ = predict(problem.profile, decision_of(problem, candidate), problem.memory_margin)
        assert [memory.peak_bytes for memory in found.memories] == [rank.peak_bytes for rank in prediction.ranks]
        if found.fits:
            assert found.step_s == pytest.approx(prediction.step_s, rel=1e-12)


def test_unlike_devices_share_by_measured_times_and_not_by_rounded_speed() -> None:
    profile = chain_profile(2, 2, speeds=[1.0, 1.6], parameter_bytes=400, bandwidth_bytes_per_s=1e7, sizes=(1, 2, 4, 8))
    problem = Problem(profile, 4, confidence=0.0)
    assert solver("best-first")(problem).decision.layout_of(0).samples(4) == (1, 3)
    assert_best_of_all(problem, partial(plans, every_share=True))


def test_memory_that_balanced_stages_lack_is_met_by_other_cuts() -> None:
    saved = (40_000, 1000, 1000, 1000, 1000)
    profile = chain_profile(5, 2, saved_bytes=saved, parameter_bytes=100, activation_bytes=100, memory_bytes=200_000)
    problem = Problem(profile, 4, schedules=("interleaved",), memory_margin=0.0, confidence=0.0)
    assert best_by_exhaustion(problem, virtual_plans)[0] is not None
    assert_best_of_all(problem, virtual_plans)


def two_racks(per_host: int = 1) -> Problem:
    """Racks of two hosts of one island each; gradients are dear across racks."""
    where = [f"{rack}/{host}/i" for rack in "ab" for host in "xy" for _ in range(per_host)]
    profile = chain_profile(4, len(where), forward_s=(3e-3, 1e-3, 3e-3, 2e-3), parameter_bytes=2**18, latency_s=1e-5)
    cluster = nested(profile.cluster, where, (1e10, 1e9, 1e8, 1e7), 1e-5)
    return Problem(replace(profile, cluster=cluster), 8, confidence=0.0)


@pytest.mark.parametrize("name", names())
def test_every_solver_plans_for_tiers_and_its_plan_is_checked(name: str) -> None:
    problem = two_racks()
    plan = solver(name)(replace(problem, time_limit_s=4.0))
    assert check(plan, problem.profile) == ()
    best = solver("best-first")(problem)
    assert best.search.status == "proven"
    assert best.prediction.step_s <= plan.prediction.step_s * (1 + 1e-9)


def test_a_group_of_gradients_stays_where_links_are_fast() -> None:
    problem = two_racks(2)
    plan = solver("best-first")(problem)
    cluster = problem.profile.cluster
    assert {cluster.group_link_class(stage.ranks) for stage in plan.decision.stages} <= {"nvlink", "leaf"}
    fast = replace(cluster, links={**cluster.links, "spine": cluster.links["nvlink"], "leaf": cluster.links["nvlink"]})
    other = solver("best-first")(replace(problem, profile=replace(problem.profile, cluster=fast)))
    assert other.prediction.step_s < plan.prediction.step_s


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
    profile = chain_profile(2, len(where))
    cluster = nested(profile.cluster, where, (4e9, 3e9, 2e9, 1e9))
    assert like_groups(pools(Problem(replace(profile, cluster=cluster), 4, confidence=0.0))) == alike
