"""What is made when it is first asked for: names of a package, values by key, and answers of a method."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Concatenate, ParamSpec, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")
Owner = TypeVar("Owner")
Arguments = ParamSpec("Arguments")


class Memo(dict[Key, Value]):
    """Values by key, each made once."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[[Key], Value]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, key: Key) -> Value:
        value = self[key] = self._make(key)
        return value


def memoized(
    method: Callable[Concatenate[Owner, Arguments], Value],
) -> Callable[Concatenate[Owner, Arguments], Value]:
    """A method that is run once for given arguments, which are hashable; its object, without slots, keeps the values.

    An error is not kept.
    """
    store = f"_values_of_{method.__name__}"

    @functools.wraps(method)
    def ask(owner: Owner, /, *arguments: Arguments.args, **named: Arguments.kwargs) -> Value:
        values: dict[object, Value] = owner.__dict__.setdefault(store, {})
        key = (*arguments, *sorted(named.items())) if named else arguments
        if key not in values:
            values[key] = method(owner, *arguments, **named)
        return values[key]

    return ask


def lazily(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package whose names lie in modules of it.

    Args:
        homes: by name, the module below ``package`` that has it.
    """

    def get(name: str) -> Any:
        if name in homes:
            return getattr(import_module(f"{package}.{homes[name]}"), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get
