"""The mean over all of space: each rank adds up its own part, and all get the sum of what they found."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from runtime.pipeline.messages import slices
from runtime.spatial.collectives import sum_dtype, summed
from runtime.spatial.empties import connected
from runtime.spatial.step import Step, gathered, shape_of

_SPACE = 2
"""Dims from here on are space."""


def run(step: Step, op: Callable[..., Any], arguments: dict[str, Any]) -> Tensor:
    """The mean, whole along space."""
    x = gathered(step, arguments)["self"]
    dtype = arguments.get("dtype") or x.dtype
    shape = shape_of(step.division.owned(0)[step.position])
    if step.is_first:
        own = x if step.own == step.done else x[slices(step.own, step.done)]
        total = own.sum(list(range(_SPACE, x.ndim)), dtype=sum_dtype(dtype)).view(shape)
    else:
        total = connected(torch.zeros(shape, dtype=sum_dtype(dtype), device=x.device), x)
    return (summed(step, total) / prod(step.division.work.shape[_SPACE:])).to(dtype)
