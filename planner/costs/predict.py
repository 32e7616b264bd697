"""What a decision is predicted to cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from planner.costs.communication.links import transport_of
from planner.costs.cost_model import PriceBook
from planner.costs.layers.confidence import weakest
from planner.costs.layers.cost_table import layers_of
from planner.costs.memory.lifetimes import RankMemory, rank_memories
from planner.costs.memory.messages import carried_by
from planner.costs.simulator.breakdown import Parts, breakdown
from planner.costs.simulator.events import run, timeline
from planner.costs.simulator.prices import Prices, prices_of, transfer_bytes
from planner.costs.simulator.program import CompiledProgram, compile_program
from planner.costs.simulator.symmetry import Symmetry, symmetry_of
from planner.costs.stages.action_costs import StageCosts
from planner.costs.stages.placement import placements
from planner.costs.timeline import Trace
from planner.costs.uncertainty import DRAWS, Deciles, Draws, deciles, deciles_of, paired_steps, varies
from planner.ir.cluster import Evidence
from planner.ir.plan import Decision, Prediction, RankPrediction, Size
from planner.ir.profile import Profile
from planner.ir.program import Program
from planner.ir.schedule import COMPUTE, Pipeline
from planner.ir.timeline import Timeline
from planner.layers.boundary import Boundaries
from planner.passes import lower, validate
from planner.schedules import schedule


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


def forecast(
    book: PriceBook, decision: Decision, memory_margin: float, memory_bytes: int = 0, num_draws: int = DRAWS
) -> Forecast:
    """As :func:`predict`, with prices that were looked up before, and memory by part.

    Args:
        num_draws: of the step under noise (``costs.uncertainty``); 0: its deciles are not wanted.
    """
    whole, costs = _priced(book, decision)
    symmetry = symmetry_of(costs)
    if symmetry is not None and (
        (num_draws and varies(costs)) or not symmetry.holds(whole)
    ):  # ranks vary by themselves
        symmetry = None
    program = whole if symmetry is None else symmetry.first(whole)
    compiled, sizes = _compiled(program, costs, symmetry)
    prices = prices_of(compiled, costs, sizes)
    trace = run(compiled, prices)
    carried = carried_by(program, compiled)
    seen = timeline(compiled, trace, costs, sizes, carried)
    memories = rank_memories(costs, compiled, sizes, carried)
    devices = book.profile.cluster.devices
    usable = [int(device.memory_bytes * (1 - memory_margin)) for device in devices]
    limits = [min(limit, memory_bytes) if memory_bytes else limit for limit in usable]
    parts = _parts(compiled, costs, prices, seen, trace)
    if symmetry is not None:
        seen, memories, parts = symmetry.timeline(seen), symmetry.spread(memories), symmetry.spread(parts)
    ranks = tuple(
        RankPrediction(
            rank,
            part.compute_s,
            part.communication_s,
            part.idle_s,
            memory.peak_bytes,
            limits[rank],
            part.bubble_s,
            devices[rank].kind,
            memory.on_chip_bytes,
            devices[rank].on_chip_bytes,
        )
        for rank, (part, memory) in enumerate(zip(parts, memories, strict=True))
    )
    step_s = trace.step_s
    used = [ranks[rank] for rank, row in enumerate(whole.rows) if row]
    lost_s = sum(rank.bubble_s + rank.idle_s for rank in used)
    bubble = lost_s / (step_s * len(used)) if step_s > 0 else 0.0
    evidence = weakest((costs.evidence(), *_network_evidence(costs, compiled, sizes)))
    rate = decision.global_batch / step_s if step_s > 0 else 0.0
    within = deciles(compiled, costs, prices, trace, num_draws) if num_draws else Deciles(0.0, 0.0, 0.0)
    transport = transport_of(book.profile.cluster, [rank.rank for rank in used])
    stream = Sustained() if program.trains else sustained(book, decision, num_draws)
    batch = decision.global_batch
    prediction = Prediction(
        step_s,
        rate,
        bubble,
        ranks,
        evidence,
        within.p10_s,
        within.p90_s,
        transport,
        *(batch / period_s if period_s > 0 else 0.0 for period_s in (stream.period_s, stream.p90_s, stream.p10_s)),
    )
    return Forecast(prediction, seen, memories)


@dataclass(frozen=True, slots=True, eq=False)
class PairedForecast:
    """A step, to be held against those of other plans.

    Attributes:
        steps: seconds, by draw.
        step_s: without noise.
        num_exchanges: messages, sums, and layers of actions inside which the ranks of a stage exchange something.
    """

    steps: Draws
    step_s: float
    num_exchanges: int


def paired_forecast(book: PriceBook, decision: Decision, num_draws: int) -> PairedForecast:
    """The step under draws that are the same for every plan of a profile; raises as :func:`predict`."""
    program, costs = _priced(book, decision)
    compiled, sizes = _compiled(program, costs)
    prices = prices_of(compiled, costs, sizes)
    inside = sum(
        len(layers_of(costs.stages[action.stage].runs))
        for row in compiled.grid
        for action in row
        if action.op in COMPUTE and costs.exchange_s(action) > 0
    )
    trace = run(compiled, prices)
    draws = paired_steps(compiled, costs, prices, trace, num_draws)
    num_sums = sum(count > 1 for count in compiled.reductions) + len(compiled.ties)
    num_exchanges = len(compiled.messages) + num_sums + inside
    return PairedForecast(draws, trace.step_s, num_exchanges)


@dataclass(frozen=True, slots=True)
class Sustained:
    """What each further batch of an endless stream takes; 0 where nothing is said.

    Attributes:
        period_s: without noise.
        p10_s, p90_s: one stream in ten is faster than the first, one slower than the second.
    """

    period_s: float = 0.0
    p10_s: float = 0.0
    p90_s: float = 0.0


FURTHER = 4
"""Batches of a stream whose time is taken, behind those that fill the pipeline."""


def filling(num_stages: int) -> int:
    """Batches of a stream until its period is the same from batch to batch."""
    return num_stages + 2


def sustained(book: PriceBook, decision: Decision, num_draws: int = 0) -> Sustained:
    """Of forward passes that follow one another without a flush, as ranks run their rows again and again.

    The period is what the busiest rank or wire needs for a batch, or a little more where ranks wait for one another.

    Args:
        num_draws: of the period under noise; 0: its deciles are not wanted.
    """
    found = []
    for times in (filling(len(decision.stages)), filling(len(decision.stages)) + FURTHER):
        sizes: tuple[Size, ...] = decision.sizes * times
        boundaries = Boundaries.of_decision(book.profile.graph, decision)
        edges, count = boundaries.edges(), len(decision.sizes)
        stages = boundaries.stages(edges, sizes)
        rows = tuple(
            tuple(
                action if action.microbatch is None else replace(action, microbatch=action.microbatch + turn * count)
                for turn in range(times)
                for action in row
            )
            for row in decision.rows()
        )
        program = Program(rows, stages, boundaries.ranks, boundaries.routes(edges, sizes))
        compiled = compile_program(program, sizes)
        costs = StageCosts(book, placements(book, decision), sizes, False)
        prices = prices_of(compiled, costs, transfer_bytes(program, compiled))
        trace = run(compiled, prices)
        draws = paired_steps(compiled, costs, prices, trace, num_draws) if num_draws else None
        found.append((trace.step_s, draws, costs))
    (first_s, first, _), (last_s, last, costs) = found
    period_s = (last_s - first_s) / FURTHER
    if first is None or last is None:
        return Sustained(period_s)
    within = deciles_of((last - first) / FURTHER, costs)
    return Sustained(period_s, within.p10_s, within.p90_s)


def unflushed_step_s(book: PriceBook, decision: Decision) -> float:
    """A step of a schedule that updates within it, where steps follow one another without a flush.

    What two steps' micro-batches as one step take, less what one step's do: from then on the period is the same.
    """

    def seconds(times: int) -> float:
        micro_batches: tuple[Size, ...] = decision.sizes * times
        boundaries = Boundaries.of_decision(book.profile.graph, decision)
        edges = boundaries.edges()
        stages = boundaries.stages(edges, micro_batches)
        order = schedule(decision.schedule)(Pipeline(stages))
        program = lower(order, stages, boundaries.ranks, boundaries.routes(edges, micro_batches), len(decision.program))
        compiled = compile_program(program, micro_batches)
        costs = StageCosts(book, placements(book, decision), micro_batches, program.trains)
        return run(compiled, prices_of(compiled, costs, transfer_bytes(program, compiled))).step_s

    return seconds(3) - seconds(2)


def _priced(book: PriceBook, decision: Decision) -> tuple[Program, StageCosts]:
    """The decision's program, and its prices."""
    program = Boundaries.of_decision(book.profile.graph, decision).program(decision)
    validate(program)
    costs = StageCosts(
        book, placements(book, decision), decision.sizes, program.trains, prepares_next_step=decision.prepares_next_step
    )
    return program, costs


def _compiled(
    program: Program, costs: StageCosts, symmetry: Symmetry | None = None
) -> tuple[CompiledProgram, list[int]]:
    """The program as integers; and the bytes of its transfers."""
    copies = 1 if symmetry is None else symmetry.copies
    compiled = compile_program(program, costs.micro_batches, costs.tied_ranks, copies)
    return compiled, transfer_bytes(program, compiled)


def _parts(
    compiled: CompiledProgram, costs: StageCosts, prices: Prices, seen: Timeline, trace: Trace
) -> tuple[Parts, ...]:
    """Where the time of each rank goes."""
    exchanged_s = [costs.exchange_s(action) if action.op in COMPUTE else 0.0 for row in compiled.grid for action in row]
    return breakdown(seen, len(compiled.rows), exchanged_s, prices.beside, trace.left_s)


def _network_evidence(costs: StageCosts, compiled: CompiledProgram, sizes: Sequence[int]) -> Iterator[Evidence]:
    network = costs.book.network
    for slot, size in zip(compiled.transfers, sizes, strict=True):
        yield network.transfer_evidence(slot.src, slot.dst, size)
    for stage in costs.stages:
        yield network.all_reduce_evidence(stage.ranks, stage.own_bytes)
        for tie in stage.ties:
            yield network.all_reduce_evidence(tie.ranks, tie.num_bytes)
