"""What ``halopipe ways --fits`` says: whether a step fits, what the memory is made of, and what would make it fit."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halopipe.extras.transformers.networks import Network, network_of
from halopipe.extras.transformers.options import WaysOptions
from halopipe.extras.transformers.ways import ANY_WIDTH, GIB, cluster_of, memory_text, space_of
from halopipe.terminal import tables, units
from planner.extras.export.launchers.job import launch_data
from planner.extras.transformers.cluster import FRAGMENTED, RESERVED_BYTES, GpuCluster
from planner.extras.transformers.fits import Change, MemoryFit, changes, least, undivided
from planner.extras.transformers.search import PricedDegrees, search
from planner.extras.transformers.shape import Recompute
from planner.ir.errors import UsageError
from planner.ir.files import write_text

_GAP = 0.1
"""How near the best the way is proven that a change is shown with."""
_CHANGE_S = 20.0
_LEVELS = (0, 1, 2, 3)


@dataclass(frozen=True, slots=True)
class FitsReport:
    """Whether a step fits, for people and for programs.

    Attributes:
        is_batch_given: whether ``global_batch`` was asked for, or follows from the devices.
        smallest: the way whose fullest rank holds least.
        quickest: of those that fit the one with the shortest step; None: none fits.
        by_choice: the same as ``smallest``, by the level of ZeRO and by what is computed again.
        changed: what would make it fit, with the quickest way then, the cheapest first.
    """

    network: Network
    cluster: GpuCluster
    devices: int
    global_batch: int
    is_batch_given: bool
    smallest: MemoryFit
    quickest: PricedDegrees | None
    by_choice: dict[tuple[int, Recompute], MemoryFit]
    changed: tuple[tuple[Change, PricedDegrees], ...]

    def data(self) -> dict[str, Any]:
        """The answer as plain data; with what ``export`` reads, where it fits."""
        best = {}
        if self.quickest is not None:
            best = {"best": self._priced(self.quickest), **launch_data(self.cluster, self.quickest.ways)}
        return {
            "transformer": dataclasses.asdict(self.network.shape),
            "network": self.network.data(),
            "cluster": self.cluster.name,
            "device": self.cluster.device,
            "gpus": self.devices,
            "global_batch": self.global_batch,
            "fits": self.quickest is not None,
            "usable_bytes": self.cluster.usable_bytes,
            "least": {"ways": dataclasses.asdict(self.smallest.ways), **_bytes(self.smallest)},
            "least_by_choice": [
                {"zero": zero, "recompute": how.value, **_bytes(fit)} for (zero, how), fit in self.by_choice.items()
            ],
            "would_fit": [
                {"ask": change.options(self.network.shape, self.devices, priced.ways), **self._priced(priced)}
                for change, priced in self.changed
            ],
            **best,
        }

    def write(self, path: Path) -> None:
        """:meth:`data` as a file."""
        write_text(path, json.dumps(self.data(), indent=1) + "\n")

    def _priced(self, priced: PricedDegrees) -> dict[str, Any]:
        fit = MemoryFit(priced.ways, priced.prediction.memory, self.cluster.usable_bytes)
        return {"ways": dataclasses.asdict(priced.ways), "step_s": priced.prediction.step.seconds, **_bytes(fit)}

    def render(self) -> str:
        """For people."""
        cluster = self.cluster
        batch = f"global batch {self.global_batch}" + ("" if self.is_batch_given else " (a sample a device)")
        whole = cluster.usable_bytes / (1 - FRAGMENTED) + RESERVED_BYTES
        aside = f"of {whole / GIB:.1f} GiB {RESERVED_BYTES / GIB:.1f} are left to CUDA and NCCL"
        aside += f", and {100 * FRAGMENTED:.0f} % of the rest to the allocator"
        lines = [
            *self.network.lines(cluster, self.smallest.ways.precision),
            f"{batch}, on {cluster.text(self.devices)}",
            f"  {aside}",
            "",
        ]
        if self.quickest is not None:
            memory = self.quickest.prediction.memory
            left = (cluster.usable_bytes - memory.total) / GIB
            lines += [
                f"  fits: {left:.1f} GiB are free in the way with the shortest step",
                f"  {self.quickest.ways}",
                f"  step {units.seconds(self.quickest.prediction.step.seconds)}",
                f"  holds {memory_text(memory, cluster.usable_bytes)}",
                f"  least: {self.smallest}",
            ]
        else:
            lines += [
                f"  does not fit: {-self.smallest.left_bytes / GIB:.1f} GiB are missing in the way that holds least",
                f"  {self.smallest.ways}",
                f"  holds {memory_text(self.smallest.memory, cluster.usable_bytes)}",
            ]
        return "\n".join([*lines, "", *self._by_choice(), *self._changes()])

    def _by_choice(self) -> list[str]:
        """Of all divisions the least, by ZeRO's level and by what is computed again."""
        hows = list(dict.fromkeys(how for _, how in self.by_choice))
        rows = [
            [f"ZeRO-{zero}", *(self._cell(zero, how) for how in hows)]
            for zero in dict.fromkeys(zero for zero, _ in self.by_choice)
        ]
        head = ["a rank holds at least, GiB", *(f"recompute {how.value}" for how in hows)]
        return [tables.table(head, rows)]

    def _cell(self, zero: int, how: Recompute) -> str:
        fit = self.by_choice.get((zero, how))
        if fit is None:
            return "-"
        left = fit.left_bytes / GIB
        return f"{fit.memory.total / GIB:.1f}, " + (f"{left:.1f} free" if fit.fits else f"{-left:.1f} too many")

    def _changes(self) -> list[str]:
        if self.quickest is not None:
            return []
        if not self.changed:
            return ["", "  nothing that was tried would fit: fixed choices left open, more devices, shorter samples"]
        rows = [
            [
                change.options(self.network.shape, self.devices, priced.ways),
                units.seconds(priced.prediction.step.seconds),
                f"{priced.prediction.memory.total / GIB:.1f} GiB",
                str(priced.ways),
            ]
            for change, priced in self.changed
        ]
        head = ["would fit, the cheapest first", "step", "memory", "so"]
        return ["", tables.table(head, rows, width=ANY_WIDTH)]


def _bytes(fit: MemoryFit) -> dict[str, Any]:
    return {"memory_bytes": fit.memory.parts, "left_bytes": fit.left_bytes}


def find(transformer: str, on: str, devices: int, global_batch: int | None, options: WaysOptions) -> FitsReport:
    """Whether a transformer's step fits on ``devices`` of a cluster.

    Args:
        global_batch: None: a sample a device.

    Raises:
        UsageError, UnknownNameError, InputFileError: as of :func:`halopipe.extras.transformers.ways.find`.
    """
    network = network_of(transformer)
    shape = network.shape
    cluster = cluster_of(on, shape, options.layers)
    if not isinstance(cluster, GpuCluster):
        raise UsageError(f"--fits is asked of alike devices, and {on} has several kinds", [cluster.device])
    space = space_of(options)
    space.require(shape, cluster)
    batch = global_batch or devices
    smallest = least(shape, cluster, devices, batch, space)
    if smallest is None:
        raise undivided(shape, devices, batch, [cluster.per_host], space)
    by_choice = {}
    for zero in (level for level in _LEVELS if level in space.zero):
        for how, _ in space.recomputes(shape, space.base):
            fixed = dataclasses.replace(space, zero=(zero,), recompute=(how,))
            fit = least(shape, cluster, devices, batch, fixed)
            if fit is not None:
                by_choice[zero, how] = fit
    limit_s = options.time_limit_s

    def quickest(change: Change, gap: float, most_s: float) -> PricedDegrees:
        sweep = search(
            change.shape, cluster, change.devices, batch, change.space, gap=gap, time_limit_s=most_s, rivals=0
        )
        return sweep.best

    asked = Change(shape, devices, space, (), smallest)
    best = quickest(asked, options.gap, limit_s) if smallest.fits else None
    fitting = [] if smallest.fits else changes(shape, cluster, devices, batch, space)
    changed = [(change, quickest(change, max(_GAP, options.gap), min(limit_s, _CHANGE_S))) for change in fitting]
    changed.sort(key=lambda pair: _dearness(pair[0], pair[1], shape.seq))
    return FitsReport(
        network, cluster, devices, batch, global_batch is not None, smallest, best, by_choice, tuple(changed)
    )


def _dearness(change: Change, priced: PricedDegrees, seq: int) -> tuple[bool, int, float]:
    """Another network is dearer than more devices, and those than a longer step."""
    return change.shape.seq != seq, change.devices, priced.prediction.step.seconds
