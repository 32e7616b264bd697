"""What of a block is kept for backward where some of it is computed again: by module, or by operator.

Modules are those of Megatron-LM (``--recompute-modules``: ``megatron/core/transformer/transformer_config.py``), which
keeps the inputs of ``core_attn``, ``mlp``, ``moe`` and ``shared_experts``, and throws away what ``moe_act``,
``layernorm`` and ``mla_up_proj`` give once it is used.  Norms before products of their own are one kernel with these
there (Transformer Engine), and ``layernorm`` says nothing of them.  Operators are torchtitan's
(``torchtitan/distributed/activation_checkpoint.py``): of the products in the order of the model's text those of odd
numbers are kept, without the router's, and those of routed experts, which are not among them, are computed again.

A set of modules frees the sum of what they do, and takes the sum of their times; what two of them share (``moe`` has
``moe_act`` and ``shared_experts`` in it) is in no set twice.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import chain, combinations

from planner.extras.transformers.shape import Module, ParallelDegrees, Product, ProductCut, Transformer
from planner.ir.errors import UsageError

ROUTER_BYTES = 2 * 4
"""Of an expert's score of a token: in float32, before and after its softmax."""
CORE = (Module.CORE_ATTN,)
_WITHIN_MOE = {Module.MOE_ACT, Module.SHARED_EXPERTS}
_BEHIND_PRODUCTS = 2
"""Of a block's products those that are summed over tensor ranks."""


@functools.cache
def modules_of(shape: Transformer) -> tuple[Module, ...]:
    """Those that free something of its blocks."""
    has_experts = shape.experts > 0
    applies = {
        Module.CORE_ATTN: not shape.fused_attention,
        Module.MOE_ACT: has_experts and not shape.relu,
        Module.LAYERNORM: has_experts or shape.kv_rank > 0,
        Module.MLA_UP_PROJ: shape.kv_rank > 0,
        Module.MLP: not has_experts or shape.first_dense > 0,
        Module.MOE: has_experts,
        Module.SHARED_EXPERTS: shape.shared_ffn > 0,
    }
    return tuple(module for module in Module if applies[module])


def require_modules(shape: Transformer, names: tuple[Module, ...]) -> None:
    """Raises :class:`UsageError` where its blocks have no such modules, or one of them is a part of another."""
    own = modules_of(shape)
    missing = [name for name in names if name not in (*CORE, *own)]
    if missing:
        raise UsageError(
            f"{shape.name} has nothing of {', '.join(missing)} that is worth computing again",
            [f"it has {', '.join(own) or 'none'}"],
            [f"--recompute-modules {','.join(own)}"] if own else ["--recompute full"],
        )
    if Module.MOE in names and _WITHIN_MOE & {*names}:
        parts = [name for name in names if name in _WITHIN_MOE]
        raise UsageError(
            f"moe has {' and '.join(parts)} in it",
            [f"--recompute-modules {','.join(names)}"],
            ["--recompute-modules moe", f"--recompute-modules {','.join(parts)}"],
        )


@functools.cache
def module_sets(shape: Transformer) -> tuple[tuple[Module, ...], ...]:
    """All sets of them, by how many they are, but for those that name a part of ``moe`` beside it."""
    modules = modules_of(shape)
    sets = chain.from_iterable(combinations(modules, number) for number in range(1, len(modules) + 1))
    return tuple(names for names in sets if not (Module.MOE in names and _WITHIN_MOE & {*names}))


def own_modules(shape: Transformer, ways: ParallelDegrees) -> list[Module]:
    """Of a way's modules those that are in an alike block of ``shape``."""
    of_block = {Module.CORE_ATTN, *modules_of(shape)} - ({Module.MLP} if shape.experts else set())
    return [module for module in ways.recompute_modules if module in of_block]


def freed_bytes(shape: Transformer, ways: ParallelDegrees, module: Module, width: int) -> float:
    """Of a block and micro-batch; arguments as of :func:`planner.extras.transformers.memory.block_bytes`."""
    s = shape
    tokens = ways.tokens(s)
    own = tokens / ways.tensor if ways.sequence_parallel else float(tokens)
    of_norm = own * s.hidden * width
    of_hidden_layers = (3 if s.gated else 1 if s.relu else 2) * tokens * width / ways.tensor
    if module is Module.CORE_ATTN:
        return 0.0 if s.fused_attention else score_bytes(s, width) * ways.micro_batch * s.heads * s.seq**2 / ways.tensor
    if module is Module.MOE_ACT:
        return tokens * width * s.top_k * s.expert_ffn / ways.tensor
    if module is Module.LAYERNORM:
        return ((s.kv_rank > 0) + (s.experts > 0)) * of_norm
    if module is Module.MLA_UP_PROJ:
        return tokens * width * s.heads * (2 * s.head_size + s.value_size) / ways.tensor
    if module is Module.MLP:
        return of_norm + of_hidden_layers * s.ffn
    if module is Module.MOE:
        routed = tokens * width * s.hidden * s.top_k * ways.expert_tensor / ways.tensor
        return own * ROUTER_BYTES * s.experts + of_hidden_layers * s.taken_ffn + routed
    return of_hidden_layers * s.shared_ffn


def score_bytes(shape: Transformer, width: int) -> int:
    """Of a probability of attention: itself; its mask, and what is left of it where some are dropped."""
    return 2 * width + 1 if shape.drops_scores else width


def operators_kept(shape: Transformer, ways: ParallelDegrees, width: int) -> float:
    """Bytes of a block and micro-batch that are kept with ``OPERATORS``."""
    s = shape
    tokens = ways.tokens(s)
    own = tokens / ways.tensor if ways.sequence_parallel else tokens
    sums = _BEHIND_PRODUCTS * (ways.sequence_parallel and ways.tensor > 1)
    kept = own * s.hidden * (1 + sums) + tokens * s.heads * s.value_size / ways.tensor
    for product in counted_products(s)[::2]:
        cut = ways.tensor if product.cut is ProductCut.COLUMN else 1
        kept += (own if product.cut is ProductCut.WHOLE else tokens) * product.outputs / cut
    return width * kept


def counted_products(shape: Transformer) -> list[Product]:
    """Of a block, as the model's text has them: queries, keys and values apart, a gate and what it weighs apart."""
    first, *others = shape.attention_products
    heads = shape.heads * shape.head_size, shape.kv_heads * shape.head_size, shape.kv_heads * shape.value_size
    counted = [first, *others] if shape.kv_rank else [replace(first, outputs=number) for number in heads] + others
    for product in shape.feed_forward_products:
        if product.weighs or product.experts:
            continue
        parts = 2 if shape.gated and product.cut is ProductCut.COLUMN else 1
        counted += [replace(product, outputs=product.outputs // parts)] * parts
    return counted
