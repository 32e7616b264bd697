"""Work on a process group of torch.distributed, waited for with a deadline and errors that name the peer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from runtime.transport.base import Deadline, gone

Words = tuple[object, ...]
"""What an error would say, put together only if there is one."""


@dataclass(frozen=True, slots=True)
class Works:
    """Starts and waits on behalf of ``rank``."""

    rank: int

    def start(self, begin: Callable[[], dist.Work], what: Words, peer: Words) -> dist.Work:
        """What ``begin`` starts.

        Raises:
            TransportError: the peer is known to be gone.
        """
        try:
            return begin()
        except RuntimeError as error:
            raise gone(words(what), self.rank, words(peer), str(error)) from error

    def wait(self, work: dist.Work, what: Words, peer: Words, deadline: Deadline) -> None:
        """Until it is done.

        Raises:
            DeadlineError: too late; gloo then closes every connection of this rank, so that peers fail at once too.
            TransportError: the peer is gone.
        """
        remaining_s = deadline.limit_s - deadline.waited_s()
        milliseconds = max(1, math.ceil(remaining_s * 1000))  # 0 would mean forever
        try:
            work.wait(timedelta(milliseconds=milliseconds))
        except RuntimeError as error:
            if deadline.waited_s() >= deadline.limit_s:
                raise deadline.error(words(what), self.rank, words(peer)) from error
            raise gone(words(what), self.rank, words(peer), str(error)) from error


def words(said: Words) -> str:
    """As an error says it."""
    return " ".join(map(str, said))
