"""All shares of the samples that members of a pipeline's stages may have, by branch and bound.

Where members of a stage are unlike, a pipeline of the search has open shares
(:mod:`planner.solvers.best_first.share_bound`).  A box holds for each member the least and the most of its samples in a
full micro-batch; the members of a stage have all samples together, which makes boxes smaller.  A box is bounded, halved
where the times of a member differ most, and its halves wait with those of all pipelines; shares that are left alone in
their box are simulated.

What a box takes at least.  Each member of each stage has a clock of its own, which follows the order of the schedule;
its F and B take what the least of its samples take.  A stage's members have the samples one after another, so that the
first and the last sample of each lie between the sums of the boxes before and after: what two members of different
stages surely have in common is a message that the receiver waits for, and there is one from some member that may have
samples in common.  For shares alone in their box the clocks are what the simulator says, but for what only adds to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf

import numpy as np

from planner.costs.candidate import Candidate
from planner.costs.communication.tables import transfer_s
from planner.costs.layers.cost_table import Array
from planner.solvers.best_first.graph_cuts import Flags, Handed, Numbers
from planner.solvers.best_first.leaf_bound import (
    ActionOrder,
    Leaf,
    ReplayedPasses,
    StageEdges,
    channels_of,
    replay,
    schedule_order,
)
from planner.solvers.best_first.message_bound import HandoverBounds
from planner.solvers.best_first.prefixes import Frontier
from planner.solvers.best_first.priced_groups import PricedGroup
from planner.solvers.best_first.share_bound import AnyShares
from planner.solvers.budget import NUMBER_S
from planner.solvers.candidates.evaluate import Evaluator
from planner.solvers.candidates.feasibility import stages_usable

_MANY_BOXES = 512
_MANY_NUMBERS = 10_000_000
_MOST_BOXES = 20_000
"""Bounded at a time, or fewer of long pipelines; and most of a pipeline that may wait."""

_ROUNDS = 3
"""Of making the box of all shares smaller."""

ShareBoxes = tuple[Numbers, Numbers]
"""The least and the most samples of each member: (member, box)."""


@dataclass(frozen=True, slots=True, eq=False)
class OpenShares:
    """The boxes of a pipeline that wait.

    Attributes:
        candidate: the pipeline, with some shares.
        stands_for_all: whether it stands for those with their stages in other orders.
        bounds: of each box, ascending.
    """

    candidate: Candidate
    clocks: MemberClocks
    boxes: ShareBoxes
    bounds: Array
    stands_for_all: bool

    @property
    def bound_s(self) -> float:
        """No shares among them take less; infinity if there are none."""
        return float(self.bounds.min(initial=inf))

    @classmethod
    def of(cls, frontier: Frontier, leaf: Leaf, candidate: Candidate, upper_s: float) -> OpenShares:
        """All shares of a pipeline that may take less than ``upper_s``."""
        clocks = MemberClocks.of(frontier, leaf, candidate)
        boxes = clocks.all_shares(upper_s)
        bounds = np.full(boxes[0].shape[1], leaf.bound_s)
        return cls(candidate, clocks, boxes, bounds, frontier.suffixes.prices.cuts.merges_orders)

    def advance(self, evaluator: Evaluator, upper_s: float) -> Iterator[Candidate | OpenShares]:
        """The shares to be simulated, or smaller boxes, that may take less than ``upper_s``."""
        least, most = self.boxes
        single = (least == most).all(axis=0)
        if single[0]:
            ends = np.cumsum([0, *map(len, self.candidate.groups)])
            samples = least[:, 0].tolist()
            candidate = replace(self.candidate, shares=tuple(tuple(samples[a:b]) for a, b in pairwise(ends)))
            if stages_usable(evaluator.problem, evaluator.cost_model, candidate):
                yield candidate
            yield from self._only(np.arange(1, len(single)), upper_s)
            return
        chosen = np.flatnonzero(~single)
        if len(chosen) > _MOST_BOXES:  # the smallest first, so that no more come
            chosen = chosen[np.argsort((most - least)[:, chosen].sum(axis=0), kind="stable")]
        chosen = chosen[: max(1, min(_MANY_BOXES, _MANY_NUMBERS // max(1, self.clocks.num_numbers)))]
        kept = np.ones(len(single), dtype=bool)
        kept[chosen] = False
        halves = self.clocks.halves(least[:, chosen], most[:, chosen])
        evaluator.budget.spend(NUMBER_S * self.clocks.num_numbers * halves[0].shape[1])
        bounds = np.maximum(self.clocks.bounds(*halves), self.bounds[0])
        every = replace(
            self,
            boxes=(np.hstack([least[:, kept], halves[0]]), np.hstack([most[:, kept], halves[1]])),
            bounds=np.concatenate([self.bounds[kept], bounds]),
        )
        yield from every._only(np.argsort(every.bounds, kind="stable"), upper_s)

    def _only(self, numbers: Numbers, upper_s: float) -> Iterator[OpenShares]:
        """These boxes, in order, as far as they may take less."""
        numbers = numbers[self.bounds[numbers] < upper_s]
        if len(numbers):
            least, most = self.boxes
            yield replace(self, boxes=(least[:, numbers], most[:, numbers]), bounds=self.bounds[numbers])


@dataclass(frozen=True, slots=True, eq=False)
class _Members:
    """The members of a stage.

    Attributes:
        own: their places among those of all stages.
        pools: of each.
        least, most: samples that a member may have.
        accumulate_s, tail_s: of the stage, as of ``BoundedStages``.
        in_step: whether members wait for one another in each action.
    """

    own: slice
    pools: tuple[int, ...]
    least: Numbers
    most: Numbers
    forward_s: Array  # [members, samples - 1] an F
    backward_s: Array  # [members, samples - 1] a B (or I)
    work_s: Array  # [members, samples - 1] all that a member does in a step
    accumulate_s: float
    tail_s: float
    in_step: bool

    @classmethod
    def of(cls, group: PricedGroup, cuts: tuple[int, int], begin: int, pools: tuple[int, ...], kept: int) -> _Members:
        """Of a stage between two cuts, the first of its members at the place ``begin``.

        Args:
            kept: micro-batches that it keeps.
        """
        first, last = cuts
        at = np.array(first), np.array(last)
        stage = group.stage(*at)
        bound = group.any_shares
        size = group.owner.micro_batches[0]
        own = slice(begin, begin + group.size)
        accumulate_s = float(group.prices.accumulate_s.least(*at))
        tail_s = float(stage.tail_s)
        in_step = bool(group.prices.exchange_forward_s[last] > group.prices.exchange_forward_s[first])
        if bound is None:
            samples = np.array(group.samples[size], dtype=np.int64)
            takes_s = (stage.forward_s, stage.backward_s, stage.all_work_s)
            forward_s, backward_s, work_s = (np.full((group.size, size), seconds) for seconds in takes_s)
            return cls(own, pools, samples, samples, forward_s, backward_s, work_s, accumulate_s, tail_s, in_step)
        rows, most = bound.by_member(first, last)
        if not group.is_open:
            most = np.array(bound.balanced(first, last))
            return cls(own, pools, most, most, *rows, accumulate_s, tail_s, in_step)
        if isinstance(group.owner, AnyShares):
            most = np.minimum(most, group.owner.most_samples(group, cuts, kept))
        least = np.ones_like(most)
        return cls(own, pools, least, most, *rows, accumulate_s, tail_s, in_step)


@dataclass(frozen=True, slots=True, eq=False)
class _Messages:
    """Messages of a value between two stages: seconds by link and samples, there and back.

    Attributes:
        link: number of the link between two members (source, destination).
    """

    link: Numbers
    there: Array
    back: Array

    @classmethod
    def of(cls, links: HandoverBounds, handed: Handed, stages: list[_Members], size: int) -> _Messages:
        """Of what a stage hands to another."""
        ends = stages[handed.source].pools, stages[handed.destination].pools
        by_pair = [[links.least_link(a, b) for b in ends[1]] for a in ends[0]]
        distinct_links = list({id(link): link for row in by_pair for link in row}.values())
        samples = np.arange(size + 1)
        there, back = (
            np.array([transfer_s(link, num_bytes * samples) for link in distinct_links])
            for num_bytes in (handed.forward_bytes, handed.backward_bytes)
        )
        return cls(np.array([[distinct_links.index(link) for link in row] for row in by_pair]), there, back)


@dataclass(frozen=True, slots=True, eq=False)
class _Wires:
    """The messages of one edge and direction in some boxes; by (sender, receiver, box).

    Attributes:
        seconds: of what is surely sent, else minus infinity.
        possible: whether anything may be sent; None: what is surely sent alone.
        some_s: (receiver, box): the least of the longest that may be sent.
    """

    seconds: Array
    possible: Flags | None
    some_s: Array

    @classmethod
    def of(cls, link: Numbers, table: Array, surely: Numbers, possible: Flags, least: Numbers) -> _Wires:
        """Where ``surely`` these samples, and at least ``least`` of each receiver, are sent."""
        seconds = np.where(surely > 0, table[link[:, :, None], surely], -inf)
        if bool((possible == (surely > 0)).all()):
            return cls(seconds, None, np.zeros(least.shape))
        each = -(-least // np.maximum(possible.sum(axis=0), 1))
        return cls(seconds, possible, table.min(axis=0)[each])

    def arrivals(self, free: Array, clock: Array) -> tuple[Array, Array]:
        """When messages that are sent at ``clock`` (sender, box) are there, by wire and by receiver."""
        sent = np.maximum(free, clock[:, None]) + self.seconds
        arrived = sent.max(axis=0)
        if self.possible is not None:
            soonest = np.where(self.possible, clock[:, None], inf).min(axis=0)
            arrived = np.maximum(arrived, soonest + self.some_s)
        return sent, arrived


@dataclass(slots=True, eq=False)
class _WirePasses(ReplayedPasses):
    """Those of all members, each of which sends."""

    wires: list[_Wires]  # [edges]

    def send(self, stage: int, microbatch: int, now: Array, takes_time: bool) -> None:
        """Over a wire from each member to each."""
        for edge in self.sent[stage]:
            self.free_s[edge], self.arrived[edge, microbatch] = self.wires[edge].arrivals(self.free_s[edge], now)


def _kept(order: ActionOrder | None, num_stages: int) -> list[int]:
    """The most micro-batches that each stage keeps at a time; one where the order is not known."""
    now = [0] * num_stages
    most = [1] * num_stages
    for forward, stage, _ in order or ():
        now[stage] += 1 if forward else -1
        most[stage] = max(most[stage], now[stage])
    return most


@dataclass(frozen=True, slots=True, eq=False)
class MemberClocks:
    """What a pipeline takes at least under its schedule, given boxes of the samples of all members.

    Attributes:
        size: samples of a full micro-batch; those that are smaller take no time.
        order: as of ``schedule_order``; None: each member by itself alone.
    """

    stages: list[_Members]
    edges: StageEdges
    messages: list[_Messages]
    size: int
    order: ActionOrder | None
    splits: bool

    @classmethod
    def of(cls, frontier: Frontier, leaf: Leaf, candidate: Candidate) -> MemberClocks:
        """Of a complete pipeline; ``candidate`` names its ranks."""
        prefix = leaf.prefix
        prices = frontier.suffixes.prices
        links = frontier.suffixes.links
        pool_of = {rank: number for number, pool in enumerate(prices.pools) for rank in pool.ranks}
        size = prices.micro_batches[0]
        edges = leaf.leaves.edges
        order = schedule_order(leaf.schedule, len(candidate.groups), prices.num_microbatches, edges, leaf.windows)
        if order is not None:
            order = tuple(action for action in order if action[2] < prices.num_counted)
        kept = _kept(order, len(candidate.groups))
        begin = 0
        stages = list[_Members]()
        for number, (group, ranks) in enumerate(zip(frontier.stage_groups(prefix), candidate.groups, strict=True)):
            pools = tuple(pool_of[rank] for rank in ranks)
            cuts = (prefix.cuts[number], prefix.cuts[number + 1])
            stages.append(_Members.of(group, cuts, begin, pools, kept[number]))
            begin += group.size
        messages = [_Messages.of(links, one, stages, size) for one in prices.cuts.handed(prefix.cuts)]
        return cls(stages, edges, messages, size, order, prices.freedom.splits)

    @property
    def num_numbers(self) -> int:
        """About how many a box takes."""
        return len(self.order or ()) * sum(len(s.pools) for s in self.stages) * max(len(s.pools) for s in self.stages)

    def all_shares(self, upper_s: float) -> ShareBoxes:
        """One box with all shares that may take less than ``upper_s``; none if there are none."""
        least, most = (np.concatenate(each) for each in zip(*((s.least, s.most) for s in self.stages), strict=True))
        boxes = self._tightened(least[:, None], most[:, None])
        for _ in range(_ROUNDS if boxes[0].shape[1] else 0):
            most = boxes[1].copy()
            for stage, (before_s, after_s) in zip(self.stages, self._around_s(boxes[0][:, 0]), strict=True):
                in_time = (stage.work_s <= upper_s - before_s - after_s).sum(axis=1)
                most[stage.own, 0] = np.minimum(most[stage.own, 0], in_time)
            boxes = self._tightened(boxes[0], most)
            if not boxes[0].shape[1]:
                break
        return boxes

    def _around_s(self, least: Numbers) -> list[tuple[float, float]]:
        """By stage, what passes before its first F and after its last backward."""
        before = [0.0 for _ in self.stages]
        after = [stage.tail_s for stage in self.stages]
        seconds = [self._taken(stage, least[stage.own, None]) for stage in self.stages]
        fastest = [(float(heads.min()), float(backs.min())) for heads, backs, _ in seconds]
        for (source, destination, returns), messages in sorted(
            zip(self.edges, self.messages, strict=True), key=lambda pair: pair[0]
        ):
            came_s = before[source] + fastest[source][0] + float(messages.there[:, 1].min())
            before[destination] = max(before[destination], came_s)
            if returns and not self.splits:
                back_s = float(messages.back[:, 1].min()) + fastest[source][1] + after[source]
                after[destination] = max(after[destination], back_s)
        return list(zip(before, after, strict=True))

    def halves(self, least: Numbers, most: Numbers) -> ShareBoxes:
        """Each box as two, cut where the times of a member differ most; those that hold shares."""
        ends = [[self._taken(stage, end[stage.own]) for end in (least, most)] for stage in self.stages]
        spread = np.concatenate([more[0] + more[1] - less[0] - less[1] for less, more in ends])
        widest = np.where(most > least, spread, -1.0).argmax(axis=0)
        every = np.arange(least.shape[1])
        middle = (least[widest, every] + most[widest, every]) // 2
        lower = most.copy()
        upper = least.copy()
        lower[widest, every] = middle
        upper[widest, every] = middle + 1
        return self._tightened(np.hstack([least, upper]), np.hstack([lower, most]))

    def _tightened(self, least: Numbers, most: Numbers) -> ShareBoxes:
        """The boxes without what is not a share of all samples; those that are not empty."""
        least = least.copy()
        most = most.copy()
        for _ in range(2):
            for stage in self.stages:
                low = least[stage.own]
                high = most[stage.own]
                np.maximum(low, self.size - (high.sum(axis=0) - high), out=low)
                np.minimum(high, self.size - (low.sum(axis=0) - low), out=high)
        kept = (least <= most).all(axis=0)
        for stage in self.stages:
            kept &= (least[stage.own].sum(axis=0) <= self.size) & (most[stage.own].sum(axis=0) >= self.size)
        return least[:, kept], most[:, kept]

    def bounds(self, least: Numbers, most: Numbers) -> Array:
        """By box, what the pipeline takes at least."""
        seconds = [self._taken(stage, least[stage.own]) for stage in self.stages]
        alone = [works.max(axis=0) + stage.tail_s for stage, (_, _, works) in zip(self.stages, seconds, strict=True)]
        bounds: Array = np.maximum.reduce(alone)
        if self.order is not None:
            clock = self._replayed(self.order, seconds, self._wires(least, most))
            ends = [now.max(axis=0) + stage.tail_s for now, stage in zip(clock, self.stages, strict=True)]
            np.maximum(bounds, np.maximum.reduce(ends), out=bounds)
        return bounds

    def _replayed(
        self, order: ActionOrder, seconds: list[tuple[Array, Array, Array]], wires: list[tuple[_Wires, _Wires]]
    ) -> list[Array]:
        """``[stages][members, boxes]``: when the last F or B is over."""
        of_forwards, of_backwards = channels_of(self.edges, len(self.stages))
        free_s = [np.zeros(1) for _ in wires]
        forwards = _WirePasses([own for own, _, _ in seconds], *of_forwards, [*free_s], [there for there, _ in wires])
        backwards = _WirePasses([own for _, own, _ in seconds], *of_backwards, free_s, [back for _, back in wires])
        clock = [np.zeros(heads.shape) for heads, _, _ in seconds]
        adds = [stage.accumulate_s or None for stage in self.stages]
        return replay(order, (forwards, backwards), clock, adds, num_counted=len(order))  # it has no others

    def _taken(self, stage: _Members, least: Numbers) -> tuple[Array, Array, Array]:
        """By member and box: its F, B and all that it does."""
        rows = np.arange(len(least))[:, None]
        heads, backs, works = (table[rows, least - 1] for table in (stage.forward_s, stage.backward_s, stage.work_s))
        if stage.in_step:
            heads = np.broadcast_to(heads.max(axis=0), heads.shape)
        return heads, backs, works

    def _wires(self, least: Numbers, most: Numbers) -> list[tuple[_Wires, _Wires]]:
        """The messages of each edge, there and back."""
        borders = [self._borders(least[stage.own], most[stage.own]) for stage in self.stages]
        wires = []
        for (source, destination, _), messages in zip(self.edges, self.messages, strict=True):
            low, high = borders[source]
            next_low, next_high = borders[destination]
            ends = np.minimum(low[1:, None], next_low[None, 1:])
            surely = np.maximum(ends - np.maximum(high[:-1, None], next_high[None, :-1]), 0)
            farthest = np.minimum(high[1:, None], next_high[None, 1:])
            possible = farthest > np.maximum(low[:-1, None], next_low[None, :-1])
            there = _Wires.of(messages.link, messages.there, surely, possible, least[self.stages[destination].own])
            turned = messages.link.T, messages.back, surely.swapaxes(0, 1), possible.swapaxes(0, 1)
            wires.append((there, _Wires.of(*turned, least[self.stages[source].own])))
        return wires

    def _borders(self, least: Numbers, most: Numbers) -> ShareBoxes:
        """The first and the last place where samples of a member may begin, and those of the last may end."""
        nothing = np.zeros((1, least.shape[1]), dtype=np.int64)
        low, high = (np.vstack([nothing, each.cumsum(axis=0)]) for each in (least, most))
        return np.maximum(low, self.size - (high[-1] - high)), np.minimum(high, self.size - (low[-1] - low))
