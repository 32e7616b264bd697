"""Convolution whose input channels are shared by several ranks: each makes partial sums of the filters of its block.

The input is fetched first; partial sums travel while a rank convolves for the filters that it keeps
(:mod:`runtime.decomposition.contraction`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from planner.ir.box import Box, Interval
from runtime.decomposition.contraction import contract, sharing_of
from runtime.decomposition.convolution.call import Call
from runtime.decomposition.convolution.gathered import box_with_zeros
from runtime.decomposition.convolution.overlapped import LocalConv, Put, halo_conv
from runtime.decomposition.convolution.terms import Window, main_term
from runtime.decomposition.empties import connected
from runtime.decomposition.exchange import Exchange, redistribute
from runtime.decomposition.step import Step


@dataclass(frozen=True, slots=True, eq=False)
class SharedConv:
    """A rank's part of such a convolution.

    Attributes:
        outputs: of which it makes partial sums.
        box: of the input that is put together.
    """

    window: Window
    exchange: Exchange
    outputs: Box
    box: Box
    locals: dict[int, LocalConv | None] = field(default_factory=dict)

    def __call__(self, step: Step, x: Tensor, weight: Tensor, bias: Tensor | None, put: Put | None = None) -> Tensor:
        """The outputs that this rank keeps; differentiable."""
        y = contract(step, redistribute(x, self.exchange, self.box), weight, self._partial_sums)
        return y if bias is None else y + bias.view(-1, *[1] * (y.ndim - 2))

    def _partial_sums(self, x: Tensor, weight: Tensor) -> Tensor:
        filters = weight.shape[1 if self.window.transposed else 0]
        if filters not in self.locals:
            self.locals[filters] = self._local(filters)
        local = self.locals[filters]
        if local is None:  # no input reaches these outputs
            shape = (len(self.outputs[0]), filters, *map(len, self.outputs[2:]))
            return connected(x.new_zeros(shape), x, weight)
        return halo_conv(x, weight, None, local)

    def _local(self, filters: int) -> LocalConv | None:
        outputs = (self.outputs[0], Interval(0, filters), *self.outputs[2:])
        term = main_term(self.window, self.box, outputs) if all(map(len, self.box)) else None
        return None if term is None else LocalConv(Call(term, tuple(map(len, outputs))))


def shared_conv(step: Step, window: Window) -> partial[Tensor]:
    """The form of a step with ``ways`` above 1."""
    exchange, outputs = step.exchange(0), sharing_of(step).block
    is_made = all(map(len, outputs)) and not window.transposed
    box = box_with_zeros(window, outputs, step.needed(0), exchange) if is_made else exchange.wanted
    return partial(SharedConv(window, exchange, outputs, box), step)
