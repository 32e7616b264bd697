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
    """What :data:`TABLE` has a column for, of the text of modules by name."""
    product = {module: ast.parse(text) for module, text in sources.items() if module.partition(".")[0] in PACKAGES}
    by_package = {
        f"{package} statements": sum(
            statements(tree) for module, tree in product.items() if module.partition(".")[0] == package
        )
        for package in PACKAGES
    }
    return {
        **by_package,
        "homonyms": len(homonyms(product)),
        "vague names": sum(len(assigns_vaguely(tree)) for tree in product.values()),
        "wide functions": sum(len(wide(tree)) for tree in product.values()),
    }


def statements(tree: ast.Module) -> int:
    """Statements of a module, those inside others too."""
    return sum(isinstance(node, ast.stmt) for node in ast.walk(tree))


def homonyms(trees: Mapping[str, ast.Module]) -> dict[str, int]:
    """Names that more than one class has, and how many have it."""
    names = Counter(node.name for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    return {name: count for name, count in names.items() if count > 1}


def assigns_vaguely(tree: ast.Module) -> list[str]:
    """Functions that bind a name of :data:`VAGUE`: a variable, a parameter, or what a loop runs over."""
    return [function.name for function in functions(tree) if any(name in VAGUE for name in _bound(function))]


def wide(tree: ast.Module) -> list[str]:
    """Functions of more than :data:`MOST_PARAMETERS` parameters, ``self`` among them."""
    return [function.name for function in functions(tree) if len(_parameters(function)) > MOST_PARAMETERS]


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All of them, methods and nested ones too."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


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
