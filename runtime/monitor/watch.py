"""Watches the ranks of a job: their processes, where they are workers of this host, or what they leave on the store.

When one worker fails, all are ended.  They meet in a store that the launcher hosts on one interface; on it they also
say what they do, so that a worker that hangs is found although it says nothing any more.

Before its first step a worker has minutes for each thing that it does, as models and data may take those to load.  But
one that is stopped then, or sleeps while others wait for it, need not be waited for: of workers on this host the kernel
tells, also before their first word.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol, TypeGuard

from cuda_ops._torch import Store, TCPStore
from cuda_ops.device.host import cpu_s_of_all, process_state
from planner.ir.errors import DeadlineError, HalopipeError, TransportError
from runtime.monitor.activity import Beat, Silence, StatusStore, describe, read_board
from runtime.monitor.failure import EndedWorker, also, blame, cause, died, left_by
from runtime.monitor.waits import MEETING, Waits
from runtime.timeouts import CONNECT_S, SETUP_S

LOOPBACK = "127.0.0.1"
STOPPED_S = 1.0
"""A worker that is stopped for so long before its first step is not waited for; a whole job is continued faster."""

_SLEEPS_S = 5.0
"""A worker may sleep for so long at least while others wait for it to start."""

_AWAKE = 0.01
"""Share of a core that a worker which does something uses; its heartbeat alone takes a tenth of that."""

PATIENCE_S = {0: 0.0, 1: 0.1, 2: 0.3, 3: 1.0}
"""How long to wait for a better explanation, by :func:`runtime.monitor.failure.blame`."""

_POLL_S = 0.02
_BOARD_S = 0.2
_GRACE_S = 1.2
"""Beyond its deadline a wait should have ended by itself; later the launcher ends it."""


class Workers(Protocol):
    """The processes of the ranks of a job."""

    def start(self) -> None:
        """Start all of them."""

    @property
    def pids(self) -> Mapping[int, int]:
        """Those of their processes, by rank."""

    def ended(self) -> Mapping[int, EndedWorker]:
        """Those that have ended by now."""

    def end(self) -> None:
        """End those that still run; none is alive afterwards."""


_OF_STORE = 12
"""Files of a store, with its listener 11 (torch 2.13), and a first connection."""


def _require_files(one: int) -> None:
    """Raises :class:`OSError` where a store could not open its own: torch says so after minutes, or never."""
    opened: list[int] = []
    try:
        while len(opened) < _OF_STORE:
            opened.append(os.dup(one))
    finally:
        for file in opened:
            os.close(file)


def _require_route(host: str) -> None:
    """Raises ``OSError`` where this host cannot reach itself there, as with the loopback interface down.

    One can listen even so, and torch would try to connect for minutes.  Nothing is sent.
    """
    with socket.socket(_family(host), socket.SOCK_DGRAM) as probe:
        probe.connect((host, 1))


def host_store(host: str = LOOPBACK, port: int = 0) -> TCPStore:
    """A store at one address of this host, by default for it alone; by itself torch listens on every interface.

    Args:
        port: that others were told of; 0: a free one.

    Raises:
        TransportError: the port is not to be had, ``host`` is not this one, or no message gets there.
        OSError: it needs more files than may be opened.
    """
    try:
        _require_route(host)
        listener = socket.create_server((host, port), family=_family(host))
        _require_files(listener.fileno())
    except (OSError, UnicodeError) as error:  # UnicodeError: a..b
        number = error.errno if isinstance(error, OSError) else 0
        if number == errno.EADDRINUSE:  # a training script has made torch's store there itself
            return join_store(host, port)
        if number in (errno.EMFILE, errno.ENFILE):
            raise
        if number == errno.ENETUNREACH:
            raise TransportError(
                f"this host cannot reach itself at {host}", [str(error)], ["bring it up: ip link set lo up"]
            ) from error
        raise TransportError(
            f"rank 0 cannot listen at {host}, port {port}",
            [str(error)],
            ["set MASTER_ADDR to an address of the host of rank 0, and MASTER_PORT to a free port"],
        ) from error
    port = listener.getsockname()[1]
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def join_store(host: str, port: int, timeout_s: float = CONNECT_S) -> TCPStore:
    """One more client of a store.

    Raises:
        TransportError: nobody answers there within ``timeout_s``.
    """
    try:
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise TransportError(
            f"no store answers at {host}, port {port}",
            [str(error).splitlines()[0]],
            ["see whether this host can reach that address, and whether a firewall lies between"],
        ) from error
    store.set_timeout(timedelta(seconds=SETUP_S))
    return store


def meet(store: Store, rank: int, num_ranks: int, timeout_s: float = SETUP_S) -> str:
    """The prefix of what ``store`` holds of this attempt of the job, once all of its ranks are there.

    A store may outlive the ranks: torchrun's holds the keys of every attempt before a restart, and attempts are not
    numbered alike on all hosts.  So rank 0 makes a name for the attempt up and tells it to the others, each of which
    asks under a name of its own; what dead ranks asked is answered too, and nobody hears it.

    Raises:
        DeadlineError: not all were there in time.
    """
    end_s = time.monotonic() + timeout_s
    if rank:
        asked = uuid.uuid4().hex
        store.set(f"halopipe/ask/{rank}", asked)
        _until(store, f"halopipe/answer/{asked}", end_s, "rank 0", rank)
        attempt = store.get(f"halopipe/answer/{asked}").decode()
        store.set(f"{attempt}/here/{rank}", "")
        return attempt
    attempt = f"halopipe/{uuid.uuid4().hex}"
    answered = set()
    missing = set(range(1, num_ranks))
    while missing:
        for other in sorted(missing):
            if store.check([f"halopipe/ask/{other}"]):
                asked = store.get(f"halopipe/ask/{other}").decode()
                if asked not in answered:
                    store.set(f"halopipe/answer/{asked}", attempt)
                    answered.add(asked)
        missing = {other for other in missing if not store.check([f"{attempt}/here/{other}"])}
        if missing and time.monotonic() > end_s:
            raise _nobody(", ".join(f"rank {other}" for other in sorted(missing)), rank)
        time.sleep(_POLL_S if missing else 0.0)
    return attempt


@dataclass(slots=True)
class Supervisor:
    """Watches ranks until each has left its result; what one of them fails by is raised, with its rank.

    Attributes:
        titles: by rank, such as ``rank 1 (n0/cpu1, stage 1)``, for errors.
        store: that the ranks publish their activity on, and leave their results and errors.
        workers: their processes, of this host; None: somebody else's, of which the store alone tells.
        watch: called a few times a second with what each of ``workers`` does.
        waits: tells who waits for whom.
        deadline_s: how long others wait at the start for a worker that only sleeps, and how long the store may be
            silent.
    """

    titles: Mapping[int, str]
    store: Store | StatusStore
    workers: Workers | None = None
    watch: Callable[[Mapping[int, Beat]], None] = lambda beats: None
    waits: Waits = field(default_factory=lambda: Waits((), ()))
    deadline_s: float = SETUP_S
    _silence: Silence = field(init=False)
    _beats: Mapping[int, Beat] = field(init=False, default_factory=dict)
    _results: dict[int, str] = field(init=False, default_factory=dict)
    _failures: dict[int, HalopipeError] = field(init=False, default_factory=dict)
    _rests: dict[int, _Rest] = field(init=False, default_factory=dict)

    def run(self, workers: Workers) -> dict[int, str]:
        """Starts all workers and returns each rank's result; none is alive afterwards, whatever happens.

        Raises:
            HalopipeError: what the worker that failed first raised; WorkerDiedError if it could not say.
            DeadlineError: a worker did one thing for longer than its deadline, went silent for so long, or is stopped
                or sleeps before its first step.
        """
        self.workers = workers
        try:
            workers.start()
            return self.wait()
        finally:
            workers.end()

    def wait(self, limit_s: float = math.inf) -> dict[int, str]:
        """Each rank's result.

        Raises:
            HalopipeError: what the rank that failed first raised; of workers also as :meth:`run`.
            DeadlineError: the store was silent for too long.
            TransportError: a rank has left nothing within ``limit_s``.
        """
        began_s = answered_s = time.monotonic()
        self._silence = Silence(self.titles)
        read_s = 0.0
        while True:
            now_s = time.monotonic()
            try:
                if not self._look():
                    break
                answered_s = now_s
            except RuntimeError as error:  # the store's
                if now_s - answered_s >= self.deadline_s:
                    silent = f"has not answered for {now_s - answered_s:.1f} s, deadline {self.deadline_s:g} s"
                    raise DeadlineError(
                        "nothing is known of the ranks that work",
                        [f"the store of the job {silent}"],
                        ["see whether the host of rank 0 runs, and can be reached"],
                    ) from error
            if self.workers is not None and now_s - read_s >= _BOARD_S:
                self._read_board(self.workers)
                read_s = time.monotonic()
            if self._failures:
                self._raise_cause()
            if now_s - began_s > limit_s:
                raise TransportError(f"rank {min(self.titles.keys() - self._results.keys())} left no result")
            time.sleep(_BOARD_S if self.workers is None else _POLL_S)
        if self.workers is not None:
            self._read_board(self.workers)  # the last that they had to say
        return self._results

    @property
    def _start_s(self) -> float:
        return max(_SLEEPS_S, self.deadline_s)

    def _look(self) -> bool:
        """Whether anybody still runs, or failed; results and failures are noted, of workers once they have ended."""
        ended = dict.fromkeys(self.titles) if self.workers is None else self.workers.ended()
        for rank, process in ended.items():
            if rank in self._failures or rank in self._results:
                continue
            outcome = left_by(self.store, rank)
            if isinstance(outcome, HalopipeError):
                self._failures[rank] = outcome
            elif outcome:
                self._results[rank] = outcome
            elif process is not None:
                beat = read_board(self.store, [rank]).get(rank)
                last = str(beat) if beat else ""
                self._failures[rank] = died(self.titles[rank], process.code, last, process.output)
        return bool(self._failures) or len(self._results) < len(self.titles)

    def _raise_cause(self) -> None:
        """Wait a little for the rank that failed first to be heard, then raise."""
        first_s = time.monotonic()
        while True:
            error = cause(self._failures)
            if time.monotonic() - first_s >= PATIENCE_S[blame(error)]:
                error.ranks = self._lost(error)
                raise error
            with contextlib.suppress(RuntimeError):  # the store's
                self._look()
            time.sleep(_POLL_S)

    def _lost(self, error: HalopipeError) -> tuple[int, ...]:
        """Those that failed as ``error`` says: of waits, those at whose end nobody did their part."""
        same = [rank for rank, failure in self._failures.items() if type(failure) is type(error)]
        if isinstance(error, DeadlineError):
            same = [self.waits.origin(rank, self._beats) for rank in same]
        return tuple(sorted(set(same)))

    def _read_board(self, workers: Workers) -> None:
        now_s = time.monotonic()
        beats = read_board(self.store, self.titles)
        self._silence.note(beats)
        self._beats = {rank: beat.aged(self._silence.seconds_of(rank)) for rank, beat in beats.items()}
        self.watch(self._beats)
        pids = workers.pids
        has_begun = any(beat.step >= 0 for beat in beats.values())  # nobody begins a step before all are there
        for rank in self.titles:
            if rank not in self._failures and rank not in self._results:
                self._check_alive(rank)
                if rank in pids and rank not in self._failures:
                    is_starting = not has_begun and _is_starting(self._beats.get(rank))
                    self._check_process(rank, pids[rank], now_s, is_starting=is_starting)

    def _check_alive(self, rank: int) -> None:
        beat = self._beats.get(rank)
        deadline_s = beat.deadline_s if beat else SETUP_S
        silent_s = self._silence.seconds_of(rank)
        busy_s = beat.for_s + silent_s if beat else silent_s
        if busy_s <= deadline_s + _GRACE_S:
            return
        doing = f"in {beat.what}" if beat else "starting"
        where = f", step {beat.step}" if beat and beat.step >= 0 else ""
        if silent_s > deadline_s:
            hangs = "is silent"
            since = "nothing was heard of it for"
        else:
            waits = beat is not None and self.waits.is_waiting(rank, self._beats)
            hangs = "waits in vain" if waits else "hangs"
            since = "it has been there for"
        what = f"{hangs} {doing}{where}: {since} {busy_s:.1f} s, deadline {deadline_s:g} s"
        self._fail(rank, what, "if it is only slow, raise --deadline")

    def _check_process(self, rank: int, number: int, now_s: float, *, is_starting: bool) -> None:
        """Whether a worker does anything, as the kernel tells.

        Of one that has begun its steps others tell sooner, but where they wait for longer: for a save, or at the end.
        """
        now = process_state(number)
        if now is None:
            return
        rest = self._rests.get(rank) or self._rests.setdefault(rank, _Rest(now_s, now_s, cpu_s_of_all(number), now_s))
        rest.look(now.state, number, now_s)
        stopped_s = now_s - rest.went_s
        slept_s = now_s - rest.woke_s
        beat = self._beats.get(rank)
        where = f"before its first step{f', in {beat.what}' if beat else ''}"
        if not is_starting:
            where = f"in {beat.what}, step {beat.step}" if beat else "behind its first step"
        if stopped_s >= (STOPPED_S if is_starting else self._start_s + 2 * _GRACE_S):
            what = f"is stopped {where}: somebody stopped its process, {number}, {stopped_s:.1f} s ago"
            self._fail(rank, what, "what stops processes is kill -STOP, or a batch system that suspends a job")
        elif is_starting and slept_s > self._start_s and not _waits_at_start(beat) and self._is_waited_for(rank):
            what = f"hangs {where}: it sleeps for {slept_s:.1f} s while others wait, deadline {self._start_s:g} s"
            self._fail(rank, what, "if it only waits for a disk or a network that is slow, raise --deadline")

    def _is_waited_for(self, rank: int) -> bool:
        """Whether another worker waits at the start for longer than it should."""
        return any(
            other != rank and _waits_at_start(beat) and beat.lasted_s > self._start_s
            for other, beat in self._beats.items()
        )

    def _fail(self, rank: int, what: str, remedy: str) -> None:
        """Note that ``rank`` does not do its part, with what is known of the others."""
        error = DeadlineError(f"{self.titles[rank]} {what}", remedies=[remedy])
        others = describe(self._beats, but=rank)
        self._failures[rank] = also(
            error, [*self.waits.lines(self._beats), *([f"the others: {others}"] if others else [])]
        )


@dataclass(slots=True)
class _Rest:
    """How long a worker has done nothing.

    Attributes:
        went_s: when it was last seen to be no stopped one, by ``time.monotonic()``.
        woke_s: when it last used a core, or would have liked to.
        cpu_s: that it had used then.
        seen_s: when it was looked at.
    """

    went_s: float
    woke_s: float
    cpu_s: float
    seen_s: float

    def look(self, state: str, number: int, now_s: float) -> None:
        """Note how the worker's process is now."""
        if state != "T" or now_s - self.seen_s > STOPPED_S / 2:  # who looks was stopped as well
            self.went_s = now_s
        self.seen_s = now_s
        used_s = cpu_s_of_all(number) - self.cpu_s
        if state == "R" or not 0.0 <= used_s <= _TICKS_S + _AWAKE * (now_s - self.woke_s):
            self.woke_s = now_s
            self.cpu_s = self.cpu_s + used_s


_TICKS_S = 0.03
"""Within which the kernel counts the seconds of a process."""


def _is_starting(beat: Beat | None) -> bool:
    """Whether a worker is before its first step; a script's that waits for the script's word is not."""
    return beat is None or (beat.step < 0 and beat.deadline_s <= SETUP_S)


def _waits_at_start(beat: Beat | None) -> TypeGuard[Beat]:
    return beat is not None and beat.step < 0 and beat.what in MEETING


def _until(store: Store, key: str, end_s: float, whom: str, rank: int) -> None:
    while not store.check([key]):
        if time.monotonic() > end_s:
            raise _nobody(whom, rank)
        time.sleep(_POLL_S)


def _nobody(whom: str, rank: int) -> DeadlineError:
    return DeadlineError(
        f"rank {rank} waited in vain for {whom} to join the job",
        remedies=["see whether all ranks were started, with one MASTER_ADDR and MASTER_PORT"],
    )


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
