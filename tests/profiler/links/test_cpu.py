"""Links measured by the ranks of this host; what is made of the times, without any."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch.distributed as dist

from planner.costs.communication.links import NetworkPrices
from planner.ir.cluster import (
    ACROSS_HOSTS,
    GLOO,
    GRADIENT_SUMS,
    MEASURED,
    MEMORY,
    NORMALISATION,
    PARTIAL_SUMS,
    PIECES,
    SHARED_MEMORY,
    WITHIN_HOST,
    Cluster,
    DeviceSpec,
    Link,
)
from planner.ir.errors import TransportError
from profiler.links import cpu as sums
from profiler.links import host_pairs, messages
from profiler.links.cpu import LinkCosts, groups_of, measure_together, opened
from profiler.links.host_pairs import CoreCosts, differ
from profiler.links.host_pairs import _link as link_of
from profiler.links.messages import LEAST_LAST_BYTES, SIZES, LinkEffort, PeerLink, burst_bytes, most_bent
from profiler.measure.child_process import Child, Report
from runtime.transport import Hub, InProcessTransport

HOSTS = ("n0", "n0", "n1")
LEAST = LinkEffort(rounds=1, most=1, each_s=1e-4, longest_s=5e-4, stream_s=1e-3, bends=True)


def one_rank(report: Report, rank: int, meeting: str) -> LinkCosts:
    """In a process of its own: three ranks that say they are on two hosts."""
    store = dist.FileStore(meeting, len(HOSTS))
    transport = opened("shared", rank, store, HOSTS)
    try:
        return measure_together(transport, store, HOSTS, LEAST, report)
    finally:
        transport.close()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[LinkCosts, list[Any]]:
    meeting = str(Path(tmp_path_factory.mktemp("meeting")) / "store")
    seen = []
    with ExitStack() as stack:
        name = "tests.profiler.links.test_cpu:one_rank"
        children = [stack.enter_context(Child(name, rank, meeting, core=None)) for rank in range(len(HOSTS))]
        return children[0].finish(300.0, seen.append), seen


def test_ranks_measure_the_links_within_and_across_hosts(found: tuple[LinkCosts, list[Any]]) -> None:
    assert list(found[0].links) == [WITHIN_HOST, ACROSS_HOSTS]
    for link in found[0].links.values():
        sizes = [size for size, _ in link.points]
        assert sizes == sorted(set(sizes))
        assert all(size % 1024 == 0 for size in sizes)
        assert link.evidence == MEASURED
        assert [size for size, _ in link.sending] == sizes
        assert all(call_s > 0 for _, call_s in link.sending)
        assert all(seconds > 0 for _, seconds in link.points)
        assert sizes[-1] >= LEAST_LAST_BYTES
        assert link.bandwidth_bytes_per_s > 0
        assert {size for size, _ in link.sender_core} <= set(host_pairs.SIZES)
        assert len(link.sender_core) in (0, len(link.receiver_core) or len(link.sender_core))
    assert [link.transport for link in found[0].links.values()] == [SHARED_MEMORY, GLOO]
    assert {(pair.src_host, pair.dst_host) for pair in found[0].pairs} <= {("n1", "n0")}


def test_sums_are_measured_by_world_size_and_hosts(found: tuple[LinkCosts, list[Any]]) -> None:
    summed = [table for table in found[0].collectives if table.num_ranks > 1 and table.operation != MEMORY]
    tables = {(table.operation, table.num_ranks, table.num_hosts): table for table in summed}
    groups = [(2, 1), (2, 2), (3, 2)]
    assert list(tables) == [(operation, *group) for group in groups for operation in ("all_reduce", "statistics")]
    assert [table.link for table in tables.values()] == 2 * [WITHIN_HOST] + 4 * [ACROSS_HOSTS]
    for table in tables.values():
        assert {size for size, _ in table.points} <= set(sums.SIZES)
        assert all(seconds > 0 for _, seconds in table.points)
    assert len(found[1]) == 2 + len(tables)


def test_what_ranks_compute_around_exchanges_is_measured_without_a_peer(found: tuple[LinkCosts, list[Any]]) -> None:
    calls = {table.operation: table for table in found[0].collectives if table.num_ranks == 1}
    assert list(calls)[:1] == [MEMORY]
    del calls[MEMORY]
    assert list(calls) == [NORMALISATION, PIECES, PARTIAL_SUMS, GRADIENT_SUMS]
    for table in calls.values():
        assert table.link == WITHIN_HOST
        assert [size for size, _ in table.points] == sorted({size for size, _ in table.points})
        assert all(1e-6 < seconds < 0.1 for _, seconds in table.points)


def test_passes_over_memory_are_measured_of_one_rank_and_of_those_of_a_host_at_once(
    found: tuple[LinkCosts, list[Any]],
) -> None:
    tables = [table for table in found[0].collectives if table.operation == MEMORY]
    assert [(table.num_ranks, table.link) for table in tables] == [(1, WITHIN_HOST), (2, WITHIN_HOST)]
    (size, alone_s), (other, both_s) = (point for table in tables for point in table.points)
    assert size == other
    assert 1e-4 < alone_s < 1.0
    assert 0.2 < both_s / alone_s < 20


def test_which_groups_are_measured() -> None:
    assert groups_of(("a",) * 3) == [(0, 1), (0, 1, 2)]
    assert groups_of("abcd") == [(0, 1), (0, 1, 2), (0, 1, 2, 3)]
    assert groups_of("aabbb") == [(2, 3), (2, 3, 4), (0, 2), (0, 1, 2, 3, 4)]
    assert [len(ranks) for ranks in groups_of([f"n{host}" for host in range(11)])] == [2, 3, 4, 8, 11]
    assert groups_of("a") == []


def test_a_burst_is_what_messages_after_silence_are_ahead_of_the_stream() -> None:
    rate, latency_s = 25e6, 1e-4
    bucket = tuple((size, latency_s + max(0, size - 32_000) / rate) for size in SIZES)
    assert burst_bytes(bucket, rate) == pytest.approx(32_000, rel=0.1)
    assert burst_bytes(tuple((size, latency_s + size / rate) for size in SIZES), rate) == 0
    assert burst_bytes(tuple((size, latency_s + 2 * size / rate) for size in SIZES), rate) == 0


class Alone:
    """The wire of a leader whose times are given."""

    leads = True

    def agree(self, value: float) -> float:
        return value

    def forget(self) -> None:
        pass

    def led_by_this(self, leads: bool) -> Alone:
        return self


@pytest.mark.parametrize(("both", "duplex"), [(1.1, True), (1.45, True), (1.55, False), (2.0, False)])
def test_a_link_is_duplex_if_both_ways_take_little_longer_than_one(
    monkeypatch: pytest.MonkeyPatch, both: float, duplex: bool
) -> None:
    monkeypatch.setattr(messages, "there_and_back_s", lambda _, there, back, pause_s=0.0: ((there + back) * 1e-9, 1e-6))
    monkeypatch.setattr(messages, "both_ways_s", lambda _, num_bytes: both * num_bytes * 1e-9)
    monkeypatch.setattr(messages, "_stream_s", lambda _, num_bytes, *__: num_bytes * 1e-9)
    costs = messages.measure_pair(cast(PeerLink, Alone()), messages.QUICK)
    assert costs is not None
    link = link_of(host_pairs._record(costs, costs.there, CoreCosts((), ()), GLOO))
    assert link.duplex is duplex
    assert link.bandwidth_bytes_per_s == pytest.approx(1e9)
    assert dict(link.points) == pytest.approx({size: size * 1e-9 for size in SIZES}, rel=1e-4)


def test_within_a_host_directions_that_seem_to_differ_were_disturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "there_and_back_s", lambda _, there, back, pause_s=0.0: ((there + back) * 1e-9, 1e-6))
    monkeypatch.setattr(messages, "both_ways_s", lambda _, num_bytes: num_bytes * 1e-9)
    monkeypatch.setattr(messages, "_stream_s", lambda _, num_bytes, __, leads: (1 + leads) * num_bytes * 1e-9)
    found = [messages.measure_pair(cast(PeerLink, Alone()), messages.QUICK, one_host=each) for each in (True, False)]
    rates = [(costs.there.bytes_per_s, costs.back.bytes_per_s) for costs in found if costs is not None]
    assert rates == [pytest.approx((1e9, 1e9)), pytest.approx((5e8, 1e9))]


def test_beyond_the_table_a_message_within_a_host_goes_on_as_between_its_largest_sizes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def way_s(size: int) -> float:  # caches hold messages up to 4 MiB
        return size * 1e-10 + max(0, size - (4 << 20)) * 4e-10

    monkeypatch.setattr(messages, "there_and_back_s", lambda _, there, back, pause_s=0.0: (2 * way_s(there), 1e-6))
    monkeypatch.setattr(messages, "both_ways_s", lambda _, num_bytes: num_bytes * 1e-9)
    monkeypatch.setattr(messages, "_stream_s", lambda _, num_bytes, *__: num_bytes * 1e-10)
    costs = messages.measure_pair(cast(PeerLink, Alone()), messages.QUICK, one_host=True)
    assert costs is not None
    link = link_of(host_pairs._record(costs, costs.there, CoreCosts((), ()), SHARED_MEMORY))
    devices = tuple(DeviceSpec(f"a/cpu{rank}", "cpu", "a", 2**30) for rank in range(2))
    network = NetworkPrices(Cluster(devices, {WITHIN_HOST: link}))
    assert network.transfer_s(0, 1, 64 << 20) == pytest.approx(way_s(64 << 20), rel=0.01)


def test_a_table_is_looked_at_again_where_it_bends() -> None:
    straight = {size: (size * 1e-9, 0.0) for size in SIZES}
    assert most_bent(straight) == 0
    bent = {size: (1e-4 + max(0, size - 32_000) / 25e6, 0.0) for size in SIZES}
    assert 16 << 10 < most_bent(bent) < 64 << 10


def test_a_pair_is_stated_apart_if_it_is_a_tenth_from_its_class() -> None:
    usual = Link(1e-4, 1e8, ((1024, 1e-4), (65536, 1e-3)))
    assert not differ(replace(usual, bandwidth_bytes_per_s=0.95e8), usual)
    assert differ(replace(usual, bandwidth_bytes_per_s=0.8e8), usual)
    assert differ(replace(usual, points=((1024, 1e-4), (65536, 1.2e-3))), usual)
    assert not differ(replace(usual, points=((1024, 2e-4), (65536, 1.05e-3))), usual)


def test_a_delay_within_the_noise_is_none() -> None:
    assert host_pairs.delay_s([1.0, 1.1, 0.9], [1.05, 1.0, 1.1]) == 0.0
    assert host_pairs.delay_s([1.0, 1.1, 0.9], [1.6, 1.5, 1.4]) == pytest.approx(0.5)


def test_a_stream_and_its_acknowledgements_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "_STEADY", 0.0)  # streams grow until their time is over
    hub = Hub(2, capacity=2 * messages._WINDOW)  # no more are on their way than have been announced

    def rank(number: int) -> float:
        transport = InProcessTransport(hub, number)
        try:
            wire = PeerLink(transport, 1 - number, number == 0)
            found = [messages._stream_s(wire, 4096, replace(LEAST, stream_s=0.02), leads) for leads in (True, False)]
            found += [messages.there_and_back_s(wire, 4096, 64)[0], messages.both_ways_s(wire, 4096)]
            wire.forget()
            return min(found[:2])
        finally:
            transport.close()

    with ThreadPoolExecutor(2) as pool:
        assert min(pool.map(rank, range(2))) > 0


def test_links_are_measured_over_transports_that_there_are() -> None:
    with pytest.raises(TransportError, match="nothing is exchanged by 'pigeons'"):
        opened("pigeons", 0, dist.HashStore(), ("n0", "n0"))
