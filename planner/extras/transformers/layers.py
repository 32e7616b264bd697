"""Kernels and exchanges of one pass through embedding, block and head, on one rank.

T = micro-batch x sequence / context tokens, h hidden, a heads of d, f ffn, t tensor ranks; n = t with sequence
parallelism, or 1.

    block, forward            norm [T/n, h]  (all-gather)  T x (a + 2 a_kv) d / t x h  attention of a / t heads
                              T x h x a d / t  (all-reduce, or reduce-scatter)  dropout and residual [T/n, h]
                              norm  (all-gather)  T x f / t x h  activation  T x h x f / t  (all-reduce ...)  residual
    latent attention          products down to the latent numbers are of T/n tokens, whole on each rank; those numbers
                              are gathered in place of hidden features
    experts                   E, of which k take a token: E products of T k / E tokens each, in one kernel.  Balanced
                              routing is assumed; tokens are copied to where their experts are, and what those give is
                              summed back
    e expert ranks            E / e experts on a rank, with the tokens of e ranks; two exchanges of T k / n rows
                              each way (:mod:`planner.extras.transformers.dispatch`), waited for, or beside another
                              micro-batch
    whole experts             of T k / t rows each in place of T k rows of f / t; tensor ranks gather and sum for shared
                              experts alone
    c context ranks           T is 1 / c of the tokens; attention, of S tokens a sample:
                              ring: S / c queries by as many keys, causal, then c - 1 times by S / (2 c) keys, each
                              after a hop of keys and values that runs beside the part before it; sums of parts in
                              float32; backward: gradients of keys and values go along, and one hop further, home
                              all-to-all: a / c heads of S tokens; queries, keys and values there, the result back
                              all-gather: S / c queries by S / 2 keys, the mean, which are gathered first
    block, backward           for each product T x n x k two of their own shapes, T x k x n for the input and k x n x T
                              for the weight; what memory bounds moves about 1.5 times the bytes; exchanges mirror those
                              of forward, and with sequence parallelism the input is gathered again
    with ``overlap_tensor``   sums of input gradients run beside the weight's product, the second gathering beside the
                              input's (Korthikanti et al. 2022, section 4.2.2): only what is longer is waited for
    with ``overlap_parts``    a gathering runs beside the product of what is gathered, a scattering beside that whose
                              results are summed, but for one part of t; what smaller products lose is not counted
    products in 8 bits        what they multiply is cast and transposed (:data:`CASTS`), by the norm that makes it or by
                              kernels of their own; what is gathered is cast first, and sent in 8 bits; sums are not
    recomputed                a forward of the whole block with its exchanges, of some modules with theirs, or of the
                              operators whose results are not kept (:mod:`planner.extras.transformers.recomputation`)
    embedding, head           cut by vocabulary (Shoeybi et al. 2019, section 3): one all-reduce of the embedding;
                              logits stay cut, the loss sums three numbers a token
    unlike blocks             dense ones that come first count with the embedding, those of ``mtp`` with the head

A pass takes no less than its host needs to launch its kernels
(:func:`planner.extras.transformers.software.launch_s`); an exchange beside products takes a part of its time from them
(:meth:`planner.extras.transformers.cluster.GpuCluster.waited_s`).
Ignored: data loading; a second residual stream at once (GPT-NeoX: its blocks are priced as if one half came after the
other).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np

from planner.extras.kernels.estimates import Estimate
from planner.extras.kernels.models import AttentionShape, Kernels
from planner.extras.transformers.cluster import GpuCluster
from planner.extras.transformers.dispatch import ExpertRoute
from planner.extras.transformers.host import COPIES, known_host
from planner.extras.transformers.memory import block_bytes
from planner.extras.transformers.passes import Cost, Layers, Pass, costs
from planner.extras.transformers.recomputation import counted_products, freed_bytes, own_modules
from planner.extras.transformers.shape import (
    ContextExchange,
    Fusion,
    Module,
    Offload,
    ParallelDegrees,
    Precision,
    Product,
    ProductCut,
    Recompute,
    Scaling,
    Transformer,
)
from planner.extras.transformers.software import launch_s
from planner.ir.errors import UsageError

PRODUCTS = "products"
ATTENTION = "attention"
MEMORY = "memory-bound"
EXCHANGE = "tensor exchanges"
EXPERT_EXCHANGE = "expert exchanges"
CONTEXT_EXCHANGE = "context exchanges"


@dataclass(frozen=True, slots=True)
class CastBytes:
    """What is moved, in bytes a number, to make numbers of 8 bits of those in half precision.

    Attributes:
        made: by kernels of their own: read, written as it is and transposed.
        made_sent: the same of what is gathered then, and transposed behind that.
        normed, normed_sent: as those, of what a norm makes, beyond what it moves itself.
        turned: to transpose what was gathered.
        gathered: that is sent of a gradient, which is multiplied by weights and by inputs.
    """

    made: int
    made_sent: int
    normed: int
    normed_sent: int
    turned: int
    gathered: int


CASTS: Mapping[Scaling, CastBytes] = {
    Scaling.CURRENT: CastBytes(2 + 2 + 1 + 1, 2 + 2 + 1, 2 + 1 + 1, 2 + 1, turned=1 + 1, gathered=1),
    Scaling.DELAYED: CastBytes(2 + 1 + 1, 2 + 1, 1 + 1, 0, turned=1 + 1, gathered=1),
    Scaling.MICRO: CastBytes(2 + 1 + 1, 2 + 1 + 1, 2 + 1 + 1, 2 + 1 + 1, turned=0, gathered=1 + 1),
}
"""As Transformer Engine does it (2.20; csrc/extensions/normalization.cpp, module/base.py).  A tensor is read for its
largest number, but for a norm's result, whose norm finds it; with delayed scaling the kernel that casts notes it, and a
norm writes 8 bits.  Blocks of 32 are cast along both dims, and both are gathered.  Activations cast nothing: they are
Megatron-LM's own kernels."""

CAST_KERNELS = 3
"""Of each expert's tokens that are cast: their largest number, what it says of the scale, the cast."""

IN_TURN = 10 / 66
"""Of what the host takes of a kernel with the Python around it (66 us of GPT-2 small in PyTorch, docs/gpu.md), what it
takes of one more that the same call starts (10 us beside H100, Liger)."""

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
    block = rank.block()
    embedding = rank.embedding()
    head = rank.head()
    if shape.first_dense:
        embedding = embedding + _Rank(shape.dense, cluster, ways).block() * shape.first_dense
    if shape.mtp:
        head = head + (rank.joined() + block + head) * shape.mtp
    by_host_s = launch_s(ways)
    return Layers(embedding.launched(by_host_s), block.launched(by_host_s), head.launched(by_host_s))


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
        recompute=ways.recompute, fp32_gradients=ways.fp32_gradients, kernels=ways.kernels, launch=ways.launch,
        attention=ways.attention, overlap_tensor=ways.overlap_tensor, expert=ways.expert,
        whole_experts=ways.whole_experts, expert_exchange=ways.expert_exchange,
        overlap_experts=ways.overlap_experts, context=ways.context,
        context_exchange=ways.context_exchange, precision=ways.precision, offload=ways.offload,
        scaling=ways.scaling, overlap_parts=ways.overlap_parts, recompute_modules=ways.recompute_modules,
    )  # fmt: skip
    return layers_of(shape, cluster, of_rank)


@dataclass(frozen=True, slots=True)
class ModuleSet:
    """Modules that are computed again, and what both passes of an alike block then take."""

    modules: tuple[Module, ...]
    block_s: float


def useful_sets(
    shape: Transformer, cluster: GpuCluster, ways: ParallelDegrees, sets: Sequence[tuple[Module, ...]]
) -> list[ModuleSet]:
    """Of sets of modules that are computed again those that others do not make useless, by the time of a block.

    A set is useless where another frees as much, and takes no longer and no more kernels, of alike blocks and of dense
    ones beside them.
    """
    by_host_s = launch_s(ways)
    marks = np.zeros((len(sets), 0))
    block_s = np.zeros(len(sets))
    for kind in [shape.dense, shape] if shape.first_dense else [shape]:
        rank = _Rank(kind, cluster, replace(ways, recompute_modules=tuple(Module)))
        of_module = {}
        for module in rank.modules:
            work = rank.module(module)
            of_module[module] = work.seconds, work.launches, -freed_bytes(kind, ways, module, cluster.width)
        has = np.array([[module in names for module in of_module] for names in sets], float)
        of_sets = has @ np.array(list(of_module.values()))
        once = rank.block_once()
        backward = once.backward
        backward_s = np.maximum(backward.seconds + of_sets[:, 0], by_host_s * (backward.launches + of_sets[:, 1]))
        block_s = backward_s + once.forward.launched(by_host_s).seconds
        marks = np.hstack([marks, of_sets])
    no_worse = (marks[:, None] <= marks[None]).all(axis=2)
    earlier = np.arange(len(sets))
    beside = no_worse & ~(no_worse.T & (earlier[:, None] >= earlier))  # of equal ones the first is kept
    useful: list[int] = np.flatnonzero(~beside.any(axis=0)).tolist()
    return sorted((ModuleSet(sets[one], block_s[one]) for one in useful), key=attrgetter("block_s"))


@dataclass(frozen=True, slots=True)
class _Half:
    """Attention, or the feed-forward part, as its tensor ranks exchange it.

    Attributes:
        entering: features of a token that are gathered before its column-parallel products, and whose gradients are
            summed.
        leaving: features of a token that are summed behind its row-parallel products.
        is_dense: whether all tokens meet all of its weights: those that enter come from a norm, and no expert is asked.
    """

    products: tuple[Product, ...]
    entering: int
    leaving: int
    is_dense: bool


_NO_PRODUCTS: Mapping[ProductCut, float] = dict.fromkeys(ProductCut, 0.0)
"""Beside which nothing is exchanged."""


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
        return self.ways.tokens(self.shape)

    @property
    def own_tokens(self) -> int:
        """Whose norms and residuals this rank computes."""
        return self.tokens // self.ways.tensor if self.ways.sequence_parallel else self.tokens

    @property
    def halves(self) -> tuple[_Half, _Half]:
        """Of a block."""
        s = self.shape
        entering = s.hidden
        if s.kv_rank:
            entering = s.latent + (0 if s.query_rank else s.hidden)
        attention = _Half(s.attention_products, entering, s.hidden, is_dense=True)
        rows = 1
        if s.experts and self.ways.whole_experts:  # tensor ranks have tokens and experts of their own
            rows = 1 if s.shared_ffn else 0
        elif s.experts and self.ways.expert > 1:  # tokens come by all-to-all, a row for each of their experts
            rows = s.top_k + (1 if s.shared_ffn else 0)
        exchanged = rows * s.hidden
        return attention, _Half(s.feed_forward_products, exchanged, exchanged, is_dense=not s.experts)

    @property
    def routed_tokens(self) -> int:
        """Tokens of the ranks that share an expert, before each is copied for all of its experts."""
        return self.tokens * self.ways.expert_tensor // self.ways.tensor

    @property
    def attention(self) -> AttentionShape:
        """The heads of this rank; of unlike keys and values the mean size."""
        s = self.shape
        tensor = self.ways.tensor
        kv_heads = max(1, s.kv_heads // tensor)
        size = (s.head_size + s.value_size) // 2
        whole = AttentionShape(self.ways.micro_batch, s.heads // tensor, kv_heads, s.seq, s.seq, size, causal=True)
        parts = self.ways.context
        if parts == 1:
            return whole
        if self.ways.context_exchange is ContextExchange.ALL_TO_ALL:
            return whole._replace(heads=whole.heads // parts, kv_heads=whole.kv_heads // parts)
        if self.ways.context_exchange is ContextExchange.ALL_GATHER:
            return whole._replace(queries=s.seq // parts, keys=s.seq // 2, causal=False)
        return whole._replace(queries=s.seq // parts, keys=s.seq // parts)

    def product(self, m: int, n: int, k: int, batch: int = 1, what: str = PRODUCTS) -> Cost:
        return Cost.of(what, self.kernels.gemm(m, n, k, batch))

    def own_experts(self, product: Product) -> int:
        """Of the product's experts those on this rank; 1, where it is no product of experts."""
        return max(1, product.experts // self.ways.expert)

    def rows(self, product: Product) -> int:
        """Tokens of one of this rank's matrices."""
        if product.experts:
            return -(-self.routed_tokens * product.taken // self.own_experts(product))
        return self.own_tokens if product.cut is ProductCut.WHOLE else self.tokens

    def features(self, product: Product) -> tuple[int, int]:
        """(outputs, inputs) of this rank."""
        tensor = self.ways.expert_tensor if product.experts else self.ways.tensor
        outputs = product.outputs // (tensor if product.cut is ProductCut.COLUMN else 1)
        return outputs, product.inputs // (tensor if product.cut is ProductCut.ROW else 1)

    def multiplied(self, product: Product, outputs: int, inputs: int) -> Cost:
        """Rows of ``inputs`` numbers by matrices [outputs, inputs], those of several experts in one kernel."""
        rows = self.rows(product)
        if product.experts:
            return self.grouped(product, rows, outputs, inputs, 1 + CAST_KERNELS * self.is_narrow(product))
        return Cost.of(PRODUCTS, self.kernels_of(product).gemm(rows, outputs, inputs))

    def weight_gradient(self, product: Product) -> Cost:
        """Of the product's matrices on this rank."""
        outputs, inputs = self.features(product)
        rows = self.rows(product)
        if product.experts:
            return self.grouped(product, inputs, outputs, rows, 1)
        return Cost.of(PRODUCTS, self.kernels_of(product).gemm(inputs, outputs, rows))

    def grouped(self, product: Product, m: int, n: int, k: int, launches: int) -> Cost:
        """A product of this rank's experts, which Transformer Engine starts in turn, with so many kernels of each."""
        experts = self.own_experts(product)
        cost = Cost.of(PRODUCTS, self.kernels_of(product).grouped(m, n, k, experts))
        if self.ways.kernels is not Fusion.FUSED:
            return cost
        return replace(cost, launches=1 + IN_TURN * (launches * experts - 1))

    def is_narrow(self, product: Product) -> bool:
        """Whether it is computed in 8 bits."""
        return self.ways.precision is Precision.FP8 and not product.weighs

    def kernels_of(self, product: Product) -> Kernels:
        """What it and its gradients take."""
        return self.cluster.eight_bit if self.is_narrow(product) else self.kernels

    def is_gathered(self, half: _Half) -> bool:
        """Whether what enters and what leaves it is sent in 8 bits, of a part of the tokens from each tensor rank."""
        cut = self.ways.sequence_parallel and self.ways.tensor > 1
        return cut and half.is_dense and self.ways.precision is Precision.FP8

    def narrowed(self, half: _Half, product: Product, features: int, gathered: ProductCut) -> Cost:
        """So many features of each of a product's tokens made numbers of 8 bits; weights are cast once a step.

        Args:
            gathered: of which products they are gathered: inputs of column-, gradients of row-parallel ones.
        """
        if not self.is_narrow(product):
            return Cost()
        casts = CASTS[self.ways.scaling]
        numbers = self.own_experts(product) * self.rows(product) * features
        is_normed = half.is_dense and gathered is product.cut is ProductCut.COLUMN and self.ways.kernels is Fusion.FUSED
        if product.cut is gathered and self.is_gathered(half):
            own = self.moved(numbers / self.ways.tensor, casts.normed_sent if is_normed else casts.made_sent)
            return own + self.moved(numbers, casts.turned)
        return self.moved(numbers, casts.normed if is_normed else casts.made)

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

    def normed(self, num_bytes: float, kind: str) -> Cost:
        """The norms of a block's hidden features; of queries and keys, and of latent numbers, where they are normed."""
        s = self.shape
        if self.ways.kernels is Fusion.EAGER and not s.layer_norm:
            kind = f"eager_{kind}"
        norm = self.moved(self.own_tokens * s.hidden, num_bytes, kind) * s.norms
        heads = s.qk_norm * self.tokens * (s.heads + s.kv_heads) * s.head_size / self.ways.tensor
        latent = self.own_tokens * (s.query_rank + s.kv_rank)
        return costs([norm, self.moved(heads, num_bytes, kind), self.moved(latent, num_bytes, kind)])

    def eager(self, scores: float) -> Cost:
        """What separate kernels move more: seven of GELU's eight, or a gate's product apart; what attention adds.

        Around attention that is not fused these are scale and mask of scores, and heads brought together.
        Their backwards move as many bytes and half.
        """
        s = self.shape
        if self.ways.kernels is not Fusion.EAGER:
            return Cost()
        wide = self.tokens * s.taken_ffn / self.ways.tensor
        activation = self.moved(wide, 4) if s.gated else self.moved(wide, 5) * 7
        if s.fused_attention:
            return activation
        narrow = self.tokens * s.hidden / self.ways.tensor
        return costs([self.moved(scores, 4) * 2, activation, self.moved(narrow, 4) * 4])

    def biases(self, num_bytes: float) -> Cost:
        """Biases of products by kernels of their own: copied to where the product adds itself; sums of gradients."""
        if self.ways.kernels is not Fusion.EAGER:
            return Cost()
        biased = [each for half in self.halves for each in half.products if each.bias]
        return self.moved(self.tokens * sum(self.features(each)[0] for each in biased), num_bytes)

    def added(self, numbers: float) -> Cost:
        """A weight's gradient, added to that of earlier micro-batches: within its product, or by a pass of its own."""
        return (
            Cost() if self.ways.kernels is Fusion.FUSED else self.moved(numbers, 12 if self.ways.fp32_gradients else 6)
        )

    def summed(self, name: str, numbers: float, beside_s: float = 0.0, num_bytes: int = 2) -> Cost:
        """An exchange among the tensor ranks, beside products of so many seconds, where they overlap at all."""
        estimate = self.cluster.exchange(name, num_bytes * numbers, self.ways.tensor)
        if beside_s and self.ways.overlap_tensor and estimate.seconds:
            waited_s = self.cluster.waited_s(estimate, beside_s, self.ways.tensor)
            estimate = estimate * (waited_s / estimate.seconds)
        return Cost.of(EXCHANGE, estimate)

    def in_parts(self, half: _Half, product_s: float) -> float:
        """Seconds of a product that parts of what it reads or gives are exchanged beside: of all but its own part."""
        return product_s * (1 - 1 / self.ways.tensor) * (half.is_dense and self.ways.overlap_parts)

    def core(self) -> Cost:
        """Scores, softmax, dropout and context; or one fused kernel."""
        s = self.shape
        b = self.ways.micro_batch
        heads = s.heads // self.ways.tensor
        if s.fused_attention:
            return self.fused_core(functools.partial(self.kernels.attention, fused=True))
        scores = b * heads * s.seq**2
        parts = [
            self.product(s.seq, s.seq, s.head_size, b * heads, ATTENTION),
            self.moved(scores, 4, "softmax"),  # scaled and masked in the same kernel
            self.product(s.seq, s.value_size, s.seq, b * heads, ATTENTION),
        ]
        return costs([*parts, self.moved(scores * s.drops_scores, 5, "dropout")])

    def core_backward(self) -> Cost:
        s = self.shape
        b = self.ways.micro_batch
        heads = s.heads // self.ways.tensor
        if s.fused_attention:
            return self.fused_core(functools.partial(self.kernels.attention_backward, fused=True), backward=True)
        scores = b * heads * s.seq**2
        square = self.product(s.seq, s.seq, s.value_size, b * heads, ATTENTION)  # of probabilities
        of_values = self.product(s.seq, s.value_size, s.seq, b * heads, ATTENTION)
        thin = self.product(s.seq, s.head_size, s.seq, b * heads, ATTENTION)  # of queries and keys
        softmax = self.moved(scores, 6, "softmax_backward")
        dropout = self.moved(scores * s.drops_scores, 5, "dropout_backward")
        return costs([square, of_values, thin * 2, softmax, dropout])

    def fused_core(self, kernel: Callable[..., Estimate], *, backward: bool = False) -> Cost:
        """The mean of blocks in which a token sees all tokens before it, and of those in which it sees a window.

        With what ranks that share the tokens of samples exchange for it.
        """
        kernel = functools.partial(kernel, by=self.ways.attention)
        s = self.shape
        every = Cost.of(ATTENTION, kernel(self.attention))
        if self.ways.context > 1 and self.ways.context_exchange is ContextExchange.RING:
            return every + self.ring(kernel, backward=backward)
        exchanged = self.context_exchanged(backward=backward)
        if not s.windowed or s.window >= s.seq:
            return every + exchanged
        near_keys = round(s.window - s.window**2 / (2 * s.seq))  # the mean: early tokens see fewer
        near = Cost.of(ATTENTION, kernel(self.attention._replace(keys=near_keys, causal=False)))
        share = s.windowed / s.layers
        return every * (1 - share) + near * share + exchanged

    def context_exchanged(self, *, backward: bool) -> Cost:
        """What ranks that share the tokens of samples send one another around attention, of which nothing is hidden."""
        s = self.shape
        tensor = self.ways.tensor
        if self.ways.context == 1:
            return Cost()
        keys = s.kv_heads * s.head_size
        values = s.kv_heads * s.value_size
        of_token = 2 * self.tokens / tensor
        if self.ways.context_exchange is ContextExchange.ALL_GATHER:
            sent = [("reduce_scatter" if backward else "all_gather", self.ways.context * of_token * (keys + values))]
        else:
            features = (s.heads * s.head_size, keys, values, s.heads * s.value_size)
            sent = [("all_to_all", of_token * each) for each in features]
        exchanges = (self.cluster.exchange(name, num_bytes, self.ways.context, tensor) for name, num_bytes in sent)
        return costs(Cost.of(CONTEXT_EXCHANGE, exchange) for exchange in exchanges)

    def ring(self, kernel: Callable[[AttentionShape], Estimate], *, backward: bool) -> Cost:
        """Of a ring, attention to the keys of other ranks, sums of the parts, and what is waited for of the hops.

        A hop runs beside attention to the keys that are there.  All queries see half of another rank's keys, or half of
        the queries all of them.
        """
        s = self.shape
        of_rank = self.tokens / self.ways.tensor
        others = self.ways.context - 1
        results = of_rank * s.heads * s.value_size
        keys_values = of_rank * s.kv_heads * (s.head_size + s.value_size)
        own_s = kernel(self.attention).seconds
        other = kernel(self.attention._replace(keys=self.attention.keys // 2, causal=False))
        hop = self.hop((4 if backward else 2) * keys_values)  # backward the gradients go along
        waits_s = self.hop_waited_s(hop, own_s) + (others - 1) * self.hop_waited_s(hop, other.seconds)
        parts = [Cost.of(ATTENTION, other, others), Cost.waited(CONTEXT_EXCHANGE, hop, waits_s)]
        if backward:
            gradients = of_rank * s.heads * s.head_size + keys_values
            home = Cost.of(CONTEXT_EXCHANGE, self.hop(2 * keys_values))
            return costs([*parts, self.moved(gradients, 2 + 2 + 2) * others, home])
        return costs([*parts, self.moved(results, 2 + 4 + 4) * others])

    def hop_waited_s(self, hop: Estimate, attention_s: float) -> float:
        """What attention of ``attention_s`` grows by, with a hop beside it."""
        return self.cluster.waited_s(hop, attention_s, self.ways.context, self.ways.tensor)

    def hop(self, num_bytes: float) -> Estimate:
        """From one rank of a ring to the next; of a ring over several hosts one that leaves its host."""
        tensor = self.ways.tensor
        joined = self.cluster.joined
        is_inside = tensor * self.ways.context <= joined
        return self.cluster.send(num_bytes, tensor if is_inside else joined, min(tensor, joined))

    def block(self) -> Pass:
        """Of a block, with what its backward computes again."""
        once = self.block_once()
        forward = once.forward
        recomputed: Mapping[Recompute, Callable[[], Cost]] = {
            Recompute.NONE: Cost,
            Recompute.SELECTIVE: lambda: costs(map(self.module, self.modules)),
            Recompute.OPERATORS: self.quick_operators,
            Recompute.FULL: lambda: forward,
        }
        backward = once.backward + recomputed[self.ways.recompute]()
        return Pass(forward + self.copied_beside(forward), backward + self.copied_beside(backward))

    def block_once(self) -> Pass:
        """Of a block, with tokens on their way to experts, where nothing is computed again."""
        alone = Pass(self.block_forward(), self.block_backward())
        return alone + self.sent_to_experts(alone)

    def copied_beside(self, work: Cost) -> Cost:
        """What is waited for of what is kept, where that is on the host: it goes, and comes back, beside a pass."""
        if self.ways.offload is not Offload.ACTIVATIONS:
            return Cost()
        host = known_host(self.cluster.name, self.cluster.host)
        copy = host.copied(block_bytes(self.shape, self.ways))
        return Cost.waited(COPIES, copy, copy.seconds - work.seconds)

    @property
    def modules(self) -> list[Module]:
        """Of a block, which are computed again."""
        return own_modules(self.shape, self.ways)

    def module(self, module: Module) -> Cost:
        """Its forward."""
        s = self.shape
        attention, feed_forward = self.halves
        shared = _Half(s.shared_products, s.hidden, s.hidden, is_dense=False)
        of_module: Mapping[Module, Callable[[], Cost]] = {
            Module.CORE_ATTN: self.core,
            Module.MOE_ACT: lambda: self.activation(s.top_k * s.expert_ffn),
            Module.LAYERNORM: lambda: self.norm() * ((s.kv_rank > 0) + (s.experts > 0)),
            Module.MLA_UP_PROJ: lambda: self.made(attention, s.attention_products, ProductCut.COLUMN) + self.rotary(),
            Module.MLP: lambda: self.norm() + self.fed(s.ffn, feed_forward),
            Module.MOE: lambda: self.fed(s.taken_ffn, feed_forward) + self.routed() + self.sent_alone(),
            Module.SHARED_EXPERTS: lambda: self.fed(s.shared_ffn, shared),
        }
        return of_module[module]()

    def quick_operators(self) -> Cost:
        """What is not kept: every second product, those of routed experts, and all that memory bounds."""
        s = self.shape
        recomputed = [
            *counted_products(s)[1::2],
            *(each for each in s.feed_forward_products if each.experts or each.weighs),
        ]
        gathered = [self.exchanged(half, _NO_PRODUCTS)[0] for half in self.halves]
        small = [self.normed(4, "norm"), self.residual() * 2, self.activation(s.taken_ffn), self.rotary()]
        products = self.made(self.halves[1], recomputed)
        return costs([products, *gathered, *small, self.biases(4), self.routed()])

    def norm(self) -> Cost:
        """One of the hidden features."""
        return self.moved(self.own_tokens * self.shape.hidden, 4, "norm")

    def made(self, half: _Half, products: Sequence[Product], cut: ProductCut | None = None) -> Cost:
        """By those products of a half, or those of them that are cut so, with what numbers of 8 bits take."""
        chosen = [product for product in products if cut in (None, product.cut)]
        multiplied = [self.multiplied(each, *self.features(each)) for each in chosen]
        narrowed = [self.narrowed(half, each, self.features(each)[1], ProductCut.COLUMN) for each in chosen]
        return costs([*multiplied, *narrowed])

    def activation(self, width: int) -> Cost:
        """Of hidden layers of so many features."""
        s = self.shape
        return self.moved(self.tokens * width / self.ways.tensor, 6 if s.gated else 4, "activation")

    def fed(self, width: int, half: _Half) -> Cost:
        """A forward of feed-forward parts with so many hidden features."""
        return costs([*self.half_forward(half), self.activation(width)])

    def block_forward(self) -> Cost:
        s = self.shape
        parts = [cost for half in self.halves for cost in self.half_forward(half)]
        more = self.eager(self.tokens * s.heads / self.ways.tensor * s.seq)
        parts += [self.normed(4, "norm"), self.residual() * 2, self.activation(s.taken_ffn)]
        parts += [self.rotary(), self.core(), more]
        return costs([*parts, self.routed(), self.biases(4)])  # written, and read by the product

    def half_forward(self, half: _Half) -> Sequence[Cost]:
        """Products of a half, and its exchanges."""
        parts: list[Cost] = []
        products_s = dict.fromkeys(ProductCut, 0.0)
        for product in half.products:
            outputs, inputs = self.features(product)
            multiplied = self.multiplied(product, outputs, inputs)
            parts += [multiplied, self.narrowed(half, product, inputs, ProductCut.COLUMN)]
            products_s[product.cut] += multiplied.seconds
        return [*parts, *self.exchanged(half, products_s)]

    def exchanged(self, half: _Half, products_s: Mapping[ProductCut, float]) -> tuple[Cost, ...]:
        """What tensor ranks exchange in a half's forward, around its products."""
        leaving = self.tokens * half.leaving
        if not self.ways.sequence_parallel:
            return (self.summed("all_reduce", leaving),)
        before_s = self.in_parts(half, products_s[ProductCut.COLUMN])
        behind_s = self.in_parts(half, products_s[ProductCut.ROW])
        num_bytes = 1 if self.is_gathered(half) else 2
        gathered = self.summed("all_gather", self.tokens * half.entering, before_s, num_bytes)
        return gathered, self.summed("reduce_scatter", leaving, behind_s)

    def exchanged_backward(
        self, half: _Half, inputs_s: Mapping[ProductCut, float], weights_s: float
    ) -> tuple[Cost, ...]:
        """What tensor ranks exchange in a half's backward.

        Args:
            inputs_s: of its products' gradients of inputs.
            weights_s: of its column-parallel products' gradients of weights.
        """
        entering = self.tokens * half.entering
        if not self.ways.sequence_parallel:
            return (self.summed("all_reduce", entering, weights_s),)
        is_narrow = self.is_gathered(half)
        sent = CASTS[self.ways.scaling].gathered if is_narrow else 2
        beside_s = self.in_parts(half, inputs_s[ProductCut.ROW])
        leaving = self.summed("all_gather", self.tokens * half.leaving, beside_s, sent)
        gathered_again = self.summed("all_gather", entering, inputs_s[ProductCut.COLUMN], 1 if is_narrow else 2)
        return leaving, gathered_again, self.summed("reduce_scatter", entering, weights_s)

    def routed(self) -> Cost:
        """Tokens before and behind their experts: scores, copies in order of experts, weighted sums.

        Forward and backward move as much.
        """
        s = self.shape
        if not s.experts:
            return Cost()
        scores = self.moved(self.own_tokens * s.experts, 2 + 4 + 4)  # read, in float32, their softmax
        whole = self.routed_tokens * s.hidden
        copies = whole * s.top_k
        return costs([scores, self.moved(copies, 4), self.moved(copies, 2), self.moved(whole, 2)])

    def sent_to_experts(self, alone: Pass) -> Pass:
        """Tokens to the ranks of their experts, and back, beside a block without it.

        With ``overlap_experts`` each of the four runs beside a part of another micro-batch's pass the other way, as in
        Megatron-LM: there in forward and backward beside the experts, back beside all else.
        """
        s = self.shape
        if not s.experts:
            return Pass(Cost(), Cost())
        route = self.route
        if not self.ways.overlap_experts:
            return Pass(self.sent_alone(), Cost.of(EXPERT_EXCHANGE, route.sent, 2))
        experts = [product for product in s.feed_forward_products if product.experts]
        forward_s = sum(self.multiplied(each, *self.features(each)).seconds for each in experts)
        backward_s = sum(
            self.multiplied(each, *reversed(self.features(each))).seconds + self.weight_gradient(each).seconds
            for each in experts
        )
        forward = self.waited(route, backward_s) + self.waited(route, alone.backward.seconds - backward_s)
        backward = self.waited(route, forward_s) + self.waited(route, alone.forward.seconds - forward_s)
        return Pass(forward + Cost.of(EXPERT_EXCHANGE, route.planned), backward)

    @property
    def route(self) -> ExpertRoute:
        """Of a pass's tokens, from the ranks of a block to those of their experts, or back."""
        return ExpertRoute(self.cluster, self.ways, 2.0 * self.own_tokens * self.shape.hidden, self.shape.top_k)

    def sent_alone(self) -> Cost:
        """Tokens of a forward to the ranks of their experts, and back, with nothing beside them."""
        route = self.route
        return Cost.of(EXPERT_EXCHANGE, route.sent, 2) + Cost.of(EXPERT_EXCHANGE, route.planned)

    def waited(self, route: ExpertRoute, beside_s: float) -> Cost:
        """What is waited for of one exchange of tokens beside so much of a pass."""
        return Cost.waited(EXPERT_EXCHANGE, route.sent, route.waited_s(beside_s))

    def rotary(self, num_bytes: float = 4, kind: str = "rope") -> Cost:
        """Queries and keys rotated; of latent attention the rotated features, and both brought together."""
        s = self.shape
        if s.kv_rank:
            rotated = self.moved(self.tokens * (s.heads / self.ways.tensor + 1) * s.rope_size, 4, "rope")
            return rotated + self.moved(self.tokens * 2 * s.heads * s.head_size / self.ways.tensor, 4)
        numbers = s.rotary * self.tokens * (s.heads + s.kv_heads) * s.head_size / self.ways.tensor
        if self.ways.kernels is Fusion.EAGER:
            return self.moved(numbers, num_bytes, f"eager_{kind}")
        return self.moved(numbers, 4, "rope")

    def block_backward(self) -> Cost:
        s = self.shape
        tokens = self.tokens
        own = self.own_tokens
        parts = [self.core_backward()]
        for half in self.halves:
            parts += self.half_backward(half)
        parts.append(self.normed(6, "norm_backward") + self.moved(own * s.hidden, 6) * 2)
        parts.append(self.moved(s.dropout * own * s.hidden, 5, "dropout_backward") * 2)
        parts.append(self.moved(tokens * s.taken_ffn / self.ways.tensor, 10 if s.gated else 6, "activation_backward"))
        more = self.eager(self.tokens * s.heads / self.ways.tensor * s.seq)
        return costs([*parts, self.rotary(6, "rope_backward"), self.routed(), more * 1.5, self.biases(2)])

    def half_backward(self, half: _Half) -> Sequence[Cost]:
        """Gradients of a half's inputs and weights, and its exchanges."""
        parts: list[Cost] = []
        inputs_s = dict.fromkeys(ProductCut, 0.0)
        weights_s = 0.0
        for product in half.products:
            outputs, inputs = self.features(product)
            of_input = self.multiplied(product, inputs, outputs)
            of_weight = self.weight_gradient(product)
            parts += [of_input, of_weight, self.added(self.own_experts(product) * outputs * inputs)]
            parts.append(self.narrowed(half, product, outputs, ProductCut.ROW))
            inputs_s[product.cut] += of_input.seconds
            if product.cut is ProductCut.COLUMN:
                weights_s += of_weight.seconds
        return [*parts, *self.exchanged_backward(half, inputs_s, weights_s)]

    def joined(self) -> Pass:
        """Of a block of ``mtp``: a norm of each of its two inputs, the product that joins them, and another norm."""
        s = self.shape
        outputs = s.hidden // self.ways.tensor
        inputs = 2 * s.hidden
        exchange = self.summed("all_gather", self.tokens * s.hidden)
        forward = [self.product(self.tokens, outputs, inputs), self.moved(3 * self.own_tokens * s.hidden, 4, "norm")]
        backward = [
            self.product(self.tokens, inputs, outputs),
            self.product(inputs, outputs, self.tokens),
            self.added(outputs * inputs),
            self.moved(3 * self.own_tokens * s.hidden, 6, "norm_backward"),
        ]
        return Pass(costs([*forward, exchange]), costs([*backward, exchange]))

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
