"""What a worker process does: it becomes one device, then does one rank's work and leaves its result or its error.

python -m halopipe.launch.worker JOB.json RANK          a rank of a job on this host
python -m halopipe.launch.worker JOB.json reference     the first steps on one device, for the ranks to compare with
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from cuda_ops.device.host import die_with_parent
from halopipe.launch.processes import error_path, result_path
from halopipe.launch.rank_device import Seat, device_of, opened, prepare, seat_of
from halopipe.run_spec.job import REFERENCE, REFERENCE_RANK, Job
from planner.ir.files import write_text


def main(arguments: Sequence[str]) -> int:
    """Run one rank of a job that was spawned on this host; the exit code says whether it succeeded."""
    job = Job.read(Path(arguments[0]))
    die_with_parent(job.parent)
    rank = REFERENCE_RANK if arguments[1] == REFERENCE else int(arguments[1])
    seat = seat_of(job.plan.decision, max(rank, 0), job.options.device)
    prepare(seat, rank if rank >= 0 else job.plan.decision.num_ranks)  # one device: on a core of its own, if there is

    from runtime.monitor.failure import write_error  # late: it loads torch, and the process must be prepared before

    try:
        text = _reference(job, seat) if arguments[1] == REFERENCE else _rank(job, seat)
        write_text(result_path(job.folder, rank), text)
    except Exception as error:  # noqa: BLE001  # whatever it is, the launcher must hear of it
        write_text(error_path(job.folder, rank), write_error(error))
        traceback.print_exception(error)
        return 1
    return 0


def _reference(job: Job, seat: Seat) -> str:
    from halopipe.training.single_device import make_reference

    make_reference(job, device_of(seat))
    return "{}"


def _rank(job: Job, seat: Seat) -> str:
    device = device_of(seat)

    from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # public, but not by torch's types

    from halopipe.training.work import work
    from runtime.monitor.watch import SETUP_S, join_store

    board = join_store(job.address, job.port)
    store = PrefixStore("job", join_store(job.address, job.port))
    num_ranks = job.plan.decision.num_ranks
    return work(
        job,
        seat.rank,
        store,
        board,
        lambda groups, program: opened(seat, device, num_ranks, store, groups, program, SETUP_S),
        device=device,
    ).to_json()


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # at once: a sum that another rank will never join must not keep the process
