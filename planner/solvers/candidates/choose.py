"""The best of a few candidates."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from planner.ir.errors import MissingMeasurementError
from planner.solvers.candidates.answer import infeasible
from planner.solvers.candidates.assemble import Candidate
from planner.solvers.candidates.evaluate import Evaluation, Evaluator

ROUNDING = 1e-9
"""Steps closer than this are equally good; the candidate seen first stays."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What a few candidates come to.

    Attributes:
        best: the one to take; None if none fits.
        closest: of those that do not fit, the one that lacks least.
        unknown: why a candidate could not be priced.
    """

    best: Evaluation | None
    closest: Evaluation | None
    unknown: MissingMeasurementError | None


def choose(evaluator: Evaluator, candidates: Iterable[Candidate], first_that_fits: bool = False) -> Choice:
    """The fastest of ``candidates`` that fits, or the first; candidates of sizes nobody measured are passed over."""
    best: Evaluation | None = None
    closest: Evaluation | None = None
    unknown: MissingMeasurementError | None = None
    for candidate in candidates:
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
    return Choice(best, closest, unknown)


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
    raise found.unknown or MissingMeasurementError(
        "no micro-batch size that may be used was measured",
        [f"global batch {evaluator.problem.global_batch}"],
        ["profile more sizes, or name the sizes to use"],
    )
