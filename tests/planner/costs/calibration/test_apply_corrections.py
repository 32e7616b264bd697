"""A profile under its corrections: each figure times the factor of its class, held against a second, plain writing."""

from __future__ import annotations

import random
from dataclasses import fields, replace

import pytest

from planner.costs.calibration.apply_corrections import Factors, StepResidual, corrected
from planner.ir.cluster import ACROSS_HOSTS, ALL_REDUCE, STATISTICS, WITHIN_HOST, Link
from planner.ir.profile import BACKWARD, FORWARD, Calibration, Measurement, Profile
from tests.planner.corrections import random_corrections
from tests.planner.networks import priced, residual
from tests.planner.parts import with_parts

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
        rate = found.bandwidth_bytes_per_s / by
        latency = found.latency_s * by
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


def _factor(profile: Profile, what: str, where: str, shared: bool = False) -> float:
    """Of the class; where there is none, of the same in stages of the other sort; else 1."""
    for sort in (shared, not shared):
        for one in profile.calibration.corrections:
            if (one.of.what, one.of.where, one.of.shared) == (what, where, sort):
                return one.factor
    return 1.0


@pytest.mark.parametrize("seed", range(6))
def test_every_figure_is_multiplied_by_the_factor_of_its_class(seed: int) -> None:
    draw = random.Random(seed)
    profile = priced(*residual(), speeds=(1.0, 2.5, 1.0), hosts=["a", "a", "b"])
    profile = with_parts(profile, (1, 2), 2, lambda *_: 1.5)
    profile = profile.corrected_by(random_corrections(draw, profile))
    found = corrected(profile)
    plainly = restated(profile)
    for name in ("measurements", "parts"):
        for device_kind, measured in getattr(found, name).items():
            for one, other in zip(measured, getattr(plainly, name)[device_kind], strict=True):
                for each in (each.name for each in fields(one) if each.name.endswith("_s") and each.name != "raw_s"):
                    assert getattr(one, each) == pytest.approx(getattr(other, each), rel=1e-12)
    without = {"measurements": {}, "parts": {}}
    assert replace(found, **without) == replace(plainly, **without)


def test_what_is_left_for_stages_is_of_one_sort_of_stage_alone() -> None:
    profile = priced(*residual())
    profile = profile.corrected_by(random_corrections(random.Random(1), profile, share=1.0))
    excess = StepResidual(Factors.of(profile.calibration.corrections))
    kind = profile.cluster.devices[0].kind
    for what in (FORWARD, BACKWARD):
        both = {excess(what, kind, shared) for shared in (False, True)}
        assert min(both) == 1.0 < max(both)
