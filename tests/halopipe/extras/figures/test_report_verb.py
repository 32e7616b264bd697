from __future__ import annotations

from pathlib import Path

import pytest

import halopipe as hp
from benchmarks.chains import chain_profile
from planner.ir.codec import dump
from tests.halopipe.commands import call
from tests.planner.factories import chain_decision, plan_of

PROFILE = chain_profile(4, latency_s=1e-4)
PLAN = plan_of(PROFILE, chain_decision(PROFILE, cuts=(2,), micro_batches=(2, 2)))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A plan with its profile beside it; in ``alone`` the plan only."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "alone").mkdir()
    dump(PROFILE, "profile.json")
    dump(PLAN, "plan.json")
    dump(PLAN, "alone/plan.json")
    return tmp_path


def test_a_report_is_one_file_and_the_same_from_python(folder: Path) -> None:
    result = call("report", "plan.json", "alone/plan.json", "--pareto", "2")
    assert result.exit_code == 0, result.stderr
    page = Path("report.html").read_text("utf-8")
    assert "alone/plan.json, against plan.json" in page
    assert "the same decision" in page
    assert "Step against memory of the fullest rank (" in page
    hp.report(PLAN, PROFILE, output="other.html")
    assert "Stages on the network" in Path("other.html").read_text("utf-8")


@pytest.mark.parametrize(
    ("arguments", "start"),
    [
        (["-o", "step.svg"], b"<?xml"),
        (["-o", "memory.png"], b"\x89PNG"),
        (["--what", "graph", "-o", "mine.svg"], b"<?xml"),
    ],
)
def test_what_is_drawn_follows_from_the_name_or_the_option(folder: Path, arguments: list[str], start: bytes) -> None:
    result = call("draw", "plan.json", *arguments)
    assert result.exit_code == 0, result.stderr
    assert Path(arguments[-1]).read_bytes().startswith(start)


@pytest.mark.parametrize(
    ("arguments", "exit_code", "text"),
    [
        (["draw", "plan.json", "-o", "picture.svg"], 2, "picture.svg does not say what to draw"),
        (["draw", "plan.json", "--what", "stp"], 2, "step (did you mean that?)"),
        (["draw", "plan.json", "-o", "step.pdf"], 2, "written as .svg or .png"),
        (["draw", "alone/plan.json"], 2, "a step needs a timeline"),
        (["draw", "plan.json", "-o", "no/step.svg"], 3, "cannot write no/step.svg"),
        (["report", "profile.json"], 2, "no plan is given"),
        (["report", "nowhere.json"], 3, "cannot read nowhere.json"),
        (["report", "plan.json", "-o", "plan.json"], 2, "a report is a page of HTML"),
        (["report", "alone/plan.json", "--pareto", "2"], 2, "--pareto searches, which needs the profile"),
    ],
)
def test_what_cannot_be_done_is_said(folder: Path, arguments: list[str], exit_code: int, text: str) -> None:
    result = call(*arguments)
    assert result.exit_code == exit_code, result.output
    assert text in result.stderr
