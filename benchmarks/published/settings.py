"""Runs that tables state in common words: predicted where the model has words for them, else left out with the reason.

division    parts of :class:`ParallelDegrees` by their names, as the row states them.  A part that the model does not
            have (``fp4``) leaves the row out under its name; once the model has it, it joins
software    the same of what the source's code does: kernels, sums, messages.  Read off code, never off a time
cluster     the named one of the row's device, with the cards that the row states; a device that no named cluster
            has leaves the row out
as ways     the run by its division, in the software of its framework's launcher, as ``halopipe ways`` predicts it: what
            the range that it prints is made of
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from benchmarks.published.runs import Run
from halopipe.extras.transformers.evidence import FRAMEWORKS, kind_of
from planner.extras.kernels.links import ALPHA_ACROSS_S, AlphaBeta
from planner.extras.transformers.cluster import GpuCluster, clusters
from planner.extras.transformers.shape import ParallelDegrees, Transformer
from planner.extras.transformers.software import LAUNCHED, Software, named_software
from planner.extras.transformers.step import predict
from planner.ir.errors import UsageError

_PARTS = frozenset(part.name for part in fields(ParallelDegrees))
_SAME_CHIP = {"A100-40GB": "A100-80GB", "H200": "H100-SXM", "H100-96GB": "H100-SXM"}
"""Devices without a named cluster of their own, whose hosts are those of another."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a row says of a run.

    Attributes:
        group: runs that a mean is taken over.
        framework: as :class:`~halopipe.extras.transformers.evidence.RunKind` calls it.
        shape: None: its sizes are not known.
        device: its name in the catalogue.
        cards_bytes_per_s: of a host's network cards, together; 0: as the named cluster has.
        measured_bytes: of the rank that holds most; 0: not measured.
        unstated: what the source does not say, or what no transformer's ways are; empty: nothing.
    """

    group: str
    name: str
    framework: str
    device: str
    global_batch: int
    measured_s: float
    shape: Transformer | None = None
    division: Mapping[str, Any] = field(default_factory=dict)
    software: Mapping[str, Any] = field(default_factory=dict)
    cards_bytes_per_s: float = 0.0
    measured_bytes: float = 0.0
    unstated: str = ""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A run that cannot be stated, and why."""

    group: str
    reason: str


def predicted(settings: Sequence[Setting]) -> tuple[list[Run], list[LeftOut]]:
    """The runs that can be stated, and the others."""
    runs = []
    left_out = []
    for setting in settings:
        run = _predicted(setting)
        if isinstance(run, Run):
            runs.append(run)
        else:
            left_out.append(run)
    return runs, left_out


def _predicted(setting: Setting) -> Run | LeftOut:
    cluster = _cluster(setting)
    reason = next(_unstated(setting, cluster), "")
    if reason or cluster is None or setting.shape is None:
        return LeftOut(setting.group, reason)
    shape = setting.shape
    try:
        stated = ParallelDegrees(**setting.division)
        prediction = predict(shape, cluster, replace(stated, **setting.software), setting.global_batch)
        as_ways = predict(shape, cluster, _software(setting.framework).of(stated), setting.global_batch)
    except UsageError:
        return LeftOut(setting.group, "a division that is none of the model's")
    return Run(
        setting.group,
        setting.name,
        prediction,
        setting.measured_s,
        setting.measured_bytes,
        predicted_bytes=prediction.memory.total if setting.measured_bytes else 0.0,
        kind=kind_of(setting.framework, shape, cluster, stated),
        ways_s=as_ways.step.seconds,
    )


def _software(framework: str) -> Software:
    """What ``ways`` predicts runs of a framework with."""
    launcher = next((name for name, of in FRAMEWORKS.items() if of == framework), "")
    return named_software(LAUNCHED[launcher])


def _unstated(setting: Setting, cluster: GpuCluster | None) -> Iterator[str]:
    """Why the run cannot be stated, what its source leaves out first."""
    if setting.unstated:
        yield setting.unstated
    for name in setting.division:
        if name not in _PARTS:
            yield f"{name} in its division"
    if cluster is None:
        yield f"no cluster of {setting.device}"
    if setting.shape is None:
        yield "its sizes"


def _cluster(setting: Setting) -> GpuCluster | None:
    """The first named one of the device, or of its chip."""
    device = _SAME_CHIP.get(setting.device, setting.device)
    named = next((cluster for cluster in clusters().values() if cluster.device == device), None)
    if named is None:
        return None
    cluster = replace(named, device=setting.device)
    if setting.cards_bytes_per_s:
        cluster = replace(cluster, across=AlphaBeta(ALPHA_ACROSS_S, setting.cards_bytes_per_s))
    return cluster
