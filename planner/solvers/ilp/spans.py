"""The tables of the integer program: every span that may be a stage, and every hand-over between two groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import product

import numpy as np
from numpy.typing import NDArray

from planner.costs.tables import Array
from planner.ir.constraints import Ways
from planner.ir.errors import MissingMeasurementError
from planner.ir.problem import ALWAYS, NEVER, Problem
from planner.solvers.candidates.rules import Constraints
from planner.solvers.ilp.crossing import Flags, Messages
from planner.solvers.ilp.groups import DeviceClass, Group
from planner.solvers.ilp.prices import Prices, Pricing

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Layers from one cut to another as a stage of a group; an entry a span.

    Attributes:
        first, last: cuts, by index.
        group: by number.
        recompute: whether activations are computed again.
        there_s, round_s: F; F and B: with what its message takes beyond the least at that cut.
        turn_s, work_s, last_s: as in :class:`planner.solvers.ilp.prices.Prices`.
        depth: most stages downstream, itself included, with which it fits in memory.
        linked, linked_back: whether the stage behind certainly reads from it, and sends a gradient back.
    """

    first: Indices
    last: Indices
    group: Indices
    recompute: Flags
    there_s: Array
    round_s: Array
    turn_s: Array
    work_s: Array
    last_s: Array
    depth: Indices
    linked: Flags
    linked_back: Flags

    def __len__(self) -> int:
        return len(self.first)

    def where(self, keep: Flags) -> Spans:
        """Those that ``keep`` picks."""
        return Spans(*(getattr(self, field.name)[keep] for field in fields(self)))


@dataclass(frozen=True, slots=True, eq=False)
class Handovers:
    """What a message at a cut between two groups takes at least: there, and there and back."""

    cut: Indices
    source: Indices
    destination: Indices
    there_s: Array
    round_s: Array

    def __len__(self) -> int:
        return len(self.cut)

    def where(self, keep: Flags) -> Handovers:
        """Those that ``keep`` picks."""
        return Handovers(*(getattr(self, field.name)[keep] for field in fields(self)))


@dataclass(frozen=True, slots=True, eq=False)
class Instance:
    """What the program is about.

    Attributes:
        cuts: positions in the list of layers, both ends included.
        num_microbatches: of a step.
        most_stages: at most.
        stage_rules: (number of the stage, whether fixed, layers).
    """

    cuts: tuple[int, ...]
    classes: tuple[DeviceClass, ...]
    groups: tuple[Group, ...]
    spans: Spans
    handovers: Handovers
    most_stages: int
    stage_rules: tuple[tuple[int, bool, tuple[int, ...]], ...] = ()

    @property
    def end(self) -> int:
        """The last cut, by index."""
        return len(self.cuts) - 1


@dataclass(frozen=True, slots=True, eq=False)
class Builder:
    """Makes tables for one way to cut the batch; ``mixing``: layers that mix samples, by layer."""

    problem: Problem
    constraints: Constraints
    pricing: Pricing
    messages: Messages
    classes: tuple[DeviceClass, ...]
    groups: tuple[Group, ...]
    mixing: Flags

    def handovers(self) -> Handovers:
        """Between all groups that can run at once, at all inner cuts."""
        rows = [
            (cut, i, j, there[cut], back[cut])
            for i in range(len(self.groups))
            for j in self._followers(i)
            for there, back in [self._least(self.groups[i], self.groups[j])]
            for cut in range(1, len(self.pricing.cuts) - 1)
        ]
        index = np.array([row[:3] for row in rows], dtype=np.int64).reshape(len(rows), 3)
        seconds = np.array([row[3:] for row in rows], dtype=np.float64).reshape(len(rows), 2)
        return Handovers(index[:, 0], index[:, 1], index[:, 2], seconds[:, 0], seconds[:, 1])

    def spans(self, in_flight: Sequence[int] | None) -> Spans:
        """All that the rules and memory allow.

        Args:
            in_flight: micro-batches by stages downstream, from 1; None: as if memory had no end.
        """
        parts = [self._of_group(number, again, prices, in_flight) for number, again, prices in self._prices()]
        empty = [np.zeros(0, dtype=kind) for kind in "lll?" + "ddddd" + "l??"]
        return Spans(*(np.concatenate(column) for column in zip(empty, *parts, strict=True)))

    def _prices(self) -> Iterator[tuple[int, bool, Prices]]:
        options = {NEVER: (False,), ALWAYS: (True,)}.get(self.problem.recompute, (False, True))
        for (number, group), again in product(enumerate(self.groups), options):
            try:
                yield number, again, self.pricing.of(group, again)
            except MissingMeasurementError:
                continue

    def _of_group(
        self, number: int, again: bool, prices: Prices, in_flight: Sequence[int] | None
    ) -> tuple[NDArray[np.generic], ...]:
        group, crossing = self.groups[number], self.pricing.crossing
        allowed = self.constraints.mask(self.pricing.cuts, group.ranks, again, Ways(sample=group.size))
        if group.size > 1:
            mixing = np.concatenate(([0], np.cumsum(self.mixing)))[list(self.pricing.cuts)]
            allowed &= mixing[None, :] == mixing[:, None]
        depth = self._depth(group, prices, in_flight)
        first, last = np.nonzero(allowed & (depth > 0))
        more_there, more_round = (matrix[first, last] for matrix in self._more(number))
        at = (first, last)
        return (
            first.astype(np.int64),
            last.astype(np.int64),
            np.full(len(first), number, dtype=np.int64),
            np.full(len(first), again),
            prices.forward_s[at] + more_there,
            prices.forward_s[at] + prices.backward_s[at] + more_round,
            prices.turn_s[at],
            prices.work_s[at],
            prices.last_s[at],
            depth[at],
            crossing.linked[at],
            crossing.linked_back[at],
        )

    def _depth(self, group: Group, prices: Prices, in_flight: Sequence[int] | None) -> Indices:
        """The most stages downstream with which a span fits; 0 if it never does."""
        found = np.zeros(prices.work_s.shape, dtype=np.int64)
        if in_flight is None:
            return found + len(self.problem.ranks)
        for downstream, count in enumerate(in_flight, start=1):
            rounding = count + 2  # the simulator rounds bytes slot by slot
            needed = prices.needed_bytes(count, self.pricing.micro_batches)
            found[needed <= group.memory_limit_bytes + rounding] = downstream
        return found

    def _followers(self, number: int) -> Iterator[int]:
        """Groups, by number, that have devices enough to run beside this one."""
        for other, group in enumerate(self.groups):
            taken = [a + b for a, b in zip(self.groups[number].takes, group.takes, strict=True)]
            if all(count <= len(c.ranks) for count, c in zip(taken, self.classes, strict=True)):
                yield other

    def _least(self, source: Group, destination: Group) -> tuple[Array, Array]:
        """By cut: the least that any linked stage of ``source`` pays there, for the way there and for both ways."""
        crossing = self.pricing.crossing
        there, back = self.messages.there_s(source, destination), self.messages.back_s(source, destination)
        least = [
            np.where(linked, seconds, np.inf).min(axis=0)
            for linked, seconds in ((crossing.linked, there), (crossing.linked_back, there + back))
        ]
        return np.where(np.isfinite(least[0]), least[0], 0.0), np.where(np.isfinite(least[1]), least[1], 0.0)

    def _more(self, number: int) -> tuple[Array, Array]:
        """By span: what the message takes beyond :meth:`_least`, to whatever group it goes."""
        crossing, source = self.pricing.crossing, self.groups[number]
        there, both = [], []
        for other in self._followers(number):
            destination = self.groups[other]
            seconds, back = self.messages.there_s(source, destination), self.messages.back_s(source, destination)
            least_there, least_both = self._least(source, destination)
            there.append(seconds - least_there)
            both.append(seconds + back - least_both)
        if not there:
            return np.zeros(crossing.linked.shape), np.zeros(crossing.linked.shape)
        more_there, more_both = np.minimum.reduce(there), np.minimum.reduce(both)
        return np.where(crossing.linked, more_there, 0.0), np.where(crossing.linked_back, more_both, 0.0)
