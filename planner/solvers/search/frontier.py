"""Pipelines under construction: a prefix of stages, what it certainly takes, and its best continuations."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields

import numpy as np

from planner.costs.tables import Array
from planner.solvers.candidates.assemble import Candidate
from planner.solvers.search.cuts import Numbers
from planner.solvers.search.devices import Counts, member_orders
from planner.solvers.search.links import Handover
from planner.solvers.search.prices import Group, Stage
from planner.solvers.search.suffix import Choice, Labels, Suffixes


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """The first stages of a pipeline.

    Attributes:
        choices: of each stage.
        rows: of each stage, the table it is in and its number there.
        cuts: stage ``s`` goes from cut ``cuts[s]`` to ``cuts[s + 1]``.
        state: unused devices.
        started_s: the end of the last stage's first F.
        returns_s: what follows once the last gradient has come back to the last stage: its last B, and all upstream.
        window: the least window of the stages, which those behind cannot exceed.
        bound_s: what the stages so far take together.
    """

    choices: tuple[Choice, ...]
    rows: tuple[tuple[Table, int], ...]
    cuts: tuple[int, ...]
    state: Counts
    started_s: float
    returns_s: float
    window: int
    bound_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """All stages that may follow with given devices from a given cut, flat: the same for all prefixes that end there.

    Attributes:
        choice: number of the choice, by stage; last: where the stage ends.
    """

    choices: tuple[Choice, ...]
    choice: Numbers
    last: Numbers
    stage: Stage
    labels: Labels


@dataclass(frozen=True, slots=True, eq=False)
class Expansion:
    """The stages that may follow a prefix, the most promising first; made into prefixes one by one.

    Attributes:
        bound_s: of each child with its best continuation, ascending.
        row: number in the table, by child.
        started_s, returns_s, own_s: of each child, see :class:`Prefix`.
    """

    parent: Prefix
    table: Table
    bound_s: Array
    row: Numbers
    started_s: Array
    returns_s: Array
    own_s: Array
    window: Numbers

    def __len__(self) -> int:
        return len(self.bound_s)

    def only(self, positions: Numbers) -> Expansion:
        """The children at ``positions``."""
        of_child = (self.bound_s, self.row, self.started_s, self.returns_s, self.own_s, self.window)
        return Expansion(self.parent, self.table, *(values[positions] for values in of_child))

    def child(self, position: int) -> Prefix:
        """The prefix number ``position``."""
        parent, row = self.parent, int(self.row[position])
        choice = self.table.choices[self.table.choice[row]]
        return Prefix(
            (*parent.choices, choice),
            (*parent.rows, (self.table, row)),
            (*parent.cuts, int(self.table.last[row])),
            choice.option.left,
            float(self.started_s[position]),
            float(self.returns_s[position]),
            int(self.window[position]),
            float(self.own_s[position]),
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Arrival:
    """How stages are tied to the one before, by row of a table, in seconds.

    Attributes:
        start: when the first F may start; all_there: when the last input can be there.
        upstream: what follows upstream after the last B; all_back: after the first gradient.
        both: the step, if inputs and gradients share a wire.
        window: the most micro-batches in flight before it.
    """

    start: Array
    all_there: Array
    upstream: Array
    all_back: Array
    both: Array
    window: int


@dataclass(slots=True, eq=False)
class Frontier:
    """Makes prefixes longer."""

    suffixes: Suffixes
    _tables: dict[tuple[Counts, int], Table] = field(init=False, default_factory=dict, repr=False)

    def root(self) -> Prefix:
        """No stage yet."""
        count = len(self.suffixes.prices.micro_batches)
        return Prefix((), (), (0,), self.suffixes.devices.all_unused, 0.0, 0.0, count, 0.0)

    def is_complete(self, prefix: Prefix) -> bool:
        """Whether all layers are placed."""
        return prefix.cuts[-1] == self.suffixes.prices.cuts.last

    def expand(self, prefix: Prefix, upper_s: float) -> Expansion:
        """What may follow ``prefix`` in less than ``upper_s``."""
        table = self._table(prefix.state, prefix.cuts[-1])
        stage, labels = table.stage, table.labels
        tied = self._arrival(prefix, table)
        count = len(self.suffixes.prices.micro_batches)
        window = np.minimum(stage.window, tied.window)
        end = np.maximum(labels.end, -(-count // np.maximum(window, 1)) * labels.trip)
        tail = np.maximum(stage.tail, tied.upstream)
        bound = np.maximum.reduce(
            [
                np.full(len(end), prefix.bound_s),
                tied.start + np.maximum(end + tail, labels.total),
                labels.free,
                tied.all_there + labels.trip + tied.upstream,
                tied.start + labels.trip + tied.all_back,
                tied.both,
            ]
        )
        limit = self.suffixes.prices.freedom.max_stages
        if limit and len(prefix.choices) + 1 >= limit:
            bound = np.where(table.last == self.suffixes.prices.cuts.last, bound, np.inf)
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
            window[rows],
        )

    def candidate(self, prefix: Prefix, schedule: str) -> Candidate:
        """The complete pipeline with its ranks: the first free ones of each pool."""
        prices = self.suffixes.prices
        groups = []
        taken = Counter[int]()
        for counts in self._hosts(prefix):
            members = member_orders(prices.pools, counts)[0]
            ranks = []
            for number in members:
                ranks.append(prices.pools[number].ranks[taken[number]])
                taken[number] += 1
            groups.append(tuple(ranks))
        recompute = tuple(choice.group.recompute for choice in prefix.choices)
        return Candidate(
            prices.cuts.stage_of(prefix.cuts),
            tuple(groups),
            tuple(choice.group.shares for choice in prefix.choices),
            prices.micro_batches,
            schedule,
            recompute=recompute if any(recompute) else (),
        )

    def handovers(self, prefix: Prefix) -> list[tuple[Handover, int]]:
        """Between each stage and the next: the messages, and the row of ``Columns``."""
        cuts = self.suffixes.prices.cuts
        found = []
        for number, choice in enumerate(prefix.choices[1:], start=1):
            source = self._renamed(prefix.choices[number - 1])
            column = int(cuts.column[prefix.cuts[number - 1], prefix.cuts[number]])
            found.append((self.suffixes.links.between(source, choice.group), column))
        return found

    def _hosts(self, prefix: Prefix) -> list[Counts]:
        """The devices of each stage by pool, hosts called by their own numbers."""
        devices = self.suffixes.devices
        _, names = devices.canonical(tuple(len(pool.ranks) for pool in devices.pools))
        found = []
        for choice in prefix.choices:
            counts = [0] * len(names)
            for place, count in enumerate(choice.option.group):
                counts[names[place]] = count
            found.append(tuple(counts))
            names = tuple(names[place] for place in choice.option.order)
        return found

    def _renamed(self, choice: Choice) -> Group:
        versions = self.suffixes.prices.versions(choice.option.renamed)
        return next(group for group in versions if group.recompute == choice.group.recompute)

    def _table(self, state: Counts, first: int) -> Table:
        found = self._tables.get((state, first))
        if found is None:
            found = self._tables[state, first] = self._make_table(state, first)
        return found

    def _make_table(self, state: Counts, first: int) -> Table:
        suffixes = self.suffixes
        choices = suffixes.choices(state)
        firsts = np.array([first])
        parts = []
        for number, choice in enumerate(choices):
            lasts = suffixes.lasts(choice)
            lasts = lasts[suffixes.prices.cuts.inside[first, lasts]]
            if not len(lasts):
                continue
            stage, labels = suffixes.stages(choice, firsts, lasts)
            kept = np.flatnonzero(np.isfinite(labels.total[0]) & (labels.free[0] <= suffixes.upper_s))
            parts.append(
                (
                    np.full(len(kept), number),
                    lasts[kept],
                    [np.broadcast_to(getattr(stage, f.name), labels.total.shape)[0, kept] for f in fields(Stage)],
                    [getattr(labels, f.name)[0, kept] for f in fields(Labels)],
                )
            )
        if not parts:
            nothing, none = np.zeros(0), np.zeros(0, dtype=np.int64)
            return Table(choices, none, none, Stage(*[nothing] * 8, none), Labels(*[nothing] * 4))
        number, last, stages, labels_of = zip(*parts, strict=True)
        return Table(
            choices,
            np.concatenate(number),
            np.concatenate(last),
            Stage(*(np.concatenate(column) for column in zip(*stages, strict=True))),
            Labels(*(np.concatenate(column) for column in zip(*labels_of, strict=True))),
        )

    def last_handover(self, prefix: Prefix, table: Table) -> tuple[Array, Array, bool]:
        """From the last stage of ``prefix`` to each choice of ``table``: messages there and back, without the
        executor's overhead, and whether both are certain.
        """
        cuts = self.suffixes.prices.cuts
        column = int(cuts.column[prefix.cuts[-2], prefix.cuts[-1]])
        certain = bool(cuts.columns.linked[column]) and bool(cuts.columns.has_gradient[column])
        source = self._renamed(prefix.choices[-1])
        there, back = np.zeros(len(table.choices)), np.zeros(len(table.choices))
        for number in np.unique(table.choice):
            link = self.suffixes.links.between(source, table.choices[number].group)
            overhead_s = link.overhead[column]
            there[number], back[number] = link.there[column] - overhead_s, link.back_all[column] - overhead_s
        return there, back, certain

    def _arrival(self, prefix: Prefix, table: Table) -> _Arrival:
        """How the stages of ``table`` are tied to the last stage of ``prefix``."""
        zeros = np.zeros(len(table.choice))
        count = len(self.suffixes.prices.micro_batches)
        nothing = _Arrival(zeros, zeros, zeros, zeros, zeros, count)
        if not prefix.choices:
            return nothing
        cuts = self.suffixes.prices.cuts
        column = int(cuts.column[prefix.cuts[-2], prefix.cuts[-1]])
        returns = bool(cuts.columns.has_gradient[column]) and self.suffixes.prices.freedom.trains
        if not cuts.columns.linked[column]:
            return nothing
        source = self._renamed(prefix.choices[-1])
        by_choice = np.zeros((5, len(table.choices)))
        for number in np.unique(table.choice):
            link = self.suffixes.links.between(source, table.choices[number].group)
            by_choice[:2, number] = link.there[column], link.load_there[column]
            if returns:
                after = prefix.returns_s
                by_choice[2:, number] = link.back[column] + after, link.load_back[column] + after, after
                by_choice[4, number] += link.load_both[column]
        there, load_there, upstream, load_back, both = by_choice[:, table.choice]
        begun = prefix.started_s
        return _Arrival(
            begun + there, begun + load_there, upstream, load_back, begun + both, prefix.window if returns else count
        )
