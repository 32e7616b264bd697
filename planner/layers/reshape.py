"""Views, flattening, permutations, slices, expansion: the sample dim is kept apart, all else is read whole."""

from __future__ import annotations

from planner.layers._rules import (
    all_apart,
    first_output,
    no_flops,
    whole_weights,
)

REDUCTION = ""
work = first_output
input_boxes = all_apart
weight_boxes = whole_weights
forward_flops = no_flops
