"""What a rank holds, step after step of its row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from planner.costs.compiled import PREPARE_STEP, RECEIVE_STEP, REDUCE_STEP, SEND_STEP, CompiledProgram
from planner.costs.holdings import Holdings
from planner.ir.program import receive_window
from planner.ir.schedule import Op


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
        self._buffers = [
            sum(found.buffers[message] for message in messages)
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
        self._frames = self._most_in_frames()
        self._with_gradients: set[int] = set()
        self._early: dict[int, int] = {}  # by stage, gradients that came with those of inputs
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

    def _receive(self, stage: int, microbatch: int, forward: bool, messages: Sequence[int]) -> None:
        came = self._buffers[self._num_received]
        self._posted -= came
        coming = self._num_received + self._window
        self._posted += self._buffers[coming] if coming < len(self._buffers) else 0
        self._num_received += 1
        (self._inputs if forward else self._seeds)[stage, microbatch] += came
        for message in messages:
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
        """Frames are kept for the next messages: as many as are ever under way at once."""
        most = now = 0
        for code, _, messages in self._compiled.rows[self._rank]:
            for message in messages if code in (SEND_STEP, RECEIVE_STEP) else ():
                if code == SEND_STEP:
                    now += self._found.sent[message][1]
                else:
                    now -= sum(self._found.sent[own][1] for own in self._found.acknowledged.get(message, ()))
            most = max(most, now)
        return most

    def _gradients(self) -> int:
        early = sum(size for stage, size in self._early.items() if stage not in self._with_gradients)
        return early + sum(self._found.gradients[self._rank, stage] for stage in self._with_gradients)

    def _activations(self) -> int:
        return self._kept + self._inputs.total() + self._seeds.total() + self._outgoing + self._frames

    def _total(self) -> int:
        return self._activations() + self._gradients() + self._posted

    def _held(self, position: int, workspace: int) -> Held:
        return Held(position, self._activations(), self._gradients(), self._posted, workspace, self._total())
