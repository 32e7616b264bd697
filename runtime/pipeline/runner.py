"""Runs a rank's row of the program on one batch after another.

A batch is made the graph's inputs, the plan is bound to its sizes, and the executor for these is run behind the barrier
that every step begins with.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from planner.ir.errors import StageFailedError
from planner.ir.schedule import FORWARD_PASS, Action
from runtime.pipeline.executor import Executor, RowTrace, StepEnvironment
from runtime.pipeline.loss_weighting import LossWeighting
from runtime.pipeline.microbatches import Batch
from runtime.pipeline.specialize import Specialization, Specializer
from runtime.stage.local_stage import LocalStage

if TYPE_CHECKING:
    from runtime.sparse.ahead import BatchPreparation
    from runtime.sparse.share import AnyBatch

_MOST_KEPT = 64
"""Combinations of sizes whose executors are kept."""


class Runner:
    """Runs the row of one rank.

    Args:
        local_stages: the stages of this rank.
        loss_weighting: told of each batch that is run.
        preparing: makes batches of clouds or seeds the graph's inputs; None: the model takes them as they are.
        heard: called when all ranks have begun a step, with what they agreed on.
    """

    def __init__(
        self,
        specializer: Specializer,
        local_stages: Mapping[int, LocalStage],
        environment: StepEnvironment,
        loss_weighting: LossWeighting,
        preparing: BatchPreparation[AnyBatch] | None,
        heard: Callable[[int], None],
    ) -> None:
        self.specializer, self.preparing = specializer, preparing
        self._local_stages, self._environment, self._loss_weighting, self._heard = (
            local_stages,
            environment,
            loss_weighting,
            heard,
        )
        self._executors: dict[tuple[Specialization, bool], Executor] = {}
        self._turn = 0

    def bound(self, batch: Batch, step: int) -> tuple[Batch, Specialization, float, int]:
        """The batch as the graph's inputs, the plan bound to it; of finding sites of clouds seconds, and most bytes.

        Raises:
            StageFailedError: clouds or seeds that cannot be used.
        """
        # What was bound to the sites of the batch before keeps these, and all that was made of them.
        self._executors = {key: each for key, each in self._executors.items() if key[0].is_kept}
        meter, start = None if self.preparing is None else self._environment.meter, time.perf_counter()
        if meter is not None:
            meter.take_peak()
        try:
            graph_batch = batch if self.preparing is None else self.preparing.batch(batch)
            specialization = self.specializer.bind(self._local_stages, graph_batch)
            self.weigh(graph_batch, specialization)
        except StageFailedError as error:
            if self.preparing is None:
                raise
            raise self._environment.context.of(error, step, "finding sites") from error
        seconds = 0.0 if self.preparing is None else time.perf_counter() - start
        return graph_batch, specialization, seconds, 0 if meter is None else meter.take_peak()

    def stream_binding(self, batch: Batch, learns: bool) -> Specialization:
        """The plan bound to a batch of a stream, with its backwards or without."""
        specialization = self.specializer.bind(self._local_stages, batch)
        return specialization if learns else _forward_only(specialization)

    def weigh(self, batch: Batch, specialization: Specialization) -> None:
        """The batch that is run next; another may have been bound after it."""
        self._loss_weighting.begin(batch, specialization.local_stages)

    def executor(self, specialization: Specialization, *, evaluates: bool) -> Executor:
        """What runs the row at these sizes, in training or evaluation."""
        if not specialization.is_kept:
            self._executors.clear()
        key = (specialization, evaluates)
        if key not in self._executors:
            if len(self._executors) >= _MOST_KEPT:
                self._executors.pop(next(iter(self._executors)))
            bound = _forward_only(specialization) if evaluates else specialization
            self._executors[key] = Executor(bound, self._environment, evaluates=evaluates)
        return self._executors[key]

    def run(self, executor: Executor, batch: Batch, step: int) -> tuple[RowTrace, float]:
        """What the row did in the step of this number, and seconds from the common start to this rank's end.

        Raises:
            NotFiniteError: as :meth:`runtime.engine.Engine.settle`: the others' word on the last step is here when all
                begin the next.
        """
        executor.prepare(step, self.next_turn(), batch)
        self._heard(self._environment.vote.agreed)
        start = time.perf_counter()
        ran = executor.run()
        return ran, time.perf_counter() - start

    def next_turn(self) -> int:
        """Numbers the runs of programs, alike on all ranks."""
        self._turn += 1
        return self._turn


def _forward_only(specialization: Specialization) -> Specialization:
    """The same, without what training adds; it ends if the whole did, since what is left waits for less."""
    rows = tuple(tuple(_at_newest(a) for a in row if a.op in FORWARD_PASS) for row in specialization.program.rows)
    return replace(specialization, program=replace(specialization.program, rows=rows))


def _at_newest(action: Action) -> Action:
    return replace(action, version=0)
