"""A layer at a number of samples, and the dims that it may be cut along."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from planner.ir.box import Box, Boxes, Interval, inside, volume, whole
from planner.ir.graph import SAMPLE, Graph, Layer, TensorSpec
from planner.ir.problem import CHANNEL_DIMS, SAMPLE_DIMS, SPATIAL_DIMS
from planner.layers._kinds import Kind, kind
from planner.layers.boxes import BoxArray, as_boxes, as_tuples, distinct

REPLICA = "replica"
"""A dim that no tensor has: ranks along it hold the same."""

AXES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "sample": (SAMPLE_DIMS, (SAMPLE,)),
    "depth": (SPATIAL_DIMS, ("depth",)),
    "height": (SPATIAL_DIMS, ("height",)),
    "width": (SPATIAL_DIMS, ("width",)),
    "channel": (CHANNEL_DIMS, ("channel", "head", "feature")),
}
"""Axes of the grid of ranks: family (``Problem.allow``) and dims, the first that a layer has. Samples vary slowest,
so that what talks most (halos, channels) stays within a host."""

SPACE = tuple(dim for family, dims in AXES.values() for dim in dims if family == SPATIAL_DIMS)
"""Dims along which a rank may work beyond its part."""

Signature = tuple[object, ...]
"""Layers of equal signature read and weigh the same boxes."""


@dataclass(frozen=True, eq=False)
class SizedLayer:
    """A layer with the specs of all that it touches, for ``samples`` samples.

    Attributes:
        work: the space that a layout divides.
        mixes_samples: whether samples do not stay apart in it.
    """

    layer: Layer
    inputs: tuple[TensorSpec, ...]
    parameters: tuple[TensorSpec, ...]
    work: TensorSpec
    samples: int
    mixes_samples: bool

    @classmethod
    def of(
        cls, graph: Graph, layer: Layer, values: Mapping[str, TensorSpec], samples: int, mixes_samples: bool
    ) -> SizedLayer:
        """``layer`` of ``graph``, whose ``values`` are indexed once."""
        sized, inputs, parameters = graph.layer_at(layer, samples, values)
        return cls(sized, inputs, parameters, kind(layer.kind).work(sized, inputs), samples, mixes_samples)

    @property
    def relation(self) -> Kind:
        """The access relation of its kind."""
        return kind(self.layer.kind)

    @cached_property
    def signature(self) -> Signature:
        """What decides about boxes and bytes."""
        attributes = tuple(sorted(self.layer.attributes.items()))
        places = tuple(self.layer.inputs.index(name) for name in self.layer.inputs)
        specs = (self.inputs, self.layer.outputs, self.parameters)
        return (self.layer.kind, attributes, places, specs, self.samples, self.mixes_samples)

    @property
    def samples_dim(self) -> int | None:
        """Which dim of the work holds the samples."""
        return self.work.dims.index(SAMPLE) if SAMPLE in self.work.dims else None

    def input_boxes(self, work_box: Box) -> Boxes:
        """The box of each input that is read to do ``work_box``, inside the tensor; empty where nothing is."""
        read = self.relation.input_boxes(self.layer, self.inputs, work_box)
        return tuple(inside(box, spec.shape) for box, spec in zip(read, self.inputs, strict=True))

    def weight_boxes(self, work_box: Box) -> Boxes:
        """The box of each parameter that is used to do ``work_box``."""
        return self.relation.weight_boxes(self.layer, self.parameters, work_box)

    def read(self, work: BoxArray) -> tuple[tuple[BoxArray, ...], tuple[BoxArray, ...]]:
        """What is read of each input, and used of each parameter, to do each of the boxes ``[..., dims, 2]`` of work.

        What is read may reach outside the tensor, where padding is.  Each distinct box is looked at once.
        """
        distinct_work, which = distinct(work.reshape(prod(work.shape[:-2]), *work.shape[-2:]))
        relation = self.relation
        parts = as_tuples(distinct_work)

        def spread(boxes: Sequence[Box]) -> BoxArray:
            array = as_boxes(boxes)
            return array[which].reshape(*work.shape[:-2], *array.shape[1:])

        inputs = zip(*(relation.input_boxes(self.layer, self.inputs, part) for part in parts), strict=True)
        weights = zip(*(relation.weight_boxes(self.layer, self.parameters, part) for part in parts), strict=True)
        return tuple(map(spread, inputs)), tuple(map(spread, weights))

    @cached_property
    def divisible(self) -> frozenset[str]:
        """The dims along which parts do less than the whole: those that its access relation narrows.

        Half of the work along the dim must read less of some parameter, or less of every input that is as large as the
        largest.  (A softmax cut along its own dim, or a reshape along anything but samples, would read all of it.)
        Layers over sites have none: ranks share their sites with the samples of a stage, and cut nothing else.
        """
        if any(spec.has_sites for spec in (*self.inputs, *self.layer.outputs)):
            return frozenset()
        return frozenset(dim for position, dim in enumerate(self.work.dims) if self._narrows(position))

    def _narrows(self, position: int) -> bool:
        dim = self.work.dims[position]
        extent = self.work.shape[position]
        if extent < 2 or self.work.dims.count(dim) > 1 or not self.inputs:
            return False
        if dim == SAMPLE and (self.mixes_samples or self.samples < 2):
            return False
        box = whole(self.work.shape)
        middle = self.samples // 2 * (extent // self.samples) if dim == SAMPLE else extent // 2
        halves = [
            (*box[:position], part, *box[position + 1 :]) for part in (Interval(0, middle), Interval(middle, extent))
        ]
        full = self._read(box)
        read = [self._read(half) for half in halves]
        narrowed = [a + b < 2 * all_of_it for a, b, all_of_it in zip(*read, full, strict=True)]
        weights = len(self.parameters)
        largest = max(full[weights:])
        inputs = zip(narrowed[weights:], full[weights:], strict=True)
        return any(narrowed[:weights]) or all(narrow for narrow, size in inputs if size == largest)

    def _read(self, work_box: Box) -> list[int]:
        """Elements of each parameter, then of each input."""
        return [volume(box) for box in (*self.weight_boxes(work_box), *self.input_boxes(work_box))]
