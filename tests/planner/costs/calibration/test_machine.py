from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from planner.costs.calibration.fit import with_observation
from planner.costs.calibration.machine import LEAST_CHANGE, drift, speeds
from planner.costs.candidate import candidate_of
from planner.costs.cost_model import CostModel
from planner.costs.observe import observe
from planner.costs.predict import predict
from planner.costs.pricing import Pricing
from planner.ir.plan import Decision
from planner.ir.profile import MACHINE, STEP_RANGE, Correction, CostClass, Profile
from planner.ir.timeline import LonePasses
from tests.planner.costs.machines import SHAPES, decision, machine

TRUE = machine(random.Random(3), spread=0.0, noise=0.0, middle=0.0)
PROFILE = TRUE.profile
KIND = TRUE.profile.cluster.devices[0].kind


def passes(asked: Decision, slower: Callable[[int], float], profile: Profile = PROFILE) -> list[LonePasses]:
    """Of every rank's stages, ``slower(time)`` times their price, before (0) and after (1) the run."""
    cost_model = CostModel(profile)
    found = []
    for number, stage in enumerate(Pricing(cost_model).stages(candidate_of(cost_model.profile.graph, asked))):
        for rank in stage.ranks:
            samples = round(stage.samples[max(asked.micro_batches)][stage.ranks.index(rank)])
            sums = cost_model.sums(KIND, samples, False, False)
            price_s = sum(sums.passes_s(stage.runs)[:2])
            found.append(LonePasses(rank, number, samples, *((price_s * slower(at),) * 3 for at in (0, 1))))
    return found


def now(factor: float) -> tuple[Correction, ...]:
    return (Correction(CostClass(MACHINE, KIND), factor, 1),)


@pytest.mark.parametrize("shape", SHAPES)
def test_an_error_is_split_into_the_machines_part_and_the_models(shape: str) -> None:
    asked = decision(random.Random(1), PROFILE, shape)
    seen = speeds(PROFILE, asked, passes(asked, lambda _: 1.3))
    assert seen is not None
    assert seen.of[KIND] == pytest.approx(1.3)
    assert seen.alone_s / seen.priced_s == pytest.approx(1.3)
    assert seen.corrections[0].factor == pytest.approx(1.3)
    slow_s = predict(PROFILE.corrected_by(now(1.3)), asked)[0].step_s
    found = drift(PROFILE, asked, seen, (), slow_s * 1.04)
    assert found.machine == pytest.approx(slow_s / predict(PROFILE, asked)[0].step_s - 1)
    assert found.machine > 0.1
    assert found.model == pytest.approx(0.04)
    known = drift(PROFILE, asked, seen, now(1.3), slow_s * 1.04)
    assert known.machine == pytest.approx(0.0, abs=1e-9), "the plan counted with it"


def test_a_difference_within_chance_is_no_change() -> None:
    asked = decision(random.Random(1), PROFILE, "two stages")
    noisy = replace(PROFILE, provenance=replace(PROFILE.provenance, process_spread={"4": 0.2}))
    least = 1 + LEAST_CHANGE
    for profile, slower, changes in (
        (PROFILE, lambda _: least * 1.01, True),
        (PROFILE, lambda _: least * 0.99, False),
        (PROFILE, lambda _: 0.9, True),
        (noisy, lambda _: 1.15, False),
        (noisy, lambda _: 1.25, True),
        (PROFILE, lambda at: 1.0 + 0.3 * at, False),
    ):
        seen = speeds(profile, asked, passes(asked, slower))
        assert seen is not None
        assert bool(seen.corrections) == changes
    assert speeds(PROFILE, asked, []) is None


def test_the_profile_is_rescaled_and_nothing_is_learnt_of_a_machine_that_is_slower_alone() -> None:
    draw = random.Random(2)
    profile = PROFILE
    slow = PROFILE.corrected_by(now(1.4))
    for shape in SHAPES:
        asked = decision(draw, PROFILE, shape)
        timeline = predict(slow, asked)[1]
        seen = speeds(PROFILE, asked, passes(asked, lambda _: 1.4))
        assert seen is not None
        observed = observe(PROFILE, asked, [timeline] * 5, timeline.step_s, 0.0, seen.corrections)
        assert observed.predicted_s == pytest.approx(observed.measured_s)
        assert observed.machine == pytest.approx(timeline.step_s / predict(PROFILE, asked)[0].step_s)
        profile = with_observation(profile, observed, seen.corrections)
    costs = [one for one in profile.calibration.corrections if one.of.what != STEP_RANGE]
    assert [(one.of.what, one.of.where) for one in costs] == [(MACHINE, KIND)]
    other = decision(draw, PROFILE, "hybrid")
    assert predict(profile, other)[0].step_s == pytest.approx(predict(slow, other)[0].step_s)
