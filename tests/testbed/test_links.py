"""Links between hosts, one of which is slower than the others."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from benchmarks.devices.testbed import RATES, Testbed
from benchmarks.links.__main__ import answer_of
from planner.ir.cluster import ACROSS_HOSTS
from profiler.links.cpu import LinkCosts
from profiler.links.messages import LinkEffort

pytestmark = pytest.mark.testbed
Build = Callable[..., Testbed]

LEAST = LinkEffort(rounds=1, most=3, each_s=1e-3, longest_s=1e-3, stream_s=0.2, bends=False)


@pytest.mark.exhaustive("hosts of the testbed")
def test_links_to_a_slower_host_are_stated_apart(build: Build) -> None:
    testbed = build(3, "1gbit")
    slow = RATES["200mbit"]
    bucket = ("tbf", "rate", f"{slow.bits_per_s:.0f}bit", "burst", str(slow.burst_bytes), "limit", "1000000")
    for namespace, device in ((testbed.hosts[2].name, "eth0"), (f"{testbed.name}-switch", "port2")):
        assert os.spawnlp(os.P_WAIT, "tc", *("tc", "-n", namespace), *_replace(device), *bucket) == 0
    found = answer_of(("n0", "n1", "n2"), testbed, {"effort": LEAST})
    assert isinstance(found, LinkCosts)
    rates = {(pair.src_host, pair.dst_host): pair.link.bandwidth_bytes_per_s for pair in found.pairs}
    usual = found.links[ACROSS_HOSTS].bandwidth_bytes_per_s
    limit = 1.2 * slow.payload_bytes_per_s  # what a busy machine cannot make faster
    assert all(rates.get(ends, usual) < limit for ends in (("n0", "n2"), ("n1", "n2"), ("n2", "n0"), ("n2", "n1")))
    assert all(rates.get(ends, usual) > limit for ends in (("n0", "n1"), ("n1", "n0")))


def _replace(device: str) -> tuple[str, ...]:
    return ("qdisc", "replace", "dev", device, "root")
