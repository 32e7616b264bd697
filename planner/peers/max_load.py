"""Loads of stages whose device computes, sends and receives in turn: the cost model of Tarnawski et al. (2020).

The load of a set S of blocks on an accelerator is the sum of their latencies there, plus the cost of every value that
crosses its border: made inside and read outside, or made outside and read inside, once however many read it.  On a CPU
it is the latencies alone.  A *value* is the set of blocks that make or read it, so that it crosses S if it has a block
inside and one outside.

For ideals I below J and S = J minus I, with ``cut`` the cost of all values that an ideal divides,

    crossing(S) = cut(I) + cut(J) - sum of cost (1 + [as much of it in I as in J]) over values divided by I and by J

which makes a table of all pairs one product of two matrices.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from planner.peers.ideals import Bools, Ints, Lattice, bits_of

Floats = NDArray[np.float64]
Singles = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Blocks:
    """What a stage takes whole: nodes that stay together, in topological order.

    Attributes:
        nodes: of each block, indices into the instance.
        successors: of each block, in the forward pass.
        accelerator_ms, cpu_ms, size_bytes: of each block; 0 on an accelerator where it may not run.
        cpu_only: whether it may not run on an accelerator.
        values: (bits of the blocks that make or read it, cost) of each value of two blocks or more.
    """

    nodes: tuple[tuple[int, ...], ...]
    successors: tuple[tuple[int, ...], ...]
    accelerator_ms: Floats
    cpu_ms: Floats
    size_bytes: Floats
    cpu_only: Bools
    values: tuple[tuple[int, float], ...]

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return len(self.nodes)

    def accelerator_load(self, inside: int) -> float:
        """Load of a set of blocks on an accelerator, memory not looked at; infinite if it may not run there."""
        listed = list(bits_of(inside))
        if self.cpu_only[listed].any():
            return inf
        crossing = sum(cost for bits, cost in self.values if bits & inside and bits & ~inside)
        return float(self.accelerator_ms[listed].sum()) + crossing

    def cpu_load(self, inside: int) -> float:
        """Load of a set of blocks on a CPU."""
        return float(self.cpu_ms[list(bits_of(inside))].sum())

    def size(self, inside: int) -> float:
        """Bytes of a set of blocks on an accelerator."""
        return float(self.size_bytes[list(bits_of(inside))].sum())


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
        states, costs = [divided], [cost * np.where(size == 2, 2.0, 1.0)]
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
        outside = self._inside[rows] @ (1 - self._inside[columns].T)  # counts below 2^24 are exact
        found: Bools = outside == 0
        return found
