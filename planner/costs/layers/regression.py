"""What nobody measured, from what was: a model for each family of layers, held to the layer's own measurements.

    family        layers of one kind, operator and back end that all read, or do not read, the network's inputs alone
    model         t = c0 + c1 flops + c2 bytes + c3 weights, c >= 0          (``features``)
                  minimises the sum of ((t - measured) / measured)^2 over all measurements, whole layers and parts
                  (Lawson and Hanson's non-negative least squares), and a ridge (most on c3) makes it unique
    held to       x the mean of measured / model over the layer's own measurements of that family, with weights
                  1 / (d^2 + 0.02), d between (log flops, log bytes): a shape beside a measured one follows it
    its family    that of the nearest of the layer's own measurements; where it has none, of layers of its kind and
                  operator, then of its kind

A family of fewer than three distinct shapes has the model of its operator on all back ends, then of its kind.  A
quantity that is zero for most of a family follows the layer's own per byte moved, and is zero without.

Alone the model missed held-back sizes by 15-25 % (mean absolute error, five networks) and held to their own by 8-15 %;
shares of whole layers missed parts by 40 %, this by 11-18 % where other parts were measured and by 20-27 % where none
was (``benchmarks.unseen_shapes`` measures it again).  Ignored: caches, and that a shape may run on another back end
than its neighbour.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.costs.layers.confidence import FAMILY_RANGE, Range, range_of, weakest
from planner.costs.layers.features import BYTES, FLOPS, Features
from planner.costs.layers.interpolation import QUANTITIES, Array, LayerCost
from planner.ir.cluster import FAMILY, Evidence
from planner.ir.graph import Graph, Layer
from planner.ir.lazy import once
from planner.ir.profile import Measurement, Profile

Indices = NDArray[np.int64]
FamilyName = tuple[object, ...]

LEAST_SHAPES = 3
_MOST_HELD_BACK = 48
_RIDGE = np.array([1e-3, 1e-3, 1e-3, 3e-2])
"""By feature: of a single shape at several sizes all grow alike, and then the weights shall not count."""

_NEAR = 0.02


@dataclass(frozen=True, slots=True, eq=False)
class FittedModel:
    """A model of some rows.

    Attributes:
        rows: measurements that it is made from.
        coefficients: ``[features, quantities]``; those of a quantity that is mostly zero are its share of the bytes.
        mostly_zero: by quantity.
    """

    rows: Indices
    coefficients: Array
    mostly_zero: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class _Anchors:
    """Measurements that an answer is held to: of one layer, or (``own`` is false) of layers like it.

    Attributes:
        logs: ``[rows, 2]``.
        models: of each row; its numbers in ``FamilyModels``; -1 for none.
        ratios: ``[rows, quantities]``: measured over model.
    """

    rows: Indices
    logs: Array
    models: Indices
    ratios: Array
    own: bool


class FamilyModels:
    """Models of all families on one kind of device; nothing is computed before the first question."""

    def __init__(self, profile: Profile, device_kind: str, features: Features) -> None:
        self.profile = profile
        self.features = features
        graph = profile.graph
        self._models = list[FittedModel]()
        index = {layer.name: number for number, layer in enumerate(graph.layers)}
        measurements = [
            m
            for measured in (profile.measurements, profile.parts)
            for m in measured.get(device_kind, ())
            if m.layer in index and m.samples > 0 and not m.before
        ]
        by_size = {samples: features.whole(samples) for samples in {m.samples for m in measurements}}
        points = [self._point(m, index[m.layer], by_size[m.samples]) for m in measurements]
        self._points = np.array(points, dtype=np.float64).reshape(-1, 4)
        values = [[float(getattr(m, name)) for name in QUANTITIES] for m in measurements]
        self._values = np.array(values, dtype=np.float64).reshape(-1, len(QUANTITIES))
        self._layers = np.array([index[m.layer] for m in measurements], dtype=np.int64)
        self._evidence = [m.evidence for m in measurements]
        self._names = [family_names(graph, graph.layers[index[m.layer]], m.key) for m in measurements]
        self._rows_of = dict[FamilyName, list[int]]()
        for row, names in enumerate(self._names):
            for name in names:
                self._rows_of.setdefault(name, []).append(row)

    def whole(self, index: int, samples: float) -> tuple[LayerCost, ...]:
        """Layer number ``index`` at ``samples`` samples; nothing where no family says."""
        values, models = self.values(index, self.features.whole(samples)[index][None])
        if models[0] < 0:
            return ()
        return (LayerCost(tuple(values[0].tolist()), self.evidence(index), *self.bounds(index, int(models[0]))),)

    def values(self, index: int, points: Array) -> tuple[Array, Indices]:
        """``[points, quantities]`` of layer number ``index``, and which model says each; -1 where none does."""
        anchors = self._anchors_of(index)
        predicted = np.zeros((len(points), len(QUANTITIES)))
        chosen: Indices = np.full(len(points), -1, dtype=np.int64)
        if not len(anchors.rows):
            return predicted, chosen
        distance = ((_logs(points)[:, None] - anchors.logs[None]) ** 2).sum(axis=-1)
        chosen = anchors.models[distance.round(9).argmin(axis=1)]  # of equally near ones the first
        for number in np.unique(chosen).tolist():
            if number < 0:
                continue
            asked = chosen == number
            base = points[asked] @ self._models[number].coefficients
            if anchors.own:
                of_model = anchors.models == number
                weights = 1 / (distance[np.ix_(asked, of_model)] + _NEAR)
                base = base * (weights @ anchors.ratios[of_model]) / weights.sum(axis=1, keepdims=True)
            else:
                base = np.where(self._models[number].mostly_zero, 0.0, base)
            predicted[asked] = base
        return predicted, chosen

    def answers(self, index: int, samples: int, part: tuple[int, ...]) -> bool:
        """Whether a model says what the part of layer number ``index`` costs."""
        _, models = self.values(index, np.array([self.features.part(index, samples, part)]))
        return bool(models[0] >= 0)

    def evidence(self, index: int) -> Evidence:
        """How well an answer for layer number ``index`` is known."""
        return weakest((FAMILY, *{self._evidence[row] for row in self._anchors_of(index).rows}))

    def bounds(self, index: int, model: int) -> Range:
        """Factors within which measurements were of what the model, without their shape, says of them.

        A layer with measurements of its own is held to them, which those that are held back are as well.
        """
        return range_of(self._held_back(model, self._anchors_of(index).own), FAMILY_RANGE)

    def _point(self, m: Measurement, index: int, whole: Array) -> Sequence[float]:
        return self.features.part(index, m.samples, m.part) if m.part else whole[index]

    @once
    def _anchors_of(self, index: int) -> _Anchors:
        rows = np.flatnonzero(self._layers == index)
        own = bool(len(rows))
        if not own:
            names = family_names(self.profile.graph, self.profile.graph.layers[index], "")
            rows = np.array(next((self._rows_of[n] for n in names[1:] if n in self._rows_of), []), dtype=np.int64)
        models = np.array([self._model(self._names[row]) for row in rows.tolist()], dtype=np.int64)
        ratios = np.ones((len(rows), len(QUANTITIES)))
        for k, number in enumerate(models.tolist()):
            if number >= 0:
                ratios[k] = _ratio(self._values[rows[k]], self._points[rows[k]] @ self._models[number].coefficients)
        return _Anchors(rows, _logs(self._points[rows]), models, ratios, own)

    def _model(self, names: tuple[FamilyName, ...]) -> int:
        """The number of the model of the first of ``names`` with shapes enough."""
        return next((number for number in map(self._number, names) if number >= 0), -1)

    @once
    def _number(self, name: FamilyName) -> int:
        """Of the family's model; -1 if it has too few shapes for one."""
        rows = np.array(self._rows_of[name], dtype=np.int64)
        if len(np.unique(self._points[rows], axis=0)) < LEAST_SHAPES:
            return -1
        self._models.append(_fitted(rows, self._points[rows], self._values[rows]))
        return len(self._models) - 1

    @once
    def _held_back(self, model: int, own: bool) -> list[float]:
        """Measured over predicted, forward and backward, of shapes that are held back one after another."""
        rows = self._models[model].rows
        points = self._points[rows]
        seconds = self._values[rows][:, :2]
        shapes, place = np.unique(points, axis=0, return_inverse=True)
        logs = _logs(points)
        ratios = []
        step = -(-len(shapes) // _MOST_HELD_BACK)
        for shape in range(0, len(shapes), step):
            held = place.ravel() == shape
            if len(shapes) - 1 < LEAST_SHAPES:
                break
            coefficients = np.stack([fitted(points[~held], seconds[~held][:, q]) for q in (0, 1)], axis=1)
            for k in np.flatnonzero(held).tolist():
                base = points[k] @ coefficients
                mine = ~held & (self._layers[rows] == self._layers[rows[k]])
                if own and mine.any():
                    weights = 1 / (((logs[mine] - logs[k]) ** 2).sum(axis=1) + _NEAR)
                    base = base * (weights @ _ratio(seconds[mine], points[mine] @ coefficients)) / weights.sum()
                elif own:
                    continue
                if base.sum() > 0 and seconds[k].sum() > 0:
                    ratios.append(float(seconds[k].sum() / base.sum()))
        return ratios


def fitted(points: Array, measured: Array) -> Array:
    """Non-negative coefficients by relative error over the measurements above 0; none if most are 0."""
    from scipy.optimize import nnls  # late: a third of what a planner takes to start, and few questions need it

    positive = measured > 0
    if 2 * int(positive.sum()) < len(measured):
        return np.zeros(points.shape[1])
    rows = points[positive] / measured[positive][:, None]
    scale = rows.max(axis=0)
    scale[scale <= 0] = 1.0
    ridge = np.sqrt(len(rows)) * np.diag(_RIDGE)
    target = np.concatenate((np.ones(len(rows)), np.zeros(points.shape[1])))
    coefficients, _ = nnls(np.concatenate((rows / scale, ridge)), target)
    unscaled: Array = coefficients / scale
    return unscaled


def _fitted(rows: Indices, points: Array, values: Array) -> FittedModel:
    coefficients = np.stack([fitted(points, values[:, q]) for q in range(len(QUANTITIES))], axis=1)
    mostly_zero = np.array([not column.any() for column in coefficients.T])
    coefficients[BYTES, mostly_zero] = 1.0
    return FittedModel(rows, coefficients, mostly_zero)


def family_names(graph: Graph, layer: Layer, key: str) -> tuple[FamilyName, ...]:
    """The layer's family on back end ``key``, its operator on all back ends, its kind."""
    first = all(name in graph.inputs for name in layer.inputs)
    operator = str(layer.attributes.get("op", ""))
    return (layer.kind, operator, first, key), (layer.kind, operator, first), (layer.kind,)


def _ratio(measured: Array, model: Array) -> Array:
    ratio: Array = measured / np.where(model > 0, model, 1.0)
    return np.where(model > 0, ratio, 1.0)


def _logs(points: Array) -> Array:
    logs: Array = np.log(points[:, FLOPS : BYTES + 1] + 1.0)
    return logs
