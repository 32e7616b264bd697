"""Mutation check by cosmic-ray: of faults put into the code at random, the share that the tests beside it notice.

    pip install cosmic-ray
    python -m benchmarks.mutation [--mutants 40] [--seed 0] [--packages NAME ...] [--json] [--quick]

Each module is drawn with the weight of its statements, and one of the mutations that cosmic-ray knows in it, but for
those of ``|``, which here joins types.  It is made in a copy of the tree, and judged by every case of the tests that
mirror the module: its own file (``tests/planner/ir/test_box.py`` for ``planner/ir/box.py``), else its folder, else the
nearest folder above.  What runs out of time is killed, as cosmic-ray counts it.  Mutants that mean the same live: 100 %
is out of reach.
"""

from __future__ import annotations

import ast
import contextlib
import os
import random
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.house.measures import PACKAGES
from benchmarks.report import Row, run
from benchmarks.without import tree_without

HOME = Path(__file__).resolve().parents[1]
NUM_MUTANTS = 40
NUM_QUICK = 2
LIMIT_S = 900.0
"""For the tests of one mutant; they take seconds to two minutes on two cores that do nothing else."""

IN_WORDS = {"survived": "LIVES", "killed": "killed", "incompetent": "cannot be run"}


def drawn(packages: Sequence[str], count: int, seed: int) -> Iterator[Any]:
    """Mutations of modules of the tree in the working folder, as cosmic-ray's work items."""
    from cosmic_ray.commands.init import init
    from cosmic_ray.work_db import WorkDB, use_db

    chance = random.Random(seed)
    weights = {
        path: sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(path.read_text("utf-8"))))
        for package in packages
        for path in sorted(Path(package).rglob("*.py"))
    }
    for path in chance.choices(list(weights), list(weights.values()), k=count):
        with use_db(":memory:", WorkDB.Mode.create) as session:
            init([path], session, {})
            items = [item for item in session.work_items if "Operator_BitOr" not in item.mutations[0].operator_name]
        if items:
            yield chance.choice(sorted(items, key=lambda item: str(item.mutations)))


def mirroring(module: Path) -> str:
    """The file of tests that mirrors a module, or the nearest folder of tests above it."""
    own = Path("tests") / module.parent / f"test_{module.stem.strip('_')}.py"
    return str(own if own.exists() else next(folder for folder in own.parents if folder.exists()))


def measure(quick: bool, packages: Sequence[str], mutants: int, seed: int) -> list[Row]:
    """Judge the mutants one by one; a line for each goes to standard error."""
    from cosmic_ray.mutating import mutate_and_test

    outcomes = dict.fromkeys(IN_WORDS, 0)
    os.environ["PYTHONPATH"] = "."
    with tree_without([]) as copied, contextlib.chdir(copied):
        for item in drawn(packages, NUM_QUICK if quick else mutants, seed):
            (mutation,) = item.mutations
            tests = mirroring(mutation.module_path)
            command = [sys.executable, "-m", "pytest", "-q", "-x", "--all-cases", "-p", "no:cacheprovider", tests]
            outcome = mutate_and_test(item.mutations, shlex.join(command), LIMIT_S).test_outcome
            if outcome is not None:
                outcomes[outcome] += 1
                place = f"{mutation.module_path}:{mutation.start_pos[0]}: {mutation.operator_name.partition('/')[2]}"
                sys.stderr.write(f"{place}: {IN_WORDS[outcome]} ({tests})\n")
    judged = outcomes["survived"] + outcomes["killed"]
    return [
        Row("mutants judged", judged, "mutants"),
        Row("killed by the tests that mirror their module", 100 * outcomes["killed"] / max(judged, 1), "%"),
        Row("mutants that cannot be run", outcomes["incompetent"], "mutants"),
    ]


OWN: Mapping[str, Mapping[str, Any]] = {
    "--mutants": {"type": int, "default": NUM_MUTANTS, "help": "how many are tried"},
    "--seed": {"type": int, "default": 0, "help": "what draws them"},
    "--packages": {"nargs": "+", "choices": PACKAGES, "default": PACKAGES, "help": "whose lines are changed"},
}


main = partial(run, "Mutation check: faults that the tests notice", measure, own=OWN)

if __name__ == "__main__":
    raise SystemExit(main())
