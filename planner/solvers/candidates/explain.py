"""What a solver answers besides the decision: what binds, why other plans lose, and why nothing fits."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from planner.costs.candidate import Candidate
from planner.costs.memory.lifetimes import RankMemory
from planner.costs.predict import Forecast, forecast
from planner.costs.pricing import Pricing
from planner.costs.sentences import AS_FAST, TIE, binding, needs_text, size_text, slower_text, too_slow_text
from planner.ir.errors import InfeasibleError
from planner.ir.plan import HEURISTIC, Alternative, Decision, Plan, Search
from planner.ir.problem import Problem
from planner.solvers.candidates.candidate import decision_of, divided, plan_of
from planner.solvers.candidates.evaluate import Evaluation, Evaluator
from planner.solvers.candidates.feasibility import mixing_text


def heuristic_plan(evaluator: Evaluator, evaluation: Evaluation, solver: str, method: str) -> Plan:
    """The plan of a solver that knows no bound."""
    decision, predicted = written(evaluator.problem, evaluator.pricing, evaluation.candidate)
    search = Search(
        method=method,
        solver=solver,
        status=HEURISTIC,
        bound_s=0.0,
        gap=0.0,
        num_simulated=evaluator.num_simulated,
        num_candidates=evaluator.num_simulated,
        binding=binding(decision.stages, predicted),
    )
    return plan_of(evaluator.problem, decision, predicted.prediction, search)


def written(problem: Problem, pricing: Pricing, candidate: Candidate) -> tuple[Decision, Forecast]:
    """The candidate as a plan writes it down, with its rows validated, and what is predicted of it."""
    whole = pricing.with_rows(candidate)
    predicted = forecast(pricing, divided(problem, whole), problem.memory_margin, problem.memory_bytes)
    return decision_of(problem, whole), predicted


def slower(name: str, step_s: float, peak_bytes: int, best_s: float, why: str, *, is_tie: bool = False) -> Alternative:
    """Another plan that fits; a tie if it cannot be told which is the faster."""
    slowdown = slower_text(step_s, best_s)
    why_not = AS_FAST if slowdown == AS_FAST else f"{slowdown}{TIE * is_tie}{f': {why}' if why else ''}"
    return Alternative(name, step_s, peak_bytes, why_not)


def too_large(name: str, problem: Problem, evaluation: Evaluation) -> Alternative:
    """Another plan that does not fit, or is too slow."""
    if evaluation.too_slow_per_s:
        return Alternative(name, None, None, too_slow_text(evaluation.too_slow_per_s, problem.rate_per_s))
    rank = evaluation.excess_rank or 0
    peak_bytes = evaluation.memories[rank].peak_bytes
    return Alternative(name, None, peak_bytes, needs_text(peak_bytes, rank, problem.memory_limit_bytes(rank)))


def infeasible(problem: Problem, closest: Evaluation, would_fit: Sequence[str] = ()) -> InfeasibleError:
    """The error that says why nothing fits.

    Args:
        closest: the candidate that lacks least.
        would_fit: what helps, in words.
    """
    rank = closest.excess_rank or 0
    device = problem.profile.cluster.devices[rank]
    limit, memory = problem.memory_limit_bytes(rank), closest.memories[rank]
    whole = f"{size_text(device.memory_bytes)} minus {problem.memory_margin:.0%} margin"
    if limit < int(device.memory_bytes * (1 - problem.memory_margin)):
        whole = f"asked for; the device has {whole}"
    details = [
        f"rank {rank}, {device.name} ({device.kind}): the leanest plan needs {size_text(memory.peak_bytes)}",
        f"usable {size_text(limit)} ({whole})",
        f"largest part: {_largest(memory)}, at micro-batch {max(closest.candidate.micro_batches)}",
    ]
    mixing = mixing_text(problem.profile.graph)
    if mixing and len(problem.ranks) > 1:
        details.append(f"{mixing}: a stage that has one is not divided among ranks by samples")
    peaks = {rank: memory.peak_bytes for rank, memory in enumerate(closest.memories)}
    over = {rank: peak for rank, peak in peaks.items() if peak > problem.memory_limit_bytes(rank)} or peaks
    usable = 1 - problem.memory_margin
    if all(peak <= problem.profile.cluster.devices[rank].memory_bytes * usable for rank, peak in over.items()):
        another = f"--memory {ceil(max(over.values()) / 2**20)}MiB, which the devices have"
    else:
        needed = size_text(max(over.values()) / usable)
        another = f"{needed} of memory a device, or more devices: --cluster FILE plans for other machines"
    return InfeasibleError("no plan fits", details, [*would_fit, another])


def _largest(memory: RankMemory) -> str:
    part, size = max(memory.parts().items(), key=lambda item: item[1])
    return f"{part}, {size_text(size)}"


def out_of_time(problem: Problem, why: str) -> InfeasibleError:
    """The error where a search ended before it had a plan."""
    longer_s = max(60.0, 4 * problem.time_limit_s)
    return InfeasibleError("no plan found in time", [why], [f"search longer: --time-limit {longer_s:g}"])
