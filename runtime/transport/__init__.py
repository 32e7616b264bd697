"""Moving tensors between ranks: every message carries its key, every wait has a deadline.

:mod:`~runtime.transport.inprocess` has ranks that are threads of one process; over :mod:`~runtime.transport.gloo`,
:mod:`~runtime.transport.nccl` and :mod:`~runtime.transport.mpi` they are processes.  All frame their messages alike
(:mod:`~runtime.transport.frame`) and pass the same tests.

Modules:

    base              What the executor asks of a transport; its deadline, its errors; joining the process group
    collectives       What the ranks of a group do together, over exchanges among them: sums, scattered sums, gathers,
                      maxima
    exchanges         Exchanges over torch.distributed, receives that stand ready for them, and the backend's own sums
    frame             A message: a frame, that is a header of 64 bytes and tensors aligned to 64, and large tensors that
                      travel alone
    gloo              Ranks that are processes: messages over torch.distributed with gloo, on the CPU
    hosts             Ranks of one host through shared memory, ranks of several over gloo
    inprocess         Ranks that are threads of one process: tests without processes, with the semantics of real
                      messages
    mpi               Ranks that are processes of an MPI job: messages and sums over mpi4py, on the CPU
    mpi_requests      One process of an MPI job: its requests under tags, and waits that have a deadline
    nccl              NCCL: a communicator for each directed channel and each group; messages in the order sent
    segments          The memory that ranks of one host share, as one of them has mapped it: blocks, announcements,
                      waits
    shared_memory     Ranks that are processes of one host: messages, exchanges and sums through memory that they share
    small_allgather   Rows of numbers that ranks tell one another: statistics of a normalisation, parts of a mean,
                      counts
    works             Work of torch.distributed waited for with a deadline; a barrier that knows who is missing
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.ir.lazy import lazily
from runtime.transport.base import Exchanging, MessageKey, Pending, Spec, Transport

if TYPE_CHECKING:
    from runtime.transport.exchanges import GroupExchanges
    from runtime.transport.gloo import GlooTransport, open_gloo
    from runtime.transport.hosts import MixedTransport, open_named, open_shared
    from runtime.transport.inprocess import Hub, InProcessTransport
    from runtime.transport.mpi import MpiTransport, open_mpi
    from runtime.transport.nccl import Channel, ChannelTransport, channels_of, open_nccl
    from runtime.transport.shared_memory import SharedMemoryTransport

__all__ = [
    "Channel",
    "ChannelTransport",
    "Exchanging",
    "GlooTransport",
    "GroupExchanges",
    "Hub",
    "InProcessTransport",
    "MessageKey",
    "MixedTransport",
    "MpiTransport",
    "Pending",
    "SharedMemoryTransport",
    "Spec",
    "Transport",
    "channels_of",
    "open_gloo",
    "open_mpi",
    "open_named",
    "open_nccl",
    "open_shared",
]

_HOMES = {
    "Channel": "nccl",
    "ChannelTransport": "nccl",
    "GlooTransport": "gloo",
    "GroupExchanges": "exchanges",
    "Hub": "inprocess",
    "InProcessTransport": "inprocess",
    "MixedTransport": "hosts",
    "MpiTransport": "mpi",
    "SharedMemoryTransport": "shared_memory",
    "channels_of": "nccl",
    "open_gloo": "gloo",
    "open_mpi": "mpi",
    "open_named": "hosts",
    "open_nccl": "nccl",
    "open_shared": "hosts",
}
"""Imported when first used: a rank exchanges in one way."""

__getattr__ = lazily(__name__, _HOMES)
