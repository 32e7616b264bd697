"""Whether stages, layers, ranks and shares of a plan make sense together, and layers can be divided as it says.

What needs no profile comes first, then what does; then the layouts of single layers, by their access relations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

from planner.ir.box import volume, whole
from planner.ir.errors import CorruptFileError, operator_of, remedies
from planner.ir.extras import extras
from planner.ir.graph import SAMPLE, Graph, Layer, TensorSpec, producer
from planner.ir.plan import Decision, Placement
from planner.ir.planner_extra import PlannerExtra
from planner.ir.profile import Profile
from planner.ir.schedule import Op, Traits
from planner.layers import (
    batch_wide_layers,
    check_samples_apart,
    fixes_samples,
    over_sites,
    require_micro_batches,
    throughout_sites,
)
from planner.layers.boundary import ordered_axis
from planner.layers.boxes import boxes_of, volumes
from planner.layers.division import has_layouts
from planner.layers.recomputed import span_faults
from planner.layers.sized import AXES, REPLICA, SPACE, SizedLayer
from planner.layers.stage_rules import require_stages, stage_errors


def structure_faults(decision: Decision) -> Iterator[str]:
    """What can be seen without a profile."""
    if not decision.stages:
        yield "decision.stages: a plan has at least one stage, here are 0"
    yield from _rank_faults(decision)
    for number in range(len(decision.stages)):
        if not has_layouts(decision, number) and not is_in_parts(decision, number):
            yield from _share_faults(decision, number)
        yield from _zero_faults(decision, number)
        yield from span_faults(decision, number)
    yield from added_faults(decision)
    if decision.prepares_next_step and not any(Op.PREPARE.value in text for row in decision.program for text in row):
        yield "decision.prepares_next_step: the next step is prepared during this one, and no rank prepares anything"


def _zero_faults(decision: Decision, number: int) -> Iterator[str]:
    """Of what the ranks of a stage divide: backwards that can divide gradients."""
    traits = _traits(decision.schedule)
    if decision.stages[number].zero > 1 and traits is not None and not traits.whole_backwards:
        why = f"{decision.schedule} has backwards in halves, or versions of the weights"
        yield f"decision.stages[{number}].zero: stage {number} divides its gradients, and {why}"


def _traits(schedule: str) -> Traits | None:
    """None of a schedule that nobody knows."""
    from planner import schedules  # late: a rank seldom asks

    return schedules.traits(schedule) if schedule in schedules.names() else None


def recomputed_faults(decision: Decision, graph: Graph) -> Iterator[str]:
    """Spans of layers that cannot be computed again as one."""
    return (fault for number in range(len(decision.stages)) for fault in span_faults(decision, number, graph))


def added_faults(decision: Decision, graph: Graph | None = None) -> Iterator[str]:
    """What extras know to be wrong with their fields of a plan; without the graph, what can be seen without it."""
    return (fault for extra in extras(PlannerExtra) for fault in extra.faults(decision, graph))


def _rank_faults(decision: Decision) -> Iterator[str]:
    """Each rank is one device, and runs one stage, or those of one position of the schedule."""
    stage_of: dict[int, int] = {}
    device_of: dict[int, str] = {}
    rank_on: dict[str, int] = {}
    for number, stage in enumerate(decision.stages):
        path = f"decision.stages[{number}]"
        for rank in stage.ranks:
            if rank in stage_of and not _shares_a_position(decision, stage_of[rank], number):
                yield f"{path}.ranks: rank {rank} is in stage {stage_of[rank]} and in stage {number}"
            stage_of[rank] = number
        for rank, device in zip(stage.ranks, stage.devices, strict=True):
            if device_of.setdefault(rank, device) != device:
                yield f"{path}.devices: rank {rank} is on {device_of[rank]} and on {device}"
            if rank_on.setdefault(device, rank) != rank:
                yield f"{path}.devices: {device} is the device of rank {rank_on[device]} and of rank {rank}"
    for rank, row in enumerate(decision.program):
        if row and rank not in stage_of:
            yield f"decision.program[{rank}]: rank {rank} has {len(row)} actions and is in 0 stages"
    if decision.program and stage_of and decision.num_ranks - 1 > max(stage_of):
        yield f"decision.program: {decision.num_ranks} rows, the last rank in a stage is {max(stage_of)}"


def _shares_a_position(decision: Decision, first: int, second: int) -> bool:
    """Whether the schedule may run both stages on the same ranks."""
    traits = _traits(decision.schedule)
    several = traits is not None and traits.stages_per_position != 1
    return several and set(decision.stages[first].ranks) == set(decision.stages[second].ranks)


def form_faults(decision: Decision) -> Iterator[str]:
    """Of ``ways`` and ``margin`` what can be seen without the layers (:func:`layer_faults`)."""
    for name, placed in decision.layers.items():
        has = f"decision.layers.{name}.ways: layer {name} has ways {placed.ways}"
        if placed.ways > 1 and placed.margin:
            yield f"{has} and margin {placed.margin}; it can have one of them"
        parts = [len(points) - 1 for points in placed.cuts.values() if len(points) > 2]
        if placed.ways > 1 and all(number % placed.ways for number in parts):
            yield f"{has}, which divide none of its parts ({', '.join(map(str, parts)) or '1'})"


def is_in_parts(decision: Decision, number: int) -> bool:
    """Whether the shares of a stage are none of samples, but parts of its sites."""
    points = decision.layers[decision.layers_of(number)[0]].cuts.get(SAMPLE, (0,))
    return len(points) > 2 and points[-1] != max(decision.micro_batches)


def samples_of(decision: Decision, stage: int, size: int, throughout: bool) -> tuple[float, ...]:
    """How many samples of a micro-batch of ``size`` each rank of a stage takes; of a part of one, a fraction.

    Args:
        throughout: whether all layers of the stage lie along sites alone.
    """
    layout = decision.layout_of(stage)
    if throughout and is_in_parts(decision, stage):
        points = layout.cuts[SAMPLE]
        return tuple((b - a) * size / points[-1] for a, b in pairwise(points))
    return layout.samples(size)


def _share_faults(decision: Decision, number: int) -> Iterator[str]:
    ranks = decision.stages[number].ranks
    first = decision.layers_of(number)[0]
    layout = decision.layers[first].layout
    path = f"decision.layers.{first}.cuts"
    for size in sorted(set(decision.micro_batches)):
        shares = layout.samples(size)
        if sum(shares) != size and len(ranks) > 1:
            yield f"{path}: stage {number} shares {sum(shares)} of {size} samples of a micro-batch"
        if min(shares) < 1:
            idle = ranks[shares.index(min(shares))]
            yield f"{path}: stage {number} leaves rank {idle} none of a micro-batch of {size}"


def model_faults(decision: Decision, graph: Graph) -> Iterator[str]:
    """Layers that are missing, unknown, or read what a later stage makes."""
    names = graph.by_name()
    yield from (f"decision.layers: layer {name} is in no stage" for name in names if name not in decision.layers)
    unknown = (name for name in decision.layers if name not in names)
    yield from (f"decision.layers.{name}: layer {name} is not in the model" for name in unknown)
    stage_of = {name: placement.stage for name, placement in decision.layers.items()}
    for layer in graph.layers:
        here = stage_of.get(layer.name)
        for value in layer.inputs:
            there = stage_of.get(producer(value))
            if here is not None and there is not None and there > here:
                path = f"decision.layers.{layer.name}.stage"
                yield f"{path}: layer {layer.name} of stage {here} reads {value}, which stage {there} makes"
    yield from _tie_faults(decision, graph, stage_of)


def _tie_faults(decision: Decision, graph: Graph, stage_of: Mapping[str, int]) -> Iterator[str]:
    """Parameters of several stages are updated together, when all gradients of the step are there."""
    schedule_traits = _traits(decision.schedule)
    if schedule_traits is None or schedule_traits.synchronous:
        return
    for name, layers in graph.tied_layers().items():
        stages = sorted({stage_of[own] for index in layers if (own := graph.layers[index].name) in stage_of})
        if len(stages) > 1:
            text = f"{decision.schedule} updates within a step, and stages {', '.join(map(str, stages))} share {name}"
            yield f"decision.schedule: {text}"


def part_faults(decision: Decision, graph: Graph) -> Iterator[str]:
    """Stages that share parts of sites: where layers see samples, or a rank would have nothing, shares are samples."""
    throughout = throughout_sites(graph)
    for number in range(len(decision.stages)):
        if has_layouts(decision, number) or not is_in_parts(decision, number):
            continue
        if not throughout.issuperset(decision.layers_of(number)):
            yield from _share_faults(decision, number)
        elif min(b - a for a, b in pairwise(decision.layout_of(number).cuts[SAMPLE])) < 1:
            path = f"decision.layers.{decision.layers_of(number)[0]}.cuts"
            yield f"{path}: stage {number} leaves a rank none of the sites"


def device_faults(decision: Decision, profile: Profile) -> Iterator[str]:
    """Ranks that the cluster has not, or has elsewhere."""
    devices = profile.cluster.devices
    for number, stage in enumerate(decision.stages):
        path = f"decision.stages[{number}].devices"
        for rank, name in zip(stage.ranks, stage.devices, strict=False):
            if rank >= len(devices):
                yield f"{path}: stage {number} names rank {rank}, the cluster has {len(devices)} devices"
            elif devices[rank].name != name:
                yield f"{path}: stage {number} has rank {rank} on {name}, in the cluster it is {devices[rank].name}"


def require_possible(decision: Decision, graph: Graph) -> None:
    """Refuses a decision that ``graph`` cannot be run by.

    Raises:
        UnsupportedModelError: the decision has other micro-batches than the graph holds for, or several where the loss
            needs the whole batch; or its stages are not what layers ask for (:mod:`planner.layers.stage_rules`).
        CorruptFileError: layers cannot be divided, run in blocks, or computed again, as the decision says.
    """
    require_micro_batches(decision, graph)
    require_stages(decision, graph)
    if decision.token_slices:
        ordered_axis(graph, decision.token_slices, [stage.ranks for stage in decision.stages])
    faults = list(added_faults(decision))
    faults += layer_faults(decision, graph)
    if faults:
        raise CorruptFileError("the plan's layers cannot be divided so", faults[:20])
    if span_complaints := list(recomputed_faults(decision, graph)):
        raise CorruptFileError("the plan's layers cannot be computed again so", span_complaints[:20])


def layer_faults(decision: Decision, graph: Graph) -> Iterator[str]:
    """What is wrong with the layouts of single layers, in stages that give each layer its own."""
    return (fault for _, fault in named_layer_faults(decision, graph))


def named_layer_faults(decision: Decision, graph: Graph) -> Iterator[tuple[str, str]]:
    """As :func:`layer_faults`, each with the layer's name."""
    mixing = frozenset(check_samples_apart(graph))
    wide = batch_wide_layers(graph)
    if wide and len(decision.micro_batches) > 1:
        yield wide[0], f"layer {wide[0]} needs the whole batch, which is in {len(decision.micro_batches)} micro-batches"
    others = sorted(set(decision.micro_batches) - {graph.samples})
    if fixes_samples(graph) and others:
        first = graph.layers[0].name
        yield first, f"layer {first} runs with {graph.samples} samples only, and a micro-batch has {others[0]}"
    for name, error in stage_errors(decision, graph):
        yield name, "; ".join((error.title, *error.details))
    for stage in range(len(decision.stages)):
        own = [name for name in decision.layers_of(stage) if name in mixing]
        if own and _shares_samples(decision, stage):
            yield own[0], f"layer {own[0]} mixes samples, and the ranks of stage {stage} share them out"
    for extra in extras(PlannerExtra):
        yield from extra.layer_faults(decision, graph)
    laid_out = [stage for stage in range(len(decision.stages)) if has_layouts(decision, stage)]
    values = graph.values()
    sites = over_sites(graph)
    for layer in graph.layers:
        placed = decision.layers[layer.name]
        if placed.stage in laid_out and layer.name in sites:
            text = f"layer {layer.name} is over sites, which ranks share as they do samples and nothing else"
            yield layer.name, f"{text}: cut all layers of stage {placed.stage} alike, along samples"
        elif placed.stage in laid_out:
            of_layout = _faults_of(decision, graph, layer, values, layer.name in mixing)
            yield from ((layer.name, fault) for fault in of_layout)


def _faults_of(
    decision: Decision, graph: Graph, layer: Layer, values: Mapping[str, TensorSpec], mixes: bool
) -> Iterator[str]:
    """Of a layer with a layout of its own; ``values``: of the graph."""
    placed = decision.layers[layer.name]
    if SAMPLE in cut_dims(placed) and mixes:
        yield f"layer {layer.name} mixes samples and is cut along them"
    for samples in sorted(set(decision.micro_batches)):
        sized = SizedLayer.of(graph, layer, values, samples, mixes_samples=False)  # which is said above
        yield from _cut_faults(placed, sized)
        ranks = decision.stages[placed.stage].ranks
        empty = [
            rank
            for rank, size in zip(ranks, volumes(boxes_of(placed.layout, sized.work, samples)), strict=True)
            if not size and volume(whole(sized.work.shape))
        ]
        if empty:
            yield f"layer {layer.name} leaves rank {empty[0]} none of a micro-batch of {samples}"
    captured = SizedLayer.of(graph, layer, values, graph.samples, mixes_samples=False)
    yield from _ways_faults(placed, captured)
    yield from _margin_faults(placed, captured)


def _shares_samples(decision: Decision, stage: int) -> bool:
    """Whether the stage is on several ranks that have other samples, its layers cut alike."""
    placed = decision.layers[decision.layers_of(stage)[0]]
    return len(decision.stages[stage].ranks) > 1 and SAMPLE in placed.cuts and not has_layouts(decision, stage)


def cut_dims(placed: Placement) -> list[str]:
    """The dims that several parts are made along."""
    return [dim for dim, points in placed.cuts.items() if len(points) > 2 and not dim.startswith(REPLICA)]


def _cut_faults(placed: Placement, sized: SizedLayer) -> Iterator[str]:
    """Dims that the layer cannot be cut along."""
    layer = sized.layer
    dims = sized.work.dims
    for dim in cut_dims(placed):
        if dim not in sized.divisible:
            why = (
                "and each part would do all of its work"
                if dims.count(dim) == 1
                else f"and has {', '.join(dims) or 'no dims'}"
            )
            helps = "; ".join(remedies(layer, dim))
            yield f"layer {layer.name} is cut along {dim}, {why}: {operator_of(layer)} cannot be cut so ({helps})"


def _ways_faults(placed: Placement, sized: SizedLayer) -> Iterator[str]:
    """How many ranks share the input channels."""
    ways = placed.ways
    if ways == 1:
        return
    from planner.layers.contraction import contracted_dims, num_channels  # late: few layers share input channels

    layer = sized.layer
    subject = f"layer {layer.name} ({operator_of(layer)}) has ways {ways}"
    dims = contracted_dims(layer, sized.inputs, sized.parameters)
    if dims is None:
        yield f"{subject}, and is no linear layer, embedding or convolution of one group: it shares no input channels"
    else:
        channels = num_channels(dims, sized.inputs, sized.parameters)
        if dims.shared(layer, placed.layout, ways) is None:
            name = layer.outputs[0].dims[dims.filters]
            parts = len(placed.cuts.get(name, (0, 1))) - 1
            yield f"{subject}, which do not divide its {parts} parts along {name}"
        elif ways > channels:
            yield f"{subject} to share {channels} input channels"
        if placed.margin:
            yield f"{subject} and margin {placed.margin}; it can have one of them"


def _margin_faults(placed: Placement, sized: SizedLayer) -> Iterator[str]:
    """Rows beyond the part, which are the neighbour's."""
    margin = placed.margin
    subject = f"layer {sized.layer.name} has margin {margin}"
    if not margin:
        return
    work = sized.work
    cut = cut_dims(placed)
    in_space = [dim for dim in cut if dim in SPACE and dim in work.dims]
    channels = [dim for dim in cut if dim in AXES["channel"][1]]
    if channels:
        yield f"{subject} and is cut along {channels[0]}: margins are for layers cut along space alone"
    elif not in_space:
        yield f"{subject} and is not cut along space"
    elif work != sized.layer.outputs[0]:
        yield f"{subject}, and what its parts make is no part of its output"
    else:
        boxes = boxes_of(placed.layout, work, sized.samples)[:, [work.dims.index(dim) for dim in in_space]]
        least = int((boxes[..., 1] - boxes[..., 0]).min())
        if margin > least:
            yield f"{subject}, and its smallest part has {least} rows"
