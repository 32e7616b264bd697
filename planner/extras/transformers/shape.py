"""A transformer by its sizes, and a way to divide its training step over devices."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import groupby

from planner.ir.errors import UnknownNameError, UsageError

MOST_DEGREE = 2**20
"""Of ranks, stages, replicas, samples and chunks; no cluster has as many devices."""


@dataclass(frozen=True, slots=True)
class Transformer:
    """A decoder of equal blocks between an embedding and a head that is tied to it.

    Attributes:
        ffn: width of the hidden layer of the feed-forward part; with ``gated`` there are two such products.
        kv_heads: heads of keys and values; fewer than ``heads`` where queries share them.
        fused_attention: scores never reach memory (FlashAttention); else they are written, masked, dropped and read.
        dropout: whether activations are dropped (masks of one byte are kept for backward).
        attention_dropout: whether attention's probabilities are dropped too, where ``dropout`` is.
        relu: the feed-forward part's activation gives all that its backward needs; else its input is kept as well.
        parameters_tied: whether the head uses the embedding's weights.
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

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "head_size", self.head_size or self.hidden // self.heads)

    @property
    def drops_scores(self) -> bool:
        """Whether attention's probabilities are dropped."""
        return self.dropout and self.attention_dropout

    @property
    def block_parameters(self) -> int:
        """Weights of one block: products and their biases, two norms."""
        attention = self.head_size * (2 * self.heads + 2 * self.kv_heads) * self.hidden
        return attention + (3 if self.gated else 2) * self.hidden * self.ffn + 9 * self.hidden + 2 * self.ffn

    @property
    def embedding_parameters(self) -> int:
        """Weights of the embedding of tokens, and of places where they are learnt."""
        return (self.vocab + (0 if self.rotary else self.seq)) * self.hidden

    @property
    def parameters(self) -> int:
        """All weights."""
        head = 0 if self.parameters_tied else self.vocab * self.hidden
        return self.layers * self.block_parameters + self.embedding_parameters + head

    def step_flop(self, global_batch: int) -> float:
        """Floating-point operations of a step without recomputation (Narayanan et al. 2021, equation 3, in general)."""
        products = self.block_parameters - 9 * self.hidden - 2 * self.ffn
        attention = 2 * self.heads * self.head_size * self.seq
        per_token = 2 * (self.layers * (products + attention) + self.vocab * self.hidden)
        return 3.0 * per_token * global_batch * self.seq


class Recompute(StrEnum):
    """What backward computes again: nothing, the core of attention, or the whole block."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


class Sends(StrEnum):
    """What a message between stages keeps busy.

    ``OVERLAPPED``: nobody. ``EXCHANGED``: both ends, one exchange in both directions at a time (Megatron-LM; or streams
    that share one NCCL communicator, which runs its operations in turn).  ``BLOCKING``: both ends, each direction by
    itself (DeepSpeed).
    """

    OVERLAPPED = "overlapped"
    EXCHANGED = "exchanged"
    BLOCKING = "blocking"


class Fusion(StrEnum):
    """Which operators share a kernel.

    ``FUSED``: bias, dropout and residual; scale, mask and softmax; norms stream; products add to the gradients that are
    there (Megatron-LM since 2022).  ``KERNELS``: the same kernels as PyTorch has them.  ``EAGER``: each operator of the
    model's text is a kernel, those of GELU too (transformers' GPT-2).
    """

    FUSED = "fused"
    KERNELS = "kernels"
    EAGER = "eager"


@dataclass(frozen=True, slots=True)
class ParallelDegrees:
    """How a step is divided.

    Attributes:
        tensor: ranks that share a block; heads and channels are cut, the vocabulary of embedding and head too.
        sequence_parallel: what the tensor ranks would compute alike is divided by tokens.
        interleave: chunks of blocks on each stage.
        micro_batch: samples of a rank's pass.
        zero: what data-parallel ranks divide: 0 nothing, 1 optimiser state, 2 gradients too, 3 weights too.
        fp32_gradients: gradients are summed in float32.
        kernels: how the operators between products are written.
        overlap_tensor: tensor-parallel sums of backward run beside the products of weight gradients.
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
    overlap_tensor: bool = True
    overlap_gradients: bool = False
    sends: Sends = Sends.EXCHANGED
    schedule: str = "1f1b"
    blocks: tuple[int, ...] = ()
    tensors: tuple[int, ...] = ()
    pools: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "data", "micro_batch", "interleave"):
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
        return self.data * sum(self.degrees)

    def at(self, stage: int) -> ParallelDegrees:
        """As a rank of that stage sees it: ``tensor`` is the stage's own."""
        return replace(self, tensor=self.tensors[stage], tensors=()) if self.tensors else self

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
            for what, size in (("heads", shape.heads), ("key heads", shape.kv_heads), ("ffn", shape.ffn)):
                if size % tensor:
                    raise UsageError(
                        f"{shape.name}: {size} {what} do not divide by --tensor {tensor}",
                        [f"{size} = {size // tensor} x {tensor} + {size % tensor}"],
                    )
            if self.sequence_parallel and shape.seq * self.micro_batch % tensor:
                raise UsageError(f"{shape.seq * self.micro_batch} tokens do not divide by {tensor} ranks")
        for what, of_stages in (("tensor degrees", self.tensors), ("pools", self.pools)):
            if of_stages and len(of_stages) != self.pipeline:
                raise UsageError(f"{len(of_stages)} {what} for {self.pipeline} stages")
        self.chunks(shape.layers)

    def __str__(self) -> str:
        parts = [f"tensor {self._degrees_text()}{' with sequence' * self.sequence_parallel}"]
        blocks = f" ({', '.join(map(str, self.blocks))} blocks)" if self.blocks else ""
        parts.append(f"pipeline {self.pipeline}" + (f" x {self.interleave}" if self.interleave > 1 else "") + blocks)
        parts.append(f"data {self.data}" + (f" ZeRO-{self.zero}" if self.zero else ""))
        parts.append(f"micro-batch {self.micro_batch}")
        if self.recompute is not Recompute.NONE:
            parts.append(f"recompute {self.recompute.value}")
        return ", ".join(parts)

    def _degrees_text(self) -> str:
        """The one degree; or those of neighbouring stages that are alike, with their pool."""
        if not (self.tensors or self.pools):
            return str(self.tensor)
        alike = groupby(zip(self.degrees, self.pools or ("",) * self.pipeline, strict=True))
        return " | ".join(
            f"{tensor} on {len(list(stages))} of {pool}" if pool else f"{tensor} on {len(list(stages))}"
            for (tensor, pool), stages in alike
        )


def _gpt(name: str, hidden: int, heads: int, layers: int, vocab: int = 51200, seq: int = 2048) -> Transformer:
    return Transformer(name, hidden, 4 * hidden, heads, layers, vocab, seq)


def _llama(shape: Transformer) -> Transformer:
    """``shape`` with what Llama's blocks have in place of GPT's."""
    modern = {"gated": True, "rotary": True, "fused_attention": True, "dropout": False, "parameters_tied": False}
    return replace(shape, **modern)  # type: ignore[arg-type]  # all are flags


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
        _llama(Transformer("llama2-7b", 4096, 11008, 32, 32, 32000, 4096, 32)),
        _llama(Transformer("llama2-70b", 8192, 28672, 64, 80, 32000, 4096, 8)),
        _llama(Transformer("llama3-8b", 4096, 14336, 32, 32, 128256, 8192, 8)),
        _llama(Transformer("llama3-70b", 8192, 28672, 64, 80, 128256, 8192, 8)),
    )
}
"""Brown et al. 2020, Narayanan et al. 2021, Korthikanti et al. 2022, Zhang et al. 2022, Touvron et al. 2023,
Dubey et al. 2024."""


def named_transformer(name: str) -> Transformer:
    """The transformer of that name.

    Raises:
        UnknownNameError: none is known.
    """
    shape = TRANSFORMERS.get(name)
    if shape is None:
        near = difflib.get_close_matches(name, TRANSFORMERS, n=1)
        raise UnknownNameError(
            f"no transformer {name!r}",
            [f"known: {', '.join(TRANSFORMERS)}"],
            [f"{name} (did you mean that?)" for name in near],
        )
    return shape
