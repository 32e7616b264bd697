"""What extras say they add is there, and is found by its point, by a value's class, or as a module's public names."""

from __future__ import annotations

import ast
import statistics
from collections import OrderedDict, UserList
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.chains import chain_profile
from planner.ir import extras
from planner.ir.errors import UnsupportedModelError
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
def test_no_extra_takes_the_place_of_anothers_addition(package: str) -> None:
    """The later one, by the alphabet, would silently be the one that is asked."""
    names = [
        (point, name)
        for extra in extras._extras(package)
        for point, additions in getattr(extra, "HOOKS", {}).items()
        for name in additions
    ]
    assert len(names) == len(set(names))


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
    with pytest.raises(UnsupportedModelError, match="nothing here knows the solvers of second"):
        addition("pack", "solvers", "second")


@pytest.mark.usefixtures("added")
def test_an_addition_is_found_by_the_class_of_a_value_or_one_that_it_derives_from() -> None:
    class Own(UserList[int]):
        pass

    assert hook_of("pack", "lists", Own()) is statistics.median
    assert hook_of("pack", "lists", OrderedDict()) is None


@pytest.mark.usefixtures("added")
def test_public_names_of_a_module_are_those_that_extras_add_there() -> None:
    assert public("pack.public")("mean") is statistics.mean
    assert public("pack.whole")("median") is statistics.median
    assert public("pack.public", lambda name: name)("other") == "other"
    with pytest.raises(AttributeError, match=r"module 'pack\.public' has no attribute 'other'"):
        public("pack.public")("other")


def test_what_is_asked_for_and_no_extra_knows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "hooks", lambda package, point: extras.Additions({}))
    profile = chain_profile(3, 2)
    with pytest.raises(UnsupportedModelError, match="ordered_axes of time"):  # not left out in silence
        solver("best-first")(Problem(profile, 4, allow=("sample", "time")), None)
    with pytest.raises(UnsupportedModelError, match="divisions of blocks"):
        Division.placed(profile.graph, {}, 1, 2, (Block((profile.graph.layers[0].name,)),))
