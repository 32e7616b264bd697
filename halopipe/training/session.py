"""One rank of a running plan, in a script of one's own: steps, evaluations, checkpoints."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import runtime.pipeline.microbatches
from cuda_ops.sparse.nn.tensor import SparseTensor
from halopipe.data.feeds import Agreement, agreement_of
from halopipe.data.sources import Item, Pair, bound, tensors_of
from halopipe.run_spec.options import Score
from halopipe.training.checkpointing import open_saved, save_now
from halopipe.training.evaluate import evaluate
from halopipe.training.first_step import FirstStep, parting
from halopipe.training.rank import Opened, Place, Prepared, Terms
from halopipe.training.single_device import Reference, reference_of, why_not_compared
from planner.ir.codec import plain
from planner.ir.errors import UnsupportedModelError, UsageError
from profiler.capture.graph import capture
from profiler.source.clouds import samples_first
from profiler.source.model import LoadedModel
from runtime.engine import StepResult
from runtime.monitor.failure import write_error
from runtime.monitor.waits import Voice
from runtime.numerics.compare import Difference, NumericsReport, report
from runtime.pipeline.messages import CPU

_log = logging.getLogger(__name__)

Tensors = Tensor | tuple[Tensor, ...]
Batch = tuple[Tensors | SparseTensor, Tensors] | list[tuple[Tensors | SparseTensor, Tensors]]
"""Inputs and targets of a global batch; or of each of its micro-batches.

Of a sparse network the inputs are a SparseTensor, and targets one a sample or one a point in the order that the points
were given in; or all has samples first, padded: coordinates, features and counts, and the targets.
"""


@dataclass(frozen=True, slots=True)
class Kept:
    """The model as it was before the first step; or why it could not be kept."""

    model: LoadedModel | None = None
    reason: str = ""

    @classmethod
    def of(cls, prepared: Prepared, *, check: bool) -> Kept:
        """A copy, where there is memory for it and one device has such a step."""
        if not check:
            return cls()
        reason = why_not_compared(prepared.terms, torch.device("cpu"))
        if reason:
            return cls(reason=reason)
        try:
            return cls(copy.deepcopy(prepared.model))
        except Exception as error:  # noqa: BLE001 - the user's module may refuse in any way
            return cls(reason=f"the model cannot be copied: {type(error).__name__}: {error}")


class WatchedSteps:
    """The steps before the first update, which are compared with one device.

    Args:
        kept: on rank 0.

    Attributes:
        is_over: the first update was compared.
    """

    def __init__(self, terms: Terms, place: Place, opened: Opened, kept: Kept | None) -> None:
        self._terms, self._opened, self._kept = terms, opened, kept
        self._items: list[Item] = []
        self._losses: list[float] = []
        self._first = FirstStep(terms, place, self._read, False, self._explain)
        self._device, self._steps_left, self.is_over = place.device or CPU, terms.accumulate, False

    def after(self, item: Item, result: StepResult) -> NumericsReport | None:
        """What the comparison shows, after the first update; None before.

        Raises:
            NumericsError: the step is not one device's.
        """
        self._losses += [] if result.loss is None else [result.loss]
        if self._kept is not None and self._kept.model is not None:
            self._items.append(item)
        self._steps_left -= 1
        if self._steps_left:
            return None
        self.is_over = True
        reference, compared = self._first.compare(self._opened, self._losses)
        if reference.skipped:
            if self._kept is not None:
                _log.warning("the first step was not compared with one device: %s", reference.skipped)
            return NumericsReport(reference.dtype, 0, 0, {}, skipped=reference.skipped)
        found = (Difference(**plain(each)) for each in compared)
        return report(found, reference.dtype, witness=reference.witness, strict=False)

    def _read(self) -> Reference:
        kept = self._kept or Kept()
        if kept.model is None:
            return Reference(skipped=kept.reason)
        try:
            return reference_of(self._terms, copy.deepcopy(kept.model), self._items, self._device)
        except UnsupportedModelError as error:
            return Reference(error=write_error(error))
        except Exception as error:  # noqa: BLE001 - whatever the user's module raises, and memory that runs out
            return Reference(skipped=f"one device could not run it: {type(error).__name__}: {error}")

    def _explain(self, wrong: Sequence[Difference]) -> list[str]:
        kept = self._kept
        if kept is None or kept.model is None:
            return []
        return parting(self._terms, kept.model, capture(kept.model), self._items[0], wrong)


class Execution:
    """One rank of a running plan; use as a context, or call ``close`` at the end.

    Until then it says what it does, so that a rank that waits in vain can tell for whom.

    Attributes:
        rank, num_ranks: in the job.
        model: the user's module; parameters of this rank's stages are trained, the others stay as they were.
        numerics: how far this rank's part of the first update was from one device's; None before it, and where that was
            not asked for.
    """

    numerics: NumericsReport | None

    def __init__(
        self, opened: Opened, model: nn.Module, voice: Voice, seed: int, watched: WatchedSteps | None = None
    ) -> None:
        self._engine, self._consumer, self._voice, self._seed = opened.engine, opened.consumer, voice, seed
        self._watched, self.numerics = watched, None
        transport = opened.consumer.transport
        self.model, self.rank, self.num_ranks = model, transport.rank, transport.world_size
        self._trained = agreement_of(opened.consumer, 0, is_script=True)
        self._evaluated = agreement_of(opened.consumer, 0, is_script=True, always=True)
        voice.__enter__()

    def __enter__(self) -> Execution:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def num_steps(self) -> int:
        """Training steps done, those before a checkpoint that was loaded included."""
        return self._engine.num_steps

    def step(self, batch: Batch) -> float | None:
        """One training step, on a batch that every rank is given whole, the same one.

        Args:
            batch: ``(inputs, targets)``, of as many samples as the plan's global batch or fewer; or a list of such
                pairs, one a micro-batch, each of its own size and shape.

        Returns:
            The loss of the batch; None on ranks that do not compute it.

        Raises:
            DifferentDataError: ranks were given different batches: seen before the first 8 steps, later within 64.
        """
        return self.train(batch).loss

    def train(self, batch: Batch) -> StepResult:
        """As :meth:`step`, with everything that is known of the step: times, learning rates, norm of the gradients."""
        self._trained.step = self.num_steps - self._trained.noted
        result = self._engine.step_on(self._bound(batch, self._trained))
        if self._watched is not None:
            item = [self._pair(each) for each in batch] if isinstance(batch, list) else self._pair(batch)
            self.numerics = self._watched.after(item, result)
            if self._watched.is_over:
                self._watched = None
        return result

    def evaluate(self, *batches: Batch) -> Score:
        """The mean loss over ``batches``, and the accuracy of a model that classifies, in evaluation mode.

        All ranks call this with the same batches, and get the same answer; nothing is changed by it.
        """
        found = (self._bound(batch, self._evaluated) for batch in batches)
        return evaluate(self._engine, self._consumer, found)

    def save(self, folder: str | Path, *, keep: int = 0) -> None:
        """Save a checkpoint, ``folder/step-N``, for whatever plan of the model; all ranks call this, and share a disk.

        Args:
            keep: the newest so many checkpoints are kept; 0: all.

        Raises:
            UsageError: there is one of this step, or gradients wait for the update.
            CheckpointError: it could not be saved; older ones are as before.
        """
        consumer = self._consumer
        self._trained.confirm()
        save_now(
            folder,
            self._engine,
            consumer.graph,
            consumer.transport,
            seed=self._seed,
            keep=keep,
        )

    def load(self, folder: str | Path, *, step: int | None = None) -> int:
        """Go on from a checkpoint, by default the newest complete one; all ranks call this.

        Returns:
            The number of steps done then; where that is in the data is the caller's to know.

        Raises:
            MissingFileError, CorruptFileError: there is none, or it is damaged.
            StaleFileError: it is another model's.
            UsageError: gradients wait for the update, or random numbers were drawn from another seed.
        """
        if not self._engine.is_updated:
            raise UsageError(
                "nothing can be loaded between updates",
                [f"after step {self.num_steps} gradients wait for the update"],
                ["load after an update, or before the first step"],
            )
        saved = open_saved(folder, self._consumer.graph, step)
        if saved.seed(self._seed) != self._seed:
            raise UsageError(
                f"{saved.checkpoint.path} was drawn from another seed",
                [f"checkpoint: {saved.seed(self._seed)}", f"here: {self._seed}"],
                [f"execute(..., seed={saved.seed(self._seed)})"],
            )
        self._engine.load_state(saved.checkpoint)
        self._watched = None  # what was kept of the first step is not what goes on
        return self._engine.num_steps

    def state_dict(self) -> dict[str, Tensor]:
        """Parameters and buffers of this rank's stages, by the module's own names."""
        return self._engine.state_dict()

    def close(self) -> None:
        """Leaves the job."""
        self._voice.__exit__(None, None, None)
        self._engine.close()

    def _bound(self, batch: Batch, agreement: Agreement) -> runtime.pipeline.microbatches.Batch:
        """The batch, which all ranks were given, as the engine takes it."""
        item = [self._pair(each) for each in batch] if isinstance(batch, list) else self._pair(batch)
        found = bound(item, self._consumer.inputs, self._consumer.decision.micro_batches)
        agreement.note(tensors_of(item))
        return found

    def _pair(self, batch: tuple[Tensors | SparseTensor, Tensors]) -> Pair:
        inputs, targets = batch
        if isinstance(inputs, SparseTensor):
            found = samples_first(inputs, _tuple(targets), self._consumer.per_site)
            return found[:_NUM_OF_CLOUDS], found[_NUM_OF_CLOUDS:]
        return _tuple(inputs), _tuple(targets)


_NUM_OF_CLOUDS = 3
"""Coordinates, features and counts."""


def _tuple(value: Tensors) -> tuple[Tensor, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)
