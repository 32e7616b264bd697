"""What a worker process does: it becomes one device, then does one rank's work and leaves its result or its error.

main(JOB.json, RANK, PORT)            a rank of a job on this host
main(JOB.json, "reference", PORT)     the first steps on one device, for the ranks to compare with
serve(FOLDER/..., RANK, PORT)         a rank of a script's job (:mod:`halopipe.launch.parallelize`)

PORT is that of the job's store, which the launcher hosts on this host.  The process begins with torch loaded and dies
with its parent, see :mod:`cuda_ops.device.fork_server`.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from halopipe.run_spec.job import REFERENCE, REFERENCE_RANK, EventLog, Job, event_log_path

if TYPE_CHECKING:
    from halopipe.training.loop import AfterStep


def main(path: str, part: str, port: str) -> int:
    """Run one rank of a job that was spawned on this host; the exit code says whether it succeeded."""
    is_reference = part == REFERENCE
    rank = REFERENCE_RANK if is_reference else int(part)

    def do() -> str:
        job = Job.read(Path(path))
        return _reference(job) if is_reference else work_as(job, rank, int(port))

    return told(int(port), rank, do)


def serve(path: str, part: str, port: str) -> int:
    """Be one rank of a script's job on this host, until it is closed."""
    folder, rank = Path(path).parent, int(part)

    def do() -> str:
        from halopipe.launch import script_rank

        script_rank.serve(folder, rank, int(port))
        return "closed"

    return told(int(port), rank, do, f"on rank {rank}")


def told(port: int, rank: int, do: Callable[[], str], where: str = "") -> int:
    """Leaves the result, or the error, with ``where`` it happened unless it says that itself; the exit code."""
    from runtime.monitor.failure import also, leave_error, leave_result, read_error, write_error  # late: loads torch
    from runtime.monitor.watch import LOOPBACK, join_store

    store = join_store(LOOPBACK, port)
    try:
        leave_result(store, rank, do())
    except Exception as error:  # noqa: BLE001  # whatever it is, the launcher must hear of it
        text = write_error(error)
        if where and f"rank {rank}" not in text:
            text = write_error(also(read_error(text), [where]))
        with contextlib.suppress(OSError):  # its output is a file, and a disk may be full
            traceback.print_exception(error)
            sys.stderr.flush()
        leave_error(store, rank, text)
        return 1
    return 0


def _reference(job: Job) -> str:
    from halopipe.training.rank_device import device_assignment_of, device_of, prepare
    from halopipe.training.single_device import make_reference

    assignment = device_assignment_of(job.plan.decision, 0, job.options.device)
    prepare(assignment, job.plan.decision.num_ranks)  # on a core of its own, if there is one
    make_reference(job, device_of(assignment, job.plan.prediction.ranks))
    return "{}"


def work_as(job: Job, rank: int, port: int, after_step: AfterStep | None = None) -> str:
    """The work of one rank in a process of its own on this host; its result as text.

    Args:
        port: of the job's store.
        after_step: told of each step; None: nobody is.
    """
    from cuda_ops._torch import PrefixStore
    from halopipe.training.work import work
    from runtime.monitor.watch import LOOPBACK, join_store

    board = join_store(LOOPBACK, port)
    store = PrefixStore("job", join_store(LOOPBACK, port))
    event_log = EventLog(event_log_path(job.folder, rank)) if job.options.restarts else None
    return work(job, rank, store, board, after_step=after_step, local_rank=rank, event_log=event_log).to_json()
