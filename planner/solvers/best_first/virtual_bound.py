"""What pipelines of several stages a position take at least, by their cuts: what their schedule's own order says.

Where the order of actions is the same whatever stages last, a step is no shorter than the longest path through it: from
an action to the next one of its position, or over a message to the stage that waits for it.  A path is a sum over
stages: so often an F, a B, a message of each (``Occurrences``).  So is what holds under any order, where D_r sums over
the stages before the first one of position r,

    step >= D_r (f + c) + sum over the stages of r of (w + update)
    step >= D_r (f + b + 2 c) + sum over the stages of r of (w without W, which may come later)
    step >= one micro-batch there and back

and so is every mean of sums.  The least of one sum over all cuts is a shortest path through a table of stages and cuts.
The bound is that of the best mean: sums play against cuts, and each side answers the other's mixture by its best sum,
or its best cuts, until neither gains (double oracle: McMahan, Gordon, Blum, ICML 2003).  What then lacks to the best
step is that layers cannot be divided.  So prefixes of cuts are bounded, many at once, each by the largest of a few
dozen sums with the least that may follow; and complete ones by their order.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from typing import Any

import numpy as np

from planner.costs.layers.cost_table import Array
from planner.ir.schedule import ADDS_GRADIENTS, Op, Pipeline, StageGraph
from planner.passes.events import in_order
from planner.schedules import schedule as schedule_named
from planner.schedules import traits
from planner.solvers.best_first.graph_cuts import Flags, Numbers
from planner.solvers.best_first.like_stages import balanced_places
from planner.solvers.best_first.priced_groups import PricedGroup
from planner.solvers.best_first.virtual_stages import (
    ADDS,
    B_LAST,
    F_LAST,
    PATH,
    RETURN,
    TAIL,
    THERE,
    UPDATE,
    WHOLE,
    B,
    F,
    GroupSpans,
    StagePrices,
    W,
)
from planner.solvers.budget import NUMBER_S

_ROUNDS = 24  # of the game at most
_MEANS = 6  # of the game that are kept, beside all sums
_TURNS = 100  # of both players in one round
_LEAST = 1e-12  # of what they regret
_NEAR = 1e-3  # of the bound: answers that gain less end the game
_BEAM = 64  # prefixes of equal length that are followed to the end at first
_FEW = 4  # of these, those whose cuts are moved
_NUMBERS_AT_ONCE = 20_000  # of a table, for the prefixes that are looked at together
_ROUND_S = 1e-3  # of work: a round, beside its tables
_ACTION_S = 1e-6  # an action of an order, for the longest path
_MANY_ACTIONS = 10_000  # of an order; longer ones are not followed

_UNITS = np.eye(RETURN + 1)

Occurrences = Array
"""How often each of these counts: (stage, of ``F`` to ``RETURN``)."""

Seconds = Array
"""What each of these takes: (stage, of ``F`` to ``RETURN``), and last one for each of many pipelines."""


@dataclass(frozen=True, slots=True, eq=False)
class FixedOrder:
    """The actions of a schedule on some positions, in an order in which they can run.

    Attributes:
        actions: of each what it lasts (numbers of its stage that are added), its stage, the action before it on its
            position, that which it waits for, and the message between: 2 s after stage s, 2 s + 1 back.  -1: none.
        last: the last action of each position and of each stage; ``closings``: what follows it, the updates of its
            position or the tail of its stage, (action, stage, number).
    """

    actions: tuple[tuple[tuple[int, ...], int, int, int, int], ...]
    last: tuple[int, ...]
    closings: Occurrences

    def steps_s(self, seconds: Seconds) -> Array:
        """Of many pipelines, by their last index."""
        ends = self._ends(seconds, np.maximum)
        closed = np.array([ends[number] for number in self.last]) + np.tensordot(self.closings, seconds, 2)
        return np.asarray(closed.max(axis=0))

    def longest(self, seconds: Seconds) -> Occurrences:
        """The longest path of one pipeline."""
        ends = self._ends(seconds, max)
        closed = np.array([ends[number] for number in self.last]) + np.tensordot(self.closings, seconds, 2)
        which = int(closed.argmax())
        number = self.last[which]
        times: Occurrences = self.closings[which].copy()
        messages = seconds[:, THERE:].ravel().tolist()
        while number >= 0:
            lasts, stage, before, needed, message = self.actions[number]
            times[stage, lasts] += 1
            number = before
            if needed >= 0 and ends[needed] + messages[message] > ends[before]:
                times[message // 2, THERE + message % 2] += 1
                number = needed
        return times

    def _ends(self, seconds: Seconds, later: Callable[[Any, Any], Any]) -> list[Any]:
        """When each action ends; last, when what waits for nothing may begin."""
        is_one = seconds.ndim == 2
        of_stages: list[Any] = seconds.tolist() if is_one else [list(own) for own in seconds]
        messages = [number for own in of_stages for number in own[THERE:]]
        messages.append(0.0)
        ends: list[Any] = [0.0] * (len(self.actions) + 1)
        for number, (lasts, stage, before, needed, message) in enumerate(self.actions):
            end = later(ends[before], ends[needed] + messages[message])
            for one in lasts:
                end = end + of_stages[stage][one]
            ends[number] = end
        return ends


@functools.lru_cache(maxsize=64)
def fixed_order(schedule: str, where: tuple[int, ...], num_microbatches: int) -> FixedOrder | None:
    """The order of a chain of stages on these positions; None if it depends on times, or is long."""
    num_stages = len(where)
    if traits(schedule).timed or 3 * num_stages * num_microbatches > _MANY_ACTIONS:
        return None
    pipeline = Pipeline(StageGraph.chain(num_stages, num_microbatches), positions=where)
    order = in_order(schedule_named(schedule)(pipeline).rows, pipeline)
    if order is None:
        return None
    number_of: dict[tuple[Op, int, int], int] = {}
    last_on: dict[int, int] = {}  # by position
    last_of: dict[int, int] = {}  # by stage, of those that add to gradients
    actions: list[tuple[tuple[int, ...], int, int, int, int]] = []
    for number, action in enumerate(order):
        stage = action.stage
        microbatch = action.microbatch or 0
        passes = Op.BACKWARD if action.op is Op.BACKWARD_INPUT else action.op
        is_last = microbatch == num_microbatches - 1
        lasts = {Op.FORWARD: F_LAST if is_last else F, Op.BACKWARD: B_LAST if is_last else B}.get(passes, W)
        adds = (ADDS,) if action.op in ADDS_GRADIENTS and stage in last_of else ()
        source = {Op.FORWARD: stage - 1, Op.BACKWARD: stage + 1}.get(passes, -1)
        needed = number_of.get((passes, source, microbatch), -1)
        message = -1 if needed < 0 else 2 * source if passes is Op.FORWARD else 2 * stage + 1
        actions.append(((lasts, *adds), stage, last_on.get(where[stage], -1), needed, message))
        number_of[passes, stage, microbatch] = number
        last_on[where[stage]] = number
        if action.op in ADDS_GRADIENTS:
            last_of[stage] = number
    updates = [np.outer(np.array(where) == position, _UNITS[UPDATE]) for position in last_on]
    tails = [np.outer(np.arange(num_stages) == stage, _UNITS[TAIL]) for stage in last_of]
    return FixedOrder(tuple(actions), (*last_on.values(), *last_of.values()), np.array([*updates, *tails]))


@dataclass(slots=True, eq=False)
class Tables:
    """What pipelines cost at least that have the same groups of devices on their positions.

    Attributes:
        where: the position of each stage.
        spans: by stage; ``messages``: after each, (stage, there and back, cut).
        limits: bytes of each member, by position.
        order: of the schedule, where that is known.
        always: sums that hold under any order, (sum, stage, number).
        bound_s: none of them is faster.
        sums: those that prefixes are bounded by; ``rest``: the least of each from a stage on, by the cut where it
            begins, (sum, stage, cut); last, 0 at the end.
        num_numbers: of all tables that were made.
    """

    where: tuple[int, ...]
    spans: tuple[GroupSpans, ...]
    messages: Array
    limits: tuple[Array, ...]
    order: FixedOrder | None
    always: Array
    bound_s: float = field(init=False, default=0.0)
    sums: Array = field(init=False)
    rest: Array = field(init=False)
    num_numbers: int = field(init=False, default=0)

    @classmethod
    def of(cls, prices: StagePrices, groups: Sequence[PricedGroup], where: Sequence[int], schedule: str) -> Tables:
        """Without a bound as yet.

        Args:
            where: the position of each stage.
        """
        spans = tuple(prices.spans(groups[r]) for r in where)
        count = prices.prices.num_microbatches
        messages = np.zeros((len(where), 2, len(spans[0].possible)))
        for stage, (a, b) in enumerate(pairwise(where)):
            messages[stage] = prices.messages(groups[a], groups[b])
        limits = tuple(_limits(group, count, len(where)) for group in groups)
        order = fixed_order(schedule, tuple(where), count) if prices.is_linked else None
        return cls(tuple(where), spans, messages, limits, order, _always(where, prices.is_linked))

    @property
    def work_s(self) -> float:
        """The work that was done."""
        return NUMBER_S * self.num_numbers

    def balanced_s(self) -> float:
        """What the balanced pipeline takes by its order, about; infinite if there is none."""
        cuts = balanced_places([spans.whole for spans in self.spans])
        seconds = np.zeros(()) if cuts is None else self.seconds(np.array([cuts]))[..., 0]
        return inf if cuts is None else float((self._longest(seconds) * seconds).sum())

    @property
    def many(self) -> int:
        """Prefixes that are looked at together: :meth:`grown` works on a few tables that fit into a cache."""
        return max(16, _NUMBERS_AT_ONCE // len(self.spans[0].possible))

    def bounded(self, upper_s: float, in_full: bool = True, most_s: float = inf) -> Tables:
        """The same with the bound of the best mean: sums play against cuts.

        Args:
            upper_s: bounds from here on need be no larger.
            in_full: also where no mean has a bound that large.
            most_s: work after which no further round begins.
        """
        cuts = balanced_places([spans.whole for spans in self.spans])
        if cuts is None:
            self.bound_s = inf
            return self
        visited = [self.seconds(np.array([cuts]))[..., 0]]
        sums = [self._longest(visited[0])]
        means: list[tuple[float, Occurrences]] = []
        players = _Players()
        best_s = 0.0
        least_s = inf  # no mean has a larger bound
        for _ in range(_ROUNDS):
            self.num_numbers += int(_ROUND_S / NUMBER_S)
            costs = np.tensordot(np.array(sums), np.array(visited), ((1, 2), (1, 2)))
            of_sums, of_cuts = players.mixtures(costs)
            mean = np.tensordot(of_sums, np.array(sums), 1)
            rest = self._rest(mean)
            means.append((float(rest[0][0]), mean))
            best_s = max(best_s, means[-1][0])
            mixed = np.tensordot(of_cuts, np.array(visited), 1)
            answer = self._longest(mixed)
            path = self.seconds(self._shortest(mean, rest)[None, :])[..., 0]
            least_s = min(least_s, float((answer * mixed).sum()))
            is_over = best_s >= upper_s or least_s <= best_s * (1 + _NEAR)
            if is_over or (least_s < upper_s and not in_full) or self.work_s > most_s:
                break
            visited.append(path)
            sums += [answer, self._longest(path)]
        means.sort(key=operator.itemgetter(0), reverse=True)
        distinct = {times.tobytes(): times for times in [*(mean for _, mean in means[:_MEANS]), *sums]}
        self.bound_s = best_s
        self.sums = np.array(list(distinct.values()))
        self.rest = np.array([self._rest(times) for times in self.sums])
        return self

    def _longest(self, seconds: Seconds) -> Occurrences:
        """The largest sum of one pipeline."""
        always: Occurrences = self.always[int(np.tensordot(self.always, seconds, 2).argmax())]
        if self.order is None:
            return always
        self.num_numbers += int(len(self.order.actions) * _ACTION_S / NUMBER_S)
        path = self.order.longest(seconds)
        return path if (path * seconds).sum() > (always * seconds).sum() else always

    def _cost(self, times: Occurrences, stage: int) -> Array:
        """What a sum counts of a stage, by first and last cut."""
        spans = self.spans[stage]
        cost = np.tensordot(times[stage, :THERE], spans.seconds, 1) + times[stage, THERE:] @ self.messages[stage]
        return np.where(spans.possible, cost, inf)

    def _rest(self, times: Occurrences) -> Array:
        """The least of a sum from each stage on, by the cut where it begins."""
        self.num_numbers += 4 * len(self.spans) * self.spans[0].possible.size
        rest = np.full((len(self.spans) + 1, len(self.spans[0].possible)), inf)
        rest[-1, -1] = 0.0
        for stage in reversed(range(len(self.spans))):
            rest[stage] = (self._cost(times, stage) + rest[stage + 1]).min(axis=1)
        return rest

    def _shortest(self, times: Occurrences, rest: Array) -> Numbers:
        """The cuts of the pipeline of which a sum is least."""
        cuts = [0]
        for stage in range(len(self.spans)):
            cuts.append(int((self._cost(times, stage)[cuts[-1]] + rest[stage + 1]).argmin()))
        return np.array(cuts)

    def seconds(self, cuts: Numbers) -> Seconds:
        """What the stages between cuts take, of many pipelines or their first stages: (stage, number, pipeline)."""
        of_stages = [
            np.concatenate([self.spans[stage].seconds[:, first, last], self.messages[stage][:, last]])
            for stage, (first, last) in enumerate(pairwise(cuts.T))
        ]
        return np.array(of_stages) if of_stages else np.zeros((0, RETURN + 1, len(cuts)))

    def grown(self, cuts: Numbers, upper_s: float) -> tuple[Numbers, Array]:
        """First stages of pipelines, with one stage more each, as far as they may lead to less than ``upper_s``.

        Args:
            cuts: of the stages so far, (prefix, cut).

        Returns:
            Their cuts, and a bound of what they lead to, the least first.
        """
        stage = cuts.shape[1] - 1
        count = len(self.sums)
        spans = self.spans[stage]
        rest = self.rest[:, stage + 1]
        done = np.tensordot(self.sums[:, :stage], self.seconds(cuts), 2)
        longer = [np.zeros((0, stage + 2), dtype=cuts.dtype)]
        bounds = [np.zeros(0)]
        for first in np.unique(cuts[:, -1]):
            own = np.flatnonzero(cuts[:, -1] == first)
            lasts = np.flatnonzero(spans.possible[first])
            cost = self.sums[:, stage, :THERE] @ spans.seconds[:, first, lasts]
            cost += self.sums[:, stage, THERE:] @ self.messages[stage][:, lasts] + rest[:, lasts]
            bound = functools.reduce(np.maximum, (done[n, own, None] + cost[n] for n in range(count)))
            rows, columns = np.nonzero((bound < upper_s) & self._holds(cuts[own], stage, lasts))
            longer.append(np.column_stack([cuts[own[rows]], lasts[columns]]).astype(cuts.dtype))
            bounds.append(bound[rows, columns])
            self.num_numbers += count * bound.size
        every = np.concatenate(longer)
        bound = np.concatenate(bounds)
        if stage + 1 == len(self.spans) and len(bound):
            bound = np.maximum(bound, self._steps_s(every))
        ascending = np.argsort(bound, kind="stable")
        kept = ascending[bound[ascending] < upper_s]
        return every[kept], bound[kept]

    def promising(self, upper_s: float) -> Numbers:
        """Cuts of a few pipelines that are fast by their order, the fastest first.

        The best of their first stages are followed, and at last cuts moved, one or two at a time, while that helps.
        """
        cuts = np.zeros((1, 1), dtype=np.int64)
        for _ in self.where:
            cuts = self.grown(cuts[:_BEAM], upper_s)[0]
        balanced = balanced_places([spans.whole for spans in self.spans])
        starts = [*cuts[:_FEW], *([np.array(balanced)] if balanced is not None else [])]
        ends = [self._moved(start) for start in starts]
        distinct = {own.tobytes(): own for _, own in sorted(ends, key=operator.itemgetter(0))}
        return np.array(list(distinct.values())).reshape(len(distinct), len(self.where) + 1)

    def _moved(self, cuts: Numbers) -> tuple[float, Numbers]:
        """What a pipeline takes by its order, and its cuts, after the best moves."""
        moves = np.array([move for width in (1, 2) for move in _moves(len(cuts), width)]).reshape(-1, len(cuts))
        best_s = inf
        for _ in range(_ROUNDS):
            around = np.concatenate([cuts[None, :], cuts + moves])
            around = around[((around >= 0) & (around <= cuts[-1])).all(axis=1)]
            stages = enumerate(pairwise(around.T))
            allowed = [self.spans[stage].possible[first, last] for stage, (first, last) in stages]
            around = around[np.logical_and.reduce(allowed)]
            steps_s = self._steps_s(around) if len(around) else np.zeros(0)
            if not len(around) or steps_s.min() >= best_s:
                break
            best_s = float(steps_s.min())
            cuts = around[steps_s.argmin()]
        return best_s, cuts

    def _steps_s(self, cuts: Numbers) -> Array:
        """What complete pipelines take at least, by their order where that is known."""
        seconds = self.seconds(cuts)
        always: Array = np.tensordot(self.always, seconds, 2).max(axis=0)
        if self.order is None:
            return always
        self.num_numbers += 3 * len(self.order.actions) * (len(cuts) + 100)
        return np.maximum(always, self.order.steps_s(seconds))

    def _holds(self, cuts: Numbers, stage: int, lasts: Numbers) -> Flags:
        """Whether all stages of a position that are known fit its members, by prefix and last cut of its next one."""
        position = self.where[stage]
        resident = self.spans[stage].resident
        if resident is None or not len(cuts):
            return np.ones((len(cuts), len(lasts)), dtype=bool)
        held = resident[:, cuts[:, -1]][:, :, lasts]
        for before in (s for s in range(stage) if self.where[s] == position):
            held = held + resident[:, cuts[:, before], cuts[:, before + 1]][:, :, None]
        return np.asarray((held <= self.limits[position][:, None, None]).all(axis=0))


def _moves(count: int, width: int) -> Iterator[Numbers]:
    """``width`` neighbouring cuts, none at an end, one or two places on or back."""
    for place in range(1, count - width):
        for by in (-2, -1, 1, 2):
            yield by * ((np.arange(count) >= place) & (np.arange(count) < place + width))


def _always(where: Sequence[int], is_linked: bool) -> Array:
    """Sums that hold under any order; where a stage need not read from the one before, those of positions alone."""
    places = np.array(where)
    stages = np.arange(len(where))
    way = [F_LAST, THERE]  # of any micro-batch: the smallest
    sums = []
    for position in range(int(places.max()) + 1):
        own = places == position
        ahead = (stages < where.index(position)) * is_linked
        whole = np.outer(own, _UNITS[WHOLE] + _UNITS[UPDATE]) + np.outer(ahead, _UNITS[way].sum(axis=0))
        path = np.outer(own, _UNITS[PATH]) + np.outer(ahead, _UNITS[[*way, B_LAST, RETURN]].sum(axis=0))
        path[0, TAIL] = ahead[0]
        sums += [whole, path]
    trip = np.outer(np.ones(len(where)), _UNITS[[*way, B_LAST, RETURN]].sum(axis=0))
    trip[0, TAIL] = 1.0
    return np.array([*sums, *([trip] if is_linked else [])])


@dataclass(slots=True, eq=False)
class _Players:
    """Sums and cuts as players, who come to play what they regret not to have played more: regret matching.

    Tammelin, "Solving large imperfect information games using CFR+", 2014.
    """

    regrets: list[Array] = field(default_factory=lambda: [np.zeros(0), np.zeros(0)])

    def mixtures(self, costs: Array) -> tuple[Array, Array]:
        """How often sums (rows) and cuts (columns) are played, where each side does about its best.

        The first ones are those of the call before.
        """
        costs = costs / max(float(np.abs(costs).max()), 1e-300)
        for_sums, for_cuts = (
            np.append(own, np.full(count - len(own), 1e-3))
            for own, count in zip(self.regrets, costs.shape, strict=True)
        )
        all_sums = np.zeros(len(for_sums))
        all_cuts = np.zeros(len(for_cuts))
        for turn in range(1, min(_TURNS, 20 * len(costs)) + 1):
            of_cuts = for_cuts / for_cuts.sum()
            worth = costs @ of_cuts
            for_sums = np.maximum(for_sums + worth - worth @ for_sums / for_sums.sum(), _LEAST)
            of_sums = for_sums / for_sums.sum()
            all_cuts += turn * of_cuts
            all_sums += turn * of_sums
            price = of_sums @ costs
            for_cuts = np.maximum(for_cuts + price @ of_cuts - price, _LEAST)
        self.regrets = [for_sums, for_cuts]
        return all_sums / all_sums.sum(), all_cuts / all_cuts.sum()


def _limits(group: PricedGroup, num_microbatches: int, num_stages: int) -> Array:
    """What each member of a group may hold."""
    memory = group.prices.memory
    rounding = (num_microbatches + 6) * num_stages  # the simulator rounds bytes slot by slot
    return np.array([holder.limit_bytes + rounding for holder in memory.holders] if memory is not None else [inf])
