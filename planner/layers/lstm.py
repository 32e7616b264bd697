"""Recurrent layers (LSTM, GRU, plain): ``x [sample, time, feature]`` and states ``[layer, sample, feature]``.

Outputs: all steps, then the last states.  A step needs all earlier ones, so only samples are apart.
"""

from __future__ import annotations

from planner.ir.graph import Layer
from planner.layers._rules import (
    Specs,
    all_apart,
    first_output,
    num_elements,
    whole_weights,
)

REDUCTION = ""
work = first_output
input_boxes = all_apart
weight_boxes = whole_weights


def forward_flops(layer: Layer, inputs: Specs) -> int:
    """Per step and direction, gates x hidden x (input + hidden) multiply-adds; the gates' functions are not counted."""
    features, output = inputs[0].shape[-1], layer.outputs[0]
    if len(layer.outputs) > 1:
        hidden, num_cells = layer.outputs[1].shape[-1], layer.outputs[1].shape[0]
    else:
        hidden, num_cells = output.shape[-1], 1
    directions = output.shape[-1] // hidden
    steps = num_elements(output) // output.shape[-1]
    inner = (num_cells // directions - 1) * directions * hidden * (directions * hidden + hidden)
    return 2 * steps * _num_gates(layer) * (directions * hidden * (features + hidden) + inner)


def _num_gates(layer: Layer) -> int:
    op = str(layer.attributes.get("op", ""))
    if "lstm" in op:
        return 4
    return 3 if "gru" in op else 1
