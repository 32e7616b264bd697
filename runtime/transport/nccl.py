"""Messages in the order sent, over a communicator for each channel: what NCCL can do, on any backend.

A message is a frame on the device, and large tensors that follow it.  Nothing here stops the device's stream: a receive
makes what follows on the stream wait, and the headers of all messages are looked at together, by ``flush``.

Ranks that are processes with a GPU each: NCCL, with a communicator for each directed channel and each group.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from cuda_ops._torch import Store
from planner.ir.errors import TransportError
from planner.ir.program import ALONE_BYTES, SPARE_BYTES, Program
from planner.ir.schedule import SEND, Op
from runtime.timeouts import TRANSPORT_S
from runtime.transport.base import Deadline, MessageKey, Spec, default_group, join, met
from runtime.transport.exchanges import GroupCollectives
from runtime.transport.frame import (
    HEADER_BYTES,
    FrameLayout,
    alone_buffer,
    check,
    header_of,
    layout_for,
    layout_of,
    views,
    whole,
)
from runtime.transport.gloo import Peer
from runtime.transport.works import Barrier, StreamWorks, Works


@dataclass(frozen=True, slots=True, order=True)
class Channel:
    """What one rank sends to another for one edge of the stages in one direction: it keeps its order.

    ``kind`` and the stages are those of the messages' keys.
    """

    kind: str
    src_stage: int
    dst_stage: int
    source: int
    destination: int


def channels_of(program: Program) -> tuple[Channel, ...]:
    """The channels over which the ranks of ``program`` send, in order."""
    channels = set()
    for rank, row in enumerate(program.rows):
        for action in row:
            if action.op in SEND and action.peer is not None:
                forward = action.op is Op.SEND_FORWARD
                for message in program.messages_of(rank, action):
                    other = message.dst if forward else message.src
                    channels.add(Channel("F" if forward else "B", action.stage, action.peer, rank, other))
    return tuple(sorted(channels))


@dataclass(slots=True)
class _ChannelReceive:
    """A message to come: its frame, then the tensors that travel alone."""

    layout: FrameLayout
    buffers: list[Tensor]
    works: list[dist.Work]


@dataclass(slots=True)
class _ChannelSend:
    """A message on its way, which holds the buffers."""

    key: MessageKey
    destination: int
    buffers: list[Tensor]
    works: list[dist.Work]


@dataclass(frozen=True, slots=True)
class _Unchecked:
    """A message that was received, its header not yet looked at."""

    key: MessageKey
    source: int
    layout: FrameLayout
    header: Tensor


class ChannelTransport(GroupCollectives):
    """The transport of one process, see :class:`runtime.transport.base.Transport`.

    It has limits of its own:

    - messages of a channel must be announced in the order in which they are sent, which every valid program does;
    - a message that is not what was announced is an error of the next ``flush``, as is a late one where the backend
      works on streams;
    - what is sent is not copied where it is large, whatever its device; what comes is on ``device``.

    Args:
        channels: those of the program; all ranks of the world make their transport together, with the same channels.
        groups: as in :func:`runtime.transport.gloo.open_gloo`.
        backend: of all communicators but the world's, which must be gloo for CPU tensors.
        device: where the backend's tensors are.
        host_kinds: kinds of messages (``MessageKey.kind``) between the hosts: they need no channel, go over the
            world's gloo, in any order, and come as tensors of the CPU.
        works: starts and waits; by default as fits the device.
        timeout_s: longest time in which a channel comes to life.
        owns_group: leave the default process group in ``close``.
    """

    def __init__(
        self,
        channels: Iterable[Channel],
        groups: Iterable[Sequence[int]] = (),
        *,
        backend: str,
        device: str,
        works: Callable[[int], Works] | None = None,
        host_kinds: Collection[str] = (),
        timeout_s: float = TRANSPORT_S,
        owns_group: bool = False,
    ) -> None:
        world = default_group()
        make = works or (Works if torch.device(device).type == "cpu" else StreamWorks)
        super().__init__(world, groups, make(world.rank()), backend=backend, device=device, batched=True)
        self._owns_group = owns_group
        self._barrier = Barrier(world, Works(self.rank))
        self._host_kinds = frozenset(host_kinds)
        self._peers = [Peer(world, Works(self.rank), rank) for rank in range(self.world_size)]
        self._receives: dict[tuple[MessageKey, int], _ChannelReceive] = {}
        self._sends: deque[_ChannelSend] = deque()
        self._unchecked: list[_Unchecked] = []
        deadline = Deadline(timeout_s)
        self._begin_groups(deadline)
        self._links = self._connect(channels, backend, deadline)

    def post_receive(self, key: MessageKey, source: int, specs: Sequence[Spec]) -> None:
        if key.kind in self._host_kinds:
            self._peers[source].post_receive(key, specs)
            return
        if (key, source) in self._receives:
            raise TransportError(f"{key} from rank {source} is announced twice")
        link = self._link(key, source, self.rank)
        layout = layout_of(specs, ALONE_BYTES)
        size = layout.total_bytes + min(layout.total_bytes, SPARE_BYTES)
        buffers = [torch.empty(size, dtype=torch.uint8, device=self.device)]
        buffers += [alone_buffer(spec, SPARE_BYTES, self.device) for spec in layout.alone]
        begin = partial(_each, link.recv, buffers, _other(link))
        works = self._works.start(begin, ("receive", key), ("rank", source))
        self._receives[key, source] = _ChannelReceive(layout, buffers, works)

    def receive(self, key: MessageKey, source: int) -> tuple[Tensor, ...]:
        if key.kind in self._host_kinds:
            return self._peers[source].receive(key, self._works.deadline())
        posted = self._receives.pop((key, source), None)
        if posted is None:
            raise TransportError(f"{key} from rank {source} was not announced")
        deadline = self._works.deadline()
        for work in posted.works:
            self._works.wait(work, ("receive", key), ("rank", source), deadline)
        frame, *alone = posted.buffers
        self._unchecked.append(_Unchecked(key, source, posted.layout, frame[:HEADER_BYTES].clone()))
        return whole(posted.layout, views(frame, posted.layout), alone)

    def send(self, key: MessageKey, destination: int, tensors: Sequence[Tensor]) -> None:
        if key.kind in self._host_kinds:
            self._peers[destination].send(key, tensors)
            return
        while self._sends and all(work.is_completed() for work in self._sends[0].works):
            self._sends.popleft()
        link = self._link(key, self.rank, destination)
        layout = layout_for(tensors, ALONE_BYTES)
        frame = self._frame(key, layout)
        inside = iter(views(frame, layout))
        buffers = [frame]
        for tensor, span in zip(tensors, layout.spans, strict=True):
            if span is None:
                buffers.append(self.here(tensor))
            else:
                next(inside).copy_(tensor.detach())
        begin = partial(_each, link.send, buffers, _other(link))
        works = self._works.start(begin, ("send", key), ("rank", destination))
        self._sends.append(_ChannelSend(key, destination, buffers, works))

    def flush(self) -> None:
        deadline = self._works.deadline()
        self._works.settle(deadline)
        while self._sends:
            sent = self._sends[0]
            for work in sent.works:
                self._works.finish(work, ("send", sent.key), ("rank", sent.destination), deadline)
            self._sends.popleft()
        for peer in self._peers:
            peer.flush(deadline)
        self._check_headers()

    def barrier(self, word: int = 0) -> int:
        return self._barrier.wait(self._works.deadline(), word)

    def close(self) -> None:
        is_stuck = bool(self._sends or self._receives) and self.device.type != "cpu"
        for link in self._links.values() if is_stuck else ():
            link.abort()  # a kernel that waits for a peer would keep the process
        self._receives.clear()
        self._sends.clear()
        self._unchecked.clear()
        self._links.clear()
        for peer in self._peers:
            peer.clear()
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()

    def num_buffers(self) -> tuple[int, int]:
        """How many announced messages, and how many sent ones, have their buffers now."""
        received, sent = zip(*(peer.num_buffers() for peer in self._peers), strict=True)
        return len(self._receives) + sum(received), len(self._sends) + sum(sent)

    def _begin_groups(self, deadline: Deadline) -> None:
        """A first sum in each group, by all its ranks and in one order.

        NCCL makes a communicator at its first use, to which all ranks of the group must come; an exchange among some of
        them would otherwise be that use.
        """
        groups = [*self._now.values(), *self._started.values(), self._pairs.group]
        for number, group in enumerate(groups):
            if group is not None:
                token = torch.zeros(1, device=self.device)
                what = ("connect group", number)
                peers = ("one of", group.size(), "ranks")
                self._works.finish(
                    self._works.start(partial(group.allreduce, [token]), what, peers), what, peers, deadline
                )

    def _connect(
        self, channels: Iterable[Channel], backend: str, deadline: Deadline
    ) -> dict[tuple[str, int, int, int, int], dist.ProcessGroup]:
        """A communicator for each channel of this rank; the first message connects it, here, in the order of channels.

        Both ends of a channel must come to it, so that a first message within a step might wait for another channel.
        """
        links = {}
        for channel in sorted(set(channels)):
            ends = sorted((channel.source, channel.destination))
            group = dist.new_group(ends, backend=backend)  # by all ranks: names of local ones depend on each rank
            if self.rank not in ends:
                continue
            token = torch.zeros(1, dtype=torch.uint8, device=self.device)
            begin = partial(group.send if self.rank == channel.source else group.recv, [token], _other(group), 0)
            peer = ("rank", channel.destination if self.rank == channel.source else channel.source)
            work = self._works.start(begin, ("connect", channel), peer)
            self._works.finish(work, ("connect", channel), peer, deadline)
            links[channel.kind, channel.src_stage, channel.dst_stage, channel.source, channel.destination] = group
        return links

    def _link(self, key: MessageKey, source: int, destination: int) -> dist.ProcessGroup:
        link = self._links.get((key.kind, key.src_stage, key.dst_stage, source, destination))
        if link is None:
            raise TransportError(
                f"{key} from rank {source} to rank {destination} belongs to no channel",
                remedies=["declare every channel when the transport is made: channels_of(program)"],
            )
        return link

    def _frame(self, key: MessageKey, layout: FrameLayout) -> Tensor:
        frame = torch.empty(layout.total_bytes, dtype=torch.uint8, device=self.device)
        header = torch.frombuffer(bytearray(header_of(key, layout, 0, 0)), dtype=torch.uint8)
        frame[:HEADER_BYTES].copy_(header)
        return frame

    def _check_headers(self) -> None:
        """Raises TransportError for the first message that is not what was announced; one copy from the device."""
        unchecked = self._unchecked
        self._unchecked = []
        if not unchecked:
            return
        headers = torch.stack([message.header for message in unchecked]).cpu().numpy()
        for message, header in zip(unchecked, headers, strict=True):
            check(memoryview(header), message.key, message.source, message.layout)


def _other(group: dist.ProcessGroup) -> int:
    """The position of the other rank of two."""
    return 1 - group.rank()


def _each(begin: Callable[..., dist.Work], buffers: list[Tensor], position: int) -> list[dist.Work]:
    return [begin([buffer], position, 0) for buffer in buffers]


def open_nccl(
    device: str,
    channels: Iterable[Channel],
    rank: int | None = None,
    world_size: int | None = None,
    store: Store | None = None,
    timeout_s: float = TRANSPORT_S,
    groups: Iterable[Sequence[int]] = (),
    host_kinds: Collection[str] = (),
) -> ChannelTransport:
    """Join the default process group and return its transport, as :func:`runtime.transport.gloo.open_gloo`.

    CPU tensors of the default group (the barrier) go over gloo.

    Args:
        device: of this process, ``cuda:0``.
        channels: ``channels_of(program)``; the same on all ranks.
        timeout_s: also the time after which NCCL's own watchdog ends a process whose peer is gone and that did not
            notice by itself: choose it longer than the deadlines of waits.
        host_kinds: as of :class:`ChannelTransport`.
    """
    torch.cuda.set_device(device)
    make = partial(
        ChannelTransport,
        channels,
        groups,
        backend="nccl",
        device=device,
        host_kinds=host_kinds,
        timeout_s=timeout_s,
        owns_group=True,
    )
    return met(join("cpu:gloo,cuda:nccl", rank, world_size, store, timeout_s, make), timeout_s)
