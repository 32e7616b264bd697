"""Pipelines of several stages a position (interleaved, ZB-V, hanayo, greedy, chimera), searched like all others.

Given       a schedule, its p positions, the group of devices of each, S stages, stage s on position r(s)
Choose      a chain of cuts, stage s from c_s to c_(s+1)
Minimise    the step, by simulation

Such a ``Chunks`` waits in the queue of the search by a bound; it is opened into its balanced cuts, improved cut by cut,
and into its first stages, each with the bound of the best stages behind.

The bound.  w_s is all that stage s does on its position, f_s, b_s its shortest F and B (or I), c_s a message there and
back behind it, i(r) the first stage of position r.  Position r begins after the F of the stages before i(r), and the
last B of r goes back through them.  So, with D_r the sum over the stages before i(r),

    step >= D_r (f + c) + sum over the stages of r of (w + update)
    step >= D_r (f + b + 2 c) + sum over the stages of r of (w without W that may come later)

for each r, hence for every mean of them with weights l_r.  A mean is a sum over stages, so the least over all cuts is a
shortest path: tables V[s][c], from stage s at cut c to the end.  Weights begin in proportion to speed and move towards
positions that the shortest path loads more (Lagrangian relaxation of the least largest load).  Third, one micro-batch
goes there and back through all stages.  Where a stage need not read from the one before, D is left out.

Groups of devices are those of the search, in any sequence, where there are at most ``MANY_SEQUENCES``; else they are
of one size, filled host by host and kind by kind (``restrictions``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise, permutations, product

import numpy as np

from planner.costs.layers.cost_table import Array
from planner.costs.memory.memory_bound import Memory
from planner.costs.stages.stage_bound import Spread
from planner.ir.errors import IllegalProgramError, MissingMeasurementError
from planner.ir.layout import equal_shares
from planner.ir.plan import Rejected
from planner.schedules import positions, traits
from planner.solvers.best_first.device_groups import Counts, Devices
from planner.solvers.best_first.graph_cuts import Flags, Numbers
from planner.solvers.best_first.message_bound import Links
from planner.solvers.best_first.priced_groups import Group, Prices
from planner.solvers.candidates.candidate import Candidate, Pool
from planner.solvers.candidates.choose import better
from planner.solvers.candidates.evaluate import Evaluation, Evaluator

WAYS = (1, 2, 3, 4)
"""Stages a position that are tried where the schedule leaves it open."""

MANY_SEQUENCES = 500
"""So many sequences of groups at most are all looked at."""

FEW_LAYERS = 24
"""Networks of so many layers are also cut next to layers that cost nothing: stages may be as many as layers."""

_KEPT = 24  # groups whose stages are kept
_FEW_KINDS = 3
_ROUNDS = 3  # of moving each cut
_STEPS = 4  # of the weights of positions
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Stages of a group, by first and last cut, in seconds; infinite where there is none.

    Attributes:
        whole: all that a rank does of it in a step.
        paths: the same without W, which may come later, and update.
        head, back: the shortest F, and the shortest B or I.
        resident: bytes that members hold of it throughout, by member; None where memory cannot matter.
        total_s: the whole network as one stage, whether it fits or not.
    """

    whole: Array
    paths: Array
    head: Array
    back: Array
    resident: Array | None
    total_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """All pipelines of a schedule with a given group of devices on each position, and number of stages.

    Attributes:
        bound_s: none is faster.
        where: the position of each stage.
        is_weighed: whether ``bound_s`` is that of the shortest path, or just all work over all devices.
    """

    bound_s: float
    owner: VirtualPipelines
    schedule: str
    groups: tuple[Group, ...]
    where: tuple[int, ...]
    is_weighed: bool = False

    def advance(self, evaluator: Evaluator, upper_s: float) -> Iterator[Family | Branch | Evaluation]:
        """A good pipeline of it, and the family with a sharper bound; then what stands for all of its pipelines."""
        opened = Opened.of(self)
        if self.is_weighed:
            yield from opened.branch(opened.root(), upper_s)
            return
        bound_s = max(self.bound_s, opened.bound_s)
        if bound_s < upper_s:
            yield from opened.improved(evaluator, upper_s)
            yield replace(self, bound_s=bound_s, is_weighed=True)

    def candidate(self, cuts: Sequence[int]) -> Candidate:
        """The pipeline with these cuts, on the first free ranks of each pool."""
        prices, count = self.owner.prices, len(self.where)
        free = [list(pool.ranks) for pool in prices.pools]
        members = [group.orders[0] for group in self.groups]
        ranks = [tuple(free[number].pop(0) for number in own) for own in members]
        mirrored = traits(self.schedule).bidirectional
        again = self.groups[0].recompute
        return Candidate(
            prices.cuts.stage_of(tuple(cuts)),
            tuple(ranks[r][::-1] if mirrored and 2 * s >= count else ranks[r] for s, r in enumerate(self.where)),
            tuple(self.groups[r].shares for r in self.where),
            prices.micro_batches,
            self.schedule,
            recompute=(again,) * count if again else (),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Mean:
    """A mean of the bounds of positions, or one micro-batch there and back: a sum over stages.

    Attributes:
        own: by stage, how much its work counts; ahead: how much the way through it does.
        returns: whether the way back counts, and not what may come later.
        table: by stage, what it and those behind cost at least, by the cut where it begins; at last, 0 at the end.
    """

    own: tuple[float, ...]
    ahead: tuple[float, ...]
    returns: bool
    table: tuple[Array, ...]

    @property
    def bound_s(self) -> float:
        """The least of all stages."""
        return float(self.table[0][0])


@dataclass(frozen=True, slots=True, eq=False)
class First:
    """The first stages of a pipeline.

    Attributes:
        means: what they cost, by mean.
        there, back: the shortest way through them, with messages.
        wholes, paths: by position, when it may end, and when the last B has returned, as far as it is known.
        held: by position, bytes of each member.
    """

    cuts: tuple[int, ...]
    means: tuple[float, ...]
    there: float
    back: float
    wholes: tuple[float, ...]
    paths: tuple[float, ...]
    held: tuple[Array, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Branch:
    """Pipelines with the same first stages, by where the next stage ends: that at ``place``, and those behind it.

    Attributes:
        bounds: of the best stages behind, ascending; ``lasts``: where the next stage ends.
    """

    opened: Opened
    first: First
    bounds: Array
    lasts: Array
    place: int = 0

    @property
    def bound_s(self) -> float:
        """None of them is faster."""
        return float(self.bounds[self.place])

    def advance(self, evaluator: Evaluator, upper_s: float) -> Iterator[Branch | Candidate]:
        """What is behind, and the one in front with its next stage, or as a whole pipeline."""
        if self.place + 1 < len(self.bounds):
            yield replace(self, place=self.place + 1)
        child = self.opened.grown(self.first, int(self.lasts[self.place]))
        if len(child.cuts) <= len(self.opened.family.where):
            yield from self.opened.branch(child, upper_s)
            return
        candidate = self.opened.family.candidate(child.cuts)
        if not evaluator.unmet(candidate):
            yield candidate


@dataclass(slots=True, eq=False)
class Opened:
    """A family with its tables.

    Attributes:
        spans: by stage; ``messages``: behind each but the last, by cut, there and back.
        begins: by position, its first stage.
    """

    family: Family
    spans: tuple[Spans, ...]
    messages: tuple[tuple[Array, Array], ...]
    begins: tuple[int, ...]
    means: tuple[Mean, ...] = ()

    @classmethod
    def of(cls, family: Family) -> Opened:
        """With weights of the positions that make the bound large."""
        owner, groups, where = family.owner, family.groups, family.where
        spans = tuple(owner.spans(groups[r], mirrored=traits(family.schedule).bidirectional) for r in where)
        messages = tuple(owner.messages(groups[a], groups[b]) for a, b in pairwise(where))
        opened = cls(family, spans, messages, tuple(where.index(r) for r in range(len(groups))))
        opened.means = opened._weighted()
        return opened

    @property
    def bound_s(self) -> float:
        """No pipeline of the family is faster."""
        return max(mean.bound_s for mean in self.means)

    def _weighted(self) -> tuple[Mean, ...]:
        """The means of the bound, for the best of a few weights."""
        speeds = 1 / np.maximum([self.spans[stage].total_s for stage in self.begins], 1e-12)
        weights = speeds / speeds.sum()
        best = self._mean(weights, returns=True)
        for _ in range(_STEPS):
            if not np.isfinite(best.bound_s):
                break
            loads = np.array(self._ends(best))
            moved = weights * np.maximum(loads / max(loads.mean(), 1e-12), 1e-3) ** 2
            mean = self._mean(moved / moved.sum(), returns=True)
            if mean.bound_s <= best.bound_s:
                break
            best, weights = mean, moved / moved.sum()
        return best, self._mean(weights, returns=False), *self._trip()

    def _ends(self, mean: Mean) -> list[float]:
        """By position, the bound of its own, where the mean is least."""
        first = self.root()
        for stage, behind in enumerate(mean.table[1:]):
            first = self.grown(first, int((self._cost(mean, stage, first.cuts[-1]) + behind).argmin()))
        return [max(one, other) for one, other in zip(first.wholes, first.paths, strict=True)]

    def _mean(self, weights: Array, returns: bool) -> Mean:
        begun = np.array(self.begins)
        stages = range(len(self.spans))
        own = tuple(float(weights[r]) for r in self.family.where)
        ahead = tuple(float(weights[begun > stage].sum()) * self.family.owner.is_linked for stage in stages)
        return self._tabled(Mean(own, ahead, returns, ()))

    def _trip(self) -> tuple[Mean, ...]:
        count = len(self.spans)
        nothing, all_ways = (0.0,) * count, (1.0,) * count
        return (self._tabled(Mean(nothing, all_ways, True, ())),) if self.family.owner.is_linked else ()

    def _tabled(self, mean: Mean) -> Mean:
        """With its table, from the last stage to the first."""
        behind = np.full(len(self.spans[0].whole), np.inf)
        behind[-1] = 0.0
        table = [behind]
        for stage in reversed(range(len(self.spans))):
            table.append((self._cost(mean, stage) + table[-1][None, :]).min(axis=1))
        return replace(mean, table=tuple(reversed(table)))

    def _cost(self, mean: Mean, stage: int, first: int | slice = slice(None)) -> Array:
        """What a stage costs by first and last cut, or by last cut alone."""
        spans, own, ahead = self.spans[stage], mean.own[stage], mean.ahead[stage]
        cost: Array = own * (spans.paths if mean.returns else spans.whole)[first] if own else np.zeros(1)
        if ahead:
            there, back = self._messages(stage)
            way = spans.head[first] + there
            cost = cost + ahead * (way + spans.back[first] + back if mean.returns else way)
        return cost

    def _messages(self, stage: int) -> tuple[Array, Array]:
        nothing = np.zeros(len(self.spans[0].whole))
        return self.messages[stage] if stage < len(self.messages) else (nothing, nothing)

    def root(self) -> First:
        """No stage yet."""
        zeros = (0.0,) * len(self.begins)
        return First((0,), (0.0,) * len(self.means), 0.0, 0.0, zeros, zeros, (np.zeros(1),) * len(self.begins))

    def grown(self, first: First, last: int) -> First:
        """With a stage more."""
        stage, begin, linked = len(first.cuts) - 1, first.cuts[-1], self.family.owner.is_linked
        spans, position = self.spans[stage], self.family.where[stage]
        wholes, paths, held = list(first.wholes), list(first.paths), list(first.held)
        if stage == self.begins[position]:
            wholes[position] += first.there
            paths[position] += first.there + first.back
        wholes[position] += float(spans.whole[begin, last])
        paths[position] += float(spans.paths[begin, last])
        if spans.resident is not None:
            held[position] = held[position] + spans.resident[:, begin, last]
        there, back = self._messages(stage)
        costs = [self._cost(mean, stage, begin)[last] for mean in self.means]
        return First(
            (*first.cuts, last),
            tuple(before + float(cost) for before, cost in zip(first.means, costs, strict=True)),
            first.there + float(spans.head[begin, last] + there[last]) if linked else 0.0,
            first.back + float(spans.back[begin, last] + back[last]) if linked else 0.0,
            tuple(wholes),
            tuple(paths),
            tuple(held),
        )

    def branch(self, first: First, upper_s: float) -> Iterator[Branch]:
        """Where the next stage may end so that the step is below ``upper_s``; nothing if nowhere."""
        stage, begin = len(first.cuts) - 1, first.cuts[-1]
        spans, position = self.spans[stage], self.family.where[stage]
        ahead = (first.there, first.there + first.back) if stage == self.begins[position] else (0.0, 0.0)
        bounds = np.maximum(
            first.wholes[position] + ahead[0] + spans.whole[begin],
            first.paths[position] + ahead[1] + spans.paths[begin],
        )
        for cost, mean in zip(first.means, self.means, strict=True):
            bounds = np.maximum(bounds, cost + self._cost(mean, stage, begin) + mean.table[stage + 1])
        if spans.resident is not None:
            held = first.held[position][:, None] + spans.resident[:, begin]
            bounds = np.where((held > self._limits(position)[:, None]).any(axis=0), np.inf, bounds)
        lasts = np.flatnonzero(bounds < upper_s)
        if len(lasts):
            order = np.argsort(bounds[lasts], kind="stable")
            yield Branch(self, first, bounds[lasts][order], lasts[order].astype(np.int64))

    def _limits(self, position: int) -> Array:
        memory, count = self.family.groups[position].prices.memory, len(self.family.owner.prices.micro_batches)
        rounding = (count + 6) * len(self.spans)  # the simulator rounds bytes slot by slot
        return np.array(
            [holder.limit_bytes + rounding for holder in memory.holders] if memory is not None else [np.inf]
        )

    def balanced(self) -> list[int] | None:
        """Cuts so that the longest stage is least; None if there are none."""
        best = np.full(len(self.spans[0].whole), np.inf)
        best[-1] = 0.0
        chosen = []
        for spans in reversed(self.spans):
            both = np.maximum(spans.whole, best[None, :])
            chosen.append(both.argmin(axis=1))
            best = both.min(axis=1)
        if not np.isfinite(best[0]):
            return None
        cuts = [0]
        for choice in reversed(chosen):
            cuts.append(int(choice[cuts[-1]]))
        return cuts

    def improved(self, evaluator: Evaluator, upper_s: float) -> Iterator[Evaluation]:
        """The balanced pipeline, if it fits; if it is faster than ``upper_s`` also what moving its cuts leads to."""
        cuts = self.balanced()
        best = self._simulated(evaluator, cuts, float("inf")) if cuts is not None else None
        if cuts is None or best is None:
            return
        inside = self.family.owner.prices.cuts.inside
        for _ in range(_ROUNDS if best.step_s < upper_s else 0):
            before = best
            for place in range(1, len(cuts) - 1):
                between = np.flatnonzero(inside[cuts[place - 1]] & inside[:, cuts[place + 1]])
                at = int(np.searchsorted(between, cuts[place]))
                for moved in (*between[max(0, at - 1) : at], *between[at + 1 : at + 2]):
                    other = [*cuts[:place], int(moved), *cuts[place + 1 :]]
                    tried = self._simulated(evaluator, other, best.step_s)
                    if tried is not None and better(best, tried) is tried:
                        best, cuts = tried, other
            if best is before:
                break
        yield best

    def _simulated(self, evaluator: Evaluator, cuts: Sequence[int], known_s: float) -> Evaluation | None:
        """The pipeline, simulated; None if it does not fit, cannot be priced, or there is no time."""
        candidate = self.family.candidate(cuts)
        if evaluator.unmet(candidate) or not evaluator.has_time_for(candidate):
            return None
        with suppress(MissingMeasurementError, IllegalProgramError):
            simulated = evaluator.evaluate(candidate, known_s)
            return simulated if simulated.fits else None
        return None


@dataclass(slots=True, eq=False)
class VirtualPipelines:
    """The families of one way to cut the batch.

    Attributes:
        is_linked: whether every stage certainly reads from the one before, and gets a gradient back.
    """

    prices: Prices
    links: Links
    is_linked: bool = field(init=False)
    _rows: list[Numbers] = field(init=False, repr=False)
    _spans: dict[object, tuple[Group, Spans]] = field(init=False, default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        cuts = self.prices.cuts
        every = [np.unique(cuts.column[:, :cut, cut]) for cut in range(1, cuts.last)]
        self._rows = [rows[rows >= 0] for rows in every]
        linked = cuts.columns.linked & cuts.columns.has_gradient
        self.is_linked = all(bool(len(rows) and linked[rows].all()) for rows in self._rows)

    def families(self, name: str, counts: Sequence[Counts]) -> Iterator[Family]:
        """Those of a schedule with such groups on its positions, by stages on each."""
        prices, limit = self.prices, self.prices.freedom.max_stages
        fixed, most = traits(name).stages_per_position, min(prices.cuts.last, limit or prices.cuts.last)
        work_s = float(prices.capacity_s().min(axis=0).sum())
        bound_s = work_s / sum(map(sum, counts)) if np.isfinite(work_s) else 0.0
        for ways in (fixed,) if fixed else WAYS:
            where = positions(name, len(counts), ways)
            if len(where) <= most:
                for groups in self._versions(counts, traits(name).bidirectional):
                    yield Family(bound_s, self, name, groups, where)

    def _versions(self, counts: Sequence[Counts], mirrored: bool) -> Iterator[tuple[Group, ...]]:
        """The groups of all positions, which compute the same activations again; none if one cannot be priced."""
        by_position = [[group for group in self.prices.versions(own) if not group.version[1]] for own in counts]
        for again in self.prices.freedom.recompute:
            groups = [group for own in by_position for group in own if group.recompute == again]
            if len(groups) == len(counts):
                yield from product(*map(self._halves, groups)) if mirrored else (tuple(groups),)

    def _halves(self, group: Group) -> tuple[Group, ...]:
        """A pair of ranks that have one half of the samples each, in both orders if these are not alike."""
        order = group.orders[0]
        orders = tuple(dict.fromkeys((order, order[::-1])))
        halves = self.prices.with_shares(group, equal_shares(self.prices.micro_batches[0], 2))
        return tuple(
            replace(halves, orders=(own, *(o for o in orders if o != own)), orders_known=True) for own in orders
        )

    def spans(self, group: Group, mirrored: bool) -> Spans:
        """The stages of a group, the same for those that are priced alike; kept while few others are asked for."""
        key = (id(group.prices), id(group.allowed), mirrored)
        if key not in self._spans:
            if len(self._spans) >= _KEPT:
                self._spans.clear()
            self._spans[key] = group, self._worked_out(group, mirrored)
        return self._spans[key][1]

    def _worked_out(self, group: Group, mirrored: bool) -> Spans:
        cuts, prices = self.prices.cuts, group.prices
        every = np.arange(cuts.last + 1)
        first, last = every[:, None], every[None, :]
        stage = group.stage(first, last)
        possible = cuts.inside & (stage.window > 0)
        whole, paths = stage.all_work, stage.work
        if mirrored or not _is_one_slowest(prices.all_works, cuts.inside):
            whole = whole - prices.all_works.most(first, last) + _mean_of(prices.all_works, first, last)
            paths = paths - prices.works.most(first, last) + _mean_of(prices.works, first, last)
        if prices.parted is None:
            whole = whole + prices.updates.least(first, last)
        total_s = float(whole[0, -1])
        whole, paths, head, back = (np.where(possible, each, np.inf) for each in (whole, paths, stage.head, stage.back))
        return Spans(whole, paths, head, back, _resident(prices.memory), total_s)

    def messages(self, source: Group, destination: Group) -> tuple[Array, Array]:
        """There and back between stages of two groups, at least, by cut; nothing on the same ranks."""
        count = self.prices.cuts.last + 1
        there, back = np.zeros(count), np.zeros(count)
        if self.is_linked and source is not destination:
            link = self.links.between(source, destination)
            for cut, rows in enumerate(self._rows, 1):
                there[cut], back[cut] = link.there[rows].min(), link.back[rows].min()
        return there, back


def _is_one_slowest(works: Spread, inside: Flags) -> bool:
    """Whether the same member is the slowest in every stage, so that the most of a sum is the sum of the most."""
    first, last = np.nonzero(inside)
    most = works.most(first, last)
    return any(bool((row[last] - row[first] >= most * (1 - _ROUNDING)).all()) for row in works.sums)


def _mean_of(works: Spread, first: Numbers, last: Numbers) -> Array:
    """The mean of members, which no sum over stages of the slowest is below."""
    return np.asarray(np.mean([row[last] - row[first] for row in works.sums], axis=0))


def _resident(memory: Memory | None) -> Array | None:
    """By holder, first and last cut: bytes of a stage that are there whatever other stages of the rank do."""
    if memory is None:
        return None
    by_holder = []
    for holder in memory.holders:
        resident = holder.resident[None, :] - holder.resident[:, None]
        if holder.gradients is not None and holder.once is not None:
            resident = resident - np.maximum(holder.gradients[None, :] - holder.gradients[:, None], 0.0)
        by_holder.append(resident)
    return np.array(by_holder)


@dataclass(frozen=True, slots=True)
class Sequences:
    """Groups of devices by position, in each order that matters; and whether some were left out."""

    groups: list[tuple[Counts, ...]]
    is_restricted: bool


def families(every: Iterable[Prices], devices: Devices, names: Sequence[str]) -> Iterator[Family | Rejected]:
    """All pipelines of several stages a position that are searched, for each way to cut the batch; and what is not."""
    formed = {mirrored: sequences(devices, mirrored) for mirrored in {traits(name).bidirectional for name in names}}
    for name in names:
        yield from _not_searched(name, formed[traits(name).bidirectional])
    for prices in every:
        for mirrored, sequence in formed.items():
            owner = VirtualPipelines(prices, Links(prices))
            for name in names:
                if traits(name).bidirectional is mirrored:
                    for counts in sequence.groups:
                        yield from owner.families(name, counts)


def _not_searched(name: str, formed: Sequences) -> Iterator[Rejected]:
    """What lies outside of the families of a schedule, and why."""
    if not traits(name).stages_per_position:
        yield Rejected(f"{name}: more than {WAYS[-1]} stages a device", "each stage more costs messages")
    if formed.is_restricted:
        why = f"more than {MANY_SEQUENCES} ways to form them; groups of one size are tried, filled host by host"
        yield Rejected(f"{name}: unequal groups of devices", why)
    if traits(name).windowed:
        yield Rejected(f"{name}: other windows than its own", "it works them out for each stage")


def sequences(devices: Devices, mirrored: bool) -> Sequences:
    """The groups of a search, by position; two positions at least, where there are two devices.

    Args:
        mirrored: a position is two devices.
    """
    fewest = 1 if mirrored or sum(len(pool.ranks) for pool in devices.pools) == 1 else 2
    state = devices.all_unused
    _, names = devices.canonical(tuple(len(pool.ranks) for pool in devices.pools))
    every = _every(devices, mirrored, state, names)
    found = list(islice((each for each in every if len(each) >= fewest), MANY_SEQUENCES + 1))
    if len(found) <= MANY_SEQUENCES and devices.unit == 1:
        return Sequences(found, False)
    return Sequences([each for each in _uniform(devices, mirrored) if len(each) >= fewest], True)


def _every(devices: Devices, mirrored: bool, state: Counts, names: Counts) -> Iterator[tuple[Counts, ...]]:
    """Every sequence from ``state`` on, whose pools are called ``names``."""
    for option in devices.options(state):
        if mirrored and sum(option.group) != 2:
            continue
        group = [0] * len(names)
        for place, count in enumerate(option.group):
            group[names[place]] = count
        yield (tuple(group),)
        behind = tuple(names[place] for place in option.order)
        for others in _every(devices, mirrored, option.left, behind):
            yield (tuple(group), *others)


def _uniform(devices: Devices, mirrored: bool) -> Iterator[tuple[Counts, ...]]:
    """Groups of one size, host by host and kind by kind: for every size, order of kinds and number of positions."""
    pools = devices.pools
    kinds = list(dict.fromkeys(pool.kind for pool in pools))
    largest = max(len(pool.ranks) for pool in pools)
    hosts = sum(len(pool.ranks) == largest for pool in pools)
    inside = [size for size in range(1, largest + 1) if largest % size == 0]
    sizes = [2] if mirrored else [*inside, *(largest * number for number in range(2, hosts // 2 + 1))]
    orders = list(permutations(kinds)) if len(kinds) <= _FEW_KINDS else [tuple(kinds)]
    found: dict[tuple[Counts, ...], None] = {}
    for size in sizes if devices.groups_allowed else [1]:
        for order in orders:
            groups = [group for kind in order for group in _filled(pools, kind, size)]
            found.update(dict.fromkeys(tuple(groups[:count]) for count in range(1, len(groups) + 1)))
    yield from found


def _filled(pools: Sequence[Pool], kind: str, size: int) -> Iterator[Counts]:
    """Groups of ``size`` devices of a kind: of one host where they fit, else of several, whole but for the last."""
    counts, filled = [0] * len(pools), 0
    for number, pool in enumerate(pools):
        left = len(pool.ranks) if pool.kind == kind else 0
        while left and (size > len(pool.ranks) or left + filled >= size):
            taken = min(left, size - filled)
            counts[number] += taken
            left, filled = left - taken, filled + taken
            if filled == size:
                yield tuple(counts)
                counts, filled = [0] * len(pools), 0
