"""A transformer as others write it: plain operators, one projection for queries, keys and values, values late."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from profiler.models.example import Example, indices, token_cross_entropy


class Attention(nn.Module):
    """Scores by einsum, softmax by function, a mask that is added; values are made after the scores."""

    mask: Tensor

    def __init__(self, width: int, heads: int, context: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.both = nn.Linear(width, 2 * width, bias=False)
        self.values = nn.Linear(width, width)
        self.back = nn.Linear(width, width)
        self.register_buffer("mask", torch.full((context, context), -1e9).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        """(sample, time, width) to the same."""
        samples, time, width = x.shape
        query, key = (each.view(samples, time, self.heads, -1) for each in self.both(x).chunk(2, dim=-1))
        scores = torch.einsum("bthd,bshd->bhts", query, key) / (width // self.heads) ** 0.5
        weights = functional.softmax(scores + self.mask[:time, :time], dim=-1)
        if self.dropout:
            weights = functional.dropout(weights, self.dropout, self.training)
        values = self.values(x).view(samples, time, self.heads, -1).permute(0, 2, 1, 3)
        mixed = torch.matmul(weights, values).permute(0, 2, 1, 3).reshape(samples, time, width)
        result: Tensor = self.back(mixed)
        return result


class Block(nn.Module):
    """Post-norm attention and feed-forward part."""

    def __init__(self, width: int, heads: int, context: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(width, heads, context, dropout)
        self.norm = nn.LayerNorm(width)
        self.ffn = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU())
        self.last = nn.Linear(2 * width, width)
        self.norm2 = nn.LayerNorm(width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(sample, time, width) to the same."""
        x = self.norm(x + self.attention(x))
        y = self.last(self.ffn(x))
        result: Tensor = self.norm2(x + (self.drop(y) if self.drop.p else y))
        return result


class Model(nn.Module):
    """An embedding, blocks and a head."""

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, context: int, dropout: float) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.body = nn.ModuleList(Block(width, heads, context, dropout) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """(sample, time) to logits."""
        x = self.table(tokens)
        for block in self.body:
            x = block(x)
        result: Tensor = self.head(x)
        return result


def transformer(
    *,
    input_shape: tuple[int, ...] = (4, 8),
    vocabulary: int = 33,
    width: int = 16,
    layers: int = 2,
    heads: int = 4,
    dropout: float = 0.0,
) -> Example:
    """``input_shape`` is (sample, time)."""
    samples, time = input_shape
    tokens = indices(vocabulary, (samples, time + 1), seed=0)
    module = Model(vocabulary, width, layers, heads, time, dropout)
    return module, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()), token_cross_entropy
