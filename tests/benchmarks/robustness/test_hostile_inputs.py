from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.robustness.hostile_files import Hostile
from benchmarks.robustness.hostile_inputs import rows, verdict

ROWS = rows()


@pytest.mark.every_case
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name.encode("ascii", "backslashreplace").decode())
def test_hostile_input_is_refused_with_its_place(row: Hostile, tmp_path: Path) -> None:
    assert verdict(row, tmp_path) == ""


def test_there_are_300_classes_of_different_names() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS) >= 300


def test_a_good_input_is_no_good_row(tmp_path: Path) -> None:
    assert verdict(Hostile("a good plan", ("check", "plan.json"), "is good"), tmp_path)
