"""What a worker process does: it becomes one device, then does one rank's work and leaves its result or its error.

main(JOB.json, RANK)            a rank of a job on this host
main(JOB.json, "reference")     the first steps on one device, for the ranks to compare with
serve(FOLDER/..., RANK)         a rank of a script's job (:mod:`halopipe.launch.parallelize`)

The process begins with torch loaded and dies with its parent, see :mod:`cuda_ops.device.fork_server`.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from halopipe.run_spec.job import (
    NO_ROOM,
    REFERENCE,
    REFERENCE_RANK,
    EventLog,
    Job,
    error_path,
    event_log_path,
    result_path,
)
from planner.ir.errors import HalopipeError
from planner.ir.files import write_text

if TYPE_CHECKING:
    from halopipe.training.loop import AfterStep
    from runtime.engine import StepResult
    from runtime.monitor.activity import Activity


def main(path: str, part: str) -> int:
    """Run one rank of a job that was spawned on this host; the exit code says whether it succeeded."""
    job = Job.read(Path(path))
    is_reference = part == REFERENCE
    rank = REFERENCE_RANK if is_reference else int(part)

    return told(job.folder, rank, lambda: _reference(job) if is_reference else work_as(job, rank))


def serve(path: str, part: str) -> int:
    """Be one rank of a script's job on this host, until it is closed."""
    folder, rank = Path(path).parent, int(part)

    def do() -> str:
        from halopipe.launch import script_rank

        script_rank.serve(folder, rank)
        return "closed"

    return told(folder, rank, do, f"on rank {rank}")


def told(folder: Path, rank: int, do: Callable[[], str], where: str = "") -> int:
    """Leaves the result, or the error, with ``where`` it happened unless it says that itself; the exit code."""
    from runtime.monitor.failure import also, read_error, write_error  # late: it loads torch

    try:
        text = do()
        folder.mkdir(mode=0o700, exist_ok=True)  # what cleans up temporary files may have removed it meanwhile
        write_text(result_path(folder, rank), text)
    except Exception as error:  # noqa: BLE001  # whatever it is, the launcher must hear of it
        text = write_error(error)
        if where and f"rank {rank}" not in text:
            text = write_error(also(read_error(text), [where]))
        with contextlib.suppress(OSError):  # its output is in the same folder
            traceback.print_exception(error)
            sys.stderr.flush()
        try:
            write_text(error_path(folder, rank), text)  # a launcher that ended has removed the folder: it stays away
        except HalopipeError:
            return NO_ROOM
        return 1
    return 0


def _reference(job: Job) -> str:
    from halopipe.training.rank_device import device_assignment_of, device_of, prepare
    from halopipe.training.single_device import make_reference

    assignment = device_assignment_of(job.plan.decision, 0, job.options.device)
    prepare(assignment, job.plan.decision.num_ranks)  # on a core of its own, if there is one
    make_reference(job, device_of(assignment, job.plan.prediction.ranks))
    return "{}"


def _ignore(step: int, result: StepResult, activity: Activity) -> None:
    """Nobody is told of steps."""


def work_as(job: Job, rank: int, after_step: AfterStep = _ignore) -> str:
    """The work of one rank in a process of its own on this host; its result as text.

    Args:
        after_step: told of each step.
    """
    from cuda_ops._torch import PrefixStore
    from halopipe.training.work import work
    from runtime.monitor.watch import LOOPBACK, join_store

    board = join_store(LOOPBACK, job.port)
    store = PrefixStore("job", join_store(LOOPBACK, job.port))
    event_log = EventLog(event_log_path(job.folder, rank)) if job.options.restarts else None
    return work(job, rank, store, board, after_step=after_step, local_rank=rank, event_log=event_log).to_json()
