"""Normalisation inside a sample: whole along the normalised dims (of channels their groups), of which the part is kept.

Weight and bias are those of the channels or places that are normalised; of a parameter for each channel a rank may have
those of its own part only, so that it is applied to that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from runtime.spatial.empties import empty_like_done
from runtime.spatial.step import Step, along, gathered, within

_CHANNEL = 1


def run(step: Step, op: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """The operator on what is normalised together."""
    found = gathered(step, arguments)
    if step.is_empty:
        return empty_like_done(step, found)
    covered, shape = step.exchange(0).wanted, step.layer.outputs[0].shape
    if "num_groups" in found:
        found["num_groups"] = found["num_groups"] * len(covered[_CHANNEL]) // shape[_CHANNEL]
    affine = {name: found[name] for name in ("weight", "bias") if found.get(name) is not None}
    is_by_channel = "normalized_shape" not in found
    if is_by_channel and affine and covered[_CHANNEL] != step.done[_CHANNEL]:
        found |= dict.fromkeys(affine)
        return _scaled(within(op(**found), covered, step.done), step, affine)
    if is_by_channel:
        found |= {name: along(each, 0, shape[_CHANNEL], covered[_CHANNEL]) for name, each in affine.items()}
    return within(op(**found), covered, step.done)


def _scaled(x: Tensor, step: Step, affine: dict[str, Tensor]) -> Tensor:
    """Weight and bias of the part's own channels."""
    extent, channels = step.layer.outputs[0].shape[_CHANNEL], step.done[_CHANNEL]
    shape = [-1 if dim == _CHANNEL else 1 for dim in range(x.ndim)]
    if "weight" in affine:
        x = x * along(affine["weight"], 0, extent, channels).view(shape)
    return x + along(affine["bias"], 0, extent, channels).view(shape) if "bias" in affine else x
