"""What was measured, in a few lines: the summary of a profile."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from halopipe.reports.explain import model_text
from halopipe.terminal import units
from planner.ir.cluster import Cluster
from planner.ir.profile import Profile

_MOST_NAMED = 8


def summary(profile: Profile) -> str:
    """What was measured: the model, its time by micro-batch size, the links, and how far it can be trusted."""
    graph = profile.graph
    num_parameters = sum(prod(spec.shape) for spec in graph.parameters.values())
    lines = [
        f"{len(graph.layers)} layers, {num_parameters:,} parameters ({units.size(graph.parameter_bytes())})",
        *_machines(profile.cluster),
        *_seconds(profile),
        *_evidence(profile),
    ]
    return "\n  ".join([model_text(profile.model), *lines])


def _machines(cluster: Cluster) -> Iterator[str]:
    """Devices by kind."""
    devices: dict[str, list[str]] = {}
    for device in cluster.devices:
        devices.setdefault(device.kind, []).append(device.name)
    for kind, names in devices.items():
        named = names if len(names) <= _MOST_NAMED else [names[0], "...", f"{names[-1]} ({len(names)})"]
        yield f"devices {', '.join(named)}: {kind}"
    yield f"memory {units.size(cluster.devices[0].memory_bytes)} a device"


def _seconds(profile: Profile) -> Iterator[str]:
    """What steps of one device and messages take."""
    for samples, step_s in sorted(profile.provenance.iteration_s.items(), key=lambda item: int(item[0])):
        sample_s = units.seconds(step_s / int(samples))
        yield f"one device, batch {samples}: {units.seconds(step_s)} a step, {sample_s} a sample"
    for name, link in profile.cluster.links.items():
        ends = [link.points[0], link.points[-1]] if link.points else []
        shown = ", ".join(f"{units.size(number)} in {units.seconds(value_s)}" for number, value_s in ends)
        over = f" over {link.transport}" if link.transport else ""
        yield f"link {name}{over}: {shown or units.size(link.bandwidth_bytes_per_s) + '/s'}"


def _evidence(profile: Profile) -> Iterator[str]:
    """What was measured when and how often, and what speaks against it."""
    provenance = profile.provenance
    if provenance.links_measured_at:
        yield f"links as they were measured at {provenance.links_measured_at}; --measure-machine measures them anew"
    for kind, measured in profile.parts.items():
        layers = {each.layer for each in measured}
        yield f"{kind}: {len(measured)} parts of {len(layers)} layers were measured at their own shapes"
    alike = {m.layer for measured in profile.measurements.values() for m in measured if m.alike}
    if alike:
        yield f"{len(alike)} layers do the same work as others, whose seconds count for them"
    for what, share in provenance.kernels.items():
        yield f"{units.percent(share)} of a step on {what}"
    if provenance.process_spread:
        worst = max(provenance.process_spread.values())
        yield f"{len(provenance.processes)} processes measured; their steps are {units.percent(worst)} apart"
    if provenance.contended:
        yield (
            f"warning: the machine was busy: {units.percent(provenance.run_delay)} of the time waited for a core, "
            f"a fixed kernel took {units.seconds(provenance.canary_before_s)} before and "
            f"{units.seconds(provenance.canary_after_s)} after; close other programs and profile again"
        )
