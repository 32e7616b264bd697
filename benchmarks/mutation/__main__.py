"""Mutation check: the share of faults that the short suite notices, of those that the whole suite notices.

    python -m benchmarks.mutation [--mutants 200] [--seed 0] [--minutes 60] [--packages NAME ...] [--json] [--quick]
    python -m benchmarks.mutation --of VERDICTS ... [--json]
    python -m benchmarks.mutation --record [TESTS ...]

Mutants of all packages, or of those of ``--packages``, are drawn (:mod:`benchmarks.mutation.mutants`), as many from
each as it has lines.  Each is judged (:mod:`benchmarks.mutation.verdicts`) by the tests that run what it changes
(:mod:`benchmarks.mutation.selection`), first as ``make test`` runs them, then, if it lives, with every case, as ``make
test-all`` does.  The score is the share of the former among all that were killed.  Mutants that no test kills are no
part of it, since many of them say the same in other words; the file of verdicts lists them.

``--verdicts FILE`` keeps the verdicts as they come; a run that was cut short goes on from there, and with more
``--files`` what lives is tried with further ones.  ``--minutes`` cuts it short by itself: mutants are judged in random
order, so those that were reached are a fair part; ``--short`` leaves every case to a later run.  ``--of`` judges
nothing and gives the rows of such files, each with the name of its file.  ``--record`` notes which tests enter which
functions: tests that never run what is changed are then left out, and distant ones added.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.mutation.mutants import draw
from benchmarks.mutation.recording import PACKAGES
from benchmarks.mutation.selection import (
    cache_file,
    files_for,
    files_of_tests,
    joined,
    load_record,
    record_tests,
    save_record,
    with_noted_seconds,
)
from benchmarks.mutation.verdicts import ALIVE, ALL, LIVES, SHORT, UNDECIDED, UNTESTED, Tree, Verdict, copy_of
from benchmarks.report import Row, at_least, run

HOME = Path(__file__).resolve().parents[2]
RECORDED = tuple(f"tests/{package}" for package in PACKAGES)
NUM_MUTANTS = 200
NUM_QUICK = 2
MOST_FILES = 12
"""Files of tests for a mutant, at most."""


@dataclass(frozen=True, slots=True)
class Options:
    """What is run; see ``--help``."""

    mutants: int = NUM_MUTANTS
    seed: int = 0
    files: int = MOST_FILES
    limit_s: float = 600.0
    budget_s: float = float("inf")
    short: bool = False
    before: tuple[str, ...] = ()
    verdicts: Path | None = None
    record: Path | None = None
    packages: tuple[str, ...] = PACKAGES


def measure(quick: bool, options: Options, home: Path = HOME) -> list[Row]:
    """Judge the mutants that have no verdict yet, as many as there is time for."""
    stops_s = time.monotonic() + options.budget_s
    record = with_noted_seconds(load_record(options.record or cache_file(home)), home)
    with copy_of(home) as root:
        files = files_of_tests(root)
        tree = Tree(root, options.before, 20.0 if quick else options.limit_s)
        mutants = draw(root, options.packages, NUM_QUICK if quick else options.mutants, options.seed)
        random.Random(options.seed).shuffle(mutants)
        known = {} if quick else {verdict.mutant: verdict for verdict in _kept(options.verdicts)}
        for every_case in (False,) if options.short else (False, True):
            for number, mutant in enumerate(mutants, 1):
                before = known.get(str(mutant))
                chosen = files_for(mutant, files, record)[: 1 if quick else options.files]
                if not every_case:
                    tried = before.files if before else ()
                    chosen = [file for file in chosen if file not in tried]
                if is_due(before, chosen, every_case) and time.monotonic() < stops_s:
                    known[str(mutant)] = verdict = tree.judge(mutant, chosen, before, every_case=every_case)
                    sys.stderr.write(
                        f"{number}/{len(mutants)} {verdict.mutant}: {verdict.outcome} {verdict.by} "
                        f"({verdict.seconds:.0f} s)\n"
                    )
                    _keep(list(known.values()), None if quick else options.verdicts)
        verdicts = [*_sound([known[str(mutant)] for mutant in mutants if str(mutant) in known], tree)]
        known.update((verdict.mutant, verdict) for verdict in verdicts)
        _keep(list(known.values()), None if quick else options.verdicts)
        return list(rows(verdicts))


def is_due(before: Verdict | None, files: Sequence[str], every_case: bool) -> bool:
    """Whether a mutant with this verdict is tried: with a few cases of ``files``, all new to it, or with every case."""
    if before is None:
        return not every_case
    return before.outcome == LIVES and (every_case or bool(files))


def _sound(verdicts: Sequence[Verdict], tree: Tree) -> Iterator[Verdict]:
    """The verdicts, undecided where the killer fails in the unchanged tree as well."""
    killed = [verdict for verdict in verdicts if verdict.outcome in (SHORT, ALL)]
    killers = {verdict.by for verdict in killed if verdict.by.startswith("tests/")}
    unsound: set[str] = set()
    unlimited = dataclasses.replace(tree, limit_s=0)
    while killers - unsound:
        failing = unlimited.failing(sorted(killers - unsound), every_case=True)
        if not failing:
            break
        if failing not in killers:
            raise SystemExit(f"the tests that killed do not run in the unchanged tree: {failing}")
        unsound.add(failing)
    for verdict in verdicts:
        yield dataclasses.replace(verdict, outcome=UNDECIDED) if verdict.by in unsound else verdict


def rows(verdicts: Iterable[Verdict]) -> Iterator[Row]:
    """The rows of some verdicts: the score, what was killed of each package, what was not."""
    found = list(verdicts)
    short, every = _count(found, SHORT), _count(found, SHORT, ALL)
    yield Row("mutants tried", len(found), "mutants")
    yield Row("killed by the short suite", short, "mutants")
    yield Row("killed by the short suite or by every case", every, "mutants")
    yield at_least("killed by the short suite, of those that every case kills", _percent(short, every), "%", 95)
    yield Row("killed, of all", _percent(every, len(found)), "%")
    for package in sorted({verdict.package for verdict in found}):
        own = [verdict for verdict in found if verdict.package == package]
        yield Row(f"killed of {package}", _percent(_count(own, SHORT, ALL), len(own)), "%")
    yield Row("alive with every case, equal in meaning included", _count(found, ALIVE, UNTESTED), "mutants")
    yield Row("alive in the short suite, not tried with every case", _count(found, LIVES), "mutants")
    yield Row("undecided, out of time or killed by a test that fails anyway", _count(found, UNDECIDED), "mutants")


def rows_of(files: Sequence[Path]) -> Iterator[Row]:
    """The rows of files of verdicts, ``seed_1.json`` as ``mutants tried: seed 1``."""
    for path in files:
        for row in rows(_kept(path)):
            yield dataclasses.replace(row, name=f"{row.name}: {path.stem.replace('_', ' ')}")


def _count(verdicts: Sequence[Verdict], *outcomes: str) -> int:
    return sum(verdict.outcome in outcomes for verdict in verdicts)


def _percent(part: int, whole: int) -> float:
    return 100.0 * part / whole if whole else 100.0


def _kept(path: Path | None) -> list[Verdict]:
    if path is None or not path.exists():
        return []
    return [Verdict(**{**entry, "files": tuple(entry["files"])}) for entry in json.loads(path.read_text("utf-8"))]


def _keep(verdicts: Sequence[Verdict], path: Path | None) -> None:
    if path is not None:
        text = json.dumps([dataclasses.asdict(verdict) for verdict in verdicts], indent=1)
        path.write_text(text + "\n", encoding="utf-8")


def _record(tests: Sequence[str], options: Options) -> None:
    path = options.record or cache_file(HOME)
    with copy_of(HOME) as root:
        save_record(joined(load_record(path), record_tests(root, tests or RECORDED, options.before)), path)
    sys.stderr.write(f"{path}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--mutants", type=int, default=NUM_MUTANTS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--files", type=int, default=MOST_FILES, help="files of tests for a mutant, at most; may be raised"
    )
    parser.add_argument("--limit", type=float, default=600.0, metavar="SECONDS", help="of one run of the tests")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no mutant is begun after so many")
    parser.add_argument("--short", action="store_true", help="what lives in the short suite is left at that")
    parser.add_argument("--before", default="", metavar="COMMAND", help='put before each of them, such as "nice -n 10"')
    parser.add_argument(
        "--verdicts", type=Path, metavar="FILE", help="keeps the verdicts; those in it are not repeated"
    )
    parser.add_argument(
        "--record-file", type=Path, metavar="FILE", help="instead of the one of this commit in the cache"
    )
    parser.add_argument("--packages", nargs="+", choices=PACKAGES, default=PACKAGES, help="whose mutants are drawn")
    parser.add_argument("--of", nargs="+", type=Path, metavar="VERDICTS", help="the rows of these files alone")
    parser.add_argument("--record", nargs="*", metavar="TESTS", help="note what tests enter, and end")
    own, rest = parser.parse_known_args(arguments)
    before = tuple(shlex.split(own.before))
    options = Options(
        own.mutants,
        own.seed,
        own.files,
        own.limit,
        60 * own.minutes,
        own.short,
        before,
        own.verdicts,
        own.record_file,
        tuple(own.packages),
    )
    if own.record is not None:
        _record(own.record, options)
        return 0
    description = "Mutation check: what the short suite kills of the faults that the whole suite kills"
    return run(description, lambda quick: list(rows_of(own.of)) if own.of else measure(quick, options), rest)


if __name__ == "__main__":
    raise SystemExit(main())
