"""DAPPLE's three ways to take devices for a stage, on hosts of like devices.

Fan et al., "DAPPLE: A Pipelined Data Parallel Approach for Training Large Models", PPoPP 2021, section 4 (device
assignment):

* *fresh first*: from hosts of which nothing is taken, so that a stage's replicas are close to one another;
* *append first*: from hosts of which something is taken already, so that no host is left in pieces;
* *scatter first*: evenly from the hosts that are taken already, or from all if all are fresh, or full.

Hosts of which equally much is taken are alike, so what is taken is kept sorted, most first; :func:`real_hosts` gives
them their names back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

Taken = tuple[int, ...]
"""Devices taken, by host, most first."""

FRESH, APPEND, SCATTER = POLICIES = ("fresh first", "append first", "scatter first")


@dataclass(frozen=True, slots=True)
class Assignment:
    """The devices of a stage.

    Attributes:
        before: what is taken before it.
        after: what is taken behind it, hosts in the order of ``before``.
        policy: how it was found.
    """

    before: Taken
    after: Taken
    policy: str

    @property
    def devices(self) -> tuple[int, ...]:
        """By host."""
        return tuple(b - a for a, b in zip(self.before, self.after, strict=True))

    @property
    def replicas(self) -> int:
        """How many devices."""
        return sum(self.after) - sum(self.before)

    @property
    def host(self) -> int:
        """The host that has them all, or -1."""
        used = [host for host, count in enumerate(self.devices) if count]
        return used[0] if len(used) == 1 else -1

    def near(self, behind: Assignment) -> bool:
        """Whether this stage and the one behind it may be, and so are, on one and the same host."""
        return self.host >= 0 and behind.host >= 0 and self.after[self.host] == behind.before[behind.host]


def most_first(taken: Taken) -> Taken:
    """The same with hosts in their standard order."""
    return tuple(sorted(taken, reverse=True))


def real_hosts(stages: Sequence[Assignment]) -> list[tuple[int, ...]]:
    """Devices by host of each stage of a pipeline, a host being the same one throughout."""
    names = list(range(len(stages[0].before)))
    found: list[tuple[int, ...]] = []
    for index, stage in enumerate(stages):
        row = [0] * len(names)
        for position, count in enumerate(stage.devices):
            row[names[position]] = count
        found.append(tuple(row))
        order = sorted(range(len(names)), key=lambda position: -stage.after[position])
        if index + 1 < len(stages) and stage.near(stages[index + 1]):
            wanted = stages[index + 1].host  # hosts of equal counts change places, so that the two meet
            mine = order.index(stage.host)
            order[wanted], order[mine] = order[mine], order[wanted]
        names = [names[position] for position in order]
    return found


def assignments(taken: Taken, replicas: int, per_host: int) -> Iterator[Assignment]:
    """The devices that the policies give to the next stage, each once."""
    seen: set[tuple[tuple[int, int], ...]] = set()
    for policy, take in _TAKE.items():
        after = take(taken, replicas, per_host)
        new = tuple(sorted(zip(taken, after, strict=True)))
        if new not in seen:
            seen.add(new)
            yield Assignment(taken, after, policy)


def _fresh_first(taken: Taken, replicas: int, per_host: int) -> Taken:
    return _fill(taken, replicas, per_host, lambda host: (taken[host] > 0, host))


def _append_first(taken: Taken, replicas: int, per_host: int) -> Taken:
    return _fill(taken, replicas, per_host, lambda host: (taken[host] == 0, host))


def _scatter_first(taken: Taken, replicas: int, per_host: int) -> Taken:
    begun = [host for host, count in enumerate(taken) if 0 < count < per_host]
    after = list(taken)
    for _ in range(replicas):
        open_hosts = [host for host in begun if after[host] < per_host]
        open_hosts = open_hosts or [host for host, count in enumerate(after) if count < per_host]
        host = min(open_hosts, key=lambda host: (after[host] - taken[host], host))
        after[host] += 1
    return tuple(after)


def _fill(taken: Taken, replicas: int, per_host: int, rank: Callable[[int], tuple[bool, int]]) -> Taken:
    after = list(taken)
    for host in sorted(range(len(taken)), key=rank):
        count = min(replicas, per_host - taken[host])
        after[host] += count
        replicas -= count
    return tuple(after)


_TAKE: dict[str, Callable[[Taken, int, int], Taken]] = {
    FRESH: _fresh_first,
    APPEND: _append_first,
    SCATTER: _scatter_first,
}
