"""The tables of the integer program, read off the search's prices: spans that may be stages, and hand-overs.

Spans and hand-overs that no solution below an upper bound can have are left out before a variable exists.  For each
(cut, group) two labels, each a shortest path without regard to how many devices there are, once along round trips (F
and B, both messages), once along forwards alone:

    before    the least that a pipeline takes from its start to the first F of a stage that begins there, and back
    after     the least that a pipeline takes which begins there

A span stays if what is before it, the span itself and what is after it stay below the bound; after a stage from which
the next need not read, nothing is before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise, product
from math import inf
from typing import TypeVar

import numpy as np

from planner.costs.layers.cost_table import Array
from planner.costs.stages.stage_bound import concatenated, only
from planner.ir.lazy import Memo
from planner.solvers.best_first.device_groups import Counts, DeviceStates
from planner.solvers.best_first.graph_cuts import Flags, GraphCuts, Numbers
from planner.solvers.best_first.message_bound import HandoverBound, HandoverBounds
from planner.solvers.best_first.priced_groups import GroupPrices, PricedGroup
from planner.solvers.candidates.candidate import DevicePool, like_groups

FEW_GROUPS = 40
"""Groups up to which they may have devices of several kinds, or hosts."""


@dataclass(frozen=True, slots=True, eq=False)
class SpanTable:
    """Layers from one cut to another as a stage of a group; an entry a span.

    Attributes:
        first, last: cuts.
        group: by number.
        recompute: which activations are computed again (:class:`Recomputes`).
        there_s, round_s: F; F and B: with what its message takes beyond the least at that cut.
        pair_s: F and B alone.
        turn_s: what the busiest member certainly does between the start of its first F and the end of its last B (I).
        work_s: all of its F and B, or F, I and W.
        last_s: reduction and update after the last of them.
        depth: most micro-batches that fit; in an instance, most stages downstream, itself included, with which it does.
        linked, linked_back: whether the next stage certainly reads from it, and sends a gradient back.
    """

    first: Numbers
    last: Numbers
    group: Numbers
    recompute: Numbers
    there_s: Array
    round_s: Array
    pair_s: Array
    turn_s: Array
    work_s: Array
    last_s: Array
    depth: Numbers
    linked: Flags
    linked_back: Flags

    def __len__(self) -> int:
        return len(self.first)

    def within(self, in_flight: Sequence[int]) -> SpanTable:
        """Those that fit, with their depth, given the micro-batches that a stage keeps, by stages downstream from 1."""
        downstream = np.arange(1, len(in_flight) + 1)
        depth = np.where(self.depth[:, None] >= np.array(in_flight), downstream, 0).max(axis=1, initial=0)
        return only(replace(self, depth=depth), depth > 0)


@dataclass(frozen=True, slots=True, eq=False)
class HandoverTable:
    """What a message at a cut between two groups takes at least; an entry a cut and pair of groups.

    Attributes:
        there_s, round_s: there; and there and back.
        wire_s, shared_s: what all messages on a wire take longer: one way, and both where they share the wire.
    """

    cut: Numbers
    source: Numbers
    destination: Numbers
    there_s: Array
    round_s: Array
    wire_s: Array
    shared_s: Array

    def __len__(self) -> int:
        return len(self.cut)


AnyTable = TypeVar("AnyTable", SpanTable, HandoverTable)


def scaled(table: AnyTable, unit_s: float) -> AnyTable:
    """The same with times in a unit."""
    times = (column.name for column in fields(table) if column.name.endswith("_s"))
    return replace(table, **{name: getattr(table, name) / unit_s for name in times})


@dataclass(frozen=True, slots=True, eq=False)
class SpanInstance:
    """What the program is about.

    Attributes:
        prices: with the cuts, and the pools of devices.
        groups: whatever they recompute.
        twins: pairs of pools that may change places: the first may have no more in use than the second.
        most_stages: at most.
        stage_rules: (number of the stage, whether fixed, layers).
    """

    prices: GroupPrices
    groups: tuple[PricedGroup, ...]
    twins: tuple[tuple[int, int], ...]
    spans: SpanTable
    handovers: HandoverTable
    most_stages: int
    stage_rules: tuple[tuple[int, bool, tuple[int, ...]], ...] = ()

    @property
    def cuts(self) -> GraphCuts:
        """Where stages begin and end."""
        return self.prices.cuts


def group_counts(devices: DeviceStates) -> tuple[list[Counts], str]:
    """The groups that a stage may have: any, or, if these are many, those of a kind or pool; and what is left out."""
    pools = devices.pools
    every = list(dict.fromkeys(devices.within(tuple(len(pool.ranks) for pool in pools))))
    of_kind, of_pool = (
        [counts for counts in every if len({labels[k] for k, count in enumerate(counts) if count}) == 1]
        for labels in ([pool.kind for pool in pools], range(len(pools)))
    )
    choices = ((every, ""), (of_kind, "stages on several kinds of devices"))
    last = of_pool, "stages on several hosts or kinds of devices" if len(of_pool) < len(every) else ""
    return next((choice for choice in choices if len(choice[0]) <= FEW_GROUPS), last)


def stage_groups(prices: GroupPrices, every: Iterable[Counts]) -> tuple[tuple[PricedGroup, ...], ...]:
    """The groups of these devices, each with its ways to recompute.

    Pools are called by their own numbers, so that the members of a group have one order.
    """
    versions: dict[object, list[PricedGroup]] = {}
    for group in (group for counts in every for group in prices.versions(counts)):
        named = replace(group, orders=group.orders[:1], orders_known=True)
        versions.setdefault((group.counts, group.version.mode.along_sites, group.shares), []).append(named)
    return tuple(map(tuple, versions.values()))


def twin_pools(pools: Sequence[DevicePool], groups: Sequence[PricedGroup]) -> tuple[tuple[int, int], ...]:
    """Pools that are alike, unless the order of a stage's hosts tells them apart."""
    hosts = [{pools[k].groups for k, count in enumerate(group.counts) if count} for group in groups]
    if any(len(of_group) > 1 for of_group in hosts):
        return ()
    alike = [sorted(number for (number,) in same) for same in like_groups(pools) if len(same[0]) == 1]
    return tuple((later, earlier) for same in alike for earlier, later in pairwise(same))


@dataclass(frozen=True, slots=True, eq=False)
class NextStages:
    """What a stage from one cut to another hands to the next one, whatever that is; by first cut and cut.

    Attributes:
        possible: by sort of the next stage as well, whether it may follow.
        linked, linked_back: whether it certainly reads, and sends a gradient back.
    """

    cuts: GraphCuts
    possible: Flags
    linked: Flags
    linked_back: Flags

    @classmethod
    def of(cls, cuts: GraphCuts) -> NextStages:
        """Read off the columns of what crosses."""
        possible: Flags = (cuts.crossing_of >= 0) & cuts.inside
        linked, linked_back = (
            np.asarray(possible.any(axis=0) & (flags[cuts.crossing_of] | ~possible).all(axis=0))
            for flags in (cuts.crossings.linked, cuts.crossings.has_gradient)
        )
        return cls(cuts, possible, linked, linked_back)

    def least(self, by_column: Array) -> Array:
        """The least, of any next stage; infinite where there is none."""
        return np.asarray(np.where(self.possible, by_column[self.cuts.crossing_of], inf).min(axis=0))

    def least_received(self) -> Array:
        """By cut, bytes a sample that any stage which starts there gets of any that ends there, at least."""
        least = self.least(self.cuts.crossings.forward_bytes).min(axis=0)
        return np.where(np.isfinite(least), least, 0.0)

    def handover_s(self, link: HandoverBound) -> tuple[Array, Array]:
        """Times in the order of :class:`HandoverTable`, at least, by cut; and what they are beyond that."""
        times = (link.forward_s, link.forward_s + link.least_backward_s, link.one_way_s, link.load_both_s)
        certain = np.stack([self.linked, *3 * [self.linked_back]])
        seconds = np.where(certain, np.stack([self.least(each) for each in times]), 0.0)
        seconds[2:] = np.maximum(seconds[2:] - seconds[1], 0.0)
        least = np.where(certain, seconds, inf).min(axis=1)
        least = np.where(np.isfinite(least), least, 0.0)
        return least, np.where(certain, seconds - least[:, None], 0.0)


def span_tables(prices: GroupPrices, groups: Sequence[Sequence[PricedGroup]]) -> tuple[SpanTable, HandoverTable]:
    """Every span that may be a stage, and every hand-over between two groups that can run at once.

    Args:
        groups: each with its ways to recompute.
    """
    after = NextStages.of(prices.cuts)
    handovers, more = _handovers(prices, after, [group for group, *_ in groups])
    spans = [_spans(prices, after, group, number, more[number]) for number, of in enumerate(groups) for group in of]
    return concatenated(*spans), handovers


def _handovers(prices: GroupPrices, after: NextStages, groups: Sequence[PricedGroup]) -> tuple[HandoverTable, Array]:
    """Every hand-over between two groups, and by group and cuts what messages of its stages take beyond that."""
    links = HandoverBounds(prices)
    least_s = Memo(after.handover_s)
    inner = np.arange(1, prices.cuts.last)
    more = np.full((len(groups), 4, *prices.cuts.inside.shape), inf)
    rows = [np.zeros((7, 0))]
    for (i, source), (j, destination) in product(enumerate(groups), repeat=2):
        counts = zip(source.counts, destination.counts, prices.pools, strict=True)
        if all(one + other <= len(pool.ranks) for one, other, pool in counts):
            least, beyond = least_s[links.between(source, destination)]
            np.minimum(more[i], beyond, out=more[i])
            rows.append(np.vstack([inner, np.full((2, len(inner)), [[i], [j]]), least[:, inner]]))
    more[np.isinf(more)] = 0.0  # no group can run beside it
    columns = np.concatenate(rows, axis=1)
    return HandoverTable(*columns[:3].astype(np.int64), *columns[3:]), more


def _spans(prices: GroupPrices, after: NextStages, group: PricedGroup, number: int, more: Array) -> SpanTable:
    """Those of a group, with what its messages take beyond the least."""
    first, last = np.nonzero(prices.cuts.inside)
    stage = group.stage(first, last)
    returns = after.linked_back[first, last]
    turn_s = stage.work_s + prices.num_microbatches * group.prices.overhead_s * returns
    may_be = after.possible[:, first, last].any(axis=0) | (last == prices.cuts.last)
    return SpanTable(
        first=first,
        last=last,
        group=np.full(len(first), number),
        recompute=np.full(len(first), int(group.recompute)),
        there_s=stage.forward_s + more[0, first, last],
        round_s=stage.forward_s + stage.backward_s + more[1, first, last],
        pair_s=stage.forward_s + stage.backward_s,
        turn_s=turn_s,
        work_s=np.maximum(turn_s, stage.all_work_s),
        last_s=stage.tail_s,
        depth=np.where(may_be, stage.window, 0),
        linked=after.linked[first, last],
        linked_back=returns,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """R or F: what spans and hand-overs add to it, and what comes at its end.

    Attributes:
        pass_s, message_s: of spans and hand-overs on the way.
        linked: by span, whether the chain goes on after it.
        end_s: of the span at its end; first_s: of the first one, in the end.
        wires: of hand-overs at its end, with what the next span takes at least.
    """

    name: str
    pass_s: Array
    message_s: Array
    linked: Flags
    end_s: Array
    first_s: Array
    wires: tuple[tuple[Array, Array], ...] = ()


def chains(spans: SpanTable, handovers: HandoverTable) -> tuple[Chain, Chain]:
    """R, the round trips, and F, the way there."""
    nothing = np.zeros(len(spans))
    wires = (handovers.wire_s, spans.pair_s), (handovers.shared_s, nothing)
    return (
        Chain("R", spans.round_s, handovers.round_s, spans.linked_back, spans.turn_s, spans.last_s, wires),
        Chain("F", spans.there_s, handovers.there_s, spans.linked, spans.work_s + spans.last_s, nothing),
    )


_SLACK = 1e-9
_ROUNDS = 3


def prune(instance: SpanInstance, upper_s: float) -> tuple[SpanInstance, float]:
    """What a solution of at most ``upper_s`` can have, and a lower bound on all of them (infinite: there is none)."""
    bound_s = 0.0
    limit_s = upper_s * (1 + _SLACK)
    for _ in range(_ROUNDS):
        spans = instance.spans
        handovers = instance.handovers
        labels = [_through(instance, chain) for chain in chains(spans, handovers)]
        bound_s = max(bound_s, *(root_s for _, _, root_s in labels))
        keep, keep_handovers = (
            np.all([np.isfinite(least) & (least <= limit_s) for least in of_both], axis=0)
            for of_both in list(zip(*labels, strict=True))[:2]
        )
        instance = replace(instance, spans=only(spans, keep), handovers=only(handovers, keep_handovers))
        if keep.all() and keep_handovers.all():
            break
    return instance, bound_s if len(instance.spans) else inf


def _through(instance: SpanInstance, chain: Chain) -> tuple[Array, Array, float]:
    """The least of a pipeline that has each span, that has each hand-over, and of all."""
    spans = instance.spans
    handovers = instance.handovers
    wire_s = np.maximum.reduce([np.zeros(len(handovers)), *(seconds for seconds, _ in chain.wires)])
    begun, ended = _before(instance, chain)
    begins, linked, unlinked = _after(instance, chain, wire_s)
    start = begun[spans.first, spans.group]
    at = (spans.last, spans.group)
    follows = np.where(chain.linked, start + chain.pass_s + linked[at], unlinked[at])
    by_span = np.maximum(start + chain.end_s, np.where(spans.last == instance.cuts.last, 0.0, follows))
    done = ended[handovers.cut, handovers.source]
    after = begins[handovers.cut, handovers.destination]
    with np.errstate(invalid="ignore"):  # no way there, with no way on
        over_s = done + chain.message_s + np.maximum(after, wire_s)
    return by_span, np.where(np.isneginf(done), after, over_s), float(begins[0].min(initial=inf))


def _before(instance: SpanInstance, chain: Chain) -> tuple[Array, Array]:
    """``[cuts, groups]``: the least before a stage that begins there, and with one that ends there.

    The latter is minus infinity where the stage need not be read.
    """
    spans = instance.spans
    handovers = instance.handovers
    begun, ended = np.full((2, instance.cuts.last + 1, len(instance.groups)), inf)
    begun[0] = 0.0
    for cut in range(1, instance.cuts.last):
        here = np.flatnonzero(spans.last == cut)
        over = np.flatnonzero(handovers.cut == cut)
        passed = begun[spans.first[here], spans.group[here]] + chain.pass_s[here]
        passed = np.where(chain.linked[here] | np.isinf(passed), passed, -inf)
        np.minimum.at(ended[cut], spans.group[here], passed)
        arrived = np.maximum(ended[cut, handovers.source[over]] + chain.message_s[over], 0.0)
        np.minimum.at(begun[cut], handovers.destination[over], arrived)
    return begun, ended


def _after(instance: SpanInstance, chain: Chain, wire_s: Array) -> tuple[Array, Array, Array]:
    """``[cuts, groups]``: the least from a stage on that begins there, and after one that ends there.

    The latter with the message to the next stage, which reads from it, and where that need not read.
    """
    spans = instance.spans
    handovers = instance.handovers
    end = instance.cuts.last
    begins, linked, unlinked = np.full((3, end + 1, len(instance.groups)), inf)
    for cut in range(end - 1, -1, -1):
        here = np.flatnonzero(spans.first == cut)
        over = np.flatnonzero(handovers.cut == cut)
        at = spans.last[here], spans.group[here]
        follows = np.where(chain.linked[here], chain.pass_s[here] + linked[at], unlinked[at])
        follows = np.where(spans.last[here] == end, 0.0, follows)
        np.minimum.at(begins[cut], spans.group[here], np.maximum(chain.end_s[here], follows))
        after = begins[cut, handovers.destination[over]]
        waited = chain.message_s[over] + np.maximum(after, wire_s[over])
        np.minimum.at(linked[cut], handovers.source[over], waited)
        np.minimum.at(unlinked[cut], handovers.source[over], after)
    return begins, linked, unlinked
