"""A candidate held against everything that was asked: the one place that says whether it may be an answer.

    global batch, micro-batch   the micro-batches add up to the batch, the full ones have a size that may be used
    schedule                    one of those that may be used
    devices, stages             ranks that may be used, no more stages than asked for
    recompute                   nowhere, or everywhere, or of attention's cores, unless it is left open
    allow, halo depth           no layer is cut along another family of dims, no rank works further beyond its part
    fix, forbid                 every rule, of every layer
    layouts                     no rank is left without a part of a layer, or of a hand-over

Whoever looks at candidates asks here: the strategies that a search starts from, its leaves, baselines, published
planners.  Memory is the simulator's business (``Evaluation.fits``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from planner.costs.shards.option import Option
from planner.costs.stages.placement import LayoutBook
from planner.ir.constraints import FAMILIES, Ways, broken
from planner.ir.graph import Graph
from planner.ir.plan import Decision, Stage
from planner.ir.problem import ALWAYS, NEVER, SAMPLE_DIMS, SELECTIVE, SPATIAL_DIMS, Problem
from planner.solvers.candidates.candidate import (
    Candidate,
    Recomputes,
    boundaries_of,
    schedule_names,
    virtual_schedule_names,
)
from planner.solvers.candidates.constraints import Constraints


def as_asked(problem: Problem, candidate: Candidate) -> Candidate:
    """``candidate``, of a strategy that knows nothing of recomputation, with it where it is asked for everywhere."""
    wanted = {ALWAYS: Recomputes.ALL, SELECTIVE: Recomputes.CORES}.get(problem.recompute)
    if wanted is None or all(each == wanted for each in candidate.recompute or (Recomputes.NOTHING,)):
        return candidate
    return replace(candidate, recompute=(wanted,) * candidate.num_stages)


def unmet(constraints: Constraints, candidate: Candidate) -> str:
    """The first request that ``candidate`` does not meet, in words; empty if it meets all."""
    problem = constraints.problem
    return (
        _batches(problem, candidate)
        or _shape(problem, candidate)
        or _recompute(problem, candidate)
        or _cuts(problem, candidate)
        or _rules(constraints, candidate)
    )


def _batches(problem: Problem, candidate: Candidate) -> str:
    total, size = sum(candidate.micro_batches), max(candidate.micro_batches)
    if total != problem.global_batch:
        return f"{total} samples a step, asked: {problem.global_batch}"
    sizes = {min(size, problem.global_batch) for size in problem.micro_batch_sizes}
    if sizes and size not in sizes:
        return f"micro-batches of {size}, asked: {', '.join(map(str, sorted(sizes)))}"
    return ""


def _shape(problem: Problem, candidate: Candidate) -> str:
    names = (*schedule_names(problem), *virtual_schedule_names(problem))
    if candidate.schedule not in names:
        return f"schedule {candidate.schedule}, asked: {', '.join(names)}"
    if 0 < problem.max_stages < candidate.num_stages:
        return f"{candidate.num_stages} stages, asked: at most {problem.max_stages}"
    strangers = {rank for group in candidate.groups for rank in group} - set(problem.ranks)
    return f"rank {min(strangers)}, asked: {len(problem.ranks)} devices" if strangers else ""


def _recompute(problem: Problem, candidate: Candidate) -> str:
    again = [candidate.recomputes(stage) for stage in range(candidate.num_stages)]
    if problem.recompute == ALWAYS and not all(again):
        return f"stage {again.index(False)} keeps its activations, asked: recompute {ALWAYS}"
    if problem.recompute in (NEVER, SELECTIVE) and any(again):
        return f"stage {again.index(True)} computes its activations again, asked: recompute {problem.recompute}"
    cores = [each == Recomputes.CORES for each in candidate.recompute] or [False] * candidate.num_stages
    if problem.recompute == SELECTIVE and not all(cores):
        return f"stage {cores.index(False)} keeps what attention saves, asked: recompute {SELECTIVE}"
    if problem.recompute == NEVER and any(cores):
        return f"stage {cores.index(True)} computes attention's core again, asked: recompute {NEVER}"
    return ""


def _cuts(problem: Problem, candidate: Candidate) -> str:
    laid_out = {stage for stage, own in zip(candidate.stage_of, candidate.options, strict=False) if own is not None}
    shared = [stage for stage, group in enumerate(candidate.groups) if len(group) > 1 and stage not in laid_out]
    if shared and SAMPLE_DIMS not in problem.allow:
        return f"stage {shared[0]} is cut along samples, asked: {', '.join(problem.allow)}"
    if any(candidate.blocks) and SPATIAL_DIMS not in problem.allow:
        return f"layers are run in blocks, asked: {', '.join(problem.allow)}"
    forbidden = [dim for family in FAMILIES if family not in problem.allow for dim in FAMILIES[family]]
    for option in candidate.options:
        cut = [dim for dim, points in option.cuts if dim in forbidden and len(points) > 2] if option else []
        if cut:
            return f"a layer is cut along {cut[0]}, asked: {', '.join(problem.allow)}"
        if option and option.margin > problem.halo_depth:
            return f"{option.margin} rows beyond a part, asked: at most {problem.halo_depth}"
    return ""


def _rules(constraints: Constraints, candidate: Candidate) -> str:
    problem = constraints.problem
    if not constraints.rules:
        return ""
    for stage, group in enumerate(candidate.groups):
        layers = [index for index, number in enumerate(candidate.stage_of) if number == stage]
        own = {index: option for index in layers if (option := candidate.option_of(index)) is not None}
        ways = None if own else Ways(sample=len(group))
        if not constraints.allows_stage(layers, group, candidate.recomputes(stage), ways, stage):
            return _broken_rule(problem, candidate)
        wrong = [
            index for index, option in own.items() if not constraints.allows_layer(index, Ways.of(dict(option.cuts)))
        ]
        if wrong:
            return _broken_rule(problem, candidate)
    return ""


def _broken_rule(problem: Problem, candidate: Candidate) -> str:
    """The first rule that is broken, and by which layer."""
    devices = problem.profile.cluster.devices
    stages = tuple(
        Stage(group, tuple(devices[rank].name for rank in group), candidate.recomputes(stage))
        for stage, group in enumerate(candidate.groups)
    )
    layers = {layer.name: candidate.placement_of(index) for index, layer in enumerate(problem.profile.graph.layers)}
    decision = Decision(candidate.schedule, candidate.micro_batches, stages, layers, ())
    return next(iter(broken(problem.fix, problem.forbid, decision, problem.profile.cluster)), "a side constraint")


def gives_all_work(
    layouts: LayoutBook, ranks: tuple[int, ...], options: Mapping[int, Option], sizes: Collection[int]
) -> bool:
    """Whether no rank is left without a part of a layer, in micro-batches of any of ``sizes``."""
    for rows in sizes:
        prices = layouts.prices(ranks, rows)
        if any((prices.shards(index, (option,)).share <= 0).any() for index, option in options.items()):
            return False
    return True


def joins_all_ranks(graph: Graph, candidate: Candidate) -> bool:
    """Whether every rank has a part in each hand-over of its stage.

    Of ranks that hold the same, some might send nothing and so get no gradient back, which no program allows.
    """
    boundaries = boundaries_of(graph, candidate)
    for edge in boundaries.edges():
        for rows in set(candidate.micro_batches):
            messages = boundaries.messages(edge, rows)
            senders = {message.src for message in messages if message.gradient_parts or not edge.gradient}
            receivers = {message.dst for message in messages}
            if senders != set(candidate.groups[edge.src]) or receivers != set(candidate.groups[edge.dst]):
                return False
    return True
