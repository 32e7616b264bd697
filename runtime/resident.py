"""A stage as it lives on a rank: its program, its share of each micro-batch, its gradients and its optimiser."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from runtime.reduction import GradientBuckets
from runtime.stage import StageProgram


@dataclass(frozen=True, slots=True)
class Share:
    """This rank's part of one micro-batch.

    Attributes:
        num_samples: rows that this rank has of the micro-batch; may be 0.
        loss_weight: those over all rows of the step.
    """

    num_samples: int
    loss_weight: float


Feed = Callable[[tuple[torch.Tensor, ...]], torch.Tensor]
"""From the global batch, this rank's part of one graph input."""


@dataclass(frozen=True, slots=True)
class Resident:
    """One stage on this rank.

    Attributes:
        ranks: that run the stage, by growing number.
        shares: by micro-batch.
        received: names of inputs that other stages make.
        handed_on: names of the differentiable outputs that other stages read.
        feeds: by micro-batch, how each graph input that the stage reads is cut from the global batch.
        parameters, buffers: by the user's names.
        optimizer: None where there is nothing to train.
        add: sums a tensor over ``ranks``, in place.
    """

    program: StageProgram
    ranks: tuple[int, ...]
    shares: tuple[Share, ...]
    received: tuple[str, ...]
    handed_on: tuple[str, ...]
    feeds: tuple[Mapping[str, Feed], ...]
    parameters: Mapping[str, nn.Parameter]
    buffers: Mapping[str, torch.Tensor]
    buckets: GradientBuckets
    optimizer: Optimizer | None
    add: Callable[[torch.Tensor], None]

    def feed(self, inputs: tuple[torch.Tensor, ...], microbatch: int) -> dict[str, torch.Tensor]:
        """The graph inputs that the stage reads, this rank's part of a micro-batch."""
        return {name: cut(inputs) for name, cut in self.feeds[microbatch].items()}

    def forward(self, microbatch: int, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Run the stage forward on this rank's share."""
        share = self.shares[microbatch]
        return self.program.forward(microbatch, share.num_samples, values, share.loss_weight)

    def reduce_gradients(self) -> None:
        """Sum the gradients over the stage's ranks."""
        self.buckets.reduce(self.add)

    def update(self) -> None:
        """One step of the optimiser."""
        if self.optimizer is not None:
            self.optimizer.step()

    def reset(self) -> None:
        """Forget the last step: its micro-batches and its gradients."""
        self.program.reset()
        for parameter in self.parameters.values():
            parameter.grad = None

    def loss(self) -> float:
        """This rank's part of the step's loss, weighted; an empty share has none."""
        return sum(
            loss.item() * share.loss_weight
            for microbatch, loss in self.program.losses.items()
            if (share := self.shares[microbatch]).num_samples
        )
