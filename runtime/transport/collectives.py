"""What the ranks of a group do together over torch.distributed: sums, scattered sums, gathers, maxima.

Each group has two communicators: what was started in the background never meets what is waited for at once.  On one
communicator matching is by order.  A ring (the backend's own sum) adds each part in a fixed order on one rank and hands
it on; in an exchange each rank adds what came from all, in the order of ranks: either way all get the same bits.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from planner.ir.cluster import STANDING_BYTES
from planner.ir.errors import TransportError
from runtime.transport.base import (
    DEADLINE_S,
    KEYED,
    Pending,
    Words,
    add_in_order,
    check_member,
    declare,
    is_plain,
    largest,
    parts,
    plain,
    plain_like,
    put_back,
)
from runtime.transport.works import OverWorks, PersistentReceives, PostedReceive, StreamWorks, Works


@dataclass(slots=True)
class _Ahead:
    """Bytes of the buffers of receives that stand ready: at most ``STANDING_BYTES`` of all sizes together."""

    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Subgroup:
    """One group on one of its two communicators, and what is done there now; ``None`` where the rank is alone."""

    ranks: tuple[int, ...]
    position: int
    group: dist.ProcessGroup | None
    what: Words

    def peers(self) -> list[int]:
        """Positions of the others."""
        return [position for position in range(len(self.ranks)) if position != self.position]


class Exchanges(OverWorks):
    """Tensors between the ranks of one process group, which are counted within it.

    Args:
        group: None where the rank is alone.
        works: starts and waits.
        device: where the backend's tensors are; others are copied there and back.
        batched: what is exchanged at once starts at once; on a stream of its own, as NCCL's, it would block itself.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, works: Works, *, device: str = "cpu", batched: bool = False
    ) -> None:
        self.rank, self.world_size = (0, 1) if group is None else (group.rank(), group.size())
        self._works, self._device, self._batched = works, torch.device(device), batched
        self._pairs = _Subgroup(tuple(range(self.world_size)), self.rank, group, ("exchange",))
        self._persistent = PersistentReceives(group, works)

    def start_exchange(
        self,
        sent: Mapping[int, torch.Tensor],
        received: Mapping[int, torch.Tensor],
        key: int | None = None,
    ) -> Pending:
        """See :class:`runtime.transport.base.Transport`."""
        is_here = self._device.type == "cpu" and all(tensor.is_cpu for tensor in sent.values())
        if is_here and all(map(is_plain, received.values())):
            return self._begin(sent, received, key)
        here = {rank: plain_like(tensor, self._device) for rank, tensor in received.items()}
        gone = {rank: self._here(tensor) for rank, tensor in sent.items()}  # to where the backend can send it
        copies = [(received[rank], buffer) for rank, buffer in here.items()]
        return _Copied(self._begin(gone, here, key), copies)

    def _here(self, tensor: torch.Tensor) -> torch.Tensor:
        return plain(tensor, self._device)

    def _begin(
        self,
        sent: Mapping[int, torch.Tensor],
        received: Mapping[int, torch.Tensor],
        key: int | None,
    ) -> Pending:
        """Starts an exchange of tensors of this rank's device; plain ones come, what is sent has any strides."""
        if key is not None and not self._batched and self._pairs.group is not None:
            return self._persistent.start(sent, received, key)
        sent = {rank: tensor if is_plain(tensor) else plain(tensor, self._device) for rank, tensor in sent.items()}
        return _WorksExchange(self._works, self._start_exchange(self._pairs, sent, received))

    def _start_exchange(
        self, subgroup: _Subgroup, sent: Mapping[int, torch.Tensor], received: Mapping[int, torch.Tensor]
    ) -> dict[dist.Work, Words]:
        """Receives, then sends, by position; with the peer of each."""
        group = subgroup.group
        works: dict[dist.Work, Words] = {}
        if group is None:
            return works
        moves = [(False, position, tensor) for position, tensor in received.items() if tensor.numel()]
        moves += [(True, position, tensor) for position, tensor in sent.items() if tensor.numel()]
        if self._batched and moves:
            everybody = ("one of", ", ".join(f"rank {subgroup.ranks[position]}" for _, position, _ in moves))
            return dict.fromkeys(self._start_batch(subgroup, moves, everybody), everybody)
        for sends, position, tensor in moves:
            peer = ("rank", subgroup.ranks[position])
            begin = partial(group.send if sends else group.recv, [tensor], position, _tag(tensor))
            works[self._works.start(begin, subgroup.what, peer)] = peer
        return works

    def _start_batch(
        self, subgroup: _Subgroup, moves: list[tuple[bool, int, torch.Tensor]], peers: Words
    ) -> list[dist.Work]:
        operations = [
            dist.P2POp(
                dist.isend if sends else dist.irecv, tensor, group=subgroup.group, tag=_tag(tensor), group_peer=position
            )
            for sends, position, tensor in moves
        ]
        return self._works.start(partial(dist.batch_isend_irecv, operations), subgroup.what, peers)


class GroupExchanges:
    """Exchanges over a process group that somebody else has made, of any backend; ranks are counted within it.

    They share the group's order with what else is sent over it, point to point.
    """

    deadline_s = DEADLINE_S

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.world_size = group.rank(), group.size()
        self._group = group
        config = dist.get_backend_config(group)  # as "cpu:gloo,cuda:nccl"
        self._backends = dict(each.split(":") for each in str(config).split(","))
        self._over: dict[str, tuple[Exchanges, Works]] = {}

    def start_exchange(
        self,
        sent: Mapping[int, torch.Tensor],
        received: Mapping[int, torch.Tensor],
        key: int | None = None,
    ) -> Pending:
        """See :class:`runtime.transport.base.Transport`; the key is of no use here."""
        devices = {tensor.device.type for tensor in (*sent.values(), *received.values())}
        exchanges, works = self._of(devices.pop() if devices else "cpu")
        works.deadline_s = self.deadline_s
        works.settle(works.deadline())  # on a stream, what the last exchange waits for is looked at by the next one
        return exchanges.start_exchange(sent, received)

    def _of(self, device: str) -> tuple[Exchanges, Works]:
        """Over the backend of tensors on ``device``, or on the processor if it moves those alone."""
        is_stream = self._backends.get(device) == "nccl" or "cpu" not in self._backends
        key = next(iter(self._backends)) if is_stream and device == "cpu" else device if is_stream else "cpu"
        if key not in self._over:
            works = StreamWorks(self.rank) if is_stream else Works(self.rank)
            place = f"cuda:{torch.cuda.current_device()}" if key == "cuda" else key
            self._over[key] = Exchanges(self._group, works, device=place, batched=is_stream), works
        return self._over[key]


class GroupCollectives(Exchanges):
    """The part of a transport that does things in groups; all ranks of ``world`` make theirs together.

    Args:
        groups: besides the world; the same, in the same order, on all ranks.
        works: starts and waits.
        backend: of the communicators.
        device: where the backend's tensors are; others are copied there and back.
        pair_bytes: sums of two ranks up to this size are exchanged; larger ones, and those of more ranks, are rings.
            Receives of what is up to this size are posted ahead.
        batched: what is exchanged at once starts at once; on a stream of its own, as NCCL's, it would block itself.
    """

    def __init__(
        self,
        world: dist.ProcessGroup,
        groups: Iterable[Sequence[int]],
        works: Works,
        *,
        backend: str = "gloo",
        device: str = "cpu",
        pair_bytes: int = 0,
        batched: bool = False,
    ) -> None:
        alone, everybody = world.size() == 1, tuple(range(world.size()))
        numbers = declare(groups, world.size())
        self._now, self._started = (
            {ranks: _new_group(ranks, backend) for ranks in numbers if len(ranks) > 1} for _ in range(2)
        )
        super().__init__(None if alone else _new_group(everybody, backend), works, device=device, batched=batched)
        self.name = self._backend = backend
        self._numbers, self._pair_bytes = numbers, pair_bytes
        self._counts: dict[tuple[str, tuple[int, ...]], int] = {}
        self._requests: dict[tuple[str, int, int], _PersistentRequest] = {}
        self._ahead = _Ahead()

    def name_among(self, ranks: Sequence[int]) -> str:
        """See :class:`runtime.transport.base.Transport`, also for the others."""
        return self._backend

    def all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> None:
        self._sum("sum", tensor, ranks).wait()

    def start_sum(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> Pending:
        return self._sum("started sum", tensor, ranks)

    @torch.no_grad()
    def reduce_scatter(self, flat: torch.Tensor, counts: Sequence[int], ranks: tuple[int, ...]) -> None:
        subgroup, pieces = self._subgroup("reduce-scatter", ranks), parts(flat, counts, ranks)
        own = pieces[subgroup.position]
        terms = {p: plain_like(own, self._device) for p in subgroup.peers()}
        self._exchange(subgroup, {p: self._here(pieces[p]) for p in subgroup.peers()}, terms)
        add_in_order(own, subgroup.position, list(terms.values()))

    @torch.no_grad()
    def all_gather(self, flat: torch.Tensor, counts: Sequence[int], ranks: tuple[int, ...]) -> None:
        subgroup, pieces = self._subgroup("all-gather", ranks), parts(flat, counts, ranks)
        buffers = [self._here(piece) for piece in pieces]
        own = buffers[subgroup.position]
        self._exchange(subgroup, dict.fromkeys(subgroup.peers(), own), {p: buffers[p] for p in subgroup.peers()})
        for piece, buffer in zip(pieces, buffers, strict=True):
            put_back(buffer, piece)

    def all_max(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> None:
        largest(self, tensor, ranks)

    @torch.no_grad()
    def _sum(self, kind: str, tensor: torch.Tensor, ranks: tuple[int, ...]) -> Pending:
        subgroup = self._subgroup(kind, ranks)
        term = self._here(tensor)
        works: dict[dist.Work, Words] = {}
        other, repost = None, None
        if subgroup.group is None or not term.numel():
            pass
        elif len(ranks) == 2 and term.nbytes <= self._pair_bytes:
            request = self._request(subgroup, 1 - subgroup.position, term)
            ready = request.receive(term)
            other, repost = ready.buffer, request.post_again
            works = {ready.work: request.peer, request.send(term): request.peer}
        else:
            begin = partial(subgroup.group.allreduce, [term])
            peers = ("one of", ", ".join(f"rank {ranks[position]}" for position in subgroup.peers()))
            works = {self._works.start(begin, subgroup.what, peers): peers}
        return _GroupSum(self._works, works, subgroup.what, tensor, term, other, repost)

    def _subgroup(self, kind: str, ranks: tuple[int, ...]) -> _Subgroup:
        check_member(self.rank, ranks, self._numbers)
        number = self._counts[kind, ranks] = self._counts.get((kind, ranks), 0) + 1
        group = (self._started if kind == "started sum" else self._now).get(ranks)
        return _Subgroup(ranks, ranks.index(self.rank), group, (f"{kind} over ranks {ranks}, number", number))

    def _exchange(
        self,
        subgroup: _Subgroup,
        sent: Mapping[int, torch.Tensor],
        received: Mapping[int, torch.Tensor],
    ) -> None:
        """Small tensors come into receives that stood ready, and are copied."""

        def lines_of(tensors: Mapping[int, torch.Tensor]) -> dict[int, _PersistentRequest]:
            small = {
                p: t for p, t in tensors.items() if subgroup.group is not None and 0 < t.nbytes <= self._pair_bytes
            }
            return {position: self._request(subgroup, position, tensor) for position, tensor in small.items()}

        deadline, coming, going = self._works.deadline(), lines_of(received), lines_of(sent)
        ready = {position: request.receive(received[position]) for position, request in coming.items()}
        works = self._start_exchange(
            subgroup,
            {position: tensor for position, tensor in sent.items() if position not in going},
            {position: tensor for position, tensor in received.items() if position not in coming},
        )
        works |= {each.work: coming[position].peer for position, each in ready.items()}
        works |= {request.send(sent[position]): request.peer for position, request in going.items()}
        for work, peer in works.items():
            self._works.wait(work, subgroup.what, peer, deadline)
        for position, each in ready.items():
            received[position].copy_(each.buffer)
            coming[position].post_again(each.buffer)

    def _request(self, subgroup: _Subgroup, position: int, tensor: torch.Tensor) -> _PersistentRequest:
        """Between this rank of a group and another, of tensors of this size."""
        assert subgroup.group is not None  # there are two ranks
        place = (subgroup.group.group_name, position, _tag(tensor))
        if place not in self._requests:
            self._requests[place] = _PersistentRequest(
                self._works, subgroup, position, KEYED | _tag(tensor), self._ahead
            )
        request = self._requests[place]
        request.what = subgroup.what
        return request


class _PersistentRequest:
    """What one rank of a group sends this one again and again, in tensors of one size, and is sent.

    The receive of the next one is posted as soon as one was read: gloo then knows of it long before the data come
    (:mod:`runtime.transport.works`).  They have a tag of their own, so that nothing else meets such a receive.

    Args:
        ahead: of all lines of a rank together.

    Attributes:
        what: is sent and received now.
    """

    def __init__(self, works: Works, subgroup: _Subgroup, position: int, tag: int, ahead: _Ahead) -> None:
        assert subgroup.group is not None  # there are two ranks
        self._works, self._group, self._position, self._tag = works, subgroup.group, position, tag
        self.what, self.peer = subgroup.what, ("rank", subgroup.ranks[position])
        self._ahead, self._ready = ahead, deque[PostedReceive]()

    def receive(self, like: torch.Tensor) -> PostedReceive:
        """The next one's, in the shape of ``like``; it may have been posted for another shape of as many numbers."""
        if not self._ready:
            return self._post(plain_like(like, like.device))
        self._ahead.num_bytes -= like.nbytes
        ready = self._ready.popleft()
        return PostedReceive(ready.work, ready.buffer.view(like.shape))

    def send(self, tensor: torch.Tensor) -> dist.Work:
        """Start to send the next one."""
        return self._works.start(partial(self._group.send, [tensor], self._position, self._tag), self.what, self.peer)

    def post_again(self, buffer: torch.Tensor) -> None:
        """The receive of the next one but those posted, into a buffer that was read."""
        if self._ahead.num_bytes + buffer.nbytes <= STANDING_BYTES:
            with suppress(TransportError):  # who has left by now: the next one, if there is any, will say so
                self._ready.append(self._post(buffer))
                self._ahead.num_bytes += buffer.nbytes

    def _post(self, buffer: torch.Tensor) -> PostedReceive:
        begin = partial(self._group.recv, [buffer], self._position, self._tag)
        return PostedReceive(self._works.start(begin, self.what, self.peer), buffer)


@dataclass(frozen=True, slots=True)
class _GroupSum:
    """A sum on its way: ``term`` is added up in place, or ``other`` comes, is added to it and given to ``repost``."""

    works: Works
    pending: dict[dist.Work, Words]
    what: Words
    tensor: torch.Tensor
    term: torch.Tensor
    other: torch.Tensor | None
    repost: Callable[[torch.Tensor], None] | None

    @torch.no_grad()
    def wait(self) -> None:
        deadline = self.works.deadline()
        for work, peer in self.pending.items():
            self.works.wait(work, self.what, peer, deadline)
        if self.other is not None:
            self.term.add_(self.other)  # the addition of two numbers commutes: both ranks get the same bits
            if self.repost is not None:
                self.repost(self.other)
        put_back(self.term, self.tensor)


_EXCHANGE: Words = ("exchange",)


@dataclass(frozen=True, slots=True)
class _WorksExchange:
    """Tensors on their way."""

    works: Works
    pending: Mapping[dist.Work, Words]

    def wait(self) -> None:
        deadline = self.works.deadline()
        for work, peer in self.pending.items():
            self.works.wait(work, _EXCHANGE, peer, deadline)


@dataclass(frozen=True, slots=True)
class _Copied:
    """An exchange; ``copies``: where what came belongs, and where it came."""

    pending: Pending
    copies: Sequence[tuple[torch.Tensor, torch.Tensor]]

    def wait(self) -> None:
        self.pending.wait()
        for wanted, buffer in self.copies:
            wanted.detach().copy_(buffer)


def _new_group(ranks: tuple[int, ...], backend: str) -> dist.ProcessGroup | None:
    group = dist.new_group(ranks, backend=backend)
    return group if isinstance(group, dist.ProcessGroup) else None


def _tag(tensor: torch.Tensor) -> int:
    """Terms of different size must not meet: gloo has no frames, and a longer one would end the process."""
    return zlib.crc32(f"{tensor.numel()} {tensor.dtype}".encode()) % KEYED
