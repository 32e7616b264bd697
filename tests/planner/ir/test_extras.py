"""What extras say they add is there and found, and docs/extras.md lists all that may be added."""

from __future__ import annotations

import ast
import re
import statistics
from collections import OrderedDict, UserList
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, ClassVar

import pytest

import halopipe.data
from benchmarks.chains import chain_profile
from halopipe import graphs
from halopipe.cli import app
from halopipe.data import laser_scans
from halopipe.extra import FaceExtra
from planner import solvers
from planner.ir import extras
from planner.ir.errors import UnsupportedModelError, UsageError
from planner.ir.extras import Extra, is_a, public, required
from planner.ir.plan import Block
from planner.ir.planner_extra import PlannerExtra
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
def test_every_name_is_where_its_extra_says(package: str) -> None:
    for extra in extras._extras_of(package):
        tables: list[Any] = [*extra.public.values()]
        tables += [getattr(extra, table) for table in ("solvers", "verbs", "sparse_kernels") if hasattr(extra, table)]
        for place in (place for table in tables for place in table.values()):
            module, _, attribute = place.partition(":")
            assert not attribute or attribute in defined_in(module), place


@pytest.mark.parametrize("package", PACKAGES)
def test_an_extra_adds_what_its_package_asks_for_alone(package: str) -> None:
    """A method that nobody calls would add nothing."""
    kind = page().kind_of(package)
    for extra in extras._extras_of(package):
        assert isinstance(extra, kind)
        own = {name for name in vars(type(extra)) if not name.startswith("_")}
        assert own <= {*dir(kind)}, type(extra)
        assert own, f"{type(extra).__name__} adds nothing"


@pytest.mark.parametrize("package", PACKAGES)
def test_every_folder_of_extras_is_asked(package: str) -> None:
    """One without ``__init__.py`` would silently add nothing."""
    spec = find_spec(f"{package}.extras")
    assert spec is not None
    assert spec.origin is not None
    folders = {path.parent for path in Path(spec.origin).parent.rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


class One(FaceExtra):
    verbs: ClassVar = {"10 first": "statistics:mean"}
    public: ClassVar = {"pack.public": {"mean": "statistics:mean"}, "pack.whole": {"*": "statistics"}}


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One extra of each package."""
    monkeypatch.setattr(extras, "_extras_of", lambda package: (One(),))
    extras.public_names.cache_clear()
    yield
    extras.public_names.cache_clear()


@pytest.mark.usefixtures("added")
def test_an_answer_that_is_needed_and_not_there_is_named() -> None:
    verbs = [extra.verbs.get("10 first") for extra in extras.extras(FaceExtra)]
    assert required([None, *verbs], "pack", "the verb") == "statistics:mean"
    with pytest.raises(UnsupportedModelError, match="of pack/extras is missing: the one that adds reports") as error:
        required([None], "pack", "reports")
    assert error.value.details == ("those that are there: One",)


def test_two_extras_do_not_add_the_same_name() -> None:
    with pytest.raises(UsageError, match="two extras add 'first'"):
        extras.joined([{"first": "statistics:mean"}, {"first": "statistics:median"}])


def test_a_mistake_in_an_extra_is_not_taken_for_its_absence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mistaken_extra.py").write_text("{}['what is not there']\n", "utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    additions = extras.Additions({"first": "mistaken_extra:solve"})
    assert "first" in additions  # which imports nothing
    assert "second" not in additions
    with pytest.raises(KeyError, match="what is not there"):
        additions["first"]


def test_a_value_is_of_a_class_by_name_or_of_one_that_derives_from_it() -> None:
    class Own(UserList[int]):
        pass

    assert is_a(Own(), "collections.UserList")
    assert not is_a(OrderedDict(), "collections.UserList")


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
    assert {"read_scan"} <= {*dir(laser_scans)} or not extras.public_names(laser_scans.__name__)
    names: dict[str, object] = {}
    exec("from halopipe.data import *", names)  # as in a notebook
    assert {"digits", "synthetic", *extras.public_names("halopipe.data")} <= {*names} & {*dir(halopipe.data)}


def test_type_checkers_see_the_names_that_extras_add_to_public_modules() -> None:
    modules = {module for package in PACKAGES for extra in extras._extras_of(package) for module in extra.public}
    for module in modules:
        added = extras.public_names(module)
        whole = added._places.get("*")
        names = {name for name in defined_in(whole) if not name.startswith("_")} if whole else {*added}
        stub = Path(str(import_module(module).__file__)).with_suffix(".pyi")
        assert names <= {each.name for node in ast.walk(ast.parse(stub.read_text("utf-8"))) for each in imported(node)}


def imported(node: ast.AST) -> list[ast.alias]:
    """What a statement imports from a module."""
    return node.names if isinstance(node, ast.ImportFrom) else []


def test_what_is_asked_for_and_no_extra_knows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "_extras_of", lambda package: ())
    profile = chain_profile(3, 2)
    with pytest.raises(UnsupportedModelError, match="the one that adds --allow time"):  # not left out in silence
        solver("best-first")(Problem(profile, 4, allow=("sample", "time"), confidence=0.0), None)
    with pytest.raises(UnsupportedModelError, match="the one that adds the division of a stage in blocks"):
        Division.placed(profile.graph, {}, 1, 2, (Block((profile.graph.layers[0].name,)),))


def page() -> Any:
    """``docs/extras_page.py``."""
    spec = spec_from_file_location("extras_page", "docs/extras_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_has_all_that_may_be_added_and_who_does() -> None:
    there = {path.name for package in PACKAGES for path in Path(package).glob("extras/*")}

    def rows(text: str) -> list[tuple[str, frozenset[str]]]:
        lines = [line.rpartition(" | ") for line in text.splitlines() if line.startswith("| `")]
        return [(line, frozenset(re.findall(r"`([^`]+)`", who)) & there) for line, _, who in lines]

    assert rows(Path("docs/extras.md").read_text("utf-8")) == rows(page().render())


def test_the_core_asks_for_all_that_may_be_added() -> None:
    text = "".join(
        path.read_text("utf-8")
        for package in PACKAGES
        for path in Path(package).rglob("*.py")
        if "extras" not in path.parts and path.name != "extra.py"
    )
    for package in PACKAGES:
        for name, _, _ in page().members(page().kind_of(package)):
            assert re.search(rf"\bextra\.{name}\b", text), name


def test_the_default_of_an_extra_adds_nothing() -> None:
    assert not any(vars(Extra)["public"])
    assert PlannerExtra().kinds_of(chain_profile(2, 1).cluster.devices[0], ()) == {}


def test_no_extra_takes_a_name_of_the_core() -> None:
    verbs = [place.split()[1] for place in (*app._VERBS, *app.added_verbs())]
    assert len(verbs) == len(set(verbs))
    assert len(solvers.names()) == len(set(solvers.names()))
