"""Messages that stream: the steps of BaPipe's table (arXiv 2012.12544, section 3), by its own closed forms."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.chains import chain_profile
from planner.costs.cost_model import CostModel
from planner.costs.predict import predict
from planner.ir.profile import Profile
from planner.ir.program import Program
from planner.layers.boundary import Boundaries
from tests.oracles.evaluation import evaluate
from tests.planner.factories import chain_decision

MIB = 2.0**20
REGIMES = {"hidden": 0.5, "longer than F": 1.5, "longer than B": 2.5, "longer than both": 4.0}
"""What a message takes, where F takes 1 and B 2."""


def boards(p: int, transfer: float, *, stream: bool = True, unlike: bool = False) -> Profile:
    """``p`` equal layers, one a device; F = 1 s, B = 2 s of a sample, whose message takes ``transfer`` s."""
    forward_s = [1.0 + unlike * k / 4 for k in range(p)]
    profile = chain_profile(
        p, p, forward_s=forward_s, activation_bytes=int(MIB), bandwidth_bytes_per_s=MIB / transfer, parameter_bytes=64
    )
    devices = tuple(replace(device, streams=stream) for device in profile.cluster.devices)
    return replace(profile, cluster=replace(profile.cluster, devices=devices))


def step_s(profile: Profile, schedule: str, m: int) -> float:
    p = len(profile.cluster.devices)
    decision = chain_decision(profile, range(1, p), (1,) * m, schedule=schedule)
    found = predict(profile, decision)[0].step_s
    assert evaluate(profile, decision).step_s == pytest.approx(found, rel=1e-12)
    return found


def program_of(profile: Profile, decision: object) -> Program:
    return Boundaries.of_decision(profile.graph, decision).program(decision)


@pytest.mark.parametrize("transfer", REGIMES.values(), ids=REGIMES)
@pytest.mark.parametrize("schedule", ["1f1b-as", "fbp-as"])
@pytest.mark.parametrize(("p", "m"), [(2, 3), (3, 8), (4, 4)])
def test_a_step_is_that_of_the_table(p: int, m: int, schedule: str, transfer: float) -> None:
    found = step_s(boards(p, transfer), schedule, m)
    slowest_s = max(1, transfer) + max(2, transfer) if schedule == "1f1b-as" else max(3, transfer)
    assert found == pytest.approx((m + p - 1) * slowest_s)


@pytest.mark.parametrize(("streaming", "plain"), [("1f1b-as", "1f1b"), ("fbp-as", "1f1b-so")])
def test_devices_that_cannot_stream_do_as_without(streaming: str, plain: str) -> None:
    profile = boards(3, 0.5, stream=False)
    assert step_s(profile, streaming, 6) == step_s(profile, plain, 6)
    assert step_s(boards(3, 0.5), streaming, 6) < step_s(profile, plain, 6)


def test_a_message_from_a_device_that_cannot_stream_is_sent_when_it_is_complete() -> None:
    profile = boards(3, 0.5)
    first, *rest = profile.cluster.devices
    mixed = replace(profile, cluster=replace(profile.cluster, devices=(replace(first, streams=False), *rest)))
    all_stream, none, found = (step_s(each, "1f1b-as", 5) for each in (profile, boards(3, 0.5, stream=False), mixed))
    assert all_stream < found < none


def test_unlike_stages_go_at_the_pace_of_the_slowest_pass() -> None:
    profile = boards(3, 1.25, unlike=True)  # F 1, 1.25, 1.5: only the first is held by its message
    assert step_s(profile, "1f1b-as", 40) - step_s(profile, "1f1b-as", 39) == pytest.approx(1.5 + 3.0)


def test_the_cost_model_is_the_same_whoever_asks_first() -> None:
    cost_model = CostModel(boards(2, 4.0))
    decisions = [
        chain_decision(cost_model.profile, (1,), (1, 1), schedule=name) for name in ("fbp-as", "1f1b", "fbp-as")
    ]
    first, _, last = (evaluate(cost_model, each).step_s for each in decisions)
    assert first == last
