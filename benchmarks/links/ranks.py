"""One rank of the links' benchmark (``python -m benchmarks.links.ranks TASK RANK``).

Measures tables, or checks them.
"""

from __future__ import annotations

import pickle
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from cuda_ops import core_of, prepare_process
from profiler.links.messages import Effort

_LIMIT_S = 300.0
_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Task:
    """What the ranks do.  Rank 0 writes ``answer``.

    :class:`profiler.links.cpu.LinkCosts`, or seconds by what and bytes.

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
    answer: Path
    effort: Effort | None = None
    sizes: tuple[int, ...] = ()
    sums: tuple[int, ...] = ()
    incast_bytes: int = 0


def main(arguments: list[str]) -> int:
    """Be one rank."""
    task: Task = pickle.loads(Path(arguments[0]).read_bytes())
    rank = int(arguments[1])
    prepare_process(core_of(rank))
    import torch.distributed as dist

    store = dist.TCPStore(task.address, task.port, is_master=rank == 0, wait_for_workers=False)
    limit = timedelta(seconds=_LIMIT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=len(task.hosts), timeout=limit)
    found: object
    if task.effort is not None:
        from profiler.links.cpu import measure_together

        found = measure_together(store, task.hosts, task.effort, lambda _: None)
    else:
        found = _checked(task, rank)
    if rank == 0:
        task.answer.write_bytes(pickle.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
    return 0


def _checked(task: Task, rank: int) -> dict[tuple[str, int], float]:
    """Seconds by what was done and its bytes: the least of the medians of a few rounds."""
    import torch
    import torch.distributed as dist

    from profiler.links.messages import PeerLink, there_and_back_s

    found: dict[tuple[str, int], float] = {}

    def noted(what: str, size: int, action: Callable[[], float]) -> None:
        first_s = action()
        word = torch.tensor([first_s], dtype=torch.float64)
        dist.broadcast(word, 0)
        repeats = max(1, min(15, round(0.1 / max(1e-6, float(word)))))
        seconds = statistics.median([action() for _ in range(repeats)] + ([first_s] if repeats < 3 else []))
        found[what, size] = min(found.get((what, size), seconds), seconds)

    world = dist.group.WORLD
    if world is None:
        raise ValueError("there is no process group")
    wire = PeerLink(world, 1 - rank, rank == 0) if rank < 2 else None
    for _ in range(_ROUNDS):
        for size in task.sizes:
            noted("message", size, lambda n=size: there_and_back_s(wire, n, n)[0] / 2 if wire else 0.0)
        for size in task.sums:
            tensor = torch.zeros(size // 4)
            noted("sum", size, lambda t=tensor: _timed(lambda: dist.all_reduce(t)))
        for senders in range(1, len(task.hosts)) if task.incast_bytes else ():
            noted(
                f"incast {senders}", task.incast_bytes, lambda k=senders: _incast_s(world, rank, k, task.incast_bytes)
            )
    return found


def _timed(action: Callable[[], object]) -> float:
    import torch.distributed as dist

    dist.barrier()
    start_s = time.perf_counter()
    action()
    return time.perf_counter() - start_s


def _incast_s(world: object, rank: int, senders: int, num_bytes: int) -> float:
    """Seconds until rank 0 has what so many ranks sent it at once."""
    import torch.distributed as dist

    from profiler.links.messages import PeerLink, wait

    wires = [PeerLink(world, other, False) for other in range(1, senders + 1)] if rank == 0 else []  # type: ignore[arg-type]
    coming = [work for wire in wires for work in wire.post(num_bytes)]
    going = PeerLink(world, 0, True) if 0 < rank <= senders else None  # type: ignore[arg-type]
    dist.barrier()
    start_s = time.perf_counter()
    wait(going.send(num_bytes) if going is not None else coming)
    return time.perf_counter() - start_s


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
