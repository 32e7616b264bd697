"""What a decision is predicted to cost: its step and timeline, memory by rank, deciles, and the rate that it sustains.

step, timeline   one run of the simulator over the decision's prices (:mod:`planner.costs.pricing`)   ``forecast``
deciles          the same trace under costs drawn anew (:mod:`planner.costs.uncertainty`)
two plans        draws that are the same for both                                              ``paired_forecast``
a stream         what a further batch takes, where passes follow one another without a flush         ``sustained``
unflushed        what a further step takes, of a schedule that updates within it              ``unflushed_step_s``
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from planner.costs.candidate import Candidate, candidate_of
from planner.costs.communication.links import transport_of
from planner.costs.layers.confidence import weakest
from planner.costs.layers.cost_table import layers_of
from planner.costs.memory.lifetimes import RankMemory
from planner.costs.pricing import PricedProgram, Pricing
from planner.costs.simulator.breakdown import Parts, breakdown
from planner.costs.simulator.events import run, timeline
from planner.costs.simulator.prices import SlotPrices
from planner.costs.simulator.replay import Draws
from planner.costs.simulator.symmetry import Symmetry
from planner.costs.timeline import Trace
from planner.costs.uncertainty import DRAWS, Deciles, deciles, deciles_of, paired_steps, varies
from planner.ir.cluster import DeviceSpec, Evidence
from planner.ir.plan import Decision, Prediction, RankPrediction
from planner.ir.problem import memory_limit_bytes
from planner.ir.profile import Profile
from planner.ir.schedule import COMPUTE
from planner.ir.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Forecast:
    """A prediction with its timeline and its memory by part.

    Attributes:
        own_timeline: of the ranks that stand for others, and those that nobody stands for.
        symmetry: which ranks do the same; None: no two are known to.
    """

    prediction: Prediction
    own_timeline: Timeline
    symmetry: Symmetry | None
    memories: tuple[RankMemory, ...]

    @property
    def timeline(self) -> Timeline:
        """Of all ranks."""
        return self.own_timeline if self.symmetry is None else self.symmetry.timeline(self.own_timeline)

    @property
    def own_ranks(self) -> tuple[RankPrediction, ...]:
        """What is predicted of the ranks of ``own_timeline``."""
        ranks = self.prediction.ranks
        return ranks if self.symmetry is None else tuple(ranks[rank] for rank in sorted(self.symmetry.kept))


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
    whole = forecast(Pricing.of(profile), decision, memory_margin, memory_bytes)
    return whole.prediction, whole.timeline


def forecast(
    pricing: Pricing,
    decision: Decision | Candidate,
    memory_margin: float,
    memory_bytes: int = 0,
    num_draws: int = DRAWS,
) -> Forecast:
    """As :func:`predict`, with prices that were looked up before, and memory by part.

    Args:
        decision: as a file has it, or in indices; rows that it has are validated.
        num_draws: of the step under noise (``costs.uncertainty``); 0: its deciles are not wanted.
    """
    candidate = _indexed(pricing, decision)
    priced = pricing.priced(candidate)
    if priced.symmetry is not None and num_draws and varies(priced.costs):  # ranks vary by themselves
        priced = pricing.priced(candidate, each_rank=True)
    prices = priced.prices()
    trace = run(priced.compiled, prices)
    steps = timeline(priced.compiled, trace, priced.costs, priced.transfer_bytes, priced.carried)
    memories = priced.memories()
    cluster = pricing.cost_model.cluster
    limits = [memory_limit_bytes(device, memory_margin, memory_bytes) for device in cluster.devices]
    ranks = _rank_predictions(cluster.devices, limits, _parts(priced, prices, steps, trace), memories)
    used = candidate.used_ranks
    lost_s = sum(ranks[rank].bubble_s + ranks[rank].idle_s for rank in used)
    within = deciles(priced.compiled, priced.costs, prices, trace, num_draws) if num_draws else Deciles(0.0, 0.0, 0.0)
    stream = Sustained() if priced.costs.trains else sustained(pricing, candidate, num_draws)
    batch = sum(candidate.micro_batches)
    prediction = Prediction(
        trace.step_s,
        _rate(batch, trace.step_s),
        _rate(lost_s, trace.step_s * len(used)),
        ranks,
        weakest((priced.costs.evidence(), *_network_evidence(priced))),
        within.p10_s,
        within.p90_s,
        transport_of(cluster, used),
        *(_rate(batch, period_s) for period_s in (stream.period_s, stream.p90_s, stream.p10_s)),
    )
    return Forecast(prediction, steps, priced.symmetry, memories)


def _rank_predictions(
    devices: Sequence[DeviceSpec], limits_bytes: Sequence[int], parts: Sequence[Parts], memories: Sequence[RankMemory]
) -> tuple[RankPrediction, ...]:
    """Of each rank of the program; devices, and what may be used of them, of all ranks there are."""
    return tuple(
        RankPrediction(
            rank,
            part.compute_s,
            part.communication_s,
            part.idle_s,
            memory.peak_bytes,
            limits_bytes[rank],
            part.bubble_s,
            devices[rank].kind,
            memory.bytes_beside,
            sum(devices[rank].memories[1:]),
        )
        for rank, (part, memory) in enumerate(zip(parts, memories, strict=True))
    )


def _rate(amount: float, seconds: float) -> float:
    """So much a second; 0 in no time."""
    return amount / seconds if seconds > 0 else 0.0


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


def paired_forecast(pricing: Pricing, decision: Decision | Candidate, num_draws: int) -> PairedForecast:
    """The step under draws that are the same for every plan of a profile; raises as :func:`predict`."""
    priced = pricing.priced(_indexed(pricing, decision), each_rank=True)
    compiled = priced.compiled
    costs = priced.costs
    prices = priced.prices()
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
"""Batches of a stream whose time is taken, after those that fill the pipeline."""


def filling(num_stages: int) -> int:
    """Batches of a stream until its period is the same from batch to batch."""
    return num_stages + 2


def sustained(pricing: Pricing, decision: Decision | Candidate, num_draws: int = 0) -> Sustained:
    """Of forward passes that follow one another without a flush, as ranks run their rows again and again.

    The period is what the busiest rank or wire needs for a batch, or a little more where ranks wait for one another.

    Args:
        num_draws: of the period under noise; 0: its deciles are not wanted.
    """
    candidate = pricing.with_rows(_indexed(pricing, decision))
    first = filling(candidate.num_stages)
    fill, further = (pricing.priced(candidate.repeated(times), each_rank=True) for times in (first, first + FURTHER))
    traces = [run(stream.compiled, stream.prices()) for stream in (fill, further)]
    period_s = (traces[1].step_s - traces[0].step_s) / FURTHER
    if not num_draws:
        return Sustained(period_s)
    first_s, last_s = (
        paired_steps(stream.compiled, stream.costs, stream.prices(), trace, num_draws)
        for stream, trace in zip((fill, further), traces, strict=True)
    )
    within = deciles_of((last_s - first_s) / FURTHER, further.costs)
    return Sustained(period_s, within.p10_s, within.p90_s)


def unflushed_step_s(pricing: Pricing, decision: Decision | Candidate) -> float:
    """A step of a schedule that updates within it, where steps follow one another without a flush.

    What two steps' micro-batches as one step take, less what one step's do: from then on the period is the same.
    """
    candidate = _indexed(pricing, decision)

    def seconds(times: int) -> float:
        longer = replace(candidate, micro_batches=candidate.micro_batches * times, rows=())
        priced = pricing.priced(longer, each_rank=True)
        return run(priced.compiled, priced.prices()).step_s

    return seconds(3) - seconds(2)


def _indexed(pricing: Pricing, decision: Decision | Candidate) -> Candidate:
    return decision if isinstance(decision, Candidate) else candidate_of(pricing.graph, decision)


def _parts(priced: PricedProgram, prices: SlotPrices, steps: Timeline, trace: Trace) -> tuple[Parts, ...]:
    """Where the time of each rank goes."""
    costs = priced.costs
    grid = priced.compiled.grid
    exchanged_s = [costs.exchange_s(action) if action.op in COMPUTE else 0.0 for row in grid for action in row]
    parts = breakdown(steps, len(grid), exchanged_s, prices.beside, trace.left_s)
    return parts if priced.symmetry is None else priced.symmetry.spread(parts)


def _network_evidence(priced: PricedProgram) -> Iterator[Evidence]:
    network = priced.costs.cost_model.network
    for slot, num_bytes in zip(priced.compiled.transfers, priced.transfer_bytes, strict=True):
        yield network.transfer_evidence(slot.src, slot.dst, num_bytes)
    for stage in priced.costs.stages:
        yield network.all_reduce_evidence(stage.ranks, stage.own_bytes)
        for tie in stage.ties:
            yield network.all_reduce_evidence(tie.ranks, tie.num_bytes)
