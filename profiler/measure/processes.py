"""The measuring processes: fresh ones, one after another on one core; what met a busy machine is measured once more.

A process met one if it waited for a core for more than 1 % of its time, or if a fixed kernel's pace changed by more
than 5 % meanwhile (:mod:`profiler.measure.contention`); only the sizes and parts that it measured then are repeated,
and none by a quick profile.

The first chooses what is measured, the others repeat it.  What a process has finished is kept as it comes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from cuda_ops.device.gpus import may_have_gpus
from planner.ir.codec import fingerprint
from planner.ir.errors import StaleFileError
from planner.ir.graph import Graph
from planner.ir.profile import MeasuringProcess
from planner.ir.scratch import scratch_folder
from profiler.measure.child_process import Child
from profiler.measure.contention import MOST_DRIFT, MOST_RUN_DELAY
from profiler.measure.devices import BACKENDS
from profiler.measure.job import MeasuringJob
from profiler.measure.partial_results import (
    CapturedGraph,
    ChosenMeasurements,
    FinishedMeasurements,
    ModelCosts,
    PartCosts,
    Rest,
    SizeCosts,
    Unfinished,
)
from profiler.measure.progress import Overall, ProfileProgress
from profiler.merge import process_of

SILENCE_S = 600.0  # between two reports: a capture, or a pass over the largest batch

Say = Callable[[str], None]

_NOTHING = FinishedMeasurements()


@dataclass(frozen=True, slots=True)
class MeasuredProcesses:
    """What all processes found: of each the quieter of its runs."""

    graph: Graph
    costs: tuple[ModelCosts, ...]
    processes: tuple[MeasuringProcess, ...]


def measure_in_processes(job: MeasuringJob, unfinished: Unfinished, progress: Overall, say: Say) -> MeasuredProcesses:
    """Measures ``job`` in ``job.num_processes`` processes, beginning with what is kept in ``unfinished``.

    Raises:
        HalopipeError: the model cannot be built, captured or run, or a process died.
    """
    resumed = bool(unfinished.contents.processes)
    try:
        return _Processes(job, unfinished, progress, say).run()
    except StaleFileError as error:
        if not resumed:
            raise
        say(f"the interrupted profile measured another graph ({error.details[0]}): it starts again")
        unfinished.drop()
        return _Processes(job, unfinished, progress, say).run()


class _Processes:
    def __init__(self, job: MeasuringJob, unfinished: Unfinished, progress: Overall, say: Say) -> None:
        self._job = job
        self._unfinished = unfinished
        self._say = say
        self._progress = progress
        self._graph: Graph | None = None

    def run(self) -> MeasuredProcesses:
        kept: list[ModelCosts] = []
        processes: list[MeasuringProcess] = []
        for number in range(self._job.num_processes):
            best, repeated = self._quietest(number, kept[0].chosen if kept else None)
            kept.append(best)
            processes.append(process_of(best, repeated))
        if self._graph is None:  # an earlier profile measured everything
            self._run("profiler.measure.worker:capture_model", self._next_job(FinishedMeasurements(), None), "")
        assert self._graph is not None, "every process says what it captured"
        return MeasuredProcesses(self._graph, tuple(kept), tuple(processes))

    def _quietest(self, number: int, chosen: ChosenMeasurements | None) -> tuple[ModelCosts, bool]:
        """What the process found, and whether it ran twice."""
        first = self._costs(number, chosen)
        if self._job.quick or not first.rest.is_contended:
            return first, False
        self._say(
            f"process {number + 1} of {self._job.num_processes} met a busy machine ({_noise_text(first.rest)}): "
            f"{_pieces_text(first)} once more"
        )
        self._progress.repeated()
        second = self._costs(number, first.chosen, first.undisturbed, repeated=True)
        best = min(first, second, key=lambda costs: _noise(costs.rest))
        self._say(
            f"its {'first' if best is first else 'second'} run was quieter, and counts ({_noise_text(best.rest)})"
        )
        return best, True

    def _costs(
        self,
        number: int,
        chosen: ChosenMeasurements | None,
        earlier: FinishedMeasurements = _NOTHING,
        *,
        repeated: bool = False,
    ) -> ModelCosts:
        """What a process finds, or found in an earlier profile, beside ``earlier`` pieces.

        Beside the first stand those of the host's other devices.
        """
        name = f"{number} again" if repeated else f"{number}"
        kept = self._unfinished.of(name)
        done = earlier.beside(kept.done)
        if kept.rest is not None:
            self._progress.ended(measured=False)
            return ModelCosts(done, kept.rest)
        job = self._next_job(done, chosen)
        with self._beside(job) if number == 0 else nullcontext(job) as asked:
            costs: ModelCosts = self._run("profiler.measure.worker:measure_model", asked, name)
        for change in costs.left_out:
            self._say(f"the back end of convolutions changes from {change}; this was not measured on both sides")
        self._unfinished.add(name, costs.rest)
        self._progress.ended()
        return costs

    def _next_job(self, done: FinishedMeasurements, chosen: ChosenMeasurements | None) -> MeasuringJob:
        return replace(self._job, chosen=chosen, done=done, graph=self._unfinished.contents.graph)

    @contextmanager
    def _beside(self, job: MeasuringJob) -> Iterator[MeasuringJob]:
        """The job of a process beside which those of the host's other devices stand, ready to compute.

        It forks them, which saves another capture of the network, unless torch sees a GPU: then autograd has threads.
        """
        if job.num_devices < 2:
            yield job
            return
        backend, _, first = job.device.partition(":")
        cores = [BACKENDS[backend].cores(number, job.num_devices) for number in range(1, job.num_devices)]
        with scratch_folder("together") as folder, ExitStack() as stack:
            (signals := folder / "signals").write_bytes(bytes(8 * job.num_devices))
            asked = replace(job, signals=str(signals))
            if not BACKENDS[backend].is_accelerator and hasattr(os, "pidfd_open") and not may_have_gpus():
                yield replace(asked, cores_beside=tuple(cores))
                return
            for number, core in enumerate(cores, 1):
                device = f"{backend}:{int(first) + number}" if first else backend
                own = replace(asked, device=device)
                stack.enter_context(Child("profiler.measure.worker:compute_beside", own, number, core=core))
            yield asked

    def _run(self, function: str, job: MeasuringJob, name: str) -> Any:
        with Child(function, job, core=BACKENDS[self._job.device.partition(":")[0]].cores(0, 1)) as child:
            return child.finish(SILENCE_S, lambda report: self._take(report, name))

    def _take(self, report: ProfileProgress | CapturedGraph | SizeCosts | PartCosts, name: str) -> None:
        if isinstance(report, ProfileProgress):
            self._progress.show(report)
        elif isinstance(report, CapturedGraph):
            for remark in report.remarks if self._graph is None else ():
                self._say(remark)
            self._graph = report.graph
            self._progress.captured()
            self._unfinished.captured(fingerprint(report.graph))
        else:
            self._unfinished.add(name, report)


def _noise(rest: Rest) -> float:
    """By how many times what is allowed the machine was busy."""
    drift = abs(rest.canary_after_s / rest.canary_before_s - 1)
    return max(rest.run_delay / MOST_RUN_DELAY, drift / MOST_DRIFT)


def _pieces_text(costs: ModelCosts) -> str:
    """How much of it is measured again."""
    undisturbed = costs.undisturbed
    done = costs.done
    num_again = len(done.sizes) + len(done.parts) - len(undisturbed.sizes) - len(undisturbed.parts)
    return f"{num_again} of {len(done.sizes) + len(done.parts)} sizes and rounds of parts are measured"


def _noise_text(rest: Rest) -> str:
    drift = rest.canary_after_s / rest.canary_before_s - 1
    return f"{rest.run_delay:.1%} of its time it waited for a core, a fixed kernel's time changed by {drift:+.1%}"
