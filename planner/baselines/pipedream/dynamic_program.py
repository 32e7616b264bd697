"""One level of PipeDream's dynamic programme: pipelines over states of a network on a number of like machines.

The programme itself stands in ``planner.baselines.pipedream.planner``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf

import numpy as np
from numpy.typing import NDArray

from planner.baselines.pipedream.antichains import Bools, Floats, States
from planner.ir.errors import UsageError
from planner.solvers.progress import check_time

_BLOCK_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Options:
    """PipeDream's restrictions beside its cost.

    Attributes:
        communication: whether activations and gradients between stages count.
        straight: no stage is replicated.
        memory_bytes: of a machine; infinite if it does not bind.
    """

    communication: bool = True
    straight: bool = False
    memory_bytes: float = inf


@dataclass(frozen=True, slots=True)
class Choice:
    """A stage: it starts in state ``first`` (None: nothing done), ends in ``last``, and has ``machines`` machines."""

    first: int | None
    last: int
    machines: int


def reduce_s(parameter_bytes: float, machines: int, bandwidth_bytes_per_s: float) -> float:
    """What summing gradients adds to a stage's work, before it is divided by the number of machines."""
    return 4 * (machines - 1) * parameter_bytes / (bandwidth_bytes_per_s * machines)


def stashes(machines_behind: int, machines: int) -> int:
    """How many mini-batches a replica keeps beside the current one."""
    return ceil(machines_behind / machines)


def require_levels(machines: Sequence[int], bandwidths_bytes_per_s: Sequence[float]) -> None:
    """Raises :class:`UsageError` if a level has no machine or no bandwidth."""
    if len(machines) != len(bandwidths_bytes_per_s) or not machines:
        raise UsageError(
            "machines and bandwidths do not match",
            [f"{len(machines)} levels of machines, {len(bandwidths_bytes_per_s)} bandwidths"],
            ["give one bandwidth a level"],
        )
    if any(count < 1 for count in machines) or not all(0 < b < inf for b in bandwidths_bytes_per_s):
        raise UsageError(
            "a level without machines or bandwidth",
            [f"machines {list(machines)}, bytes a second {list(bandwidths_bytes_per_s)}"],
            ["give numbers above 0"],
        )


@dataclass(frozen=True, slots=True)
class Level:
    """One level of machines.

    Attributes:
        times_s: ``[i, j]``: what one machine of this level takes from state i - 1 (0: nothing done) to state j;
            infinite where j does not hold i - 1.
        below: machines of the level below; 1 for the lowest.
    """

    states: States
    machines: int
    bandwidth: float
    below: int
    times_s: Floats
    options: Options

    def replicas(self) -> range:
        """How many machines a stage may have."""
        return range(1, 2 if self.options.straight else self.machines + 1)

    def alone_s(self, start: int, machines: int) -> Floats:
        """A first stage of ``machines`` from state ``start - 1`` to each state from ``start`` on."""
        parameters = self._span(self.states.parameter_bytes, start, start)
        reduction = reduce_s(1.0, machines, self.bandwidth) * parameters / self.below
        seconds = (self.times_s[start, start:] + reduction) / machines
        stash = self._span(self.states.activation_bytes, start, start) + parameters
        return np.where(self.fits(stash, machines, machines), seconds, inf)

    def later_s(self, start: int, columns: slice, machines: int) -> Floats:
        """Later stages of ``machines`` from each state from ``start`` on to those in ``columns``."""
        states, rows = self.states, slice(start, columns.stop)
        parameters = states.parameter_bytes[None, columns] - states.parameter_bytes[rows, None]
        seconds = self.times_s[1:][rows, columns] + reduce_s(1.0, machines, self.bandwidth) * parameters
        if self.options.communication:
            out = np.where(np.arange(states.num_states) == states.num_states - 1, 0.0, states.output_bytes)
            np.maximum(seconds, 2 / self.bandwidth * states.output_bytes[rows, None], out=seconds)
            np.maximum(seconds, 2 / self.bandwidth * out[None, columns], out=seconds)
        seconds /= machines
        return seconds

    def stash_bytes(self, start: int, columns: slice) -> Floats:
        """Activations and parameters of the same stages."""
        total = self.states.activation_bytes + self.states.parameter_bytes
        return total[None, columns] - total[start : columns.stop, None]

    def fits(self, stash_bytes: Floats, used: int, machines: int) -> Bools:
        """Whether a stage of ``machines``, the last of ``used`` so far, keeps within memory."""
        found: Bools = stashes(self.machines - used, machines) * stash_bytes <= self.options.memory_bytes
        return found

    def _span(self, sums: Floats, start: int, first: int) -> Floats:
        return sums[first:] - (sums[start - 1] if start else 0.0)


@dataclass(frozen=True, slots=True)
class Row:
    """Optima of all pipelines that start in one state: ``[m - 1, j - start]`` for m machines up to state j.

    Attributes:
        split: the state behind which the last stage starts; -1: there is but one stage.
        last: the last stage's machines.
    """

    start: int
    best_s: Floats
    split: NDArray[np.intp]
    last: NDArray[np.intp]


def best_row(level: Level, start: int, traced: bool = False) -> Row:
    """The dynamic programme of one row: A[m][j] = min over k, m' of max(A[m - m'][k], last stage k to j on m')."""
    count, width = level.machines, level.states.num_states - start
    best = np.full((count, width), inf)
    for m in level.replicas():
        check_time()
        best[m - 1] = level.alone_s(start, m)
    split, last = np.full((count, width), -1), np.broadcast_to(np.arange(1, count + 1)[:, None], best.shape).copy()
    limited = level.options.memory_bytes < inf
    step = max(16, _BLOCK_BYTES // (8 * len(level.replicas()) * max(1, width)))
    for low in range(0, width, step):
        here = slice(low, min(low + step, width))
        columns = slice(start + here.start, start + here.stop)
        later = [level.later_s(start, columns, m) for m in level.replicas() if m < count]
        stash = level.stash_bytes(start, columns) if limited else None
        for m in range(2, count + 1):
            check_time()
            for replicas in level.replicas():
                if replicas >= m:
                    break
                cost = np.maximum(best[m - replicas - 1, : here.stop, None], later[replicas - 1])
                if stash is not None:
                    cost = np.where(level.fits(stash, m, replicas), cost, inf)
                found = cost.min(axis=0)
                better = found < best[m - 1, here]
                if better.any():
                    best[m - 1, here][better] = found[better]
                    if traced:
                        split[m - 1, here][better] = start + cost.argmin(axis=0)[better]
                        last[m - 1, here][better] = replicas
    return Row(start, best, split, last)


def trace(row: Row, first: int | None, last: int) -> list[Choice]:
    """The stages of the best pipeline of all machines from state ``first`` to state ``last``; the row was traced."""
    found: list[Choice] = []
    used, state = row.best_s.shape[0], last
    while True:
        replicas, split = int(row.last[used - 1, state - row.start]), int(row.split[used - 1, state - row.start])
        found.append(Choice(split if split >= 0 else first, state, replicas))
        if split < 0:
            return found[::-1]
        used, state = used - replicas, split
