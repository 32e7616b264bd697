"""Another plan for the machines as they stand: devices that are gone, devices that run at another speed.

found = replan(plan, profile, {"n1/cpu0": 0.0, "n0/cpu1": 0.667})     # gone; takes 1.5 times as long
found.plan, found.before_s, found.after_s, found.lines()

The problem stays: profile, global batch, objective, constraints.  So do the micro-batches, as the statistics of batch
normalisation are theirs and random layers draw by them; of a model that has neither they may be ``free``.  The plan in
force, cut anew for what is left of it, is the one to beat; the search itself begins with one device, replicas and the
even split, so that no plan found is slower than these.

When it is worth to go over to another plan (``is_worth``), and which speeds to count with (:class:`HeardSpeeds`), is
decided here too, by numbers alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from halopipe.planning import problem as problems
from halopipe.planning import solve
from halopipe.planning.compare import differences
from halopipe.planning.options import DEFAULT_SOLVER
from halopipe.planning.searched_space import space
from halopipe.terminal import units
from planner.costs.candidate import Candidate, Recomputes
from planner.costs.cost_model import CostModel
from planner.ir.errors import HalopipeError, IllegalProgramError, InfeasibleError, MissingMeasurementError
from planner.ir.plan import Decision, Plan, status_of
from planner.ir.problem import ALWAYS, AUTO, NEVER, THROUGHPUT, Problem
from planner.ir.profile import Profile
from planner.layers.division import has_layouts
from planner.solvers.candidates.candidate import group_shares

TIME_LIMIT_S = 20.0
"""Longest search for another plan: nobody trains meanwhile."""

LEAST_GAIN = 0.05
"""Of the step: predictions of two plans beside one another are not surer than that."""

APART = 0.2
NUM_HEARD = 5
"""How far a speed must be from the one that the plan counts with, and how often in succession."""

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Replan:
    """A plan for the machines as they stand, beside the one in force.

    Attributes:
        speeds: by device, beside the profile; 0: it is gone.
        before_s: the step under the plan in force: at these speeds where all of its devices are there, else as it was
            predicted.
    """

    before: Plan
    plan: Plan
    speeds: Mapping[str, float]
    before_s: float

    @property
    def after_s(self) -> float:
        """The step of the new plan, predicted."""
        return self.plan.prediction.step_s

    def headline(self) -> str:
        """What became of the machines, what a step costs now, and how sure it is that none is faster."""
        search = self.plan.search
        best = f"the best of: {space(self.plan)}"
        sure = f"proven {best}" if search.status == "proven" else f"at most {units.percent(search.gap)} from {best}"
        optimality = f", {sure}" if search.bound_s > 0 else ""
        change = units.signed_percent(self.after_s / self.before_s - 1) if self.before_s else ""
        steps = f"{units.seconds(self.after_s)} a step, {units.seconds(self.before_s)} before ({change})"
        return f"another plan {problems.standing_text(self.speeds)}: {steps}{optimality}"

    def lines(self) -> list[str]:
        """The same, then what the plan decides otherwise."""
        return [self.headline(), *(f"  {line}" for line in differences(self.before.decision, self.plan.decision))]

    def data(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "speeds": dict(self.speeds),
            "step_s": self.after_s,
            "before_s": self.before_s,
            "gap": self.plan.search.gap,
            "status": self.plan.search.status,
            "differences": list(differences(self.before.decision, self.plan.decision)),
        }


def replan(
    plan: Plan,
    profile: Profile,
    speeds: Mapping[str, float],
    *,
    in_force: Plan | None = None,
    free: bool = False,
) -> Replan:
    """The best plan for the machines as they stand.

    Args:
        plan: as it was made for the machines when they were whole; says what was asked for.
        profile: that it was made from.
        speeds: by device, beside the profile; 0: it is gone.
        in_force: the plan that the job runs now, perhaps another one; None: ``plan``.
        free: whether micro-batches may be of other sizes.

    Raises:
        InfeasibleError: no device is left, nothing fits, or a side constraint needs a device that is gone.
        UnknownNameError: the profile knows no such device.
    """
    before = plan if in_force is None else in_force
    asked = problems.standing(problems.problem_of(plan, profile), speeds)
    sizes = [(), asked.micro_batch_sizes] if free else [(max(plan.decision.micro_batches),)]
    chosen, error = _searched(asked, sizes)
    if chosen is not None and not free and chosen.decision.micro_batches != plan.decision.micro_batches:
        chosen = None
    recut = _recut(replace(asked, micro_batch_sizes=sizes[0]), before.decision)
    if recut is not None and (chosen is None or _is_faster(recut, chosen, asked.objective)):
        chosen = recut if chosen is None else _bounded_by(recut, chosen)
    if chosen is None:
        raise _nothing_left(asked, error, plan, free)
    chosen = replace(chosen, inputs=replace(chosen.inputs, profile_path=plan.inputs.profile_path))
    return Replan(before, chosen, dict(asked.speeds), _step_now_s(before, asked))


def _searched(asked: Problem, sizes: Sequence[tuple[int, ...]]) -> tuple[Plan | None, HalopipeError | None]:
    """The best plan with micro-batches of the first of these sizes that any plan fits with."""
    failed: HalopipeError | None = None
    for those in dict.fromkeys(sizes):
        problem = replace(asked, micro_batch_sizes=those, time_limit_s=TIME_LIMIT_S)
        try:
            return solve.solve(problem), None
        except (InfeasibleError, MissingMeasurementError) as error:
            failed = failed or error
    return None, failed


def _nothing_left(asked: Problem, error: HalopipeError | None, plan: Plan, free: bool) -> InfeasibleError:
    left = [device.name for device in asked.profile.cluster.devices]
    why = [error.title, *error.details] if error is not None else []
    remedies = list(error.remedies) if error is not None else []
    if not free:
        why.append(f"in {units.micro_batches(plan.decision.micro_batches)}, as the job began")
        remedies = [
            "--replan free: other sizes; draws of dropout and statistics of batch normalisation change with them"
        ]
    return InfeasibleError(
        f"no plan fits {problems.standing_text(asked.speeds)}",
        [f"left: {', '.join(left)}", *why],
        [*remedies, "start again with --resume when the devices are back"],
    )


def _is_faster(recut: Plan, searched: Plan, objective: str) -> bool:
    best_s = searched.search.optimum_s(searched.prediction.step_s)
    return objective == THROUGHPUT and recut.prediction.step_s < best_s * (1 - _ROUNDING)


def _bounded_by(recut: Plan, searched: Plan) -> Plan:
    """``recut`` with the bound of the search that found nothing faster."""
    bound_s = searched.search.bound_s
    step_s = recut.prediction.step_s
    if not 0 < bound_s < step_s:
        return recut
    gap = step_s / bound_s - 1
    bounds_s = searched.search.bounds_s
    status = status_of(searched.search.status, step_s, bound_s, recut.inputs.request.gap)
    return replace(recut, search=replace(recut.search, status=status, bound_s=bound_s, gap=gap, bounds_s=bounds_s))


def _step_now_s(before: Plan, asked: Problem) -> float:
    """The step of the plan in force on the machines as they stand, if it could still run there."""
    names = {device.name: rank for rank, device in enumerate(asked.profile.cluster.devices)}
    for stage in before.decision.stages:
        if [names.get(name) for name in stage.devices] != list(stage.ranks):
            return before.prediction.step_s
    from planner import predict

    return predict(asked.profile, before.decision, asked.memory_margin, asked.memory_bytes)[0].step_s


def _recut(problem: Problem, decision: Decision) -> Plan | None:
    """The decision on what is left of its devices; None if it cannot be cut so, or does not fit.

    Ranks that are gone leave their share to the others of their stage; the layers of a stage that is gone as a whole
    go to the stage before it, those of the first ones to the next.
    """
    from planner.solvers.candidates.choose import heuristic_plan
    from planner.solvers.candidates.evaluate import Evaluator

    if problem.shard == AUTO:
        sharded = any(stage.sharded for stage in decision.stages)
        problem = replace(problem, shard=ALWAYS if sharded else NEVER)
    evaluator = Evaluator(problem, CostModel(problem.profile))
    try:
        candidate = _candidate(evaluator.problem, evaluator.cost_model, decision)
        if candidate is None or evaluator.unmet(candidate):
            return None
        evaluated = evaluator.evaluate(candidate)
        if not evaluated.fits:
            return None
        return heuristic_plan(evaluator, evaluated, DEFAULT_SOLVER, "the plan in force, on what is left of it")
    except (MissingMeasurementError, IllegalProgramError, InfeasibleError):
        return None


def _candidate(problem: Problem, cost_model: CostModel, decision: Decision) -> Candidate | None:
    from planner.solvers.candidates.feasibility import usable

    if any(has_layouts(decision, stage) for stage in range(len(decision.stages))):
        return None
    rank_by_name = {device.name: rank for rank, device in enumerate(problem.profile.cluster.devices)}
    left = [tuple(rank_by_name[name] for name in stage.devices if name in rank_by_name) for stage in decision.stages]
    kept = [number for number, ranks in enumerate(left) if ranks]
    groups = tuple(left[number] for number in kept)
    if not kept or len(set(groups)) < len(groups):  # several stages a position go by their schedule's pattern
        return None
    goes_to = [max((place for place, at in enumerate(kept) if at <= number), default=0) for number in range(len(left))]
    batches = decision.micro_batches
    shares = []
    for number, group in zip(kept, groups, strict=True):
        is_whole = len(group) == len(decision.stages[number].ranks)
        samples = decision.layout_of(number).samples(max(batches)) if is_whole and len(group) > 1 else ()
        shares.append(samples or group_shares(problem, cost_model, group, max(batches)))
        if not usable(problem, cost_model, group, shares[-1], batches):
            return None
    recompute_masks = tuple(_recomputes(decision, goes_to, place) for place in range(len(kept)))
    stage_of = tuple(goes_to[decision.layers[layer.name].stage] for layer in problem.profile.graph.layers)
    return Candidate(
        stage_of,
        groups,
        tuple(shares),
        batches,
        decision.schedule,
        recompute=recompute_masks if any(recompute_masks) else (),
    )


def _recomputes(decision: Decision, goes_to: Sequence[int], place: int) -> Recomputes:
    """What a stage computes again that takes over what went to it."""
    own = [stage for stage, at in zip(decision.stages, goes_to, strict=True) if at == place]
    if any(stage.recompute for stage in own):
        return Recomputes.ALL
    return Recomputes.CORES if any(stage.recomputed for stage in own) else Recomputes.NOTHING


def is_worth(before_s: float, after_s: float, num_left: int, change_s: float) -> bool:
    """Whether to go over to a plan of steps of ``after_s``: over the rest of the job it saves more than it costs.

    Args:
        before_s: a step now.
        num_left: steps that are left.
        change_s: what the change costs: the start of the ranks, and the steps that are done again.
    """
    saved_s = before_s - after_s
    return saved_s > LEAST_GAIN * before_s and saved_s * num_left > change_s


@dataclass(slots=True)
class HeardSpeeds:
    """Which speeds of devices to plan with, from what is heard of them again and again while a job runs.

    A device counts as slower or faster only where it was so :data:`NUM_HEARD` times in succession, each time by
    :data:`APART` from what the plan counts with: noise of 10 % never changes a plan.

    Attributes:
        planned: by device, beside the profile, as the plan in force counts with; 1 where nothing is said.
    """

    planned: dict[str, float] = field(default_factory=dict)
    _dismissed: dict[str, float] = field(default_factory=dict)
    _heard: dict[str, deque[float]] = field(default_factory=dict)

    def hear(self, device: str, factor: float) -> None:
        """Its own actions took ``factor`` times what the plan in force predicts."""
        self._heard.setdefault(device, deque(maxlen=NUM_HEARD)).append(factor)

    def changed(self) -> dict[str, float]:
        """Devices at another speed than the plan counts with, and at which, to three digits; less those dismissed."""
        new_speeds = {}
        for device, factors in self._heard.items():
            slower = all(factor > 1 + APART for factor in factors)
            faster = all(factor < 1 / (1 + APART) for factor in factors)
            if len(factors) == NUM_HEARD and (slower or faster):
                new_speeds[device] = float(f"{self.planned.get(device, 1.0) / median(factors):.3g}")
        return {device: speed for device, speed in new_speeds.items() if not self._is_dismissed(device, speed)}

    def plan_with(self, speeds: Mapping[str, float]) -> None:
        """From now on the plan in force counts with these."""
        self.planned = dict(speeds)
        self._heard.clear()
        self._dismissed.clear()

    def dismiss(self, speeds: Mapping[str, float]) -> None:
        """No other plan is worth it at these speeds: they are of interest again when they change further."""
        self._dismissed.update(speeds)

    def _is_dismissed(self, device: str, speed: float) -> bool:
        before = self._dismissed.get(device)
        return before is not None and abs(speed - before) <= APART * before
