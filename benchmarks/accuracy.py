"""How true predictions are: plans on hosts with rate-limited links, predicted first, then run.

    python -m benchmarks.accuracy [--quick] [--json]

A setting (:mod:`benchmarks.accuracy_cases`) is a network on two or four hosts, network namespaces with links of
200 Mbit, 1 or 4 Gbit in each direction, each host a virtual device of some speed: what a rank computes is held until a
device of that speed would be done (:mod:`benchmarks.virtual_device`), most of them of a speed that does not change with
what the others do (:mod:`benchmarks.steady_device`).  Network after network is profiled; links are measured between the
hosts of its settings; all plans of these are made and predicted, and what is predicted is written to
``results/accuracy/predictions.json``, and its SHA-256 noted.  Only then are the hosts built again and the plans of
these settings run; the median of all steps counts.

Nothing is fitted to these runs.  Every error is predicted / measured - 1.  Ranks run at the highest priority where that
is allowed (root), and the cores are kept awake (:mod:`benchmarks.awake`), in profiles and runs alike.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.accuracy_cases import CORE, NETWORKS, ONE, QUICK, STEADY, TIMED, Setting, named
from benchmarks.accuracy_plans import Case, case
from benchmarks.accuracy_profiles import (
    cluster_profile,
    first_in_line,
    measured_alone,
    measured_beside,
    on_hosts,
    testbed_of,
)
from benchmarks.accuracy_rows import rows
from benchmarks.accuracy_runs import Runner
from benchmarks.accuracy_stored import outcomes_of
from benchmarks.awake import awake
from benchmarks.report import Row, run
from benchmarks.steps import Step, by_action
from benchmarks.testbed import unavailable
from planner.ir.codec import dumps
from planner.ir.fingerprint import fingerprint
from planner.ir.problem import Problem
from planner.ir.profile import Profile

RESULTS = Path(__file__).parent / "results" / "accuracy"
STEPS = 4
ROUNDS = {CORE: 2, STEADY: 1, TIMED: 1}
"""How often the plans of a setting are run; what a core does changes from minute to minute."""


def measure(quick: bool) -> list[Row]:
    """Network after network: predict all, then run all."""
    why = unavailable()
    if why:
        return [Row(f"no testbed: {why}", 0.0, "")]
    first_in_line()
    settings = list(named(QUICK if quick else ()))
    frozen: dict[str, Any] = {}
    raw: dict[str, Any] = {}
    digests: dict[str, str] = {}
    with awake() as are_awake:
        if not are_awake:
            sys.stderr.write("the cores cannot be kept awake here: layers may take longer in runs than in profiles\n")
        for network in dict.fromkeys(setting.network for setting in settings):
            group = [setting for setting in settings if setting.network == network]
            planned = predict(group, quick)
            said = {name: [_said(each) for each in found] for name, found in planned.items()}
            digests[network] = digest_of(said)
            frozen |= said
            _write("predictions.json", frozen, quick)
            sys.stderr.write(f"{network}: sha256 of the predictions {digests[network]}\n")
            raw |= execute(group, planned, quick)
            _write("measured.json", {"predictions_sha256": digests, "settings": raw}, quick)
    factor_one = {setting.name: setting.factors[0] == 1.0 for setting in settings}
    return list(rows(outcomes_of(frozen, raw), factor_one))


def predict(settings: Sequence[Setting], quick: bool) -> dict[str, list[Case]]:
    """The plans of every setting of one network with what is predicted of them; the profiles are kept."""
    network = NETWORKS[settings[0].network]
    sys.stderr.write(f"profiling {settings[0].network}\n")
    alone = measured_alone(network, quick)
    beside = measured_beside(network) if any(setting.device == CORE for setting in settings) else alone
    found: dict[str, list[Case]] = {}
    for setting in settings:
        with testbed_of(setting) as testbed:
            links = on_hosts(setting, testbed, quick)
        of_one = of_several = cluster_profile(setting, alone, links)
        if setting.device == CORE:
            of_several = cluster_profile(setting, beside, links)
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


def execute(settings: Sequence[Setting], planned: dict[str, list[Case]], quick: bool) -> dict[str, Any]:
    """The steps of every plan, by setting."""
    raw: dict[str, Any] = {}
    for setting in settings:
        runner = Runner(NETWORKS[setting.network].source)
        seen: dict[str, list[Step]] = {each.name: [] for each in planned[setting.name]}
        with testbed_of(setting) as testbed:
            for _ in range(1 if quick else ROUNDS[setting.device]):
                for each in planned[setting.name]:
                    where = testbed, setting.host_of, setting.factors
                    spans = each.forecast.timeline.spans
                    seen[each.name] += runner.run(each.decision, *where, 3 if quick else STEPS, setting.device, spans)
        for each in planned[setting.name]:
            step_s = statistics.median(step.seconds for step in seen[each.name])
            predicted_s = each.forecast.prediction.step_s
            sys.stderr.write(f"{setting.name} {each.name}: {1e3 * step_s:.0f} ms, predicted {1e3 * predicted_s:.0f}\n")
        raw[setting.name] = {name: [_written(step) for step in found] for name, found in seen.items()}
    return raw


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
