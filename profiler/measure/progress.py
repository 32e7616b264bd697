"""How far a profile is: finished passes, weighted by how long each is likely to take."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from profiler.measure.child_process import Report
from profiler.shards.measure import Round

_BASE = 2  # a pass takes about as long as for so many samples more, since parameters are read and written


@dataclass(frozen=True, slots=True)
class ProfileProgress:
    """How far a profile is.

    Attributes:
        layer: the one that takes longest, or what else is being done.
        seconds, spread: of that layer, at ``samples`` samples.
        done, total: passes, weighted by samples.
        eta_s: seconds to go, as far as the passes so far tell.
    """

    layer: str
    seconds: float
    spread: float
    done: int
    total: int
    eta_s: float
    samples: int = 0


class Counter:
    """Turns finished passes into progress.

    Args:
        sizes: numbers of samples at which whole layers are measured, in ``passes`` passes each.
        planned: rounds in which parts are measured, in ``passes_of_parts`` each.
    """

    def __init__(
        self, report: Report, sizes: tuple[int, ...], passes: int, planned: Sequence[Round], passes_of_parts: int
    ) -> None:
        self._report = report
        self._passes = passes
        self._left = dict.fromkeys(sizes, passes)
        self._weights = {size: size + _BASE for size in sizes}
        self._passes_of_parts = passes_of_parts
        self._parts = sum(self._weight(each) for each in planned)
        self._total = passes * sum(self._weights.values()) + self._parts
        self._shapes = self._measured = 0
        self._start_s = time.monotonic()

    def start_size(self, samples: int) -> None:
        """Whole layers are going to be measured at ``samples``, which may not have been expected."""
        if samples not in self._left:
            self._left[samples] = self._passes
            self._weights[samples] = samples + _BASE
            self._total += self._passes * self._weights[samples]

    def passed(self, samples: int, layer: str, seconds: float, spread: float) -> None:
        """One more pass over whole layers."""
        self._left[samples] = max(0, self._left[samples] - 1)  # some sizes need more passes than planned
        self._say(layer, seconds, spread, samples)

    def end_size(self, samples: int) -> None:
        """No more is measured at ``samples``; that nothing was, needs not be said before."""
        self.start_size(samples)
        self._left[samples] = 0

    def start_parts(self, planned: Sequence[Round]) -> None:
        """Whole layers are done; ``planned`` is left."""
        self._left = dict.fromkeys(self._left, 0)
        before, self._parts = self._parts, sum(self._weight(each) for each in planned)
        self._total += max(0, self._parts - before)
        self._shapes = sum(len(each.shapes) for each in planned)

    def passed_part(self, layer: str, seconds: float, spread: float) -> None:
        """One more pass over parts."""
        self._say(f"part {self._measured + 1} of {self._shapes}", seconds, spread, 0)

    def end_round(self, each: Round) -> None:
        """All parts of a round are measured."""
        self._parts = max(0, self._parts - self._weight(each))  # chosen bit by bit, there may be more rounds
        self._measured += len(each.shapes)

    def _weight(self, each: Round) -> int:
        return self._passes_of_parts * (each.samples // 2 + _BASE)

    def _say(self, layer: str, seconds: float, spread: float, samples: int) -> None:
        left = sum(self._weights[size] * passes for size, passes in self._left.items()) + self._parts
        done = self._total - left
        eta_s = (time.monotonic() - self._start_s) * left / max(1, done)
        self._report(ProfileProgress(layer, seconds, spread, done, self._total, eta_s, samples))
