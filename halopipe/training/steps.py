"""What happens in one step of a rank, from its batch to what follows it.

Whoever has ranks take steps drives a :class:`RankSteps`: the loop of a run (:mod:`halopipe.training.loop`), a script's
own loop (:mod:`halopipe.training.session`), which ranks of ``hp.parallelize`` go through as well, and a stream of
requests that are answered.  They differ in where batches come from, and in what is done with what a step gave.  In
order:

    take        a batch: read, sent by rank 0, given by a script, or asked for by somebody
                all ranks agree on it (:class:`halopipe.data.batch_sources.Agreement`), and the batch after it is told
                to whoever prepares it meanwhile (:mod:`halopipe.data.ahead`)
    run         forwards, backwards, gradients over ranks, one update; or forwards alone
    settle      the others' word on NaN is waited for, where somebody looks at the loss at once
    note        what came of it: results, metrics, logs, the clock of checkpoints
    compare     the first update with one device's (:mod:`halopipe.training.first_step`)
    go on       what is due after the step: an evaluation, a checkpoint, a script's own schedule
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from halopipe.data.batch_sources import COMPARING, Agreement
from halopipe.training.first_step import ComparedStep, FirstStep
from runtime.engine import Engine, StepResult
from runtime.pipeline.microbatches import Batch


@dataclass(slots=True)
class RankSteps:
    """The steps of one rank; see the module.

    Attributes:
        take: gives the batch of a step, by its number from 0, the same on all ranks; None where there is none
            any more.
        run: given the same number, runs the step on its batch.
        agreement: that the ranks take the same; None where one reads for all.
        settles: whether the loss is looked at before the next step.
        note: told the number, the batch, what it gave on this rank, and seconds from before ``take``.
        first: compares the first update with one device's, until that is done; None: nobody does.
        after_step: called after each step with its number.
        around: entered, with that number, before the batch is taken; left when it was run.
        comparison: what ``first`` found.
    """

    engine: Engine
    take: Callable[[int], Batch | None]
    run: Callable[[int, Batch], StepResult]
    agreement: Agreement | None = None
    settles: bool = False
    note: Callable[[int, Batch, StepResult, float], object] | None = None
    first: FirstStep | None = None
    after_step: Callable[[int], object] | None = None
    around: Callable[[int], AbstractContextManager[object]] = nullcontext
    comparison: ComparedStep | None = None

    def step(self, step: int) -> StepResult | None:
        """Step ``step``, counted from 0; None where there is no batch for it.

        Raises:
            StopBeforeStepError: a rank asked to stop; the batch that was taken is not used.
            NotFiniteError: a loss or gradient is NaN or infinite, where that is to stop the job.
            NumericsError: the first update is not one device's.
        """
        begun_s = time.perf_counter()
        with self.around(step):
            batch = self.take(step)
            if batch is None:
                return None
            result = self.run(step, batch)
        if self.settles:
            self.engine.settle()
        if self.note is not None:
            self.note(step, batch, result, time.perf_counter() - begun_s)
        if self.first is not None:
            self.comparison = self.first.after(result)
            self.first = self.first if self.comparison is None else None
        if self.after_step is not None:
            self.after_step(step)
        return result

    def confirm(self) -> None:
        """Compares what ranks took since they compared last: before what was made of it is saved.

        Raises:
            DifferentDataError: it was not the same.
        """
        if self.agreement is not None:
            with self.engine.between_steps(COMPARING):
                self.agreement.confirm()
