"""Running a plan: its workers on this host or on others, or one rank of a job that torchrun or Slurm started.

result = run_plan(plan, RunOptions(steps=20))
result.losses, result.measured(plan.prediction)
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from halopipe.launch.hosts import Hosts
from halopipe.launch.slurm import job_variables
from halopipe.run_spec.options import Progress, RunOptions, RunProgress, RunResult
from halopipe.training.check_options import require_consistent
from planner.ir.errors import UsageError
from planner.ir.plan import Plan
from planner.ir.validation import MOST_DEVICES

__all__ = ["Hosts", "RunOptions", "RunProgress", "RunResult", "run_plan"]


def run_plan(
    plan: Plan, options: RunOptions | None = None, progress: Progress | None = None, hosts: Hosts | None = None
) -> RunResult | None:
    """Trains by the plan and returns what was measured; nothing is left behind, whatever happens.

    Spawns a process for each rank, on this host or on ``hosts``; where torchrun or Slurm started this process (``RANK``
    or ``SLURM_PROCID`` is set), runs that rank of the job.  There only rank 0 gets a result, the others None.

    Raises:
        RankCountError: the job has another number of ranks than the plan, or the hosts are not as many as the plan's.
        UsageError: options do not fit together, or hosts are named inside such a job.
        StaleFileError: the plan was made for another model.
        WorkerError: a worker failed; NumericsError: it computes something else than one device.
    """
    options = options or RunOptions()
    require_consistent(plan, options)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch warns of every address that has no name
    if joins():
        if hosts is not None:
            raise UsageError(
                "hosts cannot be named inside a job",
                ["torchrun or Slurm started this process as one rank"],
                ["leave out --hosts", "run outside the job"],
            )
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler writes to the terminal
        from halopipe.launch.torchrun import join  # loads torch

        return join(plan, options, progress)
    from halopipe.launch import spawn  # loads torch

    return spawn.spawn(plan, options, progress) if hosts is None else spawn.spawn_on(hosts, plan, options, progress)


def joins() -> bool:
    """Whether this process is a rank of a job; Slurm's variables are then set as torchrun sets its own."""
    os.environ.update(job_variables(os.environ))
    found = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if found:
        _require_seats(os.environ)
    return found


def _require_seats(environment: Mapping[str, str]) -> None:
    """Raises :class:`UsageError` unless rank, size and port of the job are numbers, and fit together."""
    ranks = _number(environment, "WORLD_SIZE", 1, MOST_DEVICES)
    _number(environment, "RANK", 0, ranks - 1)
    if "LOCAL_RANK" in environment:
        _number(environment, "LOCAL_RANK", 0, ranks - 1)
    if "MASTER_PORT" in environment:
        _number(environment, "MASTER_PORT", 0, 65_535)


def _number(environment: Mapping[str, str], name: str, least: int, most: int) -> int:
    text = environment[name]
    if not (text.isdecimal() and len(text) < 10 and least <= int(text) <= most):
        told = f"a number from {least} to {most} is expected of torchrun or Slurm"
        raise UsageError(f"{name} is {text!r}", [told], [f"unset {name}, to run outside of a job"])
    return int(text)
