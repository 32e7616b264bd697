"""Whether layers can be divided as a plan says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from planner.ir.box import Box, Interval, intersect, volume, whole
from planner.ir.graph import SAMPLE, Graph, Layer, TensorSpec
from planner.ir.plan import Decision
from planner.layers import check_samples_apart, kind

REPLICA = "replica"
"""Begins the name of a dim that no tensor has: ranks along it hold the same."""


def has_layouts(decision: Decision, stage: int) -> bool:
    """Whether the layers of ``stage`` are not all cut alike along samples."""
    cuts = [tuple(decision.layers[name].cuts.items()) for name in decision.layers_of(stage)]
    return len(set(cuts)) > 1 or any(dim != SAMPLE for each in cuts for dim, _ in each)


def layer_faults(decision: Decision, graph: Graph) -> Iterator[str]:
    """What is wrong with the layouts of single layers, in stages that give each layer its own."""
    mixing = check_samples_apart(graph)
    laid_out = [stage for stage in range(len(decision.stages)) if has_layouts(decision, stage)]
    values = graph.values()
    for layer in graph.layers:
        placed = decision.layers[layer.name]
        if placed.stage not in laid_out:
            continue
        cut = [dim for dim, points in placed.cuts.items() if len(points) > 2 and not dim.startswith(REPLICA)]
        if SAMPLE in cut and layer.name in mixing:
            yield f"layer {layer.name} mixes samples and is cut along them"
        for samples in sorted(set(decision.micro_batches)):
            sized = replace(layer, outputs=tuple(spec.at(samples, graph.samples) for spec in layer.outputs))
            inputs = tuple(values[name].at(samples, graph.samples) for name in layer.inputs)
            work = kind(layer.kind).work(sized, inputs)
            for dim in cut:
                if work.dims.count(dim) != 1:
                    yield f"layer {layer.name} is cut along {dim}, and has {', '.join(work.dims) or 'no dims'}"
                elif not _narrows(graph, sized, inputs, work, work.dims.index(dim), samples):
                    yield f"layer {layer.name} is cut along {dim}, and each part would do all of its work"
            ranks = decision.stages[placed.stage].ranks
            empty = [
                rank
                for rank, box in zip(ranks, placed.layout.boxes(work, samples), strict=True)
                if not volume(box) and volume(whole(work.shape))
            ]
            if empty:
                yield f"layer {layer.name} leaves rank {empty[0]} none of a micro-batch of {samples}"


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
