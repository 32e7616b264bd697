"""What ranks that are threads of one process share: mailboxes, meetings, and who waits for whom."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from planner.ir.errors import DeadlineError, TransportError
from runtime.transport.base import Deadline, Key, declare, gone


@dataclass(slots=True)
class Message:
    """One message; ``taken`` when its receiver has announced it."""

    key: Key
    buffer: torch.Tensor
    taken: bool = False


@dataclass(slots=True)
class Mailbox:
    """Messages of one tag from one rank to another, in the order sent; the first ``posted`` of them are taken."""

    messages: deque[Message] = field(default_factory=deque)
    posted: int = 0

    def match(self) -> None:
        """Mark as taken what is announced by now."""
        for message, _ in zip(self.messages, range(self.posted), strict=False):
            message.taken = True


@dataclass(slots=True)
class Meeting:
    """Something that a group does together.

    Attributes:
        terms: what each rank brought.
        counts: see ``Transport.reduce_scatter``; empty for a sum.
        result: made by the rank that came last; empty before.
        over: whether it is there.
    """

    counts: tuple[int, ...]
    terms: dict[int, torch.Tensor] = field(default_factory=dict)
    result: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    over: bool = False

    def check_alike(self, what: str, rank: int, term: torch.Tensor, counts: tuple[int, ...]) -> None:
        """Refuse a term that does not fit those that are there.

        Raises:
            TransportError: it names both ranks and what they brought.
        """
        mine = _text(term, counts)
        for peer, other in self.terms.items():
            theirs = _text(other, self.counts)
            if theirs != mine:
                raise TransportError(f"{what}: rank {rank} brings {mine}, rank {peer} brings {theirs}")


@dataclass(frozen=True, slots=True)
class _Wait:
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
        send_deadline_s: how long such a ``send`` waits.

    Attributes:
        changed: held by whoever looks at or changes what is shared.
        mailboxes: by source, destination and tag.
        meetings: by kind, group and number.
        parcels: tensors of exchanges, by source, destination and number.
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
        self.mailboxes: dict[tuple[int, int, int], Mailbox] = {}
        self.meetings: dict[tuple[str, tuple[int, ...], int], Meeting] = {}
        self.parcels: dict[tuple[int, int, int], torch.Tensor] = {}
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
        self._stall = tuple(
            f"rank {rank} waits for {_names(wait.missing())}: {wait.what}"
            for rank, wait in sorted(self._waiting.items())
        )
        self.changed.notify_all()


def _names(ranks: Sequence[int]) -> str:
    return ", ".join(f"rank {rank}" for rank in ranks)


def _text(term: torch.Tensor, counts: tuple[int, ...]) -> str:
    return f"{tuple(term.shape)} {term.dtype}" + (f" in parts of {list(counts)}" if counts else "")
