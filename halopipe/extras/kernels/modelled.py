"""``halopipe profile --on``: a profile for devices that are not here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from halopipe.planning import measure
from halopipe.planning.options import ProfileOptions
from halopipe.terminal.console import Reporter
from planner.extras.catalogue.clusters import read_machines
from planner.extras.kernels.clusters import SYSTEMS, cluster_of
from planner.ir.errors import UsageError
from planner.ir.profile import ModelSource, Profile
from profiler.extras.modelled.session import profile_on


def modelled(
    source: ModelSource, asked: ProfileOptions, *, refused: Sequence[str] = (), quiet: bool = False
) -> Profile:
    """The profile of ``source`` on devices that are not here, by models of their kernels.

    Args:
        asked: ``on`` is a system of :data:`planner.extras.kernels.clusters.SYSTEMS`, or a cluster file; ``workers``
            are devices of a system, 0: those of one host.
        refused: options that are of no use here, and were given.

    Raises:
        UsageError: ``refused`` are some, or a cluster file is given a number of devices.
        UnknownNameError, InputFileError: of ``on`` and ``tables``.
        FactoryError, UnsupportedModelError: the model needs values, or cannot be captured.
    """
    on = asked.on
    workers = asked.workers
    if not on:
        raise UsageError("--tables is for --on", [], ["--on h100-dgx, or a cluster file"])
    if refused:
        raise UsageError(
            f"{', '.join(refused)}: of no use with 'on'",
            ["nothing is measured: kernel models tell the times"],
            ["leave it out"],
        )
    is_file = on not in SYSTEMS and (Path(on).suffix in (".yaml", ".yml") or Path(on).exists())
    if is_file and workers:
        raise UsageError(f"{on} says how many devices there are", [f"--workers {workers}"], ["leave out --workers"])
    cluster = read_machines(on).cluster if is_file else cluster_of(on, workers)
    with Reporter("pricing", quiet=quiet) as reporter:
        return profile_on(
            source,
            cluster,
            measure.optimizer_of(asked),
            tuple(asked.sizes),
            asked.tables,
            lambda done, total: reporter.update(done, total, f"size {done + 1} of {total}", None),
        )
