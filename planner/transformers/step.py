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

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

from planner.costs.simulator.events import execute
from planner.costs.simulator.program import CompiledProgram, compile_program
from planner.ir.program import Message, Part
from planner.ir.schedule import MESSAGE, Op, Pipeline, StageGraph
from planner.kernels import Estimate
from planner.kernels.estimates import NOTHING
from planner.passes import lower
from planner.schedules import positions, schedule
from planner.transformers.cluster import Cluster, Cost
from planner.transformers.layers import Layers, Pass, layers_for
from planner.transformers.memory import MASTER_BYTES, WEIGHT_BYTES, Memory, memory_of, stage_parameters, unlike_stages
from planner.transformers.shape import Sends, Transformer, Ways

MOST_ACTIONS = 12_000
"""Of a pipeline that is simulated whole: about a second."""
MODEL_ERROR = 0.06
"""Of a step, what it leaves out (data, jitter, Python) makes it longer or shorter: a judgement, of what four runs of
Megatron-LM on A100 are off; it widens ranges, and moves no prediction."""
GRADIENTS, OPTIMISER, BUBBLE, SENDS = "gradient sums", "optimiser", "bubble", "messages between stages"


@dataclass(frozen=True, slots=True)
class Prediction:
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
class Chunks:
    """Passes of a micro-batch through each chunk, messages included where somebody waits for them.

    Attributes:
        overlapped_s: of a message beside the passes.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    stages: int
    overlapped_s: float = 0.0

    def least_s(self, micro_batches: int) -> float:
        """No synchronous schedule is shorter."""
        p = self.stages
        passes = [f + b for f, b in zip(self.forward_s, self.backward_s, strict=True)]
        found, before = 0.0, 0.0
        for stage in range(p):
            found = max(found, before + micro_batches * sum(passes[stage::p]))
            before += passes[stage] + 2 * self.overlapped_s
        return found

    def step_s(self, micro_batches: int, name: str = "1f1b") -> float:
        """By the simulator; see the module's text for what is too long for it."""
        interleave = len(self.forward_s) // self.stages
        most = MOST_ACTIONS // (2 * len(self.forward_s)) // self.stages * self.stages
        simulated = min(micro_batches, max(most, 4 * self.stages))
        if self.stages == 1:
            return micro_batches * (sum(self.forward_s) + sum(self.backward_s))
        named = "interleaved" if interleave > 1 else name
        compiled = _compiled(named, self.stages, interleave, simulated)
        found = _run(compiled, self)
        return found + (micro_batches - simulated) * self._cycle_s(name)

    def _cycle_s(self, name: str) -> float:
        """What one more micro-batch of many adds: GPipe's forwards end before its backwards begin."""
        p, x = self.stages, self.overlapped_s
        ahead = [sum(self.forward_s[r::p]) for r in range(p)]
        back = [sum(self.backward_s[r::p]) for r in range(p)]
        if name == "gpipe":
            return max(*ahead, x) + max(*back, x)
        return max(*(f + b for f, b in zip(ahead, back, strict=True)), x)


@functools.lru_cache(maxsize=64)
def _compiled(name: str, stages: int, interleave: int, micro_batches: int) -> CompiledProgram:
    number = stages * interleave
    graph = StageGraph.chain(number, micro_batches)
    placed = positions(name, stages, interleave)[:number]
    rows = schedule(name)(Pipeline(graph, placed))
    part = (Part("activation", (), 1),)
    messages = {
        (s, s + 1, m): (Message(placed[s], placed[s + 1], part, part),)
        for s in range(number - 1)
        for m in range(micro_batches)
    }
    program = lower(rows, graph, tuple((position,) for position in placed), messages, stages)
    return compile_program(program, (1,) * micro_batches)


def _run(compiled: CompiledProgram, chunks: Chunks) -> float:
    """When the last pass of a program of those chunks ends."""
    seconds = []
    for slot in compiled.actions:
        op, stage = slot.action.op, slot.action.stage
        passes = op not in MESSAGE and op not in (Op.REDUCE_GRAD, Op.UPDATE)
        seconds.append((chunks.forward_s if op is Op.FORWARD else chunks.backward_s)[stage] if passes else 0.0)
    transfers = [chunks.overlapped_s] * len(compiled.transfers)
    return execute(compiled, seconds, transfers, range(len(compiled.channels))).step_s


@dataclass(frozen=True, slots=True)
class _Timing:
    """A step but for its simulation."""

    layers: Layers
    chunks: Chunks
    hop: Estimate
    latency_s: float
    after: Cost
    micro_batches: int

    @property
    def at_least_s(self) -> float:
        return self.chunks.least_s(self.micro_batches) + self.latency_s + self.after.seconds


def _timing(shape: Transformer, cluster: Cluster, ways: Ways, global_batch: int, layers: Layers | None) -> _Timing:
    ways.check(shape)
    micro_batches = ways.micro_batches(global_batch)
    found = layers or layers_for(shape, cluster, ways)
    found = Layers(found.embedding, _with_shards(shape, cluster, ways, found.block), found.head)
    p, blocks = ways.pipeline, ways.chunks(shape.layers)
    forward_s, backward_s = found.block.forward.seconds, found.block.backward.seconds
    passes = [(number * forward_s, number * backward_s) for number in blocks]
    for place, layer in ((0, found.embedding), (-1, found.head)):
        ahead, back = passes[place]
        passes[place] = ahead + layer.forward.seconds, back + layer.backward.seconds
    hops = _hops(shape, cluster, ways)
    hop = max(hops, key=lambda message: message.seconds, default=NOTHING)
    # What flows one way for long pays the latency once a boundary; a round trip in each window pays it every time.
    flows = ways.sends is Sends.OVERLAPPED and ways.schedule == "gpipe"
    latency_s = min(cluster.latency_s(ways.tensor * ways.data), hop.seconds) if flows else 0.0
    chunks = chunked(passes, [message.seconds - latency_s for message in hops], ways.sends, p)
    unlike = unlike_stages(shape, ways)
    beside = {stage: sum(back for _, back in passes[stage::p]) for stage in unlike}
    summed = max((_gradients(shape, cluster, ways, stage, beside[stage]) for stage in unlike), key=lambda c: c.seconds)
    after = summed + _tied(shape, cluster, ways) + _optimiser(shape, cluster, ways, unlike)
    return _Timing(found, chunks, hop, 2 * (p - 1) * latency_s, after, micro_batches)


def least_s(shape: Transformer, cluster: Cluster, ways: Ways, global_batch: int) -> float:
    """No step of :func:`predict` is shorter; quick."""
    return _timing(shape, cluster, ways, global_batch, None).at_least_s


def predict(
    shape: Transformer, cluster: Cluster, ways: Ways, global_batch: int, layers: Layers | None = None
) -> Prediction:
    """A step of ``shape`` on ``cluster``, divided in those ways.

    Args:
        layers: passes that were measured, in place of those of kernels.

    Raises:
        UsageError: the network or the batch cannot be divided so.
    """
    timing = _timing(shape, cluster, ways, global_batch, layers)
    chunks, micro_batches, p = timing.chunks, timing.micro_batches, ways.pipeline
    pipeline_s = max(chunks.least_s(micro_batches), chunks.step_s(micro_batches, ways.schedule)) + timing.latency_s
    busy = [sum(chunks.forward_s[r::p]) + sum(chunks.backward_s[r::p]) for r in range(p)]
    busiest = max(range(p), key=busy.__getitem__)
    work = (timing.layers.block.forward + timing.layers.block.backward) * sum(ways.chunks(shape.layers)[busiest::p])
    for stage, layer in ((0, timing.layers.embedding), (p - 1, timing.layers.head)):
        if stage == busiest:
            work = work + layer.forward + layer.backward
    messages_s = max(0.0, busy[busiest] - work.seconds)
    hops = messages_s / timing.hop.seconds if timing.hop.seconds else 0.0
    spent = (work + Cost.of(SENDS, timing.hop, hops)) * micro_batches + timing.after
    whole = spent.total
    step_s = pipeline_s + timing.after.seconds
    parts = {**spent.by_what, BUBBLE: max(0.0, step_s - whole.seconds)}
    memory = memory_of(shape, ways, micro_batches)
    return Prediction(_ranged(step_s, whole), parts, memory, micro_batches, timing.at_least_s)


def _ranged(step_s: float, spent: Estimate) -> Estimate:
    """The step with the range of what it is spent on, and the model's own."""
    below, above = 1 - spent.low / spent.seconds, spent.high / spent.seconds - 1
    low, high = (sqrt(share**2 + MODEL_ERROR**2) for share in (below, above))
    return Estimate(step_s, step_s * (1 - low), step_s * (1 + high), spent.evidence)


def chunked(passes: Sequence[tuple[float, float]], hop_s: Sequence[float], sends: Sends, stages: int) -> Chunks:
    """Chunks of (forward, backward), with the messages that somebody waits for.

    Args:
        hop_s: a message from each chunk to the next; one fewer than there are chunks.
    """
    waits, also = sends is not Sends.OVERLAPPED, sends is Sends.BLOCKING
    around = [0.0, *hop_s, 0.0]
    forward = tuple(f + waits * around[i] + also * around[i + 1] for i, (f, _) in enumerate(passes))
    backward = tuple(b + waits * around[i + 1] + also * around[i] for i, (_, b) in enumerate(passes))
    return Chunks(forward, backward, stages, 0.0 if waits else max(hop_s, default=0.0))


def _hops(shape: Transformer, cluster: Cluster, ways: Ways) -> list[Estimate]:
    """Messages from each chunk to the next: each tensor rank sends its part; parts are gathered there, or stay cut."""
    whole = 2.0 * ways.micro_batch * shape.seq * shape.hidden
    stride, p = ways.tensor * ways.data, ways.pipeline
    hosts = [stage * stride // cluster.per_host for stage in range(p)]
    gathered = NOTHING if ways.sequence_parallel else cluster.exchange("all_gather", whole, ways.tensor)
    at_once = min(cluster.per_host, stride)
    inside, across = (cluster.send(whole / ways.tensor, far, at_once) + gathered for far in (1, cluster.per_host))
    chunks = range(p * ways.interleave - 1)
    far = [stride >= cluster.per_host or hosts[c % p] != hosts[(c + 1) % p] for c in chunks]
    return [across if crosses else inside for crosses in far] if p > 1 else [NOTHING for _ in chunks]


def _with_shards(shape: Transformer, cluster: Cluster, ways: Ways, block: Pass) -> Pass:
    """With ZeRO-2 a micro-batch's gradients are scattered, with ZeRO-3 weights gathered: beside the block's pass."""
    if ways.zero < 2 or ways.data == 1:
        return block
    weights = shape.block_parameters / ways.tensor
    gradients = cluster.exchange("reduce_scatter", weights * (4 if ways.fp32_gradients else 2), ways.data, ways.tensor)
    gathered = NOTHING
    if ways.zero >= 3:
        gathered = cluster.exchange("all_gather", weights * WEIGHT_BYTES, ways.data, ways.tensor)
    return Pass(
        block.forward + _beyond(gathered, block.forward.seconds),
        block.backward + _beyond(gathered + gradients, block.backward.seconds),
    )


def _beyond(exchange: Estimate, beside_s: float) -> Cost:
    """What is left to wait for of an exchange that runs beside a pass."""
    left = max(0.0, exchange.seconds - beside_s)
    return Cost.of(GRADIENTS, exchange, left / exchange.seconds) if left else Cost()


def _gradients(shape: Transformer, cluster: Cluster, ways: Ways, stage: int, beside_s: float) -> Cost:
    """Sums of a stage's gradients over the data-parallel ranks, after the last backward or beside it."""
    if ways.data == 1:
        return Cost()
    parameters = stage_parameters(shape, ways, stage)
    num_bytes = parameters * (4 if ways.fp32_gradients else 2)
    if ways.zero == 0:
        found = cluster.exchange("all_reduce", num_bytes, ways.data, ways.tensor)
    else:
        found = NOTHING
        if ways.zero == 1:
            found = cluster.exchange("reduce_scatter", num_bytes, ways.data, ways.tensor)
        if ways.zero < 3:
            found = found + cluster.exchange("all_gather", parameters * WEIGHT_BYTES, ways.data, ways.tensor)
    if ways.overlap_gradients:
        return _beyond(found, beside_s)
    return Cost.of(GRADIENTS, found)


def _tied(shape: Transformer, cluster: Cluster, ways: Ways) -> Cost:
    """The sum of the embedding's gradient on the first and the last stage."""
    if ways.pipeline == 1 or not shape.parameters_tied:
        return Cost()
    num_bytes = shape.vocab * shape.hidden / ways.tensor * (4 if ways.fp32_gradients else 2)
    stride = ways.tensor * ways.data * (ways.pipeline - 1)
    return Cost.of(GRADIENTS, cluster.exchange("all_reduce", num_bytes, 2, stride))


def _optimiser(shape: Transformer, cluster: Cluster, ways: Ways, stages: Iterable[int]) -> Cost:
    """Adam with float32 weights: state read and written, gradients zeroed, read for their norm and for the update."""
    parameters = max(stage_parameters(shape, ways, stage) for stage in stages)
    shards = ways.data if ways.zero else 1
    gradient_bytes = 4 if ways.fp32_gradients else 2
    num_bytes = parameters / shards * (2 * MASTER_BYTES + WEIGHT_BYTES + 3 * gradient_bytes)
    return Cost.of(OPTIMISER, cluster.kernels.memory_bound(num_bytes, 8))
