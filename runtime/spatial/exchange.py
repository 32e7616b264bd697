"""One tensor inside a stage: every rank has a box of it, and gets the box that its next layer reads.

    held      rank 0 [0, 4)   rank 1 [4, 8)                 what each rank has
    wanted    rank 0 [0, 5)   rank 1 [3, 8)                 what each rank gets, inside the tensor
    moves     1 -> 0 [4, 5)   0 -> 1 [3, 4)                 planner.layers.division.Division.moves

Forward, pieces are copied out of what is held.  Backward is the adjoint: gradients of pieces go back the same way and
are added up where they came from.  Halos, gathers of channels and changes of layout are all of this form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from planner.ir.box import Box, Transfer, intersect, volume
from runtime.pipeline.messages import Cuts, cuts_of, narrowed, slices
from runtime.transport import Exchanging, Pending

Pieces = tuple[tuple[Box, Tensor], ...]
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
    deadline_s: float
    sent_bytes: int = 0
    num_messages: int = 0

    @property
    def position(self) -> int:
        """This rank's among those of the stage."""
        return self.ranks.index(self.transport.rank)

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
            self.deadline_s,
            key,
        )


@dataclass(frozen=True, slots=True)
class _Mail:
    """What goes to, or comes from, one rank in one message.

    Attributes:
        boxes: in order.
        cuts: where each lies in the tensor that this rank has, as (dim, start, length); none for what comes.
        entries: their positions in ``sends`` or ``receives``.
        shape: of the message: of the one box, or all elements in a row.
    """

    position: int
    boxes: tuple[Box, ...]
    cuts: tuple[Cuts, ...]
    entries: tuple[int, ...]
    shape: tuple[int, ...]

    def cut(self, x: Tensor) -> Tensor:
        """The message of what this rank has."""
        return self.pack([narrowed(x, cuts) for cuts in self.cuts])

    def pack(self, pieces: Sequence[Tensor]) -> Tensor:
        """One tensor, of whatever strides: the transport copies it to where it is sent from."""
        return pieces[0] if len(pieces) == 1 else torch.cat([piece.reshape(-1) for piece in pieces])

    def empty(self, like: Tensor) -> Tensor:
        """Room for what comes."""
        return like.new_empty(self.shape)

    def unpack(self, came: Tensor) -> list[Tensor]:
        """The pieces in ``came``."""
        if len(self.boxes) == 1:
            return [came]
        parts = torch.split(came, [volume(box) for box in self.boxes])
        return [part.view([len(interval) for interval in box]) for part, box in zip(parts, self.boxes, strict=True)]


class Arriving:
    """Pieces on their way."""

    __slots__ = ("_boxes", "_came", "_mails", "_pending", "_sent")

    def __init__(
        self, boxes: Sequence[Box], mails: Sequence[_Mail], came: list[Tensor], pending: Pending | None, sent: object
    ) -> None:
        self._boxes, self._mails, self._came, self._pending = boxes, mails, came, pending
        self._sent = sent  # kept alive until the wait is over

    def wait(self) -> Pieces:
        """All pieces, in the order of their entries."""
        if self._pending is not None:
            self._pending.wait()
        self._sent = None
        found: list[Tensor | None] = [None] * len(self._boxes)
        for mail, came in zip(self._mails, self._came, strict=True):
            for entry, piece in zip(mail.entries, mail.unpack(came), strict=True):
                found[entry] = piece
        return tuple((box, piece) for box, piece in zip(self._boxes, found, strict=True) if piece is not None)


_NOTHING = Arriving((), (), [], None, None)


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

    wire: PeerGroup
    held: Box
    wanted: Box
    kept: tuple[Box, ...]
    receives: tuple[tuple[int, Box], ...]
    sends: tuple[tuple[int, Box], ...]
    is_local: bool
    key: int | None
    _incoming: tuple[_Mail, ...] = field(repr=False)
    _outgoing: tuple[_Mail, ...] = field(repr=False)

    @classmethod
    def of(
        cls,
        wire: PeerGroup,
        held: Sequence[Box],
        wanted: Sequence[Box],
        moves: Iterable[Transfer],
        key: int | None = None,
    ) -> Exchange:
        """That of this rank among ``moves`` between positions; ``held`` and ``wanted`` are by position."""
        moves, me = tuple(moves), wire.position
        receives = tuple((move.src, move.box) for move in moves if move.dst == me)
        sends = tuple((move.dst, move.box) for move in moves if move.src == me)
        shared = intersect(held[me], wanted[me])
        return cls(
            wire,
            held[me],
            wanted[me],
            () if shared is None else (shared,),
            receives,
            sends,
            not moves,
            key,
            _mails(receives, None),
            _mails(sends, held[me]),
        )

    def start(self, x: Tensor) -> Arriving:
        """Send what others read of ``x``, which covers ``held``; the wait gives a piece for each of ``receives``."""
        if not self.receives and not self.sends:
            return _NOTHING
        sent = {mail.position: mail.cut(x) for mail in self._outgoing}
        received = {mail.position: mail.empty(x) for mail in self._incoming}
        pending = self.wire.start(sent, received, self.key)
        return Arriving([box for _, box in self.receives], self._incoming, list(received.values()), pending, sent)

    def start_adjoint(self, gradients: Sequence[Tensor], like: Tensor) -> Arriving:
        """Send back the gradients of what was received; the wait gives a piece for each of ``sends``, to be added.

        Args:
            gradients: one for each of ``receives``.
            like: has the dtype and device of gradients; of a rank that received nothing there are none.
        """
        if not self.receives and not self.sends:
            return _NOTHING
        sent = {mail.position: mail.pack([gradients[entry] for entry in mail.entries]) for mail in self._incoming}
        received = {mail.position: mail.empty(like) for mail in self._outgoing}
        pending = self.wire.start(sent, received, None if self.key is None else self.key | 1)
        return Arriving([box for _, box in self.sends], self._outgoing, list(received.values()), pending, sent)


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
        ctx.exchange, ctx.box = exchange, box
        return _moved(x, exchange, box)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _moved_back(gradient, ctx.exchange, ctx.box), None, None


class _Accumulate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange, box: Box) -> Tensor:
        ctx.exchange, ctx.box = exchange, box
        return _moved_back(x, exchange, box)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _moved(gradient, ctx.exchange, ctx.box), None, None


def _moved(x: Tensor, exchange: Exchange, box: Box) -> Tensor:
    arriving = exchange.start(x)
    shape = [len(interval) for interval in box]
    found = x.new_empty(shape) if box == exchange.wanted else x.new_zeros(shape)
    for part in exchange.kept:
        found[slices(part, box)] = x[slices(part, exchange.held)]
    for part, piece in arriving.wait():
        found[slices(part, box)] = piece
    return found


def _moved_back(gradient: Tensor, exchange: Exchange, box: Box) -> Tensor:
    arriving = exchange.start_adjoint([gradient[slices(part, box)] for _, part in exchange.receives], gradient)
    if exchange.kept == (exchange.held,):
        found = gradient[slices(exchange.held, box)].clone(memory_format=torch.contiguous_format)
    else:
        found = gradient.new_zeros([len(interval) for interval in exchange.held])
        for part in exchange.kept:
            found[slices(part, exchange.held)] = gradient[slices(part, box)]
    for part, piece in arriving.wait():
        found[slices(part, exchange.held)] += piece
    return found


def _mails(entries: Sequence[tuple[int, Box]], held: Box | None) -> tuple[_Mail, ...]:
    by_position: dict[int, list[int]] = {}
    for entry, (position, _) in enumerate(entries):
        by_position.setdefault(position, []).append(entry)
    found = []
    for position, members in sorted(by_position.items()):
        boxes = tuple(entries[entry][1] for entry in members)
        cuts = () if held is None else tuple(cuts_of(box, held) for box in boxes)
        shape = tuple(map(len, boxes[0])) if len(boxes) == 1 else (sum(volume(box) for box in boxes),)
        found.append(_Mail(position, boxes, cuts, tuple(members), shape))
    return tuple(found)
