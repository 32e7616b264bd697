"""What a stage keeps of a micro-batch on one of its ranks, and how high memory rises meanwhile.

What the actions of a program do to the memory of the ranks (:mod:`planner.costs.memory.peak` says what counts).

What a rank holds, step after step of its row.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from planner.costs.layers.cost_table import SizeTable, layers_of
from planner.costs.memory.levels import (
    BACKWARD,
    FORWARD,
    GRADIENTS_LEFT,
    INPUTS_SAVED,
    LEFT,
    OUTPUTS_SAVED,
    WEIGHT,
    Array,
    Course,
    Indices,
    Kept,
    Run,
    Running,
    course,
    layers_in,
    plain_course,
)
from planner.costs.simulator.program import PREPARE_STEP, RECEIVE_STEP, REDUCE_STEP, SEND_STEP, CompiledProgram
from planner.costs.stages.action_costs import StageCosts
from planner.costs.stages.placement import StagePlacement
from planner.costs.stages.stage_cost import StageCost
from planner.ir.cluster import SHARED_MEMORY
from planner.ir.plan import Size, samples_in
from planner.ir.program import Part, Program, num_joined, receive_window
from planner.ir.schedule import Op

_Part = tuple[int, int, Size]
"""(rank, stage, what micro-batches of one cost are)."""


@dataclass(frozen=True, slots=True)
class Activation:
    """What a stage holds of a micro-batch on a rank, in bytes, what it received apart.

    Attributes:
        kept: from forward to the end of backward: what was saved.
        unsaved: of the outputs that are sent on their own, what nobody saves.
        recompute: whether what layers save is not among that, but computed again for the backward.
        last: the course in which sums of gradients begin, of the last backward of a stage whose ranks sum them behind.
    """

    course: Course
    kept: int
    unsaved: int = 0
    recompute: bool = False
    last: Course | None = None

    @property
    def saved(self) -> int:
        """The part of ``kept`` that layers save."""
        return 0 if self.recompute else self.course.saved


def activation_of(
    costs: StageCosts, stage: int, member: int, microbatch: int, sent_bytes: int, seeds: int, came: Sequence[int] = ()
) -> Activation:
    """Of the stage's rank number ``member``.

    Args:
        sent_bytes: of its outputs for this micro-batch, what is sent on its own.
        seeds: of the gradients that it receives for it, with their buffers.
        came: stages whose outputs it receives for it in one message each.
    """
    placed = costs.stages[stage]
    if placed.laid_out:
        cost = placed.laid_out[costs.micro_batches[microbatch]]
        if cost.unrecorded_bytes is not None:
            most = round(float(cost.unrecorded_bytes[member]))
            return Activation(replace(plain_course(0, 0, 0, 0), unrecorded=most), 0, sent_bytes)
        laid_out = None if placed.recompute else _laid_out(costs, placed, cost, member, seeds)
        if laid_out is not None:
            return Activation(laid_out, laid_out.saved, sent_bytes)
        parts = (cost.saved_bytes, cost.transient_bytes, cost.workspace_bytes, cost.parameter_bytes)
        saved, again, workspace, parameters = (round(float(part[member])) for part in parts)
        left = saved + again
        if placed.recomputed:
            saved, again = _of_spans(costs, placed, cost, member)
        found = plain_course(saved, left, parameters, workspace, again)
        return Activation(found, found.saved, sent_bytes)
    rank = placed.ranks[member]
    table, kind, on_chip = costs.table(stage, member, microbatch), costs.kind(rank), costs.on_chip_bytes(rank) > 0
    samples = placed.samples[samples_in(costs.micro_batches[microbatch])][member]
    known = costs.book.levels.known
    senders = tuple(sorted(run for number in came for run in costs.stages[number].runs))
    made_bytes = 0 if on_chip else placed.parameter_bytes
    sums_behind = placed.sums_behind and placed.tied
    key = (placed.runs, kind, samples, made_bytes, seeds, sums_behind, senders, placed.recomputed)
    if key not in known:
        copies = _copies(costs, placed)
        found, unsaved = _course_of(costs, placed, table, kind, samples, seeds, senders, made_bytes)
        last = (
            _course_of(costs, placed, table, kind, samples, seeds, senders, made_bytes, copies)[0] if copies else None
        )
        known[key] = found, unsaved, last
    found, unsaved, last = known[key]
    left = sent_bytes if unsaved is None or placed.recompute else min(unsaved, sent_bytes)
    return Activation(found, 0 if placed.recompute else found.saved, left, placed.recompute, last)


def _laid_out(costs: StageCosts, placed: StagePlacement, cost: StageCost, member: int, seeds: int) -> Course | None:
    """Of layers with layouts of their own; None if no levels are known."""
    kind, own = costs.kind(placed.ranks[member]), cost.by_layer
    found = []
    for place, layer in enumerate(own.layers):
        samples, share = float(own.samples[place, member]), float(own.share[place, member])
        whole = float(costs.book.tables.at(kind, samples).workspace_bytes[layer])
        more = float(own.workspace[place, member]) - share * whole
        levels = costs.book.levels.of_part(kind, layer, samples, share, float(own.received[place, member]), more)
        if levels is None:
            return None
        found.append(levels)
    running = costs.book.levels.running(np.array(own.layers, dtype=np.int64), placed.recomputed)
    at = np.searchsorted(own.layers, running.order)
    levels, saved = np.array(found).T[:, at], (own.saved[:, member] + own.received[:, member])[at]
    stays = _kept(costs, placed, running, saved, levels, (own.samples * own.share)[at, member])
    defers = costs.book.tables.deferring(kind)[running.order]
    made = own.parameters[at, member]
    return course(saved, made, levels, seeds, defers, stays=stays, spans=running.bounds)


def _kept(
    costs: StageCosts, placed: StagePlacement, running: Running, saved: Array, levels: Array | None, parts: Array
) -> Kept:
    """By layer as they run, what stays from forward to backward; of those outside spans all that they save."""
    if not placed.recomputed:
        return Kept(saved, saved)
    again = costs.book.levels.kept(running.order, placed.recomputed, levels, parts)
    return Kept(*(np.where(running.within, each, saved) for each in (again.kept, again.same)))


def _of_spans(costs: StageCosts, placed: StagePlacement, cost: StageCost, member: int) -> tuple[int, int]:
    """(what stays from forward to backward, what the largest span has back) of layers of which no levels are known."""
    own = cost.by_layer
    running = costs.book.levels.running(np.array(own.layers, dtype=np.int64), placed.recomputed)
    at = np.searchsorted(own.layers, running.order)
    saved = (own.saved[:, member] + own.received[:, member])[at]
    stays = _kept(costs, placed, running, saved, None, (own.samples * own.share)[at, member])
    return round(float(stays.kept.sum())), _largest_span(running, saved, stays)


def _largest_span(running: Running, saved: Array, stays: Kept) -> int:
    """What the layers of a span save beside what stays, of that where it is most."""
    more = np.maximum(saved - stays.same, 0.0)
    return round(max((float(more[first:last].sum()) for first, last in running.bounds), default=0.0))


def _copies(costs: StageCosts, placed: StagePlacement) -> dict[int, int]:
    """By the layer (its index) that completes a bucket in the last backward, what putting it together takes.

    One bucket alone is put together when it is summed; the only gradient of a bucket is summed where it lies.
    """
    found = costs.book.buckets(placed.runs, placed.tied) if placed.sums_behind else ()
    return {one.first_layer: one.copied_bytes for one in found if one.copied_bytes} if len(found) > 1 else {}


def _course_of(
    costs: StageCosts,
    placed: StagePlacement,
    table: SizeTable,
    kind: str,
    samples: float,
    seeds: int,
    senders: Sequence[Run],
    made_bytes: int,
    copies: Mapping[int, int] | None = None,
) -> tuple[Course, int | None]:
    """The course, and what is sent to other stages without being saved; None if that is not known.

    Args:
        made_bytes: of gradients of parameters; 0 where they lie on chip.
    """
    levels, copies = costs.book.levels.at(kind, samples), copies or {}
    running = costs.book.levels.running(layers_in(placed.runs), placed.recomputed)
    layers = running.order
    saved_by, parts = np.diff(table.saved_bytes)[layers], np.full(len(layers), float(samples))
    if levels is None:
        hungriest = max((float(table.workspace_bytes[a:b].max()) for a, b in placed.runs if a < b), default=0.0)
        hungriest += max(copies.values(), default=0)
        left = costs.book.tables.left_bytes(kind, samples, placed.runs)
        stays = _kept(costs, placed, running, saved_by, None, parts)
        again = _largest_span(running, saved_by, stays)
        return plain_course(float(stays.kept.sum()), left, made_bytes, hungriest, again), None
    made = np.diff(costs.book.tables.graph.parameter_bytes)[layers] * (made_bytes > 0)
    defers, own = costs.book.tables.deferring(kind)[layers], levels[:, layers]
    for layer, size in copies.items():
        own[BACKWARD : WEIGHT + 1, layers == layer] += size
    seeds_left = _seeds_left(costs, layers, own, seeds)
    there = np.minimum(_in_buffers(costs, layers, own, samples, senders), saved_by)
    own[FORWARD] -= there
    own[LEFT] -= np.clip(own[LEFT] - own[GRADIENTS_LEFT] - (saved_by - there), 0.0, there)  # so much at least is of it
    stays = _kept(costs, placed, running, saved_by - there, own, parts)
    gradients = _gradients(made_bytes, made)
    found = course(saved_by - there, gradients, own, seeds, defers, seeds_left, stays, running.bounds)
    if placed.recomputed:  # what they save of their outputs is dropped
        saved_by, levels = np.where(running.within, 0.0, saved_by), levels.copy()
        levels[OUTPUTS_SAVED, layers[running.within]] = 0.0
    return found, _unsaved(costs, layers, saved_by, levels, samples)


def _in_buffers(costs: StageCosts, layers: Indices, levels: Array, samples: float, senders: Sequence[Run]) -> Array:
    """By layer, of what it saves, at least so much that other stages made: it lies where it was received."""
    inside, outside = set(layers.tolist()), set(layers_in(senders).tolist())
    found = np.zeros(len(layers))
    for place, layer in enumerate(layers.tolist()):
        read = costs.book.levels.inputs[layer]
        mine, theirs = (samples * sum(size for maker, size in read if maker in made) for made in (inside, outside))
        found[place] = min(max(0.0, levels[INPUTS_SAVED, place] - mine), theirs)
    return found


def _seeds_left(costs: StageCosts, layers: Indices, levels: Array, seeds: int) -> float:
    """What stays of the gradients that were received, in their buffers, beside what is counted as left of them.

    A gradient that no layer of the stage adds to is that of the weight gradients where it lies; a buffer goes whole.
    """
    inside, readers = set(layers.tolist()), costs.book.levels.readers
    alone = [place for place, layer in enumerate(layers.tolist()) if inside.isdisjoint(readers[layer])]
    counted = min(float(levels[GRADIENTS_LEFT, alone].sum()), float(levels[LEFT].sum()))
    return max(0.0, seeds - counted) if counted > 0 else 0.0


def _gradients(made_bytes: int, made: Array) -> Array:
    """By layer; those of parameters that an earlier stage uses too are taken to come last."""
    found = made.copy()
    if len(found):
        found[0] += max(0.0, made_bytes - made.sum())
    return found


def _unsaved(costs: StageCosts, layers: Indices, saved_by: Array, levels: Array, samples: float) -> int:
    """Of the outputs that other stages read, what neither their makers nor readers in this stage save."""
    outputs, readers = costs.book.levels.outputs, costs.book.levels.readers
    inside = {int(layer): place for place, layer in enumerate(layers)}
    found = 0.0
    for layer in inside:
        if all(reader in inside for reader in readers[layer]):
            continue
        size = outputs[layer] * samples
        kept_by_reader = any(saved_by[inside[r]] >= 0.99 * size for r in readers[layer] if r in inside)
        found += 0.0 if kept_by_reader else max(0.0, size - float(levels[OUTPUTS_SAVED, layer]))
    return round(found)


_ENDS = (Op.BACKWARD, Op.BACKWARD_WEIGHT)
BUCKET_BYTES = 8 * 2**20
"""Most bytes of gradients that the runtime copies together to sum them."""
ALONE_BYTES = 256 * 1024
"""From here a tensor is sent and received on its own, from where it lies (:mod:`runtime.transport.gloo`)."""
SPARE_BYTES = 2**20
"""Room behind a receive buffer: at most so much, of a tensor on its own an eighth of it."""


@dataclass(frozen=True, slots=True)
class Holdings:
    """What the actions of a program do to memory, in bytes.

    Attributes:
        activations: by activation slot.
        gradients: of parameters, by rank and stage.
        messages: payload by message.
        buffers: by message, what it takes where it is received; posted: from its announcement on.
        sent: by message, what it keeps alive where it was sent, and what of that is in a frame.
        frames: by message, equal for those that may use one frame after another.
        joined: by message that others travel with, those; they are there from its arrival on.
        acknowledged: by message, those that its receiver then knows to have come.
        update, reduction: what an update, and a sum of gradients, need besides, by rank and stage.
        prepared: what is made of a micro-batch in its step, by rank, stage and micro-batch.
    """

    activations: tuple[Activation, ...]
    gradients: dict[tuple[int, int], int]
    messages: tuple[int, ...]
    buffers: tuple[int, ...]
    posted: tuple[int, ...]
    sent: tuple[tuple[int, int], ...]
    frames: tuple[tuple[int, ...], ...]
    acknowledged: dict[int, tuple[int, ...]]
    update: dict[tuple[int, int], int]
    reduction: dict[tuple[int, int], int]
    prepared: dict[tuple[int, int, int], int]
    joined: dict[int, tuple[int, ...]] = field(default_factory=dict)


def activations(
    costs: StageCosts, compiled: CompiledProgram, transfer_bytes: Sequence[int], small: Sequence[int] = ()
) -> Holdings:
    """What :func:`walk` needs to know of all ranks.

    Args:
        transfer_bytes: by transfer slot.
        small: of these the bytes of tensors that are copied into frames (:func:`small_bytes`); empty: of a transfer
            that is small itself, all.
    """
    small = small or [size if size < ALONE_BYTES else 0 for size in transfer_bytes]
    alone, seeds, cluster = Counter[_Part](), Counter[_Part](), costs.book.profile.cluster
    came: dict[_Part, Counter[int]] = {}
    for slot, transfer in enumerate(compiled.transfers):
        src, dst, microbatch = transfer.route
        size = costs.micro_batches[microbatch]
        if transfer.forward:
            came.setdefault((transfer.dst, dst, size), Counter())[src] += 1
        is_block = cluster.link(transfer.src, transfer.dst).transport == SHARED_MEMORY
        if not transfer.forward:
            seeds[transfer.dst, src, size] += buffer_bytes(transfer_bytes[slot], small[slot], is_block)
        elif not is_block:
            alone[transfer.src, src, size] += transfer_bytes[slot] - small[slot]
    found = []
    unsaved: dict[_Part, float] = {}
    for each in compiled.activations:
        key = (each.rank, each.stage, costs.micro_batches[each.microbatch])
        member = costs.stages[each.stage].ranks.index(each.rank)
        whole = [src for src, num_senders in came.get(key, {}).items() if num_senders == 1]
        found.append(activation_of(costs, each.stage, member, each.microbatch, alone[key], seeds[key], whole))
        unsaved[key] = found[-1].unsaved / alone[key] if alone[key] else 0.0
    buffers, posted, sent = [], [], []
    frames: list[tuple[int, ...]] = []
    varies = bool(costs.book.preparations.inputs)  # no two messages have as many sites
    for slot, channel in compiled.messages:
        transfer, payload, framed = compiled.transfers[slot], transfer_bytes[slot], small[slot]
        src, _, microbatch = transfer.route
        share = unsaved.get((transfer.src, src, costs.micro_batches[microbatch]), 1.0) if transfer.forward else 1.0
        is_block = cluster.link(*compiled.channels[channel]).transport == SHARED_MEMORY
        buffers.append(buffer_bytes(payload, framed, is_block))
        posted.append(0 if is_block else buffers[-1])
        sent.append((0, 0) if is_block else (round(share * (payload - framed)), framed))
        frames.append((channel, payload, framed, len(frames) if varies else 0))
    gradients, update, reduction = {}, {}, {}
    needs = _update_needs(costs)
    for number, stage in enumerate(costs.stages):
        for rank in stage.ranks:
            own = stage.parameter_bytes
            if stage.once is not None:
                own = round(float(stage.once.parameter_bytes[stage.ranks.index(rank)]))
            gradients[rank, number] = own if compiled.trains[rank] and not costs.on_chip_bytes(rank) else 0
            update[rank, number] = round(needs * _largest_parameter(costs, stage))
            reduction[rank, number] = _put_together(costs, stage, own)
    return Holdings(
        tuple(found),
        gradients,
        tuple(transfer_bytes[slot] for slot, _ in compiled.messages),
        tuple(buffers),
        tuple(posted),
        tuple(sent),
        tuple(frames),
        _acknowledged(compiled),
        update,
        reduction,
        {place: 0 if costs.is_prepared else size for place, size in prepared_bytes(costs, compiled).items()},
        _joined(compiled, transfer_bytes),
    )


def _put_together(costs: StageCosts, stage: StagePlacement, own: int) -> int:
    """What a sum of gradients needs besides when nothing of it has begun in the backward, of ``own`` bytes in all."""
    if len(stage.ranks) < 2:
        return 0
    if not stage.sums_behind:
        return min(BUCKET_BYTES, own)
    found = costs.book.buckets(stage.runs, stage.tied)
    return found[0].copied_bytes if len(found) == 1 else 0


def small_bytes(program: Program, compiled: CompiledProgram) -> list[int]:
    """By transfer slot, the bytes of its tensors that are too small to be sent on their own."""
    return [framed_bytes(slot.parts(program)) for slot in compiled.transfers]


def framed_bytes(parts: Iterable[Part]) -> int:
    """Bytes of the tensors that a message copies into its frame: those too small to be sent on their own."""
    return sum(part.num_bytes for part in parts if part.num_bytes < ALONE_BYTES)


def prepared_bytes(costs: StageCosts, compiled: CompiledProgram) -> dict[tuple[int, int, int], int]:
    """What is prepared of a step: by rank, stage and micro-batch."""
    return {
        (rank, action.stage, action.microbatch or 0): costs.prepared_bytes(
            action.stage, costs.stages[action.stage].ranks.index(rank), action.microbatch or 0
        )
        for rank, row in enumerate(compiled.grid)
        for action in row
        if action.op is Op.PREPARE
    }


def buffer_bytes(payload: int, small: int, is_block: bool = False) -> int:
    """What a message takes where it is received: behind a tensor on its own an eighth to spare, behind a frame all.

    Args:
        is_block: it is received where its sender put it, in memory that both share.
    """
    if is_block:
        return payload
    alone = payload - small
    return payload + min(alone // 8, SPARE_BYTES) + min(small, SPARE_BYTES)


def _joined(compiled: CompiledProgram, transfer_bytes: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """By message that others travel with, those (:func:`planner.ir.program.num_joined`)."""
    found: dict[int, tuple[int, ...]] = {}
    for message, before in compiled.sent_before.items():
        count = num_joined([transfer_bytes[compiled.messages[each][0]] for each in (*before, message)])
        if count:
            first = before[-count]
            found[first] = (*found.get(first, ()), message)
    return found


def _acknowledged(compiled: CompiledProgram) -> dict[int, tuple[int, ...]]:
    """By message, those of which it tells its receiver that they came.

    A message tells which ones had come when it was sent (:mod:`runtime.transport.gloo`).
    """
    received_at: dict[int, int] = {}
    sent: dict[tuple[int, int], list[tuple[int, int]]] = {}  # by (sender, receiver): (position, message), ascending
    for row in compiled.rows:
        for position, (code, _, messages) in enumerate(row):
            if code == RECEIVE_STEP:
                received_at.update(dict.fromkeys(messages, position))
            elif code == SEND_STEP:
                for message in messages:
                    ends = compiled.channels[compiled.messages[message][1]]
                    sent.setdefault(ends, []).append((position, message))
    found: dict[int, tuple[int, ...]] = {}
    for (src, dst), leaving in sent.items():
        answers = sent.get((dst, src), [])
        for _, message in leaving:
            first = bisect_right(answers, (received_at[message], len(compiled.messages)))
            if first < len(answers):
                answer = answers[first][1]
                found[answer] = (*found.get(answer, ()), message)
    return found


def _largest_parameter(costs: StageCosts, stage: StagePlacement) -> int:
    graph = costs.book.profile.graph
    names = (name for index in layers_of(stage.runs) for name in graph.layers[index].parameters)
    return max((graph.parameters[name].num_bytes for name in names), default=0)


def _update_needs(costs: StageCosts) -> float:
    """What an update needs besides, in sizes of a parameter: copies that the optimiser makes on its way."""
    optimizer = costs.book.profile.optimizer
    if optimizer.state_bytes_per_parameter_byte >= 2:
        return 2.0
    return 1.0 if optimizer.arguments.get("weight_decay", 0.0) else 0.0


@dataclass(frozen=True, slots=True)
class Held:
    """What a rank holds at the step at ``position`` of its row, in bytes, beside what is always there.

    Attributes:
        activations: with what was received and what is being sent.
        workspace: what is needed besides while it runs.
        after: all that is held when it is over.
    """

    position: int
    activations: int
    gradients: int
    receive_buffers: int
    workspace: int
    after: int

    @property
    def during(self) -> int:
        """While it runs, workspace aside."""
        return self.activations + self.gradients + self.receive_buffers


def walk(compiled: CompiledProgram, rank: int, found: Holdings) -> Iterator[Held]:
    """What the rank holds, step after step, as far as that changes."""
    yield from _Walk(compiled, rank, found).steps()


class _Walk:
    """The row of a rank, step by step."""

    def __init__(self, compiled: CompiledProgram, rank: int, found: Holdings) -> None:
        self._compiled, self._rank, self._found = compiled, rank, found
        self._elsewhere = {other for others in found.joined.values() for other in others}  # come with another message
        window = receive_window(
            found.messages[message]
            for code, _, messages in compiled.rows[rank]
            if code == RECEIVE_STEP
            for message in messages
        )
        self._window = window
        self._num_received = 0
        self._posting = [
            sum(found.posted[each] for message in messages for each in self._coming(message))
            for code, _, messages in compiled.rows[rank]
            if code == RECEIVE_STEP
        ]
        self._posted = sum(self._posting[:window])
        self._kept = 0  # of micro-batches under way, what their stages keep
        self._inputs: Counter[tuple[int, int]] = Counter()  # by stage and micro-batch, what was received for its F
        self._seeds: Counter[tuple[int, int]] = Counter()  # and for its B
        self._outgoing = 0
        self._frames = self._most_in_frames()
        self._with_gradients: set[int] = set()
        self._early: dict[int, int] = {}  # by stage, gradients that came with those of inputs
        self._computed_again = Counter[int]()
        self._last = {a.stage: p for p, a in enumerate(compiled.grid[rank]) if a.op is Op.UPDATE}
        self._summing = {a.stage: p for p, a in enumerate(compiled.grid[rank]) if a.op in _ENDS}

    def steps(self) -> Iterator[Held]:
        """All that change what is held."""
        holds: dict[int, list[tuple[int, int]]] = {}
        for position, slot, sign in self._compiled.holds[self._rank]:
            holds.setdefault(position, []).append((slot, sign))
        actions = self._compiled.grid[self._rank]
        for position, (action, (code, _, messages)) in enumerate(
            zip(actions, self._compiled.rows[self._rank], strict=True)
        ):
            if code == RECEIVE_STEP:
                self._receive(action.microbatch or 0, messages)
            elif code == SEND_STEP:
                self._outgoing += sum(self._found.sent[message][0] for message in messages)
                yield self._held(position, 0)
            elif position in holds:
                slots = holds[position]
                key = (action.stage, action.microbatch or 0)
                if len(slots) == 2:
                    yield self._alone(position, slots[0][0], key)
                else:
                    yield self._compute(position, *slots[0], key, action.op)
            elif code == PREPARE_STEP:
                self._kept += self._found.prepared[self._rank, action.stage, action.microbatch or 0]
            elif code == REDUCE_STEP:
                yield self._held(position, self._found.reduction[self._rank, action.stage])
            elif action.op is Op.UPDATE:
                yield self._held(position, self._found.update[self._rank, action.stage])
                if position != self._last[action.stage]:
                    self._with_gradients.discard(action.stage)
                    self._early.pop(action.stage, None)

    def _coming(self, message: int) -> tuple[int, ...]:
        """What comes with a message, itself first; nothing with one that comes with another."""
        return () if message in self._elsewhere else (message, *self._found.joined.get(message, ()))

    def _receive(self, microbatch: int, messages: Sequence[int]) -> None:
        self._posted -= self._posting[self._num_received]
        coming = self._num_received + self._window
        self._posted += self._posting[coming] if coming < len(self._posting) else 0
        self._num_received += 1
        for message in messages:
            for each in self._coming(message):
                transfer = self._compiled.transfers[self._compiled.messages[each][0]]
                where, stage = (
                    (self._inputs, transfer.route[1]) if transfer.forward else (self._seeds, transfer.route[0])
                )
                where[stage, microbatch] += self._found.buffers[each]
            self._outgoing -= sum(self._found.sent[own][0] for own in self._found.acknowledged.get(message, ()))

    def _alone(self, position: int, slot: int, key: tuple[int, int]) -> Held:
        """A forward that nothing follows."""
        activation = self._found.activations[slot]
        held = self._held(position, activation.course.unrecorded)
        self._inputs.pop(key, None)
        return replace(held, after=self._total())

    def _compute(self, position: int, slot: int, sign: int, key: tuple[int, int], op: Op) -> Held:
        activation = self._found.activations[slot]
        course, again = activation.course, activation.recompute
        if activation.last is not None and position == self._summing.get(key[0]):
            course = activation.last
        self._seeds.pop(key, None)
        before, has_all = self._total(), key[0] in self._with_gradients
        if sign > 0:
            top = before + (course.unrecorded if activation.recompute else course.forward)
            self._kept += activation.kept
        elif sign == 0:
            rest = before - activation.saved
            is_later = key[0] in self._with_gradients or key[0] in self._early
            level = self._first_or_later(key[0], is_later, course.input_first, course.input_later)
            top = rest + max(level, course.forward if again else 0)
            self._early[key[0]] = course.early
            self._kept += course.left - activation.saved
            self._computed_again[slot] += 1
        elif self._computed_again[slot]:
            self._computed_again[slot] -= 1
            top = before - course.left + self._first_or_later(key[0], has_all, course.weight_first, course.weight_later)
            self._kept -= course.left + activation.kept - activation.saved
            self._inputs.pop(key, None)
        else:
            rest = before - activation.saved
            level = self._first_or_later(key[0], has_all, course.backward_first, course.backward_later)
            top = rest + max(level, course.forward if again else 0)
            self._kept -= activation.kept
            self._inputs.pop(key, None)
        if sign < 0:
            self._with_gradients.add(key[0])
        after = self._held(position, 0)
        return replace(after, workspace=max(0, top - after.during))

    def _first_or_later(self, stage: int, is_later: bool, first: int, later: int) -> int:
        """Where there are several versions of weights, each micro-batch has gradients of its own, added at the end."""
        return later if is_later and self._compiled.versions[stage] < 2 else first

    def _most_in_frames(self) -> int:
        """Frames are kept for the next messages like them to that rank: as many as are ever under way at once."""
        most, now = Counter[tuple[object, ...]](), Counter[tuple[object, ...]]()
        for code, _, messages in self._compiled.rows[self._rank]:
            for message in messages if code in (SEND_STEP, RECEIVE_STEP) else ():
                if code == SEND_STEP:
                    key = self._found.frames[message]
                    now[key] += self._found.sent[message][1]
                    most[key] = max(most[key], now[key])
                else:
                    for own in self._found.acknowledged.get(message, ()):
                        now[self._found.frames[own]] -= self._found.sent[own][1]
        return most.total()

    def _gradients(self) -> int:
        early = sum(size for stage, size in self._early.items() if stage not in self._with_gradients)
        return early + sum(self._found.gradients[self._rank, stage] for stage in self._with_gradients)

    def _activations(self) -> int:
        return self._kept + self._inputs.total() + self._seeds.total() + self._outgoing + self._frames

    def _total(self) -> int:
        return self._activations() + self._gradients() + self._posted

    def _held(self, position: int, workspace: int) -> Held:
        return Held(position, self._activations(), self._gradients(), self._posted, workspace, self._total())
