"""Predicted beside measured: the step time of plans of ResNet-50 and VGG-16 on two workers of this machine.

Each network is profiled afresh, all plans are made and their predictions written down first, then every plan is run, by
turns in three rounds, of which the median counts.  The named peer is the clock.  A row is measured / predicted - 1 of
one plan; the last rows are the mean absolute error, that of speed-ups over one device, by how much a plan's own rounds
differ, and the measured speed of the planner's choice beside the baselines'.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import planner
from benchmarks.report import Row, at_most, error_within, run
from benchmarks.runs import RUN_WARM_UP, by_hand, step_s
from benchmarks.turns import by_turns
from planner.costs.candidate import Candidate
from planner.costs.cost_model import CostModel
from planner.costs.predict import forecast
from planner.costs.pricing import Pricing
from planner.ir.codec import fingerprint
from planner.ir.plan import Plan, Search
from planner.ir.problem import Problem
from planner.ir.profile import ModelSource, Profile
from planner.solvers.candidates.candidate import decision_of, split_batch
from profiler import profile

GLOBAL_BATCH = 8
GOAL_PERCENT = 5.0
SPEED_UP_PERCENT = 4.0
STEPS = 10
ROUNDS = 3
SOURCES = {
    "ResNet-50": ModelSource("profiler.models.resnet:resnet50", {"num_classes": "10"}, (GLOBAL_BATCH, 3, 64, 64)),
    "VGG-16": ModelSource("profiler.models.vgg:vgg16", {"num_classes": "10"}, (GLOBAL_BATCH, 3, 64, 64)),
}
SOLVERS = ("best-first", "one-device", "data-parallel", "even-split")
PIPELINES = (("gpipe", 4), ("1f1b", 4), ("1f1b", 2))
"""Schedules and micro-batch sizes of pipelines over both workers, cut where the simulator says."""


@dataclass(frozen=True, slots=True)
class Case:
    """A plan with its name."""

    network: str
    name: str
    plan: Plan


def measure(quick: bool) -> list[Row]:
    """Profile, plan, then run; ``--quick`` takes ResNet-50 alone and fewer steps."""
    cases = []
    for network, source in list(SOURCES.items())[: 1 if quick else None]:
        found = profile(source, num_workers=2, quick=quick)
        cases += [Case(network, name, plan) for name, plan in _plans(found, PIPELINES[:1] if quick else PIPELINES)]
    rounds = _by_turns(cases, 1 if quick else ROUNDS)
    measured_s = [statistics.median(each) for each in rounds]
    errors = [seconds / case.plan.prediction.step_s - 1 for case, seconds in zip(cases, measured_s, strict=True)]
    rows = []
    for case, seconds, error in zip(cases, measured_s, errors, strict=True):
        name = f"{case.network}, {case.name}"
        rows.append(Row(f"{name}: predicted step", 1e3 * case.plan.prediction.step_s, "ms"))
        rows.append(Row(f"{name}: measured step", 1e3 * seconds, "ms"))
        rows.append(error_within(f"{name}: error", 1 + error, GOAL_PERCENT))
    rows.append(at_most("mean absolute error", 100 * statistics.fmean(map(abs, errors)), "%", GOAL_PERCENT))
    rows.append(
        at_most("mean error of speed-ups over one device", _speed_up_error(cases, errors), "%", SPEED_UP_PERCENT)
    )
    spread = [max(each) / min(each) - 1 for each in rounds]
    rows.append(Row("a plan's own rounds, mean difference", 100 * statistics.fmean(spread), "%"))
    rows.append(Row("a plan's own rounds, largest difference", 100 * max(spread), "%"))
    rows += list(_beside_baselines(cases, measured_s))
    return rows


def _by_turns(cases: Sequence[Case], num_rounds: int) -> list[list[float]]:
    """Seconds of a step by case and round; all plans run in each round, those of one decision once."""
    plans = {fingerprint(case.plan.decision): case.plan for case in cases}
    found = by_turns(num_rounds, {key: partial(step_s, plan, STEPS, RUN_WARM_UP) for key, plan in plans.items()})
    return [found[fingerprint(case.plan.decision)] for case in cases]


def _speed_up_error(cases: Sequence[Case], errors: Sequence[float]) -> float:
    """Of predicted over measured speed-ups; what all plans of a network have in common is not in it."""
    one = {case.network: error for case, error in zip(cases, errors, strict=True) if case.name == "one-device"}
    others = [(case.network, error) for case, error in zip(cases, errors, strict=True) if case.name != "one-device"]
    return 100 * statistics.fmean(abs((1 + error) / (1 + one[network]) - 1) for network, error in others)


def _beside_baselines(cases: Sequence[Case], measured_s: Sequence[float]) -> Iterator[Row]:
    """The planner's choice against each baseline, as measured."""
    seconds = {(case.network, case.name): value for case, value in zip(cases, measured_s, strict=True)}
    for (network, name), value in seconds.items():
        if name in SOLVERS[1:]:
            yield at_most(f"{network}: chosen / {name}, measured", seconds[network, SOLVERS[0]] / value, "ratio", 1.03)


def _plans(found: Profile, pipelines: Sequence[tuple[str, int]]) -> Iterator[tuple[str, Plan]]:
    problem = Problem(found, GLOBAL_BATCH, confidence=0.0)
    for name in SOLVERS:
        yield name, planner.plan(problem, name)
    cost_model = CostModel(found)
    for schedule, size in pipelines:
        yield f"pipeline {schedule} x {GLOBAL_BATCH // size}", pipeline(problem, cost_model, schedule, size)


def pipeline(problem: Problem, cost_model: CostModel, schedule: str, size: int) -> Plan:
    """Two stages on two workers, cut where the step is predicted to be shortest."""
    layers = len(problem.profile.graph.layers)
    micro_batches = split_batch(problem.global_batch, size)
    best: tuple[float, Candidate] | None = None
    for cut in range(1, layers):
        candidate = Candidate.chain((0, cut, layers), ((0,), (1,)), ((size,), (size,)), micro_batches, schedule)
        seen = forecast(Pricing(cost_model), decision_of(problem, candidate), problem.memory_margin)
        if best is None or seen.prediction.step_s < best[0]:
            best = seen.prediction.step_s, candidate
    if best is None:
        raise ValueError("a network of one layer cannot be cut")
    search = Search("every cut simulated", "benchmark", "proven", best[0], 0.0, layers - 1, layers - 1)
    return by_hand(problem, best[1], search)


if __name__ == "__main__":
    raise SystemExit(run("Predicted beside measured step time, two workers on this machine", measure))
