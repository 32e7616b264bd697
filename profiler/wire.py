"""Messages between two ranks, framed as a run frames them, and what both of them agree on meanwhile.

A message is a frame with a header and a small tensor, which is copied into it, or a header and a large tensor behind it
that is sent from where it lies (``runtime.transport.peer``).  Receives are posted before sends: gloo serialises a send
and a later receive with the same peer (1.99 times as long).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

HEADER_BYTES = 64
ALONE_BYTES = 256 * 1024
"""From here a tensor travels behind its frame; both as in ``runtime.transport``."""

DEADLINE_S = 60.0
_MESSAGE, _WORD = 1, 2  # tags

Works = list[dist.Work]


@dataclass(slots=True, eq=False)
class Wire:
    """The messages between this rank and ``peer``.

    Attributes:
        leads: of the two ranks, this one decides and keeps the times.
    """

    group: dist.ProcessGroup
    peer: int
    leads: bool
    _going: dict[int, list[torch.Tensor]] = field(default_factory=dict, repr=False)
    _coming: dict[int, list[torch.Tensor]] = field(default_factory=dict, repr=False)
    _tensors: dict[int, torch.Tensor] = field(default_factory=dict, repr=False)

    def post(self, num_bytes: int) -> Works:
        """Announce a message of a tensor of ``num_bytes``."""
        if num_bytes not in self._coming:
            self._coming[num_bytes] = _buffers(num_bytes)
        return [self.group.recv([buffer], self.peer, _MESSAGE) for buffer in self._coming[num_bytes]]

    def send(self, num_bytes: int) -> Works:
        """Start to send one."""
        if num_bytes not in self._going:
            self._going[num_bytes] = _buffers(num_bytes)
            self._tensors[num_bytes] = torch.zeros(num_bytes, dtype=torch.uint8)
        buffers = self._going[num_bytes]
        if len(buffers) == 1:
            buffers[0][HEADER_BYTES:].copy_(self._tensors[num_bytes])
        return [self.group.send([buffer], self.peer, _MESSAGE) for buffer in buffers]

    def agree(self, value: float) -> float:
        """The leader's value, on both ranks."""
        word = torch.tensor([value], dtype=torch.float64)
        wait([self.group.send([word], self.peer, _WORD) if self.leads else self.group.recv([word], self.peer, _WORD)])
        return float(word)

    def meet(self) -> None:
        """Return when both ranks are here, the leader last: it hears that the other one is."""
        word = torch.zeros(1)
        if self.leads:
            wait([self.group.recv([word], self.peer, _WORD)])
            wait([self.group.send([word], self.peer, _WORD)])
        else:
            wait([self.group.send([word], self.peer, _WORD)])
            wait([self.group.recv([word], self.peer, _WORD)])

    def forget(self) -> None:
        """Let go of all buffers."""
        for buffers in (self._going, self._coming, self._tensors):
            buffers.clear()


def wait(works: Sequence[dist.Work]) -> None:
    """Until all are done."""
    for work in works:
        work.wait(timedelta(seconds=DEADLINE_S))


def there_and_back_s(wire: Wire, there_bytes: int, back_bytes: int, pause_s: float = 0.0) -> tuple[float, float]:
    """(seconds until the answer came, seconds of the call that sent), on the leader, who sends; the other answers.

    Args:
        pause_s: of silence before.
    """
    if not wire.leads:
        coming = wire.post(there_bytes)
        wire.meet()
        wait(coming)
        wait(wire.send(back_bytes))
        return 0.0, 0.0
    coming = wire.post(back_bytes)
    wire.meet()
    if pause_s:
        time.sleep(pause_s)
    start_s = time.perf_counter()
    going = wire.send(there_bytes)
    sent_s = time.perf_counter()
    wait(coming)
    stop_s = time.perf_counter()
    wait(going)
    return stop_s - start_s, sent_s - start_s


def both_ways_s(wire: Wire, num_bytes: int) -> float:
    """Seconds until a message has come while another of that size went."""
    coming = wire.post(num_bytes)
    wire.meet()
    start_s = time.perf_counter()
    going = wire.send(num_bytes)
    wait(coming)
    wait(going)
    return time.perf_counter() - start_s


def _buffers(num_bytes: int) -> list[torch.Tensor]:
    alone = num_bytes >= ALONE_BYTES
    sizes = [HEADER_BYTES, num_bytes] if alone else [HEADER_BYTES + num_bytes]
    return [torch.zeros(size, dtype=torch.uint8) for size in sizes]
