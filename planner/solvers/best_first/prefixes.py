"""Pipelines under construction: a prefix of stages, what it certainly takes, and its best continuations."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from itertools import pairwise

import numpy as np

from planner.costs.candidate import Candidate
from planner.costs.layers.cost_table import Array
from planner.costs.stages.stage_bound import BoundedStages
from planner.ir.lazy import Memo
from planner.solvers.best_first.bound import SORTS, GroupChoice, Labels, Suffixes, rounds_of
from planner.solvers.best_first.device_groups import Counts, at_pools, ranks_apart
from planner.solvers.best_first.graph_cuts import Numbers
from planner.solvers.best_first.message_bound import HandoverBound
from planner.solvers.best_first.priced_groups import PricedGroup, Version


@dataclass(frozen=True, slots=True, eq=False)
class PipelinePrefix:
    """The first stages of a pipeline.

    Attributes:
        choices: of each stage.
        rows: of each stage, the table it is in and its number there.
        cuts: stage ``s`` goes from cut ``cuts[s]`` to ``cuts[s + 1]``.
        state: unused devices.
        started_s: the end of the last stage's first F.
        returns_s: what follows once the last gradient has come back to the last stage: its last B, and all upstream.
        max_in_flight: the least of the stages, which those behind cannot exceed.
        bound_s: what the stages so far take together.
        sums_s: how long network cards are busy with its sums of gradients, in the mean of all hosts, as far as these
            have to wait for the stages behind.
    """

    choices: tuple[GroupChoice, ...]
    rows: tuple[tuple[StageTable, int], ...]
    cuts: tuple[int, ...]
    state: Counts
    started_s: float
    returns_s: float
    max_in_flight: int
    bound_s: float
    sums_s: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class StageTable:
    """All stages that may follow with given devices from a given cut, flat: the same for all prefixes that end there.

    Attributes:
        choice: number of the choice, by stage; last: where the stage ends.
        card_s: of each stage, how long its sum of gradients keeps network cards busy, in the mean of all hosts.
    """

    choices: tuple[GroupChoice, ...]
    choice: Numbers
    last: Numbers
    stage: BoundedStages
    labels: Labels
    card_s: Array


@dataclass(frozen=True, slots=True, eq=False)
class Expansion:
    """The stages that may follow a prefix, the most promising first; made into prefixes one by one.

    Attributes:
        bound_s: of each child with its best continuation, ascending.
        row: number in the table, by child.
        started_s, returns_s, own_s, sums_s: of each child, see :class:`PipelinePrefix`.
    """

    parent: PipelinePrefix
    table: StageTable
    bound_s: Array
    row: Numbers
    started_s: Array
    returns_s: Array
    own_s: Array
    max_in_flight: Numbers
    sums_s: Array

    def __len__(self) -> int:
        return len(self.bound_s)

    def only(self, positions: Numbers) -> Expansion:
        """The children at ``positions``."""
        return Expansion(
            self.parent,
            self.table,
            self.bound_s[positions],
            self.row[positions],
            self.started_s[positions],
            self.returns_s[positions],
            self.own_s[positions],
            self.max_in_flight[positions],
            self.sums_s[positions],
        )

    def child(self, position: int) -> PipelinePrefix:
        """The prefix number ``position``."""
        parent, row = self.parent, int(self.row[position])
        choice = self.table.choices[self.table.choice[row]]
        return PipelinePrefix(
            (*parent.choices, choice),
            (*parent.rows, (self.table, row)),
            (*parent.cuts, int(self.table.last[row])),
            choice.option.left,
            float(self.started_s[position]),
            float(self.returns_s[position]),
            int(self.max_in_flight[position]),
            float(self.own_s[position]),
            float(self.sums_s[position]),
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Arrival:
    """How stages are tied to the one before, by row of a table, in seconds.

    Attributes:
        start: when the first F may start; all_there: when the last input can be there.
        upstream: what follows upstream after the last B; all_back: after the first gradient.
        both: the step, if inputs and gradients share a wire.
        max_in_flight: the most micro-batches in flight before it.
        sums: how long network cards are busy with sums that follow the last B.
    """

    start: Array
    all_there: Array
    upstream: Array
    all_back: Array
    both: Array
    max_in_flight: Numbers
    sums: Array


@dataclass(slots=True, eq=False)
class Frontier:
    """Makes prefixes longer."""

    suffixes: Suffixes
    _tables: Memo[tuple[Counts, int], StageTable] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._tables = Memo(lambda key: self._make_table(*key))

    def root(self) -> PipelinePrefix:
        """No stage yet."""
        count = len(self.suffixes.prices.micro_batches)
        return PipelinePrefix((), (), (0,), self.suffixes.devices.all_unused, 0.0, 0.0, count, 0.0)

    def expand(self, prefix: PipelinePrefix, upper_s: float) -> Expansion:
        """What may follow ``prefix`` in less than ``upper_s``."""
        table = self._tables[prefix.state, prefix.cuts[-1]]
        stage, labels = table.stage, table.labels
        tied = self._arrival(prefix, table)
        max_in_flight = np.minimum(stage.window, tied.max_in_flight)
        rounds = rounds_of(self.suffixes.prices.num_counted, max_in_flight)
        end = np.maximum(labels.end, rounds * labels.trip)
        tail = np.maximum(stage.tail, tied.upstream)
        bound = np.maximum.reduce(
            [
                np.full(len(end), prefix.bound_s),
                tied.start + np.maximum(end + tail, labels.total),
                labels.free,
                tied.all_there + labels.trip + tied.upstream,
                tied.start + labels.trip + tied.all_back,
                tied.both,
                tied.start + labels.sums + tied.sums,
            ]
        )
        cuts = self.suffixes.prices.cuts
        if prefix.choices and cuts.complete:
            bound = np.where(cuts.disorder(prefix.cuts[-2], prefix.cuts[-1], table.last), np.inf, bound)
        limit = self.suffixes.prices.freedom.max_stages
        if limit and len(prefix.choices) + 1 >= limit:
            bound = np.where(table.last == cuts.last, bound, np.inf)
        rows = np.flatnonzero(bound < upper_s)
        rows = rows[np.argsort(bound[rows], kind="stable")]
        own = np.maximum(prefix.bound_s, tied.start + np.maximum(stage.work + tail, stage.all_work + stage.tail))
        return Expansion(
            prefix,
            table,
            bound[rows],
            rows,
            (tied.start + stage.head)[rows],
            (stage.back + tail)[rows],
            own[rows],
            max_in_flight[rows],
            (tied.sums + table.card_s)[rows],
        )

    def candidate(self, prefix: PipelinePrefix, schedule: str) -> Candidate:
        """The complete pipeline with its ranks: the first free ones of each pool."""
        prices = self.suffixes.prices
        recompute = tuple(choice.group.recompute for choice in prefix.choices)
        return Candidate(
            prices.cuts.stage_of(prefix.cuts),
            ranks_apart(prices.pools, self._hosts(prefix)),
            tuple(
                choice.group.shares_between(*ends)
                for choice, ends in zip(prefix.choices, pairwise(prefix.cuts), strict=True)
            ),
            prices.micro_batches,
            schedule,
            recompute=recompute if any(recompute) else (),
        )

    def stage_groups(self, prefix: PipelinePrefix) -> list[PricedGroup]:
        """The group of each stage, hosts called by their own numbers."""
        pairs = zip(self._hosts(prefix), prefix.choices, strict=True)
        return [self._version(counts, choice.group.version) for counts, choice in pairs]

    def next_groups(self, prefix: PipelinePrefix, table: StageTable) -> list[PricedGroup]:
        """The same of each choice of a stage behind ``prefix``."""
        names = self._names(prefix)
        return [self._version(at_pools(c.option.group, names, len(names)), c.group.version) for c in table.choices]

    def _hosts(self, prefix: PipelinePrefix) -> list[Counts]:
        """The devices of each stage by pool, hosts called by their own numbers."""
        names = [self._names(prefix, number) for number in range(len(prefix.choices))]
        return [at_pools(c.option.group, own, len(own)) for c, own in zip(prefix.choices, names, strict=True)]

    def _names(self, prefix: PipelinePrefix, stages: int | None = None) -> Counts:
        """What the pools of the state behind the first ``stages`` stages are called."""
        devices = self.suffixes.devices
        _, names = devices.canonical(tuple(len(pool.ranks) for pool in devices.pools))
        for choice in prefix.choices[:stages]:
            names = tuple(names[place] for place in choice.option.order)
        return names

    def _version(self, counts: Counts, version: Version) -> PricedGroup:
        return next(g for g in self.suffixes.prices.versions(counts) if g.version == version)

    def _renamed(self, choice: GroupChoice) -> PricedGroup:
        return self._version(choice.option.renamed, choice.group.version)

    def _make_table(self, state: Counts, first: int) -> StageTable:
        suffixes = self.suffixes
        choices = suffixes.choices(state)
        firsts = np.array([first])
        parts = []
        for number, choice in enumerate(choices):
            begin, lasts = suffixes.pairs(choice, firsts)
            if not len(lasts):
                continue
            stage, labels = suffixes.stages(choice, begin, lasts)
            kept = np.flatnonzero(np.isfinite(labels.total) & (labels.free <= suffixes.upper_s))
            parts.append(
                (
                    np.full(len(kept), number),
                    lasts[kept],
                    [getattr(stage, f.name)[kept] for f in fields(BoundedStages)],
                    [getattr(labels, f.name)[kept] for f in fields(Labels)],
                    suffixes.card_s(choice, stage)[kept],
                )
            )
        if not parts:
            nothing, none = np.zeros(0), np.zeros(0, dtype=np.int64)
            stage = BoundedStages(nothing, nothing, nothing, nothing, nothing, nothing, nothing, nothing, nothing, none)
            return StageTable(choices, none, none, stage, Labels.of(np.zeros((len(SORTS), 0))), nothing)
        number, last, stages, labels_of, cards = zip(*parts, strict=True)
        return StageTable(
            choices,
            np.concatenate(number),
            np.concatenate(last),
            BoundedStages(*(np.concatenate(column) for column in zip(*stages, strict=True))),
            Labels(*(np.concatenate(column) for column in zip(*labels_of, strict=True))),
            np.concatenate(cards),
        )

    def columns(self, prefix: PipelinePrefix, table: StageTable) -> Numbers:
        """By row of ``table``, the row of ``HandoverColumns`` for what comes from the last stage of ``prefix``."""
        cuts = self.suffixes.prices.cuts
        content = cuts.content[prefix.cuts[-1], table.last]
        return np.asarray(cuts.column[content, prefix.cuts[-2], prefix.cuts[-1]])

    def last_handovers(self, prefix: PipelinePrefix, table: StageTable, rows: Numbers) -> dict[str, Array]:
        """Messages from the last stage of ``prefix`` to each of some ``rows`` of ``table``; see ``HandoverBound``."""
        source = self._renamed(prefix.choices[-1])
        columns = self.columns(prefix, table)[rows]
        names = [one.name for one in fields(HandoverBound)]
        seconds = {name: np.zeros(len(rows)) for name in names}
        for number in np.unique(table.choice[rows]):
            link = self.suffixes.links.between(source, table.choices[number].group)
            mine = table.choice[rows] == number
            for name in names:
                seconds[name][mine] = getattr(link, name)[columns[mine]]
        return seconds

    def _arrival(self, prefix: PipelinePrefix, table: StageTable) -> _Arrival:
        """How the stages of ``table`` are tied to the last stage of ``prefix``."""
        zeros = np.zeros(len(table.choice))
        count = np.full(len(table.choice), len(self.suffixes.prices.micro_batches))
        if not prefix.choices or not len(zeros):
            return _Arrival(zeros, zeros, zeros, zeros, zeros, count, zeros)
        columns, freedom = self.suffixes.prices.cuts.columns, self.suffixes.prices.freedom
        column = self.columns(prefix, table)
        linked = columns.linked[column]
        returns = columns.has_gradient[column] & freedom.trains
        link = self.last_handovers(prefix, table, np.arange(len(column)))
        begun, after = prefix.started_s, prefix.returns_s
        return _Arrival(
            start=np.where(linked, begun + link["there"], 0.0),
            all_there=np.where(linked, begun + link["load_there"], 0.0),
            upstream=np.where(returns, link["back"] + after, 0.0),
            all_back=np.where(returns, link["load_back"] + after, 0.0),
            both=np.where(returns, begun + link["load_both"] + after, 0.0),
            max_in_flight=np.where(returns, prefix.max_in_flight, count),
            sums=np.where(returns, prefix.sums_s, 0.0),
        )
