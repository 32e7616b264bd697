"""The house itself: how large its rooms are, how many of them a reader of ``plan`` and ``run`` enters, what it costs.

Files *entered* are those of ours of which any function runs, in all processes of a command: ``sys.setprofile``, put
there by a ``sitecustomize`` on the path.  Modules *loaded* are those of ours in ``sys.modules`` when a worker ends.
The whole benchmark also installs a fresh clone, and runs its tests and its demonstration.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.report import Row, at_most, run
from tests.planner.costs.test_one_rule import pricing_places
from tests.test_architecture import CODE, complaints, read_sources

HOME = Path(__file__).parents[1]
NETWORK = ("profiler.models.resnet:resnet18", "--input", "8,3,32,32", "--arg", "width=16", "--arg", "num_classes=10")

WATCH = """
import atexit, os, sys, threading

OURS, OUT = tuple(os.environ["HOUSE_OURS"].split(os.pathsep)), os.environ["HOUSE_OUT"]
entered = set()


def note(frame, event, _):
    if event == "call":
        entered.add(frame.f_code.co_filename)


def tell():
    sys.setprofile(None)
    ours = {name for name in entered if name.startswith(OURS)}
    loaded = [name for name, module in list(sys.modules.items())
              if (getattr(module, "__file__", None) or "").startswith(OURS)]
    with open(os.path.join(OUT, f"{os.getpid()}.{'worker' if 'halopipe.launch.worker' in sys.modules else 'other'}"),
              "w") as file:
        file.write("\\n".join(["loaded " + name for name in loaded] + ["entered " + name for name in ours]))


def leave(code, leave=os._exit):  # a worker does not wait for threads that hang
    tell()
    leave(code)


atexit.register(tell)
os._exit = leave
threading.setprofile(note)
sys.setprofile(note)
"""


def measure(quick: bool) -> list[Row]:
    """All figures; the seconds of installation, tests and demonstration only where there is time."""
    rows = [*_sizes(), *_arrows(), *_entered(), _mypy_errors()]
    return rows if quick else [*rows, *_fresh_clone()]


def _sizes() -> Iterable[Row]:
    lines = {path: path.read_text("utf-8").count("\n") for top in CODE for path in (HOME / top).rglob("*.py")}
    of_tests = sum(path.read_text("utf-8").count("\n") for path in (HOME / "tests").rglob("*.py"))
    sizes = [size for path, size in lines.items() if path.name != "__init__.py"]
    yield at_most("source files", len(lines), "", 400)
    yield Row("lines of a file, median", statistics.median(sizes), "")
    yield Row("lines of a file, p90", statistics.quantiles(sizes, n=10)[-1], "")
    yield at_most("lines of the longest file", max(sizes), "", 500)
    yield at_most("source lines outside tests", sum(lines.values()), "", 72_000)
    yield at_most("lines of tests", of_tests, "", 40_000)


def _arrows() -> Iterable[Row]:
    found = complaints(read_sources(HOME))
    cycles = [each for each in found if each.startswith("cycle")]
    yield at_most("import cycles", len(cycles), "", 0)
    yield at_most("upward arrows", len(found) - len(cycles), "", 0)
    yield at_most("places that price a stage", len(pricing_places(read_sources(HOME))), "", 1)


def _entered() -> Iterable[Row]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(WATCH)
        _halopipe(folder, {}, "profile", *NETWORK, "--quick")
        plan, _ = _watched(folder, "plan", "profile.json", "--global-batch", "16")
        of_run, loaded = _watched(folder, "run", "plan.json", "--steps", "2", "--data", "halopipe.data:synthetic")
    yield at_most("files entered by plan", len(plan), "", 45)
    yield at_most("files entered by run, all processes", len(of_run), "", 25)
    yield at_most("modules of ours loaded by a worker", max(loaded), "", 150)


def _watched(folder: Path, *arguments: str) -> tuple[set[str], list[int]]:
    """Files that a command enters, and how many modules each of its workers loads."""
    with tempfile.TemporaryDirectory() as out:
        ours = os.pathsep.join(f"{HOME / top}{os.sep}" for top in CODE)  # not HOME: an environment may lie in it
        _halopipe(folder, {"HOUSE_OURS": ours, "HOUSE_OUT": out, "PYTHONPATH": f"{folder}:{HOME}"}, *arguments)
        told = {path: path.read_text().splitlines() for path in Path(out).iterdir()}
    entered = {line for lines in told.values() for line in lines if line.startswith("entered ")}
    workers = [lines for path, lines in told.items() if path.suffix == ".worker"]
    return entered, [sum(line.startswith("loaded ") for line in lines) for lines in workers] or [0]


def _halopipe(folder: Path, more: Mapping[str, str], *arguments: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(HOME), **more}
    command = [sys.executable, "-m", "halopipe", *arguments]
    subprocess.run(command, cwd=folder, env=environment, check=True, stdout=sys.stderr)


def _mypy_errors() -> Row:
    command = [sys.executable, "-m", "mypy"]
    told = subprocess.run(command, cwd=HOME, capture_output=True, text=True, check=False).stdout
    return at_most("mypy --strict, errors", sum(": error: " in line for line in told.splitlines()), "", 0)


def _fresh_clone() -> Iterable[Row]:
    with tempfile.TemporaryDirectory() as name:
        clone = Path(name) / "halopipe"
        subprocess.run(["git", "clone", "--quiet", str(HOME), str(clone)], check=True)
        yield Row("seconds of installing for the demonstration", _seconds(clone, "make", ".venv/.demo"), "s")
        yield at_most("seconds of make demo, installed", _seconds(clone, "make", "demo"), "s", 180)
        yield Row("seconds of installing for the tests", _seconds(clone, "make", ".venv/.installed"), "s")
        yield at_most("seconds of make test, installed", _seconds(clone, "make", "test"), "s", 480)


def _seconds(folder: Path, *command: str) -> float:
    start = time.perf_counter()
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    return run("The house: rooms, arrows, and what a reader enters", measure, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
