"""Complete pipelines, many at once: a simulation of all of them that never says more than the true one.

Each stage is two rows of clocks: that of its fastest member, from which the neighbours hear first, and that of its
slowest, which hears no earlier than the fastest neighbour speaks.  Both follow the order of the schedule, messages of a
channel travel one after another, and every duration is the least of what it stands for; so every clock is a lower
bound of those of its stage, and where members are alike the bound is what the simulator says.  One numpy operation an
action serves all pipelines of as many stages.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import islice, pairwise
from math import comb, inf
from typing import Any

import numpy as np

from planner.costs.layers.cost_table import Array
from planner.costs.memory.memory_bound import kept_on
from planner.costs.stages.stage_bound import BoundedStages, columnwise, concatenated, only
from planner.ir.schedule import Edge, Op, Pipeline, StageGraph, Windows
from planner.passes.events import in_order
from planner.schedules import max_in_flight, traits
from planner.schedules import schedule as schedule_named
from planner.solvers.best_first.graph_cuts import Flags, Handed, Numbers
from planner.solvers.best_first.message_bound import HandoverBounds
from planner.solvers.best_first.prefixes import Expansion, Frontier, PipelinePrefix
from planner.solvers.best_first.priced_groups import PricedGroup
from planner.solvers.budget import note

CAPS = (1, 2, 3, 4, 6)
"""Windows that a windowed schedule tries: multiples of the stages downstream and one, as far as memory allows."""

FEW_WINDOWS = 40
MANY_WINDOWS = 500
"""Where a chain of as many stages has no more windows, all are tried; of other pipelines up to the second number."""

_TURN_S = 3e-6  # of an F or B that is gone through
_PIPELINE_S = 4e-8  # for each pipeline
_CHILDREN_S = 1.5e-4  # to gather the complete children of a prefix


def windows_of(cap: int, most: Sequence[int], downstream: Sequence[int] = ()) -> tuple[int, ...]:
    """``cap`` times the stages downstream and one, none above ``most``; no windows for 0.

    Args:
        downstream: stages on the longest path from each; empty: of a chain.
    """
    depths = downstream or range(len(most) - 1, -1, -1)
    return tuple(min(window, cap * count + 1) for window, count in zip(most, depths, strict=True)) if cap else ()


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """A complete pipeline, number ``number`` of ``leaves``, under one schedule, and what it takes at least."""

    bound_s: float
    leaves: Leaves
    number: int
    schedule: str
    windows: Windows

    @property
    def prefix(self) -> PipelinePrefix:
        """The pipeline."""
        return self.leaves.prefix(self.number)


StageEdges = tuple[tuple[int, int, bool], ...]
"""Which stage hands something to which, and whether a gradient comes back."""

ActionOrder = tuple[tuple[bool, int, int], ...]
"""(forward?, stage, micro-batch)."""


@dataclass(frozen=True, slots=True, eq=False)
class Leaves:
    """Pipelines with equally many stages, and the same edges between them; the last index is the pipeline.

    Attributes:
        expansions: the pipelines are complete children (by position) of these.
        num_counted: micro-batches that take time, the first ones.
        bound: of the search so far.
        cards: of a sum of gradients, by stage, then of a message and its gradient, by edge; the cards of a host out and
            in; None where there is one host.
    """

    edges: StageEdges
    expansions: tuple[tuple[Expansion, Numbers], ...]
    num_counted: int
    bound: Array  # [pipelines] seconds
    stages: BoundedStages  # [stages, pipelines]
    messages_s: Array  # [there and back, edges, pipelines]
    cards: Array | None = None  # [flows, cards, pipelines] seconds that network cards are busy

    @classmethod
    def of(cls, frontier: Frontier, children: Sequence[tuple[Expansion, Numbers]]) -> list[Leaves]:
        """The complete children (by position) of prefixes."""
        note(_CHILDREN_S * len(children))
        alike: dict[tuple[int, StageEdges], list[Leaves]] = {}
        for expansion, positions in children:
            own = _leaves(frontier, expansion, positions)
            alike.setdefault((own.num_stages, own.edges), []).append(own)
        return list(map(_joined, alike.values()))

    def __len__(self) -> int:
        return len(self.bound)

    @property
    def num_stages(self) -> int:
        """Of each pipeline."""
        return len(self.stages.forward_s)

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
        num_stages = self.num_stages
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
        windows: Windows,
        num_microbatches: int,
        numbers: Numbers,
        upper_s: float = inf,
    ) -> Array:
        """Of the pipelines ``numbers``, under a schedule with these windows; of those from ``upper_s`` on no more."""
        order = schedule_order(schedule, self.num_stages, num_microbatches, self.edges, windows)
        if order is None:
            return np.asarray(self.bound[numbers])
        note(len(order) * (_TURN_S + _PIPELINE_S * len(numbers)))
        busy = None if self.cards is None else CardLoads(self.cards[..., numbers])
        adds = [own if bool(own.any()) else None for own in self.stages.accumulate_s[:, numbers]]
        clock = [np.zeros((2, len(numbers)))] * self.num_stages
        done = np.array(replay(order, self._passes(numbers, busy), clock, adds, self.num_counted)).max(axis=1)
        end = (done + self.stages.tail_s[:, numbers]).max(axis=0)
        if busy is not None:
            for stage, now in enumerate(done):
                busy.take(stage, now)
            places = np.flatnonzero(end < upper_s)
            end[places] = np.maximum(end[places], busy.until(places))
        return np.asarray(np.maximum(self.bound[numbers], end))

    def _passes(self, numbers: Numbers, busy: CardLoads | None) -> tuple[_ChannelPasses, _ChannelPasses]:
        """All F, and all B, of the pipelines ``numbers``."""
        stages = self.stages
        heads, backs = (
            list(np.stack([fastest[:, numbers], slowest[:, numbers]], axis=1))
            for fastest, slowest in (
                (stages.forward_s, stages.slow_forward_s),
                (stages.backward_s, stages.slow_backward_s),
            )
        )
        there, back = map(list, self.messages_s[..., numbers])
        of_forwards, of_backwards = channels_of(self.edges, self.num_stages)
        free_s = [np.zeros(len(numbers))] * len(self.edges)
        forwards = _ChannelPasses(heads, *of_forwards, [*free_s], there, self.num_stages, busy)
        return forwards, _ChannelPasses(backs, *of_backwards, free_s, back, self.num_stages + 1, busy)

    def _windows(self, schedule: str, num_microbatches: int) -> Iterator[tuple[tuple[int, ...], Numbers]]:
        """The windows to try under a schedule, and the pipelines to try them on."""
        if not traits(schedule).windowed:
            kept = kept_on(schedule, stage_graph(self.num_stages, num_microbatches, self.edges))
            yield (), np.flatnonzero((self.stages.window >= np.array(kept)[:, None]).all(axis=0))
            return
        held = self.stages.window.copy()
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


Channels = tuple[list[list[int]], list[list[int]]]
"""By stage the edges over which its F, or its B, wait for messages, and those over which they send."""


def channels_of(edges: StageEdges, num_stages: int) -> tuple[Channels, Channels]:
    """Of F, and of B."""
    into = [[number for number, edge in enumerate(edges) if edge[1] == stage] for stage in range(num_stages)]
    out_of = [[number for number, edge in enumerate(edges) if edge[0] == stage] for stage in range(num_stages)]
    sent, awaited = ([[n for n in own if edges[n][2]] for own in by_stage] for by_stage in (into, out_of))
    return (into, out_of), (awaited, sent)


@dataclass(slots=True, eq=False)
class ReplayedPasses:
    """All F, or all B, of some pipelines, as they are replayed.

    Attributes:
        awaited, sent: ``Channels``.
        arrived: when what nobody has waited for yet is there, by edge and micro-batch.
    """

    seconds: list[Array]  # [stages][members, pipelines]
    awaited: list[list[int]]
    sent: list[list[int]]
    free_s: list[Array]  # [edges][..., pipelines] when the channel has carried all messages so far
    arrived: dict[tuple[int, int], Array] = field(init=False, default_factory=dict)

    def send(self, stage: int, microbatch: int, now: Array, takes_time: bool) -> None:
        """Sends what it makes."""
        raise NotImplementedError


def replay(
    order: ActionOrder,
    passes: tuple[ReplayedPasses, ReplayedPasses],
    clock: list[Array],
    adds: Sequence[Array | float | None],
    num_counted: int,
) -> list[Array]:
    """When the last F or B of each stage is over.

    Args:
        passes: F and B.
        clock: ``[stages][members, pipelines]``, at first; an array in it is never written to.
        adds: by stage, what a B takes longer that finds gradients; None: nothing.
        num_counted: micro-batches that take time, the first ones.
    """
    has_gradients = [False] * len(clock)
    for forward, stage, microbatch in order:
        own = passes[not forward]
        now = clock[stage]
        for edge in own.awaited[stage]:
            now = np.maximum(now, own.arrived.pop((edge, microbatch)))
        takes_time = microbatch < num_counted
        if takes_time:
            now = now + own.seconds[stage]
            more = adds[stage]
            if more is not None and has_gradients[stage] and not forward:
                now += more
        has_gradients[stage] |= not forward
        clock[stage] = now
        own.send(stage, microbatch, now, takes_time)
    return clock


@dataclass(slots=True, eq=False)
class _ChannelPasses(ReplayedPasses):
    """Those of the fastest and of the slowest member, of which the first one sends.

    Attributes:
        first_flow: number of that of the first edge; of each other edge it is two more than of the one before.
        busy: network cards; None where there is one host.
    """

    message_s: list[Array]  # [edges][pipelines]
    first_flow: int
    busy: CardLoads | None

    def send(self, stage: int, microbatch: int, now: Array, takes_time: bool) -> None:
        """Over channels that carry one message after another."""
        for edge in self.sent[stage]:
            arrival = np.maximum(self.free_s[edge], now[0])
            if takes_time:
                arrival += self.message_s[edge]
                if self.busy is not None:
                    self.busy.take(self.first_flow + 2 * edge, now[0])
            self.arrived[edge, microbatch] = self.free_s[edge] = arrival


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
        """When the last one may be done in some pipelines: after the first of each sort all that begin no sooner."""
        flows = {n: np.array(begins)[:, numbers] for n, begins in self._begins.items() if begins}
        every = np.full((len(flows), max(map(len, flows.values()), default=0), len(numbers)), -inf)
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

    All there are, if a chain of as many stages has few; else some multiples of the stages downstream, as far as
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
    most: tuple[int, ...], falling: tuple[tuple[int, int], ...], windows: Windows = ()
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
    schedule: str, num_stages: int, num_microbatches: int, edges: StageEdges, windows: Windows
) -> ActionOrder | None:
    """An order in which all can run; None if backwards are split."""
    pipeline = Pipeline(stage_graph(num_stages, num_microbatches, edges), windows=windows)
    rows = schedule_named(schedule)(pipeline).rows
    if any(action.op not in (Op.FORWARD, Op.BACKWARD) for row in rows for action in row):
        return None
    order = in_order(rows, pipeline)
    if order is None:
        return None
    return tuple((action.op is Op.FORWARD, action.stage, action.microbatch or 0) for action in order)


def stage_graph(num_stages: int, num_microbatches: int, edges: StageEdges) -> StageGraph:
    """Stages with these edges; what is handed over is not said."""
    return StageGraph(num_stages, num_microbatches, tuple(Edge(s, t, (), gradient) for s, t, gradient in edges))


GroupsOfStage = list[tuple[PricedGroup, Flags | slice]]
"""The groups that a stage has, and in which pipelines."""


def edges_of(handed: Iterable[Handed], trains: bool) -> StageEdges:
    """What is handed, as edges."""
    return tuple((one.source, one.destination, one.has_gradient and trains) for one in handed)


def _leaves(frontier: Frontier, expansion: Expansion, positions: Numbers) -> Leaves:
    """The complete children of a prefix."""
    suffixes = frontier.suffixes
    prices = suffixes.prices
    parent = expansion.parent
    table = expansion.table
    rows = expansion.row[positions]
    before = (only(own.stage, np.full(len(rows), row)) for own, row in parent.rows)
    stages = columnwise(lambda *columns: np.array(columns), *before, only(table.stage, rows))
    choice = table.choice[rows]
    ends = frontier.next_groups(parent, table)
    groups: list[GroupsOfStage] = [[(group, slice(None))] for group in frontier.stage_groups(parent)]
    groups.append([(ends[number], choice == number) for number in np.unique(choice)])
    handed = prices.cuts.handed((*parent.cuts, prices.cuts.last))
    return Leaves(
        edges_of(handed, prices.freedom.trains),
        ((expansion, positions),),
        prices.num_counted,
        expansion.bound_s[positions],
        stages,
        _messages_of_groups(suffixes.links, groups, handed, len(rows)),
        cards_of(suffixes.links, groups, handed, stages.card_s),
    )


def _messages_of_groups(
    links: HandoverBounds, groups: Sequence[GroupsOfStage], handed: Sequence[Handed], count: int
) -> Array:
    """``[there and back, edges, pipelines]`` of pipelines that differ in their last stage alone."""
    messages_s = np.zeros((2, len(handed), count))
    for number, one in enumerate(handed):
        ((source, _),) = groups[one.source]
        for group, mine in groups[one.destination]:
            messages_s[:, number, mine] = np.array(links.handed(source, group, one))[:, None]
    return messages_s


def _joined(alike: Sequence[Leaves]) -> Leaves:
    """All of them together."""
    cards = [own.cards for own in alike if own.cards is not None]
    return replace(
        alike[0],
        expansions=tuple(members for own in alike for members in own.expansions),
        bound=np.concatenate([own.bound for own in alike]),
        stages=concatenated(*(own.stages for own in alike)),
        messages_s=np.concatenate([own.messages_s for own in alike], axis=-1),
        cards=np.concatenate(cards, axis=-1) if cards else None,
    )


Whole = tuple[tuple[PricedGroup, ...], tuple[int, ...]]
"""The groups of a pipeline, and the cuts between which they are stages."""


def stages_of(pipelines: Sequence[Whole]) -> BoundedStages:
    """``[stages, pipelines]``: what stages take, those that are priced alike all at once."""
    places: dict[object, list[tuple[int, int, int, int]]] = {}
    group_of: dict[object, PricedGroup] = {}
    for number, (groups, cuts) in enumerate(pipelines):
        for stage, (group, ends) in enumerate(zip(groups, pairwise(cuts), strict=True)):
            group_of[group.alike] = group
            places.setdefault(group.alike, []).append((stage, number, *ends))
    shape = len(pipelines[0][0]), len(pipelines)
    columns: dict[str, Any] = {column.name: np.zeros(shape) for column in fields(BoundedStages)}
    columns["window"] = np.zeros(shape, dtype=np.int64)
    for key, own in places.items():
        stage_of, number_of, first, last = np.array(own).T
        priced = group_of[key].stage(first, last)
        for name, column in columns.items():
            column[stage_of, number_of] = getattr(priced, name)
    return BoundedStages(**columns)


def messages_of(
    links: HandoverBounds, pipelines: Sequence[Whole], handed: Sequence[Sequence[Handed]], edges: StageEdges
) -> Array:
    """``[there and back, edges, pipelines]``: what messages take, by what is handed on in each pipeline."""
    place_of = {edge[:2]: place for place, edge in enumerate(edges)}
    messages_s = np.zeros((2, len(edges), len(pipelines)))
    for number, ((groups, _), own) in enumerate(zip(pipelines, handed, strict=True)):
        for one in own:
            alone_s = links.alone_s(groups[one.source], groups[one.destination], one)
            messages_s[:, place_of[one.source, one.destination], number] = alone_s
    return messages_s


def cards_of(
    links: HandoverBounds, stages: Sequence[GroupsOfStage], handed: Sequence[Handed], sums_s: Array
) -> Array | None:
    """``Leaves.cards`` of pipelines.

    Args:
        sums_s: ``[stages, pipelines]`` that a stage's sum of gradients keeps a card of each of its hosts busy.
    """
    if not links.has_cards:
        return None
    cards = np.zeros((len(stages) + 2 * len(handed), 2 * len(links.hosts), sums_s.shape[1]))
    for own, sum_s, groups in zip(cards, sums_s, stages, strict=False):
        for group, mine in groups:
            for host in {links.hosts[pool] for pool in group.orders[0]}:
                own[2 * host : 2 * host + 2, mine] = sum_s[mine]
    for number, one in enumerate(handed):
        ((source, _),) = stages[one.source]
        for group, mine in stages[one.destination]:
            both = np.array(links.on_cards(source, group, one))
            cards[len(stages) + 2 * number :][:2, :, mine] = both[..., None]
    return cards
