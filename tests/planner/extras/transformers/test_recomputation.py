"""What is kept and what is computed again, by module and by operator, beside closed forms of the networks' texts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.extras.transformers.cluster import named_cluster
from planner.extras.transformers.layers import ModuleSet, layers_for, useful_sets
from planner.extras.transformers.memory import block_bytes, memory_with, stage_memory
from planner.extras.transformers.placement import require_executable
from planner.extras.transformers.recomputation import counted_products, freed_bytes, module_sets, modules_of
from planner.extras.transformers.shape import Module, ParallelDegrees, Recompute, Transformer, named_transformer
from planner.ir.errors import UsageError

A100 = named_cluster("a100-dgx")
GPT = named_transformer("gpt3-175b")
LLAMA = named_transformer("llama3-8b")
MIXTRAL = named_transformer("mixtral-8x7b")
DEEPSEEK = named_transformer("deepseek-v3")
CUT = ParallelDegrees(tensor=2, sequence_parallel=True)


def by_modules(ways: ParallelDegrees, *modules: Module) -> ParallelDegrees:
    return replace(ways, recompute=Recompute.SELECTIVE, recompute_modules=modules)


def test_a_networks_modules_are_those_that_free_something() -> None:
    assert modules_of(LLAMA) == (Module.MLP,)
    assert modules_of(GPT) == (Module.CORE_ATTN, Module.MLP)
    assert modules_of(MIXTRAL) == (Module.MOE_ACT, Module.LAYERNORM, Module.MOE)
    assert set(modules_of(DEEPSEEK)) == {*Module} - {Module.CORE_ATTN}
    assert module_sets(LLAMA) == ((Module.MLP,),)
    parts = 1 + 2 * 2  # moe, or any of its two parts
    assert len(module_sets(DEEPSEEK)) == 2**3 * parts - 1


@pytest.mark.parametrize("ways", [ParallelDegrees(micro_batch=2), CUT], ids=str)
def test_a_module_frees_what_its_text_makes(ways: ParallelDegrees) -> None:
    """Numbers of two bytes: a token's of the tensor rank's features, but for norms, whose tokens are divided."""

    def freed(shape: Transformer, *modules: Module) -> float:
        return block_bytes(shape, ways) - block_bytes(shape, by_modules(ways, *modules))

    t = ways.tensor
    dense, routed, latent = (2 * ways.tokens(shape) / t for shape in (LLAMA, MIXTRAL, DEEPSEEK))
    hidden = LLAMA.hidden * (t if not ways.sequence_parallel else 1)
    assert freed(LLAMA, Module.MLP) == pytest.approx(dense * (hidden + 3 * 14336))
    assert freed(GPT, Module.CORE_ATTN) == 5 * ways.micro_batch * 96 * 2048**2 / t
    assert freed(MIXTRAL, Module.MOE_ACT) == routed * 2 * 14336
    assert freed(MIXTRAL, Module.LAYERNORM) == pytest.approx(routed * hidden)
    scores = 4 * 8 * (t if not ways.sequence_parallel else 1)
    whole = routed * (3 * 2 * 14336 + 2 * 4096 * t + scores)
    assert freed(MIXTRAL, Module.MOE) == pytest.approx(whole)
    assert freed(DEEPSEEK, Module.SHARED_EXPERTS) == latent * 3 * 2048
    assert freed(DEEPSEEK, Module.MLA_UP_PROJ) == latent * 128 * (192 + 192 + 128)
    assert freed(DEEPSEEK, Module.MLP) == 0
    assert freed(DEEPSEEK.dense, Module.MLP) > latent * 3 * 18432


def test_operators_keep_a_blocks_input_attention_and_every_other_product() -> None:
    """Of llama's seven the first, third, fifth and seventh; a tensor rank's part of a sum is as wide as the sum."""
    ways = ParallelDegrees(recompute=Recompute.OPERATORS)
    names = [product.outputs for product in counted_products(LLAMA)]
    assert names == [4096, 1024, 1024, 4096, 14336, 14336, 4096]
    kept = 4096 + 4096 + (4096 + 1024 + 14336 + 4096)
    assert block_bytes(LLAMA, ways) == 2 * 8192 * kept
    cut = replace(ways, tensor=2, sequence_parallel=True)
    sums = 2 * 4096 / 2
    of_rank = (4096 + 4096) / 2 + sums + (4096 + 1024 + 14336) / 2 + 4096
    assert block_bytes(LLAMA, cut) == 2 * 8192 * of_rank
    with pytest.raises(UsageError, match="recomputation by operators beside attention that is not fused"):
        ways.check(GPT)


@pytest.mark.parametrize("ways", [ParallelDegrees(micro_batch=2), CUT], ids=str)
def test_a_set_takes_the_sum_of_its_modules_times(ways: ParallelDegrees) -> None:
    def more_s(shape: Transformer, *modules: Module) -> float:
        none, again = (layers_for(shape, A100, each).block for each in (ways, by_modules(ways, *modules)))
        assert again.forward == none.forward
        return again.backward.seconds - none.backward.seconds

    single = [more_s(DEEPSEEK, module) for module in (Module.MLA_UP_PROJ, Module.MOE_ACT, Module.LAYERNORM)]
    assert min(single) > 0
    together = more_s(DEEPSEEK, Module.MLA_UP_PROJ, Module.MOE_ACT, Module.LAYERNORM)
    assert together == pytest.approx(sum(single))
    assert more_s(DEEPSEEK, Module.MOE) > more_s(DEEPSEEK, Module.MOE_ACT, Module.SHARED_EXPERTS)
    assert more_s(DEEPSEEK, Module.MLP) == 0  # of the dense blocks, which the first stage has
    embedding, with_mlp = (
        layers_for(DEEPSEEK, A100, each).embedding.backward.seconds for each in (ways, by_modules(ways, Module.MLP))
    )
    assert with_mlp > embedding
    block = layers_for(LLAMA, A100, ways).block
    operators = layers_for(LLAMA, A100, replace(ways, recompute=Recompute.OPERATORS)).block
    assert more_s(LLAMA, Module.MLP) < block.forward.seconds
    assert block.backward.seconds < operators.backward.seconds < block.backward.seconds + block.forward.seconds


def test_a_rank_holds_less_of_each_micro_batch_in_flight_and_what_is_computed_again_of_one() -> None:
    ways = ParallelDegrees(pipeline=4, micro_batch=2)
    less = by_modules(ways, Module.MLP)
    freed = freed_bytes(LLAMA, less, Module.MLP, 2)
    none, again = (stage_memory(LLAMA, each, 1, 8) for each in (ways, less))
    assert none.activations - again.activations == pytest.approx(3 * 8 * freed)
    assert (none.working, again.working) == (0, freed)
    at_least = {names: memory_with(DEEPSEEK, by_modules(CUT, *names), 1, 1.0, (False, False)).total
                for names in module_sets(DEEPSEEK)}  # fmt: skip
    assert max(at_least.values()) == pytest.approx(min(at_least.values()))  # of one block nothing is won


def test_of_all_sets_those_are_useful_that_no_other_is_as_good_as() -> None:
    """Beside all pairs, by the layers' own times and the memory's own bytes."""
    shape = replace(DEEPSEEK, first_dense=0, mtp=0)
    marks = {}
    for names in module_sets(shape):
        ways = by_modules(CUT, *names)
        block = layers_for(shape, A100, ways).block
        marks[names] = block.backward.seconds, block_bytes(shape, ways)
    useful = useful_sets(shape, A100, CUT, module_sets(shape))
    for names, (seconds, num_bytes) in marks.items():
        better = [
            other for other, (less_s, fewer) in marks.items() if less_s < seconds * (1 - 1e-9) and fewer < num_bytes
        ]
        assert not (better and names in {one.modules for one in useful})
    assert [one.block_s for one in useful] == sorted(one.block_s for one in useful)
    for one in useful:
        block = layers_for(shape, A100, by_modules(CUT, *one.modules)).block
        assert one == ModuleSet(one.modules, pytest.approx(block.forward.seconds + block.backward.seconds))
    assert 3 < len(useful) < len(marks)


@pytest.mark.parametrize(
    ("ways", "said"),
    [
        (by_modules(ParallelDegrees(), Module.MLP), "mlp computed again: it is attention's core, or a whole block"),
        (ParallelDegrees(recompute=Recompute.OPERATORS), "recomputation by operators"),
        (ParallelDegrees(data=4, zero=3, shards=2), "ZeRO-3 within groups of 2: all replicas divide the state"),
    ],
)
def test_what_no_plan_says_is_refused_by_name(ways: ParallelDegrees, said: str) -> None:
    with pytest.raises(UsageError, match="no plan says") as told:
        require_executable(ways)
    assert told.value.details == (said,)
