"""The house itself: how large its rooms are, what its names mean, how far a reader of ``plan`` and ``run`` walks.

Figures of the text are those of ``benchmarks/results/house.csv``, whose last row no change may exceed
(``tests/test_architecture.py``); ``--record WHY`` puts today's behind it.  Modules are *entered* where a function of
theirs really runs, in any process of a command.  The whole benchmark also installs a fresh clone, and runs its tests
and its demonstration.  ``--picture`` only draws the picture of docs/architecture.md anew.
"""

from __future__ import annotations

import csv
import datetime
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.house import picture
from benchmarks.house.measures import HOME, TABLE, Walk, figures, halopipe, rows, walk, watch
from benchmarks.report import Row, at_most, run
from tests.planner.costs.test_one_rule import pricing_places
from tests.test_architecture import CODE, TOP_LEVEL, complaints, read_sources

NETWORK = ("profiler.models.resnet:resnet18", "--input", "8,3,32,32", "--arg", "width=16", "--arg", "num_classes=10")
GOALS = {
    "planner tokens": 360_000,
    "profiler tokens": 117_000,
    "runtime tokens": 160_000,
    "cuda_ops tokens": 74_000,
    "halopipe tokens": 157_000,
    "homonyms": 0,
    "aliases of two meanings": 0,
    "vague names": 0,
    "wide functions": 30,
    "packed assignments": 0,
}
WALK_GOALS = {"plan": 75, "run": 95, "serve": 95}
LAST_COMMITS = 100
SECOND_PLACES = ("planner/check", "tests/oracles")


def measure(quick: bool) -> list[Row]:
    """All figures; the seconds of installation, tests and demonstration only where there is time."""
    of_text = figures(read_sources(HOME, TOP_LEVEL))
    of_core = sum(value for name, value in of_text.items() if name.endswith(" core tokens"))
    rows_of_text = [
        at_most(name, value, "", GOALS[name]) if name in GOALS else Row(name, value, "")
        for name, value in of_text.items()
    ]
    rows_of_text.append(Row("core tokens", of_core, ""))
    once = [*rows_of_text, *_lines(), *_arrows(), *_twice(), *_walks(), _mypy_errors()]
    return once if quick else [*once, *_fresh_clone()]


def record(why: str) -> None:
    """Put the text's figures behind :data:`TABLE`, with the day and the reason."""
    row = {"date": f"{datetime.date.today()}", **figures(read_sources(HOME, TOP_LEVEL)), "why": why}
    history = rows() if TABLE.exists() else []
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(row), extrasaction="ignore", lineterminator="\n")  # figures come and go
        writer.writeheader()
        writer.writerows([*history, row])


def _lines() -> Iterable[Row]:
    lines = {path: path.read_text("utf-8").count("\n") for top in CODE for path in (HOME / top).rglob("*.py")}
    of_tests = sum(path.read_text("utf-8").count("\n") for path in (HOME / "tests").rglob("*.py"))
    sizes = [size for path, size in lines.items() if path.name != "__init__.py"]
    yield Row("source files", len(lines), "")
    yield Row("lines of a file, median", statistics.median(sizes), "")
    yield at_most("lines of the longest file", max(sizes), "", 500)
    of_benchmarks = sum(size for path, size in lines.items() if path.is_relative_to(HOME / "benchmarks"))
    yield at_most("lines of benchmarks", of_benchmarks, "", 11_000)
    yield at_most("lines of tests", of_tests, "", 60_000)


def _arrows() -> Iterable[Row]:
    problems = complaints(read_sources(HOME))
    cycles = [each for each in problems if each.startswith("cycle")]
    yield at_most("import cycles", len(cycles), "", 0)
    yield at_most("upward arrows", len(problems) - len(cycles), "", 0)
    yield at_most("places that price a stage", len(pricing_places(read_sources(HOME))), "", 1)


def _twice() -> Iterable[Row]:
    """Of the last commits to the costs, those that had to change the checker or the oracles of the tests too."""
    command = [
        "git",
        "-C",
        str(HOME),
        "log",
        "--format=commit %h",
        "--name-only",
        "--",
        "planner/costs",
        *SECOND_PLACES,
    ]
    log = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    commits = [each.split() for each in log.split("commit ") if "planner/costs/" in each][:LAST_COMMITS]
    both = sum(any(path.startswith(SECOND_PLACES) for path in each) for each in commits)
    yield at_most(
        f"of the last {len(commits)} commits to planner/costs, also to {' or '.join(SECOND_PLACES)}", both, "", 10
    )


def _walks() -> Iterable[Row]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        watch(folder)
        halopipe(folder, {"PYTHONPATH": str(HOME)}, "profile", *NETWORK, "--quick")
        options = ("--global-batch", "16", "-o", "plan.json")
        walks = {"plan": walk(folder, "plan", "profile.json", *options)}
        walks["run"] = walk(folder, "run", "plan.json", "--steps", "2", "--data", "halopipe.data:synthetic")
        latency = ("--objective", "latency", "--schedule", "forward", "-o", "forward.json")
        halopipe(folder, {"PYTHONPATH": str(HOME)}, "plan", "profile.json", *latency)
        request = json.dumps({"inputs": [[[[0.0] * 32] * 32] * 3] * 8})
        walks["serve"] = walk(folder, "serve", "forward.json", "--stdin", "json", "--mode", "eval", text=request)
    for verb, each in walks.items():
        yield at_most(f"modules that really run for {verb}", len(each.entered), "", WALK_GOALS[verb])
    yield Row("types made on the way of run", len(_made(walks["run"])), "")
    yield at_most("modules of ours loaded by a worker", max(walks["run"].loaded), "", 150)


def _made(each: Walk) -> frozenset[str]:
    """Types that carry what is done, errors left out."""
    return frozenset(name for name in each.made if not name.endswith("Error"))


def _mypy_errors() -> Row:
    command = [sys.executable, "-m", "mypy"]
    output = subprocess.run(command, cwd=HOME, capture_output=True, text=True, check=False).stdout
    return at_most("mypy --strict, errors", sum(": error: " in line for line in output.splitlines()), "", 0)


def _fresh_clone() -> Iterable[Row]:
    with tempfile.TemporaryDirectory() as name:
        clone = Path(name) / "halopipe"
        subprocess.run(["git", "clone", "--quiet", str(HOME), str(clone)], check=True)
        yield Row("seconds of installing for the demonstration", _seconds(clone, "make", ".venv/.demo"), "s")
        yield at_most("seconds of make demo, installed", _seconds(clone, "make", "demo"), "s", 180)
        yield Row("seconds of installing for the tests", _seconds(clone, "make", ".venv/.installed"), "s")
        yield at_most("seconds of make test, installed", _seconds(clone, "make", "test"), "s", 480)


def main(arguments: Sequence[str]) -> int:
    """The command line."""
    if arguments[:1] == ["--record"] and len(arguments) == 2:
        record(arguments[1])
        return 0
    if arguments == ["--picture"]:
        picture.write()
        return 0
    return run("The house: rooms, names, and how far a reader walks", measure, arguments)


def _seconds(folder: Path, *command: str) -> float:
    start = time.perf_counter()
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
