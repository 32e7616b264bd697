"""What a solver answers besides the decision: what binds, why other plans lose, and why nothing fits."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from planner.costs.memory.lifetimes import RankMemory
from planner.costs.predict import Forecast, forecast
from planner.ir.errors import InfeasibleError
from planner.ir.plan import Alternative, Decision, Plan, Search
from planner.ir.problem import Problem
from planner.ir.schedule import Op
from planner.ir.timeline import Timeline
from planner.solvers.candidates.candidate import decision_of, plan_of
from planner.solvers.candidates.evaluate import Evaluation, Evaluator
from planner.solvers.candidates.feasibility import mixing_text

_NEARLY_FULL = 0.9
_WORTH_NAMING = 0.01
_GIB = 2.0**30


def heuristic_plan(evaluator: Evaluator, found: Evaluation, solver: str, method: str) -> Plan:
    """The plan of a solver that knows no bound."""
    decision = decision_of(evaluator.problem, found.candidate)
    seen = forecast(evaluator.book, decision, evaluator.problem.memory_margin, evaluator.problem.memory_bytes)
    search = Search(
        method=method,
        solver=solver,
        status="heuristic",
        bound_s=0.0,
        gap=0.0,
        num_simulated=evaluator.num_simulated,
        num_candidates=evaluator.num_simulated,
        binding=binding(decision, seen),
    )
    return plan_of(evaluator.problem, decision, seen.prediction, search)


def binding(decision: Decision, seen: Forecast) -> tuple[str, ...]:
    """What limits the step, in words, the largest share of it first."""
    step_s = seen.prediction.step_s
    if step_s <= 0:
        return ()
    shares = [
        (share, words)
        for share, words in (
            _bottleneck(decision, seen),
            (seen.prediction.bubble_fraction, "of the ranks' time is idle (bubble)"),
            (_longest_s(seen.timeline, Op.REDUCE_GRAD) / step_s, "of the step sums gradients (all-reduce and wait)"),
            (_messages_s(seen) / step_s, "of the step moves activations, gradients or statistics"),
        )
        if share >= _WORTH_NAMING
    ]
    ordered = [f"{share:.0%} {words}" for share, words in sorted(shares, key=lambda pair: -pair[0])]
    fullest = max(seen.prediction.ranks, key=lambda rank: rank.peak_bytes / max(1, rank.memory_limit_bytes))
    full = fullest.peak_bytes / max(1, fullest.memory_limit_bytes)
    if full >= _NEARLY_FULL:
        ordered.append(f"memory: rank {fullest.rank} holds {full:.0%} of what it may")
    return tuple(ordered)


def slower(name: str, step_s: float, peak_bytes: int, best_s: float, why: str, *, is_tie: bool = False) -> Alternative:
    """Another plan that fits; a tie if it cannot be told which is the faster."""
    ratio = step_s / best_s - 1 if best_s > 0 else float(step_s > best_s)
    slower_by = f"{abs(ratio):.1%} {'slower' if ratio > 0 else 'faster'}"
    slower_by = (slower_by if best_s > 0 else "slower than a step that costs nothing") + ", a tie" * is_tie
    why_not = f"{slower_by}{f': {why}' if why else ''}" if abs(ratio) > 1e-9 else "as fast"
    return Alternative(name, step_s, peak_bytes, why_not)


def too_large(name: str, problem: Problem, found: Evaluation) -> Alternative:
    """Another plan that does not fit, or is too slow."""
    if found.too_slow_per_s:
        return Alternative(
            name, None, None, f"sustains {found.too_slow_per_s:.4g} samples/s, asked: {problem.rate_per_s:.6g}"
        )
    rank = found.excess_rank or 0
    return Alternative(name, None, found.memories[rank].peak_bytes, needs(problem, found))


def needs(problem: Problem, found: Evaluation) -> str:
    """The two numbers that disagree: "needs 3.1 GiB on rank 0, limit 2.0 GiB"."""
    rank = found.excess_rank or 0
    limit = problem.memory_limit_bytes(rank)
    return f"needs {size_text(found.memories[rank].peak_bytes)} on rank {rank}, limit {size_text(limit)}"


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
    if memory.peak_bytes <= device.memory_bytes * (1 - problem.memory_margin):  # --memory asked for less
        another = f"--memory {ceil(memory.peak_bytes / 2**20)}MiB, which the devices have"
    else:
        needed = size_text(memory.peak_bytes / (1 - problem.memory_margin))
        another = f"{needed} of memory a device, or more devices: --cluster FILE plans for other machines"
    return InfeasibleError("no plan fits", details, [*would_fit, another])


def _bottleneck(decision: Decision, seen: Forecast) -> tuple[float, str]:
    busiest = max(seen.prediction.ranks, key=lambda rank: rank.compute_s)
    stages = [s for s, stage in enumerate(decision.stages) if busiest.rank in stage.ranks]
    where = f"stage {stages[0]}" if stages else "no stage"
    device = next((d for s in stages for r, d in _devices(decision, s) if r == busiest.rank), "")
    return busiest.compute_s / seen.prediction.step_s, f"of the step rank {busiest.rank} ({device}) computes {where}"


def _devices(decision: Decision, stage: int) -> tuple[tuple[int, str], ...]:
    found = decision.stages[stage]
    return tuple(zip(found.ranks, found.devices, strict=True))


def _longest_s(timeline: Timeline, op: Op) -> float:
    return max((span.stop_s - span.start_s for span in timeline.spans if span.action.endswith(op.value)), default=0.0)


def _messages_s(seen: Forecast) -> float:
    """The communication of the rank that has most of it, reductions apart."""
    reduction_s = {
        span.rank: span.stop_s - span.start_s
        for span in seen.timeline.spans
        if span.action.endswith(Op.REDUCE_GRAD.value)
    }
    return max((rank.communication_s - reduction_s.get(rank.rank, 0.0) for rank in seen.prediction.ranks), default=0.0)


def _largest(memory: RankMemory) -> str:
    part, size = max(memory.parts().items(), key=lambda item: item[1])
    return f"{part}, {size_text(size)}"


def out_of_time(problem: Problem, why: str) -> InfeasibleError:
    """The error where a search ended before it had a plan."""
    longer_s = max(60.0, 4 * problem.time_limit_s)
    return InfeasibleError("no plan found in time", [why], [f"search longer: --time-limit {longer_s:g}"])


def size_text(num_bytes: float) -> str:
    """Bytes as people read them."""
    for unit, scale in (("GiB", _GIB), ("MiB", _GIB / 1024), ("KiB", _GIB / 1024**2)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes:.0f} bytes"
