from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.chains import chain_profile
from planner.costs.layers.roofline import LayerWork, on_cluster, roof_s, work_of
from planner.costs.predict import predict
from planner.ir.cluster import DATASHEET, MEASURED, WITHIN_HOST, Cluster, DeviceSpec, Link
from planner.ir.errors import MissingMeasurementError
from planner.ir.profile import Optimizer, Profile
from tests.planner.factories import chain_decision

PROFILE = chain_profile(
    3,
    forward_s=(1e-3, 2e-3, 3e-3),
    parameter_bytes=(4096, 0, 8192),
    activation_bytes=4096,
    accumulate_s=1e-5,
    update_s=2e-5,
    action_overhead_s=1e-6,
    optimizer=Optimizer("SGD", {"lr": 0.1, "momentum": 0.9}, 1.0),
)
HERE = DeviceSpec("", "kind-1", "", 2**30, {"float32": 1e9}, 1e8)
THERE = DeviceSpec("n0/gpu0", "there", "n0", 2**31, {"float32": 4e9}, 2e8)
LINKS = {WITHIN_HOST: Link(1e-6, 1e9)}


def cluster(*devices: DeviceSpec) -> Cluster:
    return Cluster(devices or (THERE, replace(THERE, name="n0/gpu1")), LINKS)


def costs(profile: Profile, kind: str, layer: str, samples: int = 8) -> tuple[float, ...]:
    (m,) = (m for m in profile.measurements[kind] if (m.layer, m.samples) == (layer, samples))
    return m.forward_s, m.backward_s, m.backward_input_s, m.backward_weight_s


def test_work_is_the_relations_flops_and_the_bytes_of_all_tensors() -> None:
    # l2 is linear: 8 samples of 1024 features to 1024, with 2048 parameters
    assert work_of(PROFILE.graph, PROFILE.graph.values(), PROFILE.graph.layers[2], 8) == LayerWork(
        2 * 8 * 1024 * 1024, 8 * 4096 * 2 + 8192, 8192
    )
    assert work_of(PROFILE.graph, PROFILE.graph.values(), PROFILE.graph.layers[2], 2).flops == 2 * 2 * 1024 * 1024


def test_the_roof_is_the_slower_of_compute_and_memory() -> None:
    assert roof_s(LayerWork(4 * 10**9, 10**8), THERE, "float32", "l") == 1.0
    assert roof_s(LayerWork(4 * 10**8, 10**8), THERE, "float32", "l") == 0.5


def test_the_share_of_the_roof_that_was_reached_is_carried_over() -> None:
    found = on_cluster(PROFILE, cluster(), {"kind-1": HERE})
    # l2: bound by compute on both, four times as fast; l1 (pointwise): bound by memory, twice as fast
    assert costs(found, "there", "l2") == pytest.approx([t / 4 for t in costs(PROFILE, "kind-1", "l2")])
    assert costs(found, "there", "l1") == pytest.approx([t / 2 for t in costs(PROFILE, "kind-1", "l1")])
    assert {m.evidence for m in found.measurements["there"]} == {DATASHEET}


def test_without_figures_of_the_device_measured_on_the_roof_is_the_time() -> None:
    found = on_cluster(PROFILE, cluster())
    work = work_of(PROFILE.graph, PROFILE.graph.values(), PROFILE.graph.layers[2], 8)
    roof = roof_s(work, THERE, "float32", "l2")
    assert costs(found, "there", "l2") == pytest.approx((roof, 2 * roof, roof, roof))
    forward, backward, inputs, weights = costs(found, "there", "l1")
    assert (weights > 0, backward) == (costs(PROFILE, "kind-1", "l1")[3] > 0, inputs + weights)
    assert forward > 0


def test_parameters_go_at_the_pace_of_the_memory() -> None:
    found = on_cluster(PROFILE, cluster(), {"kind-1": HERE}).parameters["there"]["l2"]
    assert (found.accumulate_s, found.update_s) == pytest.approx((0.5e-5, 1e-5))
    bare = on_cluster(PROFILE, cluster()).parameters["there"]["l2"]
    assert (bare.accumulate_s, bare.update_s) == pytest.approx((3 * 8192 / 2e8, 5 * 8192 / 2e8))


def test_what_was_measured_stays_and_what_layers_keep_is_as_measured() -> None:
    own = replace(PROFILE.cluster.devices[0], name="n0/cpu9")
    found = on_cluster(PROFILE, cluster(THERE, own), {"kind-1": HERE})
    assert found.measurements["kind-1"] == PROFILE.measurements["kind-1"]
    assert [m.saved_bytes for m in found.measurements["there"]] == [
        m.saved_bytes for m in PROFILE.measurements["kind-1"]
    ]
    assert found.action_overhead_s == {"kind-1": 1e-6, "there": 1e-6}
    assert on_cluster(PROFILE, PROFILE.cluster) == PROFILE


def test_figures_of_the_profiles_own_devices_serve_too() -> None:
    known = tuple(
        replace(d, peak_flop_per_s=HERE.peak_flop_per_s, memory_bytes_per_s=1e8) for d in PROFILE.cluster.devices
    )
    profile = replace(PROFILE, cluster=replace(PROFILE.cluster, devices=known))
    assert on_cluster(profile, cluster()).measurements == on_cluster(PROFILE, cluster(), {"kind-1": HERE}).measurements


def test_a_missing_figure_says_what_needs_it_and_how_to_give_it() -> None:
    slow = replace(THERE, peak_flop_per_s={"float16": 1e9})
    with pytest.raises(MissingMeasurementError, match="nothing says how fast there computes in float32") as caught:
        on_cluster(PROFILE, cluster(slow))
    assert caught.value.details == ("needed for l0; known: float16",)
    with pytest.raises(MissingMeasurementError, match="how fast the memory of kind-1 is"):
        on_cluster(PROFILE, cluster(), {"kind-1": replace(HERE, memory_bytes_per_s=None)})
    with pytest.raises(MissingMeasurementError, match="how fast the memory of there is") as caught:
        on_cluster(PROFILE, cluster(replace(THERE, memory_bytes_per_s=None)))
    assert "memory-bandwidth" in caught.value.remedies[0]


def test_a_prediction_on_scaled_costs_says_so() -> None:
    found = on_cluster(PROFILE, cluster(), {"kind-1": HERE})
    prediction, _ = predict(found, chain_decision(found, cuts=(2,)))
    assert prediction.evidence == DATASHEET
    assert predict(PROFILE, chain_decision(PROFILE, cuts=(2,)))[0].evidence == MEASURED
