"""An optimiser's state divided over the ranks of a stage (ZeRO-1: Rajbhandari et al. 2020, "ZeRO", section 5.1).

    bucket:      [ conv.weight | bias | fc.weight          | fc.bias ]      one flat tensor; parameters are views of it
    parts:       [ rank 0      | rank 1      | rank 2                ]
    of rank 1:                [bi|as | fc.we]                               what its optimiser steps, 1-D views

Gradients are summed to the rank that owns them, each rank's optimiser steps its slices alone, hence keeps state for
these alone, and the parts are gathered.  The messages are those of a sum (reduce-scatter and all-gather are its two
halves), the state is 1/n.  That is exact where an optimiser looks at each element by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from planner.ir.errors import UsageError
from planner.ir.program import BUCKET_BYTES
from runtime.optim.gradient_buckets import ParameterBucket, flat_gradients, in_buckets

FlatExchange = Callable[[Tensor, Sequence[int]], None]
"""(flat, counts): a reduce-scatter or all-gather over the stage's ranks, in place; counts by rank."""

ELEMENTWISE = ["ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]
"""Optimisers of ``torch.optim`` (2.13) that treat each element by itself, hence may be given slices."""

STEP = "step"
"""What optimisers call their counter, which is no element of a parameter even if that is a single number."""


@dataclass(frozen=True, slots=True)
class ParameterSlice:
    """Elements ``start`` to ``stop`` of a parameter of ``shape``, laid flat.

    Attributes:
        view: one dim; shares the parameter's memory, and has a gradient of its own.
    """

    view: nn.Parameter
    start: int
    stop: int
    shape: tuple[int, ...]


@dataclass(slots=True)
class ShardedBucket:
    """One bucket.

    Attributes:
        flat: the elements of all its parameters.
        counts: elements by rank.
        slices: this rank's, by parameter, each with its place in ``flat``.
    """

    bucket: ParameterBucket
    flat: Tensor
    counts: tuple[int, ...]
    slices: dict[nn.Parameter, tuple[ParameterSlice, slice]]

    def move_to(self, flat: Tensor) -> None:
        """Parameters and slices become views of ``flat``."""
        self.flat = flat
        for parameter, part in zip(self.bucket, torch.split(flat, [p.numel() for p in self.bucket]), strict=True):
            parameter.data = part.view(parameter.shape)
        for each, place in self.slices.values():
            each.view.data = flat[place]


class ShardedParameters:
    """The parameters of a stage, moved into flat buckets of which each of ``num_shards`` ranks owns a part.

    Args:
        parameters: by name, in an order that is the same on all ranks.
        index: of this rank among those of the stage.
        reduce_scatter, all_gather: over the ranks of the stage.

    Attributes:
        names: of all of them.
        slices: this rank's, by the parameters' names; where it owns nothing of a parameter there is none.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        index: int,
        num_shards: int,
        reduce_scatter: FlatExchange,
        all_gather: FlatExchange,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._names = {parameter: name for name, parameter in parameters.items()}
        self.names = frozenset(parameters)
        self._reduce_scatter = reduce_scatter
        self._all_gather = all_gather
        self._shards = [_shards(bucket, index, num_shards) for bucket in in_buckets(parameters.values(), bucket_bytes)]
        self.slices = {
            self._names[parameter]: part
            for shards in reversed(self._shards)
            for parameter, (part, _) in reversed(shards.slices.items())
        }

    def arm(self) -> None:
        """Without effect: the sums wait until all gradients are there."""

    def note(self, parameter: Tensor) -> None:
        """Without effect, as :meth:`arm`."""

    def reduce(self) -> None:
        """Sums the gradients of this rank's slices over the ranks; the parameters themselves lose theirs."""
        for shards in self._shards:
            flat = flat_gradients(shards.bucket)
            self._reduce_scatter(flat, shards.counts)
            for part, place in shards.slices.values():
                part.view.grad = flat[place].clone()  # a view would keep the whole bucket alive
            for parameter in shards.bucket:
                parameter.grad = None
            del flat  # else it is there until the next one is put together

    def follow(self) -> None:
        """Before the optimisers' step: where parameters were given other storage, the old one must stay as it is."""
        for shards in self._shards:
            if shards.bucket[0].data_ptr() != shards.flat.data_ptr():
                shards.move_to(shards.flat.clone())

    def gather(self) -> None:
        """After the optimisers' step: every rank gets the elements that the others have changed."""
        for shards in self._shards:
            self._all_gather(shards.flat, shards.counts)

    def gradients(self) -> dict[str, Tensor]:
        """The whole gradients, by name, put together from all ranks, which all have to call this."""

        def put(number: int, flat: Tensor) -> None:
            for part, place in self._shards[number].slices.values():
                if part.view.grad is not None:
                    flat[place] = part.view.grad

        return self._put_together(put)

    def _put_together(self, put: Callable[[int, Tensor], None]) -> dict[str, Tensor]:
        """Whole tensors by name; ``put`` puts this rank's slices into the flat one of a bucket."""
        by_name: dict[str, Tensor] = {}
        for number, shards in enumerate(self._shards):
            flat = torch.zeros_like(shards.flat)
            put(number, flat)
            self._all_gather(flat, shards.counts)
            sizes = [parameter.numel() for parameter in shards.bucket]
            for parameter, whole in zip(shards.bucket, torch.split(flat, sizes), strict=True):
                by_name[self._names[parameter]] = whole.view(parameter.shape)
        return by_name

    def reset(self) -> None:
        """Forget the slices' gradients."""
        for part in self.slices.values():
            part.view.grad = None


@torch.no_grad()
def _shards(bucket: ParameterBucket, index: int, num_shards: int) -> ShardedBucket:
    """Moves a bucket's parameters into one flat tensor and cuts it evenly; the first parts may be larger by one."""
    flat = torch.cat([parameter.reshape(-1) for parameter in bucket])
    each, rest = divmod(flat.numel(), num_shards)
    counts = tuple(each + (rank < rest) for rank in range(num_shards))
    first = sum(counts[:index])
    last = first + counts[index]
    slices = {}
    begin = 0
    for parameter in bucket:
        end = begin + parameter.numel()
        place = slice(max(begin, first), min(end, last))
        if place.start < place.stop:
            part = ParameterSlice(
                nn.Parameter(flat[place]), place.start - begin, place.stop - begin, tuple(parameter.shape)
            )
            slices[parameter] = (part, place)
        begin = end
    shards = ShardedBucket(bucket, flat, counts, slices)
    shards.move_to(flat)
    return shards


def require_elementwise(optimizer: torch.optim.Optimizer, remedy: str) -> None:
    """Refuse an optimiser that may not be given parts of parameters.

    Raises:
        UsageError: it looks at more than single elements, or is not known not to.
    """
    cls = type(optimizer)
    if cls.__name__ not in ELEMENTWISE or getattr(torch.optim, cls.__name__, None) is not cls:
        raise UsageError(
            f"the state of {cls.__name__} cannot be divided over the ranks of a stage",
            [f"known to treat each element by itself: {', '.join(ELEMENTWISE)}"],
            ["another optimiser", remedy],
        )


def give_slices(
    optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str], sharded: ShardedParameters
) -> None:
    """Every sharded parameter of the optimiser's groups becomes this rank's slice of it, or leaves if there is none.

    The factory has seen whole parameters, so that its rules by shape mean what they say.

    Raises:
        UsageError: the optimiser looks at more than single elements, or is not known not to.
    """
    require_elementwise(optimizer, "a plan whose stages are not sharded")
    for group in optimizer.param_groups:
        kept: list[nn.Parameter] = []
        for parameter in group["params"]:
            if names[parameter] not in sharded.names:
                kept.append(parameter)
                continue
            begun = optimizer.state.pop(parameter, {})  # some keep state from the start
            part = sharded.slices.get(names[parameter])
            if part is not None:
                kept.append(part.view)
                if begun:
                    optimizer.state[part.view] = {
                        key: value if key == STEP else _cut(value, part) for key, value in begun.items()
                    }
        group["params"] = kept
        group.pop("param_names", None)  # they would no longer match


def _cut(value: Any, part: ParameterSlice) -> Any:
    if isinstance(value, Tensor) and value.shape == part.shape:
        return value.reshape(-1)[part.start : part.stop].clone()
    return value
