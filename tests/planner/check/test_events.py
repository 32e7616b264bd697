"""The events of the oracle against the simulator: no code in common, equal steps."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.chains import chain_profile
from planner.costs.predict import predict
from planner.layers.boundary import Boundaries
from planner.schedules import names
from tests.oracles.evaluation import evaluate
from tests.planner.factories import chain_decision
from tests.planner.shared_hosts import random_plan


@given(st.integers(0, 2**32), st.sampled_from(names()))
def test_the_oracle_agrees_on_hosts_that_share_cards_and_cores(seed: int, schedule: str) -> None:
    profile, decision = random_plan(random.Random(seed), schedule)
    predicted, _ = predict(profile, decision)
    assert evaluate(profile, decision).step_s == pytest.approx(predicted.step_s, rel=1e-9)


@pytest.mark.parametrize("duplex", [True, False])
def test_equal_stages_whose_messages_meet_are_ordered_alike(duplex: bool) -> None:
    profile = chain_profile(
        4, 4, hosts=["n0", "n1", "n0", "n1"], activation_bytes=4000, bandwidth_bytes_per_s=4e6, duplex=duplex
    )
    link = replace(profile.cluster.links["across-hosts"], sending=((4000, 2e-4),), receiver_core=((4000, 3e-4),))
    profile = replace(profile, cluster=replace(profile.cluster, links={**profile.cluster.links, "across-hosts": link}))
    decision = chain_decision(profile, (1, 2, 3), (1,) * 6)
    predicted, _ = predict(profile, decision)
    assert evaluate(profile, decision).step_s == pytest.approx(predicted.step_s, rel=1e-9)


@pytest.mark.parametrize("seed", [5, 62, 81])
def test_rounding_does_not_decide_who_is_first_on_a_wire_of_both_directions(seed: int) -> None:
    """Of random chains of whole milliseconds those in which it would: two ranks would send at equal times."""
    draw = random.Random(seed)
    count = draw.choice((3, 4))
    profile = chain_profile(
        count,
        count,
        forward_s=[draw.choice((1e-3, 2e-3, 3e-3)) for _ in range(count)],
        hosts=[f"n{rank % 2}" for rank in range(count)],
        activation_bytes=[draw.choice((1000, 2000, 3000)) for _ in range(count)],
        bandwidth_bytes_per_s=1e6,
        duplex=False,
    )
    cuts, micro_batches = tuple(range(1, count)), (1,) * draw.randint(3, 6)
    decision = chain_decision(profile, cuts, micro_batches, schedule=draw.choice(("1f1b", "gpipe")))
    predicted, _ = predict(profile, decision)
    assert evaluate(profile, decision).step_s == pytest.approx(predicted.step_s, rel=1e-9)


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v"])
def test_the_oracle_joins_messages_as_the_simulator_does(schedule: str) -> None:
    num_joined = 0
    for seed in range(20):
        profile, decision = random_plan(random.Random(seed), schedule, small=True)
        program = Boundaries.of_decision(profile.graph, decision).program(decision)
        joined = program.joined()
        if joined:
            num_joined += len(joined)
            predicted, _ = predict(profile, decision)
            assert evaluate(profile, decision).step_s == pytest.approx(predicted.step_s, rel=1e-9)
    assert num_joined > 20, "hardly any message was joined"
