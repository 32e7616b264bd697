"""What may be chosen for a problem, and a candidate held against everything that was asked.

The schedules, micro-batch sizes, places to cut and recomputation that may be used are named here, for those who make
candidates.  ``unmet`` is the one place that says whether a candidate may be an answer:

    global batch, micro-batch   the micro-batches add up to the batch, the full ones have a size that may be used
    batch statistics            one micro-batch, where layers that depend on their batch are to see all of it; none of
                                one sample, where a batch norm has one value a channel of each
    schedule                    one of those that may be used
    devices, stages             ranks that may be used, no more stages than asked for
    recompute                   nowhere, or everywhere, or of attention's cores, unless it is left open
    allow, halo depth           no layer is cut along another family of dims, no rank works further beyond its part
    ties                        stages share a parameter only under a schedule that updates when the step is over, whole
    fix, forbid                 every rule, of every layer
    layouts                     no rank is left without a part of a layer, or of a hand-over

Whoever looks at candidates asks here: the strategies that a search starts from, its leaves, baselines, published
planners.  Memory is the simulator's business (``Evaluation.fits``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from planner import schedules
from planner.costs.candidate import Candidate, Recomputes, boundaries_of
from planner.costs.cost_model import CostModel
from planner.costs.shards.sharding_spec import ShardingSpec
from planner.costs.stages.placement import LayoutCosts
from planner.ir.cluster import RankIds
from planner.ir.constraints import FAMILIES, REPLICAS, CutDegrees, broken
from planner.ir.errors import InfeasibleError, UsageError
from planner.ir.extras import extras
from planner.ir.graph import KEEPS_SAMPLES, Graph
from planner.ir.layout import Shares, parts_of, samples_of
from planner.ir.plan import UNCUT, BatchSizes, Decision, Rejected
from planner.ir.planner_extra import PlannerExtra
from planner.ir.problem import (
    ALWAYS,
    AUTO,
    LATENCY,
    NEVER,
    SAMPLE_DIMS,
    SELECTIVE,
    SPATIAL_DIMS,
    WHOLE,
    Problem,
)
from planner.layers import (
    batch_dependent_layers,
    batch_wide_layers,
    check_samples_apart,
    fixes_samples,
    joined_text,
    merging_layer,
    normalises_values_of_samples,
)
from planner.layers.recomputed import attention_cores
from planner.layers.stage_rules import rules_of_state
from planner.solvers.candidates.candidate import stages_of
from planner.solvers.candidates.constraints import Constraints

FEW_SAMPLES = 12
"""Up to this global batch every micro-batch size is looked at, also those that leave a smaller last one."""


def schedule_names(problem: Problem) -> tuple[str, ...]:
    """The schedules that may be used with one stage a position.

    Raises:
        UnknownNameError: one of those asked for does not exist.
        UsageError: the objective is latency, and none of them has forward passes alone.
    """
    return tuple(name for name in _schedules(problem) if not _several_a_position(name))


def virtual_schedule_names(problem: Problem) -> tuple[str, ...]:
    """The schedules that may be used and are meant for several stages a position; raises as above."""
    return tuple(name for name in _schedules(problem) if _several_a_position(name))


def chunked_schedule_names(problem: Problem) -> tuple[str, ...]:
    """The schedules of several stages a position that are looked at besides, as none is named."""
    is_open = len(problem.ranks) > 1 and problem.request.opens_chunks(problem.global_batch)
    return schedules.chunked_names() if is_open else ()


def may_stream(problem: Problem) -> bool:
    """Whether messages between two devices may take no time beside what makes and reads them."""
    devices = problem.cluster.devices
    named = any(schedules.traits(name).streams for name in _schedules(problem))
    return named and any(devices[rank].streams for rank in problem.ranks)


def _several_a_position(name: str) -> bool:
    traits = schedules.traits(name)
    return traits.trains and traits.stages_per_position != 1


def _schedules(problem: Problem) -> tuple[str, ...]:
    for name in problem.schedules:
        schedules.schedule(name)
    if problem.objective != LATENCY:
        devices = problem.cluster.devices
        all_stream = all(devices[rank].streams for rank in problem.ranks)
        streaming = tuple(name for name in schedules.names() if all_stream and schedules.traits(name).streams)
        named = tuple(dict.fromkeys(problem.schedules)) or (*schedules.default_names(), *streaming)
        return _with_slices(problem, named)
    named = problem.schedules or schedules.names()
    forward = tuple(dict.fromkeys(name for name in named if not schedules.traits(name).trains))
    if not forward:
        forward_alone = ", ".join(name for name in schedules.names() if not schedules.traits(name).trains)
        raise UsageError(
            "latency is that of forward passes, and no schedule that may be used has these alone",
            [f"asked: {', '.join(problem.schedules)}; forward alone: {forward_alone}"],
            ["leave --schedule out", *(f"--schedule {name}" for name in forward_alone.split(", ")[:1])],
        )
    return forward


def _with_slices(problem: Problem, named: tuple[str, ...]) -> tuple[str, ...]:
    """Those of ``named`` under which gradients can be in slices, if they are to be.

    Raises:
        UsageError: none of them.
    """
    if problem.shard != ALWAYS or problem.zero < 2:
        return named
    whole = tuple(name for name in named if schedules.traits(name).whole_backwards)
    if not whole:
        raise UsageError(
            f"ZeRO-{problem.zero} with {', '.join(named)}",
            ["gradients in slices are summed in each backward, whole, of one version of the weights"],
            ["--schedule 1f1b", "--zero 1"],
        )
    return whole


def micro_batch_sizes(problem: Problem, cost_model: CostModel) -> tuple[int, ...]:
    """Sizes that may be used, ascending.

    By default the divisors of the global batch and the sizes that were measured (all sizes up to ``FEW_SAMPLES``), as
    far as a stage on all ranks stays within what was measured.

    Raises:
        UsageError: the global batch or a size is not positive.
        InfeasibleError: the loss, or statistics of the whole batch, need all of it at once, or the graph holds for one
            number of samples, and micro-batches may not be so large; or statistics have no variance in any of them.
    """
    batch = problem.global_batch
    if batch < 1:
        raise UsageError(f"a global batch of {batch} samples", remedies=["give a positive number of samples"])
    if any(size < 1 for size in problem.micro_batch_sizes):
        raise UsageError(f"a micro-batch of {min(problem.micro_batch_sizes)} samples", remedies=["give sizes above 0"])
    covered = sum(cost_model.tables.largest_measured(cost_model.kind(rank)) for rank in problem.ranks)
    if batch_wide_layers(problem.graph) or sees_whole_batch(problem):
        return _whole_batch(problem, covered)
    if fixes_samples(problem.graph):
        return _as_captured(problem)
    if problem.micro_batch_sizes:
        sizes = {min(size, batch) for size in problem.micro_batch_sizes}
    else:
        measured = {m.samples for measurements in problem.profile.measurements.values() for m in measurements}
        sizes = {size for size in range(1, batch + 1) if batch % size == 0 or batch <= FEW_SAMPLES} | measured
        sizes = {size for size in sizes if size <= min(batch, covered)}
    return _with_variance(problem, tuple(sorted(sizes)))


def _with_variance(problem: Problem, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Those that leave no micro-batch of one sample where a batch norm gets one value a channel of each.

    Raises:
        InfeasibleError: none of them.
    """
    varying = tuple(size for size in sizes if not _lacks_variance(problem, size, problem.global_batch % size))
    if sizes and not varying:
        layer = normalises_values_of_samples(problem.graph)
        assert layer is not None, "it is what lacks a variance"
        fitting = [size for size in range(2, problem.global_batch + 1) if problem.global_batch % size != 1]
        raise InfeasibleError(
            f"layer {layer.name} normalises over the batch, and each choice has a micro-batch of 1 sample",
            [
                f"1 value a channel, of output {list(layer.outputs[0].shape)}; 2 have a variance",
                f"a global batch of {problem.global_batch}, in micro-batches of {', '.join(map(str, sizes))}",
            ],
            [f"--micro-batch {size}" for size in fitting[:1]] or ["--global-batch 2"],
        )
    return varying


def _lacks_variance(problem: Problem, *sizes: int) -> bool:
    if 1 not in sizes or problem.objective == LATENCY:
        return False
    return normalises_values_of_samples(problem.graph) is not None


def sees_whole_batch(problem: Problem) -> bool:
    """Whether some layer depends on its batch, and is to see the whole of it."""
    return problem.batch_statistics == WHOLE and bool(batch_dependent_layers(problem.graph))


def _whole_batch(problem: Problem, covered: int) -> tuple[int, ...]:
    """The global batch as the only size."""
    batch = problem.global_batch
    asked = problem.micro_batch_sizes
    if max(asked, default=batch) >= batch and (asked or batch <= covered):
        return (batch,)
    why = f"micro-batches of {max(asked)} samples were asked for" if asked else f"up to {covered} were measured"
    wide = batch_wide_layers(problem.graph)
    joined = batch_dependent_layers(problem.graph)
    if not wide:
        raise InfeasibleError(
            "statistics of the whole batch need all samples of a step at once",
            [f"layer {joined[0]} depends on its batch", f"a global batch of {batch} samples, {why}"],
            [
                "--batch-statistics micro",
                f"--micro-batch {batch}" if asked else f"profile an example of {batch} samples",
            ],
        )
    raise InfeasibleError(
        "the loss needs all samples of a step at once",
        [
            joined_text(problem.graph),
            f"a global batch of {batch} samples, {why}",
        ],
        [
            f"--micro-batch {batch}" if asked else f"profile an example of {batch} samples",
            f"--global-batch {max(asked) if asked else covered}",
        ],
    )


def _as_captured(problem: Problem) -> tuple[int, ...]:
    """The number of samples of the profile's example as the only size."""
    samples = problem.graph.samples
    batch = problem.global_batch
    asked = problem.micro_batch_sizes
    if batch % samples == 0 and (not asked or samples in asked):
        return (samples,)
    raise InfeasibleError(
        f"the model was captured for {samples} samples only",
        [
            "its code fixes the number of samples",
            f"a global batch of {batch} samples" + (f", micro-batches of {', '.join(map(str, asked))}" * bool(asked)),
        ],
        [
            f"--global-batch {batch // samples * samples or samples} --micro-batch {samples}",
            "sizes from x.shape, and no Python loop over samples",
        ],
    )


def is_covered(problem: Problem, cost_model: CostModel, kind: str, samples: float) -> bool:
    """Whether a device of ``kind`` may be given ``samples`` at once: what was measured, or what the user asks for."""
    return bool(problem.micro_batch_sizes) or samples <= cost_model.tables.largest_measured(kind)


def usable(
    problem: Problem,
    cost_model: CostModel,
    ranks: RankIds,
    shares: Shares,
    micro_batches: BatchSizes,
) -> bool:
    """Whether every rank has a sample of every micro-batch (a mean over none is none), and none more than measured."""
    divide = samples_of if sum(shares) == max(micro_batches) else parts_of
    return all(
        samples > 0 and is_covered(problem, cost_model, cost_model.kind(rank), samples)
        for size in set(micro_batches)
        for rank, samples in zip(ranks, divide(shares, size), strict=True)
    )


def stages_usable(problem: Problem, cost_model: CostModel, candidate: Candidate) -> bool:
    """The same of all stages of a candidate."""
    stages = zip(candidate.groups, candidate.shares, strict=True)
    return all(usable(problem, cost_model, *stage, candidate.micro_batches) for stage in stages)


def cut_positions(graph: Graph, parts_ties: bool = True) -> tuple[int, ...]:
    """Where the list of layers may be cut, both ends included.

    Args:
        parts_ties: also between layers that share a parameter.
    """
    allowed = np.ones(len(graph.layers) + 1, dtype=bool)
    for layers in () if parts_ties else graph.tied_layers().values():
        allowed[layers[0] + 1 : layers[-1] + 1] = False
    return tuple(int(position) for position in np.flatnonzero(allowed))


def may_part_ties(problem: Problem) -> bool:
    """Whether layers that share a parameter may be in several stages, under some schedule that may be used.

    Their gradients are summed over the stages when all of the step's are there: a schedule that updates within the step
    has no such moment.
    """
    names = (*schedule_names(problem), *virtual_schedule_names(problem))
    return any(schedules.traits(name).synchronous for name in names)


def uncut(together: Mapping[str, Sequence[int]], graph: Graph, why: str) -> tuple[Rejected, ...]:
    """``no cut between a and b``, for layers (by index) that are kept in one stage as they share something."""
    ends = dict.fromkeys((layers[0], layers[-1]) for layers in together.values())
    names = [layer.name for layer in graph.layers]
    return tuple(Rejected(f"{UNCUT}{names[first]} and {names[last]}", why) for first, last in ends)


def mixing_layers(graph: Graph) -> frozenset[str]:
    """Layers that mix samples, so that a stage with them cannot be cut by samples."""
    return frozenset(check_samples_apart(graph))


def mixing_text(graph: Graph) -> str:
    """How many layers mix samples, with the first, or which one keeps what it sees of them; empty if none does."""
    mixing = mixing_layers(graph)
    why = next((why for rule, why in rules_of_state(graph).items() if rule.what == REPLICAS), "")
    if why and mixing <= {layer.name for layer in graph.layers if KEEPS_SAMPLES in layer.attributes}:
        return why
    if not mixing:
        return ""
    if fixes_samples(graph):
        return f"the model takes {graph.samples} samples at a time, no other number"
    first = check_samples_apart(graph)[0]
    count = f"{len(mixing)} layers mix" if len(mixing) > 1 else "1 layer mixes"
    how = ", which merges them with another dim that comes first" if first == merging_layer(graph) else ""
    return f"{count} samples, such as {first}{how}"


def require_divisible(graph: Graph) -> None:
    """Raises :class:`InfeasibleError` if a layer of the graph mixes samples."""
    mixing = mixing_text(graph)
    if mixing:
        raise InfeasibleError("the model cannot be cut by samples", [mixing], ["plan with another solver"])


def recompute_choices(problem: Problem) -> tuple[Recomputes, ...]:
    """What a stage may compute again; cores are a choice of ``auto`` where they write scores, which saves most."""
    if problem.recompute == AUTO:
        writes_scores = any(len(core) > 1 for core in attention_cores(problem.graph))
        return (Recomputes.NOTHING, Recomputes.ALL, *((Recomputes.CORES,) if writes_scores else ()))
    only = {NEVER: Recomputes.NOTHING, ALWAYS: Recomputes.ALL, SELECTIVE: Recomputes.CORES}
    return (only[problem.recompute],)


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
        or _ties(constraints, candidate)
        or _rules(constraints, candidate)
        or next(filter(None, (extra.unmet(constraints, candidate) for extra in extras(PlannerExtra))), "")
    )


def _batches(problem: Problem, candidate: Candidate) -> str:
    total = sum(candidate.micro_batches)
    size = max(candidate.micro_batches)
    if total != problem.global_batch:
        return f"{total} samples a step, asked: {problem.global_batch}"
    sizes = {min(size, problem.global_batch) for size in problem.micro_batch_sizes}
    if sizes and size not in sizes:
        return f"micro-batches of {size}, asked: {', '.join(map(str, sorted(sizes)))}"
    if len(candidate.micro_batches) > 1 and sees_whole_batch(problem):
        return f"{len(candidate.micro_batches)} micro-batches, asked: statistics of the whole batch"
    if _lacks_variance(problem, *candidate.micro_batches):
        return "a micro-batch of 1 sample, of which a batch norm has one value a channel"
    return ""


def _shape(problem: Problem, candidate: Candidate) -> str:
    names = (*schedule_names(problem), *virtual_schedule_names(problem), *chunked_schedule_names(problem))
    if candidate.schedule not in names:
        return f"schedule {candidate.schedule}, asked: {', '.join(names)}"
    if 0 < problem.max_stages < candidate.num_stages:
        return f"{candidate.num_stages} stages, asked: at most {problem.max_stages}"
    strangers = {rank for group in candidate.groups for rank in group} - set(problem.ranks)
    return f"rank {min(strangers)}, asked: {len(problem.ranks)} devices" if strangers else ""


def _recompute(problem: Problem, candidate: Candidate) -> str:
    recomputes = [candidate.recomputes(stage) for stage in range(candidate.num_stages)]
    if problem.recompute == ALWAYS and not all(recomputes):
        return f"stage {recomputes.index(False)} keeps its activations, asked: recompute {ALWAYS}"
    if problem.recompute in (NEVER, SELECTIVE) and any(recomputes):
        return f"stage {recomputes.index(True)} computes its activations again, asked: recompute {problem.recompute}"
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


def _ties(constraints: Constraints, candidate: Candidate) -> str:
    """Layers that share a parameter are in several stages only where its copies can be kept equal, and are priced."""
    stage_of = candidate.stage_of
    for name, layers in constraints.tied.items():
        stages = sorted({stage_of[layer] for layer in layers})
        if len(stages) < 2:
            continue
        text = f"stages {', '.join(map(str, stages))} share {name}"
        if not schedules.traits(candidate.schedule).synchronous:
            return f"{text}, and {candidate.schedule} updates within a step, with some of the gradients alone"
        divided = [s for s, own in zip(stage_of, candidate.options, strict=False) if own is not None and s in stages]
        divided += [stage for stage in stages if candidate.blocks_of(stage)]
        if divided:
            return f"{text}, and stage {divided[0]} divides each layer in its own way: ranks may hold parts of it"
    return ""


def _rules(constraints: Constraints, candidate: Candidate) -> str:
    problem = constraints.problem
    if not constraints.rules:
        return ""
    for stage, group in enumerate(candidate.groups):
        layers = candidate.layers_of(stage)
        own = candidate.options_of(layers)
        ways = None if own else CutDegrees(sample=len(group))
        if not constraints.allows_stage(layers, group, candidate.recomputes(stage), ways, stage):
            return _broken_rule(problem, candidate)
        wrong = [
            index
            for index, option in own.items()
            if not constraints.allows_layer(index, CutDegrees.of(dict(option.cuts)))
        ]
        if wrong:
            return _broken_rule(problem, candidate)
    return ""


def _broken_rule(problem: Problem, candidate: Candidate) -> str:
    """The first rule that is broken, and by which layer."""
    layers = {layer.name: candidate.placement_of(index) for index, layer in enumerate(problem.graph.layers)}
    decision = Decision(candidate.schedule, candidate.micro_batches, stages_of(problem, candidate), layers, ())
    cluster = problem.cluster
    of_network = rules_of_state(problem.graph, divides_gradients=problem.zero > 1)
    wrong = next((why for rule, why in of_network.items() if broken((rule,), (), decision, cluster)), "")
    return wrong or next(iter(broken(problem.fix, problem.forbid, decision, cluster)), "a side constraint")


def gives_all_work(
    layouts: LayoutCosts, ranks: RankIds, options: Mapping[int, ShardingSpec], sizes: Collection[int]
) -> bool:
    """Whether no rank is left without a part of a layer, in micro-batches of any of ``sizes``."""
    for size in sizes:
        prices = layouts.prices(ranks, size)
        if any((prices.shards(index, (option,)).share <= 0).any() for index, option in options.items()):
            return False
    return True


def joins_all_ranks(graph: Graph, candidate: Candidate) -> bool:
    """Whether every rank has a part in each hand-over of its stage.

    Of ranks that hold the same, some might send nothing and so get no gradient back, which no program allows.
    """
    boundaries = boundaries_of(graph, candidate)
    for edge in boundaries.edges():
        for size in set(candidate.micro_batches):
            messages = boundaries.messages(edge, size)
            senders = {message.src for message in messages if message.gradient_parts or not edge.gradient}
            receivers = {message.dst for message in messages}
            if senders != set(candidate.groups[edge.src]) or receivers != set(candidate.groups[edge.dst]):
                return False
    return True
