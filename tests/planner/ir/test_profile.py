from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.chains import chain_profile
from planner.costs.predict import predict
from planner.ir.codec import fingerprint
from planner.ir.profile import FORWARD, MACHINE, Correction, CostClass, Profile, kind_at
from tests.planner.factories import chain_decision


def made(*speeds: float, hosts: tuple[str, ...] | None = None) -> Profile:
    return chain_profile(
        5, len(speeds), forward_s=(1e-3, 3e-3, 2e-3, 4e-3, 1e-3), speeds=speeds, hosts=hosts, activation_bytes=2**16
    )


@pytest.mark.parametrize("ranks", [None, ((0, 1), (2,))])
def test_a_device_at_another_speed_costs_what_one_of_that_speed_would(
    ranks: tuple[tuple[int, ...], ...] | None,
) -> None:
    def step_s(profile: Profile) -> float:
        cuts = (1, 3) if ranks is None else (3,)
        shares = None if ranks is None else ((1, 1), (2,))
        return predict(profile, chain_decision(profile, cuts, (2, 2, 2), ranks, shares))[0].step_s

    slow = made(1.0, 1.0, 1.0).standing({"n0/cpu1": 0.5})
    assert step_s(slow) == pytest.approx(step_s(made(1.0, 0.5, 1.0)), rel=1e-12)
    assert step_s(slow) > 1.2 * step_s(made(1.0, 1.0, 1.0))
    assert [device.kind for device in slow.cluster.devices] == ["kind-1", "kind-1 x0.5", "kind-1"]


def test_devices_that_are_gone_are_left_out_with_their_hosts_links() -> None:
    profile = made(1.0, 1.0, 1.0, hosts=("n0", "n1", "n1"))
    left = profile.standing({"n0/cpu0": 0.0})
    assert [device.name for device in left.cluster.devices] == ["n1/cpu1", "n1/cpu2"]
    assert left.measurements == profile.measurements
    assert fingerprint(left) != fingerprint(profile)


def test_a_profile_that_stands_so_already_stays_as_it_is() -> None:
    profile = made(1.0, 1.0, 1.0)
    speeds = {"n0/cpu0": 0.0, "n0/cpu2": 0.4}
    once = profile.standing(speeds)
    assert once.standing(speeds) is once
    assert profile.standing({}) is profile.standing({"n0/cpu1": 1.0}) is profile


def test_what_is_known_of_a_kind_holds_for_its_slow_devices_too() -> None:
    known = (Correction(CostClass(FORWARD, "kind-1"), 1.2, 3), Correction(CostClass(MACHINE, "kind-1"), 1.1, 2))
    slow = made(1.0, 1.0).corrected_by(known).standing({"n0/cpu1": 0.5})
    own = {one.of.what: one.factor for one in slow.calibration.corrections if one.of.where == "kind-1 x0.5"}
    assert own == {FORWARD: 1.2, MACHINE: pytest.approx(2.2)}
    assert slow.bare == replace(slow, calibration=slow.bare.calibration)


def test_a_kind_is_called_once_by_its_speed() -> None:
    assert kind_at(kind_at("EPYC", 2 / 3), 2 / 3) == "EPYC x0.667"
    assert kind_at("EPYC", 1.0) == kind_at("EPYC", 0.0) == "EPYC"
