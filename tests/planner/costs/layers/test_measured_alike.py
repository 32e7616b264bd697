"""All layers at once cost what each costs by itself."""

from __future__ import annotations

import random

import numpy as np

from planner.costs.layers.interpolation import layer_cost, measured_alike
from planner.ir.profile import Measurement


def measurements(draw: random.Random, sizes: tuple[int, ...], key: str = "") -> list[Measurement]:
    def seconds(samples: int) -> float:
        return draw.choice([0.0, draw.uniform(1e-4, 2e-4) * samples])

    def of(n: int) -> Measurement:
        saved, workspace = draw.randint(0, 9) * n, draw.randint(0, 9)
        return Measurement("l", n, seconds(n), seconds(n), seconds(n), seconds(n), saved, workspace, 1, key=key)

    return [of(samples) for samples in sizes]


def test_all_layers_at_once_cost_what_each_costs() -> None:
    draw = random.Random(0)
    for sizes in ((1, 2, 4, 8), (2, 6), (3, 4, 9)):
        by_layer = [measurements(draw, sizes) for _ in range(20)]
        (alike,) = measured_alike(by_layer)
        for samples in range(20):
            values, evidence = alike.at(samples)
            each = [layer_cost(found, samples) for found in by_layer]
            np.testing.assert_allclose(values, [cost.values for cost in each], rtol=1e-12)
            assert evidence == tuple(cost.evidence for cost in each)


def test_layers_that_differ_in_sizes_or_back_ends_are_not_alike() -> None:
    draw = random.Random(1)
    assert measured_alike([measurements(draw, (1, 2)), measurements(draw, (1, 4))]) == ()
    assert measured_alike([measurements(draw, (1,))]) == ()
    assert measured_alike([measurements(draw, (1,), "a") + measurements(draw, (2,), "b")]) == ()
    assert measured_alike([]) == ()
