"""What the ranks of one side do in a turn, and the times that each notes.

All functions take the rank's :class:`~benchmarks.transport.sides.Place` first.  Stretches are (start, stop) on the
clock that all processes of a machine share: what ranks do together lasts from the first start to the last stop.
"""

from __future__ import annotations

import functools
import statistics
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from benchmarks.transport.sides import Place
from runtime.transport import Key, Pending

WARM_UP = 3
Stretch = tuple[float, float]

KIB, MIB = 1 << 10, 1 << 20


def tensor(num_bytes: int) -> torch.Tensor:
    """Of one dim, zeros."""
    return torch.zeros(num_bytes // 4)


@functools.cache
def _convolution() -> Callable[[], object]:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=generator) for shape in ((1, 32, 28, 28), (32, 32, 3, 3)))
    return lambda: torch.conv2d(x, weight, padding=1)


@functools.cache
def _checksum() -> Callable[[], object]:
    text = bytes(range(256)) * 32
    return lambda: [zlib.crc32(text) for _ in range(8)]


WORK = {"convolution": _convolution, "checksum": _checksum}
"""Units of computation: one of half a megabyte of weights and activations, and one that stays in the first cache."""


def compute(kind: str, calls: int) -> None:
    """So many units of work."""
    unit = WORK[kind]()
    with torch.no_grad():
        for _ in range(calls):
            unit()


def calls_for(place: Place, kind: str, seconds: float) -> int:
    """So many units take ``seconds`` of processor time, on rank 0."""
    if place.rank:
        return 0
    times = []
    for _ in range(10):
        started_s = time.thread_time()
        compute(kind, 10)
        times.append(time.thread_time() - started_s)
    return max(1, round(10 * seconds / statistics.median(times)))


def copies(place: Place, num_bytes: int, count: int) -> list[float]:
    """Seconds of a copy into a fixed tensor, on rank 0."""
    if place.rank:
        return []
    source, fixed = tensor(num_bytes), tensor(num_bytes)
    times = []
    for _ in range(WARM_UP + count):
        started_s = time.perf_counter()
        fixed.copy_(source)
        times.append(time.perf_counter() - started_s)
    return times[WARM_UP:]


def echoes(place: Place, num_bytes: int, count: int) -> list[float]:
    """Seconds of a message, half of there and back; what goes back is what was received, so each message is read."""
    transport, peer = place.transport, place.peer
    x, times = tensor(num_bytes), []
    specs = [(tuple(x.shape), x.dtype)]
    steps = [next(place.numbers) for _ in range(WARM_UP + count)]
    there, back = ([Key(step, kind, *ends, 0) for step in steps] for kind, ends in (("F", (0, 1)), ("B", (1, 0))))
    going, coming = (there, back) if place.rank == 0 else (back, there)
    transport.post_receive(coming[0], peer, specs)
    place.start.meet()
    started_s = time.perf_counter()
    for number, key in enumerate(going):
        if place.rank == 0:
            transport.send(key, peer, [x])
        (x,) = transport.receive(coming[number], peer)
        for following in coming[number + 1 : number + 2]:
            transport.post_receive(following, peer, specs)
        if place.rank == 1:
            transport.send(key, peer, [x])
        times.append((time.perf_counter() - started_s) / 2)
        started_s = time.perf_counter()
    transport.flush()
    return times[WARM_UP:]


def pairs(place: Place, num_bytes: int, joined: int, count: int) -> list[float]:
    """Seconds of two tensors to one rank, in two messages or ``joined`` in one: half of there and back, on rank 0."""
    transport, peer, times = place.transport, place.peer, []
    tensors = [tensor(num_bytes) for _ in range(2)]
    parcels = [tensors] if joined else [[each] for each in tensors]
    for _ in range(WARM_UP + count):
        step = next(place.numbers)
        mine, theirs = (
            [Key(step, "F", rank, 2 + stage, 0) for stage in range(len(parcels))] for rank in (place.rank, peer)
        )
        for key, parcel in zip(theirs, parcels, strict=True):
            transport.post_receive(key, peer, [(tuple(each.shape), each.dtype) for each in parcel])
        place.start.meet()
        started_s = time.perf_counter()
        for sends in (place.rank == 0, place.rank == 1):
            for number, parcel in enumerate(parcels):
                if sends:
                    transport.send(mine[number], peer, parcel)
                else:
                    transport.receive(theirs[number], peer)
        times.append((time.perf_counter() - started_s) / 2)
        transport.flush()
    return times[WARM_UP:] if place.rank == 0 else []


HALOS = {"row": (2, 256, 64, 1), "column": (2, 64, 112, 1)}
"""Shapes of halos: rows of 64 numbers and columns of one, cut out of tensors 56 times as large."""


def halos(place: Place, what: str, copies_first: int, count: int) -> list[float]:
    """Seconds of an exchange of halos that are cut out of tensors, as they lie or copied before, on this rank."""
    samples, channels, length, _ = HALOS[what]
    x = torch.randn((samples, channels, 56, length) if what == "row" else (samples, channels, length, 56))
    key, times = next(place.numbers), []
    for _ in range(WARM_UP + count):
        place.start.meet()
        started_s = time.perf_counter()
        cut = x[:, :, :1] if what == "row" else x[:, :, :, :1]
        came = torch.empty(cut.shape)
        sent = cut.contiguous() if copies_first else cut
        place.transport.start_exchange({place.peer: sent}, {place.peer: came}, key).wait()
        times.append(time.perf_counter() - started_s)
    place.transport.flush()
    return times[WARM_UP:]


def behind(place: Place, what: str, num_bytes: int, calls: int, count: int) -> list[Stretch]:
    """``what`` of :class:`Starting`, waited for at once, after so many convolutions (0: none) on every rank."""
    start, times = Starting(place, what, num_bytes), []
    for _ in range(WARM_UP + count):
        place.start.meet()
        compute("convolution", calls)
        started_s = time.perf_counter()
        pending = start()
        if pending is not None:
            pending.wait()
        times.append((started_s, time.perf_counter()))
    place.transport.flush()
    return times[WARM_UP:]


def stream(place: Place, num_bytes: int, window: int, windows: int) -> list[float]:
    """Mean seconds of a message of a stream from rank 0; rank 1 reads each once, and tells of every window.

    Args:
        window: messages of which one tells; at most two windows are on their way.
    """
    transport, peer, sends = place.transport, place.peer, place.rank == 0
    x, word = tensor(num_bytes), tensor(KIB)
    specs, words = ([(tuple(each.shape), each.dtype)] for each in (x, word))
    first = next(place.numbers)

    def key(number: int) -> Key:
        return Key(first, "F", 0, 1, number)

    def told(number: int) -> Key:
        return Key(first, "B", 1, 0, number)

    for number in range(windows if sends else 2 * window):
        transport.post_receive(told(number) if sends else key(number), peer, words if sends else specs)
    place.start.meet()
    started_s = time.perf_counter()
    for number in range(window * windows):
        at, of_window = divmod(number, window)
        if sends:
            if of_window == 0 and at >= 2:
                transport.receive(told(at - 2), peer)
            transport.send(key(number), peer, [x])
        else:
            (came,) = transport.receive(key(number), peer)
            came.sum()
            del came
            if number + 2 * window < window * windows:
                transport.post_receive(key(number + 2 * window), peer, specs)
            if of_window == window - 1:
                transport.send(told(at), peer, [word])
    if sends:
        for at in range(windows - 2, windows):
            transport.receive(told(at), peer)
    seconds = (time.perf_counter() - started_s) / (window * windows)
    transport.flush()
    return [seconds]


class Starting:
    """Something between the ranks that is started and waited for, again and again.

    Args:
        what: ``exchange`` (both ways, as halos), ``keyed exchange`` (one that comes again and again), ``sum``,
            ``started sum``, ``reduce-scatter`` or ``all-gather``; a sum that is not started is over when it starts.
        num_bytes: of each message, or of the whole sum.
    """

    def __init__(self, place: Place, what: str, num_bytes: int) -> None:
        self._transport, self._what, self._ranks = place.transport, what, place.ranks
        self._x, self._y = tensor(num_bytes), tensor(num_bytes)
        size, count = self._x.numel(), len(place.ranks)
        self._counts = [size * (rank + 1) // count - size * rank // count for rank in place.ranks]
        if "exchange" in what:
            self._sent, self._received = {place.peer: self._x}, {place.peer: self._y}
        self._key = next(place.numbers) if what == "keyed exchange" else None

    def __call__(self) -> Pending | None:
        """Start it; None where it is over."""
        transport, ranks = self._transport, self._ranks
        if self._what.endswith("exchange"):
            return transport.start_exchange(self._sent, self._received, self._key)
        if self._what == "started sum":
            return transport.start_sum(self._x, ranks)
        if self._what == "sum":
            transport.all_reduce(self._x, ranks)
        elif self._what == "reduce-scatter":
            transport.reduce_scatter(self._x, self._counts, ranks)
        else:
            transport.all_gather(self._x, self._counts, ranks)
        return None


@dataclass(frozen=True, slots=True)
class Around:
    """Stretches of a computation with something on its way, and without.

    Attributes:
        cpu_s: main thread's time of the calls that start and end it.
    """

    with_it: list[Stretch] = field(default_factory=list)
    without: list[Stretch] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)


def around(place: Place, what: str, num_bytes: int, calls: int, count: int) -> Around:
    """``what`` of :class:`Starting` around so many convolutions, and these alone, by turns."""
    start, found = Starting(place, what, num_bytes), Around()
    for number in range(WARM_UP + count):
        for with_it in (number % 2 == 0, number % 2 == 1):
            place.start.meet()
            started_s, clocks = time.perf_counter(), [time.thread_time()]  # which are read either way
            pending = start() if with_it else None
            clocks.append(time.thread_time())
            compute("convolution", calls)
            clocks.append(time.thread_time())
            if pending is not None:
                pending.wait()
            clocks.append(time.thread_time())
            stretch = started_s, time.perf_counter()
            if number >= WARM_UP:
                (found.with_it if with_it else found.without).append(stretch)
                if with_it:
                    found.cpu_s.append(clocks[3] - clocks[2] + clocks[1] - clocks[0])
    place.transport.flush()
    return found


def message_cpu(place: Place, num_bytes: int, calls: int, count: int) -> list[float]:
    """Main thread's seconds of a message that is announced, sent and received: there before it is asked for."""
    transport, peer, x = place.transport, place.peer, tensor(num_bytes)
    times = []
    for _ in range(WARM_UP + count):
        step = next(place.numbers)
        mine, theirs = (Key(step, "F", rank, 1 - rank, 0) for rank in (place.rank, peer))
        place.start.meet()
        clocks = [time.thread_time()]
        transport.post_receive(theirs, peer, [(tuple(x.shape), x.dtype)])
        transport.send(mine, peer, [x])
        clocks.append(time.thread_time())
        compute("convolution", calls)
        place.start.meet()
        clocks.append(time.thread_time())
        transport.receive(theirs, peer)
        clocks.append(time.thread_time())
        times.append(clocks[1] - clocks[0] + clocks[3] - clocks[2])
    transport.flush()
    return times[WARM_UP:]
