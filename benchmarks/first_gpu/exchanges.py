"""What two ranks of one card exchange, through the runtime's own transports.

NCCL refuses two ranks of one device, so tensors go by way of the host: through its shared memory or over gloo, as in
the runs of ``plans``.  A copy from the card and one to it are in every figure.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from benchmarks.first_gpu.frame import Bench, Parts
from benchmarks.report import Row
from benchmarks.transport.__main__ import size_name
from benchmarks.transport.items import KIB, MIB, tensor
from cuda_ops import core_of
from cuda_ops._torch import FileStore
from profiler.measure.child_process import Child, Report
from runtime.transport import Key, Transport, open_named

TRANSPORTS = ("shared", "gloo")
SIZES, FEW_SIZES = (KIB, 32 * KIB, MIB, 16 * MIB, 64 * MIB), (KIB, MIB)
REPETITIONS, WARM_UP = 10, 3
_LIMIT_S = 120.0
_RANKS = (0, 1)


def exchanges(bench: Bench) -> Parts:
    """By transport."""
    return {name: partial(_over, bench, name) for name in TRANSPORTS}


def _over(bench: Bench, name: str) -> Iterator[Row]:
    sizes = FEW_SIZES if bench.rehearses else SIZES
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        store = str(Path(folder) / "store")
        ranks = [
            stack.enter_context(
                Child(f"{__name__}:measure", rank, name, store, bench.device, sizes, core=core_of(rank))
            )
            for rank in _RANKS
        ]
        seconds_of = ranks[0].result(_LIMIT_S)
    for (what, size), seconds in seconds_of.items():
        yield Row(f"{what} of {size_name(size)}: {name}", 1e6 * seconds, "us")


def measure(
    report: Report, rank: int, name: str, store: str, device: str, sizes: tuple[int, ...]
) -> dict[tuple[str, int], float]:
    """One rank's part, in a process of its own: median seconds by what is done and bytes."""
    transport = open_named(name, rank, FileStore(store, len(_RANKS)), _LIMIT_S, [_RANKS], ["n0"] * len(_RANKS))
    deeds = {"message, half of there and back": _echo, "exchange": _exchange, "sum": _sum}
    seconds = {}
    for size in sizes:
        x = tensor(size).to(device)
        for what, deed in deeds.items():
            seconds[what, size] = _median_s(transport, deed, x)
    transport.barrier()
    transport.close()
    return seconds


def _median_s(transport: Transport, deed: Callable[[Transport, torch.Tensor, int], float], x: torch.Tensor) -> float:
    """``deed`` gives the share of the time that counts."""
    seconds = []
    for number in range(WARM_UP + REPETITIONS):
        _wait(x)
        transport.barrier()
        start_s = time.perf_counter()
        share = deed(transport, x, number)
        _wait(x)
        seconds.append(share * (time.perf_counter() - start_s))
        transport.flush()
    return statistics.median(seconds[WARM_UP:])


def _echo(transport: Transport, x: torch.Tensor, number: int) -> float:
    """Rank 1 sends back what it has received, from the device."""
    rank, peer = transport.rank, 1 - transport.rank
    mine, theirs = (Key(number, "F", *ends, x.nbytes % 1021) for ends in ((rank, peer), (peer, rank)))
    transport.post_receive(theirs, peer, [(tuple(x.shape), x.dtype)])
    if rank == 0:
        transport.send(mine, peer, [x])
    (got,) = transport.receive(theirs, peer)
    got = got.to(x.device)
    if rank == 1:
        transport.send(mine, peer, [got])
    return 0.5


def _exchange(transport: Transport, x: torch.Tensor, number: int) -> float:
    """Both ways at once, as halos go."""
    peer = 1 - transport.rank
    transport.start_exchange({peer: x}, {peer: torch.empty_like(x)}).wait()
    return 1.0


def _sum(transport: Transport, x: torch.Tensor, number: int) -> float:
    transport.all_reduce(x, _RANKS)
    return 1.0


def _wait(x: torch.Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
