"""What the launcher tells a worker, as JSON in the job's folder, and what a worker answers, as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

from halopipe.run_spec.options import RunOptions
from halopipe.run_spec.result import RunNotes
from planner.ir.codec import dumps, from_json, loads, plain
from planner.ir.files import write_text
from planner.ir.plan import Plan
from planner.ir.profile import ModelSource
from planner.ir.timeline import Span
from runtime.numerics.difference import Difference

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


@dataclass(frozen=True, slots=True)
class RankResult(RunNotes):
    """What one rank measured; slow ranks are known to rank 0, ``data`` to ranks that read them.

    Attributes:
        losses: by step, on the ranks that know them; else empty.
        step_seconds: by step.
        spans: of the last steps, by their place among the steps of this attempt.
        peak_bytes: the most of any step; 0 if not known.
        compared: this rank's tensors beside one device's.
        memory: likewise: the most in each action, then after the last; empty if not known.
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
