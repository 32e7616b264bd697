from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import sampling
from tests.conftest import few_cases

HOME = Path(__file__).parents[1]


@pytest.fixture
def costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file of costs that knows nothing yet."""
    monkeypatch.setattr(sampling, "COSTS", tmp_path / "costs.json")
    sampling.COSTS.write_text("{}")
    forget()
    yield sampling.COSTS
    forget()


def forget() -> None:
    sampling.costs.cache_clear()
    sampling.budget_s.cache_clear()


def items(name: str, number: int, at_least: int = 1, **marks: int) -> list[Any]:
    """Cases of a function with such marks."""
    marked = {mark: SimpleNamespace(args=(value,), kwargs={"at_least": at_least}) for mark, value in marks.items()}
    return [SimpleNamespace(nodeid=f"a.py::{name}[{case}]", get_closest_marker=marked.get) for case in range(number)]


def names(chosen: list[Any]) -> list[str]:
    return [item.nodeid for item in chosen]


def test_six_cases_of_every_cheap_function_run_in_their_order() -> None:
    table = [*items("long", 30), *items("short", 4), SimpleNamespace(nodeid="a.py::alone", get_closest_marker={}.get)]
    chosen = few_cases(table, "a seed")
    assert len(chosen) == 6 + 4 + 1
    assert chosen == [item for item in table if item in chosen]


def test_the_same_seed_chooses_the_same_cases_and_others_come_to_all() -> None:
    table = items("long", 30)
    assert (
        names(few_cases(table, "one")) == names(few_cases(items("long", 30), "one")) != names(few_cases(table, "two"))
    )
    assert {name for seed in range(60) for name in names(few_cases(table, str(seed)))} == set(names(table))


def test_a_case_more_changes_one_at_most() -> None:
    assert len({*names(few_cases(items("long", 31), "one"))} - {*names(few_cases(items("long", 30), "one"))}) <= 1


@pytest.mark.parametrize(("marks", "count"), [({"every_case": 1}, 90), ({"cases": 60}, 60), ({}, 6)])
def test_a_mark_says_how_many_cases_run(marks: dict[str, int], count: int) -> None:
    assert len(few_cases(items("table", 90, **marks), "a seed")) == count


def test_the_seed_is_the_commit_or_one_that_never_changes_outside_git(tmp_path: Path) -> None:
    assert sampling.commit(tmp_path) == sampling.NO_COMMIT
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=b"]
    commit = [*git, "commit", "-q", "--allow-empty", "-m", "an empty one"]
    seeds = []
    for command in ([*git, "init", "-q"], commit, commit):
        subprocess.run(command, check=True)
        seeds.append(sampling.commit(tmp_path))
    assert seeds[0] == sampling.NO_COMMIT
    assert len({*seeds}) == 3


def test_workers_choose_alike_and_the_seed_is_printed(tmp_path: Path) -> None:
    (tmp_path / "test_table.py").write_text(
        "import pytest\n@pytest.mark.parametrize('case', range(50))\ndef test_it(case):\n    pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-rA", "--rootdir", str(tmp_path)]
    run = partial(subprocess.run, cwd=HOME, capture_output=True, text=True, check=True)
    first, second = (
        run([*command, *more, str(tmp_path)]).stdout
        for more in (["-n", "2"], ["-n", "0", "--seed", sampling.NO_COMMIT])
    )
    assert f"--seed {sampling.NO_COMMIT}" in first
    assert "6 passed" in first
    passed = [sorted(re.findall(r"PASSED .+", output)) for output in (first, second)]
    assert passed[0] == passed[1]
    left_out = next(case for case in range(50) if f"[{case}]" not in first)
    assert "1 passed" in run([*command, "-n", "0", f"{tmp_path}/test_table.py::test_it[{left_out}]"]).stdout


def test_a_dear_function_runs_as_many_cases_as_its_budget_buys(costs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "TOTAL_S", 19.0)
    sampling.write_costs(
        {
            "a.py::dear": sampling.Cost(7.0, 1, 6),
            "a.py::networks": sampling.Cost(2.0, 2, 4),
            "b.py::cheap": sampling.Cost(0.1, 1, 6),
        }
    )
    # One dear case, four networks and six cheap cases take 15.6 s; a second dear case would make them 22.6.
    assert len(few_cases(items("dear", 30), "a seed")) == 1
    assert len(few_cases(items("networks", 30, at_least=2, cases=4), "a seed")) == 4
    assert len(few_cases(items("dear", 30, every_case=1), "a seed")) == 30
    monkeypatch.setattr(sampling, "TOTAL_S", 5.0)
    sampling.budget_s.cache_clear()
    assert len(few_cases(items("networks", 30, at_least=2, cases=4), "a seed")) == 2
    assert len(few_cases(items("dear", 30), "a seed")) == 1


@pytest.mark.parametrize("total_s", [0.0, 12.0, 20.0, 31.5, 50.0, 1000.0])
def test_the_budget_is_the_largest_that_the_whole_suite_can_pay(total_s: float) -> None:
    tables = [sampling.Cost(0.3 * number, 1 + number % 3, 6) for number in range(1, 9)]
    budget_s = sampling.largest_budget_s(tables, total_s)

    def total(budget_s: float) -> float:
        return sum(table.total_s(budget_s) for table in tables)

    assert total(budget_s) <= max(total_s, total(0.0))
    steps = sorted({table.case_s * number for table in tables for number in range(1, 7)})
    assert all(total(step) > total_s or total(step) == total(budget_s) for step in steps if step > budget_s)


def test_costs_are_measured_by_the_median_and_kept_where_they_matter(costs: Path) -> None:
    sampling.write_costs({"b.py::old": sampling.Cost(9.0, 1, 6), "a.py::gone": sampling.Cost(9.0, 1, 6)})
    sampling.write_costs(
        {
            "a.py::table": sampling.measured_cost([8.0, 2.0, 1.0], 1, 6),
            "a.py::quick": sampling.measured_cost([0.01], 1, 1),
        }
    )
    assert {name: cost.case_s for name, cost in sampling.costs().items()} == {"a.py::table": 2.0, "b.py::old": 9.0}
    assert sampling.file_costs() == {"a.py": 12.0, "b.py": 54.0}


def test_files_of_costs_are_there() -> None:
    assert [file for file in json.loads(sampling.COSTS.read_text()) if not (HOME / file).exists()] == []


def test_the_suite_is_within_its_total() -> None:
    """If not, functions that run a fixed number of cases grew too dear: make them cheaper, or mark them exhaustive."""
    assert sampling.budget_s() > 0.0
