"""What a part of a layer costs: as it was measured at its own shape, else read off parts like it, else a share.

    measured (layer, samples, extents)        that measurement
    these extents at other samples            between those, as ``costs.layer`` reads whole layers
    other extents, cut along the same dims    at these samples, by the number of elements: in log-log between the two
                                              around it if both ran on one back end, else the nearer one's in proportion
                                              (the whole layer is one of them)
    nothing cut along these dims              the share of as many whole samples

A shard's kernel may run at another speed than a share of the whole one (a 3-D convolution took 86 ms at half the depth
and 15 ms whole), so that a share is the last resort.  Parts next to a measured one follow it: what is not known must
not look better than what is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, log, prod

import numpy as np
from numpy.typing import NDArray

from planner.costs.evidence import weakest
from planner.costs.layer import LayerCost, layer_cost
from planner.costs.part_shapes import part_of
from planner.costs.shards import Shards
from planner.ir.cluster import INTERPOLATED, Evidence
from planner.ir.errors import MissingMeasurementError
from planner.ir.profile import Measurement, Profile

Part = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Point:
    """A cost by the elements of the part."""

    elements: int
    cost: LayerCost
    key: str


@dataclass(slots=True, eq=False)
class MeasuredParts:
    """The parts that a profile has measurements of, and whole layers beside them."""

    profile: Profile
    _parts: dict[tuple[str, str], list[Measurement]] = field(init=False, default_factory=dict, repr=False)
    _whole: dict[tuple[str, str, int], Measurement] = field(init=False, default_factory=dict, repr=False)
    _known: dict[tuple[str, str, int, Part], tuple[LayerCost, ...]] = field(
        init=False, default_factory=dict, repr=False
    )

    def __post_init__(self) -> None:
        for kind, measured in self.profile.parts.items():
            for one in sorted(measured, key=lambda each: each.samples):
                self._parts.setdefault((kind, one.layer), []).append(one)
        for kind, measured in self.profile.measurements.items():
            whole = ((one.layer, one) for one in measured if (kind, one.layer) in self._parts)
            self._whole.update(((kind, layer, one.samples), one) for layer, one in whole)

    def __bool__(self) -> bool:
        return bool(self._parts)

    def knows(self, kind: str, layer: str) -> bool:
        """Whether any part of ``layer`` was measured on devices of ``kind``."""
        return (kind, layer) in self._parts

    def cost(self, kind: str, layer: str, samples: int, part: Part, whole: Part) -> tuple[LayerCost, ...]:
        """What the part costs, in the order of ``QUANTITIES``; nothing where it is a share of the whole.

        Args:
            part, whole: extents of the work of the part and of the layer, samples apart.
        """
        if part == whole or not samples or not prod(part) or not self.knows(kind, layer):
            return ()
        key = (kind, layer, samples, part)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._read(kind, layer, samples, part, whole)
        return found

    def put_in(self, costs: NDArray[np.float64], layer: str, kinds: Sequence[str], shards: Shards) -> None:
        """Puts what parts of ``layer`` were measured to cost, or are read to, in place of shares of the whole.

        Args:
            costs: ``[quantities, options, ranks]``.
            kinds: of the device of each rank.
        """
        if not any(self.knows(kind, layer) for kind in kinds):
            return
        whole = part_of(shards.sized, shards.sized.work.shape)
        for member, kind in enumerate(kinds):
            extents = shards.work[:, member, :, 1] - shards.work[:, member, :, 0]
            rows, options = np.unique(
                np.column_stack([shards.samples[:, member], extents]), axis=0, return_inverse=True
            )
            for number, (samples, *extent) in enumerate(rows.tolist()):
                for known in self.cost(kind, layer, samples, part_of(shards.sized, extent), whole):
                    costs[:, options.ravel() == number, member] = np.array(known.values)[:, None]

    def evidence(self, layer: str, kind: str, shards: Shards, option: int, member: int) -> tuple[Evidence, ...]:
        """How well the cost of a rank's part of ``layer`` is known; nothing where it is a share of the whole."""
        whole = part_of(shards.sized, shards.sized.work.shape)
        box = shards.work[option, member]
        part = part_of(shards.sized, (box[:, 1] - box[:, 0]).tolist())
        return tuple(c.evidence for c in self.cost(kind, layer, int(shards.samples[option, member]), part, whole))

    def _read(self, kind: str, layer: str, samples: int, part: Part, whole: Part) -> tuple[LayerCost, ...]:
        measured = self._parts[kind, layer]
        alike = [one for one in measured if one.part == part]
        if alike:
            try:
                return (layer_cost(alike, samples),)
            except MissingMeasurementError:  # it says nothing about so many samples
                pass
        dims = _cut(part, whole)
        points = [
            _Point(prod(one.part), layer_cost([one], samples), one.key)
            for one in measured
            if one.samples == samples and _cut(one.part, whole) == dims
        ]
        if not points:
            return ()
        of_all = self._whole.get((kind, layer, samples))
        if of_all is not None:
            points.append(_Point(prod(whole), layer_cost([of_all], samples), of_all.key))
        return (_between(sorted(points, key=lambda point: point.elements), prod(part)),)


def _cut(part: Part, whole: Part) -> tuple[bool, ...]:
    """Which dims are cut."""
    return tuple(extent != of_all for extent, of_all in zip(part, whole, strict=True))


def _between(points: Sequence[_Point], elements: int) -> LayerCost:
    """The cost of so many elements, read between ``points``, which ascend."""
    low = next((point for point in reversed(points) if point.elements <= elements), points[0])
    high = next((point for point in points if point.elements >= elements), points[-1])
    if low.elements >= high.elements or low.key != high.key:
        near = low if elements**2 <= low.elements * high.elements else high
        values = tuple(value * elements / near.elements for value in near.cost.values)
        return LayerCost(values, weakest((INTERPOLATED, near.cost.evidence)))
    at = log(elements / low.elements) / log(high.elements / low.elements)
    pairs = zip(low.cost.values, high.cost.values, strict=True)
    values = tuple(_log_log(a, b, at, elements, low, high) for a, b in pairs)
    return LayerCost(values, weakest((INTERPOLATED, low.cost.evidence, high.cost.evidence)))


def _log_log(a: float, b: float, at: float, elements: int, low: _Point, high: _Point) -> float:
    if a > 0 and b > 0:
        return exp(log(a) + (log(b) - log(a)) * at)
    return a + (b - a) * (elements - low.elements) / (high.elements - low.elements)
