"""Whether halopipe is right, or says before the first step what it cannot keep.

    python -m benchmarks.robustness [--quick] [--json] [--part networks|files|hostile|...] [--only TEXT]

* **Networks.** Each of :mod:`tests.zoo` (habits of real code: own autograd functions, hooks, frozen parts, modules
  called twice, losses of every reduction, draws, in-place writes, choices by data) is trained for two steps by a
  pipeline, a pipeline with a split backward, in data parallel and in space, beside the user's own module, called
  eagerly, in float64 to 1e-10.  It is *equal* if it is so under each plan; *refused* if some plan, or the capture, is
  refused with an error of ours that gives the reason; *wrong* if it trains otherwise; *untyped* if it crashes, or fails
  in a step.
* **Kinds.** Of those networks, the ones of some modules of the zoo apart (:data:`KINDS`): what a module does at its
  first call alone, dtypes, names that Python keeps for itself.
* **Refusals.** Command lines that are refused, and remedies that are followed to the letter
  (:mod:`benchmarks.robustness.refusals`).
* **Files.** Mutations of valid plans and profiles through load, check, predict, explain, plan and all that a run looks
  at first, and of cluster files, job files and ways through who reads them (:mod:`benchmarks.robustness.fuzzing`);
  hostile files, a class a row (:mod:`benchmarks.robustness.hostile_inputs`).
* **Habits.** What people do in training scripts with the objects that they bring beside the module, a habit a row: each
  in a plain loop and by halopipe (:mod:`benchmarks.robustness.habits`).
* **The checker.** Mutations of what plans state, each of which it must notice
  (:mod:`benchmarks.robustness.checker_mutations`).

The full run takes some minutes of one core.  ``--quick`` judges every fifth network and tries a fortieth of the
mutations.
"""

from __future__ import annotations

import importlib
import logging
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from benchmarks.report import Row, run
from benchmarks.robustness.habits import SILENT

if TYPE_CHECKING:
    from benchmarks.robustness.hostile_files import Hostile
    from benchmarks.robustness.refusals import Refusal
    from tests.zoo.entries import Entry
    from tests.zoo.judging import Verdict

R = TypeVar("R", "Hostile", "Refusal")
NUM_PLANS = NUM_PROFILES = NUM_TEXTS = 2000
NUM_CHECKED = 220  # some of which say the same in other words
QUICK_SHARE = 40
"""The quick run tries this part of the mutations."""

EVERY_FIFTH = 5

EQUAL = "equal"
REFUSED = "refused"
WRONG = "wrong"
UNTYPED = "untyped"
NEEDLESS = "refused needlessly"


def networks(quick: bool) -> Iterator[Row]:
    """What becomes of the zoo's networks."""
    from tests.zoo import ALL
    from tests.zoo.judging import judge

    of_kinds = [entry for entry in ALL.values() if kind_of(entry)]
    some = list(ALL.values())[:: EVERY_FIFTH if quick else 1]
    entries = [*some, *(entry for entry in of_kinds if entry not in some)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)  # torch.export tells at length why it refuses a model
        try:
            judged = {entry.name: class_of(entry, judge(entry)) for entry in entries}
        finally:
            logging.disable(logging.NOTSET)
    found = Counter(judged.values())
    yield Row("networks tried", len(entries), "networks")
    yield Row("networks equal to their own module", found[EQUAL], "networks")
    yield Row("networks refused with a reason, under some plan", found[REFUSED], "networks")
    yield _none("networks trained wrongly", found[WRONG], "networks")
    yield _none("networks that end in an untyped error", found[UNTYPED], "networks")
    yield _none("networks refused where they could be run, or for another reason", found[NEEDLESS], "networks")

    for kind in KINDS.values():
        classes = [judged[entry.name] for entry in of_kinds if kind_of(entry) == kind]
        if classes:
            right = sum(each in (EQUAL, REFUSED) for each in classes)
            yield _all(f"{kind}: equal, or refused with the reason", right, len(classes), "networks")


KINDS = {"first_calls": "what is done at the first call alone", "dtypes": "dtypes", "names": "names of parts"}
"""Of networks, by the module of the zoo that they are written in."""


def kind_of(entry: Entry) -> str:
    """The kind that has rows of its own; empty: none."""
    return KINDS.get(entry.name.partition(":")[0], "")


def class_of(entry: Entry, verdicts: Sequence[Verdict]) -> str:
    """The class of a network that got these verdicts: of the worst of them."""
    from tests.zoo import judging

    outcomes = {verdict.outcome for verdict in verdicts}
    if judging.WRONG in outcomes:
        return WRONG
    if judging.CRASHED in outcomes:
        return UNTYPED
    if judging.ADMITTED in outcomes:
        return NEEDLESS
    if judging.REFUSED not in outcomes:
        return EQUAL
    return REFUSED if all(verdict.is_as(entry) for verdict in verdicts) else NEEDLESS


def files(quick: bool) -> Iterator[Row]:
    """What becomes of spoilt files."""
    from benchmarks.robustness import fuzzing

    share = QUICK_SHARE if quick else 1
    for what, counts in (
        ("plans", fuzzing.fuzz_plans(NUM_PLANS // share)),
        ("profiles", fuzzing.fuzz_profiles(NUM_PROFILES // share)),
        ("texts", fuzzing.fuzz_texts(NUM_TEXTS // share)),
    ):
        _say({": ".join(example[:2]): example[2] for example in counts.examples})
        yield Row(f"mutations of {what} tried", counts.tried, "files")
        yield Row(f"mutations of {what} refused", counts.refused, "files")
        yield _none(f"mutations of {what} that end in an untyped error", counts.untyped, "files")
        yield _none(f"mutations of {what} that hang", counts.hangs, "files")
        yield _none(f"mutations of {what} that nobody notices", counts.unnoticed, "files")


def hostile(quick: bool, only: str = "") -> Iterator[Row]:
    """What becomes of hostile files, command lines and environments, of those whose name has ``only``."""
    from benchmarks.robustness import hostile_inputs

    rows = [row for row in hostile_inputs.rows()[:: QUICK_SHARE if quick else 1] if only in row.name]
    yield _good("hostile classes that end well", rows, hostile_inputs.verdict, "classes")


def remedies(quick: bool, only: str = "") -> Iterator[Row]:
    """What becomes of who follows a remedy; ``quick``: of refusals before ranks are started."""
    from benchmarks.robustness import refusals

    rows = [row for row in refusals.rows() if not (quick and row.is_dear) and only in row.name]
    yield _good("refusals whose remedies work, followed to the letter", rows, refusals.verdict, "refusals")


def _good(name: str, rows: Sequence[R], verdict: Callable[[R, Path], str], unit: str) -> Row:
    """How many rows are good, each judged in a folder of its own."""
    bad = {}
    for row in rows:
        with tempfile.TemporaryDirectory(prefix="halopipe-row-") as folder:
            if fault := verdict(row, Path(folder)):
                bad[row.name] = fault
    _say(bad)
    return _all(name, len(rows) - len(bad), len(rows), unit)


def _say(bad: Mapping[str, str]) -> None:
    """Which rows are not good, and what happened."""
    for name, fault in bad.items():
        sys.stderr.write(f"{name}: {fault}\n")


def checker(quick: bool) -> Iterator[Row]:
    """What the checker notices."""
    from benchmarks.robustness import checker_mutations

    found = checker_mutations.caught_of(NUM_CHECKED // (QUICK_SHARE if quick else 1))
    yield _all("mutations that the checker catches, with the profile", found.caught, found.tried, "mutations")
    yield _all("mutations that the checker catches, without it", found.caught_alone, found.tried_alone, "mutations")
    yield _none("mutations that end in an untyped error of the checker", len(found.raised), "mutations")


SUBJECTS = ("optimizers", "schedules", "metrics")
"""Modules beside this one, each with ``habits()``."""


def habits(quick: bool, only: str = "") -> Iterator[Row]:
    """What becomes of habits of training scripts, of those whose name has ``only``."""
    from benchmarks.robustness.habits import counted

    for subject in SUBJECTS:
        of_subject = importlib.import_module(f"benchmarks.robustness.{subject}").habits()
        some = [habit for habit in of_subject[:: EVERY_FIFTH if quick else 1] if only in habit.name]
        kinds, bad = counted(some)
        _say(bad)
        yield _all(
            f"habits with {subject}: equal, or refused before the first step", len(some) - len(bad), len(some), "habits"
        )
        yield _none(f"habits with {subject} that go wrong in silence", kinds[SILENT], "habits")


def _none(name: str, value: int, unit: str) -> Row:
    return Row(name, value, unit, "= 0", value == 0)


def _all(name: str, value: int, tried: int, unit: str) -> Row:
    return Row(name, value, unit, f"= {tried}", value == tried)


PARTS: Mapping[str, Callable[..., Iterator[Row]]] = {
    "networks": networks,
    "files": files,
    "hostile": hostile,
    "refusals": remedies,
    "checker": checker,
    "habits": habits,
}
OWN: Mapping[str, Mapping[str, Any]] = {
    "--part": {"choices": list(PARTS), "default": "", "help": "one of them"},
    "--only": {
        "default": "",
        "metavar": "TEXT",
        "help": "of hostile inputs, refusals and habits, those of such a name",
    },
}


def measure(quick: bool, part: str = "", only: str = "") -> list[Row]:
    """All rows, or those of a part; ``only`` asks for no other parts than those that have such rows."""
    wanted = [part] if part else ["hostile", "refusals", "habits"] if only else list(PARTS)
    return [row for name in wanted for row in (PARTS[name](quick, only) if only else PARTS[name](quick))]


main = partial(run, "Right, or refused", measure, own=OWN)

if __name__ == "__main__":
    raise SystemExit(main())
