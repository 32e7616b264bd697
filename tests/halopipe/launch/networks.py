"""Networks that processes of these tests load: nothing else is imported here, as each of them pays for it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.halopipe import bombs

Example = tuple[nn.Module, tuple[Tensor, Tensor], object]


def doomed(*, input_shape: tuple[int, ...] = (4, 3), deeds: list[list[str]]) -> Example:
    """A layer for each pair of deeds, of its forward and of its backward (:mod:`tests.halopipe.bombs`), and dropout."""
    parts = [part for forward, backward in deeds for part in (bombs.Layer(3, forward, backward), nn.Dropout(0.2))]
    generator = torch.Generator().manual_seed(1)
    inputs, targets = (torch.randn(input_shape, generator=generator) for _ in range(2))
    return nn.Sequential(*parts), (inputs, targets), functional.mse_loss


def normalised(*, input_shape: tuple[int, ...] = (4, 6)) -> Example:
    """Has parameters and buffers on both of its stages."""
    torch.manual_seed(0)
    parts = [part for _ in range(2) for part in (nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU())]
    return nn.Sequential(*parts), (torch.randn(input_shape), torch.arange(4) % 6), functional.cross_entropy


def heavy(*, input_shape: tuple[int, ...] = (4, 8)) -> Example:
    """Of two layers whose weights, 256 KiB each in float64, are nearly all that a rank holds."""
    torch.manual_seed(0)
    parts = nn.Sequential(nn.Linear(8, 4096), nn.Linear(4096, 8))
    return parts, (torch.randn(input_shape), torch.randn(input_shape)), functional.mse_loss
