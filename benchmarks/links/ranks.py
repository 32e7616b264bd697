"""One rank of the links' benchmark: measures tables, or checks them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from cuda_ops import core_of, prepare_process
from profiler.links.cpu import measure_together, opened
from profiler.links.messages import LinkEffort, PeerLink, there_and_back_s
from runtime.transport import Transport

_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Task:
    """What the ranks do: give :class:`profiler.links.cpu.LinkCosts`, or seconds by what and bytes.

    Attributes:
        hosts: by rank.
        effort: to measure the tables with; None: check them.
        sizes: of messages from rank 0 to rank 1.
        sums: bytes of all-reduces over all ranks.
        incast_bytes: of the messages that ranks 1, 2, ... send to rank 0 at once; 0: none.
    """

    hosts: tuple[str, ...]
    address: str
    port: int
    effort: LinkEffort | None = None
    sizes: tuple[int, ...] = ()
    sums: tuple[int, ...] = ()
    incast_bytes: int = 0


def part_of(rank: int, task: Task) -> object:
    """What a rank finds; rank 0's counts."""
    prepare_process(core_of(rank))
    store = dist.TCPStore(task.address, task.port, is_master=rank == 0, wait_for_workers=False)
    transport = opened("", rank, store, task.hosts)
    if task.effort is not None:
        found: object = measure_together(transport, store, task.hosts, task.effort, lambda _: None)
    else:
        found = _checked(task, transport)
    transport.barrier()
    transport.close()
    return found


def _checked(task: Task, transport: Transport) -> dict[tuple[str, int], float]:
    """Seconds by what was done and its bytes: the least of the medians of a few rounds."""
    found: dict[tuple[str, int], float] = {}
    rank, everybody = transport.rank, tuple(range(transport.world_size))

    def noted(what: str, size: int, action: Callable[[], float]) -> None:
        first_s = action()
        word = torch.tensor([first_s if rank == 0 else 0.0], dtype=torch.float64)
        transport.all_reduce(word, everybody)
        repeats = max(1, min(15, round(0.1 / max(1e-6, float(word)))))
        seconds = statistics.median([action() for _ in range(repeats)] + ([first_s] if repeats < 3 else []))
        found[what, size] = min(found.get((what, size), seconds), seconds)

    wires = [PeerLink(transport, other, rank == 0) for other in range(len(everybody))]
    wire = wires[1 - rank] if rank < 2 else None
    for _ in range(_ROUNDS):
        for size in task.sizes:
            noted("message", size, lambda n=size: there_and_back_s(wire, n, n)[0] / 2 if wire else 0.0)
        for size in task.sums:
            tensor = torch.zeros(size // 4)
            noted("sum", size, lambda t=tensor: _sum_s(transport, t, everybody))
        for senders in range(1, len(task.hosts)) if task.incast_bytes else ():
            noted(
                f"incast {senders}", task.incast_bytes, lambda k=senders: _incast_s(wires, rank, k, task.incast_bytes)
            )
    return found


def _sum_s(transport: Transport, tensor: torch.Tensor, ranks: tuple[int, ...]) -> float:
    transport.barrier()
    start_s = time.perf_counter()
    transport.all_reduce(tensor, ranks)
    return time.perf_counter() - start_s


def _incast_s(wires: Sequence[PeerLink], rank: int, senders: int, num_bytes: int) -> float:
    """Seconds until rank 0 has what so many ranks sent it at once."""
    transport, others = wires[0].transport, wires[1 : senders + 1]
    coming = [(wire, wire.post(num_bytes)) for wire in others] if rank == 0 else []
    transport.barrier()
    start_s = time.perf_counter()
    if 0 < rank <= senders:
        wires[0].send(num_bytes)
        transport.flush()
    for wire, key in coming:
        wire.take(key)
    return time.perf_counter() - start_s
