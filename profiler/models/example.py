"""What every factory here returns, and the example tensors and shape checks that they share.

The loss of the sequence networks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional


def token_cross_entropy(logits: Tensor, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of `logits` (sample, time, vocabulary) against the next `tokens` (sample, time)."""
    return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


TensorOrTuple = Tensor | tuple[Tensor, ...]
"""A module's inputs or its targets: every tensor has the sample dim first."""

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""`loss_fn(output, targets)`: a scalar, the mean over samples."""

Example = tuple[nn.Module, tuple[TensorOrTuple, TensorOrTuple], LossFunction]
"""What a factory returns: the module, its example inputs and targets, and the loss."""


def normal(shape: tuple[int, ...], seed: int) -> Tensor:
    """Standard normal numbers of torch's default dtype on its default device.

    They are drawn on the CPU in float32, so that a seed gives the same example on every device and in every dtype.
    """
    return _floats(torch.randn, shape, seed)


def uniform(shape: tuple[int, ...], seed: int) -> Tensor:
    """Uniform numbers in [0, 1), drawn as `normal` draws its own."""
    return _floats(torch.rand, shape, seed)


def _floats(draw: Callable[..., Tensor], shape: tuple[int, ...], seed: int) -> Tensor:
    values = draw(shape, generator=_generator(seed), dtype=torch.float32, device=_sampling_device())
    return values.to(torch.get_default_device(), torch.get_default_dtype())


def indices(count: int, shape: tuple[int, ...], seed: int) -> Tensor:
    """Uniform int64 class or token numbers in [0, count), on torch's default device."""
    values = torch.randint(count, shape, generator=_generator(seed), device=_sampling_device())
    return values.to(torch.get_default_device())


def next_tokens(
    network: str, input_shape: tuple[int, ...], vocabulary: int, *, context: int | None = None, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Tokens of `input_shape` (sample, time), and those that come next, as `indices` draws them.

    Args:
        context: the most positions that the network has; None: it has any number.

    Raises:
        ValueError: the shape is no such, or is longer than the context.
    """
    require_dims(network, input_shape, ("sample", "time"))
    samples, time = input_shape
    if context is not None and time > context:
        raise ValueError(f"{network}: input_shape {input_shape} has {time} positions, but context is {context}")
    tokens = indices(vocabulary, (samples, time + 1), seed=seed)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def require_dims(network: str, input_shape: tuple[int, ...], dims: tuple[str, ...]) -> None:
    """Raise `ValueError` unless `input_shape` has one positive size for each of `dims`."""
    names = ", ".join(dims)
    if len(input_shape) != len(dims):
        raise ValueError(
            f"{network}: input_shape {input_shape} has {len(input_shape)} dims, needs {len(dims)}: {names}"
        )
    if min(input_shape) < 1:
        raise ValueError(f"{network}: input_shape {input_shape} has a size below 1 ({names})")


def require_multiple(network: str, input_shape: tuple[int, ...], first_dim: int, factor: int) -> None:
    """Raise `ValueError` unless every size from `first_dim` on is a multiple of `factor`, the down-sampling."""
    for dim, size in enumerate(input_shape[first_dim:], start=first_dim):
        if size % factor:
            raise ValueError(
                f"{network}: input_shape {input_shape} has size {size} in dim {dim}, which is no multiple of {factor}, "
                f"the network's down-sampling; the next larger size is {size + factor - size % factor}"
            )


def _generator(seed: int) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed)


def _sampling_device() -> str:
    return "meta" if torch.get_default_device().type == "meta" else "cpu"
