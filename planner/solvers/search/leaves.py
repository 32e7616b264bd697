"""Complete pipelines, many at once: a simulation of all of them that never says more than the true one.

Each stage is two rows of clocks: that of its fastest member, from which the neighbours hear first, and that of its
slowest, which hears no earlier than the fastest neighbour speaks.  Both follow the order of the schedule, messages of a
channel travel one after another, and every duration is the least of what it stands for; so every clock is a lower
bound of those of its stage, and where members are alike the bound is what the simulator says.  One numpy operation an
action serves all pipelines of as many stages.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import comb

import numpy as np

from planner.costs.tables import Array
from planner.ir.schedule import Action, Op, Pipeline, StageGraph
from planner.schedules import schedule as schedule_named
from planner.schedules import traits
from planner.solvers.search.cuts import Numbers
from planner.solvers.search.frontier import Expansion, Frontier, Prefix

CAPS = (1, 2, 3, 4, 6)
"""Windows that a windowed schedule tries: so many times the stages downstream, as far as memory allows."""

FEW_WINDOWS = 40
"""Up to so many windows all are tried."""


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """A complete pipeline under one schedule, and what it takes at least."""

    bound_s: float
    prefix: Prefix
    schedule: str
    windows: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Leaves:
    """Pipelines of equally many stages; arrays are (stage, pipeline) or (boundary, pipeline).

    Attributes:
        heads, backs: (stage, 2, pipeline): of the fastest and of the slowest member.
        adds: what a B that finds gradients takes longer.
        there, back: messages; infinite where nothing certain is sent.
        windows: the most that memory lets each stage keep.
    """

    expansions: tuple[tuple[Expansion, Numbers], ...]
    bound: Array
    heads: Array
    backs: Array
    adds: Array
    tails: Array
    there: Array
    back: Array
    linked: np.ndarray
    windows: Numbers

    @classmethod
    def of(cls, frontier: Frontier, found: Sequence[tuple[Expansion, Numbers]]) -> Leaves:
        """The complete children (by position) of prefixes of equally many stages."""
        parts = [_arrays(frontier, expansion, positions) for expansion, positions in found]
        joined = [np.concatenate(column, axis=-1) for column in zip(*parts, strict=True)]
        return cls(tuple(found), *joined)

    def __len__(self) -> int:
        return len(self.bound)

    def prefix(self, number: int) -> Prefix:
        """The pipeline number ``number``."""
        for expansion, positions in self.expansions:
            if number < len(positions):
                return expansion.child(int(positions[number]))
            number -= len(positions)
        raise IndexError(number)

    def under(self, schedule: str, num_microbatches: int, upper_s: float) -> Iterator[Leaf]:
        """The pipelines that may take less than ``upper_s`` under a schedule, each with its windows."""
        for windows, numbers in self._windows(schedule, num_microbatches):
            bound = self._bound(schedule, windows, num_microbatches, numbers)
            for number in np.flatnonzero(bound < upper_s):
                leaf = int(numbers[number])
                yield Leaf(float(bound[number]), self.prefix(leaf), schedule, windows)

    def _bound(self, schedule: str, windows: tuple[int, ...], num_microbatches: int, numbers: Numbers) -> Array:
        num_stages = len(self.heads)
        order = _order(schedule, num_stages, num_microbatches, windows)
        if order is None or not self.linked.all():
            return np.asarray(self.bound[numbers])
        clock = np.zeros((num_stages, 2, len(numbers)))
        heads, backs, adds = self.heads[..., numbers], self.backs[..., numbers], self.adds[:, numbers]
        there, back = self.there[:, numbers], self.back[:, numbers]
        wire_there, wire_back = np.zeros_like(there), np.zeros_like(back)
        arrived: dict[tuple[bool, int, int], Array] = {}
        first = [True] * num_stages
        for forward, stage, microbatch in order:
            source = stage - 1 if forward else stage + 1
            now = clock[stage]
            if 0 <= source < num_stages:
                now = np.maximum(now, arrived.pop((forward, stage, microbatch)))
            if forward:
                now = now + heads[stage]
            else:
                now = now + backs[stage] + (0.0 if first[stage] else adds[stage])
                first[stage] = False
            clock[stage] = now
            if forward and stage + 1 < num_stages:
                wire_there[stage] = np.maximum(wire_there[stage], now[0]) + there[stage]
                arrived[True, stage + 1, microbatch] = wire_there[stage].copy()
            elif not forward and stage > 0:
                wire_back[stage - 1] = np.maximum(wire_back[stage - 1], now[0]) + back[stage - 1]
                arrived[False, stage - 1, microbatch] = wire_back[stage - 1].copy()
        end = (clock.max(axis=1) + self.tails[:, numbers]).max(axis=0)
        return np.maximum(self.bound[numbers], end)

    def _windows(self, schedule: str, num_microbatches: int) -> Iterator[tuple[tuple[int, ...], Numbers]]:
        """The windows to try under a schedule, and the pipelines to try them on."""
        every = np.arange(len(self))
        if not traits(schedule).windowed:
            yield (), every
            return
        held = np.minimum.accumulate(self.windows, axis=0)  # no stage can have more in flight than the one before
        seen: dict[tuple[int, ...], list[int]] = {}
        for most in np.unique(held, axis=1).T:
            numbers = np.flatnonzero((held == most[:, None]).all(axis=0))
            for windows in windows_to_try(tuple(most.tolist()), num_microbatches):
                seen.setdefault(windows, []).extend(numbers.tolist())
        for windows, found in seen.items():
            yield windows, np.unique(found)


@functools.lru_cache(maxsize=4096)
def windows_to_try(most: tuple[int, ...], num_microbatches: int) -> tuple[tuple[int, ...], ...]:
    """Windows of the stages of a chain, none above ``most`` (which never grows) nor above the window before.

    All there are, if they are few; else some multiples of the stages downstream, as far as ``most`` allows.
    """
    num_stages = len(most)
    if comb(num_microbatches + num_stages - 1, num_stages) <= FEW_WINDOWS:
        every = product(*(range(1, window + 1) for window in most))
        return tuple(windows for windows in every if all(a >= b for a, b in pairwise(windows)))
    found = {}
    for cap in CAPS:
        capped = [min(window, cap * (num_stages - 1 - s) + 1) for s, window in enumerate(most)]
        found[tuple(capped)] = None
    return tuple(found)


@functools.lru_cache(maxsize=4096)
def _order(
    schedule: str, num_stages: int, num_microbatches: int, windows: tuple[int, ...]
) -> tuple[tuple[bool, int, int], ...] | None:
    """(forward?, stage, micro-batch) of a chain in an order in which all can run; None if backwards are split."""
    chain = StageGraph.chain(num_stages, num_microbatches)
    rows = schedule_named(schedule)(Pipeline(chain, windows=windows)).rows
    position = [0] * num_stages
    done: set[Action] = set()
    found: list[tuple[bool, int, int]] = []
    while True:
        before = len(found)
        for stage, row in enumerate(rows):
            while position[stage] < len(row):
                action = row[position[stage]]
                forward = action.op is Op.FORWARD
                if action.op not in (Op.FORWARD, Op.BACKWARD) or action.microbatch is None:
                    return None
                source = stage - 1 if forward else stage + 1
                if 0 <= source < num_stages and Action(source, action.op, action.microbatch) not in done:
                    break
                done.add(action)
                found.append((forward, stage, action.microbatch))
                position[stage] += 1
        if len(found) == before:
            return tuple(found)


def _arrays(frontier: Frontier, expansion: Expansion, positions: Numbers) -> tuple[Array, ...]:
    table, rows = expansion.table, expansion.row[positions]
    count = len(rows)
    parent = expansion.parent

    def by_stage(name: str) -> Array:
        before = [np.full(count, getattr(t.stage, name)[row]) for t, row in parent.rows]
        return np.array([*before, getattr(table.stage, name)[rows]])

    boundaries = frontier.handovers(parent)
    there = [np.full(count, (link.there - link.overhead)[column]) for link, column in boundaries]
    back = [np.full(count, (link.back_all - link.overhead)[column]) for link, column in boundaries]
    columns = frontier.suffixes.prices.cuts.columns
    linked = [columns.linked[column] and columns.has_gradient[column] for _, column in boundaries]
    if parent.choices:
        last_there, last_back, last_linked = frontier.last_handover(parent, table)
        there.append(last_there[table.choice[rows]])
        back.append(last_back[table.choice[rows]])
        linked.append(last_linked)
    shape = (len(there), count)
    return (
        expansion.bound_s[positions],
        np.stack([by_stage("head"), by_stage("slow_head")], axis=1),
        np.stack([by_stage("back"), by_stage("slow_back")], axis=1),
        by_stage("adds"),
        by_stage("tail"),
        np.array(there).reshape(shape),
        np.array(back).reshape(shape),
        np.broadcast_to(np.array(linked, dtype=bool)[:, None], shape),
        by_stage("window"),
    )
