"""Work on a process group of torch.distributed, waited for with a deadline and errors that name the peer.

A barrier that knows who is missing: every rank tells every other that it is there.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from planner.ir.errors import TransportError
from runtime.timeouts import TRANSPORT_S
from runtime.transport.base import Deadline, ErrorWords, gone, words

T = TypeVar("T")
_SHORTEST_PAUSE_S = 20e-6
_LONGEST_PAUSE_S = 2e-3


class Works:
    """Starts and waits on behalf of ``rank``, where a wait holds the thread, as gloo's does."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.deadline_s = TRANSPORT_S

    def deadline(self) -> Deadline:
        """Of a wait that begins now."""
        return Deadline(self.deadline_s)

    def start(self, begin: Callable[[], T], what: ErrorWords, peer: ErrorWords) -> T:
        """What ``begin`` starts.

        Raises:
            TransportError: the peer is known to be gone.
        """
        try:
            return begin()
        except RuntimeError as error:
            raise gone(words(what), self.rank, words(peer), str(error)) from error

    def wait(self, work: dist.Work, what: ErrorWords, peer: ErrorWords, deadline: Deadline) -> None:
        """Until what follows on this thread may use what ``work`` brings.

        Raises:
            DeadlineError: too late; gloo then closes every connection of this rank, so that peers fail at once too.
            TransportError: the peer is gone.
        """
        milliseconds = max(1, math.ceil(deadline.left_s() * 1000))  # 0 would mean forever
        try:
            work.wait(timedelta(milliseconds=milliseconds))
        except RuntimeError as error:
            if deadline.waited_s() >= deadline.limit_s:
                raise deadline.error(words(what), self.rank, words(peer)) from error
            raise gone(words(what), self.rank, words(peer), str(error)) from error

    def finish(self, work: dist.Work, what: ErrorWords, peer: ErrorWords, deadline: Deadline) -> None:
        """Until ``work`` is done; raises as :meth:`wait`."""
        self.wait(work, what, peer, deadline)

    def settle(self, deadline: Deadline) -> None:
        """Until everything that was waited for is done; raises as :meth:`wait`."""


class OverWorks:
    """What waits by ``Works``."""

    _works: Works

    @property
    def deadline_s(self) -> float:
        """See :class:`runtime.transport.base.Transport`."""
        return self._works.deadline_s

    @deadline_s.setter
    def deadline_s(self, deadline_s: float) -> None:
        self._works.deadline_s = deadline_s


class StreamWorks(Works):
    """Works of a device's streams: a wait holds the stream, not the thread, and what went wrong is found by ``settle``.

    A backend as NCCL's has no deadline of its own that leaves the process alive: works are asked until they are done.
    """

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self._waited_for: deque[tuple[dist.Work, ErrorWords, ErrorWords]] = deque()

    def wait(self, work: dist.Work, what: ErrorWords, peer: ErrorWords, deadline: Deadline) -> None:
        self.start(work.wait, what, peer)
        self._waited_for.append((work, what, peer))

    def finish(self, work: dist.Work, what: ErrorWords, peer: ErrorWords, deadline: Deadline) -> None:
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


_CODE = 28 << 26  # the upper five bits of a tag, which no message has
_WHAT = ("barrier",)


@dataclass(slots=True)
class PostedReceive:
    """A posted receive and its buffer."""

    work: dist.Work
    buffer: Tensor


class Barrier:
    """Of all ranks of ``world``, over its backend for CPU tensors, which must be gloo.

    The receives of the next one are posted when one is over, so that nobody who comes to it waits for a posting.
    """

    def __init__(self, world: dist.ProcessGroup, works: Works) -> None:
        self._world = world
        self._works = works
        self._others = [rank for rank in range(world.size()) if rank != world.rank()]
        self._num_done = 0
        self._coming: dict[int, PostedReceive] = {}

    def wait(self, deadline: Deadline, word: int = 0) -> int:
        """Until every rank is here; the largest word of all, see :meth:`runtime.transport.base.Transport.barrier`.

        Raises:
            DeadlineError, TransportError: they name a rank that is not.
        """
        token = torch.full((1,), word, dtype=torch.uint8)
        number = self._number()
        receives = {rank: self._coming.get(rank) or self._posted(rank) for rank in self._others}
        self._coming = {}
        begin = self._world.send
        start = self._works.start
        sends = {r: start(partial(begin, [token], r, number), _WHAT, ("rank", r)) for r in self._others}
        for works in ({rank: ready.work for rank, ready in receives.items()}, sends):
            for rank, work in works.items():
                self._works.wait(work, _WHAT, ("rank", rank), deadline)
        self._num_done += 1
        with suppress(TransportError):  # who has left by now was here: the next one, if there is any, will say so
            for rank in self._others:
                self._coming[rank] = self._posted(rank)
        return max([word, *(int(ready.buffer.item()) for ready in receives.values())])

    def _number(self) -> int:
        return _CODE | self._num_done % (1 << 26)

    def _posted(self, rank: int) -> PostedReceive:
        buffer = torch.empty(1, dtype=torch.uint8)
        begin = partial(self._world.recv, [buffer], rank, self._number())
        return PostedReceive(self._works.start(begin, _WHAT, ("rank", rank)), buffer)
