"""The example of a model for other numbers of samples, and when two results of it are one."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from profiler.source import LoadedModel


def example_of(names: Iterable[str], model: LoadedModel, samples: int) -> dict[str, Tensor]:
    """Inputs and targets by name, for ``samples`` samples: the model's example, cut or repeated; where the model is."""
    fed, count = fed_example(model, samples), len(model.fed[0])
    inputs, targets = model.taken(fed[:count], fed[count:])
    return dict(zip(names, (*inputs, *targets), strict=True))


def fed_example(model: LoadedModel, samples: int) -> tuple[Tensor, ...]:
    """The same as a step is given it: of a sparse network its clouds."""
    inputs, targets = model.fed
    result = []
    for tensor in (*inputs, *targets):
        if tensor.ndim and tensor.shape[0] == model.samples:
            repeats = -(-samples // model.samples)
            tensor = (torch.cat([tensor] * repeats) if repeats > 1 else tensor)[:samples]
        result.append(tensor)
    return tuple(result)


def is_alike(a: Tensor, b: Tensor) -> bool:
    """Whether they are equal but for rounding, that of their dtype."""
    if a.shape != b.shape:
        return False
    if a.is_complex() and b.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    if not a.is_floating_point():
        return torch.equal(a, b)
    tolerance = min(1000 * torch.finfo(a.dtype).eps, 0.05)
    scale = a.abs().nan_to_num(posinf=0.0).max().item() if a.numel() else 0.0
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
