"""How much memory a plan takes on each rank: what a rank holds, from when to when, and the most of it at once.

All that a rank holds are rows of :class:`Lifetime`; its peak is their largest cumulative sum.  This table is the model.
The method of :class:`_Row` that is named beside a row yields it, and nothing else knows when it begins or ends; how
many bytes it has is in :mod:`planner.costs.memory.sizes`:

    always      parameters, optimiser state (or a part of it)         all the time; of forward passes alone no state;
                and buffers, each once                                all versions of parameters in use
                the batch, whole; the sites of all its clouds         all the time: every rank is given it
                what is prepared (kernel maps), the batch once more   all the time, if the next step is prepared
                receives that stand ready for exchanges inside a      all the time; in shared memory none
                stage, and for small sums of gradients
    prepared    inputs that the step prepares itself                  from their making to the end of the step
    announced   receive buffers, with room to spare                   from their announcement to their receive; in
                                                                      shared memory none
    received    inputs in their buffers                               from their receive to the end of F
                gradients in their buffers                            from their receive to B or I, of whose peak they
                                                                      are a part
    sent        gradients, and outputs that nobody saves              until a message tells that they came; in shared
                                                                      memory the receiver alone has them
    frames      small tensors are copied into them to be sent         all the time, as many of each kind as are under
                                                                      way at once
    forwards    what was received, put together if it came in parts   from F to the end of B or I, or to that of W if
                                                                      weight gradients are made of it
                saved activations, less what lies in such buffers     from F to B or I
                what deferred weight gradients are made of            from I to W
    passes      the highest that layers rise (``action_peaks``)       while F, B, I or W runs
    gradients   those of parameters, whole or in ZeRO-2's slices      from the first B or W on, to the update; those
                                                                      that cannot be deferred from I on
                those that other ranks update by (ZeRO-1)             the same, to the end of their sum
    once        a bucket of gradients, put together; with ZeRO-1      while gradients are summed, if that has not begun
                pieces of other ranks and the slice cut out, too      in the last backward
                what the update of the largest parameter needs        while the optimiser runs

Of a device with two memories parameters, state and gradients lie in the one on chip, if they fit there, and are left
out here (``RankMemory.on_chip_bytes``).

A stage that recomputes keeps received inputs alone, and has its activations back while B runs, or from I to W; segments
of layers that are computed again keep what they read, and have theirs back one segment at a time.  What a rank holds
depends on the order of its row alone, not on times.  Ignored: what a process takes before it has a model (interpreter,
libraries), what libraries take without torch's allocator (oneDNN and MKL little), what passes between stages of one
rank, and fragmentation.  Where layers have layouts of their own a rank holds its parts of their parameters, what its
group sent it and what it reads and saves whole, each layer has its part's share of the whole one's levels, and I makes
the gradients of weights as well; only where such a stage recomputes does every action need the workspace of the
hungriest layer beyond all that is saved.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate, chain, pairwise, repeat
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.costs.memory.messages import CoalescedMessage
from planner.costs.memory.sizes import SizeKey, Sizes, backward_size
from planner.costs.simulator.program import PREPARE_STEP, RECEIVE_STEP, REDUCE_STEP, SEND_STEP, CompiledProgram
from planner.costs.stages.action_costs import StageCosts
from planner.ir.program import receive_window
from planner.ir.schedule import ADDS_GRADIENTS, Op

Array = NDArray[np.float64]
_Key = tuple[int, int]
"""A stage, and one of its micro-batches."""


What = IntEnum(
    "What", "PARAMETERS GRADIENTS OPTIMISER_STATE BUFFERS BATCH RECEIVE_BUFFERS ACTIVATIONS WORKSPACE", start=0
)
"""The parts of what a rank holds."""
_ALWAYS = What.PARAMETERS, What.OPTIMISER_STATE, What.BUFFERS, What.BATCH, What.RECEIVE_BUFFERS


class Lifetime(NamedTuple):
    """What a rank holds from the moment ``born`` on, and no longer from ``dies`` on.

    The action number k of a row, of those that are neither receives nor preparations, runs in moment 2 k and is over in
    2 k + 1.  What comes meanwhile counts from the next of them on.

    Attributes:
        size: whose number of bytes it has (:class:`planner.costs.memory.sizes.Sizes`).
    """

    what: What
    born: int
    dies: int
    size: SizeKey


@dataclass(frozen=True, slots=True)
class RankMemory:
    """What a rank holds in its device's memory when it holds most.

    Attributes:
        held: bytes by :class:`What`.
        on_chip_bytes: of parameters, gradients and optimiser state that lie in a memory on chip, and are not in it.
    """

    held: tuple[int, ...]
    on_chip_bytes: int = 0

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
        RankMemory(usage.at_peak if usage else (0,) * len(What), costs.on_chip_bytes(rank))
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
    compiled, joined = sizes.compiled, sizes.joined
    received = [number for code, _, numbers in compiled.rows[rank] if code == RECEIVE_STEP for number in numbers]
    window = min(len(received), receive_window([sizes.payloads[compiled.messages[number][0]] for number in received]))
    key = _Row, rank, window, tuple(joined.items()) if joined else ()
    row = compiled.memo.get(key)
    if not isinstance(row, _Row):
        row = compiled.memo[key] = _Row(compiled, rank, window, sizes)
    own = {**sizes.of_rank(rank), ("frames", rank): row.frame_bytes(sizes)}
    num_bytes = np.array([own[size] if size in own else sizes.of_slot(size) for size in row.sizes], dtype=np.float64)
    always = sum(own[what.name, rank] for what in _ALWAYS)
    return Usage(row, num_bytes, row.counts @ num_bytes, always)


class _Accumulation(NamedTuple):
    """Gradients of a stage that are added up from its first backward to its update.

    Attributes:
        early: the first backward for inputs, which makes those gradients that cannot be deferred; None: there is none.
        early_at, added_at, summed_at: when that starts, the first backward that makes all others, and their sum.
        dies: the moment behind the update; behind the last one they are there to the end.
    """

    stage: int
    early: _Key | None
    early_at: int
    added_at: int
    summed_at: int
    dies: int


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
        self.compiled, self.rank, self.window, self.joined = compiled, rank, window, sizes.joined
        self.trains = compiled.trains[rank]
        self.positions = list[int]()
        self.receives, self.sends = list[tuple[int, int, Sequence[int]]](), list[tuple[int, int]]()
        self.sums, self.updates = (list[tuple[int, int]]() for _ in range(2))
        self.prepares, self.computes = list[tuple[int, _Key]](), list[tuple[int, Op, _Key]]()
        self.forward_at, self.backward_at, self.weight_at = (dict[_Key, int]() for _ in range(3))
        self.slots = dict[_Key, int]()
        self.end = self._read()
        self.accumulations = list(self._accumulations())
        told_by, received_at = sizes.answers, {n: start for start, _, numbers in self.receives for n in numbers}
        self.told_at = {number: received_at.get(told_by.get(number, -1), self.end) for _, number in self.sends}
        rows = self.always, self.prepared, self.announced, self.received, self.sent, self.frames
        inside = self.forwards, self.passes, self.gradients, self.once
        table = list(chain.from_iterable(lifetimes() for lifetimes in (*rows, *inside)))
        what_of = {size: what for what, _, _, size in table}
        columns = {size: column for column, size in enumerate(what_of)}
        born, dies, column = np.array([(born, dies, columns[size]) for _, born, dies, size in table], dtype=np.int64).T
        changes = np.zeros((self.end + 1, len(columns)))
        np.add.at(changes, (born, column), 1)
        np.subtract.at(changes, (dies, column), 1)
        self.counts, self.what, self.sizes = changes.cumsum(axis=0)[:-1], np.array([*what_of.values()]), [*columns]
        self._most_frames: dict[Hashable, dict[int, int]] = {}

    def _read(self) -> int:
        """Notes when which actions of the row start; gives the moment behind the last."""
        start, joins = 0, {other for others in self.joined.values() for other in others}
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
                at = {Op.FORWARD: self.forward_at, Op.BACKWARD_WEIGHT: self.weight_at}.get(action.op, self.backward_at)
                at[key] = start
            elif code == SEND_STEP:
                self.sends += ((start, number) for number in numbers)
            else:
                (self.sums if code == REDUCE_STEP else self.updates).append((start, action.stage))
            start += 2
        return start

    def _accumulations(self) -> Iterator[_Accumulation]:
        """The gradients of each stage from one update to the next."""
        for stage in sorted({stage for stage, _ in self.slots}):
            halves = [(start, key) for start, op, key in self.computes if key[0] == stage and op is Op.BACKWARD_INPUT]
            adds = [start for start, op, key in self.computes if key[0] == stage and op in ADDS_GRADIENTS]
            sums, updates = ([start for start, of in those if of == stage] for those in (self.sums, self.updates))
            for before, update in pairwise((-1, *updates[:-1], self.end)):
                added_at = next((start for start in adds if before < start < update), self.end)
                early_at, early = next(((start, key) for start, key in halves if before < start < added_at), (-1, None))
                dies = min(self.end, update + 2)
                summed_at = next((start for start in sums if before < start < update), dies)
                if added_at < self.end:
                    yield _Accumulation(stage, early, early_at, added_at, summed_at, dies)

    def always(self) -> Iterator[Lifetime]:
        """What is there from the start to the end."""
        return (Lifetime(what, 0, self.end, (what.name, self.rank)) for what in _ALWAYS)

    def prepared(self) -> Iterator[Lifetime]:
        """Inputs that the step prepares."""
        for start, key in self.prepares:
            yield Lifetime(What.ACTIVATIONS, start, self.end, self._size(key, "prepared"))

    def announced(self) -> Iterator[Lifetime]:
        """Buffers of receives that are announced; a receive makes room for the one that is a window later."""
        announced_at = chain(repeat(0, self.window), (start for start, *_ in self.receives))
        for (start, _, numbers), before in zip(self.receives, announced_at, strict=False):
            for number in numbers:
                yield Lifetime(What.RECEIVE_BUFFERS, before, start, self._message(number, "posted"))

    def received(self) -> Iterator[Lifetime]:
        """What was received, in its buffers: inputs to the end of the forward, gradients to the backward."""
        for start, microbatch, numbers in self.receives:
            for number in numbers:
                transfer = self.compiled.transfers[self.compiled.messages[number][0]]
                key = transfer.route[1 if transfer.forward else 0], microbatch
                dies = self.forward_at[key] + 1 if transfer.forward else self.backward_at[key]
                yield Lifetime(What.ACTIVATIONS, start, dies, self._message(number, "buffer"))

    def sent(self) -> Iterator[Lifetime]:
        """What is sent, until a message that comes back tells that it came."""
        for start, number in self.sends:
            yield Lifetime(What.ACTIVATIONS, start, self.told_at[number], self._message(number, "kept"))

    def frames(self) -> Iterator[Lifetime]:
        """Frames, which are never given back (:meth:`frame_bytes`)."""
        yield Lifetime(What.ACTIVATIONS, 0, self.end, ("frames", self.rank))

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

    def forwards(self) -> Iterator[Lifetime]:
        """What forwards leave to backwards, and backwards for inputs to those for weights."""
        for key, backward in self.backward_at.items():
            after, weight = self.forward_at[key] + 1, self.weight_at.get(key)
            if weight is None:
                yield Lifetime(What.ACTIVATIONS, after, backward + 1, self._size(key, "inputs"))
            else:
                yield Lifetime(What.ACTIVATIONS, after, backward + 1, self._size(key, "inputs of I"))
                yield Lifetime(What.ACTIVATIONS, after, weight + 1, self._size(key, "inputs of W"))
                yield Lifetime(What.ACTIVATIONS, backward + 1, weight, self._size(key, "deferred"))
            yield Lifetime(What.ACTIVATIONS, after, backward, self._size(key, "saved"))

    def passes(self) -> Iterator[Lifetime]:
        """How high memory rises while a stage's layers run, what they save and make included."""
        firsts = {start for one in self.accumulations for start in (one.early_at, one.added_at)}
        last_of = {key[0]: start for start, op, key in self.computes if op in ADDS_GRADIENTS}
        for start, op, key in self.computes:
            most = "forward" if key in self.backward_at else "forward alone"
            if op is not Op.FORWARD:
                # with several versions of weights each micro-batch has gradients of its own, added at the end
                is_first = start in firsts or self.compiled.versions[key[0]] > 1
                most = backward_size(op, is_first, start == last_of[key[0]])
            yield Lifetime(What.WORKSPACE, start, start + 1, self._size(key, most))

    def gradients(self) -> Iterator[Lifetime]:
        """Gradients of parameters."""
        for stage, early, early_at, added_at, summed_at, dies in self.accumulations:
            if early is not None:
                size = self._size(early, "early gradients")
                yield Lifetime(What.GRADIENTS, early_at + 1, added_at + 1, size)
            yield Lifetime(What.GRADIENTS, added_at + 1, dies, ("gradients", self.rank, stage))
            elsewhere = "gradients of others", self.rank, stage
            yield Lifetime(What.GRADIENTS, added_at + 1, min(dies, summed_at + 2), elsewhere)

    def once(self) -> Iterator[Lifetime]:
        """What sums of gradients and updates need besides."""
        for actions, of in ((self.sums, "sum"), (self.updates, "update")):
            for start, stage in actions:
                yield Lifetime(What.WORKSPACE, start, start + 1, (of, self.rank, stage))

    def _message(self, number: int, of: str) -> SizeKey:
        return of, self.compiled.messages[number][0]

    def _size(self, key: _Key, of: str) -> SizeKey:
        return of, self.slots[key]
