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
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist
from torch import Tensor

from planner.ir import cluster as names
from planner.ir.errors import TransportError
from runtime.timeouts import TRANSPORT_S
from runtime.transport.base import KEYED, ErrorWords, Pending, is_plain, met, plain, plain_like
from runtime.transport.collectives import STARTED_SUM, ByRank, ExchangedCollectives, Meeting
from runtime.transport.gloo import FrameMessages
from runtime.transport.mpi_requests import MpiExchange, MpiSteps, MpiWire, MpiWorks, library, load_mpi, meet

if TYPE_CHECKING:
    from mpi4py import MPI

PAIR_SUM_BYTES = 1 << 20
SUM_BYTES = 16 * 1024
"""Up to here two ranks, or more of them, exchange their whole terms; of larger ones each adds a part up for all.

Measured as above, sums of 64 KiB / 1 MiB / 4 MiB / 16 MiB: whole 16 / 156 / 1,920 / 11,200 us, parts 27 / 159 / 1,340 /
10,500 us, MPI's own Iallreduce, which need not give all ranks the same bits, 31 / 233 / 1,360 / 14,700 us.
"""

_KEYED = 1 << 31  # tags beside those of messages
_TOGETHER = 3 << 30
_UNKEYED = _TOGETHER | 1 << 29
_NUMBERS = 1 << 12  # of one group's sums, which are far fewer at a time


def open_mpi(
    rank: int | None = None,
    world_size: int | None = None,
    timeout_s: float = TRANSPORT_S,
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


class MpiTransport(ExchangedCollectives, FrameMessages):
    """The transport of one process, see :class:`runtime.transport.base.Transport`; received tensors are on the CPU.

    Args:
        ranks: a communicator of all ranks, in their order.
        groups: as in :func:`open_mpi`.
        is_crowded: whether this host has more ranks than cores: a rank that waits lets another one run.
    """

    def __init__(
        self, mpi: Any, ranks: MPI.Intracomm, groups: Iterable[Sequence[int]] = (), *, is_crowded: bool = False
    ) -> None:
        self.rank = ranks.rank
        self.world_size = ranks.size
        self.name = names.MPI
        ExchangedCollectives.__init__(self, groups, self.world_size)
        self._wire = MpiWire(mpi, ranks)
        self._works: MpiWorks = MpiWorks(self._wire, is_crowded)
        FrameMessages.__init__(
            self, cast("dist.ProcessGroup", self._wire), self._works
        )  # which has all that they ask of one

    def name_among(self, ranks: Sequence[int]) -> str:
        return self.name

    def close(self) -> None:
        self._works.leave()
        self._forget_messages()

    def start_exchange(self, sent: ByRank, received: ByRank, key: int | None = None) -> Pending:
        if key is not None and not 0 <= key < KEYED:
            raise ValueError(f"key {key} is not below {KEYED}")
        return self._start(sent, received, _UNKEYED if key is None else _KEYED | key, ("exchange",))

    def exchange(self, meeting: Meeting, sent: ByRank, received: ByRank, *, is_second: bool = False) -> Pending:
        """The started sums of a group meet nothing else it does."""
        series, number = meeting
        tag = series.group << 14 | number % _NUMBERS << 2 | (series.kind == STARTED_SUM) << 1 | is_second
        return self._start(sent, received, _TOGETHER | tag, meeting.what)

    def is_in_parts(self, tensor: Tensor, num_ranks: int) -> bool:
        return tensor.nbytes > (PAIR_SUM_BYTES if num_ranks == 2 else SUM_BYTES)

    def begun(self, meeting: Meeting, steps: Iterator[Pending]) -> Pending:
        """A started sum takes its steps beside all waits of this rank."""
        begun = MpiSteps(steps)
        if meeting.series.kind == STARTED_SUM:
            self._works.run(begun)
        return begun

    def _start(self, sent: ByRank, received: ByRank, tag: int, what: ErrorWords) -> Pending:
        """Receives, then sends; what is not plain on the CPU, by way of what is."""
        copies = []
        requests = []
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
        return MpiExchange(self._works, requests, copies, what)
