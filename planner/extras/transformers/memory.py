"""What a rank of a transformer's training holds, by stage.

Korthikanti, Casper, Lym, McAfee, Andersch, Shoeybi, Catanzaro, "Reducing activation recomputation in large transformer
models" (arXiv 2205.05198), section 4: of a block, s b h (10 + 24 / t + 5 a s / (h t)) bytes without recomputation,
of which sequence parallelism divides the 10 too; without the 5 a s / (h t) with selective, 2 s b h with full
recomputation.  Written here for any width of the feed-forward part, shared keys and fused attention, to which the above
is equal (a test says so); numbers have two bytes there, and ``width`` here.  A stage holds the micro-batches in flight:
p - r on stage r of 1F1B, all of GPipe, and p (1 + (p - 1) / (p v)) on the first of interleaved 1F1B.  State: 2 bytes of
weights, 2 or 4 of gradients, 12 of the optimiser (float32 weights and two moments); in float32 throughout 4, 4 and 8.
With products in 8 bits blocks have their weights so too, twice (Transformer Engine keeps them and their transpose from
micro-batch to micro-batch); what is kept for backward counts as in half precision, which a program keeps or less.
Of latent attention the latent numbers are kept on both sides of their norms, whole on each tensor rank; of experts the
tokens in their order, once for each expert that takes them, beside what the hidden layers of those experts hold.
Ranks that share the tokens of a sample keep those of their own; with an all-to-all what attention gives is kept by
tokens and by heads, with an all-gather the keys and values of the whole sample are, and in a ring those of two ranks
and their gradients pass by (Liu et al. 2023, section 3; Jacobs et al. 2023, section 3).
Of modules that are computed again (:mod:`planner.extras.transformers.recomputation`) a pass holds what they give, and
of operators a whole block.  Where groups of copies have the same slices, ZeRO divides over those of a group.
What is kept of blocks may be in the host's memory, but for the block that is computed and the one that comes or goes.
From when to when a micro-batch is held, and which level of ZeRO divides what, is read from the table that plans are
priced by (:mod:`planner.costs.memory.table`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from planner.costs.memory.table import What, divided, held_in_turn
from planner.extras.transformers.recomputation import (
    ROUTER_BYTES,
    freed_bytes,
    operators_kept,
    own_modules,
    score_bytes,
)
from planner.extras.transformers.shape import (
    ContextExchange,
    Fusion,
    Offload,
    ParallelDegrees,
    Precision,
    Recompute,
    Transformer,
)
from planner.ir.errors import UsageError
from planner.ir.schedule import Pipeline, StageGraph
from planner.schedules import max_in_flight
from planner.schedules.one_f_one_b import chunks_in_flight

WEIGHT_BYTES = 2
MASTER_BYTES = 12
EIGHT_BIT_BYTES = 2
HOST_COPY_BYTES = 4
"""Of a weight in the host's memory, and of its gradient: in float32, as they are copied (FSDP2)."""
HALF = 2
SINGLE = 4
"""Bytes of a number: of weights and activations in half precision, with float32 weights in the optimiser; in float32
throughout."""
_LOGIT_BYTES = {HALF: 2 + 4 + 4 + 4, SINGLE: 4 + 4 + 4}
"""Of a logit: as the product makes it, in float32 if it is not, its exponential, and the gradient of it."""
_FUSED_LOGIT_BYTES = {HALF: 2 + 4, SINGLE: 4}
"""Where its exponential and the gradient are made in place (Megatron-LM, tensor_parallel/cross_entropy.py)."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one rank.

    Attributes:
        weights, gradients, optimiser: its state, as ZeRO leaves it.
        activations: kept for backward, of the micro-batches in flight.
        working: what one pass holds beside them: logits, a block that is computed again, gathered weights.
        stage: the rank's.
        host: what is in the memory of its host in place of its own.
    """

    weights: float
    gradients: float
    optimiser: float
    activations: float
    working: float
    stage: int = 0
    host: float = 0.0

    @property
    def parts(self) -> dict[str, float]:
        """By what it is for, as people and files are told."""
        return {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimiser": self.optimiser,
            "activations": self.activations,
            "one_pass": self.working,
        }

    @property
    def state(self) -> float:
        """Weights, gradients, optimiser."""
        return self.weights + self.gradients + self.optimiser

    @property
    def total(self) -> float:
        """All of it, but for what is on the host."""
        return self.state + self.activations + self.working


@dataclass(frozen=True, slots=True)
class RankWeights:
    """Numbers of weights of a rank, before ZeRO and expert ranks divide any.

    Attributes:
        common: those that all of its replicas have.
        routed: those of experts that tokens are routed to.
    """

    common: float
    routed: float = 0.0

    def __add__(self, other: RankWeights) -> RankWeights:
        return RankWeights(self.common + other.common, self.routed + other.routed)

    def __mul__(self, factor: float) -> RankWeights:
        return RankWeights(self.common * factor, self.routed * factor)

    __rmul__ = __mul__

    def __truediv__(self, parts: float) -> RankWeights:
        return RankWeights(self.common / parts, self.routed / parts)

    def held(self, ways: ParallelDegrees, what: What) -> float:
        """Of the rank, of what ZeRO's level divides over replicas; those of an expert are of fewer."""
        common = self.common / divided(what, ways.zero, ways.shard_ranks)
        return common + self.routed / ways.expert_parts / divided(what, ways.zero, ways.expert_shard_ranks)


def block_bytes(shape: Transformer, ways: ParallelDegrees, width: int = HALF) -> float:
    """Kept for backward of one block and micro-batch.

    Args:
        width: bytes of a number, :data:`HALF` or :data:`SINGLE`.
    """
    s = shape
    t = ways.tensor
    tokens = ways.tokens(s)
    own = tokens / t if ways.sequence_parallel else float(tokens)
    if ways.recompute is Recompute.FULL:
        return width * own * s.hidden  # its input
    if ways.recompute is Recompute.OPERATORS:
        return operators_kept(s, ways, width)
    mask = 2 if s.dropout else 0  # after attention and after the feed-forward part, a byte each
    alike = own * s.hidden * ((s.norms + 2) * width + mask)  # inputs of norms, and of both halves' first products
    alike += own * width * (2 * s.latent - s.rope_size)  # latent numbers, before and after their norm
    alike += own * ROUTER_BYTES * s.experts
    mixed = (s.head_size + s.value_size) * (s.heads + s.kv_heads)  # queries, keys, values, and what attention gives
    mixed += s.qk_norm * s.head_size * (s.heads + s.kv_heads)
    mixed += _of_other_ranks(s, ways)
    cut = tokens * width * (mixed + (3 if s.gated else 1 if s.relu else 2) * s.taken_ffn) / t
    routed = tokens * width * s.hidden * s.top_k * ways.expert_tensor / t  # tokens in the order of their experts
    scores = 0.0
    if not s.fused_attention:
        scores = score_bytes(s, width) * ways.micro_batch * s.heads * s.seq**2 / t
    return alike + cut + routed + scores - _freed_bytes(s, ways, width)


def _freed_bytes(shape: Transformer, ways: ParallelDegrees, width: int) -> float:
    """Of a block and micro-batch what modules free that are computed again."""
    if ways.recompute is not Recompute.SELECTIVE:
        return 0.0
    return sum(freed_bytes(shape, ways, module, width) for module in own_modules(shape, ways))


def _of_other_ranks(shape: Transformer, ways: ParallelDegrees) -> int:
    """Features, by token of a rank's own, that are kept for attention over ranks which share the tokens of a sample."""
    if ways.context == 1 or ways.context_exchange is ContextExchange.RING:
        return 0
    if ways.context_exchange is ContextExchange.ALL_TO_ALL:
        return shape.heads * shape.value_size
    return (ways.context - 1) * shape.kv_heads * (shape.head_size + shape.value_size)


def in_flight(ways: ParallelDegrees, stage: int, micro_batches: int) -> float:
    """Of a stage's chunks of one micro-batch, how many are held at once at most, in micro-batches."""
    if ways.interleave == 1:
        return chain_in_flight(ways.schedule, ways.pipeline, micro_batches)[stage]
    chunks = chunks_in_flight(ways.pipeline, ways.interleave, stage)
    return held_in_turn(chunks, ways.interleave * micro_batches) / ways.interleave


@functools.lru_cache(maxsize=1024)
def chain_in_flight(schedule: str, num_stages: int, micro_batches: int) -> tuple[int, ...]:
    """The most micro-batches that are held under a schedule with a stage a position, by stage.

    Raises:
        UsageError: the schedule does not state how many forwards run ahead.
    """
    stated = max_in_flight(schedule, Pipeline(StageGraph.chain(num_stages, micro_batches)))
    if stated is None:
        raise UsageError(f"schedule {schedule} does not state its micro-batches in flight")
    return tuple(held_in_turn(window, micro_batches) for window in stated)


def stage_parameters(shape: Transformer, ways: ParallelDegrees, stage: int) -> float:
    """Weights of a rank of that stage, before ZeRO divides any."""
    blocks = sum(ways.chunks(shape.layers)[stage :: ways.pipeline])
    weights = parameters_of(shape, ways.at(stage).tensor, blocks, *ends_of(ways, stage))
    return weights.common + weights.routed / ways.expert_parts


def ends_of(ways: ParallelDegrees, stage: int) -> tuple[bool, bool]:
    """Whether a stage is the first, and whether it is the last."""
    return stage == 0, stage == ways.pipeline - 1


def parameters_of(shape: Transformer, tensor: int, blocks: int, first: bool, last: bool) -> RankWeights:
    """Weights of a rank of so many alike blocks.

    The first stage has the embedding, and the dense blocks that come first; the last has the head, and the blocks of
    ``mtp``, which read the embedding too.
    """
    weights = weights_of_blocks(shape, tensor, blocks, first, last)
    table = shape.vocab * shape.hidden / tensor
    if first:
        weights += RankWeights(shape.embedding_parameters - shape.vocab * shape.hidden + table)
    if last:
        joined = 2 * shape.hidden**2 / tensor + 3 * shape.norm_parameters
        weights += RankWeights(shape.norm_parameters + shape.mtp * joined)
        tables = 0 if first and shape.parameters_tied else 1
        if shape.mtp and not first and not shape.parameters_tied:
            tables = 2
        weights += RankWeights(tables * table)
    return weights


@functools.lru_cache(maxsize=4096)
def weights_of_blocks(shape: Transformer, tensor: int, blocks: int, first: bool, last: bool) -> RankWeights:
    """Of so many alike blocks, and of those of another kind that are beside them."""
    weights = _of_block(shape, tensor) * (blocks + last * shape.mtp)
    if first and shape.first_dense:
        weights += _of_block(shape.dense, tensor) * shape.first_dense
    return weights


def _of_block(shape: Transformer, tensor: int) -> RankWeights:
    weights = shape.block_weights
    return RankWeights(weights.cut / tensor + weights.alike, weights.routed / tensor)


def unlike_stages(shape: Transformer, ways: ParallelDegrees) -> list[int]:
    """The first stage, the last, and of those with as many blocks the earliest, which has the most in flight.

    All of them, where they have degrees or pools of their own.
    """
    p = ways.pipeline
    blocks = ways.chunks(shape.layers)
    if ways.tensors or ways.pools:
        return list(range(p))
    earliest = {sum(blocks[stage::p]): stage for stage in reversed(range(1, p))}
    return sorted({0, p - 1, *earliest.values()})


def stage_memory(
    shape: Transformer, ways: ParallelDegrees, stage: int, micro_batches: int, width: int = HALF
) -> Memory:
    """Of a rank of that stage; ``width`` as of :func:`block_bytes`."""
    blocks = sum(ways.chunks(shape.layers)[stage :: ways.pipeline])
    held = in_flight(ways, stage, micro_batches)
    memory = memory_with(shape, ways.at(stage), blocks, held, ends_of(ways, stage), width)
    return replace(memory, stage=stage)


def memory_with(
    shape: Transformer, ways: ParallelDegrees, blocks: int, held: float, ends: tuple[bool, bool], width: int = HALF
) -> Memory:
    """Of a rank of a stage of so many blocks; as a function of them it is linear.

    Args:
        ways: ``tensor``, ``data``, ``context``, ``zero``, ``micro_batch`` and the like count, not what stages have.
        held: micro-batches in flight (:func:`in_flight`).
        ends: whether it is the first stage, and whether it is the last.
    """
    first, last = ends
    weights = parameters_of(shape, ways.tensor, blocks, first, last)
    gradient_bytes = 4 if ways.fp32_gradients else width
    optimiser_bytes = MASTER_BYTES if width == HALF else 8  # two moments; the weights are float32 themselves
    each = (What.PARAMETERS, width), (What.GRADIENTS, gradient_bytes), (What.OPTIMISER_STATE, optimiser_bytes)
    state = [num_bytes * weights.held(ways, what) for what, num_bytes in each]
    if ways.precision is Precision.FP8:
        in_eight_bits = weights_of_blocks(shape, ways.tensor, blocks, first, last)
        state[0] += EIGHT_BIT_BYTES * in_eight_bits.held(ways, What.PARAMETERS)
    own = ways.tokens(shape) * shape.hidden / (ways.tensor if ways.sequence_parallel else 1)
    block = block_bytes(shape, ways, width)
    kept = held * blocks * block
    working = 0.0
    if first and shape.dropout:
        kept += held * own
    if first and shape.first_dense:
        kept += held * shape.first_dense * block_bytes(shape.dense, ways, width)
    if last:
        working += (1 + shape.mtp) * (_logit_bytes(shape, ways, width) + 2 * width * own)
        kept += held * shape.mtp * (block + 4 * width * own)  # its two inputs, and their norms
    working = max(working, _passing_bytes(shape, ways, width))
    if ways.zero >= 3:
        gathered = _of_block(shape, ways.tensor)
        working += 2 * width * (gathered.common + gathered.routed / ways.expert_parts)
    memory = Memory(state[0], state[1], state[2], kept, working)
    if ways.offload is Offload.OPTIMIZER:
        copies = (gradient_bytes + width) * weights.held(ways, What.OPTIMISER_STATE)  # on their way there and back
        return replace(memory, optimiser=0.0, host=memory.optimiser + copies)
    if ways.offload is Offload.PARAMETERS:
        on_host = (MASTER_BYTES + HOST_COPY_BYTES) * weights.held(ways, What.PARAMETERS)
        return replace(memory, weights=0.0, gradients=0.0, optimiser=0.0, host=on_host)
    if ways.offload is Offload.ACTIVATIONS:
        of_blocks = held * blocks * block
        return replace(memory, activations=kept - of_blocks + 2 * block, host=of_blocks)
    return memory


def _logit_bytes(shape: Transformer, ways: ParallelDegrees, width: int) -> float:
    """Of a micro-batch's logits, and of what its loss makes of them."""
    each = (_FUSED_LOGIT_BYTES if ways.kernels is Fusion.FUSED else _LOGIT_BYTES)[width]
    return ways.tokens(shape) * -(-shape.vocab // ways.tensor) * each


def _passing_bytes(shape: Transformer, ways: ParallelDegrees, width: int) -> float:
    """What the pass of one block holds beside what it keeps: what it computes again, and keys that pass by."""
    passing = _freed_bytes(shape, ways, width)
    if ways.recompute in (Recompute.FULL, Recompute.OPERATORS):
        passing = block_bytes(shape, replace(ways, recompute=Recompute.NONE), width)
    if ways.context > 1 and ways.context_exchange is ContextExchange.RING:
        keys_values = shape.kv_heads * (shape.head_size + shape.value_size)
        # Those that are used and those that come, each with its gradients.
        passing += 4 * width * ways.tokens(shape) * keys_values / ways.tensor
    return passing


def memory_of(shape: Transformer, ways: ParallelDegrees, micro_batches: int, width: int = HALF) -> Memory:
    """Of the rank that holds most; ``width`` as of :func:`block_bytes`."""
    memories = (stage_memory(shape, ways, stage, micro_batches, width) for stage in unlike_stages(shape, ways))
    return max(memories, key=lambda memory: memory.total)
