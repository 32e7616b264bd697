"""``draw``, ``report`` and ``notebook``: what they write of plans and runs, and what they refuse."""

from __future__ import annotations

import ast
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import nbformat
import pytest

import halopipe as hp
from halopipe.launch import run
from planner.costs.predict import predict
from planner.ir.codec import dump, load
from planner.ir.errors import UsageError
from planner.ir.plan import Measured, Plan
from planner.ir.profile import Correction, CostClass, Profile
from tests.halopipe.commands import HOME, PROFILE, RENAMED, call, good, require_said
from tests.halopipe.planning.test_batch_statistics import profile
from tests.planner.costs.calibration.test_machine import passes
from tests.planner.factories import chain_decision, plan_of


def test_a_report_is_one_file_and_the_same_from_python(folder: Path) -> None:
    good("report", "by_hand.json", "alone/by_hand.json", "--pareto", "2")
    page = Path("report.html").read_text("utf-8")
    assert "alone/by_hand.json, against by_hand.json" in page
    assert "the same decision" in page
    assert "Step against memory of the fullest rank (" in page
    hp.report(load("by_hand.json", Plan), PROFILE, output="other.html")
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
    good("draw", "by_hand.json", *arguments)
    assert Path(arguments[-1]).read_bytes().startswith(start)


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
    good("report", "plan.json", "one.timeline.json", "one.json", "timeline.json")
    page = Path("report.html").read_text("utf-8")
    assert re.findall(r"step, measured</p><p class=\"figure\">(.*?)</p>", page) == ["10.0 ms"]
    assert re.findall(r"<td>(25\.0 ms)</td>", page), "the rival's, in the table"
    good("report", "plan.json", "one.timeline.json", "one.json")
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


def test_the_page_of_a_report_says_of_what_statistics_are(report: ModuleType, profile: Profile) -> None:
    """Where the profile is there, whose graph knows the layers."""

    def page(**asked: Any) -> str:
        return report.page(report.ReportSources("plan.json", hp.plan(profile, solver="one-device", **asked), profile))

    assert "statistics of each of 4 micro-batches, not of the whole batch of 8" in page(micro_batch=[2])
    assert "batch statistics" not in page(micro_batch=[8])


def test_a_notebook_names_its_profile_as_python_reads_it(folder: Path) -> None:
    place = folder / "😀 é"
    place.mkdir()
    shutil.copy("profile.json", place)
    assert call("notebook", "😀 é/profile.json", "--no-run", "-o", "n.ipynb").exit_code == 0
    cells = json.loads(Path("n.ipynb").read_text("utf-8"))["cells"]
    (line,) = [line for cell in cells for line in cell["source"] if "hp.load(" in line]
    (argument,) = ast.parse(line.strip()).body[0].value.args  # type: ignore[attr-defined]  # of an assignment
    assert ast.literal_eval(argument) == "😀 é/profile.json"


@pytest.fixture
def quoted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A profile and a plan of it in ``my "data"``, so that names need quotes."""
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.setenv("PYTHONPATH", str(HOME))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    data = folder / 'my "data"'
    data.mkdir()
    shutil.copy("profile.json", data)
    by_hand = load("by_hand.json", Plan)
    measured = Measured.of_steps((0.1,), by_hand.prediction, by_hand.prediction.transport, ())
    dump(replace(by_hand, measured=measured), data / "plan.json")
    return data


def test_a_plan_that_no_run_measured_is_no_part_of_predicted_beside_measured(folder: Path) -> None:
    refused = call("notebook", "profile.json", "by_hand.json", "--no-run")
    assert refused.exit_code == UsageError.exit_code
    assert "try: halopipe run by_hand.json --update" in refused.stderr


def code(path: str | Path) -> list[str]:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


def test_the_cells_run_on_ones_own_profile_and_write_no_other_name_than_those_of_the_api(quoted: Path) -> None:
    from matplotlib import pyplot

    (Path.cwd() / "out").mkdir()
    good("notebook", str(quoted / "profile.json"), str(quoted / "plan.json"), "--no-run", "-o", "out/mine.ipynb")
    cells = code("out/mine.ipynb")
    assert [line for cell in cells for line in cell.splitlines() if "import" in line] == ["import halopipe as hp"]
    names: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as there:
        there.chdir("out")  # as a kernel does
        for cell in cells:
            exec(cell, names)
    pyplot.close("all")
    assert names["plan"] == hp.plan(PROFILE)
    assert names["table"].step_s.iloc[0] == names["plan"].prediction.step_s
    assert set(names["comparison"].plans) > {"best-first", "data-parallel"}
    assert list(names["ran"].index) == ["none"]
    assert names["front"].plans


def test_the_same_notebook_is_written_each_time_and_plans_are_shown_only_if_given(quoted: Path) -> None:
    assert call("notebook", str(quoted / "profile.json"), "--no-run").exit_code == 0
    first = Path("strategies.ipynb").read_bytes()
    assert call("notebook", str(quoted / "profile.json"), "--no-run").exit_code == 0
    assert Path("strategies.ipynb").read_bytes() == first
    assert b"Predicted against measured" not in first


@pytest.mark.parametrize("missing", ["nbclient", "nbformat"])
def test_a_package_that_is_missing_is_named_with_the_command_that_installs_it(
    quoted: Path, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib

    real = importlib.import_module

    def without(name: str, package: str | None = None) -> Any:
        if name.partition(".")[0] == missing:
            raise ImportError(f"No module named {missing!r}")
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", without)
    result = call("notebook", str(quoted / "profile.json"))
    assert result.exit_code == 2
    assert "pip install 'halopipe[notebooks]'" in result.stderr
    assert ("--no-run" in result.stderr) == (missing == "nbclient")


@pytest.mark.exhaustive("a kernel: ten seconds")
def test_the_verb_runs_what_it_writes_and_keeps_what_came_before_a_cell_that_failed(
    quoted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from halopipe.extras.figures import notebook

    monkeypatch.delenv("MPLBACKEND")  # a kernel's own shows pictures
    result = good("notebook", str(quoted / "profile.json"), str(quoted / "plan.json"))
    text = Path("strategies.ipynb").read_text("utf-8")
    found = json.loads(text)
    assert all(cell["execution_count"] for cell in found["cells"] if cell["cell_type"] == "code")
    assert "image/png" in text
    assert "<svg" in text
    monkeypatch.setattr(notebook, "CELLS", ("print(6 * 7)", "1 / 0"))
    result = call("notebook", str(quoted / "profile.json"), "-o", "failing.ipynb")
    assert result.exit_code == 5
    assert "ZeroDivisionError: division by zero" in result.stderr
    assert '"42\\n"' in Path("failing.ipynb").read_text("utf-8")


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("words", "exit_code", "texts"),
    [
        ("draw by_hand.json -o picture.svg", 2, ["picture.svg does not say what to draw"]),
        ("draw by_hand.json --what stp", 2, ["step (did you mean that?)"]),
        ("draw by_hand.json -o step.pdf", 2, ["written as .svg or .png"]),
        ("draw alone/by_hand.json", 2, ["a step needs a timeline"]),
        ("draw by_hand.json -o no/step.svg", 3, ["cannot write no/step.svg"]),
        ("draw renamed.json --what memory -o m.svg", 6, RENAMED),
        ("report profile.json", 2, ["no plan is given"]),
        ("report nowhere.json", 3, ["cannot read nowhere.json"]),
        ("report by_hand.json -o plan.json", 2, ["a report is a page of HTML"]),
        ("report alone/by_hand.json --pareto 2", 2, ["--pareto searches, which needs the profile"]),
        ("report renamed.json", 6, RENAMED),
        ("notebook profile.json -o mine.html", 2, ["-o mine.ipynb"]),
        ("notebook other.json by_hand.json --no-run", 3, ["error[H304]"]),
        ("notebook missing.json --no-run", 3, ["cannot read missing.json"]),
        ("notebook profile.json renamed.json --no-run", 6, RENAMED),
    ],
)
def test_what_goes_wrong_is_said_on_stderr_with_its_exit_code(
    folder: Path, words: str, exit_code: int, texts: list[str]
) -> None:
    require_said(folder, words.split(), exit_code, *texts)
