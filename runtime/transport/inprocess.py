"""Ranks that are threads of one process: tests without processes, with the semantics of real messages.

Messages are packed, matched by tag and unpacked exactly as over gloo.  A :class:`Hub` sees every rank, hence knows at
once what a network only learns by waiting: that all ranks wait for one another.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce

import torch

from planner.ir.errors import DeadlineError, TransportError
from runtime.transport.base import Deadline, Key, Spec, check_member, declare, gone
from runtime.transport.frame import Frame, Layout, layout_for, layout_of, tag, unpack


@dataclass(slots=True)
class _Message:
    key: Key
    buffer: torch.Tensor
    taken: bool = False


@dataclass(slots=True)
class _Mailbox:
    """Messages of one tag from one rank to another, in the order sent; the first ``posted`` of them are taken."""

    messages: deque[_Message] = field(default_factory=deque)
    posted: int = 0

    def match(self) -> None:
        for message, _ in zip(self.messages, range(self.posted), strict=False):
            message.taken = True


@dataclass(slots=True)
class _Sum:
    parts: dict[int, torch.Tensor] = field(default_factory=dict)
    total: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Wait:
    what: str
    ready: Callable[[], bool]
    missing: Callable[[], Sequence[int]]


class Hub:
    """What the ranks of one process share.

    Args:
        world_size: number of ranks; each must have its own thread and must close its transport when it ends.
        groups: those that may be summed over, besides the world.
        rendezvous: ``flush`` waits until the receivers have announced the messages, as gloo and NCCL do.
        capacity: most messages from one rank to another that were sent and not announced; at the next one ``send``
            waits.  None: any number.
        send_deadline_s: how long such a ``send`` waits.
    """

    def __init__(
        self,
        world_size: int,
        groups: Iterable[Sequence[int]] = (),
        *,
        rendezvous: bool = False,
        capacity: int | None = None,
        send_deadline_s: float = 60.0,
    ) -> None:
        self.world_size = world_size
        self.groups = declare(groups, world_size)
        self.rendezvous = rendezvous
        self.capacity = capacity
        self.send_deadline_s = send_deadline_s
        self.changed = threading.Condition()
        self.mailboxes: dict[tuple[int, int, int], _Mailbox] = {}
        self.sums: dict[tuple[tuple[int, ...], int], _Sum] = {}
        self._closed: set[int] = set()
        self._waiting: dict[int, _Wait] = {}
        self._stall: tuple[str, ...] = ()

    def wait(
        self, rank: int, what: str, ready: Callable[[], bool], missing: Callable[[], Sequence[int]], deadline: Deadline
    ) -> None:
        """Wait, holding ``changed``, until ``ready()``; ``missing()`` says which ranks it depends on."""
        self._waiting[rank] = _Wait(what, ready, missing)
        try:
            self._look_for_stall()
            while not ready():
                if self._stall:
                    raise DeadlineError(f"{what}: rank {rank} waits for {_names(missing())} forever", self._stall)
                left = self._closed.intersection(missing())
                if left:
                    raise gone(what, rank, _names(sorted(left)), "it closed its transport")
                remaining_s = deadline.limit_s - deadline.waited_s()
                if remaining_s <= 0:
                    raise deadline.error(what, rank, _names(missing()))
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
        self._stall = tuple(f"rank {rank} waits: {wait.what}" for rank, wait in sorted(self._waiting.items()))
        self.changed.notify_all()


class InProcessTransport:
    """The transport of one rank of a :class:`Hub`, see :class:`runtime.transport.base.Transport`.

    A deadlock of all ranks is a DeadlineError at once, whatever the deadline; its details are the chain of waits.
    """

    def __init__(self, hub: Hub, rank: int) -> None:
        self.rank = rank
        self.world_size = hub.world_size
        self._hub = hub
        self._layouts: dict[tuple[Key, int], Layout] = {}
        self._sent: list[tuple[_Message, int]] = []
        self._num_sums: dict[tuple[int, ...], int] = {}

    def post_receive(self, key: Key, source: int, specs: Sequence[Spec]) -> None:
        number = tag(key)
        if (key, source) in self._layouts:
            raise TransportError(f"{key} from rank {source} is announced twice")
        self._layouts[key, source] = layout_of(specs)
        with self._hub.changed:
            mailbox = self._hub.mailboxes.setdefault((source, self.rank, number), _Mailbox())
            mailbox.posted += 1
            mailbox.match()
            self._hub.changed.notify_all()

    def receive(self, key: Key, source: int, deadline_s: float) -> tuple[torch.Tensor, ...]:
        layout = self._layouts.pop((key, source), None)
        if layout is None:
            raise TransportError(f"{key} from rank {source} was not announced")
        with self._hub.changed:
            slot = (source, self.rank, tag(key))
            mailbox = self._hub.mailboxes[slot]
            what = f"receive {key}"
            self._hub.wait(self.rank, what, lambda: bool(mailbox.messages), lambda: (source,), Deadline(deadline_s))
            message = mailbox.messages.popleft()
            mailbox.posted -= 1
            if not mailbox.messages and not mailbox.posted:
                del self._hub.mailboxes[slot]
        return unpack(message.buffer, key, source, layout)

    def send(self, key: Key, destination: int, tensors: Sequence[torch.Tensor]) -> None:
        frame = Frame(layout_for(tensors))
        frame.write(key, tensors)
        message = _Message(key, frame.message)
        number = tag(key)
        with self._hub.changed:
            if self._hub.capacity is not None:
                self._wait_for_room(key, destination, self._hub.capacity)
            mailbox = self._hub.mailboxes.setdefault((self.rank, destination, number), _Mailbox())
            mailbox.messages.append(message)
            mailbox.match()
            self._hub.changed.notify_all()
        self._sent = [(sent, rank) for sent, rank in self._sent if not sent.taken]
        self._sent.append((message, destination))

    def flush(self, deadline_s: float) -> None:
        if self._hub.rendezvous:
            with self._hub.changed:
                deadline = Deadline(deadline_s)
                for message, destination in self._sent:
                    self._wait_until_taken(message, destination, deadline)
        self._sent.clear()

    def all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...], deadline_s: float) -> None:
        check_member(self.rank, ranks, self._hub.groups)
        self._sum(tensor, ranks, deadline_s, f"sum over ranks {ranks}")

    def barrier(self, deadline_s: float) -> None:
        self._sum(torch.zeros(()), tuple(range(self.world_size)), deadline_s, "barrier")

    def close(self) -> None:
        self._hub.leave(self.rank)

    def _wait_until_taken(self, message: _Message, destination: int, deadline: Deadline) -> None:
        what = f"send {message.key}"
        self._hub.wait(self.rank, what, lambda: message.taken, lambda: (destination,), deadline)

    def _wait_for_room(self, key: Key, destination: int, capacity: int) -> None:
        def has_room() -> bool:
            return sum(rank == destination and not message.taken for message, rank in self._sent) < capacity

        self._hub.wait(self.rank, f"send {key}", has_room, lambda: (destination,), Deadline(self._hub.send_deadline_s))

    def _sum(self, tensor: torch.Tensor, ranks: tuple[int, ...], deadline_s: float, what: str) -> None:
        number = self._num_sums[ranks] = self._num_sums.get(ranks, 0) + 1
        with self._hub.changed, torch.no_grad():
            entry = self._hub.sums.setdefault((ranks, number), _Sum())
            self._check_alike(tensor, entry, what)
            entry.parts[self.rank] = tensor
            if len(entry.parts) == len(ranks):
                entry.total = reduce(torch.add, [entry.parts[rank] for rank in ranks])
                self._hub.changed.notify_all()
            try:
                self._hub.wait(
                    self.rank,
                    f"{what}, number {number}",
                    lambda: entry.total is not None,
                    lambda: [rank for rank in ranks if rank not in entry.parts],
                    Deadline(deadline_s),
                )
                tensor.copy_(entry.total)
            finally:  # a rank that gave up takes its term along, so that no other gets a sum
                del entry.parts[self.rank]
                if not entry.parts:
                    del self._hub.sums[ranks, number]

    def _check_alike(self, tensor: torch.Tensor, entry: _Sum, what: str) -> None:
        for peer, other in entry.parts.items():
            if other.shape != tensor.shape or other.dtype != tensor.dtype:
                mine, theirs = (f"{tuple(part.shape)} {part.dtype}" for part in (tensor, other))
                raise TransportError(f"{what}: rank {self.rank} adds {mine}, rank {peer} adds {theirs}")


def _names(ranks: Sequence[int]) -> str:
    return ", ".join(f"rank {rank}" for rank in ranks)
