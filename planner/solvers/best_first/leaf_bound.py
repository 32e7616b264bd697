"""Complete pipelines, many at once: a simulation of all of them that never says more than the true one.

Each stage is two rows of clocks: that of its fastest member, from which the neighbours hear first, and that of its
slowest, which hears no earlier than the fastest neighbour speaks.  Both follow the order of the schedule, messages of a
channel travel one after another, and every duration is the least of what it stands for; so every clock is a lower
bound of those of its stage, and where members are alike the bound is what the simulator says.  One numpy operation an
action serves all pipelines of as many stages.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import comb

import numpy as np

from planner.costs.layers.cost_table import Array
from planner.ir.schedule import Edge, Op, Pipeline, StageGraph
from planner.passes.events import in_order
from planner.schedules import max_in_flight, traits
from planner.schedules import schedule as schedule_named
from planner.solvers.best_first.graph_cuts import Handed, Numbers
from planner.solvers.best_first.prefixes import Expansion, Frontier, PipelinePrefix
from planner.solvers.budget import note

CAPS = (1, 2, 3, 4, 6)
"""Windows that a windowed schedule tries: so many times the stages downstream and one, as far as memory allows."""

FEW_WINDOWS = 40
MANY_WINDOWS = 500
"""Where a chain of so many stages has no more windows, all are tried; of other pipelines up to the second number."""

_TURN_S = 3e-6  # of an F or B that is gone through
_PIPELINE_S = 4e-8  # for each pipeline
_CHILDREN_S = 1.5e-4  # to gather the complete children of a prefix


def windows_of(cap: int, most: Sequence[int], downstream: Sequence[int] = ()) -> tuple[int, ...]:
    """``cap`` times the stages downstream and one, none above ``most``; no windows for 0.

    Args:
        downstream: stages on the longest path from each; empty: of a chain.
    """
    behind = downstream or range(len(most) - 1, -1, -1)
    return tuple(min(window, cap * count + 1) for window, count in zip(most, behind, strict=True)) if cap else ()


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """A complete pipeline, number ``number`` of ``leaves``, under one schedule, and what it takes at least."""

    bound_s: float
    leaves: Leaves
    number: int
    schedule: str
    windows: tuple[int, ...]

    @property
    def prefix(self) -> PipelinePrefix:
        """The pipeline."""
        return self.leaves.prefix(self.number)


Edges = tuple[tuple[int, int, bool], ...]
"""Which stage hands something to which, and whether a gradient comes back."""

Order = tuple[tuple[bool, int, int], ...]
"""(forward?, stage, micro-batch)."""


@dataclass(frozen=True, slots=True, eq=False)
class Leaves:
    """Pipelines with equally many stages, and the same edges between them; the last index is the pipeline.

    Attributes:
        expansions: the pipelines are complete children (by position) of these.
        num_counted: micro-batches that take time, the first ones.
        bound: of the search so far.
        heads, backs: (stage, 2, pipeline): of the fastest and of the slowest member.
        adds: what a B that finds gradients takes longer.
        tails: reduction and update.
        there, back: messages, by edge.
        max_in_flight: the most micro-batches that memory lets each stage keep.
        cards: seconds that a sum of gradients, by stage, and a message and its gradient, by edge, keep network cards
            busy: (flow, card, pipeline), the cards of a host out and in; None where there is one host.
    """

    edges: Edges
    expansions: tuple[tuple[Expansion, Numbers], ...]
    num_counted: int
    bound: Array
    heads: Array
    backs: Array
    adds: Array
    tails: Array
    there: Array
    back: Array
    max_in_flight: Numbers
    cards: Array | None = None

    @classmethod
    def of(cls, frontier: Frontier, children: Sequence[tuple[Expansion, Numbers]]) -> list[Leaves]:
        """The complete children (by position) of prefixes."""
        note(_CHILDREN_S * len(children))
        alike: dict[tuple[int, Edges], list[tuple[Expansion, Numbers, tuple[Array, ...]]]] = {}
        for expansion, positions in children:
            chain = (*expansion.parent.cuts, frontier.suffixes.prices.cuts.last)
            handed = frontier.suffixes.prices.cuts.handed(chain)
            trains = frontier.suffixes.prices.freedom.trains
            edges = tuple((one.source, one.destination, one.has_gradient and trains) for one in handed)
            arrays = _arrays(frontier, expansion, positions, handed)
            alike.setdefault((len(chain) - 1, edges), []).append((expansion, positions, arrays))
        return [
            cls(
                edges,
                tuple((expansion, positions) for expansion, positions, _ in members),
                frontier.suffixes.prices.num_counted,
                *(np.concatenate(column, axis=-1) for column in zip(*(arrays for *_, arrays in members), strict=True)),
            )
            for (_, edges), members in alike.items()
        ]

    def __len__(self) -> int:
        return len(self.bound)

    def prefix(self, number: int) -> PipelinePrefix:
        """The pipeline number ``number``."""
        for expansion, positions in self.expansions:
            if number < len(positions):
                return expansion.child(int(positions[number]))
            number -= len(positions)
        raise IndexError(number)

    def under(
        self, schedule: str, num_microbatches: int, upper_s: float, others: Collection[str] = ()
    ) -> Iterator[Leaf]:
        """The pipelines that may take less than ``upper_s`` under a schedule, each with its windows.

        Args:
            others: schedules that are tried as well: windows that make the same order are left out.
        """
        same = self._windows_of(others, num_microbatches) if traits(schedule).windowed else set()
        for windows, numbers in self._windows(schedule, num_microbatches):
            if windows in same:
                continue
            bound = self.bounds(schedule, windows, num_microbatches, numbers, upper_s)
            for number in np.flatnonzero(bound < upper_s):
                yield Leaf(float(bound[number]), self, int(numbers[number]), schedule, windows)

    def _windows_of(self, schedules: Collection[str], num_microbatches: int) -> set[tuple[int, ...]]:
        """The windows of schedules that have fixed ones, where each stage reads from the one before."""
        num_stages = len(self.heads)
        if not all((s, s + 1, True) in self.edges for s in range(num_stages - 1)):
            return set()
        chain = Pipeline(StageGraph.chain(num_stages, num_microbatches))
        # where messages travel otherwise than under windowed 1F1B, the same order is another plan
        alike = (name for name in schedules if not (traits(name).blocking or traits(name).streams))
        fixed = (max_in_flight(name, chain) for name in alike)
        return {windows for windows in fixed if windows is not None}

    def bounds(
        self,
        schedule: str,
        windows: tuple[int, ...],
        num_microbatches: int,
        numbers: Numbers,
        upper_s: float = np.inf,
    ) -> Array:
        """Of the pipelines ``numbers``, under a schedule with these windows; of those from ``upper_s`` on no more."""
        num_stages = len(self.heads)
        order = schedule_order(schedule, num_stages, num_microbatches, self.edges, windows)
        if order is None:
            return np.asarray(self.bound[numbers])
        note(len(order) * (_TURN_S + _PIPELINE_S * len(numbers)))
        columns = self.heads, self.backs, self.adds, self.there, self.back
        heads, backs, adds, there, back = (list(each[..., numbers]) for each in columns)
        into = [[e for e, edge in enumerate(self.edges) if edge[1] == s] for s in range(num_stages)]
        out_of = [[e for e, edge in enumerate(self.edges) if edge[0] == s] for s in range(num_stages)]
        returning = [[e for e in out_of[s] if self.edges[e][2]] for s in range(num_stages)]
        clock = [np.zeros((2, len(numbers)))] * num_stages  # an array that is in a list is never written to again
        wire_there, wire_back = ([np.zeros(len(numbers))] * len(self.edges) for _ in range(2))
        arrived: dict[tuple[bool, int, int], Array] = {}
        busy = None if self.cards is None else CardLoads(self.cards[..., numbers])
        first = [True] * num_stages
        accumulates = [bool(each.any()) for each in adds]
        for forward, stage, microbatch in order:
            now = clock[stage]
            for edge in into[stage] if forward else returning[stage]:
                now = np.maximum(now, arrived.pop((forward, edge, microbatch)))
            counts = microbatch < self.num_counted
            if counts:
                now = now + (heads if forward else backs)[stage]
            if counts and not forward and not first[stage] and accumulates[stage]:
                now += adds[stage]
            first[stage] &= forward
            clock[stage] = now
            wire, seconds = (wire_there, there) if forward else (wire_back, back)
            for edge in out_of[stage] if forward else into[stage]:
                if busy is not None and counts:
                    busy.take(num_stages + 2 * edge + (not forward), now[0])
                arrival = np.maximum(wire[edge], now[0])
                arrived[forward, edge, microbatch] = wire[edge] = arrival + seconds[edge] if counts else arrival
        done = np.array(clock).max(axis=1)
        end = (done + self.tails[:, numbers]).max(axis=0)
        if busy is not None:
            for stage, now in enumerate(done):
                busy.take(stage, now)
            places = np.flatnonzero(end < upper_s)
            end[places] = np.maximum(end[places], busy.until(places))
        return np.asarray(np.maximum(self.bound[numbers], end))

    def _windows(self, schedule: str, num_microbatches: int) -> Iterator[tuple[tuple[int, ...], Numbers]]:
        """The windows to try under a schedule, and the pipelines to try them on."""
        every = np.arange(len(self))
        if not traits(schedule).windowed:
            yield (), every
            return
        held = self.max_in_flight.copy()
        falls = not traits(schedule).splits_backward
        returning = tuple((source, reader) for source, reader, returns in self.edges if returns)
        for source, reader in returning if falls else ():
            np.minimum(held[reader], held[source], out=held[reader])
        allowing_by_windows: dict[tuple[int, ...], list[int]] = {}
        for most in np.unique(held, axis=1).T:
            numbers = np.flatnonzero((held == most[:, None]).all(axis=0))
            for windows in windows_to_try(tuple(most.tolist()), num_microbatches, returning, falls):
                allowing_by_windows.setdefault(windows, []).extend(numbers.tolist())
        for windows, allowing in allowing_by_windows.items():
            yield windows, np.unique(allowing)


class CardLoads:
    """Flows that pass network cards, by when they may begin: however cards share, all are done no sooner than this."""

    def __init__(self, seconds: Array) -> None:
        self.seconds = seconds
        self._begins: dict[int, list[Array]] = {n: [] for n, own in enumerate(seconds) if bool((own > 0).any())}

    def take(self, flow: int, begins: Array) -> None:
        """One more, if it passes any card; by pipeline when it may begin."""
        if flow in self._begins:
            self._begins[flow].append(begins)

    def until(self, numbers: Numbers) -> Array:
        """When the last one may be done in some pipelines: behind the first of each sort all that begin no sooner."""
        flows = {n: np.array(begins)[:, numbers] for n, begins in self._begins.items() if begins}
        every = np.full((len(flows), max(map(len, flows.values()), default=0), len(numbers)), -np.inf)
        for own, begins in zip(every, flows.values(), strict=True):
            own[: len(begins)] = begins
        seconds = self.seconds[list(flows)][..., numbers]
        until = np.zeros(len(numbers))
        for begins in flows.values():
            first = begins.min(axis=0)
            load = np.einsum("fcp,fp->cp", seconds, (every >= first).sum(axis=1))
            until = np.maximum(until, first + load.max(axis=0))
        return until


@functools.lru_cache(maxsize=4096)
def windows_to_try(
    most: tuple[int, ...], num_microbatches: int, returning: tuple[tuple[int, int], ...], falls: bool
) -> tuple[tuple[int, ...], ...]:
    """Windows of stages, none above ``most``.

    All there are, if a chain of so many stages has few; else some multiples of the stages downstream, as far as
    ``most`` allows.

    Args:
        returning: pairs of stages of which the second gives gradients to the first.
        falls: whether the second has no larger window then (nor a larger ``most``), as it has no more in flight.
            Otherwise windows hold what waits for a W too, each stage its own.
    """
    if comb(num_microbatches + len(most) - 1, len(most)) <= FEW_WINDOWS:
        every = tuple(islice(_windows_within(most, returning if falls else ()), MANY_WINDOWS + 1))
        if len(every) <= MANY_WINDOWS:
            return every
    downstream = [0] * len(most)
    for source, reader in sorted(returning, reverse=True):
        downstream[source] = max(downstream[source], downstream[reader] + 1)
    return tuple(dict.fromkeys(windows_of(cap, most, downstream) for cap in CAPS))


def _windows_within(
    most: tuple[int, ...], falling: tuple[tuple[int, int], ...], windows: tuple[int, ...] = ()
) -> Iterator[tuple[int, ...]]:
    """All that begin with ``windows``; of each pair of stages the first has no smaller one than the second."""
    stage = len(windows)
    if stage == len(most):
        yield windows
        return
    before = (windows[source] for source, reader in falling if reader == stage)
    for window in range(1, min([most[stage], *before]) + 1):
        yield from _windows_within(most, falling, (*windows, window))


@functools.lru_cache(maxsize=4096)
def schedule_order(
    schedule: str, num_stages: int, num_microbatches: int, edges: Edges, windows: tuple[int, ...]
) -> Order | None:
    """An order in which all can run; None if backwards are split."""
    graph = StageGraph(num_stages, num_microbatches, tuple(Edge(s, t, (), gradient) for s, t, gradient in edges))
    pipeline = Pipeline(graph, windows=windows)
    rows = schedule_named(schedule)(pipeline).rows
    if any(action.op not in (Op.FORWARD, Op.BACKWARD) for row in rows for action in row):
        return None
    order = in_order(rows, pipeline)
    if order is None:
        return None
    return tuple((action.op is Op.FORWARD, action.stage, action.microbatch or 0) for action in order)


def _arrays(
    frontier: Frontier, expansion: Expansion, positions: Numbers, handed: tuple[Handed, ...]
) -> tuple[Array, ...]:
    table = expansion.table
    rows = expansion.row[positions]
    parent = expansion.parent
    count = len(rows)
    last = len(parent.choices)

    def by_stage(name: str) -> Array:
        before = [np.full(count, getattr(t.stage, name)[row]) for t, row in parent.rows]
        return np.array([*before, getattr(table.stage, name)[rows]])

    groups = frontier.stage_groups(parent)
    links = frontier.suffixes.links
    ends = frontier.next_groups(parent, table)
    sums = by_stage("card")
    messages = np.zeros((2, len(handed), count))
    cards = np.zeros((last + 1 + 2 * len(handed), 2 * len(links.hosts) if links.has_cards else 0, count))
    choices = [(ends[choice], table.choice[rows] == choice) for choice in np.unique(table.choice[rows])]
    for number, one in enumerate(handed):
        for group, mine in choices if one.destination == last else [(groups[one.destination], slice(None))]:
            messages[:, number, mine] = np.array(links.handed(groups[one.source], group, one))[:, None]
            if links.has_cards:
                both = np.array(links.on_cards(groups[one.source], group, one))
                cards[last + 1 + 2 * number :][:2, :, mine] = both[..., None]
    for stage in range(last + 1 if links.has_cards else 0):
        for group, mine in choices if stage == last else [(groups[stage], slice(None))]:
            for host in {links.hosts[pool] for pool in group.orders[0]}:
                cards[stage, 2 * host : 2 * host + 2, mine] = sums[stage, mine]
    return (
        expansion.bound_s[positions],
        np.stack([by_stage("head"), by_stage("slow_head")], axis=1),
        np.stack([by_stage("back"), by_stage("slow_back")], axis=1),
        by_stage("adds"),
        by_stage("tail"),
        messages[0],
        messages[1],
        by_stage("window"),
        cards,
    )
