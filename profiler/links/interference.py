"""By how much a message delays computation on the cores of its two ranks, on each of which a thread moves it.

A fixed computation is run by itself and while a message of a size moves, by turns, on both ranks at once; it lasts
longer than the message does there.  The difference of the medians is what the message took from the core: of the
sender's without the call that sends, which is measured apart.

The clock is the processor time of all threads of the process, which is pinned to its core: the computation must wait
while another thread of its own runs, and what the kernel does for the network between two instructions is charged to
the thread that it interrupts.  Unlike wall-clock it does not see what other programs do.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch

from profiler.links.messages import PeerLink, Points, wait

SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20)
_EDGE = 128  # of the matrices: they stay in the core's own cache
_TOGETHER_BYTES = 64 << 10  # of small messages so many go at once: a single one is lost in the noise
_LONGER = 2.0
_MARGIN_S = 0.5e-3
_LONGEST_S = 0.5  # for a computation: larger messages are not looked at


@dataclass(frozen=True, slots=True)
class CoreCosts:
    """(bytes of a message, seconds that its computation is delayed)."""

    sender: Points
    receiver: Points


def measure_cores(wire: PeerLink, transfers: Points, budget_s: float, leads: bool = True) -> CoreCosts:
    """The delays of messages from the leader to the other rank (back if not ``leads``), on both ranks.

    Args:
        transfers: seconds of messages; the largest of them is the largest looked at.
        budget_s: for each size.
    """
    kernel = _Kernel()
    chunk_s = statistics.median(kernel.run(20) / 20 for _ in range(5))
    sender, receiver = [], []
    for size in SIZES:
        known = [(abs(at - size), at, seconds) for at, seconds in transfers if at <= size]
        if size > transfers[-1][0]:
            break
        _, at, seconds = min(known)
        count = max(1, _TOGETHER_BYTES // size)
        lasts_s = wire.agree(_LONGER * count * seconds * size / at + _MARGIN_S)
        if lasts_s > _LONGEST_S:
            break
        chunks = round(wire.agree(max(1.0, lasts_s / chunk_s)))
        repeats = round(wire.agree(min(15.0, max(3.0, budget_s / (2 * lasts_s)))))
        own_s = _delay_s(wire, kernel, size, count, chunks, repeats, wire.leads is leads) / count
        delays = [PeerLink(wire.group, wire.peer, who).agree(own_s) for who in (wire.leads, not wire.leads)]
        leader_s, other_s = delays if wire.leads else delays[::-1]
        sender.append((size, leader_s if leads else other_s))
        receiver.append((size, other_s if leads else leader_s))
    wire.forget()
    return CoreCosts(tuple(sender), tuple(receiver))


def _delay_s(wire: PeerLink, kernel: _Kernel, size: int, count: int, chunks: int, repeats: int, sends: bool) -> float:
    alone, beside = [], []
    for _ in range(repeats + 1):
        wire.meet()
        alone.append(kernel.run(chunks))
        coming = [] if sends else [wire.post(size) for _ in range(count)]
        wire.meet()
        going = [wire.send(size) for _ in range(count)] if sends else []
        beside.append(kernel.run(chunks))
        for works in (*going, *coming):
            wait(works)
    return max(0.0, statistics.median(beside[1:]) - statistics.median(alone[1:]))


class _Kernel:
    """A computation in pieces of about a tenth of a millisecond."""

    def __init__(self) -> None:
        self._factor, self._product = torch.ones(_EDGE, _EDGE), torch.empty(_EDGE, _EDGE)

    def run(self, chunks: int) -> float:
        """Seconds of processor time that so many pieces, and what runs beside them, take from the core."""
        start_s = time.process_time()
        for _ in range(chunks):
            torch.mm(self._factor, self._factor, out=self._product)
        return time.process_time() - start_s
