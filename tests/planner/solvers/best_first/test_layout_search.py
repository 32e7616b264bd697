"""The search over layouts: against every plan of small problems, and what must hold of every answer."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from halopipe.planning.searched_space import best_of, space
from planner.costs.candidate import Candidate
from planner.costs.cost_model import CostModel
from planner.ir.cluster import SHARED_MEMORY
from planner.ir.constraints import CutDegrees, parse_rule
from planner.ir.layout import equal_shares
from planner.ir.plan import ANY_SETS_LAID_OUT, TIME_LIMIT
from planner.ir.problem import Problem
from planner.schedules import default_names
from planner.solvers.best_first.layout_search import beyond_samples, left_out, with_layouts
from planner.solvers.best_first.search import BestFirstSearch, Outcome
from planner.solvers.best_first.solver import solve
from planner.solvers.best_first.warm_start import SearchStart
from planner.solvers.budget import Budget
from planner.solvers.candidates.candidate import micro_batches, with_options
from planner.solvers.candidates.evaluate import Evaluation, Evaluator
from planner.solvers.candidates.feasibility import gives_all_work, joins_all_ranks
from tests.oracles.plans import check
from tests.planner.networks import Network, mesh_like, plain, priced, residual
from tests.planner.solvers.instances import with_memory
from tests.planner.solvers.laid_out_plans import EVERYTHING, plan_of_candidate
from tests.sampling import everything, some

FAMILIES = (("sample",), ("sample", "spatial"), EVERYTHING)


def searched(problem: Problem) -> tuple[Evaluator, Outcome]:
    evaluator = Evaluator(problem, CostModel(problem.profile))
    found = BestFirstSearch(evaluator, None).run(SearchStart(evaluator).items())
    return evaluator, with_layouts(evaluator, found, Budget(60.0))


def small_problem(seed: int) -> Problem:
    """Two or three layers and a loss on two or three like devices; memory for all of it, or not quite."""
    draw = random.Random(seed)
    made = plain(samples=2, height=draw.choice([8, 24, 48]), filters=draw.choice([(4,), (8,), (6,)]))
    profile = priced(
        *made,
        speeds=(1.0,) * draw.choice([2, 2, 3]),
        latency_s=draw.choice([0.0, 1e-7, 1e-6, 1e-5]),
        bandwidth_bytes_per_s=draw.choice([1e9, 1e10, 1e11]),
        duplex=draw.random() < 0.7,
        memory_bytes=draw.choice([2**30, 2**30, 60_000, 20_000]),
        sizes=(1, 2, 4),
    )
    overhead = dict.fromkeys(profile.measurements, draw.choice([0.0, 2e-6]))
    return Problem(
        replace(profile, action_overhead_s=overhead),
        draw.choice([2, 3, 4]),
        memory_margin=0.0,
        allow=EVERYTHING,
        confidence=0.0,
    )


def test_without_time_nobody_says_that_nothing_fits() -> None:
    problem = with_memory(small_problem(1), 1_000)
    evaluator = Evaluator(problem, CostModel(problem.profile))
    samples = BestFirstSearch(evaluator, None).run(SearchStart(evaluator).items())
    assert samples.refutes
    assert with_layouts(evaluator, samples, Budget(60.0)).refutes
    late = with_layouts(evaluator, samples, Budget(0.0))
    assert (late.best, late.status) == (None, TIME_LIMIT)


def every_plan(evaluator: Evaluator) -> Iterator[Candidate]:
    """All stretches of layers on all groups of like devices, under all layouts and schedules."""
    problem = evaluator.problem
    last = len(problem.profile.graph.layers)
    count = len(problem.ranks)
    for size in range(1, problem.global_batch + 1):
        batches = micro_batches(problem, size)
        for stages in range(1, count + 1):
            for cuts in itertools.combinations(range(1, last), stages - 1):
                for members in itertools.product(range(1, count + 1), repeat=stages):
                    if sum(members) <= count:
                        yield from _with_any_layouts(evaluator, (0, *cuts, last), members, batches)


def _with_any_layouts(
    evaluator: Evaluator, bounds: tuple[int, ...], members: tuple[int, ...], batches: tuple[int, ...]
) -> Iterator[Candidate]:
    starts = [0, *itertools.accumulate(members)]
    groups = tuple(tuple(range(a, b)) for a, b in itertools.pairwise(starts))
    shares = tuple(equal_shares(max(batches), len(group)) for group in groups)
    choices = [
        [dict(zip(range(first, stop), each, strict=True)) for each in itertools.product(*options)]
        for group, (first, stop) in zip(groups, itertools.pairwise(bounds), strict=True)
        for prices in [evaluator.layouts.prices(group, max(batches))]
        for options in [[prices.options(index) for index in range(first, stop)]]
    ]
    for chosen in itertools.product(*choices):
        candidate = Candidate.chain(bounds, groups, shares, batches, "gpipe")
        for group, options in zip(groups, chosen, strict=True):
            if not gives_all_work(evaluator.layouts, group, options, set(batches)):
                break
            candidate = with_options(evaluator.layouts, candidate, options)
        else:
            if joins_all_ranks(evaluator.problem.profile.graph, candidate):
                names = default_names() if len(groups) > 1 else ("1f1b",)
                yield from (replace(candidate, schedule=name) for name in names)


@pytest.mark.parametrize("first", range(0, 12, 6))
def test_no_plan_is_better_than_the_bound_and_a_proven_one_is_the_best(first: int) -> None:
    num_proven = 0
    for seed in some(range(first, first + 6), 3):
        problem = small_problem(seed)
        evaluator, found = searched(problem)
        best: Evaluation | None = None
        for candidate in every_plan(evaluator):
            each = evaluator.evaluate(candidate)
            if each.fits and (best is None or each.step_s < best.step_s):
                best = each
        if best is None:
            assert found.best is None, seed
            continue
        assert found.bound_s <= best.step_s * (1 + 1e-9), seed
        if found.status == "proven":
            assert found.best is not None
            assert found.best.step_s <= best.step_s * (1 + 1e-8), seed
            num_proven += 1
        if found.best is not None:
            assert found.bound_s <= found.best.step_s * (1 + 1e-9), seed
    assert num_proven > 1 or not everything


@pytest.mark.parametrize(
    "made", [plain(height=48), residual(), mesh_like(height=64)], ids=["plain", "residual", "mesh"]
)
@pytest.mark.parametrize("latency_s", [0.0, 1e-6])
def test_more_freedom_is_never_worse_and_every_plan_passes_the_checker(made: tuple, latency_s: float) -> None:
    steps = []
    profile = priced(*made, speeds=(1.0,) * 4, latency_s=latency_s)
    for allow in FAMILIES:
        problem = Problem(profile, 2, allow=allow, confidence=0.0)
        evaluator, found = searched(problem)
        assert found.best is not None
        assert check(plan_of_candidate(evaluator, found.best.candidate), profile) == ()
        steps.append(found.best.step_s)
    assert all(more <= less * (1 + 1e-9) for less, more in itertools.pairwise(steps))
    assert latency_s or steps[-1] < steps[0]


@pytest.mark.parametrize("seed", range(8))
def test_more_devices_are_never_worse(seed: int) -> None:
    draw = random.Random(seed)
    made = draw.choice([plain(samples=2, height=48), residual(samples=2, height=32), mesh_like(samples=2, height=64)])
    several = ("a", "a", "b", "b", "c", "c"), ("a", "b", "c", "d"), ("a", "a", "a", "a"), ("a", "a", "a", "b", "b", "b")
    hosts = draw.choice(several)
    profile = priced(
        *made,
        speeds=(1.0,) * len(hosts),
        hosts=hosts,
        latency_s=draw.choice([1e-7, 1e-6, 1e-5]),
        bandwidth_bytes_per_s=draw.choice([1e8, 1e10]),
    )
    steps = []
    for num_ranks in range(1, len(hosts) + 1):
        _, found = searched(Problem(profile, 2, num_ranks=num_ranks, allow=("sample", "spatial"), confidence=0.0))
        assert found.best is not None
        steps.append(found.best.step_s)
    assert all(more <= fewer * (1 + 1e-9) for fewer, more in itertools.pairwise(steps))


def test_samples_alone_leave_the_outcome_as_it_is() -> None:
    problem = Problem(priced(*plain(), speeds=(1.0, 1.0)), 4, confidence=0.0)
    evaluator = Evaluator(problem, CostModel(problem.profile))
    found = BestFirstSearch(evaluator, None).run(SearchStart(evaluator).items())
    assert not beyond_samples(problem)
    assert with_layouts(evaluator, found, Budget(60.0)) is found


def test_unlike_devices_on_two_hosts_are_searched_and_pass_the_checker() -> None:
    profile = priced(*mesh_like(height=256), speeds=(1.0, 1.0, 2.0, 2.0), hosts=("a", "a", "b", "b"))
    evaluator, found = searched(Problem(profile, 4, allow=EVERYTHING, confidence=0.0))
    assert found.best is not None
    assert found.best.candidate.options
    assert check(plan_of_candidate(evaluator, found.best.candidate), profile) == ()
    assert found.bound_s <= found.best.step_s


def test_sizes_that_were_not_measured_leave_the_others() -> None:
    """Layers of a stage cut along space have all samples of a micro-batch, those of replicas half of them."""
    profile = priced(*plain(samples=4), speeds=(1.0, 1.0), sizes=(2,))
    problem = Problem(profile, 4, micro_batch_sizes=(4,), max_stages=1, allow=("sample", "spatial"), confidence=0.0)
    plan = solve(replace(problem, fix=(parse_rule("*=replicas:2"),)))
    assert plan.decision.num_ranks == 2


def test_what_is_not_looked_at_is_said() -> None:
    profile = priced(*plain(), speeds=(1.0, 2.0))
    assert left_out(Problem(profile, 4, confidence=0.0)) == ()
    assert len(left_out(Problem(profile, 4, allow=EVERYTHING, confidence=0.0))) == 2


@pytest.mark.parametrize(
    ("network", "is_said"), [(plain, False), (mesh_like, False), (partial(residual, blocks=2), True)]
)
def test_that_layouts_are_of_stretches_of_layers_is_said_where_a_network_has_branches(
    network: Callable[[], Network], is_said: bool
) -> None:
    profile = priced(*network(), speeds=(1.0, 1.0), latency_s=1e-6)
    cases: tuple[tuple[Mapping[str, Any], bool], ...] = (
        ({}, True),
        ({"max_stages": 1}, False),
        ({"allow": ("sample",)}, False),
    )
    for asked, may_matter in cases:
        plan = solve(replace(Problem(profile, 4, allow=EVERYTHING, confidence=0.0), **asked))
        said = [rejected.what == ANY_SETS_LAID_OUT for rejected in plan.search.rejected]
        assert any(said) is (is_said and may_matter)
        assert ("over stretches of layers" in space(plan)) is any(said)
        every = replace(
            plan.inputs.request, schedules=("1f1b", "zb-h1", "interleaved")
        )  # nothing else may be asked for
        asked_for = replace(plan, inputs=replace(plan.inputs, request=every))
        assert ("over stretches of layers" in best_of(asked_for, profile)) is any(said)


def test_layers_that_mix_samples_are_cut_along_space() -> None:
    profile = priced(*plain(samples=2, height=128), speeds=(1.0, 1.0))
    graph = profile.graph
    layers = [
        replace(x, attributes={**x.attributes, "mixes_samples": True}) if x.kind == "conv" else x for x in graph.layers
    ]
    mixing = replace(profile, graph=replace(graph, layers=tuple(layers)))
    _, by_samples = searched(Problem(mixing, 4, confidence=0.0))
    evaluator, found = searched(Problem(mixing, 4, allow=("sample", "spatial"), confidence=0.0))
    assert found.best is not None
    assert by_samples.best is not None
    assert found.best.step_s < 0.8 * by_samples.best.step_s  # a pipeline of two stages, without halos
    plan = plan_of_candidate(evaluator, found.best.candidate)
    assert {tuple(plan.decision.layers[x.name].cuts) for x in layers if x.kind == "conv"} <= {("height",), ("width",)}
    assert check(plan, mixing) == ()


@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_work_over_capacity_bounds_what_time_cuts_short(objective: str) -> None:
    profile = priced(*residual(), speeds=(1.0,) * 3, latency_s=1e-6)
    problem = Problem(profile, 8, allow=EVERYTHING, objective=objective, confidence=0.0)
    evaluator = Evaluator(problem, CostModel(profile))
    outcome = BestFirstSearch(evaluator, None).run(SearchStart(evaluator).items())
    late = with_layouts(evaluator, outcome, Budget(0.0))
    assert late.status == "time limit"
    assert late.best == outcome.best
    in_time = with_layouts(evaluator, outcome, Budget(60.0))
    assert in_time.best is not None
    assert late.bound_s <= in_time.bound_s <= in_time.best.step_s


@pytest.mark.parametrize(("rule", "parts"), [("conv*=spatial:2", 2), ("*=channel:1", None)])
def test_side_constraints_hold(rule: str, parts: int | None) -> None:
    profile = priced(*plain(samples=2, height=48), speeds=(1.0, 1.0))
    problem = Problem(profile, 2, allow=EVERYTHING, fix=(parse_rule(rule),), confidence=0.0)
    evaluator, found = searched(problem)
    assert found.best is not None
    decision = plan_of_candidate(evaluator, found.best.candidate).decision
    ways = {name: CutDegrees.of(placed.cuts) for name, placed in decision.layers.items()}
    if parts:
        assert {each.spatial for name, each in ways.items() if name.startswith("conv")} == {parts}
    assert {each.channel for each in ways.values()} == {1}


def test_layouts_fit_where_samples_do_not() -> None:
    profile = priced(*plain(samples=1, height=64), speeds=(1.0, 1.0), sizes=(1, 2))
    links = {name: replace(link, transport=SHARED_MEMORY) for name, link in profile.cluster.links.items()}
    profile = replace(profile, cluster=replace(profile.cluster, links=links))  # over gloo, exchanges keep their buffers
    alone = Problem(profile, 1, num_ranks=1, memory_margin=0.0, confidence=0.0)
    _, whole = searched(alone)
    assert whole.best is not None
    limit = int(0.7 * whole.best.peak_bytes)
    problem = Problem(profile, 1, memory_margin=0.0, memory_bytes=limit, allow=EVERYTHING, max_stages=1, confidence=0.0)
    evaluator, found = searched(problem)
    assert found.best is not None
    assert found.best.peak_bytes <= limit
    assert check(plan_of_candidate(evaluator, found.best.candidate), profile) == ()
