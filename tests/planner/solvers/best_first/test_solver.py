"""What the exact search keeps to and says: objectives, gaps, limits, alternatives, what lacks where nothing fits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from random import Random

import pytest

from benchmarks.chains import chain_profile
from planner.ir.cluster import Link
from planner.ir.constraints import parse_rule
from planner.ir.errors import HalopipeError, InfeasibleError, MissingMeasurementError, UsageError
from planner.ir.plan import Plan
from planner.ir.problem import Problem
from planner.ir.profile import Optimizer
from planner.schedules import names, traits
from planner.solvers import SearchProgress, solver
from planner.solvers.best_first.solver import solve
from tests.oracles.plans import check
from tests.planner.solvers.instances import random_problem, several_a_position, with_memory

SEVERAL = tuple(name for name in names() if traits(name).trains and traits(name).stages_per_position != 1)


def heavy(**more: object) -> Problem:
    """A model whose gradients are dear to sum, so that a pipeline is best."""
    profile = chain_profile(
        6, 2, forward_s=(1e-3, 2e-3, 1e-3, 3e-3, 1e-3, 1e-3), parameter_bytes=2**20, bandwidth_bytes_per_s=1e8
    )
    return replace(Problem(profile, 8, confidence=0.0), **more)  # type: ignore[arg-type]  # fields by name


def with_layers(problem: Problem, changed: Mapping[str, Mapping[str, object]]) -> Problem:
    """The problem with some fields of some layers changed."""
    graph = problem.profile.graph
    layers = tuple(replace(layer, **changed.get(layer.name, {})) for layer in graph.layers)  # type: ignore[arg-type]
    return replace(problem, profile=replace(problem.profile, graph=replace(graph, layers=layers)))


def plan_or_none(problem: Problem) -> Plan | None:
    try:
        return solve(problem)
    except HalopipeError:
        return None


def step_s(problem: Problem) -> float:
    plan = plan_or_none(problem)
    return float("inf") if plan is None else plan.prediction.step_s


def no_worse(more: float, less: float) -> bool:
    return more <= less * (1 + 1e-9)


def peak_bytes(plan: Plan) -> int:
    return max(rank.peak_bytes for rank in plan.prediction.ranks)


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


def test_the_order_of_like_devices_does_not_matter() -> None:
    speeds = (1.0, 2.5, 1.0)
    steps = {
        step_s(Problem(chain_profile(4, 3, forward_s=(1e-3, 2e-3, 1e-3, 3e-3), speeds=order), 4, confidence=0.0))
        for order in (speeds, speeds[::-1], (1.0, 1.0, 2.5))
    }
    assert max(steps) == pytest.approx(min(steps), rel=1e-9)


def test_alternatives_say_why_not_and_what_a_plan_that_does_not_fit_needs() -> None:
    plan = solve(heavy())
    assert len(plan.decision.stages) == 2
    why_not = {other.name: other.why_not for other in plan.alternatives}
    assert {"one-device", "data-parallel", "even-split"} <= set(why_not)
    other = {"gpipe": "schedule 1f1b", "1f1b": "schedule gpipe"}[plan.decision.schedule]
    assert other in why_not
    assert "sums gradients" in why_not["data-parallel"]
    assert all("slower" in text or text == "as fast" for text in why_not.values())
    assert "computes stage" in plan.search.binding[0]
    tight = solve(with_memory(heavy(memory_margin=0.0), peak_bytes(plan) + 1024))
    why_not = {other.name: other.why_not for other in tight.alternatives}
    assert "needs" in why_not["one-device"]
    assert "on rank 0, limit" in why_not["one-device"]
    assert any("memory: rank" in text for text in tight.search.binding)


def test_where_nothing_fits_rank_need_limit_part_and_what_would_help_are_named() -> None:
    problem = heavy(micro_batch_sizes=(8,), num_ranks=1)
    with pytest.raises(InfeasibleError) as error:
        solve(with_memory(problem, int(peak_bytes(solve(heavy())) / 0.9)))
    text = str(error.value)
    assert "rank 0, n0/cpu0 (kind-1): the leanest plan needs" in text
    assert "minus 8% margin" in text
    assert "largest part: parameters" in text
    assert "without" in text
    assert "fits" in text
    asked_for = r"usable 1000 bytes \(asked for; the device has .* minus 8% margin\)"
    with pytest.raises(InfeasibleError, match=asked_for):
        solve(heavy(memory_bytes=1000))
    with pytest.raises(InfeasibleError, match=r"try: 6\.6 MiB of memory a device") as free:  # no change helps
        solve(with_memory(heavy(), 1000))
    assert "mix" not in str(free.value)
    mixes = {"attributes": {"mixes_samples": True}}
    with pytest.raises(InfeasibleError, match="2 layers mix samples, such as l1: a stage that has one is not divided"):
        solve(with_layers(with_memory(heavy(), 1000), {"l1": mixes, "l2": mixes}))


CLASH = "no plan keeps to the side constraints"
RULES = (
    *("l1=stage:1", "l2=stage:2", "l0=replicas:2", "l1=replicas:1"),
    *("l0=device:n0/cpu0", "l[01]=together", "*=sample:2"),
)


def ruled(fix: tuple[str, ...], forbid: tuple[str, ...] = (), memory_bytes: int = 2**30) -> Problem:
    profile = chain_profile(3, 2, parameter_bytes=4000, memory_bytes=memory_bytes)
    fixed, forbidden = (tuple(map(parse_rule, rules)) for rules in (fix, forbid))
    return Problem(
        profile, 4, schedules=("1f1b",), micro_batch_sizes=(1, 2), fix=fixed, forbid=forbidden, confidence=0.0
    )


def refused(problem: Problem) -> InfeasibleError | None:
    try:
        solve(problem)
    except InfeasibleError as error:
        return error
    return None


@pytest.mark.parametrize(
    ("problem", "title", "rules"),
    [
        (ruled(("l0=stage:0", "l2=stage:2", "l1=replicas:1")), CLASH, ("l2=stage:2",)),  # no device is left for it
        (ruled(("l1=stage:1", "l2=replicas:2", "l0=device:n0/*")), CLASH, ("l1=stage:1", "l2=replicas:2")),
        (ruled(("l2=stage:1",), ("l0=device:n0/cpu1",), 5000), "no plan fits", None),  # the least of all breaks a rule
    ],
)
def test_rules_that_clash_are_named_and_no_others(problem: Problem, title: str, rules: tuple[str, ...] | None) -> None:
    error = refused(problem)
    assert error is not None
    assert error.title == title
    if rules is not None:
        assert [each for each in error.details if each.startswith("--")] == [f"--fix {rule}" for rule in rules]
        assert error.remedies == tuple(f"leave out --fix {rule}" for rule in rules)


@pytest.mark.cases(12)
@pytest.mark.parametrize("seed", range(24))
def test_memory_is_named_only_where_more_of_it_helps(seed: int) -> None:
    draw = Random(seed)
    fix = draw.sample(RULES, draw.randint(1, 3))
    forbid = draw.sample(RULES, draw.randint(0, 1))
    error = refused(ruled(tuple(fix), tuple(forbid), draw.choice([20_000, 2**30])))
    if error is None or error.title not in (CLASH, "no plan fits"):
        return
    more = refused(ruled(tuple(fix), tuple(forbid), 2**45))
    assert (error.title == CLASH) == (more is not None)
    if error.title == CLASH:
        named = [detail.removeprefix("--fix ") for detail in error.details if detail.startswith("--fix ")]
        barred = [detail.removeprefix("--forbid ") for detail in error.details if detail.startswith("--forbid ")]
        assert refused(ruled(tuple(named), tuple(barred), 2**45)) is not None


@pytest.mark.cases(12)
@pytest.mark.parametrize("gap", [0.0, 0.01, 0.3, 0.9])
@pytest.mark.parametrize("seed", range(24))
def test_a_plan_is_within_the_gap_only_if_it_is(seed: int, gap: float) -> None:
    if seed % 2:
        problem = several_a_position(seed, SEVERAL[seed % len(SEVERAL)])
    else:
        problem = replace(random_problem(seed), allow=("sample", "spatial"), micro_batch_sizes=(1,))
    plan = plan_or_none(replace(problem, gap=gap))
    if plan is None:
        return
    assert check(plan, problem.profile) == ()
    status = plan.search.status
    own = plan.search.gap
    assert own == pytest.approx(plan.prediction.step_s / plan.search.bound_s - 1)
    if status == "proven":
        assert own <= 1e-8
    elif status == "within gap":
        assert 0 < own <= gap * (1 + 1e-8)
    else:
        assert status in ("searched", "time limit")
        assert own > gap
    best_s = step_s(problem)
    assert plan.search.bound_s <= best_s * (1 + 1e-9)
    assert status == "searched" or plan.prediction.step_s <= best_s * (1 + gap) * (1 + 1e-9)


def test_a_gap_ends_the_search_sooner() -> None:
    proven, near = (solve(heavy(gap=gap)) for gap in (0.0, 0.5))
    assert (proven.search.status, near.search.status) == ("proven", "within gap")
    assert near.search.num_simulated <= proven.search.num_simulated


def test_out_of_time_the_best_so_far_is_returned_with_its_gap() -> None:
    plan = solve(heavy(time_limit_s=0.0))
    assert plan.search.status == "time limit"
    assert 0 < plan.search.bound_s <= plan.prediction.step_s
    assert plan.search.gap == pytest.approx(plan.prediction.step_s / plan.search.bound_s - 1)


def test_ctrl_c_returns_the_best_so_far() -> None:
    """Of a search that is long enough to report: unlike layers, two hosts, dear messages and gradients."""
    seen: list[SearchProgress] = []

    def stop(progress: SearchProgress) -> None:
        seen.append(progress)
        raise KeyboardInterrupt

    profile = chain_profile(
        40,
        4,
        forward_s=[1e-3 * (1 + i * i % 7) for i in range(40)],
        parameter_bytes=2**18,
        activation_bytes=2**16,
        bandwidth_bytes_per_s=1e8,
        latency_s=1e-3,
        hosts=("n0", "n0", "n1", "n1"),
        duplex=False,
    )
    plan = solve(Problem(profile, 16, confidence=0.0), stop)
    assert plan.search.status == "stopped"
    assert plan.prediction.step_s >= plan.search.bound_s > 0
    assert seen[0].best_s >= plan.prediction.step_s


def test_layers_that_share_a_parameter_are_parted_where_a_schedule_lets_them_and_else_that_is_said() -> None:
    shared = {"parameters": ("l1.weight",)}
    problem = with_layers(heavy(), {"l1": shared, "l4": shared})
    plan = solve(problem)
    assert plan.decision.layers["l1"].stage != plan.decision.layers["l4"].stage
    assert plan.search.status == "proven"
    assert not any("no cut" in each.what for each in plan.search.rejected)
    whole = solve(replace(problem, schedules=("pipedream",)))
    assert len({whole.decision.layers[name].stage for name in ("l1", "l2", "l3", "l4")}) == 1
    assert "no cut between l1 and l4" in [each.what for each in whole.search.rejected]


def test_layers_that_mix_samples_are_not_replicated() -> None:
    problem = heavy(profile=chain_profile(4, 2, bandwidth_bytes_per_s=1e12))
    assert len(solve(problem).decision.stages[0].ranks) == 2
    (output,) = problem.profile.graph.layers[1].outputs
    mixing = with_layers(problem, {"l1": {"outputs": (replace(output, dims=("dim0", "feature")),)}})
    plan = solve(mixing)
    assert len(plan.decision.stages[plan.decision.layers["l1"].stage].ranks) == 1
    with pytest.raises(InfeasibleError, match="cannot be cut by samples"):
        solver("data-parallel")(mixing)


@pytest.mark.parametrize(
    "problem",
    [
        Problem(chain_profile(2, 1, sizes=(8,)), 4, micro_batch_sizes=(2,), confidence=0.0),
        Problem(chain_profile(6, 2, sizes=(4,)), 2, schedules=("interleaved",), confidence=0.0),
    ],
    ids=["asked for", "several stages a device"],
)
def test_a_profile_that_says_nothing_about_the_sizes_is_refused(problem: Problem) -> None:
    with pytest.raises(MissingMeasurementError, match="no micro-batch size that may be used was measured"):
        solve(problem)


@pytest.mark.parametrize(("name", "asked"), [("best-first", (4,)), ("best-first", (3,)), ("data-parallel", ())])
def test_sizes_that_a_refusal_names_are_enough_for_all(name: str, asked: tuple[int, ...]) -> None:
    problem = Problem(chain_profile(2, 2, sizes=(8,)), 8, micro_batch_sizes=asked, confidence=0.0)
    with pytest.raises(MissingMeasurementError) as refusal:
        solver(name)(problem)
    (named,) = re.findall(r"--sizes ([\d,]+)", refusal.value.remedies[0])
    measured = replace(problem, profile=chain_profile(2, 2, sizes=tuple(map(int, named.split(",")))))
    solver(name)(measured)
    for size in (1, 2, 3, 4, 8):
        solver("best-first")(replace(measured, micro_batch_sizes=(size,)))


def test_the_optimiser_is_divided_where_nothing_else_fits() -> None:
    profile = replace(heavy().profile, optimizer=Optimizer("Adam", {}, 2.0))
    problem = heavy(profile=profile, fix=(parse_rule("l*=replicas:2"),), shard="auto")
    whole, divided = (solver("best-first")(replace(problem, shard=way)) for way in ("never", "always"))
    assert peak_bytes(divided) < peak_bytes(whole)
    roomy = solver("best-first")(replace(problem, memory_bytes=peak_bytes(whole)))
    tight = solver("best-first")(replace(problem, memory_bytes=peak_bytes(divided)))
    assert not any(stage.sharded for stage in roomy.decision.stages)
    assert all(stage.sharded for stage in tight.decision.stages)


def test_least_memory_is_less_than_that_of_the_fastest_plan_and_no_less_exists() -> None:
    problem = heavy(recompute="auto")
    fastest = solve(problem)
    leanest = solve(replace(problem, objective="memory"))
    held = peak_bytes(leanest)
    assert held < peak_bytes(fastest)
    assert leanest.prediction.step_s >= fastest.prediction.step_s
    assert "no plan holds less than" in leanest.search.binding[0]
    with pytest.raises(InfeasibleError):
        solve(replace(problem, memory_bytes=int(held * 0.99)))


def test_latency_is_that_of_forward_passes() -> None:
    plan = solve(heavy(objective="latency"))
    assert plan.decision.schedule == "forward"
    assert not any("B" in action for row in plan.decision.program for action in row)
    assert plan.search.status == "proven"
    assert plan.prediction.step_s < solve(heavy()).prediction.step_s / 2
    with pytest.raises(UsageError, match="forward alone"):
        solve(heavy(objective="latency", schedules=("gpipe",)))


@pytest.mark.parametrize("name", names())
def test_every_schedule_can_be_asked_for(name: str) -> None:
    plan = solve(heavy(schedules=(name,)))
    assert plan.decision.schedule == name
    assert check(plan, heavy().profile) == ()
    if traits(name).stages_per_position == 1:
        assert plan.search.status == "proven"
    else:
        assert plan.search.bound_s <= plan.prediction.step_s


def test_the_plan_remembers_what_was_asked() -> None:
    problem = heavy(max_stages=2, fix=(parse_rule("l0=stage:0"),), gap=0.1)
    assert Problem.of(problem.profile, 8, solve(problem).inputs.request) == replace(problem, time_limit_s=60.0)
