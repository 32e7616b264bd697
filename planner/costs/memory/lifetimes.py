"""How much memory a plan takes on each rank: the lifetimes of what it holds, and the most of it at once.

peak of a rank    most over its moments of  sum over lifetimes that are there then of their bytes    ``Usage``
lifetimes         of its row, line by line of the table (``table``), from its order alone            ``_Row``
bytes             of each, at the plan's prices                                                      ``sizes``
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise, repeat

import numpy as np

from planner.costs.memory.action_peaks import Array
from planner.costs.memory.messages import CoalescedMessage
from planner.costs.memory.sizes import Sizes
from planner.costs.memory.table import TABLE, Lifetime, What, lifetimes_of, moments_of
from planner.costs.simulator.program import PREPARE_STEP, RECEIVE_STEP, REDUCE_STEP, SEND_STEP, CompiledProgram
from planner.costs.stages.action_costs import StageCosts
from planner.ir.program import receive_window
from planner.ir.schedule import ADDS_GRADIENTS, Op

_StageBatch = tuple[int, int]
"""A stage, and one of its micro-batches."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """What a rank holds in its device's memory when it holds most.

    Attributes:
        held: bytes by :class:`What`.
        bytes_beside: of parameters, gradients and optimiser state that lie beside it (``StageCosts.bytes_beside``).
    """

    held: tuple[int, ...]
    bytes_beside: int = 0

    @property
    def peak_bytes(self) -> int:
        """The sum of the parts."""
        return sum(self.held)

    def parts(self) -> dict[str, int]:
        """Bytes by part, in words."""
        return {what.name.lower().replace("_", " "): self.held[what] for what in What}


@dataclass(frozen=True, slots=True, eq=False)
class Usage:
    """What a rank holds, moment after moment.

    Attributes:
        row: the rank's lifetimes.
        sizes: bytes, as ``row.counts`` has them.
        total: bytes by moment.
        always: bytes that are there before the row begins, receives that are announced and frames aside.
    """

    row: _Row
    sizes: Array
    total: Array
    always: int

    def samples(self) -> Iterator[tuple[int, int, int]]:
        """(position in the row, the most while the action there runs, bytes when it is over)."""
        for place, (during, after) in zip(self.row.positions, self.total.reshape(-1, 2).tolist(), strict=True):
            yield place, round(max(during, after)), round(after)

    @property
    def at_peak(self) -> tuple[int, ...]:
        """By :class:`What`; of a training action as it leaves them, and what it needs beyond that as workspace."""
        peak = int(self.total.argmax())
        moment = peak | self.row.trains
        parts = np.bincount(self.row.what, self.row.counts[moment] * self.sizes, len(What)).astype(int).tolist()
        return (*parts[:-1], round(float(self.total[peak])) - sum(parts[:-1]))


def rank_memories(
    costs: StageCosts,
    compiled: CompiledProgram,
    transfer_bytes: Sequence[int],
    carried: Sequence[CoalescedMessage] = (),
) -> tuple[RankMemory, ...]:
    """What each rank holds when it holds most; arguments as of :func:`usages`."""
    return tuple(
        RankMemory(usage.at_peak if usage else (0,) * len(What), costs.bytes_beside(rank))
        for rank, usage in enumerate(usages(costs, compiled, transfer_bytes, carried))
    )


def usages(
    costs: StageCosts,
    compiled: CompiledProgram,
    transfer_bytes: Sequence[int],
    carried: Sequence[CoalescedMessage] = (),
) -> list[Usage | None]:
    """By rank; None: it is not used.

    Args:
        transfer_bytes: by transfer slot.
        carried: how these are carried (:class:`planner.costs.memory.messages.CoalescedMessage`); empty: what is small
            itself in a frame, else as it lies.
    """
    sizes = Sizes(costs, compiled, transfer_bytes, carried)
    return [_usage(sizes, rank) if row else None for rank, row in enumerate(compiled.rows)]


def _usage(sizes: Sizes, rank: int) -> Usage:
    """The cumulative sums of a rank's lifetimes."""
    compiled = sizes.compiled
    joined = sizes.joined
    received = [number for code, _, numbers in compiled.rows[rank] if code == RECEIVE_STEP for number in numbers]
    window = min(len(received), receive_window([sizes.payloads[compiled.messages[number][0]] for number in received]))
    key = _Row, rank, window, tuple(joined.items()) if joined else ()
    row = compiled.memo.get(key)
    if not isinstance(row, _Row):
        row = compiled.memo[key] = _Row(compiled, rank, window, sizes)
    own = {**sizes.of_rank(rank), ("frames", rank): row.frame_bytes(sizes)}
    num_bytes = np.array([own[size] if size in own else sizes.of_slot(size) for size in row.sizes], dtype=np.float64)
    always = sum(own[line.size, rank] for line in TABLE["rank"] if line.size != "frames")
    return Usage(row, num_bytes, row.counts @ num_bytes, always)


class _Row:
    """The row of a rank, and the lifetimes that follow from its order alone.

    Args:
        window: how many receives are announced at once.
        sizes: of the program; messages that travel with others, and those that tell of others, count alone.

    Attributes:
        sizes: all that its lifetimes have; ``what``: part of what these are.
        counts: ``[moment, size]``, how many lifetimes of a size there are.
    """

    def __init__(self, compiled: CompiledProgram, rank: int, window: int, sizes: Sizes) -> None:
        self.compiled = compiled
        self.rank = rank
        self.window = window
        self.joined = sizes.joined
        self.trains = compiled.trains[rank]
        self.positions = list[int]()
        self.receives = list[tuple[int, int, Sequence[int]]]()
        self.sends = list[tuple[int, int]]()
        self.sums, self.updates = (list[tuple[int, int]]() for _ in range(2))
        self.prepares = list[tuple[int, _StageBatch]]()
        self.computes = list[tuple[int, Op, _StageBatch]]()
        self.slots = dict[_StageBatch, int]()
        self.end = self._read()
        self.moments = moments_of(self.computes)
        self.accumulations = list(self._accumulations())
        told_by = sizes.answers
        received_at = {n: start for start, _, numbers in self.receives for n in numbers}
        self.told_at = {number: received_at.get(told_by.get(number, -1), self.end) for _, number in self.sends}
        table = list(chain(self._beside(), self._of_messages(), self._of_passes(), self._of_gradients()))
        what_of = {size: what for what, _, _, size in table}
        columns = {size: column for column, size in enumerate(what_of)}
        born, dies, column = np.array([(born, dies, columns[size]) for _, born, dies, size in table], dtype=np.int64).T
        changes = np.zeros((self.end + 1, len(columns)))
        np.add.at(changes, (born, column), 1)
        np.subtract.at(changes, (dies, column), 1)
        self.counts = changes.cumsum(axis=0)[:-1]
        self.what = np.array([*what_of.values()])
        self.sizes = [*columns]
        self._most_frames: dict[Hashable, dict[int, int]] = {}

    def _read(self) -> int:
        """Notes when which actions of the row start; gives the moment after the last."""
        start = 0
        joins = {other for others in self.joined.values() for other in others}
        slot_at = {position: slot for position, slot, _ in self.compiled.holds[self.rank]}
        row = zip(self.compiled.grid[self.rank], self.compiled.rows[self.rank], strict=True)
        for position, (action, (code, _, numbers)) in enumerate(row):
            key = action.stage, action.microbatch or 0
            if code == RECEIVE_STEP:
                coming = [each for n in numbers if n not in joins for each in (n, *self.joined.get(n, ()))]
                self.receives.append((start, key[1], coming))
                continue
            if code == PREPARE_STEP:
                self.prepares.append((start, key))
                continue
            self.positions.append(position)
            if position in slot_at:
                self.slots[key] = slot_at[position]
                self.computes.append((start, action.op, key))
            elif code == SEND_STEP:
                self.sends += ((start, number) for number in numbers)
            else:
                (self.sums if code == REDUCE_STEP else self.updates).append((start, action.stage))
            start += 2
        return start

    def _accumulations(self) -> Iterator[tuple[int, _StageBatch | None, dict[str, int]]]:
        """The gradients of each stage from one update to the next: from the first backward that makes them.

        With the first I, where there is one: it makes those gradients that cannot be deferred.  Behind the last update
        they are there to the end.
        """
        for stage in sorted({stage for stage, _ in self.slots}):
            halves = [(start, key) for start, op, key in self.computes if key[0] == stage and op is Op.BACKWARD_INPUT]
            adds = [start for start, op, key in self.computes if key[0] == stage and op in ADDS_GRADIENTS]
            sums, updates = ([start for start, of in those if of == stage] for those in (self.sums, self.updates))
            for before, update in pairwise((-1, *updates[:-1], self.end)):
                made = next((start for start in adds if before < start < update), self.end)
                early, first = next(((start, key) for start, key in halves if before < start < made), (-1, None))
                updated = min(self.end, update + 2)
                summed = min(updated, next((start + 2 for start in sums if before < start < update), updated))
                if made < self.end:
                    yield stage, first, {"early": early + 1, "made": made + 1, "summed": summed, "updated": updated}

    def _beside(self) -> Iterator[Lifetime]:
        """What is there throughout, frames among it (:meth:`frame_bytes`), and inputs that the step prepares."""
        yield from lifetimes_of("rank", (self.rank,), {"start": 0, "end": self.end})
        for start, key in self.prepares:
            yield from lifetimes_of("prepared", (self.slots[key],), {"made": start, "end": self.end})

    def _of_messages(self) -> Iterator[Lifetime]:
        """What is received and sent; a receive makes room for the one that is a window later."""
        announced_at = chain(repeat(0, self.window), (start for start, *_ in self.receives))
        for (start, microbatch, numbers), announced in zip(self.receives, announced_at, strict=False):
            for number in numbers:
                place = self.compiled.messages[number][0]
                transfer = self.compiled.transfers[place]
                of, reader = ("received input", 1) if transfer.forward else ("received gradient", 0)
                moments = self.moments[transfer.route[reader], microbatch]
                yield from lifetimes_of(of, (place,), {**moments, "announced": announced, "received": start})
        for start, number in self.sends:
            moments = {"sent": start, "told": self.told_at[number]}
            yield from lifetimes_of("sent", (self.compiled.messages[number][0],), moments)

    def frame_bytes(self, sizes: Sizes) -> int:
        """Of all frames: the next messages like them use them again, so there are as many as are under way at once."""
        if sizes.varies:
            return sum(sizes.framed[self.compiled.messages[number][0]] for _, number in self.sends)
        like = tuple(sizes.frames[self.compiled.messages[number][0]] for _, number in self.sends)
        if like not in self._most_frames:
            changes: dict[int, list[tuple[int, int]]] = {frame: [] for frame in like}
            for frame, (start, number) in zip(like, self.sends, strict=True):
                changes[frame] += (start, 1), (self.told_at[number], -1)
            most = {frame: max(accumulate(one for _, one in sorted(changed))) for frame, changed in changes.items()}
            self._most_frames[like] = most
        return sum(sizes.framed[frame] * most for frame, most in self._most_frames[like].items())

    def _of_passes(self) -> Iterator[Lifetime]:
        """What micro-batches leave from pass to pass, and what passes, sums and updates need while they run.

        That of a pass is how high memory rises while the layers run, what they save and make included.
        """
        for key, slot in self.slots.items():
            yield from lifetimes_of("micro-batch", (slot,), self.moments[key])
        firsts = {one[name] - 1 for *_, one in self.accumulations for name in ("early", "made")}
        last_of = {key[0]: start for start, op, key in self.computes if op in ADDS_GRADIENTS}
        for start, op, key in self.computes:
            most = "forward" if self.moments[key].keys() & {"B", "I"} else "forward alone"
            if op is not Op.FORWARD:
                # with several versions of weights each micro-batch has gradients of its own, added at the end
                is_first = start in firsts or self.compiled.versions[key[0]] > 1
                most = f"{op.value}{' first' * is_first}{' last' * (start == last_of[key[0]])}"
            yield from self._while_runs(start, most, (self.slots[key],))
        for actions, of in ((self.sums, "sum"), (self.updates, "update")):
            for start, stage in actions:
                yield from self._while_runs(start, of, (self.rank, stage))

    def _while_runs(self, start: int, size: str, key: tuple[int, *tuple[int, ...]]) -> Iterator[Lifetime]:
        return lifetimes_of("action", key, {"runs": start, "over": start + 1}, size)

    def _of_gradients(self) -> Iterator[Lifetime]:
        """Gradients of parameters."""
        for stage, early, moments in self.accumulations:
            yield from lifetimes_of("gradients", (self.rank, stage), moments)
            if early is not None:
                yield from lifetimes_of("early gradients", (self.slots[early],), moments)
