"""Files that a user may give by mistake, and others by intent: a row a class of ``hostile_inputs``."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halopipe.planning import problem, solve
from planner.ir.codec import MOST_KEYS, dumps, load
from planner.ir.profile import Profile

HOME = Path(__file__).resolve().parents[2]
USAGE = 2
BAD_FILE = 3
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


def files() -> Iterator[Hostile]:
    """All of them: what is in files of ours, then what stands where one is looked for, then files of others."""
    for rows in (_profiles, _plans, _timelines, _texts, _paths, _clusters, _jobs, _ways, _importers):
        yield from rows()


@functools.cache
def profile_text() -> str:
    """A good profile."""
    root = json.loads((HOME / "notebooks/data/vgg16.profile.json").read_text("utf-8"))
    for measured in root["measurements"].values():
        for each in measured:
            each.pop("raw_s", None)
    return json.dumps(root)


@functools.cache
def plan_text() -> str:
    """A good plan that was made from it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        path.write_text(profile_text(), "utf-8")
        profile = load(path, Profile)
    return dumps(solve.solve(problem.make_problem(profile, micro_batch=(4,), time_limit_s=5.0), "even-split"))


@functools.cache
def _timeline_text() -> str:
    return (HOME / "notebooks/data/schedules/1f1b.timeline.json").read_text("utf-8")


_ABSENT = object()


def _edited(text: str, place: str, value: Json) -> str:
    """A document with another value at ``graph.layers.0.name``; ``_ABSENT``: without it; a function: of the old one."""
    root = json.loads(text)
    holder = root
    parts = place.split("/")
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


def _edits(kind: str, text: Callable[[], str], *commands: tuple[str, ...]) -> Callable[[str, str, Json, str], Hostile]:
    """What makes rows of good files with another value in one place; the command lines take turns."""
    turns = itertools.cycle(commands)

    def row(name: str, place: str, value: Json, says: str) -> Hostile:
        write = _writes("bad.json", lambda: _edited(text(), place, value))
        return Hostile(f"{kind}: {name}", next(turns), says, prepare=write)

    return row


_KIND = "AMD EPYC"
_FIRST = f"measurements/{_KIND}/0"


def _profiles() -> Iterator[Hostile]:
    layers = "graph/layers"
    row = _edits("profile", profile_text, ("plan", "bad.json"))
    conv = f"{layers}/2/attributes"
    layer = "graph.layers[2]"
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
    export = ("export", "bad.json", "--to", "chrome-trace", "--profile", "profile.json")
    verbs = (("check", "bad.json"), ("compare", "plan.json", "bad.json"), ("run", "bad.json"), export)
    row = _edits("plan", plan_text, *verbs, ("explain", "bad.json"))
    stage = "decision/stages/0"
    placed = "decision/layers/features.0"
    yield row("no micro-batches", "decision/micro_batches", [], "decision.micro_batches: there is none")
    yield row("micro-batch of 0", "decision/micro_batches", [0, 8], "decision.micro_batches[0]: 0")
    yield row("micro-batch negative", "decision/micro_batches", [-1, 9], "decision.micro_batches[0]: -1")
    yield row("micro-batch huge", "decision/micro_batches", [2**40, 4], "decision.micro_batches[0]")
    yield row("70,000 micro-batches", "decision/micro_batches", [1] * 70_000, "decision.micro_batches: 70000")
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
    command = ("export", "plan.json", "--to", "chrome-trace", "--timeline", "bad.json")
    row = _edits("timeline", _timeline_text, command)
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

    def many(count: int) -> str:
        return ", ".join(f'"k{index}": 1' for index in range(count))

    for kind, good in (("profile", profile_text), ("plan", plan_text), ("timeline", _timeline_text)):
        head = f'{{"halopipe": "{kind}", "version": 1, '
        other = "profile" if kind == "plan" else "plan"
        found: Mapping[str, tuple[str | bytes | Callable[[], str | bytes], str]] = {
            "cut off": (lambda good=good: good()[:-20], "is not JSON"),
            "a list": ("[]", f"is not a halopipe {kind} file"),
            "null": ("null", "it is not a halopipe file"),
            "another format": (json.dumps({"halopipe": other, "version": 1}), "it is a halopipe"),
            "a newer version": (json.dumps({"halopipe": kind, "version": 99}), "was written by a newer halopipe"),
            "version of 0": (json.dumps({"halopipe": kind, "version": 0}), "its version is 0;"),
            "version as text": (json.dumps({"halopipe": kind, "version": "1"}), 'its version is "1";'),
            "version true": (json.dumps({"halopipe": kind, "version": True}), "its version is true;"),
            "nested deeply": (head + '"x": ' + "[" * 10**5 + "]" * 10**5 + "}", "nested too deeply"),
            "a number of 100,000 digits": (head + '"x": ' + "9" * 10**5 + "}", "a number has too many digits"),
            "more keys than a file may have": (head + many(MOST_KEYS + 1) + "}", "keys"),
            "10,000 unknown keys": (head + many(10_000) + "}", "more"),
            "a key 100,000 times": (head + '"x": 1, ' * 10**5 + '"x": 2}', "x: key given twice"),
            "keys with escapes": (head + '"\\u001b[31m": 1}', "unknown key"),
            "1e400": (head + '"x": 1e400}', "unknown key"),
            "half a character": (head + '"\\ud800": 1}', "bad"),
        }
        for name, (text, says) in found.items():
            yield Hostile(f"{kind}: {name}", _READERS[kind], says, prepare=_writes("bad", text))


def _paths() -> Iterator[Hostile]:
    """Paths at which there is no such file, for each format."""

    def link(target: str) -> Callable[[Path], None]:
        return lambda folder: (folder / "bad").symlink_to(target)

    def gigabyte(folder: Path) -> None:
        with (folder / "bad").open("wb") as file:
            file.truncate(2**30)

    for kind, arguments in _READERS.items():
        made: Mapping[str, tuple[Callable[[Path], object] | None, str]] = {
            "missing": (None, "No such file or directory"),
            "a folder": (lambda folder: (folder / "bad").mkdir(), "it is a folder"),
            "a pipe that nobody writes": (lambda folder: os.mkfifo(folder / "bad"), "bad"),
            "an endless device": (link("/dev/zero"), "it is a device"),
            "an empty device": (link("/dev/null"), "it is a device"),
            "a link to itself": (link("bad"), "bad"),
            "a link to nothing": (link("nowhere"), "No such file or directory"),
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
    devices = "devices: [{device: V100-16GB, count: 2}]"
    links = "links: {within-host: NVLink-2, across-hosts: "
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
        "a date that is none": ("a: 2020-99-99\n", "a: unknown key"),
        "tagged as a truth": ("halopipe: cluster\nversion: 1\nhosts: !!bool foo\n", "!!bool is a tag"),
        "tagged as an integer": ('halopipe: cluster\nversion: 1\nhosts: !!int ""\n', "!!int is a tag"),
        "tagged as a date": ("halopipe: cluster\nversion: 1\nhosts: !!timestamp foo\n", "!!timestamp is a tag"),
        "tagged as bytes": ("hosts: !!binary x\n", "!!binary is a tag"),
        "tagged as a set": ("hosts: !!set {x}\n", "!!set is a tag"),
        "a tag of its own": ("hosts: !<x> x\n", "is a tag"),
        "a key that is a number": ("1: x\n", "a key is no text"),
        "half a character": (changed("{name: n,", '{name: "\\ud800",'), "half a character"),
        "5,000 digits of base 16": (
            changed("Ethernet-10G", f"{{link: Ethernet-10G, duplex: 0x{'f' * 5000}}}"),
            "links.across-hosts.duplex: should be true or false",
        ),
        "another format of 5,000 digits": (changed("cluster", f"0x{'f' * 5000}"), "it is a halopipe"),
        "a merge of a number": (_GOOD_CLUSTER + "<<: 3\n", "is not YAML"),
        "hosts by aliases": (
            "halopipe: cluster\nversion: 1\nhosts:\n  - &a {name: x, count: 4096, devices: []}\n" + "  - *a\n" * 6000,
            "devices; 4096 are the most",
        ),
        "3,500 entries of 4,096 devices": (
            changed(devices, f"devices: [{', '.join(['{device: T4, count: 4096}'] * 3500)}]"),
            "devices; 4096 are the most",
        ),
        "5,000 pairs of no host": (
            changed(
                "Ethernet-10G}",
                f"Ethernet-10G, pairs: [{', '.join(['{from: x, to: n0, bandwidth: 1GB/s}'] * 5000)}]}}",
            ).replace("count: 2,", "count: 2000,"),
            "5000 faults",
        ),
        "a number of 10,000 digits": (f"hosts: {'9' * 10_000}\n", "bad.yaml"),
        "a list": ("- a\n", "should be a mapping"),
        "text": ("hello", "should be a mapping"),
        "another format": (changed("halopipe: cluster", "halopipe: plan"), "it is a halopipe plan file"),
        "another version": (changed("version: 1", "version: 2"), "should begin with"),
        "no hosts": ("links: {}\n", "hosts: missing"),
        "hosts that are none": (changed(f"\n  - {{name: n, count: 2, {devices}}}", " []"), "hosts: should be a list"),
        "an unknown key": (_GOOD_CLUSTER + "host: x\n", "host: unknown key; did you mean hosts?"),
        "a host without devices": (changed(devices, "devices: []"), "hosts[0].devices: should be a list"),
        "10,000 devices": (changed("count: 2}]", "count: 10000}]"), "should be at most 4096"),
        "10,000 devices on hosts": (changed("count: 2,", "count: 3000,"), "6000 devices; 4096 are the most"),
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
        "duplex as text": (changed("Ethernet-10G", "{link: Ethernet-10G, duplex: maybe}"), "links.across-hosts.duplex"),
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


def _jobs() -> Iterator[Hostile]:
    good = "halopipe: job\nversion: 1\nplan: plan.json\n"
    found = {
        "a merge of a number": (good + "<<: 3\n", "is not YAML"),
        "a merge of a key that is none": (good + "<<: {stepz: 3}\n", "unknown key stepz; did you mean steps?"),
        "tagged as an integer": (good + 'steps: !!int ""\n', "bad.yaml"),
        "a key that is a number": (good + "1: 2\n", "a key is no text"),
        "half a character": (good + 'data: "\\ud800"\n', "half a character"),
        "steps of 23 digits": (good + f"steps: {10**23}\n", "steps: input should be less than"),
        "steps of 5,000 digits": (good + f"steps: {'9' * 5000}\n", "an integer of 5000 digits"),
        "steps of base 16": (good + f"steps: 0x{'f' * 5000}\n", "steps: input should be a valid integer"),
        "a seed of 23 digits": (good + f"seed: {10**23}\n", "seed: input should be less than"),
        "clipping to infinity": (good + "clip-norm: 1e999\n", "clip-norm: input should be a finite number"),
        "another format of 5,000 letters": (f"halopipe: {'x' * 5000}\n", "it is a halopipe"),
        "a key of 100,000 letters": (good + f"? {'x' * 100_000}\n: 1\n", "unknown key"),
        "no plan": ("halopipe: job\nversion: 1\n", "plan is missing"),
    }
    for name, (text, says) in found.items():
        write = _writes("bad.yaml", text)
        yield Hostile(f"job file: {name}", ("run", "bad.yaml"), says, prepare=write)


def _ways() -> Iterator[Hostile]:
    shape = {"name": "x", "hidden": 8, "ffn": 8, "heads": 2, "layers": 2, "vocab": 8, "seq": 8}
    good = {"transformer": shape, "global_batch": 4, "best": {"ways": {"tensor": 1}}}
    found = {
        "a number": ("3", "it has no best"),
        "no JSON": ("{", "it is not JSON"),
        "nested deeply": ("[" * 10**5, "nested too deeply"),
        "5,000 digits": (f'{{"best": {"9" * 5000}}}', "a number has too many digits"),
        "a best of a number": (json.dumps({**good, "best": 3}), "best.ways: input should be an object, got 3"),
        "ways of a number": (json.dumps({**good, "best": {"ways": 3}}), "best.ways: input should be an object, got 3"),
        "no ways": (json.dumps({**good, "best": {}}), "best.ways: input should be an object"),
        "a degree as text": (json.dumps({**good, "best": {"ways": {"tensor": "2"}}}), "best.ways: tensor"),
        "a degree of 0": (json.dumps({**good, "best": {"ways": {"tensor": 0}}}), "a way of tensor 0"),
        "a pipeline of 1e17": (json.dumps({**good, "best": {"ways": {"pipeline": 10**17}}}), "a way of pipeline"),
        "an unknown part": (json.dumps({**good, "best": {"ways": {"tensors": [1], "x": 1}}}), "best.ways: x: unknown"),
        "no heads": (json.dumps({**good, "transformer": {**shape, "heads": 0}}), "bad.json"),
        "a batch of text": (json.dumps({**good, "global_batch": "x"}), "global_batch: input should be a valid integer"),
    }
    for name, (text, says) in found.items():
        write = _writes("bad.json", text)
        yield Hostile(f"ways file: {name}", ("plan", "profile.json", "--ways", "bad.json"), says, prepare=write)


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
        "5,000 digits": (good.replace("=1.0", f"={'9' * 5000}"), "forward_compute_time"),
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
