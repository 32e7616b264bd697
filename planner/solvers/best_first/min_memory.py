"""The objective memory: the least limit on every device under which some plan fits, by bisection."""

from __future__ import annotations

import time
from dataclasses import replace

from planner.costs.cost_model import PriceBook
from planner.ir.problem import THROUGHPUT, Problem
from planner.solvers.best_first.infeasible import leanest
from planner.solvers.best_first.search import Queue
from planner.solvers.best_first.warm_start import Start
from planner.solvers.candidates.evaluate import Evaluation, Evaluator
from planner.solvers.candidates.explain import size_text

_PRECISION = 1e-3
_SHARE_OF_TIME = 0.5  # the rest is for the fastest plan under the limit


def least_memory(problem: Problem) -> tuple[Problem, tuple[str, ...]]:
    """The problem of the fastest plan under the least limit that was found, and in words how sure that is.

    Returns the problem as it is, without words, if no plan was found: the search that follows says why.
    """
    asked = replace(problem, objective=THROUGHPUT)
    best = leanest(Evaluator(asked, PriceBook(problem.profile)))
    if best is None or not best.fits:
        best, _ = _fitting(asked, problem.memory_bytes, problem.time_limit_s)
    if best is None:
        return asked, ()
    least, most = 0, best.peak_bytes
    ends_s = time.monotonic() + _SHARE_OF_TIME * problem.time_limit_s
    while most - least > max(1, _PRECISION * most) and time.monotonic() < ends_s:
        middle = (least + most) // 2
        found, nothing_fits = _fitting(asked, middle, ends_s - time.monotonic())
        if found is not None:
            most = found.peak_bytes
        elif nothing_fits:
            least = middle
        else:
            break
    said = (
        f"memory: no plan holds less than {size_text(least)}" if least else "memory: no lower bound was found in time"
    )
    return replace(asked, memory_bytes=most, time_limit_s=problem.time_limit_s * (1 - _SHARE_OF_TIME)), (said,)


def _fitting(problem: Problem, memory_bytes: int, time_limit_s: float) -> tuple[Evaluation | None, bool]:
    """A plan under the limit, the leanest that comes soon; and whether there is certainly none."""
    limited = replace(problem, memory_bytes=memory_bytes, time_limit_s=max(0.0, time_limit_s))
    evaluator = Evaluator(limited, PriceBook(problem.profile))
    outcome = Queue(evaluator, None, any_fit=True).run(Start(evaluator).items)
    return outcome.best, outcome.best is None and outcome.status == "proven"
