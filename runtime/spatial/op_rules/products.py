"""Op rules of products with weights or between tensors: linear maps, embeddings, attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from planner.ir.box import Box, Interval
from runtime.spatial.contraction import contract
from runtime.spatial.empties import empty_like_done
from runtime.spatial.layer_shard import LayerShard, along, broadcast_part, gathered, picked
from runtime.spatial.op_rules.generic import on_operands, run_on_reads, run_whole_samples

_HEAD_DIM = -3

run_lstm = run_whole_samples  # samples are apart; other dims of what it makes are cut as the layout says


def run_linear(shard: LayerShard, op: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """The features that this rank keeps: rows cut along any dims, filters (output features) cut, input features shared.

    y-stationary (``ways`` 1): all input features are gathered, and each rank makes its own filters with its part of the
    weight.  x-stationary (as many ways as parts) and between: see :mod:`runtime.spatial.contraction`.
    """
    if shard.division.ways == 1:
        return run_on_reads(shard, op, arguments)
    operands = gathered(shard, arguments)
    result = contract(shard, operands["input"], operands["weight"], partial(_product, op))
    bias: Tensor | None = operands["bias"]
    return result if bias is None else result + bias.to(result.dtype)  # which autocast may have lowered


def _product(op: Callable[..., Any], x: Tensor, weight: Tensor) -> Tensor:
    result: Tensor = op(input=x, weight=weight, bias=None)
    return result


def run_embedding(shard: LayerShard, op: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """The columns of the table that this rank has, at the places of its part.

    Of a table that is shared by entries (``ways`` above 1) each rank looks up those that it has, for all places of its
    block; what it has not is 0, and the sums over the block are shared out (:mod:`runtime.spatial.contraction`).
    """
    operands = gathered(shard, arguments)
    if shard.division.ways > 1:
        return contract(shard, operands["indices"], operands["weight"], partial(_looked_up, shard, op, operands))
    if shard.is_empty:
        return empty_like_done(shard, operands)
    shape = shard.layer.outputs[0].shape
    if shard.input_of("indices") is None:
        operands["indices"] = broadcast_part(operands["indices"], shape[:-1], shard.done[:-1])
    if shard.input_of("weight") is None:
        operands["weight"] = along(operands["weight"], 1, shape[-1], shard.done[-1])
    return op(**operands)


def _looked_up(
    shard: LayerShard, op: Callable[..., Any], operands: dict[str, Any], indices: Tensor, weight: Tensor
) -> Tensor:
    """Entries of this rank's part of the table, zeros where ``indices`` name others."""
    entries = shard.division.weights[0][shard.position][0]
    places = (indices >= entries.start) & (indices < entries.stop)
    padding = operands.get("padding_idx", -1)
    local = padding - entries.start if entries.start <= padding < entries.stop else -1
    rows = op(**{**operands, "weight": weight, "indices": indices[places] - entries.start, "padding_idx": local})
    looked_up: Tensor = rows.new_zeros((*indices.shape, weight.shape[1])).index_put((places,), rows)
    return looked_up


@on_operands
def run_attention(shard: LayerShard, op: Callable[..., Any], operands: dict[str, Any]) -> Any:
    """Scaled dot-product attention for this rank's queries: samples, heads, queries and features of values are apart.

    All keys are read.  A causal mask lets query t see keys up to t, whichever part t lies in.  Keys after the last
    query of a part are worth nothing to it and are left out, unless weights are dropped at random, which are numbered
    by all keys.
    """
    done = shard.done
    shape = shard.layer.outputs[0].shape
    if operands.get("enable_gqa") and len(done[_HEAD_DIM]) != shape[_HEAD_DIM]:
        operands |= {name: _heads_for(shard, operands[name], name) for name in ("key", "value")}
        operands["enable_gqa"] = False
    mask = operands.get("attn_mask")
    if mask is not None and shard.input_of("attn_mask") is None:
        operands["attn_mask"] = _constant_mask(mask, shape, done)
    if operands.get("is_causal") and len(done[-2]) != shape[-2]:
        operands |= _causal_part(operands, done[-2])
    return op(**operands)


def _heads_for(shard: LayerShard, x: Tensor, name: str) -> Tensor:
    """Keys or values, of which a group of heads of queries shares each, for the heads of this part."""
    index = shard.input_of(name)
    total = x.shape[_HEAD_DIM]
    first = 0
    if isinstance(index, int):
        total = shard.division.inputs[index].shape[_HEAD_DIM]
        first = shard.exchange(index).wanted[_HEAD_DIM].start
    each = shard.layer.outputs[0].shape[_HEAD_DIM] // total
    heads = shard.done[_HEAD_DIM]
    return picked(x, _HEAD_DIM, (head // each - first for head in range(heads.start, heads.stop)))


def _constant_mask(mask: Tensor, shape: tuple[int, ...], done: Box) -> Tensor:
    """The rows of this part's queries, of a mask ``[..., query, key]``."""
    keys = mask.shape[-1]
    return broadcast_part(mask, (*shape[:-1], keys), (*done[:-1], Interval(0, keys)))


def _causal_part(operands: dict[str, Any], queries: Interval) -> dict[str, Any]:
    """Without a dropout fewer keys, and torch's own causal mask where the part begins at the first query."""
    key = operands["key"]
    value = operands["value"]
    if not operands.get("dropout_p"):
        num_keys = min(queries.stop, key.shape[-2])
        if num_keys < key.shape[-2]:
            key, value = (x.narrow(-2, 0, num_keys) for x in (key, value))
    changes: dict[str, Any] = {"key": key, "value": value}
    if queries.start == 0:
        return changes
    rows = torch.arange(queries.start, queries.stop, device=key.device)
    mask = rows.unsqueeze(1) >= torch.arange(key.shape[-2], device=key.device)
    return {**changes, "attn_mask": mask, "is_causal": False}
