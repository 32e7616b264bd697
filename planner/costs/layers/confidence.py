"""How well a figure is known, when it was made of several.

By how much figures that were not measured may be off: what held for measurements that were held back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from planner.ir.cluster import DATASHEET, FAMILY, INTERPOLATED, KERNELS, MEASURED, Evidence

_FROM_STRONG_TO_WEAK: tuple[Evidence, ...] = (MEASURED, INTERPOLATED, FAMILY, KERNELS, DATASHEET)


def weakest(evidences: Iterable[Evidence]) -> Evidence:
    """The least certain of ``evidences``; ``measured`` if there are none.  Unknown words count as datasheet."""
    rank = max((_strength(evidence) for evidence in evidences), default=0)
    return _FROM_STRONG_TO_WEAK[rank]


def _strength(evidence: Evidence) -> int:
    known = evidence in _FROM_STRONG_TO_WEAK
    return _FROM_STRONG_TO_WEAK.index(evidence) if known else len(_FROM_STRONG_TO_WEAK) - 1


Range = tuple[float, float]
"""(low, high): factors on a predicted time; one actual in ten lies below, one in ten above."""

LEAST_ERRORS = 8
INTERPOLATED_RANGE: Range = (0.85, 1.2)
FAMILY_RANGE: Range = (0.6, 1.6)
DATASHEET_RANGE: Range = (0.5, 3.0)
"""Where fewer than ``LEAST_ERRORS`` measurements could be held back: about what was found over five networks on one
machine; a datasheet's roof is rarely reached."""


def range_of(ratios: Sequence[float], default: Range) -> Range:
    """From the 10th to the 90th percentile of actual over predicted, and always around 1."""
    if len(ratios) < LEAST_ERRORS:
        return default
    low, high = np.quantile(np.array(ratios), (0.1, 0.9))
    return min(1.0, float(low)), max(1.0, float(high))


def default_range(evidence: Evidence) -> Range:
    """What is said of a figure where nothing was held back."""
    if evidence == MEASURED:
        return 1.0, 1.0
    if evidence in (FAMILY, KERNELS):  # of kernels each measurement has its own
        return FAMILY_RANGE
    return DATASHEET_RANGE if evidence == DATASHEET else INTERPOLATED_RANGE
