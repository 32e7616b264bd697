"""Convolution of a tensor that is cut in space, exchanged and computed at the same time.

forward     start the exchange; convolve what is held, with zeros around it; then add what each piece that came
            contributes (:mod:`runtime.spatial.convolution.terms`)
backward    the gradients of those pieces first, and start to send them back; then that of what is held, and of the
            weight; then add the gradients that came

So messages travel while the large part is computed, nothing is copied but thin pieces, and the large part is one call
of the ordinary kernel.  (Splitting into interior and boundary, as Dryden et al. 2019, section 4.2, computes most of the
outputs in one call and the rest in several thin ones: ``benchmarks.spatial.sides``, which is slower.)

Whether a rank's part of a convolution can be computed as a sum of terms, and whether that pays.  Pure integers.

Who knows the boxes of all ranks can so tell what each of them does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from planner.ir.box import Box
from runtime.pipeline.routing import DimCuts, cuts_of
from runtime.spatial.convolution.term_call import TermCall
from runtime.spatial.convolution.terms import LEADING, ConvWindow, Term, main_term, piece_term
from runtime.spatial.exchange import Arriving, BoxPieces, Exchange


@dataclass(frozen=True, slots=True)
class ConvPart:
    """What a rank does of a convolution.

    Attributes:
        outputs: may be empty.
        needed: of the input; may reach outside the tensor.
        channels: of the whole input and of the whole output.
    """

    window: ConvWindow
    outputs: Box
    needed: Box
    channels: tuple[int, int]

    @property
    def is_of_whole_groups(self) -> bool:
        """Whether this rank has filters, those of whole groups, and their weight alone."""
        groups = self.window.groups
        each = self.channels[1] // groups
        filters = self.outputs[1]
        if groups == 1 or len(filters) == self.channels[1]:
            return True
        return not self.window.transposed and filters.start % each == 0 and filters.stop % each == 0

    @property
    def local(self) -> ConvWindow:
        """The window with the groups that this rank has, where they are whole."""
        groups = self.window.groups * len(self.outputs[1]) // self.channels[1] if self.window.groups > 1 else 1
        return replace(self.window, groups=groups)


@dataclass(frozen=True, slots=True)
class ConvTerms:
    """What a part is the sum of.

    Attributes:
        pieces: of what comes, in order; None for what no output sees.
    """

    main: Term
    pieces: tuple[Term | None, ...]

    @property
    def multiplications(self) -> int:
        """Per pair of channels."""
        return self.main.multiplications + sum(term.multiplications for term in self.pieces if term is not None)


def linear_terms(part: ConvPart, held: Box, wanted: Box, received: Sequence[Box]) -> ConvTerms | None:
    """The terms; None where it is no such sum: what comes has other samples or channels, or nothing is held."""
    outputs = part.outputs
    if not all(map(len, outputs)) or not all(map(len, held)) or not part.is_of_whole_groups:
        return None
    if any(box[:LEADING] != held[:LEADING] for box in (wanted, *received)):
        return None
    window = part.local
    main = main_term(window, held, outputs)
    return None if main is None else ConvTerms(main, tuple(piece_term(window, box, outputs) for box in received))


def pays(part: ConvPart, terms: ConvTerms, wanted: Box, most_extra: float) -> bool:
    """Whether zeros beside what is held add at most this share of multiplications."""
    made = wanted if part.window.transposed else part.outputs
    return terms.multiplications <= (1 + most_extra) * prod(map(len, made[LEADING:])) * prod(part.window.kernel)


def num_multiplications(part: ConvPart, terms: ConvTerms, held: Box) -> int:
    """Of the term of what is held."""
    samples, filters = part.outputs[:LEADING]
    return terms.main.multiplications * len(samples) * len(filters) * len(held[1]) // part.local.groups


@dataclass(frozen=True, slots=True, eq=False)
class ReturnedHalo:
    """The halo of dy, where it moves in place of that of dx.

    Attributes:
        exchange: of dy.
        pieces: what each piece that comes gives of dx.
    """

    exchange: Exchange
    pieces: tuple[TermCall | None, ...]


@dataclass(slots=True, eq=False)
class LocalConv:
    """All that is known of a rank's part of a convolution before it has tensors; made once for each size and dtype.

    Attributes:
        main: of what is held.
        exchange: None where nothing is exchanged.
        pieces: by entry of ``exchange.receives``; None for a piece that no output sees.
        places: by entry of ``exchange.sends``, where gradients that come are added.
        returned: in place of sending gradients of what came; all ranks of the stage do so, or none.
    """

    main: TermCall
    exchange: Exchange | None = None
    pieces: tuple[TermCall | None, ...] = ()
    places: tuple[DimCuts, ...] = ()
    returned: ReturnedHalo | None = None

    def piece_gradients(
        self, dy: Tensor, weight: Tensor, slabs: Sequence[Tensor], needs_x: bool, needs_weight: bool
    ) -> tuple[list[Tensor], list[TapsGradient]]:
        """The gradients of what came, by entry of ``receives``, and of the taps that touch it.

        Args:
            slabs: what of each piece is convolved; those that no output sees have none.
        """
        gradients = [] if len(slabs) == len(self.pieces) else self.no_gradients(dy)
        parts: list[TapsGradient] = []
        rest = iter(slabs)
        for entry, call in enumerate(self.pieces):
            if call is None:
                continue
            dpiece, dtaps, _ = call.gradients(dy, next(rest), weight, (needs_x, needs_weight, False))
            if needs_weight:
                assert dtaps is not None  # it was asked for
                parts.append((call.term.taps, dtaps))
            if needs_x:
                assert dpiece is not None  # it was asked for
                gradients[entry : entry + 1] = [dpiece]
        return gradients, parts

    def add_returned(self, dx: Tensor, pieces: BoxPieces, weight: Tensor) -> None:
        """Adds to ``dx`` what came: gradients, or what pieces of dy give."""
        if self.returned is not None:
            for call, (_, piece) in zip(self.returned.pieces, pieces, strict=True):
                if call is not None:
                    call.add(dx, call.cut(piece), weight)
            return
        for cuts, (_, piece) in zip(self.places, pieces, strict=True):
            place = dx
            for cut in cuts:
                place = place.narrow(*cut)
            place.add_(piece)

    def no_gradients(self, like: Tensor) -> list[Tensor]:
        """Zeros, by entry of ``receives``."""
        boxes = () if self.exchange is None else self.exchange.receives
        return [like.new_zeros(tuple(map(len, box))) for _, box in boxes]

    def weight_gradients(
        self, dy: Tensor, x: Tensor, weight: Tensor, slabs: Sequence[Tensor], wanted: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of weight and bias, of all parts."""
        _, dweight, dbias = self.main.gradients(dy, x, weight, (False, *wanted))
        if wanted[0]:
            assert dweight is not None  # it was asked for
            add_taps(dweight, self.piece_gradients(dy, weight, slabs, False, True)[1])
        return dweight, dbias


TapsGradient = tuple[DimCuts, Tensor]
"""Some taps of the kernel, and their gradient."""

PutGradients = Callable[[tuple[Tensor | None, ...], Callable[[], tuple[Tensor | None, ...]]], None]
"""Leaves the gradients of parameters for later; see ``DeferredGradients.put_gradients``."""


def linear_conv(
    terms: ConvTerms, shape: tuple[int, ...], exchange: Exchange, returned: ReturnedHalo | None = None
) -> LocalConv:
    """The overlapped form.

    Args:
        terms: of this rank.
        shape: of its outputs.
        exchange: of the input.
    """
    return LocalConv(
        TermCall(terms.main, shape),
        exchange,
        tuple(None if term is None else TermCall(term, shape) for term in terms.pieces),
        tuple(cuts_of(box, exchange.held) for _, box in exchange.sends),
        returned,
    )


def halo_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, local: LocalConv, put: PutGradients | None = None
) -> Tensor:
    """The convolution; differentiable.

    Args:
        x: covers what is held.
        weight, bias: of this rank's filters.
        put: where the gradients of weight and bias are left, if they are leaves; backward then gives none.
    """
    convolve: Callable[[Tensor, Tensor, Tensor | None, LocalConv, PutGradients | None], Tensor] = _HaloConv.apply
    return convolve(x, weight, bias, local, put)


class _HaloConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, local: LocalConv, put: PutGradients | None
    ) -> Tensor:
        exchange = local.exchange
        main = local.main
        arriving = None if exchange is None else exchange.start(x)
        source = main.cut(x)
        y = main.outputs(source, weight, bias)
        saved = [source, weight]
        if arriving is not None:
            for call, (_, piece) in zip(local.pieces, arriving.wait(), strict=True):
                if call is not None:
                    slab = call.cut(piece)
                    call.add(y, slab, weight)
                    saved.append(slab)
        ctx.save_for_backward(*saved)
        ctx.local = local
        ctx.put = put
        ctx.targets = None if put is None else (weight, bias)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # as once_differentiable, which costs microseconds
            raise RuntimeError("a convolution over cut space cannot be differentiated twice")
        local: LocalConv = ctx.local
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        x, weight, *slabs = ctx.saved_tensors
        exchange = local.exchange
        targets = ctx.targets
        if targets is not None:
            wanted = (needs_weight, needs_bias)
            needs_weight = False
            needs_bias = False
        parts: list[TapsGradient] = []
        arriving: Arriving | None = None
        returned = local.returned
        sends_dx = needs_x and exchange is not None and returned is None
        if returned is not None and needs_x:
            arriving = returned.exchange.start(dy)
        if slabs and (sends_dx or needs_weight):
            gradients, parts = local.piece_gradients(dy, weight, slabs, sends_dx, needs_weight)
        elif sends_dx:
            gradients = local.no_gradients(dy)
        if sends_dx and exchange is not None:
            arriving = exchange.start_adjoint(gradients, dy)
        dx, dweight, dbias = local.main.gradients(dy, x, weight, (needs_x, needs_weight, needs_bias))
        if needs_weight:
            assert dweight is not None  # it was asked for
            add_taps(dweight, parts)
        if targets is not None:
            leaves = tuple(each if wants else None for each, wants in zip(targets, wanted, strict=True))
            ctx.put(leaves, partial(local.weight_gradients, dy, x, weight, slabs, wanted))
        if arriving is not None:
            assert dx is not None  # nothing comes where it is not asked for
            local.add_returned(dx, arriving.wait(), weight)
        return dx, dweight, dbias, None, None


def add_taps(dweight: Tensor, parts: Sequence[TapsGradient]) -> None:
    """Adds what pieces contribute to the gradient of the weight."""
    for cuts, part in parts:
        place = dweight
        for cut in cuts:
            place = place.narrow(*cut)
        place.add_(part)
