"""The checkpoints of a run: when they are written, and what they hold beside the model's state.

    data/epoch, data/batches, data/samples     the position in the data
    run/step, run/seed                         steps done; what data and dropout are drawn with
    run/plan, run/micro_batches                the plan in words; samples of each micro-batch
    run/failures, run/seconds, run/ended       of a job that chooses its interval: what it has seen so far
    run/weights_alone                          the checkpoint was made of a plain state dict

Which one a run goes on from: :mod:`halopipe.training.resuming`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from halopipe.data.sources import Position
from halopipe.run_spec.options import RunOptions
from halopipe.run_spec.result import Saves
from halopipe.terminal import units
from halopipe.terminal.units import AUTO_INTERVAL
from halopipe.training.rank_device import hosts_of
from halopipe.training.save_times import EndRequest, SaveTimes
from planner.ir.codec import fingerprint
from planner.ir.errors import CheckpointError, EndedError, HalopipeError
from planner.ir.graph import Graph
from planner.ir.plan import Decision
from runtime import checkpoint
from runtime.checkpoint.folders import complete_path
from runtime.checkpoint.state import Number, RankState, joined
from runtime.engine import Engine
from runtime.rank import NOTHING, SAVE, STOP, RankContext
from runtime.timeouts import SAVE_S

SEED = "run/seed"
PLAN = "run/plan"
MICRO_BATCHES = "run/micro_batches"
DATA = "data"
FAILURES = "run/failures"
RAN = "run/seconds"
ENDED = "run/ended"

_log = logging.getLogger(__name__)


class Checkpoints:
    """Writes the checkpoints of a run while it goes on; all ranks call the same.

    A save that fails while steps are left, as on a full disk, is told, and tried again at the next interval: the last
    good checkpoint is still there.  One at the end of the job ends it with the error.

    Args:
        history: how often the job failed before, and how many seconds it ran.
        end: whether somebody asked this process to end.

    Attributes:
        is_due: whether to save after the step that was noted last; the same on all ranks.
    """

    def __init__(
        self,
        options: RunOptions,
        engine: Engine,
        history: tuple[int, float],
        end: EndRequest,
    ) -> None:
        context = engine.context
        self._folder = options.checkpoint
        self._accumulate = options.accumulate
        self._steps = options.steps
        self._last = engine.num_steps
        self._engine = engine
        self._context = context
        self._end = end
        self._fingerprints = fingerprints_of(context.graph)
        self._times = SaveTimes.of(options, len(set(hosts_of(context.decision))), *history)
        self._has_history = options.checkpoint_every == AUTO_INTERVAL
        self._is_writing = self.is_due = False
        context.vote.mine = self._wish
        self._saver = checkpoint.BackgroundSaver(
            options.checkpoint,
            context.rank,
            len(context.ranks),
            context.wait_for_all,
            keep=options.keep,
            deadline_s=SAVE_S,
        )

    @property
    def saves(self) -> Saves:
        """What was saved, and what it cost."""
        return self._times.saves

    def stepped(self, step_s: float) -> None:
        """Note a step, which took so long with its waits."""
        self._times.stepped(step_s, beside_writing=self._is_writing)
        agreed = self._context.vote.agreed == SAVE
        self.is_due = agreed or self._times.is_due_after(self._engine.num_steps)
        if self._is_writing and not self._saver.is_writing:
            self._is_writing = False
            self._say(self._saver.failure)

    def save(self, position: Position) -> None:
        """Begin to save; training may go on once this returns."""
        with self._times.saving():
            self._settle()
            self._begin(position, is_last=False)
        self._is_writing = True

    def finish(self, position: Position) -> None:
        """Save the last state unless that is done, and wait until it is on disk.

        Raises:
            CheckpointError: it could not be saved.
        """
        if self._last == self._engine.num_steps:
            self._saver.wait()
            return
        with self._times.saving(is_last=True):
            self._settle()
            self._begin(position, is_last=True)
            self._saver.wait()

    def end(self, position: Position) -> NoReturn:
        """Save the last state and end the job, which somebody asked for.

        Raises:
            EndedError: it is on disk.
            CheckpointError: it could not be saved.
        """
        self.finish(position)
        num_steps = self._engine.num_steps
        why = self._end.why or "another rank was asked"
        done = f"after {units.count(num_steps, 'step')}" if num_steps else "before its first step"
        saved = complete_path(Path(self._folder), num_steps)
        there = saved.exists()
        raise EndedError(
            f"the job ended {done}: {why}",
            [f"saved as {saved}" if there else "nothing was to be saved"],
            ["--resume, to go on from there"] if there else ["run it again"],
        )

    def _settle(self) -> None:
        """Until the last save is on disk, or known to have failed."""
        try:
            self._saver.wait()
        except CheckpointError as error:
            self._times.failed()
            if self._is_writing:  # nobody has looked since it ended
                self._say(error)
        self._is_writing = False

    def _begin(self, position: Position, *, is_last: bool) -> None:
        self._last = self._engine.num_steps
        numbers = numbers_of(self._context.decision)
        if self._has_history:
            is_last = is_last or self._last == self._steps
            numbers |= {FAILURES: self._times.failures, RAN: self._times.seconds_run, ENDED: is_last}
        state = with_numbers(self._engine.state(), self._context, position, numbers)
        self._saver.save(self._last, state, self._fingerprints)

    def _wish(self) -> int:
        """What this rank asks of all before a step: rank 0's clock says when to save, whoever is asked to end tells."""
        num_steps = self._engine.num_steps
        if self._end.why and num_steps % self._accumulate == 0:
            return STOP
        return (
            SAVE
            if self._context.rank == 0 and self._times.is_due and (num_steps + 1) % self._accumulate == 0
            else NOTHING
        )

    def _say(self, error: HalopipeError | None) -> None:
        """Tell people that a checkpoint was not saved, while the job goes on; rank 0 does."""
        if error is None or self._context.rank:
            return
        text = "; ".join([error.title, *error.details, "the job goes on, and tries again at the next interval"])
        _log.warning("%s", text)
        self._context.activity.tell(text)


def save_now(folder: str | Path, engine: Engine, *, keep: int) -> None:
    """Save what all ranks have, each calling this; returns once it is on disk.

    Args:
        keep: how many checkpoints stay; 0: all.
    """
    context = engine.context
    checkpoint.save(
        folder,
        engine.num_steps,
        with_numbers(engine.state(), context, None, numbers_of(context.decision)),
        context.rank,
        len(context.ranks),
        context.wait_for_all,
        fingerprints_of(context.graph),
        keep=keep,
    )


def with_numbers(
    state: RankState, context: RankContext, position: Position | None, more: Mapping[str, Number]
) -> RankState:
    """``state`` and what belongs to the run; rank 0 writes that."""
    numbers: dict[str, Number] = {SEED: context.seed, **more}
    if position is not None:
        numbers |= {f"{DATA}/{name}": getattr(position, name) for name in ("epoch", "batches", "samples")}
    return joined((state, RankState({}, {}, numbers, frozenset(numbers if context.rank == 0 else ()))))


def numbers_of(decision: Decision) -> dict[str, Number]:
    """What a checkpoint tells of the plan that it was saved by."""
    return {PLAN: plan_text(decision), MICRO_BATCHES: " ".join(map(str, decision.micro_batches))}


def fingerprints_of(graph: Graph) -> dict[str, str]:
    """What a checkpoint and whoever reads it must agree on."""
    return {"model": fingerprint(graph)}


def plan_text(decision: Decision) -> str:
    """``2 stages on 3 ranks, 1f1b, 4 micro-batches``."""
    counted = (
        units.count(len(decision.stages), "stage") + f" on {units.count(decision.num_ranks, 'rank')}",
        decision.schedule,
        units.count(len(decision.micro_batches), "micro-batch", "micro-batches")
        + (f" of {decision.num_parts} token slices" if decision.token_slices else ""),
    )
    return ", ".join(counted)
