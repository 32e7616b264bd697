"""How a remedy is read and followed, and when it has worked."""

from __future__ import annotations

import functools
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer.main

from benchmarks.robustness.refusals.folders import PYTHON, Ended, lay_out, typed
from benchmarks.robustness.remedies import matches, table
from halopipe.cli.app import app

_STOPS = {
    "of", "and", "or", "for", "which", "to", "then", "with", "without", "on", "is", "in", "where", "again", "lists",
    "says", "writes",
}  # fmt: skip
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
        arguments: of the command line, or :data:`PYTHON` and a script; what :func:`lay_out` makes is in its folder.
        fill: what stands for words of a remedy, beside those in capitals that every remedy may have.
        prepare: makes further files in the folder.
        plan: the command that makes ``plan.json`` anew, for remedies that say to plan with an option, or to profile.
        elsewhere: remedies, by a part of their text, that are not for this machine, and why.
        is_dear: whether it takes workers, and so seconds.
        around: what the machine is like meanwhile, such as one where a package is missing.
        asked: what comes over standard input, to a process of its own.
        is_there: whether remedies are followed where it was refused, whose run has left something.
    """

    name: str
    arguments: tuple[str, ...]
    fill: Mapping[str, str] = field(default_factory=dict)
    prepare: Callable[[Path], object] | None = None
    plan: tuple[str, ...] = ("plan", "profile.json", "--global-batch", "8")
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    is_dear: bool = False
    around: Callable[[Path], AbstractContextManager[object]] = nullcontext
    asked: bytes | None = None
    is_there: bool = False


def verdict(row: Refusal, folder: Path) -> str:
    """Which remedy does not work, and what it came to; empty if all do.  ``folder`` is empty, and the row's own."""
    _prepared(row, folder)
    refused = _tried(row, folder, row.arguments)
    if refused.exit_code in (0, 1):
        return f"it is not refused: exit code {refused.exit_code}: {refused.stderr[-300:]}"
    followed = list[str]()
    for remedy in remedies(refused.stderr):
        if any(part in remedy for part in row.elsewhere):
            continue
        ways = [commands for way in alternatives(remedy) if (commands := commands_of(way, row))]
        for commands in ways:
            if fault := _followed(row, commands, folder if row.is_there else None):
                return f"{remedy!r} does not work: {fault}"
        followed += [remedy] * bool(ways)
    if not followed:
        return f"no remedy names a command: {refused.stderr[-300:]}"
    noted = table()["followed"].get(row.name, ())
    lost = [each for each in noted if not any(matches(each, remedy) for remedy in followed)]
    return f"it does not print {lost}, as remedies.json says, but {followed}" if lost else ""


def _followed(row: Refusal, commands: Sequence[Sequence[str]], there: Path | None) -> str:
    """What is wrong with the first of the commands that fails: ``there``, or in a folder of their own."""
    with tempfile.TemporaryDirectory(prefix="halopipe-remedy-") as name:
        folder = there or Path(name)
        if there is None:
            _prepared(row, folder)
        try:
            for arguments in commands:
                done = _tried(row, folder, arguments)
                if done.exit_code:
                    return f"halopipe {shlex.join(arguments)}: exit code {done.exit_code}: {done.stderr[:800]}"
        finally:
            _forget(Path(name))
    return ""


def _forget(folder: Path) -> None:
    """Takes what was imported from a folder that goes out of ``sys.modules``: no file says any more what it is."""
    for name, module in [*sys.modules.items()]:
        if folder in Path(getattr(module, "__file__", None) or "").parents:
            del sys.modules[name]


def _prepared(row: Refusal, folder: Path) -> None:
    lay_out(folder)
    if row.prepare is not None:
        row.prepare(folder)


def _tried(row: Refusal, folder: Path, arguments: Sequence[str]) -> Ended:
    with row.around(folder):
        return typed(folder, arguments, row.asked)


def remedies(printed: str) -> list[str]:
    """What an error says may be tried."""
    return [line.removeprefix("  try: ") for line in printed.splitlines() if line.startswith("  try: ")]


def alternatives(remedy: str) -> Iterator[str]:
    """The ways that one remedy names, one command or another."""
    first, *others = re.split(r",? or (?=halopipe [a-z])", remedy)
    yield first
    yield from others


@functools.cache
def _verbs() -> Mapping[str, Any]:
    group: Any = typer.main.get_command(app)
    return dict(group.commands)


def _options(verb: str) -> dict[str, bool]:
    """By name, whether a value follows it."""
    return {"--help": False} | {
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
    named = re.compile(rf"\bhalopipe (?={'|'.join(_verbs())})\b").split(text)[1:]
    if named:
        return _whole_commands(named, row)
    if own == PYTHON:
        return _changed_call(row.arguments[1], text)
    other = re.search(rf"\b({'|'.join(_verbs())})(?: again)? (?:with\b|without\b|(?=--))", text)
    verb = other[1] if other is not None else own
    base = row.arguments if verb == own else row.plan if verb == "plan" else (verb, _MISSING.get(verb, ""))
    text, _, replaced = text.partition(" in place of ")
    options = _named_options(verb, text)
    is_less = re.search(r"\bleave\b|\bwithout\b", text) is not None
    if not options:
        return []
    wrong = [word for word in base if word.startswith("--") and word not in _options(verb)]
    gone = [*(name for name, _ in options), *(wrong if "did you mean that" in text else []), *replaced.split()]
    changed = _without(base, gone)
    if not is_less:
        changed += [word for pair in options for word in pair if word]
    return [changed] if verb == own else _again([changed], row)


def _changed_call(script: str, text: str) -> list[list[str]]:
    """The script, its last line a call with the arguments that the text names."""
    pairs = re.findall(r"(?<![\w.])(\w+)=('[^']*'|[\w.]+)", text)
    for name, value in pairs:
        script = f"{re.sub(rf', {name}=[^,)]+', '', script)[:-1]}, {name}={value})"
    return [[PYTHON, script]] if pairs else []


def _whole_commands(named: Sequence[str], row: Refusal) -> list[list[str]]:
    """Of the text behind each ``halopipe``: verb, what it is about, options."""
    commands = list[list[str]]()
    for text in named:
        verb, _, rest = text.partition(" ")
        verb = verb.rstrip(",:;.")
        commands.append([verb, *_completed(verb, _words(rest) if text.startswith(f"{verb} ") else [])])
    return _again(commands, row, is_instead=" in place of " in named[-1])


def _again(commands: list[list[str]], row: Refusal, *, is_instead: bool = False) -> list[list[str]]:
    """What a person types behind them: a plan of a new profile, and what was refused, unless that is among them."""
    own = row.arguments[0]
    verbs = [command[0] for command in commands]
    if is_instead or own in verbs or verbs[-1] in _SHOWS or (own == PYTHON and verbs[-1] == "run"):
        return commands
    if verbs[-1] == "profile" and own != "plan":
        commands = [*commands, list(row.plan)]
    return [*commands, list(row.arguments)]


def _words(text: str) -> list[str]:
    """The words of a command, up to where a sentence goes on."""
    words = []
    for word in _split(text.replace("...", "")):
        bare = word.rstrip(",:;.")
        if not bare:
            continue
        if word.startswith("(") or bare in _STOPS:
            break
        words.append(_ADDS_FILES.get(bare, bare))
        if word[-1:] in ",:;":
            break
    return words


def _split(text: str) -> list[str]:
    """As a shell does, where an apostrophe begins no quotation."""
    return text.split() if text.count("'") % 2 else shlex.split(text)


def _completed(verb: str, words: list[str]) -> list[str]:
    """With what the verb is about, where options alone are named."""
    about = _MISSING.get(verb)
    return [about, *words] if about is not None and (not words or words[0].startswith("-")) else words


def _named_options(verb: str, text: str) -> list[tuple[str, str]]:
    """(option, its value or nothing) of those that the text names; of several ways the first."""
    takes = _options(verb)
    words = _split(text.replace("(", " ").replace(")", " "))
    named: list[tuple[str, str]] = []
    for place, word in enumerate(words):
        bare = word.rstrip(",:;")
        if bare in takes:
            if named and words[place - 1] in ("or", "and,"):
                break
            follows = words[place + 1].rstrip(",:;") if place + 1 < len(words) and bare == word else ""
            value = _ADDS_FILES.get(follows, follows) if takes[bare] else ""
            named.append((bare, value))
    return named


def _without(arguments: Sequence[str], names: Sequence[str]) -> list[str]:
    """The command line less these options and their values."""
    takes = _options(arguments[0])
    left = list[str]()
    is_value = False
    for word in arguments:
        if word in names:
            is_value = takes.get(word, False)
            continue
        if not is_value or word.startswith("--"):  # an option may go without its value
            left.append(word)
        is_value = False
    return left
