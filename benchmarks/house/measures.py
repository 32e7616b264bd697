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

MOST_PARAMETERS = 6
TABLE = Path(__file__).parents[1] / "results" / "house.csv"
"""A row for each time that the house was measured: the last one is what no later change may exceed."""


def figures(sources: Mapping[str, str]) -> dict[str, int]:
    """What :data:`TABLE` has a column for, of the text of modules by name.

    Statements are counted with those inside others, parameters with ``self``; of names those that more than one class
    has, and functions that bind a name of :data:`VAGUE`.
    """
    statements, classes = dict.fromkeys(PACKAGES, 0), Counter[str]()
    vague = wide = 0
    for module, text in sources.items():
        package = module.partition(".")[0]
        for node in ast.walk(ast.parse(text)) if package in PACKAGES else ():
            statements[package] += isinstance(node, ast.stmt)
            if isinstance(node, ast.ClassDef):
                classes[node.name] += 1
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                vague += not VAGUE.isdisjoint(_bound(node))
                wide += len(_parameters(node)) > MOST_PARAMETERS
    return {
        **{f"{package} statements": count for package, count in statements.items()},
        "homonyms": sum(count > 1 for count in classes.values()),
        "vague names": vague,
        "wide functions": wide,
    }


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
