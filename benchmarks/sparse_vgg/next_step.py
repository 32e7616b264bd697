"""What it gains to prepare the next step during this one: sites and maps of a sparse VGG-16, predicted and measured.

    python -m benchmarks.sparse_vgg.next_step [--quick] [--json]

SparsePipe's network, half as wide, is profiled on two cores of this machine; plans are made, each once as it prepares
every step in itself and once as it prepares the next one meanwhile (``Decision.prepares_next_step``), and all
predictions are written down.  Then all are run by the function behind ``halopipe run``, through shared memory, by
turns; a step's time is from its start to the next one's, so that what is waited for between steps is in it.

    one device          the other core has no rank, and prepares
    pipeline            two stages; each rank's core prepares while the rank waits
    one stage, shared   both ranks compute all the time: nothing is gained, and the planner does not ask for it
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import planner
from benchmarks.report import Row, run
from benchmarks.runs import step_s
from benchmarks.step_time import pipeline
from benchmarks.turns import by_turns
from planner.costs.cost_model import CostModel
from planner.costs.predict import forecast
from planner.costs.pricing import Pricing
from planner.ir.plan import Plan
from planner.ir.problem import Problem
from planner.ir.profile import ModelSource
from profiler import profile

STEPS = 12
WARMUP = 3
SAMPLES = 8
FULL = (32, 512, 3224, 3)
QUICK = (8, 32, 1000, 1)
"""Width of the network, numbers between its linear layers, voxels of a cloud, rounds."""
WAYS = {False: "in its own step", True: "in the step before"}
Key = tuple[str, bool]
"""A plan's name, and whether it prepares ahead."""


def measure(quick: bool) -> list[Row]:
    """Profile, plan, then run."""
    width, hidden, voxels, rounds = QUICK if quick else FULL
    arguments = {"width": str(width), "hidden": str(hidden), "num_classes": "40"}
    source = ModelSource("profiler.models.sparse_vgg:sparse_vgg16", arguments, (SAMPLES, voxels, 1))
    plans = dict(plans_of(Problem(profile(source, num_workers=2, quick=True), SAMPLES, confidence=0.0)))
    steps = by_turns(rounds, {key: partial(step_s, plan, STEPS, WARMUP) for key, plan in plans.items()})
    return list(rows(plans, {key: statistics.median(each) for key, each in steps.items()}))


def plans_of(problem: Problem) -> Iterator[tuple[Key, Plan]]:
    """All plans, each in both ways; and what the planner would choose of each is in their predictions."""
    cost_model = CostModel(problem.profile)
    plans = {
        "one device": planner.plan(problem, "one-device"),
        "pipeline": pipeline(problem, cost_model, "1f1b", max(1, problem.global_batch // 4)),
        "one stage, shared": planner.plan(problem, "data-parallel"),
    }
    for name, plan in plans.items():
        for ahead in WAYS:
            decision = replace(plan.decision, prepares_next_step=ahead)
            prediction = forecast(Pricing(cost_model), decision, problem.memory_margin).prediction
            yield (name, ahead), replace(plan, decision=decision, prediction=prediction)


def rows(plans: Mapping[Key, Plan], measured: Mapping[Key, float]) -> Iterator[Row]:
    """Of every plan, then what the second way gains of the first."""
    predicted = {key: plan.prediction.step_s for key, plan in plans.items()}
    for (name, ahead), seconds in predicted.items():
        yield Row(f"{name}, prepared {WAYS[ahead]}: predicted step", 1e3 * seconds, "ms")
        yield Row(f"{name}, prepared {WAYS[ahead]}: measured step", 1e3 * measured[name, ahead], "ms")
    for name in dict.fromkeys(name for name, _ in plans):
        for what, found in (("predicted", predicted), ("measured", measured)):
            yield Row(f"{name}: gained, {what}", 100 * (1 - found[name, True] / found[name, False]), "%")


if __name__ == "__main__":
    raise SystemExit(run("Preparing the next step during this one, two cores of this machine", measure))
