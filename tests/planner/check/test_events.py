"""The checker's events against the simulator's: no code in common, equal steps."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.check.recompute import reckon
from planner.costs.predict import predict
from planner.layers.boundary import Boundaries
from planner.schedules import names
from tests.planner.factories import chain_decision, chain_profile
from tests.planner.shared_hosts import random_plan


@given(st.integers(0, 2**32), st.sampled_from(names()))
def test_the_checker_agrees_on_hosts_that_share_cards_and_cores(seed: int, schedule: str) -> None:
    profile, decision = random_plan(random.Random(seed), schedule)
    program = Boundaries.of_decision(profile.graph, decision).program(decision)
    predicted, _ = predict(profile, decision)
    assert reckon(profile, decision, program).step_s == pytest.approx(predicted.step_s, rel=1e-9)


@pytest.mark.parametrize("duplex", [True, False])
def test_equal_stages_whose_messages_meet_are_ordered_alike(duplex: bool) -> None:
    profile = chain_profile(
        4, 4, hosts=["n0", "n1", "n0", "n1"], activation_bytes=4000, bandwidth_bytes_per_s=4e6, duplex=duplex
    )
    link = replace(profile.cluster.links["across-hosts"], sending=((4000, 2e-4),), receiver_core=((4000, 3e-4),))
    profile = replace(profile, cluster=replace(profile.cluster, links={**profile.cluster.links, "across-hosts": link}))
    decision = chain_decision(profile, (1, 2, 3), (1,) * 6)
    program = Boundaries.of_decision(profile.graph, decision).program(decision)
    predicted, _ = predict(profile, decision)
    assert reckon(profile, decision, program).step_s == pytest.approx(predicted.step_s, rel=1e-9)


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v"])
def test_the_checker_joins_messages_as_the_simulator_does(schedule: str) -> None:
    num_joined = 0
    for seed in range(20):
        profile, decision = random_plan(random.Random(seed), schedule, small=True)
        program = Boundaries.of_decision(profile.graph, decision).program(decision)
        joined = program.joined()
        if joined:
            num_joined += len(joined)
            predicted, _ = predict(profile, decision)
            assert reckon(profile, decision, program).step_s == pytest.approx(predicted.step_s, rel=1e-9)
    assert num_joined > 20, "hardly any message was joined"
