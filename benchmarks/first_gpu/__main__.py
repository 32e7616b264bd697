"""The first hour on a GPU, in steps that go on where an earlier call ended.

    python -m benchmarks.first_gpu                    all that is not done yet, each step within 9 minutes
    python -m benchmarks.first_gpu --minutes 9        the same, but this call ends then
    python -m benchmarks.first_gpu --step kernels     one step, or several with commas between them
    python -m benchmarks.first_gpu --part ResNet  parts whose names match a regular expression
    python -m benchmarks.first_gpu --rehearse         the same on the processor, with small networks, in a minute
    python -m benchmarks.first_gpu --list             the steps, and what is done of each

It needs no network, and of packages what halopipe needs.  Rows are in ``first_gpu.json`` of the results folder, what
the steps had to say is in ``log.txt``.  See docs/gpu.md.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.first_gpu.frame import LIMIT_S, Bench, Outcome, Results, run_steps
from benchmarks.report import table
from cuda_ops.device.gpus import may_have_gpus

HERE = "benchmarks.first_gpu."
STEPS: Mapping[str, tuple[str, str]] = {
    "machine": ("machine:machine", "versions, the card, and what doctor says"),
    "tests": ("machine:tests", "the tests that need a GPU, a file a part"),
    "kernels": ("kernels:kernels", "sparse operators and halos against the reference, and as a share of the roofline"),
    "profiles": ("networks:profiles", "four networks by device events, memory by the allocator"),
    "tables": ("networks:tables", "each layer of these, and of transformers' blocks, as --on h100-dgx prices it"),
    "plans": (
        "plans:plans",
        "one device, and two ranks on one card: the first step compared; step and memory",
    ),
    "executor": ("plans:executor", "what a run adds to the user's own loop"),
    "exchanges": ("kernels:exchanges", "messages, exchanges and sums between two ranks of one card"),
}
"""By name: ``module:function`` of this package, and what is found out."""

_LEAST_S = 20.0
"""Less is too little to begin a step."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0 whether or not the rows hold, 2 where nothing can be run."""
    parser = argparse.ArgumentParser(description="The first hour on a GPU")
    parser.add_argument("--step", default=",".join(STEPS), metavar="NAME,...", help="these; all if not given")
    parser.add_argument("--part", default="", metavar="REGEX", help="parts whose names match; all if not given")
    parser.add_argument("--list", action="store_true", help="say what the steps are, and what is done; run nothing")
    parser.add_argument("--rehearse", action="store_true", help="on the processor, with small networks")
    parser.add_argument("--minutes", type=float, default=0.0, metavar="N", help="end within so many; 0: no limit")
    parser.add_argument("--results", type=Path, default=Path("first_gpu"), metavar="FOLDER", help="folder to write")
    options = parser.parse_args(arguments)
    asked = options.step.split(",")
    if strange := [name for name in asked if name not in STEPS]:
        parser.error(f"there is no step {', '.join(strange)}; there are {', '.join(STEPS)}")
    results = Results(Bench(options.results.absolute(), options.rehearse, options.part), list(STEPS))
    if options.list:
        sys.stdout.write("".join(f"{name:<10} {text}; {_state(name, results)}\n" for name, (_, text) in STEPS.items()))
        return 0
    if why := _why_not(options.rehearse):
        sys.stderr.write(f"benchmarks.first_gpu: {why}\n")
        return 2
    end_s = time.monotonic() + (60 * options.minutes or float("inf"))
    calls = {name: HERE + STEPS[name][0] for name in asked}
    for steps in [calls] if options.rehearse else [{name: call} for name, call in calls.items()]:
        left_s = end_s - time.monotonic()
        if left_s < _LEAST_S:
            sys.stdout.write(f"not begun, the time is over: {', '.join(steps)}\n")
            continue
        run_steps(steps, results, min(LIMIT_S, left_s), _show)
    failed = [f"{each.step}: {each.part}" for each in results.outcomes.values() if each.error and each.step in asked]
    sys.stdout.write("".join(f"failed, and tried again by the next call: {name}\n" for name in failed))
    sys.stdout.write(f"rows: {results.bench.folder / 'first_gpu.json'}\n")
    return 0


def _show(outcome: Outcome) -> None:
    lines = table(list(outcome.shown())).splitlines()[1:]
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def _state(step: str, results: Results) -> str:
    outcomes = [outcome for outcome in results.outcomes.values() if outcome.step == step]
    failed = sum(bool(outcome.error) for outcome in outcomes)
    return f"{len(outcomes) - failed} parts done, {failed} failed" if outcomes else "not run"


def _why_not(rehearses: bool) -> str:
    """Why nothing can be run here; empty if it can."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = [re.split(r"[<>=!~ \[;]", each, maxsplit=1)[0] for each in project["dependencies"]]
    if missing := [name for name in wanted if not _is_there(name)]:
        return f"packages are missing: {' '.join(missing)}; how to bring them along: docs/gpu.md"
    if not rehearses and not may_have_gpus():
        return "there is no driver of NVIDIA's; --rehearse runs the same on the processor"
    return ""


def _is_there(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    raise SystemExit(main())
