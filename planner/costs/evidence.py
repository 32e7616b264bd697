"""How well a figure is known, when it was made of several."""

from __future__ import annotations

from collections.abc import Iterable

from planner.ir.cluster import DATASHEET, FAMILY, INTERPOLATED, MEASURED, Evidence

_FROM_STRONG_TO_WEAK: tuple[Evidence, ...] = (MEASURED, INTERPOLATED, FAMILY, DATASHEET)


def weakest(evidences: Iterable[Evidence]) -> Evidence:
    """The least certain of ``evidences``; ``measured`` if there are none.  Unknown words count as datasheet."""
    rank = max((_strength(evidence) for evidence in evidences), default=0)
    return _FROM_STRONG_TO_WEAK[rank]


def _strength(evidence: Evidence) -> int:
    known = evidence in _FROM_STRONG_TO_WEAK
    return _FROM_STRONG_TO_WEAK.index(evidence) if known else len(_FROM_STRONG_TO_WEAK) - 1
