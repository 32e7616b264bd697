"""Mutants: every small change of a source file that a test should notice, and a draw of some of them.

Changed are comparisons, arithmetic, numbers, truth values, conditions, ``and`` and ``or``, ``min`` and ``max``, bounds
of slices and ranges, arguments, returned values and whole statements.  Left alone is what no test of behaviour can see:
annotations, decorators, strings, what is logged, the words of errors, ``assert``, ``__all__``, code for type checkers.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
TWINS = {"min": "max", "minimum": "maximum", "amin": "amax", "any": "all", "floor": "ceil"}
TWINS |= {other: one for one, other in TWINS.items()}
WITH_DEFAULT = ("get", "getattr", "next", "pop", "range", "round", "sum")
"""Calls that may lose their last argument; keywords may everywhere."""
UNSEEN_NAMES = ("__all__", "__slots__", "__match_args__")


@dataclass(frozen=True, slots=True)
class Mutant:
    """A file with one change.

    Attributes:
        path: of the file, from the root of the tree.
        line: where the change begins.
        function: the innermost function around it, ``planner/ir/box.py::Box.size``; empty at the top of a module.
        what: the kind of change.
        start, end: what is replaced, in bytes of the file.
        text: what replaces it.
        before: what stood there.
    """

    path: str
    line: int
    function: str
    what: str
    start: int
    end: int
    text: str
    before: str

    def __str__(self) -> str:
        before, after = (" ".join(text.split()) for text in (self.before, self.text.strip("()")))
        same = next((at for at, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), 0)
        at = max(0, same - 20)  # a little of what is left alone
        before, after = before[at : at + 70], after[at : at + 70]
        return f"{self.path}:{self.line}: {self.what}: {before} -> {after}"

    def applied(self, source: bytes) -> bytes:
        """The changed file."""
        return source[: self.start] + self.text.encode() + source[self.end :]


def mutants_of(path: str, source: str) -> list[Mutant]:
    """All mutants of a file, in the order of its lines."""
    found = _File(path, source).mutants(ast.parse(source))
    return sorted(found, key=lambda each: (each.start, each.end, each.text))


def draw(tree: Path, packages: Sequence[str], count: int, seed: int) -> list[Mutant]:
    """Some mutants, as many from each package as it has lines, any line as likely as another.

    More mutants of the same seed include those that fewer are.
    """
    sources = {
        package: {path.relative_to(tree).as_posix(): path.read_text("utf-8") for path in (tree / package).rglob("*.py")}
        for package in packages
    }
    lines = {package: sum(text.count("\n") for text in files.values()) for package, files in sources.items()}
    drawn: list[Mutant] = []
    rest, lines_left = count, sum(lines.values())
    for package, files in sources.items():
        share = round(rest * lines[package] / lines_left)
        rest, lines_left = rest - share, lines_left - lines[package]
        by_line: dict[tuple[str, int], list[Mutant]] = {}
        for path, text in sorted(files.items()):
            for mutant in mutants_of(path, text):
                by_line.setdefault((path, mutant.line), []).append(mutant)
        chance = random.Random(f"{seed} {package}")
        places = sorted(by_line)
        chance.shuffle(places)
        drawn += [chance.choice(by_line[place]) for place in places[:share]]
    return drawn


class _File:
    def __init__(self, path: str, source: str) -> None:
        self._path = path
        self._bytes = source.encode()
        self._starts = [0]
        for line in self._bytes.split(b"\n"):
            self._starts.append(self._starts[-1] + len(line) + 1)

    def mutants(self, node: ast.AST, scope: str = "", function: str = "") -> Iterator[Mutant]:
        """Those of a node and of all below it; a scope is a qualified name with a dot behind it."""
        if isinstance(node, UNSEEN) or (isinstance(node, ast.stmt) and _is_unseen(node)):
            return
        for what, place, text in _changes(node, bool(function)):
            yield self._mutant(function, what, place, text)
        if isinstance(node, ast.Raise):
            return
        if isinstance(node, ast.ClassDef):
            scope = f"{scope}{node.name}."
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            scope, function = f"{scope}{node.name}.<locals>.", f"{scope}{node.name}"
        for name, value in ast.iter_fields(node):
            if name in UNSEEN_FIELDS.get(type(node), ()):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from self.mutants(child, scope, function)

    def _mutant(self, function: str, what: str, place: ast.expr | ast.stmt, text: str) -> Mutant:
        assert place.end_lineno is not None
        assert place.end_col_offset is not None
        start = self._starts[place.lineno - 1] + place.col_offset
        end = self._starts[place.end_lineno - 1] + place.end_col_offset
        before = self._bytes[start:end].decode()
        name = f"{self._path}::{function}" if function else ""
        return Mutant(self._path, place.lineno, name, what, start, end, text, before)


UNSEEN = (ast.Assert, ast.Import, ast.ImportFrom, ast.JoinedStr, ast.Global, ast.Nonlocal)
_OF_FUNCTIONS = ("decorator_list", "returns")
UNSEEN_FIELDS: dict[type[ast.AST], Sequence[str]] = {
    ast.AnnAssign: ("annotation",),
    ast.arg: ("annotation",),
    ast.FunctionDef: _OF_FUNCTIONS,
    ast.AsyncFunctionDef: _OF_FUNCTIONS,
    ast.ClassDef: ("decorator_list", "bases", "keywords"),
}


def _is_unseen(node: ast.stmt) -> bool:
    """Docstrings, names for ``import *``, logging, and what only type checkers or scripts run."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) or (
            isinstance(node.value, ast.Call) and "log" in ast.unparse(node.value.func).partition(".")[0].lower()
        )
    if isinstance(node, ast.Assign):
        return any(isinstance(target, ast.Name) and target.id in UNSEEN_NAMES for target in node.targets)
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith(("TYPE_CHECKING", "== '__main__'"))


Change = tuple[str, ast.expr | ast.stmt, str]  # what, the node that is replaced, by which text


def _changes(node: ast.AST, in_function: bool) -> Iterator[Change]:
    """The changes of one node, without those of the nodes below it."""
    if isinstance(node, ast.stmt):
        yield from _of_statement(node)
    elif isinstance(node, ast.Compare):
        for number, operator in enumerate(node.ops):
            for other in COMPARISONS[type(operator)]:
                ops = [*node.ops[:number], other(), *node.ops[number + 1 :]]
                yield _expression("comparison", node, ast.Compare(node.left, ops, node.comparators))
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        of_types = isinstance(node.op, ast.BitOr) and not in_function
        if not of_types and not _is_text(node.left) and not _is_text(node.right):
            other_operator = OPERATORS[type(node.op)]()
            yield _expression("arithmetic", node, ast.BinOp(node.left, other_operator, node.right))
    elif isinstance(node, ast.BoolOp):
        other_junction = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield _expression("and, or", node, ast.BoolOp(other_junction, node.values))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield _expression("negation", node, node.operand)
    elif isinstance(node, ast.IfExp):
        yield _negated(node.test)
    elif isinstance(node, ast.comprehension):
        yield from map(_negated, node.ifs)
    elif isinstance(node, ast.Constant):
        yield from _of_constant(node)
    elif isinstance(node, ast.Call):
        yield from _of_call(node)
    elif isinstance(node, ast.Slice):
        for bound in (node.lower, node.upper):
            if bound is not None and not isinstance(bound, ast.Constant):
                yield _expression("off by one", bound, ast.BinOp(bound, ast.Add(), ast.Constant(1)))


def _of_statement(node: ast.stmt) -> Iterator[Change]:
    if isinstance(node, ast.If | ast.While):
        yield _negated(node.test)
    elif isinstance(node, ast.Return) and node.value is not None and ast.unparse(node.value) != "None":
        yield "returned value", node.value, "None"
        if isinstance(node.value, ast.BinOp):
            yield "returned value", node.value, "0"
    elif isinstance(node, ast.AugAssign) and type(node.op) in OPERATORS and not _is_text(node.value):
        other = ast.AugAssign(node.target, OPERATORS[type(node.op)](), node.value)
        yield "arithmetic", node, ast.unparse(other)
        yield "statement removed", node, "pass"
    elif isinstance(node, ast.Assign):
        if not any(
            isinstance(target, ast.Name | ast.Tuple) for target in node.targets
        ):  # those would be missed at once
            yield "statement removed", node, "pass"
    elif isinstance(node, ast.Expr | ast.Delete | ast.Raise):
        if not isinstance(getattr(node, "value", None), ast.Yield | ast.YieldFrom):  # the function would be none
            yield "statement removed", node, "pass"
    elif isinstance(node, ast.Break | ast.Continue):
        yield "loop", node, "continue" if isinstance(node, ast.Break) else "break"


def _of_constant(node: ast.Constant) -> Iterator[Change]:
    if isinstance(node.value, bool):
        yield "truth value", node, str(not node.value)
    elif isinstance(node.value, int | float):
        for change in (1, -1):
            yield "number", node, f"({node.value + change!r})"


def _of_call(node: ast.Call) -> Iterator[Change]:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name in TWINS:
        text = ast.unparse(node.func)
        yield "min, max", node.func, text[: len(text) - len(name)] + TWINS[name]
    if name == "range":
        end = node.args[min(1, len(node.args) - 1)]
        if not isinstance(end, ast.Constant):
            yield _expression("off by one", end, ast.BinOp(end, ast.Sub(), ast.Constant(1)))
    for number in range(len(node.keywords)):
        keywords = node.keywords[:number] + node.keywords[number + 1 :]
        yield _expression("argument dropped", node, ast.Call(node.func, node.args, keywords))
    if name in WITH_DEFAULT and len(node.args) > 1 and not node.keywords:
        yield _expression("argument dropped", node, ast.Call(node.func, node.args[:-1], []))


def _negated(node: ast.expr) -> Change:
    return _expression("condition", node, ast.UnaryOp(ast.Not(), node))


def _expression(what: str, place: ast.expr, other: ast.expr) -> Change:
    return what, place, f"({ast.unparse(other)})"


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
