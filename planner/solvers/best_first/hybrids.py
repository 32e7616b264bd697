"""Pipelines that are known before the search begins: out of the table of paces, and those that anybody would try.

Given       the network as a chain of cuts; pools of like devices (hosts) of some kinds; sizes S of micro-batches
Try         the pipelines of the table of paces                                             ``pace_table.paced``
            segments of one kind each, in any order: p_k stages of d_k devices; a kind may be left out, so may
            devices; or stages that have devices of every kind                                            ``shapes``
            d = all / p, and powers of two below: a plan for few devices is one for many
            stages on hosts of their own, or 2, 4, ... beside one another on the same ones               ``placed``
            recomputation as it is left open, every schedule that is open

Three looks, each at fewer of them.  With M = ceil(batch / S), x = ceil(S / d), t_k(x) the whole network there and back
on a device of kind k, and a(d) the sum of a stage's gradients over its replicas:

    roughly     as the table says, or T = (p - 1) / V + M max(1 / V, n) + q a / p                         ``rough_s``
                V: sum over segments of p_k / t_k(ceil(S / d_k)); q: stages that share hosts;
                n: messages of a micro-batch, as large as they are on average, on a card in the middle

    balanced    cuts by a DP, least largest all_work + tail of a stage that memory allows, alone or with F before and B
                behind it                                                                        ``balanced_places``
                then moved one by one while this gets shorter, for all moves at once                   ``_closed_s``

                    T = max(max_s [R_s + max(G_s + I_s, ceil(M / W_s) E_s) + max(u_s, B_s)], E_0 + (M - 1) n)
                    I_s = (I + (W_last - 1) f - (W_s - 1) f_s)+ + (I - (W_s - 1) b_s)+,    I = E_s - f_s - b_s

                R_s: F and messages before s; G_s: all work of s; E_s: one micro-batch from s there and back;
                W_s: those in flight; I_s: what it waits for the first gradient, and from the last F to the last B;
                f: the longest F from s on; u_s: reduction and update; B_s: B and messages upstream; n: messages of
                a micro-batch on the fullest network card; of stages that share hosts sums come one after another
                first with the most in flight that memory allows; the best of these under every schedule ``_closest``

    simulated   as ``leaf_bound`` does (exactly, where replicas are alike); those of least T by the true simulator

How many are looked at is counted (``MOST_PACED``, ``MOST_ROUGH``, ``MOST_BALANCED``, ``MOST_TURNS``, ``MOST_ACTIONS``),
so that a plan does not depend on the clock.  A few of the table come first, whatever else there is: the first answer,
after 0.7 s of a core on 64 devices, 1.5 s on 1,024, and under a shorter limit those there is time for.  These plans
have no proof.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from itertools import islice, pairwise

import numpy as np

from planner.costs.candidate import Candidate
from planner.costs.communication.stage_transfers import across_hosts
from planner.costs.layers.cost_table import Array
from planner.costs.memory.memory_bound import kept_by
from planner.costs.stages.stage_bound import BoundedStages
from planner.ir.errors import MissingMeasurementError
from planner.ir.lazy import once, once_by
from planner.schedules import traits
from planner.solvers.best_first import policy
from planner.solvers.best_first.device_groups import Counts
from planner.solvers.best_first.graph_cuts import Numbers
from planner.solvers.best_first.hybrid_shapes import Shape, placed, shapes
from planner.solvers.best_first.leaf_bound import CAPS, Leaves, windows_of
from planner.solvers.best_first.message_bound import HandoverBounds
from planner.solvers.best_first.pace_table import MOST_TABLES, Boundary, PaceTable
from planner.solvers.best_first.pace_table import placed as columns_placed
from planner.solvers.best_first.priced_groups import GroupPrices, PricedGroup
from planner.solvers.budget import CALL_S, NUMBER_S, Budget
from planner.solvers.candidates.evaluate import Evaluation, Evaluator

MOST_PACED = 24
"""Pipelines of the table of paces that are cut, and ``MOST_ROUGH`` hybrids of like stages."""

MOST_ROUGH = 30

MOST_BALANCED = 10
"""Of these, that are looked at under every schedule."""

MOST_TURNS = 24_000
"""F and B of a stage that ``leaf_bound`` goes through, of all hybrids together."""

MOST_ACTIONS = 40_000
"""Actions that the true simulator goes through; the first hybrid is simulated whatever it has."""

MOST_CUTS = 128
"""Cuts that are told apart."""

_FIRST, _FIRST_BALANCED = 6, 2  # of the pipelines of the table, before all else
_ROUNDS = 12  # of moved cuts
_BALANCED_TAKES, _STAGE_S = 64, 1e-3  # numbers for each pair of cuts; seconds for each stage
_ONE_SCHEDULE_TAKES = 0.35  # of that, where the first schedule alone is looked at
_TURN_S = 3e-6  # of an F or B that ``leaf_bound`` goes through
_RANK_S = 1e-6  # of a candidate that is made: for each rank


@dataclass(frozen=True, slots=True, eq=False)
class Hybrid:
    """A hybrid with its cuts, under one schedule.

    Attributes:
        step_s: what ``leaf_bound`` says of it, else the closed form.
    """

    step_s: float
    space: HybridSpace
    groups: tuple[PricedGroup, ...]
    cuts: tuple[int, ...]
    schedule: str
    windows: tuple[int, ...] = ()

    @property
    def counts(self) -> tuple[Counts, ...]:
        """The devices of each stage by pool."""
        return tuple(group.counts for group in self.groups)

    def candidate(self) -> Candidate:
        """With its ranks."""
        return self.space.prices.pipeline(self.groups, self.cuts, self.schedule, self.windows)


def first_answers(evaluator: Evaluator, spaces: Sequence[HybridSpace]) -> Iterator[Evaluation]:
    """A few pipelines of least step in the table of paces, simulated: soon there, whatever else there is.

    Args:
        spaces: one for every way to cut the batch.
    """
    budget = evaluator.budget
    most_s = policy.WRITTEN * budget.left_s
    soon_said = [space for space in spaces if evaluator.rows_s(len(space.prices.micro_batches)) <= most_s]
    paced_stages = _paced_stages(soon_said or spaces[-1:], budget)
    within = budget.part(policy.FIRST_ANSWERS * budget.left_s)
    rest = budget.part(reserve_s=within.left_s)
    late, first = list[tuple[float, Stages]](), list[Stages]()
    for stages in paced_stages[:MOST_PACED]:
        candidate = _evenly_cut(*stages)
        if candidate is not None and evaluator.has_time_for(candidate, rest):
            first.append(stages)
        elif candidate is not None:
            late.append((evaluator.answer_s(candidate), stages))
        if len(first) == _FIRST:
            break
    if not first:
        first = [stages for _, stages in sorted(late, key=lambda one: one[0])[:_FIRST]]
    for space, counts in first:
        space.first.add(counts)
    return _answers(evaluator, first, _FIRST_BALANCED, within)


def _evenly_cut(space: HybridSpace, counts: Sequence[Counts]) -> Candidate | None:
    """A pipeline of such stages, to see what it takes to simulate it and to say what it does; None: it has none."""
    groups = [group for each in counts for group in islice(space.prices.quickest(each).values(), 1)]
    cuts = space.chain[np.linspace(0, len(space.chain) - 1, len(counts) + 1).astype(np.int64)]
    if len(groups) < len(counts) or (np.diff(cuts) == 0).any():
        return None
    return space.prices.pipeline(groups, tuple(cuts.tolist()), space.prices.freedom.schedules[0])


def hybrids(evaluator: Evaluator, spaces: Sequence[HybridSpace], best_s: float = float("inf")) -> Iterator[Evaluation]:
    """The most promising of all others that fit, simulated if they may take no longer than ``best_s``."""
    others = ((space, counts) for space, counts in _paced_stages(spaces, evaluator.budget) if counts not in space.first)
    paced_stages = islice(others, MOST_PACED - _FIRST)
    rough_stages = islice(_rough_stages(spaces, evaluator.budget), MOST_ROUGH)
    return _answers(evaluator, (*paced_stages, *rough_stages), MOST_BALANCED, evaluator.budget, best_s)


def _answers(
    evaluator: Evaluator, stages: Iterable[Stages], most: int, within: Budget, best_s: float = float("inf")
) -> Iterator[Evaluation]:
    """Those of shortest closed form under every schedule, as far as there is time for that, simulated."""
    balanced = list[Hybrid]()
    every = _closest(stages, within)
    in_time = islice((hybrid for hybrid in every if evaluator.has_time_for(hybrid.candidate())), most)
    for closest in list(in_time) or every[: int(best_s == np.inf)]:
        if not within.takes(balancing_s(closest.space, len(closest.groups))):
            balanced += [] if balanced else [closest]
            break
        balanced += closest.space.on(closest.counts)
    return _simulated(evaluator, most_promising(balanced, within), best_s)


def _simulated(evaluator: Evaluator, promising: Sequence[Hybrid], best_s: float) -> Iterator[Evaluation]:
    """Those that fit and take no longer than ``best_s`` and all before; without a plan one, however late."""
    actions = 0
    longer_s: dict[object, float] = {}  # by plan, what the simulator adds: about the same under any schedule
    for hybrid in promising:
        if evaluator.budget.ends(_RANK_S * len(evaluator.problem.ranks)) and best_s < np.inf:
            return
        if hybrid.step_s + longer_s.get((id(hybrid.groups), hybrid.cuts), 0.0) >= best_s:
            continue
        candidate = hybrid.candidate()
        if evaluator.unmet(candidate):
            continue
        count = evaluator.num_actions(candidate)
        if actions and actions + count > MOST_ACTIONS:
            continue
        if best_s < np.inf and not evaluator.has_time_for(candidate):
            continue
        actions += count
        evaluation = evaluator.tried(candidate, best_s)
        if evaluation is None:
            continue
        if np.isfinite(evaluation.step_s):
            longer_s[id(hybrid.groups), hybrid.cuts] = evaluation.step_s - hybrid.step_s
        if evaluation.fits and evaluation.memories:
            best_s = min(best_s, evaluation.step_s)
            yield evaluation


Stages = tuple["HybridSpace", tuple[Counts, ...]]
"""A way to cut the batch, and the devices of each stage by pool."""


def _paced_stages(spaces: Sequence[HybridSpace], budget: Budget) -> list[Stages]:
    """The pipelines of the most promising tables of paces, the shortest steps first."""
    tables = [(space.pace_table(budget), space) for space in spaces]
    tables = sorted((one for one in tables if one[0].choices), key=lambda one: one[0].choices[0].alike_s)
    pipelines = [(pipeline, space) for table, space in tables[:MOST_TABLES] for pipeline in table.pipelines]
    pipelines.sort(key=lambda one: one[0].step_s)
    stages = ((space, columns_placed(pipeline.columns, space.prices.pools)) for pipeline, space in pipelines)
    return list({(id(space), counts): (space, counts) for space, counts in stages if counts is not None}.values())


def _rough_stages(spaces: Sequence[HybridSpace], budget: Budget) -> Iterator[Stages]:
    """Hybrids of like stages that can be placed, the roughly best first."""
    rough: list[tuple[float, int, Shape, HybridSpace]] = []
    for space in spaces:
        for shape in shapes(space.prices):
            rough.append((space.rough_s(shape), len(rough), shape, space))
            budget.spend(CALL_S)
    rough.sort(key=lambda one: one[:2])
    for rough_s, _, shape, space in rough:
        if np.isfinite(rough_s):
            yield space, placed(shape, space.prices.pools) or ()


def _closest(stages: Iterable[Stages], budget: Budget) -> list[Hybrid]:
    """Those that fit, each with the cuts that are best where stages keep most, the shortest first; one at least."""
    closest = list[Hybrid]()
    for space, counts in stages:
        if not budget.takes(_ONE_SCHEDULE_TAKES * balancing_s(space, len(counts))) and closest:
            break
        hybrid = next(space.on(counts, keeps_most=True), None)
        if hybrid is not None:
            closest.append(hybrid)
    return sorted(closest, key=lambda hybrid: hybrid.step_s)


def most_promising(balanced: Sequence[Hybrid], budget: Budget) -> list[Hybrid]:
    """The same with ``leaf_bound``'s steps as far as there are turns for it; the most promising first.

    What it adds to the closed form is about the same under any schedule: so much is added where it was not asked.
    """
    longer_s: dict[object, float] = {}
    waiting = [(hybrid.step_s, 0.0, number) for number, hybrid in enumerate(balanced)]
    heapify(waiting)
    turns, bounded, rest = 0, list[Hybrid](), list[Hybrid]()
    while waiting:
        step_s, added_s, number = heappop(waiting)
        hybrid = balanced[number]
        plan, stages = (id(hybrid.groups), hybrid.cuts), len(hybrid.groups)
        count = 2 * stages * len(hybrid.space.prices.micro_batches)
        if longer_s.get(plan, 0.0) > added_s:
            added_s = longer_s[plan]
            heappush(waiting, (hybrid.step_s + added_s, added_s, number))
        elif turns + count > MOST_TURNS or not budget.takes(count * _TURN_S):
            rest.append(replace(hybrid, step_s=step_s))
        else:
            turns += count
            bounded.append(hybrid.space.simulated(hybrid))
            longer_s.setdefault(plan, bounded[-1].step_s - hybrid.step_s)
    return [hybrid for some in (bounded, rest) for hybrid in sorted(some, key=lambda hybrid: hybrid.step_s)]


def balancing_s(space: HybridSpace, num_stages: int) -> float:
    """The work of finding a pipeline's cuts, about."""
    return _BALANCED_TAKES * NUMBER_S * len(space.chain) ** 2 + _STAGE_S * num_stages


@dataclass(frozen=True, slots=True, eq=False)
class _Chain:
    """Groups that follow one another.

    Attributes:
        tables: by group, its stages by first and last place.
        boundaries: between two groups.
        beside: of stages that follow one another on the same hosts, several of them: the first, by the last.
    """

    groups: tuple[PricedGroup, ...]
    tables: tuple[BoundedStages, ...]
    boundaries: tuple[Boundary, ...]
    beside: Mapping[int, int]


@dataclass(eq=False)
class HybridSpace:
    """One way to cut the batch, and what was worked out for it.

    Attributes:
        chain: cuts that follow one another, at most ``MOST_CUTS``; places are numbers of these.
        first: devices by stage of the pipelines that were looked at before all others.
    """

    prices: GroupPrices
    links: HandoverBounds = field(init=False)
    chain: Numbers = field(init=False)
    first: set[tuple[Counts, ...]] = field(init=False, default_factory=set)
    _sample_s: float = field(init=False, default=0.0, repr=False)  # its outputs and gradients on a network card
    _host_of: list[int] = field(init=False, repr=False)  # by pool, its number

    def __post_init__(self) -> None:
        devices = self.prices.cost_model.profile.cluster.devices
        numbers = {host: number for number, host in enumerate(dict.fromkeys(device.host for device in devices))}
        self._host_of = [numbers[devices[pool.ranks[0]].host] for pool in self.prices.pools]
        self.links, cuts = HandoverBounds(self.prices), self.prices.cuts
        weight = cuts.sums(self.prices.capacity_s().min(axis=0))
        if not (np.isfinite(weight).all() and weight[-1] > 0):
            weight = np.arange(len(weight), dtype=np.float64)
        self.chain = np.array(cuts.chain(weight, MOST_CUTS))
        rate, columns = self.prices.cost_model.network.card_bytes_per_s[2 * self._host_of[0]], cuts.columns
        if len(self.prices.pools) > 1:
            moved = columns.forward_bytes + self.prices.freedom.trains * columns.backward_bytes
            self._sample_s = float(moved.mean()) / rate

    @once_by(lambda _, budget: ())
    def pace_table(self, budget: Budget) -> PaceTable:
        """Whose work is counted by ``budget``."""
        return PaceTable(self.prices, self.chain, self.boundary, budget)

    def rough_s(self, shape: Shape) -> float:
        """The step of ``shape``, roughly; infinity where a size was not measured."""
        size, count = self.prices.micro_batches[0], len(self.prices.micro_batches)
        speed = 0.0
        for kinds, stages, sizes in shape.segments:
            if sum(sizes) > size:
                return float("inf")
            for kind, each in zip(kinds, sizes, strict=True):
                trip_s = self._trip_s(kind, -(-size // sum(sizes)), sum(sizes) > 1)
                speed += stages * each / sum(sizes) / trip_s if trip_s > 0 else float("inf")
        if not speed > 0:
            return float("inf")
        period_s = max(1 / speed, size * self._moved_s(shape))
        return (shape.num_stages - 1) / speed + count * period_s + shape.beside * self._sum_s(shape)

    def _moved_s(self, shape: Shape) -> float:
        """What a sample's outputs and gradients take on the network cards of a stage in the middle."""
        if not self._sample_s:
            return 0.0
        host = max(len(pool.ranks) for pool in self.prices.pools)
        each = max(sum(sizes) for _, _, sizes in shape.segments)
        beside = max(shape.beside, host // each)
        parts = -(-shape.num_stages // beside)  # of the pipeline, on hosts of their own
        return min(1.0, (parts - 1) / 2) * self._sample_s * host / (beside * each)

    @once
    def _trip_s(self, kind: str, samples: int, shared: bool) -> float:
        with suppress(MissingMeasurementError):
            sums, freedom = self.prices.cost_model.sums(kind, samples, shared, recompute=False), self.prices.freedom
            passes = sums.least(freedom.trains, freedom.splits)
            return float(passes.forward_s[-1] + passes.back_s[-1])
        return float("inf")

    def _sum_s(self, shape: Shape) -> float:
        """The sum of gradients of a stage of the first segment, were parameters alike in all."""
        replicas = sum(shape.segments[0][2])
        if replicas < 2 or not self.prices.freedom.trains:
            return 0.0
        return float(self.prices.cost_model.least_sums_s(self.prices.problem.ranks[:replicas])[-1]) / shape.num_stages

    def on(self, stages: Sequence[Counts], *, keeps_most: bool = False) -> Iterator[Hybrid]:
        """Stages with these devices by pool as a pipeline with its cuts: under every schedule, recomputing or not.

        Args:
            keeps_most: under the schedules that keep most in flight first.
        """
        by_version = [self.prices.quickest(each) for each in stages]
        for version in by_version[0] if by_version else ():
            if all(version in groups for groups in by_version):
                yield from self._scheduled(tuple(groups[version] for groups in by_version), keeps_most)

    def _scheduled(self, groups: tuple[PricedGroup, ...], keeps_most: bool) -> Iterator[Hybrid]:
        """The groups as a pipeline under every schedule: the best cuts where least is kept, and where most is."""
        num_stages, count = len(groups), len(self.prices.micro_batches)
        kept = {
            windows or kept_by(schedule, num_stages, count): (schedule, windows)
            for schedule, windows in reversed(list(self._windows(num_stages)))
        }
        chain = _Chain(
            groups,
            tuple(map(self.table, groups)),
            tuple(self.boundary(*ends) for ends in pairwise(groups)),
            self._beside(groups),
        )
        yielded = set[tuple[int, ...]]()
        for is_most in (keeps_most, not keeps_most):
            order = sorted(kept, key=sum, reverse=is_most)  # as memory allows least, and most
            places = self._cut(chain, order[0])
            for windows in order:
                step_s = self._closed_s(chain, places, windows)[0] if places is not None else np.inf
                if not np.isfinite(step_s):
                    places = self._cut(chain, windows)
                    step_s = self._closed_s(chain, places, windows)[0] if places is not None else np.inf
                if places is None or not np.isfinite(step_s):
                    continue
                cuts = tuple(self.chain[places[0]].tolist())
                if (*cuts, *windows) not in yielded:
                    yielded.add((*cuts, *windows))
                    yield Hybrid(float(step_s), self, groups, cuts, *kept[windows])

    def _windows(self, num_stages: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The schedules that are open, those without windows first."""
        count = len(self.prices.micro_batches)
        for name in sorted(self.prices.freedom.schedules, key=lambda name: traits(name).windowed):
            for cap in CAPS if traits(name).windowed else (0,):
                yield name, windows_of(cap, (count,) * num_stages)

    @once_by(lambda _, group: (id(group.prices), group.size > 1, id(group.allowed)))
    def table(self, group: PricedGroup) -> BoundedStages:
        """The group's stages by first and last place."""
        ends = self.chain[:, None], self.chain[None, :]
        stage = group.stage(*ends)
        return replace(stage, window=np.where(self.prices.cuts.inside[ends], stage.window, 0))

    def _cut(self, chain: _Chain, kept: tuple[int, ...]) -> Numbers | None:
        """The places of the cuts, as one row; None if it does not fit."""
        stages = chain.tables
        even = [s.all_work + s.tail for s in stages]  # or as they end, if what is before and behind takes its time
        ending = [s.head[0][:, None] + s.all_work + np.maximum(s.tail, s.back[0][:, None]) for s in stages]
        fits = [s.window >= least for s, least in zip(stages, kept, strict=True)]
        starts = [
            places
            for costs in (even, ending)
            if (places := balanced_places([np.where(*each, np.inf) for each in zip(fits, costs, strict=True)]))
        ]
        if not starts:
            return None
        starts_s = self._closed_s(chain, np.array(starts), kept)
        now, now_s = np.array([starts[int(starts_s.argmin())]]), float(starts_s.min())
        for _ in range(_ROUNDS if len(stages) > 1 else 0):
            moved = np.concatenate([now + step * np.eye(now.size, dtype=np.int64)[1:-1] for step in (-1, 1)])
            moved = moved[(np.diff(moved, axis=1) > 0).all(axis=1)]
            found_s = self._closed_s(chain, moved, kept)
            if not len(moved) or found_s.min() >= now_s:
                break
            now, now_s = moved[found_s.argmin()][None, :], float(found_s.min())
        return now

    def _closed_s(self, chain: _Chain, places: Numbers, kept: tuple[int, ...]) -> Array:
        """The step by the closed form, by row of ``places``; infinite where memory does not allow ``kept``."""
        cuts, count, num_stages = self.prices.cuts, len(self.prices.micro_batches), len(chain.groups)
        tables, boundaries, beside = chain.tables, chain.boundaries, chain.beside
        at, zero = self.chain[places], np.zeros(len(places))
        ends = [(places[:, s], places[:, s + 1]) for s in range(num_stages)]
        there, back = [zero] * num_stages, [zero] * num_stages
        step_s, on_card = zero, zero
        if boundaries:
            columns = cuts.column[cuts.content[at[:, 1:-1], at[:, 2:]], at[:, :-2], at[:, 1:-1]].T
            is_handed = columns >= 0
            returns = is_handed & cuts.columns.has_gradient[columns] & self.prices.freedom.trains
            forward_bytes = np.where(is_handed, cuts.columns.forward_bytes[columns], 0.0)
            backward_bytes = np.where(returns, cuts.columns.backward_bytes[columns], 0.0)
            for s, (boundary, column) in enumerate(zip(boundaries, columns, strict=True)):
                out_s = np.where(is_handed[s], boundary.link.there[column], 0.0)
                in_s = np.where(returns[s], boundary.link.back_all[column], 0.0)
                there[s] = np.maximum(out_s, boundary.most_outputs * forward_bytes[s])
                back[s] = np.maximum(in_s, boundary.most_gradients * backward_bytes[s])
            outputs, gradients = (np.array([getattr(b, name) for b in boundaries]) for name in ("outputs", "gradients"))
            on_card = (outputs.T @ forward_bytes + gradients.T @ backward_bytes).max(axis=0)
        heads, backs = (
            [getattr(t, name)[end] for t, end in zip(tables, ends, strict=True)] for name in ("head", "back")
        )
        starts = np.cumsum([zero, *(a + c for a, c in zip(heads, there, strict=True))], axis=0)
        upstream = np.cumsum([zero, *(b + c for b, c in zip(backs, back, strict=True))], axis=0)
        trip, sums = zero, self._sums_s(chain.groups, at) if beside else []
        longest = zero  # F of the stages from here on
        for s in reversed(range(num_stages)):
            table, end = tables[s], ends[s]
            inner, ahead, longest = there[s] + trip + back[s], (kept[s] or count) - 1, np.maximum(longest, heads[s])
            trip = heads[s] + inner + backs[s]
            trips = -(-count // kept[s]) if kept[s] else 1  # answers alone keep nothing, and wait for nothing
            until_first = np.maximum(0.0, inner + ((kept[-1] or 1) - 1) * longest - ahead * heads[s])
            idle = until_first + np.maximum(0.0, inner - ahead * backs[s]) if kept[s] else zero
            busy = np.maximum(table.all_work[end] + idle, trips * trip)
            step_s = np.maximum(step_s, starts[s] + busy + np.maximum(table.tail[end], upstream[s]))
            step_s = np.where(table.window[end] >= kept[s], step_s, np.inf)
            if s in beside:
                step_s = np.maximum(step_s, starts[s] + busy + sum(sums[first] for first in range(beside[s], s + 1)))
        return np.asarray(np.maximum(step_s, trip + (count - 1) * on_card))

    def _beside(self, groups: tuple[PricedGroup, ...]) -> dict[int, int]:
        """Of stages that follow one another on the same hosts, several of them: the first, by the last."""
        hosts = [set(self._hosts(group)) for group in groups]
        first_by_last: dict[int, int] = {}
        for s in range(1, len(groups)):
            if len(hosts[s]) > 1 and hosts[s] == hosts[s - 1]:
                first_by_last[s] = first_by_last.pop(s - 1, s - 1)
        return first_by_last

    def _sums_s(self, groups: tuple[PricedGroup, ...], at: Numbers) -> list[Array]:
        """The sums of gradients, by stage."""
        own = [group.prices.least_sums_s * self.prices.freedom.trains for group in groups]
        return [sums_s[at[:, s + 1]] - sums_s[at[:, s]] for s, sums_s in enumerate(own)]

    @once_by(lambda _, source, destination: (source.counts, source.shares, destination.counts, destination.shares))
    def boundary(self, source: PricedGroup, destination: PricedGroup) -> Boundary:
        capacities = np.array(self.prices.cost_model.network.card_bytes_per_s).reshape(-1, 2)
        moved, ends = np.zeros(capacities.shape), (source, destination)  # samples that leave each host, and reach it
        samples = (group.samples[self.prices.micro_batches[0]] for group in ends)
        for host, *both in across_hosts(*samples, *map(self._hosts, ends)):
            moved[host] = both
        outputs, gradients = (moved / capacities).ravel(), (moved[:, ::-1] / capacities).ravel()
        return Boundary(self.links.between(source, destination), outputs, gradients)

    @once_by(lambda _, group: group.orders[0])
    def _hosts(self, group: PricedGroup) -> tuple[int, ...]:
        """The number of each member's host."""
        return tuple(self._host_of[pool] for pool in group.orders[0])

    def simulated(self, hybrid: Hybrid) -> Hybrid:
        """The same with what ``leaf_bound`` says of it, if that is more."""
        cuts, groups = self.prices.cuts, hybrid.groups
        handed = cuts.handed(hybrid.cuts)
        messages = np.zeros((2, len(handed), 1))
        for number, one in enumerate(handed):
            source, destination = groups[one.source], groups[one.destination]
            boundary = self.boundary(source, destination)
            most = boundary.most_outputs * one.forward_bytes, boundary.most_gradients * one.backward_bytes
            messages[:, number, 0] = np.maximum(self.links.handed(source, destination, one), most)
        ends = [(np.array([a]), np.array([b])) for a, b in pairwise(hybrid.cuts)]
        stages = [group.stage(*end) for group, end in zip(groups, ends, strict=True)]
        tails, sums = [stage.tail for stage in stages], self._sums_s(groups, np.array([hybrid.cuts]))
        for last, first in self._beside(groups).items():
            tails[last] = np.maximum(tails[last], sum(sums[first : last + 1]))
        edges = tuple((h.source, h.destination, h.has_gradient and self.prices.freedom.trains) for h in handed)
        leaves = Leaves(
            edges=edges,
            expansions=(),
            bound=np.array([hybrid.step_s]),
            heads=np.array([(stage.head, stage.slow_head) for stage in stages]),
            backs=np.array([(stage.back, stage.slow_back) for stage in stages]),
            adds=np.array([stage.adds for stage in stages]),
            tails=np.array(tails),
            there=messages[0],
            back=messages[1],
            max_in_flight=np.array([stage.window for stage in stages]),
            num_counted=self.prices.num_counted,
        )
        bound_s = leaves.bounds(hybrid.schedule, hybrid.windows, len(self.prices.micro_batches), np.arange(1))
        return replace(hybrid, step_s=float(bound_s[0]))


def balanced_places(costs: Sequence[Array]) -> list[int] | None:
    """Places of a chain's cuts, both ends included, such that the largest cost of a stage is least; None if infinite.

    Args:
        costs: by stage, of first and last place.
    """
    above = np.triu(np.ones(costs[0].shape, dtype=bool), 1)
    best, chosen = np.where(above, costs[-1], np.inf)[:, -1], []
    for cost in reversed(costs[:-1]):
        both = np.maximum(np.where(above, cost, np.inf), best[None, :])
        chosen.append(both.argmin(axis=1))
        best = both.min(axis=1)
    places = [0]
    for choice in reversed(chosen):
        places.append(int(choice[places[-1]]))
    return [*places, len(above) - 1] if np.isfinite(best[0]) else None
