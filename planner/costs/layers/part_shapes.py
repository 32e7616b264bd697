"""Which parts of layers a planner would consider on up to a number of ranks: what is worth measuring.

Every grid of equally fast ranks that :func:`planner.costs.shards.device_mesh.candidate_layouts` offers, for groups of
2, 4, 8, ... and of divisors of the number of ranks.  Other shares (of unequal devices, with margins, of groups of 3 of
8) are read between those (``planner.costs.layers.shards``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from planner.costs.layers.shards import part_of
from planner.costs.shards.device_mesh import axes_of, candidate_layouts
from planner.ir.extras import extras, required
from planner.ir.graph import Graph, Layer, TensorSpec
from planner.ir.planner_extra import PlannerExtra
from planner.ir.problem import TIME_DIMS
from planner.ir.profile import PartShape
from planner.layers import check_samples_apart
from planner.layers.boxes import boxes_of
from planner.layers.sized import SizedLayer


def _no_parts(sized: SizedLayer) -> Iterator[tuple[tuple[int, ...], int]]:
    return iter(())


def part_shapes(graph: Graph, sizes: Sequence[int], allow: Collection[str], num_ranks: int) -> tuple[PartShape, ...]:
    """The distinct parts of layers, by growing number of samples and in the graph's order.

    Layers whose shapes, attributes and operators are alike share an entry.  Whole layers at fewer samples are no parts.

    Args:
        sizes: micro-batches.
        allow: families of dims that may be cut (``Problem.allow``).

    Raises:
        UnsupportedModelError: time may be cut, and the graph cannot be run in parts along it.
    """
    values = graph.values()
    mixing = frozenset(check_samples_apart(graph))
    axes = axes_of(graph, allow)
    of_axis: Callable[[SizedLayer], Iterator[tuple[tuple[int, ...], int]]] = _no_parts
    if TIME_DIMS in allow:
        of_axis = required(
            (extra.part_shapes(graph) for extra in extras(PlannerExtra)), "planner", "parts of layers along time"
        )
    shapes: dict[PartShape, None] = {}
    for layers in alike_layers(graph, values, mixing):
        names = tuple(layer.name for layer in layers)
        for size in sizes:
            sized = SizedLayer.of(graph, layers[0], values, size, names[0] in mixing)
            shapes.update((PartShape(names, samples, part), None) for samples, part in _parts(sized, axes, num_ranks))
            shapes.update((PartShape(names, size, part, before), None) for part, before in of_axis(sized))
    order = {layer.name: index for index, layer in enumerate(graph.layers)}
    return tuple(sorted(shapes, key=lambda shape: (shape.samples, order[shape.layers[0]])))


def group_sizes(num_ranks: int) -> tuple[int, ...]:
    """Powers of 2 up to ``num_ranks`` and its divisors; no group of one."""
    powers = {1 << k for k in range(1, num_ranks.bit_length())}
    return tuple(size for size in range(2, num_ranks + 1) if num_ranks % size == 0 or size in powers)


def alike_layers(graph: Graph, values: Mapping[str, TensorSpec], mixing: frozenset[str]) -> list[list[Layer]]:
    """Layers that compute the same: of equal shapes and attributes, and with gradients for the same inputs."""
    alike: dict[object, list[Layer]] = {}
    for layer in graph.layers:
        sized = SizedLayer.of(graph, layer, values, graph.samples, layer.name in mixing)
        are_inputs = tuple(name in graph.inputs for name in layer.inputs)
        alike.setdefault((sized.signature, are_inputs), []).append(layer)
    return list(alike.values())


def _parts(sized: SizedLayer, axes: tuple[str, ...], num_ranks: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """(samples, extents) of what ranks do that do not do whole samples."""
    whole = part_of(sized, sized.work.shape)
    at = sized.samples_dim
    rows = 1 if at is None else max(1, sized.work.shape[at] // max(1, sized.samples))
    for size in group_sizes(num_ranks):
        for layout in candidate_layouts(sized, (1.0,) * size, axes):
            for box in boxes_of(layout, sized.work, sized.samples):
                extents = [int(stop - start) for start, stop in box]
                part = part_of(sized, extents)
                if part != whole and 0 not in extents:
                    yield sized.samples if at is None else extents[at] // rows, part
