"""A time with what is known of its error, and how far a model is off on what it was not fitted to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp, inf

import numpy as np

TABLE = "measured table"
DATASHEET = "datasheet"


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds, with the range that holds eight actual times of ten.

    Attributes:
        low, high: the 10th and the 90th percentile.
        evidence: ``measured table``, ``fitted, held-back error 3 %`` or ``datasheet``, each with more after it.
    """

    seconds: float
    low: float
    high: float
    evidence: str

    def __add__(self, other: Estimate) -> Estimate:
        """One after the other; errors of one model go the same way, so that the ends are added too."""
        worst = weakest((self.evidence, other.evidence))
        return Estimate(self.seconds + other.seconds, self.low + other.low, self.high + other.high, worst)

    def __mul__(self, factor: float) -> Estimate:
        return Estimate(self.seconds * factor, self.low * factor, self.high * factor, self.evidence)

    __rmul__ = __mul__


NOTHING = Estimate(0.0, 0.0, 0.0, TABLE)
"""No time at all; what a sum begins with."""


def weakest(evidences: Iterable[str]) -> str:
    """Of several texts of evidence the one that says least: a data sheet, else the fit with the largest error."""
    return max(evidences, key=_weakness, default=TABLE)


def _weakness(evidence: str) -> tuple[int, float]:
    if evidence.startswith(TABLE):
        return 0, 0.0
    digits = evidence.rstrip(" %").rpartition(" ")[2]
    return (2 if evidence.startswith(DATASHEET) else 1), float(digits) if digits.replace(".", "").isdigit() else 0.0


@dataclass(frozen=True, slots=True)
class HeldBackErrors:
    """Errors on shapes that were held back.

    Attributes:
        num_rows: that were held back, all groups told.
        median, p90: of |log(predicted / measured)|.
        low, high: the 10th and 90th percentile of measured / predicted.
    """

    num_rows: int
    median: float
    p90: float
    low: float
    high: float

    @classmethod
    def of(cls, logs: Sequence[float] | np.ndarray) -> HeldBackErrors:
        """Of log(predicted / measured)."""
        errors = np.asarray(logs, dtype=float)
        low, high = (exp(-float(np.quantile(errors, share))) for share in (0.9, 0.1))
        sizes = np.abs(errors)
        median = float(np.median(sizes))
        p90 = float(np.quantile(sizes, 0.9))
        return cls(len(errors), round(median, 4), round(p90, 4), round(min(low, 1.0), 4), round(max(high, 1.0), 4))

    @property
    def text(self) -> str:
        """``held-back error 3 %``."""
        return f"held-back error {100 * self.median:.2g} %"

    def estimate(self, seconds: float, evidence: str = "") -> Estimate:
        """``seconds`` with this range; ``evidence``: that of a fit, unless another is given."""
        return Estimate(seconds, seconds * self.low, seconds * self.high, evidence or f"fitted, {self.text}")


NEIGHBOURS = 8
_NEAR = 0.05
_FAR = 0.5


@dataclass(frozen=True, slots=True)
class MeasuredNeighbours:
    """What the nearest measured shapes say on top of a curve: their weighted mean, less of it the farther they are.

    Attributes:
        places: of the measured shapes, logarithms of their extents, [rows, extents].
        values: log(curve / measured), [rows].
    """

    places: np.ndarray
    values: np.ndarray

    def at(self, place: np.ndarray) -> tuple[float, float]:
        """The correction at ``place``, and the distance of the nearest shape (a sum of logarithms)."""
        if not len(self.places):
            return 0.0, inf
        far = np.abs(self.places - place).sum(axis=1)
        count = min(NEIGHBOURS, len(far))
        nearest = np.argpartition(far, count - 1)[:count] if count < len(far) else np.arange(count)
        weights = 1 / (far[nearest] + _NEAR)
        # A curve without neighbours within a factor of e**(1 / _FAR) or so counts alone.
        total = float(weights.sum()) + count * _FAR**2
        return float((weights * self.values[nearest]).sum()) / total, float(far[nearest].min())


NO_NEIGHBOURS = MeasuredNeighbours(np.empty((0, 0)), np.empty(0))
