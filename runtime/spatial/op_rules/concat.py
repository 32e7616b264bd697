"""Concatenation and stacking: the parts of the inputs that lie in this rank's part, one behind the other.

Inputs that lie beside it are asked for nothing, and hang on the result all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from runtime.spatial.empties import connected, empty_like_done
from runtime.spatial.step import Step, gathered


def run(step: Step, op: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """The pieces that are there."""
    found = gathered(step, arguments)
    if step.is_empty:
        return empty_like_done(step, found)
    attributes: Any = step.layer.attributes
    pieces = [each for each in found["tensors"] if each.numel()]
    beside = [each for each in found["tensors"] if not each.numel()]
    output = step.layer.outputs[0]
    if pieces[0].ndim < len(output.shape):
        result = torch.stack(pieces, attributes["dim"])
    else:
        result = pieces[0] if len(pieces) == 1 else torch.cat(pieces, attributes["dim"])
    return connected(result.to(getattr(torch, output.dtype)), *beside)
