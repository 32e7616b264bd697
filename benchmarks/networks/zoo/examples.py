"""Example tensors of the zoo, and a module of transformers as one that takes and gives tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

SAMPLES, TIME, VOCABULARY, CLASSES = 4, 16, 200, 5
NUM_SPECIAL = 3
"""Tokens of a meaning of their own: padding, begin and end."""

Example = tuple[nn.Module, tuple[Any, Tensor], Callable[..., Tensor]]

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
"""A small transformer, in the words of most configurations."""

SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


class Named(nn.Module):
    """``model``, whose arguments have names and whose answer is a record, with tensors in a row and one tensor out."""

    def __init__(self, model: nn.Module, names: tuple[str, ...], answer: str, **fixed: Any) -> None:
        super().__init__()
        self.model, self.names, self.answer, self.fixed = model, names, answer, fixed

    def forward(self, *tensors: Tensor) -> Tensor:
        """The record's ``answer``."""
        result: Tensor = self.model(**dict(zip(self.names, tensors, strict=True)), **self.fixed)[self.answer]
        return result


def configured(architecture: str, model: str, **settings: Any) -> nn.Module:
    """A model of transformers with random weights: ``BertConfig(**settings)`` for an architecture ``Bert``."""
    from benchmarks.networks.zoo.torchvision_operators import declare_missing

    declare_missing()
    import transformers

    transformers.logging.set_verbosity_error()  # of kernels that are not installed
    config = getattr(transformers, f"{architecture}Config")(**settings)
    found: nn.Module = getattr(transformers, model)(config)
    return found


def tokens(*shape: int, seed: int = 0) -> Tensor:
    """Ordinary tokens."""
    return torch.randint(NUM_SPECIAL, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def labels(count: int = CLASSES, *shape: int) -> Tensor:
    """A class for each sample, or for each place of each."""
    return torch.randint(count, shape or (SAMPLES,), generator=torch.Generator().manual_seed(1))


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def lengths_mask() -> Tensor:
    """1 where a sequence has a token, 0 behind its end."""
    mask = torch.ones(SAMPLES, TIME, dtype=torch.int64)
    mask[1, 10:] = 0
    mask[3, 5:] = 0
    return mask


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy over all tokens."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def picture_classifier(model: nn.Module, size: int, samples: int = SAMPLES) -> Example:
    """A network that takes pictures and gives logits."""
    return model, (normal(samples, 3, size, size), labels(CLASSES, samples)), functional.cross_entropy
