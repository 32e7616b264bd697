"""Sparse convolution, submanifold, strided or transposed: ``out[o] = sum over k of W[k] . in[neighbours[k, o]]``.

Inputs x ``(sites_i, channel)`` and the kernel map: ``neighbours`` ``(offset, sites_j)``, for each output the input row
at every offset, and ``reverse`` ``(offset, sites_i)``, for each input the output rows.  Kernel
``[offset, channel, filter]``, bias ``[filter]``.  Attribute ``pairs``: how many rows the map joins.

A rank has its own rows of x and of both maps.  What else it reads of x is data-dependent (``HALO``).
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
    """A multiply and an add per pair, channel and filter."""
    return 2 * pairs(layer) * inputs[0].shape[-1] * layer.outputs[0].shape[-1]
