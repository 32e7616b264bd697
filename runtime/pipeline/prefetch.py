"""What a rank's host makes of micro-batches ahead of their forward passes: maps of sparse networks.

On a core of the host that is work like any other.  Beside an accelerator a thread does it, one thing after another,
while the rank starts the kernels of the micro-batch before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

Inputs = Mapping[str, Tensor]
"""Graph inputs by name."""


class Ahead:
    """Inputs that are made, or being made, by stage and micro-batch.

    Args:
        beside: whether a thread of its own makes them.
    """

    def __init__(self, *, beside: bool) -> None:
        self._thread = ThreadPoolExecutor(1, "prepares") if beside else None
        self._made: dict[tuple[int, int], Future[Inputs]] = {}

    def make(self, stage: int, microbatch: int, work: Callable[[], Inputs]) -> None:
        """Make what ``work`` returns, now or beside what follows."""
        if self._thread is not None:
            self._made[stage, microbatch] = self._thread.submit(work)
            return
        found: Future[Inputs] = Future()
        found.set_result(work())
        self._made[stage, microbatch] = found

    def take(self, stage: int, microbatch: int) -> dict[str, Tensor] | None:
        """What was made, once it is there; None if nobody asked for it.  An error of ``work`` is raised here."""
        found = self._made.pop((stage, microbatch), None)
        return None if found is None else dict(found.result())

    def forget(self) -> None:
        """The micro-batches are another step's."""
        for found in self._made.values():
            found.cancel()
        self._made.clear()
