"""``profile``: measures a model and the links of this host, each in fresh, pinned processes."""

from __future__ import annotations

import importlib.metadata
import platform
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from cuda_ops import core_of, device_description
from planner.ir.cluster import WITHIN_HOST, Cluster, DeviceSpec
from planner.ir.errors import UsageError
from planner.ir.profile import ModelSource, Optimizer, Profile, Provenance
from profiler.child import Child
from profiler.counter import ProfileProgress
from profiler.links import LinkCosts, measure_links, num_measurements
from profiler.measuring import Job, ModelCosts, Shapes
from profiler.quiet import is_contended

__all__ = ["ProfileProgress", "profile"]

HOST = "n0"
_SILENCE_S = 600.0  # between two reports: a capture, or a pass over the largest batch

Progress = Callable[[ProfileProgress], None]


def profile(
    source: ModelSource,
    *,
    num_workers: int = 2,
    optimizer: Optimizer = Optimizer("SGD", {"lr": 0.01, "momentum": 0.9}, 1.0),  # noqa: B008 - it is frozen
    sizes: tuple[int, ...] | None = None,
    quick: bool = False,
    shapes: Shapes | None = None,
    progress: Progress | None = None,
) -> Profile:
    """What ``source`` costs on this host, for ``num_workers`` workers of one core each.

    Args:
        optimizer: whose updates are measured.
        sizes: numbers of samples to measure; None for the divisors of the example's.
        quick: fewer runs, larger spread.
        shapes: says which parts of layers are measured at their own shapes (``planner.costs.part_shapes``), being
            asked in the measuring process; None: whole layers alone.
        progress: called a few times a second at most sizes.

    Raises:
        HalopipeError: the model cannot be built, captured or run, or a measuring process died.
    """
    if num_workers < 1:
        raise UsageError("there must be a worker", [f"workers: {num_workers}"])
    device = device_description(num_workers)
    num_links = num_measurements(num_workers) if num_workers > 1 else 0
    costs = _measure_model(Job(source, optimizer, sizes or (), quick, shapes=shapes), num_links, progress)
    links = _measure_links(num_workers, quick, num_links, progress) if num_links else None
    devices = tuple(
        DeviceSpec(f"{HOST}/cpu{rank}", device.processor, HOST, device.memory_bytes) for rank in range(num_workers)
    )
    return Profile(
        model=source,
        optimizer=optimizer,
        graph=costs.graph,
        cluster=Cluster(devices, {WITHIN_HOST: links.link} if links else {}, links.collectives if links else ()),
        measurements={device.processor: costs.measurements},
        parameters={device.processor: costs.parameters},
        provenance=_provenance(costs),
        parts={device.processor: costs.parts} if costs.parts else {},
        preparations={device.processor: costs.preparations} if costs.preparations else {},
        site_halos=costs.site_halos,
    )


def _measure_model(job: Job, num_links: int, progress: Progress | None) -> ModelCosts:
    with Child("profiler.measuring:measure_model", job, core=core_of(0)) as child:
        reports = child.reports(_SILENCE_S)
        while True:
            try:
                report: ProfileProgress = next(reports)
            except StopIteration as stop:
                return stop.value
            if progress is not None:
                progress(replace(report, total=report.total + num_links))


def _measure_links(num_workers: int, quick: bool, num_links: int, progress: Progress | None) -> LinkCosts:
    start_s, done = time.monotonic(), 0

    def show(what: str, seconds: float) -> None:
        nonlocal done
        done += 1
        if progress is not None:
            eta_s = (time.monotonic() - start_s) / done * (num_links - done)
            progress(ProfileProgress(what, seconds, 0.0, done, num_links, eta_s))

    return measure_links(num_workers, quick, show)


def _provenance(costs: ModelCosts) -> Provenance:
    try:
        release = importlib.metadata.version("halopipe")
    except importlib.metadata.PackageNotFoundError:
        release = "source"
    versions = {
        "halopipe": release,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
    }
    return Provenance(
        versions=versions,
        canary_before_s=costs.canary_before_s,
        canary_after_s=costs.canary_after_s,
        run_delay=round(costs.run_delay, 5),
        contended=is_contended(costs.run_delay, costs.canary_before_s, costs.canary_after_s),
        iteration_s=costs.iteration_s,
    )
