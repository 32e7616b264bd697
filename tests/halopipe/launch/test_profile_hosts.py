from __future__ import annotations

from dataclasses import replace

import pytest

from halopipe.launch.hosts import Host, Hosts
from halopipe.launch.profile_hosts import together
from halopipe.launch.profile_order import ProfileOrder, ProfileRequest
from halopipe.planning.measure import measure
from halopipe.version import version
from planner.ir.cluster import ACROSS_HOSTS, Cluster, Link, PairLink
from planner.ir.errors import StaleFileError, UsageError
from planner.ir.profile import ModelSource, Optimizer
from tests.planner.factories import chain_profile

SOURCE = ModelSource("small.py:net", {"width": "2"}, (2, 8), "float32", "", ("scale",))
REQUEST = ProfileRequest(SOURCE, Optimizer("SGD", {"lr": 0.1}, 0.0), (1, 2), ("sample",), 3, True, 1)
ORDER = ProfileOrder(REQUEST, (0, 1), ("n0", "n0", "n1"), "10.0.0.1", 29400, "eth0", "/somewhere", ("/lib",), version())


def test_an_order_survives_its_line() -> None:
    assert "\n" not in ORDER.to_json()
    assert ProfileOrder.from_json(ORDER.to_json()) == ORDER
    assert ProfileOrder.from_json(ORDER.by(7).to_json()).parent == 7


def test_an_order_of_another_release_is_refused() -> None:
    with pytest.raises(StaleFileError, match="not the same on all hosts"):
        ProfileOrder.from_json(replace(ORDER, version="0.0").to_json())


def test_hosts_become_one_profile_with_the_links_that_the_first_one_wrote() -> None:
    profile, link = chain_profile(3, num_devices=1), Link(1e-4, 1e8)
    devices = [replace(profile.cluster.devices[0], name=f"n{host}/cpu0", host=f"n{host}") for host in range(2)]
    pairs = (PairLink("n1", "n0", replace(link, bandwidth_bytes_per_s=5e7)),)
    first = replace(profile, cluster=Cluster((devices[0],), {ACROSS_HOSTS: link}, (), pairs))
    other = replace(profile, cluster=Cluster((devices[1],), {}))
    found = together({"node07": first, "node09": other}).cluster
    assert [device.name for device in found.devices] == ["n0/cpu0", "n1/cpu0"]
    assert (dict(found.links), found.pairs) == ({ACROSS_HOSTS: link}, pairs)
    assert found.link(1, 0) == pairs[0].link


def test_resuming_is_for_one_host() -> None:
    with pytest.raises(UsageError, match="--resume is for a profile of one host"):
        measure(SOURCE, num_workers=1, optimizer="SGD", resume=True, hosts=Hosts((Host("node07"),)))
