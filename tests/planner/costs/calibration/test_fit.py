from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.chains import chain_profile
from planner.costs.calibration.apply_corrections import Factors
from planner.costs.calibration.fit import (
    RANGE,
    RUNS_KEPT,
    clipped,
    corrected_step_s,
    corrections_from,
    errors_left,
    factor_from,
    in_force,
    on_other_machines,
    ranges_from,
    with_observation,
)
from planner.costs.uncertainty import MODEL
from planner.ir.codec import fingerprint
from planner.ir.profile import (
    BACKWARD,
    FORWARD,
    MACHINE,
    MESSAGES,
    OVERHEAD,
    PIPELINE,
    STEP_RANGE,
    UPDATE,
    Calibration,
    Correction,
    CostClass,
    Observation,
    Seen,
)

KIND = "kind-1"
F = CostClass(FORWARD, KIND)
B = CostClass(BACKWARD, KIND)
M = CostClass(MESSAGES, "within-host")
PREDICTED_S = {F: 1.0, B: 2.0}


def observation(name: str, forward: float, backward: float, step: float = 0.0, spread: float = 0.01) -> Observation:
    """A step of forward (1 s) and backward (2 s), measured so many times longer; the step what they add up to."""
    ratios = {F: forward, B: backward}
    seen = tuple(Seen(of, s, s * ratios[of], s, s) for of, s in PREDICTED_S.items())
    explained_s = sum(clipped(one.ratio) * one.predicted_s for one in seen)
    return Observation(name, 20, spread, 3.0, step or explained_s, explained_s, seen)


def factors(*observations: Observation) -> dict[CostClass, float]:
    return {one.of: one.factor for one in corrections_from(observations)}


def test_plans_that_agree_are_believed_the_more_the_more_there_are() -> None:
    found = [factor_from([1.4] * count) for count in (1, 2, 4, 16)]
    assert found == sorted(found)
    assert found[0] == pytest.approx(math.sqrt(1.4))
    assert 1.39 < found[-1] < 1.4


def test_plans_that_disagree_and_noisy_runs_are_believed_less() -> None:
    assert factor_from([1.1, 1.4, 1.9]) < factor_from([1.4, 1.4, 1.4])
    assert factor_from([1.4] * 3, noise=0.1) < factor_from([1.4] * 3)


def test_one_plan_that_is_out_does_not_move_a_factor() -> None:
    assert factor_from([1.2, 1.2, 1.2, 1.2, 9.0]) == pytest.approx(factor_from([1.2] * 5), rel=1e-9)


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=8))
def test_a_factor_lies_between_one_and_the_median_and_in_a_sane_range(ratios: list[float]) -> None:
    middle = math.exp(sorted(map(math.log, ratios))[len(ratios) // 2])
    low = min([1.0, *ratios])
    high = max([1.0, *ratios])
    assert low * (1 - 1e-9) <= factor_from(ratios) <= high * (1 + 1e-9) or factor_from(ratios) in RANGE
    assert RANGE[0] <= factor_from(ratios) <= RANGE[1]
    assert middle > 0


def test_a_class_that_is_right_is_kept_as_such() -> None:
    """Else a stage of one rank would go with shared ones."""
    shared = CostClass(FORWARD, KIND, shared=True)
    seen = (Seen(F, 1.0, 1.0, 1.0, 1.0), Seen(shared, 2.0, 3.0, 2.0, 2.0))
    found = factors(*(Observation(name, 20, 0.0, 3.0, 4.0, 4.0, seen) for name in "abcd"))
    assert found[F] == 1.0
    assert found[shared] > 1.4


def in_turn(*pairs: tuple[float, float], step: float = 0.0) -> list[Observation]:
    """Of a plan each."""
    return [observation(str(number), *pair, step=step) for number, pair in enumerate(pairs)]


@pytest.mark.every_case
@pytest.mark.parametrize(
    "observations",
    [
        in_turn((1.05, 1.05)),  # one plan counts only if it is far out
        in_turn((1.2, 1.2), (0.8, 0.8), (1.0, 1.0)),  # plans disagree
        in_turn(*[(1.2, 1.2)] * 4, step=3.0),  # the parts are out, but the step is not
        in_turn(*((ratio, ratio) for ratio in (1.004, 0.997, 1.006, 0.999, 1.002))),  # noise
        in_turn(*[(0.5, 1.25)] * 5),  # classes make up for one another: the step is right as it is
        [observation("a", ratio, ratio) for ratio in (1.1, 0.9, 1.05, 0.95)],  # runs of a plan disagree
        [observation("a", 1.06, 1.06)],  # it may be chance
    ],
)
def test_what_would_not_hold_for_plans_left_out_is_not_corrected(observations: list[Observation]) -> None:
    assert factors(*observations) == {}


def test_a_plan_that_runs_again_is_believed_the_more_but_less_than_several_plans() -> None:
    assert 1.1 < factors(observation("a", 1.4, 1.4))[F] < 1.25, "far out, and by half"
    again = [factors(*[observation("a", 1.06, 1.06)] * count)[F] for count in (2, 5)]
    others = factors(*in_turn(*[(1.06, 1.06)] * 5))[F]
    assert 1.03 < again[0] < again[1] < others < 1.06


def test_corrections_of_devices_count_where_those_of_links_do_harm() -> None:
    def with_messages(name: str, ratio: float) -> Observation:
        found = observation(name, 1.2, 1.2)
        seen = (*found.seen, Seen(M, 1.0, ratio, 3.0, 3.0))
        return replace(found, explained_s=found.explained_s + 3.0 * (ratio - 1), seen=seen)

    found = factors(*(with_messages(name, 3.0) for name in "abcd"))
    assert set(found) == {F, B}


def test_leaving_a_plan_out_uses_only_the_others() -> None:
    (before, after), *others = errors_left([observation("a", 1.4, 1.4), *(observation(n, 1.0, 1.0) for n in "bcd")])
    assert before == after == pytest.approx(math.log(1.4))
    assert all(error == pytest.approx((0.0, 0.0), abs=1e-9) for error in others)


def test_where_another_path_becomes_the_longest_its_tangent_counts() -> None:
    """Forward on one rank, 1 s, beside backward on another, 0.9 s, which is measured half as long again."""
    seen = (Seen(F, 1.0, 1.0, 1.0, 0.0), Seen(B, 0.9, 1.35, 0.0, 0.9))
    found = Observation("a", 20, 0.01, 1.0, 1.35, 1.35, seen)
    for factor in (1.0, 1.2, 1.5):
        corrected = corrected_step_s(found, Factors.of((Correction(B, factor, 2),)))
        assert corrected == pytest.approx(max(1.0, 0.9 * factor))


def test_of_a_plan_that_runs_again_the_newest_runs_are_kept() -> None:
    profile = with_observation(chain_profile(3), observation("b", 1.0, 1.0))
    for number in range(RUNS_KEPT + 1):
        profile = with_observation(profile, observation("a", 1 + number / 10, 1.4))
    kept = profile.calibration.observations
    assert [one.plan for one in kept] == ["b", *"a" * RUNS_KEPT]
    assert [one.seen[0].measured_s for one in kept[1:]] == pytest.approx([1.1, 1.2, 1.3, 1.4, 1.5])


def test_the_machine_as_it_was_last_is_kept_and_is_no_part_of_the_rest() -> None:
    slower, faster = ((Correction(CostClass(MACHINE, KIND), of, 1),) for of in (1.3, 0.9))
    profile = with_observation(chain_profile(3), observation("a", 1.0, 1.0), slower)
    assert profile.calibration.corrections == slower
    assert with_observation(profile, observation("b", 1.0, 1.0)).calibration.corrections == slower
    assert with_observation(profile, observation("b", 1.0, 1.0), faster).calibration.corrections == faster
    assert with_observation(profile, observation("b", 1.0, 1.0), ()).calibration.corrections == ()
    both = Factors.of((*slower, Correction(F, 1.1, 1)))
    assert [both(what, KIND) for what in (FORWARD, BACKWARD, UPDATE)] == pytest.approx([1.43, 1.3, 1.3])
    assert both(OVERHEAD, KIND) == both(MESSAGES, KIND) == 1.0


def test_a_miss_widens_the_range_of_its_kind_of_plan_and_hits_narrow_it() -> None:
    def deviation(*errors: float) -> float:
        runs = [
            replace(observation(str(n), 1.0, 1.0, step=3 * math.exp(error)), kind=PIPELINE)
            for n, error in enumerate(errors)
        ]
        (found,) = ranges_from(runs)
        assert (found.of, found.num_plans) == (CostClass(STEP_RANGE, PIPELINE), len(errors))
        return math.log(found.factor)

    assert deviation(0.0) < MODEL[PIPELINE] < deviation(0.5)
    assert deviation(*[0.0] * 8) < deviation(*[0.0] * 7, 0.4)
    assert deviation(*[0.2, -0.2] * 20) == pytest.approx(0.2, rel=0.05)


def test_a_machine_that_changes_from_run_to_run_widens_the_ranges_of_all_plans() -> None:
    """Slower for good is one change; now slower and now as profiled is one each run."""

    def deviation(*machine: float) -> float:
        runs = [
            replace(observation(str(n), 1.0, 1.0), kind=PIPELINE, machine=slower) for n, slower in enumerate(machine)
        ]
        return math.log(ranges_from(runs)[0].factor)

    steady = deviation(*[1.0] * 6)
    once = deviation(*[1.2] * 6)
    often = deviation(*[1.2, 1.0] * 3)
    assert steady < once < often
    assert often**2 - steady**2 == pytest.approx(6 / 8 * math.log(1.2) ** 2)


def test_the_fingerprint_of_a_profile_is_that_of_what_was_measured() -> None:
    profile = chain_profile(3)
    learnt = with_observation(profile, observation("a", 1.4, 1.4))
    assert learnt.bare == profile
    assert fingerprint(learnt.bare) == fingerprint(profile) == learnt.calibration.profile


def test_a_profile_that_changed_has_no_corrections() -> None:
    learnt = with_observation(chain_profile(3), observation("a", 1.4, 1.4))
    changed = replace(learnt, action_overhead_s={KIND: 1e-5})
    assert in_force(learnt) is learnt
    assert in_force(changed) == changed.bare
    assert len(with_observation(changed, observation("b", 1.0, 1.0)).calibration.observations) == 1


def test_on_other_machines_only_devices_keep_their_corrections() -> None:
    corrections = (Correction(F, 1.1, 2), Correction(M, 1.5, 2))
    profile = replace(chain_profile(3), calibration=Calibration("", (), corrections))
    assert on_other_machines(profile.bare, profile).calibration.corrections == corrections[:1]


@settings(max_examples=50)
@given(st.lists(st.tuples(st.floats(0.5, 2.0), st.floats(0.5, 2.0)), min_size=2, max_size=8))
def test_accepted_corrections_lower_the_error_of_plans_left_out(ratios: list[tuple[float, float]]) -> None:
    observations = [observation(str(number), *pair) for number, pair in enumerate(ratios)]
    if factors(*observations):
        left = errors_left(observations)
        assert sum(after for _, after in left) < sum(before for before, _ in left)
