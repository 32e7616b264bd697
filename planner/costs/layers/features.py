"""What a layer, or a part of one, does: the features that models of families are made of.

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

from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from planner.costs.layers.interpolation import Array
from planner.ir.box import Box, Boxes, Interval, volume
from planner.ir.graph import BYTES_PER_ELEMENT, SAMPLE, Graph, Layer, TensorSpec
from planner.ir.lazy import once, once_by
from planner.layers import kind as kind_named
from planner.layers.sized import SizedLayer

LayerFeatures = tuple[float, float, float, float]
"""(1, flops, bytes, weights)."""

FLOPS = 1
BYTES = 2
_SPACE = ("depth", "height", "width")


@dataclass(eq=False)
class Features:
    """Features of the layers of ``graph``; each is counted once."""

    graph: Graph

    @cached_property
    def _values(self) -> dict[str, TensorSpec]:
        return self.graph.values()

    def whole(self, samples: float) -> Array:
        """(layer, feature) of all layers for ``samples`` samples."""
        fixed, each = self._line
        features: Array = fixed + each * samples
        return features

    @cached_property
    def _line(self) -> tuple[Array, Array]:
        captured = self.graph.samples
        single, double = (
            np.array([self._whole(layer, size) for layer in self.graph.layers], dtype=np.float64).reshape(-1, 4)
            for size in (captured, 2 * captured)
        )
        each = (double - single) / captured
        return single - each * captured, each

    @once_by(lambda self, index, samples, part: (self._sized(index, samples).signature, part))
    def part(self, index: int, samples: int, part: tuple[int, ...]) -> LayerFeatures:
        """Of a part of layer number ``index``: extents of its work, without its samples."""
        sized = self._sized(index, samples)
        box = canonical_box(sized, part)
        share = volume(box) / max(1, prod(sized.work.shape))
        outputs = share * sum(spec.num_bytes for spec in sized.layer.outputs)
        inputs = _bytes_of(sized.input_boxes(box), sized.inputs)
        weights = _bytes_of(sized.weight_boxes(box), sized.parameters)
        flops = float(self.whole(samples)[index, FLOPS])
        return 1.0, flops * share, inputs + outputs + weights, weights * sized.samples

    @once
    def _sized(self, index: int, samples: int) -> SizedLayer:
        return SizedLayer.of(self.graph, self.graph.layers[index], self._values, samples, False)

    def _whole(self, layer: Layer, samples: int) -> LayerFeatures:
        sized, inputs, parameters = self.graph.layer_at(layer, samples, self._values)
        flops = kind_named(layer.kind).forward_flops(sized, inputs)
        weights = sum(spec.num_bytes for spec in parameters)
        moved = sum(spec.num_bytes for spec in (*inputs, *sized.outputs)) + weights
        return 1.0, float(flops), float(moved), float(weights * samples)


def canonical_box(sized: SizedLayer, part: tuple[int, ...]) -> Box:
    """The part of the work for all of ``sized.samples``: in the middle along dims of space, at the start elsewhere."""
    extents = iter(part)
    box = []
    for dim, extent in zip(sized.work.dims, sized.work.shape, strict=True):
        wanted = extent if dim == SAMPLE else next(extents)
        start = (extent - wanted) // 2 if dim in _SPACE else 0
        box.append(Interval(start, start + wanted))
    return tuple(box)


def _bytes_of(boxes: Boxes, specs: tuple[TensorSpec, ...]) -> float:
    sizes = (volume(box) * BYTES_PER_ELEMENT[spec.dtype] for box, spec in zip(boxes, specs, strict=True))
    return float(sum(sizes))
