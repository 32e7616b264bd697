"""Ranks that are processes: messages over torch.distributed with gloo, on the CPU.

Messages between this rank and one other over gloo.

Four properties of gloo (torch 2.13) shape this file.  A send ends only when the peer has posted its receive.  Whether
it has ended, gloo says only to those who wait for it; hence each message tells, in its header, how many came the other
way, and buffers are used again as soon as that is known.  Messages with one tag are matched by order, so the tensors of
a message that travel alone follow its frame under the same tag.  And a message longer than the receive buffer aborts
the process, therefore buffers have room to spare in which the frame can be judged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch.distributed as dist
from torch import Tensor

from cuda_ops._torch import Store, times_written
from planner.ir.cluster import PAIR_SUM_BYTES
from planner.ir.errors import TransportError
from planner.ir.program import ALONE_BYTES, SPARE_BYTES
from runtime.timeouts import TRANSPORT_S
from runtime.transport.base import Deadline, MessageKey, Spec, default_group, gone, join, met
from runtime.transport.exchanges import GroupCollectives
from runtime.transport.frame import Frame, FrameLayout, alone_buffer, layout_for, layout_of, tag, whole
from runtime.transport.works import Barrier, OverWorks, Works

_SPARE_LAYOUTS = 64
"""Of this number of layouts frames are kept for the next message."""

_MASK = 0xFFFFFFFF  # numbers of messages are counted in 32 bits, and go round
_HALF = 1 << 31


@dataclass(slots=True)
class _FrameReceive:
    """A message to come: ``works`` of its frame, then of each tensor in ``alone``."""

    frame: Frame
    alone: list[Tensor]
    works: list[dist.Work]


@dataclass(slots=True)
class _FrameSend:
    """A message on its way; it holds the buffers, which gloo only borrows.

    Attributes:
        versions: of the tensors in ``alone`` when they were sent: how often they had been written.
    """

    key: MessageKey
    frame: Frame
    alone: list[Tensor]
    versions: list[int]
    works: list[dist.Work] = field(default_factory=list)


class Peer:
    """The messages to and from ``rank``."""

    def __init__(self, world: dist.ProcessGroup, works: Works, rank: int) -> None:
        self._send = world.send
        self._recv = world.recv
        self._works = works
        self._rank = rank
        self._receives: dict[MessageKey, _FrameReceive] = {}
        self._sends: deque[_FrameSend] = deque()  # the last one is number _num_sent
        self._spare_frames: dict[FrameLayout, list[Frame]] = {}  # the next step sends the same messages again
        self._num_sent = self._num_taken = 0  # all its messages up to this number have come,
        self._early: set[int] = set()  # and those

    def post_receive(self, key: MessageKey, specs: Sequence[Spec]) -> None:
        """See :class:`runtime.transport.base.Transport`."""
        number = tag(key)
        if key in self._receives:
            raise TransportError(f"{key} from rank {self._rank} is announced twice")
        layout = layout_of(specs, ALONE_BYTES)
        frame = Frame(layout, spare_bytes=min(layout.total_bytes, SPARE_BYTES))
        alone = [alone_buffer(spec, SPARE_BYTES) for spec in layout.alone]
        try:
            works = [self._recv([buffer], self._rank, number) for buffer in (frame.message, *alone)]
        except RuntimeError as error:
            raise self._gone("receive", key, error) from error
        self._receives[key] = _FrameReceive(frame, alone, works)

    def receive(self, key: MessageKey, deadline: Deadline) -> tuple[Tensor, ...]:
        """See :class:`runtime.transport.base.Transport`."""
        posted = self._receives.pop(key, None)
        if posted is None:
            raise TransportError(f"{key} from rank {self._rank} was not announced")
        frame_work, *works = posted.works
        self._works.wait(frame_work, ("receive", key), ("rank", self._rank), deadline)
        number, acknowledged = posted.frame.check(key, self._rank)
        for work in works:
            self._works.wait(work, ("receive", key), ("rank", self._rank), deadline)
        self._note(number, acknowledged)
        return whole(posted.frame.layout, posted.frame.tensors, posted.alone)

    def send(self, key: MessageKey, tensors: Sequence[Tensor]) -> None:
        """See :class:`runtime.transport.base.Transport`."""
        layout = layout_for(tensors, ALONE_BYTES)
        spare = self._spare_frames.get(layout)
        frame = spare.pop() if spare else Frame(layout)
        self._num_sent = self._num_sent + 1 & _MASK
        inside = tensors
        alone = []
        if layout.alone:
            pairs = list(zip(tensors, layout.spans, strict=True))
            inside = [tensor for tensor, span in pairs if span is not None]
            alone = [tensor.detach().to("cpu").contiguous() for tensor, span in pairs if span is None]
        frame.write(key, inside, self._num_sent, self._num_taken)
        sent = _FrameSend(key, frame, alone, [times_written(tensor) for tensor in alone])
        number = tag(key)
        try:
            sent.works = [self._send([buffer], self._rank, number) for buffer in (frame.message, *alone)]
        except RuntimeError as error:
            raise self._gone("send", key, error) from error
        self._sends.append(sent)

    def flush(self, deadline: Deadline) -> None:
        """See :class:`runtime.transport.base.Transport`."""
        while self._sends:
            for work in self._sends[0].works:
                self._works.wait(work, ("send", self._sends[0].key), ("rank", self._rank), deadline)
            self._release()

    def num_buffers(self) -> tuple[int, int]:
        """How many messages to come and how many sent ones have their buffers now."""
        return len(self._receives), len(self._sends)

    def clear(self) -> None:
        """Let go of all buffers."""
        self._receives.clear()
        self._sends.clear()
        self._spare_frames.clear()

    def _note(self, number: int, acknowledged: int) -> None:
        """Message ``number`` has come, and told that ours up to ``acknowledged`` had come before it was sent."""
        self._early.add(number)
        while (following := self._num_taken + 1 & _MASK) in self._early:
            self._early.remove(following)
            self._num_taken = following
        while self._sends and (acknowledged - self._num_sent + len(self._sends) - 1 & _MASK) < _HALF:
            self._release()

    def _release(self) -> None:
        sent = self._sends.popleft()
        if sent.alone and [times_written(tensor) for tensor in sent.alone] != sent.versions:
            raise TransportError(
                f"{sent.key} to rank {self._rank} was changed while it was being sent",
                [f"a tensor of {ALONE_BYTES} bytes or more is sent from where it lies, and was written meanwhile"],
                ["write to a copy of the tensor, or flush first"],
            )
        if len(self._spare_frames) > _SPARE_LAYOUTS:  # shapes that vary from step to step do not come again
            self._spare_frames.clear()
        self._spare_frames.setdefault(sent.frame.layout, []).append(sent.frame)

    def _gone(self, doing: str, key: MessageKey, error: RuntimeError) -> TransportError:
        return gone(f"{doing} {key}", self._works.rank, f"rank {self._rank}", str(error))


class FrameMessages(OverWorks):
    """The part of a transport that sends messages between two ranks, and knows when all ranks are there.

    Args:
        world: all that is asked of it are its rank and size, sends and receives.
    """

    def __init__(self, world: dist.ProcessGroup, works: Works) -> None:
        self._works = works
        self._barrier = Barrier(world, works)
        self._peers = [Peer(world, works, rank) for rank in range(world.size())]

    def post_receive(self, key: MessageKey, source: int, specs: Sequence[Spec]) -> None:
        """See :class:`runtime.transport.base.Transport`, also for the others."""
        self._peers[source].post_receive(key, specs)

    def receive(self, key: MessageKey, source: int) -> tuple[Tensor, ...]:
        return self._peers[source].receive(key, self._works.deadline())

    def send(self, key: MessageKey, destination: int, tensors: Sequence[Tensor]) -> None:
        self._peers[destination].send(key, tensors)

    def flush(self, deadline: Deadline | None = None) -> None:
        self._flush(deadline or self._works.deadline())

    def barrier(self, word: int = 0) -> int:
        return self._barrier.wait(self._works.deadline(), word)

    def num_buffers(self) -> tuple[int, int]:
        """How many announced messages, and how many sent ones, have their buffers now."""
        numbers = [peer.num_buffers() for peer in self._peers]
        return sum(received for received, _ in numbers), sum(sent for _, sent in numbers)

    def _flush(self, deadline: Deadline) -> None:
        for peer in self._peers:
            peer.flush(deadline)

    def _forget_messages(self) -> None:
        for peer in self._peers:
            peer.clear()


def open_gloo(
    rank: int | None = None,
    world_size: int | None = None,
    store: Store | None = None,
    timeout_s: float = TRANSPORT_S,
    groups: Iterable[Sequence[int]] = (),
) -> GlooTransport:
    """Join the default process group with gloo and return its transport, which leaves the group when it is closed.

    Under torchrun or Slurm leave out ``rank``, ``world_size`` and ``store``: the environment names them.

    Args:
        rank: of this process, from 0.
        world_size: number of processes.
        store: where the ranks find each other; with one, ``rank`` and ``world_size`` are needed.
        timeout_s: for the first meeting, and the longest that a sum left behind by an error may keep the process.
        groups: those that may do something together, besides the world; the same on all ranks.

    Raises:
        TransportError: the ranks did not find each other.
        DeadlineError: not all of them were ready in time.
    """
    make = partial(GlooTransport, groups, owns_group=True)
    transport = join("gloo", rank, world_size, store, timeout_s, make)
    return met(transport, timeout_s)


class GlooTransport(GroupCollectives, FrameMessages):
    """The transport of one process, see :class:`runtime.transport.base.Transport`; received tensors are on the CPU.

    Args:
        groups: as in :func:`open_gloo`.  All ranks make their transport together, with the same groups.
        owns_group: leave the default process group in ``close``.
    """

    def __init__(self, groups: Iterable[Sequence[int]] = (), *, owns_group: bool = False) -> None:
        world = default_group()
        works = Works(world.rank())
        GroupCollectives.__init__(self, world, groups, works, pair_bytes=PAIR_SUM_BYTES)
        FrameMessages.__init__(self, world, works)
        self._owns_group = owns_group

    def close(self) -> None:
        """Leave."""
        self._forget_messages()
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()

    def _flush(self, deadline: Deadline) -> None:
        super()._flush(deadline)
        self.flush_keyed()
