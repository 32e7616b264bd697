"""Which places to cut are worth trying."""

from __future__ import annotations

from planner.costs.stage import PriceBook
from planner.ir.graph import Graph, producer
from planner.solvers.candidates.space import cut_positions


def cuts_worth_trying(book: PriceBook) -> tuple[tuple[int, ...], int]:
    """Places to cut, both ends included, and how many were left out.

    A layer that costs nothing anywhere, reads only what the layer before it makes for it alone, and hands on no more
    bytes than it reads, stays with that layer: cutting behind it moves no work and sends no more.
    """
    graph = book.profile.graph
    allowed = cut_positions(graph)
    free = _free_layers(book)
    kept = tuple(
        position
        for position in allowed
        if position in (0, len(graph.layers))
        or not free[position]
        or not _follows(graph, position)
        or position + 1 not in allowed
        or position + 1 == len(graph.layers)
    )
    return kept, len(allowed) - len(kept)


def _free_layers(book: PriceBook) -> list[bool]:
    measured: dict[str, bool] = {layer.name: not layer.parameters for layer in book.profile.graph.layers}
    for found in book.profile.measurements.values():
        for m in found:
            if (
                m.forward_s
                or m.backward_s
                or m.backward_input_s
                or m.backward_weight_s
                or m.saved_bytes
                or m.workspace_bytes
            ):
                measured[m.layer] = False
    return list(measured.values())


def _follows(graph: Graph, position: int) -> bool:
    """Whether the layer is a mere extension of the one before."""
    layer, before = graph.layers[position], graph.layers[position - 1]
    made = [value for value in layer.inputs if value not in graph.inputs]
    if len(made) != 1 or producer(made[0]) != before.name:
        return False
    readers = [other.name for other in graph.layers for value in other.inputs if value == made[0]]
    size = sum(spec.num_bytes for spec in layer.outputs)
    return readers == [layer.name] and size <= graph.values()[made[0]].num_bytes
