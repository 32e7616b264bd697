"""How far a profile is, and what is left of it, in seconds: by what was measured so far, not by counts.

    a size       whole steps, the passes over its layers, its memory; as long as sizes took that are measured: straight
                 between two of them, beyond in proportion to the samples and two more (parameters are read as well)
    a round      of parts: its passes times what the layers of its parts took, as much of it as the parts are, times
                 what rounds so far took over that
    a process    as long as those before
    links        twice as long as a process took to start, and so many seconds each

What is expected changes as sizes and parts are chosen, so the seconds left may grow; the share that is done never
falls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from profiler.measure.child_process import Report

Now = Callable[[], float]

_BASE = 2  # a pass takes about as long as for so many samples more, since parameters are read and written
_BEFORE = 5.0  # whole steps before the first pass over a size, in passes
_AFTER = 2.0  # memory after the last, likewise
_SLOWER = 2.0  # rounds of parts than their layers alone, until one is measured: they are made, and prepared
_SURE = 3.0  # so many seconds of parts say as much as that guess


@dataclass(frozen=True, slots=True)
class ProfileProgress:
    """How far a profile is.

    Attributes:
        layer: the one that takes longest, or what else is being done.
        seconds, spread: of that layer, at ``samples`` samples.
        done, total: seconds of work; ``done / total`` never falls.
        eta_s: seconds to go; None where nothing is known of them yet.
    """

    layer: str
    seconds: float
    spread: float
    done: float
    total: float
    eta_s: float | None
    samples: int = 0


class ProgressCounter:
    """Turns what one process has measured into progress.

    Args:
        passes: over each size.
        passes_of_parts: over each round of parts.
        has_parts: whether parts are measured after the sizes.
    """

    def __init__(
        self, report: Report, passes: int, passes_of_parts: int, has_parts: bool, now: Now = time.monotonic
    ) -> None:
        self._report = report
        self._now = now
        self._passes = passes
        self._passes_of_parts = passes_of_parts
        self._start_s = now()
        self._size_s: dict[int, float] = {}
        self._sizes: tuple[int, ...] = ()
        self._size: _SizePasses | None = None
        self._rounds: list[float] | None = None if has_parts else []
        self._shapes = self._measured = 0
        self._expected_s = self._took_s = 0.0
        self._round_s = 0.0

    def expect(self, sizes: Sequence[int], rounds: Sequence[float] | None = None) -> None:
        """What is likely to be measured still.

        Args:
            rounds: of parts, what a pass over each takes; None: as before.
        """
        self._sizes = tuple(sizes)
        if rounds is not None:
            self._rounds = list(rounds)

    def start_size(self, samples: int) -> None:
        """Whole layers are going to be measured at ``samples``."""
        self._size = _SizePasses(samples, self._now(), self._passes)

    def passed(self, samples: int, layer: str, seconds: float, spread: float) -> None:
        """One more pass over whole layers."""
        if self._size is not None:
            self._size.passed_at_s.append(self._now())
        self._say(layer, seconds, spread, samples)

    def end_size(self, samples: int) -> None:
        """No more is measured at ``samples``."""
        if self._size is not None and self._size.passed_at_s:
            self._size_s[samples] = self._now() - self._size.start_s
        self._size = None
        self._sizes = tuple(size for size in self._sizes if size != samples)

    def start_parts(self, rounds: Sequence[float], shapes: int) -> None:
        """Whole layers are done; these rounds are next, and as many parts as are likely in them."""
        self._sizes = ()
        self._size = None
        self._rounds = list(rounds)
        self._shapes = self._measured + shapes
        self._round_s = self._now()

    def passed_part(self, layer: str, seconds: float, spread: float) -> None:
        """One more pass over parts."""
        self._say(f"part {min(self._measured + 1, self._shapes)} of {self._shapes}", seconds, spread, 0)

    def end_round(self, shapes: int) -> None:
        """All parts of a round are measured."""
        now_s = self._now()
        if self._rounds:
            self._expected_s += self._passes_of_parts * self._rounds.pop(0)
            self._took_s += now_s - self._round_s
        self._measured += shapes
        self._round_s = now_s

    def left_s(self) -> float | None:
        """Seconds to go in this process; None where nothing is known of them yet."""
        took_s = dict(self._size_s)
        left_s = 0.0
        if self._size is not None:
            samples = self._size.samples
            size_s = self._size.likely_s()
            if size_s is None and not took_s:
                return None
            spent_s = self._now() - self._size.start_s
            took_s[samples] = max(spent_s, size_s if size_s is not None else _size_s(samples, took_s))
            left_s = took_s[samples] - spent_s
        coming = [size for size in self._sizes if size not in took_s]
        if not took_s and (coming or self._rounds is None):
            return None
        left_s += sum(_size_s(size, took_s) for size in coming)
        if self._rounds is None:  # as long as the sizes, as far as anybody knows
            return left_s + sum(took_s.values()) + sum(_size_s(size, took_s) for size in coming)
        slower = (self._took_s + _SLOWER * _SURE) / (self._expected_s + _SURE)
        parts_s = slower * self._passes_of_parts * sum(self._rounds)
        if self._shapes and self._rounds:  # of the round that is going on
            first_s = slower * self._passes_of_parts * self._rounds[0]
            parts_s -= min(first_s, self._now() - self._round_s)
        return left_s + parts_s

    def _say(self, layer: str, seconds: float, spread: float, samples: int) -> None:
        done_s = self._now() - self._start_s
        left_s = self.left_s()
        total_s = done_s + left_s if left_s is not None else 0.0
        self._report(ProfileProgress(layer, seconds, spread, done_s, total_s, left_s, samples))


class _SizePasses:
    """A size that is being measured."""

    def __init__(self, samples: int, start_s: float, passes: int) -> None:
        self.samples = samples
        self.start_s = start_s
        self._passes = passes
        self.passed_at_s: list[float] = []

    def likely_s(self) -> float | None:
        """All that it takes; None before its first pass."""
        if not self.passed_at_s:
            return None
        before_s = self.passed_at_s[0] - self.start_s
        passed = len(self.passed_at_s)
        pass_s = (self.passed_at_s[-1] - self.passed_at_s[0]) / (passed - 1) if passed > 1 else before_s / (_BEFORE + 1)
        return before_s + (max(self._passes, passed) - 1 + _AFTER) * pass_s


def _size_s(samples: int, took_s: dict[int, float]) -> float:
    """What a size takes, by what others took."""
    below = max((size for size in took_s if size <= samples), default=None)
    above = min((size for size in took_s if size >= samples), default=None)
    if below is not None and above is not None:
        share = (samples - below) / (above - below) if above > below else 0.0
        return took_s[below] + share * (took_s[above] - took_s[below])
    nearest = below if below is not None else above
    assert nearest is not None, "something is known"
    return took_s[nearest] * (samples + _BASE) / (nearest + _BASE)


class Overall:
    """The progress of all processes, and of the links after them.

    Args:
        num_links: that are measured after them, of ``link_s`` seconds each.
    """

    def __init__(
        self,
        num_processes: int,
        progress: Callable[[ProfileProgress], None],
        num_links: int = 0,
        link_s: float = 0.0,
        now: Now = time.monotonic,
    ) -> None:
        self._progress = progress
        self._now = now
        self._left = num_processes
        self._num_links = num_links
        self._link_s = link_s
        self._capture_s = 0.0
        self._start_s = self._process_s = now()
        self._took_s: list[float] = []
        self._share = 0.0

    def show(self, at: ProfileProgress) -> None:
        """One process says where it is."""
        spent_s = self._now() - self._process_s
        process_s = spent_s + at.eta_s if at.eta_s is not None else None
        if self._took_s and process_s is None:
            process_s = max(spent_s, fmean(self._took_s))
        if process_s is None:
            self._say(at, None)
            return
        each_s = fmean(self._took_s) if self._took_s else process_s
        self._say(at, process_s - spent_s + (self._left - 1) * each_s + self._links_s())

    def captured(self) -> None:
        """A process has built its model."""
        self._capture_s = self._now() - self._process_s

    def ended(self, measured: bool = True) -> None:
        """A process is done; it was not run if an earlier profile had measured all."""
        now_s = self._now()
        if measured:
            self._took_s.append(now_s - self._process_s)
        self._left = self._left - 1
        self._process_s = now_s

    def repeated(self) -> None:
        """One is run again."""
        self._left += 1

    def links_doubted(self, num_links: int) -> None:
        """Links are measured that were thought to be known."""
        self._num_links = num_links

    def link(self, what: str, seconds: float) -> None:
        """One more measurement of links is done."""
        self._num_links -= 1
        self._say(ProfileProgress(what, seconds, 0.0, 0.0, 0.0, None), self._num_links * self._link_s)

    def _links_s(self) -> float:
        return 2 * self._capture_s + self._num_links * self._link_s if self._num_links else 0.0

    def _say(self, at: ProfileProgress, left_s: float | None) -> None:
        done_s = max(1e-3, self._now() - self._start_s)
        if left_s is not None:
            self._share = max(self._share, done_s / (done_s + left_s))
        total_s = done_s / self._share if self._share else 0.0
        self._progress(replace(at, done=done_s if self._share else 0.0, total=total_s, eta_s=left_s))
