"""The device time that a step takes at least, and what devices of unlike kinds can do of it together.

No step is shorter than all work over all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from planner.costs.layers.cost_table import Array
from planner.costs.layers.shards import MeasuredParts, part_of
from planner.costs.stages.stage_sums import least_backward_s
from planner.ir.errors import MissingMeasurementError
from planner.ir.profile import Profile
from planner.solvers.candidates.evaluate import Evaluator
from planner.solvers.layouts.stage import NONE, WHOLE

_ROUNDS = 40  # of the search for weights


@dataclass(frozen=True, slots=True, eq=False)
class Capacity:
    """What devices of unlike kinds can do together.

    Attributes:
        weights: by kind, of a device, 1 at most.
        work_s: all work of a step over all devices: no plan is faster.
    """

    weights: tuple[float, ...]
    work_s: float


def capacity(seconds: Array, counts: Sequence[int]) -> Capacity:
    """The least T in which layers, shared at will among devices, can be done.

    That is ``min T: sum_l t_kl y_kl <= D_k T, sum_k y_kl = 1``, by its dual: for any weights w >= 0,
    ``T >= sum_l min_k w_k t_kl / sum_k w_k D_k``, which is concave in w and equal at the best of them.

    Args:
        seconds: device time by kind and layer; infinite where a kind cannot be used.
        counts: devices by kind.
    """
    usable = np.isfinite(seconds).all(axis=1)
    devices = np.array(counts, dtype=np.float64)
    if not usable.any():
        return Capacity((1.0,) * len(counts), 0.0)
    speeds = np.where(usable, 1 / np.maximum(np.where(usable, seconds.sum(axis=1), 1.0), 1e-300), 0.0)

    def at(weights: Array) -> float:
        least = (weights[usable, None] * seconds[usable]).min(axis=0)
        return float(least.sum() / (weights * devices).sum())

    weights = speeds / speeds.max()  # a kind that was measured nowhere does nothing
    best = at(weights)
    step = 1.5
    for _ in range(_ROUNDS if usable.sum() > 1 else 0):
        one = np.eye(len(weights))
        moved = [weights * step ** (sign * row) for row in one for sign in (1, -1)]
        bounds = [at(other) for other in moved]
        if max(bounds) > best:
            best = max(bounds)
            weights = moved[int(np.argmax(bounds))]
        else:
            step = 1 + (step - 1) / 2
    weights = weights / weights.max()
    return Capacity(tuple(weights.tolist()), best)


def least_work_s(evaluator: Evaluator, size: int, backward: str) -> Array:
    """By layer: the least device time of a step, however it is cut: no fewer samples at once cost less a sample.

    Between measured sizes, and beyond, the cost of a sample rises or falls, so that its least is at one of them.  So it
    is with measured parts of a layer, by the share of its work.
    """
    problem = evaluator.problem
    cost_model = evaluator.cost_model
    layers = len(problem.graph.layers)
    least = np.full(layers, np.inf)
    for kind in {cost_model.kind(rank) for rank in problem.ranks}:
        measured = {m.samples for m in problem.profile.measurements.get(kind, ()) if m.samples < size}
        for samples in sorted({1, size} | measured):
            with suppress(MissingMeasurementError):
                table = cost_model.tables.at(kind, samples)
                sums = (table.forward_s, table.backward_s, table.backward_input_s, table.backward_weight_s)
                seconds = _there_and_back_s(np.diff(np.stack(sums)), backward)
                least = np.minimum(least, np.maximum(seconds, 0.0) / samples)
        least = np.minimum(least, _least_of_parts(evaluator, size, backward, kind))
    return least * problem.global_batch if np.isfinite(least).all() else np.zeros(layers)


def _there_and_back_s(passes: Array, backward: str) -> Array:
    """The least of F and ``backward``, where F, B, I and W take so long."""
    forward_s, whole_s, input_s, weight_s = passes
    back_s = 0.0 if backward == NONE else least_backward_s(whole_s, input_s, weight_s, backward != WHOLE)
    return np.asarray(forward_s + back_s)


def _least_of_parts(evaluator: Evaluator, size: int, backward: str, kind: str) -> Array:
    """By layer: the least device time of a whole sample done in measured parts; infinity where none was measured."""
    profile = evaluator.cost_model.profile
    least = np.full(len(profile.graph.layers), np.inf)
    parts = MeasuredParts(profile)
    if not parts:
        return least
    prices = evaluator.layouts.prices(evaluator.problem.ranks, size)
    index = {layer.name: k for k, layer in enumerate(profile.graph.layers)}
    for (name, part), sizes in _measured_parts(profile, kind, size).items():
        sized = prices.sized(index[name])
        whole = part_of(sized, sized.work.shape)
        share = math.prod(part) / max(1, math.prod(whole))
        for samples in sizes:
            for estimate in parts.cost(kind, name, samples, part, whole):
                seconds = float(_there_and_back_s(np.array(estimate.values[:4]), backward))
                least[index[name]] = min(least[index[name]], seconds / (samples * share))
    return least


def _measured_parts(profile: Profile, kind: str, size: int) -> dict[tuple[str, tuple[int, ...]], set[int]]:
    """By layer and part, numbers of samples to look at: those that were measured, one, and ``size``, the most."""
    sizes: dict[tuple[str, tuple[int, ...]], set[int]] = {}
    for one in profile.parts.get(kind, ()):
        if not one.before:
            sizes.setdefault((one.layer, one.part), {1, size}).update({one.samples} if one.samples <= size else ())
    return sizes
