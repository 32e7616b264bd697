"""Where unlike devices may share a micro-batch in too many ways to look at all, the bound holds over those as well."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from benchmarks.chains import chain_profile
from planner.costs.cost_model import PriceBook
from planner.ir.problem import Problem
from planner.ir.profile import Measurement
from planner.solvers import solver
from planner.solvers.candidates.candidate import FEW_SHARES
from planner.solvers.candidates.evaluate import Evaluator
from tests.planner.solvers.instances import plans

SIZES = (1, 2, 4, 8, 16, 32, 64)


def many_shares(seed: int) -> Problem:
    """Two unlike devices, whose ratio differs from layer to layer and from size to size, and many samples."""
    draw, layers = random.Random(seed), 2
    profile = chain_profile(
        layers,
        2,
        forward_s=[draw.uniform(1e-4, 1e-3) for _ in range(layers)],
        parameter_bytes=[4 * draw.randint(1, 5000) for _ in range(layers)],
        activation_bytes=[4 * draw.randint(1, 2000) for _ in range(layers)],
        speeds=[1.0, draw.choice([0.4, 0.7, 1.9])],
        memory_bytes=draw.choice([2**30, 2**30, (2**30, 400_000), (300_000, 2**30)]),
        latency_s=draw.choice([0.0, 1e-4]),
        bandwidth_bytes_per_s=draw.choice([1e7, 1e9]),
        update_s=draw.choice([0.0, 3e-4]),
        sizes=SIZES,
    )

    def uneven(one: Measurement) -> Measurement:
        names = ("forward_s", "backward_s", "backward_input_s", "backward_weight_s")
        return replace(one, **{name: draw.uniform(0.8, 1.2) * getattr(one, name) + 2e-5 for name in names})

    measured = {kind: tuple(map(uneven, found)) for kind, found in profile.measurements.items()}
    size = draw.randint(FEW_SHARES + 2, 48)
    batch = draw.choice([size, 2 * size, 2 * size - 5])
    return Problem(replace(profile, measurements=measured), batch, ("1f1b",), (size,), memory_margin=0.0)


@pytest.mark.parametrize("seed", range(40))
def test_the_bound_holds_over_all_shares_and_the_plan_is_as_good_as_it_says(seed: int) -> None:
    problem = many_shares(seed)
    evaluator = Evaluator(problem, PriceBook(problem.profile))
    best_s = min(found.step_s for found in map(evaluator.evaluate, plans(problem)) if found.fits)
    plan = solver("best-first")(problem, None)
    assert plan.search.bound_s <= best_s * (1 + 1e-9)
    assert plan.prediction.step_s <= best_s * (1 + 1e-2)
    if plan.search.status == "proven":
        assert plan.prediction.step_s <= best_s * (1 + 1e-9)


def test_some_plans_are_proven_over_all_shares() -> None:
    plans_of = [solver("best-first")(many_shares(seed), None) for seed in range(8)]
    assert any(plan.search.status == "proven" and len(plan.decision.stages[0].ranks) > 1 for plan in plans_of)
