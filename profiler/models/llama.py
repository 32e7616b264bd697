"""A decoder-only transformer as Llama is made (Touvron et al. 2023, "LLaMA"; Ainslie et al. 2023, "GQA").

Rotary positions, root-mean-square norms, gated feed-forward networks, and keys and values that groups of heads share.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from profiler.models.example import Example, indices, require_dims, token_cross_entropy


class RotaryAttention(nn.Module):
    """Causal attention with rotary positions (Su et al. 2021, "RoFormer"); each key serves several heads."""

    def __init__(self, width: int, num_heads: int, num_groups: int) -> None:
        super().__init__()
        self.num_heads, self.num_groups, size = num_heads, num_groups, width // num_heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, size * num_groups, bias=False)
        self.value = nn.Linear(width, size * num_groups, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """(sample, time, width) to the same; angles are (time, width / heads)."""
        query = _turned(_split(self.query(x), self.num_heads), cosine, sine)
        key = _turned(_split(self.key(x), self.num_groups), cosine, sine)
        value = _split(self.value(x), self.num_groups)
        shared = self.num_groups < self.num_heads
        y = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=shared)
        result: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return result


def _split(x: Tensor, num_heads: int) -> Tensor:
    """(sample, time, features) to (sample, head, time, features / heads)."""
    heads: Tensor = x.unflatten(2, (num_heads, -1))  # type: ignore[no-untyped-call]  # torch does not type it
    return heads.transpose(1, 2)


def _turned(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Pairs of features turned by the angle of their position."""
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat((-second, first), -1) * sine


class Block(nn.Module):
    """Pre-norm attention and gated feed-forward network, each beside a residual path."""

    def __init__(self, width: int, num_heads: int, num_groups: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-6), nn.RMSNorm(width, eps=1e-6)
        self.attention = RotaryAttention(width, num_heads, num_groups)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.expand = nn.Linear(width, hidden, bias=False)
        self.contract = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """(sample, time, width) to the same."""
        x = x + self.attention(self.norm1(x), cosine, sine)
        y = self.norm2(x)
        x = x + self.contract(functional.silu(self.gate(y)) * self.expand(y))
        return x


class Llama(nn.Module):
    """Token embeddings, `num_layers` blocks, a final norm and an untied head."""

    def __init__(self, *, vocabulary: int, width: int, num_layers: int, num_heads: int, num_groups: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        hidden = 8 * width // 3
        self.blocks = nn.ModuleList(Block(width, num_heads, num_groups, hidden) for _ in range(num_layers))
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.head = nn.Linear(width, vocabulary, bias=False)
        size = width // num_heads
        self.register_buffer("rates", 10000.0 ** (-torch.arange(0, size, 2) / size), persistent=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """(sample, time) to logits (sample, time, vocabulary)."""
        rates: Tensor = self.get_buffer("rates")
        angles = torch.arange(tokens.shape[1], device=tokens.device)[:, None] * torch.cat((rates, rates))
        cosine, sine = angles.cos(), angles.sin()
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x, cosine, sine)
        logits: Tensor = self.head(self.norm(x))
        return logits


def llama(
    *,
    input_shape: tuple[int, ...] = (4, 256),
    vocabulary: int = 32000,
    width: int = 512,
    layers: int = 8,
    heads: int = 8,
    groups: int = 4,
) -> Example:
    """Llama's parts at a size of one's own: `groups` heads of keys and values for `heads` of queries.

    `input_shape` is (sample, time); `heads` divides `width` into even parts, and `groups` divides `heads`.
    """
    require_dims("llama", input_shape, ("sample", "time"))
    if width % heads or width // heads % 2 or heads % groups:
        raise ValueError(f"llama: width {width}, heads {heads} and groups {groups} do not divide one another")
    samples, time = input_shape
    module = Llama(vocabulary=vocabulary, width=width, num_layers=layers, num_heads=heads, num_groups=groups)
    tokens = indices(vocabulary, (samples, time + 1), seed=0)
    return module, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()), token_cross_entropy
