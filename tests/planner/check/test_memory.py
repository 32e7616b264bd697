"""The checker and the planner agree about memory where levels were measured, under every schedule that trains."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from planner.check import check
from planner.costs.cost_model import PriceBook
from planner.costs.memory.levels import course
from planner.ir.problem import Problem
from planner.ir.profile import Levels, Measurement, Profile
from planner.schedules import names, positions, traits
from planner.solvers.candidates.candidate import Candidate
from planner.solvers.candidates.evaluate import Evaluator
from tests.planner.factories import chain_profile
from tests.planner.solvers.laid_out_plans import plan_of_candidate


def with_levels(profile: Profile, seed: int) -> Profile:
    """``profile`` with levels, and every other layer such that its weight gradients cannot come later."""

    def measured(one: Measurement) -> Measurement:
        draw = random.Random(f"{seed} {one.layer}")
        sizes = [draw.randrange(2**20) * one.samples for _ in Levels.__slots__]
        found = replace(one, levels=Levels(*sizes), saved_bytes=draw.randrange(2**20) * one.samples)
        if draw.random() < 0.5:
            found = replace(found, backward_input_s=found.backward_s, backward_weight_s=0.0)
        return found

    return replace(
        profile, measurements={kind: tuple(map(measured, found)) for kind, found in profile.measurements.items()}
    )


@pytest.mark.parametrize("schedule", [name for name in names() if traits(name).trains])
@pytest.mark.parametrize("seed", range(3))
def test_the_peaks_are_reckoned_the_same(schedule: str, seed: int) -> None:
    profile = with_levels(chain_profile(8, 2, parameter_bytes=2**20), seed)
    wanted = traits(schedule).stages_per_position
    ranks = tuple((rank,) for rank in positions(schedule, 2, 1 if wanted == 1 else 2))
    num_layers = len(profile.graph.layers)
    bounds = tuple(round(num_layers * stage / len(ranks)) for stage in range(len(ranks) + 1))
    candidate = Candidate.chain(bounds, ranks, ((1,),) * len(ranks), (1,) * 4, schedule)
    evaluator = Evaluator(Problem(profile, 4, memory_margin=0.0), PriceBook(profile))
    plan = plan_of_candidate(evaluator, candidate)
    assert check(plan, profile) == ()
    ranks_of = plan.prediction.ranks
    low = tuple(replace(each, peak_bytes=each.peak_bytes - 2**16) for each in ranks_of)
    assert check(replace(plan, prediction=replace(plan.prediction, ranks=low)), profile) != ()


def test_gradients_that_cannot_wait_come_with_those_of_inputs() -> None:
    saved, gradients, levels = np.zeros(3), np.array([10.0, 100.0, 1.0]), np.zeros((6, 3))
    found = course(saved, gradients, levels, defers=np.array([True, False, True]))
    assert (found.early, found.input_first, found.input_later) == (100, 100, 100)
    assert (found.weight_first, found.weight_later) == (11, 10)
    whole = course(saved, gradients, levels)
    assert (whole.early, whole.input_first, whole.weight_first) == (0, 0, 111)
    assert found.backward_first == whole.backward_first == 111
