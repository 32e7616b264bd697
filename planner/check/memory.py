"""A second, plain account of what a rank holds: one loop over its row, in each action one over the stage's layers.

Follows the same model as ``planner.costs.memory.peak`` (its docstring says what that is) but none of its code; what one
layer saves and needs is a price, and given.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from planner.ir.cluster import SHARED_MEMORY
from planner.ir.graph import Graph, Layer, producer
from planner.ir.plan import Decision
from planner.ir.profile import Profile
from planner.ir.program import Leg, Message, Program, receive_window, sent_by, taken_by
from planner.ir.schedule import RECEIVE, SEND, Action, Op
from planner.layers import prepared_inputs

_ENDS = (Op.BACKWARD, Op.BACKWARD_WEIGHT)
_COMPUTES = (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
_SMALL, _SPARE, _BUCKET = 1 << 18, 1 << 20, 8 << 20
_Like = tuple[int, int, int, int]
"""Of a message: its receiver, its bytes, those of them in a frame, which the next message like it uses again, and of
clouds, of which no two are alike, the micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What the account needs to know of a stage on a rank, for one micro-batch.

    Attributes:
        layers: in order.
        saved, levels: by layer, of the rank's share of a micro-batch; no levels where they were not measured.
        gradients: of values, by number of samples, in the whole network: (whose backward makes one, whose is the last
            to be given it, bytes); none where that is not known.
        parts: by layer, of so many samples which share there is; empty: all of ``samples``.
        inputs_left, gradients_left: by layer, of what its weight gradients need later: the layers that made these
            values, and those whose backward made these gradients, with bytes.
        defers: by layer, whether its weight gradients can come later than those of its inputs.
        workspace: of the hungriest layer.
        left: inputs and gradients of outputs of layers whose weight gradients may come later.
        again: what is saved only once it is computed again, of a stage whose layers have layouts of their own.
        prepared: inputs that the host makes.
        samples: the rank's share.
        standing: what its exchanges keep ready throughout.
        made: by layer, gradients of parameters, where the rank has parts of them; else they follow from the graph.
        parameter_bytes: what the rank holds of parameters; ``elsewhere``: of these whose state another rank holds.
        tied: parameters that other stages use too.
        sums_behind: whether gradients are summed over ranks while the last backward runs.
        on_chip: whether parameters, gradients and the optimiser's state lie in a memory beside this one.
        zero: from 2 on each of ``slices`` ranks keeps its slices of gradients between passes, with 3 of parameters.
    """

    layers: Sequence[Layer]
    saved: Sequence[float]
    levels: Sequence[Sequence[float]] | None = None
    gradients: Mapping[float, Sequence[tuple[str, str, float]]] = field(default_factory=dict)
    parts: Sequence[tuple[float, float]] = ()
    inputs_left: Sequence[Mapping[str, float]] = ()
    gradients_left: Sequence[Mapping[str, float]] = ()
    defers: Sequence[bool] = ()
    workspace: float
    left: float
    again: float = 0.0
    prepared: int
    samples: float
    standing: float = 0.0
    made: Sequence[float] = ()
    parameter_bytes: int
    elsewhere: int = 0
    tied: frozenset[str] = frozenset()
    sums_behind: bool = False
    on_chip: bool = False
    recompute: bool
    has_layouts: bool = False
    zero: int = 0
    slices: int = 1

    @property
    def gradient_bytes(self) -> int:
        """What is kept of gradients from one backward to the next."""
        return 0 if self.on_chip else self.parameter_bytes - (self.elsewhere if self.zero > 1 else 0)


_Received = tuple[int, int, int, int, int]
"""Of what came of a micro-batch: buffers of tensors on their own, these tensors, and what came in one piece; then what
was put together of what several ranks sent, which is among the first two, and the buffers of its parts."""


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
    """What one rank holds.

    Args:
        holding: the stage of that number on that rank (rank, stage, micro-batch).
        places: where each action stands in the rows looked at, by rank; shared by the accounts of a program.
        site_bytes: what every rank holds of the sites of a step.
    """

    def __init__(
        self,
        profile: Profile,
        decision: Decision,
        program: Program,
        rank: int,
        holding: Callable[[int, int, int], Holding],
        places: dict[int, dict[Action, int]],
        site_bytes: int = 0,
    ) -> None:
        self._site_bytes = site_bytes
        costs = (cost for several in profile.preparations.values() for cost in several)
        self._is_prepared = decision.prepares_next_step or any(cost.is_beside for cost in costs)
        self._profile, self._decision, self._program, self._rank = profile, decision, program, rank
        self._row, self._holding, self._places = program.rows[rank], holding, places
        self._joined = {leg: before for leg, before in program.joined().items() if leg[2] == rank}
        self._others: dict[Leg, list[Action]] = {}  # what travels with a leg, in its message
        for (sender, send, _), before in self._joined.items():
            self._others.setdefault((sender, before[0], rank), []).append(send)
        self._beside: dict[tuple[Op, int, int | None], list[Action]] = {}
        for action in self._row:
            self._beside.setdefault((action.op, action.stage, action.microbatch), []).append(action)
        self._versions = {stage: self._most_versions(stage) for stage in {action.stage for action in self._row}}
        self._risen: dict[tuple[int, _Received, bool, bool, tuple[float, ...]], _Rises] = {}
        self._trains = any(action.op in (*_ENDS, Op.BACKWARD_INPUT) for action in self._row)

    def _stage(self, number: int, microbatch: int) -> Holding:
        return self._holding(self._rank, number, microbatch)

    def peak_bytes(self) -> int:
        """The most that the rank holds: what is always there, and :meth:`most`."""
        mine = [stage for stage, group in enumerate(self._program.ranks) if self._rank in group]
        held, parameters = [self._stage(stage, 0) for stage in mine], self._profile.graph.parameters
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
        buffers = sum(layer.buffer_bytes for one in held for layer in one.layers)
        buffers += round(sum(one.standing for one in held))
        return weights + state + buffers + self.batch_bytes() + self.most()

    def most(self) -> int:
        """Beside parameters, optimiser state and buffers: the most at any action."""
        now, most = _Now(), 0.0
        framed: dict[_Like, int] = {}  # by receiver and sizes of its messages, the most under way
        receives = [action for action in self._row if action.op in RECEIVE]
        coming = [list(self._coming(action)) for action in receives]
        posted = [sum(_buffer(*size) for _, size in each if not size[2]) for each in coming]
        window = receive_window(size for action in receives for size, _, _ in self._sizes(action))
        now.posted, came = sum(posted[:window]), 0
        if self._is_prepared:
            made = [self._stage(a.stage, a.microbatch or 0).prepared for a in self._row if a.op is Op.PREPARE]
            now.prepared = 2 * sum(made)
        for position, action in enumerate(self._row):
            if action.op in RECEIVE:
                now.posted += (posted[came + window] if came + window < len(posted) else 0) - posted[came]
                self._receive(now, action, coming[came])
                came += 1
            elif action.op in SEND:
                forward = action.op is Op.SEND_FORWARD
                share = self._unsaved_share(action.stage, action.microbatch or 0) if forward else 1.0
                for message in self._program.messages_of(self._rank, action):
                    size, small = _bytes(message, forward)
                    peer, number = message.dst if forward else message.src, action.microbatch or 0
                    if self._shares_memory(peer):
                        continue  # it is in a block, which its receiver holds
                    like = (peer, size, small, number if prepared_inputs(self._profile.graph) else 0)
                    now.sent.append((like, action, round(share * (size - small))))
                    under_way = sum(other[2] for other, _, _ in now.sent if other == like)
                    framed[like] = max(framed.get(like, 0), under_way)
                most = max(most, now.total())
            elif action.op in _COMPUTES:
                most = max(most, self._compute(now, action), now.total())
            elif action.op is Op.PREPARE:
                # Where the step before made them, they are there from the start.
                now.prepared += 0 if self._is_prepared else self._stage(action.stage, action.microbatch or 0).prepared
            elif action.op is Op.REDUCE_GRAD:
                one, several = self._stage(action.stage, 0), len(self._program.ranks[action.stage]) > 1
                summed = min(_BUCKET, one.parameter_bytes) if several and one.zero < 2 else 0
                if one.sums_behind:
                    buckets = _buckets(one, self._profile.graph)
                    summed = buckets[0][1] if len(buckets) == 1 else 0
                most = max(most, now.total() + summed)
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
        sums = action.op in _ENDS and not any(
            later.op in _ENDS and later.stage == action.stage for later in self._row[self._row.index(action) + 1 :]
        )
        rises = self._rises(stage, self._received(Op.RECV_BACKWARD, *key), first, sums, self._in_buffers(*key))
        before, received = now.total(), self._received(Op.RECV_FORWARD, *key)
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

    def _rises(self, stage: Holding, seeds: _Received, first: bool, sums: bool, there: tuple[float, ...]) -> _Rises:
        key = (id(stage), seeds, first, sums, there)  # stages of like micro-batches are one object
        if key not in self._risen:
            self._risen[key] = _Rises(stage, self._profile.graph, seeds, first, sums, there)
        return self._risen[key]

    def _in_buffers(self, number: int, microbatch: int) -> tuple[float, ...]:
        """By layer, of what it saves, what surely lies where it was received from another stage."""
        stage, graph = self._stage(number, microbatch), self._profile.graph
        if stage.levels is None or stage.has_layouts:
            return (0.0,) * len(stage.layers)
        messages = [
            self._program.messages_of(self._rank, action)
            for action in self._beside.get((Op.RECV_FORWARD, number, microbatch), ())
        ]
        theirs = {part.value for each in messages for message in each for part in message.parts}
        names, values = {layer.name for layer in stage.layers}, graph.values()
        found = []
        for layer, levels, saved in zip(stage.layers, stage.levels, stage.saved, strict=True):
            sizes = {x: values[x].num_bytes / graph.samples * stage.samples for x in set(layer.inputs)}
            mine = sum(size for x, size in sizes.items() if x not in graph.inputs and producer(x) in names)
            came = sum(size for x, size in sizes.items() if x in theirs)
            found.append(min(max(0.0, levels[6] - mine), came, saved))
        return tuple(found)

    def _coming(self, action: Action) -> Iterator[tuple[Action, tuple[int, int, bool]]]:
        """What comes with a receive, by the receive that it belongs to: sizes as of :meth:`_sizes`."""
        messages, forward = self._program.messages_of(self._rank, action), action.op is Op.RECV_FORWARD
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
        places, last = self._places_of(peer), len(self._program.rows[peer])
        left = places.get(Action(action.peer, answers, action.microbatch, action.stage), last)
        came = places.get(Action(sending.peer, takes, sending.microbatch, sending.stage), last)
        return came < left

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

    def _received(self, op: Op, stage: int, microbatch: int) -> _Received:
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
        stage, received = self._stage(number, microbatch), self._received(Op.RECV_FORWARD, number, microbatch)
        if stage.has_layouts and stage.levels is not None:
            return 0
        if not stage.gradients:
            return received[0] + received[2]
        names, needed = {layer.name for layer in stage.layers}, dict[str, float]()
        for of_layer in stage.inputs_left:
            for maker, size in of_layer.items():
                if maker not in names:
                    needed[maker] = max(size, needed.get(maker, 0.0))
        return _still_there(received, sum(needed.values()))

    def _unsaved_share(self, number: int, microbatch: int) -> float:
        """Of the outputs that are sent on their own, the share that no layer of the stage saves."""
        stage = self._stage(number, microbatch)
        rows = self._beside.get((Op.SEND_FORWARD, number, microbatch), ())
        alone = sum(size - small for action in rows for size, small, is_block in self._sizes(action) if not is_block)
        if not alone or stage.levels is None or stage.recompute:
            return 1.0 if alone else 0.0
        graph, names = self._profile.graph, [layer.name for layer in stage.layers]
        found = 0.0
        for place, layer in enumerate(stage.layers):
            readers = _readers(graph, layer.name)
            if all(reader in names for reader in readers):
                continue
            size = sum(spec.num_bytes for spec in layer.outputs) / graph.samples * stage.samples
            inside = [stage.saved[names.index(reader)] for reader in readers if reader in names]
            if not any(saved >= 0.99 * size for saved in inside):
                found += max(0.0, size - stage.levels[place][5])
        return min(float(round(found)), alone) / alone

    def _most_versions(self, stage: int) -> int:
        """How many versions of a stage's weights there are at once at most."""
        newest, most = 0, 1
        under_way: dict[int | None, int] = {}
        for action in self._row:
            if action.stage != stage:
                continue
            newest += action.op is Op.UPDATE
            if action.op is Op.FORWARD:
                under_way[action.microbatch] = action.version
            elif action.op in _ENDS:
                under_way.pop(action.microbatch, None)
            most = max(most, len({newest, *under_way.values()}))
        return most

    def _update_bytes(self, stage: int) -> int:
        """Copies that the optimiser makes of the largest parameter on its way."""
        optimizer, parameters = self._profile.optimizer, self._profile.graph.parameters
        names = {name for layer in self._stage(stage, 0).layers for name in layer.parameters}
        copies = 1 if optimizer.arguments.get("weight_decay", 0.0) else 0
        copies = 2 if optimizer.state_bytes_per_parameter_byte >= 2 else copies
        return copies * max((parameters[name].num_bytes for name in names), default=0)


class _Rises:
    """How high memory rises in the actions of a stage, above what there is without what the stage saved."""

    def __init__(
        self, stage: Holding, graph: Graph, seeds: _Received, first: bool, sums: bool, there: tuple[float, ...]
    ) -> None:
        self._stage, self._seeds, self._first = stage, seeds[0] + seeds[2] + seeds[4], first
        self._saved = [saved - less for saved, less in zip(stage.saved, there, strict=False)]
        self.saved = round(sum(stage.saved) - sum(there))
        self.left = round(max(sum(stage.saved), stage.left))
        self._seeds_left = [0.0] * len(stage.layers)
        self._levels: list[list[float]] = []
        self._under_way = _under_way(stage, graph) if stage.gradients else None
        if stage.levels is not None:
            names = {layer.name for layer in stage.layers}
            theirs = [0.0] * len(names)
            for place, each in enumerate(stage.gradients_left if self._under_way is not None else ()):
                theirs[place] = sum(size for maker, size in each.items() if maker not in names)
            if self._under_way is None and not stage.has_layouts:
                self._seeds_left[0] = _seeds_left(stage, graph, self._seeds)
            elif self._seeds:
                room = _still_there(seeds, sum(theirs)) / max(1.0, sum(theirs))
                self._seeds_left = [size * room for size in theirs]
            for one, own, less, other in zip(stage.levels, self._saved, there, theirs, strict=True):
                left = one[4] - min(less, max(0.0, one[4] - one[7] - own))  # of what it saves besides, all may be left
                left -= min(other, left) if self._seeds else 0.0  # these gradients lie where they were received
                self._levels.append([one[0] - less, *one[1:4], left, *one[5:]])
            self.left = round(sum(levels[4] for levels in self._levels) + sum(self._seeds_left))
        buckets = _buckets(stage, graph) if sums and stage.sums_behind else []
        self._copied = [0] * len(stage.layers)
        for place, size in buckets if len(buckets) > 1 else ():
            self._copied[place] = max(size, self._copied[place])
        self._made = _made(stage, graph)
        self._whole, self._making, self._together = ([0.0] * len(stage.layers) for _ in range(3))
        self._bucket_bytes = self._bucket_needs = 0
        if stage.zero > 1 and not stage.on_chip:
            self._follow_buckets(graph)
        defers = stage.defers or (True,) * len(self._made)
        self._early = [0.0 if later else size for later, size in zip(defers, self._made, strict=True)]
        self._late = [size - early for size, early in zip(self._made, self._early, strict=True)]
        self.early = round(sum(self._early))

    def _follow_buckets(self, graph: Graph) -> None:
        """Where buckets of parameters are whole, where gradients of theirs are made, and what stays of these."""
        stage, sizes = self._stage, {name: spec.num_bytes for name, spec in graph.parameters.items()}
        buckets = buckets_of(stage.layers, graph, stage.tied)
        bytes_of = [sum(sizes[name] for name in names) for names in buckets]
        self._bucket_bytes = max(bytes_of, default=0)
        copies = [1 + (len(names) > 1 and stage.zero < 3) for names in buckets]
        self._bucket_needs = max((size * times for size, times in zip(bytes_of, copies, strict=True)), default=0)
        for names in buckets:
            users = {n: [p for p, layer in enumerate(stage.layers) if n in layer.parameters] for n in names}
            first, last = min(map(min, users.values())), max(map(max, users.values()))
            total = sum(sizes[name] for name in names)
            for place in range(first, last + 1):
                self._whole[place] += total if stage.zero > 2 else 0
                self._making[place] += sum(sizes[name] for name in names if users[name][0] >= place)
            if len(names) > 1 and stage.zero < 3:  # with ZeRO-3 its parameters went before
                self._together[first] = max(self._together[first], total)
            if stage.levels is not None:
                for name in names:
                    self._made[users[name][0]] -= sizes[name]
                self._made[first] += total / stage.slices
        if stage.levels is None:
            self._made = [stage.gradient_bytes, *[0.0] * (len(stage.layers) - 1)]
        self._made = [max(0.0, size) for size in self._made]
        self._making = [a + b for a, b in zip(self._making, self._together, strict=True)]

    def forward(self) -> float:
        """While forward runs and keeps what it saves."""
        if self._stage.levels is None:
            return self.saved + round(self._stage.workspace + self._most_of_a_bucket)
        below = most = 0.0
        for saved, levels, whole in zip(self._saved, self._levels, self._whole, strict=True):
            most = max(most, below + levels[0] + whole)
            below += saved
        return round(most)

    @property
    def _most_of_a_bucket(self) -> float:
        return self._bucket_bytes if self._stage.zero > 2 else 0

    def unrecorded(self) -> float:
        """While forward runs and keeps nothing."""
        if self._stage.levels is None:
            return self.saved + round(self._stage.workspace + self._most_of_a_bucket)
        before = most = 0.0
        for saved, levels, whole in zip(self._saved, self._levels, self._whole, strict=True):
            most = max(most, before + levels[0] + whole)
            before = saved
        return round(most)

    def backward(self) -> float:
        """While a whole backward runs."""
        if self._stage.levels is None:
            again = round(self._stage.again)
            needs = round(self._stage.workspace + max(self._copied, default=0) + self._most_of_a_bucket)
            making = self._bucket_needs if self._stage.zero > 1 else 0
            return self.saved + again + needs + making + (self._all_made if self._first else 0)
        return self._down(1, self._saved, self._made)

    def halved(self) -> float:
        """While the gradients of inputs are computed alone."""
        if self._stage.levels is None:
            needs = round(self._stage.workspace)
            return max(self.left + needs, self.saved + round(self._stage.again) + needs)
        return self._down(2, self._saved, self._early)

    def weights(self) -> float:
        """While those of weights are."""
        if self._stage.levels is None:
            needs = round(self._stage.workspace + max(self._copied, default=0))
            return self.left + needs + (self._all_made if self._first else 0)
        left = [levels[4] + beside for levels, beside in zip(self._levels, self._seeds_left, strict=True)]
        return self._down(3, left, self._late)

    @property
    def _all_made(self) -> int:
        return round(sum(self._made))

    def _down(self, which: int, held: Sequence[float], makes: Sequence[float]) -> float:
        """From the last layer to the first, each of which lets go of what it held, and makes gradients."""
        levels = self._levels
        there, made, left, most = sum(held), 0.0, 0.0, 0.0
        for place in reversed(range(len(held))):
            made = made + makes[place] if self._first else 0.0 if self._stage.zero > 1 else makes[place]
            level = levels[place][which] + (0.0 if which == 3 else self._given(place, levels[place][which]))
            sliced = self._whole[place] + (self._making[place] if which == 1 else 0.0)
            most = max(most, there + level + made + left + sliced)
            if self._copied[place] and which != 2:
                most = max(most, there - held[place] + made + self._beside_bucket(which, place, level))
            there -= held[place]
            left += levels[place][4] if which == 2 else 0.0
        return round(most)

    def _given(self, place: int, level: float) -> float:
        """What received gradients add to the level of a layer: where it has them itself, the room behind them alone."""
        if self._under_way is None:
            return self._seeds if place < len(self._levels) - 1 else 0.0
        outside, _ = self._under_way
        return max(self._seeds - min(outside[place], self._seeds), -level)

    def _beside_bucket(self, which: int, place: int, level: float) -> float:
        """A bucket put together when the layer has run, and gradients of values that are under way then."""
        copied = self._copied[place]
        if which == 3:
            return copied
        if self._under_way is None:
            return copied + level + self._saved[place]
        return copied + self._seeds + self._under_way[1][place]


def _under_way(stage: Holding, graph: Graph) -> tuple[list[float], list[float]]:
    """By layer: gradients that others made when its backward begins, and those that the stage made when it has run."""
    at = {layer.name: number for number, layer in enumerate(graph.layers)}
    mine = [at[layer.name] for layer in stage.layers]
    inside, parts = set(mine), stage.parts or [(stage.samples, 1.0)] * len(mine)
    outside, after = [0.0] * len(mine), [0.0] * len(mine)
    for samples, pairs in stage.gradients.items():
        for maker, last, size in pairs:
            target, first, behind = (
                (after, at[last] + 1, at[maker] + 1) if at[maker] in inside else (outside, at[last], at[maker])
            )
            for place in range(bisect_left(mine, first), bisect_left(mine, behind)):
                if parts[place][0] == samples:
                    target[place] += size * parts[place][1]
    return outside, after


def _still_there(received: _Received, needed: float) -> int:
    """Of buffers, those that hold what is needed: of one piece all, of tensors on their own in proportion."""
    buffers, tensors, pieces, *_ = received
    return round(buffers * min(1.0, needed / max(1, tensors))) + (pieces if needed > 0 else 0)


def _seeds_left(stage: Holding, graph: Graph, seeds: int) -> float:
    """Of gradients received, what stays for weight gradients in buffers larger than the gradients themselves."""
    names = {layer.name for layer in stage.layers}
    levels = stage.levels or ()
    kept = sum(
        one[7] for layer, one in zip(stage.layers, levels, strict=True) if names.isdisjoint(_readers(graph, layer.name))
    )
    kept = min(kept, sum(one[4] for one in levels))
    return max(0.0, seeds - kept) if kept > 0 else 0.0


def _buckets(stage: Holding, graph: Graph) -> list[tuple[int, int]]:
    """Of each bucket of gradients: its earliest layer in the stage, and its bytes if they have to be put together."""
    found = buckets_of(stage.layers, graph, stage.tied)
    earliest = {name: place for place, layer in reversed([*enumerate(stage.layers)]) for name in layer.parameters}
    sizes = [sum(graph.parameters[name].num_bytes for name in names) if len(names) > 1 else 0 for names in found]
    return [(min(earliest[name] for name in names), size) for names, size in zip(found, sizes, strict=True)]


def buckets_of(layers: Sequence[Layer], graph: Graph, tied: Collection[str]) -> list[list[str]]:
    """Names of the parameters whose gradients move together, the last ones of the stage first."""
    names = dict.fromkeys(name for layer in layers for name in layer.parameters if name not in tied)
    found: list[list[str]] = []
    room = 0
    for name in reversed(names):
        size = graph.parameters[name].num_bytes
        if not found or size > room:
            found.append([])
            room = _BUCKET
        found[-1].append(name)
        room -= size
    return found


def _made(stage: Holding, graph: Graph) -> list[float]:
    """Gradients of parameters by layer; those that an earlier stage uses too come with the first layer."""
    if stage.made:
        return list(stage.made)
    names = [layer.name for layer in stage.layers]
    found = [0.0] * len(names)
    if stage.on_chip:
        return found
    seen: dict[str, str] = {}
    for layer in graph.layers:
        for name in layer.parameters:
            seen.setdefault(name, layer.name)
    for parameter in {name for layer in stage.layers for name in layer.parameters}:
        user = seen[parameter]
        found[names.index(user) if user in names else 0] += graph.parameters[parameter].num_bytes
    if stage.levels is None:
        return [stage.parameter_bytes, *[0.0] * (len(names) - 1)]
    return found


def _readers(graph: Graph, name: str) -> list[str]:
    return [
        layer.name for layer in graph.layers if any(x not in graph.inputs and producer(x) == name for x in layer.inputs)
    ]


def _bytes(message: Message, forward: bool) -> tuple[int, int]:
    """Of a message: all, and those of tensors that are copied into a frame."""
    sizes = [part.num_bytes for part in (message.parts if forward else message.gradient_parts)]
    return sum(sizes), sum(size for size in sizes if size < _SMALL)


def _buffer(size: int, small: int, is_block: bool) -> int:
    """Of a received message: behind its frame as much again, behind tensors on their own an eighth, of blocks none."""
    return size if is_block else size + min((size - small) // 8, _SPARE) + min(small, _SPARE)
