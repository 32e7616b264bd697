"""Measures what ``04_schedules.ipynb`` reads: a profile, and every synchronous schedule's plan with a measured step.

    rm -r notebooks/data/schedules; python notebooks/collect_schedules.py [SCHEDULE ...]

A profile that is there is kept and its plans are run again.  A run whose steps differ much from one another (something
else used the machine) is repeated a few times, and the calmest is kept, whatever it says of the prediction.  A few
minutes on two cores that do nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from collected import stamp

import halopipe as hp
from halopipe.launch.run import run_plan
from halopipe.run_spec.options import RunOptions
from halopipe.run_spec.result import RunResult
from planner import predict
from planner.costs.candidate import Candidate
from planner.ir.codec import dump, load
from planner.ir.plan import Plan, Search
from planner.ir.problem import Problem
from planner.ir.profile import Profile
from planner.schedules import names, positions, traits
from planner.solvers.candidates.candidate import decision_of, plan_of, split_batch

DATA = Path(__file__).resolve().parent / "data" / "schedules"
OPTIONS = RunOptions(steps=14, warmup=4)
MOST_RUNS = 4
CALM = 0.04
GLOBAL_BATCH = 16
MICRO_BATCH = 2
NUM_RANKS = 2
ARGUMENTS = {"vocabulary": 256, "width": 256, "layers": 8, "heads": 4, "context": 64}
SHOWN = tuple(name for name in names() if traits(name).synchronous and traits(name).trains)


def main(wanted: Sequence[str]) -> int:
    """Fills ``notebooks/data/schedules``."""
    DATA.mkdir(parents=True, exist_ok=True)
    profile = _profile()
    for name in wanted or SHOWN:
        sys.stderr.write(f"running {name}\n")
        plan = _plan(profile, name)
        result = _calmest(plan)
        dump(replace(plan, measured=result.measured(plan.prediction)), DATA / f"{name}.plan.json")
        predicted = predict(profile, plan.decision)[1]
        dump(result.timeline_file(plan, replace(predicted, memory=())), DATA / f"{name}.timeline.json")
    stamp("schedules")
    return 0


def _calmest(plan: Plan) -> RunResult:
    """The first run whose steps are alike, else the one whose steps are most so."""
    found: list[tuple[float, RunResult]] = []
    while len(found) < MOST_RUNS and min((spread for spread, _ in found), default=1.0) > CALM:
        result = run_plan(plan, OPTIONS)
        if result is None:
            raise RuntimeError("run this outside torchrun")
        found.append((result.measured(plan.prediction).spread, result))
    return min(found, key=lambda each: each[0])[1]


def _profile() -> Profile:
    path = DATA / "profile.json"
    if not path.exists():
        sys.stderr.write("profiling\n")
        dump(hp.profile("profiler.models.gpt:gpt", input_shape=(GLOBAL_BATCH, 64), arguments=ARGUMENTS), path)
    return load(path, Profile)


def _plan(profile: Profile, name: str) -> Plan:
    """Equal numbers of transformer blocks in every stage; two stages a rank where the schedule wants several."""
    per_rank = 1 if traits(name).stages_per_position == 1 else 2
    ranks = positions(name, NUM_RANKS, per_rank)
    layers = [layer.name for layer in profile.graph.layers]
    blocks = ARGUMENTS["layers"] // len(ranks)
    cuts = [layers.index(f"blocks.{blocks * stage}.norm1") for stage in range(1, len(ranks))]
    candidate = Candidate.chain(
        (0, *cuts, len(layers)),
        tuple((rank,) for rank in ranks),
        ((MICRO_BATCH,),) * len(ranks),
        split_batch(GLOBAL_BATCH, MICRO_BATCH),
        name,
    )
    problem = Problem(profile, GLOBAL_BATCH, confidence=0.0)
    decision = decision_of(problem, candidate)
    prediction = predict(profile, decision)[0]
    return plan_of(problem, decision, prediction, Search("by hand", "notebook", "heuristic", 0.0, 0.0, 1, 1))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
