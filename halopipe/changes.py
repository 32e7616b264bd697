"""Changes to a problem as people write them: ``stages=4,schedule=gpipe``, ``n1/gpu0.memory=32GiB``, ``devices=8``.

schedule= micro-batch= ranks= stages= dp= recompute= shard= allow= objective= memory= global-batch= gap= solver=
    what a plan must be, or is asked for; stages and dp are exact, memory is the most on any device
PATTERN=stage:0, PATTERN=spatial:2, ...
    a side constraint, as of --fix
DEVICE.memory=32GiB
    of a device, a kind, or whatever a pattern such as ``n1/*`` matches
devices=8, hosts=2
    the first ones; further ones are like the last one
link within-host.bandwidth=25GB/s, link across-hosts.latency=5us, link within-host.speed=2
    a bandwidth, a latency, or how many times as fast everything on the link is
"""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from halopipe import machines, problems
from halopipe.naming import require_known
from halopipe.planning import DEFAULT_SOLVER
from planner.catalogue.quantities import BYTES, BYTES_PER_S, SECONDS, parse_quantity
from planner.ir.errors import RankCountError, UnknownNameError, UsageError
from planner.ir.problem import OBJECTIVES, RECOMPUTE, SHARD, Problem, Rule
from planner.ir.validation import MOST_DEVICES

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
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise UsageError("no change is named", [], ["write it like schedule=gpipe or n0/gpu0.memory=32GiB"])
    found = Changed(problem)
    for part in parts:
        found = _apply(found, part)
    return found


def _apply(at: Changed, part: str) -> Changed:
    name, equals, value = (piece.strip() for piece in part.partition("="))
    if not equals or not value:
        raise UsageError(f"{part!r} is not a change", [], ["write it like schedule=gpipe or devices=8"])
    if name in _CHANGES:
        return replace(at, problem=_CHANGES[name](at.problem, value))
    if name == "solver":
        from planner import solvers

        require_known("solver", [value], solvers.names())
        return replace(at, solver=value)
    if name in ("devices", "hosts"):
        grow = machines.with_devices if name == "devices" else machines.with_hosts
        return replace(at, problem=_on(at.problem, grow(at.problem.profile.cluster, _integer(name, value))))
    link = _LINK.fullmatch(name)
    if link is not None:
        return _link_changed(at, link[1], link[2], value)
    if name.endswith(".memory"):
        return _memory_changed(at, name.removesuffix(".memory"), value)
    if ":" in value or value == "together":
        return replace(at, problem=_with_rule(at.problem, part))
    raise UnknownNameError(
        f"nothing is known of {name!r}",
        [f"known: {', '.join((*_CHANGES, 'solver', 'devices', 'hosts'))}, DEVICE.memory, link NAME.bandwidth"],
        ["write it like schedule=gpipe, n0/gpu0.memory=32GiB or 'link across-hosts.bandwidth=25GB/s'"],
    )


def _link_changed(at: Changed, name: str, what: str, value: str) -> Changed:
    cluster = at.problem.profile.cluster
    require_known("link", [name], list(cluster.links))
    match what:
        case "bandwidth":
            found = machines.with_link(cluster, name, bandwidth_bytes_per_s=_quantity(value, BYTES_PER_S))
        case "latency":
            found = machines.with_link(cluster, name, latency_s=_quantity(value, SECONDS))
        case "speed":
            found = machines.with_faster_link(cluster, name, _number("speed", value))
        case _:
            raise UnknownNameError(f"a link has no {what!r}", ["known: bandwidth, latency, speed"])
    return replace(at, problem=_on(at.problem, found), assumed=True)


def _memory_changed(at: Changed, pattern: str, value: str) -> Changed:
    cluster, memory_bytes = at.problem.profile.cluster, int(_quantity(value, BYTES))
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


def _schedule(problem: Problem, value: str) -> Problem:
    require_known("schedule", [value], problems.schedule_names())
    return replace(problem, schedules=(value,))


def _micro_batch(problem: Problem, value: str) -> Problem:
    size = _integer("micro-batch", value)
    if size > problem.global_batch:
        raise UsageError(f"micro-batch {size} is larger than the global batch {problem.global_batch}")
    return replace(problem, micro_batch_sizes=(size,))


def _ranks(problem: Problem, value: str) -> Problem:
    wanted, there = _integer("ranks", value), len(problem.profile.cluster.devices)
    if wanted > there:
        raise RankCountError(f"{wanted} ranks are asked for, the profile has {there}", [], [f"devices={wanted}"])
    return replace(problem, num_ranks=wanted)


def _stages(problem: Problem, value: str) -> Problem:
    """Exactly so many: the last layer is in the last stage."""
    wanted = _integer("stages", value)
    last = glob.escape(problem.profile.graph.layers[-1].name)
    return replace(problem, max_stages=wanted, fix=(*problem.fix, Rule(last, "stage", str(wanted - 1))))


def _replicas(problem: Problem, value: str) -> Problem:
    return replace(problem, fix=(*problem.fix, Rule("*", "replicas", str(_integer("dp", value)))))


def _recompute(problem: Problem, value: str) -> Problem:
    require_known("way to recompute", [value], RECOMPUTE)
    return replace(problem, recompute=value)


def _shard(problem: Problem, value: str) -> Problem:
    require_known("way to shard", [value], SHARD)
    return replace(problem, shard=value)


def _allow(problem: Problem, value: str) -> Problem:
    families = value.split("+")
    require_known("family of dims", families, problems.FAMILIES)
    return replace(problem, allow=tuple(name for name in problems.FAMILIES if name in families))


def _objective(problem: Problem, value: str) -> Problem:
    require_known("objective", [value], OBJECTIVES)
    return replace(problem, objective=value)


def _global_batch(problem: Problem, value: str) -> Problem:
    return replace(problem, global_batch=_integer("global-batch", value))


def _with_rule(problem: Problem, text: str) -> Problem:
    return replace(problem, fix=(*problem.fix, *problems.rules_of([text], problem.profile)))


def _on(problem: Problem, cluster: Any) -> Problem:
    return replace(problem, profile=replace(problem.profile, cluster=cluster))


_MOST_DIGITS = 15


def _integer(name: str, value: str) -> int:
    if not value.isdecimal() or len(value) > _MOST_DIGITS or int(value) < 1:
        raise UsageError(f"{name}={value} is not a positive integer", [], [f"{name}=2"])
    if name in ("devices", "hosts") and int(value) > MOST_DEVICES:
        raise UsageError(f"{name}={value} are more than {MOST_DEVICES}", [], [f"{name}=8"])
    return int(value)


def _number(name: str, value: str) -> float:
    try:
        found = float(value.removesuffix("x"))
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise UsageError(f"{name}={value} is not a positive number", [], [f"{name}=2"])
    return found


def _quantity(value: str, dimension: str) -> float:
    try:
        found = parse_quantity(value, dimension)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if found <= 0 and dimension != SECONDS:
        raise UsageError(f"{value} is nothing", [], ["write a quantity above zero"])
    return found


_CHANGES: Mapping[str, Callable[[Problem, str], Problem]] = {
    "schedule": _schedule,
    "micro-batch": _micro_batch,
    "ranks": _ranks,
    "stages": _stages,
    "dp": _replicas,
    "recompute": _recompute,
    "shard": _shard,
    "allow": _allow,
    "objective": _objective,
    "memory": lambda problem, value: replace(problem, memory_bytes=int(_quantity(value, BYTES))),
    "global-batch": _global_batch,
    "gap": lambda problem, value: replace(problem, gap=_number("gap", value)),
}
