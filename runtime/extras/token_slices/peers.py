"""Token slices of one stage on one rank: what a slice reads of those before it is kept here until their backward.

    forward    slice 0   puts its keys and values
               slice 1   puts its own, reads those of 0
               slice 2   puts its own, reads those of 0 and 1
    backward   slice 2   adds to the gradients of 0 and 1
               slice 1   takes what was added to its own, adds to those of 0
               slice 0   takes what was added to its own; the micro-batch is forgotten

Layers run by the op rules of stages that are divided over ranks (``op_rules``): a slice is in the place of a rank, and
:class:`SliceExchange` of an exchange between ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from planner.extras.token_slices.axes import TokenAxes
from planner.ir.box import Box, Transfer, whole
from planner.ir.errors import UnsupportedModelError
from runtime.pipeline.routing import Piece, cuts_of, narrowed
from runtime.spatial.exchange import NO_MESSAGES, Arriving, BoxPieces, Exchange, PeerGroup
from runtime.transport import Pending

SliceName = tuple[int, int]
"""(micro-batch, key of the exchange)."""


class _Slice:
    """In the place of a transport: which slice is run.  Slices run one after another, and tell each other nothing."""

    rank = 0

    def start_exchange(
        self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor], key: int | None = None
    ) -> Pending:
        """Not possible.

        Raises:
            UnsupportedModelError: always.
        """
        raise UnsupportedModelError(
            "a layer combines something over all tokens of a sequence, which token slices do not have at once",
            [f"slices {self.rank} and {', '.join(map(str, sent))} would have to exchange it"],
            ["plan without --allow time and --token-slices"],
        )


class SlicePeers(PeerGroup):
    """The slices of a stage's micro-batches, in place of its ranks, and what they have of one another.

    Args:
        slices: of each micro-batch.
    """

    __slots__ = ("_evaluated", "_here", "gradients", "microbatch", "values")

    def __init__(self, slices: int) -> None:
        self._here = _Slice()
        super().__init__(self._here, tuple(range(slices)))
        self.microbatch = 0
        self._evaluated = -1
        self.values: dict[SliceName, dict[int, Tensor]] = {}
        self.gradients: dict[SliceName, dict[int, Tensor]] = {}

    def at(self, microbatch: int) -> None:
        self.microbatch, self._here.rank = divmod(microbatch, len(self.ranks))

    def finish(self) -> None:
        if self.position:
            return
        for kept in (self.values, self.gradients):  # all slices of the micro-batch have had their backward
            for name in [name for name in kept if name[0] == self.microbatch]:
                del kept[name]

    def exchange(
        self, held: Sequence[Box], wanted: Sequence[Box], moves: Iterable[Transfer], key: int | None = None
    ) -> Exchange:
        moves = tuple(moves)
        if key is None:
            raise UnsupportedModelError("a stage has too many layers to be run in token slices", [], ["more stages"])
        if any(move.src > move.dst for move in moves):
            raise UnsupportedModelError(
                "a token slice would read what a later one makes", [str(moves[0])], ["plan again"]
            )
        plain = Exchange.of(self, held, wanted, moves, key)
        return SliceExchange(
            self,
            plain.held,
            plain.wanted,
            plain.kept,
            plain.receives,
            plain.sends,
            plain.is_local,
            key,
            NO_MESSAGES,
            NO_MESSAGES,
            of_slices=tuple(held),
            position=self.position,
        )

    def put(self, key: int, position: int, x: Tensor) -> dict[int, Tensor]:
        """Keep what a slice has for those after it; returns what all slices so far have."""
        if not key & 2 and self.microbatch != self._evaluated:  # in evaluation no backward says when it may go
            self._evaluated = self.microbatch
            self.values = {name: by_slice for name, by_slice in self.values.items() if name[1] & 2}
        by_slice = self.values.setdefault((self.microbatch, key), {})
        by_slice[position] = x.detach()
        return by_slice

    def reset(self) -> None:
        self.values.clear()
        self.gradients.clear()
        self._evaluated = -1


class _There(Arriving):
    """Pieces that are there already."""

    __slots__ = ("_pieces",)

    def __init__(self, pieces: BoxPieces) -> None:
        super().__init__(NO_MESSAGES, {}, None, None)
        self._pieces = pieces

    def wait(self) -> BoxPieces:
        return self._pieces


@dataclass(frozen=True, slots=True, eq=False)
class SliceExchange(Exchange):
    """What one slice reads of those before it.

    Attributes:
        of_slices: what each slice has.
        position: the slice.
    """

    of_slices: tuple[Box, ...] = ()
    position: int = 0

    def start(self, x: Tensor) -> Arriving:
        kept = self._slice_peers.put(self.key or 0, self.position, x)
        return _There(
            tuple((box, narrowed(kept[src], cuts_of(box, self.of_slices[src]))) for src, box in self.receives)
        )

    def start_adjoint(self, gradients: Sequence[Tensor], like: Tensor) -> Arriving:
        peers = self._slice_peers
        sums = peers.gradients.setdefault((peers.microbatch, self.key or 0), {})
        for (src, box), gradient in zip(self.receives, gradients, strict=True):
            if src not in sums and box == self.of_slices[src]:
                sums[src] = gradient.clone(memory_format=torch.contiguous_format)
                continue
            if src not in sums:
                sums[src] = gradient.new_zeros([len(interval) for interval in self.of_slices[src]])
            narrowed(sums[src], cuts_of(box, self.of_slices[src])).add_(gradient)
        own = sums.pop(self.position, None)
        return _There(() if own is None else ((self.held, own),))

    @property
    def _slice_peers(self) -> SlicePeers:
        if not isinstance(self.peers, SlicePeers):
            raise TypeError("an exchange between token slices is one of their stage's")
        return self.peers


def joined(axes: TokenAxes, value: str, pieces: Sequence[Piece], samples: int) -> Piece:
    """The whole of a value from its slices, in order; rows of samples and tokens are put in the order of samples."""
    at = axes.values.get(value)
    if at is None or len(pieces) == 1:
        return pieces[0]
    tensors = [tensor for _, tensor in pieces]
    if at.is_merged:
        tensors = [tensor.unflatten(at.dim, (samples, -1)) for tensor in tensors]  # type: ignore[no-untyped-call]
    merged = torch.cat(tensors, at.dim + at.is_merged)
    if at.is_merged:
        merged = merged.flatten(at.dim, at.dim + 1)
    return whole(tuple(merged.shape)), merged


def of_micro_batches(
    axes: TokenAxes, outputs: Mapping[int, Mapping[str, Piece]], rows: Sequence[int], num_parts: int
) -> dict[int, Mapping[str, Piece]]:
    """Values by whole micro-batch, of those of its slices.

    Args:
        outputs: by number of the slice, then by value.
        rows: samples of each micro-batch.
    """
    by_microbatch: dict[int, Mapping[str, Piece]] = {}
    for m in sorted({number // num_parts for number in outputs}):
        parts = [outputs[m * num_parts + k] for k in range(num_parts)]
        names = dict.fromkeys(name for part in parts for name in part)
        by_microbatch[m] = {name: joined(axes, name, [p[name] for p in parts if name in p], rows[m]) for name in names}
    return by_microbatch
