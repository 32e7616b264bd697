"""Plans in files, and the profiles that they were made from: where these lie, and whether they still are the same."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from halopipe.terminal.console import command
from planner.ir.cluster import Cluster
from planner.ir.codec import fingerprint, load, plan_fingerprint, require_match
from planner.ir.errors import CorruptFileError, InputFileError, PlanCheckError, UsageError
from planner.ir.extras import extras, required
from planner.ir.graph import Graph
from planner.ir.plan import Decision, Plan
from planner.ir.planner_extra import PlannerExtra
from planner.ir.profile import Profile
from planner.ir.timeline import TimelineFile

PROFILE = "profile.json"


def load_plan(path: str | Path) -> Plan:
    """The plan in a file."""
    return load(path, Plan)


def timeline_of(plan: Path) -> Path:
    """Where a run of the plan in this file writes its timeline unless another place is named: in the working folder."""
    return Path("timeline.json" if plan.stem == "plan" else f"{plan.stem}.timeline.json")


def graph_in(path: Path, profile_path: Path | None, cluster: Path | None = None) -> Graph:
    """The graph of a profile, or of a plan's profile; ``profile_path`` and ``cluster`` as of :func:`profile_of`.

    Raises:
        UsageError: it is a plan whose profile is not known.
    """
    try:
        return load(path, Profile).graph
    except CorruptFileError:
        plan = load_plan(path)
    profile = profile_of(plan, path, profile_path, cluster)
    if profile is None:
        remedy = f"halopipe explain {path} --profile PROFILE ..."
        raise UsageError("the network is in the profile, and none is given", [f"{path} is a plan"], [remedy])
    return profile.graph


def profile_of(plan: Plan, path: str | Path, profile_path: Path | None, cluster: Path | None = None) -> Profile | None:
    """The profile that a plan was made from: the one given, else the one of :func:`found_profile`.

    Args:
        cluster: the cluster file that the plan was made for, if it was.

    Raises:
        StaleFileError: the plan was made from another profile than the one given.
        PlanCheckError: the plan's stages are not of that profile's network.
    """
    if profile_path is not None or cluster is not None:
        return load_profile(profile_path or places(plan, path)[0], plan, cluster)
    beside_plan = found_profile(plan, path)
    return None if beside_plan is None else as_priced(beside_plan[1], plan, path)


def as_priced(profile: Profile, plan: Plan, name: str | Path) -> Profile:
    """The plan's own profile, as it was priced on it; ``name`` is that of the plan, for errors.

    Raises:
        PlanCheckError: its stages are not of the profile's network, as after an edit by hand.
    """
    from planner.check.structure import model_faults, structure_faults

    faults = [*structure_faults(plan.decision), *model_faults(plan.decision, profile.graph)]
    if faults:
        raise PlanCheckError(f"{name} has {len(faults)} fault{'s' if len(faults) > 1 else ''}", faults)
    return plan.inputs.as_seen(profile)


def found_profile(plan: Plan, path: str | Path) -> tuple[Path, Profile] | None:
    """The profile that a plan was made from, where the plan remembers it or as ``profile.json`` beside its file.

    Another profile that lies there does not count; nobody asked for it.
    """
    for place in places(plan, path):
        try:
            profile = load(place, Profile) if place.is_file() else None
        except InputFileError:
            continue
        if profile is not None and is_of(profile, plan):
            return place, profile
    return None


def is_of(profile: Profile, plan: Plan) -> bool:
    """Whether the plan was made from the profile."""
    return fingerprint(plan.inputs.as_seen(profile).bare) == plan.inputs.profile_fingerprint


def places(plan: Plan, path: str | Path) -> list[Path]:
    """Where the plan's profile may be: where the plan remembers it, and beside the plan."""
    names = dict.fromkeys((plan.inputs.profile_path or PROFILE, PROFILE))
    return [Path(os.path.normpath(Path(path).parent / name)) for name in names]


def remembering(plan: Plan, profile: Path, path: Path) -> Plan:
    """The plan, to be written to ``path``, with the way from there to its profile; a pipe or device has none."""
    if path.exists() and not path.is_file():
        return plan
    way = Path(os.path.relpath(profile.absolute(), path.absolute().parent)).as_posix()
    return replace(plan, inputs=replace(plan.inputs, profile_path="" if way == PROFILE else way))


def load_profile(path: str | Path, plan: Plan | None = None, cluster: Path | None = None) -> Profile:
    """The profile in a file; with a plan, the one that it was made from, under the corrections that it was made under.

    Args:
        cluster: a file of machines to have the profile on.

    Raises:
        StaleFileError: the plan was made from another profile.
    """
    profile = load(path, Profile)
    if cluster is not None:
        profile = on_cluster(profile, cluster)
    return profile if plan is None else require_profile(profile, plan, path)


def on_cluster(profile: Profile, cluster: str | Path | Cluster) -> Profile:
    """The profile as it would be on the machines of a cluster file (or on ``cluster`` itself).

    Kinds of device that the profile measured keep their costs; others are scaled by the rule of
    :mod:`planner.costs.layers.roofline`, and say so (evidence ``datasheet``).  What runs of plans corrected of a kind
    of device stays too; what they corrected of links does not.

    Raises:
        CorruptFileError: the file is wrong; all its faults are named.
        MissingMeasurementError: no source states a figure that a layer needs.
    """
    from planner.costs.calibration.fit import on_other_machines
    from planner.costs.layers import roofline

    if isinstance(cluster, Cluster):
        return on_other_machines(roofline.on_cluster(profile, cluster), profile)
    described = (extra.machines(cluster, profile.cluster) for extra in extras(PlannerExtra))
    machines = required(described, "planner", "cluster files")
    return on_other_machines(roofline.on_cluster(profile, machines.cluster, machines.measured_on), profile)


def require_profile(profile: Profile, plan: Plan, path: str | Path) -> Profile:
    """The profile, if the plan was made from it, under the corrections that it was made under.

    Args:
        path: its file, for errors.

    Raises:
        StaleFileError: the plan was made from another one.
        PlanCheckError: the plan's stages are not of the profile's network.
    """
    require_match(
        "profile",
        plan.inputs.profile_fingerprint,
        fingerprint(plan.inputs.as_seen(profile).bare),
        f"{command('plan', path)}, or name the profile (and --cluster) that the plan was made from",
    )
    return as_priced(profile, plan, "the plan")


def require_timeline_of(plan: Plan, name: str | Path, run: TimelineFile, source: str | Path) -> None:
    """Whether it was the plan, called ``name``, that was run.

    Raises:
        UsageError: another plan was, or this one before its decision was changed.
    """
    if why := other_plan(plan, run):
        raise UsageError(
            f"{source} is of another plan",
            [why],
            [
                command("run", name, "-o", source) if Path(name).is_file() else f"run {name}",
                "give the plan that was run",
            ],
        )


def other_plan(plan: Plan, run: TimelineFile) -> str:
    """By what another plan was run; empty if this one was."""
    if run.plan:
        mine = plan_fingerprint(plan)
        return f"it is of the plan {run.plan}, not of {mine}" if run.plan != mine else ""
    program = [set(row) for row in plan.decision.program]  # a file of before: its actions are all that it says
    for span in run.measured.spans:
        if span.rank >= len(program) or span.action not in program[span.rank]:
            return f"rank {span.rank} did {span.action}, which the plan's program does not have"
    return ""


def device_names(plan: Plan) -> list[str]:
    """Names of the devices that the plan is meant for, by rank."""
    return [name or "not used" for name in devices_of(plan.decision)]


def devices_of(decision: Decision) -> list[str]:
    """The device of each rank; empty where the plan names none."""
    named = (zip(stage.ranks, stage.devices, strict=False) for stage in reversed(decision.stages))
    device_of = {rank: device for pairs in named for rank, device in pairs}
    return [device_of.get(rank, "") for rank in range(decision.num_ranks)]
