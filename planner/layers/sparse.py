"""Layers over the sites of sparse tensors: convolutions, pools, and from sites to samples and back."""

from __future__ import annotations

from planner.ir.graph import Layer, TensorSpec
from planner.layers._kinds import Kind
from planner.layers._rules import Specs, num_elements
from planner.layers._sites import pairs, read_rows


class SparseConv(Kind, name="sparse_conv"):
    """Sparse convolution, submanifold, strided or transposed: ``out[o] = sum over k of W[k] . in[neighbours[k, o]]``.

    Inputs x ``(sites_i, channel)`` and the kernel map: ``neighbours`` ``(offset, sites_j)``, for each output the input
    row at every offset, and ``reverse`` ``(offset, sites_i)``, for each input the output rows.  Kernel ``[offset,
    channel, filter]``, bias ``[filter]``.  Attribute ``pairs``: how many rows the map joins.

    A rank has its own rows of x and of both maps.  What else it reads of x is data-dependent (``HALO``).
    """

    HALO = True
    input_boxes = staticmethod(read_rows)

    @staticmethod
    def forward_flops(layer: Layer, inputs: Specs) -> int:
        """A multiply and an add per pair, channel and filter."""
        return 2 * pairs(layer) * inputs[0].shape[-1] * layer.outputs[0].shape[-1]


class SparsePool(Kind, name="sparse_pool"):
    """Pooling over sites (maximum, sum or mean): as a sparse convolution, channel by channel.

    Inputs x ``(sites_i, channel)``, ``neighbours`` and ``reverse`` as of ``sparse_conv``; attribute ``pairs``.  Its
    halo is data-dependent as well.
    """

    HALO = True
    input_boxes = staticmethod(read_rows)

    @staticmethod
    def forward_flops(layer: Layer, inputs: Specs) -> int:
        """A comparison or an addition per pair and channel."""
        return pairs(layer) * inputs[0].shape[-1]


class Segment(Kind, name="segment"):
    """Sum, mean or maximum over the rows of each sample: ``(sites, channel)`` -> ``(sample, channel)``.

    Inputs x, and ``starts`` and ``lengths`` ``(sample,)``: where the rows of each sample are.  What is divided is x:
    parts are partial results for all samples, which the ranks combine.  The result is cut by samples.
    """

    REDUCTION = "sum"
    input_boxes = staticmethod(read_rows)

    @staticmethod
    def work(layer: Layer, inputs: Specs) -> TensorSpec:
        """What is summed."""
        return inputs[0]

    @staticmethod
    def forward_flops(layer: Layer, inputs: Specs) -> int:
        """One an element of the input."""
        return num_elements(inputs[0])


class SegmentExpand(Kind, name="segment_expand"):
    """A row for each site out of a row for each sample: ``(sample, channel)`` -> ``(sites, channel)``.

    Inputs y, and ``starts`` and ``lengths`` ``(sample,)``.  A rank's rows may belong to any samples, hence y is read
    whole.
    """

    input_boxes = staticmethod(read_rows)
