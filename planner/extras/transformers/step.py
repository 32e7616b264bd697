"""A training step: passes of a micro-batch in a pipeline, then gradients, then the optimiser.

    chunk c of stage r     f = blocks x forward (+ embedding, + head), b likewise; messages that are not overlapped are
                           added to the pass that waits for them
    pipeline               the simulator on the schedule's own order (:mod:`planner.schedules`); beyond ``MOST_ACTIONS``
                           actions, of as many micro-batches as fit, and then the slowest stage's time a micro-batch
    at least               for each stage r:  sum over q < r of (f + b of q's first chunk)  +  M (f + b of r's chunks):
                           forwards below it come before its first, as many backwards after its last
    end                    stage ends + sum of its gradients over the data-parallel ranks, + the tied embedding's, then
                           the optimiser: everybody waits for the norm of all gradients

Interleaved 1F1B with chunks alike takes (f + b) (M + (p - 1) / v) for M a multiple of p (Narayanan et al. 2021, section
2.2.2): the simulator's time, and the bound's (a test holds the three equal).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import sqrt

from planner.costs.memory.table import What
from planner.extras.kernels.estimates import NOTHING, Estimate
from planner.extras.transformers.cluster import GpuCluster
from planner.extras.transformers.host import UPDATE, known_host
from planner.extras.transformers.layers import layers_for
from planner.extras.transformers.memory import (
    MASTER_BYTES,
    WEIGHT_BYTES,
    Memory,
    RankWeights,
    ends_of,
    parameters_of,
    stage_memory,
    unlike_stages,
)
from planner.extras.transformers.passes import OPTIMISER, Cost, Layers, Pass
from planner.extras.transformers.pipeline import Chunks, chunked
from planner.extras.transformers.pools import Pools
from planner.extras.transformers.shape import Offload, ParallelDegrees, Sends, Transformer

MODEL_ERROR = 0.06
"""Of a step, what it leaves out (data, jitter, Python) makes it longer or shorter: a judgement, of what four runs of
Megatron-LM on A100 are off; it widens ranges, and moves no prediction."""
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
class _Timing:
    """A step but for its simulation; ``layers`` by stage."""

    layers: tuple[Layers, ...]
    chunks: Chunks
    hop: Estimate
    latency_s: float
    after: Cost
    micro_batches: int

    @property
    def at_least_s(self) -> float:
        return self.chunks.least_s(self.micro_batches) + self.latency_s + self.after.seconds


def _timing(
    shape: Transformer, cluster: GpuCluster | Pools, ways: ParallelDegrees, global_batch: int, layers: Layers | None
) -> _Timing:
    ways.check(shape)
    cluster = cluster.alone(ways)
    micro_batches = ways.micro_batches(global_batch)
    p = ways.pipeline
    blocks = ways.chunks(shape.layers)
    by_place: dict[tuple[str, int], Layers] = {}
    stages = []
    for stage in range(p):
        own = ways.at(stage)
        at = cluster.at(ways, stage)
        place = at.name, own.tensor
        if place not in by_place:
            by_place[place] = stage_layers(shape, at, own, layers)
        stages.append(by_place[place])
    passes = [
        (number * stages[chunk % p].block.forward.seconds, number * stages[chunk % p].block.backward.seconds)
        for chunk, number in enumerate(blocks)
    ]
    for chunk, layer in ((0, stages[0].embedding), (-1, stages[-1].head)):
        ahead, back = passes[chunk]
        passes[chunk] = ahead + layer.forward.seconds, back + layer.backward.seconds
    hops = hops_of(shape, cluster, ways)
    hop = max(hops, key=lambda message: message.seconds, default=NOTHING)
    latency_s = flowing_s(cluster, ways, hop)
    chunks = chunked(passes, [message.seconds - latency_s for message in hops], ways.sends, p)
    unlike = unlike_stages(shape, ways)
    sums = []
    updates = []
    for stage in unlike:
        own = ways.at(stage)
        at = cluster.at(ways, stage)
        ends = ends_of(ways, stage)
        number = sum(blocks[stage::p])
        beside_s = sum(back for _, back in passes[stage::p])
        sums.append(gradients(at, own, parameters_of(shape, own.tensor, number, *ends), beside_s))
        updates.append(optimiser(shape, at, own, number, ends, stages[stage]))
    summed, updated = (max(of, key=lambda cost: cost.seconds) for of in (sums, updates))
    after = summed + tied(shape, cluster, ways) + updated
    return _Timing(tuple(stages), chunks, hop, 2 * (p - 1) * latency_s, after, micro_batches)


def stage_layers(
    shape: Transformer, cluster: GpuCluster, ways: ParallelDegrees, layers: Layers | None = None
) -> Layers:
    """Passes of a rank of a stage, with what ZeRO's exchanges add to a block.

    Args:
        ways: ``tensor`` is the stage's own.
        layers: measured, in place of those of kernels.
    """
    passes = layers or layers_for(shape, cluster, ways)
    return replace(passes, block=_with_shards(shape, cluster, ways, passes.block))


def flowing_s(cluster: GpuCluster | Pools, ways: ParallelDegrees, hop: Estimate) -> float:
    """Of a message the latency that what flows one way for long pays once a boundary, and a round trip every time."""
    if isinstance(cluster, Pools) or ways.sends is not Sends.OVERLAPPED or ways.schedule != "gpipe":
        return 0.0
    return min(cluster.latency_s(ways.tensor * ways.copies), hop.seconds)


def least_s(shape: Transformer, cluster: GpuCluster | Pools, ways: ParallelDegrees, global_batch: int) -> float:
    """No step of :func:`predict` is shorter; quick."""
    return _timing(shape, cluster, ways, global_batch, None).at_least_s


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
    timing = _timing(shape, cluster, ways, global_batch, layers)
    chunks = timing.chunks
    micro_batches = timing.micro_batches
    p = ways.pipeline
    pipeline_s = max(chunks.least_s(micro_batches), chunks.step_s(micro_batches, ways.schedule)) + timing.latency_s
    busy = [sum(chunks.forward_s[r::p]) + sum(chunks.backward_s[r::p]) for r in range(p)]
    busiest = max(range(p), key=busy.__getitem__)
    own = timing.layers[busiest]
    work = (own.block.forward + own.block.backward) * sum(ways.chunks(shape.layers)[busiest::p])
    for stage, layer in ((0, own.embedding), (p - 1, own.head)):
        if stage == busiest:
            work = work + layer.forward + layer.backward
    messages_s = max(0.0, busy[busiest] - work.seconds)
    hops = messages_s / timing.hop.seconds if timing.hop.seconds else 0.0
    spent = (work + Cost.of(SENDS, timing.hop, hops)) * micro_batches + timing.after
    whole = spent.total
    step_s = pipeline_s + timing.after.seconds
    parts = {**spent.by_what, BUBBLE: max(0.0, step_s - whole.seconds)}
    memory = fullest(shape, cluster, ways, micro_batches)
    return StepPrediction(_ranged(step_s, whole), parts, memory, micro_batches, timing.at_least_s)


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


def hops_of(shape: Transformer, cluster: GpuCluster | Pools, ways: ParallelDegrees) -> list[Estimate]:
    """Messages from each chunk to the next: each tensor rank sends its part; parts are gathered there, or stay cut."""
    p = ways.pipeline
    chunks = range(ways.pipeline * ways.interleave - 1)
    if p == 1:
        return [NOTHING for _ in chunks]
    whole = message_bytes(shape, cluster, ways)
    if isinstance(cluster, Pools):
        return cluster.hops(ways, whole)
    stride = ways.tensor * ways.copies
    hosts = [stage * stride // cluster.per_host for stage in range(p)]
    gathered = NOTHING if ways.sequence_parallel else cluster.exchange("all_gather", whole, ways.tensor)
    at_once = min(cluster.per_host, stride)
    inside, across = (cluster.send(whole / ways.tensor, far, at_once) + gathered for far in (1, cluster.per_host))
    far = [stride >= cluster.per_host or hosts[c % p] != hosts[(c + 1) % p] for c in chunks]
    return [across if crosses else inside for crosses in far]


def message_bytes(shape: Transformer, cluster: GpuCluster | Pools, ways: ParallelDegrees) -> float:
    """Of a micro-batch of a rank's tokens between two blocks."""
    return float(cluster.width) * ways.tokens(shape) * shape.hidden


def _with_shards(shape: Transformer, cluster: GpuCluster, ways: ParallelDegrees, block: Pass) -> Pass:
    """With ZeRO-2 a micro-batch's gradients are scattered, with ZeRO-3 weights gathered: beside the block's pass."""
    if ways.zero < 2 or ways.copies == 1:
        return block
    weights = parameters_of(shape, ways.tensor, 1, first=False, last=False)
    gradients = over_replicas(cluster, ways, "reduce_scatter", weights * (4 if ways.fp32_gradients else 2))
    gathered = NOTHING
    if ways.zero >= 3:
        gathered = over_replicas(cluster, ways, "all_gather", weights * cluster.width)
    return Pass(
        block.forward + _beyond(gathered, block.forward.seconds),
        block.backward + _beyond(gathered + gradients, block.backward.seconds),
    )


def _beyond(exchange: Estimate, beside_s: float) -> Cost:
    """What is left to wait for of an exchange that runs beside a pass."""
    left = max(0.0, exchange.seconds - beside_s)
    return Cost.of(GRADIENTS, exchange, left / exchange.seconds) if left else Cost()


def over_replicas(cluster: GpuCluster, ways: ParallelDegrees, name: str, num_bytes: RankWeights) -> Estimate:
    """An exchange of a rank's weights or gradients: over all copies, or over those of the same experts."""
    expert = ways.expert
    if expert == 1:
        return cluster.exchange(name, num_bytes.common + num_bytes.routed, ways.copies, ways.tensor)
    common = cluster.exchange(name, num_bytes.common, ways.copies, ways.tensor)
    return common + cluster.exchange(name, num_bytes.routed / expert, ways.copies // expert, ways.tensor * expert)


def gradients(cluster: GpuCluster, ways: ParallelDegrees, parameters: RankWeights, beside_s: float) -> Cost:
    """Sums of a stage's gradients over the ranks with the same weights, after the last backward or beside it.

    Args:
        parameters: of a rank.
        beside_s: the backward of a micro-batch.
    """
    if ways.copies == 1:
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
    if ways.overlap_gradients:
        return _beyond(summed, beside_s)
    return Cost.of(GRADIENTS, summed)


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
    num_bytes = held * (2 * MASTER_BYTES + WEIGHT_BYTES + 3 * gradient_bytes)
    return Cost.of(OPTIMISER, cluster.kernels.memory_bound(num_bytes, 8))
