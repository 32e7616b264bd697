"""Every notebook runs from top to bottom, in a copy of its folder; what it reads is as old as its stamp says."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType

import nbformat
import pytest

from halopipe.extras.figures import notebook as notebooks
from planner.ir.errors import WorkerError

HOME = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((HOME / "notebooks").glob("*.ipynb"))
_PICTURES = {"image/png", "image/svg+xml"}
NAMES = ("first_plan", "compare_strategies", "certified_planning", "schedules", "spatial_decomposition", "point_clouds")


def script(name: str) -> ModuleType:
    """A script of ``notebooks``, which are in no package."""
    spec = importlib.util.spec_from_file_location(name, HOME / "notebooks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the folder, from which a kernel finds this source tree."""
    monkeypatch.setenv("PYTHONPATH", str(HOME))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    return Path(shutil.copytree(HOME / "notebooks", tmp_path / "notebooks"))


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """``notebooks/collected.py``; the search path as it was afterwards."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    return script("collected")


QUICK = ("05",)  # imports of runtime and planner beside pictures; the others plan, measure or train
LONG = pytest.mark.exhaustive("it measures, trains or plans many cases: up to a minute each")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name", [path.name if path.name[:2] in QUICK else pytest.param(path.name, marks=LONG) for path in NOTEBOOKS]
)
def test_a_notebook_runs_from_top_to_bottom(name: str, copy: Path) -> None:
    notebook = script("execute").execute(copy / name)
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_committed_with_its_outputs_and_no_machine_of_ours(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    shown = [output.data if "data" in output else {"text/plain": output.text} for output in outputs]
    pictures = re.compile(r"<Figure|<Axes|display\.(SVG|Image) object|<matplotlib")
    assert not [data for data in shown if pictures.search(data.get("text/plain", "")) and not _PICTURES & data.keys()]
    text = path.read_text("utf-8")
    assert not [word for word in ("/root/", "/home/", "/tmp/") if word in text]
    assert "pip install" in notebook.cells[0].source  # what it needs


def test_outputs_are_of_the_data_that_is_there_now(collected: ModuleType) -> None:
    """Else tables and pictures show what was measured or predicted before."""
    told = {
        path.stem: nbformat.read(path, as_version=4).metadata.get("halopipe", {}).get("data", "") for path in NOTEBOOKS
    }
    old = [name for name, data in told.items() if data != collected.read_by(name)]
    assert old == [], f"python notebooks/execute.py {' '.join(f'notebooks/{name}.ipynb' for name in old)}"
    assert collected.READ.keys() <= told.keys()


def test_the_notebooks_are_those_that_documents_name() -> None:
    expected = [
        f"{number:02}_{name}.ipynb"
        for number, name in enumerate((*NAMES, "model_accuracy", "plan_a_gpu_cluster", "more_ways_to_split"), 1)
    ]
    assert [path.name for path in NOTEBOOKS] == expected


def test_the_comparison_of_strategies_is_what_the_verb_writes() -> None:
    folder = HOME / "notebooks"
    committed = nbformat.read(folder / "02_compare_strategies.ipynb", as_version=4)
    plans = sorted((folder / "data").glob("vgg16-*.plan.json"))
    written = notebooks.strategies(folder / "data" / "vgg16.profile.json", plans, folder)
    assert [(cell.cell_type, cell.source) for cell in committed.cells] == [
        (cell.cell_type, cell.source) for cell in written.cells
    ], "halopipe notebook data/vgg16.profile.json data/vgg16-*.plan.json -o 02_compare_strategies.ipynb"


@pytest.mark.parametrize("folder", json.loads((HOME / "notebooks" / "data" / "collected.json").read_text("utf-8")))
def test_a_stamp_says_how_old_the_data_is(folder: str, collected: ModuleType) -> None:
    assert collected.untrue(folder) == []


def test_data_that_the_code_has_left_behind_is_named_with_the_command_that_collects_it(
    collected: ModuleType, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collected, "DATA", copy / "data")
    path = copy / "data" / "schedules" / "gpipe.plan.json"
    plan = json.loads(path.read_text("utf-8"))
    plan["prediction"]["step_s"] *= 1.01
    path.write_text(json.dumps(plan), "utf-8")
    changed, price, remedy = collected.untrue("schedules")
    assert "gpipe.plan.json: changed since it was stamped" in changed
    assert "gpipe.plan.json: ('0.36" in price
    assert "python notebooks/collect_schedules.py" in remedy
    collected.price("schedules")
    assert collected.untrue("schedules") == []


def test_a_cell_that_fails_is_an_error(tmp_path: Path, copy: Path) -> None:
    path = tmp_path / "failing.ipynb"
    cells = [nbformat.v4.new_code_cell("raise ZeroDivisionError('oops')")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    with pytest.raises(WorkerError, match="oops"):
        script("execute").execute(path)
