"""Time for programmes that know no limit of their own: whoever calls a peer says when it must have ended."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from math import inf

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
