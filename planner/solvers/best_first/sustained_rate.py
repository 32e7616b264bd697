"""Streams of forward passes: the most samples a second that a plan sustains, and the plan of least latency at a rate.

Given       forward passes alone, as in :mod:`planner.solvers.best_first.solver`; a batch enters every T seconds
Choose      the pipeline                                                                            as there
Minimise    the latency of a batch that meets no other: the step                                    ``LATENCY``
Subject to  sum of the forwards of a stage <= T on each of its ranks           ``priced_groups.GroupPrices._in_time``
            the period of the simulated stream <= T             ``candidates.evaluate.Evaluator.sustained_per_s``

The first constraint is what prunes prefixes; the second, which counts messages and waiting as well, decides.  The
highest rate is found by bisection on T, as the least memory is (``infeasible``): a rate is refused once a search has
proved that no plan keeps it.
"""

from __future__ import annotations

from dataclasses import replace

from planner.ir.errors import InfeasibleError
from planner.ir.problem import LATENCY, THROUGHPUT, Problem
from planner.schedules import traits
from planner.solvers.best_first.warm_start import first_fit
from planner.solvers.budget import Budget, part_of_current

_PRECISION = 1e-3
_SHARE_OF_WORK = 0.5  # the rest is for the plan of least latency at that rate
_FASTER = 1.5  # what is tried next, as long as no rate was refused


def is_stream(problem: Problem) -> bool:
    """Whether throughput is asked for of forward passes alone: that of a stream without an end."""
    forward = problem.schedules and not any(traits(name).trains for name in problem.schedules)
    return problem.objective == THROUGHPUT and bool(forward)


def highest_rate(problem: Problem) -> tuple[Problem, tuple[str, ...]]:
    """The problem of the plan of least latency at the highest rate that was found, and in words how sure that is.

    Returns the problem without a rate, and no words, if no plan was found: the search that follows says why.

    Raises:
        InfeasibleError: the rate that was asked for is above it.
    """
    asked = replace(problem, objective=LATENCY, rate_per_s=0.0)
    budget = part_of_current(problem.time_limit_s)
    within = budget.part(_SHARE_OF_WORK * budget.limit_s)
    best_per_s, refused_per_s = 0.0, float("inf")
    reached_per_s, _ = _sustaining(asked, 0.0, budget)
    if reached_per_s is None:
        return asked, ()
    best_per_s = reached_per_s
    while refused_per_s > best_per_s * (1 + _PRECISION) and not within.is_over:
        wanted = best_per_s * _FASTER if refused_per_s == float("inf") else (best_per_s + refused_per_s) / 2
        reached_per_s, is_certain = _sustaining(asked, wanted, within)
        if reached_per_s is not None:
            best_per_s = reached_per_s
        elif is_certain:
            refused_per_s = wanted
        else:
            break
    sure = (
        f"no plan sustains more than {refused_per_s:.5g} samples/s"
        if refused_per_s < float("inf")
        else "no bound was found in time"
    )
    if problem.rate_per_s > best_per_s:
        raise too_fast(problem, best_per_s, sure)
    left = replace(
        asked, rate_per_s=best_per_s * (1 - _PRECISION**2), time_limit_s=problem.time_limit_s * (1 - _SHARE_OF_WORK)
    )
    return left, (f"rate: {sure}",)


def too_fast(problem: Problem, best_per_s: float, sure: str = "") -> InfeasibleError:
    """The error for a rate that no plan keeps.

    Args:
        best_per_s: what can be sustained.
        sure: how sure that is.
    """
    devices = len(problem.ranks)
    return InfeasibleError(
        f"no plan sustains {problem.rate_per_s:g} samples/s",
        [
            f"{best_per_s:.6g} samples/s can be sustained on {devices} device{'s' * (devices > 1)}",
            *([sure] if sure else []),
        ],
        [
            f"--rate {best_per_s * 0.99:.3g}",
            "more devices, or larger requests, where they cost less a sample",
        ],
    )


def _sustaining(problem: Problem, rate_per_s: float, within: Budget) -> tuple[float | None, bool]:
    """What a plan sustains that keeps the rate, the first that comes; and whether there is certainly none."""
    evaluator, outcome = first_fit(replace(problem, rate_per_s=rate_per_s), within)
    best = outcome.best
    return None if best is None else evaluator.sustained_per_s(best.candidate), outcome.refutes
