from __future__ import annotations

import ast
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.mutation import __main__ as mutation
from benchmarks.mutation.mutants import draw, mutants_of
from benchmarks.mutation.selection import Record, files_for, files_of_tests, record_tests
from benchmarks.mutation.verdicts import ALIVE, ALL, LIVES, SHORT, UNDECIDED, UNTESTED, Tree, Verdict

HOME = Path(__file__).parents[3]
SUMS = """
def total(values):
    return sum(values)


def larger(a, b):
    return a if a > b else b


def root(value):
    if value < 0:
        raise ValueError(value)
    return value**0.5


def forgotten(value):
    return -value
"""
TESTS = """
import subprocess
import sys

import pytest

from planner import sums


def test_a_total():
    assert sums.total([1, 2]) == 3


@pytest.mark.exhaustive("as an example")
@pytest.mark.parametrize("b", range(8))
def test_the_larger(b):
    assert sums.larger(3, b) == max(3, b)


def test_a_root_in_another_process():
    subprocess.run([sys.executable, "-c", "from planner.sums import root; assert root(4.0) == 2.0"], check=True)
"""

CONFTEST = """
def pytest_addoption(parser):
    parser.addoption("--all-cases", action="store_true")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--all-cases"):
        items[:] = [item for item in items if item.get_closest_marker("exhaustive") is None]
"""


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project of one module, with tests that leave some of it alone, and need no plugin but that of time limits."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_PLUGINS", "pytest_timeout")
    for folder in ("planner", "tests/planner"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "planner" / "__init__.py").touch()
    (tmp_path / "planner" / "sums.py").write_text(SUMS)
    (tmp_path / "tests" / "planner" / "test_sums.py").write_text(TESTS)
    (tmp_path / "tests" / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\nmarkers = ["exhaustive"]\n')
    return tmp_path


def changes(source: str) -> Iterator[str]:
    for mutant in mutants_of("planner/a.py", source):
        yield mutant.applied(source.encode()).decode().strip().removeprefix("def f():\n    ").replace("\n    ", "; ")


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("x = a < b", {"x = (a <= b)", "x = (a >= b)"}),
        ("x = a is b", {"x = (a is not b)"}),
        ("x = a + b", {"x = (a - b)"}),
        ("x = 3", {"x = (4)", "x = (2)"}),
        ("x = a and b", {"x = (a or b)"}),
        ("x = not a", {"x = (a)"}),
        ("x = min(a, b)", {"x = max(a, b)"}),
        ("x = torch.amax(a)", {"x = torch.amin(a)"}),
        ("x = a[b:]", {"x = a[(b + 1):]"}),
        ("x = call(a, b=c)", {"x = (call(a))"}),
        ("x = a.get(b, c)", {"x = (a.get(b))"}),
        ("x += a", {"x -= a", "pass"}),
        ("x.y = a", {"pass"}),
        ("x.append(a)", {"pass"}),
        ("return a", {"return None"}),
        ("if a: pass", {"if (not a): pass"}),
        ("x = [a for a in b if c]", {"x = [a for a in b if (not c)]"}),
        ("raise Infeasible(a + 1)", {"pass"}),
        ("é = a < b", {"é = (a <= b)", "é = (a >= b)"}),  # places count bytes
    ],
)
def test_a_statement_is_changed(statement: str, expected: set[str]) -> None:
    assert set(changes(f"def f():\n    {statement}\n")) == expected


@pytest.mark.parametrize(
    "source",
    [
        '"""Words."""',
        '__all__ = ["a", *map(str, range(3))]',
        "def f(a: Literal[1]) -> tuple[int, 3]: ...",
        "@dataclass(frozen=True)\nclass A(B, slots=True):\n    a: int",
        "if TYPE_CHECKING:\n    a = 1",
        "_LOGGER.warning('%d', a + 1)",
        "a = f'{b + 1} seconds'",
        "assert a < b",
        "Steps = tuple[str | int, ...]",
    ],
)
def test_what_no_test_can_see_is_left_alone(source: str) -> None:
    assert not list(changes(source))


def test_every_mutant_of_a_real_module_can_be_compiled_and_knows_its_function() -> None:
    source = (HOME / "planner" / "ir" / "box.py").read_text("utf-8")
    mutants = mutants_of("planner/ir/box.py", source)
    assert {"planner/ir/box.py::Interval.__and__", "planner/ir/box.py::volume"} <= {
        mutant.function for mutant in mutants
    }
    for mutant in mutants:
        assert ast.dump(ast.parse(mutant.applied(source.encode()))) != ast.dump(ast.parse(source))


def test_a_longer_draw_goes_on_where_a_shorter_one_ended(tree: Path) -> None:
    few, more = (draw(tree, ("planner",), count, seed=3) for count in (3, 5))
    assert more[:3] == few
    assert len({mutant.line for mutant in more}) == 5
    assert draw(tree, ("planner",), 3, seed=4) != few


@pytest.mark.parametrize(("every_case", "outcomes"), [(False, [SHORT, LIVES, LIVES]), (True, [ALL, ALL, ALIVE])])
def test_mutants_are_killed_by_a_few_cases_by_all_of_them_or_not_at_all(
    tree: Path, every_case: bool, outcomes: list[str]
) -> None:
    mutants = mutants_of("planner/sums.py", SUMS)
    judged = {}
    for line, what in ((3, "returned value"), (7, "condition"), (17, "returned value")):
        mutant = next(each for each in mutants if (each.line, each.what) == (line, what))
        judged[line] = Tree(tree).judge(mutant, ["tests/planner/test_sums.py"], every_case=every_case)
    assert [verdict.outcome for verdict in judged.values()] == outcomes
    assert judged[3].by == "tests/planner/test_sums.py::test_a_total"
    assert judged[7].by.startswith("tests/planner/test_sums.py::test_the_larger[" if every_case else "")
    assert (tree / "planner" / "sums.py").read_text() == SUMS


def test_a_file_of_tests_that_is_not_there_kills_nobody(tree: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"test_nothing\.py"):
        Tree(tree).failing(["tests/planner/test_nothing.py"])


def test_a_record_knows_what_tests_enter_in_other_processes_too(tree: Path) -> None:
    record = record_tests(tree, ["tests"])
    assert record.functions == {
        "tests/planner/test_sums.py": [f"planner/sums.py::{name}" for name in ("root", "total")]
    }
    assert record.seconds["tests/planner/test_sums.py"] > 0


def test_the_tests_of_a_mutant_are_the_nearest_ones_and_those_that_enter_its_function() -> None:
    mutant = mutants_of("planner/check/memory.py", "def f():\n    return 1\n")[0]
    files = dict.fromkeys(
        ("tests/planner/check/test_memory.py", "tests/planner/check/test_other.py", "tests/planner/check/test_idle.py",
         "tests/planner/test_slow.py", "tests/planner/test_quick.py", "tests/runtime/test_engine.py"), ""
    )  # fmt: skip
    files |= {"tests/halopipe/test_imports.py": "from planner.check.memory import f"}
    entered = {name: [mutant.function] for name in ("tests/planner/test_slow.py", "tests/planner/test_quick.py")}
    seconds = {"tests/planner/test_slow.py": 9.0, "tests/planner/test_quick.py": 1.0}
    record = Record(seconds, {**entered, "tests/planner/check/test_idle.py": []})
    assert files_for(mutant, files, record) == [
        "tests/planner/check/test_memory.py",
        "tests/halopipe/test_imports.py",
        "tests/planner/check/test_other.py",
        "tests/planner/test_quick.py",
        "tests/planner/test_slow.py",
    ]


def test_of_equal_files_those_that_name_the_function_come_first_whichever_package_hands_it_on() -> None:
    mutant = mutants_of("planner/check/memory.py", "class Account:\n    def most(self):\n        return 1\n")[0]
    texts = {
        "tests/planner/check/test_a.py": "from planner.check import other",
        "tests/planner/check/test_b.py": "from planner.check import other\n# beside Account",
        "tests/halopipe/test_c.py": "from planner.check import (\n    Account,\n    other,\n)",
        "tests/halopipe/test_d.py": "from planner.check import other",
    }
    assert files_for(mutant, texts, Record()) == [
        "tests/halopipe/test_c.py",
        "tests/planner/check/test_b.py",
        "tests/planner/check/test_a.py",
    ]


def test_the_tree_of_this_project_has_tests_for_what_is_drawn() -> None:
    files = files_of_tests(HOME)
    assert all(files_for(mutant, files, Record()) for mutant in mutants_of("planner/ir/box.py", "x = 1"))


def test_the_score_counts_what_every_case_kills_and_no_more() -> None:
    outcomes = [SHORT] * 9 + [ALL, ALIVE, UNTESTED, UNDECIDED]
    rows = {row.name: row for row in mutation.rows([Verdict("", "planner", each, "", ()) for each in outcomes])}
    score = rows["killed by the short suite, of those that every case kills"]
    assert (score.value, score.holds) == (90.0, False)
    assert rows["alive with every case, equal in meaning included"].value == 2


def test_a_run_goes_on_from_its_verdicts(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = mutation.Options(2, verdicts=tree / "verdicts.json", record=tree / "none.json", packages=("planner",))
    rows = mutation.measure(False, options, tree)
    assert rows[0].value == 2
    assert capsys.readouterr().err.count("planner/sums.py") == 3  # one with every case
    assert mutation.measure(False, options, tree) == rows
    assert not capsys.readouterr().err


def test_what_lives_is_tried_with_further_files_and_its_verdict_tells_of_all(
    tree: Path,
) -> None:
    tests = tree / "tests" / "planner"
    (tests / "test_sums.py").rename(tests / "test_totals.py")
    (tests / "test_sums.py").write_text("def test_nothing():\n    pass\n")  # named after the module, hence the first
    options = mutation.Options(
        4, files=1, short=True, verdicts=tree / "verdicts.json", record=tree / "none.json", packages=("planner",)
    )
    mutation.measure(False, options, tree)
    assert {entry["outcome"] for entry in json.loads((tree / "verdicts.json").read_text())} == {LIVES}
    rows = mutation.measure(False, dataclasses.replace(options, files=2), tree)
    verdicts = json.loads((tree / "verdicts.json").read_text())
    assert {tuple(entry["files"]) for entry in verdicts} == {
        ("tests/planner/test_sums.py", "tests/planner/test_totals.py")
    }
    assert sum(entry["outcome"] == SHORT for entry in verdicts) == rows[1].value > 0


def test_a_run_without_time_left_says_how_many_it_tried(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([0.0, 59.0, 61.0])
    monkeypatch.setattr(mutation, "time", SimpleNamespace(monotonic=lambda: next(seconds, 61.0)))
    options = mutation.Options(
        3, budget_s=60.0, verdicts=tree / "verdicts.json", record=tree / "none.json", packages=("planner",)
    )
    assert mutation.measure(False, options, tree)[0].value == 1


def test_files_of_verdicts_give_a_column_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / f"seed_{seed}.json" for seed in range(2)]
    for file, outcome in zip(files, (SHORT, LIVES), strict=True):
        file.write_text(json.dumps([dataclasses.asdict(Verdict("a", "planner", outcome, "", ()))]))
    assert mutation.main(["--of", *map(str, files), "--json"]) == 0
    rows = {row["name"]: row["value"] for row in json.loads(capsys.readouterr().out)}
    assert rows["killed by the short suite: seed 0"] == rows["mutants tried: seed 1"] == 1
    assert rows["killed by the short suite: seed 1"] == 0
    assert rows["alive in the short suite, not tried with every case: seed 1"] == 1
