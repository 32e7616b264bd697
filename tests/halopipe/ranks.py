"""Runs of whole plans, every rank a thread of this process."""

from __future__ import annotations

import threading
from pathlib import Path

import torch
import torch.distributed as dist

from halopipe.launch.combine import combine
from halopipe.run_spec.job import REFERENCE, Job, RankResult
from halopipe.run_spec.options import RunOptions
from halopipe.run_spec.result import RunResult
from halopipe.training.check_options import require_consistent
from halopipe.training.single_device import make_reference
from halopipe.training.work import work
from planner.ir.plan import Plan
from runtime.monitor.failure import blame, set_text, write_error
from runtime.transport import Hub, InProcessTransport
from tests import captures


class Told(dist.HashStore):
    """A store that tells when a rank has captured its model, and says whether it agrees with rank 0."""

    def __init__(self, came: dict[int, threading.Event]) -> None:
        super().__init__()
        self._came = came

    def set(self, key: str, value: str) -> None:
        super().set(key, value)
        if key.startswith("agreed/"):
            self._came[int(key.removeprefix("agreed/"))].set()


def run_job(plan: Plan, folder: Path, *, device: torch.device | None = None, **options: object) -> RunResult:
    """What a run of ``plan`` shows; the error to blame for the others is raised.

    Ranks and the run on one device get copies of one capture of the model (:mod:`tests.captures`).
    """
    with captures.shared():
        return _run_job(plan, folder, device, **options)


def _run_job(plan: Plan, folder: Path, device: torch.device | None, **options: object) -> RunResult:
    job = Job(
        plan, RunOptions(**{"steps": 6, "warmup": 0, "deadline_s": 20.0, "check_first_step": False, **options}), folder
    )
    require_consistent(plan, job.options)
    came: dict[int, threading.Event] = {}
    store = Told(came)
    if job.is_compared:
        set_text(store, REFERENCE, make_reference(job).to_text())
    num_ranks = plan.decision.num_ranks
    hubs: dict[str, Hub] = {}
    found: dict[int, RankResult] = {}
    errors: list[BaseException] = []

    def one(rank: int) -> None:
        def open_transport(groups: tuple[tuple[int, ...], ...], program: object) -> InProcessTransport:
            hub = hubs.setdefault("hub", Hub(num_ranks, groups))
            return InProcessTransport(hub, rank)

        try:
            found[rank] = work(job, rank, store, store, open_transport, device=device)
        except Exception as error:  # noqa: BLE001  # raised below, in the test's own thread
            errors.append(error)
        finally:
            came[rank].set()

    threads = []
    for rank in range(num_ranks):
        came[rank] = threading.Event()
        threads.append(threading.Thread(target=one, args=(rank,)))
        threads[-1].start()
        came[rank].wait()  # models are captured one after the other: torch.export is not made for threads
        if errors:
            for other in range(rank, num_ranks):  # which those before wait for
                dist.HashStore.set(store, f"agreed/{other}", write_error(errors[0]))
            break
    for thread in threads:
        thread.join()
    if errors:
        errors.sort(key=blame)
        raise errors[0]
    return combine(plan, job.options, [found[rank] for rank in sorted(found)], None)
