"""What a rank holds, step after step of its row.

:func:`holdings` says what the actions of a program do to the memory of all ranks, :class:`_Walk` follows the row of one
(:mod:`planner.costs.memory.peak` says what counts).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from planner.costs.communication.links import shares_memory
from planner.costs.layers.cost_table import layers_of
from planner.costs.memory.activations import Activation, activation_of, buckets_behind, kept_gradients
from planner.costs.memory.messages import Carried, Received, acknowledged, buffer_bytes, joined
from planner.costs.simulator.program import PREPARE_STEP, RECEIVE_STEP, REDUCE_STEP, SEND_STEP, CompiledProgram
from planner.costs.stages.action_costs import StageCosts, left_to_others
from planner.costs.stages.gradient_overlap import Bucket
from planner.costs.stages.placement import StagePlacement
from planner.ir.cluster import SHARED_MEMORY
from planner.ir.plan import Size
from planner.ir.program import ALONE_BYTES, receive_window
from planner.ir.schedule import ADDS_GRADIENTS, Op

_Part = tuple[int, int, Size]
"""(rank, stage, what micro-batches of one cost are)."""


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
        left_to_others: of ``gradients``, what goes when they are summed, since other ranks update by it.
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
    left_to_others: dict[tuple[int, int], int]
    joined: dict[int, tuple[int, ...]] = field(default_factory=dict)


def holdings(
    costs: StageCosts, compiled: CompiledProgram, transfer_bytes: Sequence[int], carried: Sequence[Carried] = ()
) -> Holdings:
    """What :func:`walk` needs to know of all ranks.

    Args:
        transfer_bytes: by transfer slot.
        carried: how these are carried (:func:`carried_by`); empty: what is small itself in a frame, else as it lies.
    """
    carried = carried or [Carried(size if size < ALONE_BYTES else 0) for size in transfer_bytes]
    buckets = {
        (rank, number): buckets_behind(costs, stage, member)
        for number, stage in enumerate(costs.stages)
        for member, rank in enumerate(stage.ranks)
        if compiled.rows[rank]
    }
    found, unsaved = _activations(costs, compiled, transfer_bytes, carried, buckets)
    buffers, posted, sent, frames = _messages(costs, compiled, transfer_bytes, carried, unsaved)
    gradients, update, reduction, gone = _updates(costs, compiled, buckets)
    return Holdings(
        tuple(found),
        gradients,
        tuple(transfer_bytes[slot] for slot, _ in compiled.messages),
        tuple(buffers),
        tuple(posted),
        tuple(sent),
        tuple(frames),
        acknowledged(compiled),
        update,
        reduction,
        {place: 0 if costs.is_prepared else size for place, size in prepared_bytes(costs, compiled).items()},
        gone,
        joined(compiled, transfer_bytes),
    )


def _activations(
    costs: StageCosts,
    compiled: CompiledProgram,
    transfer_bytes: Sequence[int],
    carried: Sequence[Carried],
    buckets: Mapping[tuple[int, int], Sequence[Bucket]],
) -> tuple[list[Activation], dict[_Part, float]]:
    """Each activation; and by rank, stage and size, the share of what is sent that nothing else keeps."""
    alone, cluster = Counter[_Part](), costs.book.profile.cluster
    forward: dict[_Part, dict[int, list[tuple[int, int, bool]]]] = {}
    backward: dict[_Part, dict[int, list[tuple[int, int, bool]]]] = {}
    for slot, transfer in enumerate(compiled.transfers):
        src, dst, microbatch = transfer.route
        size = costs.micro_batches[microbatch]
        is_block = cluster.link(transfer.src, transfer.dst).transport == SHARED_MEMORY
        reader, maker, came = (dst, src, forward) if transfer.forward else (src, dst, backward)
        message = transfer_bytes[slot], carried[slot].framed, is_block
        came.setdefault((transfer.dst, reader, size), {}).setdefault(maker, []).append(message)
        if transfer.forward and not is_block:
            alone[transfer.src, src, size] += transfer_bytes[slot] - sum(carried[slot])
    found = []
    unsaved: dict[_Part, float] = {}
    for each in compiled.activations:
        key = (each.rank, each.stage, costs.micro_batches[each.microbatch])
        member = costs.stages[each.stage].ranks.index(each.rank)
        seeds, received = Received.of(backward.get(key, {})), Received.of(forward.get(key, {}))
        behind = buckets[each.rank, each.stage]
        found.append(activation_of(costs, each.stage, member, each.microbatch, alone[key], seeds, received, behind))
        unsaved[key] = found[-1].unsaved / alone[key] if alone[key] else 0.0
    return found, unsaved


def _messages(
    costs: StageCosts,
    compiled: CompiledProgram,
    transfer_bytes: Sequence[int],
    carried: Sequence[Carried],
    unsaved: Mapping[_Part, float],
) -> tuple[list[int], list[int], list[tuple[int, int]], list[tuple[int, ...]]]:
    """By message: its buffer, what is posted for it, what its sender keeps, and the frame that it goes in."""
    cluster = costs.book.profile.cluster
    buffers, posted, sent = [], [], []
    frames: list[tuple[int, ...]] = []
    varies = bool(costs.book.preparations.inputs)  # no two messages have as many sites
    for slot, channel in compiled.messages:
        transfer, payload, framed = compiled.transfers[slot], transfer_bytes[slot], carried[slot].framed
        src, _, microbatch = transfer.route
        share = unsaved.get((transfer.src, src, costs.micro_batches[microbatch]), 1.0) if transfer.forward else 1.0
        is_block = cluster.link(*compiled.channels[channel]).transport == SHARED_MEMORY
        buffers.append(buffer_bytes(payload, framed, is_block))
        posted.append(0 if is_block else buffers[-1])
        copied = carried[slot].copied if transfer.forward else 0
        sent.append((0, 0) if is_block else (copied + round(share * (payload - framed - copied)), framed))
        frames.append((channel, payload, framed, len(frames) if varies else 0))
    return buffers, posted, sent, frames


def _updates(
    costs: StageCosts, compiled: CompiledProgram, buckets: Mapping[tuple[int, int], Sequence[Bucket]]
) -> tuple[dict[tuple[int, int], int], ...]:
    """By rank and stage: gradients that are kept, what an update and a sum need beside, what goes with the sum."""
    gradients, update, reduction, gone = {}, {}, {}, {}
    needs = _update_needs(costs)
    for number, stage in enumerate(costs.stages):
        largest = _largest_updated(costs, stage)
        for member, rank in enumerate(stage.ranks):
            if not compiled.rows[rank]:
                continue
            own = stage.parameter_bytes
            if stage.once is not None:
                own = round(float(stage.once.parameter_bytes[stage.ranks.index(rank)]))
            elif costs.trains:
                own = kept_gradients(stage)
            gradients[rank, number] = own if compiled.trains[rank] and not costs.on_chip_bytes(rank) else 0
            update[rank, number] = round(needs * largest)
            gone[rank, number] = left_to_others(stage) if stage.zero == 1 and gradients[rank, number] else 0
            reduction[rank, number] = _put_together(costs, stage, member, buckets[rank, number])
    return gradients, update, reduction, gone


def _put_together(costs: StageCosts, stage: StagePlacement, member: int, behind: Sequence[Bucket]) -> int:
    """What a sum of gradients needs besides when nothing of it has begun in the backward."""
    if len(stage.ranks) < 2 or stage.zero > 1:
        return 0
    if stage.zero:
        return _scattered(costs, stage, member)
    return behind[0].copied_bytes if len(behind) == 1 else 0


def _scattered(costs: StageCosts, stage: StagePlacement, member: int) -> int:
    """The most beside all gradients while these are summed to the ranks that update by them, bucket after bucket.

    They are put together, pieces come from the other ranks (in shared memory they are read where they lie), those of
    several ranks before this one are added apart, and its slice is cut out; then the rest of the bucket goes.
    """
    several, most, gone = len(stage.ranks), 0, 0
    others = 0 if shares_memory(costs.book.profile.cluster, stage.ranks) else several - 1
    for bucket in costs.book.buckets(stage.runs, stage.tied):
        piece = -(-bucket.num_bytes // several)
        most = max(most, max(bucket.copied_bytes, max(1, others + (member > 1)) * piece) - gone)
        gone += 0 if costs.on_chip_bytes(stage.ranks[member]) else bucket.num_bytes - piece
    return most


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


def _largest_updated(costs: StageCosts, stage: StagePlacement) -> int:
    """Of a parameter, or of this rank's slice of it: no slice is larger than a rank's piece of its bucket."""
    graph = costs.book.profile.graph
    names = {name for index in layers_of(stage.runs) for name in graph.layers[index].parameters}
    if not stage.zero:
        return max((graph.parameters[name].num_bytes for name in names), default=0)
    whole = (graph.parameters[name].num_bytes for name in names & stage.tied)
    slices = (
        min(size, -(-bucket.num_bytes // len(stage.ranks)))
        for bucket in costs.book.buckets(stage.runs, stage.tied)
        for _, size in bucket.by_layer
    )
    return max((*whole, *slices), default=0)


def _update_needs(costs: StageCosts) -> float:
    """What an update needs besides, in sizes of a parameter: copies that the optimiser makes on its way."""
    optimizer = costs.book.profile.optimizer
    if optimizer.state_bytes_per_parameter_byte >= 2:
        return 2.0
    return 1.0 if optimizer.arguments.get("weight_decay", 0.0) else 0.0


class Held(NamedTuple):
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
        self._inputs: dict[tuple[int, int], int] = {}  # by stage and micro-batch, what was received for its F
        self._seeds: dict[tuple[int, int], int] = {}  # and for its B
        self._received = 0  # the sum of both
        self._outgoing = 0
        self._frames = self._most_in_frames()
        self._with_gradients: set[int] = set()
        self._summed: set[int] = set()  # of these stages, those that have been summed
        self._early: dict[int, int] = {}  # by stage, gradients that came with those of inputs
        self._gradients = 0  # of these stages
        self._computed_again = Counter[int]()
        self._last = {a.stage: p for p, a in enumerate(compiled.grid[rank]) if a.op is Op.UPDATE}
        self._summing = {a.stage: p for p, a in enumerate(compiled.grid[rank]) if a.op in ADDS_GRADIENTS}

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
                self._summed.add(action.stage)
                self._gradients = self._gradients_now()
            elif action.op is Op.UPDATE:
                yield self._held(position, self._found.update[self._rank, action.stage])
                self._summed.discard(action.stage)
                if position != self._last[action.stage]:
                    self._with_gradients.discard(action.stage)
                    self._early.pop(action.stage, None)
                self._gradients = self._gradients_now()

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
                self._put(where, (stage, microbatch), where.get((stage, microbatch), 0) + self._found.buffers[each])
            self._outgoing -= sum(self._found.sent[own][0] for own in self._found.acknowledged.get(message, ()))

    def _alone(self, position: int, slot: int, key: tuple[int, int]) -> Held:
        """A forward that nothing follows."""
        activation = self._found.activations[slot]
        held = self._held(position, activation.course.unrecorded + activation.assembled)
        self._put(self._inputs, key, 0)
        return Held(*held[:-1], self._total())

    def _compute(self, position: int, slot: int, sign: int, key: tuple[int, int], op: Op) -> Held:
        activation = self._found.activations[slot]
        course, again = activation.course, activation.recompute
        if activation.last is not None and position == self._summing.get(key[0]):
            course = activation.last
        self._put(self._seeds, key, 0)
        before, has_all = self._total(), key[0] in self._with_gradients
        if sign > 0:
            top = before + (course.unrecorded if activation.recompute else course.forward)
            top += activation.assembled
            self._kept += activation.kept
            self._put(self._inputs, key, min(self._inputs.get(key, 0), activation.inputs))
        elif sign == 0:
            rest = before - activation.saved
            is_later = key[0] in self._with_gradients or key[0] in self._early
            level = self._first_or_later(key[0], is_later, course.input_first, course.input_later)
            top = rest + max(level, course.forward if again else 0)
            self._early[key[0]] = course.early
            self._gradients = self._gradients_now()
            self._put(self._inputs, key, min(self._inputs.get(key, 0), activation.inputs_left))
            self._kept += course.left - activation.saved
            self._computed_again[slot] += 1
        elif self._computed_again[slot]:
            self._computed_again[slot] -= 1
            top = before - course.left + self._first_or_later(key[0], has_all, course.weight_first, course.weight_later)
            self._kept -= course.left + activation.kept - activation.saved
            self._put(self._inputs, key, 0)
        else:
            rest = before - activation.saved
            level = self._first_or_later(key[0], has_all, course.backward_first, course.backward_later)
            top = rest + max(level, course.forward if again else 0)
            self._kept -= activation.kept
            self._put(self._inputs, key, 0)
        if sign < 0 and not has_all:
            self._with_gradients.add(key[0])
            self._gradients = self._gradients_now()
        return self._held(position, max(0, top - self._total()))

    def _put(self, where: dict[tuple[int, int], int], key: tuple[int, int], size: int) -> None:
        """Notes what is left of what was received."""
        self._received += size - where.get(key, 0)
        where[key] = size

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

    def _gradients_now(self) -> int:
        early = sum(size for stage, size in self._early.items() if stage not in self._with_gradients)
        gone = sum(self._found.left_to_others[self._rank, stage] for stage in self._summed & self._with_gradients)
        return early - gone + sum(self._found.gradients[self._rank, stage] for stage in self._with_gradients)

    def _total(self) -> int:
        return self._kept + self._received + self._outgoing + self._frames + self._gradients + self._posted

    def _held(self, position: int, workspace: int) -> Held:
        total = self._total()
        activations = total - self._gradients - self._posted
        return Held(position, activations, self._gradients, self._posted, workspace, total)
