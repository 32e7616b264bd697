"""Executes one rank's row of a program, action by action, and notes when each of them ran.

What is sent, and when, is the program's decision.  The executor adds one thing: receives are announced ahead of their
place in the row, ``lookahead`` at a time, so that messages travel while this rank computes (a receive in the row is
where the message is waited for).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from planner.ir.errors import HalopipeError
from planner.ir.program import Program, Route
from planner.ir.schedule import RECEIVE, SEND, Action, Op
from planner.ir.timeline import Span
from runtime.activity import Activity
from runtime.context import Context
from runtime.pieces import Piece, add_up, assemble
from runtime.plumbing import Plumbing, Wire
from runtime.resident import Resident
from runtime.transport import Key, Transport


@dataclass(frozen=True, slots=True)
class _Task:
    action: Action
    text: str
    run: Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Traffic:
    """One send or receive.

    Attributes:
        kind: ``F`` or ``B``.
        src, dst: the stage that sends and the one that receives (of a gradient, ``dst`` is the edge's source).
        wires: its messages that leave or enter this rank.
    """

    kind: str
    src: int
    dst: int
    microbatch: int
    route: Route
    wires: tuple[Wire, ...]

    def key(self, step: int) -> Key:
        """Equal at both ends."""
        return Key(step, self.kind, self.src, self.dst, self.microbatch)


class Executor:
    """One rank's row, ready to be run step after step.

    Args:
        residents: the stages of this rank.
        context: says where something failed.
        deadline_s: longest wait for a message or a sum.
        activity: told what is done.
    """

    def __init__(
        self,
        program: Program,
        residents: Mapping[int, Resident],
        plumbing: Plumbing,
        transport: Transport,
        *,
        context: Context,
        deadline_s: float,
        lookahead: int,
        activity: Activity,
    ) -> None:
        self._program, self._residents, self._plumbing, self._transport = program, residents, plumbing, transport
        self._rank = transport.rank
        self._context, self._deadline_s, self._lookahead = context, deadline_s, lookahead
        self._activity = activity
        row = program.rows[self._rank]
        self._tasks = tuple(_Task(action, str(action), self._handler(action)) for action in row)
        self._receives = tuple(self._traffic(action) for action in row if action.op in RECEIVE)
        self._inputs: tuple[torch.Tensor, ...] = ()
        self._step = self._num_posted = 0
        # By stage and micro-batch, then by value: pieces of inputs, and of gradients of outputs.
        self._activations: defaultdict[tuple[int, int], defaultdict[str, list[Piece]]] = defaultdict(_by_value)
        self._gradients: defaultdict[tuple[int, int], defaultdict[str, list[Piece]]] = defaultdict(_by_value)
        self._outbox: dict[tuple[str, Route, int], tuple[torch.Tensor, ...]] = {}

    def prepare(self, step: int, inputs: tuple[torch.Tensor, ...]) -> None:
        """Forget the last step, announce the first receives of this one and wait until every rank is there.

        Args:
            inputs: the global batch, in the order of the graph's inputs.
        """
        self._activity.begin("waiting for the others to start the step")
        self._activity.step, self._activity.deadline_s = step, self._deadline_s
        self._step, self._inputs = step, inputs
        for resident in self._residents.values():
            resident.reset()
        self._activations.clear()
        self._gradients.clear()
        self._outbox.clear()
        self._num_posted = 0
        self._post(self._lookahead)
        try:
            self._transport.barrier(self._deadline_s)
        except HalopipeError as error:
            raise self._context.of(error, self._step, "waiting for the others to start") from error

    def run(self) -> tuple[list[Span], list[float]]:
        """Execute the row; spans, and this thread's processor time in each, in the order of the row.

        Raises:
            StageFailedError: a stage raised; DeadlineError, TransportError: a message failed.  The text says where.
        """
        spans, thread_s = [], []
        origin = time.perf_counter()
        for task in self._tasks:
            self._activity.begin(task.text)
            cpu, start = time.thread_time(), time.perf_counter()
            try:
                task.run()
            except Exception as error:
                raise self._context.of_action(error, self._step, task.action) from error
            spans.append(Span(self._rank, task.text, start - origin, time.perf_counter() - origin))
            thread_s.append(time.thread_time() - cpu)
        self._activity.begin("waiting until all messages are taken")
        try:
            self._transport.flush(self._deadline_s)
        except HalopipeError as error:
            raise self._context.of(error, self._step, "waiting until all messages are taken") from error
        self._activity.begin("between steps")
        return spans, thread_s

    def _forward(self, action: Action) -> None:
        stage, microbatch = action.stage, _microbatch(action)
        resident, plumbing = self._residents[stage], self._plumbing
        pieces = self._activations.pop((stage, microbatch), {})
        values = resident.feed(self._inputs, microbatch)
        for value in resident.received:
            box = plumbing.held(value, stage, microbatch)
            values[value] = assemble(pieces.get(value, ()), box, plumbing.dtype(value))
        outputs = resident.forward(microbatch, values)
        for edge in self._program.stages.out_of(stage):
            route = (stage, edge.dst, microbatch)
            self._hand_out("F", route, plumbing.forward_out[route], outputs, self._activations[edge.dst, microbatch])

    def _backward(self, action: Action) -> None:
        stage, microbatch = action.stage, _microbatch(action)
        resident, plumbing = self._residents[stage], self._plumbing
        pieces = self._gradients.pop((stage, microbatch), {})
        # Zeros where none came: a rank with an empty share must still take part in what its stage does together.
        gradients = {
            value: add_up(pieces.get(value, ()), plumbing.held(value, stage, microbatch), plumbing.dtype(value))
            for value in resident.handed_on
        }
        whole = action.op is Op.BACKWARD
        found = (resident.program.backward if whole else resident.program.backward_input)(microbatch, gradients)
        for edge in self._program.stages.into(stage):
            route = (edge.src, stage, microbatch)
            self._hand_out("B", route, plumbing.backward_out[route], found, self._gradients[edge.src, microbatch])

    def _backward_weight(self, action: Action) -> None:
        self._residents[action.stage].program.backward_weight(_microbatch(action))

    def _reduce(self, action: Action) -> None:
        self._residents[action.stage].reduce_gradients()

    def _update(self, action: Action) -> None:
        self._residents[action.stage].update()

    def _hand_out(
        self,
        kind: str,
        route: Route,
        wires: tuple[Wire, ...],
        tensors: Mapping[str, torch.Tensor],
        own: defaultdict[str, list[Piece]],
    ) -> None:
        """What other ranks need waits in the outbox for its send; what this rank needs itself goes to ``own``."""
        for wire in wires:
            cut = tuple(tensors[value][index] for value, index in zip(wire.values, wire.cuts, strict=True))
            if wire.peer == self._rank:
                _put(own, wire, cut)
            else:
                self._outbox[kind, route, wire.peer] = cut

    def _send(self, traffic: _Traffic) -> None:
        key = traffic.key(self._step)
        for wire in traffic.wires:
            self._transport.send(key, wire.peer, self._outbox.pop((traffic.kind, traffic.route, wire.peer)))

    def _receive(self, traffic: _Traffic) -> None:
        key = traffic.key(self._step)
        arrived = (self._activations if traffic.kind == "F" else self._gradients)[traffic.dst, traffic.microbatch]
        for wire in traffic.wires:
            _put(arrived, wire, self._transport.receive(key, wire.peer, self._deadline_s))
        self._post(1)

    def _post(self, count: int) -> None:
        """Announce the next ``count`` receives of the row."""
        for traffic in self._receives[self._num_posted : self._num_posted + count]:
            key = traffic.key(self._step)
            for wire in traffic.wires:
                self._transport.post_receive(key, wire.peer, wire.specs)
        self._num_posted += count

    def _handler(self, action: Action) -> Callable[[], None]:
        if action.op in SEND:
            return partial(self._send, self._traffic(action))
        if action.op in RECEIVE:
            return partial(self._receive, self._traffic(action))
        handlers: dict[Op, Callable[[Action], None]] = {
            Op.FORWARD: self._forward,
            Op.BACKWARD: self._backward,
            Op.BACKWARD_INPUT: self._backward,
            Op.BACKWARD_WEIGHT: self._backward_weight,
            Op.REDUCE_GRAD: self._reduce,
            Op.UPDATE: self._update,
        }
        return partial(handlers[action.op], action)

    def _traffic(self, action: Action) -> _Traffic:
        """What a send or receive moves between this rank and others."""
        stage, peer, microbatch, plumbing = action.stage, action.peer, _microbatch(action), self._plumbing
        src, dst = (peer, stage) if action.op in RECEIVE else (stage, peer)
        match action.op:
            case Op.SEND_FORWARD:
                kind, route, wires = "F", (src, dst, microbatch), plumbing.forward_out
            case Op.RECV_FORWARD:
                kind, route, wires = "F", (src, dst, microbatch), plumbing.forward_in
            case Op.SEND_BACKWARD:
                kind, route, wires = "B", (dst, src, microbatch), plumbing.backward_out
            case _:
                kind, route, wires = "B", (dst, src, microbatch), plumbing.backward_in
        return _Traffic(kind, src, dst, microbatch, route, tuple(w for w in wires[route] if w.peer != self._rank))


def _by_value() -> defaultdict[str, list[Piece]]:
    return defaultdict(list)


def _put(where: defaultdict[str, list[Piece]], wire: Wire, tensors: tuple[torch.Tensor, ...]) -> None:
    for value, box, tensor in zip(wire.values, wire.boxes, tensors, strict=True):
        where[value].append((box, tensor))


def _microbatch(action: Action) -> int:
    if action.microbatch is None:
        raise ValueError(f"{action} names no micro-batch")
    return action.microbatch
