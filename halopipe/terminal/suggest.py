"""Names that people type: known ones pass, others are answered with the nearest."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from planner.ir.errors import UnknownNameError


def require_known(what: str, wanted: Iterable[str], known: Sequence[str]) -> None:
    """Raises :class:`UnknownNameError`, with the nearest name, for the first of ``wanted`` that is not known."""
    for name in wanted:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            remedies = [f"{near[0]} (did you mean that?)"] if near else []
            raise UnknownNameError(f"no {what} {name!r}", [f"known: {', '.join(known)}"], remedies)
