"""Messages and sums over ranks: loops over the tables read the same, and bounds lie below."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from planner.costs.communication.collectives import collective_s, least_collective_s, memory_factor, norm_s
from planner.costs.communication.links import NetworkPrices, transport_of, without_pairs
from planner.costs.communication.tables import read_delays, transfer_s
from planner.ir.cluster import (
    ACROSS_HOSTS,
    ALL_REDUCE,
    DATASHEET,
    GLOO,
    INTERPOLATED,
    MEASURED,
    MEMORY,
    NORMALISATION,
    SHARED_MEMORY,
    STATISTICS,
    WITHIN_HOST,
    Cluster,
    Collective,
    Link,
    PairLink,
)
from planner.ir.cluster import DeviceSpec as Device
from tests.planner.costs.plain_prices import delay_s, message_s, moving_s, sum_s

SHEET = Link(1e-3, 1e6)
FAST = Link(0.0, 1e8, evidence=MEASURED)


def cluster(hosts: str, *collectives: Collective, pairs: tuple[PairLink, ...] = ()) -> Cluster:
    """A rank for each letter, on the host that it names."""
    devices = tuple(Device(f"{host}/cpu{rank}", "cpu", host, 2**30) for rank, host in enumerate(hosts))
    return Cluster(devices, {WITHIN_HOST: FAST, ACROSS_HOSTS: SHEET}, collectives, pairs)


def test_a_shared_normalisation_is_a_sum_and_what_each_rank_computes_around_it() -> None:
    summed = Collective(STATISTICS, 2, WITHIN_HOST, ((100, 1.0), (10000, 3.0)))
    call = Collective(NORMALISATION, 1, WITHIN_HOST, ((100, 0.5), (10000, 2.0)))
    known = cluster("aa", summed, call)
    unknown = cluster("aa", summed)
    assert norm_s(unknown, (0, 1), [100, 10000]) == pytest.approx([1.0, 3.0])
    assert norm_s(known, (0, 1), [0, 100, 1000, 10000]) == pytest.approx([0.0, 1.5, 3.0**0.5 + 1.0, 5.0])
    assert norm_s(known, (0,), 100) == 0.0
    assert collective_s(known, STATISTICS, (0, 1), 100) == 1.0


def test_ranks_of_a_host_that_pass_over_memory_at_once_share_it() -> None:
    tables = tuple(Collective(MEMORY, n, WITHIN_HOST, ((1 << 26, s),)) for n, s in ((1, 2.0), (2, 3.0), (4, 7.0)))
    machines = cluster("aaab", *tables)
    assert [memory_factor(machines, ranks) for ranks in ((0,), (0, 3), (0, 1), (0, 1, 3), (0, 1, 2))] == pytest.approx(
        [1.0, 1.0, 1.5, 1.5, 2.5]
    )
    assert memory_factor(cluster("aa"), (0, 1)) == memory_factor(cluster("aa", *tables[1:]), (0, 1)) == 1.0
    quicker = (tables[0], Collective(MEMORY, 2, WITHIN_HOST, ((1 << 26, 1.0),)))
    assert memory_factor(cluster("aa", *quicker), (0, 1)) == 1.0


@pytest.mark.cases(40)
@pytest.mark.parametrize("seed", range(40))
def test_loops_over_the_tables_read_the_same(seed: int) -> None:
    draw = random.Random(seed)
    sizes = sorted(draw.sample(range(1, 10**6), 3))
    tables = [
        Collective(
            draw.choice((ALL_REDUCE, STATISTICS)),
            draw.randint(2, 6),
            draw.choice((WITHIN_HOST, ACROSS_HOSTS)),
            tuple((size, draw.uniform(1e-3, 1.0)) for size in sizes),
            draw.choice((0, 0, 1, 2, 3)),
        )
        for _ in range(draw.randint(0, 6))
    ]
    points = tuple((size, draw.uniform(1e-3, 1.0)) for size in sizes)
    link = Link(1e-3, draw.uniform(1e3, 1e6), points if seed % 2 else (), draw.random() < 0.5)
    link = replace(link, sender_core=points[:2], receiver_core=points[1:])
    machines = cluster(
        "".join(draw.choices("abc", k=6)), *tables, pairs=(PairLink("a", "b", link),) if seed % 3 else ()
    )
    ranks = tuple(draw.sample(range(6), draw.randint(1, 6)))
    for size in (0, 1, sizes[0], draw.randint(*sizes[1:]), 5 * sizes[2]):
        operation = draw.choice((ALL_REDUCE, STATISTICS))
        found = sum_s(machines, operation, ranks, size)
        assert found == pytest.approx(float(collective_s(machines, operation, ranks, size)))
        if len(ranks) > 1:
            assert moving_s(machines, ranks, size) == pytest.approx(NetworkPrices(machines).moving_s(ranks, size))
        assert message_s(link, size) == pytest.approx(float(transfer_s(link, size)))
        assert delay_s(points, size) == pytest.approx(float(read_delays(points, size)))
    assert np.allclose(
        collective_s(machines, ALL_REDUCE, ranks, np.array(sizes)),
        [sum_s(machines, ALL_REDUCE, ranks, size) for size in sizes],
    )


@pytest.mark.parametrize("points", [(), ((1024, 2e-5), (2**20, 4e-4), (2**24, 2e-3))], ids=["latency", "measured"])
def test_no_group_of_a_large_cluster_takes_less_than_the_least(points: tuple[tuple[int, float], ...]) -> None:
    """And groups that no host can hold are known to use the links between hosts."""
    devices = tuple(Device(f"n{number // 8}/gpu{number % 8}", "gpu", f"n{number // 8}", 2**30) for number in range(160))
    links = {WITHIN_HOST: Link(1e-6, 1e11), ACROSS_HOSTS: Link(2e-5, 1e10, points)}
    table = Collective(ALL_REDUCE, 4, WITHIN_HOST, ((1024, 1e-5), (2**24, 4e-4)))
    cluster = Cluster(devices, links, (table,))
    sizes = (1e3, 1e6, 1e8)
    draw = random.Random(1)
    least = least_collective_s(cluster, ALL_REDUCE, sizes)
    for _ in range(60):
        count = draw.randint(2, 160)
        ranks = tuple(draw.sample(range(160), count)) if draw.random() < 0.5 else tuple(range(count))
        assert (least[count] <= collective_s(cluster, ALL_REDUCE, ranks, sizes) * (1 + 1e-9)).all()
    assert (np.diff(least[2:161], axis=0) >= 0).all()
    for count in (9, 64, 128):
        assert least[count] == pytest.approx(collective_s(cluster, ALL_REDUCE, tuple(range(count)), sizes))


POINTS = ((1000, 1e-3), (4000, 2e-3), (16000, 8e-3))
MEASURED_LINK = Link(0.0, 3e6, POINTS, evidence=MEASURED)
ENDS = ((0, 2), (1, 2), (2, 0), (0, 1))


def three_ranks(collectives: tuple[Collective, ...] = ()) -> Cluster:
    devices = tuple(Device(f"{host}/cpu{rank}", "cpu", host, 2**30) for rank, host in enumerate(("n0", "n0", "n1")))
    return Cluster(devices, {WITHIN_HOST: MEASURED_LINK, ACROSS_HOSTS: SHEET}, collectives)


def test_prices_know_how_well_they_are_known() -> None:
    network = NetworkPrices(three_ranks((Collective("all_reduce", 2, WITHIN_HOST, POINTS),)))
    assert network.transfer_s(0, 1, 4000) == pytest.approx(2e-3)
    assert network.transfer_evidence(0, 1, 4000) == MEASURED
    assert network.transfer_evidence(0, 1, 10**9) == INTERPOLATED
    assert network.transfer_evidence(0, 2, 1) == DATASHEET
    assert network.all_reduce_evidence((0, 1), 4000) == MEASURED
    assert network.all_reduce_evidence((0, 2), 4000) == DATASHEET


def test_what_a_message_takes_of_its_ranks_is_read_straight() -> None:
    delays = ((1000, 0.0), (3000, 2e-3))
    link = replace(MEASURED_LINK, sending=((1000, 1e-4), (2000, 2e-4)), sender_core=delays, receiver_core=delays[1:])
    network = NetworkPrices(replace(three_ranks(), links={WITHIN_HOST: link, ACROSS_HOSTS: SHEET}))
    assert [network.sending_s(0, 1, n) for n in (0, 10, 1500, 4000)] == pytest.approx([0.0, 1e-4, 1.5e-4, 4e-4])
    assert network.core_s(0, 1, 2000) == pytest.approx((1e-3, 2e-3))
    assert network.core_s(0, 1, 6000) == pytest.approx((4e-3, 4e-3))
    assert (network.sending_s(0, 2, 1000), network.core_s(0, 2, 1000)) == (0.0, (0.0, 0.0))


def test_a_link_stated_for_a_pair_of_hosts_goes_before_its_class_and_one_way_only() -> None:
    slow = Link(1.0, 1e3)
    network = NetworkPrices(replace(three_ranks(), pairs=(PairLink("n0", "n1", slow),)))
    assert [network.transfer_s(*ends, 1000) for ends in ENDS] == pytest.approx([2.0, 2.0, 2e-3, 1e-3])
    links, numbers = network.classes((0, 1, 2))
    assert set(links) == {slow, SHEET, MEASURED_LINK}
    assert [links[numbers[ends]] for ends in ((0, 2), (2, 1), (0, 1))] == [slow, SHEET, MEASURED_LINK]
    assert [numbers[rank, rank] for rank in range(3)] == [-1, -1, -1]


@pytest.mark.parametrize("other", [SHEET, replace(MEASURED_LINK, points=((500, 2e-3), (8000, 3e-3)))])
def test_for_bounds_no_message_takes_longer_than_between_any_two_hosts(other: Link) -> None:
    links = {WITHIN_HOST: SHEET, ACROSS_HOSTS: MEASURED_LINK}
    machines = replace(three_ranks(), links=links, pairs=(PairLink("n0", "n1", other),))
    least = without_pairs(machines).links[ACROSS_HOSTS]
    sizes = np.geomspace(1, 1e7, 300)
    for link in (MEASURED_LINK, other):
        assert (transfer_s(least, sizes) <= transfer_s(link, sizes) * (1 + 1e-9)).all()


def test_a_network_card_carries_what_the_fastest_link_of_its_host_does() -> None:
    machines = replace(
        three_ranks(), pairs=(PairLink("n0", "n1", Link(0.0, 5e6)), PairLink("n1", "n0", Link(0.0, 2e5)))
    )
    assert machines.nic_bytes_per_s("n0") == 5e6
    assert three_ranks().nic_bytes_per_s("n1") == SHEET.bandwidth_bytes_per_s
    assert Cluster(three_ranks().devices[:2], {WITHIN_HOST: SHEET}).nic_bytes_per_s("n0") is None


def over(within: str, between: str = "") -> Cluster:
    links = {WITHIN_HOST: replace(MEASURED_LINK, transport=within), ACROSS_HOSTS: replace(SHEET, transport=between)}
    return replace(three_ranks(), links=links)


def test_what_ranks_exchange_by_is_that_of_the_links_between_them() -> None:
    mixed = over(SHARED_MEMORY, GLOO)
    assert transport_of(mixed, (0, 1)) == SHARED_MEMORY
    assert transport_of(mixed, (1, 2)) == GLOO
    assert transport_of(mixed, (0, 1, 2)) == "shared memory, gloo between hosts"
    assert transport_of(over(GLOO, GLOO), (0, 1, 2)) == GLOO
    assert transport_of(mixed, (2,)) == ""
    assert transport_of(over(SHARED_MEMORY), (0, 1, 2)) == ""
    network = NetworkPrices(mixed)
    assert not network.in_background((0, 1)), "in shared memory nothing goes on while ranks compute"
    assert network.in_background((0, 1, 2)), "it waits for gloo"
    assert NetworkPrices(three_ranks()).in_background((0, 1))


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
