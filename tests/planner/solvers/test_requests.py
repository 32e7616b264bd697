"""Whatever is asked for is kept, by every solver, or refused; more freedom never finds less; time limits hold."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.chains import chain_profile
from planner.costs.cost_model import CostModel
from planner.ir.constraints import FAMILIES, CutDegrees, broken, parse_rule
from planner.ir.errors import HalopipeError, InfeasibleError, UsageError
from planner.ir.plan import Plan
from planner.ir.problem import Problem
from planner.schedules import default_names, traits
from planner.solvers import baselines, names, solver
from planner.solvers.candidates.evaluate import Evaluation, Evaluator
from tests.oracles.plans import check
from tests.planner.networks import Network, priced, residual, with_running_statistics
from tests.planner.solvers.instances import random_problem
from tests.sampling import some

OURS = "best-first"


def disobeyed(plan: Plan, problem: Problem) -> Iterator[str]:
    """What the plan does not keep, read off its decision and prediction alone."""
    decision, prediction = plan.decision, plan.prediction
    sizes = {min(size, problem.global_batch) for size in problem.micro_batch_sizes}
    if decision.global_batch != problem.global_batch:
        yield "batch"
    if sizes and max(decision.micro_batches) not in sizes:
        yield "micro-batch"
    if problem.objective == "latency":
        if traits(decision.schedule).trains:
            yield "objective"
    elif decision.schedule not in (problem.schedules or default_names()):
        yield "schedule"
    if 0 < problem.max_stages < len(decision.stages):
        yield "stages"
    if {rank for stage in decision.stages for rank in stage.ranks} - set(problem.ranks):
        yield "devices"
    again = {stage.recompute for stage in decision.stages}
    if problem.recompute != "auto" and again != {problem.recompute == "always"}:
        yield "recompute"
    ways = [CutDegrees.of(placement.cuts) for placement in decision.layers.values()]
    if any(way.along(family) > 1 for way in ways for family in FAMILIES if family not in problem.allow):
        yield "allow"
    yield from broken(problem.fix, problem.forbid, decision, problem.profile.cluster)
    if any(rank.peak_bytes > problem.memory_limit_bytes(rank.rank) for rank in prediction.ranks):
        yield "memory"


def asked(problem: Problem, draw: random.Random) -> Problem:
    """The problem with a few requests of every sort."""
    texts = ("l0=replicas:1", "l*=replicas:2", "l1=stage:0", "l0=device:*/cpu0", "l0=together", "l1=recompute:yes")
    rules = tuple(parse_rule(text) for text in texts if draw.random() < 0.15)
    fixed = draw.random() < 0.5
    return replace(
        problem,
        schedules=draw.choice([(), (), ("1f1b",), ("gpipe", "1f1b-so"), ("interleaved",), ("zb-v",), ("zb-h1",)]),
        micro_batch_sizes=draw.choice([(), (), (1,), (2,), (2, 3)]),
        recompute=draw.choice(["never", "auto", "always", "always"]),
        max_stages=draw.choice([0, 0, 1, 2]),
        num_ranks=draw.choice([0, 0, 1, 2]),
        allow=draw.choice([("sample",), ("sample",), ("spatial",), ("sample", "spatial")]),
        objective=draw.choice(["throughput", "throughput", "throughput", "memory", "latency"]),
        memory_bytes=draw.choice([0, 0, 0, 6000, 20_000]),
        fix=rules if fixed else (),
        forbid=() if fixed else rules,
        time_limit_s=2.0,
    )


def test_the_plan_of_every_solver_keeps_to_the_request_or_there_is_none() -> None:
    found: dict[str, int] = dict.fromkeys((OURS, *baselines()), 0)
    recomputed = 0
    seeds = some(range(70), 24)
    for seed in seeds:
        problem = asked(random_problem(seed), random.Random(seed))
        for name in found:
            try:
                plan = solver(name)(problem, None)
            except HalopipeError:
                continue
            assert list(disobeyed(plan, problem)) == [], (name, seed)
            found[name] += 1
            recomputed += problem.recompute == "always"
    assert found[OURS] > len(seeds) / 4
    assert min(found.values()) > len(seeds) / 24, found
    assert recomputed > len(seeds) / 4


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "zb-v", "zb-h1", "greedy"])
def test_recompute_always_is_everywhere_under_every_schedule(schedule: str) -> None:
    problem = Problem(chain_profile(6, 2), 8, (schedule,), recompute="always", time_limit_s=5.0)
    plan = solver(OURS)(problem, None)
    assert all(stage.recompute for stage in plan.decision.stages)
    assert plan.prediction.step_s > solver(OURS)(replace(problem, recompute="never"), None).prediction.step_s


def test_no_baseline_is_faster_than_the_plan() -> None:
    for seed in some(range(12), 4):
        problem = replace(random_problem(seed), schedules=(), time_limit_s=10.0)
        steps = {name: step_or_nothing(problem, name) for name in baselines()}
        ours = step_or_nothing(problem)
        assert all(ours <= step * (1 + 1e-9) for step in steps.values()), (seed, ours, steps)


def step_or_nothing(problem: Problem, name: str = OURS) -> float:
    try:
        return solver(name)(problem, None).prediction.step_s
    except InfeasibleError:
        return float("inf")


@pytest.mark.parametrize(
    ("objective", "keeps_statistics"), [("throughput", False), ("latency", False), ("latency", True)]
)
@pytest.mark.parametrize("fix", ["", "conv0=spatial:2", "*=replicas:2", "*=replicas:4"])
@pytest.mark.parametrize("size", [1, 2])
def test_more_that_may_be_cut_never_finds_less(objective: str, keeps_statistics: bool, fix: str, size: int) -> None:
    profile = priced(*residual(samples=4, height=8), speeds=(1.0,) * 4)
    profile = with_running_statistics(profile) if keeps_statistics else profile
    rules = (parse_rule(fix),) if fix else ()
    base = Problem(profile, 4, (), (size,), time_limit_s=20.0, objective=objective, fix=rules, max_stages=2)
    allowed = [("spatial",), ("sample", "spatial"), ("sample", "spatial", "channel")]
    steps = [step_or_nothing(replace(base, allow=allow)) for allow in allowed]
    assert all(wider <= narrow * (1 + 1e-9) for narrow, wider in itertools.pairwise(steps)), steps
    assert steps[0] < float("inf")


@pytest.mark.parametrize("objective", ["throughput", "latency"])
def test_ranks_take_statistics_together_but_in_forward_plans_where_running_ones_are_kept(objective: str) -> None:
    made = Network(4, 4, 8)
    anew = priced(made, made.norm(made.image), speeds=(1.0,) * 2)
    fewer_s = []
    for allow, fix in (("sample", "batch_norm0=replicas:2"), ("spatial", "batch_norm0=spatial:2")):
        waits_s = []
        for profile in (anew, with_running_statistics(anew)):
            base = Problem(profile, 4, (), (4,), objective=objective, time_limit_s=10.0)
            plan = solver(OURS)(replace(base, allow=(allow,), fix=(parse_rule(fix),)), None)
            assert check(plan, profile) == ()
            waits_s.append([rank.communication_s for rank in plan.prediction.ranks])
        fewer_s += [more - less for more, less in zip(*waits_s, strict=True)]
    taken_s = 0.0 if objective == "throughput" else CostModel(anew).norms_s((0, 1))[0][-1]
    assert fewer_s == pytest.approx([taken_s] * 4)


def test_forward_plans_keep_to_what_may_be_cut() -> None:
    profile = priced(*residual(samples=4, height=8), speeds=(1.0,) * 2)
    for allow in (("sample",), ("spatial",), ("channel",)):
        plan = solver(OURS)(Problem(profile, 4, objective="latency", allow=allow, time_limit_s=10.0), None)
        cut = {dim for placement in plan.decision.layers.values() for dim in placement.cuts if dim != "replica"}
        assert cut <= set(FAMILIES[allow[0]])


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize(
    "bad", [{"gap": 2.0}, {"gap": -0.1}, {"gap": float("nan")}, {"time_limit_s": float("nan")}, {"max_stages": -1}]
)
def test_numbers_that_mean_nothing_are_refused(name: str, bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        solver(name)(replace(random_problem(0), **bad), None)


@pytest.mark.parametrize("gap", [0.01, 0.3, 0.9])
def test_within_a_gap_the_bound_is_true_and_as_near_as_asked(gap: float) -> None:
    for seed in range(8):
        problem = replace(random_problem(seed), micro_batch_sizes=(1,))
        if (best := step_or_nothing(problem)) == float("inf"):
            continue
        plan = solver(OURS)(replace(problem, gap=gap), None)
        assert 0 <= plan.search.bound_s <= best * (1 + 1e-9)
        assert plan.prediction.step_s <= best * (1 + gap) * (1 + 1e-9)
        assert plan.search.gap <= gap * (1 + 1e-6) + 1e-9


ZEROS = {
    "nothing costs anything": {"forward_s": 0.0, "backward_s": 0.0, "parameter_bytes": 0, "saved_bytes": 0},
    "no seconds": {"forward_s": 0.0, "backward_s": 0.0},
    "no parameters": {"parameter_bytes": 0},
    "free links": {"latency_s": 0.0, "bandwidth_bytes_per_s": 1e30},
}


@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("zero", ZEROS)
def test_what_costs_nothing_is_planned_too(zero: str, num_layers: int) -> None:
    profile = chain_profile(num_layers, 2, **ZEROS[zero])
    for name in names():
        for objective in ("throughput", "memory", "latency"):
            try:
                plan = solver(name)(Problem(profile, 4, objective=objective, time_limit_s=5.0), None)
            except (InfeasibleError, UsageError):
                assert name != OURS
                continue
            assert plan.search.bound_s <= plan.prediction.step_s


PUBLISHED = tuple(name for name in baselines() if name not in ("one-device", "data-parallel", "even-split", "dryden"))


class Clock:
    """Time that passes a little whenever somebody looks, and much when a plan is simulated."""

    def __init__(self, simulation_s: float) -> None:
        self.now_s, self.simulation_s = 1000.0, simulation_s

    def monotonic(self) -> float:
        self.now_s += 1e-5
        return self.now_s


@pytest.mark.parametrize("name", [name for name in names() if name != "span-ilp"])
@pytest.mark.parametrize("time_limit_s", [0.0, 1.0, 4.0])
def test_every_solver_ends_in_time_with_a_plan(name: str, time_limit_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(simulation_s=0.1)
    evaluate = Evaluator.evaluate

    def slowly(self: Evaluator, *arguments: Any, **named: Any) -> Evaluation:
        clock.now_s += clock.simulation_s
        return evaluate(self, *arguments, **named)

    problem = Problem(chain_profile(8, 4, memory_bytes=2**40), 48, time_limit_s=time_limit_s)
    with monkeypatch.context() as patched:
        patched.setattr(time, "monotonic", clock.monotonic)
        patched.setattr(Evaluator, "evaluate", slowly)
        found = step_or_nothing(problem, name)
    assert clock.now_s - 1000.0 <= 1.1 * time_limit_s + 1.0
    assert found < float("inf") or (time_limit_s == 0.0 and name in PUBLISHED)


def test_more_devices_memory_and_time_never_find_less() -> None:
    profile = chain_profile(5, 3, saved_bytes=4000, memory_bytes=200_000)
    base = Problem(profile, 4, memory_margin=0.0, time_limit_s=10.0)
    ways: list[list[dict[str, Any]]] = [
        [{"num_ranks": count} for count in (1, 2, 3)],
        [{"memory_bytes": size} for size in (60_000, 100_000, 200_000)],
        [{"time_limit_s": seconds} for seconds in (0.0, 10.0)],
        [{"schedules": some} for some in (("gpipe",), ("gpipe", "1f1b"), ())],
    ]
    for way in ways:
        steps = [step_or_nothing(replace(base, **change)) for change in way]
        assert all(more <= less * (1 + 1e-9) for less, more in itertools.pairwise(steps)), (way, steps)
