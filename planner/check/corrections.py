"""A profile under its corrections, written a second time for the checker (model.

``planner.costs.calibration.apply_corrections``).

Every figure is multiplied by the factor of its class; forward and backward by the smaller of their two factors, and
what is left of the larger one where the stage is known (``remaining``).
"""

from __future__ import annotations

from dataclasses import replace

from planner.ir.cluster import ACROSS_HOSTS, ALL_REDUCE, STATISTICS, WITHIN_HOST, Link
from planner.ir.profile import Calibration, Measurement, Profile

_LAYERS = {
    "forward": ("forward_s",),
    "backward": ("backward_s", "backward_input_s", "backward_weight_s"),
}


def restated(profile: Profile) -> Profile:
    """The profile with its corrections in its figures, those that depend on the stage as far as any stage has them."""
    if not profile.calibration.corrections:
        return profile

    def measured(one: Measurement, device_kind: str) -> Measurement:
        values = {
            name: getattr(one, name) * min(_factor(profile, what, device_kind, s) for s in (False, True))
            for what, names in _LAYERS.items()
            for name in names
        }
        return replace(one, **values)

    def link(found: Link, name: str) -> Link:
        by = _factor(profile, "messages", name)
        points = tuple((size, seconds * by) for size, seconds in found.points)
        rate, latency = found.bandwidth_bytes_per_s / by, found.latency_s * by
        return replace(found, latency_s=latency, bandwidth_bytes_per_s=rate, points=points)

    sums = {ALL_REDUCE: "all-reduces", STATISTICS: "statistics"}
    cluster = profile.cluster
    tables = []
    for table in cluster.collectives:
        by = _factor(profile, sums[table.operation], table.link) if table.operation in sums else 1.0
        tables.append(replace(table, points=tuple((size, seconds * by) for size, seconds in table.points)))
    pairs = []
    for pair in cluster.pairs:
        name = WITHIN_HOST if pair.src_host == pair.dst_host else ACROSS_HOSTS
        pairs.append(replace(pair, link=link(pair.link, name)))
    parameters = {}
    for device_kind, costs in profile.parameters.items():
        adding = min(_factor(profile, "backward", device_kind, shared) for shared in (False, True))
        updating = _factor(profile, "update", device_kind)
        parameters[device_kind] = {
            layer: replace(cost, accumulate_s=cost.accumulate_s * adding, update_s=cost.update_s * updating)
            for layer, cost in costs.items()
        }
    return replace(
        profile,
        cluster=replace(
            cluster,
            links={name: link(found, name) for name, found in cluster.links.items()},
            collectives=tuple(tables),
            pairs=tuple(pairs),
        ),
        measurements={
            kind: tuple(measured(one, kind) for one in found) for kind, found in profile.measurements.items()
        },
        parts={kind: tuple(measured(one, kind) for one in found) for kind, found in profile.parts.items()},
        parameters=parameters,
        action_overhead_s={
            kind: seconds * _factor(profile, "overhead", kind) for kind, seconds in profile.action_overhead_s.items()
        },
        calibration=Calibration(),
    )


def remaining(profile: Profile, quantity: str, device_kind: str, num_ranks: int) -> float:
    """What is left to multiply ``quantity`` (``forward_s``, ``accumulate_s``, ...) by on a stage of so many ranks.

    Args:
        profile: as it was given, not restated.
    """
    if quantity not in ("forward_s", "backward_s", "backward_input_s", "backward_weight_s", "accumulate_s"):
        return 1.0
    what = "forward" if quantity == "forward_s" else "backward"
    both = [_factor(profile, what, device_kind, shared) for shared in (False, True)]
    return both[num_ranks > 1] / min(both)


def _factor(profile: Profile, what: str, where: str, shared: bool = False) -> float:
    """Of the class; where there is none, of the same in stages of the other sort; else 1."""
    for sort in (shared, not shared):
        for one in profile.calibration.corrections:
            if (one.of.what, one.of.where, one.of.shared) == (what, where, sort):
                return one.factor
    return 1.0
