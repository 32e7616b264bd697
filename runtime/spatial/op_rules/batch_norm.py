"""Batch normalisation of parts cut along samples, space and channels: see :mod:`runtime.stage.batch_norm`.

Ranks with equal channels take their statistics together, each counting its own part; of ranks with equal parts the
first one counts, and rows of a margin are counted by their owner.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from torch import Tensor

from runtime.pipeline.messages import slices
from runtime.spatial.collectives import rows_of
from runtime.spatial.empties import connected
from runtime.spatial.step import Step, along, gathered, shape_of
from runtime.stage.batch_norm import Counted, synchronised_batch_norm

_CHANNEL = 1
_BY_CHANNEL = ("weight", "bias", "running_mean", "running_var")


def run(step: Step, op: Callable[..., Any], arguments: dict[str, Any]) -> Tensor:
    """Normalised by the statistics of all ranks' parts, or in evaluation by the running ones."""
    found = gathered(step, arguments)
    x, extent, channels = found["input"], step.division.work.shape[_CHANNEL], step.done[_CHANNEL]
    if step.is_empty:
        x = connected(x.new_empty(shape_of(step.done)), x)
    for name in _BY_CHANNEL:
        if found[name] is not None:
            found[name] = along(found[name], 0, extent, channels)
    is_training = found["training"] and (step.training or found["running_mean"] is None)
    if is_training and len(channels) and not _is_alone(step):
        if "ranks" not in step.memo:
            meanwhile = None if step.later is None else step.later.run
            step.memo["ranks"] = rows_of(step), _counted(step), meanwhile, _num_values(step)
        numbers = (found[name] for name in (*_BY_CHANNEL, "momentum", "eps"))
        return synchronised_batch_norm(x, *numbers, *step.memo["ranks"])
    if step.is_empty:  # for which torch's backward divides by zero
        return connected(x, *(found[name] for name in ("weight", "bias") if found[name] is not None))
    result: Tensor = op(**{**found, "input": x, "training": is_training})
    return result


def _is_alone(step: Step) -> bool:
    """Whether no other rank has values of these channels: the operator does it all."""
    return len(step.group) == 1 and step.own == step.done


def _counted(step: Step) -> Counted:
    if not step.is_first:
        return None
    return () if step.own == step.done else slices(step.own, step.done)


def _num_values(step: Step) -> int:
    """Values of a channel in the whole tensor: each is counted once."""
    shape = step.division.work.shape
    return prod(shape) // shape[_CHANNEL]
