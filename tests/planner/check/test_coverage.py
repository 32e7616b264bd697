"""Every field of a plan file has a row in the checker's table, and what the table promises holds for changed plans."""

from __future__ import annotations

import functools
import json

import pytest

from benchmarks.robustness.checker_mutations import CASES, Caught, case, caught_of
from planner import faults_of
from planner.check import needs_profile, not_checked
from planner.check.coverage import HISTORY, NOT, PARTLY, ROWS, WHOLLY, fields_of
from planner.ir.codec import dumps, loads
from planner.ir.plan import Plan
from tests.oracles.plans import check as check_plainly
from tests.sampling import everything


def test_every_field_of_a_plan_is_in_the_table_and_nothing_else() -> None:
    assert sorted(ROWS) == sorted(fields_of())


def test_a_profile_never_takes_a_check_away() -> None:
    order = {NOT: 0, PARTLY: 1, WHOLLY: 2}
    for path, row in ROWS.items():
        assert (row.alone == HISTORY) == (row.against == HISTORY), path
        if row.alone != HISTORY:
            assert order[row.against] >= order[row.alone], path
            assert row.against_by, path


def test_what_is_not_checked_is_told() -> None:
    assert "decision.stages[].devices" in needs_profile()
    assert "decision.program" not in needs_profile()
    assert any(line.startswith("inputs.model.factory") for line in not_checked(False))
    assert not any(line.startswith("inputs.model.factory") for line in not_checked(True))


@pytest.mark.parametrize("name", CASES)
def test_a_plan_of_each_kind_is_good_with_its_profile_and_without(name: str) -> None:
    plan, profile = case(name)
    assert check_plainly(plan, profile) == ()
    assert check_plainly(plan, None) == ()


@functools.cache
def sample() -> Caught:
    return caught_of(240 if everything else 80)


def test_changed_plans_are_found_out() -> None:
    """Takes 4 s: plans of every kind, 80 of their changes, each checked with its profile and without."""
    found = sample()
    assert found.missed == []
    assert found.raised == []
    assert found.caught == found.tried > (200 if everything else 60)
    assert found.caught_alone == found.tried_alone > (50 if everything else 10)
    assert found.equal < found.tried / 10


def test_all_faults_are_told_at_once() -> None:
    plan, profile = case("zero bubble")
    document = json.loads(dumps(plan))
    document["prediction"]["step_s"] *= 2
    document["search"]["bound_s"] *= 0.5
    document["inputs"]["request"]["max_stages"] = 1
    paths = {fault.split(":")[0] for fault in faults_of(loads(json.dumps(document), Plan), profile)}
    assert paths >= {"prediction.step_s", "prediction.samples_per_s", "search.gap", "search.status", "decision.stages"}
