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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
import torch.distributed as dist

from planner.ir.cluster import SHARED_MEMORY
from planner.ir.errors import TransportError
from runtime.transport.base import (
    DEADLINE_S,
    KEYED,
    Deadline,
    Key,
    Pending,
    Spec,
    Words,
    add_in_order,
    check_member,
    declare,
    flat_on_cpu,
    gone,
    has_values,
    is_plain,
    largest,
    parts,
    put_back,
    without_gradients,
    words,
)
from runtime.transport.frame import FrameLayout, another, header_of, layout_of, tag
from runtime.transport.segments import GONE, HERE, LATE, NOW_S, WATCHED, WRONG, ByteRange, Rows, SharedSegments, rows_of

SPIN_S = 10e-3
"""So long a wait looks before it sleeps, where every rank has a core of its own."""

IN_PARTS_BYTES = 128 * 1024
"""From here three and more ranks add a sum in parts."""

_MESSAGE, _KEYED, _EXCHANGE, _BARRIER, _GROUP, _PART, _RESULT = (kind << 56 for kind in range(7))  # of channels
_GROUP_SHIFT, _KEY_SHIFT, _NUMBERS = 32, 16, (1 << 32) - 1
_EXCHANGING: Words = ("exchange",)
ByRank = Mapping[int, torch.Tensor]
_MOST_SENT = 16  # are remembered before it is asked which of them were taken


class SharedMemoryTransport:
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
        self.rank, self.world_size, self.segments = segments.rank, world_size, segments
        self.name, self.deadline_s = SHARED_MEMORY, DEADLINE_S
        self.spin_s, self._in_parts, self._owns_group = spin_s, in_parts, owns_group
        self._numbers = declare(groups, world_size)
        self._announced: list[dict[Key, FrameLayout]] = [{} for _ in range(world_size)]
        self._sent: list[deque[Key]] = [deque() for _ in range(world_size)]
        self._num_sent = [0] * world_size
        self._counts: dict[object, int] = {}
        self._unfinished: list[SumInParts] = []
        self._why_unusable = ""

    def name_among(self, ranks: Sequence[int]) -> str:
        return self.name

    def post_receive(self, key: Key, source: int, specs: Sequence[Spec]) -> None:
        tag(key)  # it may have none
        if key in self._announced[source]:
            raise TransportError(f"{key} from rank {source} is announced twice")
        self._announced[source][key] = layout_of(specs)

    def receive(self, key: Key, source: int) -> tuple[torch.Tensor, ...]:
        layout = self._announced[source].pop(key, None)
        if layout is None:
            raise TransportError(f"{key} from rank {source} was not announced")
        self.require_usable(("receive", key), source)
        segments, header = self.segments, header_of(key, layout, 0, 0)
        look = partial(segments.receive, source, _MESSAGE | tag(key), header, layout)
        if (ended := look(NOW_S, 0.0, False)) == LATE:
            ended = self._wait(look, source, ("receive", key), Deadline(self.deadline_s))
        if ended == WRONG:
            raise another(segments.header(source, segments.block_offset), header, key, source)
        return segments.taken(layout)

    def send(self, key: Key, destination: int, tensors: Sequence[torch.Tensor]) -> None:
        channel, sent = _MESSAGE | tag(key), self._sent[destination]
        if self._why_unusable or not self.segments.send(destination, channel, key, tensors):
            raise self._gone(("send", key), destination)
        self._num_sent[destination] += 1
        sent.append(key)
        if len(sent) > _MOST_SENT:
            self._forget_taken(destination)

    def flush(self) -> None:
        deadline = Deadline(self.deadline_s)
        for rank, sent in enumerate(self._sent):
            self._forget_taken(rank)
            if sent:
                look = partial(self.segments.wait_taken, rank, self._num_sent[rank])
                self._wait(look, rank, ("send", sent[0]), deadline)
                sent.clear()

    @without_gradients
    def all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> None:
        self._sum("sum", tensor, ranks).wait()

    @without_gradients
    def start_sum(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> Pending:
        return self._sum("started sum", tensor, ranks)

    def start_exchange(self, sent: ByRank, received: ByRank, key: int | None = None) -> Pending:
        for rank, tensor in sent.items():
            if tensor.numel():
                self.put(tensor, (rank,), self.exchange_channel(True, rank, key), _EXCHANGING)
        return _BlockExchange(self, _receives(received), key)

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

    @without_gradients
    def reduce_scatter(self, flat: torch.Tensor, counts: Sequence[int], ranks: tuple[int, ...]) -> None:
        place, what = self._meeting("reduce-scatter", ranks)
        channel = _GROUP | place
        pieces, deadline = dict(zip(ranks, parts(flat, counts, ranks), strict=True)), Deadline(self.deadline_s)
        for rank in self.others_of(ranks):
            self.put(pieces[rank], (rank,), channel, what)
        self.add_to(pieces[self.rank], ranks, channel, what, deadline)

    @without_gradients
    def all_gather(self, flat: torch.Tensor, counts: Sequence[int], ranks: tuple[int, ...]) -> None:
        place, what = self._meeting("all-gather", ranks)
        channel = _GROUP | place
        pieces, deadline = dict(zip(ranks, parts(flat, counts, ranks), strict=True)), Deadline(self.deadline_s)
        others = self.others_of(ranks)
        self.put(pieces[self.rank], others, channel, what)
        for rank in others:
            self.fetch(pieces[rank], rank, channel, what, deadline)

    def all_max(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> None:
        largest(self, tensor, ranks)

    def barrier(self, word: int = 0) -> int:
        deadline = Deadline(self.deadline_s)
        channel, what = _BARRIER | self._next("barrier"), ("barrier",)
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

    def require_usable(self, what: Words, rank: int | None = None) -> None:
        """Raises as every wait, for ``rank``, where no peer can be reached any more."""
        if self._why_unusable:
            raise self._gone(what, self.rank if rank is None else rank)

    def others_of(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """``ranks`` but this one, in order."""
        return tuple(rank for rank in ranks if rank != self.rank)

    def next_block(self, rank: int, channel: int, what: Words, deadline: Deadline) -> int:
        """The next block that ``rank`` announces on ``channel``; raises as every wait."""
        if self._why_unusable:
            raise self._gone(what, rank)
        if not self.segments.poll(rank, channel):
            self._wait(partial(self.segments.wait, rank, channel), rank, what, deadline)
        return self.segments.block_offset

    def put(self, tensor: torch.Tensor, ranks: tuple[int, ...], channel: int, what: Words) -> None:
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

    def fetch(self, tensor: torch.Tensor, rank: int, channel: int, what: Words, deadline: Deadline) -> None:
        """Waits for a block of the size and dtype of ``tensor``, which becomes what lies there."""
        place = _place(tensor)
        if place is None:
            _, offset, block = self._look_at(tensor, rank, channel, what, deadline)
            tensor.detach().copy_(block)
            self.segments.let_go(rank, offset)
            return
        if self.fetch_now(tensor, place, rank, channel, what):
            return
        if self._wait(partial(self.segments.fetch, place, rank, channel), rank, what, deadline) == WRONG:
            raise self._unlike(tensor, rank, self.segments.block_offset, what)

    def fetch_now(self, tensor: torch.Tensor, place: ByteRange, rank: int, channel: int, what: Words) -> bool:
        """As :meth:`fetch`, if that takes no wait, of a tensor that lies at ``place``."""
        if self._why_unusable:
            raise self._gone(what, rank)
        ended = self.segments.fetch(place, rank, channel, NOW_S, 0.0, False)
        if ended == WRONG:
            raise self._unlike(tensor, rank, self.segments.block_offset, what)
        return ended == HERE

    def add_to(self, own: torch.Tensor, ranks: tuple[int, ...], channel: int, what: Words, deadline: Deadline) -> None:
        """Adds a block of each other rank to this rank's term, in the order of ``ranks``."""
        blocks = [self._look_at(own, rank, channel, what, deadline) for rank in self.others_of(ranks)]
        add_in_order(own, ranks.index(self.rank), [term for _, _, term in blocks])
        for rank, offset, _ in blocks:
            self.segments.let_go(rank, offset)

    def advance(self) -> None:
        """Adds this rank's parts of those sums whose terms have come."""
        for one in tuple(self._unfinished):
            if one.has_all():
                self.leave_alone(one)
                one.add()

    def leave_alone(self, one: SumInParts) -> None:
        """It is not advanced any more."""
        self._unfinished.remove(one)

    def _sum(self, kind: str, tensor: torch.Tensor, ranks: tuple[int, ...]) -> Pending:
        place, what = self._meeting(kind, ranks)
        self.advance()
        if self._in_parts and len(ranks) > 2 and tensor.nbytes >= IN_PARTS_BYTES:
            self._unfinished.append(SumInParts(self, tensor, ranks, place, what))
            return self._unfinished[-1]
        self.put(tensor, self.others_of(ranks), _GROUP | place, what)
        return _BlockSum(self, tensor, ranks, _GROUP | place, what)

    def _meeting(self, kind: str, ranks: tuple[int, ...]) -> tuple[int, Words]:
        """Which of a group's channels the next thing of this kind has, and how errors call it."""
        check_member(self.rank, ranks, self._numbers)
        number = self._next((kind, ranks))
        started = kind == "started sum"
        counted = number if started else self._next(("now", ranks))
        return 2 * self._numbers[ranks] + started << _GROUP_SHIFT | counted, (
            f"{kind} over ranks {ranks}, number",
            number,
        )

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

    def _look_at(
        self, like: torch.Tensor, rank: int, channel: int, what: Words, deadline: Deadline
    ) -> tuple[int, int, torch.Tensor]:
        """(``rank``, its next block, what lies there), of the size and dtype of ``like``; to be let go of."""
        offset = self.next_block(rank, channel, what, deadline)
        if self.segments.about(rank, offset) != (like.nbytes, _guard(like)):
            raise self._unlike(like, rank, offset, what)
        return rank, offset, self.segments.tensor(rank, offset, like.shape, like.dtype)

    def _unlike(self, like: torch.Tensor, rank: int, offset: int, what: Words) -> TransportError:
        num_bytes, _ = self.segments.about(rank, offset)
        return TransportError(
            f"{words(what)}: rank {self.rank} expects {tuple(like.shape)} {like.dtype} from rank {rank}",
            [f"expected {like.nbytes} bytes, came {num_bytes} bytes", "or they are of another dtype"],
        )

    def _wait(self, look: Callable[[float, float, bool], int], rank: int, what: Words, deadline: Deadline) -> int:
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

    def _gone(self, what: Words, rank: int) -> TransportError:
        why = self._why_unusable or "it has closed its transport, or ended"
        return gone(words(what), self.rank, f"rank {rank}", why)


_Receive = tuple[int, torch.Tensor, ByteRange | None]  # from which rank, and where it belongs


class _BlockExchange:
    """Tensors on their way."""

    __slots__ = ("_coming", "_transport")

    def __init__(self, transport: SharedMemoryTransport, receives: Sequence[_Receive], key: int | None) -> None:
        self._transport = transport
        channel = transport.exchange_channel
        self._coming = [(rank, channel(False, rank, key), tensor, place) for rank, tensor, place in receives]

    def wait(self) -> None:
        deadline, fetch_now = None, self._transport.fetch_now
        for rank, channel, tensor, place in self._coming:
            if deadline is None and place is not None and fetch_now(tensor, place, rank, channel, _EXCHANGING):
                continue
            deadline = deadline or Deadline(self._transport.deadline_s)
            self._transport.fetch(tensor, rank, channel, _EXCHANGING, deadline)


class Lanes:
    """An exchange of parts of a tensor that comes again and again, one at a time."""

    __slots__ = ("_key", "_receives", "_sends", "_transport")

    def __init__(
        self,
        transport: SharedMemoryTransport,
        sends: Sequence[tuple[int, int, Rows, int]],
        receives: Sequence[_Receive],
        key: int | None,
    ) -> None:
        self._transport, self._sends, self._receives = transport, sends, receives
        self._key = key

    def start(self, whole: torch.Tensor) -> Pending:
        """Sends the parts of ``whole``, contiguous and on the processor; what comes is there after the wait."""
        transport, key, address = self._transport, self._key, whole.data_ptr()
        transport.require_usable(_EXCHANGING)
        for rank, offset, rows, guard in self._sends:
            channel = transport.exchange_channel(True, rank, key)
            transport.segments.put_rows(address + offset, rows, rank, channel, guard)
        return _BlockExchange(transport, self._receives, key)


@dataclass(frozen=True, slots=True)
class _BlockSum:
    """A sum of which every rank adds all: its term lies in a block, and so do those of the others."""

    transport: SharedMemoryTransport
    tensor: torch.Tensor
    ranks: tuple[int, ...]
    channel: int
    what: Words

    @without_gradients
    def wait(self) -> None:
        if len(self.ranks) > 1:
            deadline = Deadline(self.transport.deadline_s)
            self.transport.add_to(self.tensor.detach(), self.ranks, self.channel, self.what, deadline)


class SumInParts:
    """A sum of which each rank adds a part, of the terms that the others send it, and shows it to them."""

    def __init__(
        self,
        transport: SharedMemoryTransport,
        tensor: torch.Tensor,
        ranks: tuple[int, ...],
        place: int,
        what: Words,
    ) -> None:
        self._transport, self._tensor, self._ranks = transport, tensor, ranks
        self._channel, self._results = _PART | place | WATCHED, _RESULT | place
        self._what = what
        self._flat = flat_on_cpu(tensor)
        self._pieces = dict(zip(ranks, torch.tensor_split(self._flat, len(ranks)), strict=True))
        self._others = transport.others_of(ranks)
        self._offsets: dict[int, int] = {}
        self._is_added = False
        for rank in self._others:
            transport.put(self._pieces[rank], (rank,), self._channel, what)

    def has_all(self) -> bool:
        """Whether all terms of this rank's part are here."""
        segments = self._transport.segments
        for rank in self._others:
            if rank not in self._offsets and segments.poll(rank, self._channel):
                self._offsets[rank] = segments.block_offset
        return len(self._offsets) == len(self._others)

    @without_gradients
    def add(self) -> None:
        """Of all terms this rank's part, which it shows to the others."""
        segments, rank = self._transport.segments, self._transport.rank
        own = self._pieces[rank]
        terms = [segments.tensor(other, self._offsets[other], own.shape, own.dtype) for other in self._others]
        add_in_order(own, self._ranks.index(rank), terms)
        for other, offset in self._offsets.items():
            segments.let_go(other, offset)
        self._transport.put(own, self._others, self._results, self._what)
        self._is_added = True

    @without_gradients
    def wait(self) -> None:
        """See :class:`runtime.transport.base.Pending`."""
        deadline = Deadline(self._transport.deadline_s)
        if not self._is_added:
            self._transport.leave_alone(self)
            for rank in self._others:
                if rank not in self._offsets:
                    self._offsets[rank] = self._transport.next_block(rank, self._channel, self._what, deadline)
            self.add()
        for rank in self._others:
            self._transport.fetch(self._pieces[rank], rank, self._results, self._what, deadline)
        put_back(self._flat, self._tensor)


@lru_cache(maxsize=4096)
def _guard_of(num_elements: int, dtype: torch.dtype) -> int:
    return zlib.crc32(f"{num_elements} {dtype}".encode())


def _receives(received: ByRank) -> list[_Receive]:
    return [(rank, tensor, _place(tensor)) for rank, tensor in received.items() if tensor.numel()]


def _place(tensor: torch.Tensor) -> ByteRange | None:
    return ByteRange(tensor.data_ptr(), tensor.nbytes, _guard(tensor)) if is_plain(tensor) else None


def _guard(tensor: torch.Tensor) -> int:
    """Terms of different size or dtype must not meet."""
    return _guard_of(tensor.numel(), tensor.dtype)
