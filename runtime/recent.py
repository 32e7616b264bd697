"""The last values by key, of which only a number is kept."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(dict[K, V]):
    """A mapping that lets go of its oldest value for one more than ``most``: what is made for sizes that come along."""

    __slots__ = ("_most",)

    def __init__(self, most: int = 64) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: K, value: V) -> None:
        if key not in self and len(self) >= self._most:
            del self[next(iter(self))]
        super().__setitem__(key, value)
