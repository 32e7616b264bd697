from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from planner.extras.kernels.estimates import TABLE, Estimate
from planner.extras.kernels.links import AlphaBeta
from planner.extras.transformers.cluster import GpuCluster, named_cluster
from planner.extras.transformers.layers import ATTENTION, EXCHANGE, MEMORY, PRODUCTS, layers_for
from planner.extras.transformers.passes import Cost
from planner.extras.transformers.shape import Fusion, ParallelDegrees, Recompute, Transformer

SHAPE = Transformer("small", hidden=64, ffn=256, heads=8, layers=4, vocab=128, seq=16)
SHARED = replace(SHAPE, kv_heads=4, gated=True, rotary=True, dropout=False)


class Counting:
    """Kernels that take a second for each operation, or byte."""

    def gemm(self, m: int, n: int, k: int, batch: int = 1) -> Estimate:
        return exact(2.0 * m * n * k * batch)

    def memory_bound(self, num_bytes: float, launches: int = 1, kind: str = "elementwise") -> Estimate:
        return exact(num_bytes)


def exact(seconds: float) -> Estimate:
    return Estimate(seconds, seconds, seconds, TABLE)


@dataclass(frozen=True, slots=True)
class Counted(GpuCluster):
    """A cluster that counts operations and bytes; an exchange takes a second for each byte that a rank sends."""

    @property
    def kernels(self) -> Any:
        return Counting()

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


@pytest.mark.parametrize("shape", [SHAPE, SHARED])
@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_the_products_of_all_tensor_ranks_are_those_of_the_network(shape: Transformer, tensor: int) -> None:
    layers = layers_for(shape, COUNTED, ParallelDegrees(tensor, micro_batch=2))
    tokens = 2 * shape.seq
    weights = shape.block_parameters - 9 * shape.hidden - 2 * shape.ffn
    assert tensor * spent(layers.block.forward, PRODUCTS) == 2 * tokens * weights
    assert tensor * spent(layers.block.backward, PRODUCTS) == 4 * tokens * weights
    assert tensor * spent(layers.head.forward, PRODUCTS) == 2 * tokens * shape.vocab * shape.hidden
    scores = 4 * tokens * shape.seq * shape.hidden
    assert tensor * spent(layers.block.forward, ATTENTION) == scores
    assert tensor * spent(layers.block.backward, ATTENTION) == 2 * scores


def test_the_step_has_the_operations_of_its_products() -> None:
    layers = layers_for(SHAPE, COUNTED, ParallelDegrees(micro_batch=3))
    passes = [(layers.block, SHAPE.layers), (layers.head, 1)]
    products = sum(
        number * spent(part, what)
        for layer, number in passes
        for part in (layer.forward, layer.backward)
        for what in (PRODUCTS, ATTENTION)
    )
    assert SHAPE.step_flop(3) == products


def test_sequence_parallelism_sends_as_much_forward_and_moves_less() -> None:
    """A reduce-scatter and an all-gather are an all-reduce; backward gathers the inputs of two products once more."""
    plain, cut = (
        layers_for(SHAPE, COUNTED, ParallelDegrees(4, sequence_parallel=sequence, overlap_tensor=False)).block
        for sequence in (False, True)
    )
    assert spent(cut.forward, EXCHANGE) == spent(plain.forward, EXCHANGE) > 0
    assert spent(cut.backward, EXCHANGE) == 1.5 * spent(plain.backward, EXCHANGE)
    assert spent(cut.forward, MEMORY) < spent(plain.forward, MEMORY)
    assert spent(cut.forward, PRODUCTS) == spent(plain.forward, PRODUCTS)


def test_recomputation_adds_a_forward_or_the_core_of_attention() -> None:
    none, selective, full = (layers_for(SHAPE, COUNTED, ParallelDegrees(2, recompute=how)).block for how in Recompute)
    assert full.backward.seconds == pytest.approx(none.backward.seconds + none.forward.seconds)
    more = selective.backward.seconds - none.backward.seconds
    assert spent(none.forward, ATTENTION) < more < none.forward.seconds
    assert {none.forward.seconds, selective.forward.seconds, full.forward.seconds} == {none.forward.seconds}


def test_less_is_hidden_and_more_is_moved_where_software_does_less() -> None:
    overlapped, waited = (
        layers_for(SHAPE, COUNTED, ParallelDegrees(2, overlap_tensor=on)).block.backward for on in (True, False)
    )
    assert spent(overlapped, EXCHANGE) < spent(waited, EXCHANGE)
    fused, kernels, eager = (layers_for(SHAPE, COUNTED, ParallelDegrees(kernels=how)).block for how in Fusion)
    assert fused.backward.seconds < kernels.backward.seconds < eager.backward.seconds
    assert fused.forward.seconds == kernels.forward.seconds < eager.forward.seconds


def test_separate_kernels_copy_biases_before_their_products_and_sum_their_gradients() -> None:
    """Of the operators' own texts: 4 bytes a number of the products' results forward, and 2 backward."""
    kernels, eager = (
        layers_for(SHAPE, COUNTED, ParallelDegrees(2, kernels=how)).block for how in (Fusion.KERNELS, Fusion.EAGER)
    )
    results = SHAPE.seq * (3 * 64 / 2 + 64 + 256 / 2 + 64)
    scores, wide, narrow = 8 / 2 * SHAPE.seq**2, SHAPE.seq * 256 / 2, SHAPE.seq * 64 / 2
    moved = 4 * scores * 2 + 5 * wide * 7 + 4 * narrow * 4
    residual = 2 * SHAPE.seq * 64 * (5 + 6 - 7)
    assert spent(eager.forward, MEMORY) - spent(kernels.forward, MEMORY) == moved + residual + 4 * results
    assert spent(eager.backward, MEMORY) - spent(kernels.backward, MEMORY) == 1.5 * moved + 2 * results


def test_probabilities_that_are_not_dropped_take_no_kernel_for_it() -> None:
    dropped, kept = (
        layers_for(replace(SHAPE, attention_dropout=on), COUNTED, ParallelDegrees()).block for on in (True, False)
    )
    for one, other in ((dropped.forward, kept.forward), (dropped.backward, kept.backward)):
        assert spent(one, MEMORY) - spent(other, MEMORY) == 5 * 8 * SHAPE.seq**2


@pytest.mark.parametrize("sequence", [False, True])
def test_sums_hide_behind_the_weight_products_of_the_column_parallel_layers(sequence: bool) -> None:
    """Those of queries, keys, values and of the first feed-forward half; with sequence parallelism the input's too."""
    overlapped, waited = (
        layers_for(SHAPE, SLOW, ParallelDegrees(2, sequence_parallel=sequence, overlap_tensor=on)).block.backward
        for on in (True, False)
    )
    columns = (3 * SHAPE.hidden + SHAPE.ffn) * SHAPE.hidden / 2
    hidden = 2 * SHAPE.seq * columns * (2 if sequence else 1)
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


def test_v100_are_joined_by_their_tables_and_eight_of_a_host_share_tcp() -> None:
    hosts = named_cluster("p3.16xlarge")
    two, four = (hosts.exchange("all_reduce", 64 * 2**20, members) for members in (2, 4))
    assert {two.evidence, four.evidence} == {"measured table"}
    assert hosts.send(3.125e9, 8).seconds == pytest.approx(1 / 0.58, rel=1e-3)  # 25 Gbit/s


def test_beyond_a_pair_that_nvlink_joins_the_slower_link_counts() -> None:
    pairs, whole = named_cluster("a100-pairs"), named_cluster("a100-dgx")
    size = 64 * 2**20
    of_two, of_four = (pairs.exchange("all_reduce", size, members).seconds for members in (2, 4))
    assert of_two < 2 * whole.exchange("all_reduce", size, 2).seconds
    assert of_four > 4 * of_two
    apart = pairs.exchange("all_reduce", size, 2, stride=2).seconds
    assert apart == pytest.approx(of_four * (2 * 1 / 2) / (2 * 3 / 4))
    assert pairs.send(size, stride=2).seconds > 4 * whole.send(size, stride=2).seconds
