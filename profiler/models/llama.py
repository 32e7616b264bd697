"""A decoder-only transformer as Llama is (Touvron et al. 2023).

It has root-mean-square norms, rotary positions, gated feed-forward parts, and groups of heads of queries that share
keys and values (Ainslie et al. 2023, "GQA").
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from profiler.models.example import Example, next_tokens, token_cross_entropy


class GroupedAttention(nn.Module):
    """Causal attention of ``num_heads`` heads of queries, of which equal groups share a head of keys and values."""

    def __init__(self, width: int, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        self.size = width // num_heads
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, num_kv_heads * self.size, bias=False)
        self.v_proj = nn.Linear(width, num_kv_heads * self.size, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(sample, time, width) to the same; ``cos`` and ``sin`` are (time, head size)."""
        query, key = (_rotated(self._split(layer(x)), cos, sin) for layer in (self.q_proj, self.k_proj))
        y = functional.scaled_dot_product_attention(
            query, key, self._split(self.v_proj(x)), is_causal=True, enable_gqa=True
        )
        result: Tensor = self.o_proj(y.transpose(1, 2).flatten(2))
        return result

    def _split(self, x: Tensor) -> Tensor:
        """(sample, time, heads * size) to (sample, head, time, size)."""
        return x.view(*x.shape[:2], -1, self.size).transpose(1, 2)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs of features turned by their place's angles (Su et al. 2021, "RoFormer")."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class LlamaBlock(nn.Module):
    """Pre-norm attention and gated feed-forward network, each beside a residual path."""

    def __init__(self, width: int, hidden: int, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        self.input_norm = nn.RMSNorm(width)
        self.attention = GroupedAttention(width, num_heads, num_kv_heads)
        self.post_norm = nn.RMSNorm(width)
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(sample, time, width) to the same."""
        x = x + self.attention(self.input_norm(x), cos, sin)
        y = self.post_norm(x)
        gated: Tensor = functional.silu(self.gate_proj(y)) * self.up_proj(y)
        result: Tensor = x + self.down_proj(gated)
        return result


class Llama(nn.Module):
    """Token embedding, blocks, a final norm and a head, which may have the embedding's weight."""

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        *,
        vocabulary: int,
        width: int,
        hidden: int,
        layers: int,
        heads: int,
        kv_heads: int,
        context: int,
        tied: bool,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, hidden, heads, kv_heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        size = width // heads
        angles = torch.outer(torch.arange(context), 1e4 ** (-torch.arange(0, size, 2) / size))
        angles = torch.cat((angles, angles), dim=1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """(sample, time) to logits (sample, time, vocabulary)."""
        time = tokens.shape[1]
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, self.cos[:time], self.sin[:time])
        logits: Tensor = self.head(self.norm(x))
        return logits


def llama(
    *,
    input_shape: tuple[int, ...] = (4, 256),
    vocabulary: int = 32000,
    width: int = 512,
    hidden: int = 1408,
    layers: int = 8,
    heads: int = 8,
    kv_heads: int = 4,
    context: int = 2048,
    tied: bool = False,
) -> Example:
    """A small Llama.

    `input_shape` is (sample, time) with time at most `context`; `heads` divides `width`, `kv_heads` divides `heads`.
    """
    example = next_tokens("llama", input_shape, vocabulary, context=context)
    for name, size, divisor in (("width", width, heads), ("heads", heads, kv_heads)):
        if size % divisor:
            raise ValueError(f"llama: {name} {size} is no multiple of {divisor}")
    module = Llama(
        vocabulary=vocabulary,
        width=width,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        context=context,
        tied=tied,
    )
    return module, example, token_cross_entropy
