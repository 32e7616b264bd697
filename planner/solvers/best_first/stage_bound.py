"""Lower bounds on what a stage costs on a group of devices, for any two cuts: differences of sums over ideals.

All are admissible for the simulator: where members of the group or micro-batches differ, times on the way to another
stage take the least and a rank's own work the most.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from planner.costs.communication.collectives import collective_s
from planner.costs.cost_model import PriceBook
from planner.costs.layers.cost_table import Array
from planner.costs.stages.gradient_overlap import least_exposed_s
from planner.ir.cluster import ALL_REDUCE
from planner.ir.errors import MissingMeasurementError
from planner.ir.problem import Problem
from planner.layers import throughout_sites
from planner.solvers.best_first.device_groups import Counts, first_ranks, member_orders, orders_known
from planner.solvers.best_first.graph_cuts import Cuts, Flags, Numbers
from planner.solvers.best_first.memory_bound import Memory, Workspace, holder_of, may_bind
from planner.solvers.best_first.search_space import Freedom
from planner.solvers.candidates.candidate import Pool, group_shares, parts_of, samples_of, site_shares, usable

Member = tuple[str, tuple[float, ...]]
"""What tells members of a group apart: kind of device, samples of each micro-batch."""


@dataclass(frozen=True, slots=True, eq=False)
class Spread:
    """Running sums over the layers of each cut, of members (or micro-batches) that differ: (member, cut)."""

    sums: Array

    def least(self, first: Numbers, last: Numbers) -> Array:
        """The least of all members, for stages between ``first`` and ``last`` (arrays that broadcast)."""
        found: Array = self.sums[0][last] - self.sums[0][first]
        for row in self.sums[1:]:
            np.minimum(found, row[last] - row[first], out=found)
        return found

    def most(self, first: Numbers, last: Numbers) -> Array:
        """The most of all members."""
        found: Array = self.sums[0][last] - self.sums[0][first]
        for row in self.sums[1:]:
            np.maximum(found, row[last] - row[first], out=found)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """What stages between given cuts take on a group, in seconds, elementwise.

    Attributes:
        head, back: the shortest F, and the shortest B (or I).
        slow_head, slow_back: those of one and the same member, the slowest; the longest where members keep in step.
        adds: what a B takes longer that finds gradients to add to.
        work: of the slowest member from its first F to its last B (or I).
        all_work: with the W that may come later.
        tail: reduction and update.
        window: the most micro-batches that memory lets it keep; 0 where it does not fit.
    """

    head: Array
    back: Array
    slow_head: Array
    slow_back: Array
    adds: Array
    work: Array
    all_work: Array
    tail: Array
    window: Numbers


@dataclass(frozen=True, slots=True, eq=False)
class StagePrices:
    """What any stage costs on devices of given kinds, hosts apart; see :class:`Stage`.

    Attributes:
        turns: F and B (or I) of each member, running sums.
        actions: compute actions of a micro-batch.
        is_even: whether all micro-batches are of one size.
    """

    heads: Spread
    backs: Spread
    whole_backs: Spread
    turns: tuple[tuple[Array, Array], ...]
    adds: Spread
    works: Spread
    all_works: Spread
    exchange_forward: Array
    exchange_backward: Array
    updates: Spread
    overhead_s: float
    actions: int
    is_even: bool
    memory: Memory | None

    def longest_back(self, first: Numbers, last: Numbers) -> Array:
        """No whole backward of any member and micro-batch is longer, the executor's overhead aside."""
        return self.whole_backs.most(first, last) + self.exchange_backward[last] - self.exchange_backward[first]

    def stage(self, first: Numbers, last: Numbers, num_microbatches: int) -> Stage:
        """Stages on one device, or on several that sum nothing."""
        there = self.exchange_forward[last] - self.exchange_forward[first]
        back = self.exchange_backward[last] - self.exchange_backward[first]
        head, back_s = self.heads.least(first, last), self.backs.least(first, last)
        slow_head, slow_back = head, back_s
        if self.is_even and len(self.turns) > 1:  # else the most is of a full micro-batch, and says nothing of the last
            in_step = there > 0  # an exchange of statistics makes members wait for the slowest
            longest = self.heads.most(first, last), self.backs.most(first, last)
            slowest = self._slowest(first, last)
            slow_head, slow_back = (np.where(in_step, a, b) for a, b in zip(longest, slowest, strict=True))
            head, back_s = (np.where(in_step, a, b) for a, b in zip(longest, (head, back_s), strict=True))
        always = num_microbatches * (there + back + self.actions * self.overhead_s)
        window = np.full(slow_head.shape, num_microbatches, dtype=np.int64)
        if self.memory is not None:
            window = self.memory.window(first, last, num_microbatches)
        work = self.works.most(first, last) + always
        return Stage(
            head=head + (there + self.overhead_s),
            back=back_s + (back + self.overhead_s),
            slow_head=slow_head + (there + self.overhead_s),
            slow_back=slow_back + (back + self.overhead_s),
            adds=self.adds.least(first, last),
            work=work,
            all_work=work if self.all_works is self.works else self.all_works.most(first, last) + always,
            tail=self.updates.most(first, last) + self.overhead_s,
            window=window,
        )

    def _slowest(self, first: Numbers, last: Numbers) -> tuple[Array, Array]:
        """F and B (or I) of the member whose sum of the two is largest: another may have a longer F, another B."""
        found: tuple[Array, Array] | None = None
        for turn in self.turns:
            head, back_s = (sums[last] - sums[first] for sums in turn)
            if found is None:
                found = head, back_s
            else:
                slower = head + back_s > found[0] + found[1]
                found = np.where(slower, head, found[0]), np.where(slower, back_s, found[1])
        if found is None:
            raise ValueError("a stage has no member")
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Devices as one stage, for one way to cut the batch.

    Attributes:
        counts: devices by pool.
        ranks: its devices, the first ones of each pool; which ones does not matter.
        orders: the pool of each member, in every order that may be meant; see ``device_groups.member_orders``.
        orders_known: whether these are all.
        shares: samples of each member in a full micro-batch.
        samples: of each member, by samples of the micro-batch.
        version: whether its stage computes activations again, and whether members share its sites and not samples.
        allowed: by first and last cut, what side constraints allow; None: everything.
    """

    counts: Counts
    ranks: tuple[int, ...]
    orders: tuple[tuple[int, ...], ...]
    orders_known: bool
    shares: tuple[int, ...]
    samples: Mapping[int, tuple[float, ...]]
    version: tuple[bool, bool]
    prices: StagePrices
    owner: Prices
    allowed: Flags | None

    @property
    def recompute(self) -> bool:
        """Whether its stage computes activations again."""
        return self.version[0]

    @property
    def size(self) -> int:
        """Number of devices."""
        return len(self.shares)

    def stage(self, first: Numbers, last: Numbers) -> Stage:
        """Bounds of stages between ``first`` and ``last``, arrays that broadcast."""
        owner = self.owner
        found = self.prices.stage(first, last, len(owner.micro_batches))
        tail, window = found.tail, found.window
        if self.size > 1:
            num_bytes = np.maximum(owner.parameter_bytes[last] - owner.parameter_bytes[first], 0.0)
            if owner.freedom.trains:
                reduce_s = owner.reduction_s(self, num_bytes, self.prices.longest_back(first, last))
                tail = tail + reduce_s + self.prices.overhead_s
            window = np.where(owner.mixing[last] - owner.mixing[first] > 0, 0, window)
        if self.allowed is not None:
            window = np.where(self.allowed[first, last], window, 0)
        return Stage(
            found.head,
            found.back,
            found.slow_head,
            found.slow_back,
            found.adds,
            found.work,
            found.all_work,
            tail,
            window,
        )

    def fullness(self, first: Numbers, last: Numbers, kept: int) -> Array:
        """The fullest member's share of its limit with ``kept`` micro-batches; infinite where no stage is possible."""
        owner, memory = self.owner, self.prices.memory
        possible = owner.cuts.inside[first, last]
        if self.size > 1:
            possible = possible & (owner.mixing[last] - owner.mixing[first] <= 0)
        if self.allowed is not None:
            possible = possible & self.allowed[first, last]
        found = np.zeros(possible.shape) if memory is None else memory.fullness(first, last, kept)
        return np.where(possible, found, np.inf)


@dataclass(slots=True, eq=False)
class Prices:
    """The groups of one way to cut the batch, each priced once.

    Attributes:
        parameter_bytes, mixing: at each cut: bytes of parameters, layers that mix samples.
        throughout: by first and last cut, whether a stage there lies along sites alone.
    """

    problem: Problem
    book: PriceBook
    pools: tuple[Pool, ...]
    cuts: Cuts
    micro_batches: tuple[int, ...]
    freedom: Freedom
    parameter_bytes: Array = field(init=False)
    mixing: Array = field(init=False)
    throughout: Flags = field(init=False)
    _groups: dict[tuple[Counts, bool, bool], Group | None] = field(init=False, default_factory=dict, repr=False)
    _prices: dict[object, StagePrices] = field(init=False, default_factory=dict, repr=False)
    _workspaces: dict[tuple[str, float, bool], Workspace] = field(init=False, default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        layers = self.problem.profile.graph.layers
        self.parameter_bytes = self.cuts.sums(np.diff(self.book.tables.graph.parameter_bytes))
        self.mixing = self.cuts.sums(
            np.array([layer.name in self.freedom.mixing for layer in layers], dtype=np.float64)
        )
        along = throughout_sites(self.problem.profile.graph)
        others = self.cuts.sums(np.array([layer.name not in along for layer in layers], dtype=np.float64))
        self.throughout = self.cuts.inside & (others[None, :] - others[:, None] < 0.5)

    def versions(self, counts: Counts) -> tuple[Group, ...]:
        """The devices ``counts`` as a stage, without and with recompute as allowed; none if they cannot be priced.

        Where a stage may lie along sites alone also one that shares these in other parts than whole samples.
        """
        parts = (False, True) if sum(counts) > 1 and self.throughout.any() else (False,)
        found = (self._group(counts, again, by_parts) for by_parts in parts for again in self.freedom.recompute)
        return tuple(group for group in found if group is not None)

    def capacity_s(self) -> Array:
        """The least device time of all micro-batches, by kind of device (in the order of pools) and layer."""
        kinds = list(dict.fromkeys(pool.kind for pool in self.pools))
        per_sample = np.full((len(kinds), len(self.problem.profile.graph.layers)), np.inf)
        for number, kind in enumerate(kinds):
            for samples in self._share_sizes():
                try:
                    table = self.book.tables.at(kind, samples)
                except MissingMeasurementError:
                    continue
                seconds = np.diff(table.forward_s) + self.freedom.backward(table)
                per_sample[number] = np.minimum(per_sample[number], seconds / samples)
        return per_sample * sum(self.micro_batches)

    def reduction_s(self, group: Group, num_bytes: Array, back_s: Array) -> Array:
        """The least that a group waits for the sum of so many bytes of gradients.

        Args:
            back_s: the longest of its backwards.
        """
        cluster = self.book.profile.cluster
        if self.problem.shards(group.size):
            return collective_s(cluster, ALL_REDUCE, group.ranks, num_bytes)
        return least_exposed_s(cluster, group.ranks, num_bytes, back_s)

    def _share_sizes(self) -> list[float]:
        """Samples that a member of some group may have of a micro-batch; where it shares sites, also parts of one."""
        largest = self.micro_batches[0]
        if self.throughout.any():
            return [1e-3, *range(1, largest + 1)]  # between, costs per sample lie between
        if len({pool.kind for pool in self.pools}) > 1:
            return list(range(1, largest + 1))
        sizes = range(1, len(self.problem.ranks) + 1)
        return sorted({n for rows in set(self.micro_batches) for m in sizes for n in (rows // m, -(-rows // m)) if n})

    def _group(self, counts: Counts, recompute: bool, by_parts: bool) -> Group | None:
        key = (counts, recompute, by_parts)
        if key not in self._groups:
            try:
                self._groups[key] = self._make(counts, recompute, by_parts)
            except MissingMeasurementError:
                self._groups[key] = None
        return self._groups[key]

    def _make(self, counts: Counts, recompute: bool, by_parts: bool) -> Group | None:
        orders = member_orders(self.pools, counts)
        members = orders[0]
        ranks = first_ranks(self.pools, members)
        shares_of = site_shares if by_parts else group_shares
        shares = shares_of(self.problem, self.book, ranks, self.micro_batches[0])
        if not usable(self.problem, self.book, ranks, shares, self.micro_batches):
            return None
        kinds = tuple((self.pools[k].kind, self.pools[k].memory_limit_bytes) for k in members)
        alike = (kinds, self.book.profile.cluster.group_alike(ranks), recompute, by_parts)
        if alike not in self._prices:
            self._prices[alike] = self._priced(ranks, members, shares, recompute)
        allowed = self.freedom.allowed(self.cuts, ranks, recompute)
        if by_parts:
            allowed = self.throughout if allowed is None else self.throughout & allowed
        known = orders_known(self.pools, counts)
        samples = {rows: self._samples_of(shares, rows) for rows in set(self.micro_batches)}
        version = (recompute, by_parts)
        return Group(counts, ranks, orders, known, shares, samples, version, self._prices[alike], self, allowed)

    def _samples_of(self, shares: tuple[int, ...], rows: int) -> tuple[float, ...]:
        """Of each member: whole samples, or its part of the sites."""
        return samples_of(shares, rows) if sum(shares) == self.micro_batches[0] else parts_of(shares, rows)

    def _priced(
        self, ranks: tuple[int, ...], pools: tuple[int, ...], shares: tuple[int, ...], recompute: bool
    ) -> StagePrices:
        tables, freedom, batches = self.book.tables, self.freedom, self.micro_batches
        of_size = {rows: self._samples_of(shares, rows) for rows in set(batches)}
        members: dict[Member, int] = {}
        for number, pool in enumerate(pools):
            members.setdefault((self.pools[pool].kind, tuple(of_size[rows][number] for rows in batches)), pool)
        shared = len(ranks) > 1
        sized = {
            (kind, samples): self.book.at(kind, samples, shared) for kind, of_batch in members for samples in of_batch
        }
        forward = {key: np.diff(table.forward_s) for key, table in sized.items()}
        again = {key: forward[key] if recompute else 0.0 for key in sized}
        path = {key: freedom.path_back(table) + again[key] for key, table in sized.items()}
        soon = {key: forward[key] + path[key] for key in sized}  # F, and B or I
        whole = {key: forward[key] + freedom.backward(table) + again[key] for key, table in sized.items()}
        adds = {kind: np.diff(self.book.accumulate_s(kind, shared)) for kind, _ in members}
        parts = len(ranks) if self.problem.shards(len(ranks)) else 1
        updates = {kind: np.diff(tables.parameters(kind).update_s) / parts for kind, _ in members}
        count, overhead_s = len(batches), min(tables.overhead_s(kind) for kind, _ in members)

        def spread(rows: list[Array]) -> Spread:
            found = {row.tobytes(): row for row in map(self.cuts.sums, rows)}  # members that are alike once
            return Spread(np.array(list(found.values())))

        def summed(by_size: dict[tuple[str, float], Array], member: Member) -> Array:
            kind, of_batch = member
            total = sum(of_batch.count(n) * by_size[kind, n] for n in set(of_batch))
            return np.asarray(total + (count - 1) * adds[kind] * freedom.trains)

        smallest = min(self.micro_batches)
        exchange = self.book.exchanges_s(ranks, smallest) if len(ranks) > 1 else (np.zeros(1), np.zeros(1))
        nothing = np.zeros(len(self.cuts.members))
        there, back = (self.cuts.sums(np.diff(sums)) if len(sums) > 1 else nothing for sums in exchange)
        works = spread([summed(soon, member) for member in members])
        return StagePrices(
            heads=spread([forward[key] for key in sized]),
            backs=spread([path[key] for key in sized]),
            turns=tuple((self.cuts.sums(forward[key]), self.cuts.sums(path[key])) for key in sized),
            whole_backs=spread([np.diff(table.backward_s) for table in sized.values()]),
            adds=spread([adds[kind] * freedom.trains for kind, _ in members]),
            works=works,
            all_works=spread([summed(whole, member) for member in members]) if freedom.splits else works,
            exchange_forward=there,
            exchange_backward=(back + there if recompute else back) if freedom.trains else nothing,
            updates=spread([updates[kind] if freedom.trains else 0 * updates[kind] for kind, _ in members]),
            overhead_s=overhead_s,
            actions=2 if freedom.trains else 1,
            is_even=batches[0] == batches[-1],
            memory=self._memory(members, recompute, parts),
        )

    def _memory(self, members: Mapping[Member, int], recompute: bool, parts: int) -> Memory | None:
        trains, count = self.freedom.trains, len(self.micro_batches)
        limits = {member: self.pools[pool].memory_limit_bytes for member, pool in members.items()}
        sizes = [(kind, max(samples), limits[kind, samples]) for kind, samples in members]
        if not may_bind(self.problem, self.book, sizes, count):
            return None
        return Memory(
            tuple(
                holder_of(self.book, self.cuts, kind, samples, limit, trains, recompute, parts, self._workspaces)
                for (kind, samples), limit in limits.items()
            )
        )
