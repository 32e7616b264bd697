"""Links measured by the ranks of this host and of a GPU; what is made of the times, without any."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from planner.costs.communication.links import NetworkPrices
from planner.ir.cluster import (
    ACROSS_HOSTS,
    ALL_REDUCE,
    AROUND,
    GLOO,
    GRADIENT_SUMS,
    MEASURED,
    MEMORY,
    NORMALISATION,
    PARTIAL_SUMS,
    PIECES,
    SHARED_MEMORY,
    SITES,
    STATISTICS,
    WITHIN_HOST,
    Cluster,
    DeviceSpec,
    Link,
)
from planner.ir.errors import TransportError
from profiler.links import calls, gpu, host_pairs, messages
from profiler.links import cpu as sums
from profiler.links.cpu import measure_together, opened
from profiler.links.gpu import GpuMeasuring, costs_of, measure_gpu_links, num_gpu_measurements
from profiler.links.host_pairs import CoreCosts, differ
from profiler.links.host_pairs import _link as link_of
from profiler.links.messages import LEAST_LAST_BYTES, SIZES, LinkEffort, PeerLink, burst_bytes, most_bent
from profiler.links.processes import LinkCosts, groups_of
from profiler.measure.child_process import Child, Report
from runtime.optim.gradient_buckets import GradientBuckets
from runtime.transport import Hub, InProcessTransport
from tests.forks import forked

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
        name = "tests.profiler.links.test_links:one_rank"
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
    rate = 25e6
    latency_s = 1e-4
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


torch.set_num_threads(1)


def test_all_kinds_are_measured_by_growing_size_and_those_over_sites_where_there_are_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calls, "_NUM_RUNS", 3)  # a median: of one run the machine alone may take longer than is sane
    for sites in (False, True):
        found = calls.exchange_calls("within-host", sites)
        assert [table.operation for table in found] == [each for each in AROUND if sites or each != SITES]
        for table in found:
            assert (table.num_ranks, table.link) == (1, "within-host")
            assert [size for size, _ in table.points] == sorted({size for size, _ in table.points})
            assert all(1e-6 <= seconds < 0.2 for _, seconds in table.points)


@pytest.mark.parametrize("edge", [2, 4])
def test_a_convolution_over_shared_sites_is_timed_beside_the_same_pairs_in_one_call(
    edge: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs: list[tuple[Tensor, Tensor]] = []

    def noted(call: Callable[[], Tensor], instead: Callable[[], Tensor], _: calls.Burst) -> float:
        pairs.append((call(), instead()))
        return 1.0

    monkeypatch.setattr(calls, "_call_s", noted)
    calls._sites_s(edge, calls.Burst())
    ((shared, alone),) = pairs
    assert shared.shape == (edge**3 // 2, 16)
    assert torch.allclose(shared, alone, rtol=1e-4, atol=1e-4)
    assert shared.grad_fn is not None


def test_gradients_are_the_same_with_and_without_the_sums_that_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[GradientBuckets] = []
    found: list[list[Tensor]] = []

    def kept(*given: Any) -> GradientBuckets:
        made.append(GradientBuckets(*given))
        return made[-1]

    def once(longer_s: Callable[[], float], runs: int) -> float:
        longer_s()  # with the sums, then without
        found.append([parameter.grad for bucket in made[0].buckets for parameter in bucket])  # type: ignore[misc]
        return 1.0

    monkeypatch.setattr(calls, "GradientBuckets", kept)
    monkeypatch.setattr(calls, "_median_s", once)
    assert calls._gradient_sums_s(1 << 12, calls.Burst()) == 0.5  # of one of two
    assert [len(bucket) for bucket in made[0].buckets] == [12, 12]
    assert all(torch.equal(gradient, torch.ones_like(gradient)) for gradient in found[0])
    assert not made[0]._hooks


class Counted:
    """A clock that says what has been done: each burst takes 100 s, a forward 1 s, a backward 2 s."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.order = list[str]()

    def did(self, what: str, seconds: float) -> None:
        self.order.append(what)
        self.now_s += seconds

    def thread_time(self) -> float:
        return self.now_s

    def forward(self, x: Tensor) -> Tensor:
        self.did("forward", 1.0)
        y = x * 2
        y.register_hook(lambda _: self.did("backward", 2.0))
        return y


def test_forward_and_backward_each_come_behind_a_burst_that_is_not_in_their_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Counted()
    x = torch.ones(3, requires_grad=True)
    monkeypatch.setattr(calls, "time", clock)

    def burst() -> float:
        clock.did("burst", 100.0)
        return 100.0

    assert calls._passes_s(lambda: clock.forward(x), cast("calls.Burst", burst)) == 3.0
    assert clock.order == ["burst", "forward", "burst", "backward"]


def test_a_burst_goes_through_more_data_than_a_core_has_to_itself_and_does_as_much_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    burst = calls.Burst()
    burst.number = 2 * len(burst._inputs)
    seen: list[tuple[int, int]] = []

    def noted(x: Tensor, weight: Tensor, padding: int) -> Tensor:
        seen.append((x.data_ptr(), weight.data_ptr()))
        return x

    monkeypatch.setattr(calls, "conv2d", noted)
    burst()
    assert {seen.count(pair) for pair in seen} == {2}
    inputs = burst._inputs
    weights = burst._weights
    assert sum(tensor.nbytes for tensor in (*inputs, *weights)) > 4 * 2**20
    burst()
    assert len(seen) == 2 * burst.number


SMALL = (1024, 4096)


def rank(number: int, path: Path) -> tuple[dict[tuple[str, int], float], int]:
    """What rank ``number`` of two measures, and how many reports it made; in a process of its own."""
    torch.set_num_threads(1)
    for name in ("MESSAGE_BYTES", "REDUCE_BYTES", "STATISTICS_BYTES"):
        setattr(gpu, name, SMALL)
    gpu._ALL_REDUCES.update({ALL_REDUCE: SMALL, STATISTICS: SMALL})
    gpu._DUPLEX_BYTES = 4096
    dist.init_process_group("gloo", store=dist.FileStore(str(path), 2), rank=number, world_size=2)
    reports: list[object] = []
    measuring = GpuMeasuring(reports.append, number, 2, torch.device("cpu"), True, backend="gloo")
    found = measuring.one_round()
    dist.destroy_process_group()
    return found, len(reports)


def test_both_ends_measure_messages_both_ways_and_sums(tmp_path: Path) -> None:
    for measured, num_reports in forked(2, lambda number: rank(number, tmp_path / "store")):
        assert num_reports == len(measured) == 2 + 1 + 2 * 2
        assert min(measured.values()) > 0


def numbers(num_gpus: int) -> dict[tuple[str, int], float]:
    """A link of 10 microseconds and 100 GB/s; sums twice as long for each further rank."""

    def seconds(num_bytes: int) -> float:
        return 1e-5 + num_bytes / 1e11

    found = {("message", n): seconds(n) for n in gpu.MESSAGE_BYTES}
    found["both ways", gpu._DUPLEX_BYTES] = 1.1 * seconds(gpu._DUPLEX_BYTES)
    for ranks in range(2, num_gpus + 1):
        for operation, sizes in gpu._ALL_REDUCES.items():
            found |= {(f"{operation} over {ranks}", n): ranks * seconds(n) for n in sizes}
    return found


def test_numbers_become_a_link_and_collectives_of_every_size_of_group() -> None:
    costs = costs_of(numbers(3), 3)
    link = costs.links[WITHIN_HOST]
    assert link.duplex
    assert link.bandwidth_bytes_per_s == pytest.approx(1e11)
    assert link.latency_s == pytest.approx(1e-5 + 1024 / 1e11)
    assert [(each.operation, each.num_ranks) for each in costs.collectives] == [
        (operation, ranks) for ranks in (2, 3) for operation in (ALL_REDUCE, STATISTICS)
    ]
    assert num_gpu_measurements(3) == 3 * len(numbers(3))
    slow = numbers(2) | {("both ways", gpu._DUPLEX_BYTES): 1.0}
    assert not costs_of(slow, 2).links[WITHIN_HOST].duplex


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs two GPUs")
def test_two_gpus_have_a_link() -> None:
    reports: list[str] = []
    costs = measure_gpu_links(2, True, lambda what, seconds: reports.append(what))
    assert len(reports) == num_gpu_measurements(2)
    times = [seconds for _, seconds in costs.links[WITHIN_HOST].points]
    assert min(times) > 0
    assert times[-1] > times[0]
