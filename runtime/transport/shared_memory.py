"""Ranks that are processes of one host: messages, exchanges and sums through memory that they share.

    send       copies into a block of the sender's segment, which packs what was cut as well, and announces it
    receive    gives tensors that *are* the block: nothing is copied twice, and the block goes back to its sender when
               the last of the tensors is gone
    sums       every rank reads the terms of the others where they lie and adds them in the order of ranks; from three
               ranks on, large ones in parts, of which each rank adds one

A send ends at once, whatever its receiver does.  Nothing works in the background: a wait first looks for ``SPIN_S``
without sleeping, which costs no more than the core that would be idle, and keeps it awake; then it sleeps on a futex.
Where ranks share cores it sleeps at once.  Sums in parts go on whenever their ranks wait for anything.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial

import torch
import torch.distributed as dist
from torch import Tensor

from planner.ir.cluster import SHARED_MEMORY
from planner.ir.errors import TransportError
from runtime.timeouts import TRANSPORT_S
from runtime.transport.base import (
    KEYED,
    Deadline,
    ErrorWords,
    MessageKey,
    Pending,
    Spec,
    add_in_order,
    gone,
    has_values,
    is_plain,
    words,
)
from runtime.transport.collectives import ByRank, ExchangedCollectives, Meeting, Steps
from runtime.transport.frame import FrameLayout, another, header_of, layout_of, tag
from runtime.transport.segments import (
    GONE,
    HERE,
    LATE,
    NOW_S,
    WATCHED,
    WRONG,
    ByteRange,
    SharedSegments,
    StridedRows,
    rows_of,
)

SPIN_S = 10e-3
"""So long a wait looks before it sleeps, where every rank has a core of its own."""

IN_PARTS_BYTES = 128 * 1024
"""From here three and more ranks add a sum in parts."""

_MESSAGE, _KEYED, _EXCHANGE, _BARRIER, _GROUP, _SECOND = (kind << 56 for kind in range(6))  # of channels
_PLACE_SHIFT = 32
_KEY_SHIFT = 16
_NUMBERS = (1 << 32) - 1
_EXCHANGING: ErrorWords = ("exchange",)
_MOST_SENT = 16  # are remembered before it is asked which of them were taken


class SharedMemoryTransport(ExchangedCollectives):
    """The transport of one process, see :class:`runtime.transport.base.Transport`.

    Args:
        segments: those of all ranks that this one speaks to, attached; closed with the transport.
        groups: as in :func:`open_shared`.
        spin_s: so long a wait looks before it sleeps.
        in_parts: whether large sums of three and more ranks are added in parts, which go on only while their ranks wait
            here; not where they also wait elsewhere.
        owns_group: leave the default process group in ``close``.
    """

    def __init__(
        self,
        segments: SharedSegments,
        world_size: int,
        groups: Iterable[Sequence[int]] = (),
        *,
        spin_s: float = SPIN_S,
        in_parts: bool = True,
        owns_group: bool = False,
    ) -> None:
        self.rank = segments.rank
        self.world_size = world_size
        self.segments = segments
        self.name = SHARED_MEMORY
        self.deadline_s = TRANSPORT_S
        self.spin_s = spin_s
        self._in_parts = in_parts
        self._owns_group = owns_group
        super().__init__(groups, world_size)
        self._announced: list[dict[MessageKey, FrameLayout]] = [{} for _ in range(world_size)]
        self._sent: list[deque[MessageKey]] = [deque() for _ in range(world_size)]
        self._num_sent = [0] * world_size
        self._counts: dict[object, int] = {}
        self._unfinished: list[_PartSums] = []
        self._why_unusable = ""

    def name_among(self, ranks: Sequence[int]) -> str:
        return self.name

    def post_receive(self, key: MessageKey, source: int, specs: Sequence[Spec]) -> None:
        tag(key)  # it may have none
        if key in self._announced[source]:
            raise TransportError(f"{key} from rank {source} is announced twice")
        self._announced[source][key] = layout_of(specs)

    def receive(self, key: MessageKey, source: int) -> tuple[Tensor, ...]:
        layout = self._announced[source].pop(key, None)
        if layout is None:
            raise TransportError(f"{key} from rank {source} was not announced")
        self.require_usable(("receive", key), source)
        segments = self.segments
        header = header_of(key, layout, 0, 0)
        look = partial(segments.receive, source, _MESSAGE | tag(key), header, layout)
        if (ended := look(NOW_S, 0.0, False)) == LATE:
            ended = self._wait(look, source, ("receive", key), Deadline(self.deadline_s))
        if ended == WRONG:
            raise another(segments.header(source, segments.block_offset), header, key, source)
        return segments.taken(layout)

    def send(self, key: MessageKey, destination: int, tensors: Sequence[Tensor]) -> None:
        channel = _MESSAGE | tag(key)
        sent = self._sent[destination]
        if self._why_unusable or not self.segments.send(destination, channel, key, tensors):
            raise self._gone(("send", key), destination)
        self._num_sent[destination] += 1
        sent.append(key)
        if len(sent) > _MOST_SENT:
            self._forget_taken(destination)

    def flush(self, deadline: Deadline | None = None) -> None:
        deadline = deadline or Deadline(self.deadline_s)
        for rank, sent in enumerate(self._sent):
            self._forget_taken(rank)
            if sent:
                look = partial(self.segments.wait_taken, rank, self._num_sent[rank])
                self._wait(look, rank, ("send", sent[0]), deadline)
                sent.clear()

    def start_exchange(self, sent: ByRank, received: ByRank, key: int | None = None) -> Pending:
        for rank, tensor in sent.items():
            if tensor.numel():
                self.put(tensor, (rank,), self.exchange_channel(True, rank, key), _EXCHANGING)
        return self.started(_receives(received), key)

    def lanes(self, sent: ByRank, received: ByRank, key: int | None) -> Lanes | None:
        """What does :meth:`start_exchange` again and again; None where it cannot be worked out before.

        Args:
            sent: of any values: each lies in a tensor as what is sent will lie in one of its shape and strides.
            received: where what comes is put each time.
        """
        places = {rank: rows_of(tensor.shape, tensor.stride(), tensor.itemsize) for rank, tensor in sent.items()}
        moved = (*sent.values(), *received.values())
        if not all(map(has_values, moved)) or not all(map(is_plain, received.values())) or not all(places.values()):
            return None
        sends = [
            (rank, int(tensor.storage_offset()) * tensor.itemsize, rows, _guard(tensor))
            for (rank, tensor), rows in zip(sent.items(), places.values(), strict=True)
            if rows is not None and tensor.numel()
        ]
        return Lanes(self, sends, _receives(received), key)

    def started(self, receives: Sequence[_Receive], key: int | None) -> Pending:
        """The receiving side of an exchange."""
        channel = self.exchange_channel
        coming = [(rank, channel(False, rank, key), tensor, place) for rank, tensor, place in receives]
        return _BlockExchange(self, coming, _EXCHANGING)

    def exchange(self, meeting: Meeting, sent: ByRank, received: ByRank, *, is_second: bool = False) -> Pending:
        channel = _channel(meeting, is_second)
        self._put_all(sent, channel, meeting.what)
        coming = [(rank, channel, tensor, _place(tensor)) for rank, tensor in received.items()]
        return _BlockExchange(self, coming, meeting.what)

    def is_in_parts(self, tensor: Tensor, num_ranks: int) -> bool:
        return self._in_parts and num_ranks > 2 and tensor.nbytes >= IN_PARTS_BYTES

    def added(self, meeting: Meeting, terms: ByRank) -> Iterator[Pending]:
        """The terms of others are added from where they lie."""
        own = terms[self.rank]
        others = meeting.series.others
        if not others:
            return
        channel = _channel(meeting) | (0 if terms[others[0]] is own else WATCHED)
        self._put_all({rank: terms[rank] for rank in others}, channel, meeting.what)
        blocks = _Blocks(self, own, others, channel, meeting.what)
        yield blocks
        add_in_order(own.detach(), meeting.series.position, blocks.terms())
        for rank, offset in blocks.offsets.items():
            self.segments.let_go(rank, offset)

    def begun(self, meeting: Meeting, steps: Iterator[Pending]) -> Pending:
        """A sum in parts goes on whenever this rank waits for anything."""
        self.advance()
        begun = _PartSums(self, steps)
        if begun.is_watched:
            self._unfinished.append(begun)
        return begun

    def barrier(self, word: int = 0) -> int:
        deadline = Deadline(self.deadline_s)
        channel = _BARRIER | self._next("barrier")
        what = ("barrier",)
        others = self.others_of(range(self.world_size))
        for rank in others:
            self.segments.announce(rank, channel, word)  # in place of a block
        return max([word, *(self.next_block(rank, channel, what, deadline) for rank in others)])

    def close(self) -> None:
        self._why_unusable = "this rank has closed its transport"
        self.segments.close()
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()

    def num_buffers(self) -> tuple[int, int]:
        """How many announced messages have not come yet, and how many sent ones were not taken."""
        for rank in range(self.world_size):
            self._forget_taken(rank)
        return sum(map(len, self._announced)), sum(map(len, self._sent))

    def require_usable(self, what: ErrorWords, rank: int | None = None) -> None:
        """Raises as every wait, for ``rank``, where no peer can be reached any more."""
        if self._why_unusable:
            raise self._gone(what, self.rank if rank is None else rank)

    def others_of(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """``ranks`` but this one, in order."""
        return tuple(rank for rank in ranks if rank != self.rank)

    def next_block(self, rank: int, channel: int, what: ErrorWords, deadline: Deadline) -> int:
        """The next block that ``rank`` announces on ``channel``; raises as every wait."""
        if self._why_unusable:
            raise self._gone(what, rank)
        if not self.segments.poll(rank, channel):
            self._wait(partial(self.segments.wait, rank, channel), rank, what, deadline)
        return self.segments.block_offset

    def put(self, tensor: Tensor, ranks: tuple[int, ...], channel: int, what: ErrorWords) -> None:
        """Copies ``tensor`` into one block and announces it to ``ranks``."""
        if not ranks:
            return
        if self._why_unusable:
            raise self._gone(what, ranks[0])
        if len(ranks) == 1 and (place := _place(tensor)) is not None:
            self.segments.put(place, ranks[0], channel)
            return
        if len(ranks) == 1 and has_values(tensor) and self.segments.put_cut(tensor, ranks[0], channel, _guard(tensor)):
            return
        offset = self.segments.block(tensor.nbytes, len(ranks), _guard(tensor))
        self.segments.tensor(self.rank, offset, tensor.shape, tensor.dtype).copy_(tensor.detach())
        for rank in ranks:
            self.segments.announce(rank, channel, offset)

    def fetch(self, tensor: Tensor, rank: int, channel: int, what: ErrorWords, deadline: Deadline) -> None:
        """Waits for a block of the size and dtype of ``tensor``, which becomes what lies there."""
        place = _place(tensor)
        if place is None:
            offset = self.next_block(rank, channel, what, deadline)
            tensor.detach().copy_(self.term(tensor, rank, offset, what))
            self.segments.let_go(rank, offset)
            return
        if self.fetch_now(tensor, place, rank, channel, what):
            return
        if self._wait(partial(self.segments.fetch, place, rank, channel), rank, what, deadline) == WRONG:
            raise self._unlike(tensor, rank, self.segments.block_offset, what)

    def fetch_now(self, tensor: Tensor, place: ByteRange, rank: int, channel: int, what: ErrorWords) -> bool:
        """As :meth:`fetch`, if that takes no wait, of a tensor that lies at ``place``."""
        if self._why_unusable:
            raise self._gone(what, rank)
        ended = self.segments.fetch(place, rank, channel, NOW_S, 0.0, False)
        if ended == WRONG:
            raise self._unlike(tensor, rank, self.segments.block_offset, what)
        return ended == HERE

    def advance(self) -> None:
        """Adds this rank's parts of those sums whose terms have come."""
        for sums in tuple(self._unfinished):
            if isinstance(sums.now, _Blocks) and sums.now.are_here():
                self.leave_alone(sums)
                sums.go_on()

    def leave_alone(self, sums: _PartSums) -> None:
        """It is not advanced any more."""
        if sums in self._unfinished:
            self._unfinished.remove(sums)

    def _put_all(self, sent: ByRank, channel: int, what: ErrorWords) -> None:
        """Puts what goes to several ranks into one block."""
        for tensor in {id(tensor): tensor for tensor in sent.values()}.values():
            self.put(tensor, tuple(rank for rank, one in sent.items() if one is tensor), channel, what)

    def exchange_channel(self, sends: bool, rank: int, key: int | None) -> int:
        number = self._next((sends, rank, key))
        if key is None:
            return _EXCHANGE | number
        if not 0 <= key < KEYED:
            raise ValueError(f"key {key} is not below {KEYED}")
        return _KEYED | key << _KEY_SHIFT | number % (1 << _KEY_SHIFT)

    def _next(self, counted: object) -> int:
        number = self._counts[counted] = self._counts.get(counted, 0) + 1
        return number & _NUMBERS

    def term(self, like: Tensor, rank: int, offset: int, what: ErrorWords) -> Tensor:
        """What lies in a block of ``rank``, of the size and dtype of ``like``; the block is to be let go of."""
        if self.segments.about(rank, offset) != (like.nbytes, _guard(like)):
            raise self._unlike(like, rank, offset, what)
        return self.segments.tensor(rank, offset, like.shape, like.dtype)

    def _unlike(self, like: Tensor, rank: int, offset: int, what: ErrorWords) -> TransportError:
        num_bytes, _ = self.segments.about(rank, offset)
        return TransportError(
            f"{words(what)}: rank {self.rank} expects {tuple(like.shape)} {like.dtype} from rank {rank}",
            [f"expected {like.nbytes} bytes, came {num_bytes} bytes", "or they are of another dtype"],
        )

    def _wait(self, look: Callable[[float, float, bool], int], rank: int, what: ErrorWords, deadline: Deadline) -> int:
        """How it ended that ``look(seconds, seconds awake, whether watched channels count)`` found something."""
        if self._why_unusable:
            raise self._gone(what, rank)
        while True:
            ended = look(max(0.0, deadline.left_s()), self.spin_s, bool(self._unfinished))
            if ended in (HERE, WRONG):
                return ended
            if ended == LATE:
                self._why_unusable = "an earlier wait was too long"
                self.segments.leave()
                raise deadline.error(words(what), self.rank, f"rank {rank}")
            if ended == GONE:
                raise self._gone(what, rank)
            self.advance()

    def _forget_taken(self, rank: int) -> None:
        sent = self._sent[rank]
        while len(sent) > self._num_sent[rank] - self.segments.num_taken(rank):
            sent.popleft()

    def _gone(self, what: ErrorWords, rank: int) -> TransportError:
        why = self._why_unusable or "it has closed its transport, or ended"
        return gone(words(what), self.rank, f"rank {rank}", why)


_Receive = tuple[int, Tensor, ByteRange | None]  # from which rank, and where it belongs


class _BlockExchange:
    """Tensors on their way: from which rank, on which channel, and where each belongs."""

    __slots__ = ("_coming", "_transport", "_what")

    def __init__(
        self,
        transport: SharedMemoryTransport,
        coming: Sequence[tuple[int, int, Tensor, ByteRange | None]],
        what: ErrorWords,
    ) -> None:
        self._transport = transport
        self._coming = coming
        self._what = what

    def wait(self) -> None:
        deadline = None
        fetch_now = self._transport.fetch_now
        what = self._what
        for rank, channel, tensor, place in self._coming:
            if deadline is None and place is not None and fetch_now(tensor, place, rank, channel, what):
                continue
            deadline = deadline or Deadline(self._transport.deadline_s)
            self._transport.fetch(tensor, rank, channel, what, deadline)


class _Blocks:
    """A block of each other rank, in which its term lies.

    Attributes:
        offsets: where it lies, of those that have come.
    """

    __slots__ = ("_channel", "_like", "_ranks", "_transport", "_what", "offsets")

    def __init__(
        self, transport: SharedMemoryTransport, like: Tensor, ranks: tuple[int, ...], channel: int, what: ErrorWords
    ) -> None:
        self._transport = transport
        self._like = like
        self._ranks = ranks
        self._channel = channel
        self._what = what
        self.offsets: dict[int, int] = {}

    def are_here(self) -> bool:
        """Whether all have come."""
        segments = self._transport.segments
        for rank in self._ranks:
            if rank not in self.offsets and segments.poll(rank, self._channel):
                self.offsets[rank] = segments.block_offset
        return len(self.offsets) == len(self._ranks)

    def wait(self) -> None:
        deadline = Deadline(self._transport.deadline_s)
        for rank in self._ranks:
            if rank not in self.offsets:
                self.offsets[rank] = self._transport.next_block(rank, self._channel, self._what, deadline)

    @property
    def is_watched(self) -> bool:
        """Whether a wait for something else hears of them."""
        return self._channel >= WATCHED

    def terms(self) -> list[Tensor]:
        """What lies there, in the order of ranks."""
        return [self._transport.term(self._like, rank, self.offsets[rank], self._what) for rank in self._ranks]


class _PartSums(Steps):
    """A sum; one in parts goes on beside other waits until its part is added."""

    def __init__(self, transport: SharedMemoryTransport, steps: Iterator[Pending]) -> None:
        super().__init__(steps)
        self._transport = transport

    @property
    def is_watched(self) -> bool:
        """Whether it is to go on beside other waits."""
        return isinstance(self.now, _Blocks) and self.now.is_watched

    def wait(self) -> None:
        self._transport.leave_alone(self)
        super().wait()


class Lanes:
    """An exchange of parts of a tensor that comes again and again, one at a time."""

    __slots__ = ("_key", "_receives", "_sends", "_transport")

    def __init__(
        self,
        transport: SharedMemoryTransport,
        sends: Sequence[tuple[int, int, StridedRows, int]],
        receives: Sequence[_Receive],
        key: int | None,
    ) -> None:
        self._transport = transport
        self._sends = sends
        self._receives = receives
        self._key = key

    def start(self, whole: Tensor) -> Pending:
        """Sends the parts of ``whole``, contiguous and on the processor; what comes is there after the wait."""
        transport = self._transport
        key = self._key
        address = whole.data_ptr()
        transport.require_usable(_EXCHANGING)
        for rank, offset, rows, guard in self._sends:
            channel = transport.exchange_channel(True, rank, key)
            transport.segments.put_rows(address + offset, rows, rank, channel, guard)
        return transport.started(self._receives, key)


def _channel(meeting: Meeting, is_second: bool = False) -> int:
    series, number = meeting
    return (_SECOND if is_second else _GROUP) | series.place << _PLACE_SHIFT | number & _NUMBERS


@lru_cache(maxsize=4096)
def _guard_of(num_elements: int, dtype: torch.dtype) -> int:
    return zlib.crc32(f"{num_elements} {dtype}".encode())


def _receives(received: ByRank) -> list[_Receive]:
    return [(rank, tensor, _place(tensor)) for rank, tensor in received.items() if tensor.numel()]


def _place(tensor: Tensor) -> ByteRange | None:
    return ByteRange(tensor.data_ptr(), tensor.nbytes, _guard(tensor)) if is_plain(tensor) else None


def _guard(tensor: Tensor) -> int:
    """Terms of different size or dtype must not meet."""
    return _guard_of(tensor.numel(), tensor.dtype)
