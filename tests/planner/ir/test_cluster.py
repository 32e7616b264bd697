"""Tiers of links: nested groups of devices, and the links and faults of files that state them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.chains import chain_profile
from planner.ir.cluster import ACROSS_HOSTS, HOST, HOST_TIERS, WITHIN_HOST, Cluster, DeviceSpec, Link, PairLink, Tier
from planner.ir.codec import dumps, loads
from planner.ir.errors import CorruptFileError
from planner.ir.profile import Profile

TIERS = (Tier("nvlink", "island"), Tier("pcie", HOST), Tier("leaf", "rack"), Tier("spine"))


def device(name: str, rack: str, island: str = "") -> DeviceSpec:
    groups = {"rack": rack, **({"island": island} if island else {})}
    return DeviceSpec(name, "kind-1", name.partition("/")[0], 2**30, groups=groups)


DEVICES = (
    device("a/0", "r", "a/left"),
    device("a/1", "r", "a/left"),
    device("a/2", "r", "a/right"),
    device("a/3", "r"),
    device("a/4", "r"),
    device("b/0", "r"),
    device("c/0", "s"),
)
LINKS = {tier.name: Link(0.0, 10.0 ** (9 - level)) for level, tier in enumerate(TIERS)}
CLUSTER = Cluster(DEVICES, LINKS, tiers=TIERS)


def test_two_devices_use_the_link_of_the_smallest_group_that_holds_both() -> None:
    assert [CLUSTER.link_class(0, rank) for rank in range(1, 7)] == ["nvlink", "pcie", "pcie", "pcie", "leaf", "spine"]
    assert CLUSTER.link_class(3, 4) == "pcie"  # in no island
    assert CLUSTER.link(0, 5) is LINKS["leaf"]
    assert CLUSTER.tiers_used() == tuple(LINKS)
    assert replace(CLUSTER, devices=DEVICES[2:5]).tiers_used() == ("pcie",)


def test_a_collective_uses_the_tier_of_the_smallest_group_that_holds_all() -> None:
    assert CLUSTER.group_link_class((0, 1)) == "nvlink"
    assert CLUSTER.group_link_class((0, 1, 2)) == "pcie"
    assert CLUSTER.group_link_class((0, 5)) == "leaf"
    assert CLUSTER.group_link_class((5, 6, 0)) == "spine"


def test_devices_in_no_group_of_a_level_are_told_apart() -> None:
    assert CLUSTER.groups_of(0) == ("a/left", "a", "r")
    assert CLUSTER.groups_of(3)[0] != CLUSTER.groups_of(4)[0]


def test_a_link_of_a_host_leaves_its_islands_alone() -> None:
    own = Link(0.0, 5.0)
    found = replace(CLUSTER, pairs=(PairLink("a", "a", own), PairLink("a", "b", own)))
    assert [found.link(0, rank) is own for rank in (1, 2, 5, 6)] == [False, True, True, False]
    assert [found.pair_tier(pair) for pair in found.pairs] == ["pcie", "leaf"]


def test_a_card_is_as_fast_as_the_fastest_link_to_another_host() -> None:
    assert CLUSTER.nic_bytes_per_s("a") == CLUSTER.nic_bytes_per_s("b") == 1e7
    assert CLUSTER.nic_bytes_per_s("c") == 1e6
    assert replace(CLUSTER, devices=DEVICES[:3]).nic_bytes_per_s("a") is None


def test_a_cluster_without_tiers_has_two_and_its_file_says_nothing_of_them() -> None:
    plain = chain_profile(2, 2, hosts=("n0", "n1"))
    assert plain.cluster.nested_tiers == HOST_TIERS
    assert plain.cluster.tiers_used() == (ACROSS_HOSTS,)
    assert plain.cluster.host_tier == WITHIN_HOST
    assert "tiers" not in dumps(plain)
    assert "groups" not in dumps(plain)


def profile_on(cluster: Cluster) -> Profile:
    return replace(chain_profile(2, 1), cluster=cluster)


def test_a_profile_with_tiers_survives_its_file() -> None:
    profile = profile_on(CLUSTER)
    assert loads(dumps(profile), Profile) == profile


def moved(number: int, **groups: str) -> tuple[DeviceSpec, ...]:
    return tuple(replace(each, groups=groups) if number == k else each for k, each in enumerate(DEVICES))


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("cluster", "fault"),
    [
        (
            replace(CLUSTER, links={"nvlink": LINKS["nvlink"], "pcie": LINKS["pcie"], "spine": LINKS["spine"]}),
            "cluster.links.leaf: is missing: a/0 and b/0 use it",
        ),
        (replace(CLUSTER, links={**LINKS, "spin": LINKS["spine"]}), "cluster.links.spin: no tier 'spin'; did you mean"),
        (
            replace(CLUSTER, devices=moved(1, island="a/left", rack="s")),
            "cluster.devices[1].groups.rack: host 'a' is in rack 's' (a/1) and in 'r' (a/0): groups nest",
        ),
        (
            replace(CLUSTER, devices=moved(5, island="a/left", rack="r")),
            "cluster.devices[5].host: island 'a/left' is in host 'b' (b/0) and in 'a' (a/0): groups nest",
        ),
        (
            replace(CLUSTER, devices=moved(1, iland="a/left", rack="r")),
            "cluster.devices[1].groups.iland: no tier within 'iland'; did you mean 'island'?",
        ),
        (replace(CLUSTER, devices=moved(1, host="a", rack="r")), "cluster.devices[1].groups.host: is named by 'host'"),
        (replace(CLUSTER, devices=moved(1, island="", rack="r")), "cluster.devices[1].groups.island: is empty"),
        (replace(CLUSTER, tiers=TIERS[:3]), "cluster.tiers: the last tier, and no other, is within all devices"),
        (replace(CLUSTER, tiers=(TIERS[0], *TIERS[2:])), "cluster.tiers: no tier is within 'host'"),
        (replace(CLUSTER, tiers=(TIERS[0], *TIERS)), "cluster.tiers[1]: a tier called 'nvlink' is there already"),
        (replace(CLUSTER, tiers=()), "cluster.devices[0].groups.rack: no tier within 'rack'"),
    ],
)
def test_a_file_whose_tiers_make_no_sense_is_refused(cluster: Cluster, fault: str) -> None:
    with pytest.raises(CorruptFileError) as caught:
        loads(dumps(profile_on(cluster)), Profile)
    assert any(each.startswith(fault) for each in caught.value.details), caught.value.details
