"""SparsePipe: PipeDream's pipeline on devices of several types, a stage as slow as its slowest device.

SparsePipe, a planner for sparse 3-D networks with public code (BestSonny/SparsePipedream,
optimizer/optimizer_graph_hierarchical_hybrid.py).  The network was measured on every type.

    find      states 0 = i_0 < i_1 < ... < i_S = last, and groups g_1 ... g_S of devices, disjoint and not empty
    minimise  max(max_s stage_s, max_{s < S} 2 a(i_s) / B)        a: bytes that cross, B: bytes a second of a link
    with      stage_s = (max_{type in g_s} T_s(type) + 2 (m_s - 1) P_s / (B m_s)) / m_s       m_s = |g_s|
    such that ceil(later_s / m_s) (A_s + P_s) <= memory           later_s: devices in later stages; A_s: activations

``best_pipeline`` is exact: devices in any order, groups of several types, devices that stay unused.  Its states are
(what is still to do, devices of each type that do it), since devices of one type are alike.

``fixed_order`` is the published planner: devices stand in a row, the type with most devices first (as given where
counts are equal), stages take them from the left, all of them; and a later stage has one device or an even number, and
fewer than stand before it.

Types may differ in what they report of bytes (a sparse network's depend on the batch drawn): the largest counts.

``solve`` plans a problem of ours with the published restrictions.  As there any two devices are joined alike (the
slowest link), and replicas have equal shares whatever their speed.  Its schedule is PipeDream's; ours is the
synchronous 1F1B.  Every micro-batch size is tried.

Of a sparse network each stage makes its kernel maps when the features have arrived, and not ahead of them; in its
planner that is a part of the layers' time, of the first one that needs a map.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf

import numpy as np

from planner.costs.candidate import Candidate
from planner.costs.cost_model import CostModel
from planner.extras.baselines.common.answer import (
    OPTIMAL,
    Json,
    Placed,
    RivalAnswer,
    Trial,
    bandwidth_bytes_per_s,
    candidates,
    infeasible,
    names_in,
    rival_plan,
    stages_in,
)
from planner.extras.baselines.common.problem import PricedNetwork, block_ends, blocks_at, network
from planner.extras.baselines.pipedream.format import Floats, LayerGraph, States, states_of
from planner.extras.baselines.pipedream.planner import stashes
from planner.ir.errors import FormatError, UsageError
from planner.ir.lazy import once
from planner.ir.plan import Plan
from planner.ir.problem import Problem
from planner.solvers.budget import check_time
from planner.solvers.candidates.feasibility import micro_batch_sizes, require_divisible
from planner.solvers.progress import Progress

Counts = tuple[int, ...]
"""Devices of each type."""


@dataclass(frozen=True, slots=True)
class DeviceType:
    """``count`` devices on each of which the network costs what ``graph`` says."""

    name: str
    graph: LayerGraph
    count: int


@dataclass(frozen=True, slots=True)
class _Stage:
    """A stage from ``start`` (0: nothing done, i + 1: state i done) to state ``last``."""

    start: int
    last: int
    devices: Counts


def best_pipeline(
    instance: Sequence[DeviceType],
    bandwidth_bytes_per_s: float = 1e9,
    communication: bool = True,
    memory_bytes: float = inf,
    fixed_order: bool = False,
) -> RivalAnswer:
    """The best plan: seconds a mini-batch of the slowest stage or link.

    Raises:
        UsageError: no device, or no bandwidth.
        FormatError: the types' profiles are not of one network.
    """
    counts = tuple(kind.count for kind in instance)
    if not counts or min(counts) < 0 or not sum(counts) or not 0 < bandwidth_bytes_per_s < inf:
        detail = f"devices {list(counts)}, {bandwidth_bytes_per_s:g} bytes a second"
        raise UsageError("no devices, or no bandwidth", [detail], ["give numbers above 0"])
    prices = _TypedStagePrices(instance, bandwidth_bytes_per_s, communication, memory_bytes)
    value, stages = _fixed(prices, counts) if fixed_order else _free(prices, counts)
    if value == inf:
        return infeasible()
    names = [kind.name for kind in instance]
    shown: list[Json] = [
        {
            "layers": list[Json](prices.states.layers(stage.start - 1 if stage.start else None, stage.last)),
            "devices": {name: count for name, count in zip(names, stage.devices, strict=True) if count},
        }
        for stage in stages
    ]
    return RivalAnswer(value, value, OPTIMAL, {"stages": shown})


class _TypedStagePrices:
    """What stages cost: matrices by start (0: nothing done, i + 1: state i done) and the state they reach."""

    def __init__(self, types: Sequence[DeviceType], bandwidth: float, communication: bool, memory: float) -> None:
        by_type = [states_of(kind.graph) for kind in types]
        _require_one_network(types, by_type)
        self.states: States = by_type[0]
        count = self.states.num_states
        legal = np.vstack([np.ones(count, bool), self.states.before])
        self._seconds = [np.where(legal, _spans(states.compute_s), inf) for states in by_type]
        self._parameters = _largest([_spans(states.parameter_bytes) for states in by_type])
        self._stash = self._parameters + _largest([_spans(states.activation_bytes) for states in by_type])
        crossing = _largest([states.output_bytes for states in by_type])
        self._link_s = np.where(np.arange(count) < count - 1, 2 * crossing / bandwidth, 0.0) * communication
        self._bandwidth = bandwidth
        self._memory = memory

    def stage_s(self, group: Counts, downstream: int) -> Floats:
        """Stages of a group of devices, ``downstream`` devices come later, and the links that they end at."""
        used = frozenset(index for index, count in enumerate(group) if count)
        total = sum(group)
        priced = self._priced(used, total)
        if self._memory == inf:
            return priced
        return np.where(stashes(downstream, total) * self._stash <= self._memory, priced, inf)

    @once
    def _priced(self, used: frozenset[int], total: int) -> Floats:
        slowest = _largest([self._seconds[index] for index in used])
        seconds = (slowest + 2 * (total - 1) * self._parameters / (self._bandwidth * total)) / total
        return np.asarray(np.maximum(seconds, self._link_s))


def _free(prices: _TypedStagePrices, counts: Counts) -> tuple[float, list[_Stage]]:
    """best[v][i] = min over g <= v and j of max(stage of g from i to j, best[v - g][j + 1]), v by growing size."""
    num_starts = prices.states.num_states + 1
    best = {tuple(0 for _ in counts): np.where(np.arange(num_starts) == num_starts - 1, 0.0, inf)}
    chosen: dict[Counts, list[_Stage | None]] = {}
    for whole in sorted(_up_to(counts), key=sum):
        if not any(whole):
            continue
        value = np.full(num_starts, inf)
        steps: list[_Stage | None] = [None] * num_starts
        for group in _up_to(whole):
            check_time()
            rest = tuple(v - g for v, g in zip(whole, group, strict=True))
            if not any(group) or best[rest].min() == inf:
                continue
            cost = np.maximum(prices.stage_s(group, sum(rest)), best[rest][1:])
            ends = cost.argmin(axis=1)
            values = np.append(cost[np.arange(num_starts), ends], inf)[:num_starts]
            for start in np.flatnonzero(values < value).tolist():
                value[start] = values[start]
                steps[start] = _Stage(start, int(ends[start]), group)
        best[whole] = value
        chosen[whole] = steps
    whole = min(chosen, key=lambda v: (float(best[v][0]), sum(v)))
    stages: list[_Stage] = []
    start = 0
    left = whole
    while start < num_starts - 1 and (stage := chosen[left][start]) is not None:
        stages.append(stage)
        start = stage.last + 1
        left = tuple(v - g for v, g in zip(left, stage.devices, strict=True))
    return float(best[whole][0]), stages


def _fixed(prices: _TypedStagePrices, counts: Counts) -> tuple[float, list[_Stage]]:
    """A[m][j] = min over k, m' of max(A[m - m'][k], stage from k to j on the devices m - m' ... m - 1 of the row)."""
    by_count = sorted(range(len(counts)), key=lambda index: -counts[index])
    row = [index for index in by_count for _ in range(counts[index])]
    total = len(row)

    def group(first: int, stop: int) -> Counts:
        return tuple(row[first:stop].count(index) for index in range(len(counts)))

    best = np.full((total + 1, prices.states.num_states), inf)
    steps = {}
    for used in range(1, total + 1):
        best[used] = prices.stage_s(group(0, used), total - used)[0]
        steps.update({(used, state): _Stage(0, state, group(0, used)) for state in range(best.shape[1])})
        for last in range(1, used):
            if (last > 1 and last % 2) or used - last <= last:
                continue
            check_time()
            devices = group(used - last, used)
            cost = np.maximum(best[used - last][:, None], prices.stage_s(devices, total - used)[1:])
            values = cost.min(axis=0)
            splits = cost.argmin(axis=0)
            for state in np.flatnonzero(values < best[used]).tolist():
                best[used, state] = values[state]
                steps[used, state] = _Stage(int(splits[state]) + 1, state, devices)
    stages: list[_Stage] = []
    used = total
    state = prices.states.num_states - 1
    while state >= 0:
        stages.append(steps[used, state])
        used = used - sum(stages[-1].devices)
        state = stages[-1].start - 1
    return float(best[total, -1]), stages[::-1]


def _up_to(counts: Counts) -> Iterator[Counts]:
    return product(*(range(count + 1) for count in counts))


def _spans(sums: Floats) -> Floats:
    """What lies between each start and each state: ``[i, j]`` from state i - 1 (0: nothing done) to state j."""
    starts: Floats = np.concatenate((np.zeros(1), sums))
    spans: Floats = sums[None, :] - starts[:, None]
    return spans


def _largest(arrays: Sequence[Floats]) -> Floats:
    largest: Floats = functools.reduce(np.maximum, arrays)
    return largest


def _require_one_network(types: Sequence[DeviceType], by_type: Sequence[States]) -> None:
    for kind, states in zip(types, by_type, strict=True):
        if states.done != by_type[0].done or len(states.nodes) != len(by_type[0].nodes):
            graphs = (kind.graph, types[0].graph)
            raise FormatError(
                f"{kind.graph.source} is not a profile of the same network as {types[0].graph.source}",
                [f"{graph.source}: {len(graph.nodes)} layers, {len(graph.edges)} edges" for graph in graphs],
                ["give profiles of one network, measured on each type of device"],
            )


def solve(problem: Problem, progress: Progress | None = None) -> Plan:
    """SparsePipe's stages at the best micro-batch size.

    Raises:
        InfeasibleError: they do not fit, or the model mixes samples.
    """
    if len(problem.ranks) > 1:
        require_divisible(problem.graph)
    return rival_plan(problem, pipelines, "sparsepipe", "shortest slowest stage, devices in a fixed order")


def pipelines(problem: Problem, cost_model: CostModel, trial: Trial) -> Iterator[Candidate]:
    """Every micro-batch size."""
    ranks: dict[str, list[int]] = {}
    for rank in problem.ranks:
        ranks.setdefault(cost_model.kind(rank), []).append(rank)
    bandwidth = bandwidth_bytes_per_s(problem, problem.ranks)
    for size in micro_batch_sizes(problem, cost_model):
        networks = _networks(problem, cost_model, list(ranks), size)
        types = [DeviceType(kind, networks[kind].graph, len(mine)) for kind, mine in ranks.items()]
        answer = best_pipeline(types, bandwidth, fixed_order=True)
        free = {kind: list(mine) for kind, mine in ranks.items()}
        stages: list[Placed] = []
        for stage in stages_in(answer):
            devices = stage["devices"]
            counts = devices if isinstance(devices, dict) else {}
            members = [
                free[kind].pop(0) for kind, count in counts.items() if isinstance(count, int) for _ in range(count)
            ]
            stages.append((next(iter(networks.values())).layers(names_in(stage)), tuple(sorted(members))))
        if trial.has_plan(size, answer):
            offered = candidates(problem, cost_model, stages, size, trial)
            yield from (replace(each, prepares_ahead=False) for each in offered)


def _networks(problem: Problem, cost_model: CostModel, kinds: list[str], size: int) -> dict[str, PricedNetwork]:
    """The network on each kind; if one must be a chain of blocks, the same blocks on all."""
    networks = {kind: network(problem, cost_model, kind, size, prepares=True) for kind in kinds}
    ends = block_ends(networks[kinds[0]], len(problem.ranks))
    return networks if ends is None else {kind: blocks_at(fine, ends) for kind, fine in networks.items()}
