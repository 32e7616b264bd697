"""Batch normalisation: elementwise, once the statistics of every channel are known.

The statistics are over all samples and all of space, or all sites; where these are divided, counts, sums and sums of
squares are combined over the ranks, which boxes do not say: ``REDUCTION`` does.  Weight and bias ``[channel]``.
"""

from __future__ import annotations

from planner.ir.box import Box
from planner.ir.graph import SAMPLE, Layer, is_sites
from planner.layers._rules import Boxes, Specs, broadcast, empty_work_reads_nothing, first_output, num_elements

REDUCTION = "statistics"
work = first_output


@empty_work_reads_nothing
def input_boxes(layer: Layer, inputs: Specs, work_box: Box) -> Boxes:
    """The same place."""
    return tuple(broadcast(layer.outputs[0], work_box, spec) for spec in inputs)


def weight_boxes(layer: Layer, parameters: Specs, work_box: Box) -> Boxes:
    """The channels of the work."""
    dims = layer.outputs[0].dims
    if "channel" in dims:
        channel = dims.index("channel")
    else:
        channel = 1 + next(at for at, dim in enumerate(dims) if dim == SAMPLE or is_sites(dim))
    return tuple((work_box[channel],) for _ in parameters)


def forward_flops(layer: Layer, inputs: Specs) -> int:
    """Sum, square, sum of squares; subtract, scale, multiply, add: 7 an element."""
    return 7 * num_elements(layer.outputs[0])
