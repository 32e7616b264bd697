"""Pipelines under construction: a prefix of stages, what it certainly takes, and its best continuations."""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import starmap
from typing import Any

import numpy as np

from planner.costs.candidate import Candidate
from planner.costs.layers.cost_table import Array
from planner.costs.stages.stage_bound import BoundedStages, concatenated, only
from planner.ir.lazy import once
from planner.solvers.best_first.bound import GroupChoice, Suffixes
from planner.solvers.best_first.device_groups import Counts, at_pools
from planner.solvers.best_first.graph_cuts import Flags, Numbers
from planner.solvers.best_first.message_bound import HandoverBound
from planner.solvers.best_first.priced_groups import PricedGroup
from planner.solvers.best_first.recurrence import SORTS, Before, Labels, joined, rounds_of


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
        max_in_flight: the least of the stages, which later ones cannot exceed.
        bound_s: what the stages so far take together.
        sums_s: how long network cards are busy with its sums of gradients, in the mean of all hosts, as far as these
            have to wait for later stages.
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
        columns = (getattr(self, column.name)[positions] for column in fields(self)[2:])
        return Expansion(self.parent, self.table, *columns)

    def child(self, position: int) -> PipelinePrefix:
        """The prefix number ``position``."""
        parent = self.parent
        row = int(self.row[position])
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


@dataclass(eq=False)
class Frontier:
    """Makes prefixes longer."""

    suffixes: Suffixes

    def root(self) -> PipelinePrefix:
        """No stage yet."""
        count = self.suffixes.prices.num_microbatches
        return PipelinePrefix((), (), (0,), self.suffixes.devices.all_unused, 0.0, 0.0, count, 0.0)

    def expand(self, prefix: PipelinePrefix, upper_s: float) -> Expansion:
        """What may follow ``prefix`` in less than ``upper_s``."""
        table = self._table(prefix.state, prefix.cuts[-1])
        stage = table.stage
        before, most = self._before(prefix, table)
        max_in_flight = np.minimum(stage.window, most)
        rounds = rounds_of(self.suffixes.prices.num_counted, max_in_flight)
        bound_s = np.maximum(prefix.bound_s, joined(before, stage, table.labels, rounds))
        bound_s = np.where(self._may_follow(prefix, table), bound_s, np.inf)
        rows = np.flatnonzero(bound_s < upper_s)
        rows = rows[np.argsort(bound_s[rows], kind="stable")]
        tail_s = np.maximum(stage.tail_s, before.after_last_s)
        done_s = np.maximum(stage.work_s + tail_s, stage.all_work_s + stage.tail_s)
        own_s = np.maximum(prefix.bound_s, before.start_s + done_s)
        return Expansion(
            prefix,
            table,
            bound_s[rows],
            rows,
            (before.start_s + stage.forward_s)[rows],
            (stage.backward_s + tail_s)[rows],
            own_s[rows],
            max_in_flight[rows],
            (before.sums_s + table.card_s)[rows],
        )

    def _may_follow(self, prefix: PipelinePrefix, table: StageTable) -> Flags:
        """By row of the table, whether the order of stages and their number allow it."""
        cuts = self.suffixes.prices.cuts
        limit = self.suffixes.prices.freedom.max_stages
        allowed = np.ones(len(table.last), dtype=bool)
        if prefix.choices and cuts.merges_orders:
            allowed = ~cuts.disorder(prefix.cuts[-2], prefix.cuts[-1], table.last)
        if limit and len(prefix.choices) + 1 >= limit:
            allowed = allowed & (table.last == cuts.last)
        return allowed

    def _before(self, prefix: PipelinePrefix, table: StageTable) -> tuple[Before, Numbers]:
        """``prefix`` as the next stage sees it, by row of a table, and the most micro-batches that it leaves that."""
        prices = self.suffixes.prices
        most = np.full(len(table.last), prices.num_microbatches)
        if not prefix.choices or not len(most):
            return Before(*(np.zeros(len(most)),) * len(fields(Before))), most
        *_, ahead, begin = prefix.cuts
        crossing = prices.cuts.crossing_of[prices.cuts.content[begin, table.last], ahead, begin]
        reads = prices.cuts.crossings.linked[crossing]
        returns = prices.returns()[crossing]
        link = self._handovers(prefix, table, crossing)
        started_s = prefix.started_s
        returns_s = prefix.returns_s
        before = Before(
            start_s=np.where(reads, started_s + link.forward_s, 0.0),
            last_input_s=np.where(reads, started_s + link.load_forward_s, 0.0),
            after_last_s=np.where(returns, link.least_backward_s + returns_s, 0.0),
            after_first_s=np.where(returns, link.load_backward_s + returns_s, 0.0),
            both_ways_s=np.where(returns, started_s + link.load_both_s + returns_s, 0.0),
            sums_s=np.where(returns, prefix.sums_s, 0.0),
        )
        return before, np.where(returns, prefix.max_in_flight, most)

    def candidate(self, prefix: PipelinePrefix, schedule: str) -> Candidate:
        """The complete pipeline with its ranks."""
        return self.suffixes.prices.pipeline(self.stage_groups(prefix), prefix.cuts, schedule)

    def stage_groups(self, prefix: PipelinePrefix) -> list[PricedGroup]:
        """The group of each stage, hosts called by their own numbers."""
        names = (self._names(prefix, number) for number in range(len(prefix.choices)))
        return [
            self.suffixes.version(at_pools(choice.option.group, own, len(own)), choice.group.version)
            for choice, own in zip(prefix.choices, names, strict=True)
        ]

    def next_groups(self, prefix: PipelinePrefix, table: StageTable) -> list[PricedGroup]:
        """The same of each choice of a stage after ``prefix``."""
        names = self._names(prefix)
        groups = ((at_pools(c.option.group, names, len(names)), c.group.version) for c in table.choices)
        return list(starmap(self.suffixes.version, groups))

    def _names(self, prefix: PipelinePrefix, stages: int | None = None) -> Counts:
        """What the pools of the state after the first ``stages`` stages are called."""
        devices = self.suffixes.devices
        _, names = devices.canonical(tuple(len(pool.ranks) for pool in devices.pools))
        for choice in prefix.choices[:stages]:
            names = tuple(names[place] for place in choice.option.order)
        return names

    @once
    def _table(self, state: Counts, first: int) -> StageTable:
        suffixes = self.suffixes
        choices = suffixes.choices(state)
        firsts = np.array([first])
        parts = []
        for number, choice in enumerate(choices):
            begin, lasts = suffixes.pairs(choice, firsts)
            if not len(lasts):
                continue
            stage, labels = suffixes.stages(choice, begin, lasts)
            kept = np.flatnonzero(np.isfinite(labels.end_s) & (labels.step_s <= suffixes.upper_s))
            parts.append(
                (
                    np.full(len(kept), number),
                    lasts[kept],
                    only(stage, kept),
                    only(labels, kept),
                    suffixes.card_s(choice, stage)[kept],
                )
            )
        numbers = np.zeros(0, dtype=np.int64)
        nothing = np.zeros(0)
        columns: list[Any] = [nothing] * (len(fields(BoundedStages)) - 1)
        no_stages = BoundedStages(*[*columns, numbers])  # windows are whole numbers
        empty = (numbers, numbers, no_stages, Labels(*[nothing] * len(SORTS)), nothing)
        number, last, stages, labels_of, cards = zip(empty, *parts, strict=True)
        return StageTable(
            choices,
            np.concatenate(number),
            np.concatenate(last),
            concatenated(*stages),
            concatenated(*labels_of),
            np.concatenate(cards),
        )

    def _handovers(self, prefix: PipelinePrefix, table: StageTable, crossing: Numbers) -> HandoverBound:
        """Messages from the last stage of ``prefix`` to each row of ``table``, by which crossing it is."""
        source = self.suffixes.renamed(prefix.choices[-1])
        names = [one.name for one in fields(HandoverBound)]
        seconds = {name: np.zeros(len(crossing)) for name in names}
        for number in np.unique(table.choice):
            link = self.suffixes.links.between(source, table.choices[number].group)
            mine = table.choice == number
            for name in names:
                seconds[name][mine] = getattr(link, name)[crossing[mine]]
        return HandoverBound(**seconds)
