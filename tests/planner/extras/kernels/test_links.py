"""Links of GPUs against the tables, and the relations that hold of any ring."""

from __future__ import annotations

import pytest

from planner.extras.kernels.clusters import cluster_of
from planner.extras.kernels.links import COLLECTIVES, bus_factor, links, systems
from planner.ir.cluster import ACROSS_HOSTS, WITHIN_HOST, Cluster, DeviceSpec, Link
from planner.ir.errors import UnknownNameError, UsageError


@pytest.mark.parametrize("system", systems())
def test_a_measured_size_is_read_off_the_table_and_more_bytes_take_longer(system: str) -> None:
    known = links(system)
    for (name, members, per_host), points in known.tables.items():
        for size, seconds in points:
            found = known.collective(name, size, members, per_host)
            assert found.seconds == pytest.approx(seconds)
            assert found.evidence == "measured table"
        if system.endswith("_host"):
            assert [taken for _, taken in points] == sorted(taken for _, taken in points)
        largest, longest = points[-1]
        beyond = known.collective(name, 4 * largest, members, per_host).seconds
        assert 2 * longest < beyond < 6 * longest


def test_half_of_a_sum_is_a_scatter_or_a_gather_and_the_evidence_says_so() -> None:
    known = links("v100_host")
    size = 2.0**26
    whole = known.collective("all_reduce", size, 4, 4)
    for name in ("reduce_scatter", "all_gather"):
        half = known.collective(name, size, 4, 4)
        assert half.seconds == pytest.approx(whole.seconds / 2, rel=0.1)
        assert "from all_reduce of 4" in half.evidence
        assert half.high / half.low > whole.high / whole.low


def test_a_switch_that_sums_makes_sums_faster_than_their_halves() -> None:
    """On H100, whose NVLink switches add what passes; where a table has scatters and gathers, it counts."""
    for system, least, most in (("h100_dgx", 1.2, 1.5), ("a100_dgx", 0.9, 1.2), ("b200_dgx", 1.05, 1.3)):
        known = links(system)
        size = 2.0**28
        whole = known.collective("all_reduce", size, 8, 8)
        for name in ("reduce_scatter", "all_gather", "all_to_all"):
            half = known.collective(name, size, 8, 8)
            assert half.evidence == whole.evidence == "measured table"
            assert least < 2 * half.seconds / whole.seconds < most


def test_a_stated_network_is_a_ring_over_the_cards_of_its_members() -> None:
    known = links("a100_dgx", 25e9)
    size = 2.0**30
    alone, together = (known.collective("all_reduce", size, *shape).seconds for shape in ((8, 1), (64, 8)))
    assert alone == pytest.approx(bus_factor("all_reduce", 8) * size / (0.72 * 25e9), rel=0.01)
    assert together < alone / 6
    assert known.collective("all_reduce", size, 64, 8).evidence == "datasheet"
    assert known.collective("all_reduce", size, 8, 8).evidence.startswith("measured table")


def test_the_tiers_of_a_cluster_count_where_there_is_no_table() -> None:
    devices = tuple(DeviceSpec(f"n{rank // 2}/gpu{rank % 2}", "T4", f"n{rank // 2}", 16 << 30) for rank in range(4))
    known = links(Cluster(devices, {WITHIN_HOST: Link(1e-5, 1e10), ACROSS_HOSTS: Link(5e-5, 1e9)}))
    near, far = (known.collective("send", 1e8, 2, per_host).seconds for per_host in (2, 1))
    assert near == pytest.approx(1e-5 + 1e8 / (0.72 * 1e10))
    assert far == pytest.approx(5e-5 + 1e8 / (0.72 * 1e9))


def test_one_member_exchanges_nothing_and_what_is_not_known_is_refused() -> None:
    known = links("h100_dgx")
    for name in COLLECTIVES:
        assert known.collective(name, 1e6, 1, 1).seconds == 0
    with pytest.raises(UnknownNameError, match="no collective 'allreduce'"):
        known.collective("allreduce", 1e6, 2, 2)
    with pytest.raises(ValueError, match="9 members are not 8"):
        known.collective("all_reduce", 1e6, 9, 8)
    with pytest.raises(UnknownNameError, match="no system 'dgx' was measured"):
        links("dgx")
    with pytest.raises(UnknownNameError, match="no table of rtx_3090_host says what all_reduce takes across hosts"):
        links("rtx_3090_host").collective("all_reduce", 1e6, 8, 4)


def test_a_system_by_name_is_a_cluster_with_the_links_of_its_tables() -> None:
    one = cluster_of("h100-dgx")
    four = cluster_of("h100-dgx", 32)
    assert (len(one.devices), one.tiers_used()) == (8, (WITHIN_HOST,))
    assert (len({device.host for device in four.devices}), four.unlinked()) == (4, None)
    points = dict(links("h100_dgx").tables["all_reduce", 8, 8])
    (sums,) = (each for each in four.collectives if each.num_ranks == 8)
    assert dict(sums.points) == pytest.approx(points)
    with pytest.raises(UsageError, match="12 devices are no whole number of hosts"):
        cluster_of("h100-dgx", 12)


def test_hosts_that_nvlink_joins_are_one_host_to_a_plan() -> None:
    joined = cluster_of("gb200-nvl72", 72)
    assert joined.tiers_used() == (WITHIN_HOST,)
    assert cluster_of("gb200-nvl72", 144).tiers_used() == (WITHIN_HOST, ACROSS_HOSTS)
    with pytest.raises(UsageError, match="76 devices are no whole number of hosts"):
        cluster_of("gb200-nvl72", 76)
