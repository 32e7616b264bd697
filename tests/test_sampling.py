from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import sampling
from tests.conftest import few_cases

HOME = Path(__file__).parents[1]


@pytest.mark.parametrize(("seconds", "cases"), [(0.0, 8), (0.03, 8), (0.07, 4), (0.2, 1), (30.0, 1)])
def test_a_function_runs_as_many_cases_as_its_budget_pays_for(seconds: float, cases: int) -> None:
    assert sampling.affordable(seconds) == cases


def test_what_is_written_of_costs_is_of_tests_that_are_there() -> None:
    for function, seconds in sampling.written_costs().items():
        file, _, name = function.partition("::")
        assert f"def {name.rpartition('::')[2]}(" in (HOME / file).read_text("utf-8"), function
        assert sampling.affordable(seconds) < sampling.MOST_CASES, function


def test_costs_are_written_where_fewer_cases_can_be_paid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "COSTS", tmp_path / "costs.json")
    sampling.COSTS.write_text('{"c.py": {"not_run": 0.7}, "a.py": {"dear": 8.0, "one_is_paid": 0.5, "quick_now": 0.9}}')
    seconds = {"a.py::dear": [0.2, 0.4], "a.py::single": [9.0], "b.py::cheap": [0.01] * 20}
    sampling.write_costs({**seconds, "a.py::one_is_paid": [0.6], "a.py::quick_now": [0.02]})
    assert sampling.written_costs() == {"a.py::dear": 0.3, "a.py::one_is_paid": 0.6, "c.py::not_run": 0.7}


def test_files_that_take_long_are_written_the_longest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "LONG_FILES", tmp_path / "long_files.json")
    sampling.LONG_FILES.write_text('{"c.py": 7.0, "b.py": 5.0}')
    sampling.write_long_files({"a.py::one": [4.0, 2.5], "a.py::two": [2.0], "b.py::quick_now": [0.1]})
    assert list(sampling.long_files().items()) == [("a.py", 8.5), ("c.py", 7.0)]


def test_files_that_take_long_are_there() -> None:
    assert [file for file in sampling.long_files() if not (HOME / file).exists()] == []


@pytest.mark.parametrize(("is_marked", "count"), [(True, 30), (False, 8)])
def test_of_a_function_whose_cases_are_checks_of_their_own_all_run(is_marked: bool, count: int) -> None:
    marks = {"every_case"} if is_marked else set()
    items: Any = [
        SimpleNamespace(nodeid=f"a.py::refused[{case}]", get_closest_marker=marks.__contains__) for case in range(30)
    ]
    assert len(few_cases(items)) == count


def test_what_a_table_of_checks_costs_is_little() -> None:
    marked = re.compile(r"@pytest\.mark\.every_case\n(?:.+\n)*?def (\w+)\(")
    functions = {
        f"{path.relative_to(HOME).as_posix()}::{name}"
        for path in (HOME / "tests").rglob("test_*.py")
        for name in marked.findall(path.read_text("utf-8"))
    }
    assert functions
    assert not functions & sampling.written_costs().keys(), "those cost more than make test has for them"
