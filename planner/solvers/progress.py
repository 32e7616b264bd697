"""What a search reports while it runs, and when it must have ended.

The planners of papers know no time limit of their own: whoever calls one says when it must have ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True)
class SearchProgress:
    """How far a search is.

    Attributes:
        best_s: the best plan so far; infinity if there is none yet.
        bound_s: no plan of the searched space is faster.
        gap: best_s / bound_s - 1.
        num_simulated: plans simulated so far.
    """

    best_s: float
    bound_s: float
    gap: float
    num_simulated: int
    elapsed_s: float


Progress = Callable[[SearchProgress], None]

_STOPS: ContextVar[float] = ContextVar("stops", default=inf)


class OutOfTimeError(Exception):
    """Raised by :func:`check_time` out of a programme that was not ready in time."""


@contextmanager
def until(stops: float) -> Iterator[None]:
    """What runs inside ends by ``stops``, by ``time.monotonic``, with :class:`OutOfTimeError` if it must."""
    token = _STOPS.set(min(stops, _STOPS.get()))
    try:
        yield
    finally:
        _STOPS.reset(token)


def check_time() -> None:
    """To be called in loops that may take long."""
    if time.monotonic() > _STOPS.get():
        raise OutOfTimeError
