"""Op rules of normalisation: by the statistics of all ranks, or of what lies whole on one of them."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from torch import Tensor

from runtime.pipeline.routing import slices
from runtime.spatial.collectives import rows_of
from runtime.spatial.empties import connected
from runtime.spatial.layer_shard import LayerShard, along, gathered, shape_of, within
from runtime.spatial.op_rules.generic import on_operands
from runtime.stage.batch_norm import Counted, synchronised_batch_norm

_CHANNEL = 1
_BY_CHANNEL = ("weight", "bias", "running_mean", "running_var")


def run_batch_norm(shard: LayerShard, op: Callable[..., Any], arguments: dict[str, Any]) -> Tensor:
    """Normalised by the statistics of all ranks' parts, or in evaluation by the running ones.

    Parts are cut along samples, space and channels: see :mod:`runtime.stage.batch_norm`.  Ranks with equal channels
    take their statistics together, each counting its own part; of ranks with equal parts the first one counts, and rows
    of a margin are counted by their owner.
    """
    operands = gathered(shard, arguments)
    x = operands["input"]
    extent = shard.division.work.shape[_CHANNEL]
    channels = shard.done[_CHANNEL]
    if shard.is_empty:
        x = connected(x.new_empty(shape_of(shard.done)), x)
    for name in _BY_CHANNEL:
        if operands[name] is not None:
            operands[name] = along(operands[name], 0, extent, channels)
    is_training = operands["training"] and (shard.training or operands["running_mean"] is None)
    if is_training and len(channels) and not _is_alone(shard):
        if "ranks" not in shard.memo:
            meanwhile = None if shard.later is None else shard.later.run
            shard.memo["ranks"] = rows_of(shard), _counted(shard), meanwhile, _num_values(shard)
        numbers = (operands[name] for name in (*_BY_CHANNEL, "momentum", "eps"))
        return synchronised_batch_norm(x, *numbers, *shard.memo["ranks"])
    if shard.is_empty:  # for which torch's backward divides by zero
        return connected(x, *(operands[name] for name in ("weight", "bias") if operands[name] is not None))
    result: Tensor = op(**{**operands, "input": x, "training": is_training})
    return result


def _is_alone(shard: LayerShard) -> bool:
    """Whether no other rank has values of these channels: the operator does it all."""
    return len(shard.group) == 1 and shard.own == shard.done


def _counted(shard: LayerShard) -> Counted:
    if not shard.is_first:
        return None
    return () if shard.own == shard.done else slices(shard.own, shard.done)


def _num_values(shard: LayerShard) -> int:
    """Values of a channel in the whole tensor: each is counted once."""
    shape = shard.division.work.shape
    return prod(shape) // shape[_CHANNEL]


@on_operands
def run_layer_norm(shard: LayerShard, op: Callable[..., Any], operands: dict[str, Any]) -> Any:
    """Inside a sample: whole along the normalised dims (of channels their groups), of which the part is kept.

    Weight and bias are those of the channels or places that are normalised; of a parameter for each channel a rank may
    have those of its own part only, so that it is applied to that.
    """
    covered = shard.exchange(0).wanted
    shape = shard.layer.outputs[0].shape
    if "num_groups" in operands:
        operands["num_groups"] = operands["num_groups"] * len(covered[_CHANNEL]) // shape[_CHANNEL]
    affine = {name: operands[name] for name in ("weight", "bias") if operands.get(name) is not None}
    is_by_channel = "normalized_shape" not in operands
    if is_by_channel and affine and covered[_CHANNEL] != shard.done[_CHANNEL]:
        operands |= dict.fromkeys(affine)
        return _scaled_by_channel(within(op(**operands), covered, shard.done), shard, affine)
    if is_by_channel:
        operands |= {name: along(each, 0, shape[_CHANNEL], covered[_CHANNEL]) for name, each in affine.items()}
    return within(op(**operands), covered, shard.done)


def _scaled_by_channel(x: Tensor, shard: LayerShard, affine: dict[str, Tensor]) -> Tensor:
    """Weight and bias of the part's own channels."""
    extent = shard.layer.outputs[0].shape[_CHANNEL]
    channels = shard.done[_CHANNEL]
    shape = [-1 if dim == _CHANNEL else 1 for dim in range(x.ndim)]
    if "weight" in affine:
        x = x * along(affine["weight"], 0, extent, channels).view(shape)
    return x + along(affine["bias"], 0, extent, channels).view(shape) if "bias" in affine else x


@on_operands
def run_softmax(shard: LayerShard, op: Callable[..., Any], operands: dict[str, Any]) -> Any:
    """The operator whole along its dim, of which the part is kept."""
    return within(op(**operands), shard.exchange(0).wanted, shard.done)
