"""Which remedies the product has that name a command, a call or an option, read from its sources.

``remedies.json`` beside this says of each by which row of :mod:`benchmarks.robustness.refusals` it is followed, or why
by none.  Read are the strings that reach ``remedies`` of an error: written there, in a constant, a variable or a
function of the module, or by who calls the function that raises.  Not read: options that a variable names.
"""

from __future__ import annotations

import ast
import gc
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

HOME = Path(__file__).resolve().parents[2]
_FLOORS = ("planner", "profiler", "runtime", "cuda_ops", "halopipe")
_NAMES = re.compile(r"\bhalopipe [a-z{]|\bhp\.\w|(?<![\w-])--[a-z]|(?<![\w-])-o\b|\b(leave out|add) \{\}")
_REMEDIES = ("remedies", "remedy")
_ADDS = ("append", "extend", "insert")
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def table() -> Mapping[str, Mapping[str, list[str]]]:
    """``followed``: by row its remedies; ``elsewhere``: by reason those that no row follows."""
    read: dict[str, dict[str, list[str]]] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
    return read


def matches(remedy: str, printed: str) -> bool:
    """Whether what an error printed is this remedy, ``PATH: text``, where ``{}`` stands for what a run fills in."""
    text = remedy.partition(": ")[2]
    if "--" in text and "--" not in printed:  # to who calls it from Python, options are arguments
        text = text.replace("--", "")
        printed = printed.replace("=", " ")
    return re.fullmatch(".*".join(map(re.escape, text.split("{}"))), printed, re.DOTALL) is not None


def remedies_of_product() -> set[str]:
    """Each as ``PATH: text``."""
    gc.disable()  # of a million nodes none is garbage
    try:
        return _remedies_of_product()
    finally:
        gc.enable()


def _remedies_of_product() -> set[str]:
    sources = {
        path.relative_to(HOME).as_posix(): path.read_text("utf-8")
        for floor in _FLOORS
        for path in sorted((HOME / floor).rglob("*.py"))
    }
    modules = {path: _Module(ast.parse(source)) for path, source in sources.items()}
    raising = {name: place for module in modules.values() for name, place in module.raising.items()}
    return {f"{path}: {text}" for path, module in modules.items() for text in module.remedies(raising)}


def remedies_in(source: str) -> set[str]:
    """The text of those that one module gives, ``{}`` where a value is filled in."""
    module = _Module(ast.parse(source))
    return set(module.remedies(module.raising))


class _Module:
    """What leads from the expressions of a module to the strings in them.

    Attributes:
        functions: by name.
        raising: those that are called with remedies: the place of that argument.
        values: what any variable of a name is, or gets added.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.nodes = tuple(ast.walk(tree))
        self.functions = {node.name: node for node in self.nodes if isinstance(node, _Function)}
        self.raising = dict[str, int]()
        for name, function in self.functions.items():
            names = [each.arg for each in function.args.args if each.arg not in ("self", "cls")]
            self.raising.update((name, place) for place, each in enumerate(names) if each in _REMEDIES)
        self.values: dict[str, list[ast.expr]] = defaultdict(list)
        for node in self.nodes:
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr) and node.value is not None:
                for target in node.targets if isinstance(node, ast.Assign) else (node.target,):
                    for each in target.elts if isinstance(target, ast.Tuple) else (target,):
                        self.values[_name(each)].append(node.value)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _ADDS:
                self.values[_name(node.func.value)] += node.args

    def remedies(self, raising: Mapping[str, int]) -> Iterator[str]:
        """All that name a command, a call or an option."""
        for node in self._given(raising):
            yield from filter(_NAMES.search, self._strings(node, set()))

    def _given(self, raising: Mapping[str, int]) -> Iterator[ast.AST]:
        """What is given as remedies."""
        for node in self.nodes:
            match node:
                case ast.Call(func=called, args=arguments, keywords=named):
                    name = called.attr if isinstance(called, ast.Attribute) else _name(called)
                    yield from arguments[2:] if name.endswith("Error") else ()
                    yield from (word.value for word in named if word.arg in _REMEDIES)
                    if name in raising:
                        yield from arguments[raising[name] :][:1]
                case ast.FunctionDef(name=name) if "remed" in name:
                    yield node
                case (
                    ast.Assign(targets=[target], value=value) | ast.AnnAssign(target=target, value=ast.expr() as value)
                ):
                    yield from [value] if _name(target).endswith(("usual", ".remedies")) else ()

    def _strings(self, node: ast.AST, known: set[str]) -> Iterator[str]:
        """Of an expression, and of the variables and functions that it names."""
        match node:
            case ast.Constant() | ast.JoinedStr() | ast.BinOp(op=ast.Add()) | ast.Call() if text := _text(node):
                yield text
            case ast.Name() | ast.Attribute() if (name := _name(node)) not in known:
                known.add(name)
                for value in self.values.get(name, ()):
                    yield from self._strings(value, known)
            case ast.FunctionDef():
                for part in ast.walk(node):
                    if isinstance(part, ast.Return | ast.Yield | ast.YieldFrom) and part.value is not None:
                        yield from self._strings(part.value, known)
            case _:
                name = _name(node.func) if isinstance(node, ast.Call) else ""
                if name in self.functions and name not in known:
                    known.add(name)
                    yield from self._strings(self.functions[name], known)
                for child in ast.iter_child_nodes(node):
                    yield from self._strings(child, known)


def _name(node: ast.AST) -> str:
    """As it is written; ``ast.unparse``, which knows all else, takes long."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=name):
            return f"{_name(value)}.{name}"
    return ast.unparse(node)


def _text(node: ast.AST) -> str:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(_text(each) or "{}" for each in values)
        case ast.FormattedValue(value=ast.Call() as call):
            return _text(call)
        case ast.BinOp(op=ast.Add(), left=left, right=right) if _text(left) or _text(right):
            return (_text(left) or "{}") + (_text(right) or "{}")
        case ast.Call(func=ast.Name(id="command") | ast.Attribute(attr="command") as func, args=[verb, *others]):
            plan = ["{}"] * ast.unparse(func).startswith("sources.")  # which names its plan itself
            return " ".join(("halopipe", _text(verb) or "{}", *plan, *(_text(each) or "{}" for each in others)))
    return ""
