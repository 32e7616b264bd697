"""The steps of a run on one rank, one after another: what is noted of them, what is due after them, and their end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from halopipe.data.ahead import AheadSource
from halopipe.data.shared_source import DataSources
from halopipe.data.sources import Position, ended
from halopipe.run_spec.event_log import EventLog
from halopipe.run_spec.job import Job, RankResult
from halopipe.run_spec.result import Saves, Score
from halopipe.terminal import units
from halopipe.training.first_step import FirstStep, first_batch_of
from halopipe.training.isolated_timing import IsolatedTimer
from halopipe.training.rank import JobMember
from halopipe.training.reference import Reference, compare_losses
from halopipe.training.steps import RankSteps
from planner.ir.timeline import LeftOut, Span
from runtime.engine import StepResult
from runtime.memory import storage_bytes, with_peak
from runtime.monitor.activity import SHOWN, Activity
from runtime.pipeline.executor import StopBeforeStepError
from runtime.pipeline.microbatches import Batch
from runtime.timeouts import SAVE_S

if TYPE_CHECKING:
    from halopipe.training.checkpointing import Checkpoints
    from halopipe.training.metrics import Metrics
    from halopipe.training.resuming import Saved
    from halopipe.training.save_times import EndRequest
    from halopipe.training.torch_traces import TorchTraces

KEPT_STEPS = 64
"""Last steps whose spans are kept."""

AfterStep = Callable[[int, StepResult, Activity], None]
"""Told of each step, by its number from 0, and what this rank says of itself."""


class Loop:
    """The steps of one rank.

    A ``step`` is counted from 0 over the whole training; ``num_done`` is it and those before, as people count; its
    ``place`` is among the steps of this run alone.

    Args:
        saved: where the run goes on; None: it begins.
        end: whether somebody asked this process to end; None: nobody listens, as nothing is saved.

    Attributes:
        after_step: told of each step; None: nobody is.
        metrics: to be open while the loop runs; None where none are asked for.
        isolated_timer: times the stages alone; None: nobody does.
        event_log: where steps and evaluations are noted at once; None: nowhere.
    """

    after_step: AfterStep | None = None
    isolated_timer: IsolatedTimer | None = None
    event_log: EventLog | None = None
    metrics: Metrics | None = None
    _checkpoints: Checkpoints | None = None
    _traces: TorchTraces | None = None
    _peak_bytes = 0

    def __init__(
        self,
        job: Job,
        member: JobMember,
        data_sources: DataSources,
        saved: Saved | None,
        end: EndRequest | None,
    ) -> None:
        self._options = job.options
        self._engine = member.engine
        self._context = member.context
        self._data_sources = data_sources
        self._first_step = member.engine.num_steps
        source = data_sources.training(Position() if saved is None else saved.position, self._first_step)
        self._source = AheadSource(source, member.engine.expect) if member.engine.looks_ahead else source
        self._position = source.position
        self._scores = list[Score]()
        self._left_out = list[LeftOut]()
        self._results = list[StepResult]()
        self._spans = deque[tuple[int, tuple[Span, ...]]](maxlen=KEPT_STEPS)
        self._memory = deque[tuple[int, tuple[int, ...]]](maxlen=KEPT_STEPS)
        first = None
        options = job.options
        if options.metrics:
            from halopipe.training.metrics import Metrics  # late: most runs write none

            context = member.context
            self.metrics = Metrics(options.metrics, member.store, context.rank, context.loss_rank, self._first_step)
        if options.eval_metric:
            from halopipe.training.evaluate import metric_call  # late: most runs evaluate nothing

            metric_call(member.context, units.names_in(options.eval_outputs))  # before the first step
        if end is not None:
            from halopipe.training.checkpointing import Checkpoints  # late: most runs save nothing

            self._checkpoints = Checkpoints(options, member.engine, (0, 0.0) if saved is None else saved.history, end)
        if job.is_compared:
            first = FirstStep(member, None, partial(first_batch_of, job), strict=options.check_numerics)
        self._steps = RankSteps(member.engine, self._take, self._run, source.agreement, False, self._note, first)
        self._steps.after_step = self._go_on
        self._steps.around = self._traced

    def run(self) -> RankResult:
        """All steps from the engine's own number on.

        Raises:
            UsageError: the data ends before.
            EndedError: somebody asked the job to end.
            NotFiniteError: a loss or gradient is NaN or infinite, where that is to stop the job.
        """
        options = self._options
        engine = self._engine
        if options.profile_steps:
            from halopipe.training.torch_traces import TorchTraces  # late: most runs trace nothing

            self._traces = TorchTraces(options, self._context.rank, self._context.activity, self._first_step)
        try:
            timed_alone_before = min(self._first_step + options.warmup, options.steps - 1)
            for step in range(self._first_step, options.steps):
                if self.isolated_timer is not None and step == timed_alone_before:
                    self.isolated_timer.time(engine, forgets=options.accumulate == 1)
                self._steps.step(step)
            self._finish()
        except StopBeforeStepError:
            if self._checkpoints is None:  # nobody but a run with checkpoints stops its ranks between steps
                raise
            self._saving()  # the batch that was taken for the step not done is read again by whoever goes on
            self._checkpoints.end(self._position)
        return self._result()

    def _finish(self) -> None:
        """What follows the last step: the others' word on it, the last evaluation, checkpoint and stages alone."""
        options = self._options
        engine = self._engine
        engine.settle()
        self._steps.confirm()
        if options.eval_data and not (self._scores and self._scores[-1].step == options.steps):
            self._evaluate()
        if self._checkpoints is not None:
            self._saving()
            self._checkpoints.finish(self._source.position)
        if self.isolated_timer is not None:
            self.isolated_timer.time(engine, forgets=options.accumulate == 1)

    def _result(self) -> RankResult:
        context = self._context
        timer = self.isolated_timer
        reference, compared = self._steps.comparison or (Reference(), ())
        losses = tuple(each.loss for each in self._results if not each.left_out and each.loss is not None)
        if self._options.check_numerics and reference.losses and context.rank == context.loss_rank:
            compared += compare_losses(reference, losses[: len(reference.losses)])[self._options.accumulate :]
        return RankResult(
            context.rank,
            losses,
            tuple(result.step_s for result in self._results),
            dict(self._spans),
            self._peak_bytes,
            compared,
            dict(self._memory),
            reference.witness,
            reference.skipped,
            remarks=context.activity.remarks,
            first_step=self._first_step,
            scores=tuple(self._scores),
            trained=context.program.trains,
            data=self._data_sources.origin,
            transport=context.transport.name if context.transport.world_size > 1 else "",
            isolated_passes=() if timer is None else timer.passes,
            why_not_isolated="" if timer is None else timer.skipped,
            left_out=tuple(self._left_out),
            slow=tuple(context.activity.slow),
            saves=Saves() if self._checkpoints is None else self._checkpoints.saves,
        )

    @contextmanager
    def _traced(self, step: int) -> Iterator[None]:
        with nullcontext() if self._traces is None else self._traces.around(step + 1):
            yield

    def _take(self, step: int) -> Batch:
        self._context.activity.begin("waiting for data")
        with self._engine.between_steps("reading the batch"):
            batch = self._source.take()
        if batch is None:
            raise ended(step)
        return batch

    def _run(self, step: int, batch: Batch) -> StepResult:
        is_traced = self._traces is not None and self._traces.traces(step + 1)
        is_watched = step - self._first_step == self._options.warmup - 1 and not is_traced
        engine = self._engine
        context = self._context
        run = engine.step_on if context.program.trains else engine.evaluate_on
        if context.meter is not None or not is_watched:
            return run(batch)
        held = engine.held_tensors()
        if self._options.accumulate > 1:
            held += engine.gradients().values()
        else:
            engine.forget_step()
        held_bytes = storage_bytes(held)
        result, more_bytes = with_peak(lambda: run(batch))
        self._peak_bytes = held_bytes + more_bytes
        return result

    def _note(self, step: int, batch: Batch, result: StepResult, seconds: float) -> None:
        activity = self._context.activity
        self._position = self._source.position
        num_done = step + 1
        place = len(self._results)
        if self._checkpoints is not None:
            self._checkpoints.stepped(seconds)
        self._results.append(StepResult(result.loss, result.step_s, (), left_out=result.left_out))
        if result.left_out:
            self._left_out.append(LeftOut(num_done, result.left_out))
            activity.left_out = tuple(self._left_out[-SHOWN:])
        self._spans.append((place, result.spans))
        if result.peak_bytes:
            self._memory.append((place, result.peak_bytes))
            self._peak_bytes = max(self._peak_bytes, result.before_bytes, *result.peak_bytes)
        if self.metrics is not None:
            self.metrics.step(num_done, self._position.epoch, sum(batch.rows), result, activity.slow)
        if self.event_log is not None:
            self.event_log.step(step, result.loss, result.step_s)
        if self.after_step is not None:
            self.after_step(step, result, activity)

    def _go_on(self, step: int) -> None:
        options = self._options
        checkpoints = self._checkpoints
        if options.eval_data and options.eval_every and (step + 1) % options.eval_every == 0:
            self._evaluate()
        if checkpoints is not None and checkpoints.is_due:
            self._saving()
            checkpoints.save(self._source.position)
            if self.event_log is not None:
                self.event_log.saves(checkpoints.saves)

    def _saving(self) -> None:
        self._engine.settle()
        self._steps.confirm()
        self._context.activity.begin("saving a checkpoint")
        self._context.activity.deadline_s = SAVE_S

    def _evaluate(self) -> None:
        from halopipe.training.evaluate import evaluate  # late: most runs evaluate nothing

        batches = iter(self._data_sources.evaluation().take, None)
        batches = islice(batches, self._options.eval_batches or None)
        outputs = units.names_in(self._options.eval_outputs)
        score = evaluate(self._engine, batches, self._options.eval_metric, outputs)
        self._scores.append(score)
        if self.event_log is not None:
            self.event_log.score(score)
        if self.metrics is not None:
            self.metrics.score(self._source.position.epoch, score)
