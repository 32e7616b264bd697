"""The first answers: pipelines of like stages, cut, put under schedules, and simulated.

Given       for every size of micro-batches pipelines of like stages, by devices alone                    ``LikeStages``
Choose      cuts, a schedule with its windows, and recomputation as it is left open

Three looks, each at fewer of them:

    cut         by a DP, least largest work and tail of a stage that memory allows, alone or with F before and B
                after it                                                                        ``balanced_places``
                then moved one by one while the recurrence says less, for all moves at once              ``_steps_s``
                first with some micro-batches in flight, not the most; the best of these under every schedule
    replayed    as ``leaf_bound`` does (exactly, where replicas are alike)                               ``_replayed``
    simulated   those of least step, by the true simulator

A message takes what it takes alone, or its part of the load of its channel or network card; windows are how many
micro-batches memory lets each stage keep.

How many are looked at is counted (``MOST_PIPELINES``, ``MOST_SCHEDULED``, ``MOST_TURNS``, ``MOST_ACTIONS``), so that a
plan does not depend on the clock.  A few come before all else: the first answer, after 0.7 s of a core on 64 devices,
1.5 s on 1,024, and under a shorter limit those there is time for.  These plans have no proof.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import chain, islice, pairwise
from math import inf
from typing import Any

import numpy as np

from planner.costs.candidate import Candidate
from planner.costs.layers.cost_table import Array
from planner.costs.memory.memory_bound import kept_by
from planner.costs.stages.stage_bound import BoundedStages, only
from planner.ir.schedule import Pipeline, StageGraph, Windows
from planner.schedules import max_in_flight, traits
from planner.solvers.best_first import policy
from planner.solvers.best_first.device_groups import Counts
from planner.solvers.best_first.graph_cuts import Flags, Numbers
from planner.solvers.best_first.leaf_bound import CAPS, Leaves, cards_of, edges_of, messages_of, stages_of, windows_of
from planner.solvers.best_first.like_stages import LikeStages, balanced_places, placed
from planner.solvers.best_first.message_bound import HandoverBound
from planner.solvers.best_first.priced_groups import PricedGroup
from planner.solvers.best_first.recurrence import Labels, across, alone, prepend, rounds_of, waits_of
from planner.solvers.budget import NUMBER_S, Budget
from planner.solvers.candidates.evaluate import Evaluation, Evaluator

MOST_PIPELINES = 24
"""That are cut."""

MOST_SPACES = 4
"""Ways to cut the batch that they are of, the most promising ones."""

MOST_SCHEDULED = 10
"""Of these, that are looked at under every schedule."""

MOST_TURNS = 24_000
"""F and B of a stage that ``leaf_bound`` goes through, of all of them together."""

MOST_ACTIONS = 40_000
"""Actions that the true simulator goes through; the first pipeline is simulated whatever it has."""

_FIRST = 6  # before all else
_FIRST_SCHEDULED = 3
_ROUNDS = 12  # of moved cuts
_PAIR_TAKES = 10  # of each stage that is cut: numbers for each pair of cuts
_STAGE_S = 1e-3  # and seconds
_ONE_SCHEDULE_TAKES = 0.35  # of that, where the first schedule alone is looked at
_TURN_S = 5e-6  # of an F or B that ``leaf_bound`` goes through
_RANK_S = 1e-6  # of a candidate that is made: for each rank

Stages = tuple[LikeStages, tuple[Counts, ...]]
"""A way to cut the batch, and the devices of each stage by pool."""


@dataclass(frozen=True, slots=True, eq=False)
class CutPipeline:
    """Stages with their cuts, under one schedule.

    Attributes:
        step_s: what ``leaf_bound`` says of it, else the recurrence.
    """

    step_s: float
    space: LikeStages
    groups: tuple[PricedGroup, ...]
    cuts: tuple[int, ...]
    schedule: str
    windows: Windows = ()

    @property
    def counts(self) -> tuple[Counts, ...]:
        """The devices of each stage by pool."""
        return tuple(group.counts for group in self.groups)

    def candidate(self) -> Candidate:
        """With its ranks."""
        return self.space.prices.pipeline(self.groups, self.cuts, self.schedule, self.windows)


@dataclass(eq=False)
class FirstAnswers:
    """What pipelines of like stages come to.

    Attributes:
        spaces: one for every way to cut the batch.
    """

    evaluator: Evaluator
    spaces: Sequence[LikeStages] = ()
    _looked_at: set[tuple[int, tuple[Counts, ...]]] = field(init=False, default_factory=set, repr=False)

    def soon(self) -> Iterator[Evaluation]:
        """A few of least step, about, simulated: soon there, whatever else there is.

        Where memory is too small for all of them, the next few.
        """
        evaluator = self.evaluator
        budget = self.evaluator.budget
        most_s = policy.WRITTEN * budget.left_s
        soon_said = [space for space in self.spaces if evaluator.rows_work_s(space.prices.num_microbatches) <= most_s]
        within = budget.part(policy.FIRST_ANSWERS * budget.left_s)
        in_time = self._in_time(_promising(soon_said or self.spaces[-1:]), budget.part(reserve_s=within.left_s))
        while some := list(islice(in_time, _FIRST)):
            self._looked_at |= {(id(space), counts) for space, counts in some}
            fits = False
            for evaluation in self._simulated(_closest(some, within), _FIRST_SCHEDULED, within):
                fits = True
                yield evaluation
            if fits or within.is_over:
                break

    def _in_time(self, spaces: Sequence[LikeStages], within: Budget) -> Iterator[Stages]:
        """Those there is time to simulate, of the most promising ways to cut the batch first; else the soonest said."""
        late = list[tuple[float, Stages]]()
        has_time = False
        for number, stages in enumerate(chain(_most_alike(spaces[:MOST_SPACES]), _most_alike(spaces[MOST_SPACES:]))):
            if number == MOST_PIPELINES and not has_time:
                break
            candidate = _evenly_cut(*stages)
            if candidate is not None and self.evaluator.has_time_for(candidate, within):
                has_time = True
                yield stages
            elif candidate is not None:
                late.append((self.evaluator.answer_work_s(candidate), stages))
        if not has_time:
            yield from (stages for _, stages in sorted(late, key=lambda one: one[0]))

    def others(self, best_s: float = inf) -> Iterator[Evaluation]:
        """The most promising of all others that fit, simulated if they may take no longer than ``best_s``."""
        budget = self.evaluator.budget
        every = [] if budget.is_over else _most_alike(_promising(self.spaces)[:MOST_SPACES])
        others = [(space, counts) for space, counts in every if (id(space), counts) not in self._looked_at]
        closest = _closest(others[: MOST_PIPELINES - _FIRST], budget)
        return self._simulated(closest, MOST_SCHEDULED, budget, best_s)

    def _simulated(
        self, closest: Sequence[CutPipeline], most: int, within: Budget, best_s: float = inf
    ) -> Iterator[Evaluation]:
        """Those of shortest step under every schedule, as far as there is time for that."""
        in_time = (pipeline for pipeline in closest if self.evaluator.has_time_for(pipeline.candidate()))
        scheduled = list(islice(in_time, most)) or list(closest[: int(best_s == inf)])
        for one in [*scheduled]:
            if not within.takes(_cut_s(one.space, len(one.groups))):
                break
            scheduled += islice(pipelines_on(one.space, one.counts), 1, None)
        return self._evaluated(most_promising(scheduled, within), best_s)

    def _evaluated(self, promising: Sequence[CutPipeline], best_s: float) -> Iterator[Evaluation]:
        """Those that fit and take no longer than ``best_s`` and all before; without a plan one, however late."""
        evaluator = self.evaluator
        actions = 0
        longer_s: dict[object, float] = {}  # by plan, what the simulator adds: about the same under any schedule
        for pipeline in promising:
            if evaluator.budget.ends(_RANK_S * len(evaluator.problem.ranks)) and best_s < inf:
                return
            if pipeline.step_s + longer_s.get((id(pipeline.groups), pipeline.cuts), 0.0) >= best_s:
                continue
            candidate = pipeline.candidate()
            if evaluator.unmet(candidate):
                continue
            count = evaluator.num_actions(candidate)
            if actions and actions + count > MOST_ACTIONS:
                continue
            if best_s < inf and not evaluator.has_time_for(candidate):
                continue
            actions += count
            evaluation = evaluator.tried(candidate, best_s)
            if evaluation is None:
                continue
            if np.isfinite(evaluation.step_s):
                longer_s[id(pipeline.groups), pipeline.cuts] = evaluation.step_s - pipeline.step_s
            if evaluation.fits and evaluation.memories:
                best_s = min(best_s, evaluation.step_s)
                yield evaluation


def _promising(spaces: Sequence[LikeStages]) -> list[LikeStages]:
    """Ways to cut the batch, the most promising first."""
    return sorted((space for space in spaces if space.choices), key=lambda space: space.choices[0].alike_s)


def _most_alike(spaces: Sequence[LikeStages]) -> Iterator[Stages]:
    """The pipelines of ways to cut the batch, the shortest steps first, each once."""
    pipelines = [(pipeline, space) for space in spaces for pipeline in space.pipelines]
    pipelines.sort(key=lambda one: one[0].step_s)
    stages = ((space, placed(pipeline.columns, space.prices.pools)) for pipeline, space in pipelines)
    yield from {(id(space), counts): (space, counts) for space, counts in stages if counts is not None}.values()


def _evenly_cut(space: LikeStages, counts: Sequence[Counts]) -> Candidate | None:
    """A pipeline of such stages, to see what it takes to simulate it and to say what it does; None: it has none."""
    groups = [group for each in counts for group in islice(space.prices.quickest(each).values(), 1)]
    cuts = space.cuts[np.linspace(0, len(space.cuts) - 1, len(counts) + 1).astype(np.int64)]
    if len(groups) < len(counts) or (np.diff(cuts) == 0).any():
        return None
    return space.prices.pipeline(groups, tuple(cuts.tolist()), space.prices.freedom.schedules[0])


def _cut_s(space: LikeStages, num_stages: int) -> float:
    """The work of finding a pipeline's cuts under every schedule, about."""
    return num_stages * (_PAIR_TAKES * NUMBER_S * len(space.cuts) ** 2 + _STAGE_S)


def _closest(stages: Iterable[Stages], budget: Budget) -> list[CutPipeline]:
    """Those that fit, each under the schedule that is looked at first, the shortest first; one at least."""
    closest = list[CutPipeline]()
    for space, counts in stages:
        if not budget.takes(_ONE_SCHEDULE_TAKES * _cut_s(space, len(counts))) and closest:
            break
        closest += islice(pipelines_on(space, counts), 1)
    return sorted(closest, key=lambda pipeline: pipeline.step_s)


def most_promising(pipelines: Sequence[CutPipeline], budget: Budget) -> list[CutPipeline]:
    """The same with ``leaf_bound``'s steps as far as there are turns for it; the most promising first.

    What it adds to the recurrence is about the same under any schedule: so much is added where it was not asked.
    """
    longer_s: dict[object, float] = {}
    waiting = [(pipeline.step_s, 0.0, number) for number, pipeline in enumerate(pipelines)]
    heapify(waiting)
    turns = 0
    replayed = list[CutPipeline]()
    rest = list[CutPipeline]()
    while waiting:
        step_s, added_s, number = heappop(waiting)
        pipeline = pipelines[number]
        plan = (id(pipeline.groups), pipeline.cuts)
        stages = len(pipeline.groups)
        count = 2 * stages * pipeline.space.prices.num_microbatches
        if longer_s.get(plan, 0.0) > added_s:
            added_s = longer_s[plan]
            heappush(waiting, (pipeline.step_s + added_s, added_s, number))
        elif turns + count > MOST_TURNS or not budget.allows(count * _TURN_S):
            rest.append(replace(pipeline, step_s=step_s))
        else:
            turns += count
            budget.spend(_STAGE_S * stages)
            replayed.append(_replayed(pipeline))
            longer_s.setdefault(plan, replayed[-1].step_s - pipeline.step_s)
    return [
        one
        for some in (replayed, rest)
        for one in sorted(some, key=lambda one: (one.step_s, one.windows, one.schedule))
    ]


def pipelines_on(space: LikeStages, stages: Sequence[Counts]) -> Iterator[CutPipeline]:
    """Stages with these devices by pool as a pipeline with its cuts: under every schedule, recomputing or not.

    The first is under a schedule that keeps neither least nor most in flight, if that fits.
    """
    by_mode = [space.prices.quickest(each) for each in stages]
    for mode in by_mode[0] if by_mode else ():
        if all(mode in groups for groups in by_mode):
            yield from _Cutting(space, tuple(groups[mode] for groups in by_mode)).pipelines()


@dataclass(frozen=True, slots=True, eq=False)
class _Handed:
    """What each stage but the last hands to the next one, of many pipelines."""

    crossing: Numbers  # [boundaries, pipelines] rows of ``Crossings``
    is_handed: Flags  # [boundaries, pipelines] whether the next stage reads from it
    returns: Flags  # [boundaries, pipelines] and a gradient comes back


@dataclass(frozen=True, eq=False)
class _Cutting:
    """Groups that follow one another, to be cut; places are numbers of the space's cuts."""

    space: LikeStages
    groups: tuple[PricedGroup, ...]

    def pipelines(self) -> Iterator[CutPipeline]:
        """Under every schedule: the best cuts where some are kept, where least is, and where most is."""
        num_stages = len(self.groups)
        count = self.space.prices.num_microbatches
        pipeline = Pipeline(StageGraph.chain(num_stages, count))
        kept = {
            windows or max_in_flight(schedule, pipeline) or kept_by(schedule, num_stages, count): (schedule, windows)
            for schedule, windows in reversed(list(self._windows()))
        }
        by_kept = sorted(kept, key=sum)
        yielded = set[tuple[int, ...]]()
        for order in (by_kept[(len(by_kept) - 1) // 2 :: -1], by_kept, by_kept[::-1]):
            places = self._places(order[0])
            for windows in order:
                step_s = self._steps_s(places, windows)[0] if places is not None else inf
                if not np.isfinite(step_s):
                    places = self._places(windows)
                    step_s = self._steps_s(places, windows)[0] if places is not None else inf
                if places is None or not np.isfinite(step_s):
                    continue
                cuts = tuple(self.space.cuts[places[0]].tolist())
                if (*cuts, *windows) not in yielded:
                    yielded.add((*cuts, *windows))
                    yield CutPipeline(float(step_s), self.space, self.groups, cuts, *kept[windows])

    def _windows(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The schedules that are open, those without windows first."""
        most = (self.space.prices.num_microbatches,) * len(self.groups)
        for name in sorted(self.space.prices.freedom.schedules, key=lambda name: traits(name).windowed):
            for cap in CAPS if traits(name).windowed else (0,):
                yield name, windows_of(cap, most)

    def _places(self, kept: tuple[int, ...]) -> Numbers | None:
        """Those of the cuts, as one row; None if it does not fit."""
        stages = self._stages
        even = [s.all_work_s + s.tail_s for s in stages]  # or as they end, if what is before and after takes its time
        ending = [
            s.forward_s[0][:, None] + s.all_work_s + np.maximum(s.tail_s, s.backward_s[0][:, None]) for s in stages
        ]
        fits = [s.window >= least for s, least in zip(stages, kept, strict=True)]
        starts = [
            places
            for costs in (even, ending)
            if (places := balanced_places([np.where(*each, inf) for each in zip(fits, costs, strict=True)]))
        ]
        if not starts:
            return None
        starts_s = self._steps_s(np.array(starts), kept)
        now = np.array([starts[int(starts_s.argmin())]])
        now_s = float(starts_s.min())
        for _ in range(_ROUNDS if len(stages) > 1 else 0):
            moved = np.concatenate([now + step * np.eye(now.size, dtype=np.int64)[1:-1] for step in (-1, 1)])
            moved = moved[(np.diff(moved, axis=1) > 0).all(axis=1)]
            found_s = self._steps_s(moved, kept)
            if not len(moved) or found_s.min() >= now_s:
                break
            now = moved[found_s.argmin()][None, :]
            now_s = float(found_s.min())
        return now

    def _steps_s(self, places: Numbers, kept: tuple[int, ...]) -> Array:
        """By row of ``places`` what the recurrence says; infinite where memory does not allow ``kept``."""
        handed = self._handed(places)
        every = BoundedStages(*_gathered(self._stages, (places[:, :-1].T, places[:, 1:].T)))
        labels = self._labels(every, handed, kept)
        rest = self.space.prices.num_microbatches - 1
        step_s = np.maximum(labels.step_s, labels.round_trip_s + rest * self._on_fullest_card_s(handed))
        return np.where((every.window >= np.array(kept)[:, None]).all(axis=0), step_s, inf)

    def _handed(self, places: Numbers) -> _Handed:
        """What stages between these places hand to the next ones."""
        prices = self.space.prices
        at = self.space.cuts[places].T
        crossing = prices.cuts.crossing_of[prices.cuts.content[at[1:-1], at[2:]], at[:-2], at[1:-1]]
        is_handed = crossing >= 0
        return _Handed(crossing, is_handed, is_handed & prices.returns()[crossing])

    def _labels(self, every: BoundedStages, handed: _Handed, kept: tuple[int, ...]) -> Labels:
        """Those of whole pipelines, given the micro-batches that stages keep."""
        count = self.space.prices.num_microbatches
        messages = _gathered(self._messages, (handed.crossing,))
        stages = [only(every, stage) for stage in range(len(kept))]
        rounds = [rounds_of(count, np.full(len(stages[0].forward_s), own or count)) for own in kept]
        cards_s = [stage.card_s * part for stage, part in zip(stages, self._part_of_hosts, strict=True)]
        slowest_after_s = np.maximum.accumulate(every.forward_s[::-1])[::-1]
        on_last_s = ((kept[-1] or 1) - 1) * slowest_after_s  # its F before its first B
        labels = alone(stages[-1], rounds[-1], cards_s[-1])
        for s in reversed(range(len(stages) - 1)):
            reads = handed.is_handed[s]
            returns = handed.returns[s]
            after = across(labels, HandoverBound(*(np.where(reads, one[s], 0.0) for one in messages)))
            waits_s = waits_of(stages[s], after.round_trip_s, (kept[s] or count) - 1, on_last_s[s])
            waits_s = np.where(returns, waits_s, 0.0)
            stage = replace(stages[s], work_s=stages[s].work_s + waits_s, all_work_s=stages[s].all_work_s + waits_s)
            labels = prepend(stage, after, rounds[s], cards_s[s], reads, returns)
        return labels

    def _on_fullest_card_s(self, handed: _Handed) -> Array:
        """What a micro-batch keeps the network card busy that has most of it."""
        crossings = self.space.prices.cuts.crossings
        outputs, gradients = self._on_cards
        on_cards_s = outputs.T @ np.where(handed.is_handed, crossings.forward_bytes[handed.crossing], 0.0)
        on_cards_s += gradients.T @ np.where(handed.returns, crossings.backward_bytes[handed.crossing], 0.0)
        fullest_s: Array = on_cards_s.max(axis=0, initial=0.0)
        return fullest_s

    @cached_property
    def _stages(self) -> list[BoundedStages]:
        """Of each group, between any two cuts."""
        return [self.space.stages(group) for group in self.groups]

    @cached_property
    def _messages(self) -> list[HandoverBound]:
        """From each but the last to the next."""
        return [self.space.message(*ends) for ends in pairwise(self.groups)]

    @cached_property
    def _on_cards(self) -> tuple[Array, Array]:
        """By boundary and network card that is used: what a byte of a sample takes, out and back."""
        seconds = np.array([self.space.on_cards(*ends) for ends in pairwise(self.groups)])
        outputs, gradients = seconds.reshape(-1, 2, 2 * len(self.space.links.hosts)).swapaxes(0, 1)
        is_used = (outputs + gradients).any(axis=0)
        return outputs[:, is_used], gradients[:, is_used]

    @cached_property
    def _part_of_hosts(self) -> list[float]:
        """That each group is on."""
        hosts = self.space.links.hosts
        return [len({hosts[pool] for pool in group.orders[0]}) / len(set(hosts)) for group in self.groups]


def _gathered(tables: Sequence[Any], at: tuple[Numbers, ...]) -> list[Any]:
    """The fields of each table at its own row of numbers: [fields][tables, ...]."""
    by_table: dict[int, list[int]] = {}
    for number, table in enumerate(tables):
        by_table.setdefault(id(table), []).append(number)
    gathered = [np.zeros(at[0].shape) for _ in fields(tables[0])] if tables else []
    for own in by_table.values():
        table = tables[own[0]]
        ends = tuple(numbers[own] for numbers in at)
        for column, one in zip(gathered, fields(table), strict=True):
            column[own] = getattr(table, one.name)[ends]
    return gathered


def _replayed(pipeline: CutPipeline) -> CutPipeline:
    """The same with what ``leaf_bound`` says of it, if that is more."""
    prices = pipeline.space.prices
    links = pipeline.space.links
    whole = (pipeline.groups, pipeline.cuts)
    handed = prices.cuts.handed(pipeline.cuts)
    edges = edges_of(handed, prices.freedom.trains)
    stages = stages_of([whole])
    cards = cards_of(links, [[(group, slice(None))] for group in pipeline.groups], handed, stages.card_s)
    leaves = Leaves(
        edges,
        (),
        prices.num_counted,
        np.array([pipeline.step_s]),
        stages,
        messages_of(links, [whole], [handed], edges),
        None if cards is None else np.unique(cards, axis=1),
    )
    bound_s = leaves.bounds(pipeline.schedule, pipeline.windows, prices.num_microbatches, np.arange(1))
    return replace(pipeline, step_s=float(bound_s[0]))
