from __future__ import annotations

from dataclasses import replace

import pytest

from planner.extras.transformers.cluster import named_cluster
from planner.extras.transformers.memory import SINGLE, block_bytes, memory_of, stage_memory, stage_parameters
from planner.extras.transformers.shape import ParallelDegrees, Recompute, Transformer, named_transformer
from planner.extras.transformers.step import BUBBLE, GRADIENTS, hops_of, least_s, predict
from planner.ir.errors import UsageError

A100 = named_cluster("a100-dgx")
SMALL = named_transformer("gpt2-345m")


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


def test_messages_within_a_host_are_not_those_across() -> None:
    """Two stages of four ranks on each host of eight: the second boundary is between hosts."""
    cut = ParallelDegrees(4, 4, sequence_parallel=True)
    inside, across, again = hops_of(SMALL, A100, cut)
    assert inside == again == A100.send(2 * SMALL.seq * SMALL.hidden / 4, 1)
    assert across == A100.send(2 * SMALL.seq * SMALL.hidden / 4, 8, at_once=4) != inside


@pytest.mark.parametrize(
    ("ways", "said"),
    [
        (ParallelDegrees(tensor=3), "16 heads do not divide by --tensor 3"),
        (ParallelDegrees(data=3), "a global batch of 16 is not divided by 3 replicas x 1 samples"),
        (ParallelDegrees(pipeline=8, interleave=4), "24 blocks are fewer than 8 stages x 4 chunks"),
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
    shape, b = named_transformer(name), 2
    unit = shape.seq * b * shape.hidden
    scores = 5 * shape.heads * shape.seq / shape.hidden
    ways = ParallelDegrees(tensor, micro_batch=b)
    assert block_bytes(shape, ways) == pytest.approx(unit * (10 + (24 + scores) / tensor))
    cut = replace(ways, sequence_parallel=True)
    assert block_bytes(shape, cut) == pytest.approx(unit * (34 + scores) / tensor)
    assert block_bytes(shape, replace(cut, recompute=Recompute.SELECTIVE)) == pytest.approx(unit * 34 / tensor)
    assert block_bytes(shape, replace(ways, recompute=Recompute.FULL)) == 2 * unit


@pytest.mark.parametrize("tensor", [1, 4])
def test_a_block_in_float32_keeps_what_its_operators_save(tensor: int) -> None:
    """OPT's, which keeps no mask of attention and of ReLU its result alone, as autograd saves it, tensor by tensor."""
    opt, b, t = replace(SMALL, attention_dropout=False, relu=True), 2, tensor
    numbers, scores = opt.seq * b * opt.hidden, b * opt.heads * opt.seq**2
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


def test_the_first_stage_of_an_interleaved_pipeline_holds_more_and_sharded_state_less() -> None:
    """Section 4.2.3: L (1 + (p - 1) / (p v)) blocks at once."""
    shape = replace(named_transformer("gpt3-175b"), vocab=8, seq=64)
    plain, cut = ParallelDegrees(8, 8), ParallelDegrees(8, 8, interleave=3)
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
    grouped, gated = replace(plain, kv_heads=2), replace(plain, gated=True)
    tokens = 32
    assert block_bytes(plain, ParallelDegrees()) - block_bytes(grouped, ParallelDegrees()) == 2 * tokens * 2 * 6 * 8
    assert block_bytes(gated, ParallelDegrees()) - block_bytes(plain, ParallelDegrees()) == 2 * tokens * 256
