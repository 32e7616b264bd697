"""The steps of a run on one rank: what is done in each, around it, and noted of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from halopipe.data.feeds import COMPARING, Consumer, Feed
from halopipe.data.sharded_feed import Supply
from halopipe.data.sources import ended
from halopipe.run_spec.job import Compared, Journal, RankResult
from halopipe.run_spec.options import RunOptions
from halopipe.run_spec.result import Score
from halopipe.training.checkpointing import SAVE_S, Checkpoints
from halopipe.training.evaluate import evaluate
from halopipe.training.lone_passes import Timer
from halopipe.training.metrics import Metrics
from halopipe.training.single_device import Reference
from halopipe.training.torch_traces import TorchTraces
from planner.ir.timeline import Span
from runtime.engine import Engine, StepResult
from runtime.memory import storage_bytes, with_peak
from runtime.monitor.activity import Activity
from runtime.pipeline.microbatches import Batch

KEPT_STEPS = 64
"""Last steps whose spans are kept."""

AfterStep = Callable[[int, StepResult], None]
"""Told of each step, by its number."""


@dataclass(slots=True)
class Loop:
    """The steps of one rank.

    Attributes:
        feed: where it stands is where the run begins.
        activity: told what is done between steps.
        trained: whether the steps are training steps; else they are forward passes in evaluation mode.
        compare: called after the first update with the losses so far, where this rank knows them; gives one device's
            step and this rank's differences from it.
        reference: what it gave.
        lone: times the stages alone; None: nobody does.
        journal: where steps and evaluations are noted at once; None: nowhere.
    """

    options: RunOptions
    engine: Engine
    consumer: Consumer
    supply: Supply
    feed: Feed
    metrics: Metrics
    checkpoints: Checkpoints
    after_step: AfterStep
    activity: Activity
    trained: bool = True
    compare: Callable[[Sequence[float]], tuple[Reference, tuple[Compared, ...]]] | None = None
    reference: Reference | None = None
    lone: Timer | None = None
    journal: Journal | None = None
    _results: list[StepResult] = field(default_factory=list)
    _spans: deque[tuple[int, tuple[Span, ...]]] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))
    _scores: list[Score] = field(default_factory=list)
    _memory: deque[tuple[int, tuple[int, ...]]] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))
    _peak_bytes: int = 0

    def run(self) -> RankResult:
        """All steps from the engine's own number on.

        Raises:
            UsageError: the data ends before.
        """
        options, first = self.options, self.engine.num_steps
        compared: tuple[Compared, ...] = ()
        traces = TorchTraces(options, self.consumer.transport.rank, self.activity, first)
        for number in range(first, options.steps):
            if self.lone is not None and number == min(first + options.warmup, options.steps - 1):
                self.lone.before(self.engine, forgets=options.accumulate == 1)
            with traces.around(number + 1):
                self.activity.begin("waiting for data")
                with self.engine.between_steps("reading the batch"):
                    batch = self.feed.take()
                if batch is None:
                    raise ended(number)
                is_watched = number - first == options.warmup - 1 and not traces.traces(number + 1)
                result = self._step(batch, is_watched=is_watched)
            self._note(number, batch, result)
            if number == options.accumulate - 1 and self.compare is not None:
                self.reference, compared = self.compare(self._losses)
            if options.eval_data and options.eval_every and (number + 1) % options.eval_every == 0:
                self._evaluate()
            if self.checkpoints.is_due:
                self._save()
        self._confirm()
        if options.eval_data and not (self._scores and self._scores[-1].step == options.steps):
            self._evaluate()
        if options.checkpoint:
            self._save(is_last=True)
        if self.lone is not None:
            self.lone.after(self.engine, forgets=options.accumulate == 1)
        return RankResult(
            self.consumer.transport.rank,
            self._losses,
            tuple(result.step_s for result in self._results),
            dict(self._spans),
            self._peak_bytes,
            compared,
            first,
            tuple(self._scores),
            self.trained,
            dict(self._memory),
            "" if self.reference is None else self.reference.witness,
            "" if self.reference is None else self.reference.skipped,
            self.supply.origin,
            self.consumer.transport.name if self.consumer.transport.world_size > 1 else "",
            () if self.lone is None else self.lone.passes,
            "" if self.lone is None else self.lone.skipped,
        )

    @property
    def _losses(self) -> tuple[float, ...]:
        return tuple(result.loss for result in self._results if result.loss is not None)

    def _step(self, batch: Batch, *, is_watched: bool) -> StepResult:
        if self.engine.meter is not None or not is_watched:
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
        if self.trained:
            return self.engine.step_on(batch)
        found = self.engine.evaluate_on(batch)
        return StepResult(found.loss, found.step_s, found.spans, (), peak_bytes=found.peak_bytes)

    def _note(self, number: int, batch: Batch, result: StepResult) -> None:
        self._results.append(StepResult(result.loss, result.step_s, (), ()))
        self._spans.append((len(self._results) - 1, result.spans))
        if result.peak_bytes:
            self._memory.append((len(self._results) - 1, result.peak_bytes))
            self._peak_bytes = max(self._peak_bytes, *result.peak_bytes)
        self.metrics.step(number + 1, self.feed.position.epoch, sum(batch.rows), result)
        if self.journal is not None:
            self.journal.step(number, result.loss, result.step_s)
        self.after_step(number, result)

    def _confirm(self) -> None:
        """That all ranks read the same, which is looked at now and then."""
        if self.feed.agreement is not None:
            with self.engine.between_steps(COMPARING):
                self.feed.agreement.confirm()

    def _save(self, *, is_last: bool = False) -> None:
        self._confirm()
        self.activity.begin("saving a checkpoint")
        self.activity.deadline_s = SAVE_S
        if is_last:
            self.checkpoints.finish(self.feed.position)
        else:
            self.checkpoints.save(self.feed.position)

    def _evaluate(self) -> None:
        batches = iter(self.supply.evaluation().take, None)
        batches = islice(batches, self.options.eval_batches or None)
        score = evaluate(self.engine, self.consumer, batches, self.options.eval_metric)
        self._scores.append(score)
        if self.journal is not None:
            self.journal.score(score)
        self.metrics.score(self.feed.position.epoch, score)
