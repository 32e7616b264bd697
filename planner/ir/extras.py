"""What the folders of ``PACKAGE/extras`` add to the core of a package.

An extra states in ``HOOKS`` of its ``__init__`` what it adds, by the point at which the core asks and by a name of its
own, as ``"module:attribute"``::

    HOOKS = {"solvers": {"piper": "planner.extras.baselines.piper.solver:solve"}}

The core asks with :func:`hooks`, or for the one that it needs with :func:`addition`, and imports an addition when it is
first needed.  A folder that is deleted is not asked, so that the core neither names its extras nor needs them.

Answers come in alphabetical order of their names.  Two extras that add the same name at a point are refused.  All
points are in ``docs/extras.md``: what is asked, with which arguments, and what is done with the answers.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from planner.ir.errors import UnsupportedModelError, UsageError


class Additions(Mapping[str, Any]):
    """What extras add at one point, by name in alphabetical order; each is imported when it is first asked for."""

    def __init__(self, places: Mapping[str, str]) -> None:
        self._places = dict(sorted(places.items()))
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            self._loaded[name] = pkgutil.resolve_name(self._places[name])
        return self._loaded[name]

    def __contains__(self, name: object) -> bool:
        return name in self._places  # imports nothing, and hides no KeyError of what it would import

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


@functools.cache
def hooks(package: str, point: str) -> Additions:
    """What the extras of ``package`` (``"planner"``) add at ``point``; nothing where it has no extras.

    Raises:
        UsageError: two of them add the same name.
    """
    places: dict[str, str] = {}
    added = (getattr(extra, "HOOKS", {}).get(point, {}) for extra in _extras(package))
    for name, place in (each for own in added for each in own.items()):
        if places.setdefault(name, place) != place:
            raise UsageError(f"two extras add {name!r} to the {point}", [places[name], place], ["rename one of them"])
    return Additions(places)


def addition(package: str, point: str, name: str) -> Any:
    """What an extra adds under ``name``, where a plan or a request cannot do without.

    Raises:
        UnsupportedModelError: no extra does.
    """
    additions = hooks(package, point)
    if name not in additions:
        raise UnsupportedModelError(
            f"a folder of {package}/extras is missing: the one that adds {name!r} to the {point}",
            [f"those that are there add: {', '.join(additions) or 'nothing'}"],
            [f"install halopipe again, with all folders of {package}/extras"],
        )
    return additions[name]


def hook_of(package: str, point: str, value: object) -> Any:
    """The addition whose name is the class of ``value``, or one that it derives from (``"module.Class"``); None: none.

    Nothing is imported for a class that no extra names.
    """
    additions = hooks(package, point)
    names = (f"{each.__module__}.{each.__qualname__}" for each in type(value).__mro__)
    return next((additions[name] for name in names if name in additions), None)


def public(
    module: str, own: Callable[[str], Any] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a module whose names extras have, at the point of the module's own name.

    They add names there, or ``*``: a module, all of whose names are meant (``"*": "halopipe.extras.figures.figures"``).

    Args:
        own: the ``__getattr__`` for the other names; None: there are none.
    """
    additions = functools.partial(hooks, module.partition(".")[0], module)

    def get(name: str) -> Any:
        if name in additions():
            return additions()[name]
        if "*" in additions() and hasattr(additions()["*"], name):
            return getattr(additions()["*"], name)
        if own is not None:
            return own(name)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    def names() -> list[str]:
        added = dir(additions()["*"]) if "*" in additions() else additions()
        return sorted({*(own_names := vars(import_module(module))), *own_names.get("__all__", ()), *added})

    return get, names


@functools.cache
def _extras(package: str) -> tuple[Any, ...]:
    """The packages in the folder ``extras`` of a package, which import nothing heavy."""
    folder = find_spec(f"{package}.extras")
    modules = pkgutil.iter_modules((folder and folder.submodule_search_locations) or ())
    return tuple(import_module(f"{package}.extras.{module.name}") for module in modules)
