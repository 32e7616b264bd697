"""What messages between two ranks cost, each way, measured by both of them together.

    points        there and back over two; where the directions differ, there and a short answer back, after silence
    sending       the call that sends, in the same messages
    bandwidth     of a stream of messages back to back: what its later half brings, in ever longer streams until that is
                  steady: whatever a token bucket lets pass at once has passed by then
    burst         x - bandwidth (t - latency), over messages of x bytes after silence that took t: by so much they were
                  ahead of the stream
    duplex        whether two messages that pass each other take less than 1.5 times as long as one

Times are wall-clock: the least of the medians of three rounds over all sizes, since what other programs do can only add
to them, and does so for a while.  Sizes are powers of two, and halfway between where the table bends.  Slow links are
not asked for large messages; every measurement is bounded in time.

Messages go over the transport of a run (:class:`runtime.transport.Transport`), receives posted before sends: gloo
serialises a send and a later receive with the same peer (1.99 times as long).  Of a stream every few messages are
acknowledged, since a send may end at once.

A message has arrived when ``receive`` gives its tensor.  In shared memory that is what the sender wrote, and who reads
it first fetches it from the other core's cache: 64 KiB in 8 us where the next reading takes 4, 1 MiB in 83 and 48, 4
MiB in 235 and 119, 16 MiB, which no cache keeps, in 840 and 690 (two cores, least of 35).  What layers cost was
measured with inputs that were at hand.  So by how much the first reading takes longer than the second is part of the
message; over gloo, whose thread copies on the receiver's core, it is next to nothing.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count, pairwise

import torch

from runtime.transport import MessageKey, Transport

_ELEMENT_BYTES = 4
_STEPS = 1 << 10  # keys count messages in both
_MICROBATCHES = 1 << 10


@dataclass(slots=True, eq=False)
class PeerLink:
    """The messages between this rank and ``peer``, which both send and announce in one order each way.

    Attributes:
        leads: of the two ranks, this one decides and keeps the times.
    """

    transport: Transport
    peer: int
    leads: bool
    _going: count[int] = field(default_factory=count, repr=False)
    _coming: count[int] = field(default_factory=count, repr=False)
    _tensors: dict[int, torch.Tensor] = field(default_factory=dict, repr=False)

    def led_by_this(self, leads: bool) -> PeerLink:
        """The same link, led by this rank or else by the other."""
        return replace(self, leads=leads)

    def post(self, num_bytes: int) -> MessageKey:
        """Announce a message of a tensor of ``num_bytes``, the next one that comes."""
        key = _key(next(self._coming))
        self.transport.post_receive(key, self.peer, [((num_bytes // _ELEMENT_BYTES,), torch.float32)])
        return key

    def take(self, key: MessageKey) -> torch.Tensor:
        """Wait for an announced message, and read it."""
        (tensor,) = self.transport.receive(key, self.peer)
        tensor.max()
        return tensor

    def send(self, num_bytes: int) -> None:
        """Start to send the next one."""
        if num_bytes not in self._tensors:
            self._tensors[num_bytes] = torch.zeros(num_bytes // _ELEMENT_BYTES)
        self.transport.send(_key(next(self._going)), self.peer, [self._tensors[num_bytes]])

    def agree(self, value: float) -> float:
        """The leader's value, on both ranks."""
        word = torch.tensor([value], dtype=torch.float64)
        self._exchange({self.peer: word} if self.leads else {}, {} if self.leads else {self.peer: word})
        return float(word)

    def meet(self) -> None:
        """Return when both ranks are here, the leader last: it hears that the other one is."""
        for comes in (self.leads, not self.leads):
            word = {self.peer: torch.zeros(1)}
            self._exchange({} if comes else word, word if comes else {})

    def forget(self) -> None:
        """Wait until all that was sent was taken, and let go of all buffers."""
        self.transport.flush()
        self._tensors.clear()

    def _exchange(self, sent: dict[int, torch.Tensor], received: dict[int, torch.Tensor]) -> None:
        self.transport.start_exchange(sent, received).wait()


def there_and_back_s(wire: PeerLink, there_bytes: int, back_bytes: int, pause_s: float = 0.0) -> tuple[float, float]:
    """(seconds until the answer was there, seconds of the call that sent), on the leader, who sends; the other answers.

    Args:
        pause_s: of silence before.
    """
    if not wire.leads:
        coming = wire.post(there_bytes)
        wire.meet()
        wire.take(coming)
        wire.send(back_bytes)
        return 0.0, 0.0
    coming = wire.post(back_bytes)
    wire.meet()
    if pause_s:
        time.sleep(pause_s)
    start_s = time.perf_counter()
    wire.send(there_bytes)
    sent_s = time.perf_counter()
    answer = wire.take(coming)
    whole_s = time.perf_counter() - start_s
    call_s = sent_s - start_s
    ways = 2 if there_bytes == back_bytes else 1  # the other one has then read as much
    return max(whole_s - ways * _reading_s(answer), ways * call_s), call_s


def both_ways_s(wire: PeerLink, num_bytes: int) -> float:
    """Seconds until a message has come and another of that size, sent at the same time, was taken."""
    coming = wire.post(num_bytes)
    wire.meet()
    start_s = time.perf_counter()
    wire.send(num_bytes)
    received = wire.take(coming)
    wire.transport.flush()
    both_s = time.perf_counter() - start_s
    return max(0.0, both_s - _reading_s(received))


def _reading_s(tensor: torch.Tensor) -> float:
    """Of what was read before."""
    start_s = time.perf_counter()
    tensor.max()
    return time.perf_counter() - start_s


def _key(number: int) -> MessageKey:
    """Keys come again when those before have long been taken."""
    return MessageKey(number // _MICROBATCHES % _STEPS, "L", 0, 0, number % _MICROBATCHES)


SIZES = tuple(1024 << power for power in range(15))  # 1 KiB ... 16 MiB
LEAST_LAST_BYTES = 64 << 10
"""Tables go so far however slow the link is."""

LinkPoints = tuple[tuple[int, float], ...]

_DUPLEX_BYTES = 1 << 20
_DUPLEX_LIMIT = 1.5
_BENT = 0.05  # a table that is off by more between two sizes is measured there too
_MOST_BENDS = 6
_ASYMMETRIC = 1.1
_STEADY = 0.02
_LEAST_BURST_BYTES = 4096
_STREAMED_S = 0.05
_LEAST_STREAMED_BYTES = 256 << 10
_WINDOW = 4  # messages of a stream that are acknowledged together; two such windows may be on their way
_ACKNOWLEDGEMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class LinkEffort:
    """How much to measure.

    Attributes:
        rounds: over all sizes.
        most: repetitions in a round.
        each_s: for the repetitions of one size in a round.
        longest_s: no larger messages once one took so long.
        stream_s: for the longest stream.
        bends: whether to look between the sizes.
        calls: repetitions of what a rank computes around an exchange (:mod:`profiler.links.calls`).
    """

    rounds: int
    most: int
    each_s: float
    longest_s: float
    stream_s: float
    bends: bool
    calls: int = 10


FULL = LinkEffort(3, 30, 0.12, 0.15, 1.0, True)
QUICK = LinkEffort(2, 7, 0.03, 0.06, 0.25, False, 5)
GLANCE = LinkEffort(2, 5, 0.02, 0.03, 0.2, False)


@dataclass(frozen=True, slots=True)
class OneWay:
    """Messages in one direction."""

    points: LinkPoints
    sending: LinkPoints
    bytes_per_s: float
    burst_bytes: int


@dataclass(frozen=True, slots=True)
class PairCosts:
    """Messages from the leader to the other rank, and back."""

    there: OneWay
    back: OneWay
    duplex: bool


def measure_pair(
    wire: PeerLink, effort: LinkEffort, sizes: tuple[int, ...] = SIZES, *, one_host: bool = False
) -> PairCosts | None:
    """On the leader what it says, on the other rank None.

    Args:
        one_host: both ranks are on it; if its directions seem to differ, one of them was disturbed.
    """
    times = _table(wire, effort, sizes)
    quick = [size for size in times if times[size][0] < _STREAMED_S and size <= _DUPLEX_BYTES]
    each = max(quick[-1] if quick else 0, _LEAST_STREAMED_BYTES)
    there_s, back_s = (_stream_s(wire, each, effort, leads) for leads in (True, False))
    if max(there_s, back_s) > _ASYMMETRIC * min(there_s, back_s):  # was one of them disturbed?
        there_s = min(there_s, _stream_s(wire, each, effort, True))
        back_s = min(back_s, _stream_s(wire, each, effort, False))
    if one_host:
        there_s = back_s = min(there_s, back_s)
    at = max((size for size in times if size <= _DUPLEX_BYTES), default=sizes[0])
    both_s = statistics.median(both_ways_s(wire, at) for _ in range(3))
    rates = each / there_s, each / back_s
    tables = (times, times)
    if max(rates) > _ASYMMETRIC * min(rates):
        tables = _apart(wire, times, True), _apart(wire, times, False)
    wire.forget()
    if not wire.leads:
        return None
    if one_host:  # beyond the table as between its largest, which no cache holds; the stream's messages it does
        rates = (min(rates[0], rate_of_largest(times)),) * 2
    ways = [_one_way(table, rate) for table, rate in zip(tables, rates, strict=True)]
    return PairCosts(ways[0], ways[1], both_s < _DUPLEX_LIMIT * times[at][0])


def rate_of_largest(times: dict[int, tuple[float, float]]) -> float:
    """Bytes a second that the largest size of a table takes more time by than the next; infinite: it takes no more."""
    sizes = sorted(times)[-2:]
    more_s = times[sizes[-1]][0] - times[sizes[0]][0]
    return (sizes[-1] - sizes[0]) / more_s if more_s > 0 else math.inf


def burst_bytes(points: LinkPoints, bytes_per_s: float) -> int:
    """By how much messages after silence are ahead of a stream; 0 unless most sizes say much the same."""
    latency_s = points[0][1]
    ahead = {size: size - bytes_per_s * (seconds - latency_s) for size, seconds in points}
    burst = statistics.median([bytes_ for size, bytes_ in ahead.items() if 16 << 10 <= size <= 1 << 20] or [0.0])
    larger = [bytes_ for size, bytes_ in ahead.items() if burst <= size <= 1 << 20]
    alike = [bytes_ for bytes_ in larger if 0.5 * burst <= bytes_ <= 1.5 * burst]
    return round(burst) if burst > _LEAST_BURST_BYTES and len(alike) > 0.7 * len(larger) else 0


def _one_way(times: dict[int, tuple[float, float]], bytes_per_s: float) -> OneWay:
    ordered = sorted(times.items())
    points = tuple((size, seconds) for size, (seconds, _) in ordered)
    sending = tuple((size, seconds) for size, (_, seconds) in ordered)
    return OneWay(points, sending, bytes_per_s, burst_bytes(points, bytes_per_s))


def _table(wire: PeerLink, effort: LinkEffort, sizes: tuple[int, ...]) -> dict[int, tuple[float, float]]:
    """(one way, call) seconds by size; both ranks know the sizes, the leader the times."""
    times: dict[int, tuple[float, float]] = {}

    def measured(size: int) -> float:
        there_s, call_s = medians(lambda: there_and_back_s(wire, size, size), wire.agree, effort)
        before = times.get(size, (math.inf, math.inf))
        times[size] = (min(before[0], there_s / 2), min(before[1], call_s))
        return times[size][0]

    for size in sizes:
        if wire.agree(measured(size)) > effort.longest_s and size >= LEAST_LAST_BYTES:
            break
    if effort.bends:
        _look_between(wire, times, measured)
    for _ in range(1, effort.rounds):
        for size in sorted(times):
            measured(size)
    return {
        size: (there_s, call_s) for size in sorted(times) for there_s, call_s in [_agreed_values(wire, *times[size])]
    }


def _look_between(wire: PeerLink, times: dict[int, tuple[float, float]], measured: Callable[[int], float]) -> None:
    """Measure halfway between sizes, there where the neighbours lie on no straight line (in log-log)."""
    for _ in range(_MOST_BENDS):
        middle = wire.agree(most_bent(times) if wire.leads else 0.0)
        if not middle:
            break
        measured(int(middle))


def most_bent(times: dict[int, tuple[float, float]]) -> int:
    """A size in the interval whose middle is least certain; 0 if all are well known."""
    sizes = sorted(times)
    points = [(math.log(size), math.log(times[size][0])) for size in sizes]
    worst = _BENT
    size_between = 0
    for k in range(1, len(points) - 1):
        slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(points[k - 1 : k + 2])]
        for a, b in ((k - 1, k), (k, k + 1)):
            wide = points[b][0] - points[a][0]
            off = abs(slopes[1] - slopes[0]) * wide / 4
            if off > worst and wide > math.log(1.2):
                worst = off
                size_between = round(math.sqrt(sizes[a] * sizes[b]) / 1024) * 1024
    return size_between if size_between not in times else 0


def _apart(wire: PeerLink, times: dict[int, tuple[float, float]], leads: bool) -> dict[int, tuple[float, float]]:
    """The table of one direction alone: there with a short answer, after a silence as long as the message."""
    sender = wire.led_by_this(wire.leads is leads)
    short = min(times)
    one_way_s = {}
    for size in sorted(times):
        pause_s = times[size][0]
        runs = [there_and_back_s(sender, size, short, pause_s) for _ in range(5 if pause_s < 0.02 else 2)]
        seconds, call_s = (statistics.median(column) for column in zip(*runs, strict=True))
        seconds, call_s = _agreed_values(wire, seconds, call_s, who=sender.leads)
        one_way_s[size] = (seconds, call_s)
    sender.forget()
    answer_s = times[short][0]
    return {size: (max(seconds - answer_s, answer_s), call_s) for size, (seconds, call_s) in one_way_s.items()}


def _stream_s(wire: PeerLink, num_bytes: int, effort: LinkEffort, leads: bool) -> float:
    """Seconds a message of a long stream; ``leads``: from the leader to the other."""
    sends = wire.leads is leads
    number = 2 * _WINDOW
    before_s = math.inf
    start_s = time.perf_counter()
    while True:
        found_s = _receive_stream(wire, num_bytes, number) if not sends else _send_stream(wire, num_bytes, number)
        (found_s,) = _agreed_values(wire, found_s, who=not sends)
        steady = abs(found_s - before_s) < _STEADY * found_s
        if wire.agree(float(steady or time.perf_counter() - start_s > effort.stream_s / 2)):
            return found_s
        number = 2 * number
        before_s = found_s


def _send_stream(wire: PeerLink, num_bytes: int, number: int) -> float:
    acknowledged: deque[MessageKey] = deque()
    wire.meet()
    for position in range(number):
        if position % _WINDOW == 0:
            if len(acknowledged) == 2:
                wire.take(acknowledged.popleft())
            acknowledged.append(wire.post(_ACKNOWLEDGEMENT_BYTES))
        wire.send(num_bytes)
    for key in acknowledged:
        wire.take(key)
    return 0.0


def _receive_stream(wire: PeerLink, num_bytes: int, number: int) -> float:
    coming = deque(wire.post(num_bytes) for _ in range(2 * _WINDOW))
    arrived = []
    wire.meet()
    for position in range(number):
        wire.take(coming.popleft())
        arrived.append(time.perf_counter())
        if position + 2 * _WINDOW < number:
            coming.append(wire.post(num_bytes))
        if position % _WINDOW == _WINDOW - 1:
            wire.send(_ACKNOWLEDGEMENT_BYTES)
    later = arrived[number // 4 :]  # a rank that slept makes some slopes wrong, not their median
    apart = number // 4
    return statistics.median((b - a) / apart for a, b in zip(later, later[apart:], strict=False))


def medians(
    action: Callable[[], tuple[float, ...]], agree: Callable[[float], float], effort: LinkEffort
) -> list[float]:
    """Of what ``action`` gives, over as many runs as the time allows, the first two aside.

    Args:
        action: gives seconds first, by which the time is shared out.
        agree: gives one rank's value to all that run it together.
    """
    first = [action() for _ in range(2)][1]
    repeats = round(agree(max(1.0, min(effort.most, effort.each_s / max(first[0], 1e-6)))))
    runs = [action() for _ in range(repeats)]
    return [statistics.median(column) for column in zip(*(runs if repeats > 2 else [*runs, first]), strict=True)]


def _agreed_values(wire: PeerLink, *values: float, who: bool | None = None) -> tuple[float, ...]:
    """The values of the rank for which ``who`` is true, on both; the leader's if it is None."""
    teller = wire if who is None else wire.led_by_this(who)
    return tuple([teller.agree(value) for value in values])
