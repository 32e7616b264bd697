"""What the profile says of links, beside what fresh processes measure on them.

One set of processes measures the tables of a profile; another sends messages and sums of sizes that are in no table.
On hosts of the testbed (root; without it the loopback interface alone), at rates from 200 Mbit/s to 4 Gbit/s:

    messages       mean error over sizes (the least of the medians of three rounds each), and from 1 MB up
    bandwidth      of a long stream, over the configured rate x what TCP carries of it (``testbed.PAYLOAD_SHARE``)
    all-reduce     over all hosts
    incast         2 and 3 hosts send to one at once: beside its network card, which they share max-min fairly
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.devices.ranks import forked, hide_gpus
from benchmarks.devices.testbed import INTERFACE, RATES, Testbed, unavailable
from benchmarks.report import Row, at_most, run
from cuda_ops import core_of, prepare_process
from cuda_ops._torch import FileStore
from planner.costs.communication.links import NetworkPrices
from planner.ir.cluster import ACROSS_HOSTS, Cluster, DeviceSpec
from profiler.links.cpu import measure_together, opened
from profiler.links.messages import FULL, QUICK, LinkEffort, PeerLink, there_and_back_s
from profiler.links.processes import LinkCosts
from runtime.transport import Transport

SIZES = tuple(round(kib * 1024) for kib in (3, 6, 20, 40, 100, 200, 400, 900, 1400, 3000, 6000, 12000, 24000))
SUMS = tuple(kib * 1024 for kib in (40, 160, 640, 1400, 3000, 6000))
INCAST_BYTES = 3_000_000
LARGE_BYTES = 1_000_000
_LIMIT_S = 600.0
_ROUNDS = 3


def measure(quick: bool) -> list[Row]:
    """All rows; loopback alone where there can be no testbed."""
    rows = _rows("loopback", None, 2, quick)
    for rate in () if unavailable() else ("1gbit",) if quick else RATES:
        rows += _rows(rate, rate, 3 if quick else 4, quick)
    return rows


def _rows(title: str, rate: str | None, num_hosts: int, quick: bool) -> list[Row]:
    hosts = ("n0",) * num_hosts if rate is None else tuple(f"n{host}" for host in range(num_hosts))
    largest = (6000 if quick else 24000) * 1024
    check = {
        "sizes": tuple(size for size in SIZES if size <= largest),
        "sums": tuple(size for size in SUMS if size <= largest // 4),
        "incast_bytes": 0 if rate is None else INCAST_BYTES,
    }
    with tempfile.TemporaryDirectory(prefix="halopipe-") as folder, ExitStack() as stack:
        testbed = None if rate is None else stack.enter_context(Testbed.build(num_hosts, RATES[rate]))
        costs = answer_of(Path(folder), hosts, testbed, {"effort": QUICK if quick else FULL})
        times = answer_of(Path(folder), hosts, testbed, check)
    assert isinstance(costs, LinkCosts)
    assert isinstance(times, dict)
    devices = tuple(DeviceSpec(f"{host}/cpu{rank}", "cpu", host, 2**30) for rank, host in enumerate(hosts))
    network = NetworkPrices(Cluster(devices, costs.links, costs.collectives, costs.pairs))
    return [
        *_messages(title, network, times),
        *_bandwidth(title, network, rate),
        *_sums(title, network, times, num_hosts),
        *(_incast(title, network, times, num_hosts) if rate is not None else ()),
    ]


@dataclass(frozen=True, slots=True)
class Task:
    """What the ranks do.

    Attributes:
        effort: to measure the tables with; None: check them.
        sizes: of messages from rank 0 to rank 1.
        sums: bytes of all-reduces over all ranks.
        incast_bytes: of the messages that ranks 1, 2, ... send to rank 0 at once; 0: none.
    """

    effort: LinkEffort | None = None
    sizes: tuple[int, ...] = ()
    sums: tuple[int, ...] = ()
    incast_bytes: int = 0


def answer_of(folder: Path, hosts: Sequence[str], testbed: Testbed | None, what: Mapping[str, Any]) -> object:
    """What rank 0 of fresh processes answers: :class:`profiler.links.cpu.LinkCosts`, or seconds by what and bytes.

    Args:
        folder: where they meet.
        hosts: by rank.
        what: of :class:`Task`.
    """
    store = folder / "store"
    task = Task(**what)
    store.unlink(missing_ok=True)

    def call(rank: int) -> object:
        if testbed is not None:
            testbed.enter(rank)
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE if testbed is not None else "lo"
        prepare_process(core_of(rank))
        met = FileStore(str(store), len(hosts))
        transport = opened("", rank, met, tuple(hosts))
        if task.effort is not None:
            answer: object = measure_together(transport, met, tuple(hosts), task.effort, lambda _: None)
        else:
            answer = _checked(task, transport, len(hosts))
        transport.barrier()
        transport.close()
        return answer

    return forked(len(hosts), call, _LIMIT_S)[0]


def _checked(task: Task, transport: Transport, num_hosts: int) -> dict[tuple[str, int], float]:
    """Seconds by what was done and its bytes: the least of the medians of a few rounds."""
    found: dict[tuple[str, int], float] = {}
    rank = transport.rank
    everybody = tuple(range(transport.world_size))

    def noted(what: str, size: int, action: Callable[[], float]) -> None:
        first_s = action()
        word = torch.tensor([first_s if rank == 0 else 0.0], dtype=torch.float64)
        transport.all_reduce(word, everybody)
        repeats = max(1, min(15, round(0.1 / max(1e-6, float(word)))))
        seconds = statistics.median([action() for _ in range(repeats)] + ([first_s] if repeats < 3 else []))
        found[what, size] = min(found.get((what, size), seconds), seconds)

    wires = [PeerLink(transport, other, rank == 0) for other in range(len(everybody))]
    wire = wires[1 - rank] if rank < 2 else None
    for _ in range(_ROUNDS):
        for size in task.sizes:
            noted("message", size, lambda n=size: there_and_back_s(wire, n, n)[0] / 2 if wire else 0.0)
        for size in task.sums:
            tensor = torch.zeros(size // 4)
            noted("sum", size, lambda t=tensor: _sum_s(transport, t, everybody))
        for senders in range(1, num_hosts) if task.incast_bytes else ():
            noted(
                f"incast {senders}", task.incast_bytes, lambda k=senders: _incast_s(wires, rank, k, task.incast_bytes)
            )
    return found


def _sum_s(transport: Transport, tensor: torch.Tensor, ranks: tuple[int, ...]) -> float:
    transport.barrier()
    start_s = time.perf_counter()
    transport.all_reduce(tensor, ranks)
    return time.perf_counter() - start_s


def _incast_s(wires: Sequence[PeerLink], rank: int, senders: int, num_bytes: int) -> float:
    """Seconds until rank 0 has what so many ranks sent it at once."""
    transport = wires[0].transport
    others = wires[1 : senders + 1]
    coming = [(wire, wire.post(num_bytes)) for wire in others] if rank == 0 else []
    transport.barrier()
    start_s = time.perf_counter()
    if 0 < rank <= senders:
        wires[0].send(num_bytes)
        transport.flush()
    for wire, key in coming:
        wire.take(key)
    return time.perf_counter() - start_s


def _messages(title: str, network: NetworkPrices, times: Mapping[tuple[str, int], float]) -> list[Row]:
    errors = {
        size: network.transfer_s(0, 1, size) / seconds - 1
        for (what, size), seconds in times.items()
        if what == "message"
    }
    large = [abs(error) for size, error in errors.items() if size >= LARGE_BYTES]
    worst = max(errors, key=lambda size: abs(errors[size]))
    return [
        at_most(f"{title}: messages, mean error", 100 * statistics.fmean(map(abs, errors.values())), "%", 8),
        at_most(f"{title}: messages from 1 MB, mean error", 100 * statistics.fmean(large), "%", 3),
        Row(f"{title}: messages, worst error (at {worst / 1000:.0f} kB)", 100 * errors[worst], "%"),
    ]


def _bandwidth(title: str, network: NetworkPrices, rate: str | None) -> list[Row]:
    link = network.cluster.link(0, 1)
    if rate is None:
        return [Row(f"{title}: bandwidth of a stream", link.bandwidth_bytes_per_s / 1e6, "MB/s")]
    off = abs(link.bandwidth_bytes_per_s / RATES[rate].payload_bytes_per_s - 1)
    return [
        at_most(f"{title}: bandwidth off the configured rate", 100 * off, "%", 2),
        Row(f"{title}: burst", link.burst_bytes / 1000, "kB"),
        at_most(f"{title}: pairs of hosts stated apart (all are alike)", len(network.cluster.pairs), "", 0),
    ]


def _sums(title: str, network: NetworkPrices, times: Mapping[tuple[str, int], float], count: int) -> list[Row]:
    ranks = tuple(range(count))
    errors = {
        size: network.all_reduce_s(ranks, size) / seconds - 1
        for (what, size), seconds in times.items()
        if what == "sum"
    }
    found = [at_most(f"{title}: all-reduce over {count}, mean error", 100 * _mean(errors.values()), "%", 8)]
    cluster = network.cluster
    if count > 2:
        smaller = tuple(table for table in cluster.collectives if table.num_ranks < count)
        scaled = NetworkPrices(Cluster(cluster.devices, cluster.links, smaller, cluster.pairs))
        errors = {size: scaled.all_reduce_s(ranks, size) / times["sum", size] - 1 for size in errors}
        name = f"{title}: all-reduce over {count} from those over fewer, mean error"
        found.append(Row(name, 100 * _mean(errors.values()), "%"))
    return found


def _incast(title: str, network: NetworkPrices, times: Mapping[tuple[str, int], float], count: int) -> list[Row]:
    nic = network.cluster.nic_bytes_per_s("n0") or network.cluster.links[ACROSS_HOSTS].bandwidth_bytes_per_s
    alone_s = network.transfer_s(1, 0, INCAST_BYTES)
    found = []
    for senders in range(2, count):
        predicted_s = alone_s + (senders - 1) * INCAST_BYTES / nic
        error = predicted_s / times[f"incast {senders}", INCAST_BYTES] - 1
        found.append(at_most(f"{title}: {senders} senders to one host, error", 100 * abs(error), "%", 8))
        ratio = times[f"incast {senders}", INCAST_BYTES] / times["incast 1", INCAST_BYTES]
        found.append(Row(f"{title}: {senders} senders to one host, over one", ratio, ""))
    return found


def _mean(errors: Sequence[float] | object) -> float:
    return statistics.fmean(map(abs, errors))  # type: ignore[call-overload]


if __name__ == "__main__":
    hide_gpus()
    raise SystemExit(run(str(__doc__).splitlines()[0], measure))
