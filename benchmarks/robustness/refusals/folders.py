"""Folders of files that commands are refused in, and what a command line, or a script of Python, comes to there.

A profile, a plan, a module that computes, what runs have left; and profiles of networks that the planner refuses
something of, made up: none takes a second.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from typer.testing import CliRunner

from benchmarks.chains import chain_profile
from halopipe.cli.app import app
from halopipe.terminal.output_files import claimed
from planner import predict
from planner.ir.codec import dump, plan_fingerprint
from planner.ir.errors import HalopipeError
from planner.ir.graph import FIXES_SAMPLES, KEEPS_SAMPLES, NEEDS_WHOLE_BATCH
from planner.ir.plan import Plan
from planner.ir.profile import Profile
from planner.ir.timeline import TimelineFile
from runtime.checkpoint.folders import MANIFEST, MANIFEST_HASH
from runtime.checkpoint.manifest import manifest_hash
from tests.halopipe.commands import HOME, PROFILE
from tests.planner import causal
from tests.planner.factories import chain_decision, plan_of
from tests.planner.networks import Network, priced, residual

PYTHON = "python"
"""In place of a verb: what follows is a script."""


@dataclass(frozen=True, slots=True)
class Ended:
    """What a command came to."""

    exit_code: int
    stderr: str


def typed(folder: Path, arguments: Sequence[str], asked: bytes | None = None) -> Ended:
    """What a command line, or a script, comes to in a folder, in this process; in one of its own if it is asked."""
    environment = dict(os.environ)
    try:
        with contextlib.chdir(folder):
            if arguments[0] == PYTHON:
                return _script(arguments[1])
            if asked is not None:
                environment_there = {**os.environ, "PYTHONPATH": str(HOME)}
                command = [sys.executable, "-m", "halopipe", *arguments]
                done = subprocess.run(command, input=asked, env=environment_there, capture_output=True, check=False)
                return Ended(done.returncode, done.stderr.decode())
            result = CliRunner().invoke(app, list(arguments))
            return Ended(result.exit_code, result.stderr)
    finally:
        os.environ.clear()
        os.environ.update(environment)


def _script(text: str) -> Ended:
    """As ``python`` ends that runs it: an error of ours is refused, any other one is a fault."""
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            exec(compile(text, "script.py", "exec"), {"__name__": "__main__"})
    except HalopipeError as error:
        return Ended(error.exit_code, error.render())
    except Exception as error:  # noqa: BLE001 - whatever a script ends with
        return Ended(1, f"{type(error).__name__}: {error}")
    return Ended(0, "")


DATA = Path(__file__).resolve().parents[3] / "tests" / "data"


def lay_out(folder: Path) -> None:
    """A profile, a plan of it of two stages on one rank each, and both under other names, apart."""
    dump(PROFILE, folder / "profile.json")
    dump(by_hand(), folder / "plan.json")
    (folder / "apart").mkdir()
    dump(by_hand(), folder / "apart" / "plan.json")


@functools.cache
def by_hand() -> Plan:
    """Of two stages on one rank each."""
    return plan_of(PROFILE, chain_decision(PROFILE, cuts=(3,), micro_batches=(2, 2, 2, 2)))


CLUSTER = """halopipe: cluster
version: 1
hosts:
  - {name: n, count: 1, devices: [{device: kind-1, count: 16}]}
links: {within-host: NVLink-2}
"""


def cluster(folder: Path) -> None:
    """Machines that are described, of a kind of the profile."""
    (folder / "cluster.yaml").write_text(CLUSTER, "utf-8")
    (folder / "large.yaml").write_text(CLUSTER.replace("kind-1,", "kind-1, memory: 1GiB,"), "utf-8")


def timeline(folder: Path) -> None:
    """Of a run of ``plan.json``."""
    predicted = predict(PROFILE, by_hand().decision)[1]
    measured = replace(predicted, source="measured")
    found = TimelineFile(predicted, measured, (predicted.step_s,), (1.0,), plan=plan_fingerprint(by_hand()))
    dump(found, folder / "timeline.json")


def ways_in_stages(folder: Path) -> None:
    """A way with ZeRO-1, which not every launcher can be told."""
    ways = "llama2-7b --on a100-dgx --gpus 16 --global-batch 64 --pipeline 2 --zero 1 -o ways.json"
    must(folder, "ways", *ways.split())


def proved(folder: Path) -> None:
    """In place of the plan one with a proof."""
    must(folder, "plan", "profile.json", "--global-batch", "8", "--proof", "proof.json")


def of_machines(folder: Path) -> None:
    """In place of the plan one for other machines, which the profile was not measured on."""
    cluster(folder)
    must(folder, "plan", "profile.json", "--cluster", "cluster.yaml")


def badly_proved(folder: Path) -> None:
    """A plan whose proof was changed by hand."""
    proved(folder)
    proof = json.loads((folder / "proof.json").read_text("utf-8"))
    (folder / "proof.json").write_text(json.dumps({**proof, "bound_s": 2 * proof["bound_s"]}), "utf-8")


def proved_apart(folder: Path) -> None:
    """A proved plan, and nobody knows where its profile is."""
    proved(folder)
    (folder / "apart" / "profile.json").unlink(missing_ok=True)
    shutil.move(folder / "profile.json", folder / "apart" / "profile.json")


def faulty(folder: Path) -> None:
    """A plan that was changed by hand: a layer is on a stage before what it reads."""
    plan = json.loads((folder / "plan.json").read_text("utf-8"))
    plan["decision"]["layers"]["l5"]["stage"] = 0
    (folder / "plan.json").write_text(json.dumps(plan), "utf-8")


def two_profiles(folder: Path) -> None:
    """A profile that the plan was not made from."""
    dump(chain_profile(5), folder / "other.json")


@contextmanager
def lacking(name: str, _: Path) -> Iterator[None]:
    """Where a package is not installed."""
    before = {each: module for each, module in sys.modules.items() if each.partition(".")[0] == name}
    sys.modules.update(dict.fromkeys([*before, name]))
    try:
        yield
    finally:
        del sys.modules[name]
        sys.modules.update(before)


def written_by_another(folder: Path) -> AbstractContextManager[object]:
    """While another run writes ``taken.json``."""
    return claimed([folder / "taken.json"], [])


def data_parallel(folder: Path) -> None:
    """In place of the plan one of a stage on two ranks."""
    decision = chain_decision(PROFILE, micro_batches=(4, 4), ranks=((0, 1),), shares=((2, 2),))
    dump(plan_of(PROFILE, decision), folder / "plan.json")


def unmeasured(folder: Path) -> None:
    """In place of the profile one without measurements, beside machines that are not here."""
    elsewhere(folder)
    dump(replace(PROFILE, measurements={}), folder / "profile.json")


def others(folder: Path) -> None:
    """A cluster, a spoilt plan and a graph of no lines."""
    cluster(folder)
    (folder / "broken.json").write_text('{"halopipe": "plan", "version": 1, "strange": 0}', "utf-8")
    (folder / "graph.txt").write_text("", "utf-8")


def machines(**hosts: tuple[str, int]) -> str:
    """A cluster file of hosts, each with a number of devices of a kind, by name: ``kind+kind`` has both."""
    lines = []
    for name, (kinds, count) in hosts.items():
        devices = ", ".join(f"{{device: {kind}, count: {count}}}" for kind in kinds.split("+"))
        lines.append(f"  - {{name: {name}, count: 1, devices: [{devices}]}}")
    links = "within-host: {link: NVLink-2, latency: 10us}, across-hosts: {bandwidth: 8GB/s, latency: 50us}"
    return "\n".join(["halopipe: cluster", "version: 1", "hosts:", *lines, f"links: {{{links}}}", ""])


def elsewhere(folder: Path) -> None:
    """A module, machines that are not here, and what others measured."""
    after()(folder)
    alike = ("A100-40GB", 4)
    unlike = ("V100-16GB", 4)
    (folder / "alike.yaml").write_text(machines(a=alike, b=alike), "utf-8")
    (folder / "unlike.yaml").write_text(machines(a=alike, b=unlike, c=unlike), "utf-8")
    (folder / "T4.yaml").write_text(machines(t=("T4", 2)), "utf-8")
    (folder / "mixed.yaml").write_text(machines(a=("A100-40GB+V100-16GB", 4)), "utf-8")
    (folder / "job.yaml").write_text("halopipe: job\nversion: 1\nplan: plan.json\nstrange: 1\n", "utf-8")
    for name in ("profiles/sailor/layers.csv", "profiles/pipedream/vgg16.graph.txt", "kernels/a40.csv"):
        shutil.copy(DATA / name, folder)


PROFILED = ("profile", "model.py:model", "--quick", "--workers", "2")
PLAN = ("plan", "profile.json", "--global-batch", "16")
PLANNED = (*PLAN, "--ranks", "1")
RUN_SAVED = ("run", "plan.json", "--steps", "4", "--checkpoint", "saved", "--no-learn", "--no-check-first-step")


def after(*commands: tuple[str, ...]) -> Callable[[Path], None]:
    """In place of what stands for a profile and a plan, what these commands make of a module that computes."""

    def prepare(folder: Path) -> None:
        shutil.copytree(_made(commands).name, folder, dirs_exist_ok=True)

    return prepare


@functools.cache
def _made(commands: tuple[tuple[str, ...], ...]) -> tempfile.TemporaryDirectory[str]:
    """A folder in which they were typed, as long as this process lives."""
    made = tempfile.TemporaryDirectory(prefix="halopipe-refusals-")
    folder = Path(made.name)
    if not commands:
        shutil.copyfile(Path(__file__).with_name("sample.py"), folder / "model.py")
        (folder / "folder").mkdir()
        return made
    shutil.copytree(_made(commands[:-1]).name, folder, dirs_exist_ok=True)
    must(folder, *commands[-1])
    return made


def must(folder: Path, *arguments: str) -> None:
    """What has to work before a row begins."""
    done = typed(folder, arguments)
    if done.exit_code:
        raise RuntimeError(done.stderr)


trains = after(PROFILED, PLANNED)
"""A module that computes, its profile, and a plan for one device."""

saved = after(PROFILED, PLANNED, RUN_SAVED)
"""The same, with checkpoints of a run of it."""


replicas = after(PROFILED, (*PLAN, "--solver", "data-parallel", "--ranks", "2"))
"""The same module, on two ranks that have a part of each batch."""

two_stages = after(PROFILED, (*PLAN, "--ranks", "2", "--solver", "even-split"))
"""The same module, on two ranks, one behind the other."""


def of(factory: str, *options: str) -> Callable[[Path], None]:
    """Another module, and its plan for one device."""
    return after(("profile", f"model.py:{factory}", "--quick", "--workers", "1", *options), PLANNED)


of_vectors = of("any_shape", "--input", "16,64")
"""A module that takes any shape, planned for vectors."""

SLICED = (*PLANNED, "--allow", "time", "--token-slices", "6+6")
sliced = after(("profile", "model.py:causal", "--quick", "--workers", "1"), SLICED)
"""A plan that cuts sequences."""

SPANS = (*PLANNED, "--recompute", "selective")
spans = after(("profile", "model.py:causal", "--quick", "--workers", "1"), SPANS)
"""One whose stage computes attention again."""

SLICES = (*PLAN, "--solver", "data-parallel", "--zero", "2", "--shard", "always")
slices = after(PROFILED, SLICES)
"""One of two ranks that have slices of the gradients."""

HIGH = (*PLAN, "--ranks", "2", "--allow", "spatial", "--fix", "last=spatial:2")
high = after(("profile", "model.py:means", "--quick", "--workers", "2"), HIGH)
"""One whose ranks have parts of each picture that the module makes."""

of_clouds = of("cloudy", "--input", "4,40,4")
"""A sparse network, and its plan for one device."""

in_four = after(("profile", "model.py:summed", "--quick", "--workers", "1"), (*PLANNED, "--micro-batch", "4"))
"""A loss that is no mean, in micro-batches of a batch that its module normalises by."""

of_sums = after(("profile", "model.py:linear", "--quick", "--workers", "1"), (*PLANNED, "--micro-batch", "4"))
"""A loss that is the mean of what the module makes, in micro-batches."""

of_another_model = after(PROFILED, PLANNED, RUN_SAVED, ("profile", "model.py:wide", "--quick"), PLANNED)
"""A plan, beside checkpoints of another model's run."""

of_another_run = after(
    PROFILED,
    PLANNED,
    ("run", "plan.json", "--steps", "2", "--no-learn", "--no-check-first-step", "-o", "timeline.json"),
    (*PLANNED, "--micro-batch", "4"),
)
"""A plan, beside the timeline of another one's run."""


def unreadable(folder: Path) -> None:
    """Checkpoints, beside metrics that are none."""
    saved(folder)
    (folder / "bad.jsonl").write_bytes(b"\xff\xfe")


def beside_a_plan(folder: Path) -> None:
    """Checkpoints, beside a folder that looks like one and holds a plan."""
    saved(folder)
    step = folder / "wrong" / "step-4"
    content = (folder / "plan.json").read_bytes()
    step.mkdir(parents=True)
    (step / MANIFEST).write_bytes(content)
    (step / MANIFEST_HASH).write_bytes(manifest_hash(content))


def disordered(folder: Path) -> None:
    """A plan whose program was changed by hand: it ends with what it should begin with."""
    trains(folder)
    plan = json.loads((folder / "plan.json").read_text("utf-8"))
    plan["decision"]["program"] = [row[::-1] for row in plan["decision"]["program"]]
    (folder / "plan.json").write_text(json.dumps(plan), "utf-8")


def without_profile(folder: Path) -> None:
    """A plan whose profile was moved."""
    trains(folder)
    shutil.move(folder / "profile.json", folder / "apart" / "profile.json")


def planned(*options: str) -> Callable[[Path], None]:
    """The same, of another plan."""
    return after(PROFILED, (*PLANNED, *options))


def asking(prepare: Callable[[Path], object], request: np.ndarray, name: str = "one.npy") -> Callable[[Path], None]:
    """What ``prepare`` makes, with a request in a folder."""

    def prepared(folder: Path) -> None:
        prepare(folder)
        write = np.savetxt if name.endswith(".txt") else np.save
        write(folder / "folder" / name, request)

    return prepared


_IMAGES = np.zeros((16, 1, 8, 8), np.float32)
_TOKENS = np.ones((16, 12), np.int64)
_ROWS = np.zeros((16, 64))
asks = asking(trains, _IMAGES)
asks_of_tokens = asking(sliced, _TOKENS)
asks_of_clouds = asking(of_clouds, _TOKENS)
asks_of_its_process = asking(of("of_its_process"), _IMAGES)
"""Of a module that is another one in each process."""
asks_in_text = asking(trains, _ROWS, "one.txt")
asks_two_stages = asking(two_stages, _ROWS, "one.txt")
learning = after(("profile", "model.py:model", "--quick", "--workers", "1", "--local-loss", "2"), PLANNED)
learns = asking(learning, _ROWS, "one.txt")
"""Of a module whose stages learn by losses of their own."""


def has_answered(folder: Path) -> None:
    """The same, and its answer is there already."""
    asks(folder)
    (folder / "saved").mkdir()
    np.save(folder / "saved" / "one.npy", np.zeros(1))
    (folder / "saved" / "one.npy.npy").touch()


def modelled(folder: Path) -> None:
    """The same, and machines of the catalogue."""
    trains(folder)
    (folder / "cluster.yaml").write_text(CLUSTER.replace("kind-1", "A100-80GB"), "utf-8")


def having(name: str) -> Callable[[Path], None]:
    """In place of the profile one of :data:`PROFILES`, beside a description of machines."""

    def prepare(folder: Path) -> None:
        cluster(folder)
        dump(PROFILES[name](), folder / "profile.json")

    return prepare


def _batch_norm_of_rows() -> Profile:
    network = Network(8, 3, 8)
    return priced(network, network.norm(network.head(network.image, 8)))


def _unlinked() -> Profile:
    profile = chain_profile(6, 2, hosts=("n0", "n1"))
    links = {name: link for name, link in profile.cluster.links.items() if name == "within-host"}
    return replace(profile, cluster=replace(profile.cluster, links=links, collectives=()))


def _with_terms() -> Profile:
    layers = list(PROFILE.graph.layers)
    layers[-2] = replace(layers[-2], kind="loss")
    layers[-1] = replace(layers[-1], attributes={**layers[-1].attributes, NEEDS_WHOLE_BATCH: True})
    return replace(PROFILE, graph=replace(PROFILE.graph, layers=tuple(layers)))


def _marked(attribute: str, value: object = True) -> Profile:
    *layers, last = PROFILE.graph.layers
    marked = replace(last, attributes={**last.attributes, attribute: value})
    return replace(PROFILE, graph=replace(PROFILE.graph, layers=(*layers, marked)))


PROFILES: Mapping[str, Callable[[], Profile]] = {
    "attention": causal.profile,
    "batch_norm": lambda: priced(*residual(samples=8)),
    "batch_norm_of_rows": _batch_norm_of_rows,  # of one value a channel and sample
    "keeping": partial(_marked, KEEPS_SAMPLES, "buffer"),  # what a layer sees of the rows of a batch
    "unlinked": _unlinked,  # nothing is known of the link between two hosts
    "small_devices": partial(chain_profile, 6, 2, parameter_bytes=2**20, activation_bytes=2**14, memory_bytes=2**12),
    "with_terms": _with_terms,  # a term of the loss, and a layer behind it that needs the whole batch
    "of_one_size": partial(_marked, FIXES_SAMPLES),
    "of_whole_batches": partial(_marked, NEEDS_WHOLE_BATCH),  # its loss joins samples
}
"""Networks that the planner refuses something of, made up."""
