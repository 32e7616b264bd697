"""Plans near the best one, for searches that have no proof in time: a few neighbouring stages solved again.

Given      a pipeline that was simulated; each of these changes a part of it and leaves the rest as it is
Windows    one to three neighbouring stages: their devices, and idle ones, as stages, as many, one fewer or one more,
           those first where few change hands                                                   ``_Window._divisions``
           between them cuts by a dynamic programme: the least largest work and tail of a stage     ``_Window.solved``
Versions   a stage computes its activations again, or no longer                                           ``_versions``
Replay     the step of each of these, many at once (``leaf_bound``); for what messages take longer that share network
           cards, as much is added as the simulator last did to the same stages with other cuts           ``_replayed``
Cuts       of the few of least step: one beside the busiest stages, or two that follow one another, to an ideal near
           by, as long as the replay gets shorter                                                            ``_recut``
Simulate   these with and without other cuts, as they come; the first that is shorter than the pipeline takes its place

until none is, or the work given is spent (``Repair.improved``).  Windows come in the order of what even stages would
take off their largest; each is first cut anew, then divided in a few ways, then in many.

Where memory is too small for the samples that members of a stage have, some go to others of another kind or memory
size, whether there is a proof or not                                                                ``made_to_fit``
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, pairwise, permutations
from math import inf

import numpy as np

from planner.costs.candidate import Candidate, Recomputes
from planner.costs.layers.cost_table import Array
from planner.costs.shards.device_mesh import proportional
from planner.costs.stages.stage_bound import BoundedStages
from planner.ir.lazy import once, once_by
from planner.ir.problem import Problem
from planner.solvers.best_first.device_groups import Counts
from planner.solvers.best_first.graph_cuts import Flags, Handed, Numbers
from planner.solvers.best_first.leaf_bound import Leaves, edges_of, messages_of, stages_of, windows_of
from planner.solvers.best_first.like_stages import ColumnDevices, balanced_places, placed
from planner.solvers.best_first.message_bound import handovers_of
from planner.solvers.best_first.priced_groups import GroupPrices, PricedGroup, RunMode, Version
from planner.solvers.budget import CALL_S, NUMBER_S, Budget
from planner.solvers.candidates.candidate import DevicePool
from planner.solvers.candidates.choose import ROUNDING
from planner.solvers.candidates.evaluate import Evaluation, Evaluator
from planner.solvers.candidates.feasibility import stages_usable

_WIDEST = 3  # stages of a window
_DIVISIONS = (1, 8, 40)  # of a window's devices: the first is as they are
_PLACES = 24  # to cut in a window
_FEW_DEVICES = 8  # of which any number may be a stage
_BUSIEST = 3  # stages whose cuts are moved
_MOVES = (-2, -1, 1, 2)  # of a cut, in ideals by work
_KEPT = 6  # solutions of least step that are cut anew
_ROUNDS = 4  # of that: what the replay gains further on the simulator seldom does
_SIMULATED = 4  # of these, with and without that
_TURN_S = 8e-6  # of an F or B that is replayed, whatever it is of
_TURN_OF_ROW_S = 1e-8  # for each pipeline
_ROW_S = 2e-4  # to begin with a pipeline
_NUMBERS_OF_A_STAGE = 40  # that are looked at between two cuts


@dataclass(frozen=True, eq=False)
class SolvedPipeline:
    """A pipeline, and its step by the replay."""

    step_s: float
    prices: GroupPrices
    groups: tuple[PricedGroup, ...]
    cuts: tuple[int, ...]
    schedule: str
    windows: tuple[int, ...]

    @property
    def structure(self) -> object:
        """Equal for the same stages between any cuts."""
        return id(self.prices), tuple((group.counts, group.version) for group in self.groups)

    @property
    def key(self) -> object:
        """Equal for the same pipeline."""
        return self.structure, self.cuts, self.schedule, self.windows

    @once
    def stages(self) -> tuple[BoundedStages, ...]:
        """What its stages take."""
        ends = pairwise(self.cuts)
        return tuple(group.stage(np.array(a), np.array(b)) for group, (a, b) in zip(self.groups, ends, strict=True))

    def work_s(self) -> Array:
        """Of each stage."""
        return np.array([float(stage.all_work_s) for stage in self.stages()])

    def most_kept(self) -> list[int]:
        """Micro-batches that memory lets each stage keep."""
        return [min(int(stage.window), self.prices.num_microbatches) for stage in self.stages()]

    def kept_again(self) -> SolvedPipeline:
        """With windows of the same sort for its stages."""
        if not self.windows:
            return self
        cap = -(-(self.windows[0] - 1) // max(1, len(self.windows) - 1))
        return replace(self, windows=windows_of(max(1, cap), self.most_kept()))


@dataclass(eq=False)
class Repair:
    """Pipelines made shorter; none is simulated twice.

    Attributes:
        every_prices: of each way to cut the batch.
    """

    evaluator: Evaluator
    every_prices: Sequence[GroupPrices]
    _added_s: dict[object, float] = field(init=False, default_factory=dict, repr=False)  # to replays, by structure
    _tried: set[Candidate] = field(init=False, default_factory=set, repr=False)

    def improved(self, best: Evaluation, within: Budget) -> Evaluation:
        """The plan that solving parts of ``best`` again leads to."""
        shorter: Evaluation | None = best
        while shorter is not None:
            best = shorter
            shorter = self._shorter(best, within)
        return best

    def _shorter(self, best: Evaluation, within: Budget) -> Evaluation | None:
        """A plan near ``best`` that takes less; None where none is found."""
        now = next(iter(self._replayed(self._read(best.candidate), within)), None)
        if now is None:
            return None
        usual_s = self._added_s[now.structure] = best.step_s - now.step_s

        def about_s(solution: SolvedPipeline) -> float:
            return solution.step_s + self._added_s.get(solution.structure, usual_s)

        for near in self._near(now, within):
            few = sorted(self._replayed(near, within), key=about_s)[:_KEPT]
            recut = sorted(self._recut(few, within.part(within.left_s / 2)), key=about_s)
            both = {solution.key: solution for pair in zip(recut, few, strict=True) for solution in pair}
            for solution in list(both.values())[:_SIMULATED]:
                known_s = now.step_s if solution.structure == now.structure else best.step_s
                candidate = solution.prices.pipeline(
                    solution.groups, solution.cuts, solution.schedule, solution.windows
                )
                if solution.step_s >= known_s * (1 - ROUNDING) or candidate in self._tried:
                    continue
                if within.ends(CALL_S) or not self.evaluator.has_time_for(candidate, within):
                    return None
                self._tried.add(candidate)
                other = None if self.evaluator.unmet(candidate) else _evaluated(self.evaluator, candidate, best.step_s)
                if other is not None and other.fits and other.step_s < best.step_s * (1 - ROUNDING):
                    return other
                if other is not None:
                    self._added_s[solution.structure] = other.step_s - solution.step_s
        return None

    def _read(self, candidate: Candidate) -> list[SolvedPipeline]:
        """The candidate as a solution; none where it is no pipeline of priced groups between these cuts."""
        has_own = any((*candidate.options, *candidate.blocks, *candidate.spans)) or bool(candidate.axis_parts)
        prices = next((each for each in self.every_prices if each.micro_batches == candidate.micro_batches), None)
        if candidate.positions or has_own or prices is None:
            return []
        number = {_key(members > 0): cut for cut, members in enumerate(prices.cuts.members)}
        stage_of = np.array(candidate.stage_of)
        cuts = [number.get(_key(stage_of < stage), -1) for stage in range(candidate.num_stages + 1)]
        recompute = candidate.recompute or (Recomputes.NOTHING,) * candidate.num_stages
        groups = list[PricedGroup]()
        for ranks, own, shares in zip(candidate.groups, recompute, candidate.shares, strict=True):
            counts = tuple(len(set(pool.ranks) & set(ranks)) for pool in prices.pools)
            same = (group for group in prices.versions(counts) if group.version == Version(RunMode(own), shares))
            group = next(same, prices.quickest(counts).get(RunMode(own)))
            groups += [] if group is None else [group]
        if min(cuts) < 0 or len(groups) < candidate.num_stages:
            return []
        return [SolvedPipeline(inf, prices, tuple(groups), tuple(cuts), candidate.schedule, candidate.windows)]

    def _near(self, now: SolvedPipeline, within: Budget) -> Iterator[list[SolvedPipeline]]:
        """Pipelines that differ in one of the ways above, from few to many."""
        windows = _windows(now)
        for most in _DIVISIONS:
            solved = (_Window(now, *ends, within).solved(most) for ends in windows if not within.ends(CALL_S))
            yield [now, *(solution for some in solved for solution in some)]
            if most == 1:
                yield list(_versions(now))

    def _recut(self, solutions: list[SolvedPipeline], within: Budget) -> list[SolvedPipeline]:
        """The same, each with its cuts moved as long as the replay gets shorter."""
        done = list[SolvedPipeline]()
        moving = solutions
        for _ in range(_ROUNDS):
            if not moving or within.is_over:
                break
            rows = [(number, other) for number, solution in enumerate(moving) for other in _moved(solution)]
            best = list(moving)
            steps_s = self._steps_s([other for _, other in rows], within)
            for (number, other), step_s in zip(rows, steps_s, strict=True):
                if step_s < best[number].step_s * (1 - ROUNDING):
                    best[number] = replace(other, step_s=step_s)
            done += [one for one, other in zip(moving, best, strict=True) if other is one]
            moving = [other for one, other in zip(moving, best, strict=True) if other is not one]
        return [*done, *moving]

    def _replayed(self, solutions: Iterable[SolvedPipeline], within: Budget) -> list[SolvedPipeline]:
        """Those that fit, each once, with their steps."""
        once_each = list({solution.key: solution for solution in solutions}.values())
        steps_s = self._steps_s(once_each, within)
        replayed = (replace(solution, step_s=step_s) for solution, step_s in zip(once_each, steps_s, strict=True))
        return [solution for solution in replayed if np.isfinite(solution.step_s)]

    def _steps_s(self, solutions: list[SolvedPipeline], within: Budget) -> list[float]:
        """Of each, infinite where it does not fit: together what may be replayed so."""
        alike: dict[object, list[int]] = {}
        handed = [solution.prices.cuts.handed(solution.cuts) for solution in solutions]
        for number, one in enumerate(solutions):
            trains = one.prices.freedom.trains
            edges = set(edges_of(handed[number], trains))
            is_chain = edges.issuperset((stage, stage + 1, trains) for stage in range(len(one.groups) - 1))
            sort = len(one.groups) if is_chain else frozenset(edges)
            alike.setdefault((id(one.prices), sort, one.schedule, one.windows), []).append(number)
        steps_s = [inf] * len(solutions)
        for numbers in alike.values():
            together = [solutions[number] for number in numbers], [handed[number] for number in numbers]
            for number, step_s in zip(numbers, _together_s(*together, within).tolist(), strict=True):
                steps_s[number] = step_s
        return steps_s


def _together_s(alike: list[SolvedPipeline], handed: list[tuple[Handed, ...]], within: Budget) -> Array:
    """The steps of pipelines of as many stages under one schedule, of which one order is that of all."""
    first = alike[0]
    prices = first.prices
    count = prices.num_microbatches
    within.spend(2 * (_TURN_S + _TURN_OF_ROW_S * len(alike)) * len(first.groups) * count + _ROW_S * len(alike))
    edges = tuple(sorted(set(edges_of(chain.from_iterable(handed), prices.freedom.trains))))
    pipelines = [(solution.groups, solution.cuts) for solution in alike]
    stages = stages_of(pipelines)
    ended = replace(stages, tail_s=np.maximum(stages.tail_s, _sums_s(alike, stages.card_s)))
    messages_s = messages_of(handovers_of(prices), pipelines, handed, edges)
    leaves = Leaves(edges, (), prices.num_counted, np.zeros(len(alike)), ended, messages_s)
    steps_s = leaves.bounds(first.schedule, first.windows, count, np.arange(len(alike)))
    least = np.array(first.windows or (1,))[:, None]
    return np.where((stages.window >= least).all(axis=0), steps_s, inf)


def _sums_s(alike: list[SolvedPipeline], card_s: Array) -> Array:
    """``[stages, pipelines]``: until cards have carried sums of gradients: those of stages that share hosts in turn."""
    hosts_of = handovers_of(alike[0].prices).hosts
    sums_s = card_s.copy()
    for row, solution in enumerate(alike):
        hosts = [{hosts_of[pool] for pool in group.orders[0]} for group in solution.groups]
        for stage in range(1, len(hosts)):
            if hosts[stage] == hosts[stage - 1]:
                sums_s[stage, row] += sums_s[stage - 1, row]
    return sums_s


def _key(flags: Flags) -> bytes:
    return np.packbits(flags).tobytes()


def _versions(now: SolvedPipeline) -> Iterator[SolvedPipeline]:
    for stage, group in enumerate(now.groups):
        for (recompute, _), other in now.prices.quickest(group.counts).items():
            if recompute != group.recompute:
                yield replace(now, groups=(*now.groups[:stage], other, *now.groups[stage + 1 :])).kept_again()


def _windows(now: SolvedPipeline) -> list[tuple[int, int]]:
    """First stages and those after the last, the most promising first."""
    work_s = now.work_s()
    count = len(now.groups)
    spans = [(a, b) for a in range(count) for b in range(a + 1, min(a + _WIDEST, count) + 1)]
    return sorted(spans, key=lambda span: float(work_s[slice(*span)].mean() - work_s[slice(*span)].max()))


@dataclass(frozen=True, eq=False)
class _Window:
    """Neighbouring stages of a pipeline, to be solved again: those from ``first`` to before ``last``."""

    now: SolvedPipeline
    first: int
    last: int
    within: Budget

    def solved(self, most: int) -> Iterator[SolvedPipeline]:
        """The pipeline with other stages in place of these, of each division the best cuts."""
        now = self.now
        for counts in self._divisions(most):
            groups = self._groups(counts)
            at = balanced_places(list(map(self._cost, groups))) if groups else None
            if at is not None:
                every = (*now.groups[: self.first], *groups, *now.groups[self.last :])
                cuts = (*now.cuts[: self.first], *self._places[at].tolist(), *now.cuts[self.last + 1 :])
                solution = replace(now, groups=every, cuts=cuts)
                yield solution if len(groups) == len(self._own) else solution.kept_again()

    @property
    def _own(self) -> tuple[PricedGroup, ...]:
        return self.now.groups[self.first : self.last]

    @cached_property
    def _places(self) -> Numbers:
        """Cuts that its stages may have, its ends included; some of them, spread evenly, where there are many."""
        inside = self.now.prices.cuts.inside
        begin = self.now.cuts[self.first]
        end = self.now.cuts[self.last]
        between = np.array([begin, *np.flatnonzero(inside[begin] & inside[:, end]), end])
        spread = np.linspace(0, len(between) - 1, min(_PLACES, len(between)))
        return between[np.round(spread).astype(np.int64)]

    @once_by(lambda _, group: group.alike)
    def _cost(self, group: PricedGroup) -> Array:
        """Work and tail of its stages, by first and last place; infinite where there is none."""
        self.within.spend(NUMBER_S * _NUMBERS_OF_A_STAGE * len(self._places) ** 2)
        ends = self._places[:, None], self._places[None, :]
        stage = group.stage(*ends)
        possible = self.now.prices.cuts.inside[ends] & (stage.window > 0)
        return np.where(possible, stage.all_work_s + stage.tail_s, inf)

    def _groups(self, division: tuple[Counts, ...]) -> tuple[PricedGroup, ...]:
        """Stages on these devices, which recompute what those before them did; empty if one cannot be priced."""
        own = self._own
        modes = [own[stage * len(own) // len(division)].version.mode for stage in range(len(division))]
        quickest = map(self.now.prices.quickest, division)
        groups = [each.get(mode) for each, mode in zip(quickest, modes, strict=True)]
        return tuple(group for group in groups if group is not None) if all(groups) else ()

    def _divisions(self, most: int) -> list[tuple[Counts, ...]]:
        """How its devices, and idle ones, may be stages: by pool, of each.

        As they are and in other orders, then on other hosts, then those where the fewest change hands.
        """
        divisions = dict.fromkeys(permutations(group.counts for group in self._own))
        if len(divisions) < most:
            pools = self._open_pools
            for division in self._regrouped(pools, most):
                by_pool = placed([ColumnDevices(tuple(devices)) for devices in division], pools)
                divisions |= {} if by_pool is None else {by_pool: None}
        return list(divisions)[:most]

    @property
    def _open_pools(self) -> list[DevicePool]:
        """What no other stage has of each pool."""
        pools = self.now.prices.pools
        others = (*self.now.groups[: self.first], *self.now.groups[self.last :])
        used = np.sum([(0,) * len(pools), *(group.counts for group in others)], axis=0).tolist()
        return [replace(pool, ranks=pool.ranks[count:]) for pool, count in zip(pools, used, strict=True)]

    def _regrouped(self, pools: list[DevicePool], most: int) -> list[list[list[int]]]:
        """Divisions of as many stages, one fewer or one more: of each by kind, those first where few change hands."""
        prices = self.now.prices
        kinds = list(prices.devices_by_kind())
        of_kind = np.array([[pool.kind == kind for kind in kinds] for pool in pools], dtype=np.int64)
        before = np.array([group.counts for group in self._own]) @ of_kind
        limits = np.array([len(pool.ranks) for pool in pools]) @ of_kind
        sizes = _sizes(before, limits, max(len(pool.ranks) for pool in prices.pools))
        sizes = sizes[sizes.sum(axis=1) <= (prices.micro_batches[0] if prices.freedom.may_replicate else 1)]
        changed = list[tuple[float, list[list[int]]]]()
        for number in range(max(1, len(before) - 1), len(before) + 2):
            stages = sizes[np.indices((len(sizes),) * number).reshape(number, -1).T]
            total = stages.sum(axis=1)
            stages = stages[(total <= limits).all(axis=1) & (total.sum(axis=1) >= before.sum())]
            moved = _moved_devices(before, stages)
            few = np.argsort(moved, kind="stable")[:most]
            changed += zip(moved[few].tolist(), stages[few].tolist(), strict=True)
        return [division for _, division in sorted(changed, key=lambda one: one[0])[:most]]


def _moved_devices(before: Numbers, divisions: Numbers) -> Array:
    """How many change hands, about, where stages with devices ``before`` (by kind) become those of each division."""
    at = np.arange(1, divisions.shape[1] + 1) * len(before) / divisions.shape[1]
    so_far = [np.interp(at, np.arange(len(before) + 1), np.cumsum([0, *each])) for each in before.T]
    moved: Array = np.abs(np.cumsum(divisions, axis=1) - np.stack(so_far, axis=1)).sum(axis=(1, 2))
    return moved


def _sizes(own: Numbers, limits: Numbers, host: int) -> Numbers:
    """Of stages, by kind of device: as they are, two together; half, twice, a little more or less of any kind."""
    sizes = [*map(tuple, own), *map(tuple, own[:-1] + own[1:])]
    for total in sorted({int(size.sum()) for size in own}):
        unit = host if total > host else 1
        near = total, total // 2, 2 * total, total - unit, total + unit
        for size in near if total > _FEW_DEVICES else range(1, _FEW_DEVICES + 1):
            sizes += [tuple(size * (kind == other) for other in range(len(limits))) for kind in range(len(limits))]
    return np.array([size for size in dict.fromkeys(sizes) if sum(size) > 0 and (np.array(size) <= limits).all()])


def _moved(now: SolvedPipeline) -> Iterator[SolvedPipeline]:
    """With a cut beside one of the busiest stages, or two that follow one another, at an ideal near by."""
    cuts = now.cuts
    prices = now.prices
    order = np.argsort(prices.cuts.sums(prices.capacity_s().min(axis=0)), kind="stable")
    place = np.argsort(order)
    busiest = set(np.argsort(-now.work_s(), kind="stable")[:_BUSIEST].tolist())
    spans = [(first, last) for first in range(1, len(cuts) - 1) for last in (first, first + 1) if last < len(cuts) - 1]
    for first, last in spans:
        for step in _MOVES if busiest & {first - 1, first, last - 1, last} else ():
            moved = place[list(cuts[first : last + 1])] + step
            if moved.min() > 0 and moved.max() < len(order) - 1:
                other = (*cuts[:first], *order[moved].tolist(), *cuts[last + 1 :])
                if all(prices.cuts.inside[ends] for ends in pairwise(other)):
                    yield replace(now, cuts=other)


def _evaluated(evaluator: Evaluator, candidate: Candidate, known_s: float = inf) -> Evaluation | None:
    """None where some share cannot be used, or the candidate not priced."""
    is_usable = stages_usable(evaluator.problem, evaluator.cost_model, candidate)
    return evaluator.tried(candidate, known_s) if is_usable else None


_MOST_TURNS = 12


def made_to_fit(evaluator: Evaluator, candidate: Candidate, evaluation: Evaluation) -> Evaluation:
    """The candidate's evaluation, or that of one with fewer samples where memory is too small, if that may be.

    Members of one kind and memory size get no more than so much of what is too much as fits in proportion; the others
    of the stage share the rest in proportion to what they have.
    """
    devices = evaluator.problem.cluster.devices
    full = set[int]()
    for _ in range(_MOST_TURNS):
        rank = evaluation.excess_rank
        if rank is None:
            break
        stage = next(stage for stage, ranks in enumerate(candidate.groups) if rank in ranks)
        ranks = candidate.groups[stage]
        shares = candidate.shares[stage]
        if not _is_open(evaluator.problem, candidate, stage):
            break
        kinds = [(devices[member].kind, devices[member].memory_bytes) for member in ranks]
        mine = kinds[ranks.index(rank)]
        own = shares[ranks.index(rank)]
        most = min(own - 1, int(own / evaluator.excess(evaluation)))
        full |= {member for member, kind in zip(ranks, kinds, strict=True) if kind == mine}
        left = [min(share, most) if kind == mine else share for share, kind in zip(shares, kinds, strict=True)]
        takers = [n for n, member in enumerate(ranks) if member not in full]
        if most < 1 or not takers:
            break
        more = proportional(sum(shares) - sum(left), [shares[n] for n in takers])
        for n, extra in zip(takers, more, strict=True):
            left[n] += extra
        candidate = _with_shares(candidate, stage, tuple(left))
        other = _evaluated(evaluator, candidate) if evaluator.has_time_for(candidate) else None
        if other is None:
            break
        evaluation = other
    return evaluation


def _is_open(problem: Problem, candidate: Candidate, stage: int) -> bool:
    """Whether the stage has shares of samples, and may have others."""
    size = max(candidate.micro_batches)
    if sum(candidate.shares[stage]) != size or candidate.has_own_options(stage):
        return False
    devices = (problem.cluster.devices[rank] for rank in candidate.groups[stage])
    return len({(device.kind, device.memories) for device in devices}) > 1


def _with_shares(candidate: Candidate, stage: int, shares: tuple[int, ...]) -> Candidate:
    return replace(candidate, shares=(*candidate.shares[:stage], shares, *candidate.shares[stage + 1 :]))
