"""What the ranks of a group do together: sums, scattered sums, gathers and maxima, written over exchanges among them.

    whole       each rank sends its term to every other, and adds what comes to its own
    in parts    each rank sends every other its part of the term, adds up the part that is its own (a scattered sum),
                and sends that to all (a gather)

Terms are added in the order of ranks, so that all get the same bits.  A transport says how its ranks exchange, and when
a sum is added in parts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from runtime.transport.base import (
    ErrorWords,
    Pending,
    add_in_order,
    check_member,
    declare,
    flat_on_cpu,
    parts,
    plain_like,
    put_back,
    without_gradients,
)

ByRank = Mapping[int, Tensor]

SUM = "sum"
STARTED_SUM = "started sum"
SCATTER = "reduce-scatter"
GATHER = "all-gather"
MAXIMUM = "maximum"
BARRIER = "barrier"
_KINDS = (SUM, STARTED_SUM, SCATTER, GATHER, MAXIMUM, BARRIER)


@dataclass(slots=True)
class Series:
    """What the ranks of a group do together again and again: their sums, say.

    Attributes:
        position: of this rank among ``ranks``.
        others: the ranks but this one.
        group: number of the group.
        place: a number of the group and the kind, such that no other series has it.
        title: as errors call it.
        count: how often it has begun.
    """

    kind: str
    ranks: tuple[int, ...]
    position: int
    others: tuple[int, ...]
    group: int
    place: int
    title: str
    count: int = 0


class Meeting(NamedTuple):
    """One of a series; ranks meet in the same one by its number, from 1."""

    series: Series
    number: int

    @property
    def what(self) -> ErrorWords:
        """As errors call it."""
        return (self.series.title, self.number) if self.series.kind != BARRIER else (BARRIER,)


class Steps:
    """The exchanges of a meeting, one after the other, with what is computed in between; the first has begun.

    Attributes:
        now: the exchange that is under way; None: all is over.
    """

    def __init__(self, steps: Iterator[Pending]) -> None:
        self._steps = steps
        self.now = next(steps, None)

    @without_gradients
    def go_on(self) -> None:
        """The exchange under way is over: compute, and start the next one."""
        self.now = next(self._steps, None)

    def wait(self) -> None:
        """See :class:`runtime.transport.base.Pending`."""
        while (now := self.now) is not None:
            now.wait()
            if self.now is now:  # else somebody else's wait went on with it
                self.go_on()


class CollectiveOperations(ABC):
    """The part of a transport that does things in groups, see :class:`runtime.transport.base.Transport`.

    Args:
        groups: besides the world; the same, in the same order, on all ranks.
    """

    rank: int
    world_size: int

    def __init__(self, groups: Iterable[Sequence[int]], world_size: int) -> None:
        self.groups = declare(groups, world_size)
        self._series: dict[tuple[str, tuple[int, ...]], Series] = {}

    @abstractmethod
    def among(self, ranks: tuple[int, ...]) -> ExchangedCollectives:
        """What ``ranks`` exchange by."""

    @without_gradients
    def all_reduce(self, tensor: Tensor, ranks: tuple[int, ...]) -> None:
        """See :class:`runtime.transport.base.Transport`, also for the others."""
        self.among(ranks).begin_sum(SUM, tensor, ranks).wait()

    @without_gradients
    def start_sum(self, tensor: Tensor, ranks: tuple[int, ...]) -> Pending:
        return self.among(ranks).begin_sum(STARTED_SUM, tensor, ranks)

    @without_gradients
    def reduce_scatter(self, flat: Tensor, counts: Sequence[int], ranks: tuple[int, ...]) -> None:
        group = self.among(ranks)
        meeting = group.meet(SCATTER, ranks)
        terms = dict(zip(ranks, parts(flat, counts, ranks), strict=True))
        Steps(group.added(meeting, terms)).wait()

    @without_gradients
    def all_gather(self, flat: Tensor, counts: Sequence[int], ranks: tuple[int, ...]) -> None:
        group = self.among(ranks)
        meeting = group.meet(GATHER, ranks)
        pieces = dict(zip(ranks, parts(flat, counts, ranks), strict=True))
        Steps(group.gathered(meeting, pieces)).wait()

    @without_gradients
    def all_max(self, tensor: Tensor, ranks: tuple[int, ...]) -> None:
        group = self.among(ranks)
        group.become_largest(group.meet(MAXIMUM, ranks), tensor)


class ExchangedCollectives(CollectiveOperations):
    """Collectives over one way to exchange, which a transport has in :meth:`exchange`."""

    device = torch.device("cpu")
    """Where what comes is received."""

    @abstractmethod
    def exchange(self, meeting: Meeting, sent: ByRank, received: ByRank, *, is_second: bool = False) -> Pending:
        """As ``start_exchange``, within a meeting.

        Args:
            is_second: whether it is the second exchange of this meeting.
        """

    def among(self, ranks: tuple[int, ...]) -> ExchangedCollectives:
        """See :class:`CollectiveOperations`: all exchange alike."""
        return self

    def become_largest(self, meeting: Meeting, tensor: Tensor) -> None:
        """By a gather: a ring's maximum may lose NaN."""
        everybody = tensor.new_zeros((len(meeting.series.ranks), *tensor.shape))
        everybody[meeting.series.position] = tensor
        Steps(self.gathered(meeting, dict(zip(meeting.series.ranks, everybody.unbind(), strict=True)))).wait()
        tensor.copy_(everybody.amax(0))

    def meet(self, kind: str, ranks: tuple[int, ...]) -> Meeting:
        """The next meeting of this kind.

        Raises:
            TransportError: the group was not declared, or this rank is not in it.
        """
        series = self._series.get((kind, ranks))
        if series is None:
            check_member(self.rank, ranks, self.groups)
            others = tuple(rank for rank in ranks if rank != self.rank)
            group = self.groups[ranks]
            place = group * len(_KINDS) + _KINDS.index(kind)
            title = f"{kind} over ranks {ranks}, number"
            series = Series(kind, ranks, ranks.index(self.rank), others, group, place, title)
            self._series[kind, ranks] = series
        series.count += 1
        return Meeting(series, series.count)

    def is_in_parts(self, tensor: Tensor, num_ranks: int) -> bool:
        """Whether such a sum is added in parts."""
        return False

    def added(self, meeting: Meeting, terms: ByRank) -> Iterator[Pending]:
        """Each rank is sent its term; this rank's own becomes the sum of those that it is sent, and its own."""
        own = terms[self.rank]
        others = meeting.series.others
        rows = {rank: plain_like(own, self.device) for rank in others}
        yield self.exchange(meeting, {rank: terms[rank] for rank in others}, rows)
        add_in_order(own, meeting.series.position, list(rows.values()))

    def gathered(self, meeting: Meeting, pieces: ByRank, *, is_second: bool = False) -> Iterator[Pending]:
        """Each rank is sent this rank's piece; the other pieces become what their ranks send."""
        received = {rank: pieces[rank] for rank in meeting.series.others}
        yield self.exchange(meeting, dict.fromkeys(received, pieces[self.rank]), received, is_second=is_second)

    def summed(self, meeting: Meeting, tensor: Tensor) -> Iterator[Pending]:
        """``tensor`` becomes the sum of those of all ranks."""
        ranks = meeting.series.ranks
        if not self.is_in_parts(tensor, len(ranks)):
            yield from self.added(meeting, dict.fromkeys(ranks, tensor))
            return
        flat = flat_on_cpu(tensor)
        pieces = dict(zip(ranks, torch.tensor_split(flat, len(ranks)), strict=True))
        yield from self.added(meeting, pieces)
        yield from self.gathered(meeting, pieces, is_second=True)
        put_back(flat, tensor)

    def begun(self, meeting: Meeting, steps: Iterator[Pending]) -> Pending:
        """A sum that has begun."""
        return Steps(steps)

    def begin_sum(self, kind: str, tensor: Tensor, ranks: tuple[int, ...]) -> Pending:
        """Starts to replace ``tensor`` by its sum over ``ranks``."""
        meeting = self.meet(kind, ranks)
        return self.begun(meeting, self.summed(meeting, tensor))
