"""What a person asks for as a problem for a solver, and the problem that a plan answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from fnmatch import fnmatchcase
from typing import Any

from halopipe.planning.options import PlanOptions
from halopipe.run_spec.schema import limit_faults
from halopipe.terminal import units
from halopipe.terminal.units import require_known
from planner.ir.cluster import Cluster
from planner.ir.constraints import DEVICE, KIND, check_names, format_rule, matching, parse_rule
from planner.ir.errors import InfeasibleError, MissingMeasurementError, RankCountError, UsageError
from planner.ir.graph import SAMPLE, Graph
from planner.ir.plan import Decision, Plan
from planner.ir.problem import (
    AUTO,
    CHANNEL_DIMS,
    DIM_FAMILIES,
    MICRO,
    NEVER,
    OBJECTIVES,
    RECOMPUTE,
    SAMPLE_DIMS,
    SHARD,
    SPATIAL_DIMS,
    STATISTICS,
    THROUGHPUT,
    TIME_DIMS,
    Problem,
    Rule,
)
from planner.ir.profile import Profile

_AS_THEY_ARE = {field.name for field in fields(Problem)} & {field.name for field in fields(PlanOptions)} - {
    *("global_batch", "schedules", "allow", "token_slices", "fix", "forbid")
}
"""Options that a problem has under the same name."""


def make_problem(profile: Profile, **asked: Any) -> Problem:
    """As :func:`problem_for`, of the options by name."""
    return problem_for(profile, PlanOptions(**asked))


def bytes_of(memory: str | int) -> int:
    """Bytes that are asked for as a number, or as text such as ``2GiB``; of empty text none."""
    return units.parse_size(memory) if memory and isinstance(memory, str) else int(memory or 0)


def problem_for(profile: Profile, options: PlanOptions) -> Problem:
    """What a solver is asked.

    Raises:
        UsageError, UnknownNameError, RankCountError: what is asked for does not exist or cannot be meant.
        MissingMeasurementError: the profile does not say what messages between two of its hosts cost.
    """
    from planner.solvers import requests  # late, as it knows the schedules

    for what, names, choices in (
        ("schedule", options.schedules, schedule_names()),
        ("objective", [options.objective], OBJECTIVES),
        ("family of dims", options.allow, DIM_FAMILIES),
        ("way to recompute", [options.recompute], RECOMPUTE),
        ("way to shard", [options.shard], SHARD),
        ("batch of statistics", [options.batch_statistics], STATISTICS),
    ):
        require_known(what, names, choices)
    memory_bytes = bytes_of(options.memory)
    for fault in limit_faults(replace(options, memory=memory_bytes)):
        raise fault
    gone = dict.fromkeys(devices_named(options.without, profile.cluster), 0.0)
    schedules = tuple(options.schedules)
    if not schedules and options.rate_per_s and options.objective == THROUGHPUT:
        schedules = ("forward",)
    as_they_are = {name: getattr(options, name) for name in _AS_THEY_ARE}
    asked = Problem(
        **as_they_are,
        profile=profile.standing(gone),
        global_batch=options.global_batch or profile.graph.samples,
        schedules=schedules,
        micro_batch_sizes=tuple(options.micro_batch),
        memory_bytes=memory_bytes,
        allow=_families(options, profile.graph),
        token_slices=tuple(options.token_slices),
        chunks=NEVER if schedules else AUTO,
    )
    requests.require_none((*requests.of_numbers(asked), *requests.of_pairs(asked)))
    _require_devices(asked)
    problem = replace(
        asked,
        profile=_calibrated(profile) if options.calibration else profile.bare,
        fix=rules_of(options.fix, profile),
        forbid=rules_of(options.forbid, profile),
    )
    return standing(problem, gone) if gone else problem


def _families(options: PlanOptions, graph: Graph) -> tuple[str, ...]:
    """The families of dims that may be cut: those asked for, else samples and, of a step that trains, space."""
    from halopipe.planning.searched_space import has_dims  # late, as it knows the schedules
    from planner import schedules

    asked = {*options.allow, *((TIME_DIMS,) if options.token_slices else ())}
    if not options.allow:
        asked.add(SAMPLE_DIMS)
        is_step = options.objective == THROUGHPUT and not options.rate_per_s
        trains = not options.schedules or any(schedules.traits(name).trains for name in options.schedules)
        if is_step and trains and not options.token_slices and has_dims(graph, SPATIAL_DIMS):
            asked.add(SPATIAL_DIMS)
    return tuple(name for name in DIM_FAMILIES if name in asked)


def _require_devices(asked: Problem) -> None:
    """Raises where the devices that are left are too few or too small, or links between them are not known."""
    cluster = asked.profile.cluster
    num_ranks = asked.num_ranks
    memory_bytes = asked.memory_bytes
    num_devices = len(cluster.devices)
    if num_ranks > num_devices:
        raise RankCountError(
            f"{num_ranks} ranks are asked for, the profile has {num_devices}",
            [", ".join(device.name for device in cluster.devices)],
            [f"--ranks {num_devices}", f"halopipe profile ... --workers {num_ranks}", "--cluster cluster.yaml"],
        )
    most = max((device.memory_bytes for device in cluster.devices), default=0)
    if memory_bytes > most:
        raise UsageError(
            "--memory is more than the devices have",
            [f"asked: {units.size(memory_bytes)}, there: {units.size(most)} ({most} bytes)"],
            ["leave --memory out", f"--memory {most}"],
        )
    missing = cluster.unlinked() if num_ranks != 1 else None
    if missing is not None:
        tier, src, dst = missing
        ends = " and ".join(cluster.devices[rank].name for rank in (src, dst))
        raise MissingMeasurementError(
            f"the profile does not say what messages between {ends} cost",
            [f"they use the tier {tier}; links: {', '.join(cluster.links) or 'none'}"],
            [
                "measure them: torchrun --nnodes 2 ... -m halopipe profile ...",
                "or say it in a cluster file: --cluster FILE",
            ],
        )


def problem_of(plan: Plan, profile: Profile) -> Problem:
    """The problem that ``plan`` answers; what a decision edited by hand makes use of is allowed as well."""
    profile = plan.inputs.as_seen(profile)
    decision = plan.decision
    asked = Problem.of(profile, plan.decision.global_batch, plan.inputs.request)
    has_recompute = asked.recompute == NEVER and any(stage.recompute or stage.recomputed for stage in decision.stages)
    schedules = asked.schedules
    looked_at = schedules or default_schedules(asked.chunks == AUTO)
    if decision.schedule in schedule_names() and decision.schedule not in looked_at:
        schedules = (*(schedules or default_schedules()), decision.schedule)
    return replace(
        asked,
        schedules=schedules,
        allow=_allowed(decision, asked.allow),
        halo_depth=max([asked.halo_depth, *(placement.margin for placement in decision.layers.values())]),
        recompute=AUTO if has_recompute else asked.recompute,
        shard=AUTO if asked.shard == NEVER and any(stage.sharded for stage in decision.stages) else asked.shard,
        zero=max([asked.zero, *(stage.level for stage in decision.stages)]),
        batch_statistics=MICRO if len(decision.micro_batches) > 1 else asked.batch_statistics,
    )


def _allowed(decision: Decision, asked: tuple[str, ...]) -> tuple[str, ...]:
    """The families of dims that were asked for, and those that the decision cuts."""
    dims = {dim for placement in decision.layers.values() for dim in placement.cuts}
    families = {*asked, *((SAMPLE_DIMS, SPATIAL_DIMS, CHANNEL_DIMS) if dims - {SAMPLE} else ())}
    families |= {TIME_DIMS} if decision.token_slices else set()
    return tuple(name for name in DIM_FAMILIES if name in families)


def standing(problem: Problem, speeds: Mapping[str, float]) -> Problem:
    """The problem on the machines as they stand; what was forbidden on devices that are gone needs no rule.

    Args:
        speeds: by device, beside the profile; 0: it is gone.  They are added to those that the problem has.

    Raises:
        UnknownNameError: there is no such device, and none of that name has gone before.
        InfeasibleError: no device is left, or a side constraint needs one that is gone.
    """
    device_names = [device.name for device in problem.profile.cluster.devices]
    require_known("device", [name for name in speeds if name not in problem.speeds], device_names)
    every = {**problem.speeds, **speeds}
    profile = problem.profile.standing(every)
    left = profile.cluster.devices
    if not left:
        raise InfeasibleError("no device is left", [f"gone: {', '.join(every)}"], ["leave some of them"])

    def is_met(rule: Rule) -> bool:
        if rule.what not in (DEVICE, KIND):
            return True
        return any(fnmatchcase(device.name if rule.what == DEVICE else device.kind, rule.value) for device in left)

    unmet = [format_rule(rule) for rule in problem.fix if not is_met(rule)]
    if unmet:
        raise InfeasibleError(
            f"the side constraint {unmet[0]} needs a device that is gone",
            [f"left: {', '.join(device.name for device in left)}"],
            ["plan again without it"],
        )
    return replace(
        problem,
        profile=profile,
        speeds=every,
        num_ranks=min(problem.num_ranks, len(left)),
        forbid=tuple(rule for rule in problem.forbid if is_met(rule)),
    )


def standing_text(speeds: Mapping[str, float]) -> str:
    """``without n1/cpu0, with n0/cpu1 at 67 % of its speed``; of machines as they were measured, ``on all devices``."""
    gone = [name for name, speed in speeds.items() if speed <= 0]
    slow = [f"{name} at {units.percent(speed)} of its speed" for name, speed in speeds.items() if speed not in (0, 1)]
    parts = [f"without {', '.join(gone)}"] if gone else []
    return ", ".join([*parts, *([f"with {', '.join(slow)}"] if slow else [])]) or "on all devices"


def devices_named(names: Sequence[str], cluster: Cluster) -> list[str]:
    """Devices of these names, which may be patterns as in a shell: ``n1/*``.

    Raises:
        UnknownNameError: the cluster has no such device.
    """
    device_names = [device.name for device in cluster.devices]
    require_known(
        "device", [name for name in names if not any(fnmatchcase(one, name) for one in device_names)], device_names
    )
    return [one for one in device_names if any(fnmatchcase(one, name) for name in names)]


def rules_of(texts: Sequence[str | Rule], profile: Profile) -> tuple[Rule, ...]:
    """Side constraints, each of a layer (and device) that the profile has.

    Raises:
        UsageError, UnknownNameError: a text is no rule, or is about nothing.
    """
    names = [layer.name for layer in profile.graph.layers]
    rules = tuple(text if isinstance(text, Rule) else parse_rule(text) for text in texts)
    for rule in rules:
        matching(rule, names)
        check_names(rule, profile.cluster)
    return rules


def _calibrated(profile: Profile) -> Profile:
    """The profile with the corrections that count."""
    if not profile.calibration.corrections:
        return profile
    from planner.costs.calibration.fit import in_force  # loads numpy

    return in_force(profile)


def schedule_names() -> tuple[str, ...]:
    """Names of all schedules."""
    from planner import schedules

    return tuple(schedules.names())


def default_schedules(chunks: bool = False) -> tuple[str, ...]:
    """Names of the schedules that are searched where nobody names any.

    Args:
        chunks: with those of several stages a position that are looked at besides.
    """
    from planner import schedules

    return (*schedules.default_names(), *(schedules.chunked_names() if chunks else ()))
