"""How true predictions are: plans on hosts with rate-limited links, predicted first, then run.

    python -m benchmarks.accuracy [--new] [--quick] [--only SETTING] [--again] [--json]

A setting (:mod:`benchmarks.accuracy.cases`) is a network on two or four hosts, network namespaces with links of
200 Mbit, 1 or 4 Gbit in each direction, each host a virtual device of some speed: what a rank computes is held until a
device of that speed would be done (:mod:`benchmarks.devices.virtual_device`), most of them of a speed that does not
change with what the others do (``SteadyDevice`` there).  All networks are profiled, again and again by
turns; links are measured between the hosts of each setting; all plans are made and predicted, and what is predicted is
written to ``results/accuracy/predictions.json``, and its SHA-256 noted.  Only then are the hosts built again and the
plans run, all of them, and then once more: what the machine does changes within minutes.  The median of a plan's steps
counts.

``--new`` measures as a user does: networks that the model was never held against, profiled with all effort, plans run
by ``halopipe run``'s own function on two whole cores of this host through shared memory, three times over.

One device has its turn before and after that of every other plan.  What a plan is worth is its speed-up over these two
turns, which the machine's slower and faster minutes leave alone, beside the seconds themselves.

Nothing is fitted to these runs.  Every error is predicted / measured - 1; what a plan's own rounds differ by is shown
beside it, and goals are held against what is beyond that.  Ranks run at the highest priority where that is allowed
(root), and the cores are kept awake (:mod:`benchmarks.devices.ranks`), in profiles and runs alike; ``--new`` leaves
both as they are.

After every turn the state is kept in a file ``.unfinished...`` beside the results: the same command goes on from there;
``--again`` starts anew.  With ``--only`` the results of other settings stay as they were.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import hashlib
import json
import pickle
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.accuracy.cases import (
    CORE,
    HOST,
    NETWORKS,
    NEW,
    ONE,
    QUICK,
    QUICK_NEW,
    SETTINGS,
    STEADY,
    Case,
    Setting,
    case,
    named,
    network_of,
)
from benchmarks.accuracy.profiles import (
    cluster_profile,
    first_in_line,
    measured_alone,
    measured_beside,
    measured_here,
    on_hosts,
    testbed_of,
)
from benchmarks.accuracy.report import outcomes_of, rows
from benchmarks.accuracy.runs import Ran, Rehearsed, Runner, run_here
from benchmarks.devices.ranks import Step, awake, by_action, hide_gpus
from benchmarks.devices.testbed import unavailable
from benchmarks.report import Row, run
from benchmarks.runs import RUN_WARM_UP
from planner.ir.codec import dumps, fingerprint
from planner.ir.problem import Problem
from planner.ir.profile import Profile

RESULTS = Path(__file__).parents[1] / "results" / "accuracy"
STEPS = 3
HOST_STEPS = 10
PROCESSES = 4
"""That profile a network."""
ROUNDS = 2
HOST_ROUNDS = 3
"""In which every plan is rehearsed or run."""
_STARTING_S = 10.0
"""About what a run takes besides its steps."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line says.

    Attributes:
        only: names of settings; empty: all.
    """

    new: bool = False
    quick: bool = False
    only: tuple[str, ...] = ()

    @property
    def settings(self) -> tuple[Setting, ...]:
        """Those to look at."""
        quick = QUICK_NEW if self.new else QUICK
        return tuple(named(self.only or (quick if self.quick else ()), NEW if self.new else SETTINGS))

    @property
    def folder(self) -> Path:
        """For results."""
        return RESULTS / "new" if self.new else RESULTS

    @property
    def rounds(self) -> int:
        """Of all plans."""
        return 1 if self.quick else HOST_ROUNDS if self.new else ROUNDS


@dataclass(slots=True)
class State:
    """What is kept after every turn.

    Attributes:
        planned: by setting; what is predicted of it is frozen.
        seen: by setting and plan; plans of the same decision share what was seen.
        turns: by setting: (round, plan, seconds of a step), in order, of runs that were timed.
        done: turns that are over, those that only rehearse among them.
    """

    asked: Asked
    planned: dict[str, list[Case]]
    frozen: dict[str, Any]
    seen: dict[str, dict[str, Seen]] = field(default_factory=dict)
    turns: dict[str, list[tuple[int, str, float]]] = field(default_factory=dict)
    done: int = 0

    def keep(self) -> None:
        """Replaces what was kept, in one move."""
        path = unfinished(self.asked)
        path.parent.mkdir(parents=True, exist_ok=True)
        (half := path.with_suffix(".half")).write_bytes(pickle.dumps(self))
        half.replace(path)

    @property
    def raw(self) -> dict[str, Any]:
        """What was measured, for the file."""
        return {
            name: {plan: each.written() for plan, each in plans.items() if each.steps}
            for name, plans in self.seen.items()
        }


def unfinished(asked: Asked) -> Path:
    """Where the state is kept: every question has its own."""
    return asked.folder / "-".join([".unfinished", *(["quick"] if asked.quick else []), *asked.only, "state.pickle"])


def measure(asked: Asked) -> list[Row]:
    """Predict all, then run all; or go on where the same question was left."""
    why = "" if asked.new else unavailable()
    if why:
        return [Row(f"no testbed: {why}", 0.0, "")]
    settings = asked.settings
    with contextlib.ExitStack() as stack:
        if not asked.new:
            first_in_line()
            if not stack.enter_context(awake()):
                _say("the cores cannot be kept awake here: layers may take longer in runs than in profiles")
        state = _resumed(asked) or _begun(asked, settings)
        digest = digest_of(state.frozen)
        _say(f"sha256 of the predictions: {digest}")
        turns = [turn for number in range(1, asked.rounds + 1) for turn in _turns(state.planned, number)]
        _take_turns(state, {setting.name: setting for setting in settings}, turns)
    if not asked.quick:
        _publish(state)
    unfinished(asked).unlink(missing_ok=True)
    return list(rows(outcomes_of(state.frozen, state.raw, state.turns)))


def _resumed(asked: Asked) -> State | None:
    try:
        found = pickle.loads(unfinished(asked).read_bytes())
    except (OSError, pickle.UnpicklingError, AttributeError, ImportError, EOFError):  # none, or an older benchmark's
        return None
    if not isinstance(found, State) or found.asked != asked:
        return None
    _say(f"going on after turn {found.done} of an earlier run (--again starts anew)")
    return found


def _begun(asked: Asked, settings: Sequence[Setting]) -> State:
    planned = predict(asked, settings)
    state = State(asked, planned, {name: [_said(each) for each in found] for name, found in planned.items()})
    for name, found in planned.items():
        shared = {fingerprint(each.decision): Seen() for each in found}
        state.seen[name] = {each.name: shared[fingerprint(each.decision)] for each in found}
        state.turns[name] = []
    state.keep()
    return state


@dataclass(frozen=True, slots=True)
class Turn:
    """A run of a plan to come."""

    number: int
    setting: str
    case: Case


def _turns(planned: Mapping[str, Sequence[Case]], number: int) -> Iterator[Turn]:
    """A round: one device before, between and after the other plans; plans of the same decision once."""
    for setting, cases in planned.items():
        different = list({fingerprint(each.decision): each for each in reversed(cases)}.values())[::-1]
        alone = next((each for each in cases if each.name == ONE), None)
        others = [each for each in different if alone is None or each.decision != alone.decision]
        if alone is None:
            yield from (Turn(number, setting, each) for each in others)
            continue
        yield Turn(number, setting, alone)
        for each in others:
            yield Turn(number, setting, each)
            yield Turn(number, setting, alone)


def _take_turns(state: State, settings: Mapping[str, Setting], turns: Sequence[Turn]) -> None:
    weights = [_STARTING_S + 5 * turn.case.forecast.prediction.step_s for turn in turns]
    began_s = time.monotonic()
    began = state.done
    left = groupby(list(enumerate(turns))[state.done :], lambda each: (each[1].number, each[1].setting))
    for (number, name), group in left:
        with _runner(settings[name]) as run_case:
            for place, turn in group:
                each = turn.case
                seen = state.seen[name][turn.case.name]
                ran = run_case(each, seen, number == state.asked.rounds)
                seen.add(ran)
                told = "rehearsed"
                if ran.steps:
                    step_s = statistics.median(step.seconds for step in ran.steps)
                    state.turns[name].append((number, each.name, round(step_s, 6)))
                    told = f"{1e3 * step_s:.0f} ms, predicted {1e3 * each.forecast.prediction.step_s:.0f}"
                state.done = place + 1
                state.keep()
                spent_s = time.monotonic() - began_s
                left_s = spent_s / sum(weights[began : state.done]) * sum(weights[state.done :])
                _say(f"{state.done}/{len(turns)} {name} {each.name}: {told}; about {left_s / 60:.0f} min left")


@contextlib.contextmanager
def _runner(setting: Setting) -> Iterator[Callable[[Case, Seen, bool], Ran]]:
    """What runs plans of a setting: on a testbed, or as a user would."""
    if setting.device == HOST:
        yield lambda each, _seen, _is_last: run_here(each.plan, HOST_STEPS, RUN_WARM_UP)
        return
    runner = Runner(network_of(setting).source)
    with testbed_of(setting) as testbed:

        def run_case(each: Case, seen: Seen, is_last: bool) -> Ran:
            count = STEPS if is_last or setting.device != STEADY else 0
            where = testbed, setting.host_of, setting.factors
            return runner.run(each.decision, *where, count, setting.device, each.forecast.timeline.spans, seen.before)

        yield run_case


def predict(asked: Asked, settings: Sequence[Setting]) -> dict[str, list[Case]]:
    """The plans of every setting with what is predicted of them; the profiles are kept."""
    names = list(dict.fromkeys(setting.network for setting in settings if setting.device != HOST))
    if names:
        _say(f"profiling {', '.join(names)}")
    measured = measured_alone([NETWORKS[name] for name in names], 1 if asked.quick else PROCESSES)
    alone = dict(zip(names, measured, strict=True))
    found: dict[str, list[Case]] = {}
    for number, setting in enumerate(settings, 1):
        network = network_of(setting)
        plans = setting.plans
        if setting.device == HOST:
            _say(f"profiling {setting.network}, {number} of {len(settings)}")
            of_one = of_several = measured_here(network, quick=asked.quick)
        else:
            with testbed_of(setting) as testbed:
                links = on_hosts(setting, testbed, asked.quick, alone[setting.network].graph)
            of_one = of_several = cluster_profile(setting, alone[setting.network], links)
        if setting.device == CORE:
            of_several = cluster_profile(setting, measured_beside(network), links)
        if not asked.quick:
            _keep(of_one, asked.folder / f"{setting.name}.profile.json.gz")
            if setting.device == CORE:
                _keep(of_several, asked.folder / f"{setting.name}.beside.profile.json.gz")
        problems = [Problem(of_one if n == ONE else of_several, network.samples, allow=network.allow) for n in plans]
        pads = setting.device != HOST
        found[setting.name] = [case(each, name, pads=pads) for each, name in zip(problems, plans, strict=True)]
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


def _publish(state: State) -> None:
    """Writes predictions and measurements; settings that were not asked for stay as they were."""
    folder = state.asked.folder
    names = [setting.name for setting in replace(state.asked, only=()).settings]

    def merged(name: str, part: str, new: Mapping[str, Any]) -> dict[str, Any]:
        path = folder / name
        known = json.loads(path.read_text("utf-8")) if state.asked.only and path.exists() else {}
        before = known.get(part, {}) if part else known
        return {each: new.get(each, before.get(each)) for each in names if each in new or each in before}

    predictions = merged("predictions.json", "", state.frozen)
    measured = {
        "predictions_sha256": digest_of(predictions),
        "settings": merged("measured.json", "settings", state.raw),
        "turns": merged("measured.json", "turns", state.turns),
    }
    for name, content in (("predictions.json", predictions), ("measured.json", measured)):
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _keep(profile: Profile, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(dumps(profile).encode(), mtime=0))


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


OWN: Mapping[str, Mapping[str, Any]] = {
    "--new": {"action": "store_true", "help": "as a user does, on new networks"},
    "--only": {"action": "append", "default": [], "metavar": "SETTING", "help": "settings of these names; repeatable"},
    "--again": {"action": "store_true", "help": "from the start, not from where a run was broken off"},
}


def measured(quick: bool, new: bool, only: Sequence[str], again: bool) -> list[Row]:
    """As the command line asks."""
    asked = Asked(new, quick, tuple(only))
    if again:
        unfinished(asked).unlink(missing_ok=True)
    return measure(asked)


if __name__ == "__main__":
    hide_gpus()
    raise SystemExit(run(str(__doc__).splitlines()[0], measured, own=OWN))
