"""What the ranks of one side do in a turn, and the times that each notes.

All functions take the rank's :class:`~benchmarks.transport.sides.Place` first.  Stretches are (start, stop) on the
clock that all processes of a machine share: what ranks do together lasts from the first start to the last stop.

What a computation costs after a wait, and why.

Rank 0 computes, waits, and computes the same again, which is timed; rank 1 computes all the while, as in a pipeline,
and sends what is waited for.  Where the processor's own counters are hidden, as in most virtual machines, a cause is
told by what makes no difference to it:

    wall above CPU     the scheduler of this machine, or its host's
    checksum           in the first cache: it is slower if the clock is, or if the core is shared with a neighbour;
                       convolutions are slower too if their data and code have left the caches
    0.3 ms and 3 ms    what has to come back once adds as much to both; a slow clock adds ten times as much
    asleep, awake      the same wait without a message: by a timer, and by looking at the clock

Wall and CPU are of those repetitions in which nobody else had the core for more than a tenth of a millisecond.

Found on two cores of an AMD EPYC virtual machine on which other programs ran as well, in three runs: after 5 ms a
convolution of 0.3 ms takes 0.2 to 0.35 ms more, and one of 3 ms takes no more than that either; after 1 ms about half
of it, after 20 ms no more than after 5.  It is processor time, and as much awake as asleep.  A checksum takes less than
0.1 ms more.  So what is missing is neither the clock nor the scheduler's attention: data and code have left the caches.
Spinning instead of sleeping brings back what the end of a wait comes late (a message over gloo 0.45 to 0.6 ms, a timer
0.1 ms, a look at the clock under 0.01 ms), and not the caches.
"""

from __future__ import annotations

import functools
import os
import statistics
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter

import torch

from benchmarks.report import Row
from benchmarks.transport.sides import Place, Side
from benchmarks.turns import by_turns
from runtime.transport import MessageKey, Pending

WARM_UP = 3
Stretch = tuple[float, float]

KIB = 1 << 10
MIB = 1 << 20


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
    source = tensor(num_bytes)
    fixed = tensor(num_bytes)
    times = []
    for _ in range(WARM_UP + count):
        started_s = time.perf_counter()
        fixed.copy_(source)
        times.append(time.perf_counter() - started_s)
    return times[WARM_UP:]


def echoes(place: Place, num_bytes: int, count: int) -> list[float]:
    """Seconds of a message, half of there and back; what goes back is what was received, so each message is read."""
    transport = place.transport
    peer = place.peer
    x = tensor(num_bytes)
    times = []
    specs = [(tuple(x.shape), x.dtype)]
    steps = [next(place.numbers) for _ in range(WARM_UP + count)]
    there, back = (
        [MessageKey(step, kind, *ends, 0) for step in steps] for kind, ends in (("F", (0, 1)), ("B", (1, 0)))
    )
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
    transport = place.transport
    peer = place.peer
    times = []
    tensors = [tensor(num_bytes) for _ in range(2)]
    parcels = [tensors] if joined else [[each] for each in tensors]
    for _ in range(WARM_UP + count):
        step = next(place.numbers)
        mine, theirs = (
            [MessageKey(step, "F", rank, 2 + stage, 0) for stage in range(len(parcels))] for rank in (place.rank, peer)
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
    key = next(place.numbers)
    times = []
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


def at_once(place: Place, what: str, num_bytes: int, count: int) -> list[Stretch]:
    """``what`` of :class:`Starting`, waited for at once."""
    start = Starting(place, what, num_bytes)
    times = []
    for _ in range(WARM_UP + count):
        place.start.meet()
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
    transport = place.transport
    peer = place.peer
    sends = place.rank == 0
    x = tensor(num_bytes)
    word = tensor(KIB)
    specs, words = ([(tuple(each.shape), each.dtype)] for each in (x, word))
    first = next(place.numbers)

    def key(number: int) -> MessageKey:
        return MessageKey(first, "F", 0, 1, number)

    def told(number: int) -> MessageKey:
        return MessageKey(first, "B", 1, 0, number)

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
        self._transport = place.transport
        self._what = what
        self._ranks = place.ranks
        self._x = tensor(num_bytes)
        self._y = tensor(num_bytes)
        size = self._x.numel()
        count = len(place.ranks)
        self._counts = [size * (rank + 1) // count - size * rank // count for rank in place.ranks]
        if "exchange" in what:
            self._sent = {place.peer: self._x}
            self._received = {place.peer: self._y}
        self._key = next(place.numbers) if what == "keyed exchange" else None

    def __call__(self) -> Pending | None:
        """Start it; None where it is over."""
        transport = self._transport
        ranks = self._ranks
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
    """Stretches of a computation with something on its way, and without."""

    with_it: list[Stretch] = field(default_factory=list)
    without: list[Stretch] = field(default_factory=list)


def around(place: Place, what: str, num_bytes: int, calls: int, count: int) -> Around:
    """``what`` of :class:`Starting` around so many convolutions, and these alone, by turns."""
    start = Starting(place, what, num_bytes)
    found = Around()
    for number in range(WARM_UP + count):
        for with_it in (number % 2 == 0, number % 2 == 1):
            place.start.meet()
            started_s = time.perf_counter()
            pending = start() if with_it else None
            compute("convolution", calls)
            if pending is not None:
                pending.wait()
            if number >= WARM_UP:
                (found.with_it if with_it else found.without).append((started_s, time.perf_counter()))
    place.transport.flush()
    return found


WAIT_S = 5e-3
COMPUTATIONS = (("convolution", 0.3e-3), ("convolution", 3e-3), ("checksum", 0.3e-3))
QUIET_S = 1e-4
OTHER_WAYS = {"asleep": "sleep", "awake": "spin"}
"""Instead of a message: how rank 0 waits."""


def rows(sides: Sequence[Side], rounds: int, count: int) -> list[Row]:
    """How much longer than without a wait, for each transport and each other way."""
    found = []
    for kind, seconds in COMPUTATIONS:
        calls = sides[0].turn(calls_for, kind, seconds)[0]
        turns = {side.name: partial(side.turn, after_wait, "message", kind, calls, count) for side in sides}
        for name, how in OTHER_WAYS.items():
            turns[name] = partial(sides[0].turn, after_wait, how, kind, calls, count)
        title = f"{kind} of {1e3 * seconds:g} ms after {1e3 * WAIT_S:g} ms"
        for name, of_way in by_turns(rounds, turns).items():
            at = [[each for turn in of_way for each in turn[0][waited]] for waited in (False, True)]
            without, behind = ([each for each in every if each.delay_s < QUIET_S] or every for every in at)
            for what, of in (("wall", attrgetter("wall_s")), ("CPU", attrgetter("cpu_s"))):
                more_s = statistics.median(map(of, behind)) - statistics.median(map(of, without))
                found.append(Row(f"{title}, {what}: {name}", 1e6 * more_s, "us more"))
    return found


@dataclass(frozen=True, slots=True)
class AfterWait:
    """A computation that followed a wait: seconds in all, on the core, and ready without a core."""

    wall_s: float
    cpu_s: float
    delay_s: float


def after_wait(place: Place, how: str, kind: str, calls: int, count: int) -> tuple[list[AfterWait], list[AfterWait]]:
    """What a computation took on rank 0 right after another one like it, and after a wait, by turns.

    Rank 1 computes all the time, as in a pipeline.

    Args:
        how: ``message`` (which rank 1 sends), ``sleep`` or ``spin``.
    """
    transport = place.transport
    peer = place.peer
    word = tensor(KIB)
    found: tuple[list[AfterWait], list[AfterWait]] = ([], [])
    for number in range(WARM_UP + count):
        for waits in (False, True):
            key = MessageKey(next(place.numbers), "F", 1, 0, 0)
            is_sent = how == "message" and waits
            wait_s = WAIT_S * waits
            if place.rank == 0:
                if is_sent:
                    transport.post_receive(key, peer, [(tuple(word.shape), word.dtype)])
                compute(kind, calls)
                place.start.meet()
                over_s = time.perf_counter() + wait_s
                if is_sent:
                    transport.receive(key, peer)
                elif how == "sleep" and waits:
                    time.sleep(wait_s)
                else:
                    while time.perf_counter() < over_s:
                        pass
                observed = _observed(lambda: compute(kind, calls))
                if number >= WARM_UP:
                    found[waits].append(observed)
                place.start.meet()
            else:
                place.start.meet()
                over_s = time.perf_counter() + wait_s
                while time.perf_counter() < over_s:
                    compute(kind, 1)
                if is_sent:
                    transport.send(key, peer, [word])
                place.start.meet(partial(compute, kind, 1))
    transport.flush()
    return found


def _observed(work: Callable[[], None]) -> AfterWait:
    delay_s = _delay_s()
    cpu_s = time.thread_time()
    started_s = time.perf_counter()
    work()
    return AfterWait(time.perf_counter() - started_s, time.thread_time() - cpu_s, _delay_s() - delay_s)


@functools.cache
def _schedstat() -> int | None:
    try:
        return os.open("/proc/thread-self/schedstat", os.O_RDONLY)
    except OSError:
        return None


def _delay_s() -> float:
    file = _schedstat()
    return 0.0 if file is None else int(os.pread(file, 100, 0).split()[1]) / 1e9
