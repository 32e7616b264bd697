"""A program: a schedule with every message, reduction and update explicit.  What is simulated is what is executed.

``in_buckets`` says which gradients the runtime sums together; the cost model prices these buckets one by one.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from planner.ir.box import Box
from planner.ir.schedule import FORWARD_PASS, RECEIVE, SEND, Action, Op, StageGraph

BUCKET_BYTES = 8 * 2**20
"""Most bytes of gradients that are copied together; a larger gradient is summed where it is.

Smaller ones begin earlier.  Measured on two cores of one host over gloo, a network of 47 MB: what is left to wait for
after backward is 181 ms in one go, 69 ms in buckets of 32 MiB, 32 ms of 8 MiB.
"""


def in_buckets(
    sizes: Sequence[int], kinds: Sequence[Hashable] = (), bucket_bytes: int = BUCKET_BYTES
) -> tuple[tuple[int, ...], ...]:
    """Positions of parameters, from the last to the first as backward makes their gradients, in buckets of one kind.

    A parameter larger than ``bucket_bytes`` has a bucket of its own.

    Args:
        sizes: bytes of each parameter, in the order of the model.
        kinds: of each; only those of one kind may share a bucket.  Empty: all are alike.
    """
    buckets: list[list[int]] = []
    room_bytes = 0
    current = None
    for position in reversed(range(len(sizes))):
        kind = kinds[position] if kinds else True
        if kind != current or sizes[position] > room_bytes:
            buckets.append([])
            room_bytes = bucket_bytes
            current = kind
        buckets[-1].append(position)
        room_bytes -= sizes[position]
    return tuple(map(tuple, buckets))


ALONE_BYTES = 256 * 1024
"""From here a tensor is sent from where it lies instead of being copied into the frame (:mod:`runtime.transport.gloo`).

Measured on two cores of one host, there and back, median, copied against alone: 4 KiB 0.16 against 0.18 ms, 64 KiB 0.18
against 0.19 ms, 256 KiB 0.27 against 0.26 ms, 4 MiB 5.4 against 4.4 ms, 64 MiB 178 against 123 ms.
"""

SPARE_BYTES = 2**20
"""Bytes that follow a receive buffer at most, of a tensor on its own an eighth of it; untouched unless a message is
wrong."""

POSTED_BYTES = 16 * 2**20
LEAST_POSTED = 4


def receive_window(message_bytes: Iterable[int]) -> int:
    """How many receives a rank announces ahead, of messages of these sizes: 16 MiB of the largest, at least four.

    The more are announced, the less a sender waits (announcing all receives of a step of small messages halves what
    gloo costs); but each holds its buffer.  The runtime announces these, and the memory model counts them.
    """
    return max(LEAST_POSTED, POSTED_BYTES // max((1, *message_bytes)))


JOINED_BYTES = 64 * 2**10
"""Most bytes of several sends that travel as one message.

Small ones cost a message's latency each, and joined they cost it once; of large ones the first would wait for the bytes
of the others, while its reader, which comes first, waits for it.
"""


def num_joined(sizes: Sequence[int]) -> int:
    """How many of the messages before the last of ``sizes`` it travels with; 0: it begins a message.

    Args:
        sizes: bytes of what is sent one after another to one rank (:meth:`Program.sent_before`); first come, first
            joined.
    """
    count = total = 0
    for size in sizes:
        count = count + 1 if count and total + size <= JOINED_BYTES else 1
        total = total + size if count > 1 else size
    return max(0, count - 1)


@dataclass(frozen=True, slots=True)
class Part:
    """A box (in coordinates of the micro-batch) of one value.

    Attributes:
        is_copied: whether its elements do not follow one another where its sender has them: it is sent from a copy.
    """

    value: str
    box: Box
    num_bytes: int
    is_copied: bool = False


@dataclass(frozen=True, slots=True)
class Message:
    """What rank ``src`` sends to rank ``dst`` for one edge and micro-batch; ``src == dst`` is a hand-over in memory.

    ``parts`` go forward; those in ``gradient_parts`` come back, from ``dst`` to ``src``, and are added (the adjoint).
    """

    src: int
    dst: int
    parts: tuple[Part, ...]
    gradient_parts: tuple[Part, ...]

    @property
    def forward_bytes(self) -> int:
        """Payload of the activation."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def backward_bytes(self) -> int:
        """Payload of the gradient."""
        return sum(part.num_bytes for part in self.gradient_parts)


Route = tuple[int, int, int]
"""(source stage, destination stage, micro-batch)."""

Leg = tuple[int, Action, int]
"""(rank that sends, its send, rank that receives): what one send moves to one rank."""


@dataclass(frozen=True, slots=True)
class Program:
    """What every rank does in one step.

    Attributes:
        rows: actions by rank, in order.
        stages: the DAG of stages.
        ranks: the ranks of each stage.
        messages: by route; derived from the layouts by ``planner.layers.boundary``.
    """

    rows: tuple[tuple[Action, ...], ...]
    stages: StageGraph
    ranks: tuple[tuple[int, ...], ...]
    messages: Mapping[Route, tuple[Message, ...]]

    @property
    def trains(self) -> bool:
        """Whether it is more than forward passes."""
        return any(action.op not in FORWARD_PASS for row in self.rows for action in row)

    @property
    def blocking(self) -> bool:
        """Whether any of its messages holds its ranks while it travels."""
        return any(action.blocking for row in self.rows for action in row)

    @property
    def streams(self) -> str:
        """How its messages stream between devices that can; empty: they do not."""
        return next((action.streams for row in self.rows for action in row if action.streams), "")

    def messages_of(self, rank: int, action: Action) -> tuple[Message, ...]:
        """The messages that ``action``, a send or receive on ``rank``, moves between ranks."""
        edge = action.edge
        if edge is None or action.microbatch is None:
            return ()
        forward = action.op in (Op.SEND_FORWARD, Op.RECV_FORWARD)
        at_source = action.is_at_source
        return tuple(
            message
            for message in self.messages.get((*edge, action.microbatch), ())
            if message.src != message.dst
            and (message.src if at_source else message.dst) == rank
            and (message.parts if forward else message.gradient_parts)
        )

    def sent_before(self) -> dict[Leg, tuple[Action, ...]]:
        """By leg, the sends just before it to the same rank: what one action makes for several stages that are there.

        Only such as are received in the order in which they are sent; legs that have none before them are left out, and
        so are programs whose messages block or stream.
        """
        if self.blocking or self.streams or not self._sends_twice():
            return {}
        places = [{action: place for place, action in enumerate(row)} for row in self.rows]
        earlier_sends: dict[Leg, tuple[Action, ...]] = {}
        for rank, row in enumerate(self.rows):
            maker: tuple[object, ...] = ()
            before: dict[int, tuple[Action, ...]] = {}
            for action in row:
                made_by = (action.stage, action.op, action.microbatch)
                if made_by != maker:
                    maker = made_by
                    before = {}
                for message in self.messages_of(rank, action) if action.op in SEND else ():
                    other = message.src + message.dst - rank
                    earlier = before.get(other, ())
                    if earlier and not _in_order(places[other], earlier[-1], action):
                        earlier = ()
                    if earlier:
                        earlier_sends[rank, action, other] = earlier
                    before[other] = (*earlier, action)
        return earlier_sends

    def joined(self) -> dict[Leg, tuple[Action, ...]]:
        """By leg, the sends that it travels with in one message, which is named after the first of them.

        Legs that begin a message are left out.  The receive of the first takes it all, and those of the others find
        what is theirs there.
        """
        coalesced = {}
        for leg, before in self.sent_before().items():
            rank, send, other = leg
            count = num_joined([self.leg_bytes((rank, each, other)) for each in (*before, send)])
            if count:
                coalesced[leg] = before[-count:]
        return coalesced

    def leg_bytes(self, leg: Leg) -> int:
        """Payload of a leg."""
        rank, send, other = leg
        return sum(
            message.forward_bytes if send.op is Op.SEND_FORWARD else message.backward_bytes
            for message in self.messages_of(rank, send)
            if message.src + message.dst - rank == other
        )

    def _sends_twice(self) -> bool:
        """Whether a stage has two edges, of one direction, whose other ends have a rank in common."""
        ends: dict[tuple[bool, int], set[int]] = {}
        for edge in self.stages.edges:
            for key, far in (((True, edge.src), edge.dst), ((False, edge.dst), edge.src)):
                ranks_there = ends.setdefault(key, set())
                if not ranks_there.isdisjoint(self.ranks[far]):
                    return True
                ranks_there.update(self.ranks[far])
        return False

    def receive_window(self, rank: int) -> int:
        """:func:`receive_window` of the messages that ``rank`` receives."""
        received = (action for action in self.rows[rank] if action.op in RECEIVE)
        return receive_window(
            message.forward_bytes if action.op is Op.RECV_FORWARD else message.backward_bytes
            for action in received
            for message in self.messages_of(rank, action)
        )


_TAKES = {Op.SEND_FORWARD: Op.RECV_FORWARD, Op.SEND_BACKWARD: Op.RECV_BACKWARD}


def taken_by(send: Action) -> Action:
    """The receive of what ``send`` sends."""
    if send.peer is None:
        raise ValueError(f"{send} names no other stage")
    return Action(send.peer, _TAKES[send.op], send.microbatch, send.stage)


def sent_by(receive: Action) -> Action:
    """The send of what ``receive`` receives."""
    if receive.peer is None:
        raise ValueError(f"{receive} names no other stage")
    op = Op.SEND_FORWARD if receive.op is Op.RECV_FORWARD else Op.SEND_BACKWARD
    return Action(receive.peer, op, receive.microbatch, receive.stage)


def _in_order(places: Mapping[Action, int], first: Action, second: Action) -> bool:
    """Whether a row, given by the places of its actions, receives ``first`` before ``second``."""
    here = places.get(taken_by(first))
    there = places.get(taken_by(second))
    return here is not None and there is not None and here < there
