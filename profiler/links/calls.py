"""What a rank computes around an exchange, beside its message: without a peer, as what comes is there at once.

    normalisation    a batch norm with shared statistics less torch's own (``runtime.stage.batch_norm``): moments, what
                     ranks tell each other put together, a function of autograd
    pieces           halos, changes of layout (``runtime.spatial.exchange``): packing, unpacking, a function of autograd

Each is timed forward and backward, by processor time; a table says the mean of the two.  It is of one rank, as a
collective over a group of one.  Tensors are small, so that passes over the layer's own data are hardly in it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import batch_norm

from planner.ir.box import Interval, Transfer
from planner.ir.cluster import NORMALISATION, PIECES, Collective
from profiler.measure.child_process import Child, Report
from runtime.spatial.exchange import PeerGroup, redistribute
from runtime.stage.batch_norm import synchronised_batch_norm
from runtime.transport import Transport
from runtime.transport.small_allgather import Told

SILENCE_S = 60.0
_CHANNELS = (16, 128, 1024)
_WIDTHS = (16, 256, 4096)
_ROWS = 4
_NUM_RUNS = 10
_ELEMENT_BYTES, _STATISTIC_BYTES = 4, 8


def exchange_calls(link: str) -> tuple[Collective, ...]:
    """Seconds of the calls by the bytes of their messages, as collectives over one rank of the tier ``link``."""
    norms = tuple((2 * (1 + 2 * channels) * _STATISTIC_BYTES, _norm_s(channels)) for channels in _CHANNELS)
    pieces = tuple((_CHANNELS[0] * width * _ELEMENT_BYTES, _pieces_s(width)) for width in _WIDTHS)
    return tuple(
        Collective(operation, 1, link, points) for operation, points in ((NORMALISATION, norms), (PIECES, pieces))
    )


def measure_calls(link: str, core: int | Collection[int] | None) -> tuple[Collective, ...]:
    """:func:`exchange_calls` in a process of its own, as ranks are.

    Raises:
        WorkerError: it died or took too long.
    """
    with Child("profiler.links.calls:_calls", link, core=core) as child:
        found: tuple[Collective, ...] = child.result(SILENCE_S)
        return found


def _calls(_: Report, link: str) -> tuple[Collective, ...]:
    return exchange_calls(link)


def _norm_s(channels: int) -> float:
    x = torch.randn(2, channels, 2, 2, requires_grad=True)
    weight, bias = (torch.ones(channels, requires_grad=True) for _ in range(2))
    mean, variance = torch.zeros(channels), torch.ones(channels)
    row = torch.cat([torch.full((1,), x.numel() / channels), mean, variance]).double()
    forward, backward = Told(row.expand(2, -1).clone()), Told(torch.zeros(2, 2 * channels))

    def tell(parts: Sequence[Tensor], dtype: torch.dtype) -> Told:
        return forward if dtype == torch.float64 else backward

    def shared() -> Tensor:
        return synchronised_batch_norm(x, weight, bias, mean, variance, 0.1, 1e-5, tell)

    return _call_s(shared, lambda: batch_norm(x, mean, variance, weight, bias, True, 0.1, 1e-5))


def _pieces_s(width: int) -> float:
    x = torch.randn(1, _CHANNELS[0], _ROWS, width, requires_grad=True)
    others = Interval(0, 1), Interval(0, _CHANNELS[0])

    def rows(start: int, stop: int) -> tuple[Interval, ...]:
        return (*others, Interval(start, stop), Interval(0, width))

    halos = Transfer(1, 0, rows(_ROWS, _ROWS + 1)), Transfer(0, 1, rows(_ROWS - 1, _ROWS))
    held = rows(0, _ROWS), rows(_ROWS, 2 * _ROWS)
    wanted = rows(0, _ROWS + 1), rows(_ROWS - 1, 2 * _ROWS)
    exchange = PeerGroup(cast("Transport", _Alone()), (0, 1), 0.0).exchange(held, wanted, halos)
    return _call_s(lambda: redistribute(x, exchange), lambda: x.view_as(x))


def _call_s(call: Callable[[], Tensor], instead: Callable[[], Tensor]) -> float:
    """By how much ``call`` takes longer than ``instead``: the mean of forward and backward; at least 1 us."""
    longer = [_passes_s(call) - _passes_s(instead) for _ in range(_NUM_RUNS + 2)][2:]
    return float(f"{max(1e-6, statistics.median(longer) / 2):.4g}")


def _passes_s(call: Callable[[], Tensor]) -> float:
    start_s = time.thread_time()
    y = call()
    middle_s = time.thread_time()
    gradient = torch.ones_like(y)
    again_s = time.thread_time()
    torch.autograd.backward([y], [gradient])
    return middle_s - start_s + time.thread_time() - again_s


class _Alone:
    """A transport whose peer has sent everything already."""

    rank = 0

    def start_exchange(self, *_: object) -> _Alone:
        """See :class:`Transport`."""
        return self

    def wait(self) -> None:
        """See :class:`runtime.transport.Pending`."""
