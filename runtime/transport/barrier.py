"""A barrier that knows who is missing: every rank tells every other that it is there."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist

from runtime.transport.base import Deadline
from runtime.transport.works import Works

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
