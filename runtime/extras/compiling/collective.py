"""What a divided stage moves, as functional collectives: torch.compile sees them in its graph.

A message between two ranks is a work that somebody waits for; torch.compile cannot look into it.  Here each exchange is
one all-to-all among all ranks of the stage, whose split sizes say who sends whom how much; most of them are 0.

    rank 0 of 3 sends 6 to rank 1 and nothing to rank 2          input split  0 6 0
    and receives 6 from rank 1, nothing from rank 2              output split 0 6 0

Only :class:`CollectivePeerGroup` differs, and the exchanges it makes; local forms and autograd functions are as ever.

Keeps a compiler from dropping collectives, and from moving them between forward and backward.

torch.compile takes a collective for a function of its input: nobody misses one whose result is not used, and it may be
computed as soon as its input is known.  Both are wrong where ranks differ.  A rank that only sends makes no
use of the result, and drops the call that others wait for; one with an empty part sends back zeros, which it knows in
forward already.  Therefore

    forward    what is waited for is linked to an output
    backward   what is sent is linked to the gradients that come, what is waited for to one that goes

where a link is a slice without elements, concatenated: it depends on what it was cut from, and changes nothing.  The
order of collectives is the graph's, which compilers keep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from cuda_ops._torch import functional_collectives
from planner.ir.box import Box, Transfer
from runtime.spatial.exchange import NO_MESSAGES, Arriving, Exchange, PeerGroup
from runtime.timeouts import TRANSPORT_S
from runtime.transport.base import Pending, check_member, gone, parts

_all_to_all, _all_reduce, _wait = functional_collectives()


class Collectives:
    """The part of a :class:`runtime.transport.base.Transport` that the layers of one divided stage use, on one rank.

    All ranks of ``ranks`` call the same things in the same order, also those that have nothing to send.  Waits have the
    deadline of their group: a graph that was compiled has no clock.

    Args:
        rank: this one, in the world.
        groups: process groups by their ranks, of growing numbers; the stage's own is the first.
        device: of tensors.

    Attributes:
        ranks: of the stage.
        order: keeps a compiler from dropping what it sees here.
    """

    def __init__(self, rank: int, groups: Mapping[tuple[int, ...], dist.ProcessGroup]) -> None:
        self.rank = rank
        self.ranks = next(iter(groups))
        self._names = {ranks: group.group_name for ranks, group in groups.items()}
        self.order = CollectiveOrder()

    def all_to_all(self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> Pending:
        """Start to send tensors to ranks and to fill those that come from ranks; all of the stage take part.

        Args:
            sent, received: all of one dtype; others of the stage are sent nothing.
        """
        return self._start(self.ranks, sent, received, "exchange")

    def start_exchange(
        self,
        sent: Mapping[int, Tensor],
        received: Mapping[int, Tensor],
        key: int | None = None,
    ) -> Pending:
        """See :class:`runtime.transport.base.Transport`, also for the others; here between the ranks of a group."""
        return self._start(tuple(sorted({self.rank, *sent, *received})), sent, received, "exchange")

    def start_sum(self, tensor: Tensor, ranks: tuple[int, ...]) -> Pending:
        if len(ranks) == 1:
            return _Arrived()
        name = self._name(ranks)
        with torch.no_grad():
            term = torch.cat([tensor.reshape(-1), *self.order.links(tensor)])
            return _PendingCollective(self, "sum", _all_reduce(term, "sum", name), ((tensor, 0),))

    def all_reduce(self, tensor: Tensor, ranks: tuple[int, ...]) -> None:
        self.start_sum(tensor, ranks).wait()

    def all_gather(self, flat: Tensor, counts: Sequence[int], ranks: tuple[int, ...]) -> None:
        pieces = dict(zip(ranks, parts(flat, counts, ranks), strict=True))
        own = pieces.pop(self.rank)
        self._start(ranks, dict.fromkeys(pieces, own), pieces, "gather").wait()

    @torch.no_grad()
    def reduce_scatter(self, flat: Tensor, counts: Sequence[int], ranks: tuple[int, ...]) -> None:
        pieces = dict(zip(ranks, parts(flat, counts, ranks), strict=True))
        own = pieces[self.rank]
        sent = {rank: piece for rank, piece in pieces.items() if rank != self.rank}
        terms = {rank: own if rank == self.rank else torch.empty_like(own) for rank in ranks}
        others = {rank: term for rank, term in terms.items() if rank != self.rank}
        self._start(ranks, sent, others, "scattered sum").wait()
        total = terms[ranks[0]].clone()
        for rank in ranks[1:]:
            total += terms[rank]
        own.copy_(total)

    @torch.no_grad()
    def _start(
        self, ranks: tuple[int, ...], sent: Mapping[int, Tensor], received: Mapping[int, Tensor], what: str
    ) -> Pending:
        if len(ranks) == 1:
            return _Arrived()
        flat = [sent[rank].detach().reshape(-1) for rank in ranks if rank in sent] or [self._nothing(received)]
        flat += self.order.links(flat[0])
        packed = torch.cat(flat) if len(flat) > 1 else flat[0].contiguous()
        sizes = [[each[rank].numel() if rank in each else 0 for rank in ranks] for each in (received, sent)]
        arriving = _all_to_all(packed, *sizes, self._name(ranks))
        offsets = [sum(sizes[0][:position]) for position in range(len(ranks))]
        places = tuple(
            (received[rank], offset) for rank, offset in zip(ranks, offsets, strict=True) if rank in received
        )
        return _PendingCollective(self, what, arriving, places)

    def _nothing(self, received: Mapping[int, Tensor]) -> Tensor:
        like = next(iter(received.values()), None)
        return torch.empty(0) if like is None else like.new_empty(0)

    def _name(self, ranks: tuple[int, ...]) -> str:
        check_member(self.rank, ranks, self._names)
        return self._names[ranks]


class CollectivePeerGroup(PeerGroup):
    """The way from one rank of a stage to the others, where each exchange is one all-to-all of the stage.

    A graph that was compiled moves what it moves without counting: ``sent_bytes`` and ``num_messages`` are those of
    runs that were not.
    """

    __slots__ = ()
    if TYPE_CHECKING:  # the constructor is inherited

        def __init__(self, transport: Collectives, ranks: tuple[int, ...]) -> None: ...

    transport: Collectives  # which has what exchanges and forms use of one

    def start(self, sent: dict[int, Tensor], received: dict[int, Tensor], key: int | None = None) -> Pending:
        """Every rank of the stage has to call it, also one that neither sends nor receives."""
        self.num_messages += len(sent)
        for tensor in sent.values():
            self.sent_bytes += tensor.nbytes
        ranks = self.ranks
        return self.transport.all_to_all(
            {ranks[position]: tensor for position, tensor in sent.items()},
            {ranks[position]: tensor for position, tensor in received.items()},
        )

    def exchange(
        self, held: Sequence[Box], wanted: Sequence[Box], moves: Iterable[Transfer], key: int | None = None
    ) -> Exchange:
        """How this rank gets what it wants, by position."""
        return CollectiveExchange.of(self, held, wanted, moves, key)


class CollectiveExchange(Exchange):
    """One tensor's exchange, in which a rank that neither sends nor receives takes part unless nobody does."""

    __slots__ = ()

    def start(self, x: Tensor) -> Arriving:
        return self._silent() if self._is_silent else Exchange.start(self, x)

    def start_adjoint(self, gradients: Sequence[Tensor], like: Tensor) -> Arriving:
        return self._silent() if self._is_silent else Exchange.start_adjoint(self, gradients, like)

    @property
    def _is_silent(self) -> bool:
        return not self.receives and not self.sends

    def _silent(self) -> Arriving:
        return Arriving(NO_MESSAGES, {}, None if self.is_local else self.peers.start({}, {}), None)


def open_collectives(
    stages: Mapping[int, Sequence[int]], groups: Iterable[tuple[int, ...]] = (), timeout_s: float = TRANSPORT_S
) -> dict[int, Collectives]:
    """Those of the stages that this rank runs, by stage; all processes of the job make them together, members or not.

    Args:
        stages: the ranks of each divided stage; the same on all processes, as ``groups``.
        groups: ranks that sum, or gather, among themselves; each stage takes those that lie within it.
        timeout_s: the longest wait.
    """
    rank = dist.get_rank()
    subsets = [tuple(sorted(group)) for group in groups]
    by_stage = {}
    for stage, ranks in stages.items():
        everybody = tuple(sorted(ranks))
        within = [group for group in subsets if set(group) <= set(everybody) and len(group) > 1]
        made = {
            members: dist.new_group(members, timeout=timedelta(seconds=timeout_s))
            for members in dict.fromkeys((everybody, *within))
        }
        if rank in everybody:
            by_stage[stage] = Collectives(rank, {ranks: group for ranks, group in made.items() if rank in ranks})
    return by_stage


@dataclass(frozen=True, slots=True)
class _PendingCollective:
    """A collective on its way; ``places``: what is filled, and where in ``arriving`` that begins."""

    end: Collectives
    what: str
    arriving: Tensor
    places: tuple[tuple[Tensor, int], ...]

    @torch.no_grad()
    def wait(self) -> None:
        try:
            flat = _wait(self.arriving)
        except RuntimeError as error:
            raise gone(self.what, self.end.rank, f"one of the ranks {self.end.ranks}", str(error)) from error
        self.end.order.note(flat)
        for tensor, offset in self.places:
            tensor.copy_(flat[offset : offset + tensor.numel()].view(tensor.shape))


@dataclass(frozen=True, slots=True)
class _Arrived:
    def wait(self) -> None:
        """There is nobody to wait for."""


class CollectiveOrder:
    """The links of one rank's collectives while a compiler watches; otherwise without effect."""

    __slots__ = ("_is_watched", "_origin", "_results")

    def __init__(self) -> None:
        self._is_watched = False
        self._origin: Tensor | None = None
        self._results: list[Tensor] = []

    def links(self, like: Tensor) -> list[Tensor]:
        """What to concatenate with what is sent: nothing, or a slice without elements."""
        return [] if self._origin is None else [self._origin.to(like.dtype)]

    def note(self, result: Tensor) -> None:
        """This was waited for."""
        if self._is_watched:
            self._results.append(_nothing_of(result))

    def watched(self, run: Callable[..., tuple[Tensor, ...]], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """``run(*tensors)``, whose collectives, and those of its backward, are linked."""
        arguments = list(tensors)
        places = [place for place, tensor in enumerate(arguments) if tensor.requires_grad]
        _put(arguments, places, _Enter, self)
        self.begin()
        try:
            outputs = list(run(*arguments))
            places = [place for place, each in enumerate(outputs) if each.is_floating_point()]
            _put(outputs, [place for place in places if outputs[place].requires_grad] or places, _Leave, self)
        finally:
            self.end()
        return tuple(outputs)

    def begin(self, gradients: Sequence[Tensor | None] = ()) -> None:
        """What follows is watched; in backward it begins with ``gradients``."""
        self._is_watched = True
        self._results = []
        self._origin = next((_nothing_of(each) for each in gradients if each is not None), None)

    def end(self) -> None:
        """What was watched is over."""
        self._is_watched = False
        self._origin = None
        self._results = []

    def linked(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """``tensors``, of which the smallest depends on all that was waited for."""
        linked = list(tensors)
        there = [(tensor.numel(), place, tensor) for place, tensor in enumerate(linked) if tensor is not None]
        if there and self._results:
            _, place, smallest = min(there, key=lambda each: each[:2])
            links = [result.to(smallest.dtype) for result in self._results]
            linked[place] = torch.cat([smallest.reshape(-1), *links]).view(smallest.shape)
        return linked


def _nothing_of(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1)[:0]


def _put(
    tensors: list[Tensor], places: list[int], function: type[torch.autograd.Function], order: CollectiveOrder
) -> None:
    """Replaces some of ``tensors`` by what ``function`` makes of them together."""
    if places:
        apply: Callable[..., tuple[Tensor, ...]] = function.apply
        made = apply(order, *(tensors[place] for place in places))
        for place, tensor in zip(places, made, strict=True):
            tensors[place] = tensor


class _Enter(torch.autograd.Function):
    """The inputs; backward comes when all their gradients are there."""

    @staticmethod
    def forward(ctx: Any, order: CollectiveOrder, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.order = order
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        linked = ctx.order.linked(gradients)
        ctx.order.end()
        return None, *linked


class _Leave(torch.autograd.Function):
    """The outputs; backward comes before everything else's."""

    @staticmethod
    def forward(ctx: Any, order: CollectiveOrder, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        ctx.order = order
        ctx.set_materialize_grads(False)
        linked = order.linked(tensors)
        return tuple(
            tensor.view_as(tensor) if tensor is before else tensor
            for tensor, before in zip(linked, tensors, strict=True)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        ctx.order.begin(gradients)
        return None, *gradients
