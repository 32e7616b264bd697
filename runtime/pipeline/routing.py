"""What one rank sends, receives and keeps for every edge and micro-batch, worked out once.

The messages are the program's own (:mod:`planner.layers.boundary`); here they become indices into tensors.

Cutting tensors into the pieces that messages carry, and putting pieces together again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from planner.ir.box import Box, intersect, volume
from planner.ir.errors import UnsupportedModelError
from planner.ir.graph import TensorSpec
from planner.ir.program import Message, Part, Program, Route
from planner.layers.boundary import Boundaries
from planner.layers.boxes import as_tuples, boxes_of
from planner.layers.division import Division
from runtime.transport import MessageKey, Spec

CPU = torch.device("cpu")

DimCuts = tuple[tuple[int, int, int], ...]
"""(dim, start, length), as ``Tensor.narrow`` takes them, of the dims along which a part is not all of a tensor."""

Piece = tuple[Box, Tensor]
"""Where a tensor lies, in the coordinates of its micro-batch, and the tensor."""


def slices(box: Box, origin: Box) -> tuple[slice, ...]:
    """``box`` as an index into a tensor that covers ``origin``."""
    return tuple(slice(a.start - o.start, a.stop - o.start) for a, o in zip(box, origin, strict=True))


def cuts_of(box: Box, origin: Box) -> DimCuts:
    """Where ``box`` lies in a tensor that covers ``origin``: the dims along which it is not all of it."""
    return tuple(
        (dim, part.start - whole.start, len(part))
        for dim, (part, whole) in enumerate(zip(box, origin, strict=True))
        if part != whole
    )


def narrowed(tensor: Tensor, cuts: DimCuts) -> Tensor:
    """A view of ``tensor``; itself where nothing is cut."""
    for cut in cuts:
        tensor = tensor.narrow(*cut)
    return tensor


def assemble(pieces: Sequence[Piece], box: Box, dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
    """The tensor that covers ``box``, made of disjoint pieces of it; zero where no piece lies, as nothing reads there.

    One piece that is the whole box is returned as it is.
    """
    if len(pieces) == 1 and pieces[0][0] == box:
        return pieces[0][1]
    shape = tuple(map(len, box))
    is_covered = sum(volume(part) for part, _ in pieces) == volume(box)
    whole = (torch.empty if is_covered else torch.zeros)(shape, dtype=dtype, device=device)
    for part, tensor in pieces:
        whole[slices(part, box)] = tensor
    return whole


def add_up(pieces: Sequence[Piece], box: Box, dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
    """The sum of pieces that may overlap, over ``box``: the adjoint of handing the same boxes out."""
    if len(pieces) == 1 and pieces[0][0] == box:
        return pieces[0][1]
    total = torch.zeros(tuple(map(len, box)), dtype=dtype, device=device)
    for part, tensor in pieces:
        total[slices(part, box)] += tensor
    return total


FORWARD = "F"
BACKWARD = "B"
"""Kinds of messages: activations and gradients."""


@dataclass(frozen=True, slots=True)
class MessageSlice:
    """A message's activations or its gradients, seen from this rank.

    Attributes:
        kind: ``FORWARD`` or ``BACKWARD``.
        route: of the message; a gradient goes from its destination to its source.
        peer: the rank at the other end; this rank itself for a hand-over in memory.
        values: what each of its tensors is.
        boxes: where each lies in the micro-batch.
        cuts: each box as an index into the tensor that this rank has (for messages that leave); None: all of it.
        specs: shape and dtype of each tensor.
    """

    kind: str
    route: Route
    peer: int
    values: tuple[str, ...]
    boxes: tuple[Box, ...]
    cuts: tuple[tuple[slice, ...] | None, ...]
    specs: tuple[Spec, ...]

    @property
    def reader(self) -> int:
        """The stage that reads it."""
        return self.route[1] if self.kind == FORWARD else self.route[0]

    def key(self, turn: int) -> MessageKey:
        """Of a message that begins with it; equal at both ends."""
        src, dst, microbatch = self.route
        ends = (src, dst) if self.kind == FORWARD else (dst, src)
        return MessageKey(turn, self.kind, *ends, microbatch)


SlicesByRoute = dict[Route, tuple[MessageSlice, ...]]


class Routing:
    """What ``rank`` sends and receives in messages, by route (source stage, destination stage, micro-batch).

    Args:
        boundaries: by micro-batch, of the graph in the shapes that the micro-batch has.
        rows: samples of each micro-batch; those without any move nothing.
        divisions: of the stages that this rank divides with others along any dims, or runs part by part, by stage and
            micro-batch.
        parts: into how many parts micro-batches are cut; what is called a micro-batch here is one of these.

    Attributes:
        forward_out, forward_in: activations that leave and that come.
        backward_out, backward_in: gradients, which go from the route's destination to its source.

    Raises:
        UnsupportedModelError: a stage on several ranks reads samples that its ranks do not share out.
    """

    def __init__(
        self,
        boundaries: Sequence[Boundaries],
        program: Program,
        rows: tuple[int, ...],
        rank: int,
        divisions: Mapping[tuple[int, int], Division] | None = None,
        parts: int = 1,
    ) -> None:
        self._boundaries = boundaries
        self._rows = rows
        self._rank = rank
        self._parts = parts
        self._divisions = divisions or {}
        self._held: dict[tuple[str, int, int, int], Box] = {}  # by value, stage, samples and the boundaries' id
        self.forward_out: SlicesByRoute = {}
        self.forward_in: SlicesByRoute = {}
        self.backward_out: SlicesByRoute = {}
        self.backward_in: SlicesByRoute = {}
        for route, messages in program.messages.items():
            src, dst, _ = route
            leaving = [message for message in messages if message.src == rank]
            coming = [message for message in messages if message.dst == rank]
            self.forward_out[route] = self._slices(FORWARD, route, src, ((m.dst, m.parts) for m in leaving))
            self.forward_in[route] = self._slices(FORWARD, route, dst, ((m.src, m.parts) for m in coming))
            self.backward_out[route] = self._slices(BACKWARD, route, dst, _gradients((m.src, m) for m in coming))
            self.backward_in[route] = self._slices(BACKWARD, route, src, _gradients((m.dst, m) for m in leaving))

    def held(self, value: str, stage: int, microbatch: int) -> Box:
        """The box of ``value`` that this rank has while it runs ``stage``: its share of the samples, else all.

        Of a stage that is divided along other dims as well, what the rank's layers make or read of it.
        """
        samples = self._rows[microbatch]
        boundaries = self._boundaries[microbatch]
        division = self._divisions.get((stage, microbatch))
        if division is not None:
            return division.held(value)[self._position(stage, microbatch)]
        key = (value, stage, samples, id(boundaries))
        box = self._held.get(key)
        if box is None:
            position = boundaries.ranks[stage].index(self._rank)
            boxes = boxes_of(boundaries.layouts[stage], boundaries.spec(value, samples), samples)
            box = self._held[key] = as_tuples(boxes)[position]
        return box

    def speaks_for(self, value: str, stage: int, microbatch: int) -> bool:
        """Whether this rank is the first of those of ``stage`` that have its box of a value that the stage makes."""
        division = self._divisions.get((stage, microbatch))
        if division is None:
            return True
        held = division.held(value)
        position = self._position(stage, microbatch)
        return held.index(held[position]) == position

    def _position(self, stage: int, microbatch: int) -> int:
        """This rank's among those of a stage, or the part's among those of its micro-batch."""
        if self._parts > 1:
            return microbatch % self._parts
        return self._boundaries[microbatch].ranks[stage].index(self._rank)

    def dtype(self, value: str) -> torch.dtype:
        """The dtype of ``value``."""
        return dtype_of(self._boundaries[0].spec(value, self._boundaries[0].graph.samples))

    def _slices(
        self, kind: str, route: Route, stage: int, ends: Iterable[tuple[int, tuple[Part, ...]]]
    ) -> tuple[MessageSlice, ...]:
        return tuple(self._message_slice(kind, route, stage, peer, parts) for peer, parts in ends)

    def _message_slice(self, kind: str, route: Route, stage: int, peer: int, parts: tuple[Part, ...]) -> MessageSlice:
        held = [self.held(part.value, stage, route[2]) for part in parts]
        for part, box in zip(parts, held, strict=True):
            if intersect(part.box, box) != part.box:
                raise UnsupportedModelError(
                    f"stage {stage} cannot be divided by samples: a layer there reads others' samples of {part.value}",
                    [f"rank {self._rank} holds {_text(box)}", f"and would read {_text(part.box)}"],
                    ["put that layer on a stage of one rank"],
                )
        return MessageSlice(
            kind,
            route,
            peer,
            tuple(part.value for part in parts),
            # Equal boxes are one object, which is found equal at once where pieces are put together.
            tuple(box if part.box == box else part.box for part, box in zip(parts, held, strict=True)),
            tuple(None if part.box == box else slices(part.box, box) for part, box in zip(parts, held, strict=True)),
            tuple((tuple(map(len, part.box)), self.dtype(part.value)) for part in parts),
        )


def dtype_of(spec: TensorSpec) -> torch.dtype:
    """The spec's dtype as torch's."""
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return dtype


def _gradients(ends: Iterable[tuple[int, Message]]) -> Iterable[tuple[int, tuple[Part, ...]]]:
    return ((peer, message.gradient_parts) for peer, message in ends if message.gradient_parts)


def _text(box: Box) -> str:
    return " x ".join(map(str, box))
