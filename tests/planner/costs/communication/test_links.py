from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from planner.costs.communication.collectives import transfer_s
from planner.costs.communication.links import NetworkPrices, transport_of, without_pairs
from planner.ir.cluster import (
    ACROSS_HOSTS,
    ALL_REDUCE,
    DATASHEET,
    GLOO,
    INTERPOLATED,
    MEASURED,
    SHARED_MEMORY,
    WITHIN_HOST,
    Cluster,
    Collective,
    Link,
    PairLink,
)
from planner.ir.cluster import DeviceSpec as Device

POINTS = ((1000, 1e-3), (4000, 2e-3), (16000, 8e-3))
MEASURED_LINK = Link(0.0, 3e6, POINTS, evidence=MEASURED)
SHEET = Link(1e-3, 1e6)
ENDS = ((0, 2), (1, 2), (2, 0), (0, 1))


def cluster(collectives: tuple[Collective, ...] = ()) -> Cluster:
    devices = tuple(Device(f"{host}/cpu{rank}", "cpu", host, 2**30) for rank, host in enumerate(("n0", "n0", "n1")))
    return Cluster(devices, {WITHIN_HOST: MEASURED_LINK, ACROSS_HOSTS: SHEET}, collectives)


@pytest.mark.parametrize(
    ("num_bytes", "seconds"), [(0, 0.0), (10, 1e-3), (1000, 1e-3), (2000, 2**0.5 * 1e-3), (4000, 2e-3), (16000, 8e-3)]
)
def test_a_measured_link_is_read_in_log_log(num_bytes: int, seconds: float) -> None:
    assert float(transfer_s(MEASURED_LINK, num_bytes)) == pytest.approx(seconds)


@pytest.mark.parametrize("num_bytes", [16001, 64000, 10**9])
def test_beyond_the_table_bytes_go_at_the_sustained_rate(num_bytes: int) -> None:
    assert float(transfer_s(MEASURED_LINK, num_bytes)) == pytest.approx(8e-3 + (num_bytes - 16000) / 3e6)


def test_a_link_from_a_datasheet_is_latency_and_bandwidth() -> None:
    assert float(transfer_s(SHEET, 2000)) == pytest.approx(3e-3)
    assert float(transfer_s(SHEET, 0)) == 0.0


def test_prices_know_how_well_they_are_known() -> None:
    network = NetworkPrices(cluster((Collective("all_reduce", 2, WITHIN_HOST, POINTS),)))
    assert network.transfer_s(0, 1, 4000) == pytest.approx(2e-3)
    assert network.transfer_evidence(0, 1, 4000) == MEASURED
    assert network.transfer_evidence(0, 1, 10**9) == INTERPOLATED
    assert network.transfer_evidence(0, 2, 1) == DATASHEET
    assert network.all_reduce_evidence((0, 1), 4000) == MEASURED
    assert network.all_reduce_evidence((0, 2), 4000) == DATASHEET


def test_what_a_message_takes_of_its_ranks_is_read_straight() -> None:
    delays = ((1000, 0.0), (3000, 2e-3))
    link = replace(MEASURED_LINK, sending=((1000, 1e-4), (2000, 2e-4)), sender_core=delays, receiver_core=delays[1:])
    network = NetworkPrices(replace(cluster(), links={WITHIN_HOST: link, ACROSS_HOSTS: SHEET}))
    assert [network.sending_s(0, 1, n) for n in (0, 10, 1500, 4000)] == pytest.approx([0.0, 1e-4, 1.5e-4, 4e-4])
    assert network.core_s(0, 1, 2000) == pytest.approx((1e-3, 2e-3))
    assert network.core_s(0, 1, 6000) == pytest.approx((4e-3, 4e-3))
    assert (network.sending_s(0, 2, 1000), network.core_s(0, 2, 1000)) == (0.0, (0.0, 0.0))


def test_a_link_stated_for_a_pair_of_hosts_goes_before_its_class_and_one_way_only() -> None:
    slow = Link(1.0, 1e3)
    network = NetworkPrices(replace(cluster(), pairs=(PairLink("n0", "n1", slow),)))
    assert [network.transfer_s(*ends, 1000) for ends in ENDS] == pytest.approx([2.0, 2.0, 2e-3, 1e-3])
    links, numbers = network.classes((0, 1, 2))
    assert set(links) == {slow, SHEET, MEASURED_LINK}
    assert [links[numbers[ends]] for ends in ((0, 2), (2, 1), (0, 1))] == [slow, SHEET, MEASURED_LINK]
    assert [numbers[rank, rank] for rank in range(3)] == [-1, -1, -1]


@pytest.mark.parametrize("other", [SHEET, replace(MEASURED_LINK, points=((500, 2e-3), (8000, 3e-3)))])
def test_for_bounds_no_message_takes_longer_than_between_any_two_hosts(other: Link) -> None:
    links = {WITHIN_HOST: SHEET, ACROSS_HOSTS: MEASURED_LINK}
    machines = replace(cluster(), links=links, pairs=(PairLink("n0", "n1", other),))
    least = without_pairs(machines).links[ACROSS_HOSTS]
    sizes = np.geomspace(1, 1e7, 300)
    for link in (MEASURED_LINK, other):
        assert (transfer_s(least, sizes) <= transfer_s(link, sizes) * (1 + 1e-9)).all()


def test_a_network_card_carries_what_the_fastest_link_of_its_host_does() -> None:
    machines = replace(cluster(), pairs=(PairLink("n0", "n1", Link(0.0, 5e6)), PairLink("n1", "n0", Link(0.0, 2e5))))
    assert machines.nic_bytes_per_s("n0") == 5e6
    assert cluster().nic_bytes_per_s("n1") == SHEET.bandwidth_bytes_per_s
    assert Cluster(cluster().devices[:2], {WITHIN_HOST: SHEET}).nic_bytes_per_s("n0") is None


def over(within: str, between: str = "") -> Cluster:
    links = {WITHIN_HOST: replace(MEASURED_LINK, transport=within), ACROSS_HOSTS: replace(SHEET, transport=between)}
    return replace(cluster(), links=links)


def test_what_ranks_exchange_by_is_that_of_the_links_between_them() -> None:
    mixed = over(SHARED_MEMORY, GLOO)
    assert transport_of(mixed, (0, 1)) == SHARED_MEMORY
    assert transport_of(mixed, (1, 2)) == GLOO
    assert transport_of(mixed, (0, 1, 2)) == "shared memory, gloo between hosts"
    assert transport_of(over(GLOO, GLOO), (0, 1, 2)) == GLOO
    assert transport_of(mixed, (2,)) == ""
    assert transport_of(over(SHARED_MEMORY), (0, 1, 2)) == ""


def test_in_shared_memory_nothing_goes_on_while_ranks_compute() -> None:
    network = NetworkPrices(over(SHARED_MEMORY, GLOO))
    assert not network.in_background((0, 1))
    assert network.in_background((0, 1, 2))  # it waits for gloo
    assert NetworkPrices(cluster()).in_background((0, 1))


@pytest.mark.parametrize("seed", range(20))
def test_no_message_and_no_sum_puts_more_on_a_card_than_is_said(seed: int) -> None:
    draw = np.random.default_rng(seed)

    def points(most: int) -> tuple[tuple[int, float], ...]:
        sizes = np.unique(draw.integers(100, 10**6, draw.integers(1, most)))
        return tuple((int(size), float(size * draw.uniform(2e-7, 3e-6))) for size in sizes)

    devices = tuple(Device(f"n{rank // 2}/cpu{rank}", "cpu", f"n{rank // 2}", 2**30) for rank in range(8))
    across = Link(1e-4 * (seed % 2), 1e6, points(5) if seed % 3 else ())
    tables = tuple(
        Collective(ALL_REDUCE, count, ACROSS_HOSTS, points(6), hosts)
        for count, hosts in ((2, 0), (3, 0), (4, 2), (6, 3))
        if draw.random() < 0.5
    )
    network = NetworkPrices(Cluster(devices, {WITHIN_HOST: SHEET, ACROSS_HOSTS: across}, tables))
    sizes = np.unique(np.geomspace(1, 1e9, 300).astype(np.int64)).astype(np.float64)
    assert (sizes / transfer_s(across, sizes) <= network.most_card_bytes_per_s * (1 + 1e-9)).all()
    for ranks in [(0, 2), (0, 2, 4), (0, 2, 4, 6), (0, 1, 2), *(tuple(range(count)) for count in range(3, 9))]:
        moved = 2 * (len(ranks) - 1) / len(ranks) * sizes
        assert (moved / network.all_reduces_s(ranks, sizes) <= network.most_card_bytes_per_s * (1 + 1e-9)).all()
