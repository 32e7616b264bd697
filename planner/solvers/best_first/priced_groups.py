"""Groups of devices as stages, each priced once for one way to cut the batch (``planner.costs.stages.stage_bound``).

``Freedom`` is what a problem leaves open beside cuts and devices: schedules, recomputation, side constraints.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np

from planner.costs.candidate import Candidate, Recomputes, recompute_mask
from planner.costs.cost_model import CostModel
from planner.costs.layers.cost_table import Array
from planner.costs.memory.memory_bound import LeastMemory, kept_by
from planner.costs.stages.shared_bound import GroupTimes, MemberTimes, SharedBound, member_times
from planner.costs.stages.stage_bound import BoundedStages, StageBound, StageBounds
from planner.costs.stages.stage_sums import LeastPasses, RecomputeMask
from planner.ir.cluster import RankIds
from planner.ir.constraints import CutDegrees
from planner.ir.errors import MissingMeasurementError
from planner.ir.layout import Shares, parts_of, samples_of
from planner.ir.lazy import once
from planner.ir.plan import BatchSizes
from planner.ir.problem import SAMPLE_DIMS, Problem
from planner.layers import throughout_sites
from planner.layers.recomputed import cores_by_index
from planner.schedules import traits
from planner.solvers.best_first.device_groups import Counts, first_ranks, member_orders, orders_known, ranks_apart
from planner.solvers.best_first.graph_cuts import Flags, GraphCuts, Numbers
from planner.solvers.budget import note
from planner.solvers.candidates.candidate import DevicePool, all_shares, group_shares, part_shares
from planner.solvers.candidates.constraints import Constraints
from planner.solvers.candidates.feasibility import (
    mixing_layers,
    recompute_choices,
    schedule_names,
    usable,
    virtual_schedule_names,
)

_ROUNDING = 1e-9
_GROUP_S = 4.5e-4  # to price a group
_RANK_S = 5e-7  # for each rank that there is
_SIZE_S = 4.5e-5  # to price all layers on a kind at a number of samples


class RunMode(NamedTuple):
    """How a stage is run: what it computes again, and whether members share its sites, not samples."""

    recompute: Recomputes
    along_sites: bool = False


class Version(NamedTuple):
    """A way to run a stage on given devices; shares are of samples in a full micro-batch, or of the sites."""

    mode: RunMode
    shares: Shares


@dataclass(frozen=True, slots=True, eq=False)
class Freedom:
    """The schedules and side constraints of a problem.

    Attributes:
        schedules: names of those that are searched with one stage a position.
        virtual: names of those that are meant for several.
        trains: whether there are backwards at all.
        splits: whether a schedule may cut backwards in two, I and W.
        recompute: the choices of a stage.
        mixing: layers that mix samples.
        max_stages: most stages; 0: any number.
    """

    problem: Problem
    schedules: tuple[str, ...]
    virtual: tuple[str, ...]
    trains: bool
    splits: bool
    recompute: tuple[Recomputes, ...]
    mixing: frozenset[str]
    constraints: Constraints
    max_stages: int

    @property
    def may_replicate(self) -> bool:
        """Whether a stage may have several devices."""
        return SAMPLE_DIMS in self.problem.allow

    @classmethod
    def of(cls, problem: Problem) -> Freedom:
        """What ``problem`` leaves open."""
        names = schedule_names(problem)
        virtual = virtual_schedule_names(problem)
        own_traits = [traits(name) for name in (*names, *virtual)]
        return cls(
            problem,
            names,
            virtual,
            all(each.trains for each in own_traits),
            any(each.splits_backward for each in own_traits),
            recompute_choices(problem),
            mixing_layers(problem.graph),
            Constraints.of(problem),
            problem.max_stages,
        )

    def in_flight(self, depth: int, num_microbatches: int) -> tuple[int, int]:
        """The least and the most micro-batches that an allowed schedule keeps on a stage.

        Args:
            depth: stages downstream, itself included, at most.
        """
        if not self.trains or any(traits(name).windowed for name in self.schedules):
            return 1, num_microbatches
        kept = [kept_by(name, d, num_microbatches)[0] for name in self.schedules for d in {1, depth}]
        return min(kept), max(kept)

    def allowed(self, cuts: GraphCuts, ranks: RankIds, recompute: Recomputes) -> Flags | None:
        """Which stages side constraints allow on ``ranks``, by first and last cut; None: all."""
        if not self.constraints.rules:
            return None
        return self.constraints.mask(cuts.members, ranks, recompute == Recomputes.ALL, CutDegrees(sample=len(ranks)))


@dataclass(frozen=True, slots=True, eq=False)
class PricedGroup:
    """Devices as one stage, for one way to cut the batch.

    Attributes:
        counts: devices by pool.
        ranks: its devices, the first ones of each pool; which ones does not matter.
        orders: the pool of each member, in every order that may be meant; see ``device_groups.member_orders``.
        orders_known: whether these are all.
        samples: of each member, by samples of the micro-batch.
        allowed: by first and last cut, what side constraints allow; None: everything.
        any_shares: what holds whatever the shares are, where they are open; ``prices`` is then with one sample each.
    """

    counts: Counts
    ranks: RankIds
    orders: tuple[tuple[int, ...], ...]
    orders_known: bool
    samples: Mapping[int, tuple[float, ...]]
    version: Version
    prices: StageBound
    owner: GroupPrices
    allowed: Flags | None
    any_shares: SharedBound | None = None

    @property
    def recompute(self) -> Recomputes:
        """Which activations its stage computes again."""
        return self.version.mode.recompute

    @property
    def shares(self) -> Shares:
        """Of each member."""
        return self.version.shares

    def shares_between(self, first: int, last: int) -> tuple[int, ...]:
        """Of each member of a stage between two cuts; where they are open, those with the least largest time."""
        return self.shares if self.any_shares is None else self.any_shares.balanced(first, last)

    @property
    def is_open(self) -> bool:
        """Whether its members may share samples in several ways."""
        return self.any_shares is not None and self.owner.is_open(self.counts)

    @property
    def alike(self) -> object:
        """Equal for groups of one way to cut the batch whose stages are priced alike."""
        return id(self.prices), id(self.any_shares), id(self.allowed), self.size > 1

    @property
    def size(self) -> int:
        """Number of devices."""
        return len(self.shares)

    def stage(self, first: Numbers, last: Numbers) -> BoundedStages:
        """Bounds of stages between ``first`` and ``last``, arrays that broadcast."""
        counted = self.owner.num_counted
        count = len(self.owner.micro_batches)
        priced = (self.any_shares or self.prices).stage(first, last, counted)
        window = priced.window
        if counted < count:
            window = np.where(window == counted, count, window)
        if self.size > 1:
            window = np.where(self.owner.mixing[last] - self.owner.mixing[first] > 0, 0, window)
        if self.allowed is not None:
            window = np.where(self.allowed[first, last], window, 0)
        return priced if window is priced.window else replace(priced, window=window)

    def largest_work_s(self, first: Numbers, last: Numbers) -> Array:
        """What the slowest member computes in a step, at least."""
        return (self.any_shares or self.prices).largest_work_s(first, last)

    def fullness(self, first: Numbers, last: Numbers, kept: int) -> Array:
        """The fullest member's share of its limit with ``kept`` micro-batches; infinite where no stage is possible."""
        owner = self.owner
        memory = self.prices.memory
        possible = owner.cuts.inside[first, last]
        if self.size > 1:
            possible = possible & (owner.mixing[last] - owner.mixing[first] <= 0)
        if self.allowed is not None:
            possible = possible & self.allowed[first, last]
        fullest = np.zeros(possible.shape) if memory is None else memory.fullness(first, last, kept)
        return np.where(possible, fullest, np.inf)


@dataclass(eq=False)
class GroupPrices:
    """The groups of one way to cut the batch, each priced once.

    Attributes:
        mixing: at each cut, layers that mix samples.
        throughout: by first and last cut, whether a stage there lies along sites alone.
        received: by cut, bytes a sample that surely come in there and are kept; None: nothing does.
    """

    problem: Problem
    cost_model: CostModel
    pools: tuple[DevicePool, ...]
    cuts: GraphCuts
    micro_batches: BatchSizes
    freedom: Freedom
    received: Array | None = None
    mixing: Array = field(init=False)
    throughout: Flags = field(init=False)
    _prices: dict[object, StageBound] = field(init=False, default_factory=dict, repr=False)
    _bounds: StageBounds = field(init=False, repr=False)
    _cores: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        trains = self.freedom.trains
        splits = self.freedom.splits
        counted = self.micro_batches[: self.num_counted]
        self._bounds = StageBounds(self.cost_model, self.cuts, counted, trains, splits, self.received)
        self.mixing, self.throughout, self._cores = _between_cuts(self.cost_model, self.cuts, self.freedom.mixing)

    @property
    def num_microbatches(self) -> int:
        """M: all of them."""
        return len(self.micro_batches)

    @property
    def num_counted(self) -> int:
        """How many micro-batches bounds count, the first ones."""
        return self.num_microbatches

    @once
    def returns(self) -> Flags:
        """By crossing, whether a gradient comes back."""
        return self.cuts.crossings.has_gradient & self.freedom.trains

    @once
    def versions(self, counts: Counts) -> tuple[PricedGroup, ...]:
        """The devices ``counts`` as a stage, in every way that is allowed; none if they cannot be priced.

        Without and with recompute, with every share of the samples or the fastest, and where a stage may lie along
        sites alone also with these in other parts than whole samples.
        """
        if sum(counts) > self.micro_batches[0] and not self.throughout.any():
            return ()  # a rank would have no sample
        ranks = self.first_ranks(counts)
        size = self.micro_batches[0]
        shares_of = all_shares(self.problem, ranks, size)
        if not shares_of and len(ranks) <= size:  # too many
            shares_of = (group_shares(self.problem, self.cost_model, ranks, size),)
        ways = [(False, shares) for shares in shares_of]
        if len(ranks) > 1 and self.throughout.any():
            ways.append((True, part_shares(self.problem, self.cost_model, ranks, size)))
        groups = []
        for along_sites, shares in ways:
            for recompute in self.freedom.recompute:
                note(_GROUP_S + _RANK_S * len(self.problem.ranks))
                with suppress(MissingMeasurementError):
                    groups.append(self._made(counts, Version(RunMode(recompute, along_sites), shares)))
        return tuple(group for group in groups if group is not None)

    def quickest(self, counts: Counts) -> dict[RunMode, PricedGroup]:
        """Of each mode the version whose slowest member has the whole network done first."""
        first = np.array([0])
        last = np.array([self.cuts.last])
        quickest: dict[RunMode, PricedGroup] = {}
        least_s: dict[RunMode, float] = {}
        for group in self.versions(counts):
            mode = group.version.mode
            work_s = float(group.largest_work_s(first, last)[0])
            if mode not in quickest or work_s < least_s[mode]:
                quickest[mode] = group
                least_s[mode] = work_s
        return quickest

    def pipeline(
        self, groups: Sequence[PricedGroup], cuts: tuple[int, ...], schedule: str, windows: tuple[int, ...] = ()
    ) -> Candidate:
        """Stages of these groups between the cuts, with ranks: the first of each pool that no stage before has."""
        recompute = tuple(group.recompute for group in groups)
        return Candidate(
            self.cuts.stage_of(cuts),
            ranks_apart(self.pools, [group.counts for group in groups]),
            tuple(group.shares_between(*ends) for group, ends in zip(groups, pairwise(cuts), strict=True)),
            self.micro_batches,
            schedule,
            windows,
            recompute if any(recompute) else (),
        )

    @once
    def first_ranks(self, counts: Counts) -> tuple[int, ...]:
        """The ranks of a group with the devices ``counts``, where none is used yet."""
        return first_ranks(self.pools, self._orders(counts)[0])

    @once
    def _orders(self, counts: Counts) -> tuple[tuple[int, ...], ...]:
        """In which the members may share a micro-batch."""
        return member_orders(self.pools, counts)

    def is_open(self, counts: Counts) -> bool:
        """Whether the devices ``counts`` may share samples in several ways."""
        sorts = {pool.sort for pool, count in zip(self.pools, counts, strict=True) if count}
        return len(sorts) > 1 and sum(counts) < self.micro_batches[0]

    def leaves_out(self, counts: Counts) -> bool:
        """Whether some of these ways are in no version."""
        return self.is_open(counts) and not all_shares(self.problem, self.first_ranks(counts), self.micro_batches[0])

    def times(self, ranks: RankIds, recompute: Recomputes, num_microbatches: int | None = None) -> GroupTimes:
        """What members of a group take for any number of samples.

        Args:
            num_microbatches: the first ones, which count; None: all.

        Raises:
            MissingMeasurementError: a layer's cost at one of these numbers is not known.
        """
        recomputed = recompute_mask(recompute, self._cores)
        size = self.micro_batches[0]
        zero = self.problem.zero_over(len(ranks))
        limits = map(self.problem.room_bytes, ranks)
        sorts = Counter(zip(map(self.cost_model.kind, ranks), limits, strict=True))
        members = []
        most = []
        counted = self.micro_batches[:num_microbatches]
        for kind, limit in sorts:
            top = size if self.problem.micro_batch_sizes else min(size, self.cost_model.tables.largest_measured(kind))
            members.append(self._member_times(kind, top, recomputed, counted))
            most.append(self._bounds.most_samples((kind, limit), top, recomputed, len(ranks) if zero else 1, zero))
        return GroupTimes(tuple(members), tuple(sorts.values()), size, tuple(most))

    @once
    def _member_times(self, kind: str, most: int, recompute: RecomputeMask, micro_batches: BatchSizes) -> MemberTimes:
        schedules = self.freedom.trains, self.freedom.splits
        return member_times(self.cost_model, self.cuts, micro_batches, (kind, most, recompute), schedules)

    def least_memories(self, member: tuple[str, int], samples: int) -> list[LeastMemory | None]:
        """What a member (kind, memory limit) that divides nothing holds with ``samples`` samples, by way to recompute.

        None where it always fits.
        """
        masks = (recompute_mask(recompute, self._cores) for recompute in self.freedom.recompute)
        return [self._bounds.memory_of(member, samples, mask, 1, 0) for mask in masks]

    def devices_by_kind(self) -> dict[str, int]:
        """How many devices there are of each kind, in the order of pools."""
        counts: dict[str, int] = {}
        for pool in self.pools:
            counts[pool.kind] = counts.get(pool.kind, 0) + len(pool.ranks)
        return counts

    @once
    def capacity_s(self) -> Array:
        """The least device time of all micro-batches, by kind of device (in the order of pools) and layer."""
        kinds = list(dict.fromkeys(pool.kind for pool in self.pools))
        per_sample = np.full((len(kinds), len(self.problem.graph.layers)), np.inf)
        sizes = self._share_sizes()
        note(_SIZE_S * len(kinds) * len(sizes))
        for number, kind in enumerate(kinds):
            for samples in sizes:
                for passes in self.layer_passes(kind, samples):
                    per_sample[number] = np.minimum(per_sample[number], (passes.forward_s + passes.whole_s) / samples)
        return per_sample * sum(self.micro_batches)

    def layer_passes(self, kind: str, samples: float) -> Iterator[LeastPasses]:
        """What passes of ``samples`` samples take at least, by layer, shared by ranks and not; as far as measured."""
        for shared in (False, True):
            with suppress(MissingMeasurementError):
                sums = self.cost_model.sums(kind, samples, shared, recompute=False)
                yield LeastPasses(*map(np.diff, sums.least(self.freedom.trains, self.freedom.splits)))

    def _share_sizes(self) -> list[float]:
        """Samples that a member of some group may have of a micro-batch; where it shares sites, also parts of one."""
        largest = self.micro_batches[0]
        if self.throughout.any():
            return [1e-3, *range(1, largest + 1)]  # between, costs per sample lie between
        if len({pool.sort for pool in self.pools}) > 1:
            return list(range(1, largest + 1))
        counts = range(1, len(self.problem.ranks) + 1)
        return sorted({n for size in set(self.micro_batches) for m in counts for n in (size // m, -(-size // m)) if n})

    def _made(self, counts: Counts, version: Version) -> PricedGroup | None:
        (recompute, _), shares = version
        members = self._orders(counts)[0]
        ranks = self.first_ranks(counts)
        if not usable(self.problem, self.cost_model, ranks, shares, self.micro_batches):
            return None
        kinds = tuple((self.pools[k].kind, self.pools[k].room_bytes) for k in members)
        alike = (kinds, self.cost_model.cluster.group_alike(ranks), version)
        if alike not in self._prices:
            sizes = (self.micro_batches[0], self.micro_batches[self.num_counted - 1])
            full, last = (self._samples_of(shares, size) for size in sizes)
            alike_members = [
                (*kind, samples) for kind, samples in zip(kinds, zip(full, last, strict=True), strict=True)
            ]
            recomputed = recompute_mask(recompute, self._cores)
            zero = self.problem.zero_over(len(ranks))
            self._prices[alike] = self._bounds.of(ranks, alike_members, recomputed, zero)
        samples = {size: self._samples_of(shares, size) for size in set(self.micro_batches)}
        return self._group(counts, version, samples, self._prices[alike])

    def _group(
        self,
        counts: Counts,
        version: Version,
        samples: Mapping[int, tuple[float, ...]],
        prices: StageBound,
        any_shares: SharedBound | None = None,
    ) -> PricedGroup:
        """As its attributes say; with the stages that are allowed."""
        orders = self._orders(counts)
        ranks = self.first_ranks(counts)
        allowed = [self.freedom.allowed(self.cuts, ranks, version.mode.recompute)]
        if version.mode.along_sites:
            allowed.append(self.throughout)
        if self.problem.rate_per_s:
            allowed.append(self._in_time(any_shares or prices))
        flags = [each for each in allowed if each is not None]
        return PricedGroup(
            counts,
            ranks,
            orders,
            orders_known(self.pools, counts),
            samples,
            version,
            prices,
            self,
            np.logical_and.reduce(flags) if flags else None,
            any_shares,
        )

    def _in_time(self, prices: StageBound | SharedBound) -> Flags:
        """By first and last cut, whether a stage's work leaves room for the samples a second that are asked for."""
        count = len(self.cuts.members)
        first = np.arange(count)[:, None]
        last = np.arange(count)[None, :]
        period_s = sum(self.micro_batches) / self.problem.rate_per_s
        work_s = prices.stage(first, last, self.num_microbatches).work_s
        in_time: Flags = work_s <= period_s * (1 + _ROUNDING)
        return in_time

    def _samples_of(self, shares: Shares, size: int) -> tuple[float, ...]:
        """Of each member: whole samples, or its part of the sites."""
        return samples_of(shares, size) if sum(shares) == self.micro_batches[0] else parts_of(shares, size)


@lru_cache(maxsize=2)  # one search asks with the same cuts for every size of its micro-batches
def _between_cuts(
    cost_model: CostModel, cuts: GraphCuts, mixing: frozenset[str]
) -> tuple[Array, Flags, tuple[int, ...]]:
    """At each cut, layers of ``mixing``; whether stages lie along sites alone; the layers of attention's cores."""
    graph = cost_model.graph
    along = throughout_sites(graph)
    names = [layer.name for layer in graph.layers]
    rest = cuts.sums(np.array([float(name not in along) for name in names]))
    throughout = cuts.inside & (rest[None, :] - rest[:, None] < 0.5)
    mixed = np.array([float(name in mixing) for name in names])
    return cuts.sums(mixed), throughout, tuple(chain.from_iterable(cores_by_index(graph)))
