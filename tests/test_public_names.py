"""Each package's `__init__` says what is public, and every public word is there and documented."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path
from types import ModuleType

import pytest

HOME = Path(__file__).resolve().parent.parent
CODE = ("benchmarks", "cuda_ops", "halopipe", "planner", "profiler", "runtime")
FACES = sorted(path for top in CODE for path in (HOME / top).rglob("__init__.py"))


def listed_names(tree: ast.Module) -> list[str] | None:
    """What `__all__` names itself, besides what extras add, or None where a module has none."""
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            return [ast.literal_eval(each) for each in node.value.elts if not isinstance(each, ast.Starred)]
    return None


def order(name: str) -> tuple[int, str]:
    """Constants, then classes, then the rest, each by the alphabet: the order that ruff's RUF022 writes."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


def undocumented(name: str, value: object) -> bool:
    """Whether a class, function or module has no docstring of its own; a dataclass's signature is none."""
    if inspect.isclass(value):
        own = vars(value).get("__doc__")
        return not own or own.startswith(f"{value.__name__}(")
    return (inspect.isroutine(value) or inspect.ismodule(value)) and not inspect.getdoc(value)


def faults(source: str, module: ModuleType) -> list[str]:
    """What is wrong with the public names of a package, given its `__init__`'s text and the imported package."""
    tree = ast.parse(source)
    listed = listed_names(tree)
    if listed is None:  # nor needs one where it has no names; what an extra adds is not a name
        if any(ast.unparse(node).startswith("EXTRA = ") for node in tree.body):
            return []
        unnamed = ("from __future__", "_")
        code = (ast.unparse(node) for node in tree.body if not isinstance(node, ast.Expr))
        return ["has no __all__"] if any(not text.startswith(unnamed) for text in code) else []
    in_order = sorted(set(listed), key=order)
    found = [] if listed == in_order else [f"__all__ is not sorted: {in_order}"]
    found += [f"{name} is listed but not there" for name in listed if not hasattr(module, name)]
    found += [f"{name} has no docstring" for name in listed if undocumented(name, getattr(module, name, None))]
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    defined = (node.name for node in tree.body if isinstance(node, kinds))
    found += [f"{name} is public but not listed" for name in defined if name[0] != "_" and name not in listed]
    return found


@pytest.mark.parametrize("path", FACES, ids=lambda path: ".".join(path.relative_to(HOME).parent.parts))
def test_a_package_lists_its_public_names(path: Path) -> None:
    module = importlib.import_module(".".join(path.relative_to(HOME).parent.parts))
    assert faults(path.read_text("utf-8"), module) == []


def test_every_folder_of_modules_is_a_package() -> None:
    folders = {path.parent for top in CODE for path in (HOME / top).rglob("*.py")}
    assert sorted(str(folder) for folder in folders if not (folder / "__init__.py").exists()) == []
    assert len(folders) == len(FACES) > 0


def package(source: str) -> ModuleType:
    """A package whose `__init__` is `source`."""
    module = ModuleType("package")
    exec(compile(source, "package", "exec", dont_inherit=True), vars(module))
    return module


DATACLASS = "from dataclasses import dataclass\n@dataclass\nclass Plan:\n    stages: int\n"


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("'A docstring'\na = 1", "has no __all__"),
        ("__all__ = ['b', 'a']\na = b = 1", "__all__ is not sorted: ['a', 'b']"),
        ("__all__ = ['Plan', 'Plan']\nPlan = int | str", "__all__ is not sorted: ['Plan']"),
        ("__all__: tuple[str, ...] = ('plan',)", "plan is listed but not there"),
        ("__all__ = ['plan']\ndef plan(): pass", "plan has no docstring"),
        ("class Base:\n    'Base.'\nclass Plan(Base): pass\n__all__ = ['Base', 'Plan']", "Plan has no docstring"),
        (f"__all__ = ['Plan']\n{DATACLASS}", "Plan has no docstring"),
        ("__all__ = []\ndef plan(): 'A plan.'", "plan is public but not listed"),
    ],
)
def test_a_fault_is_named(source: str, fault: str) -> None:
    assert fault in faults(source, package(source))


def test_constants_classes_and_functions_may_stand_together() -> None:
    source = "__all__ = ['SIZE', 'Plan', 'plan']\nSIZE = 1\nclass Plan:\n    'A plan.'\ndef plan(): 'Make a plan.'\n"
    assert faults(source, package(source)) == []
