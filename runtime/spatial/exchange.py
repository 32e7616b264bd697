"""One tensor inside a stage: every rank has a box of it, and gets the box that its next layer reads.

    held      rank 0 [0, 4)   rank 1 [4, 8)                 what each rank has
    wanted    rank 0 [0, 5)   rank 1 [3, 8)                 what each rank gets, inside the tensor
    moves     1 -> 0 [4, 5)   0 -> 1 [3, 4)                 planner.layers.division.Division.moves

Forward, pieces are copied out of what is held.  Backward is the adjoint: gradients of pieces go back the same way and
are added up where they came from.  Halos, gathers of channels and changes of layout are all of this form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from planner.ir.box import Box, Transfer, intersect, volume
from runtime.pipeline.routing import DimCuts, Piece, cuts_of, narrowed
from runtime.transport import Exchanging, Pending

_MOST_KEPT = 64
_KEPT_BYTES = 64 << 10
"""Room for what comes again and again is kept up to here, and so are zeros."""

_ZEROS = -2
_HELD = -1

BoxPieces = tuple[Piece, ...]
"""Boxes in global coordinates, and the tensors that cover them."""


@dataclass(slots=True)
class PeerGroup:
    """The way from one rank of a stage to the others.

    Attributes:
        ranks: of the stage, by position.
        sent_bytes, num_messages: since the start; what a rank keeps for itself does not count.
    """

    transport: Exchanging
    ranks: tuple[int, ...]
    sent_bytes: int = 0
    num_messages: int = 0

    @property
    def position(self) -> int:
        """This rank's among those of the stage."""
        return self.ranks.index(self.transport.rank)

    def at(self, microbatch: int) -> None:
        """Which micro-batch, or part of one, is run next, forward or backward: of note where parts read one another."""

    def finish(self) -> None:
        """A backward is over."""

    def reset(self) -> None:
        """What is under way came to nothing."""

    def exchange(
        self, held: Sequence[Box], wanted: Sequence[Box], moves: Iterable[Transfer], key: int | None = None
    ) -> Exchange:
        """How this rank gets what it wants of a tensor; all by position."""
        return Exchange.of(self, held, wanted, moves, key)

    def start(self, sent: dict[int, Tensor], received: dict[int, Tensor], key: int | None = None) -> Pending:
        """Start to send and receive tensors, by position; ``key`` as its :meth:`start_exchange` has it."""
        self.num_messages += len(sent)
        for tensor in sent.values():
            self.sent_bytes += tensor.nbytes
        return self.transport.start_exchange(
            {self.ranks[position]: tensor for position, tensor in sent.items()},
            {self.ranks[position]: tensor for position, tensor in received.items()},
            key,
        )


@dataclass(frozen=True, slots=True)
class _P2PMessage:
    """What goes to, or comes from, one rank in one message.

    Attributes:
        boxes: in order.
        cuts: where each lies in the tensor that this rank has, as (dim, start, length); none for what comes.
        entries: their positions in ``sends`` or ``receives``.
        shape: of the message: of the one box, or all elements in a row.
    """

    position: int
    boxes: tuple[Box, ...]
    cuts: tuple[DimCuts, ...]
    entries: tuple[int, ...]
    shape: tuple[int, ...]

    def cut(self, x: Tensor) -> Tensor:
        """The message of what this rank has."""
        if len(self.cuts) == 1:
            return narrowed(x, self.cuts[0])
        return self.pack([narrowed(x, cuts) for cuts in self.cuts])

    def pack(self, pieces: Sequence[Tensor]) -> Tensor:
        """One tensor, of whatever strides: the transport copies it to where it is sent from."""
        return pieces[0] if len(pieces) == 1 else torch.cat([piece.reshape(-1) for piece in pieces])

    def empty(self, like: Tensor) -> Tensor:
        """Room for what comes."""
        return like.new_empty(self.shape)

    def unpack(self, buffer: Tensor) -> list[Tensor]:
        """The pieces in ``buffer``."""
        if len(self.boxes) == 1:
            return [buffer]
        parts = torch.split(buffer, [volume(box) for box in self.boxes])
        return [part.view(tuple(map(len, box))) for part, box in zip(parts, self.boxes, strict=True)]


@dataclass(frozen=True, slots=True)
class P2PBatch:
    """All that goes to other ranks, or comes from them.

    Attributes:
        boxes: of each piece, in order.
        messages: the messages, one a rank.
        is_plain: whether they are the pieces, in this order.
    """

    boxes: tuple[Box, ...]
    messages: tuple[_P2PMessage, ...]
    is_plain: bool

    @classmethod
    def of(cls, entries: Sequence[tuple[int, Box]], held: Box | None) -> P2PBatch:
        """Of pieces with the positions of the other ranks; ``held``: what they are cut out of, if they go."""
        messages = _messages(entries, held)
        is_plain = [entry for message in messages for entry in message.entries] == list(range(len(messages)))
        return cls(tuple(box for _, box in entries), messages, is_plain)

    def pieces(self, buffers: Iterable[Tensor]) -> BoxPieces:
        """The pieces of messages."""
        if self.is_plain:
            return tuple(zip(self.boxes, buffers, strict=True))
        by_entry: list[Tensor | None] = [None] * len(self.boxes)
        for message, buffer in zip(self.messages, buffers, strict=True):
            for entry, piece in zip(message.entries, message.unpack(buffer), strict=True):
                by_entry[entry] = piece
        return tuple((box, piece) for box, piece in zip(self.boxes, by_entry, strict=True) if piece is not None)


class Arriving:
    """Pieces on their way."""

    __slots__ = ("_batch", "_buffers", "_pending", "_sent")

    def __init__(self, batch: P2PBatch, buffers: Mapping[int, Tensor], pending: Pending | None, sent: object) -> None:
        self._batch = batch
        self._buffers = buffers
        self._pending = pending
        self._sent = sent  # kept alive until the wait is over

    def wait(self) -> BoxPieces:
        """All pieces, in the order of their entries."""
        if self._pending is not None:
            self._pending.wait()
        self._sent = None
        return self._batch.pieces(self._buffers.values())


NO_MESSAGES = P2PBatch((), (), True)
_NOTHING = Arriving(NO_MESSAGES, {}, None, None)


@dataclass(frozen=True, slots=True, eq=False)
class Exchange:
    """One tensor's exchange, seen from one rank; made once for each size.

    Attributes:
        held: what this rank has.
        wanted: what it gets; may be empty.
        kept: of ``wanted``, what it has itself: one box, or none.
        receives, sends: (position of the other rank, box); the boxes received, and kept, are disjoint.
        is_local: whether no rank of the stage moves anything.
        key: even, and the same on all ranks, where the exchange comes again with every micro-batch; the next odd number
            is the adjoint's.
    """

    peers: PeerGroup
    held: Box
    wanted: Box
    kept: tuple[Box, ...]
    receives: tuple[tuple[int, Box], ...]
    sends: tuple[tuple[int, Box], ...]
    is_local: bool
    key: int | None
    incoming: P2PBatch = field(repr=False)
    outgoing: P2PBatch = field(repr=False)
    _laid: dict[int, _Laid] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(
        cls,
        peers: PeerGroup,
        held: Sequence[Box],
        wanted: Sequence[Box],
        moves: Iterable[Transfer],
        key: int | None = None,
    ) -> Exchange:
        """That of this rank among ``moves`` between positions; ``held`` and ``wanted`` are by position."""
        moves = tuple(moves)
        me = peers.position
        receives = tuple((move.src, move.box) for move in moves if move.dst == me)
        sends = tuple((move.dst, move.box) for move in moves if move.src == me)
        shared = intersect(held[me], wanted[me])
        return cls(
            peers,
            held[me],
            wanted[me],
            () if shared is None else (shared,),
            receives,
            sends,
            not moves,
            key,
            P2PBatch.of(receives, None),
            P2PBatch.of(sends, held[me]),
        )

    def start(self, x: Tensor) -> Arriving:
        """Send what others read of ``x``, which covers ``held``; the wait gives a piece for each of ``receives``."""
        if not self.receives and not self.sends:
            return _NOTHING
        sent = {message.position: message.cut(x) for message in self.outgoing.messages}
        received = {message.position: message.empty(x) for message in self.incoming.messages}
        return Arriving(self.incoming, received, self.peers.start(sent, received, self.key), sent)

    def start_adjoint(self, gradients: Sequence[Tensor], like: Tensor) -> Arriving:
        """Send back the gradients of what was received; the wait gives a piece for each of ``sends``, to be added.

        Args:
            gradients: one for each of ``receives``.
            like: has the dtype and device of gradients; of a rank that received nothing there are none.
        """
        if not self.receives and not self.sends:
            return _NOTHING
        sent = {m.position: m.pack([gradients[entry] for entry in m.entries]) for m in self.incoming.messages}
        received = {message.position: message.empty(like) for message in self.outgoing.messages}
        pending = self.peers.start(sent, received, None if self.key is None else self.key | 1)
        return Arriving(self.outgoing, received, pending, sent)

    def laid(self, box: Box) -> _Laid:
        """How ``box`` is put together; worked out once for each that a form asks for, which keeps it."""
        cached = self._laid.get(id(box))
        if cached is None or cached.box is not box:
            if len(self._laid) >= _MOST_KEPT:
                self._laid.clear()
            cached = self._laid[id(box)] = _Laid.of(self, box)
        return cached


class _Express:
    """An exchange of parts of contiguous tensors, worked out before there are any; one at a time.

    Attributes:
        pieces: that come, each time in the same tensors.
    """

    __slots__ = ("_lanes", "_peers", "_pending", "_sent_bytes", "pieces")

    def __init__(self, peers: PeerGroup, lanes: Any, sent_bytes: Sequence[int], pieces: BoxPieces) -> None:
        self._peers = peers
        self._lanes = lanes
        self._sent_bytes = tuple(sent_bytes)
        self.pieces = pieces
        self._pending: Pending | None = None

    @classmethod
    def of(cls, exchange: Exchange, like: Tensor, cuts: Sequence[DimCuts], *, is_adjoint: bool) -> _Express | None:
        """None where the transport has no such, or a message is of several pieces, or too large to keep room for it.

        Args:
            like: has the shape, dtype and device of what is cut.
            cuts: where each piece that goes lies in it.
        """
        peers = exchange.peers
        make = getattr(peers.transport, "lanes", None)
        if make is None:
            return None
        to, back = (exchange.incoming, exchange.outgoing) if is_adjoint else (exchange.outgoing, exchange.incoming)
        if not (to.is_plain and back.is_plain):
            return None
        if max((prod(m.shape) * like.itemsize for m in (*to.messages, *back.messages)), default=0) > _KEPT_BYTES:
            return None
        example = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        sent = {peers.ranks[m.position]: narrowed(example, cut) for m, cut in zip(to.messages, cuts, strict=True)}
        received = {peers.ranks[message.position]: message.empty(like) for message in back.messages}
        key = None if exchange.key is None else exchange.key | is_adjoint
        lanes = make(sent, received, key)
        if lanes is None:
            return None
        return cls(peers, lanes, [each.nbytes for each in sent.values()], back.pieces(received.values()))

    def start(self, whole: Tensor) -> _Express:
        """Sends the parts of ``whole``."""
        self._peers.num_messages += len(self._sent_bytes)
        self._peers.sent_bytes += sum(self._sent_bytes)
        self._pending = self._lanes.start(whole)
        return self

    def wait(self) -> BoxPieces:
        """All pieces, until the next start."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        return self.pieces


@dataclass(frozen=True, slots=True)
class _Laid:
    """How a box is put together of what is held and what comes.

    Attributes:
        is_covered: whether no element of it lies elsewhere.
        kept: what is held of it: where that lies in the box, and in what is held.
        pieces: where what comes lies in the box.
        sent: where what goes lies in what is held.
        is_all_held: whether all that is held lies in it.
        row: a dim along which zeros, what is held and what comes stand one after the other, and make up the box; with
            the extents of zeros, and which is where: -2 stands for zeros, -1 for what is held, others for what comes.
            None: they lie otherwise.
    """

    box: Box
    shape: tuple[int, ...]
    is_covered: bool
    kept: tuple[tuple[DimCuts, DimCuts], ...]
    pieces: tuple[DimCuts, ...]
    sent: tuple[DimCuts, ...]
    is_all_held: bool
    row: tuple[int, tuple[tuple[int, int], ...]] | None
    _zeros: dict[tuple[int, torch.dtype, torch.device], Tensor] = field(default_factory=dict)
    _express: dict[tuple[bool, torch.dtype, torch.device], _Express | None] = field(default_factory=dict)

    @classmethod
    def of(cls, exchange: Exchange, box: Box) -> _Laid:
        held = exchange.held
        return cls(
            box,
            tuple(map(len, box)),
            box == exchange.wanted,
            tuple((cuts_of(part, box), cuts_of(part, held)) for part in exchange.kept),
            tuple(cuts_of(part, box) for _, part in exchange.receives),
            tuple(cuts_of(part, held) for _, part in exchange.sends),
            exchange.kept == (held,),
            _row_of(exchange, box),
        )

    def in_a_row(self, x: Tensor, pieces: BoxPieces, dim: int, parts: Sequence[tuple[int, int]]) -> Tensor:
        """The box by one call, where :attr:`row` says how."""
        return torch.cat([self._part(x, pieces, dim, *part) for part in parts], dim)

    def _part(self, x: Tensor, pieces: BoxPieces, dim: int, which: int, extent: int) -> Tensor:
        if which == _HELD:
            return x
        if which != _ZEROS:
            return pieces[which][1]
        key = (extent, x.dtype, x.device)
        zeros = self._zeros.get(key) if type(x) is Tensor else None  # a compiler's stand-in mixes with no numbers
        if zeros is None:
            zeros = x.new_zeros((*self.shape[:dim], extent, *self.shape[dim + 1 :]))
            if zeros.nbytes <= _KEPT_BYTES and type(zeros) is Tensor:
                self._zeros[key] = zeros
        return zeros

    def express(self, exchange: Exchange, x: Tensor, *, is_adjoint: bool) -> _Express | None:
        """For tensors like ``x``, which covers what is held, or the box of an adjoint."""
        if not x.is_contiguous() or x.is_conj() or x.is_neg():
            return None
        key = (is_adjoint, x.dtype, x.device)
        if key not in self._express:
            cuts = self.pieces if is_adjoint else self.sent
            self._express[key] = _Express.of(exchange, x, cuts, is_adjoint=is_adjoint)
        return self._express[key]


def _row_of(exchange: Exchange, box: Box) -> tuple[int, tuple[tuple[int, int], ...]] | None:
    """See :class:`_Laid`."""
    parts = [(_HELD, exchange.held), *enumerate(part for _, part in exchange.receives)]
    dims = {
        dim for _, part in parts for dim, (mine, all_of) in enumerate(zip(part, box, strict=True)) if mine != all_of
    }
    if exchange.kept != (exchange.held,) or len(dims) != 1:
        return None
    (dim,) = dims
    row = list[tuple[int, int]]()
    place = box[dim].start
    for which, part in sorted(parts, key=lambda each: each[1][dim].start):
        if part[dim].start > place:
            row.append((_ZEROS, part[dim].start - place))
        elif part[dim].start < place:
            return None
        row.append((which, len(part[dim])))
        place = part[dim].stop
    if place < box[dim].stop:
        row.append((_ZEROS, box[dim].stop - place))
    return dim, tuple(row)


def redistribute(x: Tensor, exchange: Exchange, box: Box | None = None) -> Tensor:
    """The tensor that covers ``exchange.wanted``, from ``x``, which covers ``exchange.held``; differentiable.

    All ranks of the stage call it in the same order, also those that get nothing: so their backward passes agree.

    Args:
        box: to be covered instead, with zeros beside what is wanted.
    """
    box = exchange.wanted if box is None else box
    if exchange.is_local and box == exchange.wanted:
        if box == exchange.held:
            return x
        if exchange.kept:
            return narrowed(x, cuts_of(exchange.kept[0], exchange.held))
    moved: Callable[[Tensor, Exchange, Box], Tensor] = _Redistribute.apply
    return moved(x, exchange, box)


def accumulate(x: Tensor, exchange: Exchange, box: Box | None = None) -> Tensor:
    """The adjoint of :func:`redistribute`: what ranks have over one element is added up where that element is held.

    ``x`` covers ``exchange.wanted`` (or ``box``, outside of which nothing counts), the result ``exchange.held``.
    Differentiable; all ranks of the stage call it in the same order.
    """
    summed: Callable[[Tensor, Exchange, Box], Tensor] = _Accumulate.apply
    return summed(x, exchange, exchange.wanted if box is None else box)


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange, box: Box) -> Tensor:
        ctx.exchange = exchange
        ctx.box = box
        return moved(x, exchange, box)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if torch.is_grad_enabled():  # as once_differentiable, which costs microseconds
            raise RuntimeError("a tensor that ranks exchange cannot be differentiated twice")
        return moved_back(gradient, ctx.exchange, ctx.box), None, None


class _Accumulate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange, box: Box) -> Tensor:
        ctx.exchange = exchange
        ctx.box = box
        return moved_back(x, exchange, box)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return moved(gradient, ctx.exchange, ctx.box), None, None


def moved(x: Tensor, exchange: Exchange, box: Box) -> Tensor:
    """As :func:`redistribute`, without autograd."""
    laid = exchange.laid(box)
    express = laid.express(exchange, x, is_adjoint=False)
    arriving = exchange.start(x) if express is None else express.start(x)
    if laid.row is not None:
        return laid.in_a_row(x, arriving.wait(), *laid.row)
    tensor = x.new_empty(laid.shape) if laid.is_covered else x.new_zeros(laid.shape)
    for place, source in laid.kept:
        narrowed(tensor, place).copy_(narrowed(x, source))
    for place, (_, piece) in zip(laid.pieces, arriving.wait(), strict=True):
        narrowed(tensor, place).copy_(piece)
    return tensor


def moved_back(gradient: Tensor, exchange: Exchange, box: Box) -> Tensor:
    """As :func:`accumulate`, without autograd."""
    laid = exchange.laid(box)
    express = laid.express(exchange, gradient, is_adjoint=True)
    if express is None:
        pieces = [narrowed(gradient, place) for place in laid.pieces]
        arriving: Arriving | _Express = exchange.start_adjoint(pieces, gradient)
    else:
        arriving = express.start(gradient)
    if laid.is_all_held:
        total = narrowed(gradient, laid.kept[0][0]).clone(memory_format=torch.contiguous_format)
    else:
        total = gradient.new_zeros(tuple(map(len, exchange.held)))
        for place, source in laid.kept:
            narrowed(total, source).copy_(narrowed(gradient, place))
    arrived = arriving.wait()
    is_sent = express is not None or (
        len(arrived) == len(exchange.sends) and all(a[0] is b[1] for a, b in zip(arrived, exchange.sends, strict=True))
    )
    places = laid.sent if is_sent else [cuts_of(part, exchange.held) for part, _ in arrived]
    for place, (_, piece) in zip(places, arrived, strict=True):
        narrowed(total, place).add_(piece)
    return total


def _messages(entries: Sequence[tuple[int, Box]], held: Box | None) -> tuple[_P2PMessage, ...]:
    by_position: dict[int, list[int]] = {}
    for entry, (position, _) in enumerate(entries):
        by_position.setdefault(position, []).append(entry)
    messages = []
    for position, members in sorted(by_position.items()):
        boxes = tuple(entries[entry][1] for entry in members)
        cuts = () if held is None else tuple(cuts_of(box, held) for box in boxes)
        shape = tuple(map(len, boxes[0])) if len(boxes) == 1 else (sum(volume(box) for box in boxes),)
        messages.append(_P2PMessage(position, boxes, cuts, tuple(members), shape))
    return tuple(messages)
