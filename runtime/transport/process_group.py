"""Joining the default process group: by hand, or from what torchrun or Slurm say in the environment."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar, cast

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from cuda_ops._torch import PrefixStore, Store
from planner.ir.errors import TransportError

T = TypeVar("T")


def join(
    backend: str,
    rank: int | None,
    world_size: int | None,
    store: Store | None,
    timeout_s: float,
    make: Callable[[], T],
) -> T:
    """What ``make`` makes in the default process group, which is joined first.

    Args:
        rank, world_size, store: of this process; None where the environment names them.
        timeout_s: for the first meeting, and the longest that a sum left behind by an error may keep the process.

    Raises:
        TransportError: the ranks did not find each other.
    """
    timeout = timedelta(seconds=timeout_s)
    try:
        if store is None:
            given = (-1 if rank is None else rank, -1 if world_size is None else world_size)
            store, rank, world_size = next(rendezvous("env://", *given, timeout=timeout))
            # A restarted job finds the keys of its predecessor in torchrun's store: each attempt has its own.
            store = PrefixStore(f"halopipe/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        mine, size = cast(int, rank), cast(int, world_size)  # who gives a store gives these as well
        dist.init_process_group(backend, store=store, rank=mine, world_size=size, timeout=timeout)
        return make()
    except (RuntimeError, ValueError) as error:
        place = "a rank from the environment" if rank is None else f"rank {rank} of {world_size}"
        remedies = ["start with torchrun, or give rank, world_size and store", "look for the first error of the others"]
        raise TransportError(f"{place} could not join the others", [str(error)], remedies) from error


def default_group() -> dist.ProcessGroup:
    """The default process group.

    Raises:
        TransportError: there is none.
    """
    world = dist.group.WORLD
    if world is None:
        raise TransportError("there is no default process group", remedies=["use open_gloo or open_nccl"])
    return world
