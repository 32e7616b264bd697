"""Samples moved between unlike members of a plan's stages, while its step gets shorter.

The shares that a search looks at where there are many are the best for a stage by itself (``Prices.versions``); beside
other stages, and with what messages and sums of gradients take, their neighbours may be better.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations

from planner.ir.errors import MissingMeasurementError
from planner.ir.problem import Problem
from planner.solvers.candidates.candidate import Candidate, all_shares, has_own_options
from planner.solvers.candidates.choose import ROUNDING
from planner.solvers.candidates.evaluate import Evaluation, Evaluator
from planner.solvers.candidates.feasibility import usable


def with_moved_shares(evaluator: Evaluator, best: Evaluation) -> Evaluation:
    """The best plan that single moves lead to, each to the first neighbour that is better."""
    while True:
        better = next(_better(evaluator, best), None)
        if better is None:
            return best
        best = better


def _better(evaluator: Evaluator, best: Evaluation) -> Iterator[Evaluation]:
    for candidate in _neighbours(evaluator.problem, best.candidate):
        if not evaluator.has_time_for(candidate):
            return
        try:
            if any(
                not usable(evaluator.problem, evaluator.book, ranks, shares, candidate.micro_batches)
                for ranks, shares in zip(candidate.groups, candidate.shares, strict=True)
            ):
                continue
            found = evaluator.evaluate(candidate, best.step_s)
        except MissingMeasurementError:
            continue
        if found.fits and found.step_s < best.step_s * (1 - ROUNDING) and not evaluator.unmet(found.candidate):
            yield found


def _neighbours(problem: Problem, candidate: Candidate) -> Iterator[Candidate]:
    """With one sample moved from a member of a stage to one of another kind or memory size."""
    devices, size = problem.profile.cluster.devices, max(candidate.micro_batches)
    for stage, (ranks, shares) in enumerate(zip(candidate.groups, candidate.shares, strict=True)):
        if sum(shares) != size or has_own_options(candidate, stage) or all_shares(problem, ranks, size):
            continue
        kinds = [(devices[rank].kind, devices[rank].memory_bytes) for rank in ranks]
        one_of_each = {pair: member for member, pair in enumerate(zip(kinds, shares, strict=True))}.values()
        for giver, taker in permutations(one_of_each, 2):
            if kinds[giver] != kinds[taker] and shares[giver] > 1:
                moved = tuple(share + (n == taker) - (n == giver) for n, share in enumerate(shares))
                others = (*candidate.shares[:stage], moved, *candidate.shares[stage + 1 :])
                yield replace(candidate, shares=others)
