from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import halopipe as hp
from benchmarks.chains import chain_profile
from halopipe.planning.options import ProfileOptions
from halopipe.planning.problem import make_problem
from halopipe.planning.solve import solve
from planner.ir.codec import dump
from planner.ir.errors import CorruptFileError, StaleFileError, UsageError
from planner.ir.plan import Plan
from planner.ir.profile import ModelSource, Profile

HOME = Path(__file__).resolve().parents[2]
PROFILE = chain_profile(5, latency_s=1e-4)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return hp.plan(PROFILE, global_batch=8)


def test_a_plan_is_explained(plan: Plan) -> None:
    assert "Step (predicted)" in hp.explain(plan, PROFILE)
    text = hp.explain(plan)  # which remembers its profile
    assert text == hp.explain(plan, PROFILE)
    assert "Not shown without the profile" not in text


def test_what_is_saved_is_loaded_and_files_stand_for_what_they_hold(plan: Plan, tmp_path: Path) -> None:
    hp.save(PROFILE, tmp_path / "p.json")
    hp.save(plan, tmp_path / "plan.json")
    assert (hp.load(tmp_path / "p.json"), hp.load(str(tmp_path / "plan.json"))) == (PROFILE, plan)
    assert hp.plan(tmp_path / "p.json", global_batch=8) == plan
    assert hp.explain(str(tmp_path / "plan.json"), tmp_path / "p.json") == hp.explain(plan)
    assert "best-first" in hp.compare(tmp_path / "plan.json", *hp.baselines(tmp_path / "p.json")[:1]).plans
    with pytest.raises(UsageError, match="a list is not kept in a file"):
        hp.save([plan], tmp_path / "list.json")
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(CorruptFileError, match="is not a halopipe file"):
        hp.load(tmp_path / "other.json")


def test_a_plan_of_a_file_has_the_profile_beside_it_or_says_that_it_needs_one(tmp_path: Path) -> None:
    profile = chain_profile(3, latency_s=2e-4)
    hp.save(profile, tmp_path / "p.json")
    dump(solve(make_problem(profile, global_batch=8)), tmp_path / "plan.json")  # as by another process
    with pytest.raises(UsageError, match="needs the profile") as caught:
        hp.what_if(tmp_path / "plan.json", "devices=1")
    assert "no profile.json beside" in caught.value.details[0]
    with pytest.raises(StaleFileError, match="made for another profile"):
        hp.prices(tmp_path / "plan.json", PROFILE)
    assert hp.what_if(tmp_path / "plan.json", tmp_path / "p.json", "devices=1").other is not None
    (tmp_path / "p.json").rename(tmp_path / "profile.json")
    assert hp.what_if(hp.load(tmp_path / "plan.json"), "devices=1").other is not None
    assert "Not shown without the profile" not in hp.explain(tmp_path / "plan.json")


def test_plans_are_compared_as_a_frame(plan: Plan) -> None:
    frame = hp.compare(plan, *hp.baselines(PROFILE)).frame()
    assert frame.index[0] == "best-first"
    assert {"one-device", "data-parallel", "even-split"} <= set(frame.index)
    assert frame["step_s"].min() == frame.loc["best-first", "step_s"]


def test_what_may_be_asked_of_a_plan_may_be_asked_here(plan: Plan) -> None:
    assert hp.what_if(plan, "devices=3").other is not None
    assert str(hp.why_not(plan, PROFILE, "one-device")).startswith("one-device: ")
    assert len(hp.prices(plan, PROFILE, time_limit_s=10).prices) == 3
    frame = hp.pareto(PROFILE, num_points=2, global_batch=8).frame()
    assert frame["step_s"].is_monotonic_increasing


def test_plans_of_one_solver_get_names_of_their_own(plan: Plan) -> None:
    assert list(hp.compare(plan, plan, mine=plan).plans) == ["best-first", "best-first 2", "mine"]


def test_importing_is_light_and_an_unknown_name_is_an_attribute_error() -> None:
    code = "import sys, halopipe; print(sorted({'pydantic', 'rich', 'numpy', 'torch'} & set(sys.modules)))"
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=HOME, capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
    with pytest.raises(AttributeError, match="no attribute 'profle'"):
        hp.profle  # noqa: B018  # the access is the test


def test_a_profile_is_measured_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[ModelSource] = []

    def measure(source: ModelSource, how: ProfileOptions, **others: object) -> Profile:
        asked.append(source)
        return PROFILE

    monkeypatch.setattr("halopipe.planning.measure.measure", measure)
    assert hp.profile("a.b:c", input_shape=(8, 3), autocast="bfloat16") is PROFILE
    assert asked == [ModelSource("a.b:c", {}, (8, 3), "float32", "bfloat16")]
