"""The question that bounds a largest load: is there a pipeline between ideals whose loads are at most T.

A breadth-first walk over (devices used, ideal) that leaves out

* *hopeless ideals*: what is left, with the values that must still be received, exceeds T times the devices left;
* *dominated ideals*: let K = I with one block v more be reached by as few devices.  If cut(K) - cut(I) <= latency(v),
  no chain from I beats the best one from K: take v out of whichever later stage S has it.  S loses v's latency, stops
  sending or receiving what only v made it send or receive, and may begin to receive what v makes for S alone: at most
  what K divides and I does not.  Loads of CPUs and memory fall.

What it does not reach at T proves that every chain has a larger load.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from planner.peers.clock import check_time
from planner.peers.ideals import Bools, Ints
from planner.peers.max_load import Blocks, Loads

SAME = 1e-9
"""Loads that differ by less, as a fraction, are one load."""

ACCELERATOR, CPU = KINDS = ("accelerator", "cpu")

_ROWS = 64
"""Ideals that are gone on from at once: few, so that those they dominate are seen in time."""


@dataclass(frozen=True, slots=True)
class Chain:
    """A pipeline.

    Attributes:
        value: its largest load.
        stages: (blocks as bits, one of ``KINDS``) in order.
    """

    value: float
    stages: tuple[tuple[int, str], ...]


@dataclass(slots=True, eq=False)
class Walk:
    """The search for a chain whose loads are at most ``limit``.

    Attributes:
        settled: by (CPUs, accelerators) used, the ideals reached with as few, or dominated by one.
        parents: by (CPUs, accelerators, ideal), whence and on what it was first reached.
    """

    blocks: Blocks
    loads: Loads
    accelerators: int
    cpus: int
    limit: float
    out_of_time: Callable[[], bool]
    settled: dict[tuple[int, int], Bools] = field(init=False, default_factory=dict)
    fresh: dict[tuple[int, int], Bools] = field(init=False, default_factory=dict)
    parents: dict[tuple[int, int, int], tuple[int, str]] = field(init=False, default_factory=dict)
    _left_to_cpus: tuple[float, ...] = field(init=False)
    _below: Ints = field(init=False)
    _above: Ints = field(init=False)

    def __post_init__(self) -> None:
        loads, lattice = self.loads, self.loads.lattice
        self._left_to_cpus = tuple(most_left_to_cpus(self.blocks, self.limit * n) for n in range(self.cpus + 1))
        gain = loads.accelerator_ms - loads.cut_ms
        better = gain[lattice.above] >= gain[lattice.below]
        self._below, self._above = lattice.below[better], lattice.above[better]

    def chain(self) -> Chain | None:
        """The chain found; None if there is none.

        Raises:
            TimeoutError: there was no time to find out.
        """
        full = len(self.loads.lattice.bits) - 1
        every = [(c, a) for c in range(self.cpus + 1) for a in range(self.accelerators + 1)]
        for used in every:
            self.fresh[used] = np.zeros(full + 1, dtype=bool)
        self.fresh[0, 0][0] = True
        for c, a in every:
            front = self._settle(c, a)
            if self.settled[c, a][full]:
                return self._found(c, a, full)
            if a < self.accelerators:
                self._expand(front, (c, a), (c, a + 1), ACCELERATOR)
            if c < self.cpus:
                self._expand(front, (c, a), (c + 1, a), CPU)
        return None

    def _settle(self, c: int, a: int) -> Ints:
        """The ideals to go on from: reached with these devices, not with fewer, and not dominated."""
        fewer = [self.settled[used] for used in ((c - 1, a), (c, a - 1)) if used in self.settled]
        settled = np.logical_or.reduce(fewer) if fewer else np.zeros_like(self.fresh[c, a])
        known = settled.copy()
        settled |= self.fresh[c, a]
        dominated = self._dominated(settled)
        self.settled[c, a] = settled | dominated
        return np.flatnonzero(self.fresh[c, a] & ~known & ~dominated)

    def _dominated(self, settled: Bools) -> Bools:
        """Ideals below a settled one, step by step of those that help."""
        dominated = np.zeros_like(settled)
        reached = settled.copy()
        while True:
            check_time()
            found = np.zeros_like(settled)
            found[self._below[reached[self._above]]] = True
            if not (found & ~dominated).any():
                return dominated
            dominated |= found
            reached |= found

    def _expand(self, front: Ints, used: tuple[int, int], then: tuple[int, int], kind: str) -> None:
        loads = self.loads
        sums = loads.accelerator_ms if kind == ACCELERATOR else loads.cpu_ms
        known = self.settled[used] | self.fresh[then] | ~self._hopeful(*then)
        if (then[0] - 1, then[1]) in self.settled:
            known = known | self.settled[then[0] - 1, then[1]]
        order = front[np.argsort(-sums[front], kind="stable")]
        table = loads.accelerator if kind == ACCELERATOR else loads.cpu
        while len(order):
            if self.out_of_time():
                raise TimeoutError
            rows, order = order[:_ROWS], order[_ROWS:]
            columns = np.flatnonzero(~known & (sums >= sums[rows[-1]]) & (sums <= sums[rows[0]] + self.limit))
            if not len(columns):
                continue
            within = table(rows, columns) <= self.limit
            hit = np.flatnonzero(within.any(axis=0))
            sources = rows[within[:, hit].argmax(axis=0)]
            for target, source in zip(columns[hit].tolist(), sources.tolist(), strict=True):
                self.parents[then[0], then[1], target] = (source, kind)
            self.fresh[then][columns[hit]] = True
            known[columns[hit]] = True
            known |= self._dominated(self.fresh[then])

    def _hopeful(self, c: int, a: int) -> Bools:
        """Ideals behind which what is left may still fit the devices left."""
        loads = self.loads
        slack = 1 + SAME
        left = loads.accelerator_ms[-1] - loads.accelerator_ms
        room = (self.accelerators - a) * self.limit
        if c < self.cpus:
            found: Bools = left <= (room + self._left_to_cpus[self.cpus - c]) * slack
            return found
        bytes_left = loads.size_bytes[-1] - loads.size_bytes
        found = left + loads.cut_ms <= room * slack
        found &= bytes_left <= (self.accelerators - a) * loads.memory_bytes * slack
        found &= loads.num_cpu_only == loads.num_cpu_only[-1]
        return found

    def _found(self, c: int, a: int, at: int) -> Chain:
        stages: list[tuple[int, str]] = []
        bits = self.loads.lattice.bits
        while at:
            while (c, a, at) not in self.parents:  # settled by fewer devices
                c, a = (c, a - 1) if a and self.settled[c, a - 1][at] else (c - 1, a)
            source, kind = self.parents[c, a, at]
            stages.append((bits[at] & ~bits[source], kind))
            c, a = (c, a - 1) if kind == ACCELERATOR else (c - 1, a)
            at = source
        return Chain(value_of(self.blocks, stages), tuple(reversed(stages)))


def most_left_to_cpus(blocks: Blocks, cpu_ms: float) -> float:
    """Most accelerator milliseconds that CPUs can take over in ``cpu_ms`` (fractional knapsack)."""
    if not cpu_ms:
        return 0.0
    free = blocks.cpu_ms == 0
    taken = float(blocks.accelerator_ms[free].sum())
    costs, gains = blocks.cpu_ms[~free], blocks.accelerator_ms[~free]
    order = np.argsort(-gains / costs)
    spent = np.cumsum(costs[order])
    full = int(np.searchsorted(spent, cpu_ms, side="right"))
    taken += float(gains[order][:full].sum())
    if full < len(order):
        rest = cpu_ms - (float(spent[full - 1]) if full else 0.0)
        taken += float(gains[order[full]]) * rest / float(costs[order[full]])
    return taken


def value_of(blocks: Blocks, stages: Sequence[tuple[int, str]]) -> float:
    """The largest load of a chain, summed afresh."""
    return max(
        (
            blocks.accelerator_load(inside) if kind == ACCELERATOR else blocks.cpu_load(inside)
            for inside, kind in stages
        ),
        default=0.0,
    )
