"""Programs that documents name: each is there, starts, and in its quick form ends within its time."""

from __future__ import annotations

import ast
import contextlib
import functools
import io
import os
import re
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

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
"""What ``--quick`` means, on two cores that do nothing else."""

_BUSY = 5
"""Machines that run tests are shared, and slower."""

_NEEDS = {
    "benchmarks.accuracy": "network namespaces, root",
    "benchmarks.faults": "network namespaces, root",
    "benchmarks.networks": "networks of other packages, which tests/networks run",
    "benchmarks.mutation": "cosmic-ray",
    "benchmarks.without": "trees of their own, as tests/benchmarks/test_without.py makes them",
}
"""Programs whose quick form is not run here, and why."""


def named_in(text: str) -> list[str]:
    """Modules that the text runs as programs."""
    return [name.rstrip(".") for name in NAMED.findall(text)]


PROGRAMS = sorted(
    {name for path in DOCUMENTS for name in named_in(path.read_text("utf-8"))} - {"benchmarks.NAME", "benchmarks"}
)


def started(names: list[str], *arguments: str) -> dict[str, str]:
    """What each program, called so, wrote, with its exit code in front; in this process, as ``python -m`` would."""
    found = {}
    for name in names:
        output, code = io.StringIO(), 0
        sys.argv = [name, *arguments]
        with contextlib.redirect_stdout(output), warnings.catch_warnings():
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


def test_nothing_follows_where_a_program_begins() -> None:
    """What stands behind it is not there yet when it runs, though it is for who imports the module."""
    assert [str(path.relative_to(HOME)) for path in SOURCES if begins_early(path.read_text("utf-8"))] == []


def begins_early(source: str) -> bool:
    *before, _ = ast.parse(source).body or [ast.Pass()]
    return any(isinstance(node, ast.If) and "__name__" in ast.unparse(node.test) for node in before)


def test_a_program_that_begins_before_its_functions_is_noticed() -> None:
    program = 'if __name__ == "__main__":\n    main()\n'
    later = "def main():\n    pass\n"
    assert begins_early(program + later)
    assert not begins_early(later + program)


def test_programs_are_found_in_blocks_and_sentences() -> None:
    text = "`python -m benchmarks.seeds`: so. As `python -m benchmarks.house --quick`, python -m benchmarks.report."
    assert named_in(text) == ["benchmarks.seeds", "benchmarks.house", "benchmarks.report"]


@pytest.mark.exhaustive("all benchmarks in their quick form: up to a minute each, on a machine that does nothing else")
@pytest.mark.timeout(_BUSY * QUICK_S + 60)
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name.startswith("benchmarks.")])
def test_the_quick_form_of_a_benchmark_ends_in_its_time(name: str, tmp_path: Path) -> None:
    if "--quick" not in helps()[name]:
        pytest.skip("it has no quick form")
    if name in _NEEDS:
        pytest.skip(_NEEDS[name])
    environment = {**os.environ, "PYTHONPATH": str(HOME), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", name, "--quick"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=_BUSY * QUICK_S, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
