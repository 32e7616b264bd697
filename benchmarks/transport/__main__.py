"""Messages, exchanges and sums over every transport, beside a copy in memory; what a computation costs after a wait.

Two ranks (four for some sums), each a process on a core as a run has them, and two more for each other transport, by
turns: every round has a turn of each side, in changing order.  Figures are medians over all rounds.  All goes through
the runtime's own interface.  What ranks do together lasts from the first one's start to the last one's end, after a
meeting in shared memory that no transport has a part in.

    message       half of there and back, where each rank sends back what it received: every byte is read and written
    stream        messages that follow one another, at most two windows on their way; the receiver reads each once
    memcpy        ``copy_`` of as many bytes into a fixed tensor in one process: the limit
    exchange      both ways at once, as halos go, alone; and with a key (of one that comes again and again) around
                  4.6 ms of convolutions: how much longer these take than without it
    sum           ``all_reduce`` over two and four ranks (two to a core), scattered sums and gathers in place; started
                  sums behind 4.6 ms of convolutions
    packing       two tensors of one action to one rank, as two messages and as one; halos cut out of tensors, sent as
                  they lie and copied before
    after a wait  see ``benchmarks.transport.items``
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any

from benchmarks.report import Row, at_least, at_most, run
from benchmarks.transport import items
from benchmarks.transport.items import KIB, MIB, Around, Stretch
from benchmarks.transport.sides import OPENERS, NotThereError, Side, turns_of
from benchmarks.turns import by_turns
from planner.ir.cluster import MPI

SIZES = (KIB, 32 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
EXCHANGES = (KIB, 32 * KIB, 256 * KIB, 4 * MIB)
SCATTERED = (MIB, 16 * MIB)
COMPUTATION_S = 4.6e-3
LARGE_BYTES = 4 * MIB
GOAL_OF_MEMCPY = 0.8
GOAL_BYTES = 32 * KIB
GOAL_US = 30.0


@dataclasses.dataclass(frozen=True, slots=True)
class Effort:
    """How often things are done.

    Attributes:
        moved_bytes, most: in a turn; at least three repetitions.
        few: repetitions of what takes milliseconds, whatever its size.
    """

    sizes: tuple[int, ...]
    rounds: int
    moved_bytes: int
    most: int
    few: int

    def count(self, num_bytes: int) -> int:
        """Repetitions in a turn."""
        return max(3, min(self.most, self.moved_bytes // num_bytes))


FULL = Effort(SIZES, 6, 128 * MIB, 200, 20)
QUICK = Effort((KIB, 32 * KIB, MIB, 16 * MIB), 2, 8 * MIB, 20, 4)


def measure(quick: bool, only: str = "") -> list[Row]:
    """All rows whose subject holds ``only``."""
    effort = QUICK if quick else FULL
    rows: list[Row] = []
    subjects: Mapping[str, tuple[int, Callable[[Sequence[Side], Effort], Iterable[Row]]]] = {
        "messages": (2, messages),
        "exchanges": (2, exchanges),
        "sums of 2": (2, sums),
        "packing": (2, packing),
        "sums of 4": (4, sums),
        "waits": (2, lambda sides, effort: items.rows(sides, effort.rounds, effort.few)),
    }
    for count in (2, 4):
        wanted = [make for name, (of, make) in subjects.items() if of == count and only in name]
        if wanted:
            with opened(OPENERS, count) as sides:
                rows += chain.from_iterable(make(sides, effort) for make in wanted)
    return rows


@contextmanager
def opened(names: Iterable[str], num_ranks: int) -> Iterator[list[Side]]:
    """The sides that can be opened here; of the others stderr says why not."""
    with ExitStack() as stack:
        found = []
        for name in names:
            try:
                found.append(Side(name, num_ranks))
            except NotThereError as error:
                sys.stderr.write(f"{name}, {num_ranks} ranks: left out: {error}\n")
            else:
                stack.callback(found[-1].close)
        yield found


def messages(sides: Sequence[Side], effort: Effort) -> list[Row]:
    """One way and as a stream, beside a copy."""
    rows = []
    for size in effort.sizes:
        window = max(1, min(32, 8 * MIB // size))
        windows = 4 if size > MIB else 8
        turns: dict[str, Callable[[], list[float]]] = {"memcpy": copy_of(sides, size, effort)}
        for side in sides:
            turns[f"message {side.name}"] = partial(first, side, items.echoes, size, effort.count(size))
            turns[f"stream {side.name}"] = partial(first, side, items.stream, size, window, windows)
        found = medians(by_turns(effort.rounds, turns))
        for what in ("message", "stream"):
            title = f"{what} of {size_name(size)}"
            rows += [Row(f"{title}: {side.name}", 1e6 * found[f"{what} {side.name}"], "us") for side in sides]
            rows.append(Row(f"{title}: memcpy", 1e6 * found["memcpy"], "us"))
            for side in sides:
                share = found["memcpy"] / found[f"{what} {side.name}"]
                goal = GOAL_OF_MEMCPY if side is not sides[0] and size >= LARGE_BYTES else None
                rows.append(at_least(f"{title}: memcpy / {side.name}", share, "ratio", goal))
    return rows


def exchanges(sides: Sequence[Side], effort: Effort) -> list[Row]:
    """Alone, and around a computation."""
    calls = calls_of(sides)
    rows = []
    for size in EXCHANGES:
        found = turns_of(sides, effort.rounds, items.at_once, "exchange", size, effort.count(size))
        for name, turns in found.items():
            took_us = 1e6 * statistics.median(chain.from_iterable(map(together, turns)))
            rows.append(Row(f"exchange of {size_name(size)}: {name}", took_us, "us"))
        around = turns_of(sides, effort.rounds, items.around, "keyed exchange", size, calls, effort.few)
        for name, of_side in around.items():
            title = f"keyed exchange of {size_name(size)} around 4.6 ms: {name}"
            more_us = 1e6 * more_s(of_side)
            goal = GOAL_US if name != sides[0].name and size == GOAL_BYTES else None
            rows.append(at_most(title, more_us, "us more", goal))
    return rows


def sums(sides: Sequence[Side], effort: Effort) -> list[Row]:
    """Of all ranks, no slower than over the first side; sums of two also behind a computation."""
    num_ranks = sides[0].num_ranks
    base = sides[0].name
    rows = []
    for what, sizes in (("sum", effort.sizes), ("reduce-scatter", SCATTERED), ("all-gather", SCATTERED)):
        for size in sizes:
            turns: dict[str, Callable[[], list[float]]] = {"memcpy": copy_of(sides, size, effort)}
            for side in sides:
                turns[side.name] = partial(all_ranks, side, what, size, effort.count(size))
            found = medians(by_turns(effort.rounds, turns))
            title = f"{what} of {size_name(size)} over {num_ranks}"
            rows += [Row(f"{title}: {name}", 1e6 * seconds, "us") for name, seconds in found.items()]
            for side in sides[1:]:
                ratio = found[side.name] / found[base]
                rows.append(at_most(f"{title}: {side.name} / {base}", ratio, "ratio", 1.0))
    if num_ranks == 2:
        calls = calls_of(sides)
        for size in (32 * KIB, MIB, 4 * MIB):
            around = turns_of(sides, effort.rounds, items.around, "started sum", size, calls, effort.few)
            title = f"started sum of {size_name(size)} behind 4.6 ms"
            rows += [Row(f"{title}: {name}", 1e6 * more_s(of_side), "us more") for name, of_side in around.items()]
    return rows


def packing(sides: Sequence[Side], effort: Effort) -> list[Row]:
    """What is joined, cut and summed in small."""
    rows: list[Row] = []
    for size in (4 * KIB, 32 * KIB):
        found = _both(sides, effort, items.pairs, size)
        for name, (apart_s, joined_s) in found.items():
            title = f"two tensors of {size_name(size)} to one rank"
            rows.append(Row(f"{title}, two messages: {name}", 1e6 * apart_s, "us"))
            rows.append(_at_most_one(f"{title}, joined / two messages: {name}", joined_s / apart_s))
    for what, shape in items.HALOS.items():
        found = _both(sides, effort, items.halos, what)
        for name, (cut_s, copied_s) in found.items():
            title = f"exchange of a {what} of {' x '.join(map(str, shape))}"
            rows.append(Row(f"{title}: {name}", 1e6 * cut_s, "us"))
            rows.append(_at_most_one(f"{title}, as cut / copied before: {name}", cut_s / copied_s))
    return rows


def _at_most_one(name: str, ratio: float) -> Row:
    """MPI copies what is cut before it sends, as we did, and has messages of a few microseconds: no goal."""
    return at_most(name, ratio, "ratio", None if name.endswith(MPI) else 1.0)


def _both(
    sides: Sequence[Side], effort: Effort, work: Callable[..., list[float]], of: object
) -> dict[str, tuple[float, float]]:
    """Medians of ``work(of, 0)`` and ``work(of, 1)`` by side, by turns."""
    turns = {f"{side.name} {way}": partial(first, side, work, of, way, effort.most) for side in sides for way in (0, 1)}
    found = medians(by_turns(effort.rounds, turns))
    return {side.name: (found[f"{side.name} 0"], found[f"{side.name} 1"]) for side in sides}


def calls_of(sides: Sequence[Side]) -> int:
    """So many convolutions take 4.6 ms, for all sides."""
    return sides[0].turn(items.calls_for, "convolution", COMPUTATION_S)[0]


def copy_of(sides: Sequence[Side], size: int, effort: Effort) -> Callable[[], list[float]]:
    """A turn of copies, on a rank of the first side."""
    return partial(first, sides[0], items.copies, size, effort.count(size))


def first(side: Side, work: Callable[..., list[float]], *args: object) -> list[float]:
    """What rank 0 found."""
    return side.turn(work, *args)[0]


def all_ranks(side: Side, what: str, size: int, count: int) -> list[float]:
    """Seconds of all ranks together."""
    return together(side.turn(items.at_once, what, size, count))


def medians(rounds: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, float]:
    """Over all rounds."""
    return {name: statistics.median(chain.from_iterable(turns)) for name, turns in rounds.items()}


def together(ranks: Sequence[Sequence[Stretch]]) -> list[float]:
    """Seconds of each repetition, from the first rank's start to the last one's stop."""
    return [max(stop for _, stop in each) - min(start for start, _ in each) for each in zip(*ranks, strict=True)]


def more_s(turns: Sequence[Sequence[Around]]) -> float:
    """How much longer the computation takes with something around it, medians."""
    with_it = (together([rank.with_it for rank in turn]) for turn in turns)
    without = (together([rank.without for rank in turn]) for turn in turns)
    return statistics.median(chain.from_iterable(with_it)) - statistics.median(chain.from_iterable(without))


def size_name(num_bytes: int) -> str:
    """Such as ``32 KiB``."""
    return f"{num_bytes // MIB} MiB" if num_bytes >= MIB else f"{num_bytes // KIB} KiB"


OWN: Mapping[str, Mapping[str, Any]] = {
    "--only": {"default": "", "help": "messages, exchanges, sums, packing or waits"},
}

if __name__ == "__main__":
    raise SystemExit(run("Transports, beside a copy in memory", measure, own=OWN))
