"""What the folders of ``PACKAGE/extras`` add to the core of a package.

Each package has one class whose methods are all that an extra may add to it: ``planner.ir.planner_extra.PlannerExtra``,
``profiler.extra.ProfilerExtra``, ``runtime.extra.RuntimeExtra``, ``cuda_ops.extra.OperatorsExtra`` and
``halopipe.extra.FaceExtra``.  By default each of them adds nothing.  The ``__init__`` of an extra's folder has in
``EXTRA`` an object of a class derived from it, with the methods that it needs; they import what they need when they are
called::

    class TilePlans(PlannerExtra):
        def searches(self):
            from planner.extras.tiles.search import SEARCH

            return (SEARCH,)

    EXTRA = TilePlans()

The core asks all of them, ``for extra in extras(PlannerExtra): extra.searches()``, in alphabetical order of their
folders.  A folder that is deleted is not asked, so that the core neither names its extras nor needs them.  Where a plan
or a request cannot do without an answer, the core asks with :func:`required`.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar, cast

from planner.ir.errors import UnsupportedModelError, UsageError

R = TypeVar("R")
E = TypeVar("E", bound="Extra")
ImportPaths = Mapping[str, str]
"""Where things are by their names: ``"module:attribute"``, imported when they are first used."""


class Extra:
    """What an extra of any package may add."""

    public: ClassVar[Mapping[str, ImportPaths]] = MappingProxyType({})
    """Names for users, by the module of the core that has them (:func:`public`); ``*``: all names of a module."""


class Additions(Mapping[str, Any]):
    """Things by name in alphabetical order; each is imported when it is first asked for."""

    def __init__(self, places: ImportPaths) -> None:
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


def extras(kind: type[E]) -> tuple[E, ...]:
    """The extras of the package that ``kind`` is of; none where it has no folder of extras."""
    return cast("tuple[E, ...]", _extras_of(kind.__module__.partition(".")[0]))


@functools.cache
def _extras_of(package: str) -> tuple[Extra, ...]:
    folder = find_spec(f"{package}.extras")
    modules = pkgutil.iter_modules((folder and folder.submodule_search_locations) or ())
    added = (getattr(import_module(f"{package}.extras.{module.name}"), "EXTRA", None) for module in modules)
    return tuple(extra for extra in added if extra is not None)


def required(answers: Iterable[R | None], package: str, what: str) -> R:
    """The first answer that is one, where a plan or a request cannot do without.

    Args:
        what: that it is asked for, in words.

    Raises:
        UnsupportedModelError: no extra has an answer.
    """
    for answer in answers:
        if answer is not None:
            return answer
    raise UnsupportedModelError(
        f"a folder of {package}/extras is missing: the one that adds {what}",
        [f"those that are there: {', '.join(type(extra).__name__ for extra in _extras_of(package)) or 'none'}"],
        [f"install halopipe again, with all folders of {package}/extras"],
    )


def joined(added: Iterable[ImportPaths]) -> Additions:
    """What several extras add, by name.

    Raises:
        UsageError: two of them add the same name.
    """
    places: dict[str, str] = {}
    for name, place in (each for own in added for each in own.items()):
        if places.setdefault(name, place) != place:
            raise UsageError(f"two extras add {name!r}", [places[name], place], ["rename one of them"])
    return Additions(places)


def is_a(value: object, name: str) -> bool:
    """Whether ``value`` is of the class called ``"module.Class"``, or one that derives from it; imports nothing."""
    return any(f"{each.__module__}.{each.__qualname__}" == name for each in type(value).__mro__)


@functools.cache
def public_names(module: str) -> Additions:
    """The names for users that extras add to a module of the core."""
    return joined(extra.public.get(module, {}) for extra in _extras_of(module.partition(".")[0]))


def public(
    module: str, own: Callable[[str], Any] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a module some of whose names extras have (``Extra.public``).

    Args:
        own: the ``__getattr__`` for the other names; None: there are none.
    """
    additions = functools.partial(public_names, module)

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
