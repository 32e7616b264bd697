"""How true predictions are: plans on hosts with rate-limited links, predicted first, then run.

    python -m benchmarks.accuracy [--quick] [--json]

A setting (:mod:`benchmarks.accuracy.cases`) is a network on two or four hosts, network namespaces with links of
200 Mbit, 1 or 4 Gbit in each direction, each host a virtual device of some speed: what a rank computes is held until a
device of that speed would be done (:mod:`benchmarks.devices.virtual_device`), most of them of a speed that does not
change with what the others do (:mod:`benchmarks.devices.steady_device`).  All networks are profiled, again and again by
turns; links are measured between the hosts of each setting; all plans are made and predicted, and what is predicted is
written to ``results/accuracy/predictions.json``, and its SHA-256 noted.  Only then are the hosts built again and the
plans run, all of them, and then once more: what the machine does changes within minutes.  The median of a plan's steps
counts.

Nothing is fitted to these runs.  Every error is predicted / measured - 1.  Ranks run at the highest priority where that
is allowed (root), and the cores are kept awake (:mod:`benchmarks.devices.ranks`), in profiles and runs alike.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.accuracy.cases import CORE, NETWORKS, ONE, QUICK, STEADY, Setting, named
from benchmarks.accuracy.plans import Case, case
from benchmarks.accuracy.profiles import (
    cluster_profile,
    first_in_line,
    measured_alone,
    measured_beside,
    on_hosts,
    testbed_of,
)
from benchmarks.accuracy.report import outcomes_of, rows
from benchmarks.accuracy.runs import Ran, Rehearsed, Runner
from benchmarks.devices.ranks import Step, awake, by_action
from benchmarks.devices.testbed import unavailable
from benchmarks.report import Row, run
from planner.ir.codec import dumps
from planner.ir.fingerprint import fingerprint
from planner.ir.problem import Problem
from planner.ir.profile import Profile

RESULTS = Path(__file__).parents[1] / "results" / "accuracy"
STEPS = 3
PROCESSES = 4
"""That profile a network."""
ROUNDS = 2
"""In which every plan is rehearsed or run."""


def measure(quick: bool) -> list[Row]:
    """Predict all, then run all."""
    why = unavailable()
    if why:
        return [Row(f"no testbed: {why}", 0.0, "")]
    first_in_line()
    settings = list(named(QUICK if quick else ()))
    with awake() as are_awake:
        if not are_awake:
            sys.stderr.write("the cores cannot be kept awake here: layers may take longer in runs than in profiles\n")
        planned = predict(settings, quick)
        frozen = {name: [_said(each) for each in found] for name, found in planned.items()}
        digest = digest_of(frozen)
        _write("predictions.json", frozen, quick)
        sys.stderr.write(f"sha256 of the predictions: {digest}\n")
        seen = {setting.name: {name: Seen() for name in setting.plans} for setting in settings}
        raw: dict[str, Any] = {}
        rounds = 1 if quick else ROUNDS
        for number in range(1, rounds + 1):
            for setting in settings:
                execute(setting, planned[setting.name], seen[setting.name], is_last=number == rounds)
                raw[setting.name] = {name: each.written() for name, each in seen[setting.name].items()}
                _write("measured.json", {"predictions_sha256": digest, "settings": raw}, quick)
    return list(rows(outcomes_of(frozen, raw)))


def predict(settings: Sequence[Setting], quick: bool) -> dict[str, list[Case]]:
    """The plans of every setting with what is predicted of them; the profiles are kept."""
    names = list(dict.fromkeys(setting.network for setting in settings))
    sys.stderr.write(f"profiling {', '.join(names)}\n")
    measured = measured_alone([NETWORKS[name] for name in names], 1 if quick else PROCESSES)
    alone = dict(zip(names, measured, strict=True))
    found: dict[str, list[Case]] = {}
    for setting in settings:
        network = NETWORKS[setting.network]
        with testbed_of(setting) as testbed:
            links = on_hosts(setting, testbed, quick)
        of_one = of_several = cluster_profile(setting, alone[setting.network], links)
        if setting.device == CORE:
            of_several = cluster_profile(setting, measured_beside(network), links)
        if not quick:
            _keep(of_one, RESULTS / f"{setting.name}.profile.json.gz")
            if setting.device == CORE:
                _keep(of_several, RESULTS / f"{setting.name}.beside.profile.json.gz")
        found[setting.name] = [
            case(Problem(of_one if name == ONE else of_several, network.samples, allow=network.allow), name)
            for name in setting.plans
        ]
    return found


def digest_of(said: Mapping[str, Any]) -> str:
    """SHA-256 of what is predicted of some settings, as JSON of the fewest characters."""
    return hashlib.sha256(json.dumps(said, separators=(",", ":"), sort_keys=True).encode()).hexdigest()


@dataclass(slots=True)
class Seen:
    """What was measured of a plan.

    Attributes:
        rounds_s: by round what a step took: its median, or all that steady devices rehearsed in it, on average.
        before: what steady devices rehearsed, by rank.
    """

    steps: list[Step] = field(default_factory=list)
    rounds_s: list[float] = field(default_factory=list)
    before: list[Rehearsed] = field(default_factory=list)

    def add(self, ran: Ran) -> None:
        """One more round."""
        self.steps += ran.steps
        rehearsals = [sum(map(sum, pieces)) for pieces in zip(*ran.rehearsed, strict=True)]
        self.rounds_s.append(statistics.median(rehearsals or [step.seconds for step in ran.steps]))
        self.before = [[*a, *b] for a, b in zip(self.before or [[]] * len(ran.rehearsed), ran.rehearsed, strict=True)]

    def written(self) -> dict[str, Any]:
        """For the file."""
        return {
            "rounds_s": [round(each, 6) for each in self.rounds_s],
            "steps": [_written(step) for step in self.steps],
        }


def execute(setting: Setting, cases: Sequence[Case], seen: Mapping[str, Seen], *, is_last: bool) -> None:
    """One more round of the plans of ``setting``; on steady devices a rehearsal, unless it is the last."""
    runner = Runner(NETWORKS[setting.network].source)
    count = STEPS if is_last or setting.device != STEADY else 0
    with testbed_of(setting) as testbed:
        for each in cases:
            known, where = seen[each.name], (testbed, setting.host_of, setting.factors)
            ran = runner.run(each.decision, *where, count, setting.device, each.forecast.timeline.spans, known.before)
            known.add(ran)
            if ran.steps:
                step_s = statistics.median(step.seconds for step in ran.steps)
                told = f"{1e3 * step_s:.0f} ms, predicted {1e3 * each.forecast.prediction.step_s:.0f}"
                sys.stderr.write(f"{setting.name} {each.name}: {told}\n")


def _said(each: Case) -> dict[str, Any]:
    return {
        "plan": each.name,
        "decision": fingerprint(each.decision),
        "schedule": each.decision.schedule,
        "micro_batches": list(each.decision.micro_batches),
        "stages": [list(stage.ranks) for stage in each.decision.stages],
        "prediction": dataclasses.asdict(each.forecast.prediction),
        "by_action_s": [
            by_action(span for span in each.forecast.timeline.spans if span.rank == rank)
            for rank in range(each.decision.num_ranks)
        ],
    }


def _written(step: Step) -> dict[str, Any]:
    return {
        "seconds": round(step.seconds, 6),
        "loss": step.loss,
        "ranks": [
            {
                "busy_s": round(rank.busy_s, 6),
                "late_s": round(rank.late_s, 6),
                "waited_for_core": round(rank.delay, 4),
                "peak_bytes": rank.peak_bytes,
                "by_action_s": {what: round(seconds, 6) for what, seconds in rank.by_action_s.items()},
            }
            for rank in step.ranks
        ],
    }


def _write(name: str, content: Mapping[str, Any], quick: bool) -> None:
    if not quick:
        (RESULTS / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _keep(profile: Profile, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(dumps(profile).encode(), mtime=0))


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code."""
    return run(str(__doc__).splitlines()[0], measure, arguments)


if __name__ == "__main__":
    sys.exit(main())
