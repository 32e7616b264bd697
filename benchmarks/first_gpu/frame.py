"""Steps of parts: each step in a process of its own, the rows of a part written as soon as there are some.

A step is a function ``module:function(bench)`` that gives its parts by name, each a function of rows.  What a part has
found is a line of ``parts.jsonl`` in the results folder; of its rows and all others ``first_gpu.json`` is made, a file
as those of ``benchmarks/results``.  A part that is done is not done again, one that failed is.

A part that raises leaves a row of its error, and a new process goes on behind it: after some errors a process can use
its GPU no more.  So it is where the process dies.  A step that takes longer than its limit is ended by the operating
system (``SIGALRM``), whatever it waits for; the next call goes on with it.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.report import Row

LIMIT_S = 540.0
"""Of a step in one call."""

_OF_THE_CARD = ("%", "ratio", "us")
"""Units of rows whose goals say something of a GPU alone."""

Name = tuple[str, str]
"""Of a part: its step and its own."""


@dataclass(frozen=True, slots=True)
class Bench:
    """Where steps run.

    Attributes:
        folder: of results; ``work`` in it has what one step leaves for another.
        rehearses: whether the processor stands in for the GPU, with networks that are small.
        only: a regular expression that parts' names must match; empty: all.
    """

    folder: Path
    rehearses: bool = False
    only: str = ""

    @property
    def device(self) -> str:
        """``cuda`` or ``cpu``."""
        return "cpu" if self.rehearses else "cuda"

    def file(self, name: str) -> Path:
        """A file of ``work``."""
        (self.folder / "work").mkdir(parents=True, exist_ok=True)
        return self.folder / "work" / name


Parts = Mapping[str, Callable[[], Iterable[Row]]]
Report = Callable[[object], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a part.

    Attributes:
        error: why it has no rows; empty: it is done.
        device: of :class:`Bench`.
    """

    step: str
    part: str
    device: str
    seconds: float = 0.0
    error: str = ""
    rows: tuple[Row, ...] = ()

    @property
    def name(self) -> Name:
        """Of the part."""
        return self.step, self.part

    def shown(self) -> Iterator[Row]:
        """Its rows under the step's name, or that of its error, and the time it took."""
        yield from (dataclasses.replace(row, name=f"{self.step}: {row.name}") for row in self.rows)
        if self.error:
            yield Row(f"{self.step}: {self.part}: {self.error}", 0.0, "run", "without an error", holds=False)
        yield Row(f"{self.step}: {self.part}: took", self.seconds, "s")


@dataclass(slots=True)
class Results:
    """The files of a results folder.

    Attributes:
        order: of the steps.
        outcomes: the last one of each part.
    """

    bench: Bench
    order: Sequence[str]
    outcomes: dict[Name, Outcome] = field(init=False)

    def __post_init__(self) -> None:
        self.bench.folder.mkdir(parents=True, exist_ok=True)
        lines = self._parts.read_text("utf-8").splitlines() if self._parts.exists() else []
        read = [json.loads(line) for line in lines]
        outcomes = [Outcome(**{**each, "rows": tuple(Row(**row) for row in each["rows"])}) for each in read]
        self.outcomes = {each.name: each for each in outcomes if each.device == self.bench.device}

    def add(self, outcome: Outcome) -> None:
        """One more: it is in the files when this returns."""
        self.outcomes[outcome.name] = outcome
        with self._parts.open("a", encoding="utf-8") as file:
            file.write(json.dumps(dataclasses.asdict(outcome)) + "\n")
        partial = self.bench.folder / ".first_gpu.json"
        partial.write_text(json.dumps([dataclasses.asdict(row) for row in self.rows()], indent=1) + "\n", "utf-8")
        os.replace(partial, self.bench.folder / "first_gpu.json")

    def done(self) -> set[Name]:
        """Parts without an error."""
        return {name for name, outcome in self.outcomes.items() if not outcome.error}

    def rows(self) -> list[Row]:
        """Of all parts, step by step."""
        inside = [each for each in self.outcomes.values() if each.step in self.order]
        return [row for each in sorted(inside, key=lambda one: self.order.index(one.step)) for row in each.shown()]

    @property
    def _parts(self) -> Path:
        return self.bench.folder / "parts.jsonl"


def run_steps(
    steps: Mapping[str, str],
    results: Results,
    limit_s: float = LIMIT_S,
    show: Callable[[Outcome], None] = lambda outcome: None,
) -> None:
    """Does what is not done of ``steps`` in one process, another behind each error, within ``limit_s`` in all.

    Args:
        steps: by name, ``module:function``.
        show: called with what has just been written.
    """
    from planner.ir.errors import HalopipeError  # late: the program says first which packages are missing
    from profiler.measure.child_process import Child

    end_s = time.monotonic() + limit_s
    skipped = results.done()
    complete = False
    while not complete and time.monotonic() < end_s:
        begun = (next(iter(steps)), "")
        started_s = time.monotonic()

        def note(error: str = "", rows: tuple[Row, ...] = ()) -> None:
            outcome = Outcome(*begun, results.bench.device, time.monotonic() - started_s, error, rows)  # noqa: B023
            skipped.add(outcome.name)
            results.add(outcome)
            show(outcome)

        left_s = max(1, round(end_s - time.monotonic()))
        try:
            with Child(f"{__name__}:work", steps, results.bench, skipped, left_s, core=None) as child:
                reports = child.reports(left_s + 30.0)
                while True:
                    begun, outcome = next(reports)
                    if outcome is None:
                        started_s = time.monotonic()
                    else:
                        note(*outcome)
        except StopIteration as end:
            complete = end.value
        except HalopipeError as error:
            gone = f"ended at its limit of {limit_s:.0f} s" if time.monotonic() >= end_s - 1 else str(error)
            note(" ".join(gone.split())[:500])
            complete = complete or not begun[1]


def work(report: Report, steps: Mapping[str, str], bench: Bench, skipped: Collection[Name], limit_s: int) -> bool:
    """In the step's process: reports (part, None) where one begins, (part, (error, rows)) where it ends.

    Returns:
        Whether nothing is left; False behind an error.
    """
    signal.alarm(limit_s)
    with (bench.folder / "log.txt").open("a", encoding="utf-8") as log:
        for handle in (1, 2):
            os.dup2(log.fileno(), handle)
    for step, call in steps.items():
        parts: Parts = _function(call)(bench)
        for part, make in parts.items():
            if (step, part) in skipped or not re.search(bench.only, part):
                continue
            report(((step, part), None))
            sys.stderr.write(f"\n== {step}: {part}\n")
            try:
                rows = tuple(_plain(row, bench.rehearses) for row in make())
            except Exception as error:  # noqa: BLE001  # whatever it is, it is a result
                traceback.print_exc()
                report(((step, part), (_text(error), ())))
                return False
            report(((step, part), ("", rows)))
    return True


def _function(call: str) -> Callable[[Bench], Any]:
    module, _, name = call.partition(":")
    function: Callable[[Bench], Any] = getattr(importlib.import_module(module), name)
    return function


def _plain(row: Row, rehearses: bool) -> Row:
    """The row in numbers of Python's own; a rehearsal's times and bytes are held against nothing."""
    if rehearses and row.unit in _OF_THE_CARD:
        return Row(row.name, float(row.value), row.unit)
    return dataclasses.replace(row, value=float(row.value), holds=bool(row.holds))


def _text(error: Exception) -> str:
    """The error on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]
