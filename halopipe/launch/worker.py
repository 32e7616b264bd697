"""What a process does that a launcher of this host has started: its part of the job; it leaves its result or its error.

rank(JOB.json)        a rank's work, as under torchrun
script(JOB.json)      a rank of a script's job (:mod:`halopipe.launch.parallelize`)
reference(JOB.json)   the first steps on one device, for the ranks to compare with: a job of one rank

Which rank it is, and where the store of its job is, its environment says as torchrun does
(:mod:`halopipe.launch.job_environment`).  The process begins with torch loaded and dies with its parent, see
:mod:`cuda_ops.device.fork_server`.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from halopipe.launch.job_environment import JobRank, job_rank
from halopipe.run_spec.event_log import EventLog, event_log_path
from halopipe.run_spec.job import Job

if TYPE_CHECKING:
    from cuda_ops._torch import Store
    from runtime.monitor.activity import StatusStore


def rank(path: str) -> int:
    """One rank of a job; the exit code says whether it succeeded."""

    def trained(own: JobRank, store: Store, board: StatusStore) -> str:
        from halopipe.training.work import work

        job = Job.read(Path(path))
        log = EventLog(event_log_path(job.folder, own.rank)) if job.options.restarts else None
        return work(job, own.rank, store, board, local_rank=own.local_rank, event_log=log).to_json()

    return leave_outcome(trained)


def script(path: str) -> int:
    """One rank of a script's job, until it is closed."""

    def serve(own: JobRank, store: Store, board: StatusStore) -> str:
        from halopipe.launch import script_rank

        script_rank.serve(Path(path).parent, own, store, board)
        return "closed"

    return leave_outcome(serve, is_named=True)


def reference(path: str) -> int:
    """The first steps on one device."""

    def run(*_: object) -> str:
        from halopipe.training.rank_device import device_assignment_of, device_of, prepare
        from halopipe.training.single_device import make_reference

        job = Job.read(Path(path))
        assignment = device_assignment_of(job.plan.decision, 0, job.options.device)
        prepare(assignment, job.plan.decision.num_ranks)  # on a core of its own, if there is one
        return make_reference(job, device_of(assignment, job.plan.prediction.ranks)).to_text()

    return leave_outcome(run)


def leave_outcome(do: Callable[[JobRank, Store, StatusStore], str], *, is_named: bool = False) -> int:
    """Leaves the result of ``do`` as this rank's, or its error; the exit code.

    Args:
        do: is given the rank, and the stores as of :func:`halopipe.launch.job_stores.job_stores`.
        is_named: whether the error is to name the rank.
    """
    from halopipe.launch.job_stores import job_stores  # late: loads torch
    from runtime.monitor.failure import also, leave_error, leave_result, read_error, write_error

    own = job_rank() or JobRank(0, 1)
    store, board = job_stores(own.rank, own.num_ranks)
    try:
        leave_result(store, own.rank, do(own, store, board))
    except Exception as error:  # noqa: BLE001  # whatever it is, the launcher must hear of it
        text = write_error(error)
        if is_named and f"rank {own.rank}" not in text:
            text = write_error(also(read_error(text), [f"on rank {own.rank}"]))
        with contextlib.suppress(OSError):  # its output is a file, and a disk may be full
            traceback.print_exception(error)
            sys.stderr.flush()
        leave_error(store, own.rank, text)
        return 1
    return 0
