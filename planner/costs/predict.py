"""What a decision is predicted to cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planner.costs.compiled import PREPARE_STEP, RECEIVE_STEP, REDUCE_STEP, SEND_STEP, CompiledProgram, compile_program
from planner.costs.evidence import weakest
from planner.costs.memory import RankMemory, rank_memories
from planner.costs.simulate import (
    Trace,
    execute,
    hosts_beside,
    prices,
    resources,
    timeline,
    transfer_bytes,
    transfer_prices,
)
from planner.costs.stage import PriceBook, StageCosts, placements
from planner.ir.cluster import Evidence
from planner.ir.plan import Decision, Prediction, RankPrediction
from planner.ir.profile import Profile
from planner.ir.timeline import Timeline
from planner.layers.boundary import Boundaries
from planner.passes import validate


@dataclass(frozen=True, slots=True)
class Forecast:
    """A prediction with its timeline and its memory by part."""

    prediction: Prediction
    timeline: Timeline
    memories: tuple[RankMemory, ...]


def predict(
    profile: Profile, decision: Decision, memory_margin: float = 0.08, memory_bytes: int = 0
) -> tuple[Prediction, Timeline]:
    """Validates and simulates ``decision`` on the profile's cluster.

    Args:
        memory_margin: share of a device's memory that stays free; the rest is the limit reported.
        memory_bytes: a lower limit for every device; 0: none.

    Raises:
        IllegalProgramError: the decision's program is not legal.
        MissingMeasurementError: the profile does not say what a layer costs at a size the decision uses.
    """
    found = forecast(PriceBook(profile), decision, memory_margin, memory_bytes)
    return found.prediction, found.timeline


def forecast(book: PriceBook, decision: Decision, memory_margin: float, memory_bytes: int = 0) -> Forecast:
    """As :func:`predict`, with prices that were looked up before, and memory by part."""
    program = Boundaries.of_decision(book.profile.graph, decision).program(decision)
    validate(program)
    costs = StageCosts(book, placements(book, decision), decision.micro_batches)
    compiled = compile_program(program, decision.micro_batches)
    sizes = transfer_bytes(program, compiled)
    action_s, message_s = prices(compiled, costs), transfer_prices(compiled, sizes, book.network)
    beside = hosts_beside(compiled, costs)
    trace = execute(compiled, action_s, message_s, resources(compiled, book.network), beside)
    memories = rank_memories(costs, compiled, sizes)
    devices = book.profile.cluster.devices
    usable = [int(device.memory_bytes * (1 - memory_margin)) for device in devices]
    limits = [min(limit, memory_bytes) if memory_bytes else limit for limit in usable]
    ranks = tuple(
        _rank(rank, compiled, trace, costs, memory.peak_bytes, limits[rank], bool(beside) and beside[rank])
        for rank, memory in enumerate(memories)
    )
    step_s = trace.step_s
    used = [ranks[rank] for rank, row in enumerate(compiled.rows) if row]
    bubble = sum(rank.idle_s for rank in used) / (step_s * len(used)) if step_s > 0 else 0.0
    evidence = weakest((costs.evidence(), *_network_evidence(costs, compiled, sizes)))
    rate = decision.global_batch / step_s if step_s > 0 else 0.0
    prediction = Prediction(step_s, rate, bubble, ranks, evidence)
    return Forecast(prediction, timeline(compiled, trace, costs, sizes), memories)


def _network_evidence(costs: StageCosts, compiled: CompiledProgram, sizes: Sequence[int]) -> Iterator[Evidence]:
    network = costs.book.network
    for slot, size in zip(compiled.transfers, sizes, strict=True):
        yield network.transfer_evidence(slot.src, slot.dst, size)
    for stage in costs.stages:
        yield network.all_reduce_evidence(stage.ranks, stage.own_bytes)
        for tie in stage.ties:
            yield network.all_reduce_evidence(tie.ranks, tie.num_bytes)


def _rank(
    rank: int,
    compiled: CompiledProgram,
    trace: Trace,
    costs: StageCosts,
    peak_bytes: int,
    limit_bytes: int,
    beside: bool,
) -> RankPrediction:
    """Where the rank's time goes.

    A wait counts as communication while the awaited message travels (or a reduction runs), and as idle before.
    """
    compute_s = communication_s = 0.0
    steps = zip(compiled.rows[rank], trace.starts[rank], trace.stops[rank], strict=True)
    for position, ((code, _, numbers), start, stop) in enumerate(steps):
        if code == RECEIVE_STEP:
            arrived = max((trace.arrived[message] for message in numbers), default=start)
            sent = min((trace.sent[message] for message in numbers), default=start)
            communication_s += stop - max(start, min(sent, arrived))
        elif code == REDUCE_STEP:
            communication_s += stop - trace.released[numbers[0]]
        elif code == SEND_STEP:
            communication_s += stop - start
        elif code == PREPARE_STEP and beside:
            continue  # a thread of the host is busy, the rank is not
        else:
            exchanged_s = costs.exchange_s(compiled.grid[rank][position])
            compute_s += stop - start - exchanged_s
            communication_s += exchanged_s
    idle_s = max(0.0, trace.step_s - compute_s - communication_s)
    return RankPrediction(rank, compute_s, communication_s, idle_s, peak_bytes, limit_bytes)
