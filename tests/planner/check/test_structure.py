"""Every way to spoil a plan whose layers have layouts of their own is found by the independent checker."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from planner import faults_of
from planner.check.structure import layer_faults, part_faults
from planner.ir.codec import load
from planner.ir.plan import Decision, Placement, Plan, Stage
from planner.ir.problem import Problem
from planner.ir.profile import Profile
from tests.oracles.plans import check as check_plainly
from tests.planner.networks import Network, priced
from tests.planner.sparse_networks import segmenter

GOLDEN = Path(__file__).parents[2] / "data" / "golden" / "plan_cut_along_space.json"


@functools.cache
def profile() -> Profile:
    """Convolutions on large images, a pool, and a classifier; two devices."""
    network = Network(2, 4, 48)
    x = network.relu(network.norm(network.conv(network.image, 8)))
    return priced(network, network.head(network.pool(network.conv(x, 8)), 6), speeds=(1.0, 1.0), latency_s=1e-7)


@functools.cache
def problem() -> Problem:
    return Problem(profile(), 4, allow=("sample", "spatial"), micro_batch_sizes=(1,), confidence=0.0)


@functools.cache
def plan() -> Plan:
    return load(GOLDEN, Plan)


def recut(**cuts: Mapping[str, tuple[int, ...]]) -> Plan:
    """The plan with other cut points for some layers."""
    layers = {
        name: replace(placed, cuts=cuts[name]) if name in cuts else placed
        for name, placed in plan().decision.layers.items()
    }
    return replace(plan(), decision=replace(plan().decision, layers=layers))


def test_the_plan_is_cut_along_space_and_good() -> None:
    cuts = {name: tuple(placed.cuts) for name, placed in plan().decision.layers.items()}
    assert cuts["conv0"] == ("height",)
    assert cuts["linear7"] == ("replica",)
    assert check_plainly(plan(), profile()) == ()
    assert check_plainly(plan(), None) == ()


SPOILS: dict[str, Mapping[str, Mapping[str, tuple[int, ...]]]] = {
    "conv0.cuts: 3 parts for the 2 ranks of its stage": {"conv0": {"height": (0, 16, 32, 48)}},
    "1 parts for the 2 ranks of its stage": {"conv0": {}},
    "[0, 30, 20]: cut points ascend": {"conv0": {"width": (0, 30, 20)}},
    "[1, 24, 48]: cut points ascend from 0": {"conv0": {"height": (1, 24, 48)}},
    "conv0 is cut along depth, and has sample, channel, height, width": {"conv0": {"depth": (0, 1, 2)}},
    "reshape6 is cut along feature, and each part would do all of its work": {"reshape6": {"feature": (0, 4, 8)}},
    "conv0 leaves rank 1 none of a micro-batch of 1": {"conv0": {"width": (0, 48, 48)}},
    "leaves rank 0 none of a micro-batch of 1": {"conv0": {"sample": (0, 0, 1)}},
    "the predicted step is": {"conv0": {"width": (0, 23, 48)}},
    "rank 0 is predicted to hold": {"conv0": {"width": (0, 25, 48)}},
}


WIDTH = {"width": (0, 24, 48)}
CHANNEL = {"channel": (0, 4, 8)}
ALONE: dict[str, tuple[str, Placement]] = {
    "conv3.ways: 0 is less than 1": ("conv3", Placement(0, CHANNEL, ways=0)),
    "has ways 2, which do not divide its 1 parts along channel": ("conv3", Placement(0, WIDTH, ways=2)),
    "has ways 3, which do not divide its 2 parts along channel": ("conv3", Placement(0, CHANNEL, ways=3)),
    "norm1 (batch_norm) has ways 2, and is no linear layer, embedding or convolution of one group": (
        "batch_norm1",
        Placement(0, CHANNEL, ways=2),
    ),
    "has ways 2 and margin 1; it can have one of them": ("conv3", Placement(0, CHANNEL, 2, 1)),
    "conv3.margin: -1 is less than 0": ("conv3", Placement(0, WIDTH, margin=-1)),
    "conv3 has margin 1 and is cut along channel": ("conv3", Placement(0, CHANNEL, margin=1)),
    "linear7 has margin 1 and is not cut along space": ("linear7", Placement(0, {"replica": (0, 1, 2)}, margin=1)),
    "conv3 has margin 25, and its smallest part has 24 rows": ("conv3", Placement(0, WIDTH, margin=25)),
    "conv3 has margin 3, and its smallest part has 2 rows": ("conv3", Placement(0, {"width": (0, 46, 48)}, margin=3)),
}


@pytest.mark.every_case
@pytest.mark.parametrize("words", ALONE)
def test_ways_and_margins_that_cannot_be_are_found_out(words: str) -> None:
    name, placement = ALONE[words]
    decision = plan().decision
    spoilt = replace(plan(), decision=replace(decision, layers={**decision.layers, name: placement}))
    assert any(words in fault for fault in faults_of(spoilt, profile())), faults_of(spoilt, profile())


def test_a_layer_that_cannot_be_cut_so_comes_with_its_operator_and_three_remedies() -> None:
    fault = next(fault for fault in faults_of(recut(reshape6={"feature": (0, 4, 8)}), profile()) if "reshape6" in fault)
    for words in ("reshape6", "reshape cannot be cut", "gather: leave feature uncut", "register a rule", "elementwise"):
        assert words in fault


def test_good_ways_and_margins_are_reckoned_with() -> None:
    decision = plan().decision
    layers = {**decision.layers, "conv3": replace(decision.layers["conv3"], margin=1)}
    asked = replace(plan().inputs, request=replace(plan().inputs.request, halo_depth=1))
    wide = replace(plan(), inputs=asked, decision=replace(decision, layers=layers))
    faults = faults_of(wide, profile())
    assert all(fault.startswith(("prediction.", "search.binding")) for fault in faults), faults
    assert faults


@pytest.mark.every_case
@pytest.mark.parametrize("words", SPOILS)
def test_a_spoilt_layout_is_found_out(words: str) -> None:
    faults = faults_of(recut(**SPOILS[words]), profile())
    assert any(words in fault for fault in faults), faults


def test_a_layer_that_mixes_samples_is_not_cut_along_them() -> None:
    graph = profile().graph
    mixing = tuple(
        replace(x, attributes={**x.attributes, "mixes_samples": True}) if x.name == "conv0" else x for x in graph.layers
    )
    other = replace(profile(), graph=replace(graph, layers=mixing))
    spoilt = recut(conv0={"sample": (0, 1, 2)})
    spoilt = replace(spoilt, decision=replace(spoilt.decision, micro_batches=(2, 2)))
    assert "layer conv0 mixes samples and is cut along them" in list(layer_faults(spoilt.decision, other.graph))


@pytest.mark.parametrize(("points", "words"), [((0, 500, 1000), ""), ((0, 0, 1000), "stage 1 leaves a rank none of")])
def test_parts_of_sites_are_looked_at_behind_a_stage_of_whole_samples(points: tuple[int, ...], words: str) -> None:
    graph = segmenter()
    names = [layer.name for layer in graph.layers]
    layers = {
        name: Placement(1, {"sample": points}) if number > 2 else Placement(0) for number, name in enumerate(names)
    }
    decision = Decision("gpipe", (4,), (Stage((0,), ("n0/cpu0",)), Stage((1, 2), ("n0/cpu1", "n0/cpu2"))), layers, ())
    faults = list(part_faults(decision, graph))
    assert any(words in fault for fault in faults) == bool(words), faults
