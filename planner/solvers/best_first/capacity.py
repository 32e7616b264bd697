"""What devices of unlike kinds can do together: no step is shorter than all work over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.costs.layers.cost_table import Array

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
