"""Ranks that are processes: messages over torch.distributed with gloo, on the CPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from runtime.transport.barrier import Barrier
from runtime.transport.base import Deadline, Key, Spec
from runtime.transport.collectives import PAIR_SUM_BYTES, Together
from runtime.transport.peer import Peer
from runtime.transport.process_group import default_group, join
from runtime.transport.works import Works


def open_gloo(
    rank: int | None = None,
    world_size: int | None = None,
    store: dist.Store | None = None,
    timeout_s: float = 600.0,
    groups: Iterable[Sequence[int]] = (),
) -> GlooTransport:
    """Join the default process group with gloo and return its transport, which leaves the group when it is closed.

    Under torchrun or Slurm leave out ``rank``, ``world_size`` and ``store``: the environment names them.

    Args:
        rank: of this process, from 0.
        world_size: number of processes.
        store: where the ranks find each other; with one, ``rank`` and ``world_size`` are needed.
        timeout_s: for the first meeting, and the longest that a sum left behind by an error may keep the process.
        groups: those that may do something together, besides the world; the same on all ranks.

    Raises:
        TransportError: the ranks did not find each other.
        DeadlineError: not all of them were ready in time.
    """
    make = partial(GlooTransport, groups, owns_group=True)
    transport = join("gloo", rank, world_size, store, timeout_s, make)
    transport.barrier(timeout_s)  # a rank that leaves early would break the others' connecting
    return transport


class GlooTransport(Together):
    """The transport of one process, see :class:`runtime.transport.base.Transport`; received tensors are on the CPU.

    Args:
        groups: as in :func:`open_gloo`.  All ranks make their transport together, with the same groups.
        owns_group: leave the default process group in ``close``.
    """

    def __init__(self, groups: Iterable[Sequence[int]] = (), *, owns_group: bool = False) -> None:
        world = default_group()
        works = Works(world.rank())
        super().__init__(world, groups, works, pair_bytes=PAIR_SUM_BYTES)
        self._owns_group = owns_group
        self._barrier = Barrier(world, works)
        self._peers = [Peer(world, works, rank) for rank in range(self.world_size)]

    def post_receive(self, key: Key, source: int, specs: Sequence[Spec]) -> None:
        self._peers[source].post_receive(key, specs)

    def receive(self, key: Key, source: int, deadline_s: float) -> tuple[torch.Tensor, ...]:
        return self._peers[source].receive(key, Deadline(deadline_s))

    def send(self, key: Key, destination: int, tensors: Sequence[torch.Tensor]) -> None:
        self._peers[destination].send(key, tensors)

    def flush(self, deadline_s: float) -> None:
        deadline = Deadline(deadline_s)
        for peer in self._peers:
            peer.flush(deadline)
        self._standing.flush(deadline)

    def barrier(self, deadline_s: float) -> None:
        self._barrier.wait(Deadline(deadline_s))

    def close(self) -> None:
        for peer in self._peers:
            peer.clear()
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()

    def num_buffers(self) -> tuple[int, int]:
        """How many announced messages, and how many sent ones, have their buffers now."""
        numbers = [peer.num_buffers() for peer in self._peers]
        return sum(came for came, _ in numbers), sum(sent for _, sent in numbers)
