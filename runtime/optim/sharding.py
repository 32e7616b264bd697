"""An optimiser's state divided over the ranks of a stage (ZeRO-1: Rajbhandari et al. 2020, "ZeRO", section 5.1).

    bucket:      [ conv.weight | bias | fc.weight          | fc.bias ]      one flat tensor; parameters are views of it
    parts:       [ rank 0      | rank 1      | rank 2                ]
    of rank 1:                [bi|as | fc.we]                               what its optimiser steps, 1-D views

Gradients are summed to the rank that owns them, each rank's optimiser steps its slices alone, hence keeps state for
these alone, and the parts are gathered.  The messages are those of a sum (reduce-scatter and all-gather are its two
halves), the state is 1/n.  That is exact where an optimiser looks at each element by itself.

Summing a stage's gradients over its ranks, in buckets, behind the backward that makes them.

    backward of the last micro-batch:   fc  conv3  conv2 | conv1
    sums:                               [fc conv3] ----->
                                              [conv2 conv1] ----->        reduce() waits for the rest

Backward makes gradients from the last parameter to the first, so that is the order of the buckets.  A bucket's sum is
started when all its gradients are complete *and* all earlier buckets have been started: the same order on all ranks,
also on one that computes nothing.

Where ranks hold parts of parameters, each part has a group of ranks of its own, hence buckets of its own.  They come in
the order in which their last gradients are made; since that is an order of the stage's parameters, two ranks that share
two groups start them in the same order, and no circle of ranks waits for one another.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from planner.ir.errors import UsageError
from planner.ir.program import BUCKET_BYTES
from planner.ir.program import in_buckets as places_in_buckets
from runtime.transport import Pending

Exchange = Callable[[torch.Tensor, Sequence[int]], None]
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

    bucket: Bucket
    flat: torch.Tensor
    counts: tuple[int, ...]
    slices: dict[nn.Parameter, tuple[ParameterSlice, slice]]

    def move_to(self, flat: torch.Tensor) -> None:
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
        reduce_scatter: Exchange,
        all_gather: Exchange,
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

    def note(self, parameter: torch.Tensor) -> None:
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

    def gradients(self) -> dict[str, torch.Tensor]:
        """The whole gradients, by name, put together from all ranks, which all have to call this."""

        def put(number: int, flat: torch.Tensor) -> None:
            for part, place in self._shards[number].slices.values():
                if part.view.grad is not None:
                    flat[place] = part.view.grad

        return self._put_together(put)

    def _put_together(self, put: Callable[[int, torch.Tensor], None]) -> dict[str, torch.Tensor]:
        """Whole tensors by name; ``put`` puts this rank's slices into the flat one of a bucket."""
        by_name: dict[str, torch.Tensor] = {}
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
def _shards(bucket: Bucket, index: int, num_shards: int) -> ShardedBucket:
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
    if isinstance(value, torch.Tensor) and value.shape == part.shape:
        return value.reshape(-1)[part.start : part.stop].clone()
    return value


Bucket = tuple[nn.Parameter, ...]

StartSum = Callable[[torch.Tensor], Pending]
"""Starts to replace a tensor by its sum over the ranks of a stage."""

Hook = Callable[[torch.Tensor], None]
"""Told of a parameter whose gradient autograd has accumulated."""


class GradientBuckets:
    """The gradients of ``parameters``, whose order must be the same on all ranks of the stage.

    Args:
        start_sum: starts the sum of one flat tensor, in place.  None: this rank is alone, and nothing is summed.
        others: the same of parameters that have a group of ranks of their own; those of a group share one function.

    Attributes:
        buckets: of one dtype, one group and at most ``bucket_bytes`` each, in the order of their sums.
        put_off: parameters whose gradients are still to come by other means than autograd's, which then note them.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        start_sum: StartSum | None,
        bucket_bytes: int = BUCKET_BYTES,
        others: Mapping[nn.Parameter, StartSum | None] | None = None,
    ) -> None:
        by_group: dict[StartSum, list[nn.Parameter]] = {}
        order: dict[nn.Parameter, int] = {}
        for number, parameter in enumerate(parameters):
            order[parameter] = number
            start = (others or {}).get(parameter, start_sum)
            if start is not None:
                by_group.setdefault(start, []).append(parameter)
        bucket_sums = [
            (bucket, start) for start, group in by_group.items() for bucket in in_buckets(group, bucket_bytes)
        ]
        bucket_sums.sort(key=lambda each: -order[each[0][-1]])
        self.buckets = tuple(bucket for bucket, _ in bucket_sums)
        self._start_sum = [start for _, start in bucket_sums]
        self._bucket_of: dict[torch.Tensor, int] = {
            parameter: index for index, bucket in enumerate(self.buckets) for parameter in bucket
        }
        self.put_off: Container[torch.Tensor | None] = ()
        self._awaited: set[torch.Tensor] | None = None
        self._num_missing = [0] * len(self.buckets)
        self._num_started = 0
        self._pending: list[Pending] = []
        self._hooks: list[RemovableHandle] = []

    def arm(self) -> None:
        """Call before the last gradients of the step are made; each is then summed as soon as it is complete.

        A gradient is complete when autograd has accumulated it, or when it is noted (:meth:`note`).
        """
        if len(self.buckets) == 1:  # it is complete when backward ends: nothing to gain
            return
        self._awaited = set(self._bucket_of)
        self._num_missing = list(map(len, self.buckets))
        self._hooks = [self._hooked(parameter) for parameter in self._awaited]

    def note(self, parameter: torch.Tensor) -> None:
        """The gradient of ``parameter`` is complete; without effect before :meth:`arm` and for what is not summed here.

        Raises:
            RuntimeError: its sum has been started already, without this contribution.
        """
        index = self._bucket_of.get(parameter)
        if self._awaited is None or index is None:
            return
        if index < self._num_started:
            raise RuntimeError(f"a gradient of {tuple(parameter.shape)} came after its sum had been started")
        if parameter in self._awaited:
            self._awaited.remove(parameter)
            self._num_missing[index] -= 1
            self._start_complete()

    def _hooked(self, parameter: torch.Tensor) -> RemovableHandle:
        register: Callable[[Hook], RemovableHandle] = parameter.register_post_accumulate_grad_hook
        return register(self._accumulated)

    def _accumulated(self, parameter: torch.Tensor) -> None:
        """Autograd is done with a parameter, also where it was given nothing to accumulate."""
        if parameter not in self.put_off:
            self.note(parameter)

    def reduce(self) -> None:
        """Replaces every gradient by its sum; afterwards those of a bucket are views of one flat tensor.

        A missing gradient counts as zero: another rank may have one.
        """
        while self._num_started < len(self.buckets):
            self._start()
        for pending in self._pending:
            pending.wait()
        self.reset()

    def reset(self) -> None:
        """Forget the step."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._pending.clear()
        self._awaited = None
        self._num_started = 0

    def _start_complete(self) -> None:
        while self._num_started < len(self.buckets) and not self._num_missing[self._num_started]:
            self._start()

    def _start(self) -> None:
        number = self._num_started
        self._num_started += 1
        self._pending.append(self._start_sum[number](flat_gradients(self.buckets[number])))


def in_buckets(parameters: Iterable[nn.Parameter], bucket_bytes: int = BUCKET_BYTES) -> tuple[Bucket, ...]:
    """The parameters from the last to the first, in buckets of one dtype and device (``planner.ir.program``)."""
    listed = list(parameters)
    kinds = [(parameter.dtype, parameter.device) for parameter in listed]
    places = places_in_buckets([parameter.nbytes for parameter in listed], kinds, bucket_bytes)
    return tuple(tuple(listed[place] for place in bucket) for bucket in places)


@torch.no_grad()
def flat_gradients(bucket: Bucket) -> torch.Tensor:
    """The gradients of a bucket in one tensor, of which they become views; zero where one is missing.

    The only gradient of a bucket is not copied, unless its elements lie in another order than its dims.
    """
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
    if len(bucket) == 1:
        bucket[0].grad = gradients[0].contiguous()
        return bucket[0].grad.view(-1)
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    del gradients
    for parameter, part in zip(bucket, torch.split(flat, [p.numel() for p in bucket]), strict=True):
        parameter.grad = part.view(parameter.shape)
    return flat
