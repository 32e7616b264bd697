"""What a worker process does: it becomes one device, then does one rank's work and leaves its result or its error.

main(JOB.json, RANK)            a rank of a job on this host
main(JOB.json, "reference")     the first steps on one device, for the ranks to compare with

The process begins with torch loaded and dies with its parent, see :mod:`cuda_ops.device.fork_server`.
"""

from __future__ import annotations

import traceback
from pathlib import Path

from halopipe.launch.processes import error_path, result_path
from halopipe.run_spec.job import REFERENCE, REFERENCE_RANK, Job
from planner.ir.files import write_text


def main(path: str, part: str) -> int:
    """Run one rank of a job that was spawned on this host; the exit code says whether it succeeded."""
    job = Job.read(Path(path))
    is_reference = part == REFERENCE
    rank = REFERENCE_RANK if is_reference else int(part)

    from runtime.monitor.failure import write_error  # late: it loads torch

    try:
        write_text(result_path(job.folder, rank), _reference(job) if is_reference else _rank(job, rank))
    except Exception as error:  # noqa: BLE001  # whatever it is, the launcher must hear of it
        write_text(error_path(job.folder, rank), write_error(error))
        traceback.print_exception(error)
        return 1
    return 0


def _reference(job: Job) -> str:
    from halopipe.training.rank_device import device_of, prepare, seat_of
    from halopipe.training.single_device import make_reference

    seat = seat_of(job.plan.decision, 0, job.options.device)
    prepare(seat, job.plan.decision.num_ranks)  # on a core of its own, if there is one
    make_reference(job, device_of(seat))
    return "{}"


def _rank(job: Job, rank: int) -> str:
    from cuda_ops._torch import PrefixStore
    from halopipe.training.work import work
    from runtime.monitor.watch import LOOPBACK, join_store

    board = join_store(LOOPBACK, job.port)
    store = PrefixStore("job", join_store(LOOPBACK, job.port))
    return work(job, rank, store, board, local_rank=rank).to_json()
