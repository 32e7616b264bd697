"""The best of a few candidates."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from planner.ir.errors import InfeasibleError, MissingMeasurementError
from planner.solvers.candidates.answer import infeasible
from planner.solvers.candidates.assemble import Candidate
from planner.solvers.candidates.evaluate import Evaluation, Evaluator
from planner.solvers.candidates.request import as_asked

ROUNDING = 1e-9
"""Steps closer than this are equally good; the candidate seen first stays."""

_LATE_S = 1.0
"""What one candidate may still take when time is up and there is no plan yet."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What a few candidates come to.

    Attributes:
        best: the one to take; None if none fits.
        closest: of those that do not fit, the one that lacks least.
        unknown: why a candidate could not be priced.
        unmet: why a candidate may not be an answer, whatever it takes; empty if each may.
        is_cut_short: whether some were not looked at for want of time.
    """

    best: Evaluation | None
    closest: Evaluation | None
    unknown: MissingMeasurementError | None
    unmet: str = ""
    is_cut_short: bool = False


def cheapest_first(evaluator: Evaluator, candidates: Iterable[Candidate], stops: float) -> Iterable[Candidate]:
    """The candidates in their order; if there is no time for all of them, those of few micro-batches first."""
    found = list(candidates)
    if time.monotonic() + sum(map(evaluator.takes_s, found)) > min(stops, evaluator.stops):
        found.sort(key=evaluator.takes_s)
    return found


def choose(
    evaluator: Evaluator,
    candidates: Iterable[Candidate],
    first_that_fits: bool = False,
    stops: float = float("inf"),
) -> Choice:
    """The fastest of ``candidates`` that fits, or the first; candidates of sizes nobody measured are passed over.

    None is looked at that does not meet the problem's request, or, once there is a plan, that cannot be evaluated in
    time.  Without a plan those that take long are passed over.

    Args:
        stops: when to end, by ``time.monotonic``; the time limit's end at the latest.
    """
    best: Evaluation | None = None
    closest: Evaluation | None = None
    unknown: MissingMeasurementError | None = None
    unmet, is_cut_short = "", False
    for asked in candidates:
        candidate = as_asked(evaluator.problem, asked)
        why = evaluator.unmet(candidate)
        if why:
            unmet = unmet or why
            continue
        takes_long = best is not None or evaluator.takes_s(candidate) > _LATE_S
        if takes_long and not evaluator.has_time_for(candidate, stops):
            is_cut_short = True
            continue
        try:
            found = evaluator.evaluate(candidate, best.step_s if best is not None else float("inf"))
        except MissingMeasurementError as error:
            unknown = error
            continue
        if found.fits:
            best = better(best, found)
            if first_that_fits:
                break
        elif closest is None or evaluator.excess(found) < evaluator.excess(closest):
            closest = found
    return Choice(best, closest, unknown, unmet, is_cut_short)


def better(best: Evaluation | None, found: Evaluation) -> Evaluation:
    """The faster of two; if they are equally fast the one that holds less, else ``best``."""
    if best is None or found.step_s < best.step_s * (1 - ROUNDING):
        return found
    return found if found.step_s <= best.step_s and found.peak_bytes < best.peak_bytes else best


def best_of(evaluator: Evaluator, candidates: Iterable[Candidate], first_that_fits: bool = False) -> Evaluation:
    """As :func:`choose`, for those who need a plan.

    Raises:
        InfeasibleError: none fits.
        MissingMeasurementError: none could be priced.
    """
    found = choose(evaluator, candidates, first_that_fits)
    if found.best is not None:
        return found.best
    if found.closest is not None:
        raise infeasible(evaluator.problem, found.closest)
    if found.is_cut_short:
        limit = f"none was simulated after {evaluator.problem.time_limit_s:g} s"
        raise InfeasibleError("no plan found in time", [limit], ["search longer: --time-limit"])
    if found.unmet:
        raise InfeasibleError(
            "no plan of this strategy meets what was asked",
            [found.unmet],
            ["ask for less, or plan with another solver"],
        )
    raise found.unknown or MissingMeasurementError(
        "no micro-batch size that may be used was measured",
        [f"global batch {evaluator.problem.global_batch}"],
        ["profile more sizes, or name the sizes to use"],
    )
