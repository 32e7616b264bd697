"""What the launcher tells a worker, as JSON in the job's folder, and what a worker answers, as JSON."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from halopipe.run_spec.options import RunOptions
from halopipe.run_spec.result import RunNotes, Saves, Score
from planner.ir.codec import dumps, from_json, loads, plain
from planner.ir.files import open_plain, read_plain, write_text
from planner.ir.plan import Plan
from planner.ir.profile import ModelSource
from planner.ir.scratch import OWNER
from planner.ir.timeline import Span
from runtime.numerics.difference import Difference

_MOST_EVENT_LOG_BYTES = 2**30

NUM_COMPARED = 5
"""Steps that ``check_numerics`` compares."""

FLOAT32 = "float32"

JOB = "job.json"
"""Where the job is written, in its folder."""

REFERENCE = "reference"
REFERENCE_RANK = -1
"""What one device computed in these steps: its key on the store of the job; and what stands in place of a rank."""


@dataclass(frozen=True, slots=True)
class Job:
    """One run.

    Attributes:
        folder: of the job; removed by the launcher.
    """

    plan: Plan
    options: RunOptions
    folder: Path

    @property
    def source(self) -> ModelSource:
        """The model, in the dtype asked for; autocast is for parameters in float32 alone."""
        model = self.plan.inputs.model
        dtype = self.options.dtype
        return replace(model, dtype=dtype, autocast=model.autocast if dtype == FLOAT32 else "") if dtype else model

    @property
    def is_compared(self) -> bool:
        """Whether its first update is compared with one device's; a job that goes on from a checkpoint has none."""
        options = self.options
        wanted = options.check_numerics or options.check_first_step
        return wanted and not options.resume and options.steps >= options.accumulate

    def write(self, path: Path) -> None:
        """Write the job for a worker to read."""
        record = {"plan": dumps(self.plan), "options": plain(self.options), "folder": str(self.folder)}
        write_text(path, json.dumps(record))

    @classmethod
    def read(cls, path: Path) -> Job:
        """The job that :meth:`write` wrote."""
        record = json.loads(path.read_text(encoding="utf-8"))
        plan = loads(record["plan"], Plan)
        options = RunOptions(**record["options"])
        return cls(plan, options, Path(record["folder"]))


def event_log_path(folder: Path, rank: int) -> Path:
    """Where a rank notes what it has done, for the case that it is lost."""
    return folder / f"journal-{rank}.jsonl"


class EventLog:
    """What a rank has done, a line a step and an evaluation, each written at once; open as long as its process.

    A disk that is full ends the log, not the rank.
    """

    def __init__(self, path: Path) -> None:
        self._is_whole = True
        self._file = open_plain(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def step(self, number: int, loss: float | None, step_s: float) -> None:
        """Note a step; ``number`` counts from 0."""
        self._note({"step": number, "loss": loss, "step_s": step_s, "at_s": time.time()})

    def score(self, score: Score) -> None:
        """Note an evaluation."""
        self._note({"score": plain(score)})

    def saves(self, saves: Saves) -> None:
        """Note what was saved so far, and what it cost."""
        self._note({"saves": plain(saves)})

    def _note(self, record: dict[str, Any]) -> None:
        line = f"{json.dumps(record)}\n".encode()
        with contextlib.suppress(OSError):
            self._is_whole = self._is_whole and os.write(self._file, line) == len(line)


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """What the ranks of an attempt had done when it ended.

    Attributes:
        losses, step_seconds: by step, counted from 0, of steps that all ranks had done.
        scores: evaluations, by the steps done before.
        began_s: ``time.time()``, which all hosts share, at the start of the first step; None where there was none.
        saves: its checkpoints, on the rank where they cost most.
    """

    losses: Mapping[int, float]
    step_seconds: Mapping[int, float]
    scores: Mapping[int, Score]
    began_s: float | None = None
    saves: Saves = field(default_factory=Saves)

    @classmethod
    def read(cls, folder: Path) -> AttemptRecord:
        """What their event logs say; a rank has one before any begins its first step."""
        notes = [_notes(path) for path in folder.glob("journal-*.jsonl")]
        steps = [{note.step: note for note in each if note.step is not None} for each in notes]
        common = sorted(set(steps[0]).intersection(*steps)) if steps else []
        seconds = {step: max(each[step].step_s for each in steps) for step in common}
        losses = {step: loss for step in common for each in steps if (loss := each[step].loss) is not None}
        scores = {note.score.step: note.score for each in notes for note in each if note.score is not None}
        first = common[:1]
        began_s = min((each[step].at_s - each[step].step_s for step in first for each in steps), default=None)
        saves = [note.saves for each in notes for note in each if note.saves is not None]
        # what they cost only grows
        return cls(losses, seconds, scores, began_s, max(saves, key=lambda each: each.seconds, default=Saves()))


@dataclass(frozen=True, slots=True)
class _Note:
    """A line of an event log: a step, an evaluation, or what was saved so far."""

    step: int | None = None
    loss: float | None = None
    step_s: float = 0.0
    at_s: float = 0.0
    score: Score | None = None
    saves: Saves | None = None


def _notes(path: Path) -> list[_Note]:
    """All lines but one that its rank could not write to the end, and what is none of its lines."""
    notes = []
    with contextlib.suppress(OSError):
        for line in read_plain(path, _MOST_EVENT_LOG_BYTES).splitlines(keepends=True):
            if line.endswith(b"\n"):
                with contextlib.suppress(ValueError):
                    notes.append(from_json(line, _Note))
    return notes


def cleared(folder: Path) -> None:
    """Removes what an attempt left in the folder of its job."""
    for path in folder.iterdir():
        if path.name != OWNER:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


@dataclass(frozen=True, slots=True)
class RankResult(RunNotes):
    """What one rank measured; slow ranks are known to rank 0, ``data`` to ranks that read them.

    Attributes:
        losses: by step, on the ranks that know them; else empty.
        step_seconds: by step.
        spans: of the last steps, by step.
        peak_bytes: the most of any step; 0 if not known.
        compared: this rank's tensors beside one device's.
        memory: of the last steps, by step: the most in each action, then behind the last; empty if not known.
        witness, skipped: how one device ran the first batch, or why it did not.
        kind: of the device that it ran on, in the words of the plan where it means that device.
        remarks: what people should hear, also of a run that was over before the launcher had heard of it.
    """

    rank: int
    losses: tuple[float, ...]
    step_seconds: tuple[float, ...]
    spans: dict[int, tuple[Span, ...]]
    peak_bytes: int
    compared: tuple[Difference, ...]
    memory: dict[int, tuple[int, ...]] = field(default_factory=dict)
    witness: str = ""
    skipped: str = ""
    kind: str = ""
    remarks: tuple[str, ...] = ()

    def to_json(self) -> str:
        """As text."""
        return json.dumps(plain(self))

    @classmethod
    def from_json(cls, text: str) -> RankResult:
        """What :meth:`to_json` spelled."""
        return from_json(text, cls)
