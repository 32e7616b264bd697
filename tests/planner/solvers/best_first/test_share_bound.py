"""Where unlike devices may share a micro-batch in many ways, the plan is the best of all, and proven to be."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from benchmarks.chains import chain_profile
from planner.costs.cost_model import CostModel
from planner.ir.errors import InfeasibleError
from planner.ir.problem import Problem
from planner.ir.profile import Measurement
from planner.solvers import solver
from planner.solvers.candidates.evaluate import Evaluator
from tests.planner.solvers.instances import best_by_exhaustion, plans

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
    size = draw.randint(38, 48)
    batch = draw.choice([size, 2 * size, 2 * size - 5])
    return Problem(
        replace(profile, measurements=measured), batch, ("1f1b",), (size,), memory_margin=0.0, time_limit_s=120.0
    )


@pytest.mark.parametrize("seed", range(40))
def test_of_many_shares_the_best_is_found_and_proven(seed: int) -> None:
    problem = many_shares(seed)
    evaluator = Evaluator(problem, CostModel(problem.profile))
    best_s = min(found.step_s for found in map(evaluator.evaluate, plans(problem)) if found.fits)
    plan = solver("best-first")(problem, None)
    assert plan.search.status == "proven"
    assert plan.prediction.step_s == pytest.approx(best_s, rel=1e-9)


def several_kinds(seed: int) -> Problem:
    """Three or four devices of two or three kinds, on hosts of their own or not, some with little memory."""
    draw = random.Random(seed)
    count = draw.choice([3, 3, 4])
    layers = 3 if count == 3 else 2
    profile = chain_profile(
        layers,
        count,
        forward_s=[draw.uniform(1e-4, 1e-3) for _ in range(layers)],
        parameter_bytes=[4 * draw.randint(1, 500) for _ in range(layers)],
        activation_bytes=[4 * draw.randint(1, 400) for _ in range(layers)],
        saved_bytes=[4 * draw.randint(1, 400) for _ in range(layers)],
        speeds=[1.0, *(draw.choice([1.0, 0.5, 1.7]) for _ in range(count - 2)), 0.7],
        hosts=[draw.choice(["n0", "n1"]) for _ in range(count)] if draw.random() < 0.5 else None,
        memory_bytes=[draw.choice([9_000, 15_000, 2**30]) for _ in range(count)] if draw.random() < 0.5 else 2**30,
        latency_s=draw.choice([0.0, 1e-4]),
        bandwidth_bytes_per_s=draw.choice([1e6, 1e7, 1e9]),
        duplex=draw.random() < 0.8,
        all_reduce_latency_s=draw.choice([0.0, 1e-4]),
        sizes=(1, 2, 4, 8),
    )
    size = draw.choice([5, 6, 7]) if count == 3 else 5
    schedule = draw.choice(["1f1b", "gpipe", "1f1b-so"])
    return Problem(
        profile,
        size + draw.choice([0, 4, size]),
        (schedule,),
        (size,),
        memory_margin=0.0,
        max_stages=6 - count,
    )


@pytest.mark.parametrize("seed", range(40))
def test_on_several_kinds_and_hosts_no_shares_are_better_than_the_plan(seed: int) -> None:
    problem = several_kinds(seed)
    best, _ = best_by_exhaustion(problem)
    if best is None:
        with pytest.raises(InfeasibleError):
            solver("best-first")(problem, None)
        return
    plan = solver("best-first")(problem, None)
    assert plan.search.status == "proven"
    assert plan.prediction.step_s == pytest.approx(best.step_s, rel=1e-9)
