"""What a computation costs after a wait, and why.

Rank 0 computes, waits, and computes the same again, which is timed; rank 1 computes all the while, as in a pipeline,
and sends what is waited for.  Where the processor's own counters are hidden, as in most virtual machines, a cause is
told by what makes no difference to it:

    wall above CPU     the scheduler of this machine (``without a core``), or its host's
    checksum           in the first cache: it is slower if the clock is, or if the core is shared with a neighbour;
                       convolutions are slower too if their data and code have left the caches
    0.3 ms and 3 ms    what has to come back once adds as much to both; a slow clock adds ten times as much
    asleep, awake      the same wait without a message: by a timer, and by looking at the clock
    other core         asleep as well, instead of computing: what it takes from shared caches

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
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

from benchmarks.report import Row
from benchmarks.transport import items
from benchmarks.transport.items import KIB, calls_for, compute, tensor
from benchmarks.transport.sides import Place, Side
from benchmarks.turns import by_turns
from runtime.transport import Key

WAITS_S, QUICK_S = (0.0, 1e-3, 5e-3, 20e-3), (0.0, 5e-3)
COMPUTATIONS = (("convolution", 0.3e-3), ("convolution", 3e-3), ("checksum", 0.3e-3))
QUIET_S = 1e-4
OTHER_WAYS = {
    "asleep": ("sleep", True),
    "awake": ("spin", True),
    "asleep, other core too": ("sleep", False),
    "awake, other core asleep": ("spin", False),
}
"""Instead of a message: how rank 0 waits, and whether rank 1 works meanwhile."""


def rows(sides: Sequence[Side], rounds: int, count: int, quick: bool) -> list[Row]:
    """How much longer than without a wait, for each transport and each other way."""
    found = []
    waits_s = QUICK_S if quick else WAITS_S
    for kind, seconds in COMPUTATIONS:
        calls = sides[0].turn(calls_for, kind, seconds)[0]
        turns = {side.name: partial(side.turn, after_waits, "message", waits_s, kind, calls, count) for side in sides}
        for name, (how, other_works) in OTHER_WAYS.items():
            turns[name] = partial(sides[0].turn, after_waits, how, waits_s, kind, calls, count, other_works)
        for name, of_way in by_turns(rounds, turns).items():
            found += _rows(f"{kind} of {1e3 * seconds:g} ms", name, of_way)
    return found


_CLOCKS: Mapping[str, Callable[[AfterWait], float]] = {
    "wall": lambda after: after.wall_s,
    "CPU": lambda after: after.cpu_s,
}


def _rows(title: str, name: str, turns: Sequence[Sequence[Mapping[float, Sequence[AfterWait]]]]) -> list[Row]:
    first, *others = turns[0][0]
    all_of = {wait_s: list(chain.from_iterable(turn[0][wait_s] for turn in turns)) for wait_s in (first, *others)}
    at = {wait_s: [each for each in every if each.delay_s < QUIET_S] or every for wait_s, every in all_of.items()}
    found = []
    for wait_s in others:
        after = f"{title} after {1e3 * wait_s:g} ms"
        for what, of in _CLOCKS.items():
            more_s = statistics.median(map(of, at[wait_s])) - statistics.median(map(of, at[first]))
            found.append(Row(f"{after}, {what}: {name}", 1e6 * more_s, "us more"))
        delay_s = statistics.fmean(each.delay_s for each in all_of[wait_s])
        heard_s = statistics.median(each.heard_s for each in at[wait_s])
        found.append(Row(f"{after}, without a core: {name}", 1e6 * delay_s, "us, mean"))
        found.append(Row(f"{after}, end of the wait: {name}", 1e6 * heard_s, "us late"))
    return found


@dataclass(frozen=True, slots=True)
class AfterWait:
    """A computation that followed a wait.

    Attributes:
        heard_s: from the end of what was waited for to the end of the wait.
        wall_s, cpu_s, delay_s: of the computation: in all, on the core, ready and without a core.
        sleeps, pushed: how often the thread gave its core away, or was pushed from it.
    """

    heard_s: float
    wall_s: float
    cpu_s: float
    delay_s: float
    sleeps: int
    pushed: int


def after_waits(
    place: Place, how: str, waits_s: Sequence[float], kind: str, calls: int, count: int, other_works: bool = True
) -> Mapping[float, list[AfterWait]]:
    """What a computation took on rank 0 after each of ``waits_s``, by turns; 0: right after another one like it.

    Args:
        how: ``message`` (which rank 1 sends), ``sleep`` or ``spin``.
        other_works: rank 1 computes all the time, as in a pipeline; else it sleeps.
    """
    transport, peer, word = place.transport, place.peer, tensor(KIB)
    found: dict[float, list[AfterWait]] = {wait_s: [] for wait_s in waits_s}

    def busy() -> None:
        if other_works:
            compute(kind, 1)
        else:
            time.sleep(1e-4)

    for number in range(items.WARM_UP + count):
        for wait_s in waits_s:
            key = Key(next(place.numbers), "F", 1, 0, 0)
            is_sent = how == "message" and wait_s > 0
            if place.rank == 0:
                if is_sent:
                    transport.post_receive(key, peer, [(tuple(word.shape), word.dtype)])
                compute(kind, calls)
                place.start.meet()
                over_s = time.perf_counter() + wait_s
                if is_sent:
                    transport.receive(key, peer)
                    over_s = place.start.said_by(peer) / 1e9
                elif how == "sleep" and wait_s:
                    time.sleep(wait_s)
                else:
                    while time.perf_counter() < over_s:
                        pass
                observed = _observed(lambda: compute(kind, calls), over_s)
                if number >= items.WARM_UP:
                    found[wait_s].append(observed)
                place.start.meet()
            else:
                place.start.meet()
                over_s = time.perf_counter() + wait_s
                while time.perf_counter() < over_s:
                    busy()
                if is_sent:
                    place.start.say(time.perf_counter_ns())
                    transport.send(key, peer, [word])
                place.start.meet(busy)
    transport.flush()
    return found


def _observed(work: Callable[[], None], over_s: float) -> AfterWait:
    heard_s = time.perf_counter() - over_s
    switches = resource.getrusage(resource.RUSAGE_THREAD)
    delay_s, cpu_s, started_s = _delay_s(), time.thread_time(), time.perf_counter()
    work()
    wall_s, cpu_s, delay_s = time.perf_counter() - started_s, time.thread_time() - cpu_s, _delay_s() - delay_s
    now = resource.getrusage(resource.RUSAGE_THREAD)
    given, pushed = now.ru_nvcsw - switches.ru_nvcsw, now.ru_nivcsw - switches.ru_nivcsw
    return AfterWait(heard_s, wall_s, cpu_s, delay_s, given, pushed)


@functools.cache
def _schedstat() -> int | None:
    try:
        return os.open("/proc/thread-self/schedstat", os.O_RDONLY)
    except OSError:
        return None


def _delay_s() -> float:
    file = _schedstat()
    return 0.0 if file is None else int(os.pread(file, 100, 0).split()[1]) / 1e9
