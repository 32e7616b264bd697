"""Ranks that are processes with a GPU each: NCCL, with a communicator for each directed channel and each group."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from runtime.transport.channels import Channel, ChannelTransport
from runtime.transport.process_group import join


def open_nccl(
    device: str,
    channels: Iterable[Channel],
    rank: int | None = None,
    world_size: int | None = None,
    store: dist.Store | None = None,
    timeout_s: float = 600.0,
    groups: Iterable[Sequence[int]] = (),
    host_kinds: Collection[str] = (),
) -> ChannelTransport:
    """Join the default process group and return its transport, as :func:`runtime.transport.gloo.open_gloo`.

    CPU tensors of the default group (the barrier) go over gloo.

    Args:
        device: of this process, ``cuda:0``.
        channels: ``channels_of(program)``; the same on all ranks.
        timeout_s: also the time after which NCCL's own watchdog ends a process whose peer is gone and that did not
            notice by itself: choose it longer than the deadlines of waits.
        host_kinds: as of :class:`ChannelTransport`.
    """
    torch.cuda.set_device(device)
    make = partial(
        ChannelTransport,
        *(channels, groups),
        backend="nccl",
        device=device,
        host_kinds=host_kinds,
        timeout_s=timeout_s,
        owns_group=True,
    )
    transport = join("cpu:gloo,cuda:nccl", rank, world_size, store, timeout_s, make)
    transport.barrier(timeout_s)
    return transport
