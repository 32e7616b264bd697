"""Sparse operators and halos on the GPU: beside the reference on the processor in float64, and beside the roofline.

What two ranks of one card exchange, through the runtime's own transports.

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
from typing import Any

import torch
from torch import Tensor

from benchmarks import sparse_gpu
from benchmarks.first_gpu.frame import Bench, Parts
from benchmarks.report import Row, at_most
from benchmarks.transport.__main__ import size_name
from benchmarks.transport.items import KIB, MIB, tensor
from cuda_ops import core_of
from cuda_ops._torch import FileStore
from cuda_ops.sparse import reference
from cuda_ops.sparse.dispatch import chosen, implementation
from profiler.measure.child_process import Child, Report
from runtime.transport import MessageKey, Transport, open_named

CHANNELS = 64
SMALL_CHANNELS = 16
SMALL_VOXELS = 2000
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 4e-3}
"""Norm of the difference over the norm: float32 summed over 100,000 rows, one rounding to bfloat16."""


def kernels(bench: Bench) -> Parts:
    """Every operator in two dtypes, then shares of the roofline; the processor has no operators in bfloat16."""
    dtypes = [torch.float32] if bench.rehearses else list(TOLERANCES)
    parts = {f"against the reference, {_name(dtype)}": partial(errors, bench, dtype) for dtype in dtypes}
    return {**parts, "roofline": partial(sparse_gpu.measure, quick=True)}


def errors(bench: Bench, dtype: torch.dtype) -> Iterator[Row]:
    """How far each operator's results are from the reference's; whole numbers must be the same."""
    used = chosen(bench.device)
    yield Row(f"operators of {used}, {_name(dtype)}", 1.0, "used", "not torch", used != "torch")
    for operator, what, arguments in _calls(bench, dtype):
        there = [value.to(bench.device) if isinstance(value, Tensor) else value for value in arguments]
        exact = [_exact(value) for value in arguments]
        results, wanted = (
            result if isinstance(result, tuple) else (result,)
            for result in (implementation(operator, bench.device)(*there), getattr(reference, operator)(*exact))
        )
        error = max(_error(one.cpu(), other) for one, other in zip(results, wanted, strict=True))
        yield at_most(f"{what}, {_name(dtype)}: error", error, "of the norm", TOLERANCES[dtype])


def _calls(bench: Bench, dtype: torch.dtype) -> Iterator[tuple[str, str, tuple[Any, ...]]]:
    """Operator, what it is, and its arguments on the processor."""
    at = sparse_gpu.cloud(SMALL_VOXELS if bench.rehearses else sparse_gpu.VOXELS, "cpu")
    channels = SMALL_CHANNELS if bench.rehearses else CHANNELS
    draw = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(at.num_rows, channels, generator=draw).to(dtype) for _ in range(2))
    weight = (torch.randn(27, channels, channels, generator=draw) / (27 * channels) ** 0.5).to(dtype)
    reverse = reference.reversed_map(at.neighbours, at.num_rows)
    starts = torch.arange(0, at.num_rows, at.num_rows // 4)[:4]
    lengths = torch.full_like(starts, at.num_rows // 4)
    index = torch.randperm(at.num_rows, generator=draw)[: at.num_rows // 10]
    cube = sparse_gpu.CUBE
    one = sparse_gpu.ONE
    yield "kernel_map", "kernel map", (at.keys, at.keys, cube, one, one, False)
    yield "reversed_map", "reversed map", (at.neighbours, at.num_rows)
    yield "sparse_conv", "convolution, forward", (x, weight, at.neighbours, reverse)
    yield "sparse_conv", "convolution, input gradient", (dy, weight.transpose(1, 2), reverse, at.neighbours)
    yield "sparse_conv_weight", "convolution, weight gradient", (x, dy, at.neighbours)
    yield "sparse_max_pool", "maximum pooling", (x, at.neighbours, reverse)
    yield "sparse_sum_pool", "sum pooling", (x, at.neighbours, reverse)
    yield "segment_sum", "sum of 4 samples", (x, starts, lengths)
    yield "segment_max", "maximum of 4 samples", (x, starts, lengths)
    yield "pack_rows", "rows of a halo packed", (x, index)
    yield "unpack_add", "rows of a halo added", (x, index, dy[: len(index)])


def _exact(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _error(result: Tensor, wanted: Tensor) -> float:
    """Norm of the difference over the norm of what is wanted; of whole numbers the share that differs."""
    if not wanted.is_floating_point():
        return float((result != wanted).double().mean())
    return float((result.double() - wanted).norm() / wanted.norm())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


TRANSPORTS = ("shared", "gloo")
SIZES = (KIB, 32 * KIB, MIB, 16 * MIB, 64 * MIB)
FEW_SIZES = (KIB, MIB)
REPETITIONS = 10
WARM_UP = 3
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
    rank = transport.rank
    peer = 1 - transport.rank
    mine, theirs = (MessageKey(number, "F", *ends, x.nbytes % 1021) for ends in ((rank, peer), (peer, rank)))
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
