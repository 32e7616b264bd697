"""Dryden et al., "Improving Strong-Scaling of CNN Training by Exploiting Finer-Grained Parallelism", IPDPS 2019.

One stage over all devices; every layer has its own distribution over samples and space (its grid uses all ranks; what
cannot be cut so far is held by several), found by shortest paths through (layer, distribution), the most expensive path
of the network first, branches after it (section V-C).  Their performance model, on our measurements: a layer's compute
on the slowest rank, halos overlapped with it as far as it lasts, a redistribution wherever distributions differ, an
all-reduce of every weight's gradient.  As in their runs the batch is taken at once, or in the largest micro-batches
that fit.  Ignored: that all-reduces overlap with the backward of earlier layers; limits of memory while searching.

If samples alone may be cut (``Problem.allow``), or layers are over sites, this is sample parallelism on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from planner.costs.candidate import Candidate
from planner.costs.cost_model import CostModel
from planner.costs.shards.sharding_spec import ShardingSpec
from planner.costs.stages.layouts import LayoutPrices
from planner.costs.stages.placement import LayoutCosts
from planner.ir.errors import InfeasibleError
from planner.ir.layout import equal_shares
from planner.ir.plan import Plan
from planner.ir.problem import SAMPLE_DIMS, SPATIAL_DIMS, Problem
from planner.layers import over_sites
from planner.layers.sized import REPLICA
from planner.solvers.budget import OutOfTimeError, part_of_current
from planner.solvers.candidates.candidate import micro_batches, with_options
from planner.solvers.candidates.choose import heuristic_plan, infeasible, no_schedule
from planner.solvers.candidates.evaluate import Evaluation, Evaluator
from planner.solvers.candidates.feasibility import as_asked, gives_all_work, micro_batch_sizes, schedule_names
from planner.solvers.everyday import replicated_plan
from planner.solvers.layouts.factor_graph import Array, LabelledGraph, Labelling
from planner.solvers.layouts.stage import Question, labelled_graph, most_options, simplest
from planner.solvers.progress import Progress

NAME = "dryden"
METHOD = "per-layer distributions on all ranks by shortest paths, largest micro-batch that fits"


def solve(problem: Problem, progress: Progress | None = None) -> Plan:
    """One stage on all ranks, every layer distributed as the shortest paths say.

    Raises:
        InfeasibleError: no micro-batch fits, or samples alone may be cut and the model mixes them.
        MissingMeasurementError: the profile says nothing about any size that may be used.
    """
    evaluator = Evaluator(problem, CostModel(problem.profile))
    if len(problem.ranks) == 1 or SPATIAL_DIMS not in problem.allow or over_sites(problem.graph):
        return replicated_plan(evaluator, NAME, METHOD)
    if not schedule_names(problem):
        raise no_schedule(problem)
    closest: Evaluation | None = None
    unmet = ""
    for size in reversed(micro_batch_sizes(problem, evaluator.cost_model)):
        if size > min(
            evaluator.cost_model.tables.largest_measured(evaluator.cost_model.kind(rank)) for rank in problem.ranks
        ):
            continue
        if evaluator.budget.is_over:
            break
        try:
            chosen = distributions(problem, evaluator.cost_model, size)
        except OutOfTimeError:
            break
        candidate = _candidate(problem, evaluator.layouts, chosen, size)
        if not candidate.options:
            return replicated_plan(evaluator, NAME, METHOD)
        unmet = unmet or evaluator.unmet(candidate)
        sizes = set(candidate.micro_batches)
        if evaluator.unmet(candidate) or not gives_all_work(evaluator.layouts, problem.ranks, chosen, sizes):
            continue
        evaluation = evaluator.evaluate(candidate)
        if evaluation.fits:
            return heuristic_plan(evaluator, evaluation, NAME, METHOD)
        if closest is None or evaluator.excess(evaluation) < evaluator.excess(closest):
            closest = evaluation
    if closest is not None:
        raise infeasible(problem, closest, ["use more devices, or a solver that makes stages"])
    details = [f"{len(problem.ranks)} ranks, global batch {problem.global_batch}", *filter(None, [unmet])]
    raise InfeasibleError("no micro-batch can be distributed over all ranks", details, ["use fewer ranks"])


def distributions(problem: Problem, cost_model: CostModel, size: int) -> Mapping[int, ShardingSpec]:
    """The distribution of each layer, by index, for micro-batches of ``size``.

    Raises:
        OutOfTimeError: there is no time to price them on that many ranks.
    """
    allow = tuple(family for family in problem.allow if family in (SAMPLE_DIMS, SPATIAL_DIMS))
    prices = LayoutPrices(cost_model, problem.ranks, size, allow)
    budget = part_of_current(problem.time_limit_s)
    most = most_options(prices, budget.left_s)
    if not most:
        raise OutOfTimeError
    layers = tuple(range(len(prices.layers)))
    options = simplest([_on_all_ranks(prices.options(index)) for index in layers], most)
    question = Question(layers, problem.global_batch / size)
    picked = by_shortest_paths(labelled_graph(prices, question, options, budget))
    return {index: each[k] for index, each, k in zip(layers, options, picked, strict=True)}


def by_shortest_paths(graph: LabelledGraph) -> Labelling:
    """An assignment of ``graph``, budgets ignored; the least cost on chains alone.

    A path through the network is a chain of layers, and the cheapest options along it are a shortest path in the graph
    of (layer, option).  The most expensive path (each layer at its cheapest) is first; what it chose stays; then the
    most expensive path of the layers that are left, whose edges to layers already chosen count; and so on.
    """
    chosen: dict[int, int] = {}
    while len(chosen) < graph.num_nodes:
        path = _longest_path(graph, chosen)
        chosen.update(zip(path, _shortest(graph, path, chosen), strict=True))
    return tuple(chosen[node] for node in range(graph.num_nodes))


def _longest_path(graph: LabelledGraph, chosen: dict[int, int]) -> list[int]:
    """The most expensive path among nodes without an option, each at its cheapest; nodes are in topological order."""
    length = [float(cost.min()) for cost in graph.node_cost]
    before: dict[int, int] = {}
    total: dict[int, float] = {}
    edges: dict[int, list[int]] = {}
    for u, v in graph.edge_cost:
        edges.setdefault(v, []).append(u)
    for node in range(graph.num_nodes):
        if node in chosen:
            continue
        open_before = [u for u in edges.get(node, ()) if u not in chosen]
        longest = max(open_before, key=lambda u: (total[u], -u), default=None)
        total[node] = length[node]
        if longest is not None:
            before[node] = longest
            total[node] += total[longest]
    path = [max(total, key=lambda node: (total[node], node))]
    while path[-1] in before:
        path.append(before[path[-1]])
    return path[::-1]


def _shortest(graph: LabelledGraph, path: list[int], chosen: dict[int, int]) -> list[int]:
    costs = [_with_neighbours(graph, node, chosen) for node in path]
    origins: list[Array] = []
    least = costs[0]
    for u, v, cost in zip(path, path[1:], costs[1:], strict=False):
        table = least[:, None] + graph.edge_cost[u, v]
        origins.append(table.argmin(axis=0))
        least = table.min(axis=0) + cost
    choices = [int(np.argmin(least))]
    for step in reversed(origins):
        choices.append(int(step[choices[-1]]))
    return choices[::-1]


def _with_neighbours(graph: LabelledGraph, node: int, chosen: dict[int, int]) -> Array:
    """The node's costs, with its edges to nodes that have an option."""
    cost = graph.node_cost[node].copy()
    for (u, v), table in graph.edge_cost.items():
        if v == node and u in chosen:
            cost += table[chosen[u]]
        elif u == node and v in chosen:
            cost += table[:, chosen[v]]
    return cost


def _candidate(problem: Problem, layouts: LayoutCosts, chosen: Mapping[int, ShardingSpec], size: int) -> Candidate:
    batches = micro_batches(problem, size)
    shares = equal_shares(max(batches), len(problem.ranks))
    schedule = schedule_names(problem)[0]
    last = len(problem.graph.layers)
    plain = Candidate.chain((0, last), (problem.ranks,), (shares,), batches, schedule)
    return with_options(layouts, as_asked(problem, plain), chosen)


def _on_all_ranks(options: tuple[ShardingSpec, ...]) -> tuple[ShardingSpec, ...]:
    """The options in which fewest ranks hold the same."""
    fewest = min(_replicas(option) for option in options)
    return tuple(option for option in options if _replicas(option) == fewest)


def _replicas(option: ShardingSpec) -> int:
    replicas = 1
    for dim, parts in option.grid:
        replicas *= parts if dim.startswith(REPLICA) else 1
    return replicas
