"""A decoder-only transformer with pre-norm blocks and learned positions (Radford et al. 2019, "GPT-2").

It differs from GPT-2 where that would tie distant layers or mix heads in one matrix: the head has weights of its own,
and query, key and value are three layers, so that a range of heads is a range of output features of each.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from profiler.models.example import Example, next_tokens, token_cross_entropy


class CausalSelfAttention(nn.Module):
    """Multi-head attention of each position to itself and those before it, fused or operator by operator."""

    mask: Tensor

    def __init__(self, width: int, num_heads: int, context: int, dropout: float, is_fused: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.is_fused = is_fused
        self.drop = nn.Dropout(dropout)
        if not is_fused:
            self.register_buffer("mask", torch.ones(context, context, dtype=torch.bool).triu(1), persistent=False)
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(sample, time, width) to the same."""
        query, key, value = (self._split(layer(x)) for layer in (self.query, self.key, self.value))
        result: Tensor = self.out(self._mixed(query, key, value).transpose(1, 2).flatten(2))
        return result

    def _mixed(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """(sample, head, time, width / heads) of all three to the same."""
        if self.is_fused:
            dropout = self.drop.p if self.training else 0.0
            return functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        scores = query @ key.transpose(2, 3) * query.shape[3] ** -0.5
        scores = scores.masked_fill(self.mask[: query.shape[2], : query.shape[2]], float("-inf"))
        mixed: Tensor = _dropped(self.drop, scores.softmax(dim=3)) @ value
        return mixed

    def _split(self, x: Tensor) -> Tensor:
        """(sample, time, width) to (sample, head, time, width / heads)."""
        heads: Tensor = x.unflatten(2, (self.num_heads, -1))  # type: ignore[no-untyped-call]  # torch does not type it
        return heads.transpose(1, 2)


def _dropped(drop: nn.Dropout, x: Tensor) -> Tensor:
    result: Tensor = drop(x) if drop.p else x
    return result


class GptBlock(nn.Module):
    """Pre-norm attention and feed-forward network, each beside a residual path."""

    def __init__(self, width: int, num_heads: int, context: int, dropout: float, is_fused: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = CausalSelfAttention(width, num_heads, context, dropout, is_fused)
        self.norm2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.gelu = nn.GELU(approximate="tanh")
        self.contract = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(sample, time, width) to the same."""
        x = x + _dropped(self.drop, self.attention(self.norm1(x)))
        x = x + _dropped(self.drop, self.contract(self.gelu(self.expand(self.norm2(x)))))
        return x


class GPT(nn.Module):
    """Token and position embeddings, `num_layers` blocks, a final norm and an untied head."""

    def __init__(
        self,
        *,
        vocabulary: int,
        width: int,
        num_layers: int,
        num_heads: int,
        context: int,
        dropout: float = 0.0,
        is_fused: bool = True,
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(
            *(GptBlock(width, num_heads, context, dropout, is_fused) for _ in range(num_layers))
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """(sample, time) to logits (sample, time, vocabulary)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(positions)
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def gpt(
    *,
    input_shape: tuple[int, ...] = (4, 256),
    vocabulary: int = 50257,
    width: int = 768,
    layers: int = 12,
    heads: int = 12,
    context: int = 1024,
    dropout: float = 0.0,
    fused: bool = True,
) -> Example:
    """GPT-2 small as it stands, with its head untied: 163,037,184 parameters.

    `input_shape` is (sample, time) with time at most `context`; `heads` divides `width`.  `dropout` is that of
    attention's weights and of residual paths; without `fused`, attention is products, softmax and mask, whose scores
    are kept for the backward.
    """
    example = next_tokens("gpt", input_shape, vocabulary, context=context)
    if width % heads:
        raise ValueError(f"gpt: width {width} is no multiple of heads {heads}")
    module = GPT(
        vocabulary=vocabulary,
        width=width,
        num_layers=layers,
        num_heads=heads,
        context=context,
        dropout=dropout,
        is_fused=fused,
    )
    return module, example, token_cross_entropy
