"""What certainly crosses a cut: the least that a stage must hand to the one that starts behind it.

A stage that starts at a cut has at least the layers up to the next possible cut.  What these read from the stage
before is sent directly and in one message; what later layers read is more, and depends on where the stage ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.costs.tables import Array
from planner.ir.box import Box, intersect, volume, whole
from planner.ir.graph import BYTES_PER_ELEMENT, Graph, Layer, TensorSpec, producer
from planner.layers import kind as kind_named

Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Crossings:
    """Matrices over pairs of cuts: a stage from cut ``a`` to cut ``b``, and the stage that starts at ``b``.

    Attributes:
        linked: the second certainly reads from the first.
        has_gradient: and a gradient comes back.
        forward_bytes, backward_bytes: per sample, at least.
    """

    linked: Flags
    has_gradient: Flags
    forward_bytes: Array
    backward_bytes: Array

    def without_way_back(self) -> Crossings:
        """The same for schedules that need not end with the way back."""
        nothing = np.zeros_like(self.backward_bytes)
        return Crossings(self.linked, np.zeros_like(self.has_gradient), self.forward_bytes, nothing)


def crossings(graph: Graph, cuts: tuple[int, ...]) -> Crossings:
    """What crosses between stages that start and end at ``cuts`` (positions in the list of layers, ends included)."""
    index = {layer.name: position for position, layer in enumerate(graph.layers)}
    values = graph.values()
    shape = (len(cuts), len(cuts))
    linked, has_gradient = np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool)
    forward, backward = np.zeros(shape), np.zeros(shape)
    for b in range(1, len(cuts) - 1):
        needed: dict[str, float] = {}
        for layer in graph.layers[cuts[b] : cuts[b + 1]]:
            for value, num_bytes in _read(layer, values, graph.samples):
                if index.get(producer(value), cuts[b]) < cuts[b]:
                    needed[value] = max(needed.get(value, 0.0), num_bytes)
        for value, num_bytes in needed.items():
            starts = int(np.searchsorted(cuts, index[producer(value)], side="right"))
            linked[:starts, b] = True
            forward[:starts, b] += num_bytes
            if values[value].is_float:
                has_gradient[:starts, b] = True
                backward[:starts, b] += num_bytes
    return Crossings(linked, has_gradient, forward, backward)


def _read(layer: Layer, values: Mapping[str, TensorSpec], samples: int) -> Iterator[tuple[str, float]]:
    """The bytes per sample that ``layer`` reads of each of its inputs; 0 for what has no sample dim."""
    inputs = tuple(values[name] for name in layer.inputs)
    relation = kind_named(layer.kind)
    work: Box = whole(relation.work(layer, inputs).shape)
    for name, spec, box in zip(layer.inputs, inputs, relation.input_boxes(layer, inputs, work), strict=True):
        inside = intersect(box, whole(spec.shape))
        size = volume(inside) * BYTES_PER_ELEMENT[spec.dtype] if inside is not None else 0
        yield name, size / samples if spec.has_samples else 0.0
