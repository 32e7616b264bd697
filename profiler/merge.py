"""What several processes, or several hosts, measured of the same, as one: medians of their trimmed means.

Profiles of one model, taken on several hosts, as the profile of them all.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from planner.ir.cluster import Cluster, Collective, DeviceSpec, Link, PairLink
from planner.ir.codec import fingerprint
from planner.ir.errors import StaleFileError, UsageError
from planner.ir.profile import (
    Calibration,
    Measurement,
    MeasuringProcess,
    ParameterCost,
    PreparationCost,
    Profile,
    Provenance,
    Slowdown,
)
from profiler.measure.contention import spread
from profiler.measure.partial_results import ModelCosts

_SECONDS = ("forward_s", "backward_s", "backward_input_s", "backward_weight_s")


def merged(by_process: Iterable[Sequence[Measurement]]) -> tuple[Measurement, ...]:
    """The measurements, in the order of their first appearance: medians of the seconds, all the raw samples.

    Bytes and back ends are those of the first; they do not depend on the process.
    """
    alike: dict[tuple[str, int, tuple[int, ...], int], list[Measurement]] = {}
    for measured in by_process:
        for one in measured:
            alike.setdefault((one.layer, one.samples, one.part, one.before), []).append(one)
    return tuple(_as_one(each) for each in alike.values())


def merged_parameters(by_process: Sequence[Mapping[str, ParameterCost]]) -> dict[str, ParameterCost]:
    """Medians by layer."""
    names = dict.fromkeys(name for costs in by_process for name in costs)
    return {name: _parameter_cost([costs[name] for costs in by_process if name in costs]) for name in names}


def merged_preparations(by_process: Iterable[Sequence[PreparationCost]]) -> tuple[PreparationCost, ...]:
    """Medians by name and number of samples."""
    alike: dict[tuple[str, int], list[PreparationCost]] = {}
    for costs in by_process:
        for cost in costs:
            alike.setdefault((cost.name, cost.samples), []).append(cost)
    return tuple(
        replace(
            each[0],
            seconds=statistics.median(cost.seconds for cost in each),
            shared_s=statistics.median(cost.shared_s for cost in each),
        )
        for each in alike.values()
    )


def merged_overhead_s(by_process: Iterable[ModelCosts]) -> float | None:
    """The median of what processes measured, to 4 significant digits; None if none did."""
    seconds = [costs.rest.action_overhead_s for costs in by_process if costs.rest.action_overhead_s is not None]
    return float(f"{statistics.median(seconds):.4g}") if seconds else None


def merged_seconds(by_process: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Medians by name; names that are numbers ascend."""
    names = sorted({name for each in by_process for name in each}, key=int)
    return {name: statistics.median(each[name] for each in by_process if name in each) for name in names}


def process_of(costs: ModelCosts, repeated: bool) -> MeasuringProcess:
    """What is kept of a process beside its measurements."""
    rest = costs.rest
    steps = {str(size.samples): float(f"{size.step_s:.4g}") for size in costs.done.sizes if size.measurements}
    return MeasuringProcess(
        rest.canary_before_s,
        rest.canary_after_s,
        round(rest.run_delay, 5),
        rest.is_contended,
        dict(sorted(steps.items(), key=lambda step: int(step[0]))),
        repeated,
    )


def process_spread(processes: Sequence[MeasuringProcess]) -> dict[str, float]:
    """``Provenance.process_spread``; nothing of a single process."""
    if len(processes) < 2:
        return {}
    middle = merged_seconds([each.step_s for each in processes])
    spreads = {}
    for name, median_s in middle.items():
        steps = [each.step_s[name] for each in processes if name in each.step_s]
        spreads[name] = round((max(steps) - min(steps)) / median_s, 4) if median_s > 0 else 0.0
    return spreads


def _as_one(repeats: Sequence[Measurement]) -> Measurement:
    if len(repeats) == 1:
        return repeats[0]
    seconds = {name: statistics.median(getattr(one, name) for one in repeats) for name in _SECONDS}
    raw_s = tuple(value for one in repeats for value in one.raw_s)
    return replace(
        repeats[0],
        **seconds,
        num_runs=sum(one.num_runs for one in repeats),
        spread=round(spread(raw_s), 4) if raw_s else max(one.spread for one in repeats),
        raw_s=raw_s,
    )


def _parameter_cost(repeats: Sequence[ParameterCost]) -> ParameterCost:
    return ParameterCost(
        statistics.median(cost.accumulate_s for cost in repeats), statistics.median(cost.update_s for cost in repeats)
    )


def gather(profiles: Sequence[Profile], names: Sequence[str] = ()) -> Profile:
    """One profile: the hosts of all, in that order; what was measured on processors of one name is one kind's.

    Where a kind was measured on several hosts, the median counts, and sizes are those of any.  Hosts of different
    profiles stay apart: those whose names are taken are renamed ``n0``, ``n1``, ...  Every host keeps the link that was
    measured within it; links between hosts are those that a profile has.

    Args:
        names: of the profiles, for errors; by default their numbers.

    Raises:
        UsageError: there are no profiles.
        StaleFileError: two are of other models, dtypes, optimisers, tiers of links, or back ends at the same sizes.
    """
    if not profiles:
        raise UsageError("there is nothing to gather", ["profiles: 0"], ["name the profiles of several hosts"])
    names = names or [f"profile {number}" for number in range(len(profiles))]
    first = profiles[0]
    for name, other in zip(names[1:], profiles[1:], strict=True):
        _check_alike(names[0], first, name, other)
    hosts = _renamed(profiles)
    kinds = list(dict.fromkeys(kind for each in profiles for kind in each.measurements))
    parts = {kind: merged(each.parts.get(kind, ()) for each in profiles) for kind in kinds}
    preparations = {kind: merged_preparations(each.preparations.get(kind, ()) for each in profiles) for kind in kinds}
    overheads = [each.action_overhead_s for each in profiles]
    return replace(
        first,
        cluster=_cluster(profiles, hosts),
        measurements={
            kind: _in_order(merged(each.measurements.get(kind, ()) for each in profiles), first) for kind in kinds
        },
        parameters={kind: merged_parameters([each.parameters.get(kind, {}) for each in profiles]) for kind in kinds},
        provenance=_provenance(profiles, hosts),
        action_overhead_s={
            kind: statistics.median(each[kind] for each in overheads if kind in each)
            for kind in dict.fromkeys(kind for each in overheads for kind in each)
        },
        parts={kind: of_kind for kind, of_kind in parts.items() if of_kind},
        preparations={kind: of_kind for kind, of_kind in preparations.items() if of_kind},
        site_halos=tuple(dict.fromkeys(halo for each in profiles for halo in each.site_halos)),
        slowdowns={kind: of_kind for kind in kinds if (of_kind := _slowdowns(profiles, kind))},
        calibration=Calibration(),
    )


def _check_alike(name: str, first: Profile, other_name: str, other: Profile) -> None:
    """Raises unless both are of one model, trained in one way, by operators that choose alike."""
    pairs = {
        "graph": (fingerprint(first.graph), fingerprint(other.graph)),
        "dtype": (f"{first.model.dtype} {first.model.autocast}", f"{other.model.dtype} {other.model.autocast}"),
        "optimiser": (_optimizer_text(first), _optimizer_text(other)),
        "tiers of links": (_tiers_text(first), _tiers_text(other)),
    }
    differing = [f"{what} in {name}: {a}; in {other_name}: {b}" for what, (a, b) in pairs.items() if a != b]
    if differing:
        raise StaleFileError(
            f"{name} and {other_name} are no profiles of one model",
            [*differing, *_layers_that_differ(first, other)],
            ["profile the same model, with the same --input and options, on every host"],
        )
    for kind in first.measurements.keys() & other.measurements.keys():
        keys = {(one.layer, one.samples): one.key for one in first.measurements[kind]}
        for one in other.measurements[kind]:
            key = keys.get((one.layer, one.samples), one.key)
            if key != one.key:
                raise StaleFileError(
                    f"{one.layer} ran on other back ends on two hosts with {kind}",
                    [f"at {one.samples} samples in {name}: {key or 'none'}; in {other_name}: {one.key or 'none'}"],
                    ["install the same release of torch on every host"],
                )


def _layers_that_differ(first: Profile, other: Profile) -> list[str]:
    a, b = ([layer.name for layer in each.graph.layers] for each in (first, other))
    if a == b:
        return []
    only = [name for name in dict.fromkeys((*a, *b)) if (name in a) != (name in b)]
    return [f"{len(a)} and {len(b)} layers; only in one: {', '.join(only[:3])}" if only else "layers in another order"]


def _tiers_text(profile: Profile) -> str:
    return ", ".join(f"{tier.name} ({tier.within or 'all'})" for tier in profile.cluster.nested_tiers)


def _optimizer_text(profile: Profile) -> str:
    return str(replace(profile.optimizer, arguments=dict(sorted(profile.optimizer.arguments.items()))))


def _renamed(profiles: Sequence[Profile]) -> list[dict[str, str]]:
    """By profile: its hosts, and what they are called among all."""
    used: set[str] = set()
    by_profile = []
    for profile in profiles:
        names: dict[str, str] = {}
        for device in profile.cluster.devices:
            if device.host not in names:
                fresh = (f"n{number}" for number in range(len(used) + 1) if f"n{number}" not in used)
                names[device.host] = next(fresh) if device.host in used else device.host
                used.add(names[device.host])
        by_profile.append(names)
    return by_profile


def _cluster(profiles: Sequence[Profile], hosts: Sequence[Mapping[str, str]]) -> Cluster:
    devices: list[DeviceSpec] = []
    links: dict[str, Link] = {}
    pairs: list[PairLink] = []
    for profile, names in zip(profiles, hosts, strict=True):
        cluster = profile.cluster
        for device in cluster.devices:
            devices.append(cluster.on_host(device, names[device.host]))
        for kind, link in cluster.links.items():
            first_link = links.setdefault(kind, link)
            if kind == cluster.host_tier and link != first_link:
                pairs += [PairLink(host, host, link) for host in names.values()]
        pairs += [replace(pair, src_host=names[pair.src_host], dst_host=names[pair.dst_host]) for pair in cluster.pairs]
    return Cluster(tuple(devices), links, _collectives(profiles), tuple(pairs), profiles[0].cluster.tiers)


def _collectives(profiles: Sequence[Profile]) -> tuple[Collective, ...]:
    """Medians, point by point, over the profiles that measured the same."""
    alike: dict[object, list[Collective]] = {}
    for profile in profiles:
        for one in profile.cluster.collectives:
            alike.setdefault((one.operation, one.num_ranks, one.link, one.num_hosts), []).append(one)
    medians = []
    for each in alike.values():
        sizes = [size for size, _ in each[0].points]
        same = [dict(one.points) for one in each if [size for size, _ in one.points] == sizes]
        points = tuple((size, statistics.median(one[size] for one in same)) for size in sizes)
        medians.append(replace(each[0], points=points))
    return tuple(medians)


def _slowdowns(profiles: Sequence[Profile], kind: str) -> tuple[Slowdown, ...]:
    """Medians by layer over the hosts on which as many devices computed at once as on the first of them."""
    alike: dict[str, list[Slowdown]] = {}
    for profile in profiles:
        for one in profile.slowdowns.get(kind, ()):
            alike.setdefault(one.layer, []).append(one)
    medians = []
    for first, *others in alike.values():
        same = [first, *(one for one in others if one.num_devices == first.num_devices)]
        forward, backward = (statistics.median(getattr(one, way) for one in same) for way in ("forward", "backward"))
        medians.append(replace(first, forward=forward, backward=backward, spread=max(one.spread for one in same)))
    return tuple(medians)


def _in_order(measurements: Sequence[Measurement], first: Profile) -> tuple[Measurement, ...]:
    order = {layer.name: index for index, layer in enumerate(first.graph.layers)}
    return tuple(sorted(measurements, key=lambda one: (one.samples, order.get(one.layer, len(order)))))


def _provenance(profiles: Sequence[Profile], hosts: Sequence[Mapping[str, str]]) -> Provenance:
    """All processes; whole steps are those of the first device's kind."""
    every = [each.provenance for each in profiles]
    kind = profiles[0].cluster.devices[0].kind
    spreads = [each.process_spread for each in every]
    host_of = ["+".join(names.values()) for names in hosts]
    return Provenance(
        versions={
            name: ", ".join(dict.fromkeys(each.versions[name] for each in every if name in each.versions))
            for name in dict.fromkeys(name for each in every for name in each.versions)
        },
        canary_before_s=every[0].canary_before_s,
        canary_after_s=every[0].canary_after_s,
        run_delay=max(each.run_delay for each in every),
        contended=any(each.contended for each in every),
        iteration_s=merged_seconds([each.provenance.iteration_s for each in profiles if kind in each.measurements]),
        processes=tuple(
            replace(process, host=process.host or host)
            for each, host in zip(every, host_of, strict=True)
            for process in each.processes
        ),
        process_spread={
            name: max(each[name] for each in spreads if name in each)
            for name in sorted({name for each in spreads for name in each}, key=int)
        },
        clocks={
            f"{host}/{name}": value
            for each, host in zip(every, host_of, strict=True)
            for name, value in each.clocks.items()
        },
        governor=", ".join(dict.fromkeys(each.governor for each in every if each.governor)),
        measured_at=min(each.measured_at for each in every),
        links_measured_at=min((each.links_measured_at for each in every if each.links_measured_at), default=""),
    )
