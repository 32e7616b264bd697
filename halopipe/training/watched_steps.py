"""The steps of a script that are compared with one device, and what is kept of the model for that."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from halopipe.data.factories import Item
from halopipe.training.first_divergence import first_divergence
from halopipe.training.first_step import FirstStep
from halopipe.training.rank import Rank
from halopipe.training.reference import Reference
from halopipe.training.single_device import reference_of, why_not_compared
from planner.ir.errors import UnsupportedModelError
from profiler.capture.graph import capture
from profiler.source.model import LoadedModel
from runtime.engine import StepResult
from runtime.monitor.failure import write_error
from runtime.numerics.compare import NumericsReport, report
from runtime.numerics.difference import Difference
from runtime.optim.followed import Followed
from runtime.optim.optimizer import MakeOptimizer
from runtime.pipeline.routing import CPU

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KeptModel:
    """The model as it was before the first step; or why it could not be kept.

    Attributes:
        optimizer: makes its optimiser.
    """

    model: LoadedModel | None = None
    reason: str = ""
    optimizer: MakeOptimizer | None = None

    @classmethod
    def of(cls, rank: Rank, *, check: bool) -> KeptModel:
        """A copy, where there is memory for it and one device has such a step."""
        if not check:
            return cls()
        reason = why_not_compared(rank.plan, torch.device("cpu"))
        if reason:
            return cls(reason=reason)
        try:
            made = rank.context.optimizer
            return cls(copy.deepcopy(rank.model), "", made.as_it_is() if isinstance(made, Followed) else made)
        except Exception as error:  # noqa: BLE001 - the user's module may refuse in any way
            return cls(reason=f"the model cannot be copied: {type(error).__name__}: {error}")


class WatchedSteps:
    """The steps before the first update, which are compared with one device.

    Args:
        kept: on rank 0.

    Attributes:
        is_over: the first update was compared.
    """

    def __init__(self, rank: Rank, kept: KeptModel | None) -> None:
        self._rank, self._kept, self._device = rank, kept, rank.context.device or CPU
        self._items: list[Item] = []
        self._first = FirstStep(rank, self._read, self._explain)
        self.is_over = False

    def after(self, item: Item, result: StepResult) -> NumericsReport | None:
        """What the comparison shows, after the first update; None before.

        Raises:
            NumericsError: the step is not one device's.
        """
        if self._kept is not None and self._kept.model is not None:
            self._items.append(item)
        outcome = self._first.after(result)
        if outcome is None:
            return None
        self.is_over, (reference, compared) = True, outcome
        if reference.skipped:
            if self._kept is not None:
                _log.warning("the first step was not compared with one device: %s", reference.skipped)
            return NumericsReport(reference.dtype, 0, 0, {}, skipped=reference.skipped)
        return report(compared, reference.dtype, witness=reference.witness, strict=False)

    def _read(self) -> Reference:
        kept = self._kept or KeptModel()
        if kept.model is None:
            return Reference(skipped=kept.reason)
        try:
            context = replace(self._rank.context, optimizer=kept.optimizer or self._rank.context.optimizer)
            return reference_of(Rank(self._rank.plan, context), copy.deepcopy(kept.model), self._items, self._device)
        except UnsupportedModelError as error:
            return Reference(error=write_error(error))
        except Exception as error:  # noqa: BLE001 - whatever the user's module raises, and memory that runs out
            return Reference(skipped=f"one device could not run it: {type(error).__name__}: {error}")

    def _explain(self, wrong: Sequence[Difference]) -> list[str]:
        kept = self._kept
        if kept is None or kept.model is None:
            return []
        return first_divergence(self._rank.context, kept.model, capture(kept.model), self._items[0], wrong)
