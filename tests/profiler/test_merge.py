"""Profiles of several hosts, and measurements of several processes, as one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.chains import chain_profile
from planner.ir import codec
from planner.ir.cluster import ACROSS_HOSTS, ALL_REDUCE, HOST, WITHIN_HOST, Cluster, Collective, Link, PairLink, Tier
from planner.ir.errors import StaleFileError, UsageError
from planner.ir.profile import (
    Calibration,
    Measurement,
    MeasuringProcess,
    ParameterCost,
    PreparationCost,
    Profile,
    Provenance,
    Slowdown,
)
from profiler.measure.partial_results import FinishedMeasurements, ModelCosts, Rest, SizeCosts
from profiler.merge import (
    gather,
    merged,
    merged_parameters,
    merged_preparations,
    merged_seconds,
    process_of,
    process_spread,
)


def taken_on(speed: float, sizes: tuple[int, ...] = (1, 4), bandwidth: float = 1e9, num_devices: int = 2) -> Profile:
    """A profile of the same model on a host ``n0`` whose devices are of kind ``kind-<speed>``."""
    found = chain_profile(3, sizes=(1, 2, 4, 8), speeds=speed, num_devices=num_devices, bandwidth_bytes_per_s=bandwidth)
    names = list(found.graph.by_name())
    measured = {
        kind: tuple(sorted((m for m in every if m.samples in sizes), key=lambda m: (m.samples, names.index(m.layer))))
        for kind, every in found.measurements.items()
    }
    devices = tuple(replace(device, host="n0", name=f"n0/cpu{k}") for k, device in enumerate(found.cluster.devices))
    links = {WITHIN_HOST: found.cluster.links[WITHIN_HOST]}
    cluster = replace(found.cluster, devices=devices, links=links, collectives=())
    return replace(found, measurements=measured, cluster=cluster)


def alike(profile: Profile, factor: float) -> Profile:
    """The same kind of device, measured as ``factor`` times slower."""
    measured = {
        kind: tuple(replace(one, forward_s=factor * one.forward_s, raw_s=(factor,)) for one in every)
        for kind, every in profile.measurements.items()
    }
    return replace(profile, measurements=measured)


def forward_s(profile: Profile, kind: str, layer: str, samples: int) -> float:
    (found,) = [one for one in profile.measurements[kind] if (one.layer, one.samples) == (layer, samples)]
    return found.forward_s


def test_devices_of_all_hosts_stand_side_by_side_with_their_own_costs() -> None:
    fast = taken_on(2.0)
    slow = taken_on(1.0, num_devices=1)
    found = gather([fast, slow])
    assert [(d.name, d.host, d.kind) for d in found.cluster.devices] == [
        ("n0/cpu0", "n0", "kind-2"),
        ("n0/cpu1", "n0", "kind-2"),
        ("n1/cpu0", "n1", "kind-1"),
    ]
    assert set(found.measurements) == set(found.parameters) == set(found.action_overhead_s) == {"kind-1", "kind-2"}
    for kind, profile in (("kind-2", fast), ("kind-1", slow)):
        assert forward_s(found, kind, "l1", 4) == forward_s(profile, kind, "l1", 4)
    assert codec.loads(codec.dumps(found), Profile) == found


def test_hosts_of_one_kind_give_the_median_and_all_sizes() -> None:
    base = taken_on(1.0)
    other = taken_on(1.0, sizes=(1, 2, 8))
    found = gather([alike(base, 1.0), alike(base, 4.0), alike(other, 2.0)])
    assert forward_s(found, "kind-1", "l0", 1) == 2.0 * forward_s(base, "kind-1", "l0", 1)
    assert forward_s(found, "kind-1", "l0", 4) == 2.5 * forward_s(base, "kind-1", "l0", 4)
    measured = found.measurements["kind-1"]
    assert [one.samples for one in measured] == sorted(one.samples for one in measured)
    assert {one.samples for one in measured} == {1, 2, 4, 8}
    (both,) = [one for one in measured if (one.layer, one.samples) == ("l0", 4)]
    assert (both.raw_s, both.num_runs) == ((1.0, 4.0), 20)
    assert [device.host for device in found.cluster.devices] == ["n0", "n0", "n1", "n1", "n2", "n2"]


def test_slow_downs_of_a_kind_are_medians_over_hosts_with_as_many_devices() -> None:
    base = taken_on(1.0)
    known = [
        replace(base, slowdowns={"kind-1": (Slowdown("l1", 4, devices, factor, 1.0, factor / 100),)})
        for devices, factor in ((2, 1.25), (2, 1.5), (4, 9.0))
    ]
    found = gather([base, *known])
    assert found.slowdowns == {"kind-1": (Slowdown("l1", 4, 2, 1.375, 1.0, 0.015),)}
    assert gather([base, base]).slowdowns == {}


def test_every_host_keeps_its_own_link_and_sums_are_medians() -> None:
    a = taken_on(1.0, bandwidth=1e9)
    b = taken_on(1.0, bandwidth=3e9)
    sums = [Collective(ALL_REDUCE, 2, WITHIN_HOST, ((1024, s), (4096, 2 * s))) for s in (1.0, 3.0)]
    a = replace(a, cluster=replace(a.cluster, collectives=(sums[0],)))
    b = replace(b, cluster=replace(b.cluster, collectives=(sums[1],)))
    found = gather([a, b]).cluster
    assert found.link(0, 1) == a.cluster.links[WITHIN_HOST]
    assert found.link(2, 3) == b.cluster.links[WITHIN_HOST]
    assert found.collectives == (replace(sums[0], points=((1024, 2.0), (4096, 4.0))),)
    assert gather([a, a]).cluster.pairs == ()
    other = replace(sums[1], points=((1024, 9.0),))
    again = replace(b, cluster=replace(b.cluster, collectives=(other,)))
    assert gather([a, again]).cluster.collectives == (sums[0],)


def test_links_between_hosts_come_from_the_profile_that_has_them() -> None:
    a = taken_on(1.0)
    b = taken_on(1.0)
    link = replace(a.cluster.links[WITHIN_HOST], latency_s=1e-3)
    b = replace(b, cluster=replace(b.cluster, links={**b.cluster.links, ACROSS_HOSTS: link}))
    assert gather([a, b]).cluster.link(0, 2) == link
    renamed = tuple(replace(device, host="m", name=device.name.replace("n0", "m")) for device in a.cluster.devices)
    c = replace(a, cluster=replace(a.cluster, devices=renamed, pairs=(PairLink("m", "m", link),)))
    found = gather([a, c, replace(c)]).cluster
    assert [pair.src_host for pair in found.pairs] == ["m", "n1"]
    assert [device.host for device in found.devices] == ["n0", "n0", "m", "m", "n1", "n1"]


def test_provenance_tells_of_every_host() -> None:
    process = MeasuringProcess(1.0, 1.1, 0.02, True, {"1": 1.0})
    a = Provenance(
        {"torch": "2.13", "system": "x"}, 1.0, 1.1, 0.02, True, {"1": 1.0}, (process,), {"1": 0.1}, {"now": 2e9}
    )
    b = Provenance({"torch": "2.13", "system": "y"}, 2.0, 2.0, 0.0, False, {"1": 3.0}, (), {"1": 0.3, "4": 0.2})
    found = gather([replace(taken_on(1.0), provenance=a), replace(taken_on(1.0), provenance=b)]).provenance
    assert found.versions == {"torch": "2.13", "system": "x, y"}
    assert (found.run_delay, found.contended, found.iteration_s) == (0.02, True, {"1": 2.0})
    assert found.processes == (replace(process, host="n0"),)
    assert found.process_spread == {"1": 0.3, "4": 0.2}
    assert found.clocks == {"n0/now": 2e9}
    other = gather([replace(taken_on(1.0), provenance=a), replace(taken_on(2.0), provenance=b)]).provenance
    assert other.iteration_s == {"1": 1.0}


def test_another_graph_optimiser_or_dtype_is_refused_by_name() -> None:
    first = taken_on(1.0)
    longer = chain_profile(4, sizes=(1, 4))
    with pytest.raises(StaleFileError, match=r"a\.json and b\.json are no profiles of one model[\s\S]*only in one: l3"):
        gather([first, longer], ["a.json", "b.json"])
    optimizer = replace(first.optimizer, name="Adam")
    with pytest.raises(StaleFileError, match=r"optimiser in profile 0: SGD:lr=0\.01; in profile 1: Adam:lr=0\.01"):
        gather([first, replace(first, optimizer=optimizer)])
    with pytest.raises(StaleFileError, match="dtype"):
        gather([first, replace(first, model=replace(first.model, autocast="bfloat16"))])


def test_another_back_end_on_the_same_processor_is_refused() -> None:
    first = taken_on(1.0)
    keyed = {k: tuple(replace(one, key="Slow2d") for one in every) for k, every in first.measurements.items()}
    with pytest.raises(StaleFileError, match=r"l0 ran on other back ends[\s\S]*none; in profile 1: Slow2d"):
        gather([first, replace(first, measurements=keyed)])


def test_one_profile_stays_itself_but_for_what_runs_said_of_it() -> None:
    first = taken_on(1.0)
    assert gather([replace(first, calibration=Calibration("sha256:0"))]) == first
    with pytest.raises(UsageError, match="nothing to gather"):
        gather([])


def test_islands_of_a_host_that_is_renamed_are_its_own_and_tiers_are_alike() -> None:
    tiers = (Tier("nvlink", "island"), Tier("pcie", HOST), Tier("ethernet"))

    def tiered(bandwidth: float, tiers: tuple[Tier, ...] = tiers) -> Profile:
        found = taken_on(1.0)
        devices = tuple(replace(device, groups={"island": "n0/i"}) for device in found.cluster.devices)
        links = {tier.name: Link(0.0, bandwidth) for tier in tiers}
        return replace(found, cluster=Cluster(devices, links, tiers=tiers))

    found = gather([tiered(1e9), tiered(2e9)]).cluster
    assert [device.groups["island"] for device in found.devices] == ["n0/i", "n0/i", "n1/i", "n1/i"]
    assert [found.link_class(2, rank) for rank in (3, 0)] == ["nvlink", "ethernet"]
    assert [(pair.src_host, found.pair_tier(pair)) for pair in found.pairs] == [("n1", "pcie")]
    with pytest.raises(StaleFileError, match="no profiles of one model"):
        gather([tiered(1e9), tiered(1e9, tiers[1:])])


RAW = (1.0, 1.1, 0.9, 1.0)


def measurement(layer: str, seconds: float, part: tuple[int, ...] = (), samples: int = 2) -> Measurement:
    raw_s = tuple(3 * seconds * each for each in RAW)
    return Measurement(
        layer, samples, seconds, 2 * seconds, seconds, 0.0, 64, 8, len(RAW), 0.1, "Mkldnn", part=part, raw_s=raw_s
    )


def costs(*sizes: tuple[int, float], rest: Rest | None = None) -> ModelCosts:
    done = FinishedMeasurements(tuple(SizeCosts(n, (measurement("a", s, samples=n),), 4 * s) for n, s in sizes))
    return ModelCosts(done, rest or Rest({}, 1.0, 1.0, 0.001))


def test_the_median_of_the_processes_counts_and_every_run_is_kept_in_order() -> None:
    a, b = merged([[measurement("a", s), measurement("b", 10 * s)] for s in (1.0, 5.0, 2.0)])
    assert (a.layer, a.forward_s, a.backward_s, a.backward_input_s, a.backward_weight_s) == ("a", 2.0, 4.0, 2.0, 0.0)
    assert (b.forward_s, b.num_runs) == (20.0, 12)
    assert a.raw_s == tuple(3 * s * each for s in (1.0, 5.0, 2.0) for each in RAW)
    assert (a.saved_bytes, a.workspace_bytes, a.key) == (64, 8, "Mkldnn")
    assert a.spread > 0.5  # of runs that are five times apart


def test_a_single_measurement_stays_as_it_is() -> None:
    one = measurement("a", 1.0)
    assert merged([[one]]) == (one,)
    assert merged([[one], [measurement("a", 2.0, part=(4,))]])[0] == one
    assert merged([[one], [measurement("a", 2.0, samples=4)]])[1].forward_s == 2.0


def test_without_raw_samples_the_larger_spread_counts() -> None:
    pair = [replace(measurement("a", s), raw_s=(), spread=spread) for s, spread in ((1.0, 0.1), (2.0, 0.3))]
    assert [(one.spread, one.forward_s) for one in merged([[each] for each in pair])] == [(0.3, 1.5)]


def test_parameters_and_preparations_are_medians_too() -> None:
    found = merged_parameters([{"a": ParameterCost(s, 2 * s)} for s in (1.0, 9.0, 3.0)])
    assert found == {"a": ParameterCost(3.0, 6.0)}
    each = [[PreparationCost("map_0", ("x",), (), s, 2, s / 2)] for s in (1.0, 9.0, 3.0)]
    assert merged_preparations(each) == (PreparationCost("map_0", ("x",), (), 3.0, 2, 1.5),)
    assert merged_seconds([{"10": 1.0, "2": 1.0}, {"10": 3.0}]) == {"2": 1.0, "10": 2.0}
    assert list(merged_seconds([{"10": 1.0, "2": 1.0}])) == ["2", "10"]


def test_a_process_says_how_quiet_it_was_and_what_a_step_took() -> None:
    busy = process_of(costs((4, 1.0), (1, 0.25), rest=Rest({}, 1.0, 1.08, 0.001)), repeated=True)
    assert (busy.contended, busy.repeated, busy.run_delay) == (True, True, 0.001)
    assert list(busy.step_s.items()) == [("1", 0.75), ("4", 3.0)]
    assert not process_of(costs((4, 1.0)), repeated=False).contended


def test_the_spread_between_processes_is_by_size() -> None:
    processes = [process_of(costs((1, s), (4, 1.0)), repeated=False) for s in (1.0, 1.2, 0.9)]
    assert process_spread(processes) == {"1": pytest.approx(0.3), "4": 0.0}
    assert process_spread(processes[:1]) == {}
