"""A profile's costs under its corrections (``Profile.calibration``), and what is left to correct by stage.

    seconds of layers, of parameters, an action's overhead      times the factor of their class on that kind of device
    messages, all-reduces, statistics                           times that of the class of links
    forward, backward, update                                   times how fast the kind of device is now (``machine``)

Forward and backward have two factors, for stages of one rank and for those whose ranks share layers.  The profile
takes the smaller of the two, so that whoever reads it without knowing the stage has a lower bound (which is what the
searches want of it); the rest, :class:`StepResidual`, is put on where a stage is priced.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from planner.ir.cluster import ALL_REDUCE, STATISTICS, Cluster, Collective, Link
from planner.ir.profile import (
    ALL_REDUCES,
    BACKWARD,
    FORWARD,
    MACHINE,
    MESSAGES,
    OVERHEAD,
    STATISTIC_SUMS,
    UPDATE,
    Calibration,
    Correction,
    CostClass,
    Measurement,
    ParameterCost,
    Profile,
)

_OF_COLLECTIVE = {ALL_REDUCE: ALL_REDUCES, STATISTICS: STATISTIC_SUMS}


@dataclass(frozen=True, slots=True)
class Factors:
    """Corrections by class; 1 where there is none.

    Where runs showed stages of one rank alone, or shared ones alone, the others go with them: a machine that is slower
    than its profile is so for both, and stages that were never run should not look better for it.
    """

    known: Mapping[CostClass, float]

    @classmethod
    def of(cls, corrections: Iterable[Correction]) -> Factors:
        """Those of a calibration."""
        return cls({correction.of: correction.factor for correction in corrections})

    def __call__(self, what: str, where: str, shared: bool = False) -> float:
        if not self.known:
            return 1.0
        machine = self.known.get(CostClass(MACHINE, where), 1.0) if what in (FORWARD, BACKWARD, UPDATE) else 1.0
        return machine * self.known.get(
            CostClass(what, where, shared), self.known.get(CostClass(what, where, not shared), 1.0)
        )

    def least(self, what: str, where: str) -> float:
        """The smaller of the factors of stages of one rank and of shared ones."""
        return min(self(what, where), self(what, where, shared=True))


@dataclass(frozen=True, slots=True)
class StepResidual:
    """By how much stages cost more than the corrected profile says; at least 1."""

    factors: Factors

    def __call__(self, what: str, kind: str, shared: bool) -> float:
        """Of ``FORWARD`` or ``BACKWARD`` on a kind of device, in a stage whose layers several ranks share or not."""
        return self.factors(what, kind, shared) / self.factors.least(what, kind)


def corrected(profile: Profile) -> Profile:
    """The profile with its corrections put into its figures; it has none any more."""
    corrections = profile.calibration.corrections
    if not corrections:
        return profile
    factors = Factors.of(corrections)
    return replace(
        profile,
        cluster=corrected_cluster(profile),
        measurements=_measured(profile.measurements, factors),
        parts=_measured(profile.parts, factors),
        parameters={
            kind: {layer: _parameters(cost, kind, factors) for layer, cost in costs.items()}
            for kind, costs in profile.parameters.items()
        },
        action_overhead_s={kind: s * factors(OVERHEAD, kind) for kind, s in profile.action_overhead_s.items()},
        calibration=Calibration(),
    )


def corrected_cluster(profile: Profile) -> Cluster:
    """The profile's cluster with messages and collectives corrected.

    A link between two hosts that is stated apart goes with its tier.
    """
    cluster = profile.cluster
    factors = Factors.of(profile.calibration.corrections)
    if not factors.known:
        return cluster
    return replace(
        cluster,
        links={name: _link(link, factors(MESSAGES, name)) for name, link in cluster.links.items()},
        collectives=tuple(_collective(table, factors) for table in cluster.collectives),
        pairs=tuple(
            replace(pair, link=_link(pair.link, factors(MESSAGES, cluster.pair_tier(pair)))) for pair in cluster.pairs
        ),
    )


def _measured(
    measurements: Mapping[str, tuple[Measurement, ...]], factors: Factors
) -> dict[str, tuple[Measurement, ...]]:
    corrected = {}
    for kind, those in measurements.items():
        forward = factors.least(FORWARD, kind)
        backward = factors.least(BACKWARD, kind)
        corrected[kind] = those if forward == backward == 1 else tuple(_times(one, forward, backward) for one in those)
    return corrected


def _times(one: Measurement, forward: float, backward: float) -> Measurement:
    before_s = one.passes_s
    of_both = (one.forward_s * forward + one.backward_s * backward) / before_s if before_s else 1.0
    return replace(
        one,
        forward_s=one.forward_s * forward,
        backward_s=one.backward_s * backward,
        backward_input_s=one.backward_input_s * backward,
        backward_weight_s=one.backward_weight_s * backward,
        raw_s=tuple(seconds * of_both for seconds in one.raw_s),
    )


def _parameters(cost: ParameterCost, kind: str, factors: Factors) -> ParameterCost:
    return ParameterCost(cost.accumulate_s * factors.least(BACKWARD, kind), cost.update_s * factors(UPDATE, kind))


def _collective(table: Collective, factors: Factors) -> Collective:
    what = _OF_COLLECTIVE.get(table.operation)
    return table if what is None else replace(table, points=_slowed(table.points, factors(what, table.link)))


def _link(link: Link, factor: float) -> Link:
    return replace(
        link,
        latency_s=link.latency_s * factor,
        bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / factor,
        points=_slowed(link.points, factor),
    )


def _slowed(points: tuple[tuple[int, float], ...], factor: float) -> tuple[tuple[int, float], ...]:
    return tuple((num_bytes, seconds * factor) for num_bytes, seconds in points)
