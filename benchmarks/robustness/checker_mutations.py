"""Does the checker notice when a plan states something else?  Plans of many kinds, each changed in one place.

    found = caught_of(200)         # 200 mutations, the same every time; all there are without a number
    found.caught, found.tried, found.missed

A mutation changes one value of a valid plan file: a number by 1 % to 10 times, a word, an entry that is dropped,
doubled or exchanged.  Which fields are held to be noticed, with the profile and without, the checker's own table says
(``planner.check.coverage``): changes of fields that are checked ``wholly``.  Of those that are checked in part, changes
that break a promise are written out by hand (``_broken_promises``).

Not counted is what leaves an equally valid plan.  It is not the checker who says so: the file reads as the same plan;
two schedules order these stages alike; or the simulator predicts the same of the changed layers and stages.
"""

from __future__ import annotations

import functools
import json
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import planner
from planner import faults_of, predict, schedules
from planner.check.coverage import ROWS, WHOLLY
from planner.ir.codec import dumps, load, loads, plain
from planner.ir.errors import HalopipeError
from planner.ir.plan import Measured, Plan, RankMeasured
from planner.ir.problem import Problem, Rule
from planner.ir.profile import Correction, CostClass, Profile
from planner.ir.schedule import Pipeline, StageGraph
from planner.solvers import names

FILES = Path(__file__).parents[2] / "tests" / "data" / "checker"
Steps = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Mutation:
    """A plan file with one change.

    Attributes:
        case: name of the plan.
        path: of what was changed.
        what: the change, in words.
        text: the file.
        alone, against: whether it is to be noticed without and with the profile.
    """

    case: str
    path: str
    what: str
    text: str
    alone: bool
    against: bool

    def __str__(self) -> str:
        return f"{self.case}: {self.path}: {self.what}"


@dataclass(slots=True)
class Caught:
    """How many were noticed.

    Attributes:
        tried, caught: with the profile.
        tried_alone, caught_alone: of those that need none, without it.
        not_checked: of those tried, how many need the profile.
        equal: equally valid plans, not counted.
        missed: what was not noticed, in words.
        raised: exceptions that are none of ours.
    """

    tried: int = 0
    caught: int = 0
    tried_alone: int = 0
    caught_alone: int = 0
    not_checked: int = 0
    equal: int = 0
    missed: list[str] = field(default_factory=list)
    raised: list[str] = field(default_factory=list)


def caught_of(count: int | None = None, seed: int = 0) -> Caught:
    """What the checker notices of ``count`` mutations over all plans; of all there are, if None."""
    found = Caught()
    every = [mutation for name in CASES for mutation in mutations(name)]
    for mutation in every if count is None else _drawn(every, count, seed):
        _try(mutation, found)
    return found


def mutations(name: str) -> Iterator[Mutation]:
    """All mutations of one plan."""
    plan, _ = case(name)
    text = dumps(plan)
    document = json.loads(text)
    for steps, value in _leaves(document, ()):
        path = _row_of(steps)
        if path is None:
            continue
        row = ROWS[path]
        alone = row.alone == WHOLLY
        against = row.against == WHOLLY
        if not (alone or against):
            continue
        for what, changed in _changes(steps, value, document):
            yield Mutation(name, _spelt(steps), what, json.dumps(changed), alone, against)
    yield from _broken_promises(name, document)


@functools.cache
def case(name: str) -> tuple[Plan, Profile]:
    """A valid plan and its profile."""
    file, asked, change = CASES[name]
    profile = load(FILES / f"{file}.json", Profile)
    profile = profile.corrected_by(_CORRECTIONS) if name == "corrected" else profile
    method = str(asked.get("solver", "best-first"))
    plan = planner.plan(
        Problem(profile, **{"confidence": 0.0, **{key: value for key, value in asked.items() if key != "solver"}}),
        method,
    )
    return (change(plan) if change is not None else plan), profile


def _measured(plan: Plan) -> Plan:
    """The plan as a run leaves it behind."""
    count = plan.decision.num_ranks
    stages = len(plan.decision.stages)
    step_s = 1.25 * plan.prediction.step_s
    ranks = tuple(RankMeasured(rank, 0.5 * step_s, 0.1 * step_s, 0.3 * step_s, 0.1 * step_s) for rank in range(count))
    run = Measured(step_s, 0.01, 8, (1e-3,) * stages, (2e-3,) * stages, (2**20,) * count, 0.25, ranks=ranks)
    return replace(plan, measured=run)


def _alone(plan: Plan) -> Plan:
    """The plan without alternatives."""
    return replace(plan, alternatives=())


_CORRECTIONS = (
    Correction(CostClass("forward", "kind-1", False), 1.1, 2),
    Correction(CostClass("backward", "kind-1", False), 1.2, 2),
    Correction(CostClass("messages", "within-host"), 1.3, 2),
)

CASES: Mapping[str, tuple[str, Mapping[str, Any], Callable[[Plan], Plan] | None]] = {
    "pipeline": ("chain", {"global_batch": 8}, _measured),
    "rules": (
        "chain",
        {"global_batch": 8, "fix": (Rule("l0", "stage", "0"),), "forbid": (Rule("l7", "stage", "5"),)},
        None,
    ),
    "interleaved": ("chain", {"global_batch": 4, "schedules": ("interleaved",)}, None),
    "zero bubble": ("chain", {"global_batch": 6, "schedules": ("zb-h1",)}, None),
    "zero bubble V": ("chain", {"global_batch": 4, "schedules": ("zb-v",)}, None),
    "stale weights": ("chain", {"global_batch": 4, "schedules": ("pipedream",)}, None),
    "two versions": ("chain", {"global_batch": 6, "schedules": ("pipedream-2bw",), "micro_batch_sizes": (1,)}, None),
    "recomputed": (
        "chain",
        {"global_batch": 4, "recompute": "auto", "fix": (Rule("*", "recompute", "yes"),), "num_ranks": 3},
        _alone,
    ),
    "forward": ("chain", {"global_batch": 4, "objective": "latency"}, None),
    "little memory": ("chain", {"global_batch": 2, "objective": "memory", "num_ranks": 2}, None),
    "corrected": ("chain", {"global_batch": 4, "micro_batch_sizes": (1, 2)}, None),
    "replicas": ("uneven", {"global_batch": 16, "solver": "data-parallel"}, None),
    "divided state": ("uneven", {"global_batch": 16, "solver": "data-parallel", "shard": "always"}, None),
    "unlike devices": ("uneven", {"global_batch": 8}, None),
    "laid out": (
        "space",
        {"global_batch": 4, "solver": "dryden", "allow": ("sample", "spatial"), "micro_batch_sizes": (1,)},
        None,
    ),
    "sparse": ("sparse", {"global_batch": 4, "solver": "data-parallel", "micro_batch_sizes": (2,)}, None),
    "sparse pipeline": ("sparse", {"global_batch": 4, "micro_batch_sizes": (1,), "max_stages": 2}, None),
}
CASES = {name: made for name, made in CASES.items() if made[1].get("solver", "best-first") in names()}
"""Those whose solver is there: an extra may be left out."""


def _drawn(every: list[Mutation], count: int, seed: int) -> list[Mutation]:
    """Of each field as often as of another, in all plans together, before any comes again."""
    draw = random.Random(seed)
    by_row: dict[str, list[Mutation]] = {}
    for mutation in draw.sample(every, len(every)):
        by_row.setdefault(re.sub(r"\[\d+\]", "[]", mutation.path), []).append(mutation)
    found: list[Mutation] = []
    while by_row and len(found) < count:
        for row in list(by_row):
            found.append(by_row[row].pop())
            if not by_row[row]:
                del by_row[row]
    return found[:count]


def _try(mutation: Mutation, found: Caught) -> None:
    plan, profile = case(mutation.case)
    try:
        spoilt = loads(mutation.text, Plan)
    except HalopipeError:  # refused before anybody looks at it
        faults: tuple[str, ...] = ("refused",)
        spoilt = None
    if spoilt is not None and _is_equal(plan, spoilt, profile):
        found.equal += 1
        return
    for source in (profile, None):
        if not (mutation.alone if source is None else mutation.against):
            found.not_checked += source is None
            continue
        try:
            faults = faults_of(spoilt, source) if spoilt is not None else ("refused",)
        except Exception as error:  # noqa: BLE001  none at all may leave the checker
            found.raised.append(f"{mutation}: {type(error).__name__}: {error}")
            faults = ()
        if source is None:
            found.tried_alone += 1
            found.caught_alone += bool(faults)
        else:
            found.tried += 1
            found.caught += bool(faults)
        if not faults:
            found.missed.append(f"{mutation}{'' if source is not None else ' (without the profile)'}")


def _is_equal(plan: Plan, spoilt: Plan, profile: Profile) -> bool:
    """Whether the plan states the same, or the simulator says that what it states holds for the change as well."""
    if spoilt == plan:
        return True
    renamed = replace(plan.decision, schedule=spoilt.decision.schedule)
    if spoilt == replace(plan, decision=renamed):
        return _order_alike(plan, renamed.schedule)
    changed = replace(plan.decision, stages=spoilt.decision.stages, layers=spoilt.decision.layers)
    if spoilt != replace(plan, decision=changed) or changed == plan.decision:
        return False
    devices = profile.cluster.devices
    for stage in changed.stages:
        for rank, name in zip(stage.ranks, stage.devices, strict=False):
            if not 0 <= rank < len(devices) or devices[rank].name != name:
                return False
    request = plan.inputs.request
    if any(a.recompute != b.recompute or a.sharded != b.sharded for a, b in _pairs(plan, spoilt)):
        return False
    if any(placed.margin > request.halo_depth or placed.ways != 1 for placed in changed.layers.values()):
        return False
    try:
        profile = profile.corrected_by(plan.inputs.corrections)
        before, after = (
            predict(profile, each, request.memory_margin, request.memory_bytes)[0] for each in (plan.decision, changed)
        )
    except (ValueError, LookupError, ArithmeticError, HalopipeError):  # it makes no sense
        return False
    return _alike(plain(before), plain(after))


def _alike(before: Any, after: Any) -> bool:
    """Whether two predictions are the same but for rounding."""
    if isinstance(before, dict):
        return all(_alike(value, after[name]) for name, value in before.items())
    if isinstance(before, list | tuple):
        return len(before) == len(after) and all(map(_alike, before, after))
    return math.isclose(before, after, rel_tol=1e-9, abs_tol=1e-15) if isinstance(before, float) else before == after


def _order_alike(plan: Plan, name: str) -> bool:
    """Whether a schedule of another name gives the same order, and nobody asked for this one."""
    if name not in schedules.names() or plan.inputs.request.schedules:
        return False
    stages = StageGraph.chain(len(plan.decision.stages), len(plan.decision.micro_batches))
    orders = [schedules.schedule(each)(Pipeline(stages)) for each in (plan.decision.schedule, name)]
    return orders[0] == orders[1] and name in schedules.default_names()


def _pairs(plan: Plan, spoilt: Plan) -> Iterator[tuple[Any, Any]]:
    return zip(plan.decision.stages, spoilt.decision.stages, strict=False)


def _leaves(value: Any, steps: Steps) -> Iterator[tuple[Steps, Any]]:
    """Every value that is no object, lists themselves included, with its place."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(inner, (*steps, name))
        return
    yield steps, value
    if isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _leaves(inner, (*steps, number))


def _row_of(steps: Steps) -> str | None:
    """The row of the checker's table that a value belongs to."""
    if steps[:2] == ("decision", "layers") and len(steps) > 2:
        steps = (*steps[:2], "*", *steps[3:])
    rows = (re.sub(r"\[\d+\]", "[]", _spelt(steps[:length])) for length in range(len(steps), 0, -1))
    return next((row for row in rows if row in ROWS), None)


def _spelt(steps: Steps) -> str:
    text = ""
    for step in steps:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text


def _changes(steps: Steps, value: Any, document: Any) -> Iterator[tuple[str, Any]]:
    """Other values in that place, each with the whole document."""
    others: list[tuple[str, Any]] = []
    if isinstance(value, bool):
        others = [("flipped", not value)]
    elif isinstance(value, int):
        near = {value + 1, value - 1} if abs(value) < 1000 else {round(0.99 * value), round(1.01 * value), value // 10}
        others = [(f"{value} -> {other}", other) for other in sorted((near | {2 * value, 10 * value}) - {value})]
    elif isinstance(value, float):
        others = [(f"x {by}", value * by) for by in (0.99, 1.01, 0.5, 2.0, 10.0, 0.1) if value]
        others += [("0 -> 0.001", 1e-3)] if not value else [("negative", -value)]
    elif isinstance(value, str):
        others = [(f"{value!r} -> {other!r}", other) for other in _other_words(steps, value)]
    elif isinstance(value, list) and value and not isinstance(value[0], dict):
        others = [("last dropped", value[:-1]), ("first doubled", [value[0], *value]), ("reversed", value[::-1])]
        if steps == ("search", "binding") and len(value) == 1:  # a plan that says nothing there says nothing wrong
            others = others[1:]
        others += [
            (f"{k} and {k + 1} exchanged", [*value[:k], value[k + 1], value[k], *value[k + 2 :]])
            for k in range(len(value) - 1)
        ]
    for what, other in others:
        yield what, _with(document, steps, other)


def _with(document: Any, steps: Steps, value: Any) -> Any:
    changed = deepcopy(document)
    at = changed
    for step in steps[:-1]:
        at = at[step]
    at[steps[-1]] = value
    return changed


def _other_words(steps: Steps, value: str) -> Iterator[str]:
    if steps[:2] == ("decision", "program"):
        stage = re.match(r"\d+", value)
        if stage is not None:
            yield str(int(stage[0]) + 1) + value[stage.end() :]
        yield re.sub(r"(\d+)(?=$|[<>@!])", lambda found: str(int(found[1]) + 1), value, count=1) if stage else "x"
        for old, new in (("F", "B"), ("B", "F"), ("B", "I"), ("I", "W"), ("SEND", "RECV"), (">", "<")):
            if old in value:
                yield value.replace(old, new)
        yield f"{value}@1"
        yield f"{value}!"
        return
    words = {
        "schedule": ("1f1b", "gpipe", "interleaved", "zb-h1", "forward", "pipedream", "sooner"),
        "evidence": ("measured", "interpolated", "family", "datasheet", "certain"),
        "status": ("proven", "within gap", "heuristic", "sure"),
    }
    yield from (word for word in words.get(str(steps[-1]), (f"{value}x", value[:-1])) if word != value)


def _broken_promises(name: str, document: Any) -> Iterator[Mutation]:
    """Changes of what is checked in part, each of which breaks what it promises."""
    plan, _ = case(name)
    decision = plan.decision
    request = plan.inputs.request
    said = plan.prediction
    used = max(rank for stage in decision.stages for rank in stage.ranks)
    trains = decision.schedule != "forward"
    shared = any(len(stage.ranks) > 1 for stage in decision.stages)
    asked: dict[str, tuple[Any, ...]] = {
        "objective": ("latency", "speed") if trains else ("throughput", "memory", "speed"),
        "schedules": (["naive"], ["sooner"]),
        "micro_batch_sizes": ([max(decision.micro_batches) + 1], [0])[
            decision.micro_batches[0] == decision.global_batch :
        ],
        "max_stages": ((len(decision.stages) - 1,) if len(decision.stages) > 1 else ()) + (-1,),
        "num_ranks": ((used,) if used else ()) + (-1,),
        "gap": (-0.5,),
        "recompute": ("always" if not decision.stages[0].recompute and trains else "sometimes",)
        + (("never",) if decision.stages[0].recompute else ()),
        "halo_depth": (-1,),
        "allow": (["planes"],) + (([],) if shared else ()),
        "shard": ("half",) + (("never",) if any(stage.sharded for stage in decision.stages) else ()),
        "fix": tuple(
            [{"pattern": pattern, "what": what, "value": value}]
            for pattern, what, value in (
                ("*", "stage", str(len(decision.stages))),
                ("*", "replicas", "77"),
                ("nothing*", "stage", "0"),
                ("*", "device", "elsewhere/*"),
                ("*", "colour", "red"),
            )
        ),
        "forbid": (
            [{"pattern": "*", "what": "stage", "value": "0"}],
            [{"pattern": "*", "what": "device", "value": "*"}],
        ),
    }

    def changed(steps: Steps, value: Any, what: str, alone: bool = True) -> Mutation:
        return Mutation(name, _spelt(steps), what, json.dumps(_with(document, steps, value)), alone, True)

    for what, values in asked.items():
        for value in values:
            yield changed(("inputs", "request", what), value, f"-> {value}")
    yield changed(("inputs", "request", "memory_margin"), request.memory_margin + 0.01, "+ 0.01", alone=False)
    wrong = {"step_s": 0.0, "p10_s": said.p90_s * 1.01, "p90_s": said.p10_s * 0.99, "evidence": "certain"}
    for what, value in wrong.items():
        yield changed(("prediction", what), value, f"-> {value}")
    for rank, row in enumerate(said.ranks):
        yield changed(("prediction", "ranks", rank, "peak_bytes"), row.memory_limit_bytes + 1, "above the limit")
    yield from _broken_search(changed, plan, document)
    for number, correction in enumerate(plan.inputs.corrections):
        for factor in (0.99, 1.01, 0.0, -1.0):
            place = ("inputs", "corrections", number, "factor")
            yield changed(place, correction.factor * factor, f"x {factor}", alone=factor <= 0)


def _broken_search(changed: Callable[..., Mutation], plan: Plan, document: Any) -> Iterator[Mutation]:
    """Of status, bounds, sentences and alternatives."""
    search = plan.search
    step_s = plan.prediction.step_s
    said = document["search"]
    lower = {"bound_s": step_s / 2, "gap": 1.0, "bounds_s": {}, "status": "proven"}
    promises: list[tuple[str, dict[str, Any]]] = [
        ("proven with half the step for a bound", lower),
        ("heuristic with a bound", {**lower, "status": "heuristic"}),
        ("a bound above the step", {**lower, "bound_s": 1.01 * step_s, "gap": 1 / 1.01 - 1}),
        ("no known status", {"status": "sure"}),
        ("no words", {"binding": ["somebody is slow"]}),
    ]
    if search.bound_s:
        bounds = {**said["bounds_s"], "suffix DP": 1.01 * search.bound_s}
        promises.append(("a bound by name above the bound", {"bounds_s": bounds}))
    for number, line in enumerate(search.binding):
        percent = re.match(r"(\d+)%", line)
        if percent is not None and "gradients" not in line:
            other = f"{int(percent[1]) + 2}{line[len(percent[1]) :]}"
            binding = [*search.binding[:number], other, *search.binding[number + 1 :]]
            promises.append((f"binding {other!r}", {"binding": binding}))
    for what, changes in promises:
        yield changed(("search",), {**said, **changes}, what)
    for number, other in enumerate(plan.alternatives):
        entry = document["alternatives"][number]
        peak_bytes = other.peak_bytes or 0
        is_schedule = other.name.startswith("schedule ")
        for what, changes, alone in (
            ("no words", {"why_not": "it is worse"}, True),
            ("twice the step", {"step_s": 2 * other.step_s} if other.step_s else None, True),
            ("a step of 1 % more", {"step_s": 1.01 * other.step_s} if other.step_s and is_schedule else None, False),
            ("a peak of 1 % more", {"peak_bytes": peak_bytes * 101 // 100} if is_schedule else None, False),
            ("a peak that no device has", {"peak_bytes": 2**60}, False),
        ):
            if changes is not None:
                yield changed(("alternatives", number), {**entry, **changes}, what, alone)
