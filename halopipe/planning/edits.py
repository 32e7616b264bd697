"""Changes to a problem as people write them: ``stages=4,schedule=gpipe``, ``n1/gpu0.memory=32GiB``, ``devices=8``.

schedule= micro-batch= ranks= stages= dp= recompute= shard= zero= allow= objective= rate= memory= global-batch= gap=
solver=
    what a plan must be, or is asked for; stages and dp are exact, memory is the most on any device
token-slices=256+192+64
    how sequences are to be cut
PATTERN=stage:0, PATTERN=spatial:2, ...
    a side constraint, as of --fix; what it cuts is allowed then
spatial=2, height=2, sample=2, channel=2
    the same of all layers
without=n1/cpu0+n2/*, n0/cpu1.speed=0.5
    devices that are gone, or at another speed than they were measured
DEVICE.memory=32GiB
    of a device, a kind, or whatever a pattern such as ``n1/*`` matches
devices=8, hosts=2
    the first ones; further ones are like the last one
link within-host.bandwidth=25GB/s, link across-hosts.latency=5us, link within-host.speed=2
    of any tier of the cluster: a bandwidth, a latency, or how many times as fast everything on its links is

A problem is changed by its text (:func:`changed`), a cluster by one function for each thing: :func:`with_devices`,
:func:`with_hosts`, :func:`with_link`.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from halopipe.planning import problem as problems
from halopipe.planning.options import DEFAULT_SOLVER
from halopipe.planning.solve import known_solver
from halopipe.terminal.units import names_in, parse_pair, parse_sum, require_known, whole
from planner.ir.cluster import DATASHEET, Cluster, Collective, DeviceSpec, Link
from planner.ir.constraints import FAMILY_OF, cut_named
from planner.ir.errors import RankCountError, UnknownNameError, UsageError
from planner.ir.problem import (
    ALWAYS,
    DIM_FAMILIES,
    MOST_BATCH,
    NEVER,
    OBJECTIVES,
    RECOMPUTE,
    SHARD,
    TIME_DIMS,
    ZERO,
    Problem,
    Rule,
)
from planner.ir.quantities import BYTES, BYTES_PER_S, SECONDS, parse_quantity
from planner.ir.validation import MOST_DEVICES

LinkPoints = tuple[tuple[int, float], ...]


def with_devices(cluster: Cluster, count: int) -> Cluster:
    """The first ``count`` devices; further ones are like the last, and in its groups."""
    devices = list(cluster.devices[:count])
    while len(devices) < count:
        devices.append(one_more(devices, devices[-1]))
    return _linked(replace(cluster, devices=tuple(devices)))


def with_hosts(cluster: Cluster, count: int) -> Cluster:
    """The first ``count`` hosts; further ones are like the last, and beside it in larger groups.

    Raises:
        UsageError: nothing is known of a link that these machines need.
    """
    hosts = list(dict.fromkeys(device.host for device in cluster.devices))
    devices = [device for device in cluster.devices if device.host in hosts[:count]]
    last = [device for device in cluster.devices if device.host == hosts[-1]]
    while len(hosts) < count:
        name = _next_name(hosts[-1], hosts)
        hosts.append(name)
        devices += [cluster.on_host(device, name) for device in last]
    return _linked(replace(cluster, devices=tuple(devices)))


def with_one_more(cluster: Cluster, kind: str) -> Cluster:
    """One more device of ``kind``, on the last host that has one, after all others."""
    like = [device for device in cluster.devices if device.kind == kind][-1]
    return _linked(replace(cluster, devices=(*cluster.devices, one_more(cluster.devices, like))))


def one_more(devices: tuple[DeviceSpec, ...] | list[DeviceSpec], like: DeviceSpec) -> DeviceSpec:
    """A device like ``like``, with a name of its own."""
    return replace(like, name=_next_name(like.name, [device.name for device in devices]))


def with_link(
    cluster: Cluster, name: str, *, bandwidth_bytes_per_s: float | None = None, latency_s: float | None = None
) -> Cluster:
    """The cluster with another bandwidth or latency of a link; tables measured on it are changed alike.

    A measured time is split in the latency and the rest, which goes with the bandwidth.  Links that are stated for
    pairs of hosts change with their tier, by the same factor and to the same latency.  What the cores do for a message
    stays: it is copied as before.
    """
    old = cluster.links[name]
    least_s = _least_s(old)
    new_s = latency_s if latency_s is not None else least_s
    ratio = old.bandwidth_bytes_per_s / bandwidth_bytes_per_s if bandwidth_bytes_per_s is not None else 1.0

    def scaled(points: LinkPoints, messages: int, before_s: float = least_s) -> LinkPoints:
        now_s = before_s if latency_s is None else new_s
        return tuple(
            (size, messages * now_s + max(0.0, seconds - messages * before_s) * ratio) for size, seconds in points
        )

    def changed(link: Link) -> Link:
        return replace(
            link,
            latency_s=latency_s if latency_s is not None else link.latency_s,
            bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / ratio,
            points=scaled(link.points, 1, _least_s(link)),
            evidence=DATASHEET,
        )

    return _with_links(cluster, name, changed, lambda one: scaled(one.points, 2 * (one.num_ranks - 1)))


def with_faster_link(cluster: Cluster, name: str, times: float) -> Cluster:
    """The cluster with everything on a link ``times`` as fast; what the cores do for a message stays."""

    def faster(points: LinkPoints) -> LinkPoints:
        return tuple((size, seconds / times) for size, seconds in points)

    def changed(link: Link) -> Link:
        latency_s = link.latency_s / times
        bandwidth = link.bandwidth_bytes_per_s * times
        points = faster(link.points)
        return replace(link, latency_s=latency_s, bandwidth_bytes_per_s=bandwidth, points=points, evidence=DATASHEET)

    return _with_links(cluster, name, changed, lambda one: faster(one.points))


def _with_links(
    cluster: Cluster, name: str, changed: Callable[[Link], Link], points: Callable[[Collective], LinkPoints]
) -> Cluster:
    """The cluster with the links of a tier changed, also those stated for pairs of hosts, and its collectives' points.

    Args:
        points: of a collective of several ranks.
    """
    pairs = tuple(
        replace(pair, link=changed(pair.link)) if cluster.pair_tier(pair) == name else pair for pair in cluster.pairs
    )
    collectives = tuple(
        replace(one, points=points(one)) if one.link == name and one.num_ranks > 1 else one
        for one in cluster.collectives
    )
    links = {**cluster.links, name: changed(cluster.links[name])}
    return replace(cluster, links=links, pairs=pairs, collectives=collectives)


def _least_s(link: Link) -> float:
    return min(link.latency_s, link.points[0][1]) if link.points else link.latency_s


def _linked(cluster: Cluster) -> Cluster:
    missing = [name for name in cluster.tiers_used() if name not in cluster.links]
    if missing:
        num_hosts = len({device.host for device in cluster.devices})
        raise UsageError(
            f"nothing is known of the link {missing[0]}, which these machines need",
            [f"{num_hosts} hosts, {len(cluster.devices)} devices; links: {', '.join(cluster.links) or 'none'}"],
            ["halopipe plan PROFILE --cluster FILE, which describes such machines, in place of this question"],
        )
    return cluster


def _next_name(name: str, names: list[str]) -> str:
    """``n0/gpu3`` -> ``n0/gpu4``, or the first that is free after it."""
    stem = name.rstrip("0123456789")
    number = int(name[len(stem) :] or 0)
    while f"{stem}{number}" in names:
        number += 1
    return f"{stem}{number}"


_LINK = re.compile(r"link\s+(\S+)\.(\w+)")


@dataclass(frozen=True, slots=True)
class Changed:
    """A problem after some changes.

    Attributes:
        solver: who is to solve it.
        assumed: whether figures were changed that a profile had measured.
    """

    problem: Problem
    solver: str = DEFAULT_SOLVER
    assumed: bool = False


def changed(problem: Problem, text: str) -> Changed:
    """The problem with every change that ``text`` names, commas between them.

    Raises:
        UsageError, UnknownNameError: a change is not understood, or about nothing that there is.
    """
    parts = names_in(text)
    if not parts:
        raise UsageError("no change is named", [], ["write it like schedule=gpipe or n0/gpu0.memory=32GiB"])
    edited = Changed(problem)
    for part in parts:
        edited = _apply(edited, part)
    return edited


def _apply(at: Changed, part: str) -> Changed:
    try:
        name, value = parse_pair(part)
    except ValueError:
        raise UsageError(f"{part!r} is not a change", [], ["write it like schedule=gpipe or devices=8"]) from None
    if name in _CHANGES:
        return replace(at, problem=_CHANGES[name](at.problem, value))
    if cut := cut_named(name):
        return replace(at, problem=_with_rules(at.problem, Rule("*", cut, str(_integer(name, value)))))
    if name == "solver":
        return replace(at, solver=known_solver(value))
    if name in ("devices", "hosts"):
        grow = with_devices if name == "devices" else with_hosts
        return replace(at, problem=_on(at.problem, grow(at.problem.profile.cluster, _integer(name, value))))
    link = _LINK.fullmatch(name)
    if link is not None:
        return _link_changed(at, link[1], link[2], value)
    if name == "without":
        gone = dict.fromkeys(problems.devices_named(value.split("+"), at.problem.profile.cluster), 0.0)
        return replace(at, problem=problems.standing(at.problem, gone))
    if name.endswith(".speed"):
        device = name.removesuffix(".speed")
        speed = _number("speed", value)
        at_speed = dict.fromkeys(problems.devices_named([device], at.problem.profile.cluster), speed)
        return replace(at, problem=problems.standing(at.problem, at_speed), assumed=True)
    if name.endswith(".memory"):
        return _memory_changed(at, name.removesuffix(".memory"), value)
    if ":" in value or value == "together":
        return replace(at, problem=_with_rules(at.problem, part))
    raise UnknownNameError(
        f"nothing is known of {name!r}",
        [
            f"known: {', '.join((*_CHANGES, 'solver', 'devices', 'hosts', 'without'))}, DEVICE.memory, DEVICE.speed",
            "of all layers: sample, spatial, height, width, depth, channel; of some: PATTERN=spatial:2",
            "of links: link NAME.bandwidth, .latency or .speed",
        ],
        ["write it like schedule=gpipe, n0/gpu0.memory=32GiB or 'link across-hosts.bandwidth=25GB/s'"],
    )


def _link_changed(at: Changed, name: str, what: str, value: str) -> Changed:
    cluster = at.problem.profile.cluster
    require_known("link", [name], list(cluster.links))
    match what:
        case "bandwidth":
            cluster_after = with_link(cluster, name, bandwidth_bytes_per_s=_quantity(value, BYTES_PER_S))
        case "latency":
            cluster_after = with_link(cluster, name, latency_s=_quantity(value, SECONDS))
        case "speed":
            cluster_after = with_faster_link(cluster, name, _number("speed", value))
        case _:
            raise UnknownNameError(
                f"a link has no {what!r}", ["known: bandwidth, latency, speed"], ["link TIER.bandwidth=25GB/s"]
            )
    return replace(at, problem=_on(at.problem, cluster_after), assumed=True)


def _memory_changed(at: Changed, pattern: str, value: str) -> Changed:
    cluster = at.problem.profile.cluster
    memory_bytes = int(_quantity(value, BYTES))
    names = [*(device.name for device in cluster.devices), *(device.kind for device in cluster.devices)]
    if not any(fnmatchcase(name, pattern) for name in names):
        require_known("device", [pattern], list(dict.fromkeys(names)))
    devices = tuple(
        replace(device, memory_bytes=memory_bytes)
        if fnmatchcase(device.name, pattern) or fnmatchcase(device.kind, pattern)
        else device
        for device in cluster.devices
    )
    return replace(at, problem=_on(at.problem, replace(cluster, devices=devices)))


def _one_of(what: str, value: str, names: Sequence[str]) -> str:
    require_known(what, [value], names)
    return value


def _micro_batch(problem: Problem, value: str) -> Problem:
    size = _integer("micro-batch", value)
    if size > problem.global_batch:
        raise UsageError(
            f"micro-batch {size} is larger than the global batch {problem.global_batch}",
            [],
            [f"micro-batch={problem.global_batch}", f"global-batch={size}"],
        )
    return replace(problem, micro_batch_sizes=(size,))


def _token_slices(problem: Problem, value: str) -> Problem:
    lengths = parse_sum(value, "token-slices")
    return replace(problem, token_slices=lengths, allow=also_allowed(problem.allow, [TIME_DIMS]))


def _ranks(problem: Problem, value: str) -> Problem:
    wanted = _integer("ranks", value)
    there = len(problem.profile.cluster.devices)
    if wanted > there:
        raise RankCountError(f"{wanted} ranks are asked for, the profile has {there}", [], [f"devices={wanted}"])
    return replace(problem, num_ranks=wanted)


def _stages(problem: Problem, value: str) -> Problem:
    """Exactly as many stages: the last layer is in the last of them."""
    wanted = _integer("stages", value)
    last = glob.escape(problem.profile.graph.layers[-1].name)
    return _with_rules(replace(problem, max_stages=wanted), Rule(last, "stage", str(wanted - 1)))


def _zero(problem: Problem, value: str) -> Problem:
    level = _integer("zero", value)
    require_known("level of ZeRO", [str(level)], [str(each) for each in ZERO])
    return replace(problem, zero=level, shard=ALWAYS if problem.shard == NEVER else problem.shard)


def _allow(problem: Problem, value: str) -> Problem:
    families = value.split("+")
    require_known("family of dims", families, DIM_FAMILIES)
    return replace(problem, allow=tuple(name for name in DIM_FAMILIES if name in families))


def _with_rules(problem: Problem, *rules: str | Rule) -> Problem:
    """With rules to be held; what they cut is allowed."""
    fixed = problems.rules_of(rules, problem.profile)
    families = [FAMILY_OF[rule.what] for rule in fixed if rule.what in FAMILY_OF]
    return replace(problem, fix=(*problem.fix, *fixed), allow=also_allowed(problem.allow, families))


def also_allowed(allow: Sequence[str], families: Sequence[str]) -> tuple[str, ...]:
    """Families of dims that may be cut, with others among them."""
    return tuple(name for name in DIM_FAMILIES if name in (*allow, *families))


def _on(problem: Problem, cluster: Any) -> Problem:
    return replace(problem, profile=replace(problem.profile, cluster=cluster))


def _integer(name: str, value: str) -> int:
    try:
        number = whole(value)
    except ValueError:
        raise UsageError(f"{name}={value} is not a positive integer", [], [f"{name}=2"]) from None
    most = MOST_BATCH if name in ("global-batch", "micro-batch") else MOST_DEVICES
    if number > most:
        raise UsageError(f"{name}={value} are more than {most}", [], [f"{name}=8"])
    return number


def _number(name: str, value: str) -> float:
    try:
        number = float(value.removesuffix("x"))
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise UsageError(f"{name}={value} is not a positive number", [], [f"{name}=2"])
    return number


def _quantity(value: str, dimension: str) -> float:
    try:
        quantity = parse_quantity(value, dimension)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if quantity <= 0 and dimension != SECONDS:
        raise UsageError(f"{value} is nothing", [], ["write a quantity above zero"])
    return quantity


_CHANGES: Mapping[str, Callable[[Problem, str], Problem]] = {
    "schedule": lambda problem, value: replace(
        problem, schedules=(_one_of("schedule", value, problems.schedule_names()),)
    ),
    "micro-batch": _micro_batch,
    "token-slices": _token_slices,
    "ranks": _ranks,
    "stages": _stages,
    "dp": lambda problem, value: _with_rules(problem, Rule("*", "replicas", str(_integer("dp", value)))),
    "recompute": lambda problem, value: replace(problem, recompute=_one_of("way to recompute", value, RECOMPUTE)),
    "shard": lambda problem, value: replace(problem, shard=_one_of("way to shard", value, SHARD)),
    "zero": _zero,
    "allow": _allow,
    "objective": lambda problem, value: replace(problem, objective=_one_of("objective", value, OBJECTIVES)),
    "rate": lambda problem, value: replace(problem, rate_per_s=_number("rate", value)),
    "memory": lambda problem, value: replace(problem, memory_bytes=int(_quantity(value, BYTES))),
    "global-batch": lambda problem, value: replace(problem, global_batch=_integer("global-batch", value)),
    "gap": lambda problem, value: replace(problem, gap=_number("gap", value)),
}
