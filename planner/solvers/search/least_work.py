"""The device time that a step takes at least, however layers are cut: what work over capacity is made of."""

from __future__ import annotations

import math

import numpy as np

from planner.costs.measured_parts import MeasuredParts
from planner.costs.part_shapes import part_of
from planner.costs.tables import Array
from planner.ir.errors import MissingMeasurementError
from planner.solvers.candidates.evaluate import Evaluator
from planner.solvers.inner.stage import NONE, WHOLE


def least_work_s(evaluator: Evaluator, size: int, backward: str) -> Array:
    """By layer: the least device time of a step, however it is cut: no fewer samples at once cost less a sample.

    Between measured sizes, and beyond, the cost of a sample rises or falls, so that its least is at one of them.  So it
    is with measured parts of a layer, by the share of its work.
    """
    problem, book = evaluator.problem, evaluator.book
    layers = len(problem.profile.graph.layers)
    least = np.full(layers, np.inf)
    for kind in {book.kind(rank) for rank in problem.ranks}:
        measured = {m.samples for m in problem.profile.measurements.get(kind, ()) if m.samples < size}
        for samples in sorted({1, size} | measured):
            try:
                table = book.tables.at(kind, samples)
            except MissingMeasurementError:
                continue
            seconds = np.diff(table.forward_s)
            if backward != NONE:
                whole = np.diff(table.backward_s)
                halves = np.diff(table.backward_input_s) + np.diff(table.backward_weight_s)
                seconds = seconds + (whole if backward == WHOLE else np.minimum(whole, halves))
            least = np.minimum(least, np.maximum(seconds, 0.0) / samples)
        least = np.minimum(least, _least_of_parts(evaluator, size, backward, kind))
    return least * problem.global_batch if np.isfinite(least).all() else np.zeros(layers)


def _least_of_parts(evaluator: Evaluator, size: int, backward: str, kind: str) -> Array:
    """By layer: the least device time of a whole sample done in measured parts; infinity where none was measured."""
    profile = evaluator.book.profile
    least = np.full(len(profile.graph.layers), np.inf)
    parts = MeasuredParts(profile)
    if not parts:
        return least
    prices = evaluator.layouts.prices(evaluator.problem.ranks, size)
    index = {layer.name: k for k, layer in enumerate(profile.graph.layers)}
    measured: dict[tuple[str, tuple[int, ...]], set[int]] = {}
    for one in profile.parts.get(kind, ()):
        measured.setdefault((one.layer, one.part), {1, size}).add(one.samples)
    for (name, part), sizes in measured.items():
        sized = prices.sized(index[name])
        whole = part_of(sized, sized.work.shape)
        share = math.prod(part) / max(1, math.prod(whole))
        for samples in (count for count in sizes if count <= size):
            for known in parts.cost(kind, name, samples, part, whole):
                forward_s, whole_s, *halves_s = known.values[:4]
                backward_s = whole_s if backward == WHOLE else min(whole_s, sum(halves_s))
                seconds = forward_s + (0.0 if backward == NONE else backward_s)
                least[index[name]] = min(least[index[name]], seconds / (samples * share))
    return least
