"""What ``draw``, ``report`` and ``notebook`` make of plans that do not fit, and of names that Python has to read."""

from __future__ import annotations

import ast
import json
import shutil
from pathlib import Path

import pytest

from tests.halopipe.cli.test_files_at_odds import require_refused
from tests.halopipe.commands import call


@pytest.mark.parametrize(
    "words",
    [
        "draw renamed.json --what memory -o m.svg",
        "report renamed.json",
        "notebook profile.json renamed.json --no-run",
    ],
)
@pytest.mark.usefixtures("folder")
def test_a_plan_with_a_renamed_layer_is_refused_with_both_names(words: str) -> None:
    require_refused(words)


def test_a_notebook_names_its_profile_as_python_reads_it(folder: Path) -> None:
    place = folder / "😀 é"
    place.mkdir()
    shutil.copy("profile.json", place)
    assert call("notebook", "😀 é/profile.json", "--no-run", "-o", "n.ipynb").exit_code == 0
    cells = json.loads(Path("n.ipynb").read_text("utf-8"))["cells"]
    (line,) = [line for cell in cells for line in cell["source"] if "hp.load(" in line]
    (argument,) = ast.parse(line.strip()).body[0].value.args  # type: ignore[attr-defined]  # of an assignment
    assert ast.literal_eval(argument) == "😀 é/profile.json"
