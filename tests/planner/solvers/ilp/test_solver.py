"""The integer program over spans: against exhaustive search of its objective, and of simulated steps."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from benchmarks.chains import chain_profile
from planner.costs.candidate import Candidate, Recomputes
from planner.costs.cost_model import CostModel
from planner.ir.constraints import broken, parse_rule
from planner.ir.errors import InfeasibleError, UnknownNameError, UsageError
from planner.ir.problem import Problem
from planner.schedules import names as schedules
from planner.schedules import traits
from planner.solvers import solver
from planner.solvers.best_first.device_groups import DeviceStates, ranks_apart
from planner.solvers.candidates.candidate import pools
from planner.solvers.candidates.constraints import Constraints
from planner.solvers.candidates.evaluate import Evaluator
from planner.solvers.ilp.formulas import SpanProgram
from planner.solvers.ilp.solver import BatchSplit, Enumeration, solve
from planner.solvers.ilp.spans import SpanInstance, group_counts, prune
from planner.solvers.integer_program import INFEASIBLE, OPTIMAL, TIME_LIMIT
from planner.solvers.progress import SearchProgress
from tests.planner.solvers.clocks import Ticking, by_clock
from tests.planner.solvers.instances import branching_problem, random_problem, tied_problem

PLAIN = ("1f1b", "gpipe")


@pytest.fixture(autouse=True)
def counted_work() -> None:
    """Integer programs end by a clock."""


RULES = (
    "l1=stage:0",
    "l1=stage:1",
    "l2=stage:2",
    "l0=replicas:1",
    "l[01]=together",
    "l1=device:n?/cpu0",
    "*=sample:1",
    "l*=kind:*-1",
)
makes = pytest.mark.parametrize(
    "make", [random_problem, branching_problem, tied_problem], ids=["chains", "branches", "ties"]
)


def plain(seed: int, make: Callable[[int], Problem] = random_problem, rules: bool = False) -> Problem:
    """A random problem with schedules whose windows are their own, perhaps with recompute and side constraints."""
    draw = random.Random(seed)
    problem = replace(make(seed), schedules=PLAIN, recompute=draw.choice(["never", "never", "auto", "always"]))
    if not rules:
        return problem
    fix, forbid = (tuple(map(parse_rule, draw.sample(RULES, n))) for n in (draw.randint(0, 1), draw.randint(0, 1)))
    return replace(problem, fix=fix, forbid=forbid)


def ways(problem: Problem) -> list[BatchSplit]:
    """Every way to cut the batch, nothing pruned."""
    evaluator = Evaluator(problem, CostModel(problem.profile))
    return [way for _, way in Enumeration(evaluator, Constraints.of(problem))._ways()]


def chains(instance: SpanInstance, cut: int = 0, used: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """Every pipeline of spans, whatever devices it takes."""
    for v in np.flatnonzero(instance.spans.first == cut).tolist():
        last = int(instance.spans.last[v])
        yield from [(*used, v)] if last == instance.cuts.last else chains(instance, last, (*used, v))


def objective_s(instance: SpanInstance, chain: Sequence[int]) -> float:
    """Max over stages of what passes through the ones before it, and all its own work; the same of wires.

        round trip: sum of (F + B + both messages) before t + turn_t + reduction and update of stage 0
        forwards:   sum of (F + message) before t + work_t + reduction and update of stage t
        wire:       sum of (F + B + both messages) before t + the other messages one way + F + B of t + as above, of 0
        shared:     sum of (F + B + both messages) before t + the other messages both ways + as above, of 0

    Infinite where a hand-over was pruned.  All begin again behind a stage from which the next one need not read.
    """
    spans = instance.spans
    best = there = around = wire = shared = 0.0
    ending = float(spans.last_s[chain[0]])
    for position, v in enumerate(chain):
        best = max(best, around + float(spans.turn_s[v]) + ending, there + float(spans.work_s[v] + spans.last_s[v]))
        best = max(best, around + ending + max(wire + float(spans.pair_s[v]), shared))
        if position + 1 < len(chain):
            there_s, round_s, wire, shared = message_s(instance, v, chain[position + 1])
            there = there + float(spans.there_s[v]) + there_s if spans.linked[v] else 0.0
            around = around + float(spans.round_s[v]) + round_s if spans.linked_back[v] else 0.0
            if not spans.linked_back[v]:
                ending = wire = shared = 0.0
    return best


def message_s(instance: SpanInstance, source: int, destination: int) -> tuple[float, float, float, float]:
    """A hand-over's times, in the order of the table's columns."""
    handovers = instance.handovers
    spans = instance.spans
    match = (
        (handovers.cut == spans.last[source])
        & (handovers.source == spans.group[source])
        & (handovers.destination == spans.group[destination])
    )
    for row in np.flatnonzero(match).tolist():
        columns = (handovers.there_s, handovers.round_s, handovers.wire_s, handovers.shared_s)
        there_s, round_s, wire_s, shared_s = (float(seconds[row]) for seconds in columns)
        return there_s, round_s, wire_s, shared_s
    return (float("inf"),) * 4  # it was pruned


def cuts_of(instance: SpanInstance, chain: Sequence[int]) -> tuple[int, ...]:
    """Both ends included."""
    return (*instance.spans.first[list(chain)].tolist(), instance.cuts.last)


def follows(instance: SpanInstance, chain: Sequence[int]) -> bool:
    """Whether the numbers of the stages are what the rules want."""
    number = instance.cuts.stage_of(cuts_of(instance, chain))
    return all((number[layer] == wanted) == fixed for wanted, fixed, layers in instance.stage_rules for layer in layers)


def within_memory(instance: SpanInstance, chain: Sequence[int]) -> bool:
    """Whether no stage has more stages downstream than it has memory for, as far as they surely wait in a row."""
    spans = instance.spans
    certain = True
    for downstream, v in enumerate(reversed(chain), start=1):
        certain = certain and (downstream == 1 or bool(spans.linked[v]))
        if certain and downstream > spans.depth[v]:
            return False
    return True


def possible(instance: SpanInstance, chain: tuple[int, ...]) -> bool:
    counts = [instance.groups[int(instance.spans.group[v])].counts for v in chain]
    enough = all(
        sum(n) <= len(pool.ranks) for n, pool in zip(zip(*counts, strict=True), instance.prices.pools, strict=True)
    )
    return enough and within_memory(instance, chain) and follows(instance, chain) and len(chain) <= instance.most_stages


def without_twins(instance: SpanInstance) -> SpanInstance:
    """With like hosts told apart, so that every pipeline is there by each of its names."""
    return replace(instance, twins=())


@makes
@pytest.mark.cases(24)
@pytest.mark.parametrize("seed", range(160))
def test_the_program_is_solved_as_by_exhaustion(seed: int, make: Callable[[int], Problem]) -> None:
    try:
        found = ways(plain(seed, make, rules=True))
    except (InfeasibleError, UnknownNameError):
        return
    for way in random.Random(seed).sample(found, min(2, len(found))):
        values = [objective_s(way.instance, c) for c in chains(way.instance) if possible(way.instance, c)]
        solution = SpanProgram(way.instance, float("inf")).solve(60.0)
        if not values:
            assert solution.status == INFEASIBLE
            continue
        assert solution.status == OPTIMAL
        assert possible(way.instance, solution.spans)
        assert objective_s(way.instance, solution.spans) == pytest.approx(min(values), rel=1e-6)
        assert min(values) * (1 - 1e-5) <= solution.bound_s <= min(values)


@makes
@pytest.mark.parametrize("seed", range(300, 310))
def test_excluding_solutions_gives_the_next_best(seed: int, make: Callable[[int], Problem]) -> None:
    for way in ways(plain(seed, make))[:2]:
        instance = without_twins(way.instance)
        values = sorted(objective_s(instance, c) for c in chains(instance) if possible(instance, c))
        program = SpanProgram(instance, float("inf"))
        for value in values[:5]:
            solution = program.solve(60.0)
            assert objective_s(instance, solution.spans) == pytest.approx(value, rel=1e-6)
            program.exclude(solution.spans)
        if len(values) <= 5:
            assert program.solve(60.0).status == INFEASIBLE


@makes
@pytest.mark.parametrize("seed", range(320, 335))
def test_nothing_that_is_good_enough_is_pruned(seed: int, make: Callable[[int], Problem]) -> None:
    for way in ways(plain(seed, make)):
        values = sorted(objective_s(way.instance, c) for c in chains(way.instance) if possible(way.instance, c))
        if not values:
            continue
        least, bound_s = prune(way.instance, float("inf"))
        assert bound_s <= values[0] * (1 + 1e-9)
        for upper_s in (values[0], values[len(values) // 2]):
            least, bound_s = prune(way.instance, upper_s)
            assert bound_s <= values[0] * (1 + 1e-9)
            kept = sorted(objective_s(least, c) for c in chains(least) if possible(least, c))
            wanted = [value for value in values if value <= upper_s]
            assert kept[: len(wanted)] == pytest.approx(wanted, rel=1e-9)
            chosen = SpanProgram(least, upper_s).solve(60.0).spans
            assert objective_s(least, chosen) == pytest.approx(values[0], rel=1e-6)


def some_plans(way: BatchSplit, schedule: str, draw: random.Random) -> Iterator[tuple[tuple[int, ...], Candidate]]:
    """Random plans, and their spans where all are in the tables; they may not fit.

    Stages that need not wait for one another are in the order that is looked at.

    Raises:
        KeyError: a stage of a plan is not in the tables, and the plan may fit.
    """
    spans = way.instance.spans
    cuts = way.instance.cuts
    prices = way.instance.prices
    entries = zip(spans.first, spans.last, spans.group, spans.recompute, strict=True)
    known = {tuple(map(int, entry)): v for v, entry in enumerate(entries)}
    for _ in range(80):
        groups = dict(enumerate(way.instance.groups))
        left = [len(pool.ranks) for pool in prices.pools]
        chosen = list[int]()
        chain = [0]
        while chain[-1] != cuts.last and groups:
            chosen.append(draw.choice([*groups]))
            left = [a - b for a, b in zip(left, groups[chosen[-1]].counts, strict=True)]
            groups = {n: g for n, g in groups.items() if all(a >= b for a, b in zip(left, g.counts, strict=True))}
            behind = np.flatnonzero(cuts.inside[chain[-1]]).tolist()
            chain.append(draw.choice(behind) if groups and draw.random() < 0.6 else cuts.last)
        triples = zip(chain, chain[1:], chain[2:], strict=False)
        if any(cuts.crossing_of[cuts.content[cut, last], first, cut] < 0 for first, cut, last in triples):
            continue
        recompute = [draw.choice(prices.freedom.recompute) for _ in chosen]
        candidate = Candidate(
            cuts.stage_of(tuple(chain)),
            ranks_apart(prices.pools, [way.instance.groups[n].counts for n in chosen]),
            tuple(way.instance.groups[n].shares for n in chosen),
            way.micro_batches,
            schedule,
            recompute=tuple(map(Recomputes, recompute)) if any(recompute) else (),
        )
        stages = list(zip(chain, chain[1:], chosen, map(int, recompute), strict=False))
        yield tuple(known.get(stage, -1) for stage in stages), candidate


@makes
@pytest.mark.parametrize("seed", range(340, 365))
def test_every_plan_that_fits_is_in_the_tables_with_a_bound_below_its_step(
    seed: int, make: Callable[[int], Problem]
) -> None:
    chosen = [n for n in schedules() if (t := traits(n)).synchronous and t.trains and t.stages_per_position == 1]
    problem = replace(plain(seed, make), schedules=tuple(n for n in chosen if not traits(n).windowed))
    evaluator = Evaluator(problem, CostModel(problem.profile))
    draw = random.Random(seed)
    every = ways(problem)
    for way in draw.sample(every, min(6, len(every))):
        for chain, candidate in some_plans(way, draw.choice(way.schedules), draw):
            evaluation = evaluator.evaluate(candidate)
            if evaluation.fits:
                assert -1 not in chain, candidate
                assert within_memory(way.instance, chain), candidate
                assert objective_s(way.instance, chain) <= evaluation.step_s * (1 + 1e-9), candidate


@makes
@pytest.mark.parametrize("seed", range(500, 512))
def test_no_bound_is_above_the_exact_planner(seed: int, make: Callable[[int], Problem]) -> None:
    problem = replace(plain(seed, make), recompute="never")
    try:
        exact = solver("best-first")(problem)
    except InfeasibleError:
        with pytest.raises(InfeasibleError):
            solve(problem)
        return
    plan = solve(problem)
    assert plan.search.bound_s <= exact.prediction.step_s * (1 + 1e-9)
    assert exact.search.bound_s <= plan.prediction.step_s * (1 + 1e-9)


def larger(**more: object) -> Problem:
    draw = random.Random(1)
    profile = chain_profile(
        12,
        4,
        forward_s=[draw.uniform(1e-4, 1e-3) for _ in range(12)],
        parameter_bytes=[draw.choice([4000, 400_000]) for _ in range(12)],
        activation_bytes=[draw.choice([1000, 10_000, 100_000]) for _ in range(12)],
        bandwidth_bytes_per_s=2e7,
        latency_s=1e-5,
    )
    return replace(Problem(profile, 16, schedules=PLAIN, confidence=0.0), **more)  # type: ignore[arg-type]


def test_a_time_limit_too_short_to_prove_is_never_called_optimal() -> None:
    evaluator = Evaluator(larger(), CostModel(larger().profile))
    every = [way for _, way in Enumeration(evaluator, Constraints.of(larger()))._ways()]
    way = max(every, key=lambda found: len(found.instance.spans))
    best = SpanProgram(way.instance, float("inf")).solve(60.0)
    assert best.status == OPTIMAL
    best_s = objective_s(way.instance, best.spans)
    solutions = [SpanProgram(way.instance, float("inf")).solve(limit_s) for limit_s in (1e-3, 1e-2, 3e-2, 1e-1)]
    assert solutions[0].status == TIME_LIMIT
    for solution in solutions:
        assert solution.bound_s <= best_s * (1 + 1e-9)
        if solution.status == OPTIMAL:
            assert objective_s(way.instance, solution.spans) == pytest.approx(best_s, rel=1e-6)
        else:
            assert solution.status == TIME_LIMIT


def test_a_search_that_ends_early_says_so_and_keeps_its_bound() -> None:
    """When a clock that goes on with each look says so; within a gap; when somebody interrupts it."""
    with by_clock(Ticking(0.01)):
        late = solve(larger(time_limit_s=0.3))
    assert late.search.status == "time limit"
    assert 0 < late.search.bound_s < late.prediction.step_s
    assert late.search.gap == pytest.approx(late.prediction.step_s / late.search.bound_s - 1)
    near = solve(larger(gap=0.5))
    assert near.search.status == "within gap"
    assert near.search.gap <= 1.0
    seen: list[SearchProgress] = []

    def interrupt(progress: SearchProgress) -> None:
        seen.append(progress)
        if len(seen) == 3:
            raise KeyboardInterrupt

    stopped = solve(larger(), interrupt)
    assert stopped.search.status == "stopped"
    assert stopped.search.bound_s <= stopped.prediction.step_s
    assert all(a.bound_s <= b.bound_s * (1 + 1e-9) for a, b in pairwise(seen))


@pytest.mark.parametrize(
    ("per_host", "kinds", "left_out"),
    [(3, 1, ""), (8, 1, "stages on several hosts or kinds of devices"), (6, 2, "stages on several kinds of devices")],
)
def test_where_groups_are_many_those_of_a_kind_or_pool_are_taken_and_the_plan_says_so(
    per_host: int, kinds: int, left_out: str
) -> None:
    names = ["n0"] * per_host + ["n1"] * per_host
    speeds = [1.0] * per_host + [1.0 / kinds] * per_host
    problem = Problem(
        chain_profile(2, 2 * per_host, hosts=names, speeds=speeds),
        4,
        schedules=("1f1b",),
        time_limit_s=0.3,
        confidence=0.0,
    )
    devices = DeviceStates(pools(problem))
    counts, unlike = group_counts(devices)
    assert unlike == left_out
    assert set(counts) == {c for c in devices.within((per_host, per_host)) if not left_out or 0 in c}
    assert [each.what for each in solve(problem).search.rejected if "stages on" in each.what] == [left_out] * bool(
        left_out
    )


def test_rules_shape_the_plan() -> None:
    problem = larger(time_limit_s=0.5, fix=tuple(map(parse_rule, ("l[0-4]=together", "l5=stage:1", "l11=replicas:2"))))
    plan = solve(problem)
    assert broken(problem.fix, (), plan.decision, problem.profile.cluster) == ()
    assert {plan.decision.layers[f"l{k}"].stage for k in range(5)} == {0}
    assert len(plan.decision.stages[plan.decision.layers["l11"].stage].ranks) == 2


@pytest.mark.parametrize(
    ("rules", "memory_bytes", "title", "said"),
    [
        (("l0=stage:0", "l2=stage:2", "l1=replicas:1"), 2**30, "side constraints", "--fix l2=stage:2"),
        ((), 5000, "no plan fits", "usable"),
    ],
)
def test_what_leaves_nothing_is_named(rules: tuple[str, ...], memory_bytes: int, title: str, said: str) -> None:
    profile = chain_profile(3, 2, parameter_bytes=4000, memory_bytes=memory_bytes)
    with pytest.raises(InfeasibleError, match=title) as caught:
        solve(Problem(profile, 4, schedules=PLAIN, fix=tuple(map(parse_rule, rules)), confidence=0.0))
    assert said in caught.value.render()


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(UsageError, match="knows no schedule"):
        solve(Problem(chain_profile(3, 2), 4, schedules=("zb-v",), confidence=0.0))
    with pytest.raises(UnknownNameError, match="matches no layer"):
        solve(Problem(chain_profile(3, 2), 4, schedules=PLAIN, fix=(parse_rule("conv*=stage:0"),), confidence=0.0))
