"""Stages by what their devices are worth, whichever these are and wherever: the columns of ``counts_table``.

A column is a stage on devices of a kind, by the samples of a micro-batch that its fullest member has (where all share
alike also by those of its leanest).  What it takes is what it takes at least: on any hosts, and of any further
ranks; memory counts where all devices of the kind have as much, and divide nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cached_property

import numpy as np

from planner.costs.layers.cost_table import Array
from planner.costs.stages.gradient_overlap import least_sums_s
from planner.costs.stages.stage_bound import concatenated, only
from planner.costs.stages.stage_sums import LeastPasses
from planner.ir.errors import MissingMeasurementError
from planner.ir.lazy import once
from planner.ir.problem import NEVER
from planner.ir.program import BUCKET_BYTES
from planner.solvers.best_first.graph_cuts import Numbers
from planner.solvers.best_first.priced_groups import GroupPrices
from planner.solvers.budget import NUMBER_S, check_time
from planner.solvers.candidates.feasibility import is_covered

MOST_CUTS = 256
"""Cuts that are told apart."""

_FEW_SAMPLES = 16  # up to this micro-batch every share of it is looked at on unlike devices
_NUMBERS = ("first", "last", "worth", "window")  # beside seconds
_FURTHER = 2.0  # than what is asked for are columns worked out
_PASSES = 3  # times that a number of a column is looked at before it is known, about


@dataclass(frozen=True, slots=True, eq=False)
class CutPlaces:
    """Cuts that are told apart.

    Attributes:
        cuts: all of them, or some of a chain.
        first, last: the cuts between which a stage that begins and ends at two places, or later, surely has all layers.
        outer: the cut that no stage goes beyond that ends there.
    """

    cuts: Numbers
    first: Numbers
    last: Numbers
    outer: Numbers

    @property
    def are_all(self) -> bool:
        """Whether each cut is a place."""
        return bool(np.array_equal(self.cuts, self.outer))

    @classmethod
    def of(cls, prices: GroupPrices) -> CutPlaces | None:
        """None where there are too many cuts that are no chain."""
        cuts = prices.cuts
        count = len(cuts.members)
        every = np.arange(count)
        if count <= MOST_CUTS:
            return cls(every, every, every, every)
        if not np.array_equal(cuts.inside, np.triu(np.ones((count, count), dtype=bool), 1)):
            return None
        least_s = prices.capacity_s().min(axis=0)
        weight = cuts.sums(np.where(np.isfinite(least_s), least_s, 0.0))
        wanted = np.searchsorted(weight, np.linspace(0.0, weight[-1], MOST_CUTS))
        places = np.unique(np.concatenate(([0], np.minimum(wanted, count - 1), [count - 1])))
        following = np.append(places[1:], count - 1)
        return cls(places, following, places, following)


@dataclass(frozen=True, slots=True, eq=False)
class ColumnStages:
    """Stages of columns, flat, in seconds; see ``BoundedStages``.

    Attributes:
        first, last: numbers of places.
        worth: of its devices, at least.
        alone_s: the step, whatever is before and after.
    """

    first: Numbers
    last: Numbers
    worth: Numbers
    forward_s: Array
    backward_s: Array
    work_s: Array
    all_work_s: Array
    tail_s: Array
    window: Numbers
    alone_s: Array

    @classmethod
    def joined(cls, parts: Sequence[ColumnStages]) -> ColumnStages:
        """All of them."""
        nothing = cls(*(np.zeros(0, dtype=np.int64 if one.name in _NUMBERS else float) for one in fields(cls)))
        return concatenated(nothing, *parts)


@dataclass(frozen=True, slots=True, eq=False)
class _Ends:
    """CutPlaces where stages begin and end, flat."""

    first: Numbers
    last: Numbers


@dataclass(frozen=True, slots=True, eq=False)
class _RunningSums:
    """Running sums over layers, by place where a stage begins, and by place where it ends."""

    before: Array
    until: Array

    def between(self, pairs: _Ends) -> Array:
        """Of stages."""
        return np.maximum(self.until[pairs.last] - self.before[pairs.first], 0.0)


@dataclass(frozen=True, slots=True)
class _Share:
    """Samples of a micro-batch that members of a stage have.

    Attributes:
        leanest: no member has fewer.
        fullest, most: samples of the fullest, at least and at most.
        ranks: the least number of members.
    """

    leanest: int
    fullest: int
    most: int
    ranks: int


@dataclass(eq=False)
class Columns:
    """The columns of one way to cut the batch.

    Attributes:
        worth: of a device of each kind.
        grain: shares of samples less than this times one another are one column.
        is_open: whether members of a kind may have unlike shares of the samples, as their memory differs.
    """

    prices: GroupPrices
    places: CutPlaces
    worth: tuple[int, ...]
    grain: float = 1.0
    kinds: tuple[str, ...] = field(init=False)
    is_open: bool = field(init=False)
    _priced_below_s: float = field(init=False, default=0.0, repr=False)
    _priced: ColumnStages = field(init=False, repr=False)  # that end in less than this

    def __post_init__(self) -> None:
        self.kinds = tuple(self.prices.devices_by_kind())
        self.is_open = len({pool.sort for pool in self.prices.pools}) > len(self.kinds)

    @property
    def all_worth(self) -> int:
        """Of all devices."""
        counts = self.prices.devices_by_kind().values()
        return sum(worth * count for worth, count in zip(self.worth, counts, strict=True))

    @property
    def size(self) -> int:
        """Samples of a micro-batch."""
        return self.prices.micro_batches[0]

    @property
    def layer_s(self) -> Array:
        """By layer, seconds of all micro-batches times the worth of the device that does them, at least."""
        seconds = self.prices.capacity_s()
        least_s = np.min(np.array(self.worth)[:, None] * seconds, axis=0)
        return np.where(np.isfinite(least_s), least_s, 0.0)

    def stages(self, upper_s: float) -> ColumnStages:
        """Those that end in less than this, by their first places."""
        if upper_s > self._priced_below_s:
            self._priced_below_s = _FURTHER * upper_s
            columns = ((kind, share) for kind in self.kinds for share in self._shares(kind))
            parts = (self._of_column(kind, share, self._priced_below_s) for kind, share in columns)
            every = ColumnStages.joined([part for part in parts if part is not None])
            self._priced = only(every, np.argsort(every.first, kind="stable"))
        return only(self._priced, np.flatnonzero(self._priced.alone_s <= upper_s))

    @property
    def num_shares(self) -> int:
        """How many columns there are, all kinds together."""
        return sum(len(self._shares(kind)) for kind in self.kinds)

    @once
    def _shares(self, kind: str) -> tuple[_Share, ...]:
        """Those of a column each: from the most ranks to the fewest, as many together as the grain allows."""
        joined: list[_Share] = []
        for share in sorted(self._every_share(kind), key=lambda share: share.most):
            if joined and share.most < self.grain * joined[-1].fullest:
                last = joined.pop()
                share = _Share(
                    leanest=min(last.leanest, share.leanest),
                    fullest=last.fullest,
                    most=share.most,
                    ranks=min(last.ranks, share.ranks),
                )
            joined.append(share)
        return tuple(joined)

    def _every_share(self, kind: str) -> Iterator[_Share]:
        """Of like devices all there are, of the fewest ranks; of unlike ones by what the fullest has."""
        size = self.size
        num_ranks = self.prices.devices_by_kind()[kind]
        counts = range(1, num_ranks + 1 if self.prices.freedom.may_replicate else 2)
        if not self.is_open:
            alike = dict[tuple[int, int], int]()
            for count in counts:
                alike.setdefault((size // count, -(-size // count)), count)
            yield from (_Share(least, most, most, count) for (least, most), count in alike.items() if least)
            return
        every = range(1, size + 1) if size <= _FEW_SAMPLES else {-(-size // count) for count in counts}
        samples = sorted(every)
        for fullest, following in zip(samples, [*samples[1:], size + 1], strict=True):
            most = following - 1
            if -(-size // most) <= num_ranks:
                yield _Share(1, fullest, most, -(-size // most))

    def _of_column(self, kind: str, share: _Share, upper_s: float) -> ColumnStages | None:
        """The stages of one column; None where it cannot be priced."""
        check_time(_PASSES * NUMBER_S * len(self._pairs.first))
        passes = self._passes(kind, share.fullest, share.most)
        shortest = self._passes(kind, min(share.leanest, self.prices.micro_batches[-1]), share.most)
        if passes is None or shortest is None:
            return None
        work, all_work = (self._sums(by_layer) for by_layer in passes.works_s(self._num_full))
        forward = self._sums(shortest.forward_s)
        backward = self._sums(shortest.back_s)
        before_s, after_s = self._around_s
        pairs = self._pairs
        done_s = np.maximum(work.between(pairs) + after_s[pairs.first], all_work.between(pairs))
        alone_s = before_s[pairs.first] + done_s
        pairs = only(pairs, np.flatnonzero(alone_s <= upper_s))
        tail_s = self._tail_s(kind, share, pairs)
        window = self._window(kind, share, pairs)
        work_s = work.between(pairs)
        all_work_s = all_work.between(pairs)
        alone_s = before_s[pairs.first] + np.maximum(work_s + after_s[pairs.first], all_work_s + tail_s)
        every = ColumnStages(
            first=pairs.first,
            last=pairs.last,
            worth=np.full(len(work_s), share.ranks * self.worth[self.kinds.index(kind)]),
            forward_s=forward.between(pairs),
            backward_s=backward.between(pairs),
            work_s=work_s,
            all_work_s=all_work_s,
            tail_s=tail_s,
            window=window,
            alone_s=alone_s,
        )
        return only(every, np.flatnonzero((window > 0) & (alone_s <= upper_s)))

    @cached_property
    def _pairs(self) -> _Ends:
        """All places between which a stage may be."""
        cuts = self.places.cuts
        first, last = self.prices.cuts.inside[np.ix_(cuts, cuts)].nonzero()
        return _Ends(first, last)

    def _sums(self, by_layer: Array) -> _RunningSums:
        """Over the layers that surely are between two places."""
        sums = self.prices.cuts.sums(by_layer)
        return _RunningSums(sums[self.places.first], sums[self.places.last])

    def _most_sums(self, by_layer: Array) -> _RunningSums:
        """Over all layers that may be between them."""
        sums = self.prices.cuts.sums(by_layer)
        return _RunningSums(sums[self.places.cuts], sums[np.maximum(self.places.outer, self.places.cuts)])

    @property
    def _num_full(self) -> int:
        """Micro-batches of the full size."""
        batches = self.prices.micro_batches
        return len(batches) - (batches[-1] != batches[0])

    def _passes(self, kind: str, least: int, most: int) -> LeastPasses | None:
        """By layer, what passes take at least of a number of samples between two; None: not known."""
        prices = self.prices
        if not is_covered(prices.problem, prices.cost_model, kind, least):
            return None
        by_size = [
            passes for samples in self._sizes(kind, least, most) for passes in prices.layer_passes(kind, samples)
        ]
        return LeastPasses(*np.minimum.reduce(by_size)) if by_size else None

    def _sizes(self, kind: str, least: int, most: int) -> list[int]:
        """Numbers of samples between which times rise or fall: the ends, and what was measured between."""
        measured = {m.samples for m in self.prices.problem.profile.measurements.get(kind, ())}
        return sorted({least, most} | {samples for samples in measured if least < samples < most})

    def _tail_s(self, kind: str, share: _Share, pairs: _Ends) -> Array:
        """Reduction and update."""
        prices = self.prices
        divides = prices.problem.shard != NEVER
        update_s = prices.freedom.trains * np.diff(prices.cost_model.tables.parameters(kind).update_s)
        tail_s = self._sums(update_s).between(pairs) / (len(prices.problem.ranks) if divides else 1)
        if self._sums_s is None or share.ranks < 2 or not prices.freedom.trains:
            return tail_s
        summed_s = self._sums(self._sums_s[share.ranks]).between(pairs)
        hidden_s = self._most_sums(self._longest_back_s(share.most)).between(pairs)
        num_bytes = self._most_sums(np.diff(prices.cost_model.tables.graph.parameter_bytes)).between(pairs)
        hidden_s = np.where(num_bytes <= BUCKET_BYTES, 0.0, hidden_s)  # one bucket is summed when the backward is over
        return tail_s + np.maximum(summed_s - hidden_s, 0.0)

    @cached_property
    def _sums_s(self) -> Array | None:
        """By number of ranks and layer, what as many or more take at least to sum its gradients; None: not known."""
        cost_model = self.prices.cost_model
        ranks = self.prices.problem.ranks
        exchanges = any(sums.any() for sums in cost_model.exchanges_s(ranks[:2], self.size))
        if self.prices.problem.shard != NEVER or exchanges:  # sums may take less, or overlap with more
            return None
        network = cost_model.network
        return least_sums_s(cost_model.profile, lambda sizes: network.least_sums_s(tuple(sizes.tolist())))

    def _longest_back_s(self, most: int) -> Array:
        """By layer, the longest B of a number of samples at most, on any kind."""
        longest = np.zeros(len(self.prices.problem.graph.layers))
        for kind in self.kinds:
            for samples in self._sizes(kind, 1, most):
                for shared in (False, True):
                    with suppress(MissingMeasurementError):
                        sums = self.prices.cost_model.at(kind, samples, shared)
                        longest = np.maximum(longest, np.diff(sums.backward_s))
        return longest

    def _window(self, kind: str, share: _Share, pairs: _Ends) -> Numbers:
        """The most micro-batches that memory lets stages keep, on the largest device of the kind; 0: there is none.

        All of them where members divide what they hold, or the last micro-batch is smaller.
        """
        prices = self.prices
        count = self.prices.num_microbatches
        first = self.places.first[pairs.first]
        last = np.maximum(self.places.last[pairs.last], first)
        window = np.full(first.shape, count)
        limit = max(pool.room_bytes for pool in prices.pools if pool.kind == kind)
        if prices.problem.shard == NEVER and self._num_full == count:
            memories = prices.least_memories((kind, limit), share.fullest)
            kept = [memory.window(first, last, count) for memory in memories if memory is not None]
            if len(kept) == len(memories):
                window = np.maximum.reduce(kept)
        mixes = prices.mixing[last] - prices.mixing[first] > 0
        return np.where(mixes & (share.ranks > 1), 0, window)

    @cached_property
    def _around_s(self) -> tuple[Array, Array]:
        """F before a stage that begins at each place or up to the next, and B after it, at least.

        On the longest path through the layers to what it reads, each in its shortest time.
        """
        cuts = self.prices.cuts
        count = len(self.prices.problem.graph.layers)
        fewest = 1 if self.is_open else max(1, min(self.prices.micro_batches) // len(self.prices.problem.ranks))
        sized = [self._passes(kind, fewest, self.size) for kind in self.kinds]
        priced = [(passes.forward_s, passes.back_s) for passes in sized if passes is not None]
        if not priced:
            nothing = np.zeros(len(self.places.cuts))
            return nothing, nothing
        layer_s = np.minimum.reduce(priced)
        reads: list[list[tuple[int, bool]]] = [[] for _ in range(count)]
        for value in cuts.values:
            for reader, _ in value.readers:
                reads[reader].append((value.maker, value.has_gradient))
        check_time(NUMBER_S * count * len(cuts.members))
        outside = np.array(cuts.members) == 0
        begins = outside.copy()
        longest = np.zeros((2, count))  # F, B: of the layers on the longest path to each layer, without its own
        for layer, makers in enumerate(reads):
            for maker, has_gradient in makers:
                reached = longest[:, maker] + layer_s[:, maker]
                longest[0, layer] = max(longest[0, layer], reached[0])
                longest[1, layer] = max(longest[1, layer], reached[1] * has_gradient)
                begins[:, layer] &= ~outside[:, maker]
        least = np.zeros((2, len(cuts.members)))
        least[:, :-1] = np.where(begins[:-1], longest[:, None], np.inf).min(axis=2)
        if not self.places.are_all:  # the least up to the next place
            least = np.minimum.reduceat(least, self.places.cuts, axis=1)
        return least[0], least[1]
