"""Scaled dot-product attention: samples, heads, queries and features of values are apart; all keys are read.

A causal mask lets query t see keys up to t, whichever part t lies in.  Keys behind the last query of a part are worth
nothing to it and are left out, unless weights are dropped at random, which are numbered by all keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from planner.ir.box import Box, Interval
from runtime.spatial.empties import empty_like_done
from runtime.spatial.step import Step, broadcast_part, gathered, picked

_HEAD = -3


def run(step: Step, op: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """The operator for this rank's queries."""
    found = gathered(step, arguments)
    if step.is_empty:
        return empty_like_done(step, found)
    done, shape = step.done, step.layer.outputs[0].shape
    if found.get("enable_gqa") and len(done[_HEAD]) != shape[_HEAD]:
        found |= {name: _heads_for(step, found[name], name) for name in ("key", "value")}
        found["enable_gqa"] = False
    mask = found.get("attn_mask")
    if mask is not None and step.input_of("attn_mask") is None:
        found["attn_mask"] = _constant_mask(mask, shape, done)
    if found.get("is_causal") and len(done[-2]) != shape[-2]:
        found |= _causal(found, done[-2])
    return op(**found)


def _heads_for(step: Step, x: Tensor, name: str) -> Tensor:
    """Keys or values, of which a group of heads of queries shares each, for the heads of this part."""
    index = step.input_of(name)
    total = step.division.inputs[index].shape[_HEAD] if isinstance(index, int) else x.shape[_HEAD]
    each, heads = step.layer.outputs[0].shape[_HEAD] // total, step.done[_HEAD]
    return picked(x, _HEAD, (head // each for head in range(heads.start, heads.stop)))


def _constant_mask(mask: Tensor, shape: tuple[int, ...], done: Box) -> Tensor:
    """The rows of this part's queries, of a mask ``[..., query, key]``."""
    keys = mask.shape[-1]
    return broadcast_part(mask, (*shape[:-1], keys), (*done[:-1], Interval(0, keys)))


def _causal(found: dict[str, Any], queries: Interval) -> dict[str, Any]:
    """Without a dropout fewer keys, and torch's own causal mask where the part begins at the first query."""
    key, value = found["key"], found["value"]
    if not found.get("dropout_p"):
        seen = min(queries.stop, key.shape[-2])
        if seen < key.shape[-2]:
            key, value = (x.narrow(-2, 0, seen) for x in (key, value))
    changes: dict[str, Any] = {"key": key, "value": value}
    if queries.start == 0:
        return changes
    rows = torch.arange(queries.start, queries.stop, device=key.device)
    mask = rows.unsqueeze(1) >= torch.arange(key.shape[-2], device=key.device)
    return {**changes, "attn_mask": mask, "is_causal": False}
