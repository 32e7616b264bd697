"""What a rank has done, step by step, in a file of its own: so that it is known of a rank that is lost."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halopipe.run_spec.result import Saves, Score
from planner.ir.codec import from_json, plain
from planner.ir.files import open_plain, read_plain
from planner.ir.scratch import OWNER

_MOST_EVENT_LOG_BYTES = 2**30


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
