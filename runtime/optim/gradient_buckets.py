"""Summing a stage's gradients over its ranks, in buckets, overlapped with the backward.

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

from collections.abc import Callable, Container, Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from planner.ir.program import BUCKET_BYTES
from planner.ir.program import in_buckets as places_in_buckets
from runtime.transport import Pending

ParameterBucket = tuple[nn.Parameter, ...]

StartSum = Callable[[Tensor], Pending]
"""Starts to replace a tensor by its sum over the ranks of a stage."""

Hook = Callable[[Tensor], None]
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
        self._bucket_of: dict[Tensor, int] = {
            parameter: index for index, bucket in enumerate(self.buckets) for parameter in bucket
        }
        self.put_off: Container[Tensor | None] = ()
        self._awaited: set[Tensor] | None = None
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

    def note(self, parameter: Tensor) -> None:
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

    def _hooked(self, parameter: Tensor) -> RemovableHandle:
        register: Callable[[Hook], RemovableHandle] = parameter.register_post_accumulate_grad_hook
        return register(self._accumulated)

    def _accumulated(self, parameter: Tensor) -> None:
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


def in_buckets(parameters: Iterable[nn.Parameter], bucket_bytes: int = BUCKET_BYTES) -> tuple[ParameterBucket, ...]:
    """The parameters from the last to the first, in buckets of one dtype and device (``planner.ir.program``)."""
    listed = list(parameters)
    kinds = [(parameter.dtype, parameter.device) for parameter in listed]
    places = places_in_buckets([parameter.nbytes for parameter in listed], kinds, bucket_bytes)
    return tuple(tuple(listed[place] for place in bucket) for bucket in places)


@torch.no_grad()
def flat_gradients(bucket: ParameterBucket) -> Tensor:
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
