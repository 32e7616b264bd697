"""The house by its text: how much there is, which names mean two things, which functions take too much.

Statements are nodes of the syntax tree (``ast.stmt``): how lines are broken does not count.

And as a command walks through it: modules of which a function really runs, and the types made on the way.  Both are
read from a trace (``sys.setprofile``, put into every process by a ``sitecustomize`` on the path).  The body of a module
or of a class runs as soon as somebody imports it, and counts as nothing.
"""

from __future__ import annotations

import ast
import csv
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("planner", "profiler", "runtime", "cuda_ops", "halopipe")
VAGUE = frozenset(["found", "told", "seen", "came", "given", "taken", "again", "words", "said", "known"])
"""Variables that do not say what they hold."""

PRIVATE = {
    "Again": "recompute",
    "Asking": "vote",
    "Binder": "shape specialisation",
    "Binding": "shape specialisation",
    "Board": "status store",
    "Carried": "coalesced messages",
    "Choice": "incumbents",
    "Course": "memory profile",
    "Crossing": "resharding",
    "Current": "weight-gradient queue",
    "Draw": "counter-based random numbers",
    "Excess": "residual",
    "Feed": "data source",
    "Finishing": "gradient synchronisation",
    "Form": "tree of a batch",
    "Found": "what it is",
    "Guard": "NaN guard",
    "Handover": "stage boundary transfer",
    "Held": "usage sample",
    "HeldState": "state dict",
    "Holding": "live memory",
    "Holdings": "live memory",
    "Journal": "event log",
    "Kept": "what it is",
    "Lesson": "calibration",
    "Manner": "run configuration",
    "Option": "sharding spec",
    "Phase": "accumulation step",
    "Place": "rank context",
    "Plumbing": "routing",
    "Pool": "device group",
    "Post": "mailbox",
    "Prices": "cost arrays",
    "PutOff": "deferred weight gradients",
    "Ran": "NaN guard",
    "Resident": "local stage",
    "Rises": "action peaks",
    "Seat": "device assignment",
    "Spans": "recompute segments, stage intervals",
    "Standing": "persistent requests",
    "Supply": "data source",
    "Terms": "job configuration",
    "Together": "what it is",
    "Told": "what it is",
    "Voice": "heartbeat",
    "Way": "batch of messages",
    "Weighing": "loss weighting",
}
"""Names of classes that were this project's own, and the field's term that stands in their place.

Names in a file's schema stand, as users see them: ``planner.ir.plan.Tie``, ``planner.ir.profile.Seen``.
"""

MOST_PARAMETERS = 6
TABLE = Path(__file__).parents[1] / "results" / "house.csv"
"""A row for each time that the house was measured: the last one is what no later change may exceed."""


def figures(sources: Mapping[str, str]) -> dict[str, int]:
    """What :data:`TABLE` has a column for, of the text of modules by name.

    Statements are counted with those inside others, those of a package's core without its folder ``extras``;
    parameters with ``self``; of names those that more than one class has, and functions that bind a name of
    :data:`VAGUE`.
    """
    statements, extras, classes = dict.fromkeys(PACKAGES, 0), Counter[str](), Counter[str]()
    vague = wide = 0
    for module, text in sources.items():
        package = module.partition(".")[0]
        in_extras = module.startswith(f"{package}.extras.")
        for node in ast.walk(ast.parse(text)) if package in PACKAGES else ():
            statements[package] += isinstance(node, ast.stmt)
            extras[package] += in_extras and isinstance(node, ast.stmt)
            if isinstance(node, ast.ClassDef):
                classes[node.name] += 1
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                vague += not VAGUE.isdisjoint(_bound(node))
                wide += len(_parameters(node)) > MOST_PARAMETERS
    return {
        **{f"{package} statements": count for package, count in statements.items()},
        **{f"{package} core": count - extras[package] for package, count in statements.items()},
        "homonyms": sum(count > 1 for count in classes.values()),
        "vague names": vague,
        "wide functions": wide,
    }


def private_words(sources: Mapping[str, str]) -> list[str]:
    """Functions that bind a name of :data:`VAGUE` and classes called by a word of :data:`PRIVATE`, with their lines."""
    places = []
    for module, text in sources.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef) and node.name in PRIVATE:
                places.append(f"{module}:{node.lineno}: {node.name} is private; the term is {PRIVATE[node.name]}")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names = sorted(VAGUE.intersection(_bound(node)))
                places += [f"{module}:{node.lineno}: {node.name} binds {name}: say what it holds" for name in names]
    return places


def rows(path: Path = TABLE) -> list[dict[str, str]]:
    """The table's rows, the oldest first."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    spec = function.args
    return [each.arg for each in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs, spec.vararg, spec.kwarg) if each]


def _bound(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    """Names that the function binds, those of functions inside it left to them."""
    yield from _parameters(function)
    pending = list[ast.AST](function.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        pending.extend(ast.iter_child_nodes(node))


HOME = Path(__file__).parents[2]

WATCH = """
import atexit, os, sys, threading

OURS, OUT = tuple(os.environ["HOUSE_OURS"].split(os.pathsep)), os.environ["HOUSE_OUT"]
IS_FUNCTION = 1  # CO_OPTIMIZED, which bodies of modules and classes lack
entered, made, watched = set(), set(), {}


def note(frame, event, _):
    if event != "call":
        return
    code = frame.f_code
    if code not in watched:
        of_ours = code.co_filename.startswith(OURS) and code.co_flags & IS_FUNCTION and code.co_name[0] != "<"
        watched[code] = "module" if of_ours else "", code.co_name == "__init__"
    is_ours, makes = watched[code]
    if is_ours:
        entered.add(code.co_filename)
    if makes and (of := type(frame.f_locals.get(code.co_varnames[0]))).__module__.split(".")[0] in PACKAGES:
        made.add(f"{of.__module__}.{of.__qualname__}")


def tell():
    sys.setprofile(None)
    loaded = [name for name, module in list(sys.modules.items())
              if (getattr(module, "__file__", None) or "").startswith(OURS)]
    kind = "worker" if "halopipe.launch.worker" in sys.modules else "other"
    with open(os.path.join(OUT, f"{os.getpid()}.{kind}"), "w") as file:
        for word, names in {"loaded": loaded, "entered": entered, "made": made}.items():
            file.writelines(f"{word} {name}\\n" for name in names)


def leave(code, leave=os._exit):  # a worker does not wait for threads that hang
    tell()
    leave(code)


atexit.register(tell)
os._exit = leave
threading.setprofile(note)
sys.setprofile(note)
"""


@dataclass(frozen=True, slots=True)
class Walk:
    """What a command went through.

    Attributes:
        entered: files of ours of which a function ran, in any process.
        made: types of ours of which an object was made, in any process.
        loaded: how many modules of ours each worker loaded.
    """

    entered: frozenset[str]
    made: frozenset[str]
    loaded: tuple[int, ...]


def watch(folder: Path) -> None:
    """Put the trace into ``folder``, from where :func:`walk` starts commands."""
    (folder / "sitecustomize.py").write_text(WATCH.replace("PACKAGES", repr(PACKAGES)))


def walk(folder: Path, *arguments: str, text: str | None = None) -> Walk:
    """``halopipe`` with ``arguments`` in ``folder``, traced; ``text`` is its standard input."""
    with tempfile.TemporaryDirectory() as out:
        ours = os.pathsep.join(f"{HOME / top}{os.sep}" for top in PACKAGES)  # not HOME: an environment may lie in it
        environment = {"HOUSE_OURS": ours, "HOUSE_OUT": out, "PYTHONPATH": f"{folder}:{HOME}"}
        halopipe(folder, environment, *arguments, text=text)
        lines = {path: path.read_text().splitlines() for path in Path(out).iterdir()}
    workers = [each for path, each in lines.items() if path.suffix == ".worker"]
    joined = [line.partition(" ") for each in lines.values() for line in each]
    return Walk(
        frozenset(name for word, _, name in joined if word == "entered"),
        frozenset(name for word, _, name in joined if word == "made"),
        tuple(sum(line.startswith("loaded ") for line in each) for each in workers) or (0,),
    )


def halopipe(folder: Path, environment: Mapping[str, str], *arguments: str, text: str | None = None) -> None:
    """``halopipe`` with ``arguments`` in ``folder``; what it says goes to standard error."""
    command = [sys.executable, "-m", "halopipe", *arguments]
    of_all = {**os.environ, "PYTHONPATH": str(HOME), **environment}
    subprocess.run(command, cwd=folder, env=of_all, check=True, stdout=sys.stderr, input=text, text=True)
