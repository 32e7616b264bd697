"""Networks whose operators have what is seldom written: each a factory as ``halopipe profile`` takes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Network = tuple[nn.Module, tuple[Tensor, Tensor], Callable[..., Any]]


class _Windows(nn.Module):
    """An even kernel with padding "same", averages over padding, bins that overlap, a sum with a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, (4, 3), padding="same", dtype=torch.float64)
        self.norm = nn.BatchNorm2d(4, momentum=None, dtype=torch.float64)
        self.groups = nn.GroupNorm(1, 4, dtype=torch.float64)
        self.second = nn.Conv2d(4, 4, 1, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x))
        h = self.groups(F.avg_pool2d(h, 3, 2, padding=1))
        h = torch.add(self.second(h), h, alpha=0.3)
        return F.adaptive_avg_pool2d(h, (3, 2))


def windows() -> Network:
    """Of seven rows four, and of these three."""
    data = torch.randn(5, 3, 7, 6, dtype=torch.float64), torch.randn(5, 4, 3, 2, dtype=torch.float64)
    return _Windows(), data, F.mse_loss


def summed_classes() -> Network:
    """A loss that adds over classes, some of them ignored."""
    return _of_classes(lambda output, target: F.cross_entropy(output, target, reduction="sum", ignore_index=0))


def mean_over_classes() -> Network:
    """A loss that divides by those of the targets that are not ignored."""
    return _of_classes(lambda output, target: F.cross_entropy(output, target, ignore_index=0))


def square_of_a_mean() -> Network:
    """A loss that is no mean of examples."""
    return _of_classes(lambda output, target: (output.mean() - target.double().mean()) ** 2)


def fixed_samples() -> Network:
    """The samples are counted in Python, and the loss is the root of a mean."""
    network, data, _ = _of_classes(F.cross_entropy)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return torch.stack([output[place].sum() for place in range(len(target))]).pow(2).mean().sqrt()

    return network, data, loss


def _of_classes(loss: Callable[[Tensor, Tensor], Tensor]) -> Network:
    data = torch.randn(4, 3, dtype=torch.float64), torch.tensor([0, 1, 2, 1])
    return nn.Linear(3, 3, dtype=torch.float64), data, loss


@torch.library.custom_op("halopipe_frozen::total", mutates_args=())
def _total(x: Tensor) -> Tensor:
    """An operator of a user's own, which adds."""
    return x.sum()


_total.register_fake(lambda x: x.new_empty(()))
_total.register_autograd(
    lambda ctx, grad: grad.expand(ctx.shape),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "shape", inputs[0].shape),
)


def own_sum() -> Network:
    """A loss that is summed by it."""
    return _of_classes(lambda output, target: _total(output.pow(2)))
