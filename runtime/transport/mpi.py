"""Ranks that are processes of an MPI job: messages and sums over mpi4py, on the CPU.

Messages are those of gloo's transport, frames and keys alike; MPI matches them by tag.  What ranks do together are
sends and receives too, with additions in the order of ranks, so that all get the same bits.

What was measured decided for plain requests, from and into the tensors themselves (mpich 5.0, two ranks of one host,
one tensor each way, 1 KiB / 32 KiB / 256 KiB / 4 MiB): pairs 5 / 11 / 31 / 820 us, persistent requests 2 / 7 / 27 /
540 us, Ineighbor_alltoallw 4 / 10 / 25 / 490 us, persistent 1 / 7 / 22 / 440 us.  The last three need buffers that stay
where they are, while a halo and its receiver are new tensors in each step: copied to where persistent requests want
them, an exchange takes 5 / 17 / 150 / 6,600 us.  A neighbourhood would need a communicator for each layout besides.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from planner.ir import cluster as names
from planner.ir.errors import TransportError
from runtime.transport.base import (
    KEYED,
    Pending,
    Words,
    add_in_order,
    check_member,
    declare,
    flat_on_cpu,
    is_plain,
    largest,
    met,
    parts,
    plain,
    plain_like,
    put_back,
)
from runtime.transport.gloo import FrameMessages
from runtime.transport.mpi_requests import MpiRequest, MpiRounds, MpiWire, MpiWorks, library, load_mpi, meet

if TYPE_CHECKING:
    from mpi4py import MPI

PAIR_SUM_BYTES, SUM_BYTES = 1 << 20, 16 * 1024
"""Up to here two ranks, or more of them, exchange their whole terms; of larger ones each adds a part up for all.

Measured as above, sums of 64 KiB / 1 MiB / 4 MiB / 16 MiB: whole 16 / 156 / 1,920 / 11,200 us, parts 27 / 159 / 1,340 /
10,500 us, MPI's own Iallreduce, which need not give all ranks the same bits, 31 / 233 / 1,360 / 14,700 us.
"""

_KEYED, _TOGETHER = 1 << 31, 3 << 30  # tags beside those of messages
_UNKEYED = _TOGETHER | 1 << 29
_NUMBERS = 1 << 12  # of one group's sums, which are far fewer at a time


def open_mpi(
    rank: int | None = None,
    world_size: int | None = None,
    timeout_s: float = 600.0,
    groups: Iterable[Sequence[int]] = (),
) -> MpiTransport:
    """The transport of this process among all those that mpiexec started; all of them open theirs together.

    Args:
        rank: of this process, from 0; None: its rank in MPI's world.
        world_size: how many processes there should be; None: as many as there are.
        timeout_s: for the first meeting.
        groups: those that may do something together, besides the world; the same on all ranks.

    Raises:
        TransportError: there is no MPI, or it has another number of processes.
        DeadlineError: not all of them were ready in time.
    """
    mpi = load_mpi(timeout_s)
    world = mpi.COMM_WORLD
    if world_size is not None and world.size != world_size:
        raise TransportError(
            f"MPI has {world.size} processes, the job {world_size}",
            [library(mpi)],
            [f"mpiexec -n {world_size} halopipe ...", "with the mpiexec of the same MPI that mpi4py uses"],
        )
    meet(world, timeout_s)
    local = world.Split_type(mpi.COMM_TYPE_SHARED)
    ranks = world.Split(0, world.rank if rank is None else rank)
    transport = MpiTransport(mpi, ranks, groups, is_crowded=local.size > (os.cpu_count() or 1))
    return met(transport, timeout_s)


class MpiTransport(FrameMessages):
    """The transport of one process, see :class:`runtime.transport.base.Transport`; received tensors are on the CPU.

    Args:
        ranks: a communicator of all ranks, in their order.
        groups: as in :func:`open_mpi`.
        is_crowded: whether this host has more ranks than cores: a rank that waits lets another one run.
    """

    def __init__(
        self, mpi: Any, ranks: MPI.Intracomm, groups: Iterable[Sequence[int]] = (), *, is_crowded: bool = False
    ) -> None:
        self.rank, self.world_size, self.name = ranks.rank, ranks.size, names.MPI
        self._numbers = declare(groups, self.world_size)
        self._wire = MpiWire(mpi, ranks)
        self._works: MpiWorks = MpiWorks(self._wire, is_crowded)
        super().__init__(cast("dist.ProcessGroup", self._wire), self._works)  # which has all that they ask of one
        self._counts: dict[tuple[str, tuple[int, ...]], int] = {}

    def name_among(self, ranks: Sequence[int]) -> str:
        return self.name

    def close(self) -> None:
        self._works.leave()
        self._forget_messages()

    def start_exchange(
        self,
        sent: Mapping[int, torch.Tensor],
        received: Mapping[int, torch.Tensor],
        key: int | None = None,
    ) -> Pending:
        if key is not None and not 0 <= key < KEYED:
            raise ValueError(f"key {key} is not below {KEYED}")
        steps = self._exchange(sent, received, _UNKEYED if key is None else _KEYED | key)
        return MpiRounds(self._works, steps, ("exchange",))

    def all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> None:
        what, tag = self._begin("sum", ranks)
        MpiRounds(self._works, self._sum(tensor, ranks, tag), what).wait()

    def start_sum(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> Pending:
        what, tag = self._begin("started sum", ranks)
        steps = MpiRounds(self._works, self._sum(tensor, ranks, tag), what)
        self._works.run(steps)
        return steps

    def reduce_scatter(self, flat: torch.Tensor, counts: Sequence[int], ranks: tuple[int, ...]) -> None:
        pieces = parts(flat.detach(), counts, ranks)
        what, tag = self._begin("reduce-scatter", ranks)
        MpiRounds(self._works, self._scatter(pieces, ranks, tag), what).wait()

    def all_gather(self, flat: torch.Tensor, counts: Sequence[int], ranks: tuple[int, ...]) -> None:
        pieces = parts(flat.detach(), counts, ranks)
        what, tag = self._begin("all-gather", ranks)
        MpiRounds(self._works, self._gather(pieces, ranks, tag), what).wait()

    def all_max(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> None:
        largest(self, tensor, ranks)

    def _begin(self, kind: str, ranks: tuple[int, ...]) -> tuple[Words, int]:
        """What errors call it, and the first of two tags; the started sums of a group meet nothing else it does."""
        check_member(self.rank, ranks, self._numbers)
        number = self._counts[kind, ranks] = self._counts.get((kind, ranks), 0) + 1
        tag = self._numbers[ranks] << 14 | number % _NUMBERS << 2 | (kind == "started sum") << 1
        return (f"{kind} over ranks {ranks}, number", number), _TOGETHER | tag

    def _sum(self, tensor: torch.Tensor, ranks: tuple[int, ...], tag: int) -> Iterator[list[MpiRequest]]:
        flat = flat_on_cpu(tensor)
        if flat.nbytes <= (PAIR_SUM_BYTES if len(ranks) == 2 else SUM_BYTES):
            yield from self._add(dict.fromkeys(ranks, flat), ranks, tag)
        else:
            pieces = torch.tensor_split(flat, len(ranks))
            yield from self._scatter(pieces, ranks, tag)
            yield from self._gather(pieces, ranks, tag | 1)
        put_back(flat, tensor)

    def _scatter(self, pieces: Sequence[torch.Tensor], ranks: tuple[int, ...], tag: int) -> Iterator[list[MpiRequest]]:
        yield from self._add(dict(zip(ranks, pieces, strict=True)), ranks, tag)

    def _gather(self, pieces: Sequence[torch.Tensor], ranks: tuple[int, ...], tag: int) -> Iterator[list[MpiRequest]]:
        received = {rank: piece for rank, piece in zip(ranks, pieces, strict=True) if rank != self.rank}
        yield from self._exchange(dict.fromkeys(received, pieces[ranks.index(self.rank)]), received, tag)

    def _add(self, terms: Mapping[int, torch.Tensor], ranks: tuple[int, ...], tag: int) -> Iterator[list[MpiRequest]]:
        """Each rank is sent its term; this rank's own becomes the sum of those that it is sent, and its own."""
        own = terms[self.rank]
        rows = {rank: plain_like(own) for rank in ranks if rank != self.rank}
        yield from self._exchange({rank: terms[rank] for rank in rows}, rows, tag)
        add_in_order(own, ranks.index(self.rank), list(rows.values()))

    def _exchange(
        self, sent: Mapping[int, torch.Tensor], received: Mapping[int, torch.Tensor], tag: int
    ) -> Iterator[list[MpiRequest]]:
        """Receives, then sends; what is not plain on the CPU, by way of what is."""
        copies, requests = [], []
        for rank, tensor in received.items():
            if tensor.numel():
                here = tensor
                if not is_plain(tensor):
                    here = plain_like(tensor)
                    copies.append((tensor, here))
                requests.append(self._wire.recv([here], rank, tag, True))
        for rank, tensor in sent.items():
            if tensor.numel():
                requests.append(self._wire.send([plain(tensor)], rank, tag))
        yield requests
        for tensor, buffer in copies:
            tensor.detach().copy_(buffer)
