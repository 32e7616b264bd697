"""How well shapes are priced that nobody measured: measurements of real profiles held back, a tenth at a time.

Three things are held back, and the planner is asked for forward + backward of each:

    sizes     a layer at one number of samples; at others it was measured
    shapes    a layer, and all layers of the same shape, at all numbers of samples
    parts     a part of a layer at one number of samples, other parts being known; and all parts of all layers

Errors are means of |predicted - measured| / measured over what is held back (MAPE), each distinct shape once, and the
same weighted by seconds: many layers of a network take microseconds, and vary by as much.  Beside the planner's answer
stand what is simpler: the family's model without the layer's own measurements, a share of the whole layer, and a
roofline with the best rates that the profile itself shows (forward one roof, backward two).  Times are thread CPU time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

import numpy as np

from benchmarks.report import Row, at_most, run
from planner.costs.layers.cost_table import CostTables
from planner.costs.layers.features import BYTES, FLOPS, Features
from planner.costs.layers.regression import FamilyModels
from planner.costs.layers.shards import part_of
from planner.ir.codec import load
from planner.ir.errors import MissingMeasurementError
from planner.ir.profile import Measurement, Profile
from planner.layers.sized import SizedLayer

GOAL = 15.0
_FOLDS = 10
_DATA = Path(__file__).parent.parent / "notebooks" / "data"
COMMITTED: Mapping[str, Path] = {
    "ResNet-50, 64 x 64": _DATA / "resnet50.profile.json",
    "ResNet-50, 112 x 112": _DATA / "spatial" / "resnet.profile.json",
    "VGG-16": _DATA / "vgg16.profile.json",
    "GPT-like": _DATA / "schedules" / "profile.json",
    "mesh tangling": _DATA / "spatial" / "mesh.profile.json",
}


@dataclass(slots=True)
class Errors:
    """Predictions beside what was measured, by the name of who predicts."""

    found: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def add(self, who: str, predicted_s: float | None, measured_s: float) -> None:
        """One more; None where nothing is said."""
        if predicted_s is not None and measured_s > 0:
            self.found.setdefault(who, []).append((predicted_s, measured_s))

    def mape(self, who: str, weighted: bool = False) -> float:
        """Percent."""
        pairs = np.array(self.found.get(who, [(np.nan, 1.0)]))
        errors = np.abs(pairs[:, 0] - pairs[:, 1]) / pairs[:, 1]
        weights = pairs[:, 1]
        return 100 * float(np.average(errors, weights=weights if weighted else None))


class Held:
    """A profile whose measurements are held back in turn."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.kind = next(iter(profile.measurements))
        graph = profile.graph
        values = profile.graph.values()
        self.index = {layer.name: number for number, layer in enumerate(graph.layers)}
        self.sized = {x.name: SizedLayer.of(graph, x, values, graph.samples, False) for x in graph.layers}
        given = {x.name: tuple(name in graph.inputs for name in x.inputs) for x in graph.layers}
        shapes: dict[object, int] = {}
        self.shape = {
            name: shapes.setdefault((sized.signature, given[name]), len(shapes)) for name, sized in self.sized.items()
        }
        self.features = Features(graph)
        self.whole = [m for m in profile.measurements[self.kind] if m.layer in self.index]
        self.parts = [m for m in profile.parts.get(self.kind, ()) if m.layer in self.index]
        self.rates = self._rates()

    def without(self, held: Sequence[Measurement]) -> Profile:
        """The profile without ``held`` and without what is of the same shape."""
        gone = {self._what(m) for m in held}
        kept = [tuple(m for m in found if self._what(m) not in gone) for found in (self.whole, self.parts)]
        return replace(self.profile, measurements={self.kind: kept[0]}, parts={self.kind: kept[1]})

    def folds(self, measured: Sequence[Measurement], by_shape: bool) -> Iterator[list[Measurement]]:
        """Distinct shapes, a tenth at a time; of a layer's sizes (and parts) at most a few at once."""
        distinct: dict[object, Measurement] = {}
        for m in measured:
            distinct.setdefault(self._what(m), m)
        numbers: dict[object, int] = {}
        met: dict[int, int] = {}
        for what, m in distinct.items():
            place = met[self.shape[m.layer]] = met.get(self.shape[m.layer], -1) + 1
            numbers[what] = (self.shape[m.layer] + (0 if by_shape else 3 * place)) % _FOLDS
        for fold in range(_FOLDS):
            found = [m for what, m in distinct.items() if numbers[what] == fold]
            if found:
                yield found

    def roof_s(self, m: Measurement) -> float:
        """Forward one roof, backward two."""
        point = self.features.part(self.index[m.layer], m.samples, m.part) if m.part else self._point(m)
        return 3 * max(point[FLOPS] / self.rates[0], point[BYTES] / self.rates[1])

    def _point(self, m: Measurement) -> Sequence[float]:
        return self.features.whole(m.samples)[self.index[m.layer]].tolist()

    def _what(self, m: Measurement) -> tuple[int, int, tuple[int, ...]]:
        return self.shape[m.layer], m.samples, m.part

    def _rates(self) -> tuple[float, float]:
        """The most operations, and the most bytes, that any layer's forward did a second."""
        points = [(self._point(m), m.forward_s) for m in self.whole if m.forward_s > 0]
        return max(p[FLOPS] / s for p, s in points), max(p[BYTES] / s for p, s in points)


def sizes_and_shapes(held: Held, by_shape: bool) -> Errors:
    """Whole layers, at one size or at all."""
    errors = Errors()
    for fold in held.folds(held.whole, by_shape):
        gone = [m for m in held.whole if any(held.shape[m.layer] == held.shape[o.layer] for o in fold)]
        profile = held.without(gone if by_shape else fold)
        tables = CostTables(profile)
        bare = FamilyModels(
            replace(profile, measurements=_unnamed(profile, held, fold)), held.kind, tables.families(held.kind).features
        )
        for m in fold:
            measured_s = m.passes_s
            index = held.index[m.layer]
            try:
                cost = tables.layer(held.kind, index, m.samples)
            except MissingMeasurementError:
                errors.add("not answered", 0.0, measured_s)
                continue
            predicted_s = sum(cost.values[:2])
            errors.add("planner", predicted_s, measured_s)
            errors.add(cost.evidence, predicted_s, measured_s)
            within = cost.low * predicted_s <= measured_s <= cost.high * predicted_s
            errors.add("within range", 2 * measured_s if within else measured_s, measured_s)
            said = bare.whole(index, m.samples)
            errors.add("family alone", sum(said[0].values[:2]) if said else None, measured_s)
            errors.add("roofline", held.roof_s(m), measured_s)
    return errors


def parts(held: Held, all_at_once: bool) -> Errors:
    """Parts, where others of the layers are known, or where none is."""
    errors = Errors()
    for fold in held.folds(held.parts, by_shape=False):
        profile = held.without(held.parts if all_at_once else fold)
        tables = CostTables(profile)
        for m in fold:
            sized = held.sized[m.layer]
            whole = part_of(sized, sized.work.shape)
            try:
                cost = tables.layer(held.kind, held.index[m.layer], m.samples)
            except MissingMeasurementError:
                continue
            share = np.array(cost.values) * (prod(m.part) / prod(whole))
            found = tables.parts.estimate(held.kind, m.layer, (m.samples, m.part), whole, share)
            measured_s = m.passes_s
            errors.add("planner", float(found[:2].sum()), measured_s)
            errors.add("share", float(share[:2].sum()), measured_s)
            errors.add("roofline", held.roof_s(m), measured_s)
    return errors


def rows_of(name: str, profile: Profile) -> list[Row]:
    """All figures of one network."""
    held = Held(profile)
    found = []
    for what, errors in (
        ("sizes", sizes_and_shapes(held, by_shape=False)),
        ("shapes", sizes_and_shapes(held, by_shape=True)),
        *((("parts", parts(held, False)), ("parts, none known", parts(held, True))) if held.parts else ()),
    ):
        if not errors.found.get("planner"):
            continue
        found.append(at_most(f"{name}: {what}: planner", errors.mape("planner"), "% MAPE", GOAL))
        found.append(Row(f"{name}: {what}: planner, by seconds", errors.mape("planner", True), "%"))
        for who in ("interpolated", "family", "family alone", "share", "roofline"):
            if who in errors.found:
                found.append(Row(f"{name}: {what}: {who}", errors.mape(who), "% MAPE"))
        if "within range" in errors.found:
            found.append(Row(f"{name}: {what}: within low ... high", errors.mape("within range"), "%", "about 80"))
        missing = len(errors.found.get("not answered", ()))
        if missing:
            found.append(Row(f"{name}: {what}: not answered", missing, "layers"))
    return found


def measure(quick: bool) -> list[Row]:
    """All rows; ``quick`` takes all profiles too, since nothing is run."""
    return [row for name, path in COMMITTED.items() for row in rows_of(name, load(path, Profile))]


def _unnamed(profile: Profile, held: Held, fold: Sequence[Measurement]) -> dict[str, tuple[Measurement, ...]]:
    """Measurements without those of the layers that are asked for."""
    asked = {m.layer for m in fold}
    return {held.kind: tuple(m for m in profile.measurements[held.kind] if m.layer not in asked)}


if __name__ == "__main__":
    raise SystemExit(run("Unseen shapes, held back from real profiles", measure))
