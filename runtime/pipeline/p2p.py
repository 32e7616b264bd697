"""The mailbox of one rank: pieces of tensors between the stages of a program, over the transport or within the rank.

What a stage makes is cut into the pieces that others read.  Those for other ranks wait in the outbox for their send,
those for stages of this rank go straight to where they are read.  Receives are announced ahead of their place in the
row, ``lookahead`` at a time, so that messages travel while this rank computes.

Small pieces that one action makes for several stages of one rank leave as one message
(:meth:`planner.ir.program.Program.joined`): the first of their sends takes them all, and at the other end the first of
their receives brings them; the other sends and receives of the row find nothing left to do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain

from torch import Tensor

from planner.ir.program import Leg, Program, Route, sent_by, taken_by
from planner.ir.schedule import RECEIVE, SEND, Action, Op
from runtime.pipeline.routing import CPU, MessageSlice, Piece, Routing
from runtime.rank import RankContext
from runtime.transport import Key, Spec

FORWARD = "F"
BACKWARD = "B"
"""Kinds of messages: activations and gradients."""

_Pieces = dict[str, list[Piece]]
"""By value."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """One message of this rank to another, or from it.

    Attributes:
        routes: along which its pieces go, each with the message of it.
        specs: shape and dtype of each tensor.
    """

    peer: int
    routes: tuple[tuple[Route, MessageSlice], ...]
    specs: tuple[Spec, ...]


@dataclass(frozen=True, slots=True)
class P2PTransfer:
    """What one send or receive moves between this rank and others.

    Attributes:
        kind: ``FORWARD`` or ``BACKWARD``.
        src, dst: the stage that sends and the one that receives (of a gradient, ``dst`` is the edge's source).
        parcels: the messages that leave or enter this rank with it.
    """

    kind: str
    src: int
    dst: int
    microbatch: int
    parcels: tuple[Parcel, ...]

    def key(self, turn: int) -> Key:
        """Equal at both ends."""
        return Key(turn, self.kind, self.src, self.dst, self.microbatch)


class P2PMailbox:
    """Moves the pieces of one row.

    Args:
        program: its row of this rank, and which sends travel in one message.
    """

    def __init__(self, context: RankContext, routing: Routing, program: Program) -> None:
        self._joined = dict(program.joined())
        self._behind: dict[Leg, list[Action]] = {}  # by the leg that a message is named after, what else is in it
        for (rank, send, other), before in self._joined.items():
            self._behind.setdefault((rank, before[0], other), []).append(send)
        self._routing = routing
        self._transport = context.transport
        self._device = context.device or CPU
        self._moves_device = self._device.type != "cpu"
        self._lookahead = context.lookahead or program.receive_window(context.rank)
        self._receives = tuple(self._moved(each) for each in program.rows[context.rank] if each.op in RECEIVE)
        self._turn = self._num_posted = 0
        self._arrived: dict[tuple[str, int, int], _Pieces] = {}  # by kind, stage and micro-batch
        self._outbox: dict[tuple[str, Route, int], tuple[Tensor, ...]] = {}

    def begin(self, turn: int) -> None:
        """Forget the last step and announce the first receives of this one."""
        self._turn = turn
        self._num_posted = 0
        self._arrived.clear()
        self._outbox.clear()
        self._announce(self._lookahead)

    @property
    def num_left(self) -> int:
        """Pieces that came and were not taken, and messages that wait to be sent."""
        return len(self._outbox) + sum(map(len, self._arrived.values()))

    def take(self, kind: str, stage: int, microbatch: int) -> Mapping[str, list[Piece]]:
        """The pieces that have come for ``stage``, by value; they are not kept."""
        return self._arrived.pop((kind, stage, microbatch), {})

    def hand_out(self, kind: str, route: Route, tensors: Mapping[str, Tensor]) -> None:
        """Cuts what goes along ``route`` (a gradient goes from its destination to its source)."""
        forward = kind == FORWARD
        wires = (self._routing.forward_out if forward else self._routing.backward_out)[route]
        reader = route[1] if forward else route[0]
        for wire in wires:
            cut = tuple(
                [
                    tensors[value] if index is None else tensors[value][index]
                    for value, index in zip(wire.values, wire.cuts, strict=True)
                ]
            )
            if wire.peer == self._transport.rank:
                self._put(kind, reader, route[2], wire, cut)
            else:
                self._outbox[kind, route, wire.peer] = cut

    def handler(self, action: Action) -> Callable[[], None]:
        """What does ``action``, a send or receive of the row."""
        traffic = self._moved(action)
        return (
            partial(self._receive, traffic) if action.op in RECEIVE else partial(self._send, traffic, action.blocking)
        )

    def _send(self, traffic: P2PTransfer, blocking: bool) -> None:
        """Sends what waits for it; where it blocks, until it has been taken."""
        key = traffic.key(self._turn)
        for parcel in traffic.parcels:
            pieces = [self._outbox.pop((traffic.kind, route, parcel.peer)) for route, _ in parcel.routes]
            self._transport.send(key, parcel.peer, pieces[0] if len(pieces) == 1 else tuple(chain(*pieces)))
        if blocking:
            self._transport.flush()

    def _receive(self, traffic: P2PTransfer) -> None:
        """Waits for its messages, and announces the next receive."""
        key = traffic.key(self._turn)
        for parcel in traffic.parcels:
            tensors = self._transport.receive(key, parcel.peer)
            if self._moves_device:
                tensors = tuple(tensor.to(self._device, non_blocking=True) for tensor in tensors)
            first = 0
            for route, wire in parcel.routes:
                last = first + len(wire.specs)
                reader = route[1] if traffic.kind == FORWARD else route[0]
                self._put(traffic.kind, reader, traffic.microbatch, wire, tensors[first:last])
                first = last
        self._announce(1)

    def flush(self) -> None:
        """Waits until all that was sent has been taken."""
        self._transport.flush()

    def _announce(self, count: int) -> None:
        for traffic in self._receives[self._num_posted : self._num_posted + count]:
            key = traffic.key(self._turn)
            for parcel in traffic.parcels:
                self._transport.post_receive(key, parcel.peer, parcel.specs)
        self._num_posted += count

    def _put(self, kind: str, stage: int, microbatch: int, wire: MessageSlice, tensors: tuple[Tensor, ...]) -> None:
        where = self._arrived.setdefault((kind, stage, microbatch), {})
        for value, box, tensor in zip(wire.values, wire.boxes, tensors, strict=True):
            where.setdefault(value, []).append((box, tensor))

    def _moved(self, action: Action) -> P2PTransfer:
        """What ``action`` moves, with what else travels in the same messages."""
        rank = self._transport.rank
        sends = action.op in SEND
        kind, route, wires = self._wires(action)
        src, dst = route[:2] if kind == FORWARD else route[1::-1]
        parcels = []
        for wire in wires:
            if wire.peer == rank:
                continue
            leg = (rank, action, wire.peer) if sends else (wire.peer, sent_by(action), rank)
            if leg in self._joined:
                continue
            routes = [(route, wire)]
            for send in self._behind.get(leg, ()):
                _, other, theirs = self._wires(send if sends else taken_by(send))
                routes += [(other, each) for each in theirs if each.peer == wire.peer]
            parcels.append(Parcel(wire.peer, tuple(routes), tuple(spec for _, each in routes for spec in each.specs)))
        return P2PTransfer(kind, src, dst, route[2], tuple(parcels))

    def _wires(self, action: Action) -> tuple[str, Route, tuple[MessageSlice, ...]]:
        """The kind of what a send or receive moves, along which route, and its messages, those within the rank too."""
        stage = action.stage
        peer = action.peer or 0
        microbatch = action.microbatch or 0
        routing = self._routing
        match action.op:
            case Op.SEND_FORWARD:
                kind = FORWARD
                route = (stage, peer, microbatch)
                wires = routing.forward_out
            case Op.RECV_FORWARD:
                kind = FORWARD
                route = (peer, stage, microbatch)
                wires = routing.forward_in
            case Op.SEND_BACKWARD:
                kind = BACKWARD
                route = (peer, stage, microbatch)
                wires = routing.backward_out
            case _:
                kind = BACKWARD
                route = (stage, peer, microbatch)
                wires = routing.backward_in
        return kind, route, wires[route]
