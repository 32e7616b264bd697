"""Observations of synthetic machines show their true factors, and calibration makes plans better that were not run."""

from __future__ import annotations

import random
from statistics import fmean

import pytest

from planner.costs.calibration.fit import with_observation
from planner.costs.predict import predict
from planner.ir.codec import fingerprint
from planner.ir.plan import Decision
from planner.ir.profile import BACKWARD, FORWARD, MESSAGES, OVERHEAD, STATISTIC_SUMS, STEP_RANGE, UPDATE, Profile, Seen
from tests.planner.costs.machines import SHAPES, Machine, decision, machine, step_of

CALIBRATING = 2
HELD_BACK = 2
ROUNDING = 0.01
"""What runs scatter by."""


def shown(found: tuple[Seen, ...]) -> dict[tuple[str, bool], Seen]:
    return {(seen.of.what, seen.of.shared): seen for seen in found}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_true_factors_of_compute_are_seen(shape: str) -> None:
    draw = random.Random(shape)
    true = machine(draw, spread=0.3, noise=0.0)
    found = shown(true.observation(decision(draw, true.profile, shape), draw).seen)
    for what in (FORWARD, BACKWARD):
        seen = [one for (name, _), one in found.items() if name == what]
        assert len(seen) == (2 if shape == "hybrid" else 1)
        for one in seen:
            assert one.ratio == pytest.approx(true.truth[one.of], rel=0.05)


def test_the_true_factors_of_messages_and_updates_are_seen_where_a_pipeline_waits() -> None:
    draw = random.Random(1)
    true = machine(draw, spread=0.3, noise=0.0)
    found = shown(true.observation(decision(draw, true.profile, "two stages"), draw).seen)
    assert found[MESSAGES, False].ratio == pytest.approx(true.truth[found[MESSAGES, False].of], rel=0.02)
    assert found[OVERHEAD, False].step_s > 0
    assert found[OVERHEAD, False].ratio == 1, "it is never most of an action"
    assert found[UPDATE, False].ratio == pytest.approx(true.truth[found[UPDATE, False].of], rel=0.2)
    assert (STATISTIC_SUMS, False) not in found, "nothing is normalised"


def test_the_parts_of_the_step_add_up_to_it() -> None:
    draw = random.Random(2)
    true = machine(draw, spread=0.3, noise=0.0)
    for shape in SHAPES:
        found = true.observation(decision(draw, true.profile, shape), draw)
        assert sum(seen.step_s for seen in found.seen) == pytest.approx(found.predicted_s, rel=1e-3)


def test_an_observation_says_what_was_run_and_how_often() -> None:
    draw = random.Random(3)
    true = machine(draw, spread=0.3, noise=0.01)
    asked = decision(draw, true.profile, "two stages")
    found = true.observation(asked, draw)
    assert found.plan == fingerprint(asked)
    assert found.num_steps == 5
    assert 0 < found.spread < 0.1
    assert found.predicted_s == predict(true.profile, asked)[0].step_s


def test_corrections_that_a_profile_has_do_not_change_what_is_observed() -> None:
    draw = random.Random(4)
    true = machine(draw, spread=0.3, noise=0.0)
    asked = decision(draw, true.profile, "hybrid")
    once = true.observation(asked, draw)
    learnt = with_observation(true.profile, once)
    assert learnt.calibration.corrections
    assert Machine(learnt, true.truth, 0.0).observation(asked, draw) == once


def calibrated(true: Machine, draw: random.Random) -> Profile:
    """After as many runs of plans of every shape."""
    profile = true.profile
    for shape in SHAPES * CALIBRATING:
        profile = with_observation(profile, true.observation(decision(draw, profile, shape), draw))
    return profile


def error(profile: Profile, true: Machine, asked: Decision) -> float:
    return abs(step_of(profile, asked).step_s / true.step_s(asked) - 1)


@pytest.mark.parametrize("seed", range(3))
def test_plans_that_were_not_run_are_predicted_better_and_none_worse(seed: int) -> None:
    draw = random.Random(seed)
    true = machine(draw, spread=draw.choice((0.05, 0.15, 0.3)), noise=draw.choice((0.0, 0.01, 0.02)))
    found = calibrated(true, draw)
    held_back = [decision(draw, true.profile, shape) for shape in SHAPES * HELD_BACK]
    errors = [(error(true.profile, true, asked), error(found, true, asked)) for asked in held_back]
    assert fmean(after for _, after in errors) < fmean(before for before, _ in errors) / 2
    for before, after in errors:
        assert after <= before + ROUNDING


def test_a_machine_that_is_as_its_profile_says_is_not_corrected() -> None:
    draw = random.Random(0)
    true = machine(draw, spread=0.0, noise=0.02, middle=0.0)
    found = calibrated(true, draw).calibration.corrections
    assert [one for one in found if one.of.what != STEP_RANGE] == []
