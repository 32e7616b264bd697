"""What runs teach: errors of held-back plans before and after calibration, and of a job run after run, on two workers.

A small network is profiled afresh.  Some plans are run and teach the profile, as ``halopipe run --update`` does; then
others, with other cuts, micro-batches and schedules, are predicted under the profile with and without what it has
learnt, and run.  The named peer is the prediction without calibration.  Nothing of the held-back plans' own runs
reaches the profile.  Factors and the error that is left of the plans run, each predicted from the others, are beside
them.

A job is one plan that is run five times, each run predicted from a profile that has learnt from those before; the
machine's part of each error is told apart.  Of all these runs it is counted how many steps lie in their predicted
range: of the profile's own scatter alone, with what is assumed of the model, and as the profile had learnt by then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import nn

from benchmarks.report import Row, at_most, run
from benchmarks.runs import by_hand, ran
from halopipe.planning.calibration import calibrated, drift
from halopipe.run_spec.options import RunOptions
from halopipe.run_spec.result import RunResult
from planner import predict
from planner.costs.calibration.fit import errors_left, in_force
from planner.costs.candidate import Candidate
from planner.costs.uncertainty import MODEL
from planner.ir.plan import Plan
from planner.ir.problem import Problem
from planner.ir.profile import STEP_RANGE, Correction, CostClass, ModelSource, Profile
from planner.solvers.candidates.candidate import split_batch
from profiler import profile

GLOBAL_BATCH = 16
SOURCE = ModelSource("benchmarks.calibration:network", {}, ())
WARMUP = 3


Example = tuple[torch.Tensor, torch.Tensor]


def network(width: int = 32, depth: int = 6, side: int = 32) -> tuple[nn.Module, Example, Callable[..., torch.Tensor]]:
    """Convolutions and a classifier."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1), nn.ReLU()]
    for _ in range(depth - 1):
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.ReLU()]
    module = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))
    example = torch.randn(GLOBAL_BATCH, 3, side, side), torch.randint(0, 10, (GLOBAL_BATCH,))
    return module, example, nn.functional.cross_entropy


@dataclass(frozen=True, slots=True)
class Shape:
    """A plan: one device, both as replicas, or two stages.

    Attributes:
        cut: share of the layers in the first stage; 0: no stages.
        size: samples of a micro-batch.
    """

    schedule: str
    size: int
    cut: float = 0.0
    replicas: int = 1

    def __str__(self) -> str:
        what = f"cut at {self.cut:g}" if self.cut else "data parallel" if self.replicas > 1 else "one device"
        return f"{what}, {self.schedule}, {GLOBAL_BATCH // self.size} x {self.size}"

    def plan(self, found: Profile) -> Plan:
        """Under the corrections that the profile has."""
        layers = len(found.graph.layers)
        batches = split_batch(GLOBAL_BATCH, self.size)
        if self.cut:
            cuts: tuple[int, ...] = (0, max(1, round(self.cut * layers)), layers)
            groups: tuple[tuple[int, ...], ...] = ((0,), (1,))
            shares: tuple[tuple[int, ...], ...] = ((self.size,), (self.size,))
        else:
            cuts = (0, layers)
            groups = (tuple(range(self.replicas)),)
            shares = ((self.size // self.replicas,) * self.replicas,)
        candidate = Candidate.chain(cuts, groups, shares, batches, self.schedule)
        return by_hand(Problem(found, GLOBAL_BATCH, confidence=0.0), candidate)


TAUGHT = (
    Shape("1f1b", 4, cut=0.5),
    Shape("1f1b", 8, replicas=2),
    Shape("gpipe", 8, cut=0.3),
    Shape("1f1b", 8),
    Shape("1f1b", 16, replicas=2),
    Shape("1f1b", 2, cut=0.7),
)
HELD_BACK = (
    Shape("gpipe", 4, cut=0.4),
    Shape("1f1b", 4, replicas=2),
    Shape("1f1b", 8, cut=0.6),
    Shape("1f1b", 4),
    Shape("gpipe", 2, cut=0.5),
)


JOB = Shape("gpipe", 2, cut=0.4)
NUM_RUNS = 5
RANGES = "of the profile's scatter", "with what is assumed of the model", "as learnt"


def measure(quick: bool) -> list[Row]:
    """Profile, run and learn, predict, run; ``--quick`` takes the first plans and fewer steps."""
    found = profile(SOURCE, num_workers=2, quick=quick, sizes=(1, 2, 4, 8, 16))
    steps = WARMUP + (8 if quick else 20)
    taught, held_back = (TAUGHT[:2], HELD_BACK[:2]) if quick else (TAUGHT, HELD_BACK)
    learnt = found
    within = list[tuple[float, ...]]()
    for shape in taught:
        plan = shape.plan(found)
        result = _result(plan, steps)
        within.append(_within(plan, result, learnt))
        learnt = calibrated(learnt, plan, result)
    pairs = [(shape, shape.plan(found), shape.plan(learnt)) for shape in held_back]  # all said before any is run
    rows = [
        Row(f"factor: {_name(one.of.what, one.of.shared)}", one.factor, "x") for one in learnt.calibration.corrections
    ]
    results = [_result(plan, steps) for _, plan, _ in pairs]
    within += [_within(plan, result, learnt) for (_, plan, _), result in zip(pairs, results, strict=True)]
    step_s = [result.measured(plan.prediction).step_s for (_, plan, _), result in zip(pairs, results, strict=True)]
    rows += list(_errors(pairs, step_s))
    rows += list(_job(found, steps, within))
    for name, shares in zip(RANGES, zip(*within, strict=True), strict=True):
        rows.append(Row(f"steps in their range: {name}", 100 * fmean(shares), "%"))
    left = errors_left(learnt.calibration.observations)
    rows.append(Row("plans run: mean error", 100 * fmean(before for before, _ in left), "%"))
    rows.append(Row("plans run: mean error, each from the others", 100 * fmean(after for _, after in left), "%"))
    return rows


def _job(found: Profile, steps: int, within: list[tuple[float, ...]]) -> Iterator[Row]:
    """Errors of one plan, run after run."""
    learnt = found
    errors = []
    of_model = []
    for number in range(NUM_RUNS):
        plan = JOB.plan(learnt)
        result = _result(plan, steps)
        split = drift(learnt, plan, RunOptions(), result)
        if split is None:
            raise RuntimeError(f"no stage was run alone: {result.why_not_isolated}")
        errors.append(abs(math.log((1 + split.machine) * (1 + split.model))))
        of_model.append(abs(math.log(1 + split.model)))
        within.append(_within(plan, result, learnt))
        yield Row(f"job, run {number + 1}: error", 100 * errors[-1], "%")
        yield Row(f"job, run {number + 1}: of the model", 100 * of_model[-1], "%")
        learnt = calibrated(learnt, plan, result)
    yield at_most("job: error of the last run", 100 * errors[-1], "%", 100 * errors[0] / 2)
    yield Row("job: mean error", 100 * fmean(errors), "%")
    yield Row("job: mean error of the model", 100 * fmean(of_model), "%")


def _within(plan: Plan, result: RunResult, learnt: Profile) -> tuple[float, ...]:
    """Shares of the run's steps in its range, as in ``RANGES``."""
    exact = tuple(Correction(CostClass(STEP_RANGE, kind), 1 + 1e-9, 1) for kind in MODEL)
    shares = []
    for priced in (learnt.corrected_by(exact), learnt.bare, in_force(learnt)):
        said = predict(priced, plan.decision)[0]
        shares.append(fmean(said.p10_s <= seconds <= said.p90_s for seconds in result.timed_seconds))
    return tuple(shares)


def _errors(pairs: Sequence[tuple[Shape, Plan, Plan]], measured_s: Sequence[float]) -> Iterator[Row]:
    errors = []
    for (shape, plain, corrected), seconds in zip(pairs, measured_s, strict=True):
        before, after = (abs(math.log(plan.prediction.step_s / seconds)) for plan in (plain, corrected))
        errors.append((before, after))
        yield Row(f"{shape}: measured step", 1e3 * seconds, "ms")
        yield Row(f"{shape}: error as profiled", 100 * before, "%")
        yield at_most(f"{shape}: error calibrated", 100 * after, "%", 100 * before + 1)
    before, after = (fmean(each) for each in zip(*errors, strict=True))
    yield Row("held back: mean error as profiled", 100 * before, "%")
    yield at_most("held back: mean error calibrated", 100 * after, "%", 100 * before)


def _result(plan: Plan, steps: int) -> RunResult:
    return ran(plan, RunOptions(steps=steps, warmup=WARMUP, check_first_step=False, lone_passes="on"))


def _name(what: str, shared: bool) -> str:
    return f"{what}, shared stages" if shared else what


if __name__ == "__main__":
    raise SystemExit(run("Errors of plans that were not run, before and after calibration by others", measure))
