"""When a run saves: every so many steps, after so much time, as often as is best, and when it is asked to end.

As often as is best (``auto``): where a save costs d seconds and machines fail every M seconds, it is best to train for

    T = sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + d / 18M) - d      for d < 2M, else M        (Daly 2006, equation 37)

which is Young's sqrt(2 d M) (1974) with two more terms of the series.  d is what a save costs the *training*, for files
are written beside it: standing still while the state is copied, and steps that are slower while it is written.  That a
failure during the writing loses one interval more adds the time of writing to what is lost, whatever T is.  Ignored:
failures that come in clusters; the time of a restart, which does not depend on T.

    Young, A first order approximation to the optimum checkpoint interval, CACM 17(9), 1974
    Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 22(3), 2006

Where nobody says M, hosts fail as those of Meta's RSC-1 cluster did: 6.50 times in 1,000 days each (Kokolis et al.,
Revisiting reliability in large-scale machine learning research clusters, HPCA 2025), until the job has failures of its
own: with what is known before weighed as one failure (a gamma distribution), M is (M + seconds run) / (1 + failures).
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import FrameType

from halopipe.run_spec.options import RunOptions
from halopipe.run_spec.result import Saves
from halopipe.terminal.units import AUTO_INTERVAL, parse_seconds

HOST_MTBF_S = 86400.0 * 1000 / 6.50
"""Between two failures of a host, on the average; see above."""

MOST_SHARE = 0.01
"""Of a run's time, that saves may cost at the interval that ``auto`` chooses."""

FIRST_S = 60.0
"""After so long ``auto`` saves first: then it is known what a save costs."""

_TYPICAL_STEPS = 64


def best_interval_s(save_s: float, mtbf_s: float) -> float:
    """Daly's T of the module's docstring, in seconds.

    Args:
        save_s: d, what a save costs the training.
        mtbf_s: M, between failures of the whole job.
    """
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    share = save_s / (2 * mtbf_s)
    return math.sqrt(2 * save_s * mtbf_s) * (1 + math.sqrt(share) / 3 + share / 9) - save_s


@dataclass(slots=True)
class SaveTimes:
    """Whether a save is due, on one rank; and what saves have cost so far.

    Attributes:
        every: as :attr:`halopipe.run_spec.options.RunOptions.checkpoint_every`.
        mtbf_s: of the whole job, before it ran; ``failures`` and ``ran_s`` are what was seen since.
        is_given: whether somebody said ``mtbf_s``; then what was seen does not count.
        clock: seconds that only grow.
        interval_s: between two saves; 0 where steps are counted.
    """

    every: int | str
    mtbf_s: float = HOST_MTBF_S
    failures: int = 0
    ran_s: float = 0.0
    is_given: bool = False
    clock: Callable[[], float] = time.monotonic
    interval_s: float = field(init=False, default=0.0)
    _saves: Saves = field(init=False, default_factory=Saves)
    _start_s: float = field(init=False)
    _last_s: float = field(init=False)
    _writing_s: float = field(init=False, default=0.0)
    _steps_s: deque[float] = field(init=False, default_factory=lambda: deque(maxlen=_TYPICAL_STEPS))
    _beside_s: list[float] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self._start_s = self._last_s = self.clock()
        if isinstance(self.every, str):
            self.interval_s = FIRST_S if self.every == AUTO_INTERVAL else parse_seconds(self.every)

    @classmethod
    def of(cls, options: RunOptions, num_hosts: int, failures: int, ran_s: float) -> SaveTimes:
        """Those of a job that ran for ``ran_s`` before, and failed so often."""
        stated_s = options.mtbf_s
        return cls(
            options.checkpoint_every, stated_s or HOST_MTBF_S / max(1, num_hosts), failures, ran_s, bool(stated_s)
        )

    @property
    def seconds_run(self) -> float:
        """How long the job has run by now, all attempts together."""
        return self.ran_s + self.clock() - self._start_s

    @property
    def is_due(self) -> bool:
        """Whether a save is due after the step about to begin, rather than after the next; by the clock alone."""
        step_s = self._steps_s[-1] if self._steps_s else 0.0
        return self.interval_s > 0 and self.clock() - self._last_s + 1.5 * step_s >= self.interval_s

    def is_due_after(self, num_steps: int) -> bool:
        """Whether a save is due by the number of steps done."""
        return isinstance(self.every, int) and self.every > 0 and num_steps % self.every == 0

    @property
    def saves(self) -> Saves:
        """What was saved so far."""
        return replace(self._saves, slower_s=self._saves.slower_s + self._slower_s(), interval_s=self.interval_s)

    def stepped(self, step_s: float, *, beside_writing: bool) -> None:
        """Note a step, which took so long with its waits for data and other ranks."""
        if not beside_writing:
            self._steps_s.append(step_s)
            return
        self._beside_s.append(step_s)
        self._writing_s = self.clock() - self._last_s
        self._choose_interval()

    @contextlib.contextmanager
    def saving(self, *, is_last: bool = False) -> Iterator[None]:
        """Training stands still inside, for a save; the last one is waited for."""
        begun_s = self.clock()
        yield
        self._last_s = self.clock()
        seconds = self._last_s - begun_s
        was = self.saves
        self._beside_s.clear()
        stood_s, last_s = (was.stood_s, seconds) if is_last else (was.stood_s + seconds, was.last_s)
        self._saves = replace(was, number=was.number + 1, stood_s=stood_s, last_s=last_s)
        self._choose_interval()

    def failed(self) -> None:
        """Note that a save did not reach the disk."""
        self._saves = replace(self._saves, failed=self._saves.failed + 1)

    def _choose_interval(self) -> None:
        if self.every == AUTO_INTERVAL and self._saves.number:
            mtbf_s = self.mtbf_s if self.is_given else (self.mtbf_s + self.seconds_run) / (1 + self.failures)
            save_s = self.saves.seconds / self._saves.number
            self.interval_s = max(best_interval_s(save_s, mtbf_s), save_s / MOST_SHARE, self._writing_s)

    def _slower_s(self) -> float:
        """What steps took more since the last save, while it was written."""
        if not self._beside_s or not self._steps_s:
            return 0.0
        return max(0.0, sum(self._beside_s) - statistics.median(self._steps_s) * len(self._beside_s))


_TWICE_S = 1.0
"""Ctrl-C that comes again sooner is the same one: a terminal sends it to several processes, which pass it on."""

_LATER_S = 2.0
"""A rank waits so much longer than its launcher, which can say more."""

_LOOK_S = 0.5


class EndRequest:
    """Whether this process was asked to end, by SIGTERM or SIGINT, so that it can save first.

    SIGTERM that comes again changes nothing: Slurm sends it to torchrun and to its ranks, and torchrun passes it on.  A
    second Ctrl-C ends the process at once.

    Attributes:
        why: by what; empty: it was not.
        signal: its number; 0 where it was no signal.
    """

    def __init__(self, grace_s: float) -> None:
        self.why = ""
        self.signal = 0
        self._grace_s = grace_s
        self._asked_s = 0.0

    def ask(self, why: str) -> None:
        """Have the job save and end before its next step; one rank is enough."""
        if not self.why:
            self._asked_s = time.monotonic()
            self.why = why

    def is_late(self, by_s: float = 0.0) -> bool:
        """Whether the grace time has been over for so long."""
        return bool(self.why) and time.monotonic() - self._asked_s > self._grace_s + by_s

    @property
    def exit_code(self) -> int:
        """Of a process that did not end in time: as if nobody had listened to the signal."""
        return 128 + self.signal

    def late(self) -> str:
        """What is said of a job that did not end in time."""
        return f"{self.why} came {self._grace_s:g} s ago, and the step has not ended: the job ends without saving it"

    @contextlib.contextmanager
    def heard(self, *, ends: bool = False) -> Iterator[None]:
        """Signals are noted while the context lasts; the main thread alone can hear them.

        Args:
            ends: this process by itself when the grace time is over, as nobody else does.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(number: int, frame: FrameType | None) -> None:  # it may interrupt anything: it takes no lock
            if self.why and number == signal.SIGINT and time.monotonic() - self._asked_s > _TWICE_S:
                raise KeyboardInterrupt
            self.signal = self.signal or number
            self.ask(signal.Signals(number).name)

        def watch() -> None:
            while not over.wait(_LOOK_S):
                if self.is_late(_LATER_S):
                    sys.stderr.write(f"{self.late()}\n")
                    sys.stderr.flush()
                    os._exit(self.exit_code)

        over = threading.Event()
        if ends:
            threading.Thread(target=watch, name="grace", daemon=True).start()
        before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            over.set()
            for number, handler in before.items():
                signal.signal(number, handler or signal.SIG_DFL)
