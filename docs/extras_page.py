"""Writes docs/extras.md from the classes that say what extras may add: ``python docs/extras_page.py``."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from planner.ir.extras import Extra, extras

HOME = Path(__file__).resolve().parent.parent
PAGE = HOME / "docs" / "extras.md"
KINDS = {
    "planner": "planner.ir.planner_extra.PlannerExtra",
    "profiler": "profiler.extra.ProfilerExtra",
    "runtime": "runtime.extra.RuntimeExtra",
    "cuda_ops": "cuda_ops.extra.OperatorsExtra",
    "halopipe": "halopipe.extra.FaceExtra",
}
HEAD = """# What extras may add

*This page is made by `python docs/extras_page.py`.*

An extra is a folder of `PACKAGE/extras` (why: [0030](decisions/0030-core-and-extras.md)). In `EXTRA` of its `__init__`
it has an object of the class that is named below, with the methods that it needs; `planner/ir/extras.py` says how. Type
checkers compare them, and lead from the place that asks to all that answer.

- **Order.** Extras are asked in alphabetical order of their folders.
- **One name, one extra.** Two extras that add the same name are refused.
- **Nobody answers.** Where the core needs an answer, it raises `UnsupportedModelError`, which says what the folder that
  is missing adds. Elsewhere it goes on as if the question were not there.
- **A mistake in an extra** (a module that cannot be imported) ends the command with its traceback: it is not taken for
  an extra that is missing.

`public`, of every class: names for users, by the module of the core that has them. Added to:
{public}.
"""


def kind_of(package: str) -> type[Extra]:
    """The class that says what may be added to a package."""
    module, _, name = KINDS[package].rpartition(".")
    kind: type[Extra] = getattr(import_module(module), name)
    return kind


def members(kind: type[Extra]) -> Iterator[tuple[str, str, str]]:
    """(name, arguments and answer, what it is) of all that may be added, in the order of the file."""
    tree = ast.parse(inspect.getsource(kind)).body[0]
    assert isinstance(tree, ast.ClassDef)
    for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, ast.FunctionDef):
            node.args.args = node.args.args[1:]
            answer = ast.unparse(node.returns) if node.returns is not None else ""
            text = ast.get_docstring(node) or ""
            yield node.name, f"({ast.unparse(node.args)}) -> {answer}", " ".join(text.partition("\n\n")[0].split())
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(after, ast.Expr):
            text = inspect.cleandoc(ast.literal_eval(after.value))
            yield node.target.id, "", " ".join(text.partition("\n\n")[0].split())


def render() -> str:
    """The page."""
    modules = sorted({module for package in KINDS for extra in extras(kind_of(package)) for module in extra.public})
    parts = [HEAD.format(public=", ".join(f"`{module}`" for module in modules))]
    for package, name in KINDS.items():
        kind = kind_of(package)
        parts.append(f"## {package}: `{name}`\n\n| | What it adds | Who does |\n|---|---|---|")
        for member, takes, text in members(kind):
            own = [type(extra) for extra in extras(kind) if member in vars(type(extra))]
            folders = ", ".join(f"`{each.__module__.rpartition('.')[2]}`" for each in own)
            shown = f"`{member}{takes}`".replace("|", "\\|")
            parts[-1] += f"\n| {shown} | {text.replace('``', '`')} | {folders} |"
        parts[-1] += "\n"
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
