"""One stage on this rank, as the executor calls it: feed, forward and backward, sums of gradients, update."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from runtime.numerics.finite import all_finite
from runtime.optim.of_stage import Updates
from runtime.optim.optimizer import StageOptimizer
from runtime.optim.sharding import ShardedParameters
from runtime.pipeline.microbatches import Batch
from runtime.stage.modes import MicrobatchShard
from runtime.stage.stage import StagePasses

if TYPE_CHECKING:
    from runtime.optim.pass_shards import PassShards


@dataclass(slots=True)
class AccumulationStep:
    """Where a step stands among the ``count`` steps whose gradients make up one update.

    Attributes:
        checks: whether each stage looks by itself at the gradients and losses that it has.
        is_spoilt: something is NaN or infinite since the first of these steps: no update is made of it.
    """

    count: int = 1
    number: int = 0
    checks: bool = False
    is_spoilt: bool = False

    @property
    def is_first(self) -> bool:
        """Whether the gradients of earlier steps are used up."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Whether gradients are summed and weights updated."""
        return self.number == self.count - 1

    def advance(self) -> None:
        """The next step."""
        self.number = (self.number + 1) % self.count
        self.is_spoilt &= not self.is_first

    def go_back(self) -> None:
        """The step before."""
        self.number = (self.number - 1) % self.count


Feed = Callable[[Batch], Tensor]
"""From the batch of a step, this rank's part of one graph input."""


@dataclass(frozen=True, slots=True)
class LocalStage:
    """One stage on this rank.

    Attributes:
        ranks: that run the stage, by growing number.
        shares: this rank's part of each micro-batch.
        received: names of inputs that other stages make.
        handed_on: names of the differentiable outputs that other stages read.
        feeds: by micro-batch, how each graph input that the stage reads is cut from the global batch.
        parameters, buffers: by the user's names.
        updates: how the parameters are updated.
        add: sums a tensor over ``ranks``, in place.
        accumulation: of the running step.
    """

    passes: StagePasses
    ranks: tuple[int, ...]
    shares: tuple[MicrobatchShard, ...]
    received: tuple[str, ...]
    handed_on: tuple[str, ...]
    feeds: tuple[Mapping[str, Feed], ...]
    parameters: Mapping[str, nn.Parameter]
    buffers: Mapping[str, Tensor]
    updates: Updates
    add: Callable[[Tensor], None]
    accumulation: AccumulationStep = field(default_factory=AccumulationStep)

    @property
    def optimizer(self) -> StageOptimizer | None:
        """None where there is nothing to train."""
        return self.updates.optimizer

    @property
    def gathered(self) -> PassShards | None:
        """The parameters of the stage that its ranks have in slices between passes; None: they are whole."""
        shards = self.updates.in_passes
        return shards if shards is not None and shards.gathers else None

    def feed(self, batch: Batch, microbatch: int) -> dict[str, Tensor]:
        """The graph inputs that the stage reads, this rank's part of a micro-batch."""
        return {name: cut(batch) for name, cut in self.feeds[microbatch].items()}

    def forward(self, microbatch: int, values: Mapping[str, Tensor], version: int = 0) -> dict[str, Tensor]:
        """Run the stage forward on this rank's share, on ``version`` of its weights."""
        share = self.shares[microbatch]
        return self.passes.forward(share, values, share.loss_weight / self.accumulation.count, version)

    def evaluate(self, microbatch: int, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run the stage forward in evaluation mode on this rank's share."""
        return self.passes.evaluate(self.shares[microbatch], values)

    def answer(
        self, microbatch: int, values: Mapping[str, Tensor], *, training: bool, frozen: frozenset[str]
    ) -> dict[str, Tensor]:
        """Run the stage forward on this rank's share of a stream; see :meth:`StagePasses.answer`."""
        return self.passes.answer(self.shares[microbatch], values, training=training, frozen=frozen)

    def expect_last(self) -> None:
        """Call before the last action of the stage that adds to its gradients.

        From there on each sum of gradients starts as soon as they are complete.
        """
        if self.accumulation.is_last and self.updates.reduction is not None:
            self.updates.reduction.arm()

    def reduce_gradients(self) -> None:
        """Sum the gradients over the stage's ranks, in the last step before an update; nothing in those before."""
        if self.accumulation.is_last and self.updates.reduction is not None:
            self.updates.reduction.reduce()

    def update(self) -> None:
        """One step of the optimiser and of its schedule, in the last step before an update.

        Where that is asked for, each step looks at its gradients for NaN: one that has some spoils the update.
        """
        if self.accumulation.checks and not self.accumulation.is_spoilt:
            self.accumulation.is_spoilt = not self._agrees(self.is_finite())
        if self.accumulation.is_last:
            self.passes.before_update()  # also without an optimiser: versions are counted
            if self.optimizer is not None and not self.accumulation.is_spoilt:
                self.optimizer.step()

    def is_finite(self, *, gradients: bool = True) -> bool:
        """Whether the losses so far, and the ``gradients`` that this rank updates by, are numbers and finite."""
        samples = [share.num_samples for share in self.shares]
        tensors = [loss for microbatch, loss in self.passes.losses.items() if samples[microbatch]]
        if gradients and self.optimizer is not None:
            tensors += [each.grad for each in self.optimizer.tensors.values() if each.grad is not None]
        return all_finite(tensors)

    def _agrees(self, finite: bool) -> bool:
        """Ranks that divide an optimiser step together or not at all."""
        if not (self.accumulation.is_last and isinstance(self.updates.reduction, ShardedParameters)):
            return finite
        bad = torch.tensor([float(not finite)])
        self.add(bad)
        return not bad.item()

    def reset(self, step: int = 0) -> None:
        """Forget the last step: its micro-batches, and its gradients unless this one, ``step``, adds to them."""
        self.passes.reset(step)
        if self.accumulation.is_first:
            self.forget_gradients()
        if self.updates.reduction is not None:
            self.updates.reduction.reset()

    def forget_gradients(self) -> None:
        """The gradients that were there have been used."""
        for parameter in self.parameters.values():
            parameter.grad = None
        if self.updates.in_passes is not None:
            self.updates.in_passes.forget()

    def gradients(self) -> dict[str, Tensor]:
        """The last step's, by name; where ranks divide the optimiser, all of the stage have to call this together."""
        reduction = self.updates.reduction
        reduced = reduction.gradients() if isinstance(reduction, ShardedParameters) else {}
        return {
            name: gradient
            for name, parameter in self.parameters.items()
            if (gradient := reduced.get(name, parameter.grad)) is not None
        }

    def loss(self) -> float:
        """The sum of the last step's losses on this rank, each times its samples; an empty share has none."""
        samples = (share.num_samples for share in self.shares)
        losses = self.passes.losses
        return sum(losses[m].item() * count for m, count in enumerate(samples) if count and m in losses)
