"""Who waits for whom: from what each rank says it does, the chain of waits and where it ends.

    rank 0 waits 11.8 s for rank 1 (gradient of micro-batch 3, stage 1 -> stage 0), which is computing stage 1 backward
    of micro-batch 3 (step 7) for 12.0 s

The program says what an action waits for (its peer is in its text); the board (:mod:`runtime.monitor.activity`) says
how far each rank has come.  Which of a stage's ranks sends what follows from layouts that are not known here, so where
several could, the one that has done least is named.

:class:`RankHeartbeat` is what one rank says of itself on the board, and hears there of the others.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from cuda_ops._torch import Store
from planner.ir.errors import DeadlineError
from planner.ir.plan import Decision
from planner.ir.schedule import COMPUTE, RECEIVE, Action, Op
from runtime.monitor.activity import (
    INTERVAL_S,
    Activity,
    Beat,
    BoardSilentError,
    Heartbeat,
    Silence,
    StatusStore,
    describe,
    fresh_board,
    read_board,
)
from runtime.monitor.slow import SlowWatch

START = "waiting for the others to start the step"
END = "waiting until all messages are taken"
BETWEEN = "between steps"
MEETING = ("comparing plans with the others", "meeting the others", "waiting for the others")

WORDS: Mapping[Op, str] = {
    Op.FORWARD: "forward",
    Op.BACKWARD: "backward",
    Op.BACKWARD_INPUT: "backward for the input",
    Op.BACKWARD_WEIGHT: "backward for the weights",
    Op.SEND_FORWARD: "sending the activation",
    Op.SEND_BACKWARD: "sending the gradient",
    Op.RECV_FORWARD: "receiving the activation",
    Op.RECV_BACKWARD: "receiving the gradient",
    Op.REDUCE_GRAD: "summing gradients",
    Op.UPDATE: "update",
    Op.PREPARE: "preparing inputs",
}

_SHORTEST_LOOK_S = 5e-4
_LONGEST_LOOK_S = 0.02
"""Between two looks at the board for those who have not come to a meeting."""

RowProgress = tuple[int, float]
"""(step, how many actions of its row a rank has begun): how far it has come."""


@dataclass(frozen=True, slots=True)
class _RankWait:
    """What a rank waits for: ``ranks`` that have not done their part; none of them if that is on its way."""

    what: str
    ranks: tuple[int, ...]
    others: tuple[int, ...]


@dataclass(slots=True)
class Waits:
    """The waits of one program.

    Attributes:
        rows: actions by rank.
        ranks: of each stage.
    """

    rows: Sequence[Sequence[Action]]
    ranks: Sequence[Sequence[int]]
    _index: list[dict[Action, int]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._index = [{action: index for index, action in enumerate(row)} for row in self.rows]

    def lines(self, beats: Mapping[int, Beat]) -> tuple[str, ...]:
        """Every chain that is not the end of a longer one."""
        chains = {rank: self._walk(rank, beats) for rank in beats if self._wait(rank, beats) is not None}
        inner = {rank for walked, _ in chains.values() for rank in walked[1:]}
        heads = [rank for rank in chains if rank not in inner] or list(chains)[:1]
        return tuple(self.chain(rank, beats) for rank in heads)

    def is_waiting(self, rank: int, beats: Mapping[int, Beat]) -> bool:
        """Whether the rank waits for others rather than does something."""
        return self._wait(rank, beats) is not None

    def origin(self, rank: int, beats: Mapping[int, Beat]) -> int:
        """Where the chain of waits from ``rank`` ends: the rank that does, or does not do, what all others wait for."""
        return self._walk(rank, beats)[0][-1] if rank in beats else rank

    def chain(self, rank: int, beats: Mapping[int, Beat]) -> str:
        """From ``rank`` on; empty if nobody knows what it does."""
        if rank not in beats:
            return ""
        return f"rank {rank} {self._walk(rank, beats)[1]}"

    def _walk(self, rank: int, beats: Mapping[int, Beat]) -> tuple[list[int], str]:
        """The ranks on the way, and what is said of the first and so on."""
        walked = [rank]
        text = ""
        who = ""
        while True:
            beat = beats.get(rank)
            if beat is None:
                of_whom = f"of {who}" if who == "which " else f"of rank {rank} "
                return walked, f"{text}{of_whom}nothing is known: it has ended, or never started"
            wait = self._wait(rank, beats)
            if beat.is_silent:
                last = f"waiting for {wait.what}{_step(beat)}" if wait else self._doing(beat)
                silent = f"has said nothing for {beat.silent_s:.1f} s or more (its last word: {last})"
                return walked, f"{text}{who}{silent}: it is stopped, or its host or link is gone"
            if wait is None:
                return walked, f"{text}{who}is {self._doing(beat)} for {beat.lasted_s:.1f} s"
            text += f"{who}waits {beat.lasted_s:.1f} s for "
            if not wait.ranks:
                return walked, f"{text}{wait.what}{_on_its_way(wait.others, rank)}"
            text += f"{_names(wait.ranks)} ({wait.what}), "
            rank = wait.ranks[0]
            if rank in walked:
                return walked, f"{text}and rank {rank} is where this began: they wait for one another"
            who = "which " if len(wait.ranks) == 1 else f"of which rank {rank} "
            walked.append(rank)

    def _wait(self, rank: int, beats: Mapping[int, Beat]) -> _RankWait | None:
        """What the rank waits for; None if it works."""
        beat = beats[rank]
        everyone = [other for other in range(len(self.rows)) if other != rank]
        if beat.what == START:
            return self._late("the start of the step", everyone, (beat.step, 0.0), beats)
        if beat.what in MEETING:
            late = [r for r in everyone if r not in beats or (beats[r].what not in MEETING and beats[r].step < 0)]
            return _RankWait("all ranks to be ready", tuple(late), ())
        if beat.what == END:
            return self._takers(rank, self.rows[rank], beats)
        action = _action(beat.what)
        if action is None or rank >= len(self.rows) or action not in self._index[rank]:
            return None
        if action.op in RECEIVE and action.peer is not None:
            forward = action.op is Op.RECV_FORWARD
            needed = Action(
                action.peer, Op.SEND_FORWARD if forward else Op.SEND_BACKWARD, action.microbatch, action.stage
            )
            message = f"{'activation' if forward else 'gradient'} of micro-batch {action.microbatch}"
            what = f"{message}, stage {action.peer} -> stage {action.stage}"
            return self._until(what, rank, needed, self.ranks[action.peer], beats)
        if action.blocking:  # a send that waits until it is taken
            return self._takers(rank, [action], beats)
        if action.op is Op.REDUCE_GRAD:
            what = f"sum of the gradients of stage {action.stage}"
            return self._until(what, rank, action, self.ranks[action.stage], beats, reached=True)
        return self._shared(rank, action, beats)

    def _until(
        self,
        what: str,
        rank: int,
        needed: Action,
        ranks: Iterable[int],
        beats: Mapping[int, Beat],
        reached: bool = False,
    ) -> _RankWait:
        """A wait until the ``ranks`` that have ``needed`` in their rows are past it, or at it."""
        step = beats[rank].step
        having = [other for other in ranks if other != rank and needed in self._index[other]]
        late = [
            other
            for other in having
            if self._place(other, beats) < (step, self._index[other][needed] + (0.0 if reached else 0.5))
        ]
        return _RankWait(what, self._least_done(late, beats), tuple(having))

    def _shared(self, rank: int, action: Action, beats: Mapping[int, Beat]) -> _RankWait | None:
        """Ranks of one stage may meet inside its actions, to exchange something, and wait for those that are late."""
        others = [other for other in self.ranks[action.stage] if other != rank]
        if not others or action.op in (Op.UPDATE, Op.PREPARE, Op.SEND_FORWARD, Op.SEND_BACKWARD):
            return None
        what = f"stage {action.stage} {WORDS[action.op]}{_of(action)}, which they do together"
        wait = self._until(what, rank, action, others, beats, reached=True)
        return wait if wait.ranks else None

    def _takers(self, rank: int, actions: Sequence[Action], beats: Mapping[int, Beat]) -> _RankWait:
        """Those that have not taken what ``rank`` sends by these actions."""
        late: dict[int, None] = {}
        for action in actions:
            if action.op not in (Op.SEND_FORWARD, Op.SEND_BACKWARD) or action.peer is None:
                continue
            op = Op.RECV_FORWARD if action.op is Op.SEND_FORWARD else Op.RECV_BACKWARD
            receive = Action(action.peer, op, action.microbatch, action.stage)
            late |= dict.fromkeys(self._until("", rank, receive, self.ranks[action.peer], beats).ranks)
        return _RankWait("its messages to be taken", self._least_done(late, beats), ())

    def _late(self, what: str, ranks: Iterable[int], until: RowProgress, beats: Mapping[int, Beat]) -> _RankWait:
        late = [other for other in ranks if self._place(other, beats) < until]
        return _RankWait(what, self._least_done(late, beats), ())

    def _place(self, rank: int, beats: Mapping[int, Beat]) -> RowProgress:
        beat = beats.get(rank)
        if beat is None:
            return -1, 0.0
        if beat.what in (END, BETWEEN):
            return beat.step, float(len(self.rows[rank]) + 1)
        action = _action(beat.what)
        return beat.step, float(self._index[rank].get(action, 0)) if action is not None else 0.0

    def _least_done(self, ranks: Iterable[int], beats: Mapping[int, Beat]) -> tuple[int, ...]:
        return tuple(sorted(ranks, key=lambda rank: (self._place(rank, beats), rank)))

    def _doing(self, beat: Beat) -> str:
        action = _action(beat.what)
        where = _step(beat)
        if action is None:
            return f"{beat.what}{where}"
        if action.op in COMPUTE:
            return f"computing stage {action.stage} {WORDS[action.op]}{_of(action)}{where}"
        return f"in stage {action.stage}, {WORDS.get(action.op, beat.what)}{_of(action)}{where}"


def _action(text: str) -> Action | None:
    try:
        return Action.parse(text)
    except ValueError:
        return None


def _of(action: Action) -> str:
    return "" if action.microbatch is None else f" of micro-batch {action.microbatch}"


def _step(beat: Beat) -> str:
    return f" (step {beat.step})" if beat.step >= 0 else ""


def _names(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}" if ranks else ""


def _on_its_way(ranks: Sequence[int], rank: int) -> str:
    if not ranks:
        return ""
    have = "has done its part" if len(ranks) == 1 else "have done their part"
    return f"; {_names(ranks)} {have}: it is on the way to rank {rank}"


class RankHeartbeat(Heartbeat):
    """That of a rank of a job, which also hears the others.

    Args:
        status_store: a client of its own of the job's store.
        deadline_s: of a step's waits; a rank speaks a few times within it.
        setup_s: of what comes before the first step.
        slow: finds slow ranks in what all of them say, on one of them; None: another one does.

    Attributes:
        activity: what this rank does, for the engine to write.
    """

    def __init__(
        self,
        status_store: Store | StatusStore,
        decision: Decision,
        rank: int,
        deadline_s: float,
        setup_s: float,
        slow: SlowWatch | None = None,
    ) -> None:
        watch = (lambda: None) if slow is None else partial(self._find, slow)
        activity = Activity(deadline_s=setup_s)
        activity.begin("starting")
        super().__init__(status_store, rank, activity, min(INTERVAL_S, deadline_s / 4), watch)
        self._num_ranks = decision.num_ranks
        self._deadline_s = deadline_s
        self._waits = Waits(decision.rows(), [stage.ranks for stage in decision.stages])

    def others(self) -> str:
        """What the other ranks do, and below it whom this rank waits for; a second or so, also if nobody answers."""
        try:
            return self._look()
        except BoardSilentError as error:
            return f"unknown, as {error}"

    def meet(self) -> None:
        """Returns once every rank has come to as many meetings as this one.

        Others may take long, as to write a checkpoint, and are waited for as long as they say that they live.  A wait
        for their messages could not tell a rank that is busy from one whose host is gone.

        Raises:
            DeadlineError: a rank was not heard of for the deadline of a step's waits.
        """
        self.activity.meetings += 1
        self.publish()
        missing = [rank for rank in range(self._num_ranks) if rank != self._rank]
        pause_s = _SHORTEST_LOOK_S
        silence = Silence(missing)
        while missing:
            beats: Mapping[int, Beat] = {}
            with suppress(BoardSilentError):
                beats = read_board(self._status_store, missing)
            silence.note(beats)
            arrived = {rank for rank, beat in beats.items() if beat.meetings >= self.activity.meetings}
            missing = [rank for rank in missing if rank not in arrived]
            silent = {rank: silence.seconds_of(rank) for rank in missing}
            if any(silent_s >= self._deadline_s for silent_s in silent.values()):
                raise self._unheard(silent, beats)
            if missing:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_LOOK_S)

    def _unheard(self, silent: Mapping[int, float], beats: Mapping[int, Beat]) -> DeadlineError:
        """The error of a meeting to which ranks do not come that have said nothing for so long."""
        lost = ", ".join(f"rank {rank}" for rank, silent_s in silent.items() if silent_s >= self._deadline_s)
        step = f" (step {self.activity.step})" if self.activity.step >= 0 else ""
        said_s = f"for {max(silent.values()):.1f} s, deadline {self._deadline_s:g} s"
        return DeadlineError(
            f"rank {self._rank} waited in vain for {lost} in {self.activity.what}{step}",
            [f"nothing was heard of {lost} {said_s}", *([describe(beats)] if beats else [])],
            ["see whether the host runs, and can be reached"],
        )

    def _find(self, slow: SlowWatch) -> None:
        """Reads what all ranks say of their steps; what is found is told with the next beat."""
        self.activity.slow += tuple(slow.note(read_board(self._status_store, range(self._num_ranks))))

    def _look(self) -> str:
        self.publish()
        beats = fresh_board(self._status_store, self._num_ranks, 2 * self.interval_s)
        lines = (describe(beats, but=self._rank), self._waits.chain(self._rank, beats))
        return "\n".join(filter(None, lines))
