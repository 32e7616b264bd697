"""``profile``: measures a model and the links of this host, each in fresh, pinned processes."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import runpy
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from cuda_ops import core_of
from planner.ir.cluster import Cluster, DeviceSpec
from planner.ir.codec import fingerprint
from planner.ir.errors import UsageError
from planner.ir.profile import ModelSource, Optimizer, Profile, Provenance
from planner.layers import over_sites
from profiler.links.kept import KeptLinks, Quietness, keep, kept, key_of
from profiler.links.processes import LinkCosts, measure_links, num_measurements
from profiler.measure.contention import clocks, governor
from profiler.measure.devices import CPU, CUDA, Backend, chosen, described, num_at_once
from profiler.measure.job import MeasuringJob, PartShapesOf
from profiler.measure.partial_results import Unfinished
from profiler.measure.processes import MeasuredProcesses, measure_in_processes
from profiler.measure.progress import Overall, ProfileProgress
from profiler.measure.sizes import ReadBetween
from profiler.merge import (
    merged,
    merged_overhead_s,
    merged_parameters,
    merged_preparations,
    merged_seconds,
    process_spread,
)

__all__ = ["ProfileProgress", "profile"]

HOST = "n0"
NUM_PROCESSES = 3
_LINK_S = 6.0
_LINK_QUICK_S = 1.5

Progress = Callable[[ProfileProgress], None]


def profile(
    source: ModelSource,
    *,
    num_workers: int = 0,
    device: str = CPU,
    optimizer: Optimizer = Optimizer("SGD", {"lr": 0.01, "momentum": 0.9}, 1.0),  # noqa: B008 - it is frozen
    sizes: tuple[int, ...] | None = None,
    quick: bool = False,
    shapes: PartShapesOf | None = None,
    read: ReadBetween | None = None,
    num_processes: int = 0,
    unfinished: Path | None = None,
    resume: bool = False,
    transport: str = "",
    measure_machine: bool = False,
    progress: Progress | None = None,
    say: Callable[[str], None] | None = None,
) -> Profile:
    """What ``source`` costs on this host, for ``num_workers`` workers: of one core each, or of one GPU.

    Args:
        num_workers: 0: two, or as many as there are GPUs.
        device: ``cpu``, ``cuda``, or ``auto``: the GPUs, if there are some and enough for the workers.
        optimizer: whose updates are measured.
        sizes: numbers of samples to measure; None for those that matter (:mod:`profiler.measure.sizes`).
        read: what costs that are not measured are read by (``planner.costs.layers.interpolation.layer_cost``), so that
            no more is measured than that needs; None: all divisors of the batch are, and all of ``shapes``.
        quick: fewer sizes and runs, larger spread.
        shapes: says which parts of layers may be measured at their own shapes (``costs.layers.part_shapes``), being
            asked in the measuring process; None: whole layers alone.
        num_processes: that measure the same, one after another; 0: three, or one if ``quick``.
        unfinished: file that keeps what is finished, for ``resume``; it is the caller's to remove.
        resume: go on with what ``unfinished`` holds of the same job.
        transport: that links between cores are measured with, as of :func:`profiler.links.cpu.opened`.
        measure_machine: measure links between cores also where an earlier profile has (:mod:`profiler.links.kept`).
        progress: called a few times a second at most sizes.
        say: called with sentences for people.

    Raises:
        MissingDeviceError: this host has no GPU, or fewer than there are to be workers.
        HalopipeError: the model cannot be built, captured or run, or a measuring process died.
    """
    if num_workers < 0:
        raise UsageError("there must be a worker", [f"workers: {num_workers}"])
    if num_processes < 0:
        raise UsageError("a process must measure", [f"processes: {num_processes}"])
    kind, num_workers = chosen(device, num_workers)
    devices = described(kind, HOST, num_workers)
    num_links = _num_links(kind, len(devices))
    job = MeasuringJob(
        source,
        optimizer,
        sizes or (),
        quick,
        shapes=shapes,
        read=read,
        device="cpu" if kind.type == CPU else f"{kind.type}:0",
        num_processes=num_processes or (1 if quick else NUM_PROCESSES),
        num_devices=num_at_once(kind, len(devices)),
    )
    pieces = Unfinished(unfinished, _fingerprint(job, devices[0].kind), resume, say or _silent)

    link_s = _LINK_QUICK_S if quick else _LINK_S
    earlier = None if measure_machine or kind.type == CUDA or not num_links else _earlier(devices, quick, transport)
    overall = Overall(job.num_processes, progress or _silent, 0 if earlier else num_links, link_s)
    measured = measure_in_processes(job, pieces, overall, say or _silent)
    links = LinkCosts({})
    links_measured_at = ""
    if num_links and kind.type == CUDA:
        from profiler.links.gpu import measure_gpu_links  # late: it loads torch

        links = measure_gpu_links(len(devices), quick, overall.link)
    elif num_links:
        sites = bool(over_sites(measured.graph))
        now = _quietness(measured)
        if earlier is not None and earlier.stands_for(now, sites):
            links = earlier.wanted(sites)
            links_measured_at = earlier.measured_at
        else:
            if earlier is not None:
                (say or _silent)("the machine is not as it was when its links were measured: they are measured again")
                overall.links_doubted(num_links)
            links = measure_links(len(devices), quick, overall.link, transport, sites=sites)
            keep(key_of(devices, quick, transport, versions()), _now(), now, links)
    cluster = Cluster(devices, links.links, links.collectives)
    return _profile(job, measured, cluster, devices[0].kind, links_measured_at)


def _earlier(devices: tuple[DeviceSpec, ...], quick: bool, transport: str) -> KeptLinks | None:
    """What an earlier profile found of the links, with all repetitions if it can be had."""
    full = kept(key_of(devices, False, transport, versions()), devices)
    return full or (kept(key_of(devices, True, transport, versions()), devices) if quick else None)


def _quietness(measured: MeasuredProcesses) -> Quietness:
    canaries_s = [s for each in measured.processes for s in (each.canary_before_s, each.canary_after_s)]
    return Quietness(min(canaries_s), any(each.contended for each in measured.processes))


def _profile(
    job: MeasuringJob, measured: MeasuredProcesses, cluster: Cluster, kind: str, links_measured_at: str
) -> Profile:
    by_process = measured.costs
    parts = merged(costs.parts for costs in by_process)
    preparations = merged_preparations(costs.rest.preparations for costs in by_process)
    overhead_s = merged_overhead_s(by_process)
    return Profile(
        model=job.source,
        optimizer=job.optimizer,
        graph=measured.graph,
        cluster=cluster,
        measurements={kind: merged(costs.measurements for costs in by_process)},
        parameters={kind: merged_parameters([costs.rest.parameters for costs in by_process])},
        provenance=replace(_provenance(measured), links_measured_at=links_measured_at),
        parts={kind: parts} if parts else {},
        action_overhead_s={} if overhead_s is None else {kind: overhead_s},
        preparations={kind: preparations} if preparations else {},
        site_halos=by_process[0].rest.site_halos,
        slowdowns={kind: by_process[0].rest.slowdowns} if by_process[0].rest.slowdowns else {},
    )


def _num_links(kind: Backend, num_workers: int) -> int:
    """How often measuring the links reports progress; 0: there are none."""
    if num_workers < 2:
        return 0
    if kind.type != CUDA:
        return num_measurements(num_workers)
    from profiler.links.gpu import num_gpu_measurements  # late: it loads torch

    return num_gpu_measurements(num_workers)


def _provenance(measured: MeasuredProcesses) -> Provenance:
    processes = measured.processes
    return Provenance(
        versions=versions(),
        canary_before_s=processes[0].canary_before_s,
        canary_after_s=processes[-1].canary_after_s,
        run_delay=max(each.run_delay for each in processes),
        contended=any(each.contended for each in processes),
        iteration_s=merged_seconds([costs.iteration_s for costs in measured.costs]),
        processes=processes,
        process_spread=process_spread(processes),
        clocks={**clocks(core_of(0)), **_accelerator_clocks(measured)},
        governor=governor(core_of(0)),
        measured_at=_now(),
    )


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ")


def _accelerator_clocks(measured: MeasuredProcesses) -> dict[str, float]:
    """Hertz at work of the first and the last process; nothing of a processor."""
    first = measured.costs[0].rest.clocks_before
    last = measured.costs[-1].rest.clocks_after
    return {f"{name}_before": value for name, value in first.items()} | {
        f"{name}_after": value for name, value in last.items()
    }


def _fingerprint(job: MeasuringJob, processor: str) -> str:
    """Of everything that decides what is measured and where, but the model's own code: its graph has one of its own."""
    shapes = job.shapes
    function = getattr(shapes, "func", shapes)
    reads = getattr(job.read, "__qualname__", "")
    asked = [reads, getattr(function, "__qualname__", ""), getattr(shapes, "args", ()), getattr(shapes, "keywords", {})]
    options = [job.sizes, job.quick, job.seed, job.device, job.num_processes, job.num_devices, asked]
    return fingerprint([job.source, job.optimizer, options, versions(), processor])


def versions() -> dict[str, str]:
    """Of what a profile depends on."""
    try:
        release = importlib.metadata.version("halopipe")
    except importlib.metadata.PackageNotFoundError:
        release = "source"
    return {
        "halopipe": release,
        "torch": _torch_version(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
    }


def _torch_version() -> str:
    """``torch.__version__``, which names the build as well, without loading torch."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None, "halopipe depends on it"
    assert spec.origin is not None, "it is a folder with an __init__"
    return str(runpy.run_path(str(Path(spec.origin).with_name("version.py")))["__version__"])


def _silent(_: object) -> None:
    """Nobody listens."""
