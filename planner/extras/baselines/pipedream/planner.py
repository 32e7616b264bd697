"""PipeDream's planner: the shortest slowest stage of a pipeline with replicated stages, flat or level by level.

Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019, section 3.1, as its public
code computes it (optimizer/optimizer_graph_hierarchical.py).  A network is cut at its states (``format.states_of``).

    find      states 0 = i_0 < i_1 < ... < i_S = last, each inside the next, and machines m_1 ... m_S >= 1
    minimise  max_s max(stage_s, in_s, out_s)
    with      stage_s = (T_s + 4 (m_s - 1) P_s / (B m_s)) / m_s       T compute, P parameter bytes, B bytes a second
              in_s    = 2 a(i_{s-1}) / (B m_s)   for s > 1            a: bytes that cross (activations, gradients)
              out_s   = 2 a(i_s) / (B m_s)       for 1 < s < S
    such that m_1 + ... + m_S = N                                     every machine is used: ``best_row``
              m_s = 1                                                 if ``straight``: ``MachineLevel.replicas``
              ceil((N - m_1 - ... - m_s) / m_s) (A_s + P_s) <= memory    A: all activations: ``MachineLevel.fits``

Without communication in and out are 0.  Over levels (machines of a host, hosts, ...), the machine of a level is a whole
pipeline on all machines of the level below: T_s is that level's optimum for the same span, and in the first stage of a
level the gradients' term is divided by the number of machines of the level below.  The dynamic programme goes over
(state, machines used); its optimum is exact, so value and bound are equal.

``released`` drops what PipeDream imposes beside its cost.  Machines may stay unused, every ideal is a state, and over
levels the machines are numbered through: stages take them in order, and each of a stage's terms is priced by the
slowest link that it needs (within its group, to the machine before it, to the machine after it).  Level by level is
then one more candidate, so topology never hurts.

Such a plan (:func:`best_in_order`) is a path over (machines passed, state done).  A stage on machines x ... y - 1 costs

    max((T + 4 (m - 1) P / (B(x, y - 1) m)) / m,  2 a_in / (B(x - 1, y - 1) m),  2 a_out / (B(x, y) m)),   m = y - x

with B(x, y) the bandwidth of the lowest level that holds both machines.  Behind a stage the rest of a host (or of a
larger unit) may stay unused, and so may the last machines; on one level this is ``pipedream``'s programme for every
number of machines up to N.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, inf, prod
from operator import mul

import numpy as np
from numpy.typing import NDArray

from planner.extras.baselines.common.answer import OPTIMAL, Json, RivalAnswer, infeasible
from planner.extras.baselines.pipedream.format import Bools, Floats, LayerGraph, States, states_of
from planner.ir.errors import UsageError
from planner.solvers.budget import check_time

_BLOCK_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class PipeDreamOptions:
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
class StageChoice:
    """A stage: it starts in state ``first`` (None: nothing done), ends in ``last``, and has ``machines`` machines."""

    first: int | None
    last: int
    machines: int


def reduce_s(parameter_bytes: float, machines: int, bandwidth_bytes_per_s: float) -> float:
    """What summing gradients adds to a stage's work, before it is divided by the number of machines."""
    return 4 * (machines - 1) * parameter_bytes / (bandwidth_bytes_per_s * machines)


def stashes(machines_downstream: int, machines: int) -> int:
    """How many mini-batches a replica keeps beside the current one."""
    return ceil(machines_downstream / machines)


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
class MachineLevel:
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
    options: PipeDreamOptions

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
        states = self.states
        rows = slice(start, columns.stop)
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
        within: Bools = stashes(self.machines - used, machines) * stash_bytes <= self.options.memory_bytes
        return within

    def _span(self, sums: Floats, start: int, first: int) -> Floats:
        return sums[first:] - (sums[start - 1] if start else 0.0)


@dataclass(frozen=True, slots=True)
class OptimaRow:
    """Optima of all pipelines that start in one state: ``[m - 1, j - start]`` for m machines up to state j.

    Attributes:
        split: the state after which the last stage starts; -1: there is but one stage.
        last: the last stage's machines.
    """

    start: int
    best_s: Floats
    split: NDArray[np.intp]
    last: NDArray[np.intp]


def best_row(level: MachineLevel, start: int, traced: bool = False) -> OptimaRow:
    """The dynamic programme of one row: A[m][j] = min over k, m' of max(A[m - m'][k], last stage k to j on m')."""
    count = level.machines
    width = level.states.num_states - start
    best = np.full((count, width), inf)
    for m in level.replicas():
        check_time()
        best[m - 1] = level.alone_s(start, m)
    split = np.full((count, width), -1)
    last = np.broadcast_to(np.arange(1, count + 1)[:, None], best.shape).copy()
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
                cheapest = cost.min(axis=0)
                better = cheapest < best[m - 1, here]
                if better.any():
                    best[m - 1, here][better] = cheapest[better]
                    if traced:
                        split[m - 1, here][better] = start + cost.argmin(axis=0)[better]
                        last[m - 1, here][better] = replicas
    return OptimaRow(start, best, split, last)


def trace(row: OptimaRow, first: int | None, last: int) -> list[StageChoice]:
    """The stages of the best pipeline of all machines from state ``first`` to state ``last``; the row was traced."""
    stages: list[StageChoice] = []
    used = row.best_s.shape[0]
    state = last
    while True:
        replicas = int(row.last[used - 1, state - row.start])
        split = int(row.split[used - 1, state - row.start])
        stages.append(StageChoice(split if split >= 0 else first, state, replicas))
        if split < 0:
            return stages[::-1]
        used = used - replicas
        state = split


def solve(
    instance: LayerGraph,
    machines: Sequence[int],
    bandwidths_bytes_per_s: Sequence[float],
    options: PipeDreamOptions | None = None,
    released: bool = False,
) -> RivalAnswer:
    """The best plan of a network on ``machines``: seconds a mini-batch of the slowest stage.

    Args:
        machines: of each level, the innermost first: ``[8]``, or ``[4, 2]`` for 2 hosts of 4.
        bandwidths_bytes_per_s: of the links of each level.
        released: without PipeDream's restrictions.

    Raises:
        UsageError: levels without machines or bandwidth, or a network with too many states.
    """
    chosen = options or PipeDreamOptions()
    require_levels(machines, bandwidths_bytes_per_s)
    peer = _hierarchical(instance, tuple(machines), tuple(bandwidths_bytes_per_s), chosen)
    if not released:
        return peer
    flat = best_in_order(states_of(instance, every_ideal=True), machines, bandwidths_bytes_per_s, chosen)
    return peer if peer.value < flat.value else flat


def data_parallel_s(instance: LayerGraph, machines: Sequence[int], bandwidths_bytes_per_s: Sequence[float]) -> float:
    """Seconds a mini-batch of the whole network replicated on all machines, by PipeDream's model."""
    require_levels(machines, bandwidths_bytes_per_s)
    states = states_of(instance)
    seconds = float(states.compute_s[-1])
    below = 1
    for count, bandwidth in zip(machines, bandwidths_bytes_per_s, strict=True):
        seconds = (seconds + reduce_s(float(states.parameter_bytes[-1]), count, bandwidth) / below) / count
        below = count
    return seconds


@functools.lru_cache(maxsize=16)
def _hierarchical(
    instance: LayerGraph, machines: tuple[int, ...], bandwidths: tuple[float, ...], options: PipeDreamOptions
) -> RivalAnswer:
    """The answer; kept, since on one host the flat planner and the one that goes level by level ask the same."""
    states = states_of(instance)
    count = states.num_states
    times = np.full((count + 1, count), inf)
    times[0] = states.compute_s
    spans = states.compute_s[None, :] - states.compute_s[:, None]
    times[1:] = np.where(states.before, spans, inf)
    levels: list[MachineLevel] = []
    for number, (size, bandwidth) in enumerate(zip(machines, bandwidths, strict=True)):
        level = MachineLevel(states, size, bandwidth, levels[-1].machines if levels else 1, times, options)
        levels.append(level)
        if number < len(machines) - 1:
            times = np.full((count + 1, count), inf)
            for start in range(count):
                times[start, start:] = best_row(level, start).best_s[-1]
    whole = best_row(levels[-1], 0, traced=True)
    value = float(whole.best_s[-1, -1])
    if value == inf:
        return infeasible()
    stages = _stages(levels, whole, None, count - 1)
    return RivalAnswer(value, value, OPTIMAL, {"machines": prod(machines), "stages": stages})


def _stages(levels: Sequence[MachineLevel], row: OptimaRow, first: int | None, last: int) -> list[Json]:
    """The stages of the upper level between two states, each with those of the levels below; the row was traced."""
    stages: list[Json] = []
    for choice in trace(row, first, last):
        stage: dict[str, Json] = {
            "layers": list[Json](levels[-1].states.layers(choice.first, choice.last)),
            "machines": choice.machines,
        }
        if len(levels) > 1:
            below = best_row(levels[-2], 0 if choice.first is None else choice.first + 1, traced=True)
            stage["each"] = _stages(levels[:-1], below, choice.first, choice.last)
        stages.append(stage)
    return stages


_MOST_KEPT = 1500
"""States up to which matrices are kept; of more they would take gigabytes."""


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
        """Where the next stage may start after ``stop``: there, or where a unit begins."""
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
    states: States, machines: Sequence[int], bandwidths_bytes_per_s: Sequence[float], options: PipeDreamOptions
) -> RivalAnswer:
    """The best plan in which stages take the machines in order, exact.

    Args:
        machines: of each level, the innermost first.
    """
    topology = _Topology(tuple(accumulate(machines, mul)), tuple(bandwidths_bytes_per_s))
    total = topology.units[-1]
    if options.memory_bytes == inf:
        best = _best(states, topology, total, options)
        tried = [(used, best) for used in range(1, total + 1)]
    else:  # what a stage stashes depends on how many machines come after it
        tried = [(used, _best(states, topology, used, options)) for used in range(1, total + 1)]
    used, chosen = min(tried, key=lambda pair: float(pair[1].seconds[pair[0], -1]))
    seconds = float(chosen.seconds[used, -1])
    if seconds == inf:
        return infeasible()
    return RivalAnswer(seconds, seconds, OPTIMAL, {"machines": total, "stages": _stages_in_order(states, chosen, used)})


def _best(states: States, topology: _Topology, total: int, options: PipeDreamOptions) -> _Best:
    count = states.num_states
    seconds = np.full((total + 1, count), inf)
    split = np.full((total + 1, count), -1)
    steps: dict[tuple[int, int], _Step] = {}
    prices = _StatePrices(states, topology, options)
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


class _StatePrices:
    """What stages cost; matrices by the state they start from and the one they reach, kept where there is room."""

    def __init__(self, states: States, topology: _Topology, options: PipeDreamOptions) -> None:
        self._states = states
        self._topology = topology
        self._options = options
        compute = states.compute_s
        parameters = states.parameter_bytes
        self._compute = np.where(states.before, compute[None, :] - compute[:, None], inf)
        self._parameters = parameters[None, :] - parameters[:, None]
        total = states.activation_bytes + parameters
        self._stash = total[None, :] - total[:, None]
        self._priced: dict[tuple[int, float, float, float], Floats] = {}

    def first_s(self, step: _Step, total: int) -> Floats:
        """A first stage, by the state it reaches: nothing crosses into it, and PipeDream prices not what leaves it."""
        states = self._states
        replicas = step.machines
        inside = self._topology.bandwidth(step.start, step.start + replicas - 1)
        seconds = (states.compute_s + reduce_s(1.0, replicas, inside) * states.parameter_bytes) / replicas
        stash = stashes(total - step.after, replicas) * (states.activation_bytes + states.parameter_bytes)
        return np.where(stash <= self._options.memory_bytes, seconds, inf)

    def later_s(self, step: _Step, total: int) -> Floats:
        """A later stage."""
        start = step.start
        stop = step.start + step.machines
        where = self._topology
        before = where.bandwidth(start - 1, stop - 1)
        after = where.bandwidth(start, step.after)
        key = (step.machines, where.bandwidth(start, stop - 1), before, after)
        priced = self._priced.get(key)
        if priced is None:
            priced = self._later_s(*key)
            if self._states.num_states <= _MOST_KEPT:
                self._priced[key] = priced
        if self._options.memory_bytes == inf:
            return priced
        stash = stashes(total - step.after, step.machines) * self._stash
        return np.where(stash <= self._options.memory_bytes, priced, inf)

    def _later_s(self, replicas: int, inside: float, before: float, after: float) -> Floats:
        seconds = self._compute + reduce_s(1.0, replicas, inside) * self._parameters
        if self._options.communication:
            crossing = self._states.output_bytes
            leaving = crossing.copy()
            leaving[-1] = 0.0
            np.maximum(seconds, 2 / before * crossing[:, None], out=seconds)
            np.maximum(seconds, 2 / after * leaving[None, :], out=seconds)
        seconds /= replicas
        return seconds


def _stages_in_order(states: States, best: _Best, used: int) -> list[Json]:
    stages: list[Json] = []
    passed = used
    state = states.num_states - 1
    while state >= 0:
        step = best.steps[passed, state]
        split = int(best.split[passed, state])
        stages.append(
            {
                "layers": list[Json](states.layers(split if split >= 0 else None, state)),
                "machines": step.machines,
                "first_machine": step.start,
            }
        )
        passed = step.start
        state = split
    return stages[::-1]
