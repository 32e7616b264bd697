from __future__ import annotations

import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import sampling
from tests.conftest import few_cases

HOME = Path(__file__).parents[1]


def items(name: str, number: int, **marks: int) -> list[Any]:
    """Cases of a function with such marks."""
    marked = {mark: SimpleNamespace(args=(value,)) for mark, value in marks.items()}
    return [SimpleNamespace(nodeid=f"a.py::{name}[{case}]", get_closest_marker=marked.get) for case in range(number)]


def names(chosen: list[Any]) -> list[str]:
    return [item.nodeid for item in chosen]


def test_six_cases_of_every_function_run_in_their_order() -> None:
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
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-n", "2", "-rA", "--rootdir", str(tmp_path)]
    run = partial(subprocess.run, cwd=HOME, capture_output=True, text=True, check=True)
    first, second = (run([*command, *more, str(tmp_path)]).stdout for more in ([], ["--seed", sampling.NO_COMMIT]))
    assert f"--seed {sampling.NO_COMMIT}" in first
    assert "6 passed" in first
    passed = [sorted(re.findall(r"PASSED .+", output)) for output in (first, second)]
    assert passed[0] == passed[1]
    left_out = next(case for case in range(50) if f"[{case}]" not in first)
    assert "1 passed" in run([*command, f"{tmp_path}/test_table.py::test_it[{left_out}]"]).stdout


def test_files_that_take_long_are_written_the_longest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "LONG_FILES", tmp_path / "long_files.json")
    sampling.LONG_FILES.write_text('{"c.py": 7.0, "b.py": 5.0}')
    sampling.write_long_files({"a.py::one": [4.0, 2.5], "a.py::two": [2.0], "b.py::quick_now": [0.1]})
    assert list(sampling.long_files().items()) == [("a.py", 8.5), ("c.py", 7.0)]


def test_files_that_take_long_are_there() -> None:
    assert [file for file in sampling.long_files() if not (HOME / file).exists()] == []
