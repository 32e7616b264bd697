"""A transformer by its sizes, and a way to divide its training step over devices."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import groupby
from typing import Any

from planner.extras.kernels.models import AttentionKernel
from planner.ir.errors import UnknownNameError, UsageError, nearest

MOST_DEGREE = 2**20
"""Of ranks, stages, replicas, samples and chunks; no cluster has as many devices."""


class ProductCut(StrEnum):
    """What of a product the tensor ranks divide.

    ``COLUMN``: its outputs. ``ROW``: its inputs; they sum what it gives. ``WHOLE``: nothing, each does all of it.
    """

    COLUMN = "column"
    ROW = "row"
    WHOLE = "whole"


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix of weights [outputs, inputs] that tokens are multiplied by.

    Attributes:
        inputs, outputs: features of the whole network.
        bias: whether numbers are added to the outputs.
        experts: matrices of as many experts, of which a token goes through ``taken``; 0: one, for every token.
        weighs: its outputs choose among experts, or weight them: never in 8 bits.
    """

    inputs: int
    outputs: int
    cut: ProductCut
    bias: bool = False
    experts: int = 0
    taken: int = 1
    weighs: bool = False

    @property
    def weights(self) -> int:
        """Of all of its matrices."""
        return max(1, self.experts) * self.inputs * self.outputs

    @property
    def biases(self) -> int:
        """Numbers that are added."""
        return self.outputs if self.bias else 0

    @property
    def alike(self) -> int:
        """Of weights and biases those that each tensor rank has."""
        if self.cut is ProductCut.WHOLE:
            return self.weights + self.biases
        return self.biases if self.cut is ProductCut.ROW else 0


@dataclass(frozen=True, slots=True)
class BlockWeights:
    """Numbers of weights of a block.

    Attributes:
        cut: those that tensor ranks divide.
        alike: those that each tensor rank has.
        routed: those of experts that tokens are routed to; tensor ranks divide them too.
        routed_taken: of those, what a token goes through.
    """

    cut: int
    alike: int
    routed: int
    routed_taken: int


@dataclass(frozen=True, slots=True)
class Transformer:
    """A decoder of alike blocks between an embedding and a head.

    A block's attention has queries, keys and values of its own (fewer keys: grouped queries), or makes them of latent
    numbers (``kv_rank``: DeepSeek-V2, arXiv 2405.04434, section 2.1).  Its feed-forward part is dense, or of experts,
    ``top_k`` of which each token goes through; routing is taken as balanced: experts have equally many tokens.

    Attributes:
        ffn: width of the hidden layer of a dense feed-forward part; with ``gated`` there are two such products.
        layers: blocks that are alike; those of ``first_dense`` and ``mtp`` come before and behind them.
        seq: tokens of a sample.
        kv_heads: heads of keys and values; fewer than ``heads`` where queries share them.
        head_size: features of a head's query and key; 0: hidden / heads.
        value_size: features of a head's value; 0: ``head_size``.
        query_rank: latent numbers that queries are made of; 0: they are made of the hidden features.
        kv_rank: latent numbers that keys and values are made of; 0: they are made of the hidden features.
        rope_size: of ``head_size``, with ``kv_rank``, the features that are rotated; the heads' keys share them.
        window: tokens that each token sees in ``windowed`` of the blocks; in the others it sees all before it.
        experts: of a block; 0: its feed-forward part is dense.
        top_k: experts that a token goes through.
        expert_ffn: width of the hidden layer of an expert; 0: ``ffn``.
        shared_ffn: width of all experts that every token goes through, together.
        shared_gate: what shared experts give is weighted by a number of each token's own.
        router_bias: the router adds a number of each expert's own to its scores.
        first_dense: blocks of dense feed-forward parts of ``ffn`` before the others; they stay on the first stage.
        mtp: blocks that predict tokens beyond the next (DeepSeek-V3, arXiv 2412.19437, section 2.2), behind the others
            and on the last stage, each with a pass through the head of its own.
        fused_attention: scores never reach memory (FlashAttention); else they are written, masked, dropped and read.
        dropout: whether activations are dropped (masks of one byte are kept for backward).
        attention_dropout: whether attention's probabilities are dropped too, where ``dropout`` is.
        relu: the feed-forward part's activation gives all that its backward needs; else its input is kept as well.
        parameters_tied: whether the head uses the embedding's weights.
        qkv_bias, out_bias, ffn_bias: biases of the products before attention, behind it, and of dense feed-forward
            parts and shared experts.
        layer_norm: norms have biases too (LayerNorm); else weights alone (RMSNorm).
        norms: of a block: 2, or 4 where what attention and feed-forward part give is normed too.
        qk_norm: queries and keys are normed, head by head.
        rotary_base: of the angles that ``rotary`` positions turn by.
        settings: what else its configuration says of what is computed, which neither weights nor times depend on, as
            ``name=value``: for whoever writes the network down.
    """

    name: str
    hidden: int
    ffn: int
    heads: int
    layers: int
    vocab: int
    seq: int
    kv_heads: int = 0
    head_size: int = 0
    gated: bool = False
    rotary: bool = False
    fused_attention: bool = False
    dropout: bool = True
    attention_dropout: bool = True
    relu: bool = False
    parameters_tied: bool = True
    value_size: int = 0
    query_rank: int = 0
    kv_rank: int = 0
    rope_size: int = 0
    window: int = 0
    windowed: int = 0
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    shared_gate: bool = False
    router_bias: bool = False
    first_dense: int = 0
    mtp: int = 0
    qkv_bias: bool = True
    out_bias: bool = True
    ffn_bias: bool = True
    layer_norm: bool = True
    norms: int = 2
    qk_norm: bool = False
    rotary_base: float = 10_000.0
    settings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "head_size", self.head_size or self.hidden // self.heads)
        object.__setattr__(self, "value_size", self.value_size or self.head_size)
        if self.experts:
            object.__setattr__(self, "expert_ffn", self.expert_ffn or self.ffn)
        for is_wrong, fault, remedy in (
            (self.heads % self.kv_heads, f"heads={self.heads}, kv_heads={self.kv_heads}", "kv_heads that divide heads"),
            (not self.kv_rank and self.query_rank, f"query_rank={self.query_rank}, kv_rank=0", "kv_rank=..."),
            (self.rope_size > self.head_size, f"rope_size={self.rope_size}, head_size={self.head_size}", "fewer"),
            (self.windowed > self.layers, f"windowed={self.windowed}, layers={self.layers}", "fewer windowed blocks"),
            (self.windowed and not self.window, f"windowed={self.windowed}, window=0", "window=..."),
            (
                self.experts and not 1 <= self.top_k <= self.experts,
                f"experts={self.experts}, top_k={self.top_k}",
                "top_k=..., from 1 to the experts",
            ),
            (
                not self.experts and (self.first_dense or self.top_k),
                f"experts=0, first_dense={self.first_dense}, top_k={self.top_k}",
                "experts=..., or neither of the others",
            ),
        ):
            if is_wrong:
                raise UsageError(f"{self.name}: {fault} are no sizes of a transformer", [], [remedy])

    @property
    def drops_scores(self) -> bool:
        """Whether attention's probabilities are dropped."""
        return self.dropout and self.attention_dropout

    @property
    def attention_products(self) -> tuple[Product, ...]:
        """Of a block, before and behind the core of attention."""
        own = self.hidden
        queries = self.heads * self.head_size
        behind = Product(self.heads * self.value_size, own, ProductCut.ROW, self.out_bias)
        if not self.kv_rank:
            keys_values = self.kv_heads * (self.head_size + self.value_size)
            return Product(own, queries + keys_values, ProductCut.COLUMN, self.qkv_bias), behind
        of_queries: tuple[Product, ...] = (Product(own, queries, ProductCut.COLUMN),)
        if self.query_rank:
            narrow = Product(own, self.query_rank, ProductCut.WHOLE, self.qkv_bias)
            of_queries = narrow, Product(self.query_rank, queries, ProductCut.COLUMN)
        of_keys = Product(own, self.kv_rank + self.rope_size, ProductCut.WHOLE, self.qkv_bias)
        made = self.heads * (self.head_size - self.rope_size + self.value_size)
        return *of_queries, of_keys, Product(self.kv_rank, made, ProductCut.COLUMN), behind

    @property
    def feed_forward_products(self) -> tuple[Product, ...]:
        """Of a block; the router and the gate of shared experts among them."""
        if not self.experts:
            return self._two_products(self.ffn)
        of_each = self._two_products(self.expert_ffn)
        routed = tuple(replace(each, bias=False, experts=self.experts, taken=self.top_k) for each in of_each)
        router = Product(self.hidden, self.experts, ProductCut.WHOLE, self.router_bias, weighs=True)
        gate = (Product(self.hidden, 1, ProductCut.WHOLE, weighs=True),) if self.shared_gate else ()
        return router, *routed, *self.shared_products, *gate

    @property
    def shared_products(self) -> tuple[Product, ...]:
        """Of the experts that every token goes through."""
        return self._two_products(self.shared_ffn) if self.shared_ffn else ()

    def _two_products(self, width: int) -> tuple[Product, Product]:
        opened = (2 if self.gated else 1) * width
        return (
            Product(self.hidden, opened, ProductCut.COLUMN, self.ffn_bias),
            Product(width, self.hidden, ProductCut.ROW, self.ffn_bias),
        )

    @property
    def taken_ffn(self) -> int:
        """Width of all hidden layers of a block's feed-forward part that a token goes through."""
        return self.top_k * self.expert_ffn + self.shared_ffn if self.experts else self.ffn

    @property
    def latent(self) -> int:
        """Latent numbers of a token that queries, keys and values are made of, with the keys' rotated features."""
        return self.query_rank + self.kv_rank + self.rope_size if self.kv_rank else 0

    @property
    def norm_parameters(self) -> int:
        """Of a norm of the hidden features."""
        return (2 if self.layer_norm else 1) * self.hidden

    @property
    def block_weights(self) -> BlockWeights:
        """Of one of the alike blocks, by who has them."""
        return _block_weights(self)

    @property
    def block_parameters(self) -> int:
        """Weights of one of the alike blocks."""
        weights = self.block_weights
        return weights.cut + weights.alike + weights.routed

    @property
    def dense(self) -> Transformer:
        """One with a block of those that come first (``first_dense``)."""
        return replace(
            self, experts=0, top_k=0, expert_ffn=0, shared_ffn=0, shared_gate=False, first_dense=0, mtp=0
        )  # fmt: skip

    @property
    def embedding_parameters(self) -> int:
        """Weights of the embedding of tokens, and of places where they are learnt."""
        return (self.vocab + (0 if self.rotary else self.seq)) * self.hidden

    @property
    def parameters(self) -> int:
        """All weights but those of ``mtp``."""
        head = 0 if self.parameters_tied else self.vocab * self.hidden
        blocks = self.layers * self.block_parameters
        if self.first_dense:
            blocks += self.first_dense * self.dense.block_parameters
        return blocks + self.embedding_parameters + head + self.norm_parameters

    @property
    def active_parameters(self) -> int:
        """Of :attr:`parameters` those that a token goes through."""
        weights = self.block_weights
        return self.parameters - self.layers * (weights.routed - weights.routed_taken)

    @property
    def mtp_parameters(self) -> int:
        """Weights of the blocks of ``mtp``: a block, the product that joins its two inputs, and three norms, each."""
        joined = 2 * self.hidden * self.hidden + 3 * self.norm_parameters
        return self.mtp * (self.block_parameters + joined)

    @property
    def has_table_at_both_ends(self) -> bool:
        """Whether the last stage of several has the embedding's weights too."""
        return self.parameters_tied or self.mtp > 0

    @property
    def divided_sizes(self) -> tuple[tuple[str, int], ...]:
        """What tensor ranks divide, by name."""
        sizes = [("heads", self.heads), ("key heads", self.kv_heads)]
        if not self.experts or self.first_dense:
            sizes.append(("ffn", self.ffn))
        widths = (("expert_ffn", self.expert_ffn), ("shared_ffn", self.shared_ffn))
        return (*sizes, *(width for width in widths if width[1]))

    @property
    def seen(self) -> float:
        """Tokens that a token of a sample is compared with, the mean of the blocks; as if those behind it counted."""
        near = min(self.window, self.seq) if self.windowed else self.seq
        return self.seq + (near - self.seq) * self.windowed / self.layers

    def step_flop(self, global_batch: int) -> float:
        """Floating-point operations of a step without recomputation (Narayanan et al. 2021, equation 3, in general)."""
        head = self.vocab * self.hidden
        per_token = (self.layers + self.mtp) * _taken(self) + (1 + self.mtp) * head
        per_token += self.mtp * 2 * self.hidden * self.hidden
        if self.first_dense:
            per_token += self.first_dense * _taken(self.dense)
        return 3.0 * 2 * per_token * global_batch * self.seq


@functools.lru_cache(maxsize=256)
def _block_weights(shape: Transformer) -> BlockWeights:
    products = shape.attention_products + shape.feed_forward_products
    alike = sum(product.alike for product in products) + shape.norms * shape.norm_parameters
    alike += 2 * shape.head_size * shape.qk_norm
    if shape.kv_rank:
        alike += shape.query_rank + shape.kv_rank  # norms of the latent numbers
    own = [product for product in products if not product.experts and product.cut is not ProductCut.WHOLE]
    cut = sum(product.weights + product.biases - product.alike for product in own)
    routed = [product for product in products if product.experts]
    routed_taken = sum(product.taken * product.inputs * product.outputs for product in routed)
    return BlockWeights(cut, alike, sum(product.weights for product in routed), routed_taken)


def _taken(shape: Transformer) -> float:
    """Products with numbers of one token in a block: with weights, and of attention's core."""
    products = shape.attention_products + shape.feed_forward_products
    weights = sum(product.taken * product.inputs * product.outputs for product in products)
    return weights + shape.heads * (shape.head_size + shape.value_size) * shape.seen


class Recompute(StrEnum):
    """What backward computes again: nothing, some modules of a block, operators that are quick, or the whole block.

    ``OPERATORS``: what is kept is what attention, every other product and sums over tensor ranks give, with a block's
    input (torchtitan's selective checkpointing).
    """

    NONE = "none"
    SELECTIVE = "selective"
    OPERATORS = "operators"
    FULL = "full"


class Module(StrEnum):
    """What of a block is computed again with ``SELECTIVE``, as Megatron-LM names it.

    ``CORE_ATTN``: scores, softmax, context.  ``MOE_ACT``: the activation of routed experts.  ``LAYERNORM``: norms that
    are kernels of their own, those before latent attention and before experts.  ``MLA_UP_PROJ``: queries, keys and
    values from their latent numbers.  ``MLP``: a dense feed-forward part.  ``MOE``: router, experts, and the way there
    and back.  ``SHARED_EXPERTS``: those that every token goes through.
    """

    CORE_ATTN = "core_attn"
    MOE_ACT = "moe_act"
    LAYERNORM = "layernorm"
    MLA_UP_PROJ = "mla_up_proj"
    MLP = "mlp"
    MOE = "moe"
    SHARED_EXPERTS = "shared_experts"


class Precision(StrEnum):
    """What the products of blocks are computed in.

    ``BF16``: half precision (float16 on devices without bfloat16).  ``FP8``: 8 bits, forward and in both products of
    backward (Micikevicius et al. 2022, arXiv 2209.05433); head, router, attention's core, sums and state are as with
    ``BF16``.
    """

    BF16 = "bf16"
    FP8 = "fp8"


class Scaling(StrEnum):
    """How numbers are scaled before they are cast to 8 bits.

    ``CURRENT``: each tensor by its own largest number (Megatron-LM's ``--fp8-recipe tensorwise``, torchao).
    ``DELAYED``: by the largest of steps before (Micikevicius et al. 2022, section 3.3), which each kernel notes.
    ``MICRO``: 32 neighbours by theirs, along rows and along columns (MXFP8).
    """

    CURRENT = "current"
    DELAYED = "delayed"
    MICRO = "micro"


class Offload(StrEnum):
    """What is in the host's memory: nothing, the optimiser with its state, all state, or what is kept for backward.

    ``PARAMETERS``: weights, gradients and optimiser, of which each pass gathers a block's weights (ZeRO-3).
    """

    NONE = "none"
    OPTIMIZER = "optimizer"
    PARAMETERS = "parameters"
    ACTIVATIONS = "activations"


class Sends(StrEnum):
    """What a message between stages keeps busy.

    ``OVERLAPPED``: nobody. ``EXCHANGED``: both ends, one exchange in both directions at a time (Megatron-LM; or streams
    that share one NCCL communicator, which runs its operations in turn).  ``BLOCKING``: both ends, each direction by
    itself (DeepSpeed).
    """

    OVERLAPPED = "overlapped"
    EXCHANGED = "exchanged"
    BLOCKING = "blocking"


class ContextExchange(StrEnum):
    """How ranks that share the tokens of a sample come to the keys and values of all of them.

    ``RING``: from rank to rank, beside attention to those that are there (Liu et al. 2023, arXiv 2310.01889).  Rank r
    of c has parts r and 2 c - 1 - r of 2 c, so that all ranks have as many pairs of tokens (Megatron-LM's p2p).
    ``ALL_TO_ALL``: a part of the heads and all tokens in place of all heads and a part of the tokens, during attention
    (Jacobs et al. 2023, arXiv 2309.14509: DeepSpeed Ulysses; Megatron-LM's a2a).
    ``ALL_GATHER``: those of the whole sample on each rank, from before attention until its backward (torchtitan).
    """

    RING = "ring"
    ALL_TO_ALL = "all-to-all"
    ALL_GATHER = "all-gather"


class ExpertExchange(StrEnum):
    """How tokens come to the ranks of their experts, and back.

    ``ALL_TO_ALL``: a row for each of their experts, by NCCL.  ``DISPATCH``: once to each host and from there once to
    each of its ranks, in kernels made for it; sums on the way back likewise (DeepEP, HybridEP: Megatron-LM's ``flex``).
    """

    ALL_TO_ALL = "all-to-all"
    DISPATCH = "dispatch"


class Fusion(StrEnum):
    """Which operators share a kernel.

    ``FUSED``: bias, dropout and residual; scale, mask and softmax; norms stream; products add to the gradients that are
    there (Megatron-LM since 2022).  ``KERNELS``: the same kernels as PyTorch has them.  ``EAGER``: each operator of the
    model's text is a kernel, those of GELU too (transformers' GPT-2).
    """

    FUSED = "fused"
    KERNELS = "kernels"
    EAGER = "eager"


class Launch(StrEnum):
    """Who starts the kernels of a step, one by one, or a layer of them at once.

    ``EAGER``: Python, module by module.  ``COMPILED``: what ``torch.compile`` makes of a block.  ``GRAPHS``: the device
    itself, from CUDA graphs of whole blocks.
    """

    EAGER = "eager"
    COMPILED = "compiled"
    GRAPHS = "graphs"


@dataclass(frozen=True, slots=True)
class ParallelDegrees:
    """How a step is divided.

    Attributes:
        tensor: ranks that share a block; heads and channels are cut, the vocabulary of embedding and head too.
        sequence_parallel: what the tensor ranks would compute alike is divided by tokens.
        expert: ranks that share a block's experts: each has some of them, and gets the tokens that are routed to them
            from the others.  They are among the copies, and each has its part of what tensor ranks divide;
        whole_experts: or, where this holds, among copies and tensor ranks together, and experts are whole.
        expert_exchange: how tokens come to their experts.
        overlap_experts: that exchange runs beside the passes of another micro-batch.
        context: ranks that share the tokens of a sample; each has all weights of its tensor rank, as replicas do.
        context_exchange: how they come to the keys and values of the others.
        precision: of the products of blocks.
        scaling: of what they multiply, where that is in 8 bits.
        offload: what is in the host's memory.
        interleave: chunks of blocks on each stage.
        micro_batch: samples of a rank's pass.
        recompute_modules: what is computed again with ``SELECTIVE``, in the order of :class:`Module`.
        zero: what data-parallel ranks divide: 0 nothing, 1 optimiser state, 2 gradients too, 3 weights too.
        shards: neighbours among the copies that divide that (hybrid sharding: Zhao et al. 2023, arXiv 2304.11277,
            section 3.2.2); groups of them have the same slices, whose gradients they sum; 0: all copies.
        sums_once: groups sum their gradients once a step; else those of every micro-batch.
        fp32_gradients: gradients are summed in float32.
        kernels: how the operators between products are written.
        launch: who starts them.
        attention: what fuses its core, where the network's is fused.
        overlap_tensor: tensor-parallel sums of backward run beside the products of weight gradients.
        overlap_parts: with sequence parallelism, tensor ranks exchange as many parts as they are, each beside the
            product of another (Megatron-LM's ``--tp-comm-overlap``).
        overlap_gradients: sums over data-parallel ranks run beside the last backward.
        schedule: ``1f1b`` (``interleaved`` follows from ``interleave``) or ``gpipe``.
        blocks: blocks of each stage; empty: as even as can be.
        tensors: ``tensor`` of each stage, where stages have degrees of their own; the replicas are ``data`` of each.
        pools: the pool of each stage (:class:`planner.extras.transformers.pools.Pools`); empty: the devices are alike.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    micro_batch: int = 1
    sequence_parallel: bool = False
    interleave: int = 1
    recompute: Recompute = Recompute.NONE
    zero: int = 0
    fp32_gradients: bool = True
    kernels: Fusion = Fusion.FUSED
    launch: Launch = Launch.EAGER
    attention: AttentionKernel = AttentionKernel.TUNED
    overlap_tensor: bool = True
    overlap_parts: bool = False
    overlap_gradients: bool = False
    sends: Sends = Sends.EXCHANGED
    schedule: str = "1f1b"
    expert: int = 1
    whole_experts: bool = False
    expert_exchange: ExpertExchange = ExpertExchange.ALL_TO_ALL
    overlap_experts: bool = False
    context: int = 1
    context_exchange: ContextExchange = ContextExchange.RING
    precision: Precision = Precision.BF16
    scaling: Scaling = Scaling.CURRENT
    offload: Offload = Offload.NONE
    blocks: tuple[int, ...] = ()
    tensors: tuple[int, ...] = ()
    pools: tuple[str, ...] = ()
    recompute_modules: tuple[Module, ...] = (Module.CORE_ATTN,)
    shards: int = 0
    sums_once: bool = True

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "data", "micro_batch", "interleave", "expert", "context"):
            value = getattr(self, name)
            if not 1 <= value <= MOST_DEGREE:
                raise UsageError(f"a way of {name} {value}", [f"from 1 to {MOST_DEGREE} can be meant"])

    @property
    def degrees(self) -> tuple[int, ...]:
        """Tensor ranks of a replica of each stage."""
        return self.tensors or (self.tensor,) * self.pipeline

    @property
    def devices(self) -> int:
        """Ranks that it takes."""
        return self.copies * sum(self.degrees)

    @property
    def copies(self) -> int:
        """Ranks with the same weights, if ZeRO divides none: replicas, and those that share the tokens of a sample."""
        return self.data * self.context

    @property
    def expert_parts(self) -> float:
        """Parts into which its expert ranks divide the experts' weights that a tensor rank of one copy would have."""
        return self.expert / self.tensor if self.whole_experts else self.expert

    @property
    def expert_sharers(self) -> int:
        """Ranks that expert ranks are among."""
        return self.copies * (self.tensor if self.whole_experts else 1)

    @property
    def expert_copies(self) -> int:
        """Ranks with the same part of the same experts."""
        return self.expert_sharers // self.expert

    @property
    def expert_shard_ranks(self) -> int:
        """Of these, those that ZeRO divides over; groups of them stand beside one expert rank alone."""
        return self.shards or self.expert_copies

    @property
    def expert_tensor(self) -> int:
        """Tensor ranks that an expert is divided over."""
        return 1 if self.whole_experts else self.tensor

    @property
    def shard_ranks(self) -> int:
        """Copies that ZeRO divides over."""
        return self.shards or self.copies

    @property
    def shard_groups(self) -> int:
        """Of copies with the same slices."""
        return self.copies // self.shard_ranks

    def at(self, stage: int) -> ParallelDegrees:
        """As a rank of that stage sees it: ``tensor`` is the stage's own."""
        return replace(self, tensor=self.tensors[stage], tensors=()) if self.tensors else self

    def tokens(self, shape: Transformer) -> int:
        """Of a rank's pass, before its tensor ranks divide any."""
        return self.micro_batch * shape.seq // self.context

    def micro_batches(self, global_batch: int) -> int:
        """Passes of a rank in a step.

        Raises:
            UsageError: the samples do not divide.
        """
        count, rest = divmod(global_batch, self.data * self.micro_batch)
        if rest or not count:
            raise UsageError(
                f"a global batch of {global_batch} is not divided by {self.data} replicas x {self.micro_batch} samples",
                [f"{global_batch} = {count} x {self.data * self.micro_batch} + {rest}"],
                ["another global batch, micro-batch, or number of replicas"],
            )
        return count

    def chunks(self, layers: int) -> tuple[int, ...]:
        """Blocks of each of the pipeline x interleave chunks; chunk c is on stage c mod pipeline.

        Raises:
            UsageError: there are fewer blocks than chunks, or ``blocks`` is of another network.
        """
        number = self.pipeline * self.interleave
        if self.blocks:
            if len(self.blocks) != number or sum(self.blocks) != layers:
                raise UsageError(
                    f"{len(self.blocks)} chunks of {sum(self.blocks)} blocks for {number} chunks of {layers} blocks"
                )
            return self.blocks
        if layers < number:
            raise UsageError(f"{layers} blocks are fewer than {self.pipeline} stages x {self.interleave} chunks")
        each, more = divmod(layers, number)
        first = (number - more) // 2  # what is left over goes to the middle: embedding and head are at the ends
        return tuple(each + (first <= chunk < first + more) for chunk in range(number))

    def check(self, shape: Transformer) -> None:
        """Raises :class:`UsageError` where the network cannot be divided so."""
        for tensor in sorted(set(self.degrees)):
            for what, size in shape.divided_sizes:
                if size % tensor:
                    raise UsageError(
                        f"{shape.name}: {size} {what} do not divide by --tensor {tensor}",
                        [f"{size} = {size // tensor} x {tensor} + {size % tensor}"],
                    )
            if self.sequence_parallel and self.tokens(shape) % tensor:
                raise UsageError(f"{self.tokens(shape)} tokens do not divide by {tensor} ranks")
        self._check_experts(shape)
        self.check_context(shape)
        self.check_recompute(shape)
        self.check_offload()
        self._check_shards()
        for what, of_stages in (("tensor degrees", self.tensors), ("pools", self.pools)):
            if of_stages and len(of_stages) != self.pipeline:
                raise UsageError(f"{len(of_stages)} {what} for {self.pipeline} stages")
        self.chunks(shape.layers)

    def _check_experts(self, shape: Transformer) -> None:
        if self.expert == 1 and not self.whole_experts:
            return
        among = "ranks of a stage" if self.whole_experts else "copies of the weights"
        for what, number in (("experts", shape.experts), (among, self.expert_sharers)):
            if not number or number % self.expert:
                raise UsageError(
                    f"{shape.name}: {number} {what} do not divide by expert degree {self.expert}",
                    [f"{number} = {number // self.expert} x {self.expert} + {number % self.expert}"],
                    ["another --expert"],
                )
        if max(self.degrees) > 1 and not self.sequence_parallel:
            raise UsageError(
                f"expert degree {self.expert} beside tensor {max(self.degrees)} without sequence parallelism",
                ["tensor ranks would each send the same tokens"],
                ["sequence_parallel, or --tensor 1"],
            )

    def check_context(self, shape: Transformer) -> None:
        """Raises :class:`UsageError` where ranks cannot share the tokens of its samples so."""
        if self.context == 1:
            return
        if shape.seq % (2 * self.context):
            raise UsageError(
                f"{shape.name}: {shape.seq} tokens do not divide by 2 x --context {self.context}",
                ["each rank has two parts of a sample, which are as much work in pairs"],
                ["another --context, or seq=..."],
            )
        refusals = {exchange: self.context_refusal(shape, exchange) for exchange in ContextExchange}
        if refusals[self.context_exchange]:
            raise UsageError(
                f"{shape.name}: context {self.context} by {self.context_exchange.value}",
                [refusals[self.context_exchange]],
                [f"by {exchange.value}" for exchange, refusal in refusals.items() if not refusal],
            )

    def _check_shards(self) -> None:
        if self.shards in (0, self.copies):
            return
        if self.copies % self.shards:
            raise UsageError(
                f"{self.copies} copies of the weights do not divide by --shards {self.shards}",
                [f"{self.copies} = {self.copies // self.shards} x {self.shards} + {self.copies % self.shards}"],
                ["another --shards"],
            )
        if self.expert > 1 or not self.zero:
            beside = f"expert degree {self.expert}" if self.expert > 1 else "ZeRO-0, which divides nothing"
            raise UsageError(f"--shards {self.shards} beside {beside}", [], ["without --shards"])

    def check_recompute(self, shape: Transformer) -> None:
        """Raises :class:`UsageError` where nothing of its blocks can be computed again so."""
        if self.recompute is Recompute.OPERATORS and not shape.fused_attention:
            raise UsageError(
                f"{shape.name}: recomputation by operators beside attention that is not fused",
                ["what it gives is kept, and its scores would be"],
                ["fused_attention=1", "--recompute selective"],
            )

    def check_offload(self) -> None:
        """Raises :class:`UsageError` where that cannot be in the host's memory so."""
        if self.offload is Offload.PARAMETERS and (self.zero < 3 or self.pipeline > 1):
            raise UsageError(
                f"weights in the host's memory beside ZeRO-{self.zero} and {self.pipeline} stages",
                ["each pass gathers the weights of one block: that is ZeRO-3 of one stage"],
                ["--zero 3 --pipeline 1", "--offload optimizer"],
            )
        if self.offload is Offload.ACTIVATIONS and self.recompute is not Recompute.NONE:
            raise UsageError(
                f"{self.recompute.value} recomputation beside activations in the host's memory",
                ["what is kept there need not be computed again"],
                ["--recompute none"],
            )

    def context_refusal(self, shape: Transformer, exchange: ContextExchange) -> str:
        """Why ranks that share a sample's tokens cannot exchange keys so; empty: they can."""
        if not shape.fused_attention:
            return "attention is not fused: fused kernels alone join what parts of a sample give (fused_attention=1)"
        if exchange is ContextExchange.RING and shape.windowed:
            return f"{shape.windowed} blocks have windows of {shape.window} tokens, and a ring passes on all keys"
        parts = self.context * max(self.degrees)
        if exchange is ContextExchange.ALL_TO_ALL and shape.kv_heads % parts:
            ranks = f"{self.context} context x {max(self.degrees)} tensor ranks"
            return f"{shape.kv_heads} key heads do not divide by {ranks}"
        return ""

    def __str__(self) -> str:
        parts = [f"tensor {self._degrees_text()}{' with sequence' * self.sequence_parallel}"]
        if self.context > 1:
            parts.append(f"context {self.context} by {self.context_exchange.value}")
        blocks = f" ({', '.join(map(str, self.blocks))} blocks)" if self.blocks else ""
        parts.append(f"pipeline {self.pipeline}" + (f" x {self.interleave}" if self.interleave > 1 else "") + blocks)
        within = f" within {self.shards}" if self.shard_groups > 1 else ""
        parts.append(f"data {self.data}" + (f" ZeRO-{self.zero}{within}" if self.zero else ""))
        if self.expert > 1:
            parts.append(f"expert {self.expert}{' whole' * self.whole_experts}")
        parts.append(f"micro-batch {self.micro_batch}")
        if self.recompute is not Recompute.NONE:
            others = self.recompute is Recompute.SELECTIVE and self.recompute_modules != (Module.CORE_ATTN,)
            parts.append(f"recompute {' + '.join(self.recompute_modules) if others else self.recompute.value}")
        if self.precision is not Precision.BF16:
            parts.append(self.precision.value)
        if self.offload is not Offload.NONE:
            parts.append(f"{self.offload.value} on the host")
        return ", ".join(parts)

    def _degrees_text(self) -> str:
        """The one degree; or those of neighbouring stages that are alike, with their pool."""
        if not (self.tensors or self.pools):
            return str(self.tensor)
        alike = groupby(zip(self.degrees, self.pools or ("",) * self.pipeline, strict=True))
        counted = ((tensor, pool, len(list(stages))) for (tensor, pool), stages in alike)
        return " | ".join(
            f"{tensor} on {number} {'stage' if number == 1 else 'stages'}{f' of {pool}' if pool else ''}"
            for tensor, pool, number in counted
        )


def _gpt(name: str, hidden: int, heads: int, layers: int, vocab: int = 51200, seq: int = 2048) -> Transformer:
    return Transformer(name, hidden, 4 * hidden, heads, layers, vocab, seq)


MODERN: Mapping[str, Any] = {
    "gated": True,
    "rotary": True,
    "fused_attention": True,
    "dropout": False,
    "attention_dropout": False,
    "parameters_tied": False,
    "qkv_bias": False,
    "out_bias": False,
    "ffn_bias": False,
    "layer_norm": False,
}
"""What Llama's blocks, and most of those since, have in place of GPT's."""


def _llama(name: str, sizes: tuple[int, int, int, int], heads: tuple[int, int], seq: int, **more: Any) -> Transformer:
    """With what Llama's blocks have, or ``more``.

    Args:
        sizes: hidden, ffn, layers, vocab.
        heads: of queries, and of keys and values.
    """
    hidden, ffn, layers, vocab = sizes
    return Transformer(name, hidden, ffn, heads[0], layers, vocab, seq, heads[1], **{**MODERN, **more})


def _deepseek(name: str, sizes: tuple[int, int, int, int], heads: int, **more: Any) -> Transformer:
    """With latent attention: 512 numbers of keys and values, heads of 128 + 64 rotated features, values of 128."""
    latent = {"kv_rank": 512, "rope_size": 64, "head_size": 192, "value_size": 128}
    return _llama(name, sizes, (heads, heads), 4096, **latent, **more)


TRANSFORMERS: Mapping[str, Transformer] = {
    shape.name: shape
    for shape in (
        _gpt("gpt2-345m", 1024, 16, 24, 52256, 1024),
        Transformer("opt-350m", 1024, 4096, 16, 24, 50272, 2048, attention_dropout=False, relu=True),
        _gpt("gpt3-xl", 2048, 16, 24),
        _gpt("gpt-2.6b", 2560, 32, 32, seq=1024),
        _gpt("gpt3-6.7b", 4096, 32, 32),
        _gpt("megatron-22b", 6144, 64, 48),
        _gpt("gpt3-175b", 12288, 96, 96),
        _gpt("megatron-530b", 20480, 128, 105),
        _gpt("megatron-1t", 25600, 160, 128),
        replace(
            _gpt("gpt-neox-20b", 6144, 64, 44, 50432),
            rotary=True, fused_attention=True, dropout=False, parameters_tied=False,
        ),
        _llama("llama2-7b", (4096, 11008, 32, 32000), (32, 32), 4096),
        _llama("llama2-70b", (8192, 28672, 80, 32000), (64, 8), 4096),
        _llama("llama3-8b", (4096, 14336, 32, 128256), (32, 8), 8192, rotary_base=5e5),
        _llama("llama3-70b", (8192, 28672, 80, 128256), (64, 8), 8192, rotary_base=5e5),
        _llama("llama3.1-405b", (16384, 53248, 126, 128256), (128, 8), 8192, rotary_base=5e5),
        _llama("mistral-7b", (4096, 14336, 32, 32000), (32, 8), 8192, window=4096, windowed=32),
        _llama("mixtral-8x7b", (4096, 14336, 32, 32000), (32, 8), 8192, experts=8, top_k=2, rotary_base=1e6),
        _llama("mixtral-8x22b", (6144, 16384, 56, 32000), (48, 8), 8192, experts=8, top_k=2, rotary_base=1e6),
        _llama("qwen2.5-7b", (3584, 18944, 28, 152064), (28, 4), 4096, qkv_bias=True, rotary_base=1e6),
        _llama("qwen2.5-72b", (8192, 29568, 80, 152064), (64, 8), 4096, qkv_bias=True, rotary_base=1e6),
        _llama("qwen3-8b", (4096, 12288, 36, 151936), (32, 8), 4096, head_size=128, qk_norm=True, rotary_base=1e6),
        _llama(
            "qwen3-30b-a3b", (2048, 6144, 48, 151936), (32, 4), 4096, head_size=128, qk_norm=True,
            experts=128, top_k=8, expert_ffn=768, rotary_base=1e6,
        ),
        _llama(
            "qwen3-235b-a22b", (4096, 12288, 94, 151936), (64, 4), 4096, head_size=128, qk_norm=True,
            experts=128, top_k=8, expert_ffn=1536, rotary_base=1e6,
        ),
        _llama(
            "gemma2-9b", (3584, 14336, 42, 256000), (16, 8), 8192, head_size=256, norms=4, parameters_tied=True,
            window=4096, windowed=21,
        ),
        _deepseek(
            "deepseek-v2-lite", (2048, 10944, 26, 102400), 16,
            experts=64, top_k=6, expert_ffn=1408, shared_ffn=2816, first_dense=1,
        ),
        _deepseek(
            "deepseek-v2", (5120, 12288, 59, 102400), 128, query_rank=1536,
            experts=160, top_k=6, expert_ffn=1536, shared_ffn=3072, first_dense=1,
        ),
        _deepseek(
            "deepseek-v3", (7168, 18432, 58, 129280), 128, query_rank=1536,
            experts=256, top_k=8, expert_ffn=2048, shared_ffn=2048, router_bias=True, first_dense=3, mtp=1,
        ),
    )
}  # fmt: skip
"""Brown et al. 2020, Narayanan et al. 2021, Korthikanti et al. 2022, Zhang et al. 2022, Black et al. 2022, Touvron et
al. 2023, Dubey et al. 2024, Jiang et al. 2023 and 2024, Qwen 2024 and 2025, Gemma 2024, DeepSeek-AI 2024: sizes as
their ``config.json`` at huggingface.co give them, sequences as they were trained, 8,192 at most."""


def named_transformer(name: str) -> Transformer:
    """The transformer of that name.

    Raises:
        UnknownNameError: none is known.
    """
    shape = TRANSFORMERS.get(name)
    if shape is None:
        last = name.rpartition("/")[2].lower()
        file = [f"the path of its config.json (hf download {name} config.json)"] if "/" in name else []
        raise UnknownNameError(
            f"no transformer {name!r}",
            [f"known: {', '.join(TRANSFORMERS)}"],
            [*nearest(last, TRANSFORMERS), *(file or ["the path of a config.json, or sizes"])],
        )
    return shape
