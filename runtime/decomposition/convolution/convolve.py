"""Which form a rank's part of a convolution takes: overlapped where that pays, else gathered first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, Protocol

from torch import Tensor

from planner.ir.box import Box
from runtime.decomposition.convolution.call import Call
from runtime.decomposition.convolution.gathered import gathered_conv
from runtime.decomposition.convolution.interior import interior_conv
from runtime.decomposition.convolution.linear import Part, Terms, linear_terms, pays
from runtime.decomposition.convolution.overlapped import LocalConv, Put, ReturnedHalo, halo_conv, linear_conv
from runtime.decomposition.convolution.terms import piece_term
from runtime.decomposition.exchange import Exchange

Mode = Literal["linear", "blocking", "interior"]


@dataclass(frozen=True, slots=True)
class HaloSettings:
    """How convolutions over cut space are computed; every mode gives the same result.

    Attributes:
        mode: ``linear``: held rows while messages travel, then what came is added; ``interior``: the outputs that need
            nothing of others, then the boundary; ``blocking``: everything is fetched, then one convolution.
        backward: whether the halo of dx or that of dy moves: ``fewest`` elements, where both can.
        most_extra: share of additional multiplications above which a part is computed blocking all the same: of a few
            rows, zeros around them would be most of the work.
    """

    mode: Mode = "linear"
    most_extra: float = 0.25
    backward: Literal["fewest", "dx", "dy"] = "fewest"


LINEAR = HaloSettings()


class LocalForm(Protocol):
    """A rank's part of a convolution, for one size."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, put: Put | None = None) -> Tensor:
        """The outputs from what is held; differentiable."""


def local_form(
    part: Part, exchange: Exchange, settings: HaloSettings = LINEAR, returned: Exchange | None = None
) -> LocalForm:
    """The form for one rank; ranks of a stage may differ in theirs, since all of them exchange the same messages.

    Args:
        returned: of dy, where its halo moves backward in place of that of dx; all ranks have terms then, and one each.
    """
    if settings.mode == "linear":
        boxes = exchange.held, exchange.wanted, [box for _, box in exchange.receives]
        terms = overlapped(part, *boxes, settings)
        if terms is not None:
            shape = tuple(map(len, part.outputs))
            halo = None if returned is None else _returned(part, exchange, returned)
            return partial(_run, linear_conv(terms, shape, exchange, halo))
    elif settings.mode == "interior" and all(map(len, part.outputs)) and part.is_of_whole_groups:
        interior = interior_conv(part.local, part.outputs, exchange)
        if interior is not None:
            return interior
    return gathered_conv(part.window, part.outputs, part.needed, exchange, part.channels)


def overlapped(part: Part, held: Box, wanted: Box, received: Sequence[Box], settings: HaloSettings) -> Terms | None:
    """The terms of the overlapped form; None where it cannot be, does not pay or is not wanted."""
    terms = linear_terms(part, held, wanted, received) if settings.mode == "linear" else None
    return terms if terms is not None and pays(part, terms, wanted, settings.most_extra) else None


def _run(local: LocalConv, x: Tensor, weight: Tensor, bias: Tensor | None, put: Put | None = None) -> Tensor:
    return halo_conv(x, weight, bias, local, put)


def _returned(part: Part, exchange: Exchange, returned: Exchange) -> ReturnedHalo:
    """Dx is made of dy by the transposed convolution, and the other way round."""
    window = replace(part.local, transposed=not part.window.transposed)
    shape = tuple(map(len, exchange.held))
    found = [piece_term(window, box, exchange.held) for _, box in returned.receives]
    return ReturnedHalo(returned, tuple(None if term is None else Call(term, shape) for term in found))
