"""Running a plan: its workers on this host, or one rank of a job that torchrun or Slurm started.

result = run_plan(plan, RunOptions(steps=20))
result.losses, result.measured(plan.prediction)
"""

from __future__ import annotations

import os

from halopipe.runs import Progress, RunOptions, RunProgress, RunResult
from halopipe.support import require_executable
from planner.ir.plan import Plan

__all__ = ["RunOptions", "RunProgress", "RunResult", "run_plan"]


def run_plan(plan: Plan, options: RunOptions | None = None, progress: Progress | None = None) -> RunResult | None:
    """Trains by the plan and returns what was measured; nothing is left behind, whatever happens.

    Spawns a process for each rank on this host; where torchrun or Slurm started this process (``RANK`` is set), runs
    that rank of the job.  There only rank 0 gets a result, the others None.

    Raises:
        RankCountError: the job has another number of ranks than the plan.
        UsageError: the runtime cannot execute such a plan yet.
        StaleFileError: the plan was made for another model.
        WorkerError: a worker failed; NumericsError: it computes something else than one device.
    """
    require_executable(plan)
    options = options or RunOptions()
    joins = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if joins:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler writes to the terminal
    from halopipe import crew  # loads torch

    return (crew.join if joins else crew.spawn)(plan, options, progress)
