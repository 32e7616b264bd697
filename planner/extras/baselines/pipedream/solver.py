"""PipeDream's planner (Narayanan et al., SOSP 2019): the shortest slowest stage of a replicated pipeline.

``pipedream.planner`` is its programme.  As there all ranks are used and alike (the slowest kind's costs count), any two
are joined alike (the slowest link), micro-batches take the place of its mini-batches, and replicas have equal shares.
Its schedule is 1F1B; ours is the synchronous one, where weights change once a step.  Every micro-batch size is tried,
each with and without PipeDream's own count of memory.

``pipelines`` is flat.  ``hierarchical_pipelines`` goes over levels (section 3.1): the machine of the upper level is a
host with a pipeline on all of its devices, and a stage of the upper level may be replicated over hosts.  Hosts must
have equally many devices; with one host it is the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from math import inf

from planner.costs.candidate import Candidate
from planner.costs.cost_model import CostModel
from planner.extras.baselines.common.answer import (
    Json,
    Placed,
    RivalAnswer,
    Trial,
    bandwidth_bytes_per_s,
    candidates,
    count_in,
    dealt,
    like_hosts,
    names_in,
    rival_plan,
    slowest_kind,
    stages_in,
)
from planner.extras.baselines.common.problem import PricedNetwork, network, searchable
from planner.extras.baselines.pipedream import planner as pipedream
from planner.extras.baselines.pipedream.planner import PipeDreamOptions
from planner.ir.plan import Plan
from planner.ir.problem import Problem
from planner.solvers.candidates.feasibility import micro_batch_sizes, mixing_layers
from planner.solvers.progress import Progress


def solve(problem: Problem, progress: Progress | None = None) -> Plan:
    """PipeDream's stages at the best micro-batch size.

    Raises:
        InfeasibleError: they do not fit.
    """
    return rival_plan(problem, pipelines, "pipedream", "shortest slowest stage, replicated, all links alike")


def solve_hierarchical(problem: Problem, progress: Progress | None = None) -> Plan:
    """PipeDream's stages over hosts and inside them, at the best micro-batch size.

    Raises:
        InfeasibleError: they do not fit, or hosts have different numbers of devices.
    """
    return rival_plan(
        problem, hierarchical_pipelines, "pipedream-hierarchical", "shortest slowest stage, replicated, level by level"
    )


def pipelines(problem: Problem, cost_model: CostModel, trial: Trial) -> Iterator[Candidate]:
    """Every micro-batch size."""
    levels = [len(problem.ranks)]
    bandwidths = [bandwidth_bytes_per_s(problem, problem.ranks)]
    for size, net, answer in answers(problem, cost_model, levels, bandwidths, trial):
        listed = stages_in(answer)
        groups = dealt(problem.ranks, map(count_in, listed))
        stages = [(net.layers(names_in(stage)), ranks) for stage, ranks in zip(listed, groups, strict=True)]
        yield from candidates(problem, cost_model, stages, size, trial)


def hierarchical_pipelines(problem: Problem, cost_model: CostModel, trial: Trial) -> Iterator[Candidate]:
    """The same over hosts and inside them."""
    hosts = like_hosts(problem)
    levels = 1 if len(hosts) == 1 else 2
    machines = [len(hosts[0]), len(hosts)][:levels]
    bandwidths = [bandwidth_bytes_per_s(problem, ranks) for ranks in (hosts[0], problem.ranks)][:levels]
    for size, net, answer in answers(problem, cost_model, machines, bandwidths, trial):
        upper: list[dict[str, Json]] = stages_in(answer)
        if levels == 1:
            upper = [{"machines": 1, "each": list[Json](upper)}]
        stages: list[Placed] = []
        for stage, own in zip(upper, dealt(hosts, map(count_in, upper)), strict=True):
            stages += _on_hosts(net, stage["each"], own)
        yield from candidates(problem, cost_model, stages, size, trial)


def answers(
    problem: Problem, cost_model: CostModel, machines: Sequence[int], bandwidths: Sequence[float], trial: Trial
) -> Iterator[tuple[int, PricedNetwork, RivalAnswer]]:
    """PipeDream's answer for every micro-batch size on levels of machines, without and with memory."""
    straight = bool(mixing_layers(problem.graph))
    least = min(problem.memory_limit_bytes(rank) for rank in problem.ranks)
    for size in micro_batch_sizes(problem, cost_model):
        fine = network(problem, cost_model, slowest_kind(problem, cost_model, size), size)
        net = searchable(fine, max(machines))
        everything = sum(node.activation_bytes + node.parameter_bytes for node in net.graph.nodes)
        binds = everything * max(machines) > least  # else no stage can stash too much
        for memory_bytes in (inf, float(least)) if binds else (inf,):
            options = PipeDreamOptions(straight=straight, memory_bytes=memory_bytes)
            answer = pipedream.solve(net.graph, machines, bandwidths, options)
            if trial.has_plan(size, answer, "its count of memory"):
                yield size, net, answer


def _on_hosts(net: PricedNetwork, stages: Json, hosts: tuple[tuple[int, ...], ...]) -> Iterator[Placed]:
    """The same stages on every one of ``hosts``, in the order of its devices."""
    listed = [stage for stage in stages if isinstance(stage, dict)] if isinstance(stages, list) else []
    by_host = [list(dealt(ranks, map(count_in, listed))) for ranks in hosts]
    for stage, groups in zip(listed, zip(*by_host, strict=True), strict=True):
        yield net.layers(names_in(stage)), tuple(chain.from_iterable(groups))
