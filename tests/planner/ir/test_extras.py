"""What extras say they add is there and found by its point, and docs/extras.md has all points."""

from __future__ import annotations

import ast
import inspect
import re
import statistics
from collections import OrderedDict, UserList
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

import halopipe.data
from benchmarks.chains import chain_profile
from halopipe import graphs
from halopipe.cli import app
from halopipe.data import laser_scans
from planner import solvers
from planner.ir import extras
from planner.ir.errors import UnsupportedModelError, UsageError
from planner.ir.extras import addition, hook_of, public
from planner.ir.plan import Block
from planner.ir.problem import Problem
from planner.layers.division import Division
from planner.solvers import solver

PACKAGES = ("planner", "profiler", "runtime", "cuda_ops", "halopipe")


def defined_in(module: str) -> set[str]:
    """The names that a module defines at its top."""
    spec = find_spec(module)
    assert spec is not None, module
    assert spec.origin is not None, module
    names: set[str] = set()
    for node in ast.parse(Path(spec.origin).read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}
    return names


@pytest.mark.parametrize("package", PACKAGES)
def test_every_addition_is_where_its_extra_says(package: str) -> None:
    places = [
        place
        for extra in extras._extras(package)
        for additions in getattr(extra, "HOOKS", {}).values()
        for place in additions.values()
    ]
    for place in places:
        module, _, attribute = place.partition(":")
        assert not attribute or attribute in defined_in(module), place


@pytest.mark.parametrize("package", PACKAGES)
def test_every_folder_of_extras_is_asked(package: str) -> None:
    """One without ``__init__.py`` would silently add nothing."""
    spec = find_spec(f"{package}.extras")
    assert spec is not None
    assert spec.origin is not None
    folders = {path.parent for path in Path(spec.origin).parent.rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One extra of one package, with a point of each kind."""
    extra = ModuleType("pack.extras.one")
    extra.HOOKS = {  # type: ignore[attr-defined]  # as an extra has it
        "solvers": {"first": "statistics:mean"},
        "lists": {"collections.UserList": "statistics:median"},
        "pack.public": {"mean": "statistics:mean"},
        "pack.whole": {"*": "statistics"},
    }
    monkeypatch.setattr(extras, "_extras", lambda package: (extra,))
    extras.hooks.cache_clear()
    yield
    extras.hooks.cache_clear()


@pytest.mark.usefixtures("added")
def test_an_addition_that_is_needed_and_not_there_is_named() -> None:
    assert addition("pack", "solvers", "first") is statistics.mean
    with pytest.raises(UnsupportedModelError, match="is missing: the one that adds 'second' to the solvers"):
        addition("pack", "solvers", "second")


def test_two_extras_do_not_add_the_same_name(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = ModuleType("pack.extras.one"), ModuleType("pack.extras.other")
    one.HOOKS = {"solvers": {"first": "statistics:mean"}}  # type: ignore[attr-defined]  # as an extra has it
    other.HOOKS = {"solvers": {"first": "statistics:median"}}  # type: ignore[attr-defined]  # likewise
    monkeypatch.setattr(extras, "_extras", lambda package: (one, other))
    with pytest.raises(UsageError, match="two extras add 'first' to the solvers"):
        extras.hooks.__wrapped__("pack", "solvers")


def test_a_mistake_in_an_extra_is_not_taken_for_its_absence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mistaken_extra.py").write_text("{}['what is not there']\n", "utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    additions = extras.Additions({"first": "mistaken_extra:solve"})
    assert "first" in additions  # which imports nothing
    assert "second" not in additions
    with pytest.raises(KeyError, match="what is not there"):
        additions["first"]


@pytest.mark.usefixtures("added")
def test_an_addition_is_found_by_the_class_of_a_value_or_one_that_it_derives_from() -> None:
    class Own(UserList[int]):
        pass

    assert hook_of("pack", "lists", Own()) is statistics.median
    assert hook_of("pack", "lists", OrderedDict()) is None


@pytest.mark.usefixtures("added")
def test_public_names_of_a_module_are_those_that_extras_add_there() -> None:
    assert public("pack.public")[0]("mean") is statistics.mean
    assert public("pack.whole")[0]("median") is statistics.median
    assert public("pack.public", lambda name: name)[0]("other") == "other"
    assert public("pack.whole", lambda name: name)[0]("other") == "other"
    for module in ("pack.public", "pack.whole"):
        with pytest.raises(AttributeError, match=rf"module '{module}' has no attribute 'other'"):
            public(module)[0]("other")


def test_names_of_extras_are_listed_with_those_of_their_module() -> None:
    assert {*graphs.__all__} <= {*dir(graphs)}
    assert {"read_scan"} <= {*dir(laser_scans)} or not extras.hooks("halopipe", laser_scans.__name__)
    names: dict[str, object] = {}
    exec("from halopipe.data import *", names)  # as in a notebook
    assert {"digits", "synthetic", *extras.hooks("halopipe", "halopipe.data")} <= {*names} & {*dir(halopipe.data)}


def test_type_checkers_see_the_names_that_extras_add_to_public_modules() -> None:
    for package, point in points_asked():
        if not point.startswith(f"{package}."):
            continue
        added = extras.hooks(package, point)
        whole = added._places.get("*")
        names = {name for name in defined_in(whole) if not name.startswith("_")} if whole else {*added}
        stub = Path(str(import_module(point).__file__)).with_suffix(".pyi")
        assert names <= {each.name for node in ast.walk(ast.parse(stub.read_text("utf-8"))) for each in imported(node)}


def imported(node: ast.AST) -> list[ast.alias]:
    """What a statement imports from a module."""
    return node.names if isinstance(node, ast.ImportFrom) else []


def test_what_is_asked_for_and_no_extra_knows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "hooks", lambda package, point: extras.Additions({}))
    profile = chain_profile(3, 2)
    with pytest.raises(UnsupportedModelError, match="'time' to the ordered axes"):  # not left out in silence
        solver("best-first")(Problem(profile, 4, allow=("sample", "time")), None)
    with pytest.raises(UnsupportedModelError, match="'blocks' to the divisions"):
        Division.placed(profile.graph, {}, 1, 2, (Block((profile.graph.layers[0].name,)),))


PAGE = "docs/extras.md"
ASKING = {"hooks", "addition", "hook_of"}


@dataclass(frozen=True)
class Point:
    """A row of the page: where the core asks, with which arguments (None: an answer is no function), who answers."""

    asked_in: frozenset[str]
    arguments: tuple[str, ...] | None
    answered_by: frozenset[str]


def stated_points() -> dict[tuple[str, str], Point]:
    """Points by package and name, as the page has them."""
    points, package = {}, ""
    for line in Path(PAGE).read_text("utf-8").splitlines():
        if line.startswith("## "):
            package = line.removeprefix("## ")
        elif line.startswith("| `"):
            name, asked_in, answer, _, answered_by = (cell.strip() for cell in line.strip("|").split("|"))
            arguments = re.match(r"`\(([^)]*)\) ->", answer)
            points[package, name.strip("`")] = Point(
                frozenset(re.findall(r"`([^`]+)`", asked_in)),
                tuple(filter(None, arguments[1].split(", "))) if arguments else None,
                frozenset(re.findall(r"`([^`]+)`", answered_by)),
            )
    return points


def points_asked() -> dict[tuple[str, str], set[str]]:
    """Files of the core by the package and the point that they ask at."""
    files: dict[tuple[str, str], set[str]] = {}
    for path in (path for package in PACKAGES for path in Path(package).rglob("*.py") if "extras" not in path.parts):
        text = path.read_text("utf-8")
        for node in ast.walk(ast.parse(text)) if "planner.ir.extras" in text else ():
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            if node.func.id in ASKING:
                package, point = (ast.literal_eval(each) for each in node.args[:2])
                files.setdefault((package, point), set()).add(path.as_posix())
            elif node.func.id == "public":
                module = path.with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
                files.setdefault((path.parts[0], module), set()).add(path.as_posix())
    return files


def test_the_page_has_every_point_at_which_the_core_asks_and_who_answers() -> None:
    points = stated_points()
    assert {point: set(each.asked_in) for point, each in points.items()} == points_asked()
    answered: dict[tuple[str, str], set[str]] = {point: set() for point in points}
    for package in PACKAGES:
        for extra in extras._extras(package):
            for point in getattr(extra, "HOOKS", {}):  # a point that nobody asks at is in no row
                answered.setdefault((package, point), set()).add(extra.__name__.rpartition(".")[2])
    there = {path.name for package in PACKAGES for path in Path(package).glob("extras/*")}
    assert {point: {*each.answered_by} & there for point, each in points.items()} == answered


@pytest.mark.parametrize("package", PACKAGES)
def test_every_answer_takes_the_arguments_that_the_page_states(package: str) -> None:
    for (of, point), stated in stated_points().items():
        for name, answer in extras.hooks(package, point).items() if of == package else ():
            if stated.arguments is None:
                continue
            named = {each.strip("="): None for each in stated.arguments if each.endswith("=")}
            positional = [each for each in stated.arguments if not each.endswith("=")]
            try:
                inspect.signature(answer).bind(*positional, **named)
            except TypeError as error:
                pytest.fail(f"{point}, {name}: {error}")


def test_no_extra_takes_a_name_of_the_core() -> None:
    verbs = [place.split()[1] for place in (*app._VERBS, *extras.hooks("halopipe", "verbs"))]
    assert len(verbs) == len(set(verbs))
    assert len(solvers.names()) == len(set(solvers.names()))
