"""PipeDream's planner: the shortest slowest stage of a pipeline with replicated stages, flat or level by level.

Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019, section 3.1, as its public
code computes it (optimizer/optimizer_graph_hierarchical.py).  A network is cut at ``planner.peers.antichains``.

    find      states 0 = i_0 < i_1 < ... < i_S = last, each inside the next, and machines m_1 ... m_S >= 1
    minimise  max_s max(stage_s, in_s, out_s)
    with      stage_s = (T_s + 4 (m_s - 1) P_s / (B m_s)) / m_s       T compute, P parameter bytes, B bytes a second
              in_s    = 2 a(i_{s-1}) / (B m_s)   for s > 1            a: bytes that cross (activations, gradients)
              out_s   = 2 a(i_s) / (B m_s)       for 1 < s < S
    such that m_1 + ... + m_S = N                                     every machine is used: ``best_row``
              m_s = 1                                                 if ``straight``: ``Level.replicas``
              ceil((N - m_1 - ... - m_s) / m_s) (A_s + P_s) <= memory    A: all activations: ``Level.fits``

Without communication in and out are 0.  Over levels (machines of a host, hosts, ...), the machine of a level is a whole
pipeline on all machines of the level below: T_s is that level's optimum for the same span, and in the first stage of a
level the gradients' term is divided by the number of machines of the level below.  The dynamic programme goes over
(state, machines used); its optimum is exact, so value and bound are equal.

``released`` drops what PipeDream imposes beside its cost.  Machines may stay unused, every ideal is a state, and over
levels the machines are numbered through: stages take them in order, and each of a stage's terms is priced by the
slowest link that it needs (within its group, to the machine before it, to the machine behind it).  Level by level is
then one more candidate, so topology never hurts.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, prod

import numpy as np

from planner.formats.pipedream import LayerGraph
from planner.peers.answer import OPTIMAL, Answer, Json, infeasible
from planner.peers.antichains import States, states_of
from planner.peers.pipedream_released import best_in_order
from planner.peers.pipedream_rows import Level, Options, best_row, reduce_s, require_levels, trace

__all__ = ["Options", "data_parallel_s", "solve"]


def solve(
    instance: LayerGraph,
    machines: Sequence[int],
    bandwidths_bytes_per_s: Sequence[float],
    options: Options | None = None,
    released: bool = False,
) -> Answer:
    """The best plan of a network on ``machines``: seconds a mini-batch of the slowest stage.

    Args:
        machines: of each level, the innermost first: ``[8]``, or ``[4, 2]`` for 2 hosts of 4.
        bandwidths_bytes_per_s: of the links of each level.
        released: without PipeDream's restrictions.

    Raises:
        UsageError: levels without machines or bandwidth, or a network with too many states.
    """
    chosen = options or Options()
    require_levels(machines, bandwidths_bytes_per_s)
    peer = _hierarchical(states_of(instance), machines, bandwidths_bytes_per_s, chosen)
    if not released:
        return peer
    flat = best_in_order(states_of(instance, every_ideal=True), machines, bandwidths_bytes_per_s, chosen)
    return peer if peer.value < flat.value else flat


def data_parallel_s(instance: LayerGraph, machines: Sequence[int], bandwidths_bytes_per_s: Sequence[float]) -> float:
    """Seconds a mini-batch of the whole network replicated on all machines, by PipeDream's model."""
    require_levels(machines, bandwidths_bytes_per_s)
    states = states_of(instance)
    seconds, below = float(states.compute_s[-1]), 1
    for count, bandwidth in zip(machines, bandwidths_bytes_per_s, strict=True):
        seconds = (seconds + reduce_s(float(states.parameter_bytes[-1]), count, bandwidth) / below) / count
        below = count
    return seconds


def _hierarchical(states: States, machines: Sequence[int], bandwidths: Sequence[float], options: Options) -> Answer:
    count = states.num_states
    times = np.full((count + 1, count), inf)
    times[0] = states.compute_s
    spans = states.compute_s[None, :] - states.compute_s[:, None]
    times[1:] = np.where(states.before, spans, inf)
    levels: list[Level] = []
    for number, (size, bandwidth) in enumerate(zip(machines, bandwidths, strict=True)):
        level = Level(states, size, bandwidth, levels[-1].machines if levels else 1, times, options)
        levels.append(level)
        if number < len(machines) - 1:
            times = np.full((count + 1, count), inf)
            for start in range(count):
                times[start, start:] = best_row(level, start).best_s[-1]
    value = float(best_row(levels[-1], 0).best_s[-1, -1])
    if value == inf:
        return infeasible()
    stages = _stages(levels, None, count - 1)
    return Answer(value, value, OPTIMAL, {"machines": prod(machines), "stages": stages})


def _stages(levels: Sequence[Level], first: int | None, last: int) -> list[Json]:
    """The stages of the upper level between two states, each with those of the levels below."""
    level = levels[-1]
    choices = trace(best_row(level, 0 if first is None else first + 1, traced=True), first, last)
    return [
        {
            "layers": list[Json](level.states.layers(choice.first, choice.last)),
            "machines": choice.machines,
            **({"each": _stages(levels[:-1], choice.first, choice.last)} if len(levels) > 1 else {}),
        }
        for choice in choices
    ]
