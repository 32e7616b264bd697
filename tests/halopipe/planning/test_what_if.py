from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.chains import chain_profile
from halopipe.planning import problem, solve, what_if
from planner.ir.cluster import DATASHEET, MEASURED
from planner.ir.errors import UnknownNameError, UsageError
from planner.ir.plan import Alternative, Plan, Rejected
from tests.planner.factories import chain_decision, plan_of

PROFILE = chain_profile(6, latency_s=1e-4, parameter_bytes=2**20, activation_bytes=2**14, update_s=5e-4)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return solve.solve(problem.make_problem(PROFILE))


def by_hand() -> Plan:
    made = plan_of(PROFILE, chain_decision(PROFILE, cuts=(3,)), step_s=0.0925)
    listed = (Alternative("one-device", 0.15, 2**24, "62 % slower: no parallelism"),)
    rejected = (Rejected("8 micro-batches of 1", "bound 95 ms"),)
    return replace(made, alternatives=listed, search=replace(made.search, rejected=rejected))


def test_an_alternative_is_found_by_part_of_its_name() -> None:
    assert str(what_if.why_not(by_hand(), None, "One-Dev")) == "one-device: 62 % slower: no parallelism"
    assert what_if.why_not(by_hand(), None, "micro-batches of 1").reasons == ("8 micro-batches of 1: bound 95 ms",)


def test_a_condition_is_searched_for_again_and_the_difference_shown(plan: Plan) -> None:
    answer = what_if.why_not(plan, PROFILE, "schedule=gpipe,micro-batch=8,ranks=1")
    assert answer.other is not None
    assert (answer.other.decision.schedule, answer.other.decision.micro_batches) == ("gpipe", (8,))
    assert answer.slower is not None
    assert answer.slower > 0
    shown = answer.render()
    assert shown.startswith("schedule=gpipe,micro-batch=8,ranks=1: ")
    assert " slower (" in shown
    assert "\n  memory   " in shown
    assert "\n  decides  schedule: gpipe instead of " in shown
    assert "proven the best under this condition; costs: measured" in shown
    assert json.loads(json.dumps(answer.data()))["other"]["evidence"] == MEASURED


def test_a_solver_is_asked_by_its_name(plan: Plan) -> None:
    answer = what_if.why_not(plan, PROFILE, "even-split")
    assert answer.other is not None
    assert answer.other.search.solver == "even-split"


@pytest.mark.parametrize("question", ["dp=2", "stages=2", "l1=stage:1"])
def test_what_is_asked_for_exactly_is_had_exactly(plan: Plan, question: str) -> None:
    answer = what_if.why_not(plan, PROFILE, question)
    assert answer.other is not None
    decision = answer.other.decision
    match question:
        case "dp=2":
            assert {len(stage.ranks) for stage in decision.stages} == {2}
        case "stages=2":
            assert len(decision.stages) == 2
        case _:
            assert decision.layers["l1"].stage == 1
    assert answer.reasons == ()


def test_a_solver_that_does_not_keep_to_a_condition_is_told_on(plan: Plan) -> None:
    answer = what_if.why_not(plan, PROFILE, "solver=one-device,l*=replicas:2")
    assert answer.other is None
    assert "side constraints" in answer.reasons[0]
    assert answer.reasons[1].startswith("  fix l*=replicas:2: l0 is in stage 0")


def test_where_nothing_fits_the_reason_is_the_answer(plan: Plan) -> None:
    answer = what_if.what_if(plan, PROFILE, "memory=1MiB")
    assert (answer.other, answer.slower) == (None, None)
    assert answer.render().startswith("memory=1MiB: no plan fits\n")
    assert answer.data()["other"] is None


def test_machines_may_be_otherwise(plan: Plan) -> None:
    more = what_if.what_if(plan, PROFILE, "devices=4,global-batch=16")
    assert more.other is not None
    assert more.other.decision.global_batch == 16
    assert more.slower is not None
    assert more.slower < 0
    assert "global batch: 16 instead of 8" in more.render()
    quick = what_if.what_if(plan, PROFILE, "link within-host.speed=4")
    assert quick.evidence == DATASHEET


def test_what_makes_no_difference_is_as_fast(plan: Plan) -> None:
    answer = what_if.what_if(plan, PROFILE, "n0/*.memory=8GiB")
    assert answer.render().startswith("n0/*.memory=8GiB: as fast (")
    assert "  decides  the same" in answer.render()


@pytest.mark.parametrize("question", ["", "tensor parallelism", "dp=4", "schedule=gpipe"])
def test_what_is_not_known_is_answered_with_what_may_be_asked(question: str) -> None:
    with pytest.raises(UsageError, match="nothing is known of") as caught:
        what_if.why_not(by_hand(), None, question)
    assert "one-device" in caught.value.details[0]
    assert "(needs --profile): schedule=..." in caught.value.details[1]


@pytest.mark.parametrize("question", ["data_parallel", "data-paralel"])
def test_a_solver_that_is_misspelt_is_named(question: str) -> None:
    with pytest.raises(UsageError, match="nothing is known of") as caught:
        what_if.why_not(by_hand(), PROFILE, question)
    assert caught.value.remedies[0] == "--why-not data-parallel (did you mean that?)"


def test_a_condition_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(UsageError, match="is not a positive integer"):
        what_if.why_not(by_hand(), PROFILE, "stages=two")
    with pytest.raises(UnknownNameError, match="no schedule 'gpip'"):
        what_if.why_not(by_hand(), PROFILE, "schedule=gpip")
    with pytest.raises(UsageError, match="nothing is known of 'magic'"):
        what_if.why_not(by_hand(), PROFILE, "magic")
