"""What each rank is doing, told to the others: a line on a notice board (the store), renewed by a thread.

Where a rank hangs, nobody can ask it.  Hence each one says all the time what it does, and whoever meets a failure
(the peer that waits, or the launcher) reads the board.  The board may be gone, or behind a link that is cut: then a
question to it does not return, hence ranks ask through a :class:`StatusStore`, which nobody waits for for long.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self, TypeVar

from cuda_ops._torch import Store
from planner.ir.timeline import LeftOut, Slow
from runtime.monitor.slow import Moves, StepLog
from runtime.timeouts import SETUP_S

INTERVAL_S = 0.5
PATIENCE_S = 1.5

SILENT_S = 0.9
"""A rank that said nothing for so long is stopped, or its host or link is gone."""

SHOWN = 8
"""Updates left out that are told of, the newest."""

T = TypeVar("T")


class BoardSilentError(RuntimeError):
    """The store of the job has not answered for ``PATIENCE_S``; it may again."""


class StatusStore:
    """A client of the job's store that nobody waits for longer than ``patience_s``, for what ranks tell each other.

    While a question is without an answer for so long, as behind a link that is cut, all others are refused at once;
    when it is answered, since the link is back, all is as before.

    Args:
        store: a client of its own: one that waits for something would keep the questions back.
    """

    def __init__(self, store: Store, patience_s: float = PATIENCE_S) -> None:
        self._store = store
        self._patience_s = patience_s
        self._open_s: dict[Future[Any], float] = {}  # when the questions were asked that have no answer yet
        self._lock = threading.Lock()

    @classmethod
    def of(cls, store: Store | StatusStore) -> StatusStore:
        """``store`` itself, where it is one."""
        return store if isinstance(store, StatusStore) else cls(store)

    @property
    def is_silent(self) -> bool:
        """Whether a question has waited too long."""
        with self._lock:
            return time.monotonic() - min(self._open_s.values(), default=math.inf) >= self._patience_s

    def ask(self, question: Callable[[Store], T]) -> T:
        """The answer, which a thread waits for.

        Raises:
            BoardSilentError: it did not come in time.
            RuntimeError: the store is gone.
        """
        if not self.is_silent:
            answer: Future[T] = Future()
            with self._lock:
                self._open_s[answer] = time.monotonic()
            threading.Thread(target=self._asked, args=(answer, question), name="question", daemon=True).start()
            try:
                return answer.result(self._patience_s)
            except TimeoutError:
                pass
        raise BoardSilentError("the store of the job does not answer")

    def answer(self, question: Callable[[Store], T], otherwise: T) -> T:
        """The answer; ``otherwise`` where the store is silent or gone."""
        try:
            return self.ask(question)
        except RuntimeError as error:
            _log.debug("no answer: %s", error)
            return otherwise

    def set(self, key: str, value: str) -> None:
        """As of a store."""
        self.ask(lambda store: store.set(key, value))

    def get(self, key: str) -> bytes:
        """As of a store; ``key`` must be there."""
        return self.ask(lambda store: store.get(key))

    def check(self, keys: list[str]) -> bool:
        """As of a store."""
        return self.ask(lambda store: store.check(keys))

    def _asked(self, answer: Future[T], question: Callable[[Store], T]) -> None:
        try:
            answer.set_result(question(self._store))
        except Exception as error:  # noqa: BLE001  # raised where it was asked
            answer.set_exception(error)
        with self._lock:
            del self._open_s[answer]


_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Activity:
    """What this rank does now; written by its main thread, read by its heartbeat.

    Attributes:
        what: an action such as ``1RECV_F3<0``, or words for what comes before the first step.
        step: number of the step, -1 before the first.
        since_s: ``time.monotonic()`` at its start.
        deadline_s: how long it may last.
        num_done: complete steps.
        loss: of the last complete step, where this rank knows it.
        step_s: how long the last complete step took.
        remarks: what people should hear while the job runs; the launcher tells them, the last one with the next beat.
        listener: told as well of all that begins.
        steps: what the last steps took.
        slow: ranks and links that were found to be slow, on the rank that looks for them.
        left_out: the last updates that were left out, at most ``SHOWN``.
        meetings: how many of :meth:`runtime.monitor.waits.RankHeartbeat.meet` this rank has come to.
    """

    what: str = "starting"
    step: int = -1
    since_s: float = 0.0
    deadline_s: float = SETUP_S
    num_done: int = 0
    loss: float | None = None
    step_s: float = 0.0
    remarks: tuple[str, ...] = ()
    listener: Callable[[str], None] | None = None
    steps: StepLog = field(default_factory=StepLog)
    slow: tuple[Slow, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    meetings: int = 0

    def begin(self, what: str) -> None:
        """Say what is done from now on."""
        self.what = what
        self.since_s = time.monotonic()
        if self.listener is not None:
            self.listener(what)

    @property
    def remark(self) -> str:
        """The last of the remarks."""
        return self.remarks[-1] if self.remarks else ""

    def tell(self, remark: str) -> None:
        """Have people told something, once."""
        if remark not in self.remarks:
            self.remarks = (*self.remarks, remark)


@dataclass(frozen=True, slots=True)
class Beat:
    """What a rank said last: as in :class:`Activity`, with how long it had lasted then and the number of this beat.

    Attributes:
        silent_s: how long ago that was, as far as the reader knows.
        last, busy_s, parts_s, marked, moves: as of a :class:`runtime.monitor.slow.StepReport`.
    """

    rank: int
    number: int
    what: str
    step: int
    for_s: float
    deadline_s: float
    num_done: int
    loss: float | None
    step_s: float
    silent_s: float = 0.0
    last: int = 0
    busy_s: tuple[float, ...] = ()
    parts_s: Mapping[str, float] = field(default_factory=dict)
    marked: int = 0
    moves: Moves = ()
    slow: tuple[Slow, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    meetings: int = 0
    remark: str = ""

    def __str__(self) -> str:
        where = f"step {self.step}, " if self.step >= 0 else ""
        silent = f", silent for {self.silent_s:.1f} s or more" if self.is_silent else ""
        return f"rank {self.rank} in {self.what} ({where}{self.lasted_s:.1f} s{silent})"

    @property
    def lasted_s(self) -> float:
        """How long it has been doing this by now, if it still is."""
        return self.for_s + self.silent_s

    @property
    def is_silent(self) -> bool:
        """Whether it should have spoken again long ago."""
        return self.silent_s >= SILENT_S

    def aged(self, silent_s: float) -> Beat:
        """The same, said ``silent_s`` ago."""
        return replace(self, silent_s=silent_s)


_SAID = ("what", "step", "deadline_s", "num_done", "loss", "step_s", "slow", "left_out", "meetings", "remark")


class Heartbeat:
    """Publishes ``activity`` on the board from entry to exit of the context, every ``interval_s``.

    Args:
        watch: called after every second beat.
    """

    def __init__(
        self,
        store: Store | StatusStore,
        rank: int,
        activity: Activity,
        interval_s: float = INTERVAL_S,
        watch: Callable[[], None] = lambda: None,
    ) -> None:
        self._status_store = StatusStore.of(store)
        self._rank = rank
        self.activity = activity
        self._watch = watch
        self.interval_s = interval_s
        self._number = 0
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> Self:
        self.publish()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(PATIENCE_S)
        self.publish()

    def publish(self) -> None:
        """Say now what is done; a board that is gone (its host ended) is no error of this rank."""
        with self._lock:
            self._number += 1
            now = self.activity
            for_s = time.monotonic() - now.since_s if now.since_s else 0.0
            fields = {name: getattr(now, name) for name in _SAID} | now.steps.report()
            beat = Beat(rank=self._rank, number=self._number, for_s=for_s, **fields)
            try:
                self._status_store.set(_key(self._rank), json.dumps(asdict(beat)))
            except BoardSilentError:
                return
            except RuntimeError as error:
                _log.debug("rank %d cannot publish: %s", self._rank, error)
                self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(self.interval_s):
            self.publish()
            if self._number % 2:
                try:
                    self._watch()
                except BoardSilentError as error:
                    _log.debug("rank %d: %s", self._rank, error)
                except Exception:  # a heart beats on  # noqa: BLE001
                    _log.warning("rank %d cannot look for slow ranks", self._rank, exc_info=True)


def read_board(store: Store | StatusStore, ranks: Iterable[int]) -> Mapping[int, Beat]:
    """What each of ``ranks`` said last; those that said nothing, or a board that is gone, are left out.

    Raises:
        BoardSilentError: of a Board.
    """
    if isinstance(store, StatusStore):
        return store.ask(lambda own: read_board(own, ranks))
    beats = {}
    try:
        for rank in ranks:
            if store.check([_key(rank)]):
                beats[rank] = _beat(store.get(_key(rank)))
    except RuntimeError as error:
        _log.debug("cannot read the board: %s", error)
    return beats


class Silence:
    """How long ago ranks were heard of, each from now on."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self._heard = dict.fromkeys(ranks, (-1, time.monotonic()))

    def note(self, beats: Mapping[int, Beat]) -> None:
        """What they said last."""
        for rank, beat in beats.items():
            if self._heard[rank][0] != beat.number:
                self._heard[rank] = (beat.number, time.monotonic())

    def seconds_of(self, rank: int) -> float:
        """Since it was heard of."""
        return time.monotonic() - self._heard[rank][1]


def _beat(text: bytes) -> Beat:
    record = json.loads(text)
    record["slow"] = tuple(Slow(**each) for each in record.get("slow", ()))
    record["left_out"] = tuple(LeftOut(**each) for each in record.get("left_out", ()))
    return Beat(**record)


def fresh_board(store: Store | StatusStore, num_ranks: int, patience_s: float) -> Mapping[int, Beat]:
    """The board once every rank has spoken again, or after ``patience_s``: what a rank said before is out of date.

    Raises:
        BoardSilentError: of a Board.
    """
    start_s = time.monotonic()
    before = read_board(store, range(num_ranks))
    while True:
        now = read_board(store, range(num_ranks))
        waited_s = time.monotonic() - start_s
        silent = {rank for rank, beat in before.items() if rank in now and now[rank].number == beat.number}
        if not silent or waited_s > patience_s:
            return {rank: beat.aged(waited_s if rank in silent else 0.0) for rank, beat in now.items()}
        time.sleep(0.02)


def describe(beats: Mapping[int, Beat], but: int | None = None) -> str:
    """One line: ``rank 0 in 0RECV_B3<1 (step 4, 0.2 s) · rank 1 ...``."""
    return " · ".join(str(beat) for rank, beat in sorted(beats.items()) if rank != but)


def _key(rank: int) -> str:
    return f"halopipe/beat/{rank}"
