"""What a user may give by mistake, and others by intent: a row a class, each with the word that halopipe has for it.

    python -m benchmarks.robustness.hostile_inputs [WORD...]      # those that have a word in their names

A row is a command line in a folder of files.  It is good if it ends soon, with the exit code of its class (2 usage, 3 a
bad file), a typed error that names the place, and no traceback; and if it wrote nothing.  Rows run in this process.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from benchmarks.robustness.fuzzing import OverrunError, watched
from halopipe.cli.app import app
from halopipe.planning import problem, solve
from planner.ir.codec import dumps, load
from planner.ir.profile import Profile

HOME = Path(__file__).resolve().parents[2]
LIMIT_S = 6.0
"""Processor time of a row; what takes most is reading a file of a million keys."""

USAGE, BAD_FILE = 2, 3
Json = Any


@dataclass(frozen=True, slots=True)
class Hostile:
    """One class of input.

    Attributes:
        name: group and class.
        arguments: of the command line; ``profile.json`` and ``plan.json`` in its folder are good.
        says: a word that standard error must have: the place in the file, the option.
        exit_code: that the command must end with.
        prepare: makes further files in the folder that it is given.
        environment: variables that are set meanwhile.
    """

    name: str
    arguments: tuple[str, ...]
    says: str
    exit_code: int = BAD_FILE
    prepare: Callable[[Path], object] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


def verdict(row: Hostile, folder: Path) -> str:
    """What is wrong with how halopipe takes the row; empty if it is good.  ``folder`` is empty, and the row's own."""
    (folder / "profile.json").write_text(_profile_text(), "utf-8")
    (folder / "plan.json").write_text(_plan_text(), "utf-8")
    if row.prepare is not None:
        row.prepare(folder)
    before = _contents(folder)
    home, environment = os.getcwd(), dict(os.environ)
    os.chdir(folder)
    os.environ.update(row.environment)
    try:
        with watched(LIMIT_S):
            result = CliRunner().invoke(app, list(row.arguments))
    except OverrunError:
        return f"more than {LIMIT_S} s"
    finally:
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(home)
    shown = " ".join(result.stderr.replace("│", " ").split())
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return f"an exception: {result.exception!r}"
    if result.exit_code != row.exit_code or "Traceback" in shown:
        return f"exit code {result.exit_code} instead of {row.exit_code}: {shown[:400]}"
    if any(ord(letter) < 32 and letter not in "\n\t" for letter in result.output):
        return f"control characters: {result.output[:200]!r}"
    if " ".join(row.says.split()) not in shown:
        return f"{row.says!r} is not said: {shown[:400]}"
    if _contents(folder) != before:
        return f"files were made or changed: {sorted(set(_contents(folder)) ^ set(before))}"
    return ""


def rows() -> tuple[Hostile, ...]:
    """All classes."""
    found = (
        *_profiles(), *_plans(), *_timelines(), *_texts(), *_paths(), *_clusters(), *_importers(),
        *_options(), *_environments(), *_outputs(), *_checkpoints(),
    )  # fmt: skip
    return found


def _contents(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.lstat().st_mtime_ns for path in folder.rglob("*")}


@functools.cache
def _profile_text() -> str:
    root = json.loads((HOME / "notebooks/data/vgg16.profile.json").read_text("utf-8"))
    for measured in root["measurements"].values():
        for each in measured:
            each.pop("raw_s", None)
    return json.dumps(root)


@functools.cache
def _plan_text() -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        path.write_text(_profile_text(), "utf-8")
        profile = load(path, Profile)
    return dumps(solve.solve(problem.make_problem(profile, micro_batch=(4,), time_limit_s=5.0), "even-split"))


@functools.cache
def _timeline_text() -> str:
    return (HOME / "notebooks/data/schedules/1f1b.timeline.json").read_text("utf-8")


_ABSENT = object()


def _edited(text: str, place: str, value: Json) -> str:
    """A document with another value at ``graph.layers.0.name``; ``_ABSENT``: without it; a function: of the old one."""
    root = json.loads(text)
    holder, parts = root, place.split("/")
    keys = [int(part) if part.isdecimal() else part for part in parts]
    for key in keys[:-1]:
        holder = holder[key]
    if value is _ABSENT:
        del holder[keys[-1]]
    else:
        holder[keys[-1]] = value(copy.deepcopy(holder[keys[-1]])) if callable(value) else value
    return json.dumps(root)


def _writes(name: str, text: str | bytes | Callable[[], str | bytes]) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        found = text() if callable(text) else text
        (folder / name).write_bytes(found.encode("utf-8", "surrogatepass") if isinstance(found, str) else found)

    return write


_KIND = "AMD EPYC"
_FIRST = f"measurements/{_KIND}/0"


def _profiles() -> Iterator[Hostile]:
    layers = "graph/layers"

    def row(name: str, place: str, value: Json, says: str) -> Hostile:
        write = _writes("bad.json", lambda: _edited(_profile_text(), place, value))
        return Hostile(f"profile: {name}", ("plan", "bad.json"), says, prepare=write)

    conv, layer = f"{layers}/2/attributes", "graph.layers[2]"
    for name in ("stride", "kernel", "dilation"):
        for number, word in ((0, "of 0"), (-1, "negative"), (2**40, "huge")):
            yield row(f"{name} {word}", f"{conv}/{name}", [number, number], f"{layer}.attributes.{name}: {number}")
        yield row(f"{name} missing", f"{conv}/{name}", _ABSENT, f"{layer}.attributes: no {name}")
        yield row(f"{name} of one number too many", f"{conv}/{name}", [1, 1, 1], f"{layer}.attributes:")
    yield row("padding negative", f"{conv}/padding", [-1, -1], f"{layer}.attributes.padding: -1")
    yield row("padding huge", f"{conv}/padding", [2**40, 1], f"{layer}.attributes.padding")
    yield row("groups of 0", f"{conv}/groups", 0, f"{layer}.attributes.groups: 0")
    yield row("groups that do not divide", f"{conv}/groups", 7, f"{layer}.attributes.groups: 7 groups")
    yield row("groups as text", f"{conv}/groups", "two", layer)
    yield row("a window that does not fit", f"{conv}/kernel", [31, 31], f"{layer}.outputs[0].shape")
    yield row("kind unknown", f"{layers}/2/kind", "convolution", f"{layer}.kind: no layer kind 'convolution'")
    yield row("kind that is a helper", f"{layers}/2/kind", "fitting", f"{layer}.kind")
    yield row("kind that is a path", f"{layers}/2/kind", "../os", f"{layer}.kind")
    yield row("kind of another shape", f"{layers}/3/kind", "conv", "graph.layers[3]")
    yield row("kind of more inputs", f"{layers}/3/kind", "attention", "graph.layers[3]")
    yield row("cycle", f"{layers}/1/inputs", ["features.3"], "graph.layers[1].inputs[0]: reads 'features.3'")
    yield row("reads itself", f"{layers}/1/inputs", ["features.1"], "which itself makes")
    yield row("dangling input", f"{layers}/1/inputs", ["nowhere"], "graph.layers[1].inputs[0]: no value 'nowhere'")
    yield row("output that there is not", f"{layers}/1/inputs", ["features.0:7"], "graph.layers[1].inputs[0]")
    yield row("order turned round", layers, lambda found: found[::-1], "topological order")
    yield row("two layers of one name", layers, lambda found: [*found, found[0]], "'features.0' is there already")
    yield row("no layers", layers, [], "graph.layers: there is no layer")
    yield row("layer without a name", f"{layers}/0/name", "", "graph.layers[0].name")
    yield row("layer with a colon", f"{layers}/0/name", "a:1", "graph.layers[0].name")
    yield row("layer called like an input", f"{layers}/0/name", "inputs", "graph.layers[0].name")
    yield row("layer without outputs", f"{layers}/1/outputs", [], "graph.layers[1].outputs")
    yield row("escape in a name", f"{layers}/1/inputs", ["\x1b]0;owned\x07"], "graph.layers[1].inputs[0]")
    yield row("parameter unknown", f"{layers}/0/parameters", ["w"], "graph.layers[0].parameters[0]: no parameter 'w'")
    yield row("loss unknown", "graph/loss", "losses", "graph.loss: no value 'losses'")
    yield row("loss that is an input", "graph/loss", "targets", "graph.loss")
    yield row("samples of 0", "graph/samples", 0, "graph.samples: 0")
    yield row("samples negative", "graph/samples", -8, "graph.samples: -8")
    yield row("samples that do not divide", "graph/samples", 7, "no multiple of graph.samples, 7")
    spec = f"{layers}/0/outputs/0"
    yield row("dims and shape differ", f"{spec}/shape", [8, 64], "graph.layers[0].outputs[0].shape: 2 extents")
    yield row("extent negative", f"{spec}/shape", [8, 64, -1, 32], "graph.layers[0].outputs[0].shape[2]: -1")
    yield row("extent huge", f"{spec}/shape", [8, 64, 2**50, 32], "graph.layers[0].outputs[0].shape[2]")
    yield row("too many elements", f"{spec}/shape", [2**30, 2**30, 4, 4], "graph.layers[0].outputs[0].shape")
    yield row("dtype unknown", f"{spec}/dtype", "float31", "graph.layers[0].outputs[0].dtype: no dtype 'float31'")
    yield row("occupancy above 1", f"{spec}/occupancy", 2.0, "graph.layers[0].outputs[0].occupancy")
    yield row("occupancy negative", f"{spec}/occupancy", -0.5, "graph.layers[0].outputs[0].occupancy")
    yield row("buffer negative", f"{layers}/0/buffer_bytes", -1, "graph.layers[0].buffer_bytes: -1")
    for name in ("forward_s", "backward_s", "backward_input_s", "backward_weight_s"):
        yield row(f"{name} negative", f"{_FIRST}/{name}", -1.0, f"measurements.{_KIND}[0].{name}: -1")
        yield row(f"{name} of 1e30", f"{_FIRST}/{name}", 1e30, f"measurements.{_KIND}[0].{name}: 1e+30")
    yield row("costs far apart", f"{_FIRST}/forward_s", 1e-300, "times the 1e-300 s of [0]")
    for name in ("saved_bytes", "workspace_bytes", "num_runs"):
        yield row(f"{name} negative", f"{_FIRST}/{name}", -1, f"measurements.{_KIND}[0].{name}: -1")
        yield row(f"{name} huge", f"{_FIRST}/{name}", 10**30, f"measurements.{_KIND}[0].{name}")
    yield row("measured at 0 samples", f"{_FIRST}/samples", 0, f"measurements.{_KIND}[0].samples: 0")
    yield row("layer measured that is not", f"{_FIRST}/layer", "features", f"measurements.{_KIND}[0].layer")
    yield row("measured twice", f"measurements/{_KIND}", lambda found: [*found, found[0]], "is there already, at [0]")
    yield row("spread negative", f"{_FIRST}/spread", -1.0, f"measurements.{_KIND}[0].spread")
    costs = f"parameters/{_KIND}/features.0"
    yield row("update negative", f"{costs}/update_s", -1.0, f"parameters.{_KIND}.features.0.update_s")
    yield row("update of 1e30", f"{costs}/update_s", 1e30, f"parameters.{_KIND}.features.0.update_s")
    yield row("update of no layer", f"parameters/{_KIND}/x", {"accumulate_s": 0.0, "update_s": 0.0}, "no layer 'x'")
    device = "cluster/devices"
    yield row("no devices", device, [], "cluster.devices: there is no device")
    yield row("10,000 devices", device, lambda found: found[:1] * 10_000, "cluster.devices: 10000 devices")
    yield row("two devices of one name", device, lambda found: [found[0]] * 2, "cluster.devices[1]: a device called")
    yield row("device without memory", f"{device}/0/memory_bytes", 0, "cluster.devices[0].memory_bytes: 0")
    yield row("memory negative", f"{device}/0/memory_bytes", -1, "cluster.devices[0].memory_bytes: -1")
    yield row("memory of 1e30", f"{device}/0/memory_bytes", 10**30, "cluster.devices[0].memory_bytes")
    yield row("device without a name", f"{device}/0/name", "", "cluster.devices[0].name")
    yield row("device without a host", f"{device}/0/host", "", "cluster.devices[0].host")
    yield row("core share above 1", f"{device}/0/core_share", 2.0, "cluster.devices[0].core_share")
    yield row("peak of 0", f"{device}/0/peak_flop_per_s", {"float32": 0.0}, "peak_flop_per_s.float32: 0")
    link = "cluster/links/within-host"
    yield row("bandwidth of 0", f"{link}/bandwidth_bytes_per_s", 0.0, "bandwidth_bytes_per_s: 0 is not above 0")
    yield row("bandwidth negative", f"{link}/bandwidth_bytes_per_s", -1.0, "within-host.bandwidth_bytes_per_s")
    yield row("bandwidth of 1e30", f"{link}/bandwidth_bytes_per_s", 1e30, "within-host.bandwidth_bytes_per_s")
    yield row("latency negative", f"{link}/latency_s", -1.0, "cluster.links.within-host.latency_s: -1")
    yield row("points that shrink", f"{link}/points", [[4, 1.0], [2, 1.0]], "within-host.points[1][0]: 2 bytes after 4")
    yield row("point of no bytes", f"{link}/points", [[0, 1.0]], "within-host.points[0][0]: 0")
    yield row("point of no time", f"{link}/points", [[1, 0.0]], "within-host.points[0][1]: 0")
    yield row("link of no host", "cluster/pairs", [{"src_host": "a", "dst_host": "n0", "link": {
        "latency_s": 0.0, "bandwidth_bytes_per_s": 1.0}}], "cluster.pairs[0].src_host: no host 'a'")  # fmt: skip
    collective = "cluster/collectives/0"
    yield row("collective of 0 ranks", f"{collective}/num_ranks", 0, "cluster.collectives[0].num_ranks: 0")
    yield row("collective on no link", f"{collective}/link", "x", "cluster.collectives[0].link: no link 'x'")
    yield row("collective unmeasured", f"{collective}/points", [], "cluster.collectives[0].points")
    yield row("no links", "cluster/links", {}, "cluster.collectives[0].link")
    yield row("state negative", "optimizer/state_bytes_per_parameter_byte", -1.0, "state_bytes_per_parameter_byte")
    yield row("state of 1e30", "optimizer/state_bytes_per_parameter_byte", 1e30, "state_bytes_per_parameter_byte")
    yield row("model of an unknown dtype", "model/dtype", "float31", "model.dtype: no dtype 'float31'")
    yield row("input of no samples", "model/input_shape", [0, 3], "model.input_shape[0]: 0")
    yield row("overhead negative", f"action_overhead_s/{_KIND}", -1.0, "action_overhead_s")
    for section in ("model", "graph", "cluster", "measurements", "optimizer", "provenance", "parameters"):
        yield row(f"without {section}", section, _ABSENT, f"{section}: missing")
        yield row(f"{section} is null", section, None, section)
        yield row(f"{section} is a number", section, 7, section)
    yield row("unknown key", "graph/layer", 1, "graph.layer: unknown key")
    yield row("true for a number", f"{_FIRST}/forward_s", True, f"measurements.{_KIND}[0].forward_s")
    yield row("text for a number", f"{_FIRST}/forward_s", "1e-3", f"measurements.{_KIND}[0].forward_s")


def _plans() -> Iterator[Hostile]:
    verbs = (("explain", "bad.json"), ("check", "bad.json"), ("compare", "plan.json", "bad.json"), ("run", "bad.json"))
    verbs += (("export", "bad.json", "--to", "chrome-trace", "--profile", "profile.json"),)
    count = 0

    def row(name: str, place: str, value: Json, says: str) -> Hostile:
        nonlocal count
        count += 1
        write = _writes("bad.json", lambda: _edited(_plan_text(), place, value))
        return Hostile(f"plan: {name}", verbs[count % len(verbs)], says, prepare=write)

    stage, placed = "decision/stages/0", "decision/layers/features.0"
    yield row("no micro-batches", "decision/micro_batches", [], "decision.micro_batches: there is none")
    yield row("micro-batch of 0", "decision/micro_batches", [0, 8], "decision.micro_batches[0]: 0")
    yield row("micro-batch negative", "decision/micro_batches", [-1, 9], "decision.micro_batches[0]: -1")
    yield row("micro-batch huge", "decision/micro_batches", [2**40, 4], "decision.micro_batches[0]")
    yield row("a million micro-batches", "decision/micro_batches", [1] * 10**6, "decision.micro_batches: 1000000")
    yield row("no stages", "decision/stages", [], "decision.layers.features.0.stage: 0 is none of 0 stages")
    yield row("stage without ranks", f"{stage}/ranks", [], "decision.stages[0].ranks")
    yield row("stage with a rank twice", f"{stage}/ranks", [0, 0], "decision.stages[0].ranks[1]: rank 0")
    yield row("rank that there is not", f"{stage}/ranks", [9], "decision.stages[0].ranks[0]: rank 9")
    yield row("rank negative", f"{stage}/ranks", [-1], "decision.stages[0].ranks[0]: rank -1")
    yield row("stage without devices", f"{stage}/devices", [], "decision.stages[0].devices: 0 devices for 1 ranks")
    yield row("stage without layers", "decision/stages", lambda found: [*found, found[0]], "decision.stages[2]")
    yield row("layer of no stage", f"{placed}/stage", 7, "decision.layers.features.0.stage: 7 is none of 2")
    yield row("layer of a negative stage", f"{placed}/stage", -1, "decision.layers.features.0.stage: -1")
    for name, points in (
        ("one point", [0]), ("none", []), ("not from 0", [1, 2]), ("falling", [0, 2, 1]), ("all 0", [0, 0]),
        ("negative", [-1, 0]),
    ):  # fmt: skip
        yield row(f"cuts: {name}", f"{placed}/cuts", {"sample": points}, "decision.layers.features.0.cuts.sample")
    yield row("cuts for other ranks", f"{placed}/cuts", {"sample": [0, 1, 2]}, "2 parts for the 1 ranks")
    yield row("cuts without end", f"{placed}/cuts", {"sample": list(range(10**5))}, "parts for the 1 ranks")
    yield row("ways of 0", f"{placed}/ways", 0, "decision.layers.features.0.ways: 0")
    yield row("margin negative", f"{placed}/margin", -1, "decision.layers.features.0.margin: -1")
    yield row("no program", "decision/program", [], "decision.program: there is no rank")
    for name, text in (
        ("no action", "x"), ("empty", ""), ("escape", "\x1b[2J"), ("signed", "-1F0"), ("zeros", "00F0"),
        ("long", "9" * 5000 + "F0"), ("letters of others", "0Ｆ0"),
    ):  # fmt: skip
        yield row(f"action: {name}", "decision/program/0/0", text, "decision.program[0][0]")
    yield row("action of no stage", "decision/program/0/0", "7F0", "names stage 7, there are 2")
    yield row("action of no micro-batch", "decision/program/0/0", "0F99", "names microbatch 99, there are 2")
    yield row("action towards no stage", "decision/program/0/1", "0SEND_F0>9", "names peer 9, there are 2")
    yield row("10,000 ranks", "decision/program", lambda found: found * 5000, "decision.program: 10000 are more")
    yield row("step of 0", "prediction/step_s", 0.0, "prediction.step_s: 0 is not above 0")
    yield row("step negative", "prediction/step_s", -1.0, "prediction.step_s: -1")
    yield row("step of 1e30", "prediction/step_s", 1e30, "prediction.step_s: 1e+30")
    yield row("bubble above 1", "prediction/bubble_fraction", 2.0, "prediction.bubble_fraction: 2")
    yield row("peak negative", "prediction/ranks/0/peak_bytes", -1, "prediction.ranks[0].peak_bytes: -1")
    yield row("rank predicted twice", "prediction/ranks/0/rank", 1, "prediction.ranks[1]: rank 1 is there already")
    yield row("rank predicted of none", "prediction/ranks/0/rank", 5, "prediction.ranks[0]: rank 5")
    yield row("bound negative", "search/bound_s", -1.0, "search.bound_s: -1")
    yield row("objective unknown", "inputs/request", {"objective": "fun"}, "inputs.request.objective")
    yield row("recompute unknown", "inputs/request", {"recompute": "x"}, "inputs.request.recompute")
    yield row("rule that is none", "inputs/request", {"fix": [{"pattern": "*", "what": "stage", "value": "x"}]},
              "inputs.request.fix[0]")  # fmt: skip
    yield row("ranks negative", "inputs/request", {"num_ranks": -1}, "inputs.request.num_ranks: -1")
    yield row("margin of memory above 1", "inputs/request", {"memory_margin": 2.0}, "inputs.request.memory_margin")
    correction = {"of": {"what": "forward", "where": "x"}, "factor": 0.0, "num_plans": 1}
    yield row("correction of 0", "inputs/corrections", [correction], "inputs.corrections[0].factor")
    for section in ("inputs", "decision", "prediction", "search"):
        yield row(f"without {section}", section, _ABSENT, f"{section}: missing")
        yield row(f"{section} is a list", section, [], section)
    yield row("unknown key", "decision/scheduler", "x", "decision.scheduler: unknown key; did you mean 'schedule'?")


def _timelines() -> Iterator[Hostile]:
    arguments = ("export", "plan.json", "--to", "chrome-trace", "--timeline", "bad.json")

    def row(name: str, place: str, value: Json, says: str) -> Hostile:
        write = _writes("bad.json", lambda: _edited(_timeline_text(), place, value))
        return Hostile(f"timeline: {name}", arguments, says, prepare=write)

    span = "predicted/spans/0"
    yield row("rank negative", f"{span}/rank", -1, "predicted.spans[0].rank: -1")
    yield row("rank huge", f"{span}/rank", 10**9, "predicted.spans[0].rank")
    yield row("action that is none", f"{span}/action", "x", "predicted.spans[0].action: 'x'")
    yield row("ends before it starts", f"{span}/start_s", 1e6, "predicted.spans[0].stop_s")
    yield row("start negative", f"{span}/start_s", -5.0, "predicted.spans[0].start_s: -5")
    yield row("step negative", "measured/step_s", -1.0, "measured.step_s: -1")
    yield row("step seconds of 1e30", "step_seconds", [1e30], "step_seconds[0]: 1e+30")
    yield row("bytes negative", "measured/memory/0/num_bytes", -1, "measured.memory[0].num_bytes: -1")
    yield row("memory of a rank that is none", "measured/memory/0/rank", -3, "measured.memory[0].rank: -3")
    yield row("loss as text", "losses", ["low"], "losses[0]")


_READERS: Mapping[str, tuple[str, ...]] = {
    "profile": ("plan", "bad"),
    "plan": ("explain", "bad"),
    "timeline": ("export", "plan.json", "--to", "chrome-trace", "--timeline", "bad"),
    "cluster file": ("cluster", "bad"),
    "pipedream file": ("import", "bad", "-o", "out.json"),
}
"""A command line for each format, that reads a file called ``bad``."""


def _texts() -> Iterator[Hostile]:
    """Documents that are none, for each of our formats in JSON."""
    for kind, good in (("profile", _profile_text), ("plan", _plan_text), ("timeline", _timeline_text)):
        head = f'{{"halopipe": "{kind}", "version": 1, '
        found: Mapping[str, tuple[str | bytes | Callable[[], str | bytes], str]] = {
            "cut off": (lambda good=good: good()[:-20], "is not JSON"),
            "a list": ("[]", f"is not a halopipe {kind} file"),
            "null": ("null", "it is not a halopipe file"),
            "another format": (
                json.dumps({"halopipe": "plan" if kind != "plan" else "profile", "version": 1}),
                "it is a halopipe",
            ),
            "a newer version": (json.dumps({"halopipe": kind, "version": 99}), "was written by a newer halopipe"),
            "version of 0": (json.dumps({"halopipe": kind, "version": 0}), "version: 0"),
            "version as text": (json.dumps({"halopipe": kind, "version": "1"}), "version: '1'"),
            "version true": (json.dumps({"halopipe": kind, "version": True}), "version: True"),
            "nested deeply": (head + '"x": ' + "[" * 10**5 + "]" * 10**5 + "}", "nested too deeply"),
            "a number of 100,000 digits": (head + '"x": ' + "9" * 10**5 + "}", "a number has too many digits"),
            "a million keys": (
                lambda head=head: head + ", ".join(f'"k{index}": 1' for index in range(10**6)) + "}",
                "keys",
            ),
            "50,000 unknown keys": (
                lambda head=head: head + ", ".join(f'"k{index}": 1' for index in range(50_000)) + "}",
                "more",
            ),
            "a key 100,000 times": (head + '"x": 1, ' * 10**5 + '"x": 2}', "x: key given twice"),
            "keys with escapes": (head + '"\\u001b[31m": 1}', "unknown key"),
            "1e400": (head + '"x": 1e400}', "unknown key"),
            "half a character": (head + '"\\ud800": 1}', "bad"),
        }
        for name, (text, says) in found.items():
            yield Hostile(f"{kind}: {name}", _READERS[kind], says, prepare=_writes("bad", text))


def _paths() -> Iterator[Hostile]:
    """Paths at which there is no such file, for each format."""

    def loop(folder: Path) -> None:
        (folder / "bad").symlink_to("bad")

    def dangling(folder: Path) -> None:
        (folder / "bad").symlink_to("nowhere")

    def gigabyte(folder: Path) -> None:
        with (folder / "bad").open("wb") as file:
            file.truncate(2**30)

    for kind, arguments in _READERS.items():
        made: Mapping[str, tuple[Callable[[Path], object] | None, str]] = {
            "missing": (None, "No such file or directory"),
            "a folder": (lambda folder: (folder / "bad").mkdir(), "it is a folder"),
            "a pipe that nobody writes": (lambda folder: os.mkfifo(folder / "bad"), "bad"),
            "an endless device": (lambda folder: (folder / "bad").symlink_to("/dev/zero"), "it is a device"),
            "an empty device": (lambda folder: (folder / "bad").symlink_to("/dev/null"), "it is a device"),
            "a link to itself": (loop, "bad"),
            "a link to nothing": (dangling, "No such file or directory"),
            "a gigabyte": (gigabyte, "is too large"),
            "empty": (_writes("bad", ""), "bad"),
            "not UTF-8": (_writes("bad", b"\xff\xfe{}"), "not UTF-8"),
            "null characters": (_writes("bad", b"a\0b\0"), "bad"),
        }
        for name, (prepare, says) in made.items():
            yield Hostile(f"{kind}: {name}", arguments, says, prepare=prepare)
        long = tuple("b" * 300 if word == "bad" else word for word in arguments)
        yield Hostile(f"{kind}: a name too long", long, "File name too long")


_GOOD_CLUSTER = """halopipe: cluster
version: 1
hosts:
  - {name: n, count: 2, devices: [{device: V100-16GB, count: 2}]}
links: {within-host: NVLink-2, across-hosts: Ethernet-10G}
"""


def _clusters() -> Iterator[Hostile]:
    def changed(old: str, new: str) -> str:
        if old not in _GOOD_CLUSTER:
            raise ValueError(old)
        return _GOOD_CLUSTER.replace(old, new)

    bomb = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"{name}: &{name} [{', '.join(['*' + before] * 9)}]\n"
        for before, name in zip("abcdefgh", "bcdefghi", strict=True)
    )
    devices, links = "devices: [{device: V100-16GB, count: 2}]", "links: {within-host: NVLink-2, across-hosts: "
    found: Mapping[str, tuple[str, str]] = {
        "a bomb of aliases": (bomb, "with its aliases spelled out"),
        "a bomb of merges": (bomb.replace("[", "{<<: [", 0) + "m: {<<: [*a]}\n", "bad.yaml"),
        "an alias inside itself": ("a: &a [*a]\n", "an alias stands inside"),
        "an alias of nothing": ("a: *b\n", "is not YAML"),
        "an object of Python": ("a: !!python/object/apply:os.system ['touch owned']\n", "is not YAML"),
        "nested deeply": ("[" * 20_000, "bad.yaml"),
        "a key twice": (_GOOD_CLUSTER + "version: 1\n", "version is given twice"),
        "a key that is a list": ("? [a, b]\n: 1\n", "is not YAML"),
        "tabs": ("hosts:\n\t- x\n", "is not YAML"),
        "two documents": ("a: 1\n---\nb: 2\n", "is not YAML"),
        "a date that is none": ("a: 2020-99-99\n", "is not YAML"),
        "a number of 10,000 digits": (f"hosts: {'9' * 10_000}\n", "bad.yaml"),
        "a list": ("- a\n", "should be a mapping"),
        "text": ("hello", "should be a mapping"),
        "another format": (changed("halopipe: cluster", "halopipe: plan"), "should begin with"),
        "another version": (changed("version: 1", "version: 2"), "should begin with"),
        "no hosts": ("links: {}\n", "hosts: missing"),
        "hosts that are none": (changed(f"\n  - {{name: n, count: 2, {devices}}}", " []"), "hosts: should be a list"),
        "an unknown key": (_GOOD_CLUSTER + "host: x\n", "host: unknown key; did you mean hosts?"),
        "a host without devices": (changed(devices, "devices: []"), "hosts[0].devices: should be a list"),
        "10,000 devices": (changed("count: 2}]", "count: 10000}]"), "should be at most 4096"),
        "10,000 devices on hosts": (changed("count: 2,", "count: 3000,"), "more than 4096 devices"),
        "count of 1e30": (changed("count: 2}]", f"count: {10**30}}}]"), "hosts[0].devices[0].count"),
        "count of 0": (changed("count: 2}]", "count: 0}]"), "hosts[0].devices[0].count: should be a positive"),
        "count negative": (changed("count: 2,", "count: -2,"), "hosts[0].count"),
        "count as text": (changed("count: 2,", "count: two,"), "hosts[0].count"),
        "count true": (changed("count: 2,", "count: true,"), "hosts[0].count"),
        "two hosts of one name": (
            changed("links:", f"  - {{name: n0, {devices}}}\nlinks:"),
            "two hosts are called 'n0'",
        ),
        "an unknown device": (changed("V100-16GB", "V100-16G"), "no device 'V100-16G'; did you mean V100-16GB?"),
        "memory of 0": (changed("count: 2}]", "memory: 0GiB}]"), "hosts[0].devices[0].memory: should be above zero"),
        "memory of 1e30": (changed("count: 2}]", f"memory: {10**20}PB}}]"), "hosts[0].devices[0].memory"),
        "memory without end": (changed("count: 2}]", f"memory: {'9' * 400}GB}}]"), "hosts[0].devices[0].memory"),
        "memory as words": (changed("count: 2}]", "memory: much}]"), "hosts[0].devices[0].memory"),
        "bandwidth of 0": (changed("Ethernet-10G", "{bandwidth: 0GB/s}"), "links.across-hosts.bandwidth"),
        "no bandwidth": (changed("Ethernet-10G", "{latency: 1us}"), "links.across-hosts.bandwidth: missing"),
        "bandwidth in seconds": (changed("Ethernet-10G", "{bandwidth: 5us}"), "links.across-hosts.bandwidth"),
        "latency negative": (
            changed("Ethernet-10G", "{link: Ethernet-10G, latency: -5us}"),
            "links.across-hosts.latency",
        ),
        "latency of 1e30": (
            changed("Ethernet-10G", f"{{link: Ethernet-10G, latency: {10**30}s}}"),
            "links.across-hosts.latency",
        ),
        "duplex as text": (
            changed("Ethernet-10G", "{link: Ethernet-10G, duplex: maybe}"),
            "links.across-hosts.duplex",
        ),
        "an unknown link": (changed("Ethernet-10G", "Ethernt-10G"), "no link 'Ethernt-10G'"),
        "no link across hosts": (changed(", across-hosts: Ethernet-10G", ""), "links.across-hosts: missing"),
        "a pair of no host": (
            changed("Ethernet-10G}", "Ethernet-10G, pairs: [{from: x, to: n0, bandwidth: 1GB/s}]}"),
            "links.pairs[0].from: no host 'x'",
        ),
        "a pair without end": (
            changed("Ethernet-10G}", "Ethernet-10G, pairs: [{from: n1, bandwidth: 1GB/s}]}"),
            "links.pairs[0].to: missing",
        ),
        "links that are measured nowhere": (changed(links + "Ethernet-10G", links + "measured"), "measured no link"),
        "an escape in a name": (changed("V100-16GB", '"\\e[31mV100"'), "no device"),
        "a million characters": ("x" * 10**6, "is too large"),
    }
    for name, (text, says) in found.items():
        write = _writes("bad.yaml", text)
        yield Hostile(f"cluster file: {name}", ("cluster", "bad.yaml"), says, prepare=write)
    write = _writes("bad.yaml", "hosts: 1\n")
    plan = ("plan", "profile.json", "--cluster", "bad.yaml")
    yield Hostile("cluster file: of a plan", plan, "hosts: should be a list", prepare=write)


def _importers() -> Iterator[Hostile]:
    costs = "forward_compute_time={f}, backward_compute_time=2.0, activation_size=100.0, parameter_size=10.0"
    good = f"node1 -- Input -- {costs.format(f=1.0)}\nnode2 -- Linear -- {costs.format(f=1.0)}\n\tnode1 -- node2\n"
    found = {
        "no layers": ("\tnode1 -- node2\n", "graph.txt"),
        "an edge of no layer": (good + "\tnode1 -- node9\n", "graph.txt, line 4"),
        "a cycle": (good + "\tnode2 -- node1\n", "the edges make a cycle"),
        "a layer twice": (good + good, "appears twice"),
        "a negative time": (good.replace("=1.0", "=-1.0"), "forward_compute_time"),
        "NaN": (good.replace("=1.0", "=nan"), "forward_compute_time"),
        "infinity": (good.replace("=1.0", "=inf"), "forward_compute_time"),
        "1e400": (good.replace("=1.0", "=1e400"), "forward_compute_time"),
        "1e30 ms": (good.replace("=1.0", "=1e30"), "forward_s"),
        "1e30 bytes": (good.replace("=100.0", "=1e30"), "graph"),
        "words": (good.replace("=1.0", "=long"), "forward_compute_time"),
        "a field missing": (good.replace(", parameter_size=10.0", ""), "has no parameter_size"),
        "no format at all": ("hello\n", "graph.txt, line 1"),
        "an escape": ("\x1b[31m\n", "graph.txt, line 1"),
    }
    for name, (text, says) in found.items():
        arguments = ("import", "graph.txt", "-o", "out.json")
        yield Hostile(f"pipedream: {name}", arguments, says, prepare=_writes("graph.txt", text))
    write = _writes("graph.txt", good)
    for name, options, says in (
        ("format unknown", ("--format", "piper"), "no format to import 'piper'"),
        ("device unknown", ("--device", "abacus"), "'abacus'"),
        ("samples of 0", ("--samples", "0"), "--samples"),
        ("samples negative", ("--samples", "-1"), "--samples"),
        ("onto its own file", ("-o", "graph.txt"), "graph.txt is read, and would be replaced"),
    ):
        yield Hostile(f"pipedream: {name}", ("import", "graph.txt", *options), says, USAGE, write)


def _options() -> Iterator[Hostile]:
    """Command lines; exit code 2 throughout."""
    plan, run, explain = ("plan", "profile.json"), ("run", "plan.json"), ("explain", "plan.json")
    found: tuple[tuple[tuple[str, ...], tuple[str, ...], str], ...] = (
        ((), ("fly",), "No such command 'fly'"),
        ((), ("--fly",), "No such option"),
        ((), ("plan",), "Missing argument"),
        ((), ("check",), "Missing argument"),
        ((), ("compare",), "Missing argument"),
        (plan, ("--fly",), "No such option"),
        (plan, ("another.json",), "unexpected extra argument"),
        (plan, ("--global-batch", "-1"), "--global-batch"),
        (plan, ("--global-batch", "many"), "--global-batch"),
        (plan, ("--global-batch", str(2**40)), "--global-batch"),
        (plan, ("--micro-batch", "0"), "--micro-batch"),
        (plan, ("--micro-batch", "-1"), "--micro-batch"),
        (plan, ("--micro-batch", "x"), "--micro-batch"),
        (plan, ("--micro-batch", "99999"), "micro-batch 99999 is larger"),
        (plan, ("--schedule", "2f2b"), "no schedule '2f2b'"),
        (plan, ("--schedule", ""), "no schedule ''"),
        (plan, ("--solver", "oracle"), "no solver 'oracle'"),
        (plan, ("--objective", "fun"), "no objective 'fun'"),
        (plan, ("--allow", "time"), "no family of dims 'time'"),
        (plan, ("--recompute", "often"), "no way to recompute 'often'"),
        (plan, ("--shard", "often"), "no way to shard 'often'"),
        (plan, ("--ranks", "-1"), "--ranks"),
        (plan, ("--ranks", "99"), "99 ranks are asked for"),
        (plan, ("--max-stages", "-1"), "--max-stages"),
        (plan, ("--halo-depth", "-1"), "--halo-depth"),
        (plan, ("--memory", "much"), "'much' is not a size"),
        (plan, ("--memory", "0GB"), "'0GB' is not a size"),
        (plan, ("--memory", "-1GB"), "'-1GB' is not a size"),
        (plan, ("--memory", "9" * 5000 + "GB"), "is not a size"),
        (plan, ("--memory", "999TiB"), "--memory is more than the devices have"),
        (plan, ("--gap", "-0.1"), "--gap"),
        (plan, ("--gap", "nan"), "--gap"),
        (plan, ("--gap", "inf"), "--gap"),
        (plan, ("--time-limit", "-1"), "--time-limit"),
        (plan, ("--time-limit", "nan"), "--time-limit"),
        (plan, ("--time-limit", "soon"), "--time-limit"),
        (plan, ("--pareto", "-1"), "--pareto"),
        (plan, ("--fix", "features"), "is not a rule"),
        (plan, ("--fix", "*=stage:x"), "stage is a whole number"),
        (plan, ("--fix", "*=colour:red"), "no rule is about 'colour'"),
        (plan, ("--fix", "nothing=stage:0"), "matches no layer"),
        (plan, ("--fix", "*=device:n9"), "n9"),
        (plan, ("--forbid", "*=recompute:maybe"), "recompute is yes or no"),
        (plan, ("--forbid", "\x1b[31m"), "is not a rule"),
        (plan, ("-o", "profile.json"), "profile.json is read, and would be replaced"),
        (explain, ("--layer", "nothing"), "nothing"),
        (explain, ("--why-not", "x=1"), "x"),
        (explain, ("--what-if", "n0/cpu0.colour=red"), "colour"),
        (explain, ("--what-if", "devices=-1"), "devices"),
        (explain, ("--what-if", "devices=1000000"), "devices"),
        (explain, ("--what-if", "n0/cpu0.memory=much"), "much"),
        (explain, ("--why-not", "dp=4", "--what-if", "devices=4"), "are asked at once"),
        (explain, ("profile.json", "--profile", "profile.json"), "two profiles are given"),
        (explain, ("--prices", "--time-limit", "0"), "--time-limit"),
        (("compare", "plan.json", "plan.json"), (), "plan.json is given twice"),
        (("export", "plan.json"), (), "Missing option"),
        (("export", "plan.json", "--to", "pdf"), (), "no export format 'pdf'"),
        (("schema", "novel"), (), "no file format 'novel'"),
        (("cluster", "-o", "x.json"), (), "--output needs a cluster file"),
        (("checkpoint",), (), "Missing argument"),
        (run, ("--steps", "0"), "--steps"),
        (run, ("--steps", "many"), "--steps"),
        (run, ("--accumulate", "0"), "--accumulate"),
        (run, ("--keep", "-1"), "--keep"),
        (run, ("--seed", "-1"), "--seed"),
        (run, ("--deadline", "0"), "--deadline"),
        (run, ("--deadline", "nan"), "--deadline"),
        (run, ("--memory-limit", "much"), "'much' is not a size"),
        (run, ("--clip-norm", "-1"), "--clip-norm"),
        (run, ("--clip-norm", "nan"), "--clip-norm"),
        (run, ("--data-from", "nobody"), "no way to read data 'nobody'"),
        (run, ("--data-from", "share"), "--data-from share needs --data"),
        (run, ("--optimizer", "Magic"), "Magic"),
        (run, ("--optimizer", "SGD:lr=fast"), "SGD"),
        (run, ("--optimizer", "SGD:lr"), "SGD"),
        (run, ("--scheduler", "Magic"), "Magic"),
        (run, ("--compile", "magic"), "no compiler 'magic'"),
        (run, ("--eval-every", "2"), "--eval-every needs --eval-data"),
        (run, ("--checkpoint-every", "2"), "--checkpoint-every needs --checkpoint"),
        (run, ("--keep", "2"), "--keep needs --checkpoint"),
        (run, ("--resume",), "--resume needs --checkpoint"),
        (run, ("--hosts", "plan.json"), "torchrun starts the ranks of several hosts"),
        (run, ("--hosts", "nowhere"), "torchrun starts the ranks of several hosts"),
        (run, ("-o", "plan.json"), "plan.json is read, and would be replaced"),
        (("profile", "x:y"), ("--input", "8,x"), "--input '8,x'"),
        (("profile", "x:y"), ("--input", "0,3"), "--input '0,3'"),
        (("profile", "x:y"), ("--input", "8,-3"), "--input '8,-3'"),
        (("profile", "x:y"), ("--arg", "a"), "--arg 'a' is not key=value"),
        (("profile", "x:y"), ("--arg", "a=1", "--arg", "a=2"), "--arg a is given twice"),
        (("profile", "x:y"), ("--arg", "a-b=1"), "is not key=value"),
        (("profile", "x:y"), ("--workers", "-1"), "--workers"),
        (("profile", "x:y"), ("--processes", "-1"), "--processes"),
    )  # fmt: skip
    for command, options, says in found:
        words = (*command, *options)
        name = " ".join(word if len(word) < 40 else f"{word[:9]}..." for word in words)
        yield Hostile(f"command: {name!r}", words, says, USAGE)


def _environments() -> Iterator[Hostile]:
    """What launchers leave in the environment."""
    slurm = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "1"}
    torchrun = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, variables, says in (
        ("Slurm: several tasks", slurm, "srun --ntasks-per-node 1 torchrun"),
        ("Slurm: a number of tasks that is none", {**slurm, "SLURM_NTASKS": "x"}, "one of x tasks"),
        ("torchrun: a rank that is no number", {**torchrun, "RANK": "x"}, "RANK"),
        ("torchrun: a negative rank", {**torchrun, "RANK": "-1"}, "RANK"),
        ("torchrun: a rank beyond the world", {**torchrun, "RANK": "7"}, "RANK"),
        ("torchrun: a world that is no number", {**torchrun, "WORLD_SIZE": "two"}, "WORLD_SIZE"),
        ("torchrun: another number of ranks", {**torchrun, "WORLD_SIZE": "5"}, "2 ranks"),
        ("torchrun: no port", {**torchrun, "MASTER_PORT": "x"}, "MASTER_PORT"),
        ("torchrun: a port beyond all", {**torchrun, "MASTER_PORT": "99999"}, "MASTER_PORT"),
    ):
        yield Hostile(f"environment: {name}", ("run", "plan.json"), says, USAGE, environment=variables)


def _outputs() -> Iterator[Hostile]:
    plan = ("plan", "profile.json", "--time-limit", "0.1", "-o")
    yield Hostile("output: a folder", (*plan, "there"), "it is a folder", prepare=lambda f: (f / "there").mkdir())
    yield Hostile("output: in a folder that is not there", (*plan, "nowhere/x.json"), "cannot write nowhere/x.json")
    yield Hostile("output: in a file", (*plan, "plan.json/x.json"), "cannot write plan.json/x.json")
    yield Hostile("output: a name too long", (*plan, "x" * 300), "File name too long")
    yield Hostile("output: nobody reads the pipe", (*plan, "pipe"), "cannot write pipe", prepare=_pipe)
    yield Hostile("output: a link to itself", (*plan, "loop"), "cannot write loop", prepare=_loop)
    yield Hostile(
        "output: a link to its input", (*plan, "link"), "would be replaced", USAGE,
        prepare=lambda f: (f / "link").symlink_to("profile.json"),
    )  # fmt: skip
    yield Hostile("output: empty", (*plan, ""), "cannot write")
    run = ("run", "plan.json")
    yield Hostile("output: a trace in no folder", (*run, "--trace", "no/x"), "/no/x")
    yield Hostile("output: metrics onto the plan", (*run, "--metrics", "plan.json"), "would be replaced", USAGE)
    yield Hostile("output: a timeline in no folder", (*run, "-o", "no/x"), "/no/x")
    yield Hostile("output: checkpoints in a file", (*run, "--checkpoint", "plan.json"), "is no folder")
    both = ("merge", "profile.json", "profile.json", "-o", "profile.json")
    yield Hostile("output: a merge onto its input", both, "would be replaced", USAGE)
    trace = ("export", "plan.json", "--to", "chrome-trace", "--profile", "profile.json", "-o", "plan.json")
    yield Hostile("output: a trace onto the plan", trace, "would be replaced", USAGE)


def _pipe(folder: Path) -> None:
    os.mkfifo(folder / "pipe")


def _loop(folder: Path) -> None:
    (folder / "loop").symlink_to("loop")


def _checkpoints() -> Iterator[Hostile]:
    yield Hostile("checkpoint: no folder", ("checkpoint", "nowhere"), "has no complete checkpoint")
    yield Hostile("checkpoint: a file", ("checkpoint", "plan.json"), "checkpoint")
    yield Hostile("checkpoint: an empty folder", ("checkpoint", "saved"), "has no complete checkpoint",
                  prepare=lambda folder: (folder / "saved").mkdir())  # fmt: skip
    yield Hostile("checkpoint: a step that there is not", ("checkpoint", ".", "--step", "7"), "checkpoint of step 7")
    yield Hostile("checkpoint: a step as text", ("checkpoint", ".", "--step", "x"), "--step", USAGE)


def main() -> int:
    """Prints the rows that are not good."""
    found = [row for row in rows() if not sys.argv[1:] or any(word in row.name for word in sys.argv[1:])]
    bad = 0
    for row in found:
        with tempfile.TemporaryDirectory(prefix="halopipe-hostile-") as folder:
            fault = verdict(row, Path(folder))
        if fault:
            bad += 1
            sys.stdout.write(f"{row.name}: {fault!r}\n")
    sys.stdout.write(f"{len(found) - bad} of {len(found)} classes are good\n")
    return 0 if not bad else 1


if __name__ == "__main__":
    sys.exit(main())
