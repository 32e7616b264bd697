"""Moving tensors between ranks: every message carries its key, every wait has a deadline.

:mod:`~runtime.transport.inprocess` has ranks that are threads of one process; over :mod:`~runtime.transport.gloo`,
:mod:`~runtime.transport.nccl` and :mod:`~runtime.transport.mpi` they are processes.  All frame their messages alike
(:mod:`~runtime.transport.frame`) and pass the same tests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.ir.lazy import lazily
from runtime.transport.base import Exchanging, Key, Pending, Spec, Transport

if TYPE_CHECKING:
    from runtime.transport.collectives import GroupExchanges
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
    "Key",
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
    "GroupExchanges": "collectives",
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
