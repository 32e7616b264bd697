"""What devices of a host take from one another: slow-downs of layers, and steps predicted without them and with them.

    python -m benchmarks.accuracy.together [--only NETWORK] [--quick] [--json]

Each network is profiled as ``halopipe profile --quick`` does it, on two whole cores of this host.  Three plans are
predicted from the profile, and from the same profile without its slow-downs; then they are run, by turns in rounds, of
which the quietest counts.  The error of a plan is predicted / measured - 1; the last rows are means over the plans of
two ranks.  What the machine does from hour to hour is in both errors: speed-ups over one device leave it out.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from benchmarks.accuracy.cases import DATA_PARALLEL, NEW_NETWORKS, ONE, Case, Network, case
from benchmarks.accuracy.profiles import measured_here
from benchmarks.report import Row, error_within, run
from benchmarks.runs import RUN_WARM_UP, step_s
from benchmarks.turns import by_turns
from planner.costs.predict import predict
from planner.ir.problem import Problem
from planner.ir.profile import ModelSource, Profile

NETWORKS: Mapping[str, Network] = {
    **{name: NEW_NETWORKS[name] for name in ("2-D U-Net", "SE-ResNet", "GPT-2", "BERT", "ViT")},
    "ResNet-50": Network(ModelSource("profiler.models.resnet:resnet50", {"num_classes": "10"}, (8, 3, 64, 64)), 8, ()),
}
PLANS = (ONE, DATA_PARALLEL, "1f1b/2")
STEPS = 20
ROUNDS = 3
GOAL_PERCENT = 2.0
_KINDS = 3


@dataclass(frozen=True, slots=True)
class Compared:
    """A plan of a network.

    Attributes:
        alone_s, together_s: the step as predicted without slow-downs and with them.
        rounds_s: measured.
    """

    network: str
    plan: str
    alone_s: float
    together_s: float
    rounds_s: tuple[float, ...]

    @property
    def measured_s(self) -> float:
        """Of the quietest round: what other programs take of the cores is no neighbour's doing."""
        return min(self.rounds_s)


def measure(quick: bool, only: Sequence[str]) -> list[Row]:
    """Profile, predict, run; ``--quick`` takes one network and one round."""
    names = only or list(NETWORKS)[: 1 if quick else None]
    rows = list[Row]()
    compared = list[Compared]()
    for name in names:
        sys.stderr.write(f"{name}\n")
        profile = measured_here(NETWORKS[name], quick=True)
        rows += slowdown_rows(name, profile)
        problem = Problem(profile, NETWORKS[name].samples)
        compared += _compared(
            name, [case(problem, plan, pads=False) for plan in PLANS], profile, 1 if quick else ROUNDS
        )
    return [*rows, *step_rows(compared), *mean_rows(compared)]


def _compared(name: str, cases: Sequence[Case], profile: Profile, rounds: int) -> Iterator[Compared]:
    without = replace(profile, slowdowns={})
    alone_s = {each.name: predict(without, each.decision)[0].step_s for each in cases}
    measured = by_turns(rounds, {each.name: partial(step_s, each.plan, STEPS, RUN_WARM_UP) for each in cases})
    for each in cases:
        steps = tuple(measured[each.name])
        yield Compared(name, each.name, alone_s[each.name], each.forecast.prediction.step_s, steps)


def slowdown_rows(name: str, profile: Profile) -> Iterator[Row]:
    """By how much passes over a network, and over its layers of the longest kinds, are longer together."""
    (device, slowdowns), *_ = [*profile.slowdowns.items(), (profile.cluster.devices[0].kind, ())]
    factors = {one.layer: one for one in slowdowns}
    samples = slowdowns[0].samples if slowdowns else max(one.samples for one in profile.measurements[device])
    kinds = {layer.name: layer.kind for layer in profile.graph.layers}
    alone_s = dict[str, float]()
    more_s = dict[str, float]()
    for one in profile.measurements[device]:
        if one.samples == samples:
            factor = factors.get(one.layer)
            more = one.forward_s * (factor.forward - 1) + one.backward_s * (factor.backward - 1) if factor else 0.0
            for group in ("all layers", kinds[one.layer]):
                alone_s[group] = alone_s.get(group, 0.0) + one.passes_s
                more_s[group] = more_s.get(group, 0.0) + more
    for group in sorted(alone_s, key=alone_s.__getitem__, reverse=True)[: 1 + _KINDS]:
        yield Row(f"{name}, {group}: together / alone", 1 + more_s[group] / alone_s[group], "times")


def step_rows(compared: Sequence[Compared]) -> Iterator[Row]:
    """Of each plan."""
    for each in compared:
        name = f"{each.network}, {each.plan}"
        yield Row(f"{name}: predicted alone", 1e3 * each.alone_s, "ms")
        yield Row(f"{name}: predicted together", 1e3 * each.together_s, "ms")
        yield Row(f"{name}: measured", 1e3 * each.measured_s, "ms")
        yield Row(f"{name}: error alone", 100 * (each.alone_s / each.measured_s - 1), "%")
        yield Row(f"{name}: error together", 100 * (each.together_s / each.measured_s - 1), "%")
        yield Row(f"{name}: own rounds apart", 100 * (max(each.rounds_s) / min(each.rounds_s) - 1), "%")


def mean_rows(compared: Sequence[Compared]) -> Iterator[Row]:
    """Over the plans of two ranks."""
    ones = {each.network: each for each in compared if each.plan == ONE}
    shared = [each for each in compared if each.plan != ONE]
    for what in ("alone_s", "together_s"):
        word = what.removesuffix("_s")
        errors = [getattr(each, what) / each.measured_s for each in shared]
        ups = [
            (ones[each.network].alone_s / getattr(each, what)) / (ones[each.network].measured_s / each.measured_s)
            for each in shared
        ]
        yield error_within(f"mean signed error of steps of two ranks, {word}", statistics.fmean(errors), GOAL_PERCENT)
        yield error_within(f"mean signed error of speed-ups, {word}", statistics.fmean(ups), GOAL_PERCENT)
        yield Row(f"mean absolute error of speed-ups, {word}", 100 * statistics.fmean(abs(up - 1) for up in ups), "%")


OWN = {"--only": {"action": "append", "default": [], "metavar": "NETWORK", "help": "repeatable"}}

if __name__ == "__main__":
    raise SystemExit(run(str(__doc__).splitlines()[0], measure, own=OWN))
