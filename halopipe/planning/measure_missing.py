"""Plans, measures what the plan and its close rivals use and nobody measured, plans again, until nothing is left."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from halopipe.planning import solve as planning
from halopipe.terminal import units
from halopipe.terminal.console import Reporter
from planner.costs.cost_model import CostModel
from planner.costs.stages.coverage import Unmeasured, unmeasured
from planner.ir.codec import dump
from planner.ir.errors import HalopipeError, UsageError
from planner.ir.plan import Decision, Plan
from planner.ir.problem import Problem
from planner.ir.profile import Measurement, Profile

if TYPE_CHECKING:
    from planner.ir.cluster import Collective
    from profiler.measure.progress import ProfileProgress
    from profiler.shards.missing import FoundMissing

MOST_ROUNDS = 3
CLOSE = 0.05
"""Rivals whose step is at most this much longer may turn out to be the best."""

_RIVAL_TIME_LIMIT_S = 5.0
_WAITS = "waits"

Solve = Callable[[Problem], Plan]
Measure = Callable[[Profile, str, Unmeasured], "FoundMissing"]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Completed:
    """The plan, and the profile that it was made from: what was measured is in it."""

    plan: Plan
    profile: Profile
    rounds: tuple[str, ...]


def plan_and_measure(problem: Problem, solve: Solve, measure: Measure, say: Say = lambda line: None) -> Completed:
    """Plans until the plan and its close rivals are made of measurements, in at most ``MOST_ROUNDS`` rounds.

    Args:
        solve: of the plan itself and of its rivals.
        measure: on this machine.
        say: called with a line for each round.

    Raises:
        UsageError: the profile is on other devices than it was measured on.
        MissingDeviceError: this machine has no device of a kind that is missing.
        HalopipeError: no plan fits, or measuring failed.
    """
    rounds: list[str] = []
    tried: set[tuple[str, object]] = set()
    plan = solve(problem)
    while len(rounds) < MOST_ROUNDS:
        cost_model = CostModel(problem.profile)
        missing = unmeasured(cost_model, [plan.decision, *_rivals(problem, plan, solve)])
        wanted = {kind: left for kind, needs in missing.items() if (left := _untried(kind, needs, tried))}
        if not wanted:
            break
        profile = problem.profile
        busy = False
        for kind, each in wanted.items():
            measured = measure(profile, kind, each)
            profile = with_measurements(profile, kind, measured.whole, measured.parts)
            busy = busy or measured.is_contended
            if each.waits and measured.action_overhead_s is not None:
                overheads_s = {**profile.action_overhead_s, kind: measured.action_overhead_s}
                profile = replace(profile, action_overhead_s=overheads_s)
            if measured.calls:
                profile = with_calls(profile, measured.calls)
            tried |= {(kind, what) for what in (*each.sizes, *each.shapes, *each.exchanges, _WAITS)}
        problem = replace(problem, profile=profile)
        before = plan
        plan = solve(problem)
        rounds.append(_line(len(rounds) + 1, wanted, before, plan, problem, busy))
        say(rounds[-1])
    return Completed(plan, problem.profile, tuple(rounds))


def plan_and_store(
    problem: Problem,
    solve: Solve,
    measure: Measure | None,
    profile: Profile,
    path: Path | None,
    say: Say = lambda line: None,
) -> Completed:
    """The plan; where what is missing is measured, as :func:`plan_and_measure`, with what was measured in the file.

    Args:
        measure: None: nothing is.
        profile: as it is in the file.
        path: of the profile; None: it is in none.
    """
    if measure is None:
        return Completed(solve(problem), problem.profile, ())
    completed = plan_and_measure(problem, solve, measure, say)
    if completed.rounds and path is not None:
        dump(stored(profile, completed.profile), path)
    return completed


def measure_here(quick: bool = False, quiet: bool = False) -> Measure:
    """Measures in processes of this machine, with progress on stderr unless ``quiet``."""

    def measure(profile: Profile, kind: str, wanted: Unmeasured) -> FoundMissing:
        from profiler.shards.missing import FoundMissing, measure_calls, measure_missing

        with Reporter("measuring what is missing", quiet=quiet) as reporter:

            def show(at: ProfileProgress) -> None:
                reporter.update(at.done, at.total, at.layer, at.eta_s)

            calls = measure_calls(profile, kind) if wanted.exchanges else ()
            sizes = wanted.sizes
            if wanted.waits and not sizes and not wanted.shapes:  # at some size actions wait
                sizes = (min(one.samples for one in profile.measurements[kind]),)
            if not sizes and not wanted.shapes:
                return FoundMissing((), (), False, calls=calls)
            measured = measure_missing(profile, kind, sizes, wanted.shapes, quick=quick, progress=show)
            return replace(measured, calls=calls)

    return measure


def with_measurements(
    profile: Profile, kind: str, whole: Iterable[Measurement], parts: Iterable[Measurement]
) -> Profile:
    """The profile with these measurements, in place of what it had of the same layers, samples and parts.

    Whole layers at sizes that it had stay as they are: they were only needed to cut parts from.
    """
    had = profile.measurements.get(kind, ())
    measured = {(one.layer, one.samples) for one in had}
    fresh = tuple(one for one in whole if (one.layer, one.samples) not in measured)
    new = {(one.layer, one.samples, one.part, one.before): one for one in parts}
    kept = [one for one in profile.parts.get(kind, ()) if (one.layer, one.samples, one.part, one.before) not in new]
    of_kind = (*kept, *new.values())
    return replace(
        profile,
        measurements={**profile.measurements, kind: (*had, *fresh)},
        parts={**profile.parts, kind: of_kind} if of_kind else profile.parts,
    )


def with_calls(profile: Profile, calls: Sequence[Collective]) -> Profile:
    """The profile with these measurements of what ranks compute around exchanges, in place of those that it had."""
    new = {call.operation for call in calls}
    kept = [one for one in profile.cluster.collectives if one.operation not in new]
    return replace(profile, cluster=replace(profile.cluster, collectives=(*kept, *calls)))


def stored(profile: Profile, completed: Profile) -> Profile:
    """``profile``, with what ``completed`` has measured more: what goes back to its file."""
    return replace(
        profile,
        measurements=completed.measurements,
        parts=completed.parts,
        action_overhead_s=completed.action_overhead_s,
        cluster=replace(profile.cluster, collectives=completed.cluster.collectives),
    )


def require_possible(cluster: object, pareto: int | None = None) -> None:
    """Refuses to measure for machines that are only described, and for a whole front.

    Raises:
        UsageError: a cluster is given, or a number of plans.
    """
    if cluster is not None:
        raise UsageError(
            "--measure-missing measures this machine, --cluster describes others",
            ["what is measured here would say nothing about them"],
            ["leave out one of the two", "halopipe profile on a machine of that kind"],
        )
    if pareto is not None:
        raise UsageError(
            "--measure-missing is about one plan, --pareto makes many",
            [],
            ["measure with a plan first, then ask for the front of the profile that it completed"],
        )


def _rivals(problem: Problem, plan: Plan, solve: Solve) -> list[Decision]:
    """Other plans that are as good as the plan, or nearly: published strategies, and half and twice its micro-batch."""
    size = max(plan.decision.micro_batches)
    sizes = [each for each in (size // 2, 2 * size) if 0 < each <= problem.global_batch]
    if problem.micro_batch_sizes:
        sizes = [each for each in sizes if each in problem.micro_batch_sizes]
    limit_s = min(problem.time_limit_s, _RIVAL_TIME_LIMIT_S)
    rivals = list(planning.solve_baselines(problem, within_s=limit_s).plans.values())
    for each in sizes:
        try:
            rivals.append(solve(replace(problem, micro_batch_sizes=(each,), time_limit_s=limit_s)))
        except HalopipeError:  # what does not fit is no rival
            continue
    most_s = plan.prediction.step_s * (1 + CLOSE)
    return [rival.decision for rival in rivals if rival.prediction.step_s <= most_s]


def _untried(kind: str, missing: Unmeasured, tried: set[tuple[str, object]]) -> Unmeasured:
    """Sizes at which the model does not run, and parts that cannot be run alone, are tried once."""
    return Unmeasured(
        tuple(size for size in missing.sizes if (kind, size) not in tried),
        tuple(shape for shape in missing.shapes if (kind, shape) not in tried),
        missing.waits and (kind, _WAITS) not in tried,
        tuple(each for each in missing.exchanges if (kind, each) not in tried),
    )


def _line(
    number: int, wanted: dict[str, Unmeasured], before: Plan, after: Plan, problem: Problem, is_contended: bool
) -> str:
    measured = []
    for kind, each in wanted.items():
        whole = f"layers at {', '.join(map(str, each.sizes))} samples" if each.sizes else ""
        parts = f"{len(each.shapes)} parts of layers" if each.shapes else ""
        waits = "actions after waits" if each.waits else ""
        calls = f"calls around exchanges ({', '.join(each.exchanges)})" if each.exchanges else ""
        measured.append(f"{' and '.join(filter(None, (whole, parts, waits, calls)))} on {kind}")
    same, _ = planning.predict_again(before, problem.profile)
    moved = same.step_s / before.prediction.step_s - 1 if before.prediction.step_s else 0.0
    old = units.seconds(before.prediction.step_s)
    now = units.seconds(same.step_s)
    text = f"round {number}: measured {'; '.join(measured)}: the plan's step is {now}, predicted {old} ({moved:+.1%})"
    if after.decision == before.decision:
        text += "; it stays the best"
    else:
        text += f"; another plan is better now: {units.seconds(after.prediction.step_s)}"
    return text + ("; the machine was busy" if is_contended else "")
