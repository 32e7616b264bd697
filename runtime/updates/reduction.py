"""Summing a stage's gradients over its ranks, in buckets, behind the backward that makes them.

    backward of the last micro-batch:   fc  conv3  conv2 | conv1
    sums:                               [fc conv3] ----->
                                              [conv2 conv1] ----->        reduce() waits for the rest

Backward makes gradients from the last parameter to the first, so that is the order of the buckets.  A bucket's sum is
started when all its gradients are complete *and* all earlier buckets have been started: the same order on all ranks,
also on one that computes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from runtime.transport import Pending

BUCKET_BYTES = 8 * 2**20
"""Most bytes of gradients that are copied together; a larger gradient is summed where it is.

Smaller ones begin earlier.  Measured on two cores of one host over gloo, a network of 47 MB: what is left to wait for
after backward is 181 ms in one go, 69 ms in buckets of 32 MiB, 32 ms of 8 MiB.
"""

Bucket = tuple[nn.Parameter, ...]


StartSum = Callable[[torch.Tensor], Pending]
"""Starts to replace a tensor by its sum over the ranks of a stage."""


class GradientBuckets:
    """The gradients of ``parameters``, whose order must be the same on all ranks of the stage.

    Args:
        start_sum: starts the sum of one flat tensor, in place.

    Attributes:
        buckets: of one dtype and at most ``bucket_bytes`` each, in the order of their sums.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], start_sum: StartSum, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        self.buckets = in_buckets(parameters, bucket_bytes)
        self._start_sum = start_sum
        self._bucket_of = {parameter: index for index, bucket in enumerate(self.buckets) for parameter in bucket}
        self._awaited: set[nn.Parameter] | None = None
        self._num_missing = [0] * len(self.buckets)
        self._num_started = 0
        self._pending: list[Pending] = []
        self._hooks: list[RemovableHandle] = []

    def arm(self, awaited: Collection[nn.Parameter] | None = None) -> None:
        """Call before the last gradients of the step are made; each is then summed as soon as it is complete.

        A gradient is complete when autograd has accumulated it, or when it is noted (:meth:`note`).

        Args:
            awaited: parameters whose gradient is still to come; all if None.  The others' are complete.
        """
        if len(self.buckets) == 1:  # it is complete when backward ends: nothing to gain
            return
        self._awaited = set(self._bucket_of) if awaited is None else {p for p in awaited if p in self._bucket_of}
        self._num_missing = [sum(p in self._awaited for p in bucket) for bucket in self.buckets]
        self._hooks = [parameter.register_post_accumulate_grad_hook(self.note) for parameter in self._awaited]
        self._start_complete()

    def note(self, parameter: nn.Parameter) -> None:
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
        self._awaited, self._num_started = None, 0

    def _start_complete(self) -> None:
        while self._num_started < len(self.buckets) and not self._num_missing[self._num_started]:
            self._start()

    def _start(self) -> None:
        flat = flat_gradients(self.buckets[self._num_started])
        self._num_started += 1
        self._pending.append(self._start_sum(flat))


def in_buckets(parameters: Iterable[nn.Parameter], bucket_bytes: int = BUCKET_BYTES) -> tuple[Bucket, ...]:
    """The parameters from the last to the first, in buckets of one dtype and device and at most ``bucket_bytes``.

    A larger parameter has a bucket of its own.
    """
    buckets: list[list[nn.Parameter]] = []
    room_bytes, kind = 0, None
    for parameter in reversed(list(parameters)):
        if (parameter.dtype, parameter.device) != kind or parameter.nbytes > room_bytes:
            buckets.append([])
            room_bytes, kind = bucket_bytes, (parameter.dtype, parameter.device)
        buckets[-1].append(parameter)
        room_bytes -= parameter.nbytes
    return tuple(map(tuple, buckets))


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
    for parameter, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
        parameter.grad = part.view(parameter.shape)
    return flat
