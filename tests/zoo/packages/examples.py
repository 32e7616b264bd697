"""Example tensors of the zoo, and modules of transformers as ones that take and give tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.missing_operators import declare_missing
from tests.zoo.entries import DATA, network

SAMPLES = 4
TIME = 16
VOCABULARY = 200
CLASSES = 5
NUM_SPECIAL = 3
"""Tokens of a meaning of their own: padding, begin and end."""

Example = tuple[nn.Module, tuple[Any, Tensor], Callable[..., Tensor]]

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
"""A small transformer, in the words of most configurations."""

SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = {"num_key_value_heads": 2}

ANSWER = 10
"""Tokens that the decoder sees."""

TWO_SIDES: dict[str, Any] = {
    "d_model": 64,
    **{f"{side}_layers": 2 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 128 for side in ("encoder", "decoder")},
}
WAVES: dict[str, Any] = {
    "conv_dim": (32, 32, 32),
    "conv_stride": (5, 2, 2),
    "conv_kernel": (10, 3, 3),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "classifier_proj_size": 32,
    "num_labels": CLASSES,
    # masks and skipped layers are drawn by numpy, outside of the graph
    "mask_time_prob": 0.0,
    "layerdrop": 0.0,
}


BRANCHES = "GuardOnDataDependentSymNode"
"""What is refused of Python that branches on what a batch holds."""

NOT_APART = {DATA: "samples do not stay apart"}
"""What is refused of layers that mix samples: to divide them between replicas."""


def registering(origin: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """For networks of ``origin``: the decorator of a factory, and the same for one call.

    ``made(name, habit)(make, *arguments, **settings)`` registers ``make`` with these arguments under a name.
    """
    decorator = partial(network, origin=origin, draws=True)

    def made(name: str, habit: str, **said: Any) -> Callable[..., Any]:
        register = decorator(habit, f"packages:{name}", **said)
        return lambda make, *arguments, **settings: register(partial(make, *arguments, **settings))

    return decorator, made


class Named(nn.Module):
    """``model``, whose arguments have names and whose answer is a record, with tensors in a row and one tensor out."""

    def __init__(self, model: nn.Module, names: tuple[str, ...], answer: str, **fixed: Any) -> None:
        super().__init__()
        self.model = model
        self.names = names
        self.answer = answer
        self.fixed = fixed

    def forward(self, *tensors: Tensor) -> Tensor:
        """The record's ``answer``."""
        result: Tensor = self.model(**dict(zip(self.names, tensors, strict=True)), **self.fixed)[self.answer]
        return result


def configured(architecture: str, model: str, **settings: Any) -> nn.Module:
    """A model of transformers with random weights: ``BertConfig(**settings)`` for an architecture ``Bert``."""
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


def encoder(architecture: str, masked: bool = True, **settings: Any) -> Example:
    """A text encoder as a classifier of sequences of unequal length."""
    return classifier(architecture, masked, {**SMALL, "max_position_embeddings": 64, **settings})


def classifier(architecture: str, masked: bool, settings: dict[str, Any]) -> Example:
    """The same of a network whose configuration has words of its own for sizes."""
    name = f"{architecture}ForSequenceClassification"
    model = configured(architecture, name, **{"vocab_size": VOCABULARY, "num_labels": CLASSES, **settings})
    inputs = (tokens(SAMPLES, TIME), *([lengths_mask()] if masked else []))
    named = Named(model, ("input_ids", "attention_mask")[: len(inputs)], "logits")
    return named, (inputs, labels()), functional.cross_entropy


def decoder(architecture: str, name: str = "", masked: bool = False, **settings: Any) -> Example:
    """A language model that predicts the next token."""
    sizes = {**SMALL, **SPECIAL, "vocab_size": VOCABULARY, "max_position_embeddings": 64, **settings}
    model = configured(architecture, name or f"{architecture}ForCausalLM", **sizes)
    text = tokens(SAMPLES, TIME + 1)
    inputs = (text[:, :-1].contiguous(), *([lengths_mask()] if masked else []))
    named = Named(model, ("input_ids", "attention_mask")[: len(inputs)], "logits", use_cache=False)
    return named, (inputs, text[:, 1:].contiguous()), token_loss


def translation(architecture: str, name: str, **settings: Any) -> Example:
    """A network with an encoder and a decoder."""
    special = {"pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 1}
    model = configured(architecture, name, vocab_size=VOCABULARY, **special, **settings)
    named = Named(model, ("input_ids", "attention_mask", "decoder_input_ids"), "logits", use_cache=False)
    inputs = (tokens(SAMPLES, TIME), lengths_mask(), tokens(SAMPLES, ANSWER, seed=2))
    return named, (inputs, labels(VOCABULARY, SAMPLES, ANSWER)), token_loss


def waves(architecture: str, **settings: Any) -> Example:
    """A classifier of sound."""
    model = configured(architecture, f"{architecture}ForSequenceClassification", **WAVES, **SMALL, **settings)
    return Named(model, ("input_values",), "logits"), (normal(SAMPLES, 800), labels()), functional.cross_entropy
