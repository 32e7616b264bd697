from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nbformat
import pytest
from typer.testing import CliRunner, Result

import halopipe as hp
from benchmarks.chains import chain_profile
from halopipe.cli.app import app
from planner.ir.codec import dump
from tests.planner.factories import chain_decision, plan_of

PROFILE = chain_profile(4, latency_s=1e-4)
PLAN = plan_of(PROFILE, chain_decision(PROFILE, cuts=(2,), micro_batches=(2, 2)))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A profile and a plan of it in ``my "data"``, so that names need quotes; and a plan of another profile."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.setenv("PYTHONPATH", str(Path(hp.__file__).parents[1]))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    data = tmp_path / 'my "data"'
    data.mkdir()
    dump(PROFILE, data / "profile.json")
    dump(PLAN, data / "plan.json")
    other = chain_profile(5)
    dump(plan_of(other, chain_decision(other, cuts=(2,), micro_batches=(2, 2))), tmp_path / "stranger.json")
    return data


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["notebook", *map(str, arguments)])


def code(path: str | Path) -> list[str]:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


def test_the_cells_run_on_ones_own_profile_and_write_no_other_name_than_those_of_the_api(folder: Path) -> None:
    from matplotlib import pyplot

    (Path.cwd() / "out").mkdir()
    result = call(folder / "profile.json", folder / "plan.json", "--no-run", "-o", "out/mine.ipynb")
    assert result.exit_code == 0, result.stderr
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


def test_the_same_notebook_is_written_each_time_and_plans_are_shown_only_if_given(folder: Path) -> None:
    assert call(folder / "profile.json", "--no-run").exit_code == 0
    first = Path("strategies.ipynb").read_bytes()
    assert call(folder / "profile.json", "--no-run").exit_code == 0
    assert Path("strategies.ipynb").read_bytes() == first
    assert b"Predicted against measured" not in first


def test_what_cannot_be_written_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = folder / "profile.json"
    wrong = call(profile, "-o", "mine.html")
    assert (wrong.exit_code, "-o mine.ipynb" in wrong.stderr) == (2, True)
    assert call(profile, "stranger.json", "--no-run").exit_code == 3
    assert call("missing.json", "--no-run").exit_code == 3
    assert not Path("strategies.ipynb").exists()


@pytest.mark.parametrize("missing", ["nbclient", "nbformat"])
def test_a_package_that_is_missing_is_named_with_the_command_that_installs_it(
    folder: Path, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib

    real = importlib.import_module

    def without(name: str, package: str | None = None) -> Any:
        if name.partition(".")[0] == missing:
            raise ImportError(f"No module named {missing!r}")
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", without)
    result = call(folder / "profile.json")
    assert result.exit_code == 2
    assert "pip install 'halopipe[notebooks]'" in result.stderr
    assert ("--no-run" in result.stderr) == (missing == "nbclient")


@pytest.mark.exhaustive("a kernel: ten seconds")
def test_the_verb_runs_what_it_writes_and_keeps_what_came_before_a_cell_that_failed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from halopipe.extras.figures import notebook

    monkeypatch.delenv("MPLBACKEND")  # a kernel's own shows pictures
    result = call(folder / "profile.json", folder / "plan.json")
    assert result.exit_code == 0, result.stderr
    text = Path("strategies.ipynb").read_text("utf-8")
    found = json.loads(text)
    assert all(cell["execution_count"] for cell in found["cells"] if cell["cell_type"] == "code")
    assert "image/png" in text
    assert "<svg" in text
    monkeypatch.setattr(notebook, "CELLS", ("print(6 * 7)", "1 / 0"))
    result = call(folder / "profile.json", "-o", "failing.ipynb")
    assert result.exit_code == 5
    assert "ZeroDivisionError: division by zero" in result.stderr
    assert '"42\\n"' in Path("failing.ipynb").read_text("utf-8")
