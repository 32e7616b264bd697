"""What holds of every solver in the registry: it keeps to what is asked, or refuses; and nobody beats the exact one."""

from __future__ import annotations

import gc
import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.chains import chain_profile
from halopipe.planning.problem import make_problem
from planner.costs.cost_model import CostModel
from planner.ir.codec import dumps, loads
from planner.ir.constraints import FAMILIES, CutDegrees, broken, parse_rule
from planner.ir.errors import HalopipeError, InfeasibleError, UnknownNameError, UsageError
from planner.ir.extras import extras
from planner.ir.graph import FIXES_SAMPLES, MIXES_SAMPLES, NEEDS_WHOLE_BATCH
from planner.ir.plan import Plan
from planner.ir.planner_extra import PlannerExtra
from planner.ir.problem import Problem
from planner.ir.profile import Profile
from planner.schedules import default_names, traits
from planner.solvers import baselines, names, requests, solver
from tests.oracles.plans import check
from tests.planner.networks import Network, priced, residual, with_running_statistics
from tests.planner.solvers.instances import random_problem

OURS = "best-first"
GOLDEN = Path(__file__).resolve().parents[2] / "data" / "golden" / "plan_chain6_two_devices.json"


def disobeyed(plan: Plan, problem: Problem) -> Iterator[str]:
    """What the plan does not keep, read off its decision and prediction alone."""
    decision = plan.decision
    prediction = plan.prediction
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


@pytest.mark.cases(16)
@pytest.mark.parametrize("seed", range(80))
def test_every_solver_keeps_to_the_request_and_none_is_faster_than_the_exact_one(seed: int) -> None:
    """Or there is no plan; of every second problem nothing is asked."""
    problem = replace(random_problem(seed), schedules=())
    problem = asked(problem, random.Random(seed)) if seed % 2 else problem
    found: dict[str, Plan] = {}
    for name in (OURS, *baselines()):
        with suppress(HalopipeError):
            found[name] = solver(name)(problem, None)
    for name, plan in found.items():
        assert list(disobeyed(plan, problem)) == [], name
        assert check(plan, problem.profile) == (), name
        assert plan.search.solver == name
        assert dumps(loads(dumps(plan), Plan)) == dumps(plan)
    if not seed % 2 and found:
        assert OURS in found
        assert found[OURS].prediction.step_s <= min(plan.prediction.step_s for plan in found.values()) * (1 + 1e-9)


def test_solvers_seldom_find_no_plan() -> None:
    """Else nothing would be asked of them above."""
    for name in (OURS, *baselines()):
        assert any(step_or_nothing(random_problem(seed), name) < float("inf") for seed in (0, 3, 8)), name


def step_or_nothing(problem: Problem, name: str = OURS) -> float:
    try:
        return solver(name)(problem, None).prediction.step_s
    except InfeasibleError:
        return float("inf")


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "zb-v", "zb-h1", "greedy"])
def test_recompute_always_is_everywhere_under_every_schedule(schedule: str) -> None:
    problem = Problem(
        chain_profile(6, 2), 8, schedules=(schedule,), recompute="always", time_limit_s=5.0, confidence=0.0
    )
    plan = solver(OURS)(problem, None)
    assert all(stage.recompute for stage in plan.decision.stages)
    assert plan.prediction.step_s > solver(OURS)(replace(problem, recompute="never"), None).prediction.step_s


@pytest.mark.parametrize(
    ("objective", "keeps_statistics"), [("throughput", False), ("latency", False), ("latency", True)]
)
@pytest.mark.parametrize("fix", ["", "conv0=spatial:2", "*=replicas:2", "*=replicas:4"])
@pytest.mark.parametrize("size", [1, 2])
def test_more_that_may_be_cut_never_finds_less(objective: str, keeps_statistics: bool, fix: str, size: int) -> None:
    profile = priced(*residual(samples=4, height=8), speeds=(1.0,) * 4)
    profile = with_running_statistics(profile) if keeps_statistics else profile
    rules = (parse_rule(fix),) if fix else ()
    base = Problem(
        profile,
        4,
        schedules=(),
        micro_batch_sizes=(size,),
        time_limit_s=20.0,
        objective=objective,
        fix=rules,
        max_stages=2,
        confidence=0.0,
    )
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
            base = Problem(
                profile, 4, schedules=(), micro_batch_sizes=(4,), objective=objective, time_limit_s=10.0, confidence=0.0
            )
            plan = solver(OURS)(replace(base, allow=(allow,), fix=(parse_rule(fix),)), None)
            assert check(plan, profile) == ()
            waits_s.append([rank.communication_s for rank in plan.prediction.ranks])
        fewer_s += [more - less for more, less in zip(*waits_s, strict=True)]
    taken_s = 0.0 if objective == "throughput" else CostModel(anew).norms_s((0, 1))[0][-1]
    assert fewer_s == pytest.approx([taken_s] * 4)


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
                plan = solver(name)(Problem(profile, 4, objective=objective, time_limit_s=5.0, confidence=0.0), None)
            except (InfeasibleError, UsageError):
                assert name != OURS
                continue
            assert plan.search.bound_s <= plan.prediction.step_s


ASKED: Mapping[str, Mapping[str, Any]] = {
    "a gap of 1": {"gap": 1.0},
    "a rate goes with latency or throughput": {"rate_per_s": 5.0, "objective": "memory"},
    "-1 bytes of memory": {"memory": -1},
    "even-split knows no rate of a stream": {"rate_per_s": 5.0, "objective": "latency", "solver": "even-split"},
    "span-ilp cannot minimise memory": {"objective": "memory", "solver": "span-ilp"},
    "--global-batch is 16777217": {"global_batch": 2**24 + 1},
    "--zero is 2, --shard never": {"zero": 2},
    "micro-batch 8 is larger than the global batch 4": {"micro_batch": [2, 8]},
    "a rate is that of a stream": {"rate_per_s": 5.0, "schedules": ["1f1b"]},
    "--zero 2 divides gradients": {"zero": 2, "shard": "always"},
    "--halo-depth is of no use": {"halo_depth": 2},
    "--recompute selective: no attention": {"recompute": "selective"},
}
"""By the beginning of the title of what is said."""

NUMBERS: Mapping[str, Mapping[str, Any]] = {
    "a confidence of 1": {"confidence": 1.0},
    "a time limit of -1 s": {"time_limit_s": -1.0},
    "a rate of -1 samples/s": {"rate_per_s": -1.0, "objective": "latency"},
    "-1 stages": {"max_stages": -1},
    "-1 devices": {"num_ranks": -1},
    "-1 rows of halo": {"halo_depth": -1},
}
"""Of problems that are put without the bounds of options."""


def profile() -> Profile:
    """A chain of which a layer makes a term of a loss that needs the whole batch."""
    whole = chain_profile(3, 2)
    first, *others, last = whole.graph.layers
    last = replace(last, attributes={**last.attributes, NEEDS_WHOLE_BATCH: True})
    return replace(whole, graph=replace(whole.graph, layers=(replace(first, kind="loss"), *others, last)))


@pytest.mark.every_case
@pytest.mark.parametrize("title", ASKED)
def test_it_is_refused_with_its_code_and_a_remedy_or_a_reason(title: str) -> None:
    request = dict(ASKED[title])
    name = request.pop("solver", "best-first")
    with pytest.raises(UsageError) as caught:
        solver(name)(make_problem(profile(), **{"global_batch": 4, **request}), None)
    assert caught.value.title.startswith(title)
    assert (caught.value.code, caught.value.exit_code) == ("H200", 2)
    assert [*caught.value.details, *caught.value.remedies]


@pytest.mark.every_case
@pytest.mark.parametrize("title", NUMBERS)
def test_a_number_that_no_plan_can_have_is_refused(title: str) -> None:
    with pytest.raises(UsageError) as caught:
        solver("best-first")(replace(Problem(profile(), 4, confidence=0.0), **NUMBERS[title]), None)
    assert caught.value.title.startswith(title)
    assert (caught.value.code, caught.value.exit_code) == ("H200", 2)


def test_no_row_of_the_tables_is_left_out() -> None:
    problem = Problem(profile(), 4, confidence=0.0)
    rows = (*requests.of_search(problem, "best-first"), *requests.of_numbers(problem), *requests.of_pairs(problem))
    added = [row for extra in extras(PlannerExtra) for row in extra.refusals(problem)]
    assert len(rows) == len(ASKED) + len(NUMBERS) + len(added)
    assert not any(applies for applies, _ in rows)


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize(
    "bad",
    [
        *({"gap": 2.0}, {"gap": -0.1}, {"gap": float("nan")}, {"time_limit_s": float("nan")}, {"max_stages": -1}),
        *({"global_batch": 0}, {"micro_batch_sizes": (0,)}),
    ],
)
def test_numbers_that_mean_nothing_are_refused(name: str, bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        solver(name)(replace(random_problem(0), **bad), None)


def test_names_that_are_not_known_are_refused_and_those_of_older_releases_are() -> None:
    with pytest.raises(UnknownNameError):
        solver(OURS)(replace(random_problem(0), schedules=("zigzag",)))
    assert set(baselines()) >= {"data-parallel", "even-split", "one-device"}
    assert set(names()) == {*baselines(), "span-ilp", "best-first"}
    with pytest.raises(UnknownNameError, match="no solver 'magic'"):
        solver("magic")
    assert solver("suffix-dp")(Problem(chain_profile(3), 4, confidence=0.0)).search.solver == "best-first"


def joining_problem(num_devices: int = 2, **options: object) -> Problem:
    """Of a chain whose loss needs the whole batch, and would be cut into micro-batches else."""
    profile = chain_profile(4, num_devices, parameter_bytes=4, activation_bytes=4)
    *others, loss = profile.graph.layers
    loss = replace(loss, attributes={**loss.attributes, MIXES_SAMPLES: True, NEEDS_WHOLE_BATCH: True})
    return Problem(
        replace(profile, graph=replace(profile.graph, layers=(*others, loss))), 8, **{"confidence": 0.0, **options}
    )


def fixed_problem(num_devices: int = 2, global_batch: int = 16, **options: object) -> Problem:
    """Of a chain that was captured for as many samples as its example has."""
    profile = chain_profile(4, num_devices, parameter_bytes=4, activation_bytes=4)
    marks = {MIXES_SAMPLES: True, FIXES_SAMPLES: True}
    layers = tuple(replace(layer, attributes={**layer.attributes, **marks}) for layer in profile.graph.layers)
    return Problem(
        replace(profile, graph=replace(profile.graph, layers=layers)), global_batch, **{"confidence": 0.0, **options}
    )


@pytest.mark.cases(12)
@pytest.mark.parametrize(
    ("make", "samples", "fault"),
    [
        (joining_problem, 8, "needs the whole batch, which is in 2 micro-batches"),
        (fixed_problem, 8, "a micro-batch has"),
    ],
    ids=["whole batch", "fixed samples"],
)
@pytest.mark.parametrize("name", names())
def test_samples_that_belong_together_stay_in_one_micro_batch(
    name: str, make: Callable[[], Problem], samples: int, fault: str
) -> None:
    problem = make()
    try:
        plan = solver(name)(problem)
    except InfeasibleError as error:
        assert "cut by samples" in str(error)  # noqa: PT017  # strategies that do nothing else
        return
    assert set(plan.decision.micro_batches) == {samples}
    assert check(plan, problem.profile) == ()
    first, *others = plan.decision.micro_batches
    cut = replace(plan, decision=replace(plan.decision, micro_batches=(first // 2, first // 2, *others)))
    assert any(fault in each for each in check(cut, problem.profile))


@pytest.mark.parametrize("name", names())
def test_one_device_cuts_nothing_and_micro_batches_of_a_loss_over_the_whole_batch_are_refused(name: str) -> None:
    assert solver(name)(joining_problem(1)).decision.micro_batches == (8,)
    with pytest.raises(InfeasibleError, match=r"cut by samples|needs all samples of a step at once"):
        solver(name)(joining_problem(micro_batch_sizes=(4,)))


def test_a_batch_that_is_no_multiple_of_fixed_samples_is_refused() -> None:
    samples = fixed_problem().profile.graph.samples
    for problem in (fixed_problem(global_batch=2 * samples + 1), fixed_problem(micro_batch_sizes=(samples + 1,))):
        said = rf"captured for {samples} samples only[\s\S]*--micro-batch {samples}"
        with pytest.raises(InfeasibleError, match=said):
            solver("best-first")(problem)


@pytest.mark.parametrize("memory_bytes", [0, 1])
def test_a_search_leaves_the_collector_of_garbage_as_it_was(memory_bytes: int) -> None:
    before = gc.get_threshold()
    with suppress(InfeasibleError):
        solver("best-first")(replace(random_problem(0), memory_bytes=memory_bytes), None)
    assert gc.get_threshold() == before


def test_one_device_takes_the_fastest() -> None:
    plan = solver("one-device")(Problem(chain_profile(3, 3, speeds=(1.0, 4.0, 1.0)), 4, confidence=0.0))
    assert [stage.ranks for stage in plan.decision.stages] == [(1,)]


def test_data_parallel_shares_in_proportion_to_speed() -> None:
    plan = solver("data-parallel")(Problem(chain_profile(3, 2, speeds=(3.0, 1.0)), 8, confidence=0.0))
    assert plan.decision.micro_batches == (8,)
    assert plan.decision.layout_of(0).samples(8) == (6, 2)


def test_data_parallel_takes_smaller_micro_batches_where_memory_is_short() -> None:
    profile = chain_profile(2, 2, parameter_bytes=4, saved_bytes=10_000, activation_bytes=4, memory_bytes=50_000)
    assert solver("data-parallel")(Problem(profile, 8, confidence=0.0)).decision.micro_batches == (4, 4)


def test_even_split_counts_layers_and_not_costs() -> None:
    plan = solver("even-split")(
        Problem(chain_profile(5, 3, forward_s=(9e-3, 1e-3, 1e-3, 1e-3, 1e-3)), 4, confidence=0.0)
    )
    assert [len(plan.decision.layers_of(stage)) for stage in range(3)] == [2, 2, 2]
    assert plan.decision.schedule == "gpipe"
