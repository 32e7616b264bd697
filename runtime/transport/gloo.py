"""Ranks that are processes: messages over torch.distributed with gloo, on the CPU.

Three properties of gloo (torch 2.13) shape this file.  A send ends only when the peer has posted its receive.  A wait
that expires closes every connection of the rank, so that peers fail at once too.  A message longer than the receive
buffer aborts the process, therefore buffers have room to spare (``_SPARE_BYTES``) in which the frame can be judged.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from planner.ir.errors import TransportError
from runtime.transport.base import Deadline, Key, Spec, check_member, declare, gone
from runtime.transport.frame import Frame, Layout, layout_for, layout_of, tag

PAIR_SUM_BYTES = 256 * 1024
"""Up to here two ranks exchange their terms and add, which takes half the time of gloo's ring.

Measured on two cores of one host, median of both ways: 4 KiB 0.16 against 0.35 ms, 256 KiB 0.18 against 0.38 ms,
1 MiB 0.70 against 0.67 ms, 64 MiB 74 against 37 ms.
"""

_SPARE_BYTES = 1 << 20
"""At most so many bytes follow a receive buffer, never more than it has itself; untouched unless a message is wrong."""

_SUM_CODE, _BARRIER_CODE = 27, 28  # the upper five bits of a tag, which no key has


_Words = tuple[object, ...]
"""What an error would say, put together only if there is one."""


@dataclass(slots=True)
class _Receive:
    work: dist.Work
    frame: Frame


@dataclass(slots=True)
class _Send:
    """A message on its way; it holds the buffer, which gloo only borrows.

    gloo says whether a send is done only to those who wait for it, so ``flush`` alone gives buffers back.
    """

    work: dist.Work
    frame: Frame
    key: Key
    destination: int


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
        self._numbers = declare(groups, self.world_size)
        self._groups = {
            ranks: self._world if number == 0 else dist.new_group(ranks, backend="gloo")
            for ranks, number in self._numbers.items()
        }
        self._owns_group = owns_group
        self._receives: dict[tuple[Key, int], _Receive] = {}
        self._sends: list[_Send] = []
        self._spare_frames: dict[Layout, list[Frame]] = {}  # the next step sends the same messages again
        self._num_sums = dict.fromkeys(self._numbers, 0)
        self._num_barriers = 0

    def post_receive(self, key: Key, source: int, specs: Sequence[Spec]) -> None:
        number = tag(key)
        if (key, source) in self._receives:
            raise TransportError(f"{key} from rank {source} is announced twice")
        layout = layout_of(specs)
        frame = Frame(layout, spare_bytes=min(layout.total_bytes, _SPARE_BYTES))
        work = self._start_receive(("receive", key), frame.message, source, number)
        self._receives[key, source] = _Receive(work, frame)

    def receive(self, key: Key, source: int, deadline_s: float) -> tuple[torch.Tensor, ...]:
        posted = self._receives.pop((key, source), None)
        if posted is None:
            raise TransportError(f"{key} from rank {source} was not announced")
        self._wait(posted.work, ("receive", key), ("rank", source), Deadline(deadline_s))
        return posted.frame.read(key, source)

    def send(self, key: Key, destination: int, tensors: Sequence[torch.Tensor]) -> None:
        layout = layout_for(tensors)
        spare = self._spare_frames.get(layout)
        frame = spare.pop() if spare else Frame(layout)
        frame.write(key, tensors)
        work = self._start_send(("send", key), frame.message, destination, tag(key))
        self._sends.append(_Send(work, frame, key, destination))

    def flush(self, deadline_s: float) -> None:
        deadline = Deadline(deadline_s)
        for sent in self._sends:
            self._wait(sent.work, ("send", sent.key), ("rank", sent.destination), deadline)
            self._spare_frames.setdefault(sent.frame.layout, []).append(sent.frame)
        self._sends.clear()

    @torch.no_grad()
    def all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...], deadline_s: float) -> None:
        check_member(self.rank, ranks, self._numbers)
        self._num_sums[ranks] += 1
        if len(ranks) == 1:
            return
        term = tensor.contiguous()
        if len(ranks) == 2 and term.nbytes <= PAIR_SUM_BYTES:
            self._sum_pair(term, ranks, deadline_s)
        else:
            self._sum_ring(term, ranks, deadline_s)
        if term is not tensor:
            tensor.copy_(term)

    def barrier(self, deadline_s: float) -> None:
        number = _BARRIER_CODE << 26 | self._num_barriers % (1 << 26)
        self._num_barriers += 1
        deadline = Deadline(deadline_s)
        peers = [rank for rank in range(self.world_size) if rank != self.rank]
        token = torch.zeros(1, dtype=torch.uint8)
        came = {peer: self._start_receive(("barrier",), torch.empty_like(token), peer, number) for peer in peers}
        told = {peer: self._start_send(("barrier",), token, peer, number) for peer in peers}
        for works in (came, told):
            for peer, work in works.items():
                self._wait(work, ("barrier",), ("rank", peer), deadline)

    def close(self) -> None:
        self._receives.clear()
        self._sends.clear()
        self._spare_frames.clear()
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()

    def _sum_pair(self, term: torch.Tensor, ranks: tuple[int, ...], deadline_s: float) -> None:
        """``term`` += the peer's; addition of two numbers commutes, hence both get the same bits."""
        peer = ranks[0] if ranks[1] == self.rank else ranks[1]
        what = (f"sum over ranks {ranks}, number", self._num_sums[ranks])
        alike = zlib.crc32(f"{term.numel()} {term.dtype}".encode()) % (1 << 12)  # other sizes must not meet
        number = _SUM_CODE << 8 | self._numbers[ranks] % (1 << 8)
        number = (number << 6 | self._num_sums[ranks] % (1 << 6)) << 12 | alike
        other = torch.empty_like(term)
        deadline = Deadline(deadline_s)
        came = self._start_receive(what, other, peer, number)
        told = self._start_send(what, term, peer, number)
        for work in (came, told):
            self._wait(work, what, ("rank", peer), deadline)
        term += other

    def _sum_ring(self, term: torch.Tensor, ranks: tuple[int, ...], deadline_s: float) -> None:
        """Gloo's ring: each part is added in a fixed order on one rank and handed on, so all get the same bits."""
        what = (f"sum over ranks {ranks}, number", self._num_sums[ranks])
        peers = ("one of", ", ".join(f"rank {rank}" for rank in ranks if rank != self.rank))
        try:
            work = dist.all_reduce(term, group=self._groups[ranks], async_op=True)
        except RuntimeError as error:
            raise gone(_words(what), self.rank, _words(peers), str(error)) from error
        self._wait(work, what, peers, Deadline(deadline_s))

    def _start_receive(self, what: _Words, buffer: torch.Tensor, source: int, number: int) -> dist.Work:
        try:
            return self._world.recv([buffer], source, number)
        except RuntimeError as error:
            raise gone(_words(what), self.rank, f"rank {source}", str(error)) from error

    def _start_send(self, what: _Words, message: torch.Tensor, destination: int, number: int) -> dist.Work:
        try:
            return self._world.send([message], destination, number)
        except RuntimeError as error:
            raise gone(_words(what), self.rank, f"rank {destination}", str(error)) from error

    def _wait(self, work: dist.Work, what: _Words, peer: _Words, deadline: Deadline) -> None:
        remaining_s = deadline.limit_s - deadline.waited_s()
        milliseconds = max(1, math.ceil(remaining_s * 1000))  # 0 would mean forever
        try:
            work.wait(timedelta(milliseconds=milliseconds))
        except RuntimeError as error:
            if deadline.waited_s() >= deadline.limit_s:
                raise deadline.error(_words(what), self.rank, _words(peer)) from error
            raise gone(_words(what), self.rank, _words(peer), str(error)) from error


def _words(parts: _Words) -> str:
    return " ".join(map(str, parts))
