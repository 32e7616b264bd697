"""Running a plan: its workers on this host, or one rank of a job that torchrun started.

result = run_plan(plan, RunOptions(steps=20))
result.losses, result.measured(plan.prediction)
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from halopipe.launch.job_environment import job_rank
from halopipe.launch.processes import warm_workers
from halopipe.run_spec.options import RunOptions
from halopipe.run_spec.result import RunProgress, RunResult, ShowRun
from halopipe.training.check_options import require_consistent
from halopipe.training.rank_device import device_assignments_of, on_gpus
from planner.ir.errors import UsageError
from planner.ir.plan import Plan

if TYPE_CHECKING:
    from halopipe.launch.replanning import Replanner

__all__ = ["RunOptions", "RunProgress", "RunResult", "run_plan"]


def run_plan(
    plan: Plan,
    options: RunOptions | None = None,
    progress: ShowRun | None = None,
    replanner: Replanner | None = None,
) -> RunResult | None:
    """Trains by the plan and returns what was measured; nothing is left behind, whatever happens.

    Spawns a process for each rank on this host; where torchrun started this process (``RANK`` is set), runs that rank
    of the job.  There only rank 0 gets a result, the others None.

    Args:
        replanner: decides which plan a job goes on with after a loss of ranks, and which plan ranks of torchrun take
            (:mod:`halopipe.launch.replanning`); None: the same (:mod:`halopipe.launch.restart`).

    Raises:
        RankCountError: the job has another number of ranks than the plan, or a host of it has.
        UsageError: options do not fit together, another job writes its checkpoints into the same folder, or Slurm
            started several of this process without torchrun.
        StaleFileError: the plan was made for another model.
        WorkerError: a worker failed; NumericsError: it computes something else than one device.
        EndedError: somebody asked the job to end.
    """
    options = options or RunOptions()
    require_consistent(plan, options)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch warns of every address that has no name
    job = job_rank()
    if job is not None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler writes to the terminal
        if options.restarts:
            raise UsageError(
                "--restarts is for a job of one host, which halopipe starts; this one was started by torchrun",
                [f"--restarts is {options.restarts}"],
                [f"torchrun --max-restarts {options.restarts} ... halopipe run PLAN --resume auto"],
            )
        from halopipe.launch.torchrun import join  # loads torch

        return join(job, plan, options, progress, replanner)
    if replanner is not None:
        replanner.require_restarts()
        progress = replanner.watching(progress)
    if not on_gpus(device_assignments_of(plan.decision, options.device)):
        warm_workers()
    from halopipe.launch.restart import supervised  # loads torch
    from runtime.checkpoint.lock import held

    with held(Path(options.checkpoint)) if options.checkpoint else nullcontext():
        return supervised(plan, options, progress, replanner.decide if replanner is not None else None)
