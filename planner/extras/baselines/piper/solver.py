"""Piper (Tarnawski, Narayanan, Phanishayee, NeurIPS 2021): stages, data degrees and recomputation, within memory.

``piper.planner`` is its programme, with tensor degree 1 alone.  As there all ranks are used as alike (the slowest
kind's costs count), any two are joined alike (the slowest link), and data degrees divide the number of micro-batches.
Its replicas take whole micro-batches in turn; ours share the samples of each.  Recomputation, if the problem allows it,
is chosen by layer there and by stage here: a stage of which some layers compute their activations again does so as a
whole.

``solve_equal`` is what the paper compares Piper with: the same, of equi-partitions alone.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf

from planner.costs.candidate import Candidate, Recomputes
from planner.costs.cost_model import CostModel
from planner.extras.baselines.common.answer import (
    Placed,
    RivalAnswer,
    Trial,
    bandwidth_bytes_per_s,
    candidates,
    dealt,
    rival_plan,
    slowest_kind,
    stages_in,
)
from planner.extras.baselines.common.problem import NodeBytes, PricedNetwork, held, network, searchable
from planner.extras.baselines.piper import planner as piper
from planner.extras.baselines.piper.format import PiperInstance, PiperNode, PiperOption
from planner.ir.plan import Plan
from planner.ir.problem import ALWAYS, AUTO, Problem
from planner.solvers.candidates.candidate import micro_batches
from planner.solvers.candidates.feasibility import mixing_layers
from planner.solvers.progress import Progress

_AGAIN = "activation recomp"


def solve(problem: Problem, progress: Progress | None = None) -> Plan:
    """Piper's stages at the best micro-batch size.

    Raises:
        InfeasibleError: they do not fit.
    """
    return rival_plan(problem, pipelines, "piper", "least time per sample of stages, data degrees and recomputation")


def solve_equal(problem: Problem, progress: Progress | None = None) -> Plan:
    """The best of the equi-partitions that Piper is compared with, at the best micro-batch size.

    Raises:
        InfeasibleError: none fits.
    """
    return rival_plan(
        problem,
        functools.partial(pipelines, variant="equal"),
        "piper-equal",
        "equally many layers a stage, one data degree, recomputation everywhere or nowhere",
    )


def pipelines(problem: Problem, cost_model: CostModel, trial: Trial, variant: str = "piper") -> Iterator[Candidate]:
    """Every micro-batch size, with memory counted as Piper does, and as if there were enough.

    A rank holds more than Piper counts (what is received, the batch).  So where recomputation is a choice, stages of
    which all compute their activations again are offered as well: what fits so should be found.
    """
    together = bool(mixing_layers(problem.graph))
    least = float(min(problem.memory_limit_bytes(rank) for rank in problem.ranks))
    for size, limit_s in trial.sizes(problem, cost_model):
        kind = slowest_kind(problem, cost_model, size)
        net = searchable(network(problem, cost_model, kind, size), len(problem.ranks))
        memory = held(cost_model, net, kind, size)
        rules = [(problem, least), (problem, inf)]
        if problem.recompute == AUTO:
            rules.append((replace(problem, recompute=ALWAYS), least))
        most = 1 if together else min(micro_batches(problem, size))
        offered: list[PiperStages] = []
        for asked, memory_bytes in rules:
            made = replace(instance(asked, net, memory, size), memory_bytes=memory_bytes)
            answer = piper.solve(made, variant=variant, most_replicas=most, time_limit_s=limit_s / len(rules))
            chosen = _chosen(asked, net, answer)
            if trial.has_plan(size, answer, "its count of memory") and chosen not in offered:
                offered.append(chosen)
                for candidate in candidates(problem, cost_model, chosen.stages, size, trial):
                    yield replace(candidate, recompute=chosen.recompute) if any(chosen.recompute) else candidate


@dataclass(frozen=True, slots=True)
class PiperStages:
    """Stages, and whether each computes its activations again."""

    stages: tuple[Placed, ...]
    recompute: tuple[Recomputes, ...]


def _chosen(problem: Problem, net: PricedNetwork, answer: RivalAnswer) -> PiperStages:
    stages = stages_in(answer)
    degrees = [degree for stage in stages if isinstance(degree := stage["data_degree"], int)]
    nodes = [[f"n{node}" for node in members] for stage in stages if isinstance(members := stage["nodes"], list)]
    placed = tuple(zip(map(net.layers, nodes), dealt(problem.ranks, degrees), strict=True))
    return PiperStages(placed, tuple(Recomputes(problem.recompute == ALWAYS or bool(s["options"])) for s in stages))


def instance(problem: Problem, net: PricedNetwork, memory: NodeBytes, size: int) -> PiperInstance:
    """The network in the planner's own form, with the options that the problem allows."""
    graph = net.graph
    nodes = []
    for k, node in enumerate(graph.nodes):
        reads = {src: 0.0 for src, dst in graph.edges if dst == k}
        readers = {dst: 0.0 for src, dst in graph.edges if src == k}
        once = node.forward_s + node.backward_s
        always = memory.always[k]
        saved = memory.saved[k]
        inputs = memory.inputs[k]
        plain = PiperOption("vanilla", once, node.parameter_bytes, saved, always, reads, readers)
        recomputed = replace(
            plain,
            name=_AGAIN,
            time_per_sample=once + node.forward_s,
            bytes_per_in_flight=inputs,
            fixed_bytes=always + saved - inputs,
        )
        options = {AUTO: (plain, recomputed), ALWAYS: (recomputed,)}.get(problem.recompute, (plain,))
        nodes.append(PiperNode(k, node.name, {1: options}))
    edges = tuple((src, dst, graph.nodes[src].activation_bytes) for src, dst in graph.edges)
    bandwidth = bandwidth_bytes_per_s(problem, problem.ranks)
    batches = len(micro_batches(problem, size))
    return PiperInstance(graph.source, len(problem.ranks), inf, bandwidth, batches, tuple(nodes), edges)
