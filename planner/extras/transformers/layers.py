"""Kernels and exchanges of one pass through embedding, block and head, on one rank.

T = micro-batch x sequence tokens, h hidden, a heads of d, f ffn, t tensor ranks; n = t with sequence parallelism, or 1.

    block, forward            norm [T/n, h]  (all-gather)  T x (a + 2 a_kv) d / t x h  attention of a / t heads
                              T x h x a d / t  (all-reduce, or reduce-scatter)  dropout and residual [T/n, h]
                              norm  (all-gather)  T x f / t x h  activation  T x h x f / t  (all-reduce ...)  residual
    block, backward           for each product T x n x k two of their own shapes, T x k x n for the input and k x n x T
                              for the weight; what memory bounds moves about 1.5 times the bytes; exchanges mirror those
                              of forward, and with sequence parallelism the input is gathered again
    with ``overlap_tensor``   sums of input gradients run beside the weight's product, the second gathering beside the
                              input's (Korthikanti et al. 2022, section 4.2.2): only what is longer is waited for
    recomputed                a forward of the whole block with its exchanges, or of the core of attention
    embedding, head           cut by vocabulary (Shoeybi et al. 2019, section 3): one all-reduce of the embedding;
                              logits stay cut, the loss sums three numbers a token

Ignored: what products and exchanges that overlap take from one another, data loading, Python between kernels.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from planner.extras.kernels.models import AttentionShape, Kernels
from planner.extras.transformers.cluster import GpuCluster
from planner.extras.transformers.passes import Cost, Layers, Pass, costs
from planner.extras.transformers.shape import Fusion, ParallelDegrees, Recompute, Transformer
from planner.ir.errors import UsageError

PRODUCTS = "products"
ATTENTION = "attention"
MEMORY = "memory-bound"
EXCHANGE = "tensor exchanges"

_STREAMING = {
    "dropout_add": "dropout",
    "norm": "elementwise",
    "norm_backward": "elementwise",
    "activation_backward": "activation",
}
"""Kinds of operators by what a fused kernel of theirs is alike: tables have them as PyTorch or vLLM runs them."""


@functools.lru_cache(maxsize=4096)
def layers_of(shape: Transformer, cluster: GpuCluster, ways: ParallelDegrees) -> Layers:
    """The passes of a rank, from its kernels and exchanges; :func:`layers_for` leaves out what does not change them."""
    rank = _Rank(shape, cluster, ways)
    forward = rank.block_forward()
    backward = rank.block_backward()
    recomputed = {Recompute.NONE: Cost(), Recompute.SELECTIVE: rank.core(), Recompute.FULL: forward}[ways.recompute]
    return Layers(rank.embedding(), Pass(forward, backward + recomputed), rank.head())


def layers_for(shape: Transformer, cluster: GpuCluster, ways: ParallelDegrees) -> Layers:
    """:func:`layers_of` of those ways, or what was measured.

    Raises:
        UsageError: the cluster's passes were measured, and these were not.
    """
    if cluster.timed is not None:
        measured = cluster.timed.of(ways)
        if measured is None:
            raise UsageError(
                f"no time of a layer on {cluster.device} at {ways}",
                [f"measured: tensor {tensor}, micro-batch {size}" for tensor, size in sorted(cluster.timed.layers)][
                    :20
                ],
            )
        return measured
    of_rank = ParallelDegrees(
        tensor=ways.tensor, micro_batch=ways.micro_batch, sequence_parallel=ways.sequence_parallel,
        recompute=ways.recompute, fp32_gradients=ways.fp32_gradients, kernels=ways.kernels,
        overlap_tensor=ways.overlap_tensor,
    )  # fmt: skip
    return layers_of(shape, cluster, of_rank)


@dataclass(frozen=True, slots=True)
class _Rank:
    shape: Transformer
    cluster: GpuCluster
    ways: ParallelDegrees

    @property
    def kernels(self) -> Kernels:
        return self.cluster.kernels

    @property
    def tokens(self) -> int:
        return self.ways.micro_batch * self.shape.seq

    @property
    def own_tokens(self) -> int:
        """Whose norms and residuals this rank computes."""
        return self.tokens // self.ways.tensor if self.ways.sequence_parallel else self.tokens

    @property
    def products(self) -> tuple[tuple[int, int], ...]:
        """(n, k) of the block's four products, column-parallel and row-parallel in turn."""
        s = self.shape
        t = self.ways.tensor
        mixed = s.heads * s.head_size // t
        up = s.ffn // t
        key = 2 * s.kv_heads * s.head_size // t
        return (mixed + key, s.hidden), (s.hidden, mixed), ((2 if s.gated else 1) * up, s.hidden), (s.hidden, up)

    @property
    def attention(self) -> AttentionShape:
        """The heads of this rank."""
        s = self.shape
        tensor = self.ways.tensor
        kv_heads = max(1, s.kv_heads // tensor)
        return AttentionShape(
            self.ways.micro_batch, s.heads // tensor, kv_heads, s.seq, s.seq, s.head_size, causal=True
        )

    def product(self, m: int, n: int, k: int, batch: int = 1, what: str = PRODUCTS) -> Cost:
        return Cost.of(what, self.kernels.gemm(m, n, k, batch))

    def moved(self, numbers: float, num_bytes: float, kind: str = "elementwise") -> Cost:
        """An operator that memory bounds, of so many numbers, at so many bytes each."""
        if self.ways.kernels is Fusion.FUSED:
            kind = _STREAMING.get(kind, kind)
        return Cost.of(MEMORY, self.kernels.memory_bound(numbers * num_bytes, kind=kind))

    def residual(self) -> Cost:
        """Bias, dropout and residual in one kernel; or the residual alone."""
        numbers = self.own_tokens * self.shape.hidden
        if not self.shape.dropout:
            return self.moved(numbers, 6)
        if self.ways.kernels is Fusion.EAGER:
            return self.moved(numbers, 5, "dropout") + self.moved(numbers, 6)
        return self.moved(numbers, 7, "dropout_add")

    def eager(self, scores: float) -> Cost:
        """What separate kernels move more: scale and mask of scores, seven of GELU's eight, heads brought together.

        Their backwards move as many bytes and half.
        """
        if self.ways.kernels is not Fusion.EAGER:
            return Cost()
        wide = self.tokens * self.shape.ffn / self.ways.tensor
        narrow = self.tokens * self.shape.hidden / self.ways.tensor
        return costs([self.moved(scores, 4) * 2, self.moved(wide, 5) * 7, self.moved(narrow, 4) * 4])

    def biases(self, num_bytes: float) -> Cost:
        """Biases of products by kernels of their own: copied to where the product adds itself; sums of gradients."""
        if self.ways.kernels is not Fusion.EAGER:
            return Cost()
        return self.moved(self.tokens * sum(n for n, _ in self.products), num_bytes)

    def added(self, numbers: float) -> Cost:
        """A weight's gradient, added to that of earlier micro-batches: within its product, or by a pass of its own."""
        return (
            Cost() if self.ways.kernels is Fusion.FUSED else self.moved(numbers, 12 if self.ways.fp32_gradients else 6)
        )

    def summed(self, name: str, numbers: float, beside: float = 0.0) -> Cost:
        """An exchange of half-precision numbers among the tensor ranks; of which ``beside`` seconds are hidden."""
        estimate = self.cluster.exchange(name, 2 * numbers, self.ways.tensor)
        if beside and self.ways.overlap_tensor and estimate.seconds:
            estimate = estimate * (max(0.0, estimate.seconds - beside) / estimate.seconds)
        return Cost.of(EXCHANGE, estimate)

    def core(self) -> Cost:
        """Scores, softmax, dropout and context; or one fused kernel."""
        s = self.shape
        b = self.ways.micro_batch
        heads = s.heads // self.ways.tensor
        if s.fused_attention:
            return Cost.of(ATTENTION, self.kernels.attention(self.attention, fused=True))
        scores = b * heads * s.seq**2
        parts = [
            self.product(s.seq, s.seq, s.head_size, b * heads, ATTENTION),
            self.moved(scores, 4, "softmax"),  # scaled and masked in the same kernel
            self.product(s.seq, s.head_size, s.seq, b * heads, ATTENTION),
        ]
        return costs([*parts, self.moved(scores * s.drops_scores, 5, "dropout")])

    def core_backward(self) -> Cost:
        s = self.shape
        b = self.ways.micro_batch
        heads = s.heads // self.ways.tensor
        if s.fused_attention:
            return Cost.of(ATTENTION, self.kernels.attention_backward(self.attention, fused=True))
        scores = b * heads * s.seq**2
        square = self.product(s.seq, s.seq, s.head_size, b * heads, ATTENTION)  # of probabilities
        thin = self.product(s.seq, s.head_size, s.seq, b * heads, ATTENTION)  # of values, queries and keys
        softmax = self.moved(scores, 6, "softmax_backward")
        dropout = self.moved(scores * s.drops_scores, 5, "dropout_backward")
        return costs([square, thin * 3, softmax, dropout])

    def block_forward(self) -> Cost:
        s = self.shape
        tokens = self.tokens
        own = self.own_tokens
        products = [self.product(tokens, n, k) for n, k in self.products]
        norm = self.moved(own * s.hidden, 4, "norm")
        activation = self.moved(tokens * s.ffn / self.ways.tensor, 6 if s.gated else 4, "activation")
        if self.ways.sequence_parallel:
            whole = tokens * s.hidden
            exchanges = (self.summed("all_gather", whole) + self.summed("reduce_scatter", whole)) * 2
        else:
            exchanges = self.summed("all_reduce", tokens * s.hidden) * 2
        more = self.eager(self.ways.micro_batch * s.heads / self.ways.tensor * s.seq**2)
        parts = [*products, norm * 2, self.residual() * 2, activation, self.rotary(), self.core(), more, exchanges]
        return costs([*parts, self.biases(4)])  # written, and read by the product

    def rotary(self) -> Cost:
        s = self.shape
        return self.moved(s.rotary * self.tokens * (s.heads + s.kv_heads) * s.head_size / self.ways.tensor, 4, "rope")

    def block_backward(self) -> Cost:
        s = self.shape
        tokens = self.tokens
        own = self.own_tokens
        parts = [self.core_backward()]
        for index, (n, k) in enumerate(self.products):
            input_product = self.product(tokens, k, n)
            weight_product = self.product(k, n, tokens)
            parts += [input_product, weight_product, self.added(n * k)]
            whole = tokens * s.hidden
            if index % 2:  # row-parallel: its forward ends in a sum
                parts.append(self.summed("all_gather", whole) if self.ways.sequence_parallel else Cost())
            elif self.ways.sequence_parallel:
                parts.append(self.summed("all_gather", whole, input_product.seconds))
                parts.append(self.summed("reduce_scatter", whole, weight_product.seconds))
            else:
                parts.append(self.summed("all_reduce", whole, weight_product.seconds))
        parts.append(self.moved(own * s.hidden, 6, "norm_backward") * 2 + self.moved(own * s.hidden, 6) * 2)
        parts.append(self.moved(s.dropout * own * s.hidden, 5, "dropout_backward") * 2)
        parts.append(self.moved(tokens * s.ffn / self.ways.tensor, 10 if s.gated else 6, "activation_backward"))
        more = self.eager(self.ways.micro_batch * s.heads / self.ways.tensor * s.seq**2)
        return costs([*parts, self.rotary(), more * 1.5, self.biases(2)])

    def embedding(self) -> Pass:
        s = self.shape
        tokens = self.tokens
        looked_up = self.moved(tokens * s.hidden, 4, "embedding") + self.residual()
        exchange = self.summed("reduce_scatter" if self.ways.sequence_parallel else "all_reduce", tokens * s.hidden)
        backward = self.moved(tokens * s.hidden, 2 + 8) + self.moved(self.own_tokens * s.hidden * s.dropout, 5)
        gathered = self.summed("all_gather", tokens * s.hidden) if self.ways.sequence_parallel else Cost()
        return Pass(looked_up + exchange, backward + gathered)

    def head(self) -> Pass:
        s = self.shape
        tokens = self.tokens
        width = -(-s.vocab // self.ways.tensor)
        whole = tokens * s.hidden
        gathered = self.summed("all_gather", whole) if self.ways.sequence_parallel else Cost()
        loss = self.moved(tokens * width, 2 + 4 + 4 + 8 + 8)  # to float32, largest, shifted, exponentials, their sum
        norm = self.moved(self.own_tokens * s.hidden, 4, "norm")
        small = Cost.of(EXCHANGE, self.cluster.exchange("all_reduce", 4 * tokens, self.ways.tensor), 3)
        forward = costs([norm, gathered, self.product(tokens, width, s.hidden), loss, small])
        weight = self.product(s.hidden, width, tokens)
        backward = [self.moved(tokens * width, 8 + 6), self.product(tokens, s.hidden, width), weight]
        backward += [self.added(s.hidden * width), self.moved(self.own_tokens * s.hidden, 8)]
        name = "reduce_scatter" if self.ways.sequence_parallel else "all_reduce"
        backward.append(self.summed(name, whole, weight.seconds))
        return Pass(forward, costs(backward))
