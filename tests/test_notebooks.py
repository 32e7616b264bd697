"""Every notebook runs from top to bottom, in a copy of its folder."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType

import nbformat
import pytest

HOME = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((HOME / "notebooks").glob("*.ipynb"))


def executor() -> ModuleType:
    """``notebooks/execute.py``, which is a script and in no package."""
    spec = importlib.util.spec_from_file_location("execute_notebooks", HOME / "notebooks" / "execute.py")
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


QUICK = ("02", "04", "05")
LONG = pytest.mark.exhaustive("it measures, trains or plans many cases: a minute each")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name", [path.name if path.name[:2] in QUICK else pytest.param(path.name, marks=LONG) for path in NOTEBOOKS]
)
def test_a_notebook_runs_from_top_to_bottom(name: str, copy: Path) -> None:
    notebook = executor().execute(copy / name)
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_committed_with_its_outputs_and_no_machine_of_ours(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not [output for cell in cells for output in cell.outputs if output.output_type == "error"]
    text = path.read_text("utf-8")
    assert not [word for word in ("/root/", "/home/", "/tmp/") if word in text]


def test_there_are_notebooks() -> None:
    assert [path.name for path in NOTEBOOKS] == [
        "01_first_plan.ipynb",
        "02_compare_strategies.ipynb",
        "03_certified_planning.ipynb",
        "04_schedules.ipynb",
        "05_spatial_decomposition.ipynb",
        "06_point_clouds.ipynb",
        "07_model_accuracy.ipynb",
    ]


def test_a_cell_that_fails_is_an_error(tmp_path: Path, copy: Path) -> None:
    from nbclient.exceptions import CellExecutionError

    path = tmp_path / "failing.ipynb"
    cells = [nbformat.v4.new_code_cell("raise ZeroDivisionError('oops')")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    with pytest.raises(CellExecutionError, match="oops"):
        executor().execute(path)
