"""What layers over sites read: of each sparse tensor a rank's own rows, as the layout cuts its level.

Sites have no order in which neighbours are near, so that which rows a convolution reads beyond a rank's own is known
from the coordinates alone, when a micro-batch is there: its halo is no box.  Relations name the rows that a rank holds,
the interval of its work scaled to the level (which for a layout without cut points of its own is the layout's, but for
rounding), and ``HALO`` says that there is more.
"""

from __future__ import annotations

from planner.ir.box import Box, Interval
from planner.ir.graph import SAMPLE, Graph, Layer, TensorSpec, is_sites
from planner.ir.layout import scaled_intervals
from planner.layers._kinds import kind
from planner.layers._rules import Boxes, Specs, empty_work_reads_nothing, integer

OVER_SITES = frozenset({"sparse_conv", "sparse_pool", "segment", "segment_expand"})
"""Kinds that read maps or segments, which the host prepares."""


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


def prepared_inputs(graph: Graph, readers: frozenset[str] | None = None) -> tuple[str, ...]:
    """The graph inputs, read by the layers ``readers`` (all if None), that a host prepares ahead of a micro-batch.

    They are functions of the coordinates alone: integers that lie along sites (kernel maps), or that a layer over sites
    reads (where samples start).  Targets are none of them.
    """
    read_by: dict[str, list[Layer]] = {}
    for layer in graph.layers:
        for value in layer.inputs:
            read_by.setdefault(value, []).append(layer)
    found = []
    for name, spec in graph.inputs.items():
        reading = read_by.get(name, [])
        is_map = spec.has_sites and any(layer.kind != "loss" for layer in reading)
        is_read = any(layer.kind in OVER_SITES for layer in reading)
        mine = readers is None or any(layer.name in readers for layer in reading)
        if not spec.is_float and mine and (is_map or is_read):
            found.append(name)
    return tuple(found)


def throughout_sites(graph: Graph) -> frozenset[str]:
    """Names of the layers whose work and outputs all lie along sites (of a loss the work), samples nowhere.

    The ranks of a stage of such layers alone share its sites, and may be more than the samples of a micro-batch.
    """
    values = graph.values()
    found = set()
    for layer in graph.layers:
        work = kind(layer.kind).work(layer, tuple(values[name] for name in layer.inputs))
        outputs = () if layer.kind == "loss" else layer.outputs
        if all(spec.has_sites for spec in (work, *outputs)):
            found.add(layer.name)
    return frozenset(found)


def over_sites(graph: Graph) -> frozenset[str]:
    """Names of the layers that read or make a sparse tensor (or a map)."""
    values = graph.values()
    return frozenset(
        layer.name
        for layer in graph.layers
        if any(spec.has_sites for spec in (*(values[name] for name in layer.inputs), *layer.outputs))
    )
