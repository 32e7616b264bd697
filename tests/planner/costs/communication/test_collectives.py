from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from planner.costs.communication.collectives import (
    collective_evidence,
    collective_s,
    least_collective_s,
    memory_factor,
    norm_s,
    read_delays,
    transfer_s,
)
from planner.ir.cluster import (
    ACROSS_HOSTS,
    ALL_REDUCE,
    DATASHEET,
    INTERPOLATED,
    MEASURED,
    MEMORY,
    NORMALISATION,
    STATISTICS,
    WITHIN_HOST,
    Cluster,
    Collective,
    Link,
    PairLink,
)
from planner.ir.cluster import DeviceSpec as Device
from tests.planner.costs.plain_prices import delay_s, message_s, sum_s

SHEET = Link(1e-3, 1e6)
FAST = Link(0.0, 1e8, evidence=MEASURED)


def cluster(hosts: str, *collectives: Collective, pairs: tuple[PairLink, ...] = ()) -> Cluster:
    """A rank for each letter, on the host that it names."""
    devices = tuple(Device(f"{host}/cpu{rank}", "cpu", host, 2**30) for rank, host in enumerate(hosts))
    return Cluster(devices, {WITHIN_HOST: FAST, ACROSS_HOSTS: SHEET}, collectives, pairs)


def ring(num_ranks: int, num_bytes: int, times: float = 1.0, hosts: int = 0, link: str = ACROSS_HOSTS) -> Collective:
    """A table of one point: what theory says of a ring, ``times`` as long."""
    part_s = 1e-3 + num_bytes / num_ranks / 1e6 if link == ACROSS_HOSTS else num_bytes / num_ranks / 1e8
    return Collective(ALL_REDUCE, num_ranks, link, ((num_bytes, times * 2 * (num_ranks - 1) * part_s),), hosts)


def seconds(machines: Cluster, ranks: tuple[int, ...], num_bytes: int = 6000) -> float:
    return float(collective_s(machines, ALL_REDUCE, ranks, num_bytes))


def test_a_measured_collective_is_read_from_its_table() -> None:
    table = Collective(ALL_REDUCE, 2, WITHIN_HOST, ((100, 1.0), (10000, 3.0)))
    assert seconds(cluster("aab", table), (0, 1), 10000) == pytest.approx(3.0)
    assert seconds(cluster("aab", table), (0, 1), 1000) == pytest.approx(3.0**0.5)
    assert seconds(cluster("aab", table), (0, 1), 20000) == pytest.approx(3.0 + 10000 * 2 / 9900)


def test_a_shared_normalisation_is_a_sum_and_what_each_rank_computes_around_it() -> None:
    summed = Collective(STATISTICS, 2, WITHIN_HOST, ((100, 1.0), (10000, 3.0)))
    call = Collective(NORMALISATION, 1, WITHIN_HOST, ((100, 0.5), (10000, 2.0)))
    known, unknown = cluster("aa", summed, call), cluster("aa", summed)
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


def test_where_nothing_was_measured_it_is_a_ring() -> None:
    assert seconds(cluster("abc"), (0, 1, 2), 3000) == pytest.approx(4 * 2e-3)
    assert seconds(cluster("abc"), (0,), 3000) == seconds(cluster("abc"), (0, 1), 0) == 0.0


def test_between_measured_world_sizes_rings_are_as_inefficient_as_both() -> None:
    machines = cluster("abcdef", ring(2, 6000, 1.5), ring(4, 6000, 2.5))
    assert seconds(machines, (0, 1, 2)) == pytest.approx(2.0 * 4 * 3e-3)
    assert seconds(machines, (0, 1, 2, 3, 4, 5)) == pytest.approx(2.5 * 10 * 2e-3)
    assert seconds(machines, (0, 1)) == pytest.approx(1.5 * 2 * 4e-3)


def test_an_exchange_of_two_ranks_does_not_make_larger_rings_faster() -> None:
    assert seconds(cluster("abc", ring(2, 6000, 0.5)), (0, 1, 2)) == pytest.approx(4 * 3e-3)
    assert seconds(cluster("abcd", ring(3, 6000, 0.5)), (0, 1, 2, 3)) == pytest.approx(0.5 * 6 * 2.5e-3)


def test_groups_with_several_ranks_a_host_have_tables_of_their_own() -> None:
    machines = cluster("aabb", ring(4, 6000, 1.0, 4), ring(4, 6000, 3.0, 2))
    assert seconds(machines, (0, 1, 2, 3)) == pytest.approx(3.0 * 6 * 2.5e-3)
    assert seconds(machines, (0, 1, 2)) == pytest.approx(3.0 * 4 * 3e-3)
    assert seconds(machines, (0, 2)) == pytest.approx(2 * 4e-3)  # one rank a host
    only_spread = cluster("aabb", ring(2, 6000, 2.0))
    assert seconds(only_spread, (0, 1, 2, 3)) == pytest.approx(2.0 * 6 * 2.5e-3)


def test_a_ring_waits_for_the_slowest_of_the_links_between_neighbours() -> None:
    slow = Link(0.0, 1e3)
    assert seconds(cluster("abc", pairs=(PairLink("b", "c", slow),)), (0, 1, 2)) == pytest.approx(4 * 2.0)
    assert seconds(cluster("abc", pairs=(PairLink("c", "b", slow),)), (0, 1, 2)) == pytest.approx(4 * 3e-3)


def test_statistics_without_a_table_are_sums_of_gradients() -> None:
    machines = cluster("ab", ring(2, 6000, 2.0))
    assert float(collective_s(machines, STATISTICS, (0, 1), 6000)) == seconds(machines, (0, 1))


def test_how_well_a_sum_is_known() -> None:
    machines = cluster("aabb", ring(2, 6000, 1.0, link=WITHIN_HOST))
    assert collective_evidence(machines, ALL_REDUCE, (0, 1), 6000) == MEASURED
    assert collective_evidence(machines, ALL_REDUCE, (0, 1), 7000) == INTERPOLATED
    assert collective_evidence(machines, ALL_REDUCE, (0, 2), 10) == DATASHEET
    measured = replace(machines, links={WITHIN_HOST: FAST, ACROSS_HOSTS: FAST})
    assert collective_evidence(measured, ALL_REDUCE, (0, 2), 10) == INTERPOLATED


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
    machines = cluster(
        "".join(draw.choices("abc", k=6)), *tables, pairs=(PairLink("a", "b", link),) if seed % 3 else ()
    )
    ranks = tuple(draw.sample(range(6), draw.randint(1, 6)))
    for size in (0, 1, sizes[0], draw.randint(*sizes[1:]), 5 * sizes[2]):
        operation = draw.choice((ALL_REDUCE, STATISTICS))
        found = sum_s(machines, operation, ranks, size)
        assert found == pytest.approx(float(collective_s(machines, operation, ranks, size)))
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
    cluster, sizes, draw = Cluster(devices, links, (table,)), (1e3, 1e6, 1e8), random.Random(1)
    least = least_collective_s(cluster, ALL_REDUCE, sizes)
    for _ in range(60):
        count = draw.randint(2, 160)
        ranks = tuple(draw.sample(range(160), count)) if draw.random() < 0.5 else tuple(range(count))
        assert (least[count] <= collective_s(cluster, ALL_REDUCE, ranks, sizes) * (1 + 1e-9)).all()
    assert (np.diff(least[2:161], axis=0) >= 0).all()
    for count in (9, 64, 128):
        assert least[count] == pytest.approx(collective_s(cluster, ALL_REDUCE, tuple(range(count)), sizes))
