"""Pipelines under construction: a prefix of stages, what it certainly takes, and its best continuations."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.costs.tables import Array
from planner.solvers.candidates.assemble import Candidate
from planner.solvers.search.bounds import Bounds, Levels, Remaining
from planner.solvers.search.groups import Group
from planner.solvers.search.suffix import Suffixes


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """The first stages of a pipeline.

    Attributes:
        groups: of each stage.
        cuts: stage ``s`` goes from cut ``cuts[s]`` to ``cuts[s + 1]``.
        remaining: unused devices.
        level: budget of stages downstream for what follows, see ``Bounds.level_after``.
        start_s: before the last stage's first F.
        tail_s: after the last stage's last B.
        bound_s: what the stages so far take together.
    """

    suffixes: Suffixes
    groups: tuple[Group, ...]
    cuts: tuple[int, ...]
    remaining: Remaining
    level: int
    start_s: float
    tail_s: float
    bound_s: float

    @classmethod
    def root(cls, suffixes: Suffixes) -> Node:
        """No stage yet."""
        bounds = suffixes.bounds
        remaining = tuple(len(pool.ranks) for pool in bounds.pools)
        return cls(suffixes, (), (0,), remaining, bounds.any_level, 0.0, 0.0, 0.0)

    @property
    def bounds(self) -> Bounds:
        """Prices of stages."""
        return self.suffixes.bounds

    @property
    def is_complete(self) -> bool:
        """Whether all layers are placed."""
        return self.cuts[-1] == len(self.bounds.stretches.cuts) - 1

    def candidate(self) -> Candidate:
        """The complete pipeline with its ranks: the first free ones of each pool."""
        free = [0] * len(self.bounds.pools)
        ranks = []
        for group in self.groups:
            first = free[group.pool]
            free[group.pool] += group.size
            ranks.append(self.bounds.pools[group.pool].ranks[first : first + group.size])
        bounds = tuple(self.bounds.stretches.cuts[cut] for cut in self.cuts)
        shares = tuple(group.shares for group in self.groups)
        return Candidate.chain(bounds, tuple(ranks), shares, self.bounds.micro_batches, self.bounds.schedule)


@dataclass(frozen=True, slots=True, eq=False)
class Expansion:
    """All ways to add one stage to a node, the most promising first; made into nodes one by one.

    Attributes:
        bound_s: of each child and its best continuation, ascending, finite.
        choice: number of the group, by child.
        cut: where the child's last stage ends.
        prefix_s, tail_s: the child's own ``bound_s`` and ``tail_s``.
        level: the child's.
        start_s: by group.
    """

    parent: Node
    options: tuple[tuple[Group, Remaining], ...]
    bound_s: Array
    choice: Levels
    cut: Levels
    prefix_s: Array
    tail_s: Array
    level: Levels
    start_s: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.bound_s)

    def child(self, position: int) -> Node:
        """The node number ``position``."""
        parent, choice = self.parent, int(self.choice[position])
        group, left = self.options[choice]
        return Node(
            parent.suffixes,
            (*parent.groups, group),
            (*parent.cuts, int(self.cut[position])),
            left,
            int(self.level[position]),
            self.start_s[choice],
            float(self.tail_s[position]),
            float(self.prefix_s[position]),
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Row:
    """The children that use one group, by the cut at which its stage ends."""

    start_s: float
    bound_s: Array
    prefix_s: Array
    tail_s: Array
    level: Levels


def expand(node: Node, max_stages: int) -> Expansion:
    """The children of ``node`` that may still fit.

    Args:
        max_stages: most stages; 0 for no limit.
    """
    options = tuple(node.bounds.used(node.remaining))
    must_end = max_stages > 0 and len(node.groups) + 1 >= max_stages
    rows = [_row(node, group, left, must_end) for group, left in options]
    num_cuts = len(node.bounds.stretches.cuts)
    bound_s = np.concatenate([row.bound_s for row in rows]) if rows else np.zeros(0)
    order = np.argsort(bound_s, kind="stable")[: int(np.isfinite(bound_s).sum())]
    nothing = np.zeros(0)
    return Expansion(
        node,
        options,
        bound_s[order],
        order // num_cuts,
        order % num_cuts,
        np.concatenate([row.prefix_s for row in rows] or [nothing])[order],
        np.concatenate([row.tail_s for row in rows] or [nothing])[order],
        np.concatenate([row.level for row in rows] or [nothing.astype(np.int64)])[order],
        tuple(row.start_s for row in rows),
    )


def _row(node: Node, group: Group, left: Remaining, must_end: bool) -> _Row:
    bounds, first = node.bounds, node.cuts[-1]
    last = len(bounds.stretches.cuts) - 1
    level = np.minimum(bounds.budgets[group.pool, group.size][first], node.level)
    start_s, upstream_s = _arrival(node, group)
    tail_s = np.maximum(group.last_s[first], upstream_s)
    left_or_not = (0,) * len(left) if must_end else left
    stage = node.suffixes.stage(group, left_or_not, level[None, :], slice(first, first + 1))
    from_start_s = start_s + np.maximum(stage.end_s[0] + tail_s, stage.total_s[0])
    bound_s = np.maximum.reduce([np.full(last + 1, node.bound_s), from_start_s, stage.free_s[0]])
    linked = bounds.stretches.crossing.linked[first]
    after = np.where(linked, bounds.level_after(level), bounds.any_level)
    own_s = start_s + bounds.work_s(group)[first] + tail_s
    prefix_s = np.where(np.arange(last + 1) == last, bound_s, np.maximum(node.bound_s, own_s))
    return _Row(start_s, bound_s, prefix_s, tail_s, after)


def _arrival(node: Node, group: Group) -> tuple[float, float]:
    """When the new stage can start, and what follows upstream after its last B."""
    if not node.groups:
        return 0.0, 0.0
    a, b = node.cuts[-2:]
    before, crossing = node.groups[-1], node.bounds.stretches.crossing
    forward_s, _, backward_s = node.bounds.link_s(before, group)
    start_s = node.start_s + before.head_s[a, b] + forward_s[a, b] if crossing.linked[a, b] else 0.0
    upstream_s = backward_s[a, b] + before.back_s[a, b] + node.tail_s if crossing.has_gradient[a, b] else 0.0
    return float(start_s), float(upstream_s)
