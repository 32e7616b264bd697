"""Ranks that are processes: messages over torch.distributed with gloo, on the CPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from planner.ir.errors import TransportError
from runtime.transport.base import Deadline, Key, Pending, Spec
from runtime.transport.peer import Peer
from runtime.transport.together import Together
from runtime.transport.works import Works

_BARRIER_CODE = 28  # the upper five bits of a tag, which no key has


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
        groups: those that may be summed over, besides the world; the same on all ranks.

    Raises:
        TransportError: the ranks did not find each other.
        DeadlineError: not all of them were ready in time.
    """
    timeout = timedelta(seconds=timeout_s)
    try:
        if store is None:
            given = (-1 if rank is None else rank, -1 if world_size is None else world_size)
            store, rank, world_size = next(dist.rendezvous("env://", *given, timeout=timeout))
            # A restarted job finds the keys of its predecessor in torchrun's store: each attempt has its own.
            store = dist.PrefixStore(f"halopipe/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
        transport = GlooTransport(groups, owns_group=True)
    except (RuntimeError, ValueError) as error:
        place = "a rank from the environment" if rank is None else f"rank {rank} of {world_size}"
        remedies = ["start with torchrun, or give rank, world_size and store", "look for the first error of the others"]
        raise TransportError(f"{place} could not join the others", [str(error)], remedies) from error
    transport.barrier(timeout_s)  # a rank that leaves early would break the others' connecting
    return transport


class GlooTransport:
    """The transport of one process, see :class:`runtime.transport.base.Transport`; tensors are on the CPU.

    Args:
        groups: as in :func:`open_gloo`.  All ranks make their transport together, with the same groups.
        owns_group: leave the default process group in ``close``.
    """

    def __init__(self, groups: Iterable[Sequence[int]] = (), *, owns_group: bool = False) -> None:
        self._world = dist.group.WORLD
        if self._world is None:
            raise TransportError("there is no default process group", remedies=["use open_gloo"])
        self.rank = self._world.rank()
        self.world_size = self._world.size()
        self._works = Works(self.rank)
        self._together = Together(self.rank, self.world_size, groups, "gloo", "cpu", self._works)
        self._owns_group = owns_group
        self._peers = [Peer(self._world, self._works, rank) for rank in range(self.world_size)]
        self._num_barriers = 0

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

    def all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...], deadline_s: float) -> None:
        self._together.all_reduce(tensor, ranks, deadline_s)

    def start_sum(self, tensor: torch.Tensor, ranks: tuple[int, ...], deadline_s: float) -> Pending:
        return self._together.start_sum(tensor, ranks, deadline_s)

    def reduce_scatter(
        self, flat: torch.Tensor, counts: Sequence[int], ranks: tuple[int, ...], deadline_s: float
    ) -> None:
        self._together.reduce_scatter(flat, counts, ranks, deadline_s)

    def all_gather(self, flat: torch.Tensor, counts: Sequence[int], ranks: tuple[int, ...], deadline_s: float) -> None:
        self._together.all_gather(flat, counts, ranks, deadline_s)

    def all_max(self, tensor: torch.Tensor, ranks: tuple[int, ...], deadline_s: float) -> None:
        self._together.all_max(tensor, ranks, deadline_s)

    def barrier(self, deadline_s: float) -> None:
        number = _BARRIER_CODE << 26 | self._num_barriers % (1 << 26)
        self._num_barriers += 1
        deadline = Deadline(deadline_s)
        token = torch.zeros(1, dtype=torch.uint8)
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        came = [self._start(self._world.recv, torch.empty_like(token), rank, number) for rank in others]
        told = [self._start(self._world.send, token, rank, number) for rank in others]
        for works in (came, told):
            for rank, work in zip(others, works, strict=True):
                self._works.wait(work, ("barrier",), ("rank", rank), deadline)

    def close(self) -> None:
        self._peers.clear()
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()

    def num_buffers(self) -> tuple[int, int]:
        """How many announced messages, and how many sent ones, have their buffers now."""
        numbers = [peer.num_buffers() for peer in self._peers]
        return sum(came for came, _ in numbers), sum(sent for _, sent in numbers)

    def _start(self, begin: Callable[..., dist.Work], token: torch.Tensor, rank: int, number: int) -> dist.Work:
        return self._works.start(partial(begin, [token], rank, number), ("barrier",), ("rank", rank))
