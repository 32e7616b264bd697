"""Ranks of a plan as ``halopipe run`` makes them, each counted and held below a limit of its own.

They are workers of the launcher (:mod:`halopipe.launch.processes`), and do what its workers do
(:func:`halopipe.launch.worker.rank`): each loads and captures the model itself, agrees with the others on the plan,
and holds what a rank of a user's job holds.  Two things are added: every rank has a limit of its own, where
``--memory-limit`` is one for all, and it notes what each step took.  Left out is the comparison of the first step with
one device.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halopipe.launch.processes import workers_of
from halopipe.launch.spawn import supervisor_of
from halopipe.launch.worker import leave_outcome
from halopipe.run_spec.job import JOB, Job
from halopipe.run_spec.options import NEVER, RunOptions
from planner.ir.errors import OutOfMemoryError
from planner.ir.plan import Plan
from planner.ir.scratch import scratch_folder

if TYPE_CHECKING:
    from cuda_ops._torch import Store
    from runtime.engine import StepResult
    from runtime.monitor.activity import StatusStore

Limits = Sequence[int | None]
"""Bytes, by rank; None: as many as there are."""

_LIMITS = "limits.json"
_DEADLINE_S = 300.0


@dataclass(frozen=True, slots=True)
class Counted:
    """What the ranks held in the steps that all of them did.

    Attributes:
        steps: by rank, then by step, the most in use: before the program (0 where nothing is found there), in each
            action, and behind the last.
        ran_out: whether one of them went beyond its limit.
    """

    steps: tuple[tuple[tuple[int, ...], ...], ...]
    ran_out: bool

    @property
    def num_steps(self) -> int:
        """That all ranks did."""
        return min(map(len, self.steps))

    def peak_bytes(self, num_steps: int) -> tuple[int, ...]:
        """By rank, the most in any of the first steps."""
        return tuple(max(map(max, steps[:num_steps])) for steps in self.steps)


def steps_within(plan: Plan, transport: str, limits: Sequence[Limits]) -> Counted:
    """A step of ``plan`` for each of ``limits``, one after another in one job; it ends where a rank runs out.

    Args:
        transport: what ranks exchange by, as of :class:`halopipe.run_spec.options.RunOptions`.
        limits: by step.

    Raises:
        HalopipeError: a rank failed otherwise.
    """
    options = RunOptions(
        steps=len(limits),
        warmup=1,
        check_first_step=False,
        transport=transport,
        lone_passes=NEVER,
        deadline_s=_DEADLINE_S,
    )
    ranks = range(plan.decision.num_ranks)
    ran_out = False
    with scratch_folder("job") as folder:
        Job(plan, options, folder).write(folder / JOB)
        (folder / _LIMITS).write_text(json.dumps([list(of_ranks) for of_ranks in limits]), encoding="utf-8")
        workers, store = workers_of(folder, len(ranks), call=f"{__name__}:rank")
        try:
            supervisor_of(plan.decision, store, _DEADLINE_S).run(workers)
        except OutOfMemoryError:
            ran_out = True
        return Counted(tuple(_noted(folder, number) for number in ranks), ran_out)


def rank(path: str) -> int:
    """What a worker does: the work of one rank, under the limits that lie beside the job."""
    return leave_outcome(lambda own, store, board: _limited(Job.read(Path(path)), own.rank, store, board))


def _limited(job: Job, number: int, store: Store, board: StatusStore) -> str:
    from halopipe.training.work import work  # late: it loads torch

    limits = [of_ranks[number] for of_ranks in json.loads((job.folder / _LIMITS).read_text(encoding="utf-8"))]
    limited = replace(job, options=replace(job.options, tensors_limit_bytes=limits[0] or 0))

    def note(step: int, result: StepResult, _: Any) -> None:
        from cuda_ops.memory import install  # late: it loads torch

        with _notes(job.folder, number).open("a", encoding="utf-8") as file:
            file.write(json.dumps([result.before_bytes, *result.peak_bytes]) + "\n")
        if step + 1 < len(limits):
            install().limit(limits[step + 1])

    return work(limited, number, store, board, after_step=note, local_rank=number).to_json()


def _notes(folder: Path, number: int) -> Path:
    return folder / f"counted-{number}.jsonl"


def _noted(folder: Path, number: int) -> tuple[tuple[int, ...], ...]:
    path = _notes(folder, number)
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return tuple(tuple(json.loads(line)) for line in lines)
