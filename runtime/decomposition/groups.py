"""Which ranks of a divided stage combine statistics or partial sums of a layer."""

from __future__ import annotations

from planner.ir.box import Box
from planner.ir.graph import Graph
from planner.ir.plan import Decision
from planner.layers import kind
from planner.layers.division import Division, LayerDivision, divides


def group_of(layer: LayerDivision, ranks: tuple[int, ...], position: int) -> tuple[int, ...]:
    """Global ranks that combine statistics or partial sums with ``position``, by growing number; itself included.

    A normalisation combines the ranks with equal channels.  Of other sums all ranks whose parts make the same output
    take part; those of a layer without any sum are the ranks of the stage.
    """
    keys = _keys(layer)
    return tuple(sorted(rank for rank, key in zip(ranks, keys, strict=True) if key == keys[position]))


def groups_in(decision: Decision, graph: Graph) -> tuple[tuple[int, ...], ...]:
    """All groups of a plan that combine something, each once."""
    found: dict[tuple[int, ...], None] = {}
    for number, stage in enumerate(decision.stages):
        if not divides(decision, number, graph):
            continue
        division = Division.of(graph, decision, number, max(decision.micro_batches))
        for layer in division.layers.values():
            if kind(layer.layer.kind).REDUCTION:
                groups = (group_of(layer, stage.ranks, position) for position in range(len(stage.ranks)))
                found |= dict.fromkeys(group for group in groups if len(group) > 1)
    return tuple(found)


def _keys(layer: LayerDivision) -> list[object]:
    reduction = kind(layer.layer.kind).REDUCTION
    if reduction == "statistics":
        dims = layer.layer.outputs[0].dims
        channel = dims.index("channel") if "channel" in dims else 1
        return [box[channel] for box in layer.own]
    if reduction == "sum":
        owned: tuple[Box, ...] = layer.owned(0)
        return list(owned)
    return [None] * len(layer.own)
