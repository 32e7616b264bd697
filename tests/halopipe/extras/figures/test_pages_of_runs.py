"""What pages and figures show of runs, and of batch statistics."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import halopipe as hp
from halopipe.extras.figures import report
from halopipe.launch import run
from planner.costs.predict import predict
from planner.ir.codec import dump, load
from planner.ir.plan import Plan
from planner.ir.profile import Correction, CostClass, Profile
from tests.halopipe.commands import PROFILE, call
from tests.halopipe.planning.test_batch_statistics import profile
from tests.planner.costs.calibration.test_machine import passes
from tests.planner.factories import chain_decision, plan_of

FIXTURES = (profile,)


def test_a_page_says_how_the_machine_has_changed_since_the_profile(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call("plan", "profile.json", "--global-batch", "8", "-o", "plan.json").exit_code == 0
    slow = PROFILE.corrected_by((Correction(CostClass("machine", PROFILE.cluster.devices[0].kind), 1.3, 1),))
    timeline = replace(predict(slow, load("plan.json", Plan).decision)[1], source="measured")

    def run_plan(plan: Plan, options: run.RunOptions, progress: object, replanner: object) -> run.RunResult:
        isolated = tuple(passes(plan.decision, lambda _: 1.3, PROFILE))
        return run.RunResult((2.3,) * 9, (timeline.step_s,) * 9, 1, timeline, (), (), (), isolated_passes=isolated)

    monkeypatch.setattr(run, "run_plan", run_plan)
    assert call("run", "plan.json", "--calibrate", "on").exit_code == 0
    assert call("report", "plan.json", "timeline.json", "profile.json").exit_code == 0
    assert "machine since the profile" in Path("report.html").read_text("utf-8")


def test_each_timeline_is_shown_as_its_own_plans(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of two plans, one of which is 2.5 times as long, and first steps that are slow."""

    def run_plan(plan: Plan, options: run.RunOptions, progress: object, replanner: object) -> run.RunResult:
        step_s = 0.010 if len(plan.decision.stages) == 2 else 0.025
        timeline = replace(predict(PROFILE, plan.decision)[1], source="measured", step_s=step_s)
        return run.RunResult((2.3,) * 5, (0.9, 0.8, *(step_s,) * 3), 2, timeline, (), (), ())

    monkeypatch.setattr(run, "run_plan", run_plan)
    one = plan_of(PROFILE, chain_decision(PROFILE, cuts=(), micro_batches=(2, 2, 2, 2)))
    dump(load("by_hand.json", Plan), "plan.json")
    dump(one, "one.json")
    for name in ("plan.json", "one.json"):
        assert call("run", name, "--no-learn").exit_code == 0
    both = call("report", "plan.json", "one.timeline.json", "one.json", "timeline.json")
    assert both.exit_code == 0, both.stderr
    page = Path("report.html").read_text("utf-8")
    assert re.findall(r"step, measured</p><p class=\"figure\">(.*?)</p>", page) == ["10.0 ms"]
    assert re.findall(r"<td>(25\.0 ms)</td>", page), "the rival's, in the table"
    alone = call("report", "plan.json", "one.timeline.json", "one.json")
    assert alone.exit_code == 0, alone.stderr
    assert "step, measured" not in Path("report.html").read_text("utf-8")
    for verb in (("report", "plan.json", "one.timeline.json"), ("draw", "plan.json", "one.timeline.json")):
        refused = call(*verb)
        assert refused.exit_code == 2
        assert "one.timeline.json is of another plan" in refused.stderr
    trace = call("export", "one.json", "--to", "chrome-trace", "--timeline", "timeline.json")
    assert "timeline.json is of another plan" in trace.stderr
    Path("copy.json").write_bytes(Path("timeline.json").read_bytes())
    twice = call("report", "plan.json", "timeline.json", "copy.json")
    assert "are both of plan.json" in twice.stderr
    wider = replace(one, inputs=replace(one.inputs, model_fingerprint="sha256:0123456789abcdef"))
    dump(wider, "wider.json")
    assert "is of another plan" in call("report", "wider.json", "one.timeline.json").stderr


def test_the_page_of_a_report_says_of_what_statistics_are(profile: Profile) -> None:
    """Where the profile is there, whose graph knows the layers."""

    def page(**asked: Any) -> str:
        return report.page(report.ReportSources("plan.json", hp.plan(profile, solver="one-device", **asked), profile))

    assert "statistics of each of 4 micro-batches, not of the whole batch of 8" in page(micro_batch=[2])
    assert "batch statistics" not in page(micro_batch=[8])
