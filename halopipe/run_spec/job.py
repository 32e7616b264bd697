"""What the launcher tells a worker, and what a worker answers, as JSON in the job's folder.

The folder of a job: there while it runs, gone afterwards whatever happens.
"""

from __future__ import annotations

import contextlib
import json
import signal
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from halopipe.run_spec.options import RunOptions
from halopipe.run_spec.result import Score
from planner.ir.codec import dumps, loads, plain
from planner.ir.files import write_text
from planner.ir.plan import Plan
from planner.ir.profile import ModelSource
from planner.ir.timeline import LeftOut, LonePasses, Slow, Span


@contextlib.contextmanager
def job_folder() -> Iterator[Path]:
    """A folder that is removed at the end, also when the process is told to end."""
    with tempfile.TemporaryDirectory(prefix="halopipe-") as name, _ended_by_exception():
        yield Path(name)


@contextlib.contextmanager
def _ended_by_exception() -> Iterator[None]:
    """SIGTERM raises SystemExit, so that what must be cleaned up is; only the main thread may say so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


NUM_COMPARED = 5
"""Steps that ``check_numerics`` compares."""

FLOAT32 = "float32"

JOB = "job.json"
"""Where the job is written, in its folder."""

REFERENCE, REFERENCE_RANK = "reference", -1
"""In place of a rank: the worker that runs these steps on one device, and its number among the files of the job."""


@dataclass(frozen=True, slots=True)
class Job:
    """One run.

    Attributes:
        folder: for results and errors; removed by the launcher.
        port: of the launcher's store, on the loopback interface; 0 where the environment says where to meet.
    """

    plan: Plan
    options: RunOptions
    folder: Path
    port: int = 0

    @property
    def source(self) -> ModelSource:
        """The model, in the dtype asked for; autocast is for parameters in float32 alone."""
        model, dtype = self.plan.inputs.model, self.options.dtype
        return replace(model, dtype=dtype, autocast=model.autocast if dtype == FLOAT32 else "") if dtype else model

    @property
    def is_compared(self) -> bool:
        """Whether its first update is compared with one device's; a job that goes on from a checkpoint has none."""
        options = self.options
        wanted = options.check_numerics or options.check_first_step
        return wanted and not options.resume and options.steps >= options.accumulate

    @property
    def reference_path(self) -> Path:
        """Where the run on one device is kept."""
        return self.folder / "reference.pt"

    def write(self, path: Path) -> None:
        """Write the job for a worker to read."""
        record = {"plan": dumps(self.plan), "options": plain(self.options), "folder": str(self.folder)}
        write_text(path, json.dumps(record | {"port": self.port}))

    @classmethod
    def read(cls, path: Path) -> Job:
        """The job that :meth:`write` wrote."""
        record = json.loads(path.read_text(encoding="utf-8"))
        plan, options = loads(record["plan"], Plan), RunOptions(**record["options"])
        return cls(plan, options, Path(record["folder"]), record["port"])


def failed_path(reference: Path) -> Path:
    """Where it says why there is no reference."""
    return reference.with_suffix(".failed")


@dataclass(frozen=True, slots=True)
class Compared:
    """A :class:`runtime.numerics.compare.Difference`, without torch."""

    name: str
    kind: str
    step: int
    found: float
    expected: float
    error: float
    accepted: float
    rounding: float = 0.0


@dataclass(frozen=True, slots=True)
class RankResult:
    """What one rank measured.

    Attributes:
        losses: by step, on the ranks that know them; else empty.
        step_seconds: by step.
        spans: of the last steps, by step.
        peak_bytes: the most of any step; 0 if not known.
        memory: of the last steps, by step: the most in each action, then behind the last; empty if not known.
        compared: this rank's tensors beside one device's.
        witness, skipped: how one device ran the first batch, or why it did not.
        data: what data it was, and how it was asked for; empty on ranks that do not read it.
        transport: that the ranks of the job exchange by; empty of one rank.
        first_step: steps done before.
        scores: of the evaluations; the same on all ranks.
        trained: whether the steps were training steps.
        lone: its stages run alone; ``not_lone``: why they were not.
        left_out, slow: as of a :class:`halopipe.run_spec.result.RunResult`; slow ones are known to rank 0.
    """

    rank: int
    losses: tuple[float, ...]
    step_seconds: tuple[float, ...]
    spans: dict[int, tuple[Span, ...]]
    peak_bytes: int
    compared: tuple[Compared, ...]
    first_step: int = 0
    scores: tuple[Score, ...] = ()
    trained: bool = True
    memory: dict[int, tuple[int, ...]] = field(default_factory=dict)
    witness: str = ""
    skipped: str = ""
    data: str = ""
    transport: str = ""
    lone: tuple[LonePasses, ...] = ()
    not_lone: str = ""
    left_out: tuple[LeftOut, ...] = ()
    slow: tuple[Slow, ...] = ()

    def to_json(self) -> str:
        """As text."""
        spans = {
            step: [(span.action, span.start_s, span.stop_s) for span in found] for step, found in self.spans.items()
        }
        return json.dumps({**plain(self), "spans": spans})

    @classmethod
    def from_json(cls, text: str) -> RankResult:
        """What :meth:`to_json` spelled."""
        record = json.loads(text)
        rank = record["rank"]
        return cls(
            rank,
            tuple(record["losses"]),
            tuple(record["step_seconds"]),
            {int(step): tuple(Span(rank, *span) for span in spans) for step, spans in record["spans"].items()},
            record["peak_bytes"],
            tuple(Compared(**each) for each in record["compared"]),
            record["first_step"],
            tuple(Score(**each) for each in record["scores"]),
            record["trained"],
            {int(step): tuple(found) for step, found in record["memory"].items()},
            record["witness"],
            record["skipped"],
            record["data"],
            record["transport"],
            tuple(LonePasses(*each.values()) for each in map(_with_tuples, record["lone"])),
            record["not_lone"],
            tuple(LeftOut(**each) for each in record["left_out"]),
            tuple(Slow(**each) for each in record["slow"]),
        )


def _with_tuples(record: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in record.items()}
