"""Groups of like devices that may run a stage, and what limits how many there are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from planner.costs.stage import PriceBook
from planner.ir.errors import MissingMeasurementError
from planner.ir.problem import SAMPLE_DIMS, Problem
from planner.solvers.candidates.rules import Constraints
from planner.solvers.candidates.shares import equal_shares, usable
from planner.solvers.candidates.space import pools


@dataclass(frozen=True, slots=True)
class DeviceClass:
    """Ranks of one pool that no rule tells apart: any of them will do.

    Attributes:
        twin: an earlier class with which it may change places, together with its whole host; -1 if there is none.
    """

    kind: str
    host: str
    memory_limit_bytes: int
    ranks: tuple[int, ...]
    twin: int = -1


@dataclass(frozen=True, slots=True)
class Group:
    """Devices of one kind and host that share the samples of a stage.

    Attributes:
        takes: by class of devices, how many.
        ranks: such ranks; the plan may take others of the same classes.
        shares: samples of each in a full micro-batch.
    """

    takes: tuple[int, ...]
    ranks: tuple[int, ...]
    shares: tuple[int, ...]
    kind: str
    host: str
    memory_limit_bytes: int

    @property
    def size(self) -> int:
        """Number of devices."""
        return len(self.shares)


def device_classes(problem: Problem, constraints: Constraints) -> tuple[DeviceClass, ...]:
    """The pools, split where a rule tells their devices apart."""
    found: list[DeviceClass] = []
    all_pools = pools(problem)
    split = [{constraints.device_class(rank) for rank in pool.ranks} for pool in all_pools]
    first: list[int] = []
    for number, pool in enumerate(all_pools):
        first.append(len(found))
        twin = -1
        for other in range(number):
            if len(split[number]) == 1 and split[number] == split[other] and pool.interchangeable(all_pools[other]):
                twin = first[other]
        for signature in sorted(split[number], reverse=True):
            ranks = tuple(rank for rank in pool.ranks if constraints.device_class(rank) == signature)
            found.append(DeviceClass(pool.kind, pool.host, pool.memory_limit_bytes, ranks, twin))
    return tuple(found)


def groups(
    problem: Problem, book: PriceBook, classes: tuple[DeviceClass, ...], micro_batches: tuple[int, ...]
) -> tuple[Group, ...]:
    """Every group that gets a sample of every micro-batch and whose sizes were measured."""
    found = []
    for takes in _takes(classes):
        count = sum(takes)
        if count > max(1, micro_batches[0]) or (count > 1 and SAMPLE_DIMS not in problem.allow):
            continue
        ranks = tuple(rank for kind, number in zip(classes, takes, strict=True) for rank in kind.ranks[:number])
        one = classes[next(k for k, number in enumerate(takes) if number)]
        shares = equal_shares(micro_batches[0], count)
        try:
            if usable(problem, book, ranks, shares, micro_batches):
                found.append(Group(takes, ranks, shares, one.kind, one.host, one.memory_limit_bytes))
        except MissingMeasurementError:
            continue
    return tuple(found)


def assign(classes: tuple[DeviceClass, ...], chosen: tuple[Group, ...]) -> tuple[tuple[int, ...], ...]:
    """Ranks for groups that run at once, the first ones of each class first."""
    given = [0] * len(classes)
    found = []
    for group in chosen:
        ranks: list[int] = []
        for number, count in enumerate(group.takes):
            ranks += classes[number].ranks[given[number] : given[number] + count]
            given[number] += count
        found.append(tuple(sorted(ranks)))
    return tuple(found)


def _takes(classes: tuple[DeviceClass, ...]) -> Iterator[tuple[int, ...]]:
    """How many of each class a group may take: all of its classes are of one pool."""
    pool_of = [(c.kind, c.host, c.memory_limit_bytes) for c in classes]
    for pool in dict.fromkeys(pool_of):
        ranges = [range(len(c.ranks) + 1) if own == pool else range(1) for c, own in zip(classes, pool_of, strict=True)]
        yield from (takes for takes in product(*ranges) if any(takes))
