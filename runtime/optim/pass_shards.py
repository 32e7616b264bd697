"""Gradients, and parameters, that ranks of a stage have in parts while passes run (ZeRO-2 and ZeRO-3).

Rajbhandari et al. 2020, "ZeRO", sections 5.2 and 5.3; parameters come and go as in FSDP (Zhao et al. 2023, section 3).

    forward     gather A | A's operators | let A go, gather B | B's operators | let B go
    backward               gather B | B's operators, last to first | scatter B's gradients, let B go | gather A ...
    update      each rank's optimiser its slices; ZeRO-2 then gathers them, ZeRO-3 leaves them in parts

A, B are buckets of :mod:`runtime.optim.gradient_buckets`.  When each comes and goes follows from the *places* of the
operators that use its parameters in the order of the captured graph alone, hence is the same on all ranks, also on one
that has no rows.  Autograd runs the operators of a pass in the reverse order of their making, so that a bucket is
needed from the last place that uses it to the first, and complete below that.  The gradients of each micro-batch are
scattered and added up in slices; a rank has whole ones of a few buckets at a time.

A parameter that is not there has zero strides and NaN in place of its values, in eight bytes: nobody reads an old one.
What autograd saved of it (itself, or views such as a transpose) shares the bucket's storage, which is emptied and
filled again in place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from runtime.optim.gradient_buckets import flat_gradients
from runtime.optim.sharding import FlatExchange, ParameterSlice, ShardedBucket, ShardedParameters


@dataclass(frozen=True, slots=True)
class UsePlaces:
    """Where the operators that use a parameter stand in the graph's order.

    Attributes:
        forward: of all of them: first and last.
        backward: of those that a backward runs through: first and last.
    """

    forward: tuple[int, int]
    backward: tuple[int, int]


_Due = tuple[float, Callable[[], None]]
"""When something is due, in places along a pass, and what."""


class PassShards(ShardedParameters):
    """The parameters of a stage, of which each rank keeps gradients, and parameters, in slices.

    Args:
        parameters: by name, in an order that is the same on all ranks, best that of their first use.
        places: of each of them.
        gathers: whether parameters are in slices too (ZeRO-3), else their gradients (ZeRO-2).
        reduce_scatter, all_gather: over the ranks of the stage.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        places: Mapping[str, UsePlaces],
        index: int,
        num_shards: int,
        reduce_scatter: FlatExchange,
        all_gather: FlatExchange,
        *,
        gathers: bool,
    ) -> None:
        super().__init__(parameters, index, num_shards, reduce_scatter, all_gather)
        self._gathers = gathers
        self._index = index
        self._own: dict[int, Tensor] = {}  # by bucket, this rank's elements, where they do not lie in it
        self._there = set(range(len(self._shards)))
        self._stays = False
        self._forward, self._backward = self._events(places)
        self._next = 0

    @property
    def gathers(self) -> bool:
        """Whether parameters are in slices between passes."""
        return self._gathers

    def divide(self) -> None:
        """Call once the optimiser was made of whole parameters: from now on each rank keeps its slices alone."""
        if not self._gathers:
            return
        for number, shards in enumerate(self._shards):
            own = self._own[number] = shards.flat[self._part(shards)].clone()
            first = self._part(shards).start
            for each, place in shards.slices.values():
                each.view.data = own[place.start - first : place.stop - first]
        self._let_all_go()

    def begin_forward(self) -> None:
        """A pass forward is next."""
        if not self._stays:
            self._let_all_go()
        self._next = 0

    def forward_at(self, place: float) -> None:
        """The operator at ``place`` is next, or has run where half a place is added."""
        self._run(self._forward, place)

    def begin_backward(self) -> None:
        """A pass backward is next."""
        self._next = 0

    def backward_at(self, place: float) -> None:
        """The backward of the operator at ``place`` is next."""
        self._run(self._backward, -place)

    def end_backward(self) -> None:
        """The backward is over: what it came to nowhere, such as an operator without rows, is done all the same."""
        self._run(self._backward, math.inf)

    def stay(self, whole: bool) -> None:
        """Whether parameters stay whole from now on, whatever passes run; all ranks of the stage call this together."""
        self._stays = whole
        if whole:
            self.unshard()

    def unshard(self) -> None:
        """Parameters are whole until the next pass; all ranks of the stage call this together."""
        for number in range(len(self._shards)):
            self._gather_bucket(number)

    def reduce(self) -> None:
        """Without effect: each micro-batch's gradients were summed in its backward."""

    def follow(self) -> None:
        if not self._gathers:
            super().follow()

    def gather(self) -> None:
        if not self._gathers:
            super().gather()
            return
        if self._stays:  # what is whole follows the slices
            self._there.clear()
            self.unshard()
            return
        self._let_all_go()

    def reset(self) -> None:
        """Without effect: gradients of the steps before make up the same update (:meth:`forget`)."""

    def forget(self) -> None:
        """Forget the slices' gradients, which have been used."""
        super().reset()

    @torch.no_grad()
    def values(self) -> dict[str, Tensor]:
        """Copies of whole parameters, by name; all ranks of the stage call this together."""

        def put(number: int, flat: Tensor) -> None:
            flat[self._part(self._shards[number])] = self._own[number]

        return self._put_together(put)

    @torch.no_grad()
    def load(self, name: str, read: Callable[[ParameterSlice], Tensor]) -> None:
        """This rank's slice of a parameter becomes what ``read`` gives of it, in one dim."""
        part = self.slices.get(name)
        if part is not None:
            part.view.copy_(read(part))

    def _events(self, places: Mapping[str, UsePlaces]) -> tuple[tuple[_Due, ...], tuple[_Due, ...]]:
        forward: list[_Due] = []
        backward: list[_Due] = []
        for number, shards in enumerate(self._shards):
            used = [places[self._names[parameter]] for parameter in shards.bucket]
            first = min(each.backward[0] for each in used)
            last = max(each.backward[1] for each in used)
            if self._gathers:
                gather = partial(self._gather_bucket, number)
                let_go = partial(self._let_go, number)
                forward += [
                    (min(each.forward[0] for each in used), gather),
                    (max(each.forward[1] for each in used) + 0.5, let_go),
                ]
                backward += [(-last, gather), (-first + 0.5, let_go)]
            backward.append((-first + 0.5, partial(self._scatter, number)))
        return tuple(sorted(forward, key=_when)), tuple(sorted(backward, key=_when))

    def _run(self, events: tuple[_Due, ...], until: float) -> None:
        while self._next < len(events) and events[self._next][0] <= until:
            does = events[self._next][1]
            self._next += 1
            does()

    def _part(self, shards: ShardedBucket) -> slice:
        first = sum(shards.counts[: self._index])
        return slice(first, first + shards.counts[self._index])

    @torch.no_grad()
    def _gather_bucket(self, number: int) -> None:
        if not self._gathers or number in self._there:
            return
        shards = self._shards[number]
        shards.flat.untyped_storage().resize_(shards.flat.nbytes)
        shards.flat[self._part(shards)] = self._own[number]
        self._all_gather(shards.flat, shards.counts)
        for parameter, part in zip(shards.bucket, _split(shards), strict=True):
            parameter.data = part.view(parameter.shape)
        self._there.add(number)

    def _let_all_go(self) -> None:
        for number in sorted(self._there):
            self._let_go(number)

    @torch.no_grad()
    def _let_go(self, number: int) -> None:
        if not self._gathers or number not in self._there or self._stays:
            return
        shards = self._shards[number]
        for parameter in shards.bucket:
            parameter.data = parameter.new_full((), math.nan).expand(parameter.shape)
        shards.flat.untyped_storage().resize_(0)
        self._there.discard(number)

    @torch.no_grad()
    def _scatter(self, number: int) -> None:
        """Sums the gradients of a bucket to the slices' owners, and adds them to what is there of this update."""
        shards = self._shards[number]
        flat = flat_gradients(shards.bucket)
        for parameter in shards.bucket:
            parameter.grad = None
        self._reduce_scatter(flat, shards.counts)
        for part, place in shards.slices.values():
            if part.view.grad is None:
                part.view.grad = flat[place].clone()  # a view would keep the whole bucket alive
            else:
                part.view.grad += flat[place]


def _when(event: _Due) -> float:
    return event[0]


def _split(shards: ShardedBucket) -> Iterable[Tensor]:
    return torch.split(shards.flat, [parameter.numel() for parameter in shards.bucket])
