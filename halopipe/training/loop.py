"""The steps of a run on one rank: what is done in each, around it, and noted of it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from halopipe.data.ahead import AheadSource
from halopipe.data.batch_sources import COMPARING, BatchSource
from halopipe.data.shared_source import DataSources
from halopipe.data.sources import Position, ended
from halopipe.run_spec.job import EventLog, RankResult
from halopipe.run_spec.options import RunOptions
from halopipe.run_spec.result import Saves, Score
from halopipe.terminal import units
from halopipe.training.first_step import FirstStep
from halopipe.training.isolated_timing import IsolatedTimer
from halopipe.training.reference import Reference
from planner.ir.timeline import LeftOut, Span
from runtime.engine import Engine, StepResult
from runtime.memory import storage_bytes, with_peak
from runtime.monitor.activity import SHOWN, Activity
from runtime.numerics.difference import Difference
from runtime.pipeline.executor import StopBeforeStepError
from runtime.pipeline.microbatches import Batch
from runtime.rank import RankContext

if TYPE_CHECKING:
    from halopipe.training.checkpointing import Checkpoints
    from halopipe.training.metrics import Metrics

KEPT_STEPS = 64
"""Last steps whose spans are kept."""

AfterStep = Callable[[int, StepResult, Activity], None]
"""Told of each step, by its number, and what this rank says of itself."""


@dataclass(slots=True)
class Loop:
    """The steps of one rank.

    Attributes:
        batch_source: where it stands is where the run begins.
        metrics, checkpoints: None where none are asked for.
        first: compares the first update with one device's; None: nobody does.
        isolated_timer: times the stages alone; None: nobody does.
        event_log: where steps and evaluations are noted at once; None: nowhere.
        reference: what one device gave.
    """

    options: RunOptions
    engine: Engine
    data_sources: DataSources
    batch_source: BatchSource
    metrics: Metrics | None
    checkpoints: Checkpoints | None
    after_step: AfterStep
    first: FirstStep | None = None
    isolated_timer: IsolatedTimer | None = None
    event_log: EventLog | None = None
    reference: Reference | None = None
    _compared: tuple[Difference, ...] = ()
    _results: list[StepResult] = field(default_factory=list)
    _spans: deque[tuple[int, tuple[Span, ...]]] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))
    _scores: list[Score] = field(default_factory=list)
    _memory: deque[tuple[int, tuple[int, ...]]] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))
    _peak_bytes: int = 0
    _left_out: list[LeftOut] = field(default_factory=list)
    _done: Position = field(init=False)

    def __post_init__(self) -> None:
        if self.engine.looks_ahead:
            self.batch_source = AheadSource(self.batch_source, self.engine.expect)
        self._done = self.batch_source.position

    def run(self) -> RankResult:
        """All steps from the engine's own number on.

        Raises:
            UsageError: the data ends before.
            EndedError: somebody asked the job to end.
            NotFiniteError: a loss or gradient is NaN or infinite, where that is to stop the job.
        """
        begun = self.engine.num_steps
        try:
            self._train(begun)
            self._finish()
        except StopBeforeStepError:
            if self.checkpoints is None:  # nobody but a run with checkpoints stops its ranks between steps
                raise
            self._saving()  # the batch that was taken for the step not done is read again by whoever goes on
            self.checkpoints.end(self._done)
        return self._result(begun)

    def _train(self, begun: int) -> None:
        """The steps from ``begun`` on."""
        options, activity, traces = self.options, self.context.activity, None
        if options.profile_steps:
            from halopipe.training.torch_traces import TorchTraces  # late: most runs trace nothing

            traces = TorchTraces(options, self.context.rank, activity, begun)
        for number in range(begun, options.steps):
            if self.isolated_timer is not None and number == min(begun + options.warmup, options.steps - 1):
                self.isolated_timer.before(self.engine, forgets=options.accumulate == 1)
            begun_s = time.perf_counter()
            with nullcontext() if traces is None else traces.around(number + 1):
                activity.begin("waiting for data")
                with self.engine.between_steps("reading the batch"):
                    batch = self.batch_source.take()
                if batch is None:
                    raise ended(number)
                is_traced = traces is not None and traces.traces(number + 1)
                is_watched = number - begun == options.warmup - 1 and not is_traced
                result = self._step(batch, is_watched=is_watched)
            self._done = self.batch_source.position
            if self.checkpoints is not None:
                self.checkpoints.stepped(time.perf_counter() - begun_s)
            self._note(number, batch, result)
            outcome = None if self.first is None else self.first.after(result)
            self.reference, self._compared = outcome or (self.reference, self._compared)
            if options.eval_data and options.eval_every and (number + 1) % options.eval_every == 0:
                self._evaluate()
            if self.checkpoints is not None and self.checkpoints.is_due:
                self._save(self.checkpoints)

    def _finish(self) -> None:
        """What follows the last step: the others' word on it, the last evaluation, checkpoint and stages alone."""
        options = self.options
        self.engine.settle()
        self._confirm()
        if options.eval_data and not (self._scores and self._scores[-1].step == options.steps):
            self._evaluate()
        if self.checkpoints is not None:
            self._save(self.checkpoints, is_last=True)
        if self.isolated_timer is not None:
            self.isolated_timer.after(self.engine, forgets=options.accumulate == 1)

    @property
    def context(self) -> RankContext:
        """Of this rank."""
        return self.engine.context

    def _result(self, begun: int) -> RankResult:
        transport, activity = self.context.transport, self.context.activity
        losses = (each.loss for each in self._results if not each.left_out)
        return RankResult(
            transport.rank,
            tuple(loss for loss in losses if loss is not None),
            tuple(result.step_s for result in self._results),
            dict(self._spans),
            self._peak_bytes,
            self._compared,
            begun,
            tuple(self._scores),
            self.context.program.trains,
            dict(self._memory),
            "" if self.reference is None else self.reference.witness,
            "" if self.reference is None else self.reference.skipped,
            self.data_sources.origin,
            transport.name if transport.world_size > 1 else "",
            () if self.isolated_timer is None else self.isolated_timer.passes,
            "" if self.isolated_timer is None else self.isolated_timer.skipped,
            left_out=tuple(self._left_out),
            slow=tuple(activity.slow),
            saves=Saves() if self.checkpoints is None else self.checkpoints.saves,
            remarks=activity.remarks,
        )

    def _step(self, batch: Batch, *, is_watched: bool) -> StepResult:
        if self.context.meter is not None or not is_watched:
            return self._run(batch)
        held = self.engine.held_tensors()
        if self.options.accumulate > 1:
            held += self.engine.gradients().values()
        else:
            self.engine.forget_step()
        held_bytes = storage_bytes(held)
        result, more_bytes = with_peak(lambda: self._run(batch))
        self._peak_bytes = held_bytes + more_bytes
        return result

    def _run(self, batch: Batch) -> StepResult:
        if self.context.program.trains:
            return self.engine.step_on(batch)
        evaluation = self.engine.evaluate_on(batch)
        return StepResult(evaluation.loss, evaluation.step_s, evaluation.spans, peak_bytes=evaluation.peak_bytes)

    def _note(self, number: int, batch: Batch, result: StepResult) -> None:
        activity = self.context.activity
        self._results.append(StepResult(result.loss, result.step_s, (), left_out=result.left_out))
        if result.left_out:
            self._left_out.append(LeftOut(number + 1, result.left_out))
            activity.left_out = tuple(self._left_out[-SHOWN:])
        self._spans.append((len(self._results) - 1, result.spans))
        if result.peak_bytes:
            self._memory.append((len(self._results) - 1, result.peak_bytes))
            self._peak_bytes = max(self._peak_bytes, result.before_bytes, *result.peak_bytes)
        if self.metrics is not None:
            self.metrics.step(number + 1, self.batch_source.position.epoch, sum(batch.rows), result, activity.slow)
        if self.event_log is not None:
            self.event_log.step(number, result.loss, result.step_s)
        self.after_step(number, result, activity)

    def _confirm(self) -> None:
        """That all ranks read the same, which is looked at now and then."""
        if self.batch_source.agreement is not None:
            with self.engine.between_steps(COMPARING):
                self.batch_source.agreement.confirm()

    def _saving(self) -> None:
        from halopipe.training.checkpointing import SAVE_S  # late, as all that saves

        self.engine.settle()
        self._confirm()
        self.context.activity.begin("saving a checkpoint")
        self.context.activity.deadline_s = SAVE_S

    def _save(self, checkpoints: Checkpoints, *, is_last: bool = False) -> None:
        self._saving()
        if is_last:
            checkpoints.finish(self.batch_source.position)
        else:
            checkpoints.save(self.batch_source.position)
            if self.event_log is not None:
                self.event_log.saves(checkpoints.saves)

    def _evaluate(self) -> None:
        from halopipe.training.evaluate import evaluate  # late: most runs evaluate nothing

        batches = iter(self.data_sources.evaluation().take, None)
        batches = islice(batches, self.options.eval_batches or None)
        score = evaluate(self.engine, batches, self.options.eval_metric, units.names_in(self.options.eval_outputs))
        self._scores.append(score)
        if self.event_log is not None:
            self.event_log.score(score)
        if self.metrics is not None:
            self.metrics.score(self.batch_source.position.epoch, score)
