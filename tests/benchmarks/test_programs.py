"""Programs that documents name: each starts, refuses what it does not take, and tells its rows as others do."""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
import io
import json
import os
import re
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from benchmarks.mutation import mirroring
from benchmarks.report import Row
from benchmarks.turns import WARM_UP, by_turns, medians, turns
from benchmarks.without import closure, extras, measure
from tests.forks import forked

HOME = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted({*HOME.glob("*.md"), *(HOME / "docs").rglob("*.md"), *(HOME / "benchmarks").rglob("*.md")})
NAMED = re.compile(r"python3? -m ((?:benchmarks|planner|halopipe|profiler|runtime|notebooks)[\w.]*)(?=[\s`.;,:)]|$)")
SOURCES = [
    path
    for folder in ("benchmarks", "cuda_ops", "docs", "halopipe", "notebooks", "planner", "profiler", "runtime", "tests")
    for path in sorted((HOME / folder).rglob("*.py"))
]
QUICK_S = 60.0
BUSY = 5
"""What ``--quick`` means, on two cores that do nothing else; machines that run tests are shared, and slower."""

NEEDS = {
    "benchmarks.accuracy": "network namespaces, root",
    "benchmarks.faults": "network namespaces, root",
    "benchmarks.networks": "networks of other packages, which tests/networks run",
    "benchmarks.mutation": "cosmic-ray",
    "benchmarks.without": "trees of their own, as a test below makes them",
}
"""Programs whose quick form is not run here, and why."""


def named_in(text: str) -> list[str]:
    """Modules that the text runs as programs."""
    return [name.rstrip(".") for name in NAMED.findall(text)]


PROGRAMS = sorted(
    {name for path in DOCUMENTS for name in named_in(path.read_text("utf-8"))} - {"benchmarks.NAME", "benchmarks"}
)
BENCHMARKS = [name for name in PROGRAMS if name.startswith("benchmarks.")]


def started(names: list[str], *arguments: str) -> dict[str, str]:
    """What each program, called so, wrote, with its exit code in front; in this process, as ``python -m`` would."""
    found = {}
    for name in names:
        output = io.StringIO()
        code = 0
        sys.argv = [name, *arguments]
        silent = contextlib.redirect_stdout(output), contextlib.redirect_stderr(io.StringIO())
        with silent[0], silent[1], warnings.catch_warnings():
            warnings.simplefilter("ignore")  # another program may have imported it
            try:
                runpy.run_module(name, run_name="__main__", alter_sys=True)
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else int(end.code is not None)
        found[name] = f"{code}: {output.getvalue()}"
    return found


@functools.cache
def helps() -> dict[str, str]:
    (found,) = forked(1, lambda _: started(PROGRAMS, "--help"))
    assert isinstance(found, dict)
    return found


def test_every_program_that_a_document_names_starts_and_says_what_it_takes() -> None:
    assert len(PROGRAMS) >= 30
    assert {name: text for name, text in helps().items() if not text.startswith("0: usage")} == {}


def test_every_benchmark_refuses_an_option_that_there_is_not() -> None:
    (found,) = forked(1, lambda _: started(BENCHMARKS, "--no-such-option"))
    assert {name: text for name, text in found.items() if text != "2: "} == {}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("known_answers", ["--peer", "sparsepipe"]),
        ("scale", ["--only", "no such case"]),
        ("sparse_gpu", ["--tune"]),
        ("spatial", ["--only", "no such case"]),
    ],
)
def test_rows_are_told_as_json_and_nothing_else_is(name: str, options: list[str]) -> None:
    (found,) = forked(1, lambda _: started([f"benchmarks.{name}"], "--quick", "--json", *options))
    code, _, text = found[f"benchmarks.{name}"].partition(": ")
    rows = [Row(**row) for row in json.loads(text)]
    assert (code, len({row.name for row in rows})) == ("0", len(rows))
    assert all(isinstance(row.value, float | int) and row.holds in (True, False) for row in rows)
    assert [row.name for row in rows if not (row.goal or row.holds)] == []
    assert bool(rows) == (options[-1:] not in (["no such case"], ["--tune"]))


@pytest.mark.exhaustive("all benchmarks in their quick form: up to a minute each, on a machine that does nothing else")
@pytest.mark.timeout(BUSY * QUICK_S + 60)
@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_quick_form_of_a_benchmark_ends_in_its_time(name: str, tmp_path: Path) -> None:
    if "--quick" not in helps()[name]:
        pytest.skip("it has no quick form")
    if name in NEEDS:
        pytest.skip(NEEDS[name])
    environment = {**os.environ, "PYTHONPATH": str(HOME), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", name, "--quick"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=BUSY * QUICK_S, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_nothing_follows_where_a_program_begins() -> None:
    """What stands behind it is not there yet when it runs, though it is for who imports the module."""
    program = 'if __name__ == "__main__":\n    main()\n'
    later = "def main():\n    pass\n"
    assert begins_early(program + later)
    assert not begins_early(later + program)
    assert [str(path.relative_to(HOME)) for path in SOURCES if begins_early(path.read_text("utf-8"))] == []


def begins_early(source: str) -> bool:
    *before, _ = ast.parse(source).body or [ast.Pass()]
    return any(isinstance(node, ast.If) and "__name__" in ast.unparse(node.test) for node in before)


def test_each_side_has_a_turn_in_each_round_in_changing_order() -> None:
    between: list[int] = []
    order = list(turns("ab", 2, 1, between=lambda: between.append(0)))
    assert order == [(-1, "b"), (-1, "a"), (0, "a"), (0, "b"), (1, "b"), (1, "a")]
    assert len(between) == 3
    assert by_turns(3, {"a": lambda: 1, "b": lambda: 2}) == {"a": [1, 1, 1], "b": [2, 2, 2]}


def test_medians_leave_out_what_warms_up_and_what_is_waited_for() -> None:
    now = 0.0

    def spend(seconds: float) -> None:
        nonlocal now
        now += seconds
        assert not gc.isenabled()

    lasts = iter([100.0] * WARM_UP + [1.0, 2.0, 9.0])
    sides = {"a": lambda: spend(next(lasts)), "b": lambda: spend(3.0)}
    (found,) = medians(sides, 3, lambda: spend(50.0), (lambda: now,))
    assert found == {"a": 2.0, "b": 3.0}
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("module", "tests"),
    [
        ("planner/ir/box.py", "tests/planner/ir/test_box.py"),
        ("planner/ir/__init__.py", "tests/planner/ir"),
        ("runtime/of_no_folder/a.py", "tests/runtime"),
    ],
)
def test_a_mutant_is_judged_by_the_tests_that_mirror_its_module(
    module: str, tests: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(HOME)
    assert mirroring(Path(module)) == tests


@pytest.mark.cases(1)  # seconds each
@pytest.mark.parametrize("name", list(extras()))
def test_every_module_of_the_core_is_imported_without_an_extra(name: str) -> None:
    assert [row.value for row in measure(quick=True, extra=[name], tests=())] == [0]


def test_an_extra_goes_with_those_that_import_it() -> None:
    assert closure("token_slices") == ["token_slices"]
    assert {"kernels", "modelled", "transformers"} <= set(closure("kernels"))
    folders = ["planner/extras/token_slices", "runtime/extras/token_slices"]
    assert [path.as_posix() for path in extras()["token_slices"]] == folders
