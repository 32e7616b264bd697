"""Work on a process group of torch.distributed, waited for with a deadline and errors that name the peer.

A barrier that knows who is missing: every rank tells every other that it is there.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist

from runtime.transport.base import Deadline, gone

T = TypeVar("T")
Words = tuple[object, ...]
"""What an error would say, put together only if there is one."""

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 20e-6, 2e-3


class Works:
    """Starts and waits on behalf of ``rank``, where a wait holds the thread, as gloo's does."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def start(self, begin: Callable[[], T], what: Words, peer: Words) -> T:
        """What ``begin`` starts.

        Raises:
            TransportError: the peer is known to be gone.
        """
        try:
            return begin()
        except RuntimeError as error:
            raise gone(words(what), self.rank, words(peer), str(error)) from error

    def wait(self, work: dist.Work, what: Words, peer: Words, deadline: Deadline) -> None:
        """Until what follows on this thread may use what ``work`` brings.

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

    def finish(self, work: dist.Work, what: Words, peer: Words, deadline: Deadline) -> None:
        """Until ``work`` is done; raises as :meth:`wait`."""
        self.wait(work, what, peer, deadline)

    def settle(self, deadline: Deadline) -> None:
        """Until everything that was waited for is done; raises as :meth:`wait`."""


class StreamWorks(Works):
    """Works of a device's streams: a wait holds the stream, not the thread, and what went wrong is found by ``settle``.

    A backend as NCCL's has no deadline of its own that leaves the process alive: works are asked until they are done.
    """

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self._waited_for: deque[tuple[dist.Work, Words, Words]] = deque()

    def wait(self, work: dist.Work, what: Words, peer: Words, deadline: Deadline) -> None:
        self.start(work.wait, what, peer)
        self._waited_for.append((work, what, peer))

    def finish(self, work: dist.Work, what: Words, peer: Words, deadline: Deadline) -> None:
        pause_s = _SHORTEST_PAUSE_S
        while not self.start(work.is_completed, what, peer):
            if deadline.waited_s() >= deadline.limit_s:
                raise deadline.error(words(what), self.rank, words(peer))
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        self.start(work.wait, what, peer)  # raises if it was not done but failed

    def settle(self, deadline: Deadline) -> None:
        while self._waited_for:
            self.finish(*self._waited_for.popleft(), deadline)


def words(said: Words) -> str:
    """As an error says it."""
    return " ".join(map(str, said))


_CODE = 28 << 26  # the upper five bits of a tag, which no message has
_WHAT = ("barrier",)


class Barrier:
    """Of all ranks of ``world``, over its backend for CPU tensors, which must be gloo."""

    def __init__(self, world: dist.ProcessGroup, works: Works) -> None:
        self._world, self._works = world, works
        self._others = [rank for rank in range(world.size()) if rank != world.rank()]
        self._num_done = 0

    def wait(self, deadline: Deadline) -> None:
        """Until every rank is here.

        Raises:
            DeadlineError, TransportError: they name a rank that is not.
        """
        number = _CODE | self._num_done % (1 << 26)
        self._num_done += 1
        token = torch.zeros(1, dtype=torch.uint8)
        start = self._works.start
        came = {
            r: start(partial(self._world.recv, [torch.empty_like(token)], r, number), _WHAT, ("rank", r))
            for r in self._others
        }
        told = {r: start(partial(self._world.send, [token], r, number), _WHAT, ("rank", r)) for r in self._others}
        for works in (came, told):
            for rank, work in works.items():
                self._works.wait(work, _WHAT, ("rank", rank), deadline)
