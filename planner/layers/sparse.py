"""Layers over the sites of sparse tensors: convolutions, pools, and from sites to samples and back.

They read of each sparse tensor a rank's own rows, as the layout cuts its level.  Sites have no order in which
neighbours are near, so that which rows a convolution reads beyond a rank's own is known from the coordinates alone,
when a micro-batch is there: its halo is no box.  Relations name the rows that a rank holds, the interval of its work
scaled to the level (which for a layout without cut points of its own is the layout's, but for rounding), and ``HALO``
says that there is more.
"""

from __future__ import annotations

from planner.ir.box import Box, Boxes, Interval
from planner.ir.graph import SAMPLE, Layer, TensorSpec, is_sites
from planner.ir.layout import scaled_intervals
from planner.layers._kinds import Kind
from planner.layers._rules import Specs, empty_work_reads_nothing, integer, num_elements


def sites_interval(work: TensorSpec, work_box: Box, extent: int) -> Interval | None:
    """The rows of another level that lie where those of the work do; None if the work has neither sites nor samples."""
    for dim, interval, total in zip(work.dims, work_box, work.shape, strict=True):
        if is_sites(dim) or dim == SAMPLE:
            return scaled_intervals((0, interval.start, interval.stop, total), extent)[1]
    return None


def own_rows(work: TensorSpec, work_box: Box, spec: TensorSpec, *, with_samples: bool = False) -> Box:
    """The rank's own rows of ``spec``, whole along every other dim.

    Args:
        with_samples: of samples its own as well, which go with its sites.
    """
    box = []
    for dim, extent in zip(spec.dims, spec.shape, strict=True):
        is_own = is_sites(dim) or (with_samples and dim == SAMPLE)
        interval = sites_interval(work, work_box, extent) if is_own else None
        box.append(interval or Interval(0, extent))
    return tuple(box)


@empty_work_reads_nothing
def read_rows(layer: Layer, inputs: Specs, work_box: Box) -> Boxes:
    """Of every input the rank's own rows; what has none (starts and lengths of samples) whole."""
    work = inputs[0] if layer.kind == "segment" else layer.outputs[0]
    return tuple(own_rows(work, work_box, spec) for spec in inputs)


def pairs(layer: Layer) -> int:
    """How many (input, output) pairs of rows the layer's map joins, for the samples that it was made for."""
    return integer(layer.attributes.get("pairs"))


class SparseConvKind(Kind, name="sparse_conv", dims="sequence"):
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


class SparsePoolKind(Kind, name="sparse_pool", dims="sequence"):
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


class SegmentKind(Kind, name="segment", dims="own"):
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


class SegmentExpandKind(Kind, name="segment_expand", dims="sequence"):
    """A row for each site out of a row for each sample: ``(sample, channel)`` -> ``(sites, channel)``.

    Inputs y, and ``starts`` and ``lengths`` ``(sample,)``.  A rank's rows may belong to any samples, hence y is read
    whole.
    """

    input_boxes = staticmethod(read_rows)
