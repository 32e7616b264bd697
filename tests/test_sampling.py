from __future__ import annotations

from pathlib import Path

import pytest

from tests import sampling

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
    sampling.COSTS.write_text('{"c.py": {"not_run": 0.7}, "a.py": {"dear": 8.0}}')
    sampling.write_costs({"a.py::dear": [0.2, 0.4], "a.py::single": [9.0], "b.py::cheap": [0.01] * 20})
    assert sampling.written_costs() == {"a.py::dear": 0.3, "c.py::not_run": 0.7}
