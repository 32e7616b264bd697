"""Runs a rank's row of the program on one batch after another.

A batch is made the graph's inputs, the plan is bound to its sizes, and the executor for these is run after the barrier
that every step begins with.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from planner.ir.errors import StageFailedError
from planner.ir.schedule import FORWARD_PASS
from runtime.optim.gradient_sync import GradientSync
from runtime.pipeline.executor import Executor, RowTrace
from runtime.pipeline.loss_weighting import LossWeighting
from runtime.pipeline.microbatches import Batch
from runtime.pipeline.specialize import Specialization, Specializer
from runtime.rank import RankContext
from runtime.recent import Recent
from runtime.stage.local_stage import LocalStage

if TYPE_CHECKING:
    from runtime.sparse.ahead import BatchPreparation
    from runtime.sparse.share import AnyBatch


class BoundBatch(NamedTuple):
    """A batch as this rank runs it.

    Attributes:
        batch: the graph's inputs.
        specialization: the plan bound to their sizes.
        preparing_s: what it took to find the sites of clouds; 0 of other batches.
        peak_bytes: the most in use meanwhile; 0 where nothing counts.
    """

    batch: Batch
    specialization: Specialization
    preparing_s: float = 0.0
    peak_bytes: int = 0


class Runner:
    """Runs the row of one rank.

    Args:
        local_stages: the stages of this rank.
        gradient_sync: finishes its steps.
        heard: called when all ranks have begun a step, with what they agreed on.

    Attributes:
        preparing: makes batches of clouds or seeds the graph's inputs; None: the model takes them as they are.
        norm: of all gradients of the last step before they were clipped; None where they are not.

    Raises:
        UnsupportedModelError: the model cannot be run with the samples that are planned.
    """

    norm: float | None = None

    def __init__(
        self,
        context: RankContext,
        local_stages: Mapping[int, LocalStage],
        gradient_sync: GradientSync,
        heard: Callable[[int], None],
    ) -> None:
        self.context = context
        self._local_stages = local_stages
        self._heard = heard
        self._gradient_sync = gradient_sync
        self._loss_weighting = LossWeighting(context)
        self.specializer = Specializer(context, self._loss_weighting)
        self.specializer.require_possible(local_stages)
        self.preparing: BatchPreparation[AnyBatch] | None = None
        if context.preparation is not None:
            from runtime.sparse.preparing import preparing  # late: other networks do without

            core = context.spare_core
            gives_way = context.gives_way
            self.preparing = preparing(context.decision, context.model, core, gives_way=gives_way)
        self._upcoming = list[Batch]()  # that wait for the next step's first wait
        self._executors = Recent[tuple[Specialization, bool], Executor]()
        self._turn = 0

    def expect(self, batch: Batch) -> None:
        """Prepare a later ``batch`` on the thread beside: on a core of its own now, else once this rank waits."""
        if self.preparing is None or not self.preparing.looks_ahead:
            return
        if self.context.gives_way:
            self._upcoming.append(batch)
        else:
            self.preparing.expect(batch, self.context.rank)

    def _begin_upcoming(self) -> None:
        """While this rank waits its core has time for them."""
        if self.preparing is not None:
            for batch in self._upcoming:
                self.preparing.expect(batch, self.context.rank)
        self._upcoming.clear()

    def bound(self, batch: Batch, step: int, *, trains: bool = False) -> BoundBatch:
        """The batch as the graph's inputs, and the plan bound to it.

        Of clouds what was made of the batch before goes first: sites and maps are much of what a rank holds, and would
        be there twice while the next are made.  So do gradients, where a training step begins with none.

        Raises:
            StageFailedError: clouds or seeds that cannot be used.
        """
        if self.preparing is not None:
            self._upcoming = [each for each in self._upcoming if each is not batch]  # of which it is too late
            self._gradient_sync.bind(None)
            for local_stage in self._local_stages.values():
                local_stage.passes.reset(step)
                if trains and self._gradient_sync.is_last:
                    local_stage.forget_gradients()
        # What was bound to the sites of the batch before keeps these, and all that was made of them.
        stale = [key for key in self._executors if not key[0].is_kept]
        while stale:  # no name may keep one
            del self._executors[stale.pop()]
        meter = None if self.preparing is None else self.context.meter
        start = time.perf_counter()
        if meter is not None:
            meter.take_peak()
        try:
            graph_batch = batch if self.preparing is None else self.preparing.batch(batch)
            specialization = self.specializer.bind(self._local_stages, graph_batch)
            self._loss_weighting.begin(graph_batch, specialization.local_stages)
        except StageFailedError as error:
            if self.preparing is None:
                raise
            raise self.context.of(error, step, "finding sites") from error
        self._gradient_sync.bind(specialization.local_stages)
        if self.preparing is None:
            return BoundBatch(graph_batch, specialization)
        seconds = time.perf_counter() - start
        return BoundBatch(graph_batch, specialization, seconds, 0 if meter is None else meter.take_peak())

    def stream_binding(self, batch: Batch, learns: bool) -> Specialization:
        """The plan bound to a batch of a stream, with its backwards or without."""
        specialization = self.specializer.bind(self._local_stages, batch)
        return specialization if learns else _forward_only(specialization)

    def begin(self, batch: Batch, specialization: Specialization, learns: bool) -> None:
        """A batch of a stream is run next; another may have been bound after it."""
        self._loss_weighting.begin(batch, specialization.local_stages)
        if learns:
            self._gradient_sync.bind(specialization.local_stages)
            self._gradient_sync.begin()

    def executor(self, specialization: Specialization, *, evaluates: bool) -> Executor:
        """What runs the row at these sizes, in training or evaluation."""
        if not specialization.is_kept:
            self._executors.clear()
        key = (specialization, evaluates)
        if key not in self._executors:
            bound = _forward_only(specialization) if evaluates else specialization
            self._executors[key] = Executor(bound, self.context, self.finish, evaluates=evaluates)
        return self._executors[key]

    def run(self, executor: Executor, batch: Batch, step: int) -> tuple[RowTrace, float]:
        """What the row did in the step of this number, and seconds from the common start to this rank's end.

        Raises:
            NotFiniteError: as :meth:`runtime.engine.Engine.settle`: the others' word on the last step is here when all
                begin the next.
        """
        executor.begin(step, self.next_turn(), batch)
        self._heard(self.context.vote.agreed)
        start = time.perf_counter()
        ran = executor.run(self._begin_upcoming)
        return ran, time.perf_counter() - start

    def finish(self) -> None:
        """What all ranks do together before the first update that ends a step."""
        self.norm = self._gradient_sync.run()

    def next_turn(self) -> int:
        """Numbers the runs of programs, alike on all ranks."""
        self._turn += 1
        return self._turn


def _forward_only(specialization: Specialization) -> Specialization:
    """The same, without what training adds; it ends if the whole did, since what is left waits for less."""
    rows = tuple(
        tuple(replace(a, version=0) for a in row if a.op in FORWARD_PASS) for row in specialization.program.rows
    )
    return replace(specialization, program=replace(specialization.program, rows=rows))
