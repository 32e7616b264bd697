"""Pipelines of several stages a position beside those of one, where no schedule is named (``Problem.chunks``).

They are looked at after the others, for a small part of the work that these took (``virtual_pipelines``), and for more
where one of the first is faster.  Where that is enough to know that none is faster, or which is the fastest, the plan
is the best of them too.  Where it is not, the best that was found is taken, and what is left is named
(``SEVERAL_STAGES``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from planner.ir.plan import SEVERAL_STAGES, STOPPED, TIME_LIMIT, Rejected, status_of
from planner.solvers.best_first import policy
from planner.solvers.best_first.search import BestFirstSearch, Outcome
from planner.solvers.best_first.virtual_pipelines import WAYS, good_pipelines
from planner.solvers.best_first.warm_start import SearchStart
from planner.solvers.budget import Budget
from planner.solvers.candidates.choose import better
from planner.solvers.candidates.evaluate import Evaluator
from planner.solvers.candidates.feasibility import chunked_schedule_names

_LEAST_S = 0.5  # of work, that they may take in any case
_LEAST_OF_BETTER_S = 8.0  # where one of them is faster

_LEFT_OUT = Rejected(SEVERAL_STAGES, "there was no time for all of them, nor a bound that rules them out")

_MEMBER_S = 5e-4  # of work, to price the groups of devices of one sort of pipeline and to bound it


def with_chunks(evaluator: Evaluator, outcome: Outcome, start: SearchStart) -> Outcome:
    """``outcome`` of the search with one stage a position, continued over several; as it is where none may be used."""
    names = chunked_schedule_names(evaluator.problem)
    if not names or outcome.best is None or start.cuts is None:
        return outcome
    if outcome.status == STOPPED:
        return replace(outcome, rejected=(*outcome.rejected, _LEFT_OUT))
    of_several = _searched(evaluator, outcome, start)
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


def _searched(evaluator: Evaluator, outcome: Outcome, start: SearchStart) -> Outcome:
    """What is known of several stages a position after a part of the work; ``time limit`` where that is not all."""
    before_s = evaluator.budget.work_s
    within = evaluator.budget.part(max(_LEAST_S, policy.SEVERAL_STAGES * before_s))
    within.spend(start.chunked_work_s())
    nothing = replace(outcome, status=TIME_LIMIT, bound_s=start.capacity_s, num_candidates=0, by_num_stages={})
    if within.is_over or start.cuts is None:
        return nothing
    every = tuple(start.chunked(chunked_schedule_names(evaluator.problem)))
    with _spending(evaluator, within):
        few = BestFirstSearch(evaluator, None)
        few.best = outcome.best
        good = few.run(good_pipelines(every, evaluator, few.upper_s))
    if good.status == STOPPED or not start.cuts.are_in_order:
        return replace(good, status=STOPPED if good.status == STOPPED else TIME_LIMIT, bound_s=start.capacity_s)
    whole = within
    if good.best is not outcome.best:  # worth a proof
        whole = evaluator.budget.part(max(_LEAST_OF_BETTER_S, policy.FASTER_SEVERAL_STAGES * before_s))
    work_s = _MEMBER_S * len(WAYS) * sum(len(families.sequences) for families in every)
    if not whole.allows(work_s):
        return replace(good, status=TIME_LIMIT, bound_s=start.capacity_s)
    whole.spend(work_s)
    with _spending(evaluator, whole):
        search = BestFirstSearch(evaluator, None)
        search.best = good.best
        ended = search.run(every)
    return replace(ended, by_num_stages={**good.by_num_stages, **ended.by_num_stages})


@contextmanager
def _spending(evaluator: Evaluator, within: Budget) -> Iterator[None]:
    """What the evaluator does inside is within a part of its budget."""
    whole = evaluator.budget
    evaluator.budget = within
    try:
        yield
    finally:
        evaluator.budget = whole
