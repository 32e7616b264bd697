"""A transformer's layers, memory and step: operations that are counted, published formulas, and closed forms."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from planner.costs.memory.memory_bound import kept_by
from planner.extras.kernels.estimates import TABLE, Estimate
from planner.extras.kernels.links import AlphaBeta
from planner.extras.kernels.models import AttentionKernel, AttentionShape
from planner.extras.transformers import pipeline
from planner.extras.transformers.cluster import TAKEN_ACROSS, TAKEN_WITHIN, GpuCluster, named_cluster
from planner.extras.transformers.dispatch import ACROSS_S, OF_CARD, WITHIN_S, ExpertRoute
from planner.extras.transformers.host import COPIED, COPIES, UPDATE, UPDATED, HostSide, known_host
from planner.extras.transformers.layers import (
    ATTENTION,
    CONTEXT_EXCHANGE,
    EXCHANGE,
    EXPERT_EXCHANGE,
    MEMORY,
    PRODUCTS,
    layers_for,
)
from planner.extras.transformers.memory import (
    SINGLE,
    block_bytes,
    chain_in_flight,
    in_flight,
    memory_of,
    parameters_of,
    stage_memory,
    stage_parameters,
)
from planner.extras.transformers.passes import HOST, OPTIMISER, Cost
from planner.extras.transformers.pipeline import Chunks, chunked, even_s, label_of, longer
from planner.extras.transformers.shape import (
    ContextExchange,
    ExpertExchange,
    Fusion,
    Launch,
    Offload,
    ParallelDegrees,
    Precision,
    Recompute,
    Scaling,
    Sends,
    Transformer,
    named_transformer,
)
from planner.extras.transformers.software import launch_s
from planner.extras.transformers.step import BUBBLE, GRADIENTS, gradients, hops_of, least_s, predict, stage_layers
from planner.ir.errors import UsageError
from planner.solvers.best_first.recurrence import LaidOutStages

TINY = Transformer("small", hidden=64, ffn=256, heads=8, layers=4, vocab=128, seq=16)

SHARED = replace(TINY, kv_heads=4, gated=True, rotary=True, dropout=False)

FINE = replace(
    SHARED, kv_heads=0, heads=4, seq=256, kv_rank=16, query_rank=24, head_size=12, rope_size=4, value_size=8,
    experts=8, top_k=2, expert_ffn=32, shared_ffn=32, first_dense=1, mtp=1, qkv_bias=False, out_bias=False,
    ffn_bias=False, layer_norm=False, parameters_tied=False,
)  # fmt: skip
"""Latent attention and experts, which are 128 tokens each of two samples: a tile."""


LONG = replace(SHARED, fused_attention=True, parameters_tied=False)
"""With a kernel of its own for attention, so that ranks may share the tokens of a sample."""


def fine_attention(hidden: int = 64) -> int:
    """Weights that FINE's tokens go through in a block's attention."""
    return hidden * 24 + 24 * 4 * 12 + hidden * (16 + 4) + 16 * 4 * (8 + 8) + 4 * 8 * hidden


class Counting:
    """Kernels that take a second for each operation, or byte."""

    def gemm(self, m: int, n: int, k: int, batch: int = 1) -> Estimate:
        return exact(2.0 * m * n * k * batch)

    def grouped(self, m: int, n: int, k: int, groups: int) -> Estimate:
        return exact(2.0 * m * n * k * groups)

    def memory_bound(self, num_bytes: float, launches: int = 1, kind: str = "elementwise") -> Estimate:
        return exact(num_bytes)

    def attention(self, shape: AttentionShape, fused: bool, by: AttentionKernel = AttentionKernel.TUNED) -> Estimate:
        pairs = shape.queries * shape.keys * (0.5 if shape.causal else 1)
        return exact(4.0 * shape.batch * shape.heads * pairs * shape.head_size)

    def attention_backward(
        self, shape: AttentionShape, fused: bool, by: AttentionKernel = AttentionKernel.TUNED
    ) -> Estimate:
        return self.attention(shape, fused) * 2.5


class Halved(Counting):
    """Products that take half a second for each operation."""

    def gemm(self, m: int, n: int, k: int, batch: int = 1) -> Estimate:
        return exact(1.0 * m * n * k * batch)

    def grouped(self, m: int, n: int, k: int, groups: int) -> Estimate:
        return exact(1.0 * m * n * k * groups)


def exact(seconds: float) -> Estimate:
    return Estimate(seconds, seconds, seconds, TABLE)


@dataclass(frozen=True, slots=True)
class Counted(GpuCluster):
    """A cluster that counts operations and bytes; an exchange takes a second for each byte that a rank sends."""

    @property
    def kernels(self) -> Any:
        return Counting()

    @property
    def eight_bit(self) -> Any:
        return Halved()

    def exchange(self, name: str, num_bytes: float, members: int, stride: int = 1) -> Estimate:
        return exact((2 if name == "all_reduce" else 1) * (members - 1) / members * num_bytes)


class Slow(Counted):
    """Exchanges that nothing hides wholly."""

    def exchange(self, name: str, num_bytes: float, members: int, stride: int = 1) -> Estimate:
        return exact(1e3 * num_bytes)


COUNTED = Counted("counted", "A100-80GB", 8, AlphaBeta(0, 1), AlphaBeta(0, 1))

SLOW = Slow("slow", "A100-80GB", 8, AlphaBeta(0, 1), AlphaBeta(0, 1))


def spent(cost: Cost, what: str) -> float:
    return cost.by_what.get(what, 0.0)


@pytest.mark.parametrize("shape", [TINY, SHARED])
@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_the_products_of_all_tensor_ranks_are_those_of_the_network(shape: Transformer, tensor: int) -> None:
    layers = layers_for(shape, COUNTED, ParallelDegrees(tensor, micro_batch=2))
    tokens = 2 * shape.seq
    attention = 2 * shape.head_size * (shape.heads + shape.kv_heads)
    weights = shape.hidden * (attention + (3 if shape.gated else 2) * shape.ffn)
    assert tensor * spent(layers.block.forward, PRODUCTS) == 2 * tokens * weights
    assert tensor * spent(layers.block.backward, PRODUCTS) == 4 * tokens * weights
    assert tensor * spent(layers.head.forward, PRODUCTS) == 2 * tokens * shape.vocab * shape.hidden
    scores = 4 * tokens * shape.seq * shape.hidden
    assert tensor * spent(layers.block.forward, ATTENTION) == scores
    assert tensor * spent(layers.block.backward, ATTENTION) == 2 * scores


@pytest.mark.parametrize("shape", [TINY, FINE])
def test_the_step_has_the_operations_of_its_products(shape: Transformer) -> None:
    layers = layers_for(shape, COUNTED, ParallelDegrees(micro_batch=4))
    passes = [(layers.embedding, 1), (layers.block, shape.layers), (layers.head, 1)]
    products = sum(
        number * spent(part, what)
        for layer, number in passes
        for part in (layer.forward, layer.backward)
        for what in (PRODUCTS, ATTENTION)
    )
    assert shape.step_flop(4) == products


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_tensor_ranks_divide_experts_and_what_is_made_of_latent_numbers(tensor: int) -> None:
    """And of products that each does whole the tokens, with sequence parallelism."""
    ways = ParallelDegrees(tensor, micro_batch=2, sequence_parallel=True)
    layers = layers_for(FINE, COUNTED, ways)
    tokens = 2 * FINE.seq
    block = fine_attention() + 64 * 8 + (2 + 1) * 3 * 64 * 32  # router, two experts and the shared one
    assert tensor * spent(layers.block.forward, PRODUCTS) == 2 * tokens * block
    assert tensor * spent(layers.block.backward, PRODUCTS) == 4 * tokens * block
    dense = fine_attention() + 3 * 64 * 256
    assert tensor * spent(layers.embedding.forward, PRODUCTS) == 2 * tokens * dense
    joined = 2 * 64 * 64
    assert tensor * spent(layers.head.forward, PRODUCTS) == 2 * tokens * (2 * 128 * 64 + block + joined)


def test_expert_ranks_send_each_token_to_its_experts_and_multiply_more_tokens_by_fewer() -> None:
    alone, four = (layers_for(FINE, COUNTED, ParallelDegrees(micro_batch=2, expert=expert)).block for expert in (1, 4))
    assert spent(alone.forward, EXPERT_EXCHANGE) == 0
    for part in (four.forward, four.backward):
        assert spent(part, EXPERT_EXCHANGE) == 2 * 3 / 4 * 2 * (2 * FINE.seq * 2 * 64)
    assert spent(four.forward, PRODUCTS) == spent(alone.forward, PRODUCTS)
    few = replace(named_transformer("mixtral-8x7b"), seq=64)  # 16 tokens an expert wait for its weights
    cluster = named_cluster("h100-dgx")
    alone, four = (layers_for(few, cluster, ParallelDegrees(expert=expert)).block for expert in (1, 4))
    assert spent(four.forward, PRODUCTS) < 0.5 * spent(alone.forward, PRODUCTS)


def test_whole_experts_beside_tensor_ranks_take_tokens_of_one_rank_each() -> None:
    """As many products as cut ones; tensor ranks gather for the shared expert alone, and send a token once, not each.

    Four ranks of a stage, two tensor ranks of two copies: four expert ranks among all, or two among the copies.
    """
    cut = ParallelDegrees(2, data=2, micro_batch=2, sequence_parallel=True, expert=2)
    whole = replace(cut, expert=4, whole_experts=True)
    among_copies, among_all = (layers_for(FINE, COUNTED, ways).block for ways in (cut, whole))
    own = 2 * FINE.seq // 2  # tokens of a rank
    for one, other in ((among_copies.forward, among_all.forward), (among_copies.backward, among_all.backward)):
        assert spent(one, PRODUCTS) == spent(other, PRODUCTS)
        assert spent(one, EXPERT_EXCHANGE) == 2 * 1 / 2 * 2 * (own * 2 * 64)
        assert spent(other, EXPERT_EXCHANGE) == 2 * 3 / 4 * 2 * (own * 2 * 64)
    # Forward: cut experts gather two rows of each of the tokens of both ranks, and sum as many.
    rows = 1 / 2 * 2 * (2 * FINE.seq * 64)
    fewer = spent(among_copies.forward, EXCHANGE) - spent(among_all.forward, EXCHANGE)
    assert fewer == 2 * 2 * rows
    dense = replace(FINE, experts=0, top_k=0, expert_ffn=0, shared_ffn=0, first_dense=0, mtp=0)
    first = [layers_for(FINE, COUNTED, ways).embedding.forward for ways in (cut, whole, replace(cut, expert=1))]
    assert len({spent(of, EXCHANGE) for of in first}) == 1  # of the dense block that comes first
    assert spent(first[0], EXCHANGE) > spent(layers_for(dense, COUNTED, cut).embedding.forward, EXCHANGE)


def test_a_dispatch_sends_a_token_once_to_a_host_and_once_to_each_of_its_ranks() -> None:
    """64 tokens of 100 bytes to 2 of 16 ranks, on hosts of 8 with a card of 1 GB/s for each; NVLink has 10."""
    cluster = replace(COUNTED, per_host=8, within=AlphaBeta(0.0, 10e9), across=AlphaBeta(0.0, 8e9))
    ways = ParallelDegrees(data=16, expert=16, expert_exchange=ExpertExchange.DISPATCH)
    route = ExpertRoute(cluster, ways, 6400.0, 2)
    hosts = 2 * (1 - 1 / 4)  # of two those that have one of two experts
    assert route.sent.seconds == pytest.approx(ACROSS_S + 6400 * hosts / 2 / (OF_CARD * 1e9))
    eight = replace(route, ways=replace(ways, data=8, expert=8))
    assert eight.sent.seconds == pytest.approx(WITHIN_S + 6400 * 8 * (1 - (7 / 8) ** 2) / 10e9)
    assert replace(route, ways=replace(ways, expert=1)).sent.seconds == 0
    # HybridEP's kernels on 16 to 64 H100: 4,096 tokens of 7,168 numbers to 8 experts, 72, 58 and 50 GB/s to hosts.
    h100 = named_cluster("h100-dgx")
    for ranks, rate in ((16, 71.71e9), (32, 57.69e9), (64, 49.97e9)):
        hosts = ranks // 8 * (1 - (1 - 8 / ranks) ** 8)
        num_bytes = 4096 * 7168 * 2
        measured = ExpertRoute(h100, replace(ways, data=ranks, expert=ranks), num_bytes, 8)
        assert measured.sent.seconds == pytest.approx(num_bytes * hosts / rate, rel=0.1)


def test_exchanges_of_experts_beside_another_micro_batch_are_waited_for_where_they_are_longer() -> None:
    h100 = named_cluster("h100-dgx")
    shape = replace(named_transformer("qwen3-235b-a22b"), seq=4096)
    alone = ParallelDegrees(data=32, expert=32)
    beside = replace(alone, overlap_experts=True)
    waited, hidden = (layers_for(shape, h100, ways).block for ways in (alone, beside))
    for one, other in ((waited.forward, hidden.forward), (waited.backward, hidden.backward)):
        assert 0.07 * spent(one, EXPERT_EXCHANGE) < spent(other, EXPERT_EXCHANGE) < spent(one, EXPERT_EXCHANGE)
        assert other.seconds - spent(other, EXPERT_EXCHANGE) == pytest.approx(one.seconds - spent(one, EXPERT_EXCHANGE))
    slow = replace(h100, across=AlphaBeta(0.0, 1e9))  # the passes beside them are nothing
    waited, hidden = (layers_for(shape, slow, ways).block for ways in (alone, beside))
    sent = spent(waited.forward, EXPERT_EXCHANGE) + spent(waited.backward, EXPERT_EXCHANGE)
    others = sum(of.seconds - spent(of, EXPERT_EXCHANGE) for of in (waited.forward, waited.backward))
    left = spent(hidden.forward, EXPERT_EXCHANGE) + spent(hidden.backward, EXPERT_EXCHANGE)
    assert left == pytest.approx(sent - others, rel=1e-6)


@pytest.mark.parametrize(("shape", "tensor"), [(TINY, 2), (SHARED, 1), (FINE, 1)])
def test_products_of_blocks_in_8_bits_take_half(shape: Transformer, tensor: int) -> None:
    """Head and router stay as they are."""
    half, eight = (
        layers_for(shape, COUNTED, ParallelDegrees(tensor, micro_batch=2, precision=precision))
        for precision in Precision
    )
    tokens = 2 * shape.seq
    router = 2 * tokens * shape.hidden * shape.experts
    for times, whole, narrow in (
        (1, half.block.forward, eight.block.forward),
        (2, half.block.backward, eight.block.backward),
    ):
        assert spent(narrow, PRODUCTS) - times * router == (spent(whole, PRODUCTS) - times * router) / 2
        assert spent(narrow, ATTENTION) == spent(whole, ATTENTION)
    assert eight.head.forward.seconds - half.head.forward.seconds == (
        shape.mtp * (eight.block.forward.seconds - half.block.forward.seconds)
    )


BYTES = {
    Scaling.CURRENT: (2 + 2 + 1 + 1, 2 + 2 + 1, 2 + 1 + 1, 2 + 1, 1 + 1, 1),
    Scaling.DELAYED: (2 + 1 + 1, 2 + 1, 1 + 1, 0, 1 + 1, 1),
    Scaling.MICRO: (2 + 1 + 1, 2 + 1 + 1, 2 + 1 + 1, 2 + 1 + 1, 0, 1 + 1),
}
"""Of a number: cast and transposed, cast before it is sent, the same of a norm's, transposed behind that, sent."""


@pytest.mark.parametrize("scaling", Scaling)
@pytest.mark.parametrize("kernels", [Fusion.FUSED, Fusion.KERNELS])
def test_operands_are_cast_by_norms_or_alone_and_gathered_in_8_bits(scaling: Scaling, kernels: Fusion) -> None:
    """Of two pairs of products [into, out of] a half, by half the outputs, then the inputs, of two tensor ranks."""
    alone, sent, normed, normed_sent, turned, gathered = BYTES[scaling]
    if kernels is Fusion.KERNELS:
        normed = alone
        normed_sent = sent
    into = [(64, 128), (64, 512)]  # 8 heads and twice 4 of 8; a gate
    behind = [(64, 64), (256, 64)]
    for cut in (False, True):
        half, eight = (
            layers_for(
                SHARED,
                COUNTED,
                ParallelDegrees(
                    2, sequence_parallel=cut, precision=precision, scaling=scaling, kernels=kernels,
                    overlap_tensor=False,
                ),
            ).block
            for precision in Precision
        )  # fmt: skip
        of_norms = normed_sent / 2 + turned if cut else normed
        of_sums = sent / 2 + turned if cut else alone
        entering = sum(of_norms * inputs for inputs, _ in into) + sum(alone * inputs / 2 for inputs, _ in behind)
        leaving = sum(alone * outputs / 2 for _, outputs in into) + sum(of_sums * outputs for _, outputs in behind)
        for narrow, whole, cast in (
            (eight.forward, half.forward, entering),
            (eight.backward, half.backward, leaving),
        ):
            assert spent(narrow, MEMORY) - spent(whole, MEMORY) == SHARED.seq * cast
        of_one = 2 * (2 - 1) / 2 * SHARED.seq * 64  # of both halves, of a byte
        assert spent(half.forward, EXCHANGE) - spent(eight.forward, EXCHANGE) == cut * of_one
        assert spent(half.backward, EXCHANGE) - spent(eight.backward, EXCHANGE) == cut * (1 + 2 - gathered) * of_one


@pytest.mark.parametrize("cluster", [COUNTED, SLOW])
def test_exchanges_in_parts_hide_behind_all_but_a_part_of_their_products(cluster: Counted) -> None:
    """Three of four parts: of inputs that are gathered and of sums, and of gradients that are gathered for inputs'."""
    parts, whole = (
        layers_for(TINY, cluster, ParallelDegrees(4, sequence_parallel=True, overlap_parts=parts)).block
        for parts in (True, False)
    )
    of_products = 2 * TINY.seq * TINY.hidden / 4
    into = of_products * (3 * TINY.hidden + TINY.ffn)
    behind = of_products * (TINY.hidden + TINY.ffn)
    sent = 2 * cluster.exchange("all_gather", 2 * TINY.seq * TINY.hidden, 4).seconds  # of both halves
    for short, long, hidden in (
        (parts.forward, whole.forward, (into, behind)),
        (parts.backward, whole.backward, (behind,)),
    ):
        most = [min(3 / 4 * product_s, (1 - TAKEN_WITHIN) * sent) for product_s in hidden]
        assert long.seconds - short.seconds == pytest.approx(sum(most))
    unlike = ParallelDegrees(4, overlap_parts=True)
    assert layers_for(TINY, cluster, unlike) == layers_for(TINY, cluster, replace(unlike, overlap_parts=False))


def test_8_bits_are_quicker_by_less_than_half_and_keep_weights_of_blocks_twice_more() -> None:
    llama = named_transformer("llama3-8b")
    half, eight = (ParallelDegrees(data=8, zero=1, precision=precision) for precision in Precision)
    whole, narrow = (predict(llama, H100, ways, 8).step.seconds for ways in (half, eight))
    assert 0.5 < narrow / whole < 0.95
    updates = [predict(llama, H100, replace(ways, zero=0), 8).parts[OPTIMISER] for ways in (half, eight)]
    assert updates[1] > 1.05 * updates[0]  # weights are cast once a step
    held, more = (memory_of(llama, ways, 1) for ways in (half, eight))
    assert more.weights - held.weights == 2 * llama.layers * llama.block_parameters
    assert (more.gradients, more.optimiser, more.activations) == (held.gradients, held.optimiser, held.activations)
    assert "fp8" in str(eight)
    assert "fp8" not in str(half)


def test_an_optimiser_on_the_host_takes_the_longest_of_its_copies_and_its_step() -> None:
    """Ren et al. 2021, section 4.1: 4 bytes a weight there and back with gradients of 2; Adam in the host's memory."""
    llama = named_transformer("llama3-8b")
    ways = ParallelDegrees(data=8, zero=1, offload=Offload.OPTIMIZER, fp32_gradients=False)
    weights = llama.parameters / 8
    for link, rate in (("PCIe-4-x16", 31.5e9), ("Ethernet-10G", 1.25e9)):
        host = HostSide(link, 1e15, 8e11, "a test")
        found = predict(llama, replace(A100, host=host), ways, 8)
        copy_s = 2 * weights / (COPIED * rate)
        adam_s = (2 * 12 + 2 + 2) * weights / (UPDATED * 1e11)
        assert found.parts[UPDATE] == pytest.approx(max(copy_s, adam_s))
    here, there = (
        stage_memory(llama, replace(ways, offload=offload), 0, 1) for offload in (Offload.NONE, ways.offload)
    )
    assert (there.optimiser, there.gradients, there.weights) == (0.0, here.gradients, here.weights)
    assert there.host == pytest.approx((12 + 2 + 2) * weights)
    assert there.total == pytest.approx(here.total - 12 * weights)


@pytest.mark.parametrize("link", ["NVLink-4", "PCIe-5-x16"])
def test_activations_go_to_the_host_beside_the_passes_that_hide_them(link: str) -> None:
    """Of three stages the first has three micro-batches in flight; two blocks stay, that computed and the next."""
    llama = replace(named_transformer("llama3-8b"), layers=12)
    host = HostSide(link, 1e15, 1e12, "a test")
    cluster = replace(H100, host=host)
    ways = ParallelDegrees(pipeline=3, offload=Offload.ACTIVATIONS)
    alone, beside = (
        layers_for(llama, cluster, replace(ways, offload=what)).block for what in (Offload.NONE, ways.offload)
    )
    block = block_bytes(llama, ways)
    copy_s = host.copied(block).seconds
    for one, other in ((alone.forward, beside.forward), (alone.backward, beside.backward)):
        assert spent(other, COPIES) == pytest.approx(max(0.0, copy_s - one.seconds))
        assert (spent(other, COPIES) > 0) == (link == "PCIe-5-x16")
    here, there = (stage_memory(llama, replace(ways, offload=what), 0, 8) for what in (Offload.NONE, ways.offload))
    assert here.activations == 3 * 4 * block
    assert (there.activations, there.host) == (2 * block, 3 * 4 * block)
    assert (there.state, there.working) == (here.state, here.working)


def test_a_window_shortens_attention_in_the_blocks_that_have_one() -> None:
    """With half of the tokens in sight: three quarters of all pairs before a token."""
    shape = replace(named_transformer("mistral-7b"), window=0, windowed=0)
    whole, some, every = (
        spent(layers_for(replace(shape, window=window, windowed=of), A100, ParallelDegrees()).block.forward, ATTENTION)
        for window, of in ((0, 0), (shape.seq // 2, 16), (shape.seq // 2, 32))
    )
    assert every == pytest.approx(0.75 * whole, rel=0.1)
    assert some == pytest.approx((whole + every) / 2)
    assert replace(shape, window=shape.seq // 2, windowed=32).step_flop(1) < shape.step_flop(1)


@pytest.mark.parametrize("exchange", ContextExchange)
@pytest.mark.parametrize(("tensor", "context"), [(1, 2), (1, 4), (2, 2)])
def test_ranks_that_share_tokens_divide_all_products_and_pairs(
    exchange: ContextExchange, tensor: int, context: int
) -> None:
    """Of causal attention too: halves of a ring are as much work on each rank (LONG's keys divide by all ranks)."""
    plain, cut = (
        layers_for(LONG, COUNTED, ParallelDegrees(tensor, micro_batch=2, context=ranks, context_exchange=exchange))
        for ranks in (1, context)
    )
    for one, other in ((plain.block, cut.block), (plain.head, cut.head)):
        for whole, part in ((one.forward, other.forward), (one.backward, other.backward)):
            for what in (PRODUCTS, ATTENTION):
                assert context * spent(part, what) == spent(whole, what)
    assert context * spent(cut.embedding.forward, MEMORY) == spent(plain.embedding.forward, MEMORY)


@pytest.mark.parametrize("context", [2, 4])
def test_an_all_to_all_sends_what_ulysses_sends(context: int) -> None:
    """Jacobs et al. 2023, section 3.2: of N tokens, h features and P ranks 4 N h / P a rank, each way."""
    shape = replace(LONG, kv_heads=8)
    ways = ParallelDegrees(context=context, context_exchange=ContextExchange.ALL_TO_ALL)
    block = layers_for(shape, COUNTED, ways).block
    sent = 2 * 4 * shape.seq * shape.hidden / context * (context - 1) / context
    assert spent(block.forward, CONTEXT_EXCHANGE) == spent(block.backward, CONTEXT_EXCHANGE) == sent
    shared = layers_for(LONG, COUNTED, ways).block  # half as many keys and values
    assert spent(shared.forward, CONTEXT_EXCHANGE) == 0.75 * sent


@pytest.mark.parametrize("context", [2, 4])
def test_a_ring_hides_its_hops_behind_attention_where_parts_are_long_enough(context: int) -> None:
    """Liu et al. 2023, section 3: a part of n tokens hides a hop if its pairs take as long as its keys and values.

    Here each rank sees half of another's keys: 2 n n h operations beside 4 n h bytes, so that n = 2 hides them.
    Backward there are 2.5 times as many beside twice as much, and the gradients' way home, which nothing hides.
    What is hidden takes its share of the pass, as any exchange beside one does.
    """
    shape = replace(LONG, kv_heads=8)
    part = shape.seq // context
    keys_values = 2 * 2 * part * shape.hidden
    pairs = 2 * part * part * shape.hidden
    ways = ParallelDegrees(context=context)
    hidden = layers_for(shape, COUNTED, ways).block
    hops = context - 1
    assert spent(hidden.forward, CONTEXT_EXCHANGE) == pytest.approx(TAKEN_WITHIN * hops * keys_values)
    assert spent(hidden.backward, CONTEXT_EXCHANGE) == pytest.approx((1 + TAKEN_WITHIN * hops * 2) * keys_values)
    rate = 1 / 100
    slow = layers_for(shape, replace(COUNTED, within=AlphaBeta(0, rate)), ways).block
    assert spent(slow.forward, CONTEXT_EXCHANGE) == pytest.approx(hops * (keys_values / rate - pairs))
    back = hops * (2 * keys_values / rate - 2.5 * pairs) + keys_values / rate
    assert spent(slow.backward, CONTEXT_EXCHANGE) == pytest.approx(back)
    alone = layers_for(shape, COUNTED, ParallelDegrees()).block.forward
    sums = hops * (2 + 4 + 4) * part * shape.hidden
    assert context * (spent(hidden.forward, MEMORY) - sums) == pytest.approx(spent(alone, MEMORY))


def test_a_ring_over_hosts_takes_the_cards_that_its_neighbours_share() -> None:
    cluster = replace(COUNTED, across=AlphaBeta(0, 2.0), of_network=1.0)
    shape = replace(LONG, heads=16, kv_heads=16, head_size=4, value_size=4, seq=64)
    waits = {}
    for tensor, context in ((8, 2), (4, 2)):
        ways = ParallelDegrees(tensor, context=context)
        waits[tensor] = spent(layers_for(shape, cluster, ways).block.backward, CONTEXT_EXCHANGE)
    keys_values = 2 * 2 * shape.seq / 2 * shape.hidden
    home = {8: keys_values / 8 * 4, 4: keys_values / 4}
    """Eight ranks a host have an eighth of two bytes a second each; within the host it is a byte a second."""
    for tensor, taken in ((8, TAKEN_ACROSS), (4, TAKEN_WITHIN)):  # by the hop before it, of keys, values and gradients
        assert waits[tensor] == pytest.approx(home[tensor] * (1 + 2 * taken))


def test_gathered_keys_are_waited_for_and_their_gradients_scattered() -> None:
    ways = ParallelDegrees(context=4, context_exchange=ContextExchange.ALL_GATHER)
    block = layers_for(LONG, COUNTED, ways).block
    gathered = 3 / 4 * 2 * LONG.seq * 2 * LONG.kv_heads * LONG.head_size
    assert spent(block.forward, CONTEXT_EXCHANGE) == spent(block.backward, CONTEXT_EXCHANGE) == gathered


def test_sequence_parallelism_sends_as_much_forward_and_moves_less() -> None:
    """A reduce-scatter and an all-gather are an all-reduce; backward gathers the inputs of two products once more."""
    plain, cut = (
        layers_for(TINY, COUNTED, ParallelDegrees(4, sequence_parallel=sequence, overlap_tensor=False)).block
        for sequence in (False, True)
    )
    assert spent(cut.forward, EXCHANGE) == spent(plain.forward, EXCHANGE) > 0
    assert spent(cut.backward, EXCHANGE) == 1.5 * spent(plain.backward, EXCHANGE)
    assert spent(cut.forward, MEMORY) < spent(plain.forward, MEMORY)
    assert spent(cut.forward, PRODUCTS) == spent(plain.forward, PRODUCTS)


def test_recomputation_adds_a_forward_or_the_core_of_attention() -> None:
    none, selective, full = (
        layers_for(TINY, COUNTED, ParallelDegrees(2, recompute=how)).block
        for how in (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL)
    )
    assert full.backward.seconds == pytest.approx(none.backward.seconds + none.forward.seconds)
    more = selective.backward.seconds - none.backward.seconds
    assert spent(none.forward, ATTENTION) < more < none.forward.seconds
    assert {none.forward.seconds, selective.forward.seconds, full.forward.seconds} == {none.forward.seconds}


def test_separate_kernels_copy_biases_before_their_products_and_sum_their_gradients() -> None:
    """Of the operators' own texts: 4 bytes a number of the products' results forward, and 2 backward."""
    kernels, eager = (
        layers_for(TINY, COUNTED, ParallelDegrees(2, kernels=how)).block for how in (Fusion.KERNELS, Fusion.EAGER)
    )
    results = TINY.seq * (3 * 64 / 2 + 64 + 256 / 2 + 64)
    scores = 8 / 2 * TINY.seq**2
    wide = TINY.seq * 256 / 2
    narrow = TINY.seq * 64 / 2
    moved = 4 * scores * 2 + 5 * wide * 7 + 4 * narrow * 4
    residual = 2 * TINY.seq * 64 * (5 + 6 - 7)
    assert spent(eager.forward, MEMORY) - spent(kernels.forward, MEMORY) == moved + residual + 4 * results
    assert spent(eager.backward, MEMORY) - spent(kernels.backward, MEMORY) == 1.5 * moved + 2 * results


@pytest.mark.parametrize("sequence", [False, True])
def test_sums_hide_behind_the_weight_products_of_the_column_parallel_layers(sequence: bool) -> None:
    """Those of queries, keys, values and of the first feed-forward half; with sequence parallelism the input's too."""
    overlapped, waited = (
        layers_for(TINY, SLOW, ParallelDegrees(2, sequence_parallel=sequence, overlap_tensor=on)).block.backward
        for on in (True, False)
    )
    columns = (3 * TINY.hidden + TINY.ffn) * TINY.hidden / 2
    hidden = 2 * TINY.seq * columns * (2 if sequence else 1)
    assert waited.seconds - overlapped.seconds == pytest.approx(hidden)


def test_an_estimate_says_what_share_rests_on_what() -> None:
    cost = Cost.of("a", exact(3)) + Cost.of("b", Estimate(1, 0.5, 2, "datasheet, of something")) * 2
    assert cost.total == Estimate(5, 4, 7, "60 % measured table, 40 % datasheet")
    assert cost.by_what == {"a": 3, "b": 2}


def test_groups_that_talk_at_once_share_the_cards_of_their_host() -> None:
    cluster = replace(named_cluster("p3.16xlarge"), of_network=1.0, across=AlphaBeta(0.0, 8e9))
    alone = cluster.exchange("all_reduce", 1e9, 2, stride=1 * 8)
    assert alone.seconds == pytest.approx(8 * 1e9 / 8e9)  # eight pairs, each with an eighth of the cards
    whole = cluster.exchange("all_reduce", 1e9, 16, stride=1)
    assert whole.seconds == pytest.approx(2 * 15 / 16 * 1e9 / 8e9)  # one ring through both hosts
    assert cluster.send(1e9, 8, at_once=8).seconds == pytest.approx(1.0)


def test_beyond_a_pair_that_nvlink_joins_the_slower_link_counts() -> None:
    pairs = named_cluster("a100-pairs")
    whole = named_cluster("a100-dgx")
    size = 64 * 2**20
    of_two, of_four = (pairs.exchange("all_reduce", size, members).seconds for members in (2, 4))
    assert of_two < 2 * whole.exchange("all_reduce", size, 2).seconds
    assert of_four > 4 * of_two
    apart = pairs.exchange("all_reduce", size, 2, stride=2).seconds
    assert apart == pytest.approx(of_four * (2 * 1 / 2) / (2 * 3 / 4))
    assert pairs.send(size, stride=2).seconds > 4 * whole.send(size, stride=2).seconds


def test_hosts_that_nvlink_joins_exchange_as_one() -> None:
    """Tensor and expert groups over several hosts of an NVL72; beyond it the cards, of which each GPU has one."""
    joined = named_cluster("gb200-nvl72")
    apart = replace(joined, domain=0)
    size = 2.0**28
    for name in ("all_gather", "all_to_all"):
        near, all_of_it, beyond = (joined.exchange(name, size, members).seconds for members in (4, 64, 128))
        assert all_of_it < 1.4 * near
        assert apart.exchange(name, size, 64).seconds > 1.9 * all_of_it
        assert beyond > all_of_it
    assert joined.send(size, 64).seconds == joined.send(size, 1).seconds < joined.send(size, 72).seconds / 3
    assert joined.send(size, 72, at_once=72).seconds > 3.5 * joined.send(size, 72).seconds  # of four cards one
    assert joined.waited_s(exact(1.0), 10.0, 16) == TAKEN_WITHIN
    ways = ParallelDegrees(tensor=8, pipeline=4, data=4, micro_batch=1, sends=Sends.BLOCKING)
    inside = hops_of(SMALL, joined, ways)
    assert [hop.seconds for hop in inside] == pytest.approx([inside[0].seconds, inside[1].seconds, inside[0].seconds])
    assert inside[1].seconds > inside[0].seconds  # two stages of 32 fill a domain


A100, H100 = map(named_cluster, ("a100-dgx", "h100-dgx"))

SMALL = named_transformer("gpt2-345m")


def test_all_to_all_leaves_a_host_by_each_ranks_own_share_of_the_cards() -> None:
    """A ring passes every byte over a host's cards once; here each of its ranks sends half of its own to the other."""
    cluster = replace(named_cluster("h100-dgx"), of_network=1.0, across=AlphaBeta(0.0, 8e9))
    assert cluster.exchange("all_gather", 1e9, 16).seconds == pytest.approx(15 / 16 * 1e9 / 8e9)
    assert cluster.exchange("all_to_all", 1e9, 16).seconds == pytest.approx(8 / 16 * 1e9 / 1e9)
    inside = cluster.exchange("all_to_all", 1e9, 8)
    assert inside.evidence.startswith("measured table")
    fast = replace(cluster, across=AlphaBeta(0.0, 1e15))
    assert fast.exchange("all_to_all", 1e9, 16).seconds == pytest.approx(fast.exchange("all_to_all", 0.5e9, 8).seconds)


def test_what_runs_beside_a_pass_takes_a_part_of_it() -> None:
    """Of an exchange that a pass hides, and the whole of what it does not hide."""
    assert A100.waited_s(exact(1.0), 10.0, 8) == TAKEN_WITHIN
    assert A100.waited_s(exact(1.0), 10.0, 2, stride=8) == TAKEN_ACROSS < TAKEN_WITHIN
    assert A100.waited_s(exact(1.0), 0.25, 8) == 0.75
    ways = ParallelDegrees(data=8, micro_batch=8, zero=3)
    deep = replace(SMALL, layers=48)  # what is waited for of the first and the last is little of all
    gathered, whole = (predict(deep, A100, replace(ways, zero=zero), 64).parts[GRADIENTS] for zero in (3, 1))
    assert 0 < gathered < whole


@pytest.mark.parametrize("launch", [Launch.EAGER, Launch.COMPILED])
@pytest.mark.parametrize("kernels", Fusion)
def test_passes_of_small_kernels_take_what_their_launches_take(kernels: Fusion, launch: Launch) -> None:
    ways = ParallelDegrees(kernels=kernels, launch=launch)
    small, large = (
        layers_for(replace(SMALL, hidden=hidden, ffn=4 * hidden, seq=seq), A100, replace(ways, micro_batch=size)).block
        for hidden, seq, size in ((128, 128, 1), (4096, 1024, 8))
    )
    for each in (small.forward, small.backward):
        by_host_s = each.launches * launch_s(ways)
        assert each.seconds == pytest.approx(max(by_host_s, each.seconds - spent(each, HOST)))
        assert spent(each, HOST) > 0 or launch is Launch.COMPILED
    assert not spent(large.forward + large.backward, HOST)


def test_graphs_of_layers_wait_for_no_host_and_a_compiler_for_less_of_it() -> None:
    eager, compiled, graphs = (
        predict(replace(SMALL, hidden=128, ffn=512), A100, ParallelDegrees(launch=launch), 8) for launch in Launch
    )
    assert graphs.step.seconds < compiled.step.seconds < eager.step.seconds
    of_update_s = predict(replace(SMALL, hidden=128, ffn=512), A100, ParallelDegrees(launch=Launch.GRAPHS), 1)
    assert graphs.parts[HOST] == pytest.approx(of_update_s.parts[HOST])  # once a step, whatever its micro-batches


def test_what_fsdp_gathers_first_and_sums_last_is_waited_for() -> None:
    """The table and the first block; the others' exchanges run beside the block before or behind."""
    ways = ParallelDegrees(data=8, zero=3)
    alone = layers_for(SMALL, A100, ways)
    layers = stage_layers(SMALL, A100, ways)
    gathered, scattered = (
        sum(
            A100.exchange(name, size * each, 8).seconds for each in (SMALL.block_parameters, SMALL.embedding_parameters)
        )
        for name, size in (("all_gather", 2), ("reduce_scatter", 4))
    )
    assert spent(layers.embedding.forward, GRADIENTS) == pytest.approx(gathered)
    assert spent(layers.embedding.backward, GRADIENTS) == pytest.approx(scattered)
    assert spent(layers.block.forward, GRADIENTS) < gathered
    assert not spent(stage_layers(SMALL, A100, replace(ways, zero=1)).embedding.forward, GRADIENTS)
    assert layers.head == alone.head


def test_the_parts_of_a_step_are_the_step() -> None:
    ways = ParallelDegrees(
        2, 4, 2, micro_batch=1, sequence_parallel=True, recompute=Recompute.SELECTIVE, interleave=2, zero=1
    )
    found = predict(SMALL, A100, ways, 16)
    assert sum(found.parts.values()) == pytest.approx(found.step.seconds)
    assert found.parts[BUBBLE] > 0
    assert found.step.low < found.at_least_s <= found.step.seconds * (1 + 1e-9) < found.step.high
    assert found.at_least_s == pytest.approx(least_s(SMALL, A100, ways, 16))


def test_replicas_sum_their_gradients_over_the_ring_of_their_tensor_rank() -> None:
    ways = ParallelDegrees(2, 1, 8, overlap_gradients=False)
    found = predict(SMALL, A100, ways, 8)
    num_bytes = 4 * stage_parameters(SMALL, ways, 0)
    assert found.parts[GRADIENTS] == pytest.approx(A100.exchange("all_reduce", num_bytes, 8, stride=2).seconds)
    halves = predict(SMALL, A100, replace(ways, fp32_gradients=False), 8)
    assert halves.parts[GRADIENTS] < found.parts[GRADIENTS]


def test_gradients_are_summed_over_replicas_and_the_ranks_that_share_their_tokens() -> None:
    llama = named_transformer("llama3-8b")
    ways = ParallelDegrees(2, data=2, context=4, overlap_gradients=False)
    found = predict(llama, A100, ways, 8)
    num_bytes = 4 * stage_parameters(llama, ways, 0)
    assert ways.devices == 16
    assert found.parts[GRADIENTS] == pytest.approx(A100.exchange("all_reduce", num_bytes, 8, stride=2).seconds)
    assert found.micro_batches == 4
    cut = replace(ways, pipeline=2, tensor=1, context=2)
    (message,) = hops_of(llama, A100, cut)
    assert message == A100.send(2 * llama.seq / 2 * llama.hidden, 1)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_groups_with_the_same_slices_exchange_within_and_sum_across(zero: int) -> None:
    """Eight copies of two tensor ranks, in groups of four: a group's host, and its slices between hosts."""
    llama = named_transformer("llama3-8b")
    ways = ParallelDegrees(2, data=8, zero=zero, shards=4)
    plain = replace(ways, shards=0)
    assert str(ways).count(f"data 8 ZeRO-{zero} within 4") == 1
    of_group, of_all = (stage_memory(llama, each, 0, 1) for each in (ways, plain))
    divided = ["optimiser", "gradients", "weights"][:zero]
    for part in ("optimiser", "gradients", "weights"):
        assert of_group.parts[part] == of_all.parts[part] * (2 if part in divided else 1)
    weights = stage_parameters(llama, ways, 0)
    across = A100.exchange("all_reduce", 4 * weights / 4, 2, stride=8).seconds
    after = {
        1: A100.exchange("reduce_scatter", 4 * weights, 4, 2).seconds,
        2: 0.0,
        3: 0.0,
    }[zero]
    after += A100.exchange("all_gather", 2 * weights, 4, 2).seconds * (zero < 3)
    found = gradients(A100, ways, parameters_of(llama, 2, llama.layers, first=True, last=True), 0.0)
    assert found.seconds == pytest.approx(after + across)
    whole = replace(ways, shards=8)
    assert predict(llama, A100, whole, 8).step == predict(llama, A100, plain, 8).step


def test_sums_across_groups_are_once_a_step_or_with_each_micro_batch() -> None:
    llama = named_transformer("llama3-8b")
    slow = replace(A100, across=AlphaBeta(A100.across.alpha_s, A100.across.bytes_per_s / 20))
    once = ParallelDegrees(data=16, zero=3, shards=8)
    each = replace(once, sums_once=False)
    steps = {
        ways: [predict(llama, slow, ways, 16 * count).step.seconds for count in (1, 4)]
        for ways in (once, each, replace(once, shards=0))
    }
    assert steps[once][1] < steps[each][1] < steps[replace(once, shards=0)][1]
    num_bytes = 4 * stage_parameters(llama, once, 0) / 8
    assert found_s(llama, slow, once) == pytest.approx(slow.exchange("all_reduce", num_bytes, 2, 8).seconds)
    assert found_s(llama, slow, each) == 0.0


def found_s(shape: Transformer, cluster: GpuCluster, ways: ParallelDegrees) -> float:
    return gradients(cluster, ways, parameters_of(shape, 1, shape.layers, first=True, last=True), 0.0).seconds


def test_weights_on_the_host_come_before_each_pass_and_their_gradients_go_there() -> None:
    """In float32, over each device's own link; state is none of the device's, and 16 bytes a weight of the host's."""
    llama = named_transformer("llama3-8b")
    ways = ParallelDegrees(data=4, zero=3, offload=Offload.PARAMETERS)
    weights = stage_parameters(llama, ways, 0) / 4
    found = predict(llama, A100, ways, 16)
    assert (found.memory.state, found.memory.host) == (0, pytest.approx(16 * weights))
    assert found.memory.working > 0
    host = known_host("a100-dgx", A100.host)
    assert found.parts[UPDATE] == pytest.approx(host.adam(weights, 4, 8).seconds)
    plain = layers_for(llama, A100, replace(ways, offload=Offload.NONE)).block
    copy_s = host.copied(4 * llama.block_parameters / 4).seconds
    assert copy_s < plain.forward.seconds  # of so many tokens nothing is waited for
    assert COPIES not in found.parts
    short = replace(llama, seq=512)
    waited = predict(short, A100, ways, 16).parts[COPIES] / (4 * llama.layers)
    alone = layers_for(short, A100, replace(ways, offload=Offload.NONE)).block
    copies = [copy_s - each.seconds for each in (alone.forward, alone.backward)]
    assert waited == pytest.approx(sum(max(0.0, seconds) for seconds in copies))


def test_messages_within_a_host_are_not_those_across() -> None:
    """Two stages of four ranks on each host of eight: the second boundary is between hosts."""
    cut = ParallelDegrees(4, 4, sequence_parallel=True)
    inside, across, again = hops_of(SMALL, A100, cut)
    assert inside == again == A100.send(2 * SMALL.seq * SMALL.hidden / 4, 1)
    assert across == A100.send(2 * SMALL.seq * SMALL.hidden / 4, 8, at_once=4) != inside
    near, straddling = hops_of(SMALL, A100, ParallelDegrees(1, 3, 3))  # three ranks a stage: the last has one elsewhere
    assert near == A100.send(2 * SMALL.seq * SMALL.hidden, 1)
    assert straddling == A100.send(2 * SMALL.seq * SMALL.hidden, 8, at_once=3)


@pytest.mark.parametrize(
    ("ways", "said"),
    [
        (ParallelDegrees(tensor=3), "16 heads do not divide by --tensor 3"),
        (ParallelDegrees(data=2, expert=2), "0 experts do not divide by expert degree 2"),
        (ParallelDegrees(2, sequence_parallel=True, whole_experts=True), "0 experts do not divide by expert degree 1"),
        (ParallelDegrees(context=3), "1024 tokens do not divide by 2 x --context 3"),
        (ParallelDegrees(context=2), "gpt2-345m: context 2 by ring"),
        (
            ParallelDegrees(recompute=Recompute.FULL, offload=Offload.ACTIVATIONS),
            "full recomputation beside activations",
        ),
        (ParallelDegrees(data=3), "a global batch of 16 is not divided by 3 replicas x 1 samples"),
        (ParallelDegrees(pipeline=8, interleave=4), "24 blocks are fewer than 8 stages x 4 chunks"),
        (ParallelDegrees(data=4, shards=3, zero=3), "4 copies of the weights do not divide by --shards 3"),
        (ParallelDegrees(data=4, shards=2), "--shards 2 beside ZeRO-0"),
        (
            ParallelDegrees(data=4, zero=2, offload=Offload.PARAMETERS),
            "weights in the host's memory beside ZeRO-2 and 1 stages",
        ),
        (ParallelDegrees(pipeline=2, blocks=(12, 11)), "2 chunks of 23 blocks for 2 chunks of 24 blocks"),
    ],
)
def test_what_does_not_divide_is_refused(ways: ParallelDegrees, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        predict(SMALL, A100, ways, 16)


@pytest.mark.parametrize("name", ["gpt3-175b", "megatron-22b"])
@pytest.mark.parametrize("tensor", [1, 8])
def test_a_block_keeps_what_korthikanti_et_al_say(name: str, tensor: int) -> None:
    """Section 4: s b h (10 + 24 / t + 5 a s / (h t)), with sequence parallelism all divided, and so on."""
    shape = named_transformer(name)
    b = 2
    unit = shape.seq * b * shape.hidden
    scores = 5 * shape.heads * shape.seq / shape.hidden
    ways = ParallelDegrees(tensor, micro_batch=b)
    assert block_bytes(shape, ways) == pytest.approx(unit * (10 + (24 + scores) / tensor))
    cut = replace(ways, sequence_parallel=True)
    assert block_bytes(shape, cut) == pytest.approx(unit * (34 + scores) / tensor)
    assert block_bytes(shape, replace(cut, recompute=Recompute.SELECTIVE)) == pytest.approx(unit * 34 / tensor)
    assert block_bytes(shape, replace(ways, recompute=Recompute.FULL)) == 2 * unit


def test_ways_to_exchange_keys_that_a_network_has_not_are_refused_with_those_that_it_has() -> None:
    llama = named_transformer("llama3-8b")
    with pytest.raises(UsageError, match="by all-to-all") as told:
        ParallelDegrees(4, context=4, context_exchange=ContextExchange.ALL_TO_ALL).check(llama)
    assert told.value.details == ("8 key heads do not divide by 4 context x 4 tensor ranks",)
    assert told.value.remedies == ("by ring", "by all-gather")
    with pytest.raises(UsageError, match="by ring") as told:
        ParallelDegrees(context=2).check(named_transformer("mistral-7b"))
    assert "32 blocks have windows of 4096 tokens" in told.value.details[0]
    ParallelDegrees(2, context=4, context_exchange=ContextExchange.ALL_TO_ALL).check(llama)


@pytest.mark.parametrize(("tensor", "context"), [(1, 4), (8, 2)])
def test_ranks_that_share_tokens_keep_their_own_and_what_they_exchange(tensor: int, context: int) -> None:
    """Korthikanti et al. 2022, section 4, by context: s b h 34 / (t c) of a block whose scores are never kept."""
    shape = replace(named_transformer("gpt3-175b"), fused_attention=True)
    token = shape.seq // context * shape.hidden  # numbers of a rank's tokens
    ring = ParallelDegrees(tensor, sequence_parallel=True, context=context)
    assert block_bytes(shape, ring) == pytest.approx(34 * token / tensor)
    for sequence, parts in ((True, tensor), (False, 1)):  # the input of a block, in parts or whole
        full = replace(ring, recompute=Recompute.FULL, sequence_parallel=sequence)
        assert block_bytes(shape, full) == 2 * token / parts
    heads = replace(ring, context_exchange=ContextExchange.ALL_TO_ALL)
    assert block_bytes(shape, heads) == pytest.approx((34 + 2) * token / tensor)
    gathered = replace(ring, context_exchange=ContextExchange.ALL_GATHER)
    assert block_bytes(shape, gathered) == pytest.approx((34 + (context - 1) * 4) * token / tensor)
    many, few = (stage_memory(shape, replace(ring, zero=3, data=4 // ranks, context=ranks), 0, 1) for ranks in (1, 4))
    assert many.state == few.state  # slices are of replicas and of ranks that share tokens alike
    held = memory_of(shape, replace(ring, recompute=Recompute.FULL), 1)
    whole = memory_of(replace(shape, seq=shape.seq // context), replace(ring, context=1, recompute=Recompute.FULL), 1)
    passing = 4 * 2 * 2 * token / tensor
    assert held.activations == pytest.approx(whole.activations)
    assert held.working == pytest.approx(max(whole.working, block_bytes(shape, ring) + passing))


@pytest.mark.parametrize("tensor", [1, 4])
def test_a_block_in_float32_keeps_what_its_operators_save(tensor: int) -> None:
    """OPT's, which keeps no mask of attention and of ReLU its result alone, as autograd saves it, tensor by tensor."""
    opt = replace(SMALL, attention_dropout=False, relu=True)
    b = 2
    t = tensor
    numbers = opt.seq * b * opt.hidden
    scores = b * opt.heads * opt.seq**2
    saved = [
        ("inputs of two norms", 2 * numbers),
        ("inputs of two column-parallel products", 2 * numbers),
        ("queries, keys and values", 3 * numbers / t),
        ("probabilities", scores / t),
        ("what attention gives", numbers / t),
        ("what ReLU gives", 4 * numbers / t),
    ]
    masks = 2 * numbers  # of a byte: after attention and after the feed-forward part
    kept = 4 * sum(size for _, size in saved) + masks
    assert block_bytes(opt, ParallelDegrees(tensor, micro_batch=b), SINGLE) == pytest.approx(kept)
    # In half precision the optimiser has the float32 weights: as many bytes a weight either way.
    ways = ParallelDegrees(tensor, micro_batch=b, fp32_gradients=False)
    assert memory_of(opt, ways, 4, SINGLE).state == pytest.approx(memory_of(opt, ways, 4).state)


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_block_of_experts_keeps_what_its_operators_save(tensor: int) -> None:
    b = 2
    t = tensor
    tokens = FINE.seq * b
    saved = [
        ("inputs of two norms, and what these give", 4 * 64),
        ("latent numbers on both sides of their norms, and the rotated ones", 2 * (24 + 16) + 4),
        ("queries, keys, values and what attention gives", 4 * (12 + 12 + 8 + 8) / t),
        ("probabilities", 4 * FINE.seq / t),
        ("tokens in the order of their experts", 2 * 64),
        ("hidden layers of two experts and of the shared one", (2 + 1) * 3 * 32 / t),
    ]
    of_scores = 2 * 4 * 8  # in float32
    kept = tokens * (2 * sum(size for _, size in saved) + of_scores)
    assert block_bytes(FINE, ParallelDegrees(t, micro_batch=b)) == pytest.approx(kept)


def test_each_rank_has_its_part_of_the_experts_and_ends_what_is_unlike() -> None:
    """Three stages of a block and two; the embedding is on the last too, for its block of MTP."""
    shape = replace(FINE, layers=5)
    ways = ParallelDegrees(1, 3, 4, expert=2, blocks=(1, 2, 2))
    norms = 2 * 64 + 24 + 16
    routed = 8 * 3 * 64 * 32
    block = fine_attention() + norms + 64 * 8 + 3 * 64 * 32
    dense = fine_attention() + norms + 3 * 64 * 256
    table = 128 * 64
    mtp = block + routed / 2 + 2 * 64 * 64 + 3 * 64
    first, middle, last = (stage_parameters(shape, ways, stage) for stage in range(3))
    assert first == table + dense + block + routed / 2
    assert middle == 2 * (block + routed / 2)
    assert last == middle + 64 + mtp + 2 * table
    whole = replace(ways, expert=1)
    assert sum(stage_parameters(shape, whole, stage) for stage in range(3)) - table == (
        shape.parameters + shape.mtp_parameters
    )
    # Optimiser state is divided over all ranks that have it: expert ranks change nothing of that.
    states = [stage_memory(shape, replace(ways, zero=1, expert=expert), 1, 4).optimiser for expert in (1, 2, 4)]
    assert states == pytest.approx([states[0]] * 3)
    weights = [stage_memory(shape, replace(ways, expert=expert), 1, 4).weights for expert in (1, 2)]
    assert weights[0] - weights[1] == 2 * 2 * routed / 2


def test_whole_experts_are_as_many_numbers_on_all_ranks_and_their_tokens_are_kept_once() -> None:
    """Of two tensor ranks and four copies: eight expert ranks with an expert each, or four with half of two."""
    shape = replace(FINE, layers=5)
    cut = ParallelDegrees(2, 3, 4, sequence_parallel=True, expert=4, blocks=(1, 2, 2))
    whole = replace(cut, expert=8, whole_experts=True)
    assert stage_parameters(shape, whole, 1) == stage_parameters(shape, cut, 1)
    few = replace(whole, expert=2)  # of 8 experts each has 4 whole
    assert stage_parameters(shape, few, 1) - stage_parameters(shape, whole, 1) == 2 * 3 * 3 * 64 * 32
    states = [stage_memory(shape, replace(ways, zero=1), 1, 4).optimiser for ways in (cut, whole, few)]
    assert states == pytest.approx([states[0]] * 3)
    tokens = FINE.seq
    assert block_bytes(FINE, cut) - block_bytes(FINE, whole) == pytest.approx(2 * 64 * 2 * tokens / 2)


def test_the_first_stage_of_an_interleaved_pipeline_holds_more_and_sharded_state_less() -> None:
    """Section 4.2.3: L (1 + (p - 1) / (p v)) blocks at once."""
    shape = replace(named_transformer("gpt3-175b"), vocab=8, seq=64)
    plain = ParallelDegrees(8, 8)
    cut = ParallelDegrees(8, 8, interleave=3)
    ratio = memory_of(shape, cut, 64).activations / memory_of(shape, plain, 64).activations
    assert ratio == pytest.approx(1 + 7 / 24, rel=0.01)
    states = [memory_of(SMALL, ParallelDegrees(data=4, zero=zero), 4).state for zero in range(4)]
    assert states == sorted(states, reverse=True)
    assert states[3] == pytest.approx(states[0] / 4)


@pytest.mark.parametrize("pipeline", [1, 5, 7])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_the_rank_that_holds_most_is_found_among_unlike_stages(pipeline: int, schedule: str) -> None:
    for recompute in Recompute:
        ways = ParallelDegrees(2, pipeline, 1, micro_batch=2, recompute=recompute, schedule=schedule)
        every = [stage_memory(SMALL, ways, stage, 16).total for stage in range(pipeline)]
        assert memory_of(SMALL, ways, 16).total == max(every)


def test_a_gated_network_with_shared_keys_keeps_less_of_keys_and_more_of_the_feed_forward_part() -> None:
    plain = Transformer("plain", 64, 256, 8, 2, 100, 32, fused_attention=True, dropout=False)
    grouped = replace(plain, kv_heads=2)
    gated = replace(plain, gated=True)
    tokens = 32
    assert block_bytes(plain, ParallelDegrees()) - block_bytes(grouped, ParallelDegrees()) == 2 * tokens * 2 * 6 * 8
    assert block_bytes(gated, ParallelDegrees()) - block_bytes(plain, ParallelDegrees()) == 2 * tokens * 256


def test_a_transformer_holds_as_many_micro_batches_as_lines_are_alive() -> None:
    assert chain_in_flight("1f1b", 3, 8) == kept_by("1f1b", 3, 8)
    assert chain_in_flight("gpipe", 2, 500) == kept_by("gpipe", 2, 500)
    assert in_flight(ParallelDegrees(pipeline=2, interleave=2), 0, 8) == (2 + 2 + 1) / 2


@pytest.mark.parametrize(
    ("stages", "interleave", "micro_batches"), [(1, 1, 5), (2, 1, 4), (4, 1, 9), (4, 2, 8), (3, 4, 6)]
)
def test_alike_chunks_take_the_closed_form_the_simulated_and_the_least_time(
    stages: int, interleave: int, micro_batches: int
) -> None:
    number = stages * interleave
    chunks = Chunks((1.0,) * number, (2.0,) * number, stages)
    closed = 3.0 * interleave * (micro_batches + (stages - 1) / interleave)
    assert chunks.step_s(micro_batches) == pytest.approx(closed)
    assert chunks.least_s(micro_batches) == pytest.approx(closed)


@pytest.mark.parametrize("seed", range(12))
def test_no_schedule_is_shorter_than_the_least(seed: int) -> None:
    draw = random.Random(seed)
    stages = draw.randint(1, 5)
    interleave = draw.randint(1, 3)
    passes = [(draw.random(), draw.random()) for _ in range(stages * interleave)]
    hops = [draw.choice((0.0, 0.2 * draw.random())) for _ in passes[1:]]
    chunks = chunked(passes, hops, draw.choice(list(Sends)), stages)
    for micro_batches in (1, stages, 3 * stages):
        name = "gpipe" if interleave == 1 and draw.random() < 0.3 else "1f1b"
        assert chunks.step_s(micro_batches, name) >= chunks.least_s(micro_batches) - 1e-9


@pytest.mark.parametrize(
    ("chunks", "name"),
    [
        (Chunks((1.0, 2.0, 1.5, 1.0), (2.0, 4.0, 3.0, 2.0), 4), "1f1b"),
        (Chunks((1.0,) * 6, (2.0,) * 6, 3), "1f1b"),
        (Chunks((1.0, 2.0, 1.5), (2.0, 4.0, 5.0), 3), "gpipe"),
        (Chunks((1.0,) * 4, (4.0,) * 4, 4, overlapped_s=2.5), "gpipe"),
    ],
)
def test_many_micro_batches_are_read_off_fewer(chunks: Chunks, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = chunks.step_s(60, name)
    monkeypatch.setattr(pipeline, "MOST_ACTIONS", 150)
    assert chunks.step_s(60, name) == pytest.approx(whole, rel=1e-9)


def test_messages_cost_more_the_less_they_overlap() -> None:
    times = [
        chunked([(1.0, 2.0)] * 4, [0.1] * 3, sends, 4).step_s(8)
        for sends in (Sends.OVERLAPPED, Sends.EXCHANGED, Sends.BLOCKING)
    ]
    assert times == sorted(times)
    assert times[2] > times[1] > times[0]


def stay_s(forward_s: float, backward_s: float, below_s: float, window: int, micro_batches: int) -> float:
    """In closed form what a stage of 1F1B takes at least from its first forward to its last backward.

    ``below_s``: what a micro-batch spends behind it.
    """
    f = forward_s
    b = backward_s
    m = micro_batches
    w = window
    if m <= w:
        return max(m * (f + b), f + below_s + m * b, m * f + below_s + b)
    return max(w * f, f + below_s) + (m - w) * (f + b) + max(w * b, below_s + b)


def least_1f1b_s(chunks: Chunks, micro_batches: int) -> float:
    """The longest of all stays, each with the passes of the stages before it."""
    span_s = 0.0
    below_s = 0.0
    flies_s = 2 * chunks.overlapped_s
    for window in range(1, chunks.stages + 1):
        forward_s = chunks.forward_s[-window]
        backward_s = chunks.backward_s[-window]
        between_s = flies_s if window > 1 else 0.0
        stay = stay_s(forward_s, backward_s, below_s + between_s, window, micro_batches)
        span_s = max(stay, forward_s + backward_s + between_s + span_s)
        below_s += between_s + forward_s + backward_s
    return span_s


def least_of_windows_s(chunks: Chunks, micro_batches: int) -> float:
    """What the recurrence says of 1F1B."""
    behind = label_of()
    for window in range(1, chunks.stages + 1):
        forward_s, backward_s = (np.array([of[-window]]) for of in (chunks.forward_s, chunks.backward_s))
        work_s = micro_batches * (forward_s + backward_s)
        stage = LaidOutStages(forward_s, backward_s, work_s, work_s)
        behind = longer(stage, behind, chunks.overlapped_s if window > 1 else 0.0, micro_batches, window)
    return float(behind.last_backward_s[0])


@pytest.mark.parametrize("seed", range(40))
def test_no_1f1b_is_shorter_than_its_least_which_is_mostly_its_time(seed: int) -> None:
    draw = random.Random(seed)
    equal = 0
    for _ in range(5):
        stages = draw.randint(2, 6)
        micro_batches = draw.choice((1, 2, stages, stages + 1, 3 * stages, 8 * stages))
        blocks = [draw.choice((7, 8, 8, 8, 9)) for _ in range(stages)]
        share = draw.choice((0.25, 1 / 3, 0.5))
        passes = [(3.0 * share * number, 3.0 * (1 - share) * number) for number in blocks]
        passes[-1] = passes[-1][0] + draw.random(), passes[-1][1] + 2 * draw.random()
        hops = [draw.choice((0.0, 0.3, 1.0))] * (stages - 1)
        chunks = chunked(passes, hops, draw.choice(list(Sends)), stages)
        least = least_of_windows_s(chunks, micro_batches)
        simulated = chunks.step_s(micro_batches)
        assert least <= simulated * (1 + 1e-9)
        assert least >= least_1f1b_s(chunks, micro_batches) * (1 - 1e-9)
        assert least >= chunks.least_s(micro_batches) * (1 - 1e-9)
        assert 3.0 * even_s(stages, sum(blocks), micro_batches)[-1] <= least * (1 + 1e-9)
        equal += simulated <= least * (1 + 1e-9)
    assert equal >= 3


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (2, 8), (3, 2), (4, 9), (5, 40)])
def test_blocks_divided_as_evenly_as_can_be_take_the_least_of_all_divisions(stages: int, micro_batches: int) -> None:
    """Of blocks whose two passes are as long as each other."""
    for blocks in range(stages, 9):
        every = (
            least_of_windows_s(Chunks(halves, halves, stages), micro_batches)
            for numbers in product(range(1, blocks + 1), repeat=stages)
            if sum(numbers) == blocks
            for halves in [tuple(number / 2 for number in numbers)]
        )
        assert even_s(stages, 8, micro_batches)[blocks] == pytest.approx(min(every))


def test_a_fused_loss_works_in_place_and_another_keeps_each_step_of_it() -> None:
    """Logits in half precision and in float32, which become the gradient; else their exponential and it are further."""
    ways = ParallelDegrees(2, micro_batch=2)
    logits = 2 * SMALL.seq * SMALL.vocab / 2
    fused, apart = (memory_of(SMALL, replace(ways, kernels=how), 4).working for how in (Fusion.FUSED, Fusion.KERNELS))
    assert apart - fused == 8 * logits
    assert fused == 6 * logits + 4 * 2 * SMALL.seq * SMALL.hidden
