"""A training step: passes of a micro-batch in a pipeline, then gradients, then the optimiser.

    chunk c of stage r     f = blocks x forward (+ embedding, + head), b likewise; messages that are not overlapped are
                           added to the pass that waits for them
    pipeline               the simulator on the schedule's own order (:mod:`planner.schedules`); beyond ``MOST_ACTIONS``
                           actions, of as many micro-batches as fit, and then the slowest stage's time a micro-batch
    at least               by the recurrence of pipelines (:mod:`planner.extras.transformers.pipeline`)
    end                    stage ends + sum of its gradients over the data-parallel ranks, within groups that share
                           slices and then across these, + the tied embedding's, then
                           the optimiser: everybody waits for the norm of all gradients

Interleaved 1F1B with chunks alike takes (f + b) (M + (p - 1) / v) for M a multiple of p (Narayanan et al. 2021, section
2.2.2): the simulator's time, and the bound's (a test holds the three equal).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf, sqrt
from operator import attrgetter

from planner.costs.memory.table import What
from planner.extras.kernels.estimates import NOTHING, Estimate
from planner.extras.transformers.cluster import GpuCluster
from planner.extras.transformers.host import COPIES, UPDATE, known_host
from planner.extras.transformers.layers import CASTS, layers_for
from planner.extras.transformers.memory import (
    HOST_COPY_BYTES,
    MASTER_BYTES,
    WEIGHT_BYTES,
    Memory,
    RankWeights,
    ends_of,
    parameters_of,
    stage_memory,
    unlike_stages,
    weights_of_blocks,
)
from planner.extras.transformers.passes import OPTIMISER, Cost, Layers, Pass, costs
from planner.extras.transformers.pipeline import Chunks, N, chunked
from planner.extras.transformers.pools import GpuRange, Pools, message
from planner.extras.transformers.shape import Launch, Offload, ParallelDegrees, Precision, Sends, Transformer
from planner.extras.transformers.software import launch_s
from planner.ir.lazy import Memo

MODEL_ERROR = 0.06
"""Of a step, what it leaves out (data, jitter, Python) makes it longer or shorter: a judgement, of what four runs of
Megatron-LM on A100 are off; it widens ranges, and moves no prediction."""
STEP_LAUNCHES = 80.0
"""Once a step: batches, gradients' norm, update, copies of weights; 9 ms of Megatron-LM's tests on H100."""
GRADIENTS = "gradient sums"
BUBBLE = "bubble"
SENDS = "messages between stages"


@dataclass(frozen=True, slots=True)
class StepPrediction:
    """A step.

    Attributes:
        step: with its range and evidence.
        parts: seconds of the step by what the busiest stage spends them on, ``bubble`` included; they sum to it.
        memory: of the rank that holds most.
        at_least_s: no schedule of these passes ends earlier.
    """

    step: Estimate
    parts: Mapping[str, float]
    memory: Memory
    micro_batches: int
    at_least_s: float

    def model_flop_per_s(self, shape: Transformer, global_batch: int, devices: int) -> float:
        """Of one device, recomputation not counted."""
        return shape.step_flop(global_batch) / self.step.seconds / devices


@dataclass(frozen=True, slots=True)
class StepTiming:
    """A step but for its simulation; ``layers`` by stage."""

    ways: ParallelDegrees
    layers: tuple[Layers, ...]
    chunks: Chunks
    messages: Messages
    after: Cost
    micro_batches: int

    @property
    def at_least_s(self) -> float:
        return self.chunks.least_s(self.micro_batches) + self.messages.latency_s + self.after.seconds

    @property
    def simulated_s(self) -> float:
        return self.chunks.step_s(self.micro_batches, self.ways.schedule) + self.messages.latency_s + self.after.seconds

    def spent(self, blocks: Sequence[int]) -> Cost:
        """What the busiest stage spends its time on, idle time apart; ``blocks`` by chunk."""
        p = self.ways.pipeline
        busy_s = [sum(self.chunks.forward_s[r::p]) + sum(self.chunks.backward_s[r::p]) for r in range(p)]
        busiest = max(range(p), key=busy_s.__getitem__)
        own = self.layers[busiest]
        passes = [own.block * sum(blocks[busiest::p]), *_at_ends(own, *ends_of(self.ways, busiest))]
        work = costs(each for of in passes for each in (of.forward, of.backward))
        messages_s = max(0.0, busy_s[busiest] - work.seconds)
        hop = self.messages.longest
        hops = messages_s / hop.seconds if hop.seconds else 0.0
        return (work + Cost.of(SENDS, hop, hops)) * self.micro_batches + self.after


def timing_of(
    shape: Transformer,
    cluster: GpuCluster | Pools,
    ways: ParallelDegrees,
    global_batch: int,
    layers: Layers | None = None,
) -> StepTiming:
    """What the stages of a step take, and what comes after all passes; arguments as of :func:`predict`."""
    ways.check(shape)
    cluster = cluster.alone(ways)
    p = ways.pipeline
    of_place = Memo[tuple[GpuCluster, ParallelDegrees], Layers](
        lambda place: stage_layers(shape, place[0], place[1], layers)
    )
    of_stages = tuple(of_place[cluster.at(ways, stage), ways.at(stage)] for stage in range(p))
    messages = Messages.of(shape, cluster, ways)
    blocks = ways.chunks(shape.layers)
    passes = [
        passes_s(of_stages[chunk % p], number, chunk == 0, chunk == len(blocks) - 1)
        for chunk, number in enumerate(blocks)
    ]
    chunks = chunked(passes, messages.hops_s, ways.sends, p)
    after = _after(shape, cluster, ways, of_stages)
    return StepTiming(ways, of_stages, chunks, messages, after, ways.micro_batches(global_batch))


def passes_s(layers: Layers, blocks: N, first: bool, last: bool) -> tuple[N, N]:
    """Forward and backward of so many blocks (a number of them, or many), with the ends that are there."""
    ends = _at_ends(layers, first, last)
    forward_s = sum(end.forward.seconds for end in ends)
    backward_s = sum(end.backward.seconds for end in ends)
    return blocks * layers.block.forward.seconds + forward_s, blocks * layers.block.backward.seconds + backward_s


def _at_ends(layers: Layers, first: bool, last: bool) -> list[Pass]:
    """The embedding of the first stage, the head of the last."""
    return [layers.embedding] * first + [layers.head] * last


def _after(shape: Transformer, cluster: GpuCluster | Pools, ways: ParallelDegrees, of_stages: Sequence[Layers]) -> Cost:
    """Behind all passes: the longest sum of gradients, that of the tied embedding, and the longest update."""
    blocks = ways.chunks(shape.layers)
    afters = [
        after_passes(
            shape, cluster.at(ways, stage), ways.at(stage), of_stages[stage],
            sum(blocks[stage :: ways.pipeline]), ends_of(ways, stage),
        )
        for stage in unlike_stages(shape, ways)
    ]  # fmt: skip
    summed = max((summed for summed, _ in afters), key=attrgetter("seconds"))
    updated = max((updated for _, updated in afters), key=attrgetter("seconds"))
    return summed + tied(shape, cluster, ways) + updated


def after_passes(
    shape: Transformer, cluster: GpuCluster, ways: ParallelDegrees, layers: Layers, blocks: int, ends: tuple[bool, bool]
) -> tuple[Cost, Cost]:
    """Of a rank of a stage of so many blocks: the sum of its gradients, and its update."""
    beside_s = passes_s(layers, blocks, *ends)[1]
    summed = gradients(cluster, ways, parameters_of(shape, ways.tensor, blocks, *ends), beside_s)
    return summed, optimiser(shape, cluster, ways, blocks, ends, layers)


def stage_layers(
    shape: Transformer, cluster: GpuCluster, ways: ParallelDegrees, layers: Layers | None = None
) -> Layers:
    """Passes of a rank of a stage, with what ZeRO's exchanges add to a block.

    Args:
        ways: ``tensor`` is the stage's own.
        layers: measured, in place of those of kernels.
    """
    passes = layers or layers_for(shape, cluster, ways)
    weights = parameters_of(shape, ways.tensor, 1, first=False, last=False)
    if ways.offload is Offload.PARAMETERS:
        passes = replace(passes, block=_with_copies(cluster, passes.block, weights.held(ways, What.PARAMETERS)))
    if ways.zero < 2 or ways.copies == 1:
        return passes
    block = _Shards.of(cluster, ways, weights)
    first = _Shards.of(cluster, ways, RankWeights(shape.embedding_parameters / ways.tensor))
    return replace(passes, embedding=passes.embedding + (block + first).waited(), block=block.beside(passes.block))


def least_s(shape: Transformer, cluster: GpuCluster | Pools, ways: ParallelDegrees, global_batch: int) -> float:
    """No step of :func:`predict` is shorter; quick."""
    return timing_of(shape, cluster, ways, global_batch).at_least_s


def predict(
    shape: Transformer,
    cluster: GpuCluster | Pools,
    ways: ParallelDegrees,
    global_batch: int,
    layers: Layers | None = None,
) -> StepPrediction:
    """A step of ``shape`` on ``cluster``, divided in those ways.

    Args:
        layers: passes that were measured, in place of those of kernels.

    Raises:
        UsageError: the network or the batch cannot be divided so.
    """
    timing = timing_of(shape, cluster, ways, global_batch, layers)
    at_least_s = timing.at_least_s
    step_s = max(timing.simulated_s, at_least_s)
    spent = timing.spent(ways.chunks(shape.layers))
    whole = spent.total
    parts = {**spent.by_what, BUBBLE: max(0.0, step_s - whole.seconds)}
    memory = fullest(shape, cluster, ways, timing.micro_batches)
    return StepPrediction(_ranged(step_s, whole), parts, memory, timing.micro_batches, at_least_s)


def fullest(shape: Transformer, cluster: GpuCluster | Pools, ways: ParallelDegrees, micro_batches: int) -> Memory:
    """Of the rank that is fullest, of what its device has."""
    held = (
        (stage_memory(shape, ways, stage, micro_batches, cluster.width), cluster.at(ways, stage).usable_bytes)
        for stage in unlike_stages(shape, ways)
    )
    return max(held, key=lambda pair: pair[0].total / pair[1])[0]


def _ranged(step_s: float, spent: Estimate) -> Estimate:
    """The step with the range of what it is spent on, and the model's own."""
    below = 1 - spent.low / spent.seconds
    above = spent.high / spent.seconds - 1
    low, high = (sqrt(share**2 + MODEL_ERROR**2) for share in (below, above))
    return Estimate(step_s, step_s * (1 - low), step_s * (1 + high), spent.evidence)


@dataclass(frozen=True, slots=True)
class Messages:
    """From each chunk to the next.

    Attributes:
        hops_s: of each, but for the latency that what flows one way for long pays once a boundary, there and back.
        latency_s: of all boundaries.
        longest: of all, with its latency.
    """

    hops_s: tuple[float, ...]
    latency_s: float
    longest: Estimate

    @classmethod
    def of(cls, shape: Transformer, cluster: GpuCluster | Pools, ways: ParallelDegrees) -> Messages:
        """Those of a way."""
        hops = hops_of(shape, cluster, ways)
        longest = max(hops, key=lambda hop: hop.seconds, default=NOTHING)
        flowing_s = 0.0
        if isinstance(cluster, GpuCluster) and ways.sends is Sends.OVERLAPPED and ways.schedule == "gpipe":
            flowing_s = min(cluster.latency_s(ways.tensor * ways.copies), longest.seconds)
        return cls(tuple(hop.seconds - flowing_s for hop in hops), 2 * (ways.pipeline - 1) * flowing_s, longest)


def hops_of(shape: Transformer, cluster: GpuCluster | Pools, ways: ParallelDegrees) -> list[Estimate]:
    """Messages from each chunk to the next: each tensor rank sends its part; parts are gathered there, or stay cut."""
    p = ways.pipeline
    chunks = range(p * ways.interleave - 1)
    if p == 1:
        return [NOTHING for _ in chunks]
    whole = message_bytes(shape, cluster, ways)
    if isinstance(cluster, Pools):
        return [cluster.hop(ways, whole, *ends) for ends in pairwise(cluster.places(ways))]
    ranks = ways.tensor * ways.copies
    places = [GpuRange(cluster, ways.tensor, stage * ranks, (stage + 1) * ranks) for stage in range(p)]
    ends = [(places[chunk % p], places[(chunk + 1) % p]) for chunk in chunks]
    inside = [one.shares_host(other) for one, other in ends]
    sent = {tier: message(ways, whole, *pair) for tier, pair in dict(zip(inside, ends, strict=True)).items()}
    return [sent[tier] for tier in inside]


def message_bytes(shape: Transformer, cluster: GpuCluster | Pools, ways: ParallelDegrees) -> float:
    """Of a micro-batch of a rank's tokens between two blocks."""
    return float(cluster.width) * ways.tokens(shape) * shape.hidden


@dataclass(frozen=True, slots=True)
class _Shards:
    """What replicas exchange of some weights each micro-batch, with ZeRO-2 and ZeRO-3.

    Those of a block are gathered beside the block before, and its gradients scattered beside the one behind it: what
    comes first in a pass, the table and the first block, is waited for whole, as is the last sum of their gradients.

    Attributes:
        gathered: with ZeRO-3 the weights, forward and backward.
        scattered: their gradients.
        summed: slices of these over groups that have the same, where they do not sum once a step.
    """

    cluster: GpuCluster
    ways: ParallelDegrees
    gathered: Estimate
    scattered: Estimate
    summed: Estimate

    @classmethod
    def of(cls, cluster: GpuCluster, ways: ParallelDegrees, weights: RankWeights) -> _Shards:
        """Of those weights of a rank."""
        gathered = NOTHING
        if ways.zero >= 3:
            gathered = over_replicas(cluster, ways, "all_gather", weights * cluster.width)
        num_bytes = weights * (4 if ways.fp32_gradients else 2)
        scattered = over_replicas(cluster, ways, "reduce_scatter", num_bytes)
        summed = NOTHING if ways.sums_once else across_groups(cluster, ways, num_bytes)
        return cls(cluster, ways, gathered, scattered, summed)

    def __add__(self, other: _Shards) -> _Shards:
        return replace(
            self,
            gathered=self.gathered + other.gathered,
            scattered=self.scattered + other.scattered,
            summed=self.summed + other.summed,
        )

    def beside(self, block: Pass) -> Pass:
        """With what a block waits for of its exchanges, which run beside its passes."""
        exchanged = self.gathered + self.scattered
        return Pass(
            block.forward + _beyond(self.cluster, self.ways, self.gathered, NOTHING, block.forward.seconds),
            block.backward + _beyond(self.cluster, self.ways, exchanged, self.summed, block.backward.seconds),
        )

    def waited(self) -> Pass:
        """Nothing runs beside them."""
        return Pass(Cost.of(GRADIENTS, self.gathered), Cost.of(GRADIENTS, self.scattered + self.summed))


def _with_copies(cluster: GpuCluster, block: Pass, weights: float) -> Pass:
    """With a rank's weights of a block from the host before each pass, and their gradients there, beside the pass."""
    copy = known_host(cluster.name, cluster.host).copied(HOST_COPY_BYTES * weights)
    return Pass(
        block.forward + Cost.waited(COPIES, copy, copy.seconds - block.forward.seconds),
        block.backward + Cost.waited(COPIES, copy, copy.seconds - block.backward.seconds),
    )


def _beyond(cluster: GpuCluster, ways: ParallelDegrees, inside: Estimate, across: Estimate, beside_s: float) -> Cost:
    """What a pass waits for exchanges that run beside it, over copies that share slices, and then across groups."""
    waited_s = cluster.waited_s(inside, beside_s, ways.shard_ranks, ways.tensor)
    if across.seconds:
        taken_s = cluster.waited_s(inside, inf, ways.shard_ranks, ways.tensor)
        taken_s += cluster.waited_s(across, inf, ways.shard_groups, ways.tensor * ways.shard_ranks)
        waited_s = max(inside.seconds + across.seconds - beside_s, taken_s)
    return Cost.waited(GRADIENTS, inside + across, waited_s)


def across_groups(cluster: GpuCluster, ways: ParallelDegrees, num_bytes: RankWeights) -> Estimate:
    """Sums of slices of a rank's gradients over groups of copies that have the same slices."""
    slices = (num_bytes.common + num_bytes.routed) / ways.shard_ranks
    return cluster.exchange("all_reduce", slices, ways.shard_groups, ways.tensor * ways.shard_ranks)


def over_replicas(cluster: GpuCluster, ways: ParallelDegrees, name: str, num_bytes: RankWeights) -> Estimate:
    """An exchange of a rank's weights or gradients: over copies that share slices, or over those of the same experts.

    Without ZeRO all copies do.
    """
    if ways.expert_copies == ways.copies:
        return cluster.exchange(name, num_bytes.common + num_bytes.routed, ways.shard_ranks, ways.tensor)
    common = cluster.exchange(name, num_bytes.common, ways.copies, ways.tensor)
    stride = ways.expert * ways.expert_tensor
    return common + cluster.exchange(name, num_bytes.routed / ways.expert_parts, ways.expert_copies, stride)


def gradients(cluster: GpuCluster, ways: ParallelDegrees, parameters: RankWeights, beside_s: float) -> Cost:
    """Sums of a stage's gradients over the ranks with the same weights, after the last backward or beside it.

    Args:
        parameters: of a rank.
        beside_s: the backward of a micro-batch.
    """
    if max(ways.copies, ways.expert_copies) == 1:
        return Cost()
    num_bytes = parameters * (4 if ways.fp32_gradients else 2)
    if ways.zero == 0:
        summed = over_replicas(cluster, ways, "all_reduce", num_bytes)
    else:
        summed = NOTHING
        if ways.zero == 1:
            summed = over_replicas(cluster, ways, "reduce_scatter", num_bytes)
        if ways.zero < 3:
            summed = summed + over_replicas(cluster, ways, "all_gather", parameters * cluster.width)
    of_groups = across_groups(cluster, ways, num_bytes) if ways.sums_once or ways.zero == 1 else NOTHING
    if ways.overlap_gradients:
        return _beyond(cluster, ways, summed, of_groups, beside_s)
    return Cost.of(GRADIENTS, summed + of_groups)


def tied(shape: Transformer, cluster: GpuCluster | Pools, ways: ParallelDegrees) -> Cost:
    """The sum of the embedding's gradient on the first and the last stage."""
    if ways.pipeline == 1 or not shape.has_table_at_both_ends:
        return Cost()
    if isinstance(cluster, Pools):
        first, *_, last = cluster.places(ways)
        return Cost.of(GRADIENTS, cluster.sum_of_two(shape, ways, first, last))
    num_bytes = shape.vocab * shape.hidden / ways.tensor * (4 if ways.fp32_gradients else 2)
    stride = ways.tensor * ways.copies * (ways.pipeline - 1)
    return Cost.of(GRADIENTS, cluster.exchange("all_reduce", num_bytes, 2, stride))


def optimiser(
    shape: Transformer, cluster: GpuCluster, ways: ParallelDegrees, blocks: int, ends: tuple[bool, bool], layers: Layers
) -> Cost:
    """Adam with float32 weights: state read and written, gradients zeroed, read for their norm and for the update.

    Or what was measured of each layer; or on the host, where its state is there.
    """
    if layers.update is not None:
        return layers.update * ((blocks + sum(ends)) / (ways.data if ways.zero else 1))
    held = parameters_of(shape, ways.tensor, blocks, *ends).held(ways, What.OPTIMISER_STATE)
    gradient_bytes = 4 if ways.fp32_gradients else 2
    if ways.offload is Offload.OPTIMIZER:
        host = known_host(cluster.name, cluster.host)
        return Cost.of(UPDATE, host.updated(held, gradient_bytes, cluster.per_host))
    if ways.offload is Offload.PARAMETERS:  # where its gradients are
        host = known_host(cluster.name, cluster.host)
        return Cost.of(UPDATE, host.adam(held, HOST_COPY_BYTES, cluster.per_host))
    num_bytes = held * (2 * MASTER_BYTES + WEIGHT_BYTES + 3 * gradient_bytes)
    if ways.precision is Precision.FP8:  # which every micro-batch reads: Transformer Engine, is_first_microbatch
        narrow = weights_of_blocks(shape, ways.tensor, blocks, *ends)
        num_bytes += CASTS[ways.scaling].made * (narrow.common + narrow.routed / ways.expert_parts)
    update = Cost.of(OPTIMISER, cluster.kernels.memory_bound(num_bytes, 8))
    return replace(update, launches=STEP_LAUNCHES).launched(launch_s(replace(ways, launch=Launch.EAGER)))
