"""Which ranks of a divided stage do something together: they are declared when the transport is made."""

from __future__ import annotations

from planner.ir.box import Box
from planner.layers import kind
from planner.layers.division import Division, LayerDivision


def group_of(layer: LayerDivision, ranks: tuple[int, ...], position: int) -> tuple[int, ...]:
    """Global ranks that combine statistics or partial sums with ``position``, by growing number; itself included.

    A normalisation combines the ranks with equal channels.  Of other sums all ranks whose parts make the same output
    take part; those of a layer without any sum are the ranks of the stage.
    """
    keys = _keys(layer)
    return tuple(sorted(rank for rank, key in zip(ranks, keys, strict=True) if key == keys[position]))


def groups_in(division: Division, ranks: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """All groups of a stage that combine something, each once."""
    found: dict[tuple[int, ...], None] = {}
    for layer in division.layers.values():
        if kind(layer.layer.kind).REDUCTION:
            for position in range(len(ranks)):
                found[group_of(layer, ranks, position)] = None
    return tuple(group for group in found if len(group) > 1)


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
