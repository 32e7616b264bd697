"""Refusals whose remedy names a command or an option: each remedy, followed to the letter, must work.

    python -m benchmarks.robustness.refusals [WORD...]      # those that have a word in their names

A row is a command line that is refused in a folder of files.  What its error prints behind ``try:`` is read as a person
would: a command is typed, an option is added to the command line that was refused or put in place of its own, what is
to be left out is left out.  Words in capitals stand for what only the user knows, and are filled in.  A remedy works
if every command that it comes to ends with exit code 0; one of another verb is followed by the refused command, again.
Which remedies of the product a row follows is in ``remedies.json``; see :mod:`benchmarks.robustness.remedies`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import typer.main
from typer.testing import CliRunner, Result

from benchmarks.robustness.remedies import matches, table
from benchmarks.robustness.tables import main
from halopipe.cli.app import app
from planner.costs.predict import predict
from planner.ir.codec import dump, plan_fingerprint
from planner.ir.plan import Plan
from planner.ir.timeline import TimelineFile
from tests.halopipe.commands import PROFILE
from tests.planner.factories import chain_decision, plan_of

_STOPS = {"of", "and", "or", "for", "which", "to", "then", "with", "without", "on", "is", "in", "where", "again"}
_ADDS_FILES = {
    "PLAN": "plan.json", "PROFILE": "profile.json", "FOLDER": "folder", "N": "2", "MODEL": "model.py:model",
    "cluster.yaml": "cluster.yaml", "SECONDS": "60", "LAYER": "l1", "FACTORY": "model.py:data", "FILE": "other.json",
}  # fmt: skip
_SHOWS = ("devices", "schema", "ways", "checkpoint")
"""Verbs that show what a remedy speaks of, or make it: the refused command is not typed again."""

_MISSING = {"plan": "profile.json", "run": "plan.json", "profile": "model.py:model"}
"""What a verb is about, where the remedy names options alone."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A command line that is refused.

    Attributes:
        arguments: of the command line; what :func:`lay_out` makes is in its folder.
        fill: what stands for words of a remedy, beside those in capitals that every remedy may have.
        prepare: makes further files in the folder.
        plan: the command that makes ``plan.json`` anew, for remedies that say to plan with an option.
        elsewhere: remedies, by a part of their text, that are not for this machine, and why.
        is_dear: whether it takes workers, and so seconds.
    """

    name: str
    arguments: tuple[str, ...]
    fill: Mapping[str, str] = field(default_factory=dict)
    prepare: Callable[[Path], object] | None = None
    plan: tuple[str, ...] = ("plan", "profile.json", "--global-batch", "8")
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    is_dear: bool = False


def lay_out(folder: Path) -> None:
    """A profile, a plan of it of two stages on one rank each, and both under other names, apart."""
    dump(PROFILE, folder / "profile.json")
    dump(_by_hand(), folder / "plan.json")
    (folder / "apart").mkdir()
    dump(_by_hand(), folder / "apart" / "plan.json")


@functools.cache
def _by_hand() -> Plan:
    return plan_of(PROFILE, chain_decision(PROFILE, cuts=(3,), micro_batches=(2, 2, 2, 2)))


def verdict(row: Refusal, folder: Path) -> str:
    """Which remedy does not work, and what it came to; empty if all do.  ``folder`` is empty, and the row's own."""
    followed = list[str]()
    lay_out(folder)
    if row.prepare is not None:
        row.prepare(folder)
    refused = typed(folder, row.arguments)
    if refused.exit_code in (0, 1):
        return f"it is not refused: exit code {refused.exit_code}: {refused.stderr[-300:]}"
    for remedy in remedies(refused.stderr):
        if any(part in remedy for part in row.elsewhere):
            continue
        with tempfile.TemporaryDirectory(prefix="halopipe-remedy-") as own:
            lay_out(Path(own))
            if row.prepare is not None:
                row.prepare(Path(own))
            commands = commands_of(remedy, row)
            for arguments in commands:
                done = typed(Path(own), arguments)
                if done.exit_code:
                    came_to = f"halopipe {shlex.join(arguments)}: exit code {done.exit_code}"
                    return f"{remedy!r} does not work: {came_to}: {done.stderr[:400]}"
            followed += [remedy] * bool(commands)
    if not followed:
        return f"no remedy names a command: {refused.stderr[-300:]}"
    noted = table()["followed"].get(row.name, ())
    lost = [each for each in noted if not any(matches(each, remedy) for remedy in followed)]
    return f"it does not print {lost}, as remedies.json says, but {followed}" if lost else ""


def typed(folder: Path, arguments: Sequence[str]) -> Result:
    """What a command line comes to in a folder, in this process."""
    environment = dict(os.environ)
    try:
        with contextlib.chdir(folder):
            return CliRunner().invoke(app, list(arguments))
    finally:
        os.environ.clear()
        os.environ.update(environment)


def remedies(printed: str) -> list[str]:
    """What an error says may be tried."""
    return [line.removeprefix("  try: ") for line in printed.splitlines() if line.startswith("  try: ")]


@functools.cache
def _verbs() -> Mapping[str, Any]:
    group: Any = typer.main.get_command(app)
    return dict(group.commands)


def _options(verb: str) -> dict[str, bool]:
    """By name, whether a value follows it."""
    return {
        name: not parameter.is_flag
        for parameter in (_verbs()[verb].params if verb in _verbs() else ())
        if parameter.param_type_name == "option"
        for name in (*parameter.opts, *parameter.secondary_opts)
    }


def commands_of(remedy: str, row: Refusal) -> list[list[str]]:
    """The command lines that a remedy comes to, in order; none: it names neither a command nor an option."""
    text = remedy
    for word, meant in row.fill.items():
        text = re.sub(rf"(?<![\w-]){re.escape(word)}(?![\w-])", meant.replace("\\", ""), text)
    own = row.arguments[0]
    if text == "halopipe --help":
        return [["--help"]]
    named = re.search(rf"\bhalopipe ({'|'.join(_verbs())})\b(?![.\w])(.*)", text)
    if named is not None:
        verb, rest = named[1], _completed(named[1], _words(named[2]))
        if verb == own:
            return [[verb, *rest]]
        return [[verb, *rest], *([] if verb in _SHOWS else [list(row.arguments)])]
    other = re.search(rf"\b({'|'.join(_verbs())})(?: again)? (?:with\b|without\b|(?=--))", text)
    verb = other[1] if other is not None else own
    base = row.arguments if verb == own else row.plan if verb == "plan" else (verb, _MISSING.get(verb, ""))
    text, _, replaced = text.partition(" in place of ")
    options, is_less = _named_options(verb, text), re.search(r"\bleave\b|\bwithout\b", text) is not None
    if not options:
        return []
    wrong = [word for word in base if word.startswith("--") and word not in _options(verb)]
    gone = [*(name for name, _ in options), *(wrong if "did you mean that" in text else []), replaced]
    changed = _without(base, gone)
    if not is_less:
        changed += [word for pair in options for word in pair if word]
    return [changed] if verb == own else [changed, list(row.arguments)]


def _words(text: str) -> list[str]:
    """The words of a command, up to where a sentence goes on."""
    found = []
    for word in shlex.split(re.sub(r"\.\.\.", "", text).replace("'", '"') if text.count("'") % 2 else text):
        bare = word.rstrip(",:;.")
        if word.startswith("(") or bare in _STOPS:
            break
        found.append(_ADDS_FILES.get(bare, bare))
        if word[-1:] in ",:;":
            break
    return found


def _completed(verb: str, words: list[str]) -> list[str]:
    """With what the verb is about, where options alone are named."""
    about = _MISSING.get(verb)
    return [about, *words] if about is not None and (not words or words[0].startswith("-")) else words


def _named_options(verb: str, text: str) -> list[tuple[str, str]]:
    """(option, its value or nothing) of those that the text names; of several ways the first."""
    takes = _options(verb)
    words = shlex.split(text.replace("(", " ").replace(")", " "))
    found: list[tuple[str, str]] = []
    for place, word in enumerate(words):
        bare = word.rstrip(",:;")
        if bare in takes:
            if found and words[place - 1] in ("or", "and,"):
                break
            follows = words[place + 1].rstrip(",:;") if place + 1 < len(words) and bare == word else ""
            value = _ADDS_FILES.get(follows, follows) if takes[bare] else ""
            found.append((bare, value))
    return found


def _without(arguments: Sequence[str], names: Sequence[str]) -> list[str]:
    """The command line less these options and their values."""
    takes, left, skip = _options(arguments[0]), list[str](), False
    for word in arguments:
        if skip:
            skip = False
        elif word in names:
            skip = takes.get(word, False)
        else:
            left.append(word)
    return left


def rows() -> tuple[Refusal, ...]:
    """All of them, those that take workers last."""
    return (*_planning(), *_of_plans(), *_of_other_files(), *_of_serving(), *_of_runs())


_CLUSTER = """halopipe: cluster
version: 1
hosts:
  - {name: n, count: 1, devices: [{device: kind-1, count: 16}]}
links: {within-host: NVLink-2}
"""


def _planning() -> Iterator[Refusal]:
    plan = ("plan", "profile.json", "--global-batch", "8")
    here = {"profile ": "of a model that the row has not, on more devices than there are"}
    asked: tuple[tuple[str, Mapping[str, str], Mapping[str, str]], ...] = (
        ("--zero 3 --shard never", {}, {}),
        ("--zero 7", {}, {}),
        ("--micro-batch 16", {}, {}),
        ("--rate 10 --schedule 1f1b", {}, {}),
        ("--recompute selective", {}, {}),
        ("--ranks 9", {}, here),
        ("--memory 99TiB", {}, {}),
        ("--memory 1KiB", {}, {}),
        ("--gap 2", {}, {}),
        ("--gap nan", {}, {}),
        ("--confidence 2", {}, {}),
        ("--rate nan", {}, {}),
        ("--rate inf", {}, {}),
        ("--quick", {}, {"add --measure-missing": "the devices of the profile are not here"}),
        ("--halo-depth 2", {}, {}),
        ("--proof x.json --ways data=1", {}, {}),
        ("--proof plan.json -o plan.json", {"another name": "proof.json"}, {}),
        ("--proof profile.json", {"-o another name": "--proof proof.json"}, {}),
        ("--fix *=sample:2 --allow spatial", {}, {}),
        ("--solver span-ilp --schedule chimera", {}, {}),
        ("--fix *=recompute:yes --recompute never", {}, {}),
        ("--rate 10 --objective memory", {}, {}),
        ("--rate 10 --solver one-device", {}, {}),
        (
            "--rate 1e9",
            {},
            {"larger requests": "it says what costs less, not how much less", "more devices": "the same"},
        ),
        ("--objective latency --schedule 1f1b", {}, {}),
        ("--shard always --zero 2 --schedule zb-h1", {}, {}),
        ("--ways tensor=2 --schedule 1f1b", {}, {}),
        ("--ways data=2,micro_batch=2 --micro-batch 8", {}, {"micro_batch=...": "a part of a way is no option"}),
        ("--solver span-ilp --objective latency", {}, {}),
        ("--time-limit nan", {}, {}),
        ("--token-slices 4+4", {}, {}),
        ("--allow time", {}, {}),
        ("--measure-missing", {}, {}),
        ("--fly", {"--fix": "--fix *=stage:0"}, {}),
        ("-o profile.json", {"another name": "other.json"}, {}),
    )
    for text, fill, elsewhere in asked:
        yield Refusal(f"plan {text}", (*plan, *shlex.split(text)), fill, _cluster, plan, elsewhere)
    too_many = ("plan", "profile.json", "--global-batch", "16", "--ways", "data=16")
    yield Refusal("plan --ways data=16", too_many, {"FILE": "cluster.yaml"}, _cluster, too_many, here)
    ways = "ways llama2-7b --on a100-dgx --global-batch 64"
    for text, fill in (
        (f"{ways} --gpus 8 --tensor 3", {"another --global-batch or --gpus; leave": "leave"}),
        (f"{ways} --gpus 1", {"more --gpus, another --on, or a smaller --global-batch": "--gpus 8"}),
    ):
        yield Refusal(text, tuple(text.split()), fill)
    for text in ("plan", "plan profile.json other", "plan profile.json --global-batch 99999999"):
        yield Refusal(text, tuple(text.split()))


def _cluster(folder: Path) -> None:
    (folder / "cluster.yaml").write_text(_CLUSTER, "utf-8")


def _timeline(folder: Path) -> None:
    """Of a run of ``plan.json``."""
    predicted = predict(PROFILE, _by_hand().decision)[1]
    measured = replace(predicted, source="measured")
    found = TimelineFile(predicted, measured, (predicted.step_s,), (1.0,), plan=plan_fingerprint(_by_hand()))
    dump(found, folder / "timeline.json")


_OF = "name a file that 'halopipe {}' wrote"
_OF_PLAN = _OF.format("plan")


def _proved(folder: Path) -> None:
    """In place of the plan one with a proof."""
    _must(folder, "plan", "profile.json", "--global-batch", "8", "--proof", "proof.json")


def _of_plans() -> Iterator[Refusal]:
    """Plans explained, compared, drawn, reported, exported."""
    seen = {"PROFILE": "profile.json"}
    timeline = {**seen, "TIMELINE": "timeline.json"}
    for words, fill, prepare in (
        ("explain apart/plan.json --what-if devices=2", {**seen, "...": "--what-if devices=2"}, None),
        ("explain apart/plan.json --prices", {**seen, "...": "--prices --time-limit 1"}, None),
        ("explain apart/plan.json --receptive-field l1", {**seen, "...": "--layer l1"}, None),
        ("explain plan.json --why-not one-devise", {}, None),
        ("explain plan.json --box feature=0:4", {}, None),
        ("explain profile.json --why-not one-device", {_OF_PLAN: "halopipe explain plan.json"}, None),
        ("compare profile.json", {_OF_PLAN: "halopipe compare plan.json"}, None),
        ("check profile.json", {_OF_PLAN: "halopipe check plan.json"}, _proved),
        (
            "check plan.json --proof profile.json",
            {_OF.format("plan --proof"): "halopipe check plan.json --proof proof.json"},
            _proved,
        ),
        (
            "check plan.json --profile plan.json",
            {_OF.format("profile"): "halopipe check plan.json --profile profile.json"},
            _proved,
        ),
        ("explain apart/plan.json --why-not one-device", seen, None),
        (
            "export plan.json --to chrome-trace --timeline plan.json",
            {_OF.format("run"): "halopipe export plan.json --to chrome-trace --timeline timeline.json"},
            _timeline,
        ),
        ("compare apart/plan.json --baselines", seen, None),
        ("draw plan.json -o figure.svg", {}, None),
        ("draw plan.json -o step.pdf", {}, None),
        ("draw apart/plan.json -o step.svg", seen, _timeline),
        ("report apart/plan.json --pareto 2", seen, None),
        ("report plan.json -o report.pdf", {}, None),
        ("report profile.json", {"...": ""}, None),
        ("notebook profile.json --no-run -o strategies.pdf", {}, None),
        ("export apart/plan.json --to chrome-trace", timeline, _timeline),
        ("export apart/plan.json --to torch-pipelining", seen, None),
        ("export plan.json --to torch-pipelining -o pipe.csv", {}, None),
        ("export plan.json --to megatron", {}, None),
        ("export plan.json", {}, None),
    ):
        yield Refusal(words, tuple(shlex.split(words)), fill, prepare)
    two = ("plan", "profile.json", "--global-batch", "8", "--micro-batch", "2")
    yield Refusal(
        "export a stage of two ranks --to torch-pipelining",
        ("export", "plan.json", "--to", "torch-pipelining"), {}, _data_parallel, two,
    )  # fmt: skip


def _data_parallel(folder: Path) -> None:
    """In place of the plan one of a stage on two ranks."""
    decision = chain_decision(PROFILE, micro_batches=(4, 4), ranks=((0, 1),), shares=((2, 2),))
    dump(plan_of(PROFILE, decision), folder / "plan.json")


def _of_other_files() -> Iterator[Refusal]:
    """Files that are another kind's, spoilt, or not there."""
    for words, fill in (
        ("check broken.json", {}),
        ("merge profile.json -o profile.json", {"another name": "other.json"}),
        ("cluster -o out.json", {"FILE": "cluster.yaml", "PROFILE": "profile.json"}),
        ("import graph.txt --device abacus", {}),
        ("devices x", {}),
        ("schema", {}),
        ("run plan.json --write-job job.txt", {}),
        ("fly", {}),
    ):
        yield Refusal(words, tuple(words.split()), fill, _others)


def _others(folder: Path) -> None:
    _cluster(folder)
    (folder / "broken.json").write_text('{"halopipe": "plan", "version": 1, "strange": 0}', "utf-8")
    (folder / "graph.txt").write_text("", "utf-8")


_MODEL = """
from torch import nn, rand, randint, randn
from torch.utils.data import TensorDataset


def model(input_shape=(16, 1, 8, 8)):
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
    return network, (randn(input_shape), randint(10, (input_shape[0],))), nn.CrossEntropyLoss()


def data():
    return TensorDataset(rand(64, 1, 8, 8), randint(10, (64,)))
"""
_PLANNED = ("plan", "profile.json", "--global-batch", "16", "--ranks", "1")


@functools.cache
def _profiled() -> Mapping[str, str]:
    """A module that computes, its profile, and a plan for one device."""
    with tempfile.TemporaryDirectory(prefix="halopipe-refusals-") as name:
        folder = Path(name)
        (folder / "model.py").write_text(_MODEL, "utf-8")
        for arguments in (("profile", "model.py:model", "--quick"), _PLANNED):
            done = typed(folder, arguments)
            if done.exit_code:
                raise RuntimeError(done.stderr)
        return {path.name: path.read_text("utf-8") for path in folder.iterdir() if path.is_file()}


def _trains(folder: Path) -> None:
    """In place of what stands for a profile and a plan, those of a module that computes."""
    for name, text in _profiled().items():
        (folder / name).write_text(text, "utf-8")
    (folder / "folder").mkdir()


def _planned(*options: str) -> Callable[[Path], None]:
    """The same, of another plan."""

    def prepare(folder: Path) -> None:
        _trains(folder)
        _must(folder, *_PLANNED, *options)

    return prepare


def _must(folder: Path, *arguments: str) -> None:
    done = typed(folder, arguments)
    if done.exit_code:
        raise RuntimeError(done.stderr)


def _saved(folder: Path) -> None:
    """The same, with checkpoints of a run of it."""
    _trains(folder)
    _must(folder, "run", "plan.json", "--steps", "4", "--checkpoint", "saved", "--no-learn")


def _of_serving() -> Iterator[Refusal]:
    fill = {"--to FOLDER": "--to answers", "FOLDER": "folder", "another folder": "answers"}
    elsewhere = {
        "--http": "it answers until it is ended",
        "--stdin json": "this process has no standard input to serve from",
        "leave --to": "the same",
    }
    for words in (
        "serve plan.json",
        "serve plan.json --from folder",
        "serve plan.json --from folder --to folder",
        "serve plan.json --stdin json --to answers",
    ):
        yield Refusal(words, tuple(words.split()), fill, _asks, _PLANNED, elsewhere, is_dear=True)


def _asks(folder: Path) -> None:
    """The same, with a request in a folder."""
    _trains(folder)
    np.save(folder / "folder" / "one.npy", np.zeros((16, 1, 8, 8), np.float32))


def _modelled(folder: Path) -> None:
    """The same, and machines of the catalogue."""
    _trains(folder)
    (folder / "cluster.yaml").write_text(_CLUSTER.replace("kind-1", "A100-80GB"), "utf-8")


def _of_runs() -> Iterator[Refusal]:
    within = _planned("--schedule", "pipedream", "--micro-batch", "4")
    forward, saved = _planned("--schedule", "forward"), {"FOLDER": "saved", "another": "another-folder"}
    runs: tuple[tuple[str, Callable[[Path], None], Mapping[str, str]], ...] = (
        ("--keep 2", _trains, {}),
        ("--eval-every 2", _trains, {}),
        ("--restarts 2", _trains, {}),
        ("--profile-folder traces", _trains, {}),
        ("--profile-steps 30:50", _trains, {}),
        ("--checkpoint saved --accumulate 3 --steps 10", _trains, {}),
        ("--check-numerics --accumulate 30 --steps 10", _trains, {}),
        ("--steps 0", _trains, {}),
        ("--data-from share", _trains, {"FACTORY": "model.py:data"}),
        ("--check-numerics", within, {}),
        ("--on-nan skip", within, {}),
        ("--optimizer SGD", forward, {}),
        ("--checkpoint saved", _saved, {"another": ""}),
        ("--resume", _saved, {"--checkpoint checkpoints": "--checkpoint saved"}),
        ("--replan", _trains, {}),
        ("-o plan.json", _trains, {"another name": "other.json"}),
        ("--profile-steps 5:2", _trains, {}),
        (
            "--resume --checkpoint nowhere",
            _saved,
            {"name the folder of 'halopipe run --checkpoint FOLDER'": "--checkpoint saved"},
        ),
        ("--resume --checkpoint saved --steps 4", _saved, {}),
        ("--transport mpi", _trains, {}),
        ("--optimizer SGD:lr=1e10 --steps 5", _trains, {}),
    )
    for words, prepare, fill in runs:
        arguments = ("run", "plan.json", "--no-learn", *words.split())
        elsewhere = {"torchrun": "it is another launcher's", "pip install": "it asks another machine"}
        yield Refusal(f"run {words}", arguments, fill, prepare, _PLANNED, elsewhere, is_dear=True)
    for words in (
        "checkpoint list", "checkpoint walk saved", "checkpoint export saved", "checkpoint saved --step 7",
    ):  # fmt: skip
        fill = {**saved, "...": "weights.pt"}
        yield Refusal(words, tuple(words.split()), fill, _saved, is_dear=True)
    for words in ("--workers 1 --quick --device cuda", "--workers 1 --quick --dtype bfloat16 --autocast bfloat16",
                  "--on a100-dgx --workers 9", "--on cluster.yaml --workers 9"):  # fmt: skip
        profile = ("profile", "model.py:model", *words.split())
        yield Refusal(f"profile {words}", profile, {}, _modelled, is_dear=True)


if __name__ == "__main__":
    sys.exit(
        main("Refusals whose remedies are followed to the letter", rows(), verdict, "refusals have remedies that work")
    )
