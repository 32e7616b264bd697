"""Samples moved between unlike members of a plan's stages, until it fits, and while its step gets shorter.

The shares that a search simulates first are the best for a stage by itself (``SharedBound.balanced``), as far as a
bound of memory allows them. Exactly, a member may hold less; and beside other stages, and with what messages and sums
of gradients take, their neighbours may be better.  Where there is time, all are looked at (``share_search``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations

from planner.costs.candidate import Candidate
from planner.costs.shards.device_mesh import proportional
from planner.ir.errors import MissingMeasurementError
from planner.ir.problem import Problem
from planner.solvers.candidates.choose import ROUNDING
from planner.solvers.candidates.evaluate import Evaluation, Evaluator
from planner.solvers.candidates.feasibility import stages_usable

_MOST_MOVES = 12


def made_to_fit(evaluator: Evaluator, candidate: Candidate, evaluation: Evaluation) -> Evaluation:
    """The candidate's evaluation, or that of one with fewer samples where memory is too small, if that may be.

    Members of one kind and memory size get no more than so much of what is too much as fits in proportion; the others
    of the stage share the rest in proportion to what they have.
    """
    devices, full = evaluator.problem.profile.cluster.devices, set[int]()
    for _ in range(_MOST_MOVES):
        rank = evaluation.excess_rank
        if rank is None:
            break
        stage = next(stage for stage, ranks in enumerate(candidate.groups) if rank in ranks)
        ranks, shares = candidate.groups[stage], candidate.shares[stage]
        if not _is_open(evaluator.problem, candidate, stage):
            break
        kinds = [(devices[member].kind, devices[member].memory_bytes) for member in ranks]
        mine, own = kinds[ranks.index(rank)], shares[ranks.index(rank)]
        most = min(own - 1, int(own / evaluator.excess(evaluation)))
        full |= {member for member, kind in zip(ranks, kinds, strict=True) if kind == mine}
        left = [min(share, most) if kind == mine else share for share, kind in zip(shares, kinds, strict=True)]
        takers = [n for n, member in enumerate(ranks) if member not in full]
        if most < 1 or not takers:
            break
        more = proportional(sum(shares) - sum(left), [shares[n] for n in takers])
        for n, extra in zip(takers, more, strict=True):
            left[n] += extra
        candidate = _with_shares(candidate, stage, tuple(left))
        tried = _evaluated(evaluator, candidate)
        if tried is None:
            break
        evaluation = tried
    return evaluation


def with_moved_shares(evaluator: Evaluator, best: Evaluation) -> Evaluation:
    """The best plan that single moves lead to, each to the first neighbour that is better."""
    while True:
        better = next(_better(evaluator, best), None)
        if better is None:
            return best
        best = better


def _better(evaluator: Evaluator, best: Evaluation) -> Iterator[Evaluation]:
    for candidate in _neighbours(evaluator.problem, best.candidate):
        evaluation = _evaluated(evaluator, candidate, best.step_s)
        shorter = evaluation is not None and evaluation.fits and evaluation.step_s < best.step_s * (1 - ROUNDING)
        if evaluation is not None and shorter and not evaluator.unmet(evaluation.candidate):
            yield evaluation


def _evaluated(evaluator: Evaluator, candidate: Candidate, known_s: float = float("inf")) -> Evaluation | None:
    """None where shares cannot be used or priced, or there is no time."""
    if not evaluator.has_time_for(candidate):
        return None
    try:
        if not stages_usable(evaluator.problem, evaluator.cost_model, candidate):
            return None
        return evaluator.evaluate(candidate, known_s)
    except MissingMeasurementError:
        return None


def _is_open(problem: Problem, candidate: Candidate, stage: int) -> bool:
    """Whether the stage has shares of samples, and may have others."""
    size = max(candidate.micro_batches)
    if sum(candidate.shares[stage]) != size or candidate.has_own_options(stage):
        return False
    devices = (problem.profile.cluster.devices[rank] for rank in candidate.groups[stage])
    return len({(device.kind, device.memory_bytes, device.on_chip_bytes) for device in devices}) > 1


def _with_shares(candidate: Candidate, stage: int, shares: tuple[int, ...]) -> Candidate:
    return replace(candidate, shares=(*candidate.shares[:stage], shares, *candidate.shares[stage + 1 :]))


def _neighbours(problem: Problem, candidate: Candidate) -> Iterator[Candidate]:
    """With one sample moved from a member of a stage to one of another kind or memory size."""
    devices = problem.profile.cluster.devices
    for stage, (ranks, shares) in enumerate(zip(candidate.groups, candidate.shares, strict=True)):
        if not _is_open(problem, candidate, stage):
            continue
        kinds = [(devices[rank].kind, devices[rank].memory_bytes) for rank in ranks]
        one_of_each = {pair: member for member, pair in enumerate(zip(kinds, shares, strict=True))}.values()
        for giver, taker in permutations(one_of_each, 2):
            if kinds[giver] != kinds[taker] and shares[giver] > 1:
                moved = tuple(share + (n == taker) - (n == giver) for n, share in enumerate(shares))
                yield _with_shares(candidate, stage, moved)
