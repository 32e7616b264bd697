"""What a part of a layer costs: as it was measured at its own shape, else by the model of its family, else a share.

    measured (layer, samples, extents)        that measurement
    these extents at other samples            between those, as ``costs.layers.interpolation`` reads whole layers
    others                                    seconds: what the family says (``regression``), held to the layer's
                                              own measurements, whole and in part, never better than these (below)
    no family, cut along dims as others are   at these samples, by the number of elements: in log-log between the two
                                              around it if both ran on one back end, else the nearer one's in proportion
                                              (the whole layer is one of them); bytes are always read so
    no family, nothing cut along these dims   the share of as many whole samples

A shard's kernel may run at another speed than a share of the whole one (a 3-D convolution took 86 ms at half the depth
and 15 ms whole), so that a share is the last resort.  What is not known must not look better than what is: no part is
cheaper, for its share of the work, than the whole at these samples or the cheapest part that was measured at them; nor
is its forward alone, or with either backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log, prod

import numpy as np

from planner.costs.layers.confidence import weakest
from planner.costs.layers.interpolation import Array, LayerCost, layer_cost, values_of
from planner.costs.layers.regression import FamilyModels
from planner.ir.cluster import INTERPOLATED, Evidence
from planner.ir.errors import MissingMeasurementError
from planner.ir.lazy import once
from planner.ir.profile import Measurement, Profile
from planner.layers.shards import Shards
from planner.layers.sized import SizedLayer

PartExtents = tuple[int, ...]
"""Of a part of a layer's work, samples apart."""
_PartKey = tuple[int, PartExtents]
"""(samples, extents)."""

_TOTALS = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 1]], dtype=np.float64)
"""Forward; with the backward in one go; with its halves."""


def part_of(sized: SizedLayer, extents: Sequence[int]) -> PartExtents:
    """The extents of a part of the work without those of its samples."""
    apart = sized.samples_dim
    return tuple(extents if apart is None else (*extents[:apart], *extents[apart + 1 :]))


@dataclass(frozen=True, slots=True)
class _Point:
    """A cost by the elements of the part."""

    elements: int
    cost: LayerCost
    key: str


class MeasuredParts:
    """The parts that a profile has measurements of, and whole layers beside them.

    Args:
        families: by kind of device: models for what was not measured; without, there is what was measured alone.
    """

    def __init__(self, profile: Profile, families: Callable[[str], FamilyModels] | None = None) -> None:
        self.families = families
        self._modelled = dict[tuple[str, str, int, PartExtents], Array]()
        self._parts, self._after_others = (dict[tuple[str, str], list[Measurement]]() for _ in range(2))
        self._whole = dict[tuple[str, str, int], Measurement]()
        self._index = {layer.name: number for number, layer in enumerate(profile.graph.layers)}
        for kind, measured in profile.parts.items():
            for one in sorted(measured, key=lambda each: each.samples):
                (self._after_others if one.before else self._parts).setdefault((kind, one.layer), []).append(one)
        for kind, measured in profile.measurements.items():
            whole = ((one.layer, one) for one in measured if (kind, one.layer) in self._parts)
            self._whole.update(((kind, layer, one.samples), one) for layer, one in whole)

    def __bool__(self) -> bool:
        return bool(self._parts)

    def knows(self, kind: str, layer: str) -> bool:
        """Whether any part of ``layer`` was measured on devices of ``kind``."""
        return (kind, layer) in self._parts

    def cost(self, kind: str, layer: str, samples: int, part: PartExtents, whole: PartExtents) -> tuple[LayerCost, ...]:
        """What the part costs, in the order of ``QUANTITIES``; nothing where it is a share of the whole.

        Args:
            part, whole: extents of the work of the part and of the layer, samples apart.
        """
        if part == whole or not samples or not prod(part) or not self.knows(kind, layer):
            return ()
        return self._read(kind, layer, samples, part, whole)

    def put_in(self, costs: Array, layer: str, kinds: Sequence[str], shards: Shards) -> None:
        """Puts what parts of ``layer`` were measured to cost, or are read to, in place of shares of the whole.

        Args:
            costs: ``[quantities, options, ranks]``.
            kinds: of the device of each rank.
        """
        if self.families is None and not any(self.knows(kind, layer) for kind in kinds):
            return
        whole = part_of(shards.sized, shards.sized.work.shape)
        for kind in dict.fromkeys(kinds):
            places = _places(shards, [member for member, other in enumerate(kinds) if other == kind], whole)
            shares = {asked: costs[:4, options[0], members[0]] for asked, (options, members) in places.items()}
            modelled = self._by_family(kind, layer, shares, whole, _over_sites(shards))
            for (samples, part), (options, members) in places.items():
                for measured in self.cost(kind, layer, samples, part, whole):
                    costs[:, options, members] = np.array(measured.values)[:, None]
                seconds = modelled.get((samples, part))
                if seconds is not None:
                    costs[:4, options, members] = seconds[:, None]

    def evidence(self, layer: str, kind: str, shards: Shards, option: int, member: int) -> tuple[Evidence, ...]:
        """How well the cost of a rank's part of ``layer`` is known; nothing where it is a share of the whole."""
        whole = part_of(shards.sized, shards.sized.work.shape)
        box = shards.done[option, member]
        part = part_of(shards.sized, (box[:, 1] - box[:, 0]).tolist())
        samples = int(shards.samples[option, member])
        if self._is_modelled(kind, layer, (samples, part), whole, _over_sites(shards)):
            families = self.families(kind) if self.families is not None else None
            if families is not None and families.answers(self._index[layer], samples, part):
                return (families.evidence(self._index[layer]),)
        return tuple(c.evidence for c in self.cost(kind, layer, samples, part, whole))

    def estimate(self, kind: str, layer: str, asked: _PartKey, whole: PartExtents, share: Array) -> Array:
        """What one part costs, in the order of ``QUANTITIES``; ``share`` is its share of the whole layer's cost."""
        estimated = share.copy()
        for measured in self.cost(kind, layer, *asked, whole):
            estimated[:] = measured.values
        for seconds in self._by_family(kind, layer, {asked: share[:4]}, whole, over_sites=False).values():
            estimated[:4] = seconds
        return estimated

    def after_others(self, kind: str, layer: str, samples: int) -> tuple[Measurement, ...]:
        """Parts of ``layer`` that were measured after others, at the number of samples nearest in proportion."""
        parts = self._after_others.get((kind, layer), ())
        near = min(parts, key=lambda one: abs(log(max(1, one.samples) / max(1, samples))), default=None)
        return () if near is None else tuple(one for one in parts if one.samples == near.samples)

    def _is_modelled(self, kind: str, layer: str, asked: _PartKey, whole: PartExtents, over_sites: bool) -> bool:
        """Whether a family is asked: of parts, but those of sites, without measurements of their own to go by."""
        samples, part = asked
        if self.families is None or over_sites or part == whole or not samples or not prod(part):
            return False
        return not self._of_own_extents(kind, layer, samples, part)

    def _by_family(
        self, kind: str, layer: str, shares: Mapping[_PartKey, Array], whole: PartExtents, over_sites: bool
    ) -> dict[_PartKey, Array]:
        """Seconds of those that the layer's family says, of parts whose ``shares`` of the whole are given."""
        wanted = [asked for asked in shares if self._is_modelled(kind, layer, asked, whole, over_sites)]
        fresh = [asked for asked in wanted if (kind, layer, *asked) not in self._modelled]
        if fresh and self.families is not None:
            families = self.families(kind)
            index = self._index[layer]
            points = np.array([families.features.part(index, *asked) for asked in fresh])
            values, models = families.values(index, points)
            for asked, seconds, model in zip(fresh, values[:, :4], models.tolist(), strict=True):
                least = self._least(kind, layer, *asked, shares[asked])
                self._modelled[kind, layer, *asked] = _no_less(seconds, least) if model >= 0 else np.zeros(0)
        modelled = {asked: self._modelled[kind, layer, *asked] for asked in wanted}
        return {asked: seconds for asked, seconds in modelled.items() if len(seconds)}

    def _least(self, kind: str, layer: str, samples: int, part: PartExtents, share: Array) -> Array:
        """By total: the least that is known to do as much of the layer at ``samples`` samples."""
        candidates = [share]
        for one in self._parts.get((kind, layer), ()):
            if one.samples == samples:
                candidates.append(np.array(values_of(one)[:4]) * (prod(part) / prod(one.part)))
        least: Array = (np.array(candidates) @ _TOTALS.T).min(axis=0)
        return least

    def _of_own_extents(self, kind: str, layer: str, samples: int, part: PartExtents) -> tuple[LayerCost, ...]:
        """Measured at these extents, at these samples or at others to read between."""
        alike = [one for one in self._parts.get((kind, layer), ()) if one.part == part]
        if not alike:
            return ()
        try:
            return (layer_cost(alike, samples),)
        except MissingMeasurementError:  # they say nothing about that many samples
            return ()

    @once
    def _read(
        self, kind: str, layer: str, samples: int, part: PartExtents, whole: PartExtents
    ) -> tuple[LayerCost, ...]:
        own = self._of_own_extents(kind, layer, samples, part)
        if own:
            return own
        measured = self._parts[kind, layer]
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


def _over_sites(shards: Shards) -> bool:
    sized = shards.sized
    return any(spec.has_sites for spec in (*sized.inputs, *sized.layer.outputs))


def _places(shards: Shards, members: list[int], whole: PartExtents) -> dict[_PartKey, tuple[list[int], list[int]]]:
    """Where (options, members) this number of samples of a part is done; whole ones and empty ones are left out."""
    work = shards.done[:, members]
    extents = work[..., 1] - work[..., 0]
    by_part: dict[_PartKey, tuple[list[int], list[int]]] = {}
    for option, (row, samples) in enumerate(zip(extents.tolist(), shards.samples[:, members].tolist(), strict=True)):
        for member, extent, number in zip(members, row, samples, strict=True):
            asked = number, part_of(shards.sized, extent)
            if number and asked[1] != whole and prod(asked[1]):
                options, places = by_part.setdefault(asked, ([], []))
                options.append(option)
                places.append(member)
    return by_part


def _no_less(seconds: Array, least: Array) -> Array:
    """``seconds``, slowed down until no total is below the ``least``."""
    totals = _TOTALS @ seconds
    factor = max([1.0, *(float(b / a) for a, b in zip(totals, least, strict=True) if a > 0)])
    return seconds * factor


def _cut(part: PartExtents, whole: PartExtents) -> tuple[bool, ...]:
    """Which dims are cut."""
    return tuple(extent != of_all for extent, of_all in zip(part, whole, strict=True))


def _between(points: Sequence[_Point], elements: int) -> LayerCost:
    """The cost of a number of elements, read between ``points``, which ascend."""
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
