from __future__ import annotations

from dataclasses import replace

from benchmarks.chains import chain_profile
from halopipe.planning import problem, shadow_prices, solve
from planner.ir.cluster import DATASHEET, Cluster
from planner.ir.plan import Plan
from planner.ir.profile import Profile


def solved(profile: Profile) -> Plan:
    return solve.solve(problem.make_problem(profile))


def test_every_kind_and_link_has_a_price_and_the_largest_saving_comes_first() -> None:
    profile = chain_profile(5, latency_s=1e-3, speeds=(1.0, 2.0))
    shown: list[str] = []
    found = shadow_prices.prices(solved(profile), profile, show=lambda done, total, what: shown.append(what))
    assert shown == [
        "1 GiB on each kind-1",
        "1 GiB on each kind-2",
        "1 kind-1",
        "1 kind-2",
        "link within-host twice as fast",
    ]
    assert {price.what for price in found.prices} == set(shown)
    assert [price.saves_s for price in found.prices] == sorted((p.saves_s for p in found.prices), reverse=True)
    by_name = {price.what: price for price in found.prices}
    assert by_name["1 kind-2"].saves_s > 0
    assert by_name["link within-host twice as fast"].evidence == DATASHEET
    assert by_name["1 GiB on each kind-1"].saves_s == 0.0
    assert found.render().startswith("Prices, of a step of ")
    assert "  nothing" in found.render()
    assert found.data()["step_s"] == found.plan.prediction.step_s


def test_memory_that_binds_has_a_price() -> None:
    profile = chain_profile(4, parameter_bytes=2**26, memory_bytes=600 * 2**20, bandwidth_bytes_per_s=1e8)
    plan = solved(profile)
    assert len(plan.decision.stages) == 2
    roomy = chain_profile(4, parameter_bytes=2**26, memory_bytes=600 * 2**20 + 2**30, bandwidth_bytes_per_s=1e8)
    expected = plan.prediction.step_s - solved(roomy).prediction.step_s
    prices = {price.what: price for price in shadow_prices.prices(plan, profile).prices}
    assert prices["1 GiB on each kind-1"].saves_s == max(0.0, expected)


def test_a_single_device_has_no_price_for_another() -> None:
    profile = chain_profile(3, num_devices=1)
    alone = replace(profile, cluster=Cluster(profile.cluster.devices, {}))
    found = shadow_prices.prices(solved(alone), alone)
    assert [price.what for price in found.prices] == ["1 GiB on each kind-1"]


def test_a_search_that_was_not_proven_says_what_could_be_saved_at_most() -> None:
    profile = chain_profile(3)
    plan = solved(profile)
    open_ended = replace(plan, search=replace(plan.search, status="time limit", bound_s=plan.prediction.step_s / 2))
    price = shadow_prices._price("x", plan, open_ended, assumed=False)
    assert (price.saves_s, price.at_most_s) == (0.0, plan.prediction.step_s / 2)
    slower = replace(plan, prediction=replace(plan.prediction, step_s=2 * plan.prediction.step_s))
    assert shadow_prices._price("x", plan, slower, assumed=False).saves_s == 0.0
