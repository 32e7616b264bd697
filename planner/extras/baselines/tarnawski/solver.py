"""Tarnawski et al. (NeurIPS 2020): one device a stage, the smallest largest load, contiguous sets of layers.

``tarnawski.planner`` is its programme.  Each layer is a forward and a backward node of one colour, edges are mirrored,
and sending does not overlap with computing, as there.  A layer's gradient counts with the bytes of all it reads.  All
ranks are used as alike (the slowest kind's costs count), any two are joined alike (the slowest link), and none is a
CPU.  A layer occupies what it holds with one micro-batch in flight, with as many as there are ranks, or nothing: each
is tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from planner.costs.candidate import Candidate
from planner.costs.cost_model import CostModel
from planner.extras.baselines.common.answer import (
    Placed,
    RivalAnswer,
    Trial,
    bandwidth_bytes_per_s,
    candidates,
    rival_plan,
    slowest_kind,
)
from planner.extras.baselines.common.problem import NodeBytes, PricedNetwork, held, network, searchable
from planner.extras.baselines.tarnawski import planner as tarnawski
from planner.extras.baselines.tarnawski.format import TarnawskiInstance, TarnawskiNode
from planner.ir.plan import Plan
from planner.ir.problem import Problem
from planner.solvers.progress import Progress

_MS = 1e3


def solve(problem: Problem, progress: Progress | None = None) -> Plan:
    """The stages of the smallest largest load, at the best micro-batch size.

    Raises:
        InfeasibleError: they do not fit.
    """
    return rival_plan(problem, pipelines, "tarnawski", "smallest largest load, one device a stage, transfers added")


def pipelines(problem: Problem, cost_model: CostModel, trial: Trial) -> Iterator[Candidate]:
    """Every micro-batch size, with few and with many micro-batches in flight, and as if memory were enough."""
    for size, limit_s in trial.sizes(problem, cost_model):
        kind = slowest_kind(problem, cost_model, size)
        net = searchable(network(problem, cost_model, kind, size), len(problem.ranks))
        memory = held(cost_model, net, kind, size)
        offered: set[tuple[Placed, ...]] = set()
        for in_flight, memory_bytes in ((1, None), (len(problem.ranks), None), (1, inf)):
            made = instance(problem, net, memory, in_flight)
            answer = tarnawski.solve(made, memory_bytes=memory_bytes, time_limit_s=limit_s / 3)
            stages = _stages(problem, net, answer)
            if trial.has_plan(size, answer, "its count of memory") and stages not in offered:
                offered.add(stages)
                yield from candidates(problem, cost_model, stages, size, trial)


def instance(problem: Problem, net: PricedNetwork, memory: NodeBytes, in_flight: int) -> TarnawskiInstance:
    """The network in the planner's own form: node ``k`` forward, then node ``k`` backward."""
    nodes = net.graph.nodes
    count = len(net.graph.nodes)
    bandwidth = bandwidth_bytes_per_s(problem, problem.ranks)
    reads = [0.0] * count
    for src, dst in net.graph.edges:
        reads[dst] += nodes[src].activation_bytes
    sizes = [always + in_flight * saved for always, saved in zip(memory.always, memory.saved, strict=True)]
    forward = [
        TarnawskiNode(
            k, node.name, node.forward_s * _MS, 0.0, node.activation_bytes / bandwidth * _MS, sizes[k], True, False, k
        )
        for k, node in enumerate(nodes)
    ]
    backward = [
        TarnawskiNode(count + k, node.name, node.backward_s * _MS, 0.0, reads[k] / bandwidth * _MS, 0.0, True, True, k)
        for k, node in enumerate(nodes)
    ]
    edges = [*net.graph.edges, *((count + dst, count + src) for src, dst in net.graph.edges)]
    edges += [(k, count + k) for k in range(count)]
    devices = min(len(problem.ranks), problem.max_stages or len(problem.ranks))
    least = min(problem.memory_limit_bytes(rank) for rank in problem.ranks)
    return TarnawskiInstance(net.graph.source, devices, 0, float(least), (*forward, *backward), tuple(edges))


def _stages(problem: Problem, net: PricedNetwork, answer: RivalAnswer) -> tuple[Placed, ...]:
    """Each device's layers; ranks in the problem's order."""
    devices = answer.plan.get("devices", [])
    listed = [device for device in devices if isinstance(device, dict)] if isinstance(devices, list) else []
    stages: list[Placed] = []
    for rank, device in zip(problem.ranks, listed, strict=False):
        nodes = device["nodes"]
        names = [f"n{k}" for k in nodes if isinstance(k, int)] if isinstance(nodes, list) else []
        stages.append((net.layers([name for name in names if name in net.members]), (rank,)))
    return tuple(stages)
