"""Pairs of ranks, one after another: each measured by its two, while the others wait; everybody hears what was found.

A pair of hosts is known by two ranks, the first of each.  The pair in the middle
stands for the class of links across hosts.

By how much a message delays computation on the cores of its two ranks, on each of which a thread moves it.

A fixed computation is run by itself and while a message of a size moves, by turns, on both ranks at once; it lasts
longer than the message does there.  The difference of the medians is what the message took from the core: of the
sender's without the call that sends, which is measured apart.

The clock is the processor time of all threads of the process, which is pinned to its core: the computation must wait
while another thread of its own runs, and what the kernel does for the network between two instructions is charged to
the thread that it interrupts.  Unlike wall-clock it does not see what other programs do.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

import torch

from planner.ir.cluster import MEASURED, Link, PairLink
from profiler.links.messages import GLANCE, LinkEffort, LinkPoints, OneWay, PairCosts, PeerLink, measure_pair
from runtime.transport import Transport

if TYPE_CHECKING:
    from cuda_ops._torch import Store


SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20)
_EDGE = 128  # of the matrices: they stay in the core's own cache
_TOGETHER_BYTES = 64 << 10  # of small messages so many go at once: a single one is lost in the noise
_LONGER = 2.0
_MARGIN_S = 0.5e-3
_LONGEST_S = 0.5  # for a computation: larger messages are not looked at


@dataclass(frozen=True, slots=True)
class CoreCosts:
    """(bytes of a message, seconds that its computation is delayed)."""

    sender: LinkPoints
    receiver: LinkPoints


def measure_cores(wire: PeerLink, transfers: LinkPoints, budget_s: float, leads: bool = True) -> CoreCosts:
    """The delays of messages from the leader to the other rank (back if not ``leads``), on both ranks.

    Args:
        transfers: seconds of messages; the largest of them is the largest looked at.
        budget_s: for each size.
    """
    kernel = _Kernel()
    chunk_s = statistics.median(kernel.run(20) / 20 for _ in range(5))
    sender = []
    receiver = []
    for size in SIZES:
        shorter = [(abs(at - size), at, seconds) for at, seconds in transfers if at <= size]
        if size > transfers[-1][0]:
            break
        _, at, seconds = min(shorter)
        count = max(1, _TOGETHER_BYTES // size)
        lasts_s = wire.agree(_LONGER * count * seconds * size / at + _MARGIN_S)
        if lasts_s > _LONGEST_S:
            break
        chunks = round(wire.agree(max(1.0, lasts_s / chunk_s)))
        repeats = round(wire.agree(min(15.0, max(3.0, budget_s / (2 * lasts_s)))))
        own_s = _delay_s(wire, kernel, size, count, chunks, repeats, wire.leads is leads) / count
        delays = [wire.led_by_this(who).agree(own_s) for who in (wire.leads, not wire.leads)]
        leader_s, other_s = delays if wire.leads else delays[::-1]
        sender.append((size, leader_s if leads else other_s))
        receiver.append((size, other_s if leads else leader_s))
    wire.forget()
    return CoreCosts(*(tuple(each) if any(delay for _, delay in each) else () for each in (sender, receiver)))


def _delay_s(wire: PeerLink, kernel: _Kernel, size: int, count: int, chunks: int, repeats: int, sends: bool) -> float:
    alone = []
    beside = []
    for _ in range(repeats + 1):
        wire.meet()
        alone.append(kernel.run(chunks))
        coming = [] if sends else [wire.post(size) for _ in range(count)]
        wire.meet()
        for _ in range(count if sends else 0):
            wire.send(size)
        beside.append(kernel.run(chunks))
        for key in coming:
            wire.take(key)
    return delay_s(alone[1:], beside[1:])


def delay_s(alone: Sequence[float], beside: Sequence[float]) -> float:
    """By how much the medians differ; 0 if that is less than the two of them are known by."""
    later_s = statistics.median(beside) - statistics.median(alone)
    return later_s if later_s > _uncertain_s(alone) + _uncertain_s(beside) else 0.0


def _uncertain_s(runs: Sequence[float]) -> float:
    """How far the median may well be from that of ever more runs, from the median distance of the runs to it."""
    middle_s = statistics.median(runs)
    return 2 * statistics.median(abs(run_s - middle_s) for run_s in runs) / math.sqrt(len(runs))


class _Kernel:
    """A computation in pieces of about a tenth of a millisecond."""

    def __init__(self) -> None:
        self._factor = torch.ones(_EDGE, _EDGE)
        self._product = torch.empty(_EDGE, _EDGE)

    def run(self, chunks: int) -> float:
        """Seconds of processor time that so many pieces, and what runs beside them, take from the core."""
        start_s = time.process_time()
        for _ in range(chunks):
            torch.mm(self._factor, self._factor, out=self._product)
        return time.process_time() - start_s


DIFFERS = 1.1
"""A pair whose rate, or whose seconds at a size, are further from its class is stated by itself."""

_GLANCED = (1 << 10, 64 << 10, 1 << 20)
_CORE_EFFORTS = 4.0  # times as long as the messages of one size

RankPair = tuple[int, int]
"""Two ranks, from one to the other."""


def measure_across(
    transport: Transport, store: Store, hosts: Sequence[str], effort: LinkEffort
) -> tuple[Link, tuple[PairLink, ...]]:
    """The class of links across hosts, and the pairs of hosts that are not as it says; on all ranks.

    The class is the pair whose rate is the median.

    Args:
        hosts: by rank.
    """
    firsts = [hosts.index(host) for host in dict.fromkeys(hosts)]
    every = list(combinations(firsts, 2))
    glances = {pair: _by_two(transport, store, pair, "glance", _glance) for pair in every} if len(every) > 1 else {}
    middle = sorted(glances, key=lambda pair: min(glances[pair][:2]))[(len(glances) - 1) // 2] if glances else every[0]
    fully = [middle, *(pair for pair in every if pair != middle and _differs(glances[pair], glances[middle]))]
    links = measure_fully(transport, store, fully, effort)
    usual = links[middle]
    apart = tuple(PairLink(hosts[src], hosts[dst], link) for (src, dst), link in links.items() if differ(link, usual))
    return usual, apart


def measure_fully(
    transport: Transport, store: Store, pairs: Sequence[RankPair], effort: LinkEffort, *, one_host: bool = False
) -> dict[RankPair, Link]:
    """The links of pairs, each there and back; on all ranks."""
    links = {}
    for pair in pairs:
        record = _by_two(transport, store, pair, "fully", lambda wire: _full_record(wire, effort, one_host))
        for ends, link in zip((pair, pair[::-1]), record, strict=True):
            links[ends] = _link(link)
    return links


def differ(link: Link, usual: Link) -> bool:
    """Whether a link is further from the usual one than a class allows."""
    there = dict(link.points)
    here = dict(usual.points)
    ratios = [link.bandwidth_bytes_per_s / usual.bandwidth_bytes_per_s]
    ratios += [there[size] / here[size] for size in _GLANCED[1:] if size in there and size in here]
    return any(max(ratio, 1 / ratio) > DIFFERS for ratio in ratios)


def _glance(wire: PeerLink) -> list[float] | None:
    """Bytes a second there and back, then seconds of a few messages."""
    costs = measure_pair(wire, GLANCE, _GLANCED)
    if costs is None:
        return None
    return [costs.there.bytes_per_s, costs.back.bytes_per_s, *(seconds for _, seconds in costs.there.points[1:])]


def _differs(glance: Sequence[float], usual: Sequence[float]) -> bool:
    pairs = zip(glance, usual, strict=False)  # slow links are not asked for the largest messages
    return any(max(a / b, b / a) > DIFFERS for a, b in pairs)


def _full_record(wire: PeerLink, effort: LinkEffort, one_host: bool) -> list[dict[str, Any]] | None:
    costs = measure_pair(wire, effort, one_host=one_host)
    ways = (costs.there, costs.back) if costs is not None else (None, None)
    cores = []
    alike = bool(wire.agree(float(costs is not None and costs.there.points == costs.back.points)))
    for leads, way in zip((True, False), ways, strict=True):
        if leads or not alike:
            points = _shared(wire, way.points if way is not None else ())
            cores.append(measure_cores(wire, points, _CORE_EFFORTS * effort.each_s, leads))
        else:
            cores.append(cores[0])
    if costs is None:
        return None
    name = wire.transport.name_among((wire.transport.rank, wire.peer))
    return [_record(costs, way, core, name) for way, core in zip((costs.there, costs.back), cores, strict=True)]


def _record(costs: PairCosts, way: OneWay, core: CoreCosts, name: str) -> dict[str, Any]:
    return {**asdict(way), **asdict(core), "duplex": costs.duplex, "transport": name}


def _shared(wire: PeerLink, points: LinkPoints) -> LinkPoints:
    """The leader's points, on both ranks."""
    count = round(wire.agree(len(points)))
    padded = points if wire.leads else ((0, 0.0),) * count
    return tuple((round(wire.agree(size)), wire.agree(seconds)) for size, seconds in padded)


def _by_two(transport: Transport, store: Store, pair: RankPair, what: str, measure: Callable[[PeerLink], Any]) -> Any:
    """What the first rank of the pair makes of it together with the second; on all ranks."""
    rank = transport.rank
    key = f"halopipe/{what}/{pair[0]}/{pair[1]}"
    transport.barrier()
    if rank in pair:
        record = measure(PeerLink(transport, pair[1] if rank == pair[0] else pair[0], rank == pair[0]))
        if record is not None:
            store.set(key, json.dumps(record))
    transport.barrier()
    return json.loads(store.get(key).decode())


def _link(record: Mapping[str, Any]) -> Link:
    sending, sender, receiver = (rounded(record[name]) for name in ("sending", "sender", "receiver"))
    points = rounded(record["points"])
    return Link(
        latency_s=points[0][1],
        bandwidth_bytes_per_s=record["bytes_per_s"],
        points=points,
        duplex=record["duplex"],
        evidence=MEASURED,
        burst_bytes=record["burst_bytes"],
        sending=sending,
        sender_core=sender,
        receiver_core=receiver,
        transport=record["transport"],
    )


def rounded(rows: Sequence[Sequence[float]]) -> LinkPoints:
    """Rows of a table to five digits: files need not carry the noise."""
    return tuple((int(size), float(f"{seconds:.5g}")) for size, seconds in rows)
