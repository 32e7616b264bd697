"""Batches of sparse and graph networks, made the graph's inputs by whoever prepares them, maybe a step ahead.

A thread of the rank makes what it is told to expect, in order, while the rank's own thread computes the step before.
Native code, in which nearly all of its time goes, leaves the interpreter to the other.  Where no core is spare both
threads are on the rank's, and the one that prepares gives way: it goes on while the rank sleeps, waiting for others.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, Protocol, TypeVar

from cuda_ops.device.host import work_beside
from runtime.pipeline.microbatches import Batch

T = TypeVar("T")
B = TypeVar("B")
BatchOf = TypeVar("BatchOf", covariant=True)


@dataclass(slots=True)
class PreparationClock:
    """Seconds of preparing.

    Attributes:
        busy_s: processor time of the thread that prepares.
        waited_s: of the rank's own thread, until what it asked for was there.
    """

    busy_s: float = 0.0
    waited_s: float = 0.0

    @property
    def hidden(self) -> float:
        """The share of preparing that nobody waited for."""
        return max(0.0, 1 - self.waited_s / self.busy_s) if self.busy_s else 1.0


class BatchPreparation(Protocol[BatchOf]):
    """Prepares the batches of a run.

    Attributes:
        clock: what its thread and its waiters took.
    """

    @property
    def clock(self) -> PreparationClock: ...

    @property
    def looks_ahead(self) -> bool:
        """Whether it is worth telling what comes next (:meth:`expect`)."""

    def batch(self, raw: Batch) -> BatchOf:
        """``raw`` as the graph's inputs; what was expected, if it was.

        Raises:
            StageFailedError: clouds that were expected cannot be used.
        """

    def expect(self, raw: Batch, rank: int) -> None:
        """Begins with ``raw``, a batch that this rank is given soon, beside what is computed now."""


@dataclass(frozen=True, slots=True)
class PreparationThread:
    """The thread that prepares, with its clock.

    Attributes:
        core: of the host, that no rank has; None: the thread is on its rank's core and gives way.
        gives_way: False: the thread stays as it is, wherever the system puts it.
    """

    clock: PreparationClock = field(default_factory=PreparationClock)
    core: int | None = None
    gives_way: bool = False
    _thread: list[ThreadPoolExecutor] = field(default_factory=list)

    def begin(self, work: Callable[[], T]) -> Future[T]:
        """``work`` after what the thread was given before."""
        if not self._thread:
            enter = partial(work_beside, self.core) if self.gives_way or self.core is not None else None
            self._thread.append(ThreadPoolExecutor(1, "prepares", initializer=enter))

        def timed() -> T:
            start_s = time.thread_time()
            try:
                return work()
            finally:
                self.clock.busy_s += time.thread_time() - start_s

        return self._thread[0].submit(timed)

    def result(self, future: Future[T]) -> T:
        """Once it is there; an error of the work is raised here."""
        start_s = time.perf_counter()
        try:
            return future.result()
        finally:
            self.clock.waited_s += time.perf_counter() - start_s


@dataclass(frozen=True, slots=True)
class Expected(Generic[B]):
    """Batches that were begun and not yet asked for: this step's, maybe, and the next one's."""

    _begun: list[tuple[Batch, B]] = field(default_factory=list)

    def add(self, raw: Batch, made: B) -> None:
        """What is made of ``raw``; of those before, the last stays."""
        self._begun[:] = [*self._begun[-1:], (raw, made)]

    def take(self, raw: Batch) -> B | None:
        """What was begun for ``raw``, which is then no longer kept."""
        for place, (each, made) in enumerate(self._begun):
            if each is raw:
                del self._begun[place]
                return made
        return None

    def __len__(self) -> int:
        return len(self._begun)
