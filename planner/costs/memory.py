"""How much memory a plan takes on each rank, action by action.

    parameters + optimiser state (or a part of it) + buffers              all the time; of forward passes alone no
                                                                          state; all versions of parameters in use
    the batch, whole                                                      all the time: every rank is given it
    prepared inputs (kernel maps)                                         from their making to the end of the step
    receive buffers, with room to spare                                   from their announcement to their receive
    what was received                                                     from then to the end of B (or W)
    saved activations, and sent outputs that nobody saves                 from F to B (or W), per micro-batch
    gradients of parameters                                               from the first B (or W) on, in which they come
                                                                          layer by layer
    gradients sent                                                        until a message tells that they came
    the stage's highest level (planner.costs.levels)                      while F, B, I or W runs
    the largest bucket of gradients                                       while they are summed
    what the update of the largest parameter needs                        while the optimiser runs

A backward in two halves keeps, from I to W, what the weight gradients that come later are computed from, and lets the
rest go.  A stage that recomputes keeps received inputs alone, and has its activations back while B runs, or from I to
W.  What a rank holds depends on the order of its row alone, not on times.  Ignored: what a process takes before it has
a model (interpreter, libraries), what libraries take without torch's allocator (oneDNN and MKL little), what passes
between stages of one rank, and fragmentation.  Where layers have layouts of their own a rank holds its parts of their
parameters, and what its group sent it; every action then needs the workspace of the hungriest layer beyond all that is
saved.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from planner.costs.compiled import PREPARE_STEP, RECEIVE_STEP, REDUCE_STEP, SEND_STEP, CompiledProgram
from planner.costs.courses import ALONE_BYTES, Activation, activation_of
from planner.costs.stage import StageCosts, StagePlacement
from planner.costs.tables import layers_of, span
from planner.ir.program import receive_window
from planner.ir.schedule import Op

BUCKET_BYTES = 8 * 2**20
"""Most bytes of gradients that the runtime copies together to sum them."""
SPARE_BYTES = 2**20
"""Room behind a receive buffer: at most so much, of a tensor on its own an eighth of it."""


@dataclass(frozen=True, slots=True)
class Resident:
    """Bytes that a rank holds; ``gradients`` and ``receive_buffers`` are those of a moment, the rest stays."""

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    receive_buffers: int
    batch: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        held = self.parameters + self.gradients + self.optimizer + self.buffers
        return held + self.receive_buffers + self.batch


@dataclass(frozen=True, slots=True)
class RankMemory:
    """What a rank holds when it holds most, by part."""

    resident: Resident
    activations: int
    workspace: int

    @property
    def peak_bytes(self) -> int:
        """The sum of the parts."""
        return self.resident.total + self.activations + self.workspace

    def parts(self) -> dict[str, int]:
        """Bytes by part, in words."""
        return {
            "parameters": self.resident.parameters,
            "gradients": self.resident.gradients,
            "optimiser state": self.resident.optimizer,
            "buffers": self.resident.buffers,
            "batch": self.resident.batch,
            "receive buffers": self.resident.receive_buffers,
            "activations": self.activations,
            "workspace": self.workspace,
        }


@dataclass(frozen=True, slots=True)
class Holdings:
    """What the actions of a program do to memory, in bytes.

    Attributes:
        activations: by activation slot.
        gradients: of parameters, by rank and stage.
        messages: payload by message.
        acknowledged: by message, of gradients that its receiver then knows to have come.
        update, reduction: what an update, and a sum of gradients, need besides, by rank and stage.
        prepared: what the host makes of a micro-batch, by rank, stage and micro-batch.
    """

    activations: tuple[Activation, ...]
    gradients: dict[tuple[int, int], int]
    messages: tuple[int, ...]
    acknowledged: dict[int, int]
    update: dict[tuple[int, int], int]
    reduction: dict[tuple[int, int], int]
    prepared: dict[tuple[int, int, int], int]


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


def resident(costs: StageCosts, compiled: CompiledProgram, transfer_bytes: Sequence[int]) -> tuple[Resident, ...]:
    """What each rank holds throughout, hence no gradients and no receive buffers.

    Args:
        transfer_bytes: by transfer slot.
    """
    versions = compiled.versions
    batch = _batch_bytes(costs)
    found = []
    for rank, row in enumerate(compiled.rows):
        stages = [stage for stage in costs.stages if rank in stage.ranks]
        parameters = costs.parameter_bytes(rank)
        divided = sum(_left_to_others(stage) for stage in stages)
        state_of = parameters - divided if compiled.trains[rank] else 0
        state = round(state_of * costs.book.profile.optimizer.state_bytes_per_parameter_byte)
        older = sum(
            (versions[number] - 1) * stage.parameter_bytes
            for number, stage in enumerate(costs.stages)
            if rank in stage.ranks and versions[number] > 1
        )
        buffers = round(sum(span(costs.book.tables.graph.buffer_bytes, stage.runs) for stage in stages))
        found.append(Resident(parameters + older, 0, state, buffers, 0, batch if row else 0))
    return tuple(found)


def activations(costs: StageCosts, compiled: CompiledProgram, transfer_bytes: Sequence[int]) -> Holdings:
    """What :func:`walk` needs to know of all ranks.

    Args:
        transfer_bytes: by transfer slot.
    """
    sent, seeds = Counter[tuple[int, int, int]](), Counter[tuple[int, int, int]]()
    for slot, transfer in enumerate(compiled.transfers):
        src, _, microbatch = transfer.route
        size = costs.micro_batches[microbatch]
        if transfer.forward:
            sent[transfer.src, src, size] += transfer_bytes[slot]
        else:
            seeds[transfer.dst, src, size] += buffer_bytes(transfer_bytes[slot])
    found = []
    for each in compiled.activations:
        stage = costs.stages[each.stage]
        key = (each.rank, each.stage, costs.micro_batches[each.microbatch])
        member = stage.ranks.index(each.rank)
        found.append(activation_of(costs, each.stage, member, each.microbatch, sent[key], seeds[key]))
    gradients, update, reduction = {}, {}, {}
    needs = _update_needs(costs)
    for number, stage in enumerate(costs.stages):
        for rank in stage.ranks:
            own = stage.parameter_bytes
            if stage.once is not None:
                own = round(float(stage.once.parameter_bytes[stage.ranks.index(rank)]))
            gradients[rank, number] = own if compiled.trains[rank] else 0
            update[rank, number] = round(needs * _largest_parameter(costs, stage))
            reduction[rank, number] = min(BUCKET_BYTES, own) if len(stage.ranks) > 1 else 0
    prepared = {
        (rank, action.stage, action.microbatch or 0): costs.prepared_bytes(
            action.stage, costs.stages[action.stage].ranks.index(rank), action.microbatch or 0
        )
        for rank, row in enumerate(compiled.grid)
        for action in row
        if action.op is Op.PREPARE
    }
    payloads = tuple(transfer_bytes[slot] for slot, _ in compiled.messages)
    acknowledged = _acknowledged(compiled, payloads)
    return Holdings(tuple(found), gradients, payloads, acknowledged, update, reduction, prepared)


def walk(compiled: CompiledProgram, rank: int, found: Holdings) -> Iterator[Held]:
    """What the rank holds, step after step, as far as that changes."""
    yield from _Walk(compiled, rank, found).steps()


def rank_memories(
    costs: StageCosts, compiled: CompiledProgram, transfer_bytes: Sequence[int]
) -> tuple[RankMemory, ...]:
    """What each rank holds when it holds most."""
    holdings = activations(costs, compiled, transfer_bytes)
    found = []
    for rank, always in enumerate(resident(costs, compiled, transfer_bytes)):
        steps = walk(compiled, rank, holdings)
        most = max(steps, key=lambda step: step.during + step.workspace, default=Held(0, 0, 0, 0, 0, 0))
        buffers = always.receive_buffers + most.receive_buffers
        at_peak = replace(always, gradients=most.gradients, receive_buffers=buffers)
        found.append(RankMemory(at_peak, most.activations, most.workspace))
    return tuple(found)


def buffer_bytes(payload: int) -> int:
    """What a message of ``payload`` bytes takes where it is received, about.

    Behind a tensor on its own there is an eighth of it to spare, behind a frame of small ones as much again.  How many
    of its tensors are small is not known here: of a large message it is taken to be an eighth, up to half of such one.
    """
    if payload < ALONE_BYTES:
        return payload + min(payload, SPARE_BYTES)
    eighth = payload // 8
    return payload + min(eighth, SPARE_BYTES) + min(eighth, ALONE_BYTES // 2)


class _Walk:
    """The row of a rank, step by step."""

    def __init__(self, compiled: CompiledProgram, rank: int, found: Holdings) -> None:
        self._compiled, self._rank, self._found = compiled, rank, found
        self._buffers = [
            sum(buffer_bytes(found.messages[message]) for message in messages)
            for code, _, messages in compiled.rows[rank]
            if code == RECEIVE_STEP
        ]
        window = receive_window(
            found.messages[message]
            for code, _, messages in compiled.rows[rank]
            if code == RECEIVE_STEP
            for message in messages
        )
        self._window = window
        self._num_received = 0
        self._posted = sum(self._buffers[:window])
        self._kept = 0  # of micro-batches under way, what their stages keep
        self._inputs: Counter[tuple[int, int]] = Counter()  # by stage and micro-batch, what was received for its F
        self._seeds: Counter[tuple[int, int]] = Counter()  # and for its B
        self._outgoing = 0
        self._with_gradients: set[int] = set()
        self._computed_again = Counter[int]()
        self._last = {a.stage: p for p, a in enumerate(compiled.grid[rank]) if a.op is Op.UPDATE}

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
                self._receive(action.stage, action.microbatch or 0, action.op is Op.RECV_FORWARD, messages)
            elif code == SEND_STEP:
                if action.op is Op.SEND_BACKWARD:
                    self._outgoing += sum(self._found.messages[message] for message in messages)
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

    def _receive(self, stage: int, microbatch: int, forward: bool, messages: Sequence[int]) -> None:
        came = self._buffers[self._num_received]
        self._posted -= came
        coming = self._num_received + self._window
        self._posted += self._buffers[coming] if coming < len(self._buffers) else 0
        self._num_received += 1
        (self._inputs if forward else self._seeds)[stage, microbatch] += came
        for message in messages:
            self._outgoing -= self._found.acknowledged.get(message, 0)

    def _alone(self, position: int, slot: int, key: tuple[int, int]) -> Held:
        """A forward that nothing follows."""
        activation = self._found.activations[slot]
        held = self._held(position, activation.course.unrecorded)
        self._inputs.pop(key, None)
        return replace(held, after=self._total())

    def _compute(self, position: int, slot: int, sign: int, key: tuple[int, int], op: Op) -> Held:
        activation = self._found.activations[slot]
        course, again = activation.course, activation.recompute
        self._seeds.pop(key, None)
        before = self._total()
        if sign > 0:
            top = before + (course.unrecorded if activation.recompute else course.forward)
            self._kept += activation.kept
        elif sign == 0:
            rest = before - activation.saved
            top = rest + max(course.backward_input, course.forward if again else 0)
            self._kept += course.left - activation.saved
            self._computed_again[slot] += 1
        elif self._computed_again[slot]:
            self._computed_again[slot] -= 1
            top = before - course.left + self._first_or_later(key[0], course.weight_first, course.weight_later)
            self._kept -= course.left + activation.kept - activation.saved
            self._inputs.pop(key, None)
        else:
            rest = before - activation.saved
            level = self._first_or_later(key[0], course.backward_first, course.backward_later)
            top = rest + max(level, course.forward if again else 0)
            self._kept -= activation.kept
            self._inputs.pop(key, None)
        if sign < 0:
            self._with_gradients.add(key[0])
        after = self._held(position, 0)
        return replace(after, workspace=max(0, top - after.during))

    def _first_or_later(self, stage: int, first: int, later: int) -> int:
        """Where there are several versions of weights, each micro-batch has gradients of its own, added at the end."""
        return later if stage in self._with_gradients and self._compiled.versions[stage] < 2 else first

    def _gradients(self) -> int:
        return sum(self._found.gradients[self._rank, stage] for stage in self._with_gradients)

    def _activations(self) -> int:
        return self._kept + self._inputs.total() + self._seeds.total() + self._outgoing

    def _total(self) -> int:
        return self._activations() + self._gradients() + self._posted

    def _held(self, position: int, workspace: int) -> Held:
        return Held(position, self._activations(), self._gradients(), self._posted, workspace, self._total())


def _acknowledged(compiled: CompiledProgram, payloads: Sequence[int]) -> dict[int, int]:
    """By message: bytes of gradients of which it tells its receiver that they came.

    A message tells which ones had come when it was sent (:mod:`runtime.transport.peer`).
    """
    gradients: list[int] = []
    received_at: dict[int, int] = {}
    sent: dict[tuple[int, int], list[tuple[int, int]]] = {}  # by (sender, receiver): (position, message), ascending
    for row, actions in zip(compiled.rows, compiled.grid, strict=True):
        for position, ((code, _, messages), action) in enumerate(zip(row, actions, strict=True)):
            if code == RECEIVE_STEP:
                received_at.update(dict.fromkeys(messages, position))
            elif code == SEND_STEP:
                gradients += messages if action.op is Op.SEND_BACKWARD else ()
                for message in messages:
                    ends = compiled.channels[compiled.messages[message][1]]
                    sent.setdefault(ends, []).append((position, message))
    found: dict[int, int] = {}
    for message in gradients:
        src, dst = compiled.channels[compiled.messages[message][1]]
        answers = sent.get((dst, src), [])
        first = bisect_right(answers, (received_at[message], len(payloads)))
        if first < len(answers):
            answer = answers[first][1]
            found[answer] = found.get(answer, 0) + payloads[message]
    return found


def _batch_bytes(costs: StageCosts) -> int:
    """Of the inputs and targets of a step that are not prepared."""
    graph = costs.book.profile.graph
    prepared = costs.book.preparations.inputs
    whole = sum(costs.micro_batches) / graph.samples
    return round(
        sum(
            spec.num_bytes * (whole if spec.has_samples else 1)
            for name, spec in graph.inputs.items()
            if name not in prepared
        )
    )


def _largest_parameter(costs: StageCosts, stage: StagePlacement) -> int:
    graph = costs.book.profile.graph
    names = (name for index in layers_of(stage.runs) for name in graph.layers[index].parameters)
    return max((graph.parameters[name].num_bytes for name in names), default=0)


def _left_to_others(stage: StagePlacement) -> int:
    """Bytes of parameters whose optimiser's state other ranks of the stage hold."""
    return stage.own_bytes - -(-stage.own_bytes // len(stage.ranks)) if stage.sharded else 0


def _update_needs(costs: StageCosts) -> float:
    """What an update needs besides, in sizes of a parameter: copies that the optimiser makes on its way."""
    optimizer = costs.book.profile.optimizer
    if optimizer.state_bytes_per_parameter_byte >= 2:
        return 2.0
    return 1.0 if optimizer.arguments.get("weight_decay", 0.0) else 0.0
