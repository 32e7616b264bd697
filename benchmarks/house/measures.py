"""The house by its text: how much there is, which names mean two things, which functions take or hold too much.

It is counted in tokens: names, operators, numbers and texts.  Docstrings, comments, how lines are broken and a comma at
the end of a list count nothing, so that writing one name a line costs nothing.

And as a command walks through it: modules of which a function really runs, and the types made on the way.  Both are
read from a trace (``sys.setprofile``, put into every process by a ``sitecustomize`` on the path).  The body of a module
or of a class runs as soon as somebody imports it, and counts as nothing.
"""

from __future__ import annotations

import ast
import csv
import io
import os
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
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
MOST_NAMES = 25
"""Of a function's own."""

TABLE = Path(__file__).parents[1] / "results" / "house.csv"
"""A row for each time that the house was measured: the last one is what no later change may exceed."""


def figures(sources: Mapping[str, str]) -> dict[str, int]:
    """What :data:`TABLE` has a column for, of the text of modules by name.

    Tokens of a package's core are those without its folder ``extras``; parameters count with ``self``.  Packed
    assignments are counted in all modules, all else in those of the packages.
    """
    ours = {module: text for module, text in sources.items() if module.partition(".")[0] in PACKAGES}
    trees = {module: ast.parse(text) for module, text in ours.items()}
    tokens = {module: num_tokens(text, trees[module]) for module, text in ours.items()}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    others = (text for module, text in sources.items() if module not in ours)
    of_others = (node for text in others for node in _statements(ast.parse(text)))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    classes = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    return {
        **{f"{package} tokens": _sum_of(tokens, f"{package}.") for package in PACKAGES},
        **{
            f"{package} core tokens": _sum_of(tokens, f"{package}.") - _sum_of(tokens, f"{package}.extras.")
            for package in PACKAGES
        },
        "homonyms": sum(count > 1 for count in classes.values()),
        "aliases of two meanings": len(_ambiguous_aliases(trees.values(), classes)),
        "vague names": sum(not VAGUE.isdisjoint(_bound(function)) for function in functions),
        "wide functions": sum(len(_parameters(function)) > MOST_PARAMETERS for function in functions),
        "functions of many names": sum(len(set(_bound(function))) > MOST_NAMES for function in functions),
        "packed assignments": sum(is_packed(node) for node in chain(nodes, of_others)),
    }


def num_tokens(text: str, tree: ast.Module) -> int:
    """Names, operators, numbers and texts of a module; a formatted text is one, whatever is in it."""
    docstrings = {
        node.body[0].lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and ast.get_docstring(node, clean=False) is not None
    }
    count = 0
    inside = 0  # formatted texts
    is_comma = False  # before this one
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        if kind == "FSTRING_START":
            count += not inside
            inside += 1
        elif kind == "FSTRING_END":
            inside -= 1
        elif kind == "STRING" and token.start[0] in docstrings:
            continue
        elif kind in ("NAME", "OP", "NUMBER", "STRING") and not inside:
            is_closing = token.string in (")", "]", "}")
            count += 1 - (is_comma and is_closing)
        if kind not in ("NL", "COMMENT"):
            is_comma = token.string == ","
    return count


def is_packed(node: ast.AST) -> bool:
    """Whether several names are each given a value of their own at once; a swap and the parts of one value are not."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    (target, *others) = node.targets
    if others or not isinstance(target, ast.Tuple) or len(target.elts) != len(node.value.elts):
        return False
    names = [ast.unparse(name) for name in target.elts]
    return sorted(names) != sorted(ast.unparse(value) for value in node.value.elts)


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """All of a module, without what is in them: in half the time of ``ast.walk``."""
    pending: list[ast.AST] = [tree]
    for node in pending:  # which grows meanwhile
        pending += [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr)]
    yield from pending


def _sum_of(tokens: Mapping[str, int], prefix: str) -> int:
    return sum(count for module, count in tokens.items() if module.startswith(prefix))


def _ambiguous_aliases(trees: Iterable[ast.Module], classes: Container[str]) -> set[str]:
    """Names that stand for one type here and for another there, or for a class."""
    meanings: dict[str, set[str]] = {}
    for tree in trees:
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id.lstrip("_")
                if name[:1].isupper() and not name.isupper() and "_" not in name:
                    meanings.setdefault(name, set()).add(ast.unparse(node.value))
    return {name for name, values in meanings.items() if len(values) > 1 or name in classes}


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
