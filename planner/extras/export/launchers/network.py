"""What launchers are told of a network, from the sizes that a shape has.

A size that a shape does not name has the value that its kind of block has: Llama's (gated, rotary) have RMSNorm and no
biases, GPT's have LayerNorm and biases.  Whatever a shape names and nobody tells is found by :func:`sizes_beyond`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields
from typing import Any

from planner.extras.transformers.shape import ParallelDegrees, Transformer

_ROTARY_BASES = {"llama3": 500_000, "mixtral": 1_000_000, "qwen": 1_000_000}
"""By the beginning of a network's name: ``rope_theta`` of its ``config.json`` at huggingface.co."""
_ROTARY_BASE = 10_000
"""Of others (Su et al. 2021)."""


def size_of(shape: Transformer, name: str) -> Any:
    """The size of that name; of one that the shape does not name, what its kind of block has."""
    is_modern = shape.gated and shape.rotary
    usual: dict[str, Any] = {
        "layer_norm": not is_modern,
        **dict.fromkeys(("qkv_bias", "out_bias", "ffn_bias"), not is_modern),
        "rotary_base": next(
            (base for name, base in _ROTARY_BASES.items() if shape.name.startswith(name)), _ROTARY_BASE
        ),
    }
    return getattr(shape, name, usual.get(name, 0))


def sizes_beyond(shape: Transformer, names: Collection[str]) -> list[str]:
    """Sizes beyond those of ``names`` that are not those that a network has if it is not said."""
    return [
        f"{field.name}={getattr(shape, field.name)}"
        for field in fields(shape)
        if field.name not in names and getattr(shape, field.name) != field.default
    ]


def expert_degree(ways: ParallelDegrees) -> int:
    """Ranks that share a block's experts, where ways have such a degree."""
    return getattr(ways, "expert", 1)
