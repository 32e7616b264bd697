"""Scaled dot-product attention: ``q [sample, head, time, feature]``, ``k`` and ``v`` alike, and a mask if there is one.

Every query reads all keys and values of its sample and head (a causal mask makes some of them worthless, not unread).
"""

from __future__ import annotations

from planner.ir.box import Box, Interval
from planner.ir.graph import Layer, TensorSpec
from planner.layers._rules import (
    Boxes,
    Specs,
    broadcast,
    empty_work_reads_nothing,
    first_output,
    num_elements,
    samples_apart,
    whole_weights,
)

REDUCTION = ""
work = first_output
weight_boxes = whole_weights


@empty_work_reads_nothing
def input_boxes(layer: Layer, inputs: Specs, work_box: Box) -> Boxes:
    """Queries of the same times, keys and values of all times; a mask is broadcast to (query, key)."""
    output = layer.outputs[0]
    query, key, value, *rest = inputs
    *sample_and_head, time, feature = work_box
    return (
        (*sample_and_head, time, _all(query, -1)),
        (*_batch(output, work_box, key), _all(key, -2), _all(key, -1)),
        (*_batch(output, work_box, value), _all(value, -2), feature),
        *(_mask(output, work_box, spec) for spec in rest),
    )


def forward_flops(layer: Layer, inputs: Specs) -> int:
    """Two products of (query time) x (key time) x feature, each a multiply and an add."""
    key_times = inputs[1].shape[-2]
    query_flops = 2 * num_elements(inputs[0]) * key_times
    return query_flops + 2 * num_elements(layer.outputs[0]) * key_times


def _all(spec: TensorSpec, dim: int) -> Interval:
    return Interval(0, spec.shape[dim])


def _batch(output: TensorSpec, work_box: Box, spec: TensorSpec) -> Box:
    pairs = zip(work_box[:-2], output.shape[:-2], spec.shape[:-2], strict=True)
    return tuple(interval if extent == total else Interval(0, extent) for interval, total, extent in pairs)


def _mask(output: TensorSpec, work_box: Box, spec: TensorSpec) -> Box:
    if not 2 <= len(spec.shape) <= len(output.shape):
        return samples_apart(output, work_box, spec)
    return (*broadcast(output, work_box, spec)[:-1], _all(spec, -1))
