from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import threading
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from runtime.transport import (
    Channel,
    ChannelTransport,
    Hub,
    InProcessTransport,
    MessageKey,
    Transport,
    open_gloo,
    open_mpi,
    open_shared,
)
from runtime.transport.base import Spec, join
from tests.forks import Outcome, attempt, forked, places_in_mpi, results

Program = Callable[[Transport], Any]
MIXED = (
    torch.arange(6, dtype=torch.float64).reshape(2, 3),
    torch.tensor([2**62 + 1, -5]),
    torch.tensor([True, False, True]),
    torch.empty(0, 4, dtype=torch.float16),
    torch.tensor(2.5, dtype=torch.bfloat16),
    torch.arange(12.0).reshape(3, 4).t(),
    torch.tensor([1 + 2j]),
)


def key(microbatch: int = 3, step: int = 4, kind: str = "F") -> MessageKey:
    return MessageKey(step, kind, 0, 1, microbatch)


def specs_of(*tensors: torch.Tensor) -> list[Spec]:
    return [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]


def deliver(transport: Transport, name: MessageKey, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """From rank 0 to rank 1."""
    if transport.rank == 0:
        transport.send(name, 1, tensors)
        transport.flush()
        return tensors
    transport.post_receive(name, 0, specs_of(*tensors))
    return transport.receive(name, 0)


def run_in_threads(world_size: int, program: Program, hub: Hub) -> list[Any]:
    """What ``program`` returns on each rank, the ranks being threads."""
    outcomes: list[Outcome] = [(False, "did not end")] * world_size

    def work(rank: int) -> None:
        transport = InProcessTransport(hub, rank)
        outcomes[rank] = attempt(partial(program, transport))
        transport.close()

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    return results(outcomes)


def over_gloo(rank: int, world_size: int, groups: Sequence[tuple[int, ...]], store: Path) -> Transport:
    return open_gloo(rank, world_size, dist.FileStore(str(store), world_size), 20.0, groups)


def over_shared(rank: int, world_size: int, groups: Sequence[tuple[int, ...]], store: Path) -> Transport:
    return open_shared(rank, world_size, dist.FileStore(str(store), world_size), 20.0, groups, required=True)


def over_mixed(rank: int, world_size: int, groups: Sequence[tuple[int, ...]], store: Path) -> Transport:
    """Even ranks on one host, odd ones on another."""
    hosts = [f"n{rank % 2}" for rank in range(world_size)]
    return open_shared(rank, world_size, dist.FileStore(str(store), world_size), 20.0, groups, hosts, required=True)


def over_channels(rank: int, world_size: int, groups: Sequence[tuple[int, ...]], store: Path) -> Transport:
    """All that NCCL's transport does, over gloo on the CPU."""
    pairs = list(itertools.permutations(range(world_size), 2))
    channels = [Channel("F", *pair, *pair) for pair in pairs] + [Channel("F", 0, 1, 1, 0)]
    channels += [Channel("F", 1, 0, 0, 1), Channel("B", 0, 1, 0, 1), Channel("B", 1, 0, 0, 1)]
    make = partial(ChannelTransport, channels, groups, backend="gloo", device="cpu", timeout_s=20.0, owns_group=True)
    transport = join("gloo", rank, world_size, dist.FileStore(str(store), world_size), 20.0, make)
    transport.barrier()
    return transport


def over_mpi(rank: int, world_size: int, groups: Sequence[tuple[int, ...]], store: Path) -> Transport:
    return open_mpi(rank, world_size, 20.0, groups)


Opened = Callable[[int, int, Sequence[tuple[int, ...]], Path], Transport]


def run_in_processes(
    world_size: int, program: Program, groups: Sequence[tuple[int, ...]], store: Path, opened: Opened = over_gloo
) -> list[Any]:
    """What ``program`` returns on each rank, the ranks being forked processes; None where one ended by itself."""

    def work(rank: int) -> Any:
        torch.set_num_threads(1)
        transport = opened(rank, world_size, groups, store)
        try:
            return program(transport)
        finally:
            transport.close()

    with places_in_mpi(world_size) if opened is over_mpi else contextlib.nullcontext([]) as places:
        return forked(world_size, work, places)


PROCESSES: dict[str, Opened] = {
    "gloo": over_gloo,
    "shared": over_shared,
    "mixed": over_mixed,
    "channels": over_channels,
    "mpi": over_mpi,
}


@pytest.fixture
def over() -> Event:
    """Set by a rank, thread or process, when another one may leave."""
    return multiprocessing.get_context("fork").Event()


@pytest.fixture(params=["inprocess", "rendezvous", "gloo", "shared", "mixed", "channels", "mpi"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., list[Any]]:
    """``run(world_size, program, groups)``: the program on every rank of each transport."""

    def run(world_size: int, program: Program, groups: Sequence[tuple[int, ...]] = ()) -> list[Any]:
        if request.param in PROCESSES:
            store = tmp_path / f"store-{len(list(tmp_path.iterdir()))}"
            return run_in_processes(world_size, program, groups, store, PROCESSES[request.param])
        hub = Hub(world_size, groups, rendezvous=request.param == "rendezvous")
        return run_in_threads(world_size, program, hub)

    return run
