"""Op rules for any operator: on what a part reads, or on whole samples.

Other families fall back on them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor

from planner.ir.box import Box, whole
from planner.ir.graph import SAMPLE, TensorSpec
from runtime.spatial.empties import connected_to_all, empty_like_done
from runtime.spatial.layer_shard import LayerShard, gathered, within

OpRule = Callable[[LayerShard, Callable[..., Any], dict[str, Any]], Any]
"""What runs a layer's operator on this rank's part."""


def on_operands(rule: OpRule) -> OpRule:
    """``rule``, given what this rank's part reads; an empty part makes an empty result, which hangs on all of that."""

    @wraps(rule)
    def run(shard: LayerShard, op: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        operands = gathered(shard, arguments)
        return empty_like_done(shard, operands) if shard.is_empty else rule(shard, op, operands)

    return run


@on_operands
def run_on_reads(shard: LayerShard, op: Callable[..., Any], operands: dict[str, Any]) -> Any:
    """The operator on what the part reads of every input."""
    return op(**operands)


@on_operands
def run_whole_samples(shard: LayerShard, op: Callable[..., Any], operands: dict[str, Any]) -> Any:
    """The operator on whole samples, of which nothing else is known to be apart: every output is then cut to the part.

    Ranks that share samples do the same work; each keeps its part, and hence its share of the gradients.
    """
    result = connected_to_all(shard, op(**operands), operands)
    outputs = shard.layer.outputs
    if isinstance(result, Tensor):
        return within(result, whole_samples(outputs[0], shard.done), shard.done)
    boxes = [shard.done, *(shard.division.held[index][shard.position] for index in range(1, len(outputs)))]
    parts = zip(outputs, boxes, strict=True)
    return tuple(_cut_from_samples(each, *next(parts)) if isinstance(each, Tensor) else each for each in result)


def whole_samples(spec: TensorSpec, done: Box) -> Box:
    """The samples of a part, whole along other dims."""
    return tuple(
        interval if dim == SAMPLE else total
        for dim, interval, total in zip(spec.dims, done, whole(spec.shape), strict=True)
    )


def _cut_from_samples(x: Tensor, spec: TensorSpec, box: Box) -> Tensor:
    return within(x, whole_samples(spec, box), box)
