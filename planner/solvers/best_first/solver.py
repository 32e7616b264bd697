"""The planner: the pipeline with the shortest simulated step, found by best-first search under an admissible bound.

Given       the network as a DAG of layers; pools of like devices (kind, host, memory); a global batch.
Choose      sizes of micro-batches, hence their number M                     ``feasibility.micro_batch_sizes``
            a chain of ideals of the DAG: stage s holds what the s-th adds                    ``graph_cuts``
            for each stage a group of devices: of one host, of several hosts of a kind     ``device_groups``
            or, where there are few devices, of several kinds; pools in any order along the
            pipeline; devices may stay unused
            the samples of each rank of a stage: equal on like devices, on unlike ones any    ``share_search``
            a schedule for all of them, and where it has windows, W_s for each stage          ``leaf_bound``
            whether a stage computes its activations again, where that is allowed   ``GroupPrices.versions``
Minimise    the step, by ``simulator.events``
Subject to  memory on every rank, with the micro-batches in flight              ``costs.memory.memory_bound``
            a sample of every micro-batch on every rank of a stage                      ``feasibility.usable``
            side constraints                                                      ``candidates.constraints``

The bound.  What a pipeline takes at least, on network cards too, is a fold over its stages, from the last to the first:
                                                                                              ``recurrence``

The least values over all continuations, for each cut, devices left and first group, are a
DP over suffixes                                                                                   ``bound``
and for each cut and worth of devices left, whichever they are, a table over counts                ``counts_table``
Where stage s + 1 need not read from s, only the step as a whole is bounded                  ``Labels.step_s``
Stages that do not depend on one another are bounded in one order and simulated in each   ``GraphCuts.disorder``

Prefixes of pipelines wait in a queue by the bound of their best continuation                   ``prefixes``
Complete ones are simulated many at once, never too slow, and exactly where members of groups are alike; those that may
still be the best are simulated by the true simulator                                         ``leaf_bound``
The search ends with a proof when no bound in the queue is below the best step.
Of unlike devices the DP is over any shares (``share_bound``), and complete pipelines are branched over them
                                                                                               ``share_search``
Without a proof in time a few neighbouring stages of the best plan are solved again, as it is simulated      ``repair``
Of plans that the model cannot tell apart one on the fewest ranks is taken, if that is asked   ``choose.without_ties``

Where layers may be cut along more than samples, the search goes on over layouts           ``layout_search``
Searches of extras go on from what it found, among plans that are not in this space             ``continued``

Objectives: ``throughput`` as above, of forward passes alone the rate of a stream (``objectives``); ``latency`` the
same with forward passes alone, at a rate if one is asked for; ``memory`` the least limit under
which a plan is found, by bisection to 0.1 %, and the fastest plan under it                   ``objectives``

Schedules for several stages a position, where they are named                 ``virtual_pipelines``, ``virtual_bound``
or, where none is named and that is allowed, some of them for a part of the time                  ``chunked``

Not in the space: windows other than those of ``leaf_bound.windows_to_try``, on large clusters what
``DeviceStates.restrictions`` says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from planner.costs.cost_model import CostModel
from planner.costs.sentences import binding
from planner.ir.extras import extras, required
from planner.ir.plan import TIME_LIMIT, Plan, Search, status_of
from planner.ir.planner_extra import PlannerExtra
from planner.ir.problem import MEMORY, THROUGHPUT, TIME_DIMS, Problem
from planner.solvers.best_first import policy
from planner.solvers.best_first.chunked import with_chunks
from planner.solvers.best_first.continued import continued_searches
from planner.solvers.best_first.layout_search import beyond_samples, left_out, with_layouts
from planner.solvers.best_first.objectives import highest_rate, is_stream, least_memory, no_plan_fits
from planner.solvers.best_first.search import BestFirstSearch, Outcome
from planner.solvers.best_first.warm_start import SearchStart
from planner.solvers.budget import Budget, part_of_current
from planner.solvers.candidates.candidate import plan_of
from planner.solvers.candidates.choose import alternatives, out_of_time, without_ties, written
from planner.solvers.candidates.evaluate import Evaluation, Evaluator
from planner.solvers.progress import Progress

METHOD = "best-first search under a suffix DP's bound, every candidate simulated"


def solve(problem: Problem, progress: Progress | None = None) -> Plan:
    """The best plan by the problem's objective.

    Ctrl-C ends the search with the best plan so far, status ``stopped``.

    Raises:
        InfeasibleError: nothing fits; the error says what lacks least and what would fit.
        MissingMeasurementError: the profile says nothing about any size that may be used.
        UnsupportedModelError: the network cannot be run by what is asked for.
    """
    budget = part_of_current(problem.time_limit_s)
    limited, certainty = _limited(problem)
    cost_model = CostModel(problem.profile)
    _require_searches(problem, cost_model)
    evaluator = Evaluator(limited, cost_model, within=_part_over_samples(limited, budget))
    start = SearchStart(evaluator)
    over_samples = _searched(start, progress)
    if problem.objective == THROUGHPUT:
        over_samples = with_chunks(evaluator, over_samples, start)
    evaluator.budget = budget
    outcome = with_layouts(evaluator, over_samples, budget)
    for continued in continued_searches(limited):
        outcome = continued.outcome(evaluator, outcome, budget)
    plan = _written(problem, start, over_samples, outcome, certainty)
    for continued in continued_searches(problem):
        plan = continued.plan(evaluator, plan)
    return plan


def _limited(problem: Problem) -> tuple[Problem, tuple[str, ...]]:
    """The problem whose fastest plan is the best one by the objective, and in words how sure that is."""
    if problem.objective == MEMORY:
        return least_memory(problem)
    return highest_rate(problem) if is_stream(problem) else (problem, ())


def _require_searches(problem: Problem, cost_model: CostModel) -> None:
    """Raises an error where what is asked for is in no search, so that it is not left out in silence."""
    if TIME_DIMS in problem.allow:
        cutting = (extra for extra in extras(PlannerExtra) if TIME_DIMS in extra.allows)
        required(cutting, "planner", f"--allow {TIME_DIMS}")
    for continued in continued_searches(problem):
        continued.require(problem, cost_model)


def _part_over_samples(limited: Problem, budget: Budget) -> Budget:
    """What the search over samples may spend: half of the work where others follow.

    And half of the time too, where what is counted of it takes twice as long.
    """
    limit_s = limited.time_limit_s
    others_follow = beyond_samples(limited) or any(continued.takes_half for continued in continued_searches(limited))
    return budget.part(limit_s / 2, reserve_s=limit_s / 4) if others_follow else budget


def _searched(start: SearchStart, progress: Progress | None) -> Outcome:
    """What the search over samples ends with: without a proof, with what is near its best plan."""
    whole = start.evaluator.budget
    until_s = whole.elapsed_s + policy.SEARCH * whole.clock_s
    within = whole.part(policy.SEARCH * whole.left_s, until_s=until_s)
    search = BestFirstSearch(
        start.evaluator, progress, within=within, improved=start.improved, start_bound_s=start.bound_s
    )
    outcome = search.run(start.items())
    if outcome.best is None or outcome.status != TIME_LIMIT:
        return outcome
    return replace(outcome, best=start.improved(outcome.best, whole.part(reserve_s=search.answer_work_s)))


def _written(
    problem: Problem, start: SearchStart, over_samples: Outcome, outcome: Outcome, certainty: tuple[str, ...]
) -> Plan:
    """The plan that is taken of those that were found, with its proof and what else there is.

    Args:
        over_samples: what the search had where layers are cut along samples alone.
        certainty: how sure it is that the limit of the objective is the least, in words.

    Raises:
        HalopipeError: there is none.
    """
    evaluator = start.evaluator
    if outcome.best is None:
        raise _nothing_found(evaluator, outcome)
    evaluator.budget.reserve(evaluator.answer_work_s(outcome.best.candidate))
    chosen, tie = without_ties(evaluator, outcome.best, _incumbents(start, over_samples, outcome))
    decision, predicted = written(problem, evaluator.pricing, chosen.candidate)
    evaluator.budget.spend(evaluator.forecast_work_s(chosen.candidate))
    evaluator.budget.reserve(evaluator.writing_work_s)
    fastest_s = tie.step_s if tie is not None else predicted.prediction.step_s
    limits = certainty + binding(decision.stages, predicted)
    searched = replace(_search_of(start, outcome, fastest_s), binding=limits, tie=tie)
    fastest = outcome.best if tie is not None else None
    others = alternatives(evaluator, chosen, start.choices, outcome.by_num_stages, fastest)
    return plan_of(problem, decision, predicted.prediction, searched, others)


def _incumbents(start: SearchStart, over_samples: Outcome, outcome: Outcome) -> Iterator[Evaluation]:
    """Plans that were found on the way."""
    plans = [*(choice.best for choice in start.choices.values()), over_samples.best, over_samples.unreplicated]
    plans += [*over_samples.by_num_stages.values(), *outcome.by_num_stages.values()]
    yield from (evaluation for evaluation in plans if evaluation is not None)


def _search_of(start: SearchStart, outcome: Outcome, step_s: float) -> Search:
    """What is known of how far a plan of ``step_s`` can be from the best."""
    problem = start.evaluator.problem
    bound_s = min(outcome.bound_s, start.least_work_s, step_s)
    bounds_s = {"frontier of the search": bound_s, "suffix DP": min(outcome.root_s, bound_s)}
    if not beyond_samples(problem):  # what the bound counts that knows counts of devices alone
        groups = "every group of devices" + " of one kind" * (not start.mixes_kinds)
        bounds_s[groups] = min(start.whole_s, bound_s)
    bounds_s["work over capacity"] = min(start.capacity_s, bound_s)
    return Search(
        method=METHOD,
        solver="best-first",
        status=status_of(outcome.status, step_s, bound_s, problem.gap),
        bound_s=bound_s,
        gap=step_s / bound_s - 1 if bound_s > 0 else 0.0,
        num_simulated=start.evaluator.num_simulated,
        num_candidates=outcome.num_candidates,
        bounds_s=bounds_s,
        rejected=(*start.rejected, *left_out(problem, start.cuts), *outcome.rejected),
    )


def _nothing_found(evaluator: Evaluator, outcome: Outcome) -> Exception:
    if outcome.status != TIME_LIMIT:
        if evaluator.problem.rate_per_s:
            highest_rate(replace(evaluator.problem, objective=THROUGHPUT))  # raises, if it is the rate
        return no_plan_fits(evaluator)
    limit_s = evaluator.problem.time_limit_s
    return out_of_time(evaluator.problem, f"none of {outcome.num_candidates} candidates fits after {limit_s:g} s")
