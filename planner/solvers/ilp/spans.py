"""The tables of the integer program: every span that may be a stage, and every hand-over between two groups.

Spans and hand-overs that no solution below an upper bound can have are left out before a variable exists.

Two labels per (cut, group), each a shortest path without regard to how many devices there are:

    before    the least that a pipeline takes from its start to the first F of a stage that begins there, and back
    behind    the least that a pipeline takes which begins there

once along the round trip (F and B, both messages), once along forwards alone.  A span stays if what is before it, the
span itself and what is behind it stay below the bound; behind a stage from which the next need not read, nothing is
before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from planner.costs.candidate import Recomputes, recompute_mask
from planner.costs.cost_model import PriceBook
from planner.costs.layers.cost_table import Array, Flags, running
from planner.costs.stages.stage_bound import BoundedStages, StageBounds
from planner.ir.constraints import CutDegrees
from planner.ir.errors import MissingMeasurementError
from planner.ir.problem import Problem
from planner.layers import throughout_sites
from planner.layers.recomputed import cores_by_index
from planner.solvers.candidates.constraints import Constraints
from planner.solvers.candidates.feasibility import recompute_choices
from planner.solvers.ilp.device_groups import CutTraffic, DeviceClass, LeastMessages, StageGroup

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class SpanTable:
    """Layers from one cut to another as a stage of a group; an entry a span.

    Attributes:
        first, last: cuts, by index.
        group: by number.
        recompute: which activations are computed again (:class:`Recomputes`).
        there_s, round_s: F; F and B: with what its message takes beyond the least at that cut.
        pair_s: F and B alone.
        turn_s: what the busiest member certainly does between the start of its first F and the end of its last B (I).
        work_s: all of its F and B, or F, I and W.
        last_s: reduction and update after the last of them.
        depth: most stages downstream, itself included, with which it fits in memory.
        linked, linked_back: whether the stage behind certainly reads from it, and sends a gradient back.
    """

    first: Indices
    last: Indices
    group: Indices
    recompute: Indices
    there_s: Array
    round_s: Array
    pair_s: Array
    turn_s: Array
    work_s: Array
    last_s: Array
    depth: Indices
    linked: Flags
    linked_back: Flags

    def __len__(self) -> int:
        return len(self.first)

    def where(self, keep: Flags) -> SpanTable:
        """Those that ``keep`` picks."""
        return SpanTable(*(getattr(self, field.name)[keep] for field in fields(self)))


@dataclass(frozen=True, slots=True, eq=False)
class StageTransfers:
    """What a message at a cut between two groups takes at least; an entry a cut and pair of groups.

    Attributes:
        there_s, round_s: there; and there and back.
        wire_s, shared_s: what all messages on a wire take longer: one way, and both where they share the wire.
    """

    cut: Indices
    source: Indices
    destination: Indices
    there_s: Array
    round_s: Array
    wire_s: Array
    shared_s: Array

    def __len__(self) -> int:
        return len(self.cut)

    def where(self, keep: Flags) -> StageTransfers:
        """Those that ``keep`` picks."""
        return StageTransfers(*(getattr(self, field.name)[keep] for field in fields(self)))


@dataclass(frozen=True, slots=True, eq=False)
class SpanInstance:
    """What the program is about.

    Attributes:
        cuts: positions in the list of layers, both ends included.
        num_microbatches: of a step.
        most_stages: at most.
        stage_rules: (number of the stage, whether fixed, layers).
    """

    cuts: tuple[int, ...]
    classes: tuple[DeviceClass, ...]
    groups: tuple[StageGroup, ...]
    spans: SpanTable
    transfers: StageTransfers
    most_stages: int
    stage_rules: tuple[tuple[int, bool, tuple[int, ...]], ...] = ()

    @property
    def end(self) -> int:
        """The last cut, by index."""
        return len(self.cuts) - 1


@dataclass(frozen=True, slots=True, eq=False)
class CutChain:
    """The places between layers in a row where stages may begin and end: positions, both ends included."""

    positions: tuple[int, ...]

    def sums(self, by_layer: Array) -> Array:
        """The sum over the layers before each cut."""
        return np.asarray(running(by_layer)[list(self.positions)])

    def largest(self, by_layer: Array) -> Array:
        """[a, b] = the largest of the layers between cuts a and b."""
        count = len(self.positions)
        of_block = np.maximum.reduceat(by_layer, self.positions[:-1])
        table = np.zeros((count, count))
        for a in range(count - 1):
            table[a, a + 1 :] = np.maximum.accumulate(of_block[a:])
        return table


@dataclass(frozen=True, slots=True, eq=False)
class SpanBuilder:
    """Makes tables for one way to cut the batch.

    Attributes:
        splits: whether backwards may be cut in two.
        mixing: layers that mix samples, by layer.
    """

    problem: Problem
    book: PriceBook
    constraints: Constraints
    cuts: tuple[int, ...]
    crossing: CutTraffic
    messages: LeastMessages
    micro_batches: tuple[int, ...]
    splits: bool
    classes: tuple[DeviceClass, ...]
    groups: tuple[StageGroup, ...]
    mixing: Flags

    def transfers(self) -> StageTransfers:
        """Between all groups that can run at once, at all inner cuts."""
        rows = [
            (cut, i, j, *(seconds[cut] for seconds in least))
            for i in range(len(self.groups))
            for j in self._followers(i)
            for least in [self._least(self.groups[i], self.groups[j])]
            for cut in range(1, len(self.cuts) - 1)
        ]
        index = np.array([row[:3] for row in rows], dtype=np.int64).reshape(len(rows), 3)
        seconds = np.array([row[3:] for row in rows], dtype=np.float64).reshape(len(rows), 4)
        return StageTransfers(index[:, 0], index[:, 1], index[:, 2], *seconds.T)

    def spans(self, in_flight: Sequence[int] | None) -> SpanTable:
        """All that the rules and memory allow.

        Args:
            in_flight: micro-batches by stages downstream, from 1; None: as if memory had no end.
        """
        parts = [self._of_group(number, recompute, stage, in_flight) for number, recompute, stage in self._stages()]
        empty = [np.zeros(0, dtype=kind) for kind in "llll" + "dddddd" + "l??"]
        return SpanTable(*(np.concatenate(column) for column in zip(empty, *parts, strict=True)))

    def _stages(self) -> Iterator[tuple[int, Recomputes, BoundedStages]]:
        """All groups, with recompute or without, as stages between any two cuts."""
        options = recompute_choices(self.problem)
        cores = sum(cores_by_index(self.problem.profile.graph), start=())
        fed, at = self._surely_fed(), np.arange(len(self.cuts))
        received = np.where(fed, self.crossing.least(self.crossing.forward_bytes), 0.0)
        bounds = StageBounds(self.book, CutChain(self.cuts), self.micro_batches, True, self.splits, received)
        sizes = (self.micro_batches[0], self.micro_batches[-1])
        for (number, group), recompute in product(enumerate(self.groups), options):
            samples = zip(*map(group.samples, sizes), strict=True)
            members = [(c.kind, c.memory_limit_bytes, own) for c, own in zip(group.classes, samples, strict=True)]
            zero = self.problem.zero_over(group.size)
            try:
                bound = bounds.of(group.ranks, members, recompute_mask(recompute, cores), zero)
            except MissingMeasurementError:
                continue
            yield number, recompute, bound.stage(at[:, None], at[None, :], len(self.micro_batches))

    def _surely_fed(self) -> Flags:
        """By cut: whether whatever stage ends there feeds the one that starts there."""
        at = np.arange(len(self.cuts))
        before = at[:, None] < at[None, :]
        return np.asarray((self.crossing.linked | ~before).all(axis=0)) & (at > 0)

    def _of_group(
        self, number: int, recompute: Recomputes, stage: BoundedStages, in_flight: Sequence[int] | None
    ) -> tuple[NDArray[np.generic], ...]:
        group, crossing = self.groups[number], self.crossing
        allowed = self.constraints.mask(
            self.cuts, group.ranks, recompute == Recomputes.ALL, CutDegrees(sample=group.size)
        )
        chain = CutChain(self.cuts)
        if group.size > 1:
            mixing = chain.sums(self.mixing.astype(np.float64))
            allowed &= mixing[None, :] == mixing[:, None]
        if group.by_parts:
            layers, along = self.problem.profile.graph.layers, throughout_sites(self.problem.profile.graph)
            others = chain.sums(np.array([layer.name not in along for layer in layers], dtype=np.float64))
            allowed &= others[None, :] == others[:, None]
        depth = self._depth(stage, in_flight)
        first, last = np.nonzero(allowed & (depth > 0))
        more_there, more_round = (matrix[first, last] for matrix in self._more(number))
        at = (first, last)
        messages_s = self._overhead_s(group)[at]
        return (
            first.astype(np.int64),
            last.astype(np.int64),
            np.full(len(first), number, dtype=np.int64),
            np.full(len(first), recompute, dtype=np.int64),
            stage.head[at] + more_there,
            stage.head[at] + stage.back[at] + more_round,
            stage.head[at] + stage.back[at],
            stage.work[at] + messages_s,
            stage.all_work[at] + messages_s,
            stage.tail[at],
            depth[at],
            crossing.linked[at],
            crossing.linked_back[at],
        )

    def _overhead_s(self, group: StageGroup) -> Array:
        """Of receiving all messages back from the stage behind, by span."""
        each = min(self.messages.overhead_s.get(member.kind, 0.0) for member in group.classes)
        return np.asarray(len(self.micro_batches) * each * (self.crossing.backward_bytes > 0))

    def _depth(self, stage: BoundedStages, in_flight: Sequence[int] | None) -> Indices:
        """The most stages downstream with which a span fits; 0 if it never does."""
        depth = np.zeros(stage.window.shape, dtype=np.int64)
        if in_flight is None:
            return depth + len(self.problem.ranks)
        for downstream, count in enumerate(in_flight, start=1):
            depth[stage.window >= count] = downstream
        return depth

    def _followers(self, number: int) -> Iterator[int]:
        """Groups, by number, that have devices enough to run beside this one."""
        for other, group in enumerate(self.groups):
            total = [a + b for a, b in zip(self.groups[number].takes, group.takes, strict=True)]
            if all(count <= len(c.ranks) for count, c in zip(total, self.classes, strict=True)):
                yield other

    def _least(self, source: StageGroup, destination: StageGroup) -> tuple[Array, Array, Array, Array]:
        """By cut: the least that any linked stage of ``source`` pays there, as in :class:`StageTransfers`."""
        crossing, messages = self.crossing, self.messages
        there, back = messages.there_s(source, destination), messages.back_s(source, destination)
        wire, shared = messages.wires_s(source, destination)
        return (
            _least_of(there, crossing.linked),
            _least_of(there + back, crossing.linked_back),
            _least_of(wire, crossing.linked_back),
            _least_of(shared, crossing.linked_back),
        )

    def _more(self, number: int) -> tuple[Array, Array]:
        """By span: what the message takes beyond :meth:`_least`, to whatever group it goes."""
        crossing, source = self.crossing, self.groups[number]
        there, both = [], []
        for other in self._followers(number):
            destination = self.groups[other]
            seconds, back = self.messages.there_s(source, destination), self.messages.back_s(source, destination)
            least_there, least_both, _, _ = self._least(source, destination)
            there.append(seconds - least_there)
            both.append(seconds + back - least_both)
        if not there:
            return np.zeros(crossing.linked.shape), np.zeros(crossing.linked.shape)
        more_there, more_both = np.minimum.reduce(there), np.minimum.reduce(both)
        return np.where(crossing.linked, more_there, 0.0), np.where(crossing.linked_back, more_both, 0.0)


def _least_of(seconds: Array, linked: Flags) -> Array:
    """The least of each column where ``linked``; 0 where nothing is."""
    least = np.where(linked, seconds, np.inf).min(axis=0)
    return np.where(np.isfinite(least), least, 0.0)


_SLACK = 1e-9
_ROUNDS = 3


@dataclass(frozen=True, slots=True, eq=False)
class _Path:
    """One of the two chains: what spans add to it, what they are as its end, and where it breaks."""

    pass_s: Array
    end_s: Array
    message_s: Array
    wire_s: Array
    linked: Flags


def prune(instance: SpanInstance, upper_s: float) -> tuple[SpanInstance, float]:
    """What a solution of at most ``upper_s`` can have, and a lower bound on all of them (infinite: there is none)."""
    bound_s, limit_s = 0.0, upper_s * (1 + _SLACK)
    for _ in range(_ROUNDS):
        spans, transfers = instance.spans, instance.transfers
        keep, keep_transfers = np.ones(len(spans), dtype=bool), np.ones(len(transfers), dtype=bool)
        for chain in _chains(spans, transfers):
            before, behind = _before(instance, chain), _behind(instance, chain)
            bound_s = max(bound_s, float(behind.begins[0].min(initial=np.inf)))
            with np.errstate(invalid="ignore"):  # no way there, with no way on
                least = _least(instance, chain, before, behind)
                keep &= (least <= limit_s) & np.isfinite(least)
                least = _least_over(instance, chain, before, behind)
                keep_transfers &= (least <= limit_s) & np.isfinite(least)
        instance = replace(instance, spans=spans.where(keep), transfers=transfers.where(keep_transfers))
        if keep.all() and keep_transfers.all():
            break
    return instance, bound_s if len(instance.spans) else float("inf")


def _chains(spans: SpanTable, transfers: StageTransfers) -> tuple[_Path, _Path]:
    wire_s, none_s = np.maximum(transfers.wire_s, transfers.shared_s), np.zeros(len(transfers))
    return (
        _Path(spans.round_s, spans.turn_s, transfers.round_s, wire_s, spans.linked_back),
        _Path(spans.there_s, spans.work_s + spans.last_s, transfers.there_s, none_s, spans.linked),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Before:
    """By (cut, group): the least before a stage that begins there; and of one that ended there, -inf if unlinked."""

    begun: Array
    ended: Array


@dataclass(frozen=True, slots=True, eq=False)
class _Behind:
    """By (cut, group): the least of what begins there; and behind a stage that ends there, linked to it or not."""

    begins: Array
    linked: Array
    unlinked: Array


def _before(instance: SpanInstance, chain: _Path) -> _Before:
    spans, transfers = instance.spans, instance.transfers
    shape = (len(instance.cuts), len(instance.groups))
    begun, ended = np.full(shape, np.inf), np.full(shape, np.inf)
    begun[0] = 0.0
    for cut in range(1, instance.end):
        here = np.flatnonzero(spans.last == cut)
        value = begun[spans.first[here], spans.group[here]] + chain.pass_s[here]
        value = np.where(chain.linked[here] | np.isinf(value), value, -np.inf)
        np.minimum.at(ended[cut], spans.group[here], value)
        over = np.flatnonzero(transfers.cut == cut)
        arrived = np.maximum(ended[cut, transfers.source[over]] + chain.message_s[over], 0.0)
        np.minimum.at(begun[cut], transfers.destination[over], arrived)
    return _Before(begun, ended)


def _behind(instance: SpanInstance, chain: _Path) -> _Behind:
    spans, transfers = instance.spans, instance.transfers
    shape = (len(instance.cuts), len(instance.groups))
    begins, linked, unlinked = (np.full(shape, np.inf) for _ in range(3))
    for cut in range(instance.end - 1, -1, -1):
        here = np.flatnonzero(spans.first == cut)
        at = spans.last[here], spans.group[here]
        follows = np.where(chain.linked[here], chain.pass_s[here] + linked[at], unlinked[at])
        follows = np.where(spans.last[here] == instance.end, 0.0, follows)
        np.minimum.at(begins[cut], spans.group[here], np.maximum(chain.end_s[here], follows))
        over = np.flatnonzero(transfers.cut == cut)
        after = begins[cut, transfers.destination[over]]
        waited = np.maximum(after, chain.wire_s[over])
        np.minimum.at(linked[cut], transfers.source[over], chain.message_s[over] + waited)
        np.minimum.at(unlinked[cut], transfers.source[over], after)
    return _Behind(begins, linked, unlinked)


def _least(instance: SpanInstance, chain: _Path, before: _Before, behind: _Behind) -> Array:
    """By span: the least of a pipeline that has it."""
    spans = instance.spans
    at = spans.last, spans.group
    begun = before.begun[spans.first, spans.group]
    follows = np.where(chain.linked, begun + chain.pass_s + behind.linked[at], behind.unlinked[at])
    return np.maximum(begun + chain.end_s, np.where(spans.last == instance.end, 0.0, follows))


def _least_over(instance: SpanInstance, chain: _Path, before: _Before, behind: _Behind) -> Array:
    """By hand-over: the least of a pipeline that has it; where a stage may end unlinked, its message is no bound."""
    transfers = instance.transfers
    ended = before.ended[transfers.cut, transfers.source]
    follows = behind.begins[transfers.cut, transfers.destination]
    return np.where(np.isneginf(ended), follows, ended + chain.message_s + np.maximum(follows, chain.wire_s))
