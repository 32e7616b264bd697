"""What a rank computes around an exchange, beside its message: without a peer, as what comes is there at once.

    normalisation    a batch norm with shared statistics less torch's own (``runtime.stage.batch_norm``): moments, what
                     ranks tell each other put together, a function of autograd
    pieces           halos, changes of layout (``runtime.spatial.exchange``): packing, unpacking, a function of autograd
    sites            a sparse convolution with a halo less the same pairs in one call (``runtime.sparse.halo``): own
                     rows and those of others apart, packing, a function of autograd
    partial sums     a small sum of which each rank has a part (``runtime.spatial.collectives``), such as a pool's
    gradient sums    a bucket of gradients (``runtime.optim.gradient_buckets``): hooks on its parameters, gradients put
                     together

Each is timed by processor time; where there are two passes, a table says the mean of forward and backward.  It is of
one rank, as a collective over a group of one.  Tensors are small, so that passes over the layer's own data are hardly
in it; but of gradient sums, where copying them is what takes.

In a step layers come before and after, whose data has taken the place of an exchange's own code and data in the core's
caches: repeated alone, exchanges are told too short.  So each is timed behind a :class:`Burst`, as are sums of
statistics between ranks (:mod:`profiler.links.cpu`).
"""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm, conv2d, relu

from cuda_ops.sparse import operators
from cuda_ops.sparse.geometry import MapSpec, geometry_of
from cuda_ops.sparse.local import Owned, local_map
from planner.ir.box import Interval, Transfer
from planner.ir.cluster import GRADIENT_SUMS, NORMALISATION, PARTIAL_SUMS, PIECES, SITES, Collective
from profiler.links.messages import LinkPoints
from profiler.measure.child_process import Report
from runtime.optim.gradient_buckets import GradientBuckets
from runtime.sparse.halo import shared_conv
from runtime.spatial.collectives import rows_of, summed
from runtime.spatial.exchange import PeerGroup, redistribute
from runtime.spatial.layer_shard import LayerShard
from runtime.stage.batch_norm import synchronised_batch_norm
from runtime.transport import Transport
from runtime.transport.small_allgather import PendingRows

_CHANNELS = (16, 128, 1024)
_WIDTHS = (16, 256, 4096)
_EDGES = (4, 8, 16)
_SUMMED = (256, 16384)
_BUCKETS = (1 << 16, 1 << 19, 1 << 22)
_PARAMETERS = 12
_ROWS = 4
_NUM_RUNS = 10
_ELEMENT_BYTES = 4
_STATISTIC_BYTES = 8

_BURST_S = 0.0015  # about what a layer takes
_BURST_TENSORS = 12
_BURST_SHAPE = (4, 64, 16, 16)
_BURST_KERNEL = (64, 64, 3, 3)


class Burst:
    """A fixed number of convolutions, about 1.5 ms of them, over 5 MiB by turns: more than a core's own caches hold.

    Args:
        runs: how often each call is timed behind it; 0: as often as in a full profile.

    Attributes:
        number: of convolutions; ranks that meet have to take the same.
    """

    def __init__(self, runs: int = 0) -> None:
        self.runs = runs or _NUM_RUNS
        self._inputs = [torch.randn(_BURST_SHAPE) for _ in range(_BURST_TENSORS)]
        self._weights = [torch.randn(_BURST_KERNEL) for _ in range(_BURST_TENSORS)]
        self._next = 0
        self.number = _BURST_TENSORS
        each_s = min(self() for _ in range(3)) / self.number
        self.number = max(1, round(_BURST_S / each_s))

    @torch.no_grad()
    def __call__(self) -> float:
        """Processor seconds of it."""
        start_s = time.thread_time()
        for _ in range(self.number):
            self._next = (self._next + 1) % _BURST_TENSORS
            relu(conv2d(self._inputs[self._next], self._weights[self._next], padding=1))
        return time.thread_time() - start_s


def exchange_calls(link: str, sites: bool = False, runs: int = 0) -> tuple[Collective, ...]:
    """Seconds of the calls by the bytes of their messages, as collectives over one rank of the tier ``link``.

    Args:
        sites: whether those over shared sites are wanted as well, which sparse networks have.
        runs: as of :class:`Burst`.
    """
    return tuple(Collective(operation, 1, link, points) for operation, points in _measured(sites, Burst(runs)))


def report_calls(_: Report, link: str, sites: bool) -> tuple[Collective, ...]:
    """:func:`exchange_calls`, in a process of its own, as ranks are."""
    return exchange_calls(link, sites)


def _measured(sites: bool, burst: Burst) -> Iterator[tuple[str, LinkPoints]]:
    yield (
        NORMALISATION,
        tuple((2 * (1 + 2 * channels) * _STATISTIC_BYTES, _norm_s(channels, burst)) for channels in _CHANNELS),
    )
    yield PIECES, tuple((_CHANNELS[0] * width * _ELEMENT_BYTES, _pieces_s(width, burst)) for width in _WIDTHS)
    if sites:
        yield SITES, tuple((_CHANNELS[0] * edge**2 * _ELEMENT_BYTES, _sites_s(edge, burst)) for edge in _EDGES)
    yield PARTIAL_SUMS, tuple((size * _ELEMENT_BYTES, _partial_sums_s(size, burst)) for size in _SUMMED)
    yield GRADIENT_SUMS, tuple((size, _gradient_sums_s(size, burst)) for size in _BUCKETS)


def _norm_s(channels: int, burst: Burst) -> float:
    x = torch.randn(2, channels, 2, 2, requires_grad=True)
    weight, bias = (torch.ones(channels, requires_grad=True) for _ in range(2))
    mean = torch.zeros(channels)
    variance = torch.ones(channels)
    row = torch.cat([torch.full((1,), x.numel() / channels), mean, variance]).double()
    forward = PendingRows(row.expand(2, -1).clone())
    backward = PendingRows(torch.zeros(2, 2 * channels))

    def tell(parts: Sequence[Tensor], dtype: torch.dtype) -> PendingRows:
        return forward if dtype == torch.float64 else backward

    def shared() -> Tensor:
        return synchronised_batch_norm(x, weight, bias, mean, variance, 0.1, 1e-5, tell)

    return _call_s(shared, lambda: batch_norm(x, mean, variance, weight, bias, True, 0.1, 1e-5), burst)


def _pieces_s(width: int, burst: Burst) -> float:
    x = torch.randn(1, _CHANNELS[0], _ROWS, width, requires_grad=True)
    others = Interval(0, 1), Interval(0, _CHANNELS[0])

    def rows(start: int, stop: int) -> tuple[Interval, ...]:
        return (*others, Interval(start, stop), Interval(0, width))

    halos = Transfer(1, 0, rows(_ROWS, _ROWS + 1)), Transfer(0, 1, rows(_ROWS - 1, _ROWS))
    held = rows(0, _ROWS), rows(_ROWS, 2 * _ROWS)
    wanted = rows(0, _ROWS + 1), rows(_ROWS - 1, 2 * _ROWS)
    exchange = _alone().exchange(held, wanted, halos)
    return _call_s(lambda: redistribute(x, exchange), lambda: x.view_as(x), burst)


def _sites_s(edge: int, burst: Burst) -> float:
    """Of a cube of sites cut in two, of which this rank has the half below; a face of it is the halo."""
    axis = torch.arange(edge, dtype=torch.int32)
    cube = torch.cartesian_prod(torch.zeros(1, dtype=torch.int32), axis, axis, axis)
    geometry, _ = geometry_of(cube)
    below = Owned.by((geometry.coordinates(())[:, 1] >= edge // 2).to(torch.int16), 0)
    local = local_map(geometry.map(MapSpec((), (), (3, 3, 3))), below, below).split()
    x = torch.randn(local.num_own, _CHANNELS[0], requires_grad=True)
    halo = torch.zeros(local.halo.num_received, _CHANNELS[0])
    weight = torch.randn(27, _CHANNELS[0], _CHANNELS[0], requires_grad=True)
    wire = _alone()
    return _call_s(
        lambda: shared_conv(x, weight, local, wire),
        lambda: operators.sparse_conv(torch.cat([x, halo]), weight, local.neighbours, local.reverse),
        burst,
    )


def _partial_sums_s(size: int, burst: Burst) -> float:
    x = torch.randn(size, requires_grad=True)
    table = PendingRows(torch.zeros(2, size))
    step = cast("LayerShard", SimpleNamespace(memo={inspect.unwrap(rows_of): lambda parts, dtype: table}, later=None))
    return _call_s(lambda: summed(step, x), lambda: x.view_as(x), burst)


def _gradient_sums_s(num_bytes: int, burst: Burst) -> float:
    """Of one of two buckets, which is summed while the backward goes on."""
    size = num_bytes // (_PARAMETERS * _ELEMENT_BYTES)
    parameters = [nn.Parameter(torch.randn(size)) for _ in range(2 * _PARAMETERS)]
    gradients = [torch.ones(size) for _ in parameters]
    buckets = GradientBuckets(parameters, lambda flat: _Alone(), num_bytes)

    def backward(is_summed: bool) -> float:
        outputs = [parameter.view(-1) for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        burst()
        start_s = time.thread_time()
        if is_summed:
            buckets.arm()
        torch.autograd.backward(outputs, gradients)
        if is_summed:
            buckets.reduce()
        return time.thread_time() - start_s

    return _median_s(lambda: backward(True) - backward(False), burst.runs) / len(buckets.buckets)


def _call_s(call: Callable[[], Tensor], instead: Callable[[], Tensor], burst: Burst) -> float:
    """By how much ``call`` takes longer than ``instead``: the mean of forward and backward; at least 1 us."""
    return _median_s(lambda: (_passes_s(call, burst) - _passes_s(instead, burst)) / 2, burst.runs)


def _median_s(longer_s: Callable[[], float], runs: int) -> float:
    """Of several, but for the first two; at least 1 us."""
    longer_by_s = [longer_s() for _ in range(runs + 2)][2:]
    return float(f"{max(1e-6, statistics.median(longer_by_s)):.4g}")


def _passes_s(call: Callable[[], Tensor], burst: Burst) -> float:
    burst()
    start_s = time.thread_time()
    y = call()
    middle_s = time.thread_time()
    gradient = torch.ones_like(y)
    burst()
    again_s = time.thread_time()
    torch.autograd.backward([y], [gradient])
    return middle_s - start_s + time.thread_time() - again_s


def _alone() -> PeerGroup:
    return PeerGroup(cast("Transport", _Alone()), (0, 1))


class _Alone:
    """A transport whose peer has sent everything already."""

    rank = 0

    def start_exchange(self, sent: object, received: dict[int, Tensor], *_: object) -> _Alone:
        """See :class:`Transport`; zeros, as numbers next to 0 would take a processor longer."""
        for tensor in received.values():
            tensor.zero_()
        return self

    def wait(self) -> None:
        """See :class:`runtime.transport.Pending`."""
