"""Trials are of every kind, the same for the same seed, and one that goes wrong is seen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.faults.__main__ import (
    EVERY,
    MOMENTS,
    OWN,
    PLANS,
    SIGNALS,
    Outcome,
    Trial,
    _wrong,
    drawn,
    made,
    rows,
    tried,
)
from benchmarks.faults.victim import FORWARD
from halopipe.run_spec.result import RunResult, Score
from planner.ir.timeline import Restart, Timeline

TRIAL = Trial("1f1b/2", "SIGKILL", FORWARD, 0, 3)
RESULT = RunResult((1.0, 2.0), (0.1, 0.1), 0, Timeline("measured", 0.1, ()), (), (), (), scores=(Score(2, 0.5, 8),))


def test_trials_are_of_every_kind_and_follow_from_the_seed() -> None:
    trials = list(drawn(300, 0))
    assert trials == list(drawn(300, 0)) != list(drawn(300, 1))
    assert {each.deed for each in trials} == {*OWN, *SIGNALS}
    assert {each.plan for each in trials} == set(PLANS)
    assert {each.moment for each in trials} >= set(MOMENTS)
    assert any(each.damaged for each in trials)


def test_other_losses_other_evaluations_and_too_much_done_again_are_wrong() -> None:
    once = replace(RESULT, restarts=(Restart(4, (0,), "killed", "H501", 3, 1, 1.5),))
    assert _wrong(TRIAL, once, RESULT, 1) == ""
    assert "other losses" in _wrong(TRIAL, replace(RESULT, losses=(1.0, 2.5)), RESULT, 0)
    assert "other evaluations" in _wrong(TRIAL, replace(RESULT, scores=()), RESULT, 0)
    assert "were repeated" in _wrong(TRIAL, once, RESULT, EVERY + 1)
    found = {row.name: row for row in rows([Outcome(TRIAL, "", (1.5,), 1), Outcome(TRIAL, "the job ended", ())])}
    assert (found["ended as they should"].value, found["ended as they should"].holds) == (1, False)
    assert found["recovery, median"].value == 1.5


@pytest.mark.exhaustive("4 s: three jobs in processes; tests of launch/test_restart.py lose ranks as well")
def test_a_trial_ends_as_it_should() -> None:
    from benchmarks.faults.__main__ import _folder, _job

    plan = made()[TRIAL.plan]
    with _folder() as folder:
        expected = _job(plan, folder)
    found = tried(TRIAL, plan, expected, 1.0)
    assert (found.wrong, len(found.recoveries_s)) == ("", 1)
    assert "other losses" in tried(TRIAL, plan, replace(expected, losses=()), 1.0).wrong
