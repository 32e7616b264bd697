"""Whether layers can be divided as a plan says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from planner.check.parts import SPACE
from planner.ir.box import Box, Interval, intersect, volume, whole
from planner.ir.errors import CorruptFileError
from planner.ir.graph import SAMPLE, Graph, Layer, TensorSpec
from planner.ir.plan import Decision, Placement
from planner.ir.remedies import operator_of, remedies
from planner.layers import batch_wide_layers, check_samples_apart, kind, over_sites
from planner.layers.contraction import contracted_dims

REPLICA = "replica"
"""Begins the name of a dim that no tensor has: ranks along it hold the same."""

_CHANNELS = ("channel", "head", "feature")


def has_layouts(decision: Decision, stage: int) -> bool:
    """Whether the layers of ``stage`` are not all cut alike along samples."""
    placed = [decision.layers[name] for name in decision.layers_of(stage)]
    cuts = [tuple(each.cuts.items()) for each in placed]
    return (
        len(set(cuts)) > 1
        or any(dim != SAMPLE for each in cuts for dim, _ in each)
        or any(each.ways != 1 or each.margin for each in placed)
    )


def require_possible(decision: Decision, graph: Graph) -> None:
    """Raises :class:`CorruptFileError` if layers of ``graph`` cannot be divided as ``decision`` says."""
    faults = list(layer_faults(decision, graph))
    if faults:
        raise CorruptFileError("the plan's layers cannot be divided so", faults[:20])


def layer_faults(decision: Decision, graph: Graph) -> Iterator[str]:
    """What is wrong with the layouts of single layers, in stages that give each layer its own."""
    return (fault for _, fault in named_layer_faults(decision, graph))


def named_layer_faults(decision: Decision, graph: Graph) -> Iterator[tuple[str, str]]:
    """As :func:`layer_faults`, each with the layer's name."""
    mixing, wide = frozenset(check_samples_apart(graph)), batch_wide_layers(graph)
    if wide and len(decision.micro_batches) > 1:
        yield wide[0], f"layer {wide[0]} needs the whole batch, which is in {len(decision.micro_batches)} micro-batches"
    for stage in range(len(decision.stages)):
        own = [name for name in decision.layers_of(stage) if name in mixing]
        if own and _shares_samples(decision, stage):
            yield own[0], f"layer {own[0]} mixes samples, and the ranks of stage {stage} share them out"
    laid_out = [stage for stage in range(len(decision.stages)) if has_layouts(decision, stage)]
    values, sites = graph.values(), over_sites(graph)
    for layer in graph.layers:
        placed = decision.layers[layer.name]
        if placed.stage in laid_out and layer.name in sites:
            text = f"layer {layer.name} is over sites, which ranks share as they do samples and nothing else"
            yield layer.name, f"{text}: cut all layers of stage {placed.stage} alike, along samples"
        elif placed.stage in laid_out:
            found = _faults_of(
                decision, graph, layer, tuple(values[name] for name in layer.inputs), layer.name in mixing
            )
            yield from ((layer.name, fault) for fault in found)


def _faults_of(
    decision: Decision, graph: Graph, layer: Layer, captured: tuple[TensorSpec, ...], mixes: bool
) -> Iterator[str]:
    """Of a layer with a layout of its own; ``captured``: its inputs."""
    placed = decision.layers[layer.name]
    if SAMPLE in _cut_dims(placed) and mixes:
        yield f"layer {layer.name} mixes samples and is cut along them"
    for samples in sorted(set(decision.micro_batches)):
        sized = replace(layer, outputs=tuple(spec.at(samples, graph.samples) for spec in layer.outputs))
        inputs = tuple(spec.at(samples, graph.samples) for spec in captured)
        work = kind(layer.kind).work(sized, inputs)
        yield from _cut_faults(graph, sized, inputs, placed, work, samples)
        ranks = decision.stages[placed.stage].ranks
        empty = [
            rank
            for rank, box in zip(ranks, placed.layout.boxes(work, samples), strict=True)
            if not volume(box) and volume(whole(work.shape))
        ]
        if empty:
            yield f"layer {layer.name} leaves rank {empty[0]} none of a micro-batch of {samples}"
    yield from _ways_faults(graph, layer, placed)
    yield from _margin_faults(graph, layer, placed)


def _shares_samples(decision: Decision, stage: int) -> bool:
    """Whether the stage is on several ranks that have other samples, its layers cut alike."""
    placed = decision.layers[decision.layers_of(stage)[0]]
    return len(decision.stages[stage].ranks) > 1 and SAMPLE in placed.cuts and not has_layouts(decision, stage)


def _cut_dims(placed: Placement) -> list[str]:
    return [dim for dim, points in placed.cuts.items() if len(points) > 2 and not dim.startswith(REPLICA)]


def _cut_faults(
    graph: Graph, layer: Layer, inputs: tuple[TensorSpec, ...], placed: Placement, work: TensorSpec, samples: int
) -> Iterator[str]:
    """Dims that the layer cannot be cut along."""
    for dim in _cut_dims(placed):
        why = ""
        if work.dims.count(dim) != 1:
            why = f"and has {', '.join(work.dims) or 'no dims'}"
        elif not _narrows(graph, layer, inputs, work, work.dims.index(dim), samples):
            why = "and each part would do all of its work"
        if why:
            helps = "; ".join(remedies(layer, dim))
            yield f"layer {layer.name} is cut along {dim}, {why}: {operator_of(layer)} cannot be cut so ({helps})"


def _ways_faults(graph: Graph, layer: Layer, placed: Placement) -> Iterator[str]:
    """How many ranks share the input channels."""
    ways = placed.ways
    if ways == 1:
        return
    values, words = graph.values(), f"layer {layer.name} ({operator_of(layer)}) has ways {ways}"
    inputs = tuple(values[name] for name in layer.inputs)
    dims = contracted_dims(layer, inputs, tuple(graph.parameters[name] for name in layer.parameters))
    if ways < 1:
        yield f"{words}; it is 1 or more"
    elif dims is None:
        yield f"{words}, and is no linear layer or convolution of one group: it shares no input channels"
    else:
        name, channels = layer.outputs[0].dims[dims.filters], inputs[0].shape[dims.channels]
        parts = len(placed.cuts.get(name, (0, 1))) - 1
        if parts % ways:
            yield f"{words}, which do not divide its {parts} parts along {name}"
        elif ways > channels:
            yield f"{words} to share {channels} input channels"
        if placed.margin:
            yield f"{words} and margin {placed.margin}; it can have one of them"


def _margin_faults(graph: Graph, layer: Layer, placed: Placement) -> Iterator[str]:
    """Rows beyond the part, which are the neighbour's."""
    margin, words = placed.margin, f"layer {layer.name} has margin {placed.margin}"
    if margin < 0:
        yield f"{words}; it is 0 or more"
    if margin <= 0:
        return
    values = graph.values()
    inputs = tuple(values[name] for name in layer.inputs)
    work, cut = kind(layer.kind).work(layer, inputs), _cut_dims(placed)
    in_space = [dim for dim in cut if dim in SPACE and dim in work.dims]
    channels = [dim for dim in cut if dim in _CHANNELS]
    if channels:
        yield f"{words} and is cut along {channels[0]}: margins are for layers cut along space alone"
    elif not in_space:
        yield f"{words} and is not cut along space"
    elif work != layer.outputs[0]:
        yield f"{words}, and what its parts make is no part of its output"
    else:
        boxes = placed.layout.boxes(work, graph.samples)
        least = min(len(box[work.dims.index(dim)]) for box in boxes for dim in in_space)
        if margin > least:
            yield f"{words}, and its smallest part has {least} rows"


def _narrows(
    graph: Graph, layer: Layer, inputs: tuple[TensorSpec, ...], work: TensorSpec, at: int, samples: int
) -> bool:
    """Whether half of the work along a dim reads less of a parameter, or of each of the largest inputs."""
    extent = work.shape[at]
    unit = extent // samples if work.dims[at] == SAMPLE and samples else 1
    middle = extent // unit // 2 * unit if unit else 0
    if not 0 < middle < extent:
        return False
    everything = whole(work.shape)
    halves = [
        (*everything[:at], part, *everything[at + 1 :]) for part in (Interval(0, middle), Interval(middle, extent))
    ]
    parameters = tuple(graph.parameters[name] for name in layer.parameters)
    relation = kind(layer.kind)
    weights = [
        [volume(box) for box in relation.weight_boxes(layer, parameters, part)] for part in (everything, *halves)
    ]
    if any(first + second < 2 * full for full, first, second in zip(*weights, strict=True)):
        return True
    reads = [_elements(relation.input_boxes(layer, inputs, part), inputs) for part in (everything, *halves)]
    largest = max(reads[0], default=0)
    return bool(reads[0]) and all(
        first + second < 2 * full for full, first, second in zip(*reads, strict=True) if full == largest
    )


def _elements(boxes: tuple[Box, ...], inputs: tuple[TensorSpec, ...]) -> list[int]:
    inside = [intersect(box, whole(spec.shape)) for box, spec in zip(boxes, inputs, strict=True)]
    return [volume(box) if box is not None else 0 for box in inside]
