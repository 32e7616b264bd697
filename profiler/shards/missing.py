"""Measures what a plan uses and its profile does not hold: the same processes, sizes and parts being given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from planner.ir.cluster import Collective
from planner.ir.codec import fingerprint
from planner.ir.errors import MissingDeviceError
from planner.ir.profile import Measurement, PartShape, Profile
from planner.layers import over_sites
from profiler.measure.child_process import Child
from profiler.measure.devices import BACKENDS, Backend, described
from profiler.measure.job import MeasuringJob
from profiler.measure.partial_results import ChosenMeasurements, ModelCosts
from profiler.measure.processes import SILENCE_S
from profiler.measure.progress import Overall, ProfileProgress
from profiler.merge import merged, merged_overhead_s

ShowProfile = Callable[[ProfileProgress], None]


@dataclass(frozen=True, slots=True)
class FoundMissing:
    """What was measured.

    Attributes:
        whole: layers, at the sizes at which the model runs.
        parts: those that can be run alone.
        is_contended: whether the machine was busy.
        action_overhead_s: as of a ``Profile``; None beside an accelerator.
        calls: what ranks compute around exchanges, if asked for.
    """

    whole: tuple[Measurement, ...]
    parts: tuple[Measurement, ...]
    is_contended: bool
    action_overhead_s: float | None = None
    calls: tuple[Collective, ...] = ()


def measure_missing(
    profile: Profile,
    device_kind: str,
    sizes: Sequence[int],
    shapes: Sequence[PartShape],
    *,
    quick: bool = False,
    progress: ShowProfile | None = None,
) -> FoundMissing:
    """Layers of the profile's model at ``sizes`` samples, and parts ``shapes`` of them, in as many processes as before.

    Args:
        device_kind: that of devices of this machine.
        quick: fewer runs, in one process.

    Raises:
        MissingDeviceError: this machine has no device of that kind.
        StaleFileError: the model is another one than that of the profile.
        HalopipeError: the model cannot be built, captured or run, or a measuring process died.
    """
    backend = backend_of(device_kind)
    largest = max((shape.samples for shape in shapes), default=0)
    cut_from = () if not largest or max(sizes, default=0) >= largest else (largest,)
    num_processes = 1 if quick else max(1, len(profile.provenance.processes))
    job = MeasuringJob(
        profile.model,
        profile.optimizer,
        tuple(sizes),
        quick,
        device="cpu" if backend.type == "cpu" else f"{backend.type}:0",
        num_processes=num_processes,
        chosen=ChosenMeasurements(tuple(sorted({*sizes, *cut_from})), tuple(shapes)),
        graph=fingerprint(profile.graph),
    )
    overall = Overall(num_processes, progress or (lambda at: None))
    by_process = [_measured(job, backend, overall) for _ in range(num_processes)]
    return FoundMissing(
        merged(costs.measurements for costs in by_process),
        merged(costs.parts for costs in by_process),
        any(costs.rest.is_contended for costs in by_process),
        merged_overhead_s(by_process),
    )


def measure_calls(profile: Profile, device_kind: str) -> tuple[Collective, ...]:
    """What ranks compute around exchanges, on a device of this machine.

    Raises:
        MissingDeviceError: this machine has no device of that kind.
        WorkerError: the measuring process died.
    """
    link = next(iter(profile.cluster.links))
    core = backend_of(device_kind).cores(0, 1)
    with Child("profiler.links.calls:report_calls", link, bool(over_sites(profile.graph)), core=core) as child:
        collectives: tuple[Collective, ...] = child.result(SILENCE_S)
    return collectives


def backend_of(device_kind: str) -> Backend:
    """The torch backend of this machine's devices of that kind.

    Raises:
        MissingDeviceError: it has none.
    """
    there = []
    for backend in BACKENDS.values():
        if backend.count():
            kind = described(backend, "n0", 1)[0].kind
            if kind == device_kind:
                return backend
            there.append(kind)
    raise MissingDeviceError(
        f"{device_kind} cannot be measured on this machine",
        [f"devices here: {', '.join(there) or 'none'}"],
        ["run it on a machine that has such a device", "plan without --measure-missing"],
    )


def _measured(job: MeasuringJob, backend: Backend, progress: Overall) -> ModelCosts:
    def show(report: object) -> None:
        if isinstance(report, ProfileProgress):
            progress.show(report)

    with Child("profiler.measure.worker:measure_model", job, core=backend.cores(0, 1)) as child:
        costs: ModelCosts = child.finish(SILENCE_S, show)
    progress.ended()
    return costs
