from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.chains import chain_profile
from halopipe.planning.compare import Comparison, differences, proof_text, tie_text
from halopipe.planning.solve import Baselines
from planner.ir.plan import Measured, Search, Tie
from tests.planner.factories import chain_decision, plan_of

PROFILE = chain_profile(6)
REFERENCE = chain_decision(PROFILE, cuts=(3,))


def test_equal_decisions_differ_in_nothing() -> None:
    assert differences(REFERENCE, chain_decision(PROFILE, cuts=(3,))) == ()


def test_moved_layers_are_named_in_runs() -> None:
    (line,) = differences(REFERENCE, chain_decision(PROFILE, cuts=(5,)))
    assert line == "2 layers l3 ... l4: on n0/cpu0 instead of n0/cpu1"


def test_stages_are_told_apart_by_devices_not_by_number() -> None:
    swapped = chain_decision(PROFILE, cuts=(3,), ranks=((1,), (0,)))
    assert differences(REFERENCE, swapped) == (
        "3 layers l0 ... l2: on n0/cpu1 instead of n0/cpu0",
        "4 layers l3 ... loss: on n0/cpu0 instead of n0/cpu1",
    )


def test_schedule_batches_and_shares_are_named() -> None:
    other = chain_decision(PROFILE, micro_batches=(4,), ranks=((0, 1),), shares=((3, 1),), schedule="gpipe")
    assert differences(REFERENCE, other) == (
        "schedule: gpipe instead of 1f1b",
        "micro-batches: 1 micro-batch of 4 instead of 2 micro-batches of 2",
        "stages: 1 instead of 2",
        "3 layers l0 ... l2: on n0/cpu0 and n0/cpu1 (samples 3:1) instead of n0/cpu0",
        "4 layers l3 ... loss: on n0/cpu0 and n0/cpu1 (samples 3:1) instead of n0/cpu1",
    )


def test_another_order_of_the_same_actions_is_a_difference() -> None:
    first, *rest = REFERENCE.program
    reordered = replace(REFERENCE, program=((*first[:-2], *reversed(first[-2:])), *rest))
    assert differences(REFERENCE, reordered) == ("the order of actions differs",)


def test_recomputation_and_micro_batches_in_flight_are_named() -> None:
    other = chain_decision(PROFILE, cuts=(3,), micro_batches=(1, 1, 1, 1), schedule="gpipe")
    again = replace(other, stages=(replace(other.stages[0], recompute=True), other.stages[1]))
    assert differences(REFERENCE, again) == (
        "schedule: gpipe instead of 1f1b",
        "micro-batches: 4 micro-batches of 1 instead of 2 micro-batches of 2",
        "stage 0 on n0/cpu0: computes activations again",
        "stage 0 on n0/cpu0: 4 micro-batches in flight instead of 2",
        "stage 1 on n0/cpu1: 4 micro-batches in flight instead of 1",
    )
    assert "stage 0 on n0/cpu0: keeps its activations" in differences(again, REFERENCE)


def test_layouts_of_single_layers_are_told_apart() -> None:
    base = chain_decision(PROFILE, micro_batches=(4,), ranks=((0, 1),), shares=((2, 2),))
    cut = {**base.layers, "l2": replace(base.layers["l2"], cuts={"height": (0, 5, 8)})}
    assert differences(base, replace(base, layers=cut)) == (
        "layer l2: on n0/cpu0 and n0/cpu1 (height 5:3) instead of n0/cpu0 and n0/cpu1 (samples 2:2)",
    )


def test_what_ranks_divide_is_named() -> None:
    levels = [
        replace(
            REFERENCE, stages=tuple(replace(stage, sharded=zero > 0, zero=max(1, zero)) for stage in REFERENCE.stages)
        )
        for zero in range(4)
    ]
    assert differences(REFERENCE, levels[1])[0] == "stage 0 on n0/cpu0: its ranks divide the optimiser's state"
    assert differences(levels[1], levels[2])[0].endswith("divide the optimiser's state and gradients")
    assert differences(levels[3], REFERENCE)[0].endswith("keep the optimiser's state whole")


def test_layers_of_another_model_are_named() -> None:
    other = chain_decision(chain_profile(7), cuts=(3,))
    assert differences(REFERENCE, other) == ("layer l6: only in this plan",)
    assert differences(other, REFERENCE) == ("layer l6: not in this plan",)


def test_the_table_says_which_is_best_and_what_does_not_fit() -> None:
    slow = plan_of(PROFILE, chain_decision(PROFILE, cuts=(5,)), step_s=3e-3)
    fast = plan_of(PROFILE, REFERENCE, step_s=2e-3)
    took_s, limits_s = {"one-device": 0.012, "dapple": 8.0}, {"one-device": 60.0, "dapple": 8.0}
    solved = Baselines({}, {"one-device": "needs 9 GiB"}, took_s, limits_s)
    comparison = Comparison({"slow.json": slow, "fast.json": fast}, None, solved)
    lines = comparison.render().splitlines()
    assert lines[1].split()[:6] == ["slow.json", "3.00", "ms", "1,333", "+50", "%"]
    assert " best " in lines[2]
    assert "  one-device: no plan: needs 9 GiB" in lines
    assert "  planned in: one-device 12.0 ms, dapple 8.00 s (all of 8.00 s)" in lines
    assert comparison.data()["planning_s"] == took_s
    assert "fast.json, against slow.json:" in lines
    assert "  2 layers l3 ... l4: on n0/cpu1 instead of n0/cpu0" in lines
    assert comparison.data()["differences"] == {"fast.json": ["2 layers l3 ... l4: on n0/cpu1 instead of n0/cpu0"]}


def test_what_was_measured_stands_beside_what_was_predicted_in_the_same_units() -> None:
    ran = plan_of(PROFILE, REFERENCE, step_s=2e-3)
    ran = replace(ran, measured=Measured.of_steps((4e-3,), ran.prediction, "", ()))
    header, (one, other) = Comparison({"ran": ran, "not": plan_of(PROFILE, REFERENCE, step_s=2e-3)}).table()
    assert header[1:5] == ["step", "samples/s", "measured step", "measured samples/s"]
    assert (one[3:5], other[3:5]) == (["4.00 ms", "1,000"], ["–", "–"])


@pytest.mark.parametrize(
    ("status", "gap", "text"),
    [
        ("proven", 0.0, "proven"),
        ("within gap", 0.021, "within 2.1 %"),
        ("within gap", 1e-5, "within 0.1 %"),
        ("time limit", 0.124, "time limit, within 12 %"),
        ("searched", 4.61, "searched, within 461 %"),
    ],
)
def test_a_proof_says_how_far_from_the_best_a_plan_can_be(status: str, gap: float, text: str) -> None:
    assert proof_text(Search("m", "s", status, 1e-3, gap, 0, 0)) == text
    assert proof_text(Search("m", "s", "heuristic", 0.0, 0.0, 0, 0)) == "heuristic"


def test_plans_that_decide_the_same_are_told_of_together() -> None:
    first, other = plan_of(PROFILE, REFERENCE), plan_of(PROFILE, chain_decision(PROFILE, cuts=(5,)))
    shown = Comparison({"a": first, "b": other, "c": first, "d": other}).render()
    assert "b, d, against a:\n  2 layers l3 ... l4" in shown
    assert "c, against a:\n  the same decision" in shown


def test_plans_for_different_models_are_remarked_on() -> None:
    other_profile = chain_profile(7)
    other = plan_of(other_profile, chain_decision(other_profile, cuts=(3,)))
    assert "different models" in Comparison({"a": plan_of(PROFILE, REFERENCE), "b": other}).render()


def test_plans_of_different_global_batches_are_remarked_on() -> None:
    other = plan_of(PROFILE, chain_decision(PROFILE, cuts=(3,), micro_batches=(4, 4)))
    comparison = Comparison({"a": plan_of(PROFILE, REFERENCE), "b": other}, profile=PROFILE)
    assert "global batches differ (4, 8)" in comparison.render()
    assert comparison.ties == {}


@pytest.mark.parametrize(
    ("num_ranks", "said"),
    [
        (3, "uses 2 ranks rather than 3, and gives up 6.5 % at the mean"),
        (2, "exchanges less on as many ranks, and gives up 6.5 % at the mean"),
        (0, "is simpler, and gives up 6.5 % at the mean"),  # a file of before
    ],
)
def test_what_a_plan_was_taken_for_and_what_that_costs_is_said(num_ranks: int, said: str) -> None:
    tie = Tie("3 stages on 3 ranks, 1f1b, 2 micro-batches", 0.01, 0.065, 0.68, num_ranks)
    plan = plan_of(PROFILE, REFERENCE)
    plan = replace(plan, search=replace(plan.search, tie=tie))
    assert tie_text(plan, tie) == said
    assert f"  mine {said}: {tie.over}, is faster there" in str(Comparison({"mine": plan}))
