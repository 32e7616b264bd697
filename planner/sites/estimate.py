"""What dividing an example cloud among ranks costs, before any micro-batch is drawn: for the planner's search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.sites.arrangement import TOLERANCE, arrange, cut
from planner.sites.balance import Halo, SiteMap, halo, imbalance, rank_work
from planner.sites.keys import Floats
from planner.sites.partition import Level, Load, block_work


@dataclass(frozen=True, slots=True, eq=False)
class Estimate:
    """A cloud divided.

    Attributes:
        work_s: [n], seconds of each rank, on a device of speed 1.
        imbalance: the slowest rank's time over the mean, speeds considered.
        halo: the rows that ranks receive.
    """

    work_s: Floats
    imbalance: float
    halo: Halo


def estimate(
    levels: Sequence[Level],
    loads: Sequence[Load],
    maps: Sequence[SiteMap],
    speeds: Sequence[float],
    tolerance: float = TOLERANCE,
) -> Estimate:
    """The micro-batch divided as :func:`planner.sites.arrangement.cut` would for ranks of ``speeds``.

    Raises:
        UsageError: what does not fit, as the parts say.
    """
    work = block_work(levels, loads)
    owned = cut(arrange(work, speeds, tolerance), speeds, tolerance)
    work_s = rank_work(owned, work)
    return Estimate(work_s, imbalance(work_s, speeds), halo(owned, levels, maps))
