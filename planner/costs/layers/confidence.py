"""How well a figure is known.

evidence    the least certain, where it was made of several
range       by how much figures that were not measured may be off: what held for measurements that were held back
noise       how measured ones vary, by process and from one pass to the next
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log, sqrt

import numpy as np
from numpy.typing import NDArray

from planner.ir.cluster import DATASHEET, FAMILY, INTERPOLATED, KERNELS, MEASURED, Evidence
from planner.ir.lazy import once
from planner.ir.profile import Measurement, Profile

_FEW = 4  # passes that say nothing of how they follow one another
_QUARTILES = 1.3489795003921634  # interquartile range of the normal distribution, in standard deviations

_FROM_STRONG_TO_WEAK: tuple[Evidence, ...] = (MEASURED, INTERPOLATED, FAMILY, KERNELS, DATASHEET)


def weakest(evidences: Iterable[Evidence]) -> Evidence:
    """The least certain of ``evidences``; ``measured`` if there are none.  Unknown words count as datasheet."""
    rank = max((_strength(evidence) for evidence in evidences), default=0)
    return _FROM_STRONG_TO_WEAK[rank]


def _strength(evidence: Evidence) -> int:
    is_ranked = evidence in _FROM_STRONG_TO_WEAK
    return _FROM_STRONG_TO_WEAK.index(evidence) if is_ranked else len(_FROM_STRONG_TO_WEAK) - 1


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


Ranges = tuple[tuple[str, float, float, float], ...]
"""(kind of layer, part of the time, factor of the first decile, of the last)."""


@dataclass(frozen=True, slots=True, eq=False)
class CostNoise:
    """What is known of how one action's cost varies.

    Attributes:
        levels: by process, the median of its passes over the median of all.
        passes: what each pass differs from its process' level, ``[processes, passes of each]``.
        drift: the part of their variance that stays from a pass to the next.
        measured, spread: part of its time that ``passes`` tell about; standard deviation of the rest.
        ranges: of what was not measured.
    """

    levels: NDArray[np.float64]
    passes: NDArray[np.float64]
    drift: float
    measured: float
    spread: float
    ranges: Ranges

    @property
    def varies(self) -> bool:
        """Whether it does at all."""
        return bool(
            self.spread > 0
            or self.ranges
            or (self.measured > 0 and (np.ptp(self.levels) > 0 or np.ptp(self.passes) > 0))
        )


QUIET = CostNoise(np.ones(1), np.zeros((1, 1)), 0.0, 0.0, 0.0, ())


class MeasuredNoise:
    """A profile's measurements by kind of device and layer."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile

    @once
    def _by_layer(self, kind: str) -> dict[str, list[Measurement]]:
        by_layer: dict[str, list[Measurement]] = {}
        for each in self.profile.measurements.get(kind, ()):
            by_layer.setdefault(each.layer, []).append(each)
        return by_layer

    def nearest(self, kind: str, layers: Sequence[int], samples: float) -> dict[int, Measurement]:
        """Of each of ``layers`` that was measured, at the size nearest in proportion, by index."""
        by_index = {}
        for index in layers:
            of_layer = self._by_layer(kind).get(self.profile.graph.layers[index].name)
            if of_layer:
                by_index[index] = min(of_layer, key=lambda each: (abs(log(each.samples / samples)), each.samples))
        return by_index

    def num_processes(self, kind: str, length: int) -> int:
        """The processes that made ``length`` runs, as many each; 1 if that is not known."""
        hosts = {"", *(device.host for device in self.profile.cluster.devices if device.kind == kind)}
        number = sum(process.host in hosts for process in self.profile.provenance.processes)
        return number if number and length % number == 0 else 1

    def noise(
        self, kind: str, nearest: Mapping[int, Measurement], weights: Mapping[int, float], ranges: Ranges
    ) -> CostNoise:
        """Of an action whose layers were measured as ``nearest`` says, by index.

        Args:
            kind: of device.
            weights: seconds of each of them.
            ranges: of the action, see :class:`CostNoise`.
        """
        total_s = sum(weights.values())
        if total_s <= 0:
            return QUIET
        length = max((len(measurement.raw_s) for measurement in nearest.values()), default=0)
        with_runs = [index for index, measurement in nearest.items() if length and len(measurement.raw_s) == length]
        spread = sum(weights[index] * nearest[index].spread for index in nearest if index not in with_runs) / total_s
        sums = np.sum([nearest[index].raw_s for index in with_runs], axis=0) if with_runs else np.zeros(1)
        if np.median(sums) <= 0:
            return replace(QUIET, spread=spread / _QUARTILES, ranges=ranges)
        runs = (sums / np.median(sums)).reshape(self.num_processes(kind, length), -1)
        levels = np.median(runs, axis=1)
        passes = runs - levels[:, None]
        measured = sum(weights[index] for index in with_runs) / total_s
        return CostNoise(levels, passes, _drift(passes), measured, spread / _QUARTILES, ranges)


def _drift(passes: NDArray[np.float64]) -> float:
    """The autocorrelation of passes that follow one another in a process, where it is more than chance would give.

    Of independent ones it is normal around 0 with a deviation of 1 / sqrt(number) (Bartlett 1946).
    """
    variance = float(np.mean(passes**2))
    if variance <= 0 or passes.shape[1] < _FEW:
        return 0.0
    correlation = float(np.mean(passes[:, 1:] * passes[:, :-1])) / variance
    return min(1.0, correlation) if correlation > 2 / sqrt(passes.size) else 0.0
