"""The loss of the sequence networks."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def token_cross_entropy(logits: Tensor, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of `logits` (sample, time, vocabulary) against the next `tokens` (sample, time)."""
    return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
