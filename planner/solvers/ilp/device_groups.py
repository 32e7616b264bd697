"""Groups of devices that may run a stage, and what limits how many there are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

from planner.costs.cost_model import PriceBook
from planner.ir.errors import MissingMeasurementError
from planner.ir.problem import SAMPLE_DIMS, Problem
from planner.layers import throughout_sites
from planner.solvers.candidates.candidate import (
    group_shares,
    like_groups,
    parts_of,
    pools,
    samples_of,
    site_shares,
    usable,
)
from planner.solvers.candidates.constraints import Constraints

FEW_COMPOSITIONS = 40
"""Groups may have devices of several kinds, or hosts, while there are at most so many compositions."""


@dataclass(frozen=True, slots=True)
class DeviceClass:
    """Ranks of one pool that no rule tells apart: any of them will do.

    Attributes:
        groups: that they are in, as of a pool.
        twin: an earlier class with which it may change places, together with its groups; -1 if there is none.
    """

    kind: str
    groups: tuple[str, ...]
    memory_limit_bytes: int
    ranks: tuple[int, ...]
    twin: int = -1


@dataclass(frozen=True, slots=True)
class Group:
    """Devices that share the samples of a stage, or, of one that lies along sites alone, its sites.

    Attributes:
        takes: by class of devices, how many.
        classes: of each member, in the order in which they share a micro-batch.
        ranks: such ranks; the plan may take others of the same classes.
        shares: samples of each in a full micro-batch, or parts of the sites.
        by_parts: which of the two.
    """

    takes: tuple[int, ...]
    classes: tuple[DeviceClass, ...]
    ranks: tuple[int, ...]
    shares: tuple[int, ...]
    by_parts: bool = False

    def samples(self, rows: int) -> tuple[float, ...]:
        """Samples of each in a micro-batch of ``rows``."""
        return parts_of(self.shares, rows) if self.by_parts else samples_of(self.shares, rows)

    @property
    def size(self) -> int:
        """Number of devices."""
        return len(self.shares)


def device_classes(problem: Problem, constraints: Constraints) -> tuple[DeviceClass, ...]:
    """The pools, split where a rule tells their devices apart."""
    found: list[DeviceClass] = []
    all_pools = pools(problem)
    split = [{constraints.device_class(rank) for rank in pool.ranks} for pool in all_pools]
    earlier: dict[int, int] = {}
    for alike in like_groups(all_pools):
        last: dict[tuple[bool, ...], int] = {}
        for number, *more in sorted(alike):
            if not more and len(split[number]) == 1:
                (told_apart,) = split[number]
                if told_apart in last:
                    earlier[number] = last[told_apart]
                last[told_apart] = number
    first: list[int] = []
    for number, pool in enumerate(all_pools):
        first.append(len(found))
        twin = first[earlier[number]] if number in earlier else -1
        for signature in sorted(split[number], reverse=True):
            ranks = tuple(rank for rank in pool.ranks if constraints.device_class(rank) == signature)
            found.append(DeviceClass(pool.kind, pool.groups, pool.memory_limit_bytes, ranks, twin))
    return tuple(found)


def groups(
    problem: Problem, book: PriceBook, classes: tuple[DeviceClass, ...], micro_batches: tuple[int, ...]
) -> tuple[Group, ...]:
    """Every group that gets a sample of every micro-batch, or some of its sites, and whose sizes were measured."""
    found = []
    of_sites = (False, True) if throughout_sites(problem.profile.graph) else (False,)
    for takes, by_parts in product(_takes(classes), of_sites):
        count = sum(takes)
        if count > 1 and SAMPLE_DIMS not in problem.allow:
            continue
        if count == 1 if by_parts else count > micro_batches[0]:
            continue
        members = _members(classes, takes)
        ranks = _first(classes, members, [0] * len(classes))
        shares = (site_shares if by_parts else group_shares)(problem, book, ranks, micro_batches[0])
        try:
            if usable(problem, book, ranks, shares, micro_batches):
                found.append(Group(takes, tuple(classes[k] for k in members), ranks, shares, by_parts))
        except MissingMeasurementError:
            continue
    return tuple(found)


def assign(classes: tuple[DeviceClass, ...], chosen: tuple[Group, ...]) -> tuple[tuple[int, ...], ...]:
    """Ranks for groups that run at once, the first ones of each class first."""
    given = [0] * len(classes)
    return tuple(_first(classes, _members(classes, group.takes), given) for group in chosen)


def _members(classes: tuple[DeviceClass, ...], takes: tuple[int, ...]) -> tuple[int, ...]:
    """The class of each member: kind after kind, within a kind the smallest group with more members first."""
    kinds = list(dict.fromkeys(c.kind for c in classes))
    on = Counter[tuple[str, ...]]()
    for c, count in zip(classes, takes, strict=True):
        on[c.groups] += count
    order = sorted(range(len(classes)), key=lambda k: (kinds.index(classes[k].kind), -on[classes[k].groups], k))
    return tuple(k for k in order for _ in range(takes[k]))


def _first(classes: tuple[DeviceClass, ...], members: tuple[int, ...], given: list[int]) -> tuple[int, ...]:
    """The next ranks of the members' classes, counted in ``given``."""
    found = []
    for k in members:
        found.append(classes[k].ranks[given[k]])
        given[k] += 1
    return tuple(found)


def _takes(classes: tuple[DeviceClass, ...]) -> Iterator[tuple[int, ...]]:
    """How many of each class a group may take: any, or, where these are many, of one kind, or of one pool."""
    everything = [0] * len(classes)
    pool_of = [(c.kind, c.groups, c.memory_limit_bytes) for c in classes]
    for labels in (everything, [c.kind for c in classes], pool_of):
        largest = max(
            prod(len(c.ranks) + 1 for c, own in zip(classes, labels, strict=True) if own == label) for label in labels
        )
        if largest <= FEW_COMPOSITIONS or labels is pool_of:
            for label in dict.fromkeys(labels):
                most_of = [len(c.ranks) if own == label else 0 for c, own in zip(classes, labels, strict=True)]
                yield from (takes for takes in product(*(range(most + 1) for most in most_of)) if any(takes))
            return
