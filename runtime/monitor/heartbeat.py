"""What one rank says of itself on the board, and what it hears there of the others, while it takes part in a job."""

from __future__ import annotations

from types import TracebackType

from cuda_ops._torch import Store
from planner.ir.plan import Decision
from runtime.monitor.activity import INTERVAL_S, PATIENCE_S, Activity, Heartbeat, describe, fresh_board, within
from runtime.monitor.waits import Waits


class Voice:
    """Speaks from entry to exit of the context.

    Args:
        board: a client of its own of the job's store: one that waits for something would keep the beats back.
        deadline_s: of a step's waits; a rank speaks a few times within it.
        setup_s: of what comes before the first step.

    Attributes:
        activity: what this rank does, for the engine to write.
    """

    def __init__(self, board: Store, decision: Decision, rank: int, deadline_s: float, setup_s: float) -> None:
        self._board, self._rank, self._num_ranks = board, rank, decision.num_ranks
        self._waits = Waits(decision.rows(), [stage.ranks for stage in decision.stages])
        self.activity = Activity(deadline_s=setup_s)
        self._heartbeat = Heartbeat(board, rank, self.activity, min(INTERVAL_S, deadline_s / 4))

    def __enter__(self) -> Voice:
        self.activity.begin("starting")
        self._heartbeat.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._heartbeat.stop()

    def others(self) -> str:
        """What the other ranks do, and below it whom this rank waits for; a second or so, also if nobody answers."""
        return within(PATIENCE_S, self._look, "unknown, as the store of the job does not answer")

    def _look(self) -> str:
        self._heartbeat.publish()
        beats = fresh_board(self._board, self._num_ranks, 2 * self._heartbeat.interval_s)
        lines = (describe(beats, but=self._rank), self._waits.chain(self._rank, beats))
        return "\n".join(filter(None, lines))
