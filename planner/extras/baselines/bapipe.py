"""BaPipe: a balanced pipeline with one device a stage, and the schedule that suits links and memory.

Zhao et al., "BaPipe: Exploration of Balanced Pipeline Parallelism for DNN Training", 2020 (arXiv 2012.12544): the
schedules and their times (section 3), the balance (section 4).  Devices stand in a row with speeds v_1 ... v_N; the
mini-batch is cut into M micro-batches, for one of which a stage s takes F_s and B_s, and a cut r takes SR_r one way.

    find      cuts 0 = b_0 < ... < b_N = layers, a schedule, M
    minimise  (M + N - 1) max_s (F_s + B_s) + k max_r 2 SR_r                                   ``minibatch_s``

              schedule    k                                F and B that count     micro-batches stage i = 1 ... N keeps
              1F1B-SNO    M + N - 2 - ceil((M - 1) / N)    as they are            min(M, N - i + 1)
              1F1B-SO     N - 1                            as they are            min(M, 2 (N - i) + 1)
              1F1B-AS     0                                at least SR each       min(M, N - i + 1)
              FBP-AS      0                                their sum, at least SR min(M, 2 (N - i) + 1)

    such that 2 P_s + kept_s A_s <= memory                       parameters, gradients, activations of micro-batches
              cuts lie after whole layers                        unless ``intra_layer``

1F1B-SO hides transfers while SR <= (F + B) / 2 of the slowest stage; longer ones slow the pipeline down to that, or, if
that is quicker, it is 1F1B-SNO.  SNO and SO are for devices that compute or send (no overlap, or overlap by twice the
warm-up), AS for those that stream while they compute (FPGAs; FBP runs forward and backward at once on parts of the
device).  Balancing by compute, and the *coarse-grained* partition (only cuts that links can bear), are one exact
programme here: for every threshold of SR the smallest slowest stage over cuts not above it, ``_balance``.  The
*intra-layer* partition moves a cut into a layer, so that stages take exactly their share; the next device then
needs the layer's inputs beside the part of its outputs.  Data parallelism is BaPipe's fall-back:
M (F + B) / sum of v + 2 (N - 1) / N P / bandwidth.

``best_pipeline`` is that programme; ``solve`` plans a problem of ours by it: schedules 1F1B-SNO and 1F1B-SO, or 1F1B-AS
and FBP-AS where all devices stream, every micro-batch size, devices in the order of their ranks, each as fast as the
profile says, joined by the slowest link.  A stage there is of whole layers, so the intra-layer partition is left out;
data parallelism is its fall-back.  Which schedule is best at which size BaPipe's closed form says; the simulator then
chooses among the sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, inf

import numpy as np
from numpy.typing import NDArray

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
    rival_plan,
    slowest_kind,
    whole_network_s,
)
from planner.extras.baselines.common.problem import (
    ChainCosts,
    PricedNetwork,
    chain_of,
    network,
    require_positive,
    sums,
)
from planner.ir.plan import Plan
from planner.ir.problem import Problem
from planner.schedules import names as schedule_names
from planner.solvers.budget import check_time
from planner.solvers.candidates.candidate import micro_batches
from planner.solvers.candidates.feasibility import micro_batch_sizes, mixing_layers
from planner.solvers.progress import Progress

SNO = "1F1B-SNO"
SO = "1F1B-SO"
AS = "1F1B-AS"
FBP = "FBP-AS"
SYNCHRONOUS = (SNO, SO)
ASYNCHRONOUS = (AS, FBP)
DATA_PARALLEL = "data-parallel"

_ROUNDING = 1e-9
_NEARLY_EVEN = 1.25  # of the even share of work: stages that long are looked for first


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """The devices.

    Attributes:
        speeds: of each, in their order.
        bandwidth_bytes_per_s: of the link between neighbours.
        memory_bytes: of each device.
    """

    speeds: tuple[float, ...]
    bandwidth_bytes_per_s: float
    memory_bytes: float = inf


@dataclass(frozen=True, slots=True)
class BapipePipeline:
    """A point of BaPipe's space.

    Attributes:
        cuts: where stages end, in layers; a fraction lies inside a layer.
    """

    schedule: str
    micro_batches: int
    cuts: tuple[float, ...]


def best_pipeline(
    instance: ChainCosts,
    devices: DeviceRow,
    micro_batches: Sequence[int],
    schedules: Sequence[str] = SYNCHRONOUS,
    intra_layer: bool = False,
    data_parallel: bool = False,
) -> RivalAnswer:
    """The best pipeline by BaPipe's model: seconds a mini-batch.

    Args:
        micro_batches: numbers of them that may be tried.
        intra_layer: a cut may lie inside a layer.
        data_parallel: whether replicas of the whole network are tried too.

    Raises:
        UsageError: no device, no micro-batch, or no bandwidth.
    """
    require_positive(devices=len(devices.speeds), micro_batches=min(micro_batches, default=0))
    require_positive(speed=min(devices.speeds), bandwidth=devices.bandwidth_bytes_per_s)
    priced: list[tuple[float, BapipePipeline]] = []
    sums_of = _Sums(instance)
    for count in micro_batches:
        for schedule in schedules:
            best_s = min((value for value, _ in priced), default=inf)
            priced += _whole_layers(sums_of, devices, schedule, count, best_s)
            if intra_layer:
                priced += _inside_layers(instance, devices, schedule, count)
        if (
            data_parallel
            and sum(instance.saved_bytes) / count + 2 * sum(instance.parameter_bytes) <= devices.memory_bytes
        ):
            priced.append((_data_parallel_s(instance, devices), BapipePipeline(DATA_PARALLEL, count, ())))
    if not priced:
        return infeasible()
    value, best = min(priced, key=lambda pair: pair[0])
    plan: dict[str, Json] = {
        "schedule": best.schedule,
        "micro_batches": best.micro_batches,
        "cuts": list[Json](best.cuts),
    }
    return RivalAnswer(value, value, OPTIMAL, plan)


def minibatch_s(chain: ChainCosts, devices: DeviceRow, pipeline: BapipePipeline) -> float:
    """BaPipe's closed form for one pipeline; infinite if it does not fit."""
    count = pipeline.micro_batches
    stages = len(devices.speeds)
    bounds = (0.0, *pipeline.cuts, float(chain.num_layers))
    spans = list(pairwise(bounds))
    costs = [
        _stage_s(chain, first, last, speed, count) for (first, last), speed in zip(spans, devices.speeds, strict=True)
    ]
    link_s = max((_crossing(chain, cut) for cut in pipeline.cuts), default=0.0)
    link_s /= count * devices.bandwidth_bytes_per_s
    for number, (first, last) in enumerate(spans, start=1):
        if not _fits(chain, devices, first, last, kept(pipeline.schedule, number, stages, count), count):
            return inf
    return _total_s(pipeline.schedule, count, stages, costs, link_s)


def kept(schedule: str, number: int, stages: int, micro_batches: int) -> int:
    """Micro-batches whose activations stage ``number`` (from 1) keeps."""
    later = stages - number
    return min(micro_batches, 2 * later + 1 if schedule in (SO, FBP) else later + 1)


def _total_s(schedule: str, count: int, stages: int, costs: Sequence[tuple[float, float]], link_s: float) -> float:
    if schedule == AS:
        return (count + stages - 1) * max(max(f, link_s) + max(b, link_s) for f, b in costs)
    slowest = max(f + b for f, b in costs)
    if schedule == FBP:
        return (count + stages - 1) * max(slowest, link_s)
    plain = (count + stages - 1) * slowest + (count + stages - 2 - ceil((count - 1) / stages)) * 2 * link_s
    hidden = (count + stages - 1) * max(slowest, 2 * link_s) + (stages - 1) * 2 * link_s
    return min(plain, hidden) if schedule == SO else plain


def _whole_layers(
    sums_of: _Sums, devices: DeviceRow, schedule: str, count: int, best_s: float
) -> list[tuple[float, BapipePipeline]]:
    """The best pipelines for every threshold of what crosses, the lowest first; cuts after whole layers.

    Unless transfers lengthen stages (AS), the best cuts for a threshold are the best for all lower ones that they keep,
    and the slowest stage grows as the threshold falls: once it alone takes longer than the best pipeline, so do all.

    Args:
        best_s: of pipelines known before; none that surely takes longer is of interest.
    """
    crossing_bytes = sums_of.chain.crossing_bytes
    rounds = count + len(devices.speeds) - 1
    priced: list[tuple[float, BapipePipeline]] = []
    even_s = float(sums_of.running[0][-1] + sums_of.running[1][-1]) / sum(devices.speeds)
    most_bytes = inf  # from there on the cuts are known
    for limit in sorted({0.0, *crossing_bytes}, reverse=True):
        check_time()
        if limit >= most_bytes:
            continue
        upper_s = inf if schedule == AS else best_s * count / rounds * (1 + _ROUNDING)
        near_s = upper_s if schedule == AS else min(upper_s, _NEARLY_EVEN * even_s)
        slowest_s, cuts = _balance(sums_of, devices, schedule, count, _Limits(limit, near_s))
        if slowest_s > near_s and near_s < upper_s:
            slowest_s, cuts = _balance(sums_of, devices, schedule, count, _Limits(limit, upper_s))
        if slowest_s == inf:
            break
        pipeline = BapipePipeline(schedule, count, cuts)
        priced.append((minibatch_s(sums_of.chain, devices, pipeline), pipeline))
        best_s = min(best_s, priced[-1][0])
        if schedule != AS:
            most_bytes = max((crossing_bytes[int(cut) - 1] for cut in cuts), default=0.0)
    return priced[::-1]


@dataclass(frozen=True, slots=True)
class _Limits:
    """What a cut may carry, and what a stage may take of a mini-batch."""

    cut_bytes: float
    stage_s: float


def _balance(
    sums_of: _Sums, devices: DeviceRow, schedule: str, count: int, limits: _Limits
) -> tuple[float, tuple[float, ...]]:
    """The smallest slowest stage within limits, and its cuts: best[s][j] = min of max(best[s - 1][i], i to j).

    Seconds are those of a whole mini-batch; infinity if there are no such cuts.
    """
    chain = sums_of.chain
    stages = len(devices.speeds)
    link_s = limits.cut_bytes / devices.bandwidth_bytes_per_s if schedule == AS else 0.0
    places = np.flatnonzero([True, *(size <= limits.cut_bytes for size in chain.crossing_bytes[:-1]), True])
    running = [column[places] for column in sums_of.running]
    windows = _windows(running[0] + running[1], devices.speeds, limits.stage_s)
    best = np.array([0.0 if windows[0].start == 0 else inf])
    splits: list[NDArray[np.intp]] = []
    for number, (speed, before, after) in enumerate(zip(devices.speeds, windows, windows[1:], strict=False), start=1):
        check_time()
        spans = [column[None, after] - column[before, None] for column in running]
        share = kept(schedule, number, stages, count) / count
        seconds = _stages_s(spans, speed, link_s, share, devices.memory_bytes)
        possible = places[before, None] < places[None, after]
        cost = np.where(possible, np.maximum(best[:, None], seconds), inf)
        splits.append(cost.argmin(axis=0) + before.start)
        best = cost.min(axis=0)
    return float(best[-1]), tuple(float(places[cut]) for cut in _walked(splits, windows, len(places) - 1))


def _walked(splits: Sequence[NDArray[np.intp]], windows: Sequence[slice], last: int) -> list[int]:
    """The inner cuts of the best pipeline, by its choices of each stage's first cut, up to the ``last`` one."""
    cuts = [last]
    for back, window in zip(reversed(splits), reversed(windows), strict=False):
        cuts.append(int(back[cuts[-1] - window.start]))
    return cuts[-2:0:-1]


def _stages_s(
    spans: Sequence[NDArray[np.float64]], speed: float, link_s: float, share: float, memory_bytes: float
) -> NDArray[np.float64]:
    """What stages take on a device; infinite where memory is too small.

    Args:
        spans: seconds of F and B, bytes saved and of parameters, by first and last cut.
        share: of what is saved that is kept at a time.
    """
    forward_s, backward_s, saved_bytes, parameter_bytes = spans
    seconds = np.maximum(forward_s / speed, link_s) + np.maximum(backward_s / speed, link_s)
    return np.where(2 * parameter_bytes + share * saved_bytes <= memory_bytes, seconds, inf)


def _windows(work_s: NDArray[np.float64], speeds: Sequence[float], stage_s: float) -> list[slice]:
    """The cuts (an interval) that may lie before the first device, after it, and so on, if no stage takes longer."""
    last = len(work_s) - 1
    highest = [0]
    lowest = [last]
    for speed, last_speed in zip(speeds, reversed(speeds), strict=True):
        reach_s = work_s[highest[-1]] + speed * stage_s * (1 + _ROUNDING)
        highest.append(int(np.searchsorted(work_s, reach_s, side="right")) - 1)
        reach_s = work_s[lowest[-1]] - last_speed * stage_s * (1 + _ROUNDING)
        lowest.append(int(np.searchsorted(work_s, reach_s, side="left")))
    return [slice(low, max(low, high) + 1) for low, high in zip(reversed(lowest), highest, strict=True)]


class _Sums:
    """Running sums over the layers, for a whole mini-batch on a device of speed 1; of a layer those up to it."""

    def __init__(self, chain: ChainCosts) -> None:
        self.chain = chain
        columns = (chain.forward_s, chain.backward_s, chain.saved_bytes, chain.parameter_bytes)
        self.running = [np.array(sums(values)) for values in columns]


def _inside_layers(
    chain: ChainCosts, devices: DeviceRow, schedule: str, count: int
) -> list[tuple[float, BapipePipeline]]:
    """The pipeline whose stages take exactly their share of the work."""
    work = sums([f + b for f, b in zip(chain.forward_s, chain.backward_s, strict=True)])
    shares = sums(devices.speeds)
    cuts = []
    for share in shares[1:-1]:
        wanted = work[-1] * share / shares[-1]
        layer = max(k for k in range(chain.num_layers) if work[k] <= wanted)
        own = work[layer + 1] - work[layer]
        cuts.append(layer + ((wanted - work[layer]) / own if own else 0.0))
    pipeline = BapipePipeline(schedule, count, tuple(cuts))
    value = minibatch_s(chain, devices, pipeline)
    return [(value, pipeline)] if value < inf else []


def _data_parallel_s(chain: ChainCosts, devices: DeviceRow) -> float:
    work = sum(chain.forward_s) + sum(chain.backward_s)
    number = len(devices.speeds)
    reduction = 2 * (number - 1) / number * sum(chain.parameter_bytes) / devices.bandwidth_bytes_per_s
    return work / sum(devices.speeds) + reduction


def _stage_s(chain: ChainCosts, first: float, last: float, speed: float, count: int) -> tuple[float, float]:
    forward, backward = (_between(values, first, last) for values in (chain.forward_s, chain.backward_s))
    return forward / (speed * count), backward / (speed * count)


def _fits(chain: ChainCosts, devices: DeviceRow, first: float, last: float, room: int, count: int) -> bool:
    if devices.memory_bytes == inf:
        return True
    weights = 2 * _between(chain.parameter_bytes, first, last)
    return weights + room * _between(chain.saved_bytes, first, last) / count <= devices.memory_bytes


def _between(values: Sequence[float], first: float, last: float) -> float:
    """The sum from layer ``first`` to ``last``, of layers that are cut the part."""
    return sum(values[k] * (min(last, k + 1) - max(first, k)) for k in range(int(first), min(ceil(last), len(values))))


def _crossing(chain: ChainCosts, cut: float) -> float:
    """What crosses: after a whole layer its outputs; inside one what it reads, and the part of its outputs."""
    layer = int(cut)
    part = cut - int(cut)
    whole_bytes = chain.crossing_bytes[layer - 1] if layer else 0.0
    return whole_bytes + part * chain.crossing_bytes[layer] if part else whole_bytes


_SCHEDULES = {SNO: "1f1b", SO: "1f1b-so", AS: "1f1b-as", FBP: "fbp-as", DATA_PARALLEL: "1f1b"}
"""Ours for each of BaPipe's; whether sends block is a matter of the machine, and the simulator's."""


def solve(problem: Problem, progress: Progress | None = None) -> Plan:
    """BaPipe's stages and schedule at the best micro-batch size.

    Raises:
        InfeasibleError: they do not fit, or there are fewer layers than ranks.
    """
    return rival_plan(problem, pipelines, "bapipe", "balanced stages of one device, schedule by closed form")


def pipelines(problem: Problem, cost_model: CostModel, trial: Trial) -> Iterator[Candidate]:
    """Every micro-batch size."""
    ranks = problem.ranks
    bandwidth = bandwidth_bytes_per_s(problem, ranks)
    memory_bytes = float(min(problem.memory_limit_bytes(rank) for rank in ranks))
    replicas = not mixing_layers(problem.graph)
    devices = problem.cluster.devices
    schedules = ASYNCHRONOUS if all(devices[rank].streams for rank in ranks) else SYNCHRONOUS
    for size in micro_batch_sizes(problem, cost_model):
        slowest = slowest_kind(problem, cost_model, size)
        net = network(problem, cost_model, slowest, size)
        seconds = {kind: whole_network_s(cost_model, kind, size) for kind in {cost_model.kind(rank) for rank in ranks}}
        speeds = tuple(
            seconds[slowest] / seconds[cost_model.kind(rank)] if seconds[slowest] > 0 else 1.0 for rank in ranks
        )
        row = DeviceRow(speeds, bandwidth, memory_bytes)
        chain = chain_of(net.graph)
        count = len(micro_batches(problem, size))
        answer = best_pipeline(chain.scaled(count), row, (count,), schedules, data_parallel=replicas)
        trial.has_plan(
            size, answer, f"one stage of {chain.num_layers} layers on each of {len(ranks)} ranks, and memory"
        )
        cuts = answer.plan.get("cuts")
        name = answer.plan.get("schedule")
        if not isinstance(cuts, list) or not isinstance(name, str):
            continue
        stages: list[Placed] = [(tuple(range(len(problem.graph.layers))), ranks)]
        if name != DATA_PARALLEL:
            stages = list(_placed(net, chain.names, cuts, ranks))
        wanted = _SCHEDULES[name] if _SCHEDULES[name] in schedule_names() else "1f1b"
        yield from candidates(problem, cost_model, stages, size, trial, (wanted,))


def _placed(net: PricedNetwork, names: Sequence[str], cuts: Sequence[object], ranks: Sequence[int]) -> Iterator[Placed]:
    """A stage of the layers between two cuts on each rank."""
    bounds = [0, *(int(cut) for cut in cuts if isinstance(cut, float)), len(names)]
    for (first, last), rank in zip(pairwise(bounds), ranks, strict=True):
        yield net.layers(names[first:last]), (rank,)
