"""Ranks that are threads of one process: tests without processes, with the semantics of real messages.

Messages are packed, matched by tag and unpacked exactly as over gloo.  A :class:`~runtime.transport.inprocess.Hub` sees
every rank, hence knows at once what a network only learns by waiting: that all ranks wait for one another.

What ranks that are threads of one process share: mailboxes, meetings, and who waits for whom.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from planner.ir.cluster import IN_PROCESS
from planner.ir.errors import DeadlineError, TransportError
from runtime.transport.base import Deadline, ErrorWords, MessageKey, Pending, Spec, declare, gone, named, words
from runtime.transport.collectives import BARRIER, ByRank, ExchangedCollectives, Meeting
from runtime.transport.frame import Frame, FrameLayout, layout_for, layout_of, tag, unpack

_Slot = tuple[int, int, Hashable]


@dataclass(slots=True)
class QueuedMessage:
    """One message; ``taken`` when its receiver has announced it."""

    key: MessageKey
    buffer: Tensor
    taken: bool = False


@dataclass(slots=True)
class Mailbox:
    """Messages of one tag from one rank to another, in the order sent; the first ``posted`` of them are taken."""

    messages: deque[QueuedMessage] = field(default_factory=deque)
    posted: int = 0

    def match(self) -> None:
        """Mark as taken what is announced by now."""
        for message, _ in zip(self.messages, range(self.posted), strict=False):
            message.taken = True


@dataclass(frozen=True, slots=True)
class _BlockedRank:
    what: str
    ready: Callable[[], bool]
    missing: Callable[[], Sequence[int]]


class Hub:
    """What the ranks of one process share.

    Args:
        world_size: number of ranks; each must have its own thread and must close its transport when it ends.
        groups: those that may do something together, besides the world.
        rendezvous: ``flush`` waits until the receivers have announced the messages, as gloo and NCCL do.
        capacity: most messages from one rank to another that were sent and not announced; at the next one ``send``
            waits.  None: any number.
        deadline_s: of the waits of its transports.

    Attributes:
        changed: held by whoever looks at or changes what is shared.
        mailboxes: by source, destination and tag.
        parcels: tensors of exchanges, by source, destination and what they are for.
    """

    def __init__(
        self,
        world_size: int,
        groups: Iterable[Sequence[int]] = (),
        *,
        rendezvous: bool = False,
        capacity: int | None = None,
        deadline_s: float = 60.0,
    ) -> None:
        self.world_size = world_size
        self.groups = declare(groups, world_size)
        self.rendezvous = rendezvous
        self.capacity = capacity
        self.deadline_s = deadline_s
        self.changed = threading.Condition()
        self.mailboxes: dict[tuple[int, int, int], Mailbox] = {}
        self.parcels: dict[_Slot, Tensor] = {}
        self._closed: set[int] = set()
        self._waiting: dict[int, _BlockedRank] = {}
        self._stall: tuple[str, ...] = ()

    def wait(
        self, rank: int, what: str, ready: Callable[[], bool], missing: Callable[[], Sequence[int]], deadline: Deadline
    ) -> None:
        """Wait, holding ``changed``, until ``ready()``; ``missing()`` says which ranks it depends on."""
        self._waiting[rank] = _BlockedRank(what, ready, missing)
        try:
            self._look_for_stall()
            while not ready():
                if self._stall:
                    raise DeadlineError(f"{what}: rank {rank} waits for {named(missing())} forever", self._stall)
                departed = self._closed.intersection(missing())
                if departed:
                    raise gone(what, rank, named(sorted(departed)), "it closed its transport")
                remaining_s = deadline.left_s()
                if remaining_s <= 0:
                    raise deadline.error(what, rank, named(missing()))
                self.changed.wait(remaining_s)
        finally:
            del self._waiting[rank]

    def leave(self, rank: int) -> None:
        """Mark a rank as closed and wake those that wait for it."""
        with self.changed:
            self._closed.add(rank)
            self._look_for_stall()
            self.changed.notify_all()

    def _look_for_stall(self) -> None:
        """If every rank still here waits for what no other will do, tell all of them.

        A rank that waits for one that left is about to get an error, hence may still do something.
        """
        waits = self._waiting.values()
        all_wait = len(waits) + len(self._closed) == self.world_size
        if self._stall or not all_wait or any(w.ready() or self._closed.intersection(w.missing()) for w in waits):
            return
        self._stall = tuple(
            f"rank {rank} waits for {named(wait.missing())}: {wait.what}"
            for rank, wait in sorted(self._waiting.items())
        )
        self.changed.notify_all()


class InProcessTransport(ExchangedCollectives):
    """The transport of one rank of a :class:`Hub`, see :class:`runtime.transport.base.Transport`.

    A deadlock of all ranks is a DeadlineError at once, whatever the deadline; its details are the chain of waits.
    Messages of CUDA tensors come as CPU tensors; what a group does together stays on the tensors' own devices.
    """

    def __init__(self, hub: Hub, rank: int) -> None:
        super().__init__(hub.groups, hub.world_size)
        self.rank = rank
        self.world_size = hub.world_size
        self.name = IN_PROCESS
        self.deadline_s = hub.deadline_s
        self._hub = hub
        self._layouts: dict[tuple[MessageKey, int], FrameLayout] = {}
        self._sent: list[tuple[QueuedMessage, int]] = []
        self._num_parcels: dict[tuple[int, int], int] = {}

    def name_among(self, ranks: Sequence[int]) -> str:
        return self.name

    def post_receive(self, key: MessageKey, source: int, specs: Sequence[Spec]) -> None:
        number = tag(key)
        if (key, source) in self._layouts:
            raise TransportError(f"{key} from rank {source} is announced twice")
        self._layouts[key, source] = layout_of(specs)
        with self._hub.changed:
            mailbox = self._hub.mailboxes.setdefault((source, self.rank, number), Mailbox())
            mailbox.posted += 1
            mailbox.match()
            self._hub.changed.notify_all()

    def receive(self, key: MessageKey, source: int) -> tuple[Tensor, ...]:
        layout = self._layouts.pop((key, source), None)
        if layout is None:
            raise TransportError(f"{key} from rank {source} was not announced")
        with self._hub.changed:
            slot = (source, self.rank, tag(key))
            mailbox = self._hub.mailboxes[slot]
            what = f"receive {key}"
            self._hub.wait(
                self.rank, what, lambda: bool(mailbox.messages), lambda: (source,), Deadline(self.deadline_s)
            )
            message = mailbox.messages.popleft()
            mailbox.posted -= 1
            if not mailbox.messages and not mailbox.posted:
                del self._hub.mailboxes[slot]
        return self._unpacked(message, key, source, layout)

    def send(self, key: MessageKey, destination: int, tensors: Sequence[Tensor]) -> None:
        message = self._packed(key, tensors)
        number = tag(key)
        with self._hub.changed:
            if self._hub.capacity is not None:
                self._wait_for_room(key, destination, self._hub.capacity)
            mailbox = self._hub.mailboxes.setdefault((self.rank, destination, number), Mailbox())
            mailbox.messages.append(message)
            mailbox.match()
            self._hub.changed.notify_all()
        self._sent = [(sent, rank) for sent, rank in self._sent if not sent.taken]
        self._sent.append((message, destination))

    def flush(self) -> None:
        if self._hub.rendezvous:
            with self._hub.changed:
                deadline = Deadline(self.deadline_s)
                for message, destination in self._sent:
                    self._wait_until_taken(message, destination, deadline)
        self._sent.clear()

    def start_exchange(self, sent: ByRank, received: ByRank, key: int | None = None) -> Pending:
        going = {rank: self._turn(self.rank, rank) for rank in sent}
        coming = {rank: self._turn(rank, self.rank) for rank in received}
        return self._start(("exchange",), sent, received, going, coming)

    def exchange(self, meeting: Meeting, sent: ByRank, received: ByRank, *, is_second: bool = False) -> Pending:
        place = (meeting.series.place, meeting.number)
        return self._start(meeting.what, sent, received, dict.fromkeys(sent, place), dict.fromkeys(received, place))

    def barrier(self, word: int = 0) -> int:
        token = torch.tensor(word, dtype=torch.uint8)
        self.become_largest(self.meet(BARRIER, tuple(range(self.world_size))), token)
        return int(token)

    def close(self) -> None:
        self._hub.leave(self.rank)

    def num_buffers(self) -> tuple[int, int]:
        """How many announced messages, and how many sent ones, have their buffers now."""
        return len(self._layouts), len(self._sent)

    def _packed(self, key: MessageKey, tensors: Sequence[Tensor]) -> QueuedMessage:
        """What is on its way, in memory of its own."""
        frame = Frame(layout_for(tensors))
        frame.write(key, tensors)
        return QueuedMessage(key, frame.message)

    def _unpacked(
        self, message: QueuedMessage, key: MessageKey, source: int, layout: FrameLayout
    ) -> tuple[Tensor, ...]:
        """What :meth:`_packed` made, for who announced ``key`` with ``layout``."""
        return unpack(message.buffer, key, source, layout)

    def _turn(self, src: int, dst: int) -> int:
        """The number of the next parcel from one rank to another, of which this rank is one."""
        self._num_parcels[src, dst] = self._num_parcels.get((src, dst), 0) + 1
        return self._num_parcels[src, dst]

    def _wait_until_taken(self, message: QueuedMessage, destination: int, deadline: Deadline) -> None:
        what = f"send {message.key}"
        self._hub.wait(self.rank, what, lambda: message.taken, lambda: (destination,), deadline)

    def _wait_for_room(self, key: MessageKey, destination: int, capacity: int) -> None:
        def has_room() -> bool:
            return sum(rank == destination and not message.taken for message, rank in self._sent) < capacity

        self._hub.wait(self.rank, f"send {key}", has_room, lambda: (destination,), Deadline(self.deadline_s))

    @torch.no_grad()
    def _start(
        self,
        what: ErrorWords,
        sent: ByRank,
        received: ByRank,
        going: Mapping[int, Hashable],
        coming: Mapping[int, Hashable],
    ) -> Pending:
        """``going``, ``coming``: by rank, what is to meet there."""
        with self._hub.changed:
            for rank, tensor in sent.items():
                self._hub.parcels[self.rank, rank, going[rank]] = tensor.detach().clone()
            self._hub.changed.notify_all()
        expected = {(rank, self.rank, coming[rank]): tensor for rank, tensor in received.items()}
        return _Delivery(self, self._hub, words(what), expected)


@dataclass(frozen=True, slots=True)
class _Delivery:
    """Parcels that one rank expects: by address, where each belongs."""

    transport: InProcessTransport
    hub: Hub
    what: str
    expected: dict[_Slot, Tensor]

    def wait(self) -> None:
        rank = self.transport.rank
        deadline = Deadline(self.transport.deadline_s)
        with self.hub.changed, torch.no_grad():
            self.hub.wait(rank, self.what, self._is_there, self._missing, deadline)
            for place, tensor in self.expected.items():
                parcel = self.hub.parcels.pop(place)
                if (parcel.shape, parcel.dtype) != (tensor.shape, tensor.dtype):
                    raise TransportError(
                        f"{self.what}: rank {rank} expects {tuple(tensor.shape)} {tensor.dtype} from rank {place[0]}",
                        [f"which sent {tuple(parcel.shape)} {parcel.dtype}"],
                    )
                tensor.copy_(parcel)

    def _is_there(self) -> bool:
        return all(place in self.hub.parcels for place in self.expected)

    def _missing(self) -> list[int]:
        return [place[0] for place in self.expected if place not in self.hub.parcels]
