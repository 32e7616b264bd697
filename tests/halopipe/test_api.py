from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import halopipe as hp
from planner.ir.plan import Plan
from planner.ir.profile import ModelSource, Profile
from tests.planner.factories import chain_profile

HOME = Path(__file__).resolve().parents[2]
PROFILE = chain_profile(5, latency_s=1e-4)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return hp.plan(PROFILE, global_batch=8)


def test_a_plan_is_explained(plan: Plan) -> None:
    assert "Step (predicted)" in hp.explain(plan, PROFILE)
    assert "Not shown without the profile" in hp.explain(plan)


def test_plans_are_compared_as_a_frame(plan: Plan) -> None:
    frame = hp.compare(plan, *hp.baselines(PROFILE)).frame()
    assert frame.index[0] == "best-first"
    assert {"one-device", "data-parallel", "even-split"} <= set(frame.index)
    assert frame["step_s"].min() == frame.loc["best-first", "step_s"]


CLUSTER = """
halopipe: cluster
version: 1
hosts: [{name: n, devices: [{device: T4, count: 2}]}]
links: {within-host: PCIe-3}
"""


def test_what_may_be_asked_of_a_plan_may_be_asked_here(plan: Plan, tmp_path: Path) -> None:
    assert hp.what_if(plan, PROFILE, "devices=3").other is not None
    assert str(hp.why_not(plan, PROFILE, "one-device")).startswith("one-device: ")
    assert len(hp.prices(plan, PROFILE, time_limit_s=10).prices) == 3
    frame = hp.pareto(PROFILE, num_points=2, global_batch=8).frame()
    assert frame["step_s"].is_monotonic_increasing
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    there = hp.plan(PROFILE, cluster=tmp_path / "cluster.yaml", memory="8GiB", solver="even-split")
    assert there.decision.stages[0].devices == ("n/gpu0",)
    assert there == hp.plan(hp.on_cluster(PROFILE, tmp_path / "cluster.yaml"), memory=8 * 2**30, solver="even-split")


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

    def measure(source: ModelSource, **others: object) -> Profile:
        asked.append(source)
        return PROFILE

    monkeypatch.setattr("halopipe.planning.measure.measure", measure)
    assert hp.profile("a.b:c", input_shape=(8, 3), autocast="bfloat16") is PROFILE
    assert asked == [ModelSource("a.b:c", {}, (8, 3), "float32", "bfloat16")]
