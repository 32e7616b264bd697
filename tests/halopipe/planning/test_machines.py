from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.chains import chain_profile, cluster
from halopipe.planning import edits
from halopipe.planning.problem import make_problem
from planner.ir.cluster import ACROSS_HOSTS, DATASHEET, HOST, MEASURED, WITHIN_HOST, Cluster, Link, PairLink, Tier
from planner.ir.errors import UnknownNameError, UsageError

FLAT = cluster((1.0, 1.0), latency_s=1e-3, bandwidth_bytes_per_s=1e6)
TWO_HOSTS = cluster((1.0, 2.0, 1.0, 2.0), ("n0", "n0", "n1", "n1"))

TIERED = replace(
    TWO_HOSTS,
    devices=tuple(
        replace(device, kind="kind-1", groups={"island": f"{device.host}/i", "rack": "r"})
        for device in TWO_HOSTS.devices
    ),
    links={"nvlink": Link(0.0, 1e9), "pcie": Link(0.0, 1e8), "leaf": Link(0.0, 1e7), "spine": Link(0.0, 1e6)},
    collectives=(),
    tiers=(Tier("nvlink", "island"), Tier("pcie", HOST), Tier("leaf", "rack"), Tier("spine")),
)


def names(found: Cluster) -> list[str]:
    return [device.name for device in found.devices]


def test_further_devices_are_like_the_last_and_on_its_host() -> None:
    assert names(edits.with_devices(FLAT, 4)) == ["n0/cpu0", "n0/cpu1", "n0/cpu2", "n0/cpu3"]
    assert names(edits.with_devices(TWO_HOSTS, 6))[4:] == ["n1/cpu4", "n1/cpu5"]
    assert names(edits.with_devices(TWO_HOSTS, 1)) == ["n0/cpu0"]


def test_further_hosts_are_like_the_last() -> None:
    found = edits.with_hosts(TWO_HOSTS, 3)
    assert names(found)[4:] == ["n2/cpu2", "n2/cpu3"]
    assert [device.kind for device in found.devices[4:]] == ["kind-1", "kind-2"]
    assert names(edits.with_hosts(TWO_HOSTS, 1)) == ["n0/cpu0", "n0/cpu1"]


def test_machines_without_a_link_between_them_are_refused() -> None:
    with pytest.raises(UsageError, match="nothing is known of the link across-hosts"):
        edits.with_hosts(FLAT, 2)
    alone = Cluster(FLAT.devices[:1], {})
    with pytest.raises(UsageError, match="nothing is known of the link within-host"):
        edits.with_devices(alone, 2)


def test_one_more_of_a_kind_comes_after_all_others() -> None:
    found = edits.with_one_more(TWO_HOSTS, "kind-1")
    assert (found.devices[-1].kind, found.devices[-1].host, found.devices[-1].name) == ("kind-1", "n1", "n1/cpu4")


def test_a_link_twice_as_fast_halves_every_time() -> None:
    link = edits.with_faster_link(FLAT, WITHIN_HOST, 2.0).links[WITHIN_HOST]
    assert (link.latency_s, link.bandwidth_bytes_per_s, link.evidence) == (5e-4, 2e6, DATASHEET)
    assert [s for _, s in link.points] == [s / 2 for _, s in FLAT.links[WITHIN_HOST].points]
    collective = edits.with_faster_link(FLAT, WITHIN_HOST, 2.0).collectives[0]
    assert [s for _, s in collective.points] == [s / 2 for _, s in FLAT.collectives[0].points]


def test_bandwidth_and_latency_change_their_own_part_of_a_measured_time() -> None:
    wide = edits.with_link(FLAT, WITHIN_HOST, bandwidth_bytes_per_s=4e6).links[WITHIN_HOST]
    assert [s for _, s in wide.points] == pytest.approx([1e-3 + n / 4e6 for n, _ in wide.points])
    quick = edits.with_link(FLAT, WITHIN_HOST, latency_s=0.0).links[WITHIN_HOST]
    assert [s for _, s in quick.points] == pytest.approx([n / 1e6 for n, _ in quick.points])
    other = edits.with_link(TWO_HOSTS, WITHIN_HOST, latency_s=1.0)
    assert other.links[ACROSS_HOSTS] == TWO_HOSTS.links[ACROSS_HOSTS]
    assert [c for c in other.collectives if c.link == ACROSS_HOSTS] == [
        c for c in TWO_HOSTS.collectives if c.link == ACROSS_HOSTS
    ]


def test_links_of_pairs_change_with_their_class_and_cores_stay_as_they_are() -> None:
    link = Link(1e-3, 1e6, ((1000, 2e-3),), True, MEASURED, 64_000, ((1000, 1e-4),), ((1000, 2e-4),), ((1000, 3e-4),))
    apart = PairLink("n0", "n1", replace(link, bandwidth_bytes_per_s=5e5, points=((1000, 3e-3),)))
    known = replace(TWO_HOSTS, links={**TWO_HOSTS.links, ACROSS_HOSTS: link}, pairs=(apart,))
    for found in (
        edits.with_link(known, ACROSS_HOSTS, bandwidth_bytes_per_s=2e6),
        edits.with_faster_link(known, ACROSS_HOSTS, 2.0),
    ):
        both = (found.links[ACROSS_HOSTS], found.pairs[0].link)
        assert [each.bandwidth_bytes_per_s for each in both] == [2e6, 1e6]
        assert {(x.burst_bytes, x.sending, x.sender_core, x.receiver_core) for x in both} == {
            (64_000, link.sending, link.sender_core, link.receiver_core)
        }
        assert both[1].points[0][1] < 3e-3
    assert edits.with_faster_link(known, WITHIN_HOST, 2.0).pairs == known.pairs


def test_further_hosts_are_in_the_rack_of_the_last_with_islands_of_their_own() -> None:
    found = edits.with_hosts(TIERED, 3)
    assert names(found)[4:] == ["n2/cpu2", "n2/cpu3"]
    assert [device.groups for device in found.devices[4:]] == [{"island": "n2/i", "rack": "r"}] * 2
    assert found.link_class(4, 5) == "nvlink"
    assert found.link_class(2, 4) == "leaf"
    assert edits.with_devices(TIERED, 5).devices[-1].groups == TIERED.devices[-1].groups


def test_a_link_of_any_tier_is_changed_alone() -> None:
    problem = make_problem(replace(chain_profile(2, 2), cluster=TIERED), num_ranks=2)
    found = edits.changed(problem, "link leaf.speed=2, link nvlink.latency=1us").problem.profile.cluster
    before = {name: link.bandwidth_bytes_per_s for name, link in TIERED.links.items()}
    after = {name: link.bandwidth_bytes_per_s for name, link in found.links.items()}
    assert after == {**before, "leaf": 2 * before["leaf"]}
    assert found.links["nvlink"].latency_s == 1e-6
    with pytest.raises(UnknownNameError, match="no link 'across-hosts'"):
        edits.changed(problem, "link across-hosts.speed=2")
