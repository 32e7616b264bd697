"""One rank of a running plan, in a script of one's own: steps, evaluations, checkpoints."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn

import runtime.batch
from cuda_ops.sparse.nn.tensor import SparseTensor
from halopipe.agreement import Agreement
from halopipe.batches import bound, tensors_of
from halopipe.checkpoints import save_now
from halopipe.evaluating import evaluate
from halopipe.feeding import Consumer, agreement_of
from halopipe.forms import Pair
from halopipe.runs import Score
from halopipe.saved import open_saved
from planner.ir.errors import UsageError
from profiler.clouds import samples_first
from runtime.engine import Engine, StepResult
from runtime.jobs.voice import Voice

Tensors = Tensor | tuple[Tensor, ...]
Batch = tuple[Tensors | SparseTensor, Tensors] | list[tuple[Tensors | SparseTensor, Tensors]]
"""Inputs and targets of a global batch; or of each of its micro-batches.

Of a sparse network the inputs are a SparseTensor, and targets one a sample or one a point in the order that the points
were given in; or all has samples first, padded: coordinates, features and counts, and the targets.
"""


class Execution:
    """One rank of a running plan; use as a context, or call ``close`` at the end.

    Until then it says what it does, so that a rank that waits in vain can tell for whom.

    Attributes:
        rank, num_ranks: in the job.
        model: the user's module; parameters of this rank's stages are trained, the others stay as they were.
    """

    def __init__(self, engine: Engine, consumer: Consumer, model: nn.Module, voice: Voice, seed: int) -> None:
        self._engine, self._consumer, self._voice, self._seed = engine, consumer, voice, seed
        self.model, self.rank, self.num_ranks = model, consumer.transport.rank, consumer.transport.world_size
        self._trained = agreement_of(consumer, 0, is_script=True)
        self._evaluated = agreement_of(consumer, 0, is_script=True, always=True)
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
        return self._engine.step_on(self._bound(batch, self._trained))

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
        return self._engine.num_steps

    def state_dict(self) -> dict[str, Tensor]:
        """Parameters and buffers of this rank's stages, by the module's own names."""
        return self._engine.state_dict()

    def close(self) -> None:
        """Leaves the job."""
        self._voice.__exit__(None, None, None)
        self._engine.close()

    def _bound(self, batch: Batch, agreement: Agreement) -> runtime.batch.Batch:
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
