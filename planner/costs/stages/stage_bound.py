"""The lower bound of what a stage costs on a group of devices, for any two cuts: differences of sums over layers.

It takes its prices from where the simulator takes them (``CostModel.sums``, ``exchanges_s``, ``gradient_overlap``), and
is admissible for it: where members of the group or micro-batches differ, times on the way to another stage take the
least and a rank's own work the most.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache, reduce
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from planner.costs.cost_model import CostModel
from planner.costs.layers.cost_table import Array, TiedParameter
from planner.costs.memory.memory_bound import Cuts, Holders, LeastMemory, Numbers, may_bind
from planner.costs.stages.gradient_overlap import least_bytes_on_cards, least_reduction_s
from planner.costs.stages.stage_sums import RecomputeMask
from planner.ir.cluster import RankIds
from planner.ir.lazy import once

Table = TypeVar("Table")
"""A dataclass of arrays."""

_MANY_SAMPLES = 256
"""More are not held against memory one by one."""

_MANY_CUTS = 512
"""Nor stages between more."""

Member = tuple[str, int, tuple[float, float]]
"""What tells members of a group apart: kind of device, memory limit, samples of a full micro-batch and of the last."""


def columnwise(function: Callable[..., Any], *tables: Table) -> Table:
    """The table whose arrays are what ``function`` makes of those of the same name in ``tables``."""
    first: Any = tables[0]
    made: Table = type(first)(*(function(*(getattr(one, each.name) for one in tables)) for each in fields(first)))
    return made


def only(table: Table, which: NDArray[Any] | slice | int) -> Table:
    """Some of its entries."""
    return columnwise(lambda column: column[which], table)


def concatenated(*tables: Table) -> Table:
    """One after another, by the last index."""
    return columnwise(lambda *columns: np.concatenate(columns, axis=-1), *tables)


@dataclass(frozen=True, slots=True, eq=False)
class Spread:
    """Running sums over the layers of each cut, of members (or micro-batches) that differ."""

    sums: Array  # [members, cuts] seconds

    def least(self, first: Numbers, last: Numbers) -> Array:
        """The least of all members, for stages between ``first`` and ``last`` (arrays that broadcast)."""
        return reduce(np.minimum, (row[last] - row[first] for row in self.sums))

    def most(self, first: Numbers, last: Numbers) -> Array:
        """The most of all members."""
        return reduce(np.maximum, (row[last] - row[first] for row in self.sums))


@dataclass(frozen=True, slots=True, eq=False)
class BoundedStages:
    """What stages between given cuts take on a group: arrays of the shape of the cuts broadcast."""

    forward_s: Array  # seconds of the shortest F
    backward_s: Array  # seconds of the shortest B (or I)
    slow_forward_s: Array  # seconds of the F of the slowest member; of the longest where members wait for the slowest
    slow_backward_s: Array  # seconds of the B (or I) of that same member; of the longest likewise
    accumulate_s: Array  # seconds that a B takes longer that finds gradients to add to
    work_s: Array  # seconds of the slowest member from its first F to its last B (or I)
    all_work_s: Array  # seconds of `work_s` and the W that may come later
    tail_s: Array  # seconds of reduction and update
    card_s: Array  # seconds of its sum of gradients on the fullest network card of each of its hosts; 0 on one host
    window: Numbers  # the most micro-batches that memory lets it keep; 0 where it does not fit


@dataclass(frozen=True, slots=True, eq=False)
class Parted:
    """What stages have to do with parameters that other stages use too, at least; by first and last cut."""

    inside_bytes: Array  # [cuts, cuts] of those that count at a layer of the stage: not summed over its ranks alone
    seconds: Array  # [cuts, cuts] of sums over all ranks that use them, and of updates not counted at its layers


@dataclass(frozen=True, slots=True, eq=False)
class StageBound:
    """What any stage costs at least on devices of given kinds, hosts apart; see :class:`BoundedStages`.

    Sums run over layers, members of the group that are alike once.
    """

    cost_model: CostModel
    ranks: RankIds
    forward_s: Spread  # a micro-batch's F
    backward_s: Spread  # its B, or its I where backwards may be split
    whole_backward_s: Spread  # its B, whether it may be split or not
    passes_s: tuple[tuple[Array, Array], ...]  # [members][F, B (or I)][cuts] seconds
    accumulate_s: Spread  # what a B takes longer that finds gradients to add to
    works: Spread  # all F and B (or I) of a step
    all_works: Spread  # all F, B, I and W of a step
    exchange_forward_s: Array  # [cuts] statistics and halos inside the stage, once a micro-batch
    exchange_backward_s: Array  # [cuts] their adjoints
    updates: Spread  # the optimiser, after the last backward
    overhead_s: float  # of an action
    actions: int  # compute actions of a micro-batch
    is_even: bool  # whether all micro-batches are of one size
    parameter_bytes: Array  # [cuts]
    least_sums_s: Array  # [cuts] what sums of gradients take at least
    zero: int  # what ranks divide among them (`planner.ir.plan.Stage.level`)
    memory: LeastMemory | None  # None: it cannot matter
    parted: Parted | None = None  # None: no layers share a parameter, or nothing is trained

    def stage(self, first: Numbers, last: Numbers, num_microbatches: int) -> BoundedStages:
        """Stages between ``first`` and ``last``, arrays that broadcast."""
        exchange_forward_s = self.exchange_forward_s[last] - self.exchange_forward_s[first]
        exchange_backward_s = self.exchange_backward_s[last] - self.exchange_backward_s[first]
        forward_s = self.forward_s.least(first, last)
        backward_s = self.backward_s.least(first, last)
        slow_forward_s = forward_s
        slow_backward_s = backward_s
        if self.is_even and len(self.passes_s) > 1:  # else the most is of a full micro-batch, not of the last
            waits_for_slowest = exchange_forward_s > 0  # in an exchange of statistics
            most_forward_s = self.forward_s.most(first, last)
            most_backward_s = self.backward_s.most(first, last)
            slow_forward_s, slow_backward_s = self._slowest(first, last)
            slow_forward_s = np.where(waits_for_slowest, most_forward_s, slow_forward_s)
            slow_backward_s = np.where(waits_for_slowest, most_backward_s, slow_backward_s)
            forward_s = np.where(waits_for_slowest, most_forward_s, forward_s)
            backward_s = np.where(waits_for_slowest, most_backward_s, backward_s)
        exchanges_s = num_microbatches * (exchange_forward_s + exchange_backward_s)
        work_s = self.works.most(first, last) + exchanges_s
        all_work_s = work_s if self.all_works is self.works else self.all_works.most(first, last) + exchanges_s
        last_backward_s = exchange_backward_s
        if self.sums_gradients:
            last_backward_s = self.whole_backward_s.most(first, last) + exchange_backward_s
        update_s, sum_s = self.after_s(first, last, self.updates.most(first, last), last_backward_s)
        return BoundedStages(
            forward_s=forward_s + exchange_forward_s,
            backward_s=backward_s + exchange_backward_s,
            slow_forward_s=slow_forward_s + exchange_forward_s,
            slow_backward_s=slow_backward_s + exchange_backward_s,
            accumulate_s=self.accumulate_s.least(first, last),
            work_s=work_s,
            all_work_s=all_work_s,
            tail_s=update_s + sum_s,
            card_s=self._card_s(first, last, sum_s),
            window=self._window(first, last, num_microbatches, slow_forward_s.shape),
        )

    def _window(self, first: Numbers, last: Numbers, num_microbatches: int, shape: tuple[int, ...]) -> Numbers:
        """The most micro-batches that memory lets a stage keep."""
        if self.memory is None:
            return np.full(shape, num_microbatches, dtype=np.int64)
        return self.memory.window(first, last, num_microbatches)

    @property
    def sums_gradients(self) -> bool:
        """Whether several ranks have gradients of the same parameters."""
        return len(self.ranks) > 1 and self.actions > 1

    def largest_work_s(self, first: Numbers, last: Numbers) -> Array:
        """What the slowest member computes from its first F to its last B (or I)."""
        return self.works.most(first, last)

    def after_s(self, first: Numbers, last: Numbers, update_s: Array, back_s: Array) -> tuple[Array, Array]:
        """Update and reduction, given what updates take at least, and what no rank's last backward exceeds."""
        if self.parted is not None:
            update_s = update_s + self.parted.seconds[first, last]
        if not self.sums_gradients:
            return update_s, np.zeros_like(update_s)
        num_bytes = self._summed_bytes(first, last)
        sums_s = self.least_sums_s[last] - self.least_sums_s[first]
        return update_s, least_reduction_s(self.cost_model.network, self.ranks, num_bytes, sums_s, back_s, self.zero)

    def _card_s(self, first: Numbers, last: Numbers, sum_s: Array) -> Array:
        network = self.cost_model.network
        devices = self.cost_model.cluster.devices
        if not self.sums_gradients or len({devices[rank].host for rank in self.ranks}) == 1:
            return np.zeros_like(sum_s)
        moved = least_bytes_on_cards(network, self.ranks, self._summed_bytes(first, last), sum_s, self.zero)
        return moved / network.most_card_bytes_per_s

    def _summed_bytes(self, first: Numbers, last: Numbers) -> Array:
        num_bytes = self.parameter_bytes[last] - self.parameter_bytes[first]
        if self.parted is not None:
            num_bytes = num_bytes - self.parted.inside_bytes[first, last]
        return np.maximum(num_bytes, 0.0)

    def _slowest(self, first: Numbers, last: Numbers) -> tuple[Array, Array]:
        """F and B (or I) of the member whose sum of the two is largest: another may have a longer F, another B."""
        (slow_forward_s, slow_backward_s), *others = (
            [sums[last] - sums[first] for sums in passes] for passes in self.passes_s
        )
        for forward_s, backward_s in others:
            is_slower = forward_s + backward_s > slow_forward_s + slow_backward_s
            slow_forward_s = np.where(is_slower, forward_s, slow_forward_s)
            slow_backward_s = np.where(is_slower, backward_s, slow_backward_s)
        return slow_forward_s, slow_backward_s


@dataclass(frozen=True, slots=True, eq=False)
class _PartedSums:
    """Of parameters that some layers of a stage use, and other stages too, by first and last cut."""

    num_bytes: Array  # [cuts, cuts] of all
    inside_bytes: Array  # [cuts, cuts] of those that count at a layer of the stage
    updates: Mapping[str, Array]  # by kind of device, [cuts, cuts] seconds of updating all
    inside_updates: Mapping[str, Array]  # the same of those that count at a layer of the stage


@lru_cache(maxsize=2)  # one search asks with the same cuts for every size of its micro-batches
def _parted_sums(cost_model: CostModel, cuts: Cuts) -> _PartedSums:
    layers = np.arange(len(cost_model.graph.layers))
    kinds = sorted(cost_model.profile.measurements)
    groups: dict[tuple[int, ...], list[TiedParameter]] = {}
    for parameter in cost_model.tables.graph.tied:
        groups.setdefault(parameter.layers, []).append(parameter)
    shape = 2 * (len(cuts.sums(np.zeros(len(layers)))),)
    num_bytes = np.zeros(shape)
    inside_bytes = np.zeros(shape)
    updates, inside_updates = ({kind: np.zeros(shape) for kind in kinds} for _ in range(2))
    for users, own in groups.items():
        used, begins = (cuts.sums(np.isin(layers, some).astype(np.float64)) for some in (users, users[:1]))
        count = used[None, :] - used[:, None]
        parted = ((count > 0.5) & (count < len(users) - 0.5)).astype(np.float64)
        inside = parted * (begins[None, :] - begins[:, None])
        size = sum(parameter.num_bytes for parameter in own)
        part = sum(parameter.part for parameter in own)
        num_bytes += size * parted
        inside_bytes += size * inside
        for kind in kinds:
            sums = cost_model.tables.parameters(kind).update_s
            seconds = part * float(sums[users[0] + 1] - sums[users[0]])
            updates[kind] += seconds * parted
            inside_updates[kind] += seconds * inside
    return _PartedSums(num_bytes, inside_bytes, updates, inside_updates)


@dataclass(frozen=True, eq=False)
class StageBounds:
    """Makes bounds for one way to cut the batch.

    Attributes:
        micro_batches: samples of each, the last one perhaps fewer.
        trains: whether there are backwards at all.
        splits: whether backwards may be cut in two.
        received: by cut, bytes a sample that surely come in there and are kept; None: nothing does.
    """

    cost_model: CostModel
    cuts: Cuts
    micro_batches: tuple[int, ...]
    trains: bool
    splits: bool
    received: Array | None = None
    _workspaces: dict[tuple[str, float, RecomputeMask], Array] = field(init=False, default_factory=dict, repr=False)

    def of(self, ranks: RankIds, members: Sequence[Member], recompute: RecomputeMask, zero: int) -> StageBound:
        """Of stages on ``ranks`` that recompute activations of ``recompute``; members that are alike once are enough.

        Raises:
            MissingMeasurementError: a layer's cost at a member's sizes is not known.
        """
        tables = self.cost_model.tables
        shared = len(ranks) > 1
        alike = list(dict.fromkeys((kind, samples) for kind, _, samples in members))
        kinds = list(dict.fromkeys(kind for kind, _ in alike))
        least = {
            (kind, n): self.cost_model.sums(kind, n, shared, recompute).least(self.trains, self.splits)
            for kind, samples in alike
            for n in samples
        }
        rest = int(self.micro_batches[-1] != self.micro_batches[0])
        of_members = (
            least[kind, full].works_s(len(self.micro_batches) - rest, least[kind, last] if rest else None)
            for kind, (full, last) in alike
        )
        works, all_works = (self._spread(list(column)) for column in zip(*of_members, strict=True))
        parts = len(ranks) if zero else 1
        forward_s, backward_s = self.cost_model.exchanges_s(ranks, min(self.micro_batches), recompute, self.trains)
        return StageBound(
            cost_model=self.cost_model,
            ranks=ranks,
            forward_s=self._spread([passes.forward_s for passes in least.values()]),
            backward_s=self._spread([passes.back_s for passes in least.values()]),
            passes_s=tuple((self._sums(passes.forward_s), self._sums(passes.back_s)) for passes in least.values()),
            whole_backward_s=self._spread([self.cost_model.at(kind, n, shared).backward_s for kind, n in least]),
            accumulate_s=self._spread([self.trains * self.cost_model.accumulate_s(kind, shared) for kind in kinds]),
            works=works,
            all_works=all_works if self.splits else works,
            exchange_forward_s=self._sums(forward_s),
            exchange_backward_s=self._sums(self.trains * backward_s),
            updates=self._spread([self.trains * tables.parameters(kind).update_s / parts for kind in kinds]),
            overhead_s=min(tables.overhead_s(kind) for kind in kinds),
            actions=2 if self.trains else 1,
            is_even=self.micro_batches[0] == self.micro_batches[-1],
            parameter_bytes=self._sums(tables.graph.parameter_bytes),
            least_sums_s=self._sums(self.cost_model.least_sums_s(ranks)),
            zero=zero,
            memory=self._memory(members, recompute, parts, zero),
            parted=self._parted(len(ranks), kinds, parts) if self.trains and tables.graph.tied else None,
        )

    @once
    def most_samples(
        self, member: tuple[str, int], most: int, recompute: RecomputeMask, parts: int, zero: int
    ) -> Numbers | None:
        """By first and last cut, the most of ``most`` samples that fit a member (kind, memory limit); None: maybe all.

        One micro-batch is kept.  Where cuts or samples are many nobody looks.
        """
        kind, limit = member
        count = len(self.cuts.sums(np.zeros(len(self.cost_model.graph.layers))))
        if most > _MANY_SAMPLES or count > _MANY_CUTS:
            return None
        if not may_bind(self.cost_model, [(kind, most, limit)], len(self.micro_batches)):
            return None
        first, last = np.triu_indices(count, 1)
        largest = np.full((count, count), most, dtype=np.int64)
        largest[first, last] = 0
        for samples in range(most, 0, -1):
            memory = self.memory_of((kind, limit), samples, recompute, parts, zero)
            fits = np.full(len(first), True) if memory is None else memory.window(first, last, 1) > 0
            largest[first[fits], last[fits]] = samples
            first = first[~fits]
            last = last[~fits]
            if not len(first):
                break
        return largest

    @once
    def memory_of(
        self, member: tuple[str, int], samples: int, recompute: RecomputeMask, parts: int, zero: int
    ) -> LeastMemory | None:
        """What a member (kind, memory limit) holds at least with ``samples`` samples; None: it always fits."""
        return self._memory([(*member, (samples, samples))], recompute, parts, zero)

    def _parted(self, num_ranks: int, kinds: Sequence[str], parts: int) -> Parted:
        """Of stages on ``num_ranks`` ranks of some kinds, which divide the optimiser's state in ``parts``."""
        sums = _parted_sums(self.cost_model, self.cuts)
        updates = [sums.updates[kind] - sums.inside_updates[kind] / parts for kind in kinds]
        sums_s = sums.num_bytes * self._least_s_per_byte(num_ranks + 1)
        return Parted(sums.inside_bytes, np.minimum.reduce(updates) + sums_s)

    def _least_s_per_byte(self, num_ranks: int) -> float:
        """No sum over stages of ``num_ranks`` ranks or more takes less for a byte; how many sums there are is open."""
        each = [float(parameter.num_bytes) for parameter in self.cost_model.tables.graph.tied]
        least = max(1.0, min(each))
        most = max(1.0, sum(each))
        points = [float(at) for table in self.cost_model.cluster.collectives for at, _ in table.points]
        inside = [at for at in points if least < at < most]
        sizes = np.unique([least, most, *inside, *np.geomspace(least, most, 64 if len(each) > 1 else 1)])
        least_s = self.cost_model.network.least_sums_s(tuple(sizes.tolist()))[num_ranks]
        return float((least_s / sizes).min())

    def _sums(self, running: Array) -> Array:
        """At each cut."""
        return self.cuts.sums(np.diff(running))

    def _spread(self, rows: list[Array]) -> Spread:
        distinct = {row.tobytes(): row for row in map(self._sums, rows)}  # members that are alike once
        return Spread(np.array(list(distinct.values())))

    def _memory(self, members: Sequence[Member], recompute: RecomputeMask, parts: int, zero: int) -> LeastMemory | None:
        """None where memory cannot matter."""
        sizes = [(kind, max(samples), limit) for kind, limit, samples in members]
        if not may_bind(self.cost_model, sizes, len(self.micro_batches)):
            return None
        holders = Holders(self.cost_model, self.cuts, self.trains, self.received, self._workspaces)
        return LeastMemory(tuple(holders.of(member, recompute, parts, zero) for member in dict.fromkeys(members)))
