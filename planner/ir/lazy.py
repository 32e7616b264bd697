"""What is made when it is first asked for: names of a package, values by key, and what methods give."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from importlib import import_module
from typing import Any, Concatenate, ParamSpec, TypeVar

K = TypeVar("K")
V = TypeVar("V")
S = TypeVar("S")
P = ParamSpec("P")


class Memo(dict[K, V]):
    """Values by key, each made once."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[[K], V]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, key: K) -> V:
        value = self[key] = self._make(key)
        return value


def once_by(
    key: Callable[..., object] | None,
) -> Callable[[Callable[Concatenate[S, P], V]], Callable[Concatenate[S, P], V]]:
    """A decorator of methods that give the same for arguments of the same ``key``: each value is made once an object.

    The values are in the object's ``__dict__``: its class has no slots.

    Args:
        key: of the object and the method's arguments; None: these arguments.
    """

    def decorated(
        method: Callable[Concatenate[S, P], V],
    ) -> Callable[Concatenate[S, P], V]:
        name = f"values of {method.__qualname__}"

        @wraps(method)
        def looked_up(owner: S, /, *arguments: P.args, **named: P.kwargs) -> V:
            values = owner.__dict__.get(name)
            if values is None:
                values = owner.__dict__[name] = {}
            if key is not None:
                place = key(owner, *arguments, **named)
            else:
                place = (arguments, *named.items()) if named else arguments
            try:
                return values[place]  # type: ignore[no-any-return]  # what the method gave
            except KeyError:
                pass
            value = values[place] = method(owner, *arguments, **named)
            return value

        return looked_up

    return decorated


def once(method: Callable[Concatenate[S, P], V]) -> Callable[Concatenate[S, P], V]:
    """The method, whose value is made once for an object and the same arguments."""
    return once_by(None)(method)


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
