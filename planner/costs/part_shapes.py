"""Which parts of layers a planner would consider on up to so many ranks: what is worth measuring.

Every grid of equally fast ranks that :func:`planner.costs.grids.candidate_layouts` offers, for groups of 2, 4, 8, ...
and of divisors of the number of ranks.  Other shares (of unequal devices, with margins, of groups of 3 of 8) are read
between those (``planner.costs.measured_parts``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from planner.costs.boxes import boxes_of
from planner.costs.grids import axes_of, candidate_layouts
from planner.costs.sized import SizedLayer
from planner.ir.graph import Graph, Layer, TensorSpec
from planner.ir.profile import PartShape
from planner.layers import check_samples_apart


def part_shapes(graph: Graph, sizes: Sequence[int], allow: Collection[str], num_ranks: int) -> tuple[PartShape, ...]:
    """The distinct parts of layers, by growing number of samples and in the graph's order.

    Layers whose shapes, attributes and operators are alike share an entry.  Whole layers at fewer samples are no parts.

    Args:
        sizes: micro-batches.
        allow: families of dims that may be cut (``Problem.allow``).
    """
    values, mixing = graph.values(), frozenset(check_samples_apart(graph))
    axes = axes_of(graph, allow)
    found: dict[PartShape, None] = {}
    for layers in _alike(graph, values, mixing):
        names = tuple(layer.name for layer in layers)
        for size in sizes:
            sized = SizedLayer.of(graph, layers[0], values, size, names[0] in mixing)
            found.update((PartShape(names, samples, part), None) for samples, part in _parts(sized, axes, num_ranks))
    order = {layer.name: index for index, layer in enumerate(graph.layers)}
    return tuple(sorted(found, key=lambda shape: (shape.samples, order[shape.layers[0]])))


def part_of(sized: SizedLayer, extents: Sequence[int]) -> tuple[int, ...]:
    """The extents of a part of the work without those of its samples."""
    apart = sized.samples_dim
    return tuple(extents if apart is None else (*extents[:apart], *extents[apart + 1 :]))


def group_sizes(num_ranks: int) -> tuple[int, ...]:
    """Powers of 2 up to ``num_ranks`` and its divisors; no group of one."""
    powers = {1 << k for k in range(1, num_ranks.bit_length())}
    return tuple(size for size in range(2, num_ranks + 1) if num_ranks % size == 0 or size in powers)


def _alike(graph: Graph, values: Mapping[str, TensorSpec], mixing: frozenset[str]) -> list[list[Layer]]:
    """Layers that compute the same: of equal shapes and attributes, and with gradients for the same inputs."""
    found: dict[object, list[Layer]] = {}
    for layer in graph.layers:
        sized = SizedLayer.of(graph, layer, values, graph.samples, layer.name in mixing)
        given = tuple(name in graph.inputs for name in layer.inputs)
        found.setdefault((sized.signature, given), []).append(layer)
    return list(found.values())


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
