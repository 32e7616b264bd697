"""A second, plain account of what ranks hold (``peaks_of``): a loop over each row, in each action one over layers.

Follows the same model as ``planner.costs.memory.lifetimes`` (its table says what that is) but none of its code; how
high memory rises in an action is worked out in ``stage_memory``, what one layer saves and needs is a price, and given.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from planner.ir.cluster import PAIR_SUM_BYTES, SHARED_MEMORY, STANDING_BYTES
from planner.ir.graph import producer
from planner.ir.program import (
    ALONE_BYTES,
    SPARE_BYTES,
    Leg,
    Message,
    receive_window,
    sent_by,
    taken_by,
)
from planner.ir.schedule import ADDS_GRADIENTS, RECEIVE, SEND, Action, Op
from planner.layers import prepared_inputs
from tests.oracles.stage_memory import (
    Holding,
    Received,
    Rises,
    buckets_in,
    buckets_of,
    exchanged_sums,
    readers_of,
    still_there,
)
from tests.oracles.stages import Stages

_COMPUTES = (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
_Like = tuple[int, int, int, int]
"""Of a message: its receiver, its bytes, those of them in a frame, which the next message like it uses again, and of
clouds, of which no two are alike, the micro-batch."""


def peaks_of(stages: Stages) -> tuple[int, ...]:
    """The most bytes that each rank holds in a step of a program."""
    return tuple(Account(stages, rank).peak_bytes() for rank in range(len(stages.program.rows)))


@dataclass(slots=True)
class _Now:
    """What there is besides what is always there."""

    kept: dict[tuple[int, int], float] = field(default_factory=dict)
    inputs: dict[tuple[int, int], int] = field(default_factory=dict)
    seeds: dict[tuple[int, int], int] = field(default_factory=dict)
    gradients: dict[int, int] = field(default_factory=dict)
    early: dict[int, int] = field(default_factory=dict)  # of stages that have no others yet, those made with inputs'
    halved: set[tuple[int, int]] = field(default_factory=set)
    sent: list[tuple[_Like, Action, float]] = field(default_factory=list)  # (to whom, what sent it, bytes on its own)
    posted: int = 0
    prepared: int = 0

    def total(self) -> float:
        held = (*self.kept.values(), *self.inputs.values(), *self.seeds.values())
        made = {**self.early, **self.gradients}
        return sum(held) + sum(made.values()) + sum(size for _, _, size in self.sent) + self.posted + self.prepared


class Account:
    """What one rank holds in a step of a program."""

    def __init__(self, stages: Stages, rank: int) -> None:
        self._profile = stages.cost_model.profile
        self._decision = stages.decision
        self._program = stages.program
        program = self._program
        self._stages = stages
        self._rank = rank
        self._row = program.rows[rank]
        preparations = stages.cost_model.preparations
        is_shared = any(len(group) > 1 for group in program.ranks)
        self._is_prepared = self._decision.prepares_next_step or preparations.look_ahead
        sites = (preparations.before_program_bytes(rows, shared=is_shared) for rows in self._decision.micro_batches)
        self._site_bytes = (1 + self._is_prepared) * sum(sites)  # this step's, and the next one's
        self._places: dict[int, dict[Action, int]] = {}
        self._joined = {leg: before for leg, before in program.joined().items() if leg[2] == rank}
        self._others: dict[Leg, list[Action]] = {}  # what travels with a leg, in its message
        for (sender, send, _), before in self._joined.items():
            self._others.setdefault((sender, before[0], rank), []).append(send)
        self._beside: dict[tuple[Op, int, int | None], list[Action]] = {}
        for action in self._row:
            self._beside.setdefault((action.op, action.stage, action.microbatch), []).append(action)
        self._versions = {stage: self._most_versions(stage) for stage in {action.stage for action in self._row}}
        self._risen: dict[tuple[int, Received, bool, bool, tuple[float, ...]], Rises] = {}
        self._trains = any(action.op in (*ADDS_GRADIENTS, Op.BACKWARD_INPUT) for action in self._row)

    def _stage(self, number: int, microbatch: int) -> Holding:
        return self._stages.holding(self._rank, number, microbatch)

    def peak_bytes(self) -> int:
        """The most that the rank holds: what is always there, and :meth:`most`."""
        mine = [stage for stage, group in enumerate(self._program.ranks) if self._rank in group]
        held = [self._stage(stage, 0) for stage in mine]
        parameters = self._profile.graph.parameters
        names = {name for one in held if not one.has_layouts for layer in one.layers for name in layer.parameters}
        weights = sum(parameters[name].num_bytes for name in names)
        weights += sum(one.parameter_bytes for one in held if one.has_layouts)
        with_state = weights - sum(one.elsewhere for one in held) if self._trains else 0
        state = round(with_state * self._profile.optimizer.state_bytes_per_parameter_byte)
        weights -= sum(one.elsewhere for one in held if one.zero > 2)
        if any(one.on_chip for one in held):
            weights = state = 0
        for stage, one in zip(mine, held, strict=True):  # older versions, that micro-batches under way still need
            used = {name for layer in one.layers for name in layer.parameters}
            weights += (self._versions.get(stage, 1) - 1) * sum(parameters[name].num_bytes for name in used)
        layers = [layer for one in held for layer in one.layers]
        shared = {name: size for layer in layers for name, size in layer.shared_buffers}
        buffers = sum(shared.values()) + sum(layer.buffer_bytes for layer in layers)
        buffers -= sum(size for layer in layers for _, size in layer.shared_buffers)
        buffers += round(sum(one.standing for one in held))
        buffers += sum(self._standing_sums(stage, one) for stage, one in zip(mine, held, strict=True))
        return weights + state + buffers + self.batch_bytes() + self.most()

    def _standing_sums(self, number: int, stage: Holding) -> int:
        """Receives that stay ready for sums of gradients, of which the ranks of a stage exchange small ones."""
        ranks = self._program.ranks[number]
        room = STANDING_BYTES
        if not self._trains or all(self._shares_memory(other) for other in ranks if other != self._rank):
            return 0
        for size in exchanged_sums(stage, self._profile.graph, len(ranks)):
            room -= size if size <= min(room, PAIR_SUM_BYTES) else 0
        return STANDING_BYTES - room

    def most(self) -> int:
        """Beside parameters, optimiser state and buffers: the most at any action."""
        now = _Now()
        most = 0.0
        framed: dict[_Like, int] = {}  # by receiver and sizes of its messages, the most under way
        receives = [action for action in self._row if action.op in RECEIVE]
        coming = [list(self._coming(action)) for action in receives]
        posted = [sum(_buffer(*size) for _, size in each if not size[2]) for each in coming]
        window = receive_window(size for action in receives for size, _, _ in self._sizes(action))
        now.posted = sum(posted[:window])
        num_received = 0
        if self._is_prepared:
            made = [self._stage(a.stage, a.microbatch or 0).prepared for a in self._row if a.op is Op.PREPARE]
            now.prepared = 2 * sum(made)
        for position, action in enumerate(self._row):
            if action.op in RECEIVE:
                now.posted += (posted[num_received + window] if num_received + window < len(posted) else 0) - posted[
                    num_received
                ]
                self._receive(now, action, coming[num_received])
                num_received += 1
            elif action.op in SEND:
                forward = action.op is Op.SEND_FORWARD
                share = self._unsaved_share(action.stage, action.microbatch or 0) if forward else 1.0
                for message in self._program.messages_of(self._rank, action):
                    size, small = _bytes(message, forward)
                    peer = message.dst if forward else message.src
                    number = action.microbatch or 0
                    if self._shares_memory(peer):
                        continue  # it is in a block, which its receiver holds
                    like = (peer, size, small, number if prepared_inputs(self._profile.graph) else 0)
                    copied = _copied(message) if forward else 0
                    now.sent.append((like, action, copied + round(share * (size - small - copied))))
                    under_way = sum(other[2] for other, _, _ in now.sent if other == like)
                    framed[like] = max(framed.get(like, 0), under_way)
                most = max(most, now.total())
            elif action.op in _COMPUTES:
                most = max(most, self._compute(now, action), now.total())
            elif action.op is Op.PREPARE:
                # Where the step before made them, they are there from the start.
                now.prepared += 0 if self._is_prepared else self._stage(action.stage, action.microbatch or 0).prepared
            elif action.op is Op.REDUCE_GRAD:
                one = self._stage(action.stage, 0)
                several = len(self._program.ranks[action.stage]) > 1
                summed = self._scattered(action.stage, one) if several and one.zero == 1 else 0
                if one.overlaps_sums:
                    buckets = buckets_in(one, self._profile.graph)
                    summed = buckets[0][1] if len(buckets) == 1 else 0
                most = max(most, now.total() + summed)
                if one.zero == 1 and now.gradients.get(action.stage):
                    now.gradients[action.stage] -= one.elsewhere
            elif action.op is Op.UPDATE:
                most = max(most, now.total() + self._update_bytes(action.stage))
                if any(a.op is Op.UPDATE and a.stage == action.stage for a in self._row[position + 1 :]):
                    now.gradients.pop(action.stage, None)
                    now.early.pop(action.stage, None)
        return round(most) + sum(framed.values())

    def batch_bytes(self) -> int:
        """Of all inputs of a step but those that the host prepares, and of its sites."""
        if not self._row:
            return 0
        graph = self._profile.graph
        made = set(prepared_inputs(graph))
        times = self._decision.global_batch / graph.samples
        sizes = (s.num_bytes * (times if s.has_samples else 1) for n, s in graph.inputs.items() if n not in made)
        return (2 if self._is_prepared else 1) * round(sum(sizes)) + self._site_bytes

    def _compute(self, now: _Now, action: Action) -> float:
        """What there is while it runs; ``now`` becomes what is there afterwards."""
        key = (action.stage, action.microbatch or 0)
        stage = self._stage(*key)
        now.seeds.pop(key, None)
        made = action.stage in now.gradients or (action.op is Op.BACKWARD_INPUT and action.stage in now.early)
        first = not made or self._versions[action.stage] > 1
        sums = action.op in ADDS_GRADIENTS and not any(
            later.op in ADDS_GRADIENTS and later.stage == action.stage
            for later in self._row[self._row.index(action) + 1 :]
        )
        rises = self._rises(stage, self._received(Op.RECV_BACKWARD, *key), first, sums, self._in_buffers(*key))
        before = now.total()
        received = self._received(Op.RECV_FORWARD, *key)
        if action.op is Op.FORWARD and not self._trains:
            now.inputs.pop(key, None)
            return before + rises.unrecorded() + received[3]
        if action.op is Op.FORWARD:
            before += received[3]
            now.inputs[key] = min(now.inputs.get(key, 0), received[0] + received[2])
            apart = 0.0 if stage.recompute else rises.saved
            now.kept[key] = apart
            return before + (rises.unrecorded() if stage.recompute else rises.forward())
        saved = 0.0 if stage.recompute else rises.saved
        if action.op is Op.BACKWARD_INPUT:
            now.kept[key] += rises.left - saved
            now.inputs[key] = min(now.inputs.get(key, 0), self._inputs_left(*key))
            now.halved.add(key)
            now.early[action.stage] = rises.early
            return before - saved + max(rises.halved(), rises.forward() if stage.recompute else 0.0)
        if key in now.halved:
            now.halved.remove(key)
            top = before - rises.left + rises.weights()
        else:
            top = before - saved + max(rises.backward(), rises.forward() if stage.recompute else 0.0)
        now.kept.pop(key)
        now.inputs.pop(key, None)
        now.gradients[action.stage] = stage.gradient_bytes
        return top

    def _rises(self, stage: Holding, seeds: Received, first: bool, sums: bool, there: tuple[float, ...]) -> Rises:
        key = (id(stage), seeds, first, sums, there)  # stages of like micro-batches are one object
        if key not in self._risen:
            self._risen[key] = Rises(stage, self._profile.graph, seeds, first, sums, there)
        return self._risen[key]

    def _in_buffers(self, number: int, microbatch: int) -> tuple[float, ...]:
        """By layer, of what it saves, what surely lies where it was received from another stage."""
        stage = self._stage(number, microbatch)
        graph = self._profile.graph
        if stage.levels is None or (stage.has_layouts and not stage.reads):
            return (0.0,) * len(stage.layers)
        messages = [
            self._program.messages_of(self._rank, action)
            for action in self._beside.get((Op.RECV_FORWARD, number, microbatch), ())
        ]
        theirs = {part.value for each in messages for message in each for part in message.parts}
        names = {layer.name for layer in stage.layers}
        values = graph.values()
        reads = stage.reads or [(stage.samples, levels[6], False) for levels in stage.levels]
        by_layer = []
        for layer, (samples, kept, _), saved in zip(stage.layers, reads, stage.saved, strict=True):
            sizes = {x: values[x].num_bytes / graph.samples * samples for x in set(layer.inputs)}
            mine = sum(size for x, size in sizes.items() if x not in graph.inputs and producer(x) in names)
            received_bytes = sum(size for x, size in sizes.items() if x in theirs)
            by_layer.append(min(max(0.0, kept - mine), received_bytes, saved))
        return tuple(by_layer)

    def _coming(self, action: Action) -> Iterator[tuple[Action, tuple[int, int, bool]]]:
        """What comes with a receive, by the receive that it belongs to: sizes as of :meth:`_sizes`."""
        messages = self._program.messages_of(self._rank, action)
        forward = action.op is Op.RECV_FORWARD
        for message, size in zip(messages, self._sizes(action), strict=True):
            leg = (message.src if forward else message.dst, sent_by(action), self._rank)
            if leg in self._joined:
                continue
            yield action, size
            for send in self._others.get(leg, ()):
                small = self._program.leg_bytes((leg[0], send, self._rank))
                yield taken_by(send), (small, small, size[2])

    def _receive(self, now: _Now, action: Action, coming: list[tuple[Action, tuple[int, int, bool]]]) -> None:
        for one, size in coming:
            key = (one.stage, one.microbatch or 0)
            where = now.inputs if one.op is Op.RECV_FORWARD else now.seeds
            where[key] = where.get(key, 0) + _buffer(*size)
        forward = action.op is Op.RECV_FORWARD
        for message in self._program.messages_of(self._rank, action):
            peer = message.src if forward else message.dst
            now.sent = [sent for sent in now.sent if not self._told(peer, sent, action)]

    def _told(self, peer: int, sent: tuple[_Like, Action, float], action: Action) -> bool:
        """Whether the message that ``action`` receives from ``peer`` left when what was sent had come there."""
        (to, *_), sending, _ = sent
        if to != peer or action.peer is None or sending.peer is None:
            return False
        answers = Op.SEND_FORWARD if action.op is Op.RECV_FORWARD else Op.SEND_BACKWARD
        takes = Op.RECV_FORWARD if sending.op is Op.SEND_FORWARD else Op.RECV_BACKWARD
        places = self._places_of(peer)
        last = len(self._program.rows[peer])
        left = places.get(Action(action.peer, answers, action.microbatch, action.stage), last)
        received_at = places.get(Action(sending.peer, takes, sending.microbatch, sending.stage), last)
        return received_at < left

    def _places_of(self, peer: int) -> dict[Action, int]:
        """Where each action stands in the row of another rank."""
        if peer not in self._places:
            self._places[peer] = {action: place for place, action in enumerate(self._program.rows[peer])}
        return self._places[peer]

    def _sizes(self, action: Action) -> list[tuple[int, int, bool]]:
        """Of each message of a send or receive: its bytes, those in a frame, and whether both ends share memory."""
        forward = action.op in (Op.RECV_FORWARD, Op.SEND_FORWARD)
        messages = self._program.messages_of(self._rank, action)
        return [
            (*_bytes(message, forward), self._shares_memory(message.src + message.dst - self._rank))
            for message in messages
        ]

    def _shares_memory(self, peer: int) -> bool:
        return self._profile.cluster.link(self._rank, peer).transport == SHARED_MEMORY

    def _received(self, op: Op, stage: int, microbatch: int) -> Received:
        """Of the inputs of a stage, or of the gradients of its outputs, that come from other ranks."""
        buffers = tensors = pieces = assembled = parts = 0
        for action in self._beside.get((op, stage, microbatch), ()):
            sizes = self._sizes(action)
            for size, small, is_block in sizes:
                piece = _buffer(size, size, True) if is_block else _buffer(small, small, False)
                if len(sizes) > 1:
                    assembled += size
                    parts += _buffer(size, small, is_block)
                else:
                    pieces += piece
                    buffers += _buffer(size, small, is_block) - piece
                    tensors += 0 if is_block else size - small
        return buffers + assembled, tensors + assembled, pieces, assembled, parts

    def _inputs_left(self, number: int, microbatch: int) -> int:
        """Of the buffers of what was received for a forward, those that weight gradients need."""
        stage = self._stage(number, microbatch)
        received = self._received(Op.RECV_FORWARD, number, microbatch)
        if stage.has_layouts and stage.levels is not None:
            return 0
        if not stage.gradients:
            return received[0] + received[2]
        names = {layer.name for layer in stage.layers}
        needed = dict[str, float]()
        for of_layer in stage.inputs_left:
            for maker, size in of_layer.items():
                if maker not in names:
                    needed[maker] = max(size, needed.get(maker, 0.0))
        return still_there(received, sum(needed.values()))

    def _unsaved_share(self, number: int, microbatch: int) -> float:
        """Of the outputs that are sent on their own, the share that no layer of the stage saves."""
        stage = self._stage(number, microbatch)
        rows = self._beside.get((Op.SEND_FORWARD, number, microbatch), ())
        alone = sum(
            size - small - _copied(message)
            for action in rows
            for message, (size, small, is_block) in zip(
                self._program.messages_of(self._rank, action), self._sizes(action), strict=True
            )
            if not is_block
        )
        if not alone or stage.levels is None or stage.recompute:
            return 1.0 if alone else 0.0
        graph = self._profile.graph
        names = [layer.name for layer in stage.layers]
        recomputed = {place for span in stage.spans for place in span}  # which drop what they save of their outputs
        copies = {place for place, (_, _, is_copy) in enumerate(stage.reads) if is_copy}
        saves = [0.0 if place in recomputed | copies else saved for place, saved in enumerate(stage.own or stage.saved)]
        parts = [samples * share for samples, share in stage.parts] or [stage.samples] * len(names)
        unsaved_bytes = 0.0
        for place, layer in enumerate(stage.layers):
            readers = readers_of(graph, layer.name)
            if all(reader in names for reader in readers):
                continue
            size = sum(spec.num_bytes for spec in layer.outputs) / graph.samples * parts[place]
            inside = [saves[names.index(reader)] for reader in readers if reader in names]
            if not any(saved >= 0.99 * size for saved in inside):
                unsaved_bytes += max(0.0, size - (0.0 if place in recomputed else stage.levels[place][5]))
        return min(float(round(unsaved_bytes)), alone) / alone

    def _most_versions(self, stage: int) -> int:
        """How many versions of a stage's weights there are at once at most."""
        newest = 0
        most = 1
        under_way: dict[int | None, int] = {}
        for action in self._row:
            if action.stage != stage:
                continue
            newest += action.op is Op.UPDATE
            if action.op is Op.FORWARD:
                under_way[action.microbatch] = action.version
            elif action.op in ADDS_GRADIENTS:
                under_way.pop(action.microbatch, None)
            most = max(most, len({newest, *under_way.values()}))
        return most

    def _scattered(self, number: int, stage: Holding) -> int:
        """Beside all gradients, what is there while each rank is sent the sum of its piece of each bucket."""
        graph = self._profile.graph
        ranks = self._program.ranks[number]
        is_near = all(
            self._profile.cluster.link(a, b).transport == SHARED_MEMORY for a in ranks for b in ranks if a != b
        )
        pieces = (0 if is_near else len(ranks) - 1) + (1 if ranks.index(self._rank) >= 2 else 0)
        above = most = 0  # what is there at the beginning of a bucket, less all gradients; then the most
        for names in buckets_of(stage.layers, graph, stage.tied):
            whole = sum(graph.parameters[name].num_bytes for name in names)
            piece = math.ceil(whole / len(ranks))
            most = max(most, above + pieces * piece, above + piece, above + (whole if len(names) > 1 else 0))
            above += 0 if stage.on_chip else piece - whole
        return most

    def _update_bytes(self, stage: int) -> int:
        """Copies that the optimiser makes of the largest that it steps on its way: a parameter, or a piece of one."""
        optimizer = self._profile.optimizer
        graph = self._profile.graph
        one = self._stage(stage, 0)
        sizes = {name: graph.parameters[name].num_bytes for layer in one.layers for name in layer.parameters}
        for names in buckets_of(one.layers, graph, one.tied) if one.zero else ():
            piece = math.ceil(sum(sizes[name] for name in names) / len(self._program.ranks[stage]))
            sizes |= {name: min(sizes[name], piece) for name in names}
        copies = 1 if optimizer.arguments.get("weight_decay", 0.0) else 0
        copies = 2 if optimizer.state_bytes_per_parameter_byte >= 2 else copies
        return copies * max(sizes.values(), default=0)


def _bytes(message: Message, forward: bool) -> tuple[int, int]:
    """Of a message: all, and those of tensors that are copied into a frame."""
    sizes = [part.num_bytes for part in (message.parts if forward else message.gradient_parts)]
    return sum(sizes), sum(size for size in sizes if size < ALONE_BYTES)


def _copied(message: Message) -> int:
    """Of tensors that go forward on their own, those that do not lie in one piece where they are sent from."""
    return sum(part.num_bytes for part in message.parts if part.num_bytes >= ALONE_BYTES and part.is_copied)


def _buffer(size: int, small: int, is_block: bool) -> int:
    """Of a received message: behind its frame as much again, behind tensors on their own an eighth, of blocks none."""
    return size if is_block else size + min((size - small) // 8, SPARE_BYTES) + min(small, SPARE_BYTES)
