"""PipeDream's cost without PipeDream's restrictions: any number of machines, any ideal, the topology priced.

Machines are numbered through, host by host, and stages take them in order, so that a plan is a path over (machines
passed, state done).  A stage on machines x ... y - 1 costs

    max((T + 4 (m - 1) P / (B(x, y - 1) m)) / m,  2 a_in / (B(x - 1, y - 1) m),  2 a_out / (B(x, y) m)),   m = y - x

with B(x, y) the bandwidth of the lowest level that holds both machines.  Behind a stage the rest of a host (or of a
larger unit) may stay unused, and so may the last machines; on one level this is ``pipedream``'s programme for every
number of machines up to N.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from operator import mul

import numpy as np
from numpy.typing import NDArray

from planner.peers.answer import OPTIMAL, Answer, Json, infeasible
from planner.peers.antichains import Floats, States
from planner.peers.pipedream_rows import Options, reduce_s, stashes

_MOST_KEPT = 1500
"""Matrices of up to so many states are kept; of more they would take gigabytes."""


@dataclass(frozen=True, slots=True)
class _Topology:
    """Machines by number.

    Attributes:
        units: machines in a unit of each level.
        bandwidths: by level.
    """

    units: tuple[int, ...]
    bandwidths: tuple[float, ...]

    def bandwidth(self, first: int, last: int) -> float:
        """Of the lowest level at which both machines are in one unit; what lies outside is as far as can be."""
        for unit, bandwidth in zip(self.units, self.bandwidths, strict=True):
            if first // unit == last // unit:
                return bandwidth
        return self.bandwidths[-1]

    def next_starts(self, stop: int) -> list[int]:
        """Where the next stage may start behind ``stop``: there, or where a unit begins."""
        return sorted({stop, *(-(-stop // unit) * unit for unit in self.units[:-1])})


@dataclass(frozen=True, slots=True)
class _Step:
    """A stage on machines ``start`` to ``start + machines``; the next one starts at ``after``."""

    start: int
    machines: int
    after: int


@dataclass(frozen=True, slots=True)
class _Best:
    """By machines passed and state; ``split`` -1: the first stage; ``steps``: the last stage, where there is one."""

    seconds: Floats
    split: NDArray[np.intp]
    steps: dict[tuple[int, int], _Step]


def best_in_order(
    states: States, machines: Sequence[int], bandwidths_bytes_per_s: Sequence[float], options: Options
) -> Answer:
    """The best plan in which stages take the machines in order, exact.

    Args:
        machines: of each level, the innermost first.
    """
    topology = _Topology(tuple(accumulate(machines, mul)), tuple(bandwidths_bytes_per_s))
    total = topology.units[-1]
    if options.memory_bytes == inf:
        best = _best(states, topology, total, options)
        tried = [(used, best) for used in range(1, total + 1)]
    else:  # what a stage stashes depends on how many machines come behind it
        tried = [(used, _best(states, topology, used, options)) for used in range(1, total + 1)]
    used, found = min(tried, key=lambda pair: float(pair[1].seconds[pair[0], -1]))
    seconds = float(found.seconds[used, -1])
    if seconds == inf:
        return infeasible()
    return Answer(seconds, seconds, OPTIMAL, {"machines": total, "stages": _stages(states, found, used)})


def _best(states: States, topology: _Topology, total: int, options: Options) -> _Best:
    count = states.num_states
    seconds, split = np.full((total + 1, count), inf), np.full((total + 1, count), -1)
    steps: dict[tuple[int, int], _Step] = {}
    prices = _Prices(states, topology, options)
    for start in range(total):
        largest = 1 if options.straight else total - start
        if start and seconds[start].min() == inf:
            continue
        for replicas in range(1, largest + 1):
            for after in topology.next_starts(start + replicas):
                if after > total:
                    continue
                step = _Step(start, replicas, after)
                if start == 0:
                    cost = prices.first_s(step, total)[None, :]
                else:
                    cost = np.maximum(seconds[start][:, None], prices.later_s(step, total))
                best = cost.min(axis=0)
                better = np.flatnonzero(best < seconds[after])
                seconds[after][better] = best[better]
                split[after][better] = cost.argmin(axis=0)[better] if start else -1
                steps.update({(after, state): step for state in better.tolist()})
    return _Best(seconds, split, steps)


class _Prices:
    """What stages cost; matrices by the state they start from and the one they reach, kept where there is room."""

    def __init__(self, states: States, topology: _Topology, options: Options) -> None:
        self._states, self._topology, self._options = states, topology, options
        compute, parameters = states.compute_s, states.parameter_bytes
        self._compute = np.where(states.before, compute[None, :] - compute[:, None], inf)
        self._parameters = parameters[None, :] - parameters[:, None]
        total = states.activation_bytes + parameters
        self._stash = total[None, :] - total[:, None]
        self._priced: dict[tuple[int, float, float, float], Floats] = {}

    def first_s(self, step: _Step, total: int) -> Floats:
        """A first stage, by the state it reaches: nothing crosses into it, and PipeDream prices not what leaves it."""
        states, replicas = self._states, step.machines
        inside = self._topology.bandwidth(step.start, step.start + replicas - 1)
        seconds = (states.compute_s + reduce_s(1.0, replicas, inside) * states.parameter_bytes) / replicas
        stash = stashes(total - step.after, replicas) * (states.activation_bytes + states.parameter_bytes)
        return np.where(stash <= self._options.memory_bytes, seconds, inf)

    def later_s(self, step: _Step, total: int) -> Floats:
        """A later stage."""
        start, stop, where = step.start, step.start + step.machines, self._topology
        before, behind = where.bandwidth(start - 1, stop - 1), where.bandwidth(start, step.after)
        key = (step.machines, where.bandwidth(start, stop - 1), before, behind)
        priced = self._priced.get(key)
        if priced is None:
            priced = self._later_s(*key)
            if self._states.num_states <= _MOST_KEPT:
                self._priced[key] = priced
        if self._options.memory_bytes == inf:
            return priced
        stash = stashes(total - step.after, step.machines) * self._stash
        return np.where(stash <= self._options.memory_bytes, priced, inf)

    def _later_s(self, replicas: int, inside: float, before: float, behind: float) -> Floats:
        seconds = self._compute + reduce_s(1.0, replicas, inside) * self._parameters
        if self._options.communication:
            crossing = self._states.output_bytes
            leaving = crossing.copy()
            leaving[-1] = 0.0
            np.maximum(seconds, 2 / before * crossing[:, None], out=seconds)
            np.maximum(seconds, 2 / behind * leaving[None, :], out=seconds)
        seconds /= replicas
        return seconds


def _stages(states: States, found: _Best, used: int) -> list[Json]:
    stages: list[Json] = []
    passed, state = used, states.num_states - 1
    while state >= 0:
        step, split = found.steps[passed, state], int(found.split[passed, state])
        stages.append(
            {
                "layers": list[Json](states.layers(split if split >= 0 else None, state)),
                "machines": step.machines,
                "first_machine": step.start,
            }
        )
        passed, state = step.start, split
    return stages[::-1]
