"""Sum, mean or maximum over the rows of each sample: ``(sites, channel)`` -> ``(sample, channel)``.

Inputs x, and ``starts`` and ``lengths`` ``(sample,)``: where the rows of each sample are.  What is divided is x: parts
are partial results for all samples, which the ranks combine.  The result is cut by samples.
"""

from __future__ import annotations

from planner.ir.graph import Layer, TensorSpec
from planner.layers._rules import Specs, num_elements, whole_weights
from planner.layers._sites import read_rows

REDUCTION = "sum"
input_boxes = read_rows
weight_boxes = whole_weights


def work(layer: Layer, inputs: Specs) -> TensorSpec:
    """What is summed."""
    return inputs[0]


def forward_flops(layer: Layer, inputs: Specs) -> int:
    """One an element of the input."""
    return num_elements(inputs[0])
