"""What each rank is doing, told to the others: a line on a notice board (the store), renewed by a thread.

Where a rank hangs, nobody can ask it.  Hence each one says all the time what it does, and whoever meets a failure
(the peer that waits, or the launcher) reads the board.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch.distributed as dist

INTERVAL_S = 0.5

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
    """

    what: str = "starting"
    step: int = -1
    since_s: float = 0.0
    deadline_s: float = 600.0
    num_done: int = 0
    loss: float | None = None
    step_s: float = 0.0

    def begin(self, what: str) -> None:
        """Say what is done from now on."""
        self.what = what
        self.since_s = time.monotonic()


@dataclass(frozen=True, slots=True)
class Beat:
    """What a rank said last: as in :class:`Activity`, with how long it had lasted then and the number of this beat."""

    rank: int
    number: int
    what: str
    step: int
    for_s: float
    deadline_s: float
    num_done: int
    loss: float | None
    step_s: float

    def __str__(self) -> str:
        where = f"step {self.step}, " if self.step >= 0 else ""
        return f"rank {self.rank} in {self.what} ({where}{self.for_s:.1f} s)"


class Heartbeat:
    """Publishes ``activity`` on the board every ``interval_s`` until it is stopped.

    Args:
        store: a client of its own: one that waits for something would keep the beats back.
    """

    def __init__(self, store: dist.Store, rank: int, activity: Activity, interval_s: float = INTERVAL_S) -> None:
        self._store, self._rank, self._activity = store, rank, activity
        self.interval_s = interval_s
        self._number = 0
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Publish once, then go on in a thread."""
        self.publish()
        self._thread.start()

    def stop(self) -> None:
        """Publish a last time and end the thread."""
        self._stop.set()
        self._thread.join()
        self.publish()

    def publish(self) -> None:
        """Say now what is done; a board that is gone (its host ended) is no error of this rank."""
        with self._lock:
            self._number += 1
            now = self._activity
            for_s = time.monotonic() - now.since_s if now.since_s else 0.0
            said = {name: getattr(now, name) for name in ("what", "step", "deadline_s", "num_done", "loss", "step_s")}
            beat = Beat(rank=self._rank, number=self._number, for_s=for_s, **said)
            try:
                self._store.set(_key(self._rank), json.dumps(asdict(beat)))
            except RuntimeError as error:
                _log.debug("rank %d cannot publish: %s", self._rank, error)
                self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(self.interval_s):
            self.publish()


def read_board(store: dist.Store, num_ranks: int) -> Mapping[int, Beat]:
    """What each rank said last; ranks that said nothing, or a board that is gone, are left out."""
    beats = {}
    try:
        for rank in range(num_ranks):
            if store.check([_key(rank)]):
                beats[rank] = Beat(**json.loads(store.get(_key(rank))))
    except RuntimeError as error:
        _log.debug("cannot read the board: %s", error)
    return beats


def fresh_board(store: dist.Store, num_ranks: int, patience_s: float) -> Mapping[int, Beat]:
    """The board once every rank has spoken again, or after ``patience_s``: what a rank said before is out of date."""
    before = read_board(store, num_ranks)
    end_s = time.monotonic() + patience_s
    while True:
        now = read_board(store, num_ranks)
        if (
            all(rank not in now or now[rank].number > beat.number for rank, beat in before.items())
            or time.monotonic() > end_s
        ):
            return now
        time.sleep(0.02)


def describe(beats: Mapping[int, Beat], but: int | None = None) -> str:
    """One line: ``rank 0 in 0RECV_B3<1 (step 4, 0.2 s) · rank 1 ...``."""
    return " · ".join(str(beat) for rank, beat in sorted(beats.items()) if rank != but)


def _key(rank: int) -> str:
    return f"halopipe/beat/{rank}"
