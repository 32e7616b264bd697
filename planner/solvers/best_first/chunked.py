"""Pipelines of several stages a position beside those of one, where no schedule is named (``Problem.chunks``).

They are looked at after the others, for a small part of the work that these took (``virtual_pipelines``).  Where that
is enough to know that none is faster, or which is the fastest, the plan is the best of them too.  Where it is not, the
best of those that were simulated is taken if it is faster, and what is left is named (``SEVERAL_STAGES``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from math import inf

from planner.costs.candidate import Candidate
from planner.ir.plan import SEVERAL_STAGES, STOPPED, TIME_LIMIT, Rejected, status_of
from planner.solvers.best_first.search import BestFirstSearch, Outcome
from planner.solvers.best_first.virtual_pipelines import WAYS, Family, PipelineFamilies
from planner.solvers.best_first.warm_start import SearchStart
from planner.solvers.budget import Budget
from planner.solvers.candidates.choose import better
from planner.solvers.candidates.evaluate import Evaluation, Evaluator
from planner.solvers.candidates.feasibility import chunked_schedule_names

_SHARE, _LEAST_S = 0.12, 0.1
"""Of the work that was done before, and seconds of work that they may take in any case."""

_SHARE_OF_BETTER, _LEAST_OF_BETTER_S = 0.5, 1.0
"""The same, once more, where they have a faster plan that is not proven the best."""

_LEFT_OUT = Rejected(SEVERAL_STAGES, "there was no time for all of them, nor a bound that rules them out")

_MEMBER_S = 5e-4  # of work, to price the groups of devices of one sort of pipeline and to bound it
_FEW = 2  # plans with several stages, on whose groups of devices they are tried first


def with_chunks(evaluator: Evaluator, outcome: Outcome, start: SearchStart) -> Outcome:
    """``outcome`` of the search with one stage a position, continued over several; as it is where none may be used."""
    names = chunked_schedule_names(evaluator.problem)
    if not names or outcome.best is None or start.cuts is None:
        return outcome
    if outcome.status == STOPPED:
        return replace(outcome, rejected=(*outcome.rejected, _LEFT_OUT))
    of_several = _searched(evaluator, outcome, start, max(_LEAST_S, _SHARE * evaluator.budget.work_s))
    if of_several.status == TIME_LIMIT and of_several.best is not outcome.best:  # worth a proof
        work_s = max(_LEAST_OF_BETTER_S, _SHARE_OF_BETTER * evaluator.budget.work_s)
        longer = _searched(evaluator, replace(outcome, best=of_several.best), start, work_s)
        of_several = replace(longer, by_num_stages={**of_several.by_num_stages, **longer.by_num_stages})
    is_complete = of_several.status not in (TIME_LIMIT, STOPPED)
    rejected = tuple(start.chunked_left_out(names)) if is_complete else (_LEFT_OUT,)
    num_candidates = outcome.num_candidates + of_several.num_candidates
    continued = replace(outcome, num_candidates=num_candidates, rejected=(*outcome.rejected, *rejected))
    if is_complete or of_several.best is not outcome.best:
        continued = replace(continued, bound_s=min(outcome.bound_s, of_several.bound_s))
    if of_several.best is not None and of_several.best is not outcome.best:
        by_num_stages = dict(outcome.by_num_stages)
        for number, plan in of_several.by_num_stages.items():
            by_num_stages[number] = better(by_num_stages.get(number), plan)
        ended = outcome.status if is_complete else TIME_LIMIT
        status = status_of(ended, of_several.best.step_s, continued.bound_s, evaluator.problem.gap)
        continued = replace(continued, best=of_several.best, status=status, by_num_stages=by_num_stages)
    return replace(continued, status=STOPPED) if of_several.status == STOPPED else continued


def _searched(evaluator: Evaluator, outcome: Outcome, start: SearchStart, work_s: float) -> Outcome:
    """What is known of several stages a position after so much work; ``time limit`` where that is not all."""
    within = evaluator.budget.part(work_s)
    within.spend(start.chunked_takes_s())
    nothing = replace(outcome, status=TIME_LIMIT, bound_s=start.capacity_s, num_candidates=0, by_num_stages={})
    if within.is_over or start.cuts is None:
        return nothing
    with _spending(evaluator, within):
        search = BestFirstSearch(evaluator, None)
        search.best = outcome.best
        every = tuple(start.chunked(chunked_schedule_names(evaluator.problem)))
        takes_s = _MEMBER_S * len(WAYS) * sum(len(families.sequences) for families in every)
        if start.cuts.are_in_order and within.allows(takes_s):
            within.spend(takes_s)
            return search.run(chain(_promising(evaluator, outcome, every), every))
        few = search.run(_promising(evaluator, outcome, every))
    return replace(few, status=STOPPED if few.status == STOPPED else TIME_LIMIT, bound_s=start.capacity_s)


def _promising(evaluator: Evaluator, outcome: Outcome, every: Sequence[PipelineFamilies]) -> Iterator[Evaluation]:
    """Good pipelines on the groups of devices of the best plans that have several stages."""
    upper_s = outcome.best.step_s if outcome.best is not None else inf
    plans = [plan for number, plan in outcome.by_num_stages.items() if number > 1]
    for plan in sorted(plans, key=lambda plan: plan.step_s)[:_FEW]:
        for family in chain.from_iterable(_like(families, plan.candidate) for families in every):
            good = family.good(evaluator, upper_s) if family.tables().bound_s < upper_s else None
            if good is not None:
                upper_s = min(upper_s, good.step_s)
                yield good


def _like(families: PipelineFamilies, candidate: Candidate) -> Iterator[Family]:
    """Those with several stages on each position that have a pipeline's groups of devices and micro-batches."""
    prices = families.stage_prices.prices
    if prices.micro_batches == candidate.micro_batches:
        counts = tuple(tuple(len({*pool.ranks}.intersection(own)) for pool in prices.pools) for own in candidate.groups)
        like = replace(families, sequences=[own for own in families.sequences if own == counts])
        yield from (family for family in like.members() if len(family.where) > len(counts))


@contextmanager
def _spending(evaluator: Evaluator, within: Budget) -> Iterator[None]:
    """What the evaluator does inside is within a part of its budget."""
    whole = evaluator.budget
    evaluator.budget = within
    try:
        yield
    finally:
        evaluator.budget = whole
