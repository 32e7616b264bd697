"""A device of constant speed: each piece of its work takes what it took the core alone, times its factor.

Four ranks on two cores take each other's caches, and what a layer takes changes with what the others compute; and the
machine under the cores is a tenth faster in one minute than in the next.  Devices of a real cluster do nothing of the
kind.  So the first steps are *rehearsals*, in which one rank computes at a time, whichever its turn it is, and never
waits amid an action, where it would lose its caches: what ranks do together there is done by each alone
(:mod:`benchmarks.devices.mirrored`).  Each piece of work (what is done between two words to other ranks) is timed: the
thread's processor time.  From then on the ranks compute side by side, and each is held until its device would be done:
the piece takes the device the mean of its rehearsals, of earlier runs too (without the least and the greatest fifth, as
in a profile), times the factor, whatever it takes here now.

    rehearsals   1.0 | 1.1 | 0.9
    afterwards   work 1.3, held 2.7 | send                factor 4

As long as a core has time enough for its ranks' work nothing is late, and what ranks do then is real: messages, memory,
and the values, but for what the rehearsals made of the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.synchronize import Lock

from benchmarks.devices.virtual_device import VirtualDevice
from profiler.measure.timing import trimmed_mean

REHEARSALS = 10
_COLD = 2  # of these, steps whose times are left out: memory is taken and code is loaded then


class SteadyDevice(VirtualDevice):
    """The clock of one rank.

    Args:
        alone: held by the one rank that computes in a rehearsal; shared by all.
        before: rehearsals of earlier runs: by step the seconds of each piece.

    Raises:
        RuntimeError: steps do not have the same pieces of work, so these cannot be known by their number.
    """

    def __init__(self, factor: float, alone: Lock, before: Sequence[Sequence[float]] = ()) -> None:
        super().__init__(factor)
        self._alone, self._before = alone, before
        self._steps: list[list[float]] = []
        self._seconds: list[float] = []  # by piece; empty while these are rehearsed
        self._done = 0

    @property
    def rehearsed(self) -> list[list[float]]:
        """By step the seconds of each piece, on a core that no other rank used."""
        return self._steps[_COLD:]

    def begin_step(self) -> None:
        if len(self._steps) < REHEARSALS:
            self._steps.append([])
        elif not self._seconds:
            steps = [*self._before, *self.rehearsed]
            counts = {len(pieces) for pieces in (*steps, *self._steps)}
            if len(counts) > 1:
                raise RuntimeError(f"steps have {sorted(counts)} pieces of work: a steady device needs all alike")
            self._seconds = [trimmed_mean(piece) for piece in zip(*steps, strict=True)]
        self._done = 0

    @property
    def mirrors(self) -> bool:
        return not self._seconds and self._since is not None and not self._shares

    def _begin(self) -> None:
        if not self._seconds:
            self._alone.acquire()
        super()._begin()

    def _end(self) -> None:
        super()._end()
        if not self._seconds:
            self._alone.release()

    def _device_s(self, worked_s: float, took_s: float) -> float:
        if not self._seconds:
            self._steps[-1].append(worked_s)
            return took_s
        if self._done == len(self._seconds):
            raise RuntimeError(f"a step has more than {self._done} pieces of work: a steady device needs all alike")
        self._done += 1
        return self.factor * self._seconds[self._done - 1]
