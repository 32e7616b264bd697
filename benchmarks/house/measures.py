"""The house by its text: how much there is, which names mean two things, which functions take too much.

Statements are nodes of the syntax tree (``ast.stmt``): how lines are broken does not count.
"""

from __future__ import annotations

import ast
import csv
from collections import Counter
from collections.abc import Iterator, Mapping
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
