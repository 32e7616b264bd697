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
from functools import partial
from itertools import chain
from typing import NamedTuple

from torch import Tensor

from planner.ir.program import Leg, Program, Route, sent_by, taken_by
from planner.ir.schedule import RECEIVE, SEND, Action, Op
from runtime.pipeline.routing import CPU, FORWARD, MessageSlice, Piece, Routing
from runtime.rank import RankContext
from runtime.transport import Spec

_ByValue = dict[str, list[Piece]]


class _JoinedMessage(NamedTuple):
    """What one message carries: one slice, or small ones of several routes; its key is the first one's.

    Attributes:
        specs: of all its tensors.
    """

    slices: tuple[MessageSlice, ...]
    specs: tuple[Spec, ...]


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
        self._receives = tuple(self._messages(each) for each in program.rows[context.rank] if each.op in RECEIVE)
        self._turn = self._num_posted = 0
        self._arrived: dict[tuple[str, int, int], _ByValue] = {}  # by kind, stage and micro-batch
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
        slices = self._routing.forward_out if kind == FORWARD else self._routing.backward_out
        for each in slices[route]:
            cut = tuple(
                [
                    tensors[value] if index is None else tensors[value][index]
                    for value, index in zip(each.values, each.cuts, strict=True)
                ]
            )
            if each.peer == self._transport.rank:
                self._put(each, cut)
            else:
                self._outbox[kind, route, each.peer] = cut

    def handler(self, action: Action) -> Callable[[], None]:
        """What does ``action``, a send or receive of the row."""
        messages = self._messages(action)
        if action.op in RECEIVE:
            return partial(self._receive, messages)
        return partial(self._send, messages, action.blocking)

    def _send(self, messages: tuple[_JoinedMessage, ...], blocking: bool) -> None:
        """Sends what waits for it; where it blocks, until it has been taken."""
        for slices, _ in messages:
            first = slices[0]
            pieces = [self._outbox.pop((each.kind, each.route, each.peer)) for each in slices]
            tensors = pieces[0] if len(pieces) == 1 else tuple(chain(*pieces))
            self._transport.send(first.key(self._turn), first.peer, tensors)
        if blocking:
            self._transport.flush()

    def _receive(self, messages: tuple[_JoinedMessage, ...]) -> None:
        """Waits for its messages, and announces the next receive."""
        for slices, _ in messages:
            tensors = self._transport.receive(slices[0].key(self._turn), slices[0].peer)
            if self._moves_device:
                tensors = tuple(tensor.to(self._device, non_blocking=True) for tensor in tensors)
            first = 0
            for each in slices:
                last = first + len(each.specs)
                self._put(each, tensors[first:last])
                first = last
        self._announce(1)

    def flush(self) -> None:
        """Waits until all that was sent has been taken."""
        self._transport.flush()

    def _announce(self, count: int) -> None:
        for messages in self._receives[self._num_posted : self._num_posted + count]:
            for slices, specs in messages:
                self._transport.post_receive(slices[0].key(self._turn), slices[0].peer, specs)
        self._num_posted += count

    def _put(self, arrived: MessageSlice, tensors: tuple[Tensor, ...]) -> None:
        pieces = self._arrived.setdefault((arrived.kind, arrived.reader, arrived.route[2]), {})
        for value, box, tensor in zip(arrived.values, arrived.boxes, tensors, strict=True):
            pieces.setdefault(value, []).append((box, tensor))

    def _messages(self, action: Action) -> tuple[_JoinedMessage, ...]:
        """What leaves or enters this rank with ``action``, with what else travels in the same messages."""
        rank = self._transport.rank
        sends = action.op in SEND
        messages: list[_JoinedMessage] = []
        for own in self._slices(action):
            leg = (rank, action, own.peer) if sends else (own.peer, sent_by(action), rank)
            if own.peer == rank or leg in self._joined:
                continue
            others = [self._slices(send if sends else taken_by(send)) for send in self._behind.get(leg, ())]
            slices = (own, *(each for each in chain(*others) if each.peer == own.peer))
            messages.append(_JoinedMessage(slices, tuple(chain(*(each.specs for each in slices)))))
        return tuple(messages)

    def _slices(self, action: Action) -> tuple[MessageSlice, ...]:
        """What a send or receive moves, within the rank too."""
        stage = action.stage
        other_stage = action.peer or 0
        microbatch = action.microbatch or 0
        routing = self._routing
        match action.op:
            case Op.SEND_FORWARD:
                return routing.forward_out[stage, other_stage, microbatch]
            case Op.RECV_FORWARD:
                return routing.forward_in[other_stage, stage, microbatch]
            case Op.SEND_BACKWARD:
                return routing.backward_out[other_stage, stage, microbatch]
            case _:
                return routing.backward_in[stage, other_stage, microbatch]
