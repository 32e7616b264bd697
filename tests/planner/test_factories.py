"""The handmade profiles are what a profiler could have written: every layer measured, every program legal."""

from __future__ import annotations

import pytest

from benchmarks.chains import SIZES, chain_profile
from planner.layers.boundary import Boundaries
from planner.passes import validate
from planner.schedules import names, traits
from tests.planner.factories import chain_decision


def test_every_layer_is_measured_at_every_size_on_every_kind() -> None:
    profile = chain_profile(3, num_devices=2, speeds=(1.0, 2.0), forward_s=(1.0, 2.0, 4.0), loss_s=0.5)
    expected = {(layer.name, n) for layer in profile.graph.layers for n in SIZES}
    for measurements in profile.measurements.values():
        assert {(m.layer, m.samples) for m in measurements} == expected
    slow, fast = (
        {(m.layer, m.samples): m for m in profile.measurements[device.kind]} for device in profile.cluster.devices
    )
    assert slow["l1", 4].forward_s == 8.0
    assert fast["l1", 4].backward_s == 8.0
    assert slow["loss", 2].forward_s == 1.0


def test_numbers_are_given_for_all_layers_or_for_each() -> None:
    with pytest.raises(ValueError, match="2 numbers for 3"):
        chain_profile(3, forward_s=(1.0, 2.0))


@pytest.mark.parametrize("schedule", [name for name in names() if traits(name).stages_per_position != 2])
def test_its_decisions_are_legal(schedule: str) -> None:
    profile = chain_profile(4, num_devices=4, skips=((0, 3),))
    decision = chain_decision(profile, (1, 3), (2, 1, 1), ((0,), (1, 2), (3,)), schedule=schedule)
    validate(Boundaries.of_decision(profile.graph, decision).program(decision))
