"""Plans, profiles and texts spoilt by chance, and what halopipe says of them: a typed refusal, or a plan that holds.

    python -m benchmarks.robustness --part files

A mutation of a valid file goes the way of a user's: read, checked, predicted, explained, through all that a run looks
at before its ranks begin, and, of a profile, planned within a time limit.  Counted are

    untyped     exceptions that are not of our tree (``planner.ir.errors``)
    hangs       more processor time than a user would wait, or a time limit overrun
    unnoticed   files that the checker calls good and the runtime, or the simulator, then refuses

The same seed gives the same mutations.
"""

from __future__ import annotations

import copy
import functools
import json
import random
import re
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from halopipe.extras.transformers import ways
from halopipe.planning import plan_files, solve
from halopipe.planning import problem as problems
from halopipe.planning.compare import Comparison
from halopipe.reports import explain, layer
from halopipe.run_spec import job_file
from halopipe.run_spec.options import RunOptions
from halopipe.training.check_options import require_consistent
from planner import faults_of
from planner.check.structure import require_possible
from planner.extras.catalogue.clusters import read_machines
from planner.ir.chrome_trace import chrome_trace
from planner.ir.codec import dumps, load
from planner.ir.errors import HalopipeError
from planner.ir.plan import Plan
from planner.ir.profile import Profile
from planner.layers.boundary import Boundaries
from planner.passes import validate
from runtime.optim.ties import groups_of
from runtime.rank import check_layers

HOME = Path(__file__).resolve().parents[2]
PLAN_SEEDS = (
    ("best-first", "notebooks/data/vgg16.profile.json"),
    ("data-parallel", "notebooks/data/vgg16.profile.json"),
    ("best-first", "notebooks/data/clouds/classification.profile.json"),
)
"""Solvers, and the profiles of which they make plans."""

PROFILE_SEEDS = (*dict.fromkeys(path for _, path in PLAN_SEEDS), "notebooks/data/spatial/mesh.profile.json")
LIMIT_S = 4.0
"""Processor time that one file may take beside what it is searched for."""

SEARCH_S = 0.3
_PATIENCE = 15  # how much longer the clock may run than the processor, on a machine that others use too

Json = Any
T = TypeVar("T")
Place = tuple[Any, Any]
"""A container, and the key or index in it."""


@dataclass(slots=True)
class Counts:
    """What became of the mutations.

    Attributes:
        refused: with an error of ours, or faults that the checker names.
        examples: of what should not be: (kind, seed of the mutation, what happened).
    """

    tried: int = 0
    refused: int = 0
    untyped: int = 0
    hangs: int = 0
    unnoticed: int = 0
    examples: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """Whether nothing happened that should not."""
        return not (self.untyped or self.hangs or self.unnoticed)


class OverrunError(BaseException):
    """The watchdog's: no ``except Exception`` may swallow it."""


def fuzz_plans(number: int, seed: int = 0) -> Counts:
    """Mutations of plans, with the profile that each was made from."""
    return _fuzz("plan", number, seed, PLAN_SEEDS, _plan_of, _plan_journey)


def fuzz_profiles(number: int, seed: int = 0) -> Counts:
    """Mutations of profiles."""
    return _fuzz("profile", number, seed, PROFILE_SEEDS, _profile_of, lambda path, origin: _profile_journey(path))


def fuzz_texts(number: int, seed: int = 0) -> Counts:
    """Mutations of cluster files, job files and files of ways, as text: tags, aliases, merges, numbers, halves."""
    return _fuzz("text", number, seed, tuple(TEXTS), TEXTS.__getitem__, _text_journey, spoilt_text)


def spoilt_text(original: str, name: str) -> bytes:
    """The mutation of a text that ``name`` seeds."""
    chance = random.Random(name)
    text = original
    for _ in range(chance.choice((1, 1, 2, 3))):
        text = _text_spoilt(text, chance)
    return text.encode("utf-8", "surrogatepass")


def mutation(original: Json, name: str) -> bytes:
    """The mutation of a document that ``name`` seeds."""
    chance = random.Random(name)
    root = copy.deepcopy(original)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        _spoil(root, chance)
    try:
        data = json.dumps(root).encode()
    except (RecursionError, ValueError):
        data = b"{"
    return _spelled(data, chance) if chance.random() < 0.25 else data


class _Unnoticed(Exception):  # noqa: N818 - a verdict rather than an error
    pass


def _fuzz(
    what: str,
    number: int,
    seed: int,
    origins: Sequence[T],
    document: Callable[[T], Json],
    journey: Callable[[Path, T], None],
    spoil: Callable[[Json, str], bytes] | None = None,
) -> Counts:
    counts = Counts()
    with tempfile.TemporaryDirectory(prefix="halopipe-fuzz-") as folder:
        path = Path(folder) / f"spoilt.{what}.json"
        for index in range(number):
            origin = origins[index % len(origins)]
            name = f"{what}-{seed}-{index}"
            path.write_bytes((spoil or mutation)(document(origin), name))
            counts.tried += 1
            try:
                with watched(LIMIT_S):
                    journey(path, origin)
            except HalopipeError:
                counts.refused += 1
            except OverrunError as error:
                counts.hangs += 1
                counts.examples.append(("hang", name, _last_lines(error)))
            except _Unnoticed as error:
                counts.unnoticed += 1
                counts.examples.append(("unnoticed", name, str(error)))
            except Exception as error:  # noqa: BLE001 - what is counted here is any exception at all
                counts.untyped += 1
                counts.examples.append(("untyped", name, _last_lines(error)))
    return counts


@functools.cache
def _profile_at(path: str) -> Profile:
    return load(HOME / path, Profile)


@functools.cache
def _profile_of(path: str) -> Json:
    root = json.loads((HOME / path).read_text("utf-8"))
    for section in ("measurements", "parts"):
        for measured in root.get(section, {}).values():
            for each in measured:
                each.pop("raw_s", None)  # most of the file, and all alike
    return root


@functools.cache
def _plan_of(origin: tuple[str, str]) -> Json:
    solver, path = origin
    profile = _profile_at(path)
    problem = problems.make_problem(
        profile, micro_batch=(max(1, profile.graph.samples // 2),), time_limit_s=10 * SEARCH_S
    )
    plan = solve.solve(problem, solver)
    if faults := faults_of(plan, profile):
        raise ValueError(f"{origin}: the plan to be spoilt has faults: {faults[:3]}")
    return json.loads(dumps(plan))


def _plan_journey(path: Path, origin: tuple[str, str]) -> None:
    profile = _profile_at(origin[1])
    plan = plan_files.load_plan(path)
    explain.explain(plan)
    explain.data(plan)
    Comparison({"a": plan, "b": plan}).render()
    faults = faults_of(plan, None)
    faults_with = faults_of(plan, profile)
    graph = profile.graph
    try:
        require_consistent(plan, RunOptions())
        _before_ranks(plan, profile)
        _, timeline = solve.predict_again(plan, profile)
        chrome_trace([timeline], plan_files.device_names(plan))
        explain.explain(plan, profile)
        layer.describe_layer(plan, profile, graph.layers[0].name)
    except HalopipeError as error:
        if not faults and not faults_with:
            raise _Unnoticed(f"the checker says good, then: {error.render()[:400]}") from error
        raise
    if faults or faults_with:
        raise HalopipeError("the checker names faults")


TEXTS: Mapping[str, str] = {
    "cluster": (HOME / "tests/data/texts/cluster.yaml").read_text("utf-8"),
    "job": (HOME / "tests/data/texts/job.yaml").read_text("utf-8"),
    "ways": (HOME / "tests/data/texts/ways.json").read_text("utf-8"),
}
"""Good texts, by what reads them."""


def _text_journey(path: Path, kind: str) -> None:
    readers: Mapping[str, Callable[[Path], object]] = {
        "cluster": read_machines,
        "job": job_file.read,
        "ways": ways.read,
    }
    repr(readers[kind](path))


def _profile_journey(path: Path) -> None:
    profile = plan_files.load_profile(path)
    problem = problems.make_problem(
        profile, micro_batch=(max(1, profile.graph.samples // 2),), schedules=("1f1b",), time_limit_s=SEARCH_S
    )
    plan = solve.solve(problem)
    explain.explain(plan, profile)
    faults = faults_of(plan, profile)
    if faults:
        raise _Unnoticed(f"planned, and the checker says: {'; '.join(faults)[:400]}")
    try:
        _before_ranks(plan, profile)
    except HalopipeError as error:
        raise _Unnoticed(f"planned, and the runtime says: {error.render()[:400]}") from error


def _before_ranks(plan: Plan, profile: Profile) -> None:
    """What every rank looks at first, of the graph that it captured."""
    check_layers(plan.decision, profile.graph)
    require_possible(plan.decision, profile.graph)
    groups_of(plan.decision, profile.graph)
    validate(Boundaries.of_decision(profile.graph, plan.decision).program(plan.decision))


@contextmanager
def watched(limit_s: float) -> Iterator[None]:
    """Raises OverrunError in its body after so much processor time, or far more of the clock's."""

    def bark(number: int, frame: FrameType | None) -> None:
        raise OverrunError(f"more than {limit_s} s")

    signals = {signal.SIGPROF: (signal.ITIMER_PROF, limit_s), signal.SIGALRM: (signal.ITIMER_REAL, _PATIENCE * limit_s)}
    before = {number: signal.signal(number, bark) for number in signals}
    for timer, seconds in signals.values():
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for number, (timer, _) in signals.items():
            signal.setitimer(timer, 0)
            signal.signal(number, before[number])


# Mutations of a document.


def _places(value: Json) -> Iterator[Place]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield value, key
            yield from _places(item)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield value, index
            yield from _places(item)


def _chosen(root: Json, chance: random.Random, accept: Callable[[Json], bool] = lambda value: True) -> Place | None:
    """A place by section, so that small sections are as likely as large ones."""
    sections = (
        [value for value in root.values() if isinstance(value, (dict, list)) and value]
        if isinstance(root, dict)
        else []
    )
    for _ in range(8):
        inside = chance.choice(sections) if sections and chance.random() < 0.9 else root
        if isinstance(inside, dict) and chance.random() < 0.6:
            deeper = [value for value in inside.values() if isinstance(value, (dict, list)) and value]
            inside = chance.choice(deeper) if deeper else inside
        found = [(holder, key) for holder, key in _places(inside) if accept(holder[key])]
        if found:
            return chance.choice(found)
    return None


_OTHERS: tuple[Json, ...] = (None, True, 0, 1, -1, 1.5, "", "x", "\x1b[31m", "\ud800", [], {}, [0], {"a": 1}, [[]])
_NUMBERS: tuple[Json, ...] = (0, -1, 1, 2, 3, 7, 2**31, 2**63, 2**64, 10**30)
_NUMBERS += (0.0, -0.0, -1e-9, 1e-300, 5e-324, 1e9, 1e30, 1e308)
_KINDS = (
    "drop", "duplicate", "swap", "swap rows", "retype", "number", "number", "number", "rename", "rename", "rekey",
    "repeat",
)  # fmt: skip


def _takes(kind: str, value: Json) -> bool:
    """Whether a value can be changed in that way."""
    match kind:
        case "duplicate" | "repeat":
            return isinstance(value, list) and bool(value)
        case "swap rows":
            return isinstance(value, list) and len(value) > 1
        case "number":
            return isinstance(value, (int, float)) and not isinstance(value, bool)
        case "rename":
            return isinstance(value, str)
        case "rekey":
            return isinstance(value, dict) and bool(value)
    return True


def _spoil(root: Json, chance: random.Random) -> None:
    """One change somewhere; none where nothing can be changed so."""
    kind = _KINDS[chance.randrange(len(_KINDS))]
    place = _chosen(root, chance, functools.partial(_takes, kind))
    other = _chosen(root, chance, functools.partial(_takes, kind)) if kind in ("swap", "rename") else place
    if place is None or other is None:
        return
    holder, key = place
    there, name = other
    value = holder[key]
    match kind:
        case "drop":
            del holder[key]
        case "duplicate":
            value.insert(chance.randrange(len(value) + 1), copy.deepcopy(chance.choice(value)))
        case "swap":
            holder[key] = copy.deepcopy(there[name])
            there[name] = copy.deepcopy(value)
        case "swap rows":
            a, b = chance.sample(range(len(value)), 2)
            value[a], value[b] = value[b], value[a]
        case "retype":
            holder[key] = copy.deepcopy(chance.choice(_OTHERS))
        case "number":
            half = value // 2 if isinstance(value, int) else value / 2
            scaled = (value * 2, half, value + 1, value - 1, -value, value * 1000)
            holder[key] = chance.choice(_NUMBERS if chance.random() < 0.5 else scaled)
        case "rename":  # to another name of the file or to one that there is not
            text = there[name]
            holder[key] = text if chance.random() < 0.6 else chance.choice((text + "x", "", "a:1", "*", "n0/cpu0"))
        case "rekey":
            old = chance.choice(list(value))
            value[chance.choice((old + "x", "", "sample", "0"))] = value.pop(old)
        case "repeat":
            holder[key] = value * chance.choice((2, 10, 100))


_VALUE = re.compile(r"(?<=: )[^,}\]\n]+")
_TAGS = ("bool", "int", "float", "timestamp", "null", "binary", "set", "omap", "str", "merge", "value", "python/none")
_WORDS = (
    "9" * 5000, f"-{'9' * 30}", f"0x{'f' * 5000}", "0b1", "010", "1_000", "1:30:99", "1e999", ".nan", "-.inf",
    "2020-99-99", "0001-01-01T00:00:00+23:59", "~", "=", "<<", "on", '""', '"\\ud800"', '"\\ud83d\\ude00"', "*a",
    "*nothing", "[*a, *a]", "{<<: *a}", "{<<: 3}", "{<<: [3]}", "[[", "{}", "[]", "- x", "? x", "!", "! x", "|", ">",
    "%", "@", "\t", "\ufeff", "4096",
)  # fmt: skip
"""In place of a value."""


def _text_spoilt(text: str, chance: random.Random) -> str:
    """One change of a value, or of a line."""
    values = list(_VALUE.finditer(text))
    lines = text.splitlines(keepends=True)
    number = chance.randrange(len(lines))
    line = chance.choice(lines)
    kind = chance.randrange(6) if values else 4
    if kind < 4:
        found = chance.choice(values)
        words = (
            f"!!{chance.choice(_TAGS)} {found[0]}",
            chance.choice(_WORDS),
            f"&a {found[0]}",
            f"!!{chance.choice(_TAGS)}",
        )
        return text[: found.start()] + words[kind] + text[found.end() :]
    indent = lines[number][: len(lines[number]) - len(lines[number].lstrip())]
    merge = f"{indent}<<: {chance.choice(('3', '*a', '[*a, 3]', '{version: 1}', '{hosts: *a}', '[[]]'))}\n"
    return "".join(
        [*lines[:number], *([merge] if kind == 4 else [line] * chance.choice((1, 50, 4000))), *lines[number:]]
    )


def _spelled(data: bytes, chance: random.Random) -> bytes:
    """Bytes flipped, cut off, put in or taken twice."""
    at = chance.randrange(len(data) or 1)
    match chance.randrange(5):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + bytes([data[at] ^ (1 << chance.randrange(8))]) + data[at + 1 :]
        case 2:
            put_in = chance.choice((b"\0", b"\xff", b"\xef\xbb\xbf", b"1e400", b"9" * 5000, b"[" * 5000))
            return data[:at] + put_in + data[at:]
        case 3:
            return data[:at] + data[at : at + 50] + data[at:]
        case _:
            return data[:at] + data[at + chance.randrange(1, 20) :]


def _last_lines(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    where = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames))
    return f"{type(error).__name__}: {str(error)[:200]} ({where})"
