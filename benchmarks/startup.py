"""Start-up: importing the planner, and ``halopipe plan`` from a profile file, as whole processes."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.report import Row, at_most, run
from benchmarks.turns import by_turns

PROFILE = Path(__file__).parents[1] / "notebooks" / "data" / "resnet50.profile.json"


def measure(quick: bool) -> list[Row]:
    """Medians over several processes; the bare interpreter, started in between, is the floor under each figure."""
    repetitions = 3 if quick else 9
    with tempfile.TemporaryDirectory() as folder:
        output = str(Path(folder) / "plan.json")
        commands = {
            "python": ["-c", "pass"],
            "planner": ["-c", "import planner, planner.solvers, planner.ir.plan"],
            "plan": ["-m", "halopipe", "plan", str(PROFILE), "-o", output],
            "help": ["-m", "halopipe", "--help"],
        }
        seconds = by_turns(repetitions, {name: partial(_run, command) for name, command in commands.items()})
    median = {name: statistics.median(values) for name, values in seconds.items()}
    floor = median["python"]
    return [
        Row("bare interpreter", floor, "s"),
        at_most("import planner, above the bare interpreter", median["planner"] - floor, "s", 0.2),
        at_most("halopipe --help", median["help"], "s", 1.0),
        at_most("halopipe plan, ResNet-50 on 2 devices, start-up included", median["plan"], "s", 3.0),
    ]


def _run(command: Sequence[str]) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, *command], check=True, capture_output=True, env={**os.environ})
    return time.perf_counter() - start


if __name__ == "__main__":
    raise SystemExit(run("Start-up of the planner (wall seconds, medians of whole processes)", measure))
