from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product

import pytest

from benchmarks.chains import chain_profile
from planner.costs.cost_model import CostModel
from planner.costs.predict import predict
from planner.ir.cluster import Link
from planner.ir.codec import dumps
from planner.ir.errors import InfeasibleError, MissingMeasurementError, UnknownNameError, UsageError
from planner.ir.plan import Plan
from planner.ir.problem import ALWAYS, Problem
from planner.solvers import SearchProgress, baselines, solver
from planner.solvers.best_first.solver import solve
from planner.solvers.candidates.candidate import decision_of
from planner.solvers.candidates.evaluate import Evaluator
from tests.oracles.plans import check
from tests.planner.solvers.instances import (
    best_by_exhaustion,
    branching_problem,
    heavy_problem,
    plans,
    random_problem,
    streaming,
    tied_problem,
    with_memory,
)
from tests.sampling import some

tied_branches = partial(tied_problem, make=branching_problem)


def tied_and_divided(seed: int) -> Problem:
    """What ranks of a stage have is divided among them, but for what other stages use too."""
    return replace(tied_problem(seed), shard=ALWAYS, zero=1 + seed % 3)


@pytest.mark.parametrize(
    "make",
    [
        random_problem,
        branching_problem,
        heavy_problem,
        streaming,
        tied_problem,
        tied_branches,
        tied_and_divided,
    ],
    ids=["chains", "branches", "heavy", "streams", "ties", "branches with ties", "ties beside ZeRO"],
)
@pytest.mark.parametrize("first", range(0, 60, 20))
def test_the_plan_is_the_best_of_all_plans(first: int, make: Callable[[int], Problem]) -> None:
    num_infeasible = num_saved = 0
    for seed in some(range(first, first + 20), 5):
        problem = make(seed)
        best, num_plans = best_by_exhaustion(problem)
        try:
            plan = solve(problem)
        except InfeasibleError:
            assert best is None, seed
            num_infeasible += 1
            continue
        assert plan.search.status == "proven", seed
        assert plan.search.bound_s == pytest.approx(plan.prediction.step_s, rel=1e-8)
        assert best is not None, seed
        assert plan.prediction.step_s == pytest.approx(best.step_s, rel=1e-9), seed
        assert check(plan, problem.profile) == (), seed
        num_saved += num_plans > plan.search.num_simulated
    assert num_saved > 0
    assert num_infeasible < 10


def test_some_random_problems_are_infeasible_and_some_have_unlike_devices() -> None:
    problems = [random_problem(seed) for seed in range(120)]
    assert best_by_exhaustion(problems[15])[0] is None  # the first
    assert any(len({d.kind for d in problem.profile.cluster.devices}) > 1 for problem in problems)


def test_some_of_the_best_plans_part_layers_that_share_a_parameter() -> None:
    num_parted = 0
    for seed in (5, 13, 17, 30):
        problem = tied_problem(seed)
        placed, layers = solve(problem).decision.layers, problem.profile.graph.layers
        users = problem.profile.graph.tied_layers().values()
        num_parted += any(len({placed[layers[index].name].stage for index in own}) > 1 for own in users)
    assert num_parted == 4


def step_s(problem: Problem) -> float:
    try:
        return solve(problem).prediction.step_s
    except InfeasibleError:
        return float("inf")


def no_worse(more: float, less: float) -> bool:
    return more <= less * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(30))
def test_more_is_never_worse(seed: int) -> None:
    problem = random_problem(seed)
    cluster = problem.profile.cluster
    before = step_s(problem)

    def on(changed: object) -> Problem:
        return replace(problem, profile=replace(problem.profile, cluster=changed))

    assert no_worse(before, step_s(replace(problem, num_ranks=max(1, len(cluster.devices) - 1))))
    richer = tuple(replace(device, memory_bytes=2 * device.memory_bytes) for device in cluster.devices)
    assert no_worse(step_s(on(replace(cluster, devices=richer))), before)
    if all(link.duplex for link in cluster.links.values()):  # on a shared wire the order may turn against one
        faster = {name: faster_link(link) for name, link in cluster.links.items()}
        assert no_worse(step_s(on(replace(cluster, links=faster))), before)
    assert no_worse(step_s(replace(problem, schedules=())), before)


def faster_link(link: Link) -> Link:
    return replace(link, points=tuple((size, seconds / 2) for size, seconds in link.points))


@pytest.mark.parametrize("seed", range(40))
def test_no_baseline_is_faster(seed: int) -> None:
    problem = random_problem(seed)
    best_s = step_s(problem)
    for name in baselines():
        if name == "even-split" and "gpipe" not in (problem.schedules or ("gpipe",)):
            continue
        try:
            other = solver(name)(problem).prediction.step_s
        except InfeasibleError:
            continue
        assert no_worse(best_s, other), name


def test_the_order_of_like_devices_does_not_matter() -> None:
    speeds = (1.0, 2.5, 1.0)
    steps = {
        step_s(Problem(chain_profile(4, 3, forward_s=(1e-3, 2e-3, 1e-3, 3e-3), speeds=order), 4))
        for order in (speeds, speeds[::-1], (1.0, 1.0, 2.5))
    }
    assert max(steps) == pytest.approx(min(steps), rel=1e-9)


def test_the_fast_evaluation_is_what_predict_says() -> None:
    for seed, make in product(range(12), (random_problem, tied_problem)):
        problem = replace(make(seed), recompute="auto")
        evaluator = Evaluator(problem, CostModel(problem.profile))
        for candidate in list(plans(problem))[::397]:
            found = evaluator.evaluate(candidate)
            prediction, _ = predict(problem.profile, decision_of(problem, candidate), problem.memory_margin)
            assert [m.peak_bytes for m in found.memories] == [rank.peak_bytes for rank in prediction.ranks]
            if found.fits:
                assert found.step_s == pytest.approx(prediction.step_s, rel=1e-12)


def test_a_plan_is_the_same_every_time() -> None:
    problem = random_problem(7)
    assert dumps(solve(problem)) == dumps(solve(problem))


def heavy() -> Problem:
    """A model whose gradients are dear to sum, so that a pipeline is best."""
    profile = chain_profile(
        6, 2, forward_s=(1e-3, 2e-3, 1e-3, 3e-3, 1e-3, 1e-3), parameter_bytes=2**20, bandwidth_bytes_per_s=1e8
    )
    return Problem(profile, 8)


def test_alternatives_say_why_not() -> None:
    plan = solve(heavy())
    assert len(plan.decision.stages) == 2
    why_not = {other.name: other.why_not for other in plan.alternatives}
    assert {"one-device", "data-parallel", "even-split"} <= set(why_not)
    other = {"gpipe": "schedule 1f1b", "1f1b": "schedule gpipe"}[plan.decision.schedule]
    assert other in why_not
    assert "sums gradients" in why_not["data-parallel"]
    assert all("slower" in text or text == "as fast" for text in why_not.values())
    assert "computes stage" in plan.search.binding[0]


def test_an_alternative_that_does_not_fit_says_what_it_needs() -> None:
    problem = heavy()
    need = max(rank.peak_bytes for rank in solve(problem).prediction.ranks)
    plan = solve(with_memory(replace(problem, memory_margin=0.0), need + 1024))
    why_not = {other.name: other.why_not for other in plan.alternatives}
    assert "needs" in why_not["one-device"]
    assert "on rank 0, limit" in why_not["one-device"]
    assert any("memory: rank" in text for text in plan.search.binding)


def test_nothing_fits_names_rank_need_limit_part_and_what_would_help() -> None:
    problem = replace(heavy(), micro_batch_sizes=(8,), num_ranks=1)
    fits = solve(heavy())
    need = max(rank.peak_bytes for rank in fits.prediction.ranks)
    with pytest.raises(InfeasibleError) as error:
        solve(with_memory(problem, int(need / 0.9)))
    text = str(error.value)
    assert "rank 0, n0/cpu0 (kind-1): the leanest plan needs" in text
    assert "minus 8% margin" in text
    assert "largest part: parameters" in text
    assert "without" in text
    assert "fits" in text


def test_a_limit_that_was_asked_for_is_told_apart_from_what_the_device_has() -> None:
    with pytest.raises(InfeasibleError, match=r"usable 1000 bytes \(asked for; the device has .* minus 8% margin\)"):
        solve(replace(heavy(), memory_bytes=1000))


def test_what_no_change_helps_is_said() -> None:
    with pytest.raises(InfeasibleError, match=r"try: 6\.6 MiB of memory a device"):
        solve(with_memory(heavy(), 1000))


def test_layers_that_keep_a_stage_on_one_rank_are_named_where_nothing_fits() -> None:
    problem = with_memory(heavy(), 1000)
    with pytest.raises(InfeasibleError) as free:
        solve(problem)
    assert "mix" not in str(free.value)
    graph = problem.profile.graph
    layers = tuple(
        replace(layer, attributes={**layer.attributes, "mixes_samples": True}) if layer.name in ("l1", "l2") else layer
        for layer in graph.layers
    )
    mixing = replace(problem.profile, graph=replace(graph, layers=layers))
    with pytest.raises(InfeasibleError, match="2 layers mix samples, such as l1: a stage that has one is not divided"):
        solve(replace(problem, profile=mixing))


@pytest.mark.parametrize("gap", [0.0, 0.5])
def test_a_gap_ends_the_search_sooner(gap: float) -> None:
    plan = solve(replace(heavy(), gap=gap))
    assert plan.search.bound_s >= plan.prediction.step_s * (1 - gap) * (1 - 1e-9)
    assert plan.search.status == ("proven" if plan.search.gap < 1e-8 else "within gap")


def test_out_of_time_the_best_so_far_is_returned_with_its_gap() -> None:
    plan = solve(replace(heavy(), time_limit_s=0.0))
    assert plan.search.status == "time limit"
    assert 0 < plan.search.bound_s <= plan.prediction.step_s
    assert plan.search.gap == pytest.approx(plan.prediction.step_s / plan.search.bound_s - 1)


def test_ctrl_c_returns_the_best_so_far() -> None:
    seen: list[SearchProgress] = []

    def stop(progress: SearchProgress) -> None:
        seen.append(progress)
        raise KeyboardInterrupt

    plan = solve(big(), stop)
    assert plan.search.status == "stopped"
    assert plan.prediction.step_s >= plan.search.bound_s > 0
    assert seen[0].best_s >= plan.prediction.step_s


def big() -> Problem:
    """Long enough a search to report: unlike layers, several devices on two hosts, dear messages and gradients."""
    forward_s = [1e-3 * (1 + i * i % 7) for i in range(40)]
    profile = chain_profile(
        40,
        4,
        forward_s=forward_s,
        parameter_bytes=2**18,
        activation_bytes=2**16,
        bandwidth_bytes_per_s=1e8,
        latency_s=1e-3,
        hosts=("n0", "n0", "n1", "n1"),
        duplex=False,
    )
    return Problem(profile, 16)


def solved(problem: Problem) -> Plan:
    return solve(problem)


def test_micro_batches_and_stages_may_be_restricted() -> None:
    plan = solved(replace(heavy(), micro_batch_sizes=(3,)))
    assert plan.decision.micro_batches == (3, 3, 2)
    assert len(solved(replace(heavy(), max_stages=1)).decision.stages) == 1
    assert len(solved(replace(heavy(), num_ranks=1)).decision.program) == 1


def test_layers_that_share_a_parameter_are_parted_where_a_schedule_lets_them_and_else_that_is_said() -> None:
    problem = heavy()
    layers = problem.profile.graph.layers
    tied = tuple(replace(layer, parameters=("l1.weight",)) if layer.name in ("l1", "l4") else layer for layer in layers)
    profile = replace(problem.profile, graph=replace(problem.profile.graph, layers=tied))
    plan = solved(replace(problem, profile=profile))
    assert plan.decision.layers["l1"].stage != plan.decision.layers["l4"].stage
    assert plan.search.status == "proven"
    assert not any("no cut" in each.what for each in plan.search.rejected)
    whole = solved(replace(problem, profile=profile, schedules=("pipedream",)))
    assert len({whole.decision.layers[name].stage for name in ("l1", "l2", "l3", "l4")}) == 1
    assert "no cut between l1 and l4" in [each.what for each in whole.search.rejected]


def test_layers_that_mix_samples_are_not_replicated() -> None:
    problem = replace(heavy(), profile=chain_profile(4, 2, bandwidth_bytes_per_s=1e12))
    assert len(solved(problem).decision.stages[0].ranks) == 2
    layers = problem.profile.graph.layers
    mixed = replace(layers[1], outputs=(replace(layers[1].outputs[0], dims=("dim0", "feature")),))
    graph = replace(problem.profile.graph, layers=(layers[0], mixed, *layers[2:]))
    plan = solved(replace(problem, profile=replace(problem.profile, graph=graph)))
    stage = plan.decision.layers["l1"].stage
    assert len(plan.decision.stages[stage].ranks) == 1
    with pytest.raises(InfeasibleError, match="cannot be cut by samples"):
        solver("data-parallel")(replace(problem, profile=replace(problem.profile, graph=graph)))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"schedules": ("zigzag",)}, UnknownNameError),
        ({"global_batch": 0}, UsageError),
        ({"micro_batch_sizes": (0,)}, UsageError),
    ],
)
def test_what_cannot_be_understood_is_refused(changes: dict[str, object], error: type[Exception]) -> None:
    with pytest.raises(error):
        solve(replace(heavy(), **changes))


def test_a_profile_that_says_nothing_about_the_sizes_is_refused() -> None:
    problem = Problem(chain_profile(2, 1, sizes=(8,)), 4, micro_batch_sizes=(2,))
    with pytest.raises(MissingMeasurementError):
        solve(problem)


@pytest.mark.parametrize("seed", range(12))
def test_the_checker_agrees_where_gradients_are_summed_in_several_buckets(seed: int) -> None:
    problem = heavy_problem(seed)
    plan = solve(problem)
    assert check(plan, problem.profile) == ()
