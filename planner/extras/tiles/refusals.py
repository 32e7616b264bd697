"""Which layers may be run in tiles, and in blocks at all (:class:`planner.ir.plan.Block`); what is refused, and why.

A tile knows what it reads.  A layer that needs more than an overlap of tiles is refused by name:

    statistics of the micro-batch   a batch norm that keeps no running statistics
    all of space                    softmax, attention, group and layer norms over a dim that is cut into tiles;
                                    reshapes and others of which nobody says that places stay apart
    the result of all tiles         what reads a sum over space (a global pool, a loss) inside the same block
    the weight of all places        cross-entropy, whose mean counts the places that are not ignored

Sums over space themselves may end a block: sums over tiles are exact.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from math import prod

from planner.check.structure import cut_dims
from planner.ir.box import Box, Interval, whole
from planner.ir.errors import operator_of
from planner.ir.graph import SAMPLE, Graph, Layer, TensorSpec, producer
from planner.ir.plan import Decision
from planner.layers import has_halo, kind
from planner.layers._samples import takes_statistics
from planner.layers.elementwise import ELEMENTS, PLACES
from planner.layers.sized import SPACE

_LEAVE_OUT = "end the block before it and begin another one behind, so that it runs on what all tiles made"


def form_faults(decision: Decision, graph: Graph | None = None) -> Iterator[str]:
    """Of blocks what can be seen without the layers (:func:`layer_faults`)."""
    return (fault for number in range(len(decision.stages)) for fault in _form_faults(decision, number))


def _form_faults(decision: Decision, number: int) -> Iterator[str]:
    names = list(decision.layers_of(number))
    blocks = decision.stages[number].blocks
    path = f"decision.stages[{number}].blocks"
    if not blocks:
        return
    from planner import schedules  # late: a rank seldom asks

    if decision.schedule in schedules.names() and schedules.traits(decision.schedule).trains:
        yield f"{path}: stage {number} has blocks, which are for forward passes alone, and the plan trains"
    last = 0
    for block in blocks:
        first = names.index(block.layers[0]) if block.layers and block.layers[0] in names else -1
        if first < last or tuple(names[first : first + len(block.layers)]) != block.layers:
            yield f"{path}: a block of {len(block.layers)} layers is no stretch of the stage's layers from {last} on"
            return
        last = first + len(block.layers)
        for dim, parts in block.tiles.items():
            if dim not in SPACE or parts < 1:
                yield f"{path}: {parts} tiles along {dim}; tiles are 1 or more, along {', '.join(SPACE)}"
        for name in block.layers:
            placed = decision.layers[name]
            others = [dim for dim in cut_dims(placed) if dim not in (SAMPLE, *SPACE)]
            if others or placed.ways != 1 or placed.margin:
                what = f"cut along {others[0]}" if others else "given ways or a margin"
                yield f"{path}: layer {name} of a block is {what}; it can be cut along samples and space alone"


def layer_faults(decision: Decision, graph: Graph) -> Iterator[tuple[str, str]]:
    """(layer, what is wrong and what helps) of all blocks; nothing where they are exact."""
    blocks = (block for stage in decision.stages for block in stage.blocks)
    return (fault for block in blocks for fault in block_faults(graph, block.layers, block.tiles))


def block_faults(graph: Graph, names: Collection[str], tiles: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """(layer, what is wrong and what helps) of a block of ``names`` in ``tiles``; nothing where it is exact."""
    specs = graph.values()
    inside = frozenset(names)
    cut = [dim for dim, parts in tiles.items() if parts > 1]
    read = {value for layer in graph.layers if layer.name in inside for value in layer.inputs}
    summing = {layer.name for layer in graph.layers if kind(layer.kind).REDUCTION == "sum"}
    for layer in graph.layers:
        if layer.name in inside:
            why = _fault(layer, specs, cut, prod(tiles.values()))
            if not why and layer.name in summing and any(producer(value) == layer.name for value in read):
                why = f"is read in its own block, and is a sum that is known when all tiles are done; {_LEAVE_OUT}"
            if why:
                yield layer.name, f"layer {layer.name} ({operator_of(layer)}) {why}"


def is_global_along(layer: Layer, inputs: tuple[TensorSpec, ...], dim: str) -> bool:
    """Whether each part of the layer's work along a dim reads all of an input along it."""
    relation = kind(layer.kind)
    work = relation.work(layer, inputs)
    for index, spec in enumerate(inputs):
        if dim not in spec.dims or spec.shape[spec.dims.index(dim)] < 2:
            continue
        at = spec.dims.index(dim)
        extent = spec.shape[spec.dims.index(dim)]
        places = [work.dims.index(dim)] if work.dims.count(dim) == 1 else []
        ends = {
            relation.input_boxes(layer, inputs, box)[index][at]
            for box in _ends_along(work, places[0] if places else None)
        }
        if ends == {Interval(0, extent)}:
            return True
    return False


def _ends_along(work: TensorSpec, dim: int | None) -> list[Box]:
    """The first and the last row of the work."""
    box = whole(work.shape)
    if dim is None:
        return [box]
    last = work.shape[dim] - 1
    return [(*box[:dim], Interval(row, row + 1), *box[dim + 1 :]) for row in (0, last)]


def _fault(layer: Layer, specs: Mapping[str, TensorSpec], cut: list[str], num_tiles: int) -> str:
    inputs = tuple(specs[name] for name in layer.inputs)
    if has_halo(layer.kind) or any(spec.has_sites for spec in (*inputs, *layer.outputs)):
        return "is over sites, whose neighbours depend on the data; only dense layers are in blocks"
    if takes_statistics(layer, trains=False):
        return f"takes statistics of the whole micro-batch: track_running_stats=True, or {_LEAVE_OUT}"
    if num_tiles < 2:
        return ""
    terms = layer.attributes.get("terms")
    if layer.kind == "loss" and terms != ELEMENTS:
        why = "divides by what all places weigh" if terms == PLACES else "takes all of a sample at once"
        return f"{why}, which no tile knows; {_LEAVE_OUT}"
    for dim in cut:
        if is_global_along(layer, inputs, dim):
            return f"reads all of {dim}, of which a tile has a part; {_LEAVE_OUT}, or leave {dim} uncut"
    return ""
