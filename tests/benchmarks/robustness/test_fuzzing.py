from __future__ import annotations

import json
import time

import pytest

from benchmarks.robustness import fuzzing
from planner.ir.errors import UsageError


def test_spoilt_plans_are_refused_or_hold() -> None:
    found = fuzzing.fuzz_plans(60, seed=7)
    assert found.is_good, found.examples
    assert 0 < found.refused < found.tried == 60


def test_spoilt_profiles_are_refused_or_planned() -> None:
    found = fuzzing.fuzz_profiles(24, seed=7)
    assert found.is_good, found.examples
    assert 0 < found.refused < found.tried == 24


def test_a_seed_gives_the_same_mutations() -> None:
    document = {"a": {"b": [1, 2, 3]}, "c": {"d": "x"}}
    before = json.dumps(document)
    spoilt = [fuzzing.mutation(document, f"plan-0-{index}") for index in range(30)]
    assert spoilt == [fuzzing.mutation(document, f"plan-0-{index}") for index in range(30)]
    assert len(set(spoilt)) > 15
    assert json.dumps(document) == before


def test_what_should_not_be_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    told = iter((UsageError("ours"), KeyError("not ours"), None))

    def faults_of(plan: object, profile: object) -> tuple[str, ...]:
        error = next(told)
        if error is None:
            time.sleep(60)
        raise error

    fuzzing._plan_of(fuzzing.PLAN_SEEDS[0])
    monkeypatch.setattr(fuzzing, "PLAN_SEEDS", fuzzing.PLAN_SEEDS[:1])
    monkeypatch.setattr(fuzzing, "LIMIT_S", 1.0)
    monkeypatch.setattr(fuzzing, "_PATIENCE", 1)
    monkeypatch.setattr(fuzzing, "mutation", lambda document, name: json.dumps(document).encode())
    monkeypatch.setattr(fuzzing, "faults_of", faults_of)
    found = fuzzing.fuzz_plans(3)
    assert (found.refused, found.untyped, found.hangs, found.is_good) == (1, 1, 1, False)
