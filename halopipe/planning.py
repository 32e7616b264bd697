"""From a profile and what a person asks for to problems, plans, baselines and predicted timelines.  No torch."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from planner.ir.codec import load
from planner.ir.errors import InfeasibleError, InputFileError, RankCountError, UnknownNameError, UsageError
from planner.ir.fingerprint import fingerprint, require_match
from planner.ir.plan import Plan, Prediction
from planner.ir.problem import Problem
from planner.ir.profile import Profile
from planner.ir.timeline import Timeline

if TYPE_CHECKING:
    from planner.solvers import Progress

DEFAULT_SOLVER = "suffix-dp"


@dataclass(frozen=True, slots=True)
class Baselines:
    """The published strategies by name: those that fit, and why the others do not."""

    plans: dict[str, Plan]
    infeasible: dict[str, str]


def make_problem(
    profile: Profile,
    *,
    global_batch: int = 0,
    micro_batch: Sequence[int] = (),
    schedules: Sequence[str] = (),
    num_ranks: int = 0,
    max_stages: int = 0,
    memory_bytes: int = 0,
    gap: float = 0.0,
    time_limit_s: float = 60.0,
) -> Problem:
    """What a solver is asked.

    Args:
        global_batch: samples a step; 0: as many as the profile's example has.
        micro_batch: samples a micro-batch that may be used; empty: the solver chooses.
        schedules: names; empty: all.
        num_ranks, max_stages: 0: no limit.
        memory_bytes: most bytes a plan may use on any device; 0: the device's memory less a margin.

    Raises:
        UsageError, UnknownNameError, RankCountError: what is asked for does not exist or cannot be meant.
    """
    known_schedules = schedule_names()
    batch = global_batch or profile.graph.samples
    num_devices = len(profile.cluster.devices)
    require_known("schedule", schedules, known_schedules)
    if num_ranks > num_devices:
        raise RankCountError(
            f"{num_ranks} ranks are asked for, the profile has {num_devices}",
            [", ".join(device.name for device in profile.cluster.devices)],
            [f"--ranks {num_devices}", f"halopipe profile ... --workers {num_ranks}"],
        )
    too_large = [size for size in micro_batch if size > batch]
    if too_large:
        raise UsageError(
            f"micro-batch {too_large[0]} is larger than the global batch {batch}",
            [],
            [f"--micro-batch {batch}", f"--global-batch {too_large[0]}"],
        )
    problem = Problem(
        profile=profile,
        global_batch=batch,
        schedules=tuple(schedules) or known_schedules,
        micro_batch_sizes=tuple(micro_batch),
        max_stages=max_stages,
        num_ranks=num_ranks,
        gap=gap,
        time_limit_s=time_limit_s,
    )
    return _with_memory(problem, memory_bytes) if memory_bytes else problem


def solve(problem: Problem, name: str = DEFAULT_SOLVER, progress: Progress | None = None) -> Plan:
    """The plan that solver ``name`` finds.

    Raises:
        UnknownNameError: there is no such solver.
        InfeasibleError: nothing fits.
    """
    from planner import solvers

    require_known("solver", [name], solvers.names())
    return solvers.solver(name)(problem, progress)


def problem_of(plan: Plan, profile: Profile) -> Problem:
    """The problem that ``plan`` answers, without its limits on schedules, micro-batches and stages."""
    decision, registry = plan.decision, schedule_names()
    margin = memory_margin(plan, profile)
    return Problem(profile, decision.global_batch, registry, num_ranks=decision.num_ranks, memory_margin=margin)


def solve_baselines(problem: Problem) -> Baselines:
    """One device, data parallelism, an even split: each as its authors do it, on the same problem."""
    from planner import solvers

    plans: dict[str, Plan] = {}
    infeasible: dict[str, str] = {}
    for name in solvers.baselines():
        try:
            plans[name] = solvers.solver(name)(problem, None)
        except InfeasibleError as error:
            infeasible[name] = "; ".join((error.title, *error.details[:1]))
    return Baselines(plans, infeasible)


def predict_again(plan: Plan, profile: Profile) -> tuple[Prediction, Timeline]:
    """The simulator's word on the plan's decision, which may have been edited since."""
    from planner.costs.predict import predict

    return predict(profile, plan.decision, memory_margin(plan, profile))


def memory_margin(plan: Plan, profile: Profile) -> float:
    """The share of device memory that the plan was told to leave free."""
    devices = profile.cluster.devices
    margins = [
        1 - rank.memory_limit_bytes / devices[rank.rank].memory_bytes
        for rank in plan.prediction.ranks
        if rank.rank < len(devices) and rank.memory_limit_bytes > 0
    ]
    return max(0.0, margins[0]) if margins else Problem(profile, plan.decision.global_batch).memory_margin


def load_plan(path: str | Path) -> Plan:
    """The plan in a file."""
    return load(path, Plan)


def profile_of(plan: Plan, path: str | Path, given: Path | None) -> Profile | None:
    """The profile that a plan was made from: the one given, else ``profile.json`` beside the plan file if it is that.

    Raises:
        StaleFileError: the plan was made from another profile than the one given.
    """
    if given is not None:
        return load_profile(given, plan)
    beside = Path(path).parent / "profile.json"
    if not beside.is_file():
        return None
    try:
        return load_profile(beside, plan)
    except InputFileError:  # somebody else's; nobody asked for it
        return None


def load_profile(path: str | Path, plan: Plan | None = None) -> Profile:
    """The profile in a file; with a plan, the one that it was made from.

    Raises:
        StaleFileError: the plan was made from another profile.
    """
    profile = load(path, Profile)
    if plan is not None:
        require_match(
            "profile",
            plan.inputs.profile_fingerprint,
            fingerprint(profile),
            f"halopipe plan {path}, or name the profile that the plan was made from",
        )
    return profile


def schedule_names() -> tuple[str, ...]:
    """Names of all schedules."""
    from planner import schedules

    return tuple(schedules.names())


def device_names(plan: Plan) -> list[str]:
    """Names of the devices that the plan is meant for, by rank."""
    names = {
        rank: device for stage in plan.decision.stages for rank, device in zip(stage.ranks, stage.devices, strict=True)
    }
    return [names.get(rank, "not used") for rank in range(plan.decision.num_ranks)]


def require_known(what: str, wanted: Iterable[str], known: Sequence[str]) -> None:
    """Raises :class:`UnknownNameError`, with the nearest name, for the first of ``wanted`` that is not known."""
    for name in wanted:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            remedies = [f"{near[0]} (did you mean that?)"] if near else []
            raise UnknownNameError(f"no {what} {name!r}", [f"known: {', '.join(known)}"], remedies)


def _with_memory(problem: Problem, memory_bytes: int) -> Problem:
    """The problem with at most ``memory_bytes`` a device, expressed as the margin that leaves so much."""
    from dataclasses import replace

    sizes = {device.memory_bytes for device in problem.profile.cluster.devices}
    if len(sizes) > 1:
        raise UsageError(
            "--memory needs devices of one memory size",
            [f"the profile has {', '.join(str(number) + ' bytes' for number in sorted(sizes))}"],
        )
    device_bytes = sizes.pop()
    if memory_bytes > device_bytes:
        raise UsageError(
            "--memory is more than the devices have", [f"asked: {memory_bytes} bytes, there: {device_bytes} bytes"]
        )
    return replace(problem, memory_margin=1 - memory_bytes / device_bytes)
