"""Keeps a compiler from dropping collectives, and from moving them between forward and backward.

torch.compile takes a collective for a function of its input: nobody misses one whose result is not used, and it may be
computed as soon as its input is known.  Both are wrong where ranks differ.  A rank that only sends makes no
use of the result, and drops the call that others wait for; one with an empty part sends back zeros, which it knows in
forward already.  Therefore

    forward    what is waited for is tied to an output
    backward   what is sent is tied to the gradients that come, what is waited for to one that goes

where a tie is a slice without elements, concatenated: it depends on what it was cut from, and changes nothing.  The
order of collectives is the graph's, which compilers keep.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable


class Order:
    """The ties of one rank's collectives while a compiler watches; otherwise without effect."""

    __slots__ = ("_is_watched", "_origin", "_results")

    def __init__(self) -> None:
        self._is_watched = False
        self._origin: Tensor | None = None
        self._results: list[Tensor] = []

    def ties(self, like: Tensor) -> list[Tensor]:
        """What to concatenate with what is sent: nothing, or a slice without elements."""
        return [] if self._origin is None else [self._origin.to(like.dtype)]

    def note(self, result: Tensor) -> None:
        """This was waited for."""
        if self._is_watched:
            self._results.append(_nothing_of(result))

    def watched(self, run: Callable[..., tuple[Tensor, ...]], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """``run(*tensors)``, whose collectives, and those of its backward, are tied."""
        arguments = list(tensors)
        places = [place for place, tensor in enumerate(arguments) if tensor.requires_grad]
        _put(arguments, places, _Enter, self)
        self.begin()
        try:
            outputs = list(run(*arguments))
            places = [place for place, each in enumerate(outputs) if each.is_floating_point()]
            _put(outputs, [place for place in places if outputs[place].requires_grad] or places, _Leave, self)
        finally:
            self.end()
        return tuple(outputs)

    def begin(self, gradients: Sequence[Tensor | None] = ()) -> None:
        """What follows is watched; in backward it begins with ``gradients``."""
        self._is_watched, self._results = True, []
        self._origin = next((_nothing_of(each) for each in gradients if each is not None), None)

    def end(self) -> None:
        """What was watched is over."""
        self._is_watched, self._origin, self._results = False, None, []

    def tied(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """``tensors``, of which the smallest depends on all that was waited for."""
        found = list(tensors)
        there = [(tensor.numel(), place, tensor) for place, tensor in enumerate(found) if tensor is not None]
        if there and self._results:
            _, place, smallest = min(there, key=lambda each: each[:2])
            ties = [result.to(smallest.dtype) for result in self._results]
            found[place] = torch.cat([smallest.reshape(-1), *ties]).view(smallest.shape)
        return found


def _nothing_of(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1)[:0]


def _put(tensors: list[Tensor], places: list[int], function: type[torch.autograd.Function], order: Order) -> None:
    """Replaces some of ``tensors`` by what ``function`` makes of them together."""
    if places:
        made = function.apply(order, *(tensors[place] for place in places))
        for place, tensor in zip(places, made, strict=True):
            tensors[place] = tensor


class _Enter(torch.autograd.Function):
    """The inputs; backward comes when all their gradients are there."""

    @staticmethod
    def forward(ctx: FunctionCtx, order: Order, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.order = order
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *gradients: Tensor | None) -> tuple[Any, ...]:
        found = ctx.order.tied(gradients)
        ctx.order.end()
        return None, *found


class _Leave(torch.autograd.Function):
    """The outputs; backward comes before everything else's."""

    @staticmethod
    def forward(ctx: FunctionCtx, order: Order, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        ctx.order = order
        ctx.set_materialize_grads(False)
        tied = order.tied(tensors)
        return tuple(
            tensor.view_as(tensor) if tensor is before else tensor for tensor, before in zip(tied, tensors, strict=True)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *gradients: Tensor | None) -> tuple[Any, ...]:
        ctx.order.begin(gradients)
        return None, *gradients
