"""Input channels shared by several ranks: partial sums are made, sent to who keeps them, and added.

    rank 0 of 2     partial sums of rank 1's filters   send -->   its own filters      wait, add what came
    backward        send dy of its own filters   -->   dx, dw of its own filters      wait, dx, dw of rank 1's filters

So messages travel while a rank computes what it keeps.  Backward the order is autograd's, which runs what was called
last first.  Who shares and sends what says :mod:`planner.layers.contraction`; the messages are the adjoint of a gather
of the block's filters, hence backward is that gather.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from planner.ir.box import Box, Interval, Transfer
from planner.layers.boxes import as_tuples
from runtime.spatial.empties import connected
from runtime.spatial.exchange import Arriving, Exchange
from runtime.spatial.layer_shard import LayerShard, shape_of, worked_out_once

MakePartialSums = Callable[[Tensor, Tensor], Tensor]
"""(x, weight) -> the outputs of the filters in ``weight`` and the places in ``x``, from the input channels in both,
without bias."""


@dataclass(frozen=True, slots=True, eq=False)
class Sharing:
    """One rank's part of a contraction.

    Attributes:
        exchange: of outputs: what a rank keeps is held, what its block keeps is wanted.
        along: the dim of the outputs that is shared out; ``weight_filters`` that of the weight, None: it is none of the
            filters but of places, which ``x`` has at the same dim.
        before, own, after: what the block has along it before the rank's own, its own, and after it.
    """

    exchange: Exchange
    along: int
    weight_filters: int | None
    before: int
    own: int
    after: int

    @property
    def block(self) -> Box:
        """What this rank makes partial sums of."""
        return self.exchange.wanted

    def others(self) -> tuple[int, ...]:
        """The shape of the partial sums that others keep."""
        shape = list(shape_of(self.block))
        shape[self.along] = self.before + self.after
        return tuple(shape)

    def within_others(self, box: Box) -> tuple[slice, ...]:
        """Where a part that another rank keeps lies in these."""
        cuts = [slice(a.start - o.start, a.stop - o.start) for a, o in zip(box, self.block, strict=True)]
        place = cuts[self.along]
        if place.start >= self.before:
            cuts[self.along] = slice(place.start - self.own, place.stop - self.own)
        return tuple(cuts)

    def split(self, x: Tensor, weight: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """(x, weight) of what others keep, and of the rank's own."""
        if not x.numel():  # no channels of any place
            return (x, weight), (x, weight)
        whole, dim = (x, self.along) if self.weight_filters is None else (weight, self.weight_filters)
        before, own, after = torch.split(whole, [self.before, self.own, self.after], dim)
        rest = before if not self.after else after if not self.before else torch.cat((before, after), dim)
        return ((rest, weight), (own, weight)) if self.weight_filters is None else ((x, rest), (x, own))


@worked_out_once
def sharing_of(shard: LayerShard) -> Sharing:
    """How this rank shares the input channels of a layer with ``ways`` above 1."""
    division = shard.division
    me = shard.position
    plan = division.contraction
    if plan is None:
        raise ValueError(f"no ranks share the input channels of {division.layer.name}")
    boxes = as_tuples(plan.made)
    gather = [Transfer(keeper, maker, division.own[keeper]) for maker, keeper in plan.pairs()]
    own = division.own[me][plan.along]
    block = boxes[me][plan.along]
    own = own if len(own) else Interval(block.start, block.start)
    return Sharing(
        Exchange.of(shard.peers, division.own, boxes, gather),
        plan.along,
        plan.dims.weight_filters if plan.along == plan.dims.filters else None,
        own.start - block.start,
        len(own),
        block.stop - own.stop,
    )


def contract(shard: LayerShard, x: Tensor, weight: Tensor, run: MakePartialSums) -> Tensor:
    """The outputs that this rank keeps, summed over all input channels, without bias; differentiable.

    Args:
        x: covers what this rank needs of the first input (``shard.get(0, ...)``).
        weight: this rank's part: all filters of its block, its input channels.
        run: called for what others keep, then for the rank's own; not for parts without elements.
    """
    sharing = sharing_of(shard)
    if sharing.exchange.is_local:
        return _run(run, x, weight, shape_of(shard.own))
    others, own = sharing.split(x, weight)
    theirs = _run(run, *others, sharing.others())
    sums = _PartialSums(sharing)
    send: Callable[[Tensor, _PartialSums], Tensor] = _SendPartialSums.apply
    keep: Callable[[Tensor, Tensor, _PartialSums], Tensor] = _Keep.apply
    token = send(theirs, sums)
    return keep(_run(run, *own, shape_of(shard.own)), token, sums)


@dataclass(slots=True)
class _PartialSums:
    """What one call has on its way: partial sums forward, gradients backward."""

    sharing: Sharing
    arriving: Arriving | None = field(default=None)
    returning: Arriving | None = field(default=None)


class _SendPartialSums(torch.autograd.Function):
    """Starts to send partial sums; backward waits for the gradients of what was sent."""

    @staticmethod
    def forward(ctx: Any, theirs: Tensor, sums: _PartialSums) -> Tensor:
        sharing = sums.sharing
        pieces = [theirs[sharing.within_others(box)] for _, box in sharing.exchange.receives]
        sums.arriving = sharing.exchange.start_adjoint(pieces, theirs)
        ctx.sums = sums
        ctx.shape = theirs.shape
        return theirs.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, token: Tensor) -> tuple[Tensor, None]:
        sums: _PartialSums = ctx.sums
        gradient = token.new_empty(ctx.shape)
        returning = sums.returning
        sums.returning = None
        for box, piece in () if returning is None else returning.wait():
            gradient[sums.sharing.within_others(box)] = piece
        return gradient, None


class _Keep(torch.autograd.Function):
    """Adds the partial sums that came; backward starts to send the gradient to those that made them."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, token: Tensor, sums: _PartialSums) -> Tensor:
        ctx.sums = sums
        arriving = sums.arriving
        sums.arriving = None
        pieces = [piece for _, piece in (() if arriving is None else arriving.wait())]
        return _total(own, pieces)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        sums: _PartialSums = ctx.sums
        if ctx.needs_input_grad[1]:
            sums.returning = sums.sharing.exchange.start(dy)
        return dy, dy.new_zeros(0), None


def _total(own: Tensor, pieces: list[Tensor]) -> Tensor:
    """A new tensor."""
    if not pieces:
        return own.clone()
    total = own + pieces[0]
    for piece in pieces[1:]:
        total += piece
    return total


def _run(run: MakePartialSums, x: Tensor, weight: Tensor, shape: tuple[int, ...]) -> Tensor:
    """What ``run`` gives; zeros that hang on both where there is nothing to multiply."""
    if prod(shape) and x.numel() and weight.numel():
        return run(x, weight)
    return connected((x if x.is_floating_point() else weight).new_zeros(shape), x, weight)
