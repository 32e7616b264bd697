"""What stages and the messages between them take at least, and how many stages memory lets follow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from planner.costs.network import transfer_s
from planner.costs.tables import Array
from planner.ir.cluster import ACROSS_HOSTS, WITHIN_HOST, Link
from planner.ir.problem import Problem
from planner.solvers.candidates.space import Pool
from planner.solvers.search.groups import Group, Stretches, pieces

Remaining = tuple[int, ...]
"""Unused devices by pool."""
Levels = NDArray[np.int64]


@dataclass(slots=True, eq=False)
class Bounds:
    """Bounds of one way to cut the batch, under one schedule.

    Attributes:
        groups: by (pool, size).
        in_flight: micro-batches that the schedule keeps on a stage, by stages downstream, from 1.
        links: with tables that never fall, by class.
        budgets: stages downstream that memory allows, as levels, by (pool, size); see ``level_after``.
        num_levels: 0 = nothing may follow or fit, then 1, 2, ... stages, the last one = any number.
    """

    problem: Problem
    pools: tuple[Pool, ...]
    stretches: Stretches
    micro_batches: tuple[int, ...]
    schedule: str
    groups: Mapping[tuple[int, int], Group]
    in_flight: tuple[int, ...]
    links: Mapping[str, Link]
    budgets: Mapping[tuple[int, int], Levels] = field(init=False)
    num_levels: int = field(init=False)
    _transfers: dict[tuple[str, int, bool], Array] = field(init=False, default_factory=dict, repr=False)
    _links: dict[object, tuple[Array, Array, Array]] = field(init=False, default_factory=dict, repr=False)
    _works: dict[object, Array] = field(init=False, default_factory=dict, repr=False)
    _least: dict[object, tuple[Array, Array, Array]] = field(init=False, default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        finest = {key: self._budget(found) for key, found in self.groups.items()}
        unlimited = len(self.in_flight)
        limited = [int(budget[budget < unlimited].max(initial=0)) for budget in finest.values()]
        deepest = max(limited, default=0)
        self.num_levels = deepest + 2
        self.budgets = {
            key: np.where(budget < unlimited, budget, deepest + 1).astype(np.int64) for key, budget in finest.items()
        }

    @property
    def any_level(self) -> int:
        """The level that limits nothing."""
        return self.num_levels - 1

    def level_after(self, level: Levels) -> Levels:
        """What may follow a stage that has ``level``."""
        return np.where(level == self.any_level, level, np.maximum(level - 1, 0))

    def capacity_s(self) -> float:
        """All work, each layer on the group that does it with least device time, over all devices."""
        device_s = np.full(len(self.stretches.cuts) - 1, np.inf)
        for found in self.groups.values():
            own_s = np.diagonal(found.least_work_s, 1)
            allowed = np.diagonal(found.allowed, 1)
            device_s = np.where(allowed, np.minimum(device_s, found.size * own_s), device_s)
        return float(device_s.sum()) / sum(len(pool.ranks) for pool in self.pools)

    def deepest(self, left: Remaining) -> int:
        """The most stages downstream of a stage, itself included, if ``left`` is left for what follows."""
        most = 1 + sum(left)
        return min(most, self.problem.max_stages) if self.problem.max_stages else most

    def used(self, remaining: Remaining) -> Iterator[tuple[Group, Remaining]]:
        """Every group that can be taken from ``remaining``, with what is left.  Of like untouched pools the first."""
        for number, count in enumerate(remaining):
            if self._has_a_twin_before(number, remaining):
                continue
            for size in range(1, count + 1):
                found = self.groups.get((number, size))
                if found is not None:
                    yield found, (*remaining[:number], count - size, *remaining[number + 1 :])

    def transfer_s(self, link: str, samples: int, forward: bool) -> Array:
        """The message of at least so many samples between two stages, by (first cut, last cut) of the earlier one."""
        found = self._transfers.get((link, samples, forward))
        if found is None:
            crossing = self.stretches.crossing
            per_sample = crossing.forward_bytes if forward else crossing.backward_bytes
            found = self._transfers[link, samples, forward] = transfer_s(self.links[link], per_sample * samples)
        return found

    def link_s(self, source: Group, destination: Group) -> tuple[Array, Array, Array]:
        """From the end of an F to the start of one behind, the same for a single rank, and from a B to a B before."""
        key = (source.pool, source.size, destination.pool, destination.size)
        found = self._links.get(key)
        if found is None:
            largest, smallest = pieces(source.shares, destination.shares, self.micro_batches)
            link = self._link_class(source.pool, destination.pool)
            overhead = source.overhead_s + destination.overhead_s
            asked = ((largest, True), (smallest, True), (smallest, False))
            there, path, back = (self.transfer_s(link, samples, forward) + overhead for samples, forward in asked)
            found = self._links[key] = (there, path, back)
        return found

    def least_link_s(self, source: Group, remaining: Remaining) -> tuple[Array, Array, Array]:
        """:meth:`link_s` to the best of the groups that can be taken from ``remaining``."""
        key = (source.pool, source.size, remaining)
        found = self._least.get(key)
        if found is None:
            options = [self.link_s(source, destination) for destination, _ in self.used(remaining)]
            nothing = np.zeros_like(source.work_s)
            there, path, back = (
                np.minimum.reduce([option[which] for option in options]) if options else nothing for which in range(3)
            )
            found = self._least[key] = (there, path, back)
        return found

    def work_s(self, source: Group) -> Array:
        """The group's own work, with the messages that it certainly has with the stage behind."""
        found = self._works.get((source.pool, source.size))
        if found is None:
            crossing = self.stretches.crossing
            messages = (crossing.forward_bytes > 0).astype(np.float64) + (crossing.backward_bytes > 0)
            found = source.work_s + len(self.micro_batches) * source.overhead_s * messages
            self._works[source.pool, source.size] = found
        return found

    def needed_bytes(self, found: Group, downstream: int) -> Array:
        """What a stage holds at least, with so many stages downstream, itself included."""
        count = self.in_flight[downstream - 1]
        uneven = self.micro_batches[-1] != self.micro_batches[0]
        rest = 1 if uneven and count == len(self.micro_batches) else 0
        kept = (count - rest) * found.saved_bytes + rest * found.saved_rest_bytes
        return found.resident_bytes + kept + found.workspace_bytes

    def _budget(self, found: Group) -> Levels:
        """The most stages downstream (itself included) with which a stage fits; 0 if it never does."""
        limit = self.pools[found.pool].memory_limit_bytes
        budget = np.zeros(found.work_s.shape, dtype=np.int64)
        for downstream, count in enumerate(self.in_flight, start=1):
            rounding = count + 2  # the simulator rounds bytes slot by slot
            budget[self.needed_bytes(found, downstream) <= limit + rounding] = downstream
        return budget

    def _link_class(self, source: int, destination: int) -> str:
        return WITHIN_HOST if self.pools[source].host == self.pools[destination].host else ACROSS_HOSTS

    def _has_a_twin_before(self, number: int, remaining: Remaining) -> bool:
        pool = self.pools[number]
        if remaining[number] < len(pool.ranks):
            return False
        return any(
            remaining[other] == len(self.pools[other].ranks) and pool.interchangeable(self.pools[other])
            for other in range(number)
        )


def canonical(pools: tuple[Pool, ...], remaining: Remaining) -> Remaining:
    """The same for sets of devices that differ only by which of like hosts they are on."""
    found = list(remaining)
    for number, pool in enumerate(pools):
        twins = [other for other in range(number, len(pools)) if pool.interchangeable(pools[other])]
        best = max(twins, key=lambda other: found[other])
        found[number], found[best] = found[best], found[number]
    return tuple(found)
