"""Pooling over sites (maximum, sum or mean): as a sparse convolution, channel by channel.

Inputs x ``(sites_i, channel)``, ``neighbours`` and ``reverse`` as of ``sparse_conv``; attribute ``pairs``.  Its halo is
data-dependent as well.
"""

from __future__ import annotations

from planner.ir.graph import Layer
from planner.layers._rules import Specs, first_output, whole_weights
from planner.layers._sites import pairs, read_rows

REDUCTION = ""
HALO = True
work = first_output
input_boxes = read_rows
weight_boxes = whole_weights


def forward_flops(layer: Layer, inputs: Specs) -> int:
    """A comparison or an addition per pair and channel."""
    return pairs(layer) * inputs[0].shape[-1]
