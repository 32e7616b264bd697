"""What stands between a step and the next: nothing that is made of NaN or infinity goes on, or is saved.

    step k     forward, backward, sums     each rank looks at its losses and gradients       update, or none
    step k+1   read the batch, wait until all begin: with that wait comes the others' word on step k
               goes on, or runs k again and says where

Ranks so wait for nobody before an update, and no message is sent for it.  Where they meet before the update anyway, to
clip gradients, or have to, as updates may be left out, they agree there
(:class:`runtime.optim.gradient_sync.GradientSync`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from planner.ir.errors import NotFiniteError
from runtime.monitor.waits import BETWEEN, START
from runtime.numerics.finite import Examiner, NanReport, OnNan, all_finite, explained, kind_of
from runtime.optim.gradient_sync import GradientSync
from runtime.pipeline.microbatches import Batch
from runtime.rank import BAD, NOTHING, RankContext
from runtime.stage.local_stage import LocalStage

if TYPE_CHECKING:
    from runtime.checkpoint.state import RankState

_MOST_EXPLAINED = 3
"""Updates that are left out of which the layer is looked for, since the step is run once more for that."""

_MOST_NAMED = 3


@dataclass(frozen=True, slots=True)
class GuardedStep:
    """A training step that is over, with what it takes to run it again.

    What was made of the batch is not among that: of clouds these are maps, for which memory would be wanted twice while
    those of the next step are made.

    Attributes:
        number: counted from 0.
        batch: as it was given to the rank.
        loss: None on ranks that do not make it.
        bad: names of parameters, of those that this rank updates, whose gradients are not finite.
        kept: the buffers that layers write, as they were before.
    """

    number: int
    batch: Batch
    loss: float | None
    kept: Sequence[Tensor] = ()
    bad: tuple[str, ...] = ()


class NanGuard:
    """Of one rank.

    Args:
        local_stages: the stages of this rank.
        rerun: runs a step once more.
    """

    def __init__(
        self,
        context: RankContext,
        local_stages: Mapping[int, LocalStage],
        gradient_sync: GradientSync,
        rerun: Callable[[GuardedStep], object],
    ) -> None:
        self._context = context
        self.on_nan = context.on_nan
        self._rerun = rerun
        self._local_stages = local_stages
        self._gradient_sync = gradient_sync
        self._written = [
            tensor
            for each in local_stages.values()
            for name, tensor in each.buffers.items()
            if name in each.passes.mutated
        ]
        self._untold: GuardedStep | None = None
        self._num_left_out = 0
        self._was_spoilt = False

    def begin(self) -> list[Tensor]:
        """Call when a step begins; gives what is to be put back where its update is left out."""
        self._was_spoilt = self._gradient_sync.is_spoilt
        return [tensor.clone() for tensor in self._written] if self.on_nan is OnNan.SKIP else []

    def judge(self, guarded: GuardedStep) -> str:
        """Call when a step is over.

        Returns:
            Why no rank makes the update; empty if that is not so.

        Raises:
            NotFiniteError: on all ranks, where they know already that the step ends the job.
        """
        gradient_sync = self._gradient_sync
        if self.on_nan is OnNan.IGNORE or self._was_spoilt:
            return ""
        if not gradient_sync.is_agreed:
            is_bad = gradient_sync.is_spoilt or (guarded.loss is not None and not math.isfinite(guarded.loss))
            self._untold = self._with_names(guarded) if is_bad else guarded
            self._context.vote.is_bad = is_bad
            return ""
        if not gradient_sync.is_spoilt:
            return ""
        guarded = self._with_names(guarded)
        if self.on_nan is OnNan.STOP:
            raise self._explained(guarded)
        self._put_back(guarded)
        self._num_left_out += 1
        error = self._explained(guarded, runs_again=self._num_left_out <= _MOST_EXPLAINED)
        self._put_back(guarded)
        return error.title

    def settle(self, step: int) -> None:
        """Waits for the others' word on the last step, if it has not come; ``step`` is the next.

        Raises:
            NotFiniteError: on all ranks: a loss or gradient of the last step is NaN or infinite on some of them.
        """
        if self._untold is None:
            return
        context = self._context
        activity = context.activity
        activity.begin(START)
        activity.step = step
        activity.deadline_s = context.deadline_s
        agreed = context.transport.barrier(BAD if context.vote.is_bad else NOTHING)
        activity.begin(BETWEEN)
        self.heard(agreed)

    def heard(self, agreed: int) -> None:
        """The others' word has come.  Raises as :meth:`settle`."""
        guarded = self._untold
        self._untold = None
        self._context.vote.is_bad = False
        if agreed == BAD and guarded is not None:
            raise self._explained(guarded)

    def require_finite(self, state: RankState, named: Mapping[str, Tensor], step: int) -> None:
        """Raises :class:`NotFiniteError` where what is to be saved after ``step`` is not.

        Buffers that no layer writes may be infinite, as masks are.

        Args:
            named: parameters and buffers by the names that ``state`` has them under.
        """
        if self.on_nan is OnNan.IGNORE:
            return
        from runtime.checkpoint.state import MODEL  # late, as all that saves

        buffers = (tensor for each in self._local_stages.values() for tensor in each.buffers.values())
        fixed = {id(tensor) for tensor in buffers} - {id(tensor) for tensor in self._written}
        masks = {MODEL + name for name, tensor in named.items() if id(tensor) in fixed}
        checked = {key: tensor for key, tensor in state.tensors.items() if key not in masks}
        if all_finite(checked.values()):
            return
        bad = [key for key, tensor in checked.items() if kind_of(tensor)]
        raise NotFiniteError(
            f"after step {step} the state has NaN or infinity, so it is not saved",
            [f"rank {self._context.rank}: {', '.join(bad[:_MOST_NAMED])}; {len(bad)} of {len(checked)} tensors"],
            ["go on from the checkpoint before, with a smaller learning rate", "--on-nan ignore saves it all the same"],
        )

    @torch.no_grad()
    def _put_back(self, guarded: GuardedStep) -> None:
        for tensor, before in zip(self._written, guarded.kept, strict=True):
            tensor.copy_(before)

    def _with_names(self, guarded: GuardedStep) -> GuardedStep:
        """With the parameters whose gradients are not finite, while these are there."""
        stages = [each.optimizer for each in self._local_stages.values() if each.optimizer is not None]
        gradients = {name: tensor.grad for each in stages for name, tensor in each.tensors.items()}
        return replace(guarded, bad=tuple(name for name, each in gradients.items() if kind_of(each)))

    def _explained(self, guarded: GuardedStep, *, runs_again: bool = True) -> NotFiniteError:
        """Where it first appeared; all ranks call this together."""
        context = self._context
        rank = context.rank
        own = NanReport(rank, guarded.loss, guarded.bad)
        if runs_again:
            own = self._examined(guarded, own)
        reports = [own]
        if not own.trouble:
            from runtime.optim.whole_state import united  # late: most runs have no such step

            by_rank = united({f"rank {rank}": own.encoded()}, context.transport)
            reports = sorted(map(NanReport.decoded, by_rank.values()), key=lambda each: each.rank)
        order = {name: place for place, name in enumerate(context.decision.layers)}
        return explained(guarded.number + 1, reports, context.graph.loss, order, context.where)

    def _examined(self, guarded: GuardedStep, own: NanReport) -> NanReport:
        """``own`` with what this rank finds when the step is run again, which updates nothing."""
        examiner = Examiner(own.rank)
        local_stages = self._local_stages.values()
        self._gradient_sync.spoil()
        for each in local_stages:
            each.forget_gradients()  # the examiner looks for the first micro-batch that spoils one
            each.passes.examine(examiner)
            if each.gathered is not None:
                each.gathered.stay(True)  # the examiner looks at parameters before operators do
        try:
            self._rerun(guarded)
        except Exception as error:  # noqa: BLE001  # that the step is bad is known, and must be told whatever comes
            return replace(own, trouble=f"it could not be run again: {type(error).__name__}: {error}")
        finally:
            examiner.close()
            for each in local_stages:
                each.passes.examine(None)
                if each.gathered is not None:
                    each.gathered.stay(False)
        return replace(own, origins=tuple(examiner.origins))
