"""Loads of stages whose device computes, sends and receives in turn: the cost model of Tarnawski et al. (2020).

The load of a set S of blocks on an accelerator is the sum of their latencies there, plus the cost of every value that
crosses its border: made inside and read outside, or made outside and read inside, once however many read it.  On a CPU
it is the latencies alone.  A *value* is the set of blocks that make or read it, so that it crosses S if it has a block
inside and one outside.

For ideals I below J and S = J minus I, with ``cut`` the cost of all values that an ideal divides,

    crossing(S) = cut(I) + cut(J) - sum of cost (1 + [as much of it in I as in J]) over values divided by I and by J

which makes a table of all pairs one product of two matrices.

The smallest largest load of a pipeline: which ideals to cut at, and which device takes each stage.

    minimise    max over stages s of load(J_s minus J_{s-1}, device kind of s)
    over        a chain of ideals: nothing = J_0 below J_1 below ... below J_S = everything
    subject to  at most ``accelerators`` stages on accelerators, at most ``cpus`` on CPUs       (devices are few)
                bytes of a stage on an accelerator within its memory; no CPU-only block there   (Loads.accelerator)

:func:`direct` is the dynamic program over pairs of ideals, device by device, as published; it holds a table of all
pairs.  :func:`search` is for large lattices: it asks "is there a chain of loads at most T?" (below) for a T
just below the best known, and then for some between that and the lower bound.  What is found is first improved along
an order of blocks that it follows (:func:`along`).

The question that bounds a largest load: is there a pipeline between ideals whose loads are at most T.

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
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from planner.extras.baselines.common.ideals import Bools, Floats, Ints, Lattice, chain_of
from planner.extras.baselines.tarnawski.format import Blocks
from planner.ir.graph import bits_of
from planner.solvers.budget import Budget, check_time

Singles = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TarnawskiDevices:
    """What there is to place on.

    Attributes:
        memory_bytes: of each accelerator.
        budget: when it is over, the best so far is the answer.
    """

    accelerators: int
    cpus: int
    memory_bytes: float
    budget: Budget


@dataclass(frozen=True, slots=True)
class Loads:
    """Sums over the ideals of a lattice, and the loads of the stages between them.

    Attributes:
        accelerator_ms, cpu_ms, size_bytes, num_cpu_only: by ideal, sums over its blocks.
        cut_ms: by ideal, what all values that it divides cost.
    """

    lattice: Lattice
    memory_bytes: float
    accelerator_ms: Floats
    cpu_ms: Floats
    size_bytes: Floats
    num_cpu_only: Floats
    cut_ms: Floats
    _inside: Singles
    _states: Floats
    _costs: Floats

    @classmethod
    def of(cls, blocks: Blocks, lattice: Lattice, memory_bytes: float) -> Loads:
        """The sums over every ideal of ``lattice``."""
        member = lattice.members(blocks.num_blocks)
        inside = member.astype(np.float64)
        columns = (blocks.accelerator_ms, blocks.cpu_ms, blocks.size_bytes, blocks.cpu_only.astype(np.float64))
        sums = inside @ np.stack(columns, axis=1)
        touched = np.zeros((blocks.num_blocks, len(blocks.values)))
        for value, (bits, _) in enumerate(blocks.values):
            touched[list(bits_of(bits)), value] = 1
        cost = np.array([cost for _, cost in blocks.values])
        count = inside @ touched
        size = touched.sum(axis=0)
        divided = (count > 0) & (count < size)
        # A value of two blocks is divided in one way only: its column counts twice.  Larger ones have a column for
        # being divided and one for each number of blocks inside.
        states = [divided]
        costs = [cost * np.where(size == 2, 2.0, 1.0)]
        for large in np.flatnonzero(size > 2):
            numbers = np.arange(1, size[large])
            states.append(count[:, large, None] == numbers)
            costs.append(np.full(len(numbers), cost[large]))
        accelerator_ms, cpu_ms, size_bytes, num_cpu_only = (np.ascontiguousarray(column) for column in sums.T)
        return cls(
            lattice,
            memory_bytes,
            accelerator_ms,
            cpu_ms,
            size_bytes,
            num_cpu_only,
            cut_ms=divided @ cost,
            _inside=member.astype(np.float32),
            _states=np.concatenate(states, axis=1).astype(np.float64),
            _costs=np.concatenate(costs),
        )

    def accelerator(self, rows: Ints, columns: Ints) -> Floats:
        """``[i, j]``: load on an accelerator of what column ``j`` has beyond row ``i``; infinite where not allowed.

        Not allowed are a row that is not inside the column, too many bytes, and blocks that need a CPU.
        """
        shared = (self._states[rows] * self._costs) @ self._states[columns].T
        load = (self.accelerator_ms + self.cut_ms)[columns] - (self.accelerator_ms - self.cut_ms)[rows][:, None]
        load -= shared
        load[~self._nested(rows, columns)] = inf
        if self.size_bytes[-1] > self.memory_bytes:
            allowed = self.memory_bytes * (1 + 1e-12)
            load[self.size_bytes[columns] - self.size_bytes[rows][:, None] > allowed] = inf
        if self.num_cpu_only[-1]:
            load[self.num_cpu_only[columns] != self.num_cpu_only[rows][:, None]] = inf
        return load

    def cpu(self, rows: Ints, columns: Ints) -> Floats:
        """``[i, j]``: load on a CPU of what column ``j`` has beyond row ``i``; infinite where row is not inside."""
        load = self.cpu_ms[columns] - self.cpu_ms[rows][:, None]
        load[~self._nested(rows, columns)] = inf
        return load

    def _nested(self, rows: Ints, columns: Ints) -> Bools:
        with np.errstate(invalid="ignore"):  # small products are computed on lanes beyond the numbers, too
            outside = self._inside[rows] @ (1 - self._inside[columns].T)  # counts below 2^24 are exact
        nested: Bools = outside == 0
        return nested


MOST_IN_TABLE = 3000
"""Ideals of which a table of all pairs is made."""


def direct(loads: Loads, accelerators: int, cpus: int) -> DeviceChain | None:
    """The best chain, from a table of all pairs; None if there is none."""
    every = np.arange(len(loads.lattice.bits))
    tables = (loads.accelerator(every, every), loads.cpu(every, every) if cpus else None)
    best: dict[tuple[int, int], Floats] = {}
    for c in range(cpus + 1):
        for a in range(accelerators + 1):
            check_time()
            value = np.full(len(every), inf)
            value[0] = 0.0
            for table, before in zip(tables, ((a - 1, c), (a, c - 1)), strict=True):
                if table is not None and before in best:
                    value = np.minimum(value, np.maximum(best[before][:, None], table).min(axis=0))
            best[a, c] = value
    used = (accelerators, cpus)
    at = len(every) - 1
    largest = float(best[used][at])
    if largest == inf:
        return None
    stages: list[tuple[int, str]] = []
    while at:
        steps = ((tables[0], (used[0] - 1, used[1]), ACCELERATOR), (tables[1], (used[0], used[1] - 1), CPU))
        for table, before, kind in steps:
            if table is None or before not in best:
                continue
            reached = np.maximum(best[before], table[:, at])
            source = int(reached.argmin())
            if reached[source] <= best[used][at]:
                stages += [(loads.lattice.bits[at] & ~loads.lattice.bits[source], kind)] if source != at else []
                used = before
                at = source
                break
    return DeviceChain(largest, tuple(reversed(stages)))


def along(blocks: Blocks, memory_bytes: float, accelerators: int, cpus: int, chain: DeviceChain) -> DeviceChain:
    """The best chain in an order of all blocks that ``chain`` follows: its stages' borders move."""
    order = [block for inside, _ in chain.stages for block in bits_of(inside)]
    if len(order) > MOST_IN_TABLE:
        return chain
    improved = direct(Loads.of(blocks, chain_of(order), memory_bytes), accelerators, cpus)
    if improved is None:
        return chain
    value = value_of(blocks, improved.stages)
    return DeviceChain(value, improved.stages) if value < chain.value else chain


def lower_bound(blocks: Blocks, accelerators: int, cpus: int) -> float:
    """No chain has a smaller largest load: all work over all devices, and the largest single block."""
    if not accelerators and not cpus:
        return inf
    on_cpu = blocks.cpu_ms if cpus else np.full(blocks.num_blocks, inf)
    on_accelerator = (
        np.where(blocks.cpu_only, inf, blocks.accelerator_ms) if accelerators else np.full_like(on_cpu, inf)
    )
    single = np.minimum(on_cpu, on_accelerator)
    largest = float(single.max(initial=0.0))
    low = largest
    high = max(largest, float(single.sum()))
    if high == inf:
        return inf
    while high - low > SAME * high:
        middle = (low + high) / 2
        if most_left_to_cpus(blocks, middle * cpus) + middle * accelerators >= float(blocks.accelerator_ms.sum()):
            high = middle
        else:
            low = middle
    return low


def search(
    blocks: Blocks, loads: Loads, devices: TarnawskiDevices, start: DeviceChain | None, bound: float
) -> tuple[DeviceChain | None, float]:
    """The best chain and the bound that is proved; equal (within ``SAME``) unless time ran out.

    Args:
        start: a chain to improve on.
        bound: proved before.
    """
    anything = float(blocks.accelerator_ms.sum() + blocks.cpu_ms.sum()) + 2 * sum(cost for _, cost in blocks.values)
    accelerators = devices.accelerators
    cpus = devices.cpus
    best = start
    low = bound
    high = best.value if best else anything * (1 + SAME)
    step = 0
    try:
        while best is None or low < high * (1 - SAME):
            limit = high if best is None else high * (1 - SAME) if step % 3 == 0 else (low + high) / 2
            chain = Walk(blocks, loads, accelerators, cpus, limit, devices.budget.ends).chain()
            step += 1
            if chain is not None:
                best = along(blocks, loads.memory_bytes, accelerators, cpus, chain)
                high = min(high, best.value)
            elif best is None:
                return None, inf
            else:
                low = limit
    except TimeoutError:
        return best, low
    return best, high


SAME = 1e-9
"""Loads that differ by less, as a fraction, are one load."""

ACCELERATOR, CPU = KINDS = ("accelerator", "cpu")

_ROWS = 64
"""Ideals that are gone on from at once: few, so that those they dominate are seen in time."""


@dataclass(frozen=True, slots=True)
class DeviceChain:
    """A pipeline.

    Attributes:
        value: its largest load.
        stages: (blocks as bits, one of ``KINDS``) in order.
    """

    value: float
    stages: tuple[tuple[int, str], ...]


class Walk:
    """The search for a chain whose loads are at most ``limit``.

    Attributes:
        settled: by (CPUs, accelerators) used, the ideals reached with as few, or dominated by one.
        parents: by (CPUs, accelerators, ideal), whence and on what it was first reached.
    """

    def __init__(
        self,
        blocks: Blocks,
        loads: Loads,
        accelerators: int,
        cpus: int,
        limit: float,
        out_of_time: Callable[[], bool],
    ) -> None:
        self.blocks = blocks
        self.loads = loads
        self.accelerators = accelerators
        self.cpus = cpus
        self.limit = limit
        self.out_of_time = out_of_time
        lattice = loads.lattice
        self.settled = dict[tuple[int, int], Bools]()
        self.fresh = dict[tuple[int, int], Bools]()
        self.parents = dict[tuple[int, int, int], tuple[int, str]]()
        self._left_to_cpus = tuple(most_left_to_cpus(blocks, limit * n) for n in range(cpus + 1))
        gain = loads.accelerator_ms - loads.cut_ms
        better = gain[lattice.above] >= gain[lattice.below]
        self._below = lattice.below[better]
        self._above = lattice.above[better]

    def chain(self) -> DeviceChain | None:
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
                return self._chain_to(c, a, full)
            if a < self.accelerators:
                self._expand(front, (c, a), (c, a + 1), ACCELERATOR)
            if c < self.cpus:
                self._expand(front, (c, a), (c + 1, a), CPU)
        return None

    def _settle(self, c: int, a: int) -> Ints:
        """The ideals to go on from: reached with these devices, not with fewer, and not dominated."""
        fewer = [self.settled[used] for used in ((c - 1, a), (c, a - 1)) if used in self.settled]
        settled = np.logical_or.reduce(fewer) if fewer else np.zeros_like(self.fresh[c, a])
        earlier = settled.copy()
        settled |= self.fresh[c, a]
        dominated = self._dominated(settled)
        self.settled[c, a] = settled | dominated
        return np.flatnonzero(self.fresh[c, a] & ~earlier & ~dominated)

    def _dominated(self, settled: Bools) -> Bools:
        """Ideals below a settled one, step by step of those that help."""
        dominated = np.zeros_like(settled)
        reached = settled.copy()
        while True:
            check_time()
            lower = np.zeros_like(settled)
            lower[self._below[reached[self._above]]] = True
            if not (lower & ~dominated).any():
                return dominated
            dominated |= lower
            reached |= lower

    def _expand(self, front: Ints, used: tuple[int, int], then: tuple[int, int], kind: str) -> None:
        loads = self.loads
        sums = loads.accelerator_ms if kind == ACCELERATOR else loads.cpu_ms
        excluded = self.settled[used] | self.fresh[then] | ~self._hopeful(*then)
        if (then[0] - 1, then[1]) in self.settled:
            excluded = excluded | self.settled[then[0] - 1, then[1]]
        order = front[np.argsort(-sums[front], kind="stable")]
        table = loads.accelerator if kind == ACCELERATOR else loads.cpu
        while len(order):
            if self.out_of_time():
                raise TimeoutError
            rows = order[:_ROWS]
            order = order[_ROWS:]
            columns = np.flatnonzero(~excluded & (sums >= sums[rows[-1]]) & (sums <= sums[rows[0]] + self.limit))
            if not len(columns):
                continue
            within = table(rows, columns) <= self.limit
            hit = np.flatnonzero(within.any(axis=0))
            sources = rows[within[:, hit].argmax(axis=0)]
            for target, source in zip(columns[hit].tolist(), sources.tolist(), strict=True):
                self.parents[then[0], then[1], target] = (source, kind)
            self.fresh[then][columns[hit]] = True
            excluded[columns[hit]] = True
            excluded |= self._dominated(self.fresh[then])

    def _hopeful(self, c: int, a: int) -> Bools:
        """Ideals after which what is left may still fit the devices left."""
        loads = self.loads
        slack = 1 + SAME
        left = loads.accelerator_ms[-1] - loads.accelerator_ms
        room = (self.accelerators - a) * self.limit
        if c < self.cpus:
            hopeful: Bools = left <= (room + self._left_to_cpus[self.cpus - c]) * slack
            return hopeful
        bytes_left = loads.size_bytes[-1] - loads.size_bytes
        hopeful = left + loads.cut_ms <= room * slack
        hopeful &= bytes_left <= (self.accelerators - a) * loads.memory_bytes * slack
        hopeful &= loads.num_cpu_only == loads.num_cpu_only[-1]
        return hopeful

    def _chain_to(self, c: int, a: int, at: int) -> DeviceChain:
        stages: list[tuple[int, str]] = []
        bits = self.loads.lattice.bits
        while at:
            while (c, a, at) not in self.parents:  # settled by fewer devices
                c, a = (c, a - 1) if a and self.settled[c, a - 1][at] else (c - 1, a)
            source, kind = self.parents[c, a, at]
            stages.append((bits[at] & ~bits[source], kind))
            c, a = (c, a - 1) if kind == ACCELERATOR else (c - 1, a)
            at = source
        return DeviceChain(value_of(self.blocks, stages), tuple(reversed(stages)))


def most_left_to_cpus(blocks: Blocks, cpu_ms: float) -> float:
    """Most accelerator milliseconds that CPUs can take over in ``cpu_ms`` (fractional knapsack)."""
    if not cpu_ms:
        return 0.0
    free = blocks.cpu_ms == 0
    moved_ms = float(blocks.accelerator_ms[free].sum())
    costs = blocks.cpu_ms[~free]
    gains = blocks.accelerator_ms[~free]
    order = np.argsort(-gains / costs)
    spent = np.cumsum(costs[order])
    full = int(np.searchsorted(spent, cpu_ms, side="right"))
    moved_ms += float(gains[order][:full].sum())
    if full < len(order):
        rest = cpu_ms - (float(spent[full - 1]) if full else 0.0)
        moved_ms += float(gains[order[full]]) * rest / float(costs[order[full]])
    return moved_ms


def value_of(blocks: Blocks, stages: Sequence[tuple[int, str]]) -> float:
    """The largest load of a chain, summed afresh."""
    return max(
        (
            blocks.accelerator_load(inside) if kind == ACCELERATOR else blocks.cpu_load(inside)
            for inside, kind in stages
        ),
        default=0.0,
    )
