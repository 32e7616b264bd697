"""Summing a stage's gradients over its ranks, in buckets: few messages, little memory, the same order everywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

BUCKET_BYTES = 32 * 2**20
"""Most bytes of gradients that are copied together; a larger gradient is summed where it is."""


class GradientBuckets:
    """The gradients of ``parameters``, in order, in buckets of one dtype and at most ``bucket_bytes``.

    The order must be the same on all ranks.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], bucket_bytes: int = BUCKET_BYTES) -> None:
        self.buckets: list[list[nn.Parameter]] = []
        room_bytes, dtype = 0, None
        for parameter in parameters:
            if parameter.dtype != dtype or parameter.nbytes > room_bytes:
                self.buckets.append([])
                room_bytes, dtype = bucket_bytes, parameter.dtype
            self.buckets[-1].append(parameter)
            room_bytes -= parameter.nbytes

    @torch.no_grad()
    def reduce(self, add: Callable[[torch.Tensor], None]) -> None:
        """Replaces every gradient by its sum; ``add`` sums one tensor over the ranks, in place.

        A missing gradient counts as zero: another rank may have one.
        """
        for bucket in self.buckets:
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
            if len(bucket) == 1:
                bucket[0].grad = gradients[0].contiguous()
                add(bucket[0].grad)
                continue
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            add(flat)
            for parameter, total in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                parameter.grad = total.view(parameter.shape)
