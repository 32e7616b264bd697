"""The engine: one rank's part of a plan, step after step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from planner.ir.errors import DeadlineError, TransportError, UsageError
from planner.ir.extras import extras, required
from planner.ir.timeline import Span
from planner.layers import require_several_values
from planner.passes.versions import partial_batch_refused
from runtime.extra import RuntimeExtra
from runtime.numerics.finite import OnNan
from runtime.numerics.nan_guard import GuardedStep, NanGuard
from runtime.optim.gradient_sync import GradientSync, check_finishing
from runtime.pipeline.executor import StopBeforeStepError
from runtime.pipeline.microbatches import Batch, WholeBatch
from runtime.pipeline.routing import Piece
from runtime.pipeline.runner import Runner
from runtime.pipeline.specialize import Specialization
from runtime.rank import RankContext
from runtime.stage.builder import StageBuilder
from runtime.stage.state_dict import StateDict

if TYPE_CHECKING:
    from runtime.checkpoint.state import RankState
    from runtime.sparse.ahead import BatchPreparation
    from runtime.sparse.share import AnyBatch


_OTHER_BATCH = (
    "leave the smaller last batch out: DataLoader(..., drop_last=True)",
    "another halopipe plan --global-batch",
)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step gave on one rank.

    Attributes:
        loss: of the whole global batch; None on ranks that do not make it.
        step_s: from the common start to this rank's end; of clouds with the time of finding their sites before.
        spans: when each action ran, in order.
        gradient_norm: of all gradients before they were clipped; None where they are not, or not yet.
        learning_rates: that this step used, of this rank's optimisers' groups.
        peak_bytes: the most in use in each action, then after the last; empty where memory is not counted.
        left_out: why no rank made the update, where it was left out (``on_nan``).
        before_bytes: the most in use before the program, while sites were found; 0 where none are, or nothing counts.
    """

    loss: float | None
    step_s: float
    spans: tuple[Span, ...]
    gradient_norm: float | None = None
    learning_rates: tuple[float, ...] = ()
    peak_bytes: tuple[int, ...] = ()
    left_out: str = ""
    before_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult(StepResult):
    """What forward passes in evaluation mode gave on one rank; nothing is known of gradients and updates.

    Attributes:
        num_samples: of the whole batch.
        outputs: what the loss is computed from, or was to be kept, this rank's part, by micro-batch and name of the
            value: where it lies in the micro-batch, and the tensor.
        batch: what was evaluated on, as the graph's inputs.
    """

    num_samples: int
    outputs: Mapping[int, Mapping[str, Piece]]
    batch: Batch


class Engine(StateDict):
    """Executes a decision on one rank.

    A step gives the losses, gradients and buffers of one device that runs the micro-batches in the program's order: the
    loss of each weighted by its rows, gradients added, batch normalisation within each micro-batch, one update.

    Args:
        context: with its model and its transport.  The engine keeps of the model what this rank's stages use, and has
            the context let go of the rest.

    Raises:
        CorruptFileError: the decision's layers are not the graph's.
        UnsupportedModelError: the model cannot be cut that way.
        UsageError: what is asked for does not go with the plan's schedule.
    """

    def __init__(self, context: RankContext) -> None:
        self.context = context
        if context.ties or context.clip_norm or context.on_nan is OnNan.SKIP:
            check_finishing(context.program)
        if context.is_versioned and context.accumulate > 1:
            raise UsageError(
                f"schedule {context.decision.schedule} updates the weights within a step",
                [f"gradients of {context.accumulate} steps cannot be gathered for one update"],
                ["a larger global batch", "halopipe plan --schedule 1f1b"],
            )
        context.transport.deadline_s = context.deadline_s
        builder = StageBuilder(context)
        super().__init__(context, builder.local_stages())
        context.device = self.device if context.device is None else context.device
        self.layers_by_micro_batch = builder.layers_by_micro_batch
        for local_stage in self._local_stages.values():
            if context.scheduler is not None and local_stage.optimizer is not None:
                local_stage.optimizer.schedule(context.scheduler)
        self._gradient_sync = GradientSync(context, self._local_stages)
        self._guard = NanGuard(context, self._local_stages, self._gradient_sync, self._run_again)
        self._runner = Runner(context, self._local_stages, self._gradient_sync, self._guard.heard)
        self._streaming: Any = None
        if context.answers:
            streams = (extra.stream(context, self._local_stages) for extra in extras(RuntimeExtra))
            self._streaming = required(streams, "runtime", "answers to a stream of batches")
        context.let_go()

    @property
    def is_updated(self) -> bool:
        """Whether the last step ended with an update."""
        return self._gradient_sync.is_last

    @property
    def has_updated(self) -> bool:
        """The same, and it was not left out."""
        return self._gradient_sync.is_last and not self._gradient_sync.is_spoilt

    def step(self, inputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> StepResult:
        """One training step on a batch that every rank is given whole.

        Fewer rows than planned fill the first micro-batches.

        Raises:
            UsageError: the tensors are not what the model takes, or more rows than planned.
            StageFailedError, DeadlineError, TransportError: the step failed; the engine cannot be used any more.
            StopBeforeStepError: a rank asked to stop; the state is as before, the engine takes no more steps.
            NotFiniteError: so did the step before, or this one.
        """
        return self.step_on(self._batch(inputs, targets))

    def step_on(self, batch: Batch) -> StepResult:
        """One training step on ``batch``, which is the same on all ranks."""
        context = self.context
        if not context.program.trains:
            raise UsageError("this plan has forward passes alone, it cannot train", [], ["evaluate", "plan again"])
        if context.is_versioned and batch.rows != context.decision.micro_batches:
            sizes = f"the batch has micro-batches of {batch.rows}, the plan {context.decision.micro_batches}"
            raise partial_batch_refused(context.decision.schedule, [sizes], _OTHER_BATCH)
        require_several_values(context.graph, batch.rows, _OTHER_BATCH)
        rates = tuple(
            chain.from_iterable(r.optimizer.learning_rates() for r in self._local_stages.values() if r.optimizer)
        )
        bound = self._runner.bound(batch, self.num_steps, trains=True)
        executor = self._runner.executor(bound.specialization, evaluates=False)
        self._gradient_sync.begin()
        self._runner.norm = None
        kept = self._guard.begin()
        try:
            ran, step_s = self._runner.run(executor, bound.batch, self.num_steps)
        except StopBeforeStepError:
            self._gradient_sync.take_back()
            raise
        loss = self._loss(bound.specialization)
        self.num_steps += 1
        left_out = self._guard.judge(GuardedStep(self.num_steps - 1, batch, loss, kept))
        activity = context.activity
        activity.num_done = self.num_steps
        activity.loss = loss
        activity.step_s = step_s
        activity.steps.note(self.num_steps, ran.spans, step_s)
        return StepResult(
            loss,
            bound.preparing_s + step_s,
            ran.spans,
            self._runner.norm,
            rates,
            ran.peak_bytes,
            left_out,
            bound.peak_bytes,
        )

    def evaluate(self, inputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> EvaluationResult:
        """Forward passes in evaluation mode (running statistics, nothing dropped); nothing is changed by them."""
        return self.evaluate_on(self._batch(inputs, targets))

    def evaluate_on(self, batch: Batch, keep: Sequence[str] = ()) -> EvaluationResult:
        """As :meth:`evaluate`, on any batch.

        Args:
            batch: whose samples are those of the plan's micro-batches, or fewer.
            keep: values whose parts are given back instead of what the loss is computed from; among
                :func:`runtime.captured.watched_values`.
        """
        batch, specialization, preparing_s, _ = self._runner.bound(batch, self.num_steps)
        executor = self._runner.executor(specialization, evaluates=True)
        executor.kept = tuple(keep) or self.context.judged
        ran, step_s = self._runner.run(executor, batch, self.num_steps)
        loss = self._loss(specialization)
        outputs: Mapping[int, Mapping[str, Piece]] = dict(executor.outputs)
        axis = self.context.boundaries.axis
        num_parts = self.context.decision.num_parts
        if axis is not None:
            joined = (extra.joined_parts(axis, outputs, batch.rows, num_parts) for extra in extras(RuntimeExtra))
            outputs = required(joined, "runtime", "outputs of micro-batches in parts")
        return EvaluationResult(
            loss,
            preparing_s + step_s,
            ran.spans,
            peak_bytes=ran.peak_bytes,
            num_samples=sum(batch.rows),
            outputs=outputs,
            batch=batch,
        )

    def stream(self, *, learns: bool = False, training: bool = True) -> Any:
        """An endless stream of batches (an extra's), of which several may be on their way through the stages.

        Args:
            learns: whether each stage updates its weights after each batch, by losses of its own.
            training: whether stages run in the mode that the module was captured in, else in evaluation mode.

        Raises:
            UsageError: the engine was not made for answers, or a plan does not learn by local losses alone.
        """
        if self._streaming is None:
            raise UsageError("this engine gives no answers", ["it was made to train"], ["RankContext(answers=True)"])
        setting = replace(self._streaming, learns=learns, training=training)
        return setting.opened(self._runner, self._gradient_sync, self._learn)

    @property
    def preparing(self) -> BatchPreparation[AnyBatch] | None:
        """Makes batches of clouds or seeds the graph's inputs; None: the model takes them as they are."""
        return self._runner.preparing

    @property
    def looks_ahead(self) -> bool:
        """Whether the next step's batch is prepared while this one is computed, if it is known (:meth:`expect`)."""
        return self.preparing is not None and self.preparing.looks_ahead

    def expect(self, batch: Batch) -> None:
        """Prepare ``batch``, that of the next step, while this one is computed; nothing where nobody looks ahead.

        Where the thread that prepares has no core of its own it begins when this rank waits for others.
        """
        self._runner.expect(batch)

    def state(self) -> RankState:
        """All that this rank has to save for training to go on, also under another plan; no copies.

        Raises:
            UsageError: gradients wait for those of the next steps (``accumulate``), which is not part of the state.
            NotFiniteError: the state, or the last step, has NaN or infinity, and that is not to be ignored.
        """
        self.settle()
        self._require_updated()
        rank_state = super().state()
        self._guard.require_finite(rank_state, self.named, self.num_steps)
        return rank_state

    def whole_optimizer_state(self, *, of_last_update: bool = False) -> dict[str, Any]:
        """As of :class:`StateDict`.  Raises as :meth:`state`, but for what is not finite.

        Args:
            of_last_update: whatever has come since then, such as gradients that wait.
        """
        if not of_last_update:
            self.settle()
            self._require_updated()
        return super().whole_optimizer_state()

    def gradients(self) -> dict[str, Tensor]:
        """As of :class:`StateDict`, once the others' word on the last step has come."""
        self.settle()
        return super().gradients()

    @contextmanager
    def between_steps(self, doing: str) -> Iterator[None]:
        """Errors of what ranks do together beside their steps say where they were, as those of a step do."""
        try:
            yield
        except (DeadlineError, TransportError) as error:
            raise self.context.of(error, self.num_steps, doing) from error

    def settle(self) -> None:
        """Waits for the others' word on the last step; all ranks call this before anything but the next step follows.

        Raises:
            NotFiniteError: on some rank its loss or a gradient is NaN or infinite; all ranks raise this.
        """
        with self.between_steps("waiting for the others to end the step"):
            self._guard.settle(self.num_steps)

    def close(self) -> None:
        """Leave the transport."""
        self._transport.close()

    def _batch(self, inputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> WholeBatch:
        return WholeBatch(self.context.inputs, (*inputs, *targets), self.context.decision.micro_batches)

    def _require_updated(self) -> None:
        if not self.is_updated:
            raise UsageError(
                f"after step {self.num_steps} gradients wait for the update",
                ["they are not saved"],
                ["save after an update"],
            )

    def _run_again(self, guarded: GuardedStep) -> None:
        """The same step on the same batch; of clouds their sites are found once more."""
        batch, specialization, _, _ = self._runner.bound(guarded.batch, guarded.number)
        self._runner.run(self._runner.executor(specialization, evaluates=False), batch, guarded.number)

    def _learn(self) -> None:
        """A batch of a stream is a step."""
        self.num_steps += 1

    def _loss(self, specialization: Specialization) -> float | None:
        local_stage = specialization.local_stages.get(self.context.loss_stage)
        if local_stage is None:
            return None
        loss = local_stage.loss()
        if len(local_stage.ranks) > 1:
            total = torch.tensor([loss], dtype=torch.float64)
            local_stage.add(total)
            loss = total.item()
        return loss / sum(specialization.rows)
