"""What a layer, or a part of one, does: the features that models of families are made of (``costs.families``).

    1            a call
    flops        multiply-adds, counted as two                         planner.layers: ``forward_flops``
    bytes        of inputs, outputs and parameters
    weights      bytes of parameters x samples: back ends that take samples one by one read them as often

Of a whole layer they are straight lines in the number of samples, through the captured number and twice that (exact,
but for the rounding of sites).  Of a part: flops and outputs by its share of the work, inputs and parameters by the
boxes that the access relation says, for a part in the middle along dims of space and at the start along others (where
the profiler cuts parts from).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod

import numpy as np
from numpy.typing import NDArray

from planner.costs.sized import Signature, SizedLayer
from planner.ir.box import Box, Interval, volume
from planner.ir.graph import BYTES_PER_ELEMENT, SAMPLE, Graph, Layer, TensorSpec
from planner.layers import kind as kind_named

Array = NDArray[np.float64]
Point = tuple[float, float, float, float]
"""(1, flops, bytes, weights)."""

FLOPS, BYTES = 1, 2
_SPACE = ("depth", "height", "width")


@dataclass(slots=True, eq=False)
class Features:
    """Features of the layers of ``graph``; each is counted once."""

    graph: Graph
    _values: dict[str, TensorSpec] = field(init=False, repr=False)
    _line: tuple[Array, ...] = field(init=False, default=(), repr=False)
    _sized: dict[tuple[int, int], SizedLayer] = field(init=False, default_factory=dict, repr=False)
    _parts: dict[tuple[Signature, tuple[int, ...]], Point] = field(init=False, default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self._values = self.graph.values()

    def whole(self, samples: float) -> Array:
        """(layer, feature) of all layers for ``samples`` samples."""
        if not self._line:
            captured = self.graph.samples
            once, twice = (
                np.array([self._whole(layer, size) for layer in self.graph.layers], dtype=np.float64).reshape(-1, 4)
                for size in (captured, 2 * captured)
            )
            each = (twice - once) / captured
            self._line = once - each * captured, each
        fixed, each = self._line
        found: Array = fixed + each * samples
        return found

    def part(self, index: int, samples: int, part: tuple[int, ...]) -> Point:
        """Of a part of layer number ``index``: extents of its work, without its samples."""
        sized = self._sized.get((index, samples))
        if sized is None:
            layer = self.graph.layers[index]
            sized = self._sized[index, samples] = SizedLayer.of(self.graph, layer, self._values, samples, False)
        key = (sized.signature, part)
        found = self._parts.get(key)
        if found is None:
            found = self._parts[key] = self._part(sized, float(self.whole(samples)[index, FLOPS]), part)
        return found

    def _whole(self, layer: Layer, samples: int) -> Point:
        captured = self.graph.samples
        inputs = tuple(self._values[name].at(samples, captured) for name in layer.inputs)
        outputs = tuple(spec.at(samples, captured) for spec in layer.outputs)
        flops = kind_named(layer.kind).forward_flops(replace(layer, outputs=outputs), inputs)
        weights = sum(self.graph.parameters[name].num_bytes for name in layer.parameters)
        moved = sum(spec.num_bytes for spec in (*inputs, *outputs)) + weights
        return 1.0, float(flops), float(moved), float(weights * samples)

    @staticmethod
    def _part(sized: SizedLayer, flops: float, part: tuple[int, ...]) -> Point:
        box = canonical_box(sized, part)
        share = volume(box) / max(1, prod(sized.work.shape))
        outputs = share * sum(spec.num_bytes for spec in sized.layer.outputs)
        inputs = _bytes_of(sized.input_boxes(box), sized.inputs)
        weights = _bytes_of(sized.weight_boxes(box), sized.parameters)
        return 1.0, flops * share, inputs + outputs + weights, weights * sized.samples


def canonical_box(sized: SizedLayer, part: tuple[int, ...]) -> Box:
    """The part of the work for all of ``sized.samples``: in the middle along dims of space, at the start elsewhere."""
    extents = iter(part)
    box = []
    for dim, extent in zip(sized.work.dims, sized.work.shape, strict=True):
        wanted = extent if dim == SAMPLE else next(extents)
        start = (extent - wanted) // 2 if dim in _SPACE else 0
        box.append(Interval(start, start + wanted))
    return tuple(box)


def _bytes_of(boxes: tuple[Box, ...], specs: tuple[TensorSpec, ...]) -> float:
    sizes = (volume(box) * BYTES_PER_ELEMENT[spec.dtype] for box, spec in zip(boxes, specs, strict=True))
    return float(sum(sizes))
