"""A second, plain account of the blocks of a stage: one loop over tiles, in each one over layers.

Follows the same model as ``planner.extras.tiles.prices`` (its docstring says what that is) but none of its code; what
one layer costs in a tile, and needs beside what it reads and makes, is a price, and given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from planner.costs.communication.collectives import call_s
from planner.costs.communication.resharding import exchange_s
from planner.costs.cost_model import CostModel
from planner.costs.layers.cost_table import Array
from planner.extras.tiles.division import BlockDivision, BlockedDivision
from planner.extras.tiles.workspace import box_bytes, transient_bytes
from planner.ir.box import Box, Interval, volume
from planner.ir.cluster import PIECES
from planner.ir.graph import BYTES_PER_ELEMENT, Graph, output_of, producer
from planner.layers.division import Division
from planner.layers.sized import SizedLayer


@dataclass(frozen=True, eq=False)
class BlockAccount:
    """The blocks of one stage, for one number of samples.

    Attributes:
        sized: by layer.
        ranks: of the stage.
    """

    cost_model: CostModel
    division: BlockedDivision
    sized: Mapping[str, SizedLayer]
    ranks: tuple[int, ...]

    def fetched_s(self) -> float:
        """Of what ranks exchange before their blocks."""
        total = 0.0
        for block in self.division.blocks:
            for value, wanted in block.wanted.items():
                sent = np.zeros((len(self.ranks), len(self.ranks)))
                for move in self.division.moves_to(value, wanted):
                    sent[move.src, move.dst] += volume(move.box) * BYTES_PER_ELEMENT[self._spec(value)]
                if sent.sum():
                    total += float(exchange_s(sent, self.ranks, self.cost_model.network))
                    total += float(call_s(self.cost_model.profile.cluster, PIECES, sent.sum(axis=0).max()))
        return total

    def peak_bytes(self, member: int, graph: Graph) -> int:
        """The most that a forward pass holds of values."""
        groups: list[tuple[tuple[str, ...], BlockDivision | None]] = []
        for name in self.division.layers:
            block = next((block for block in self.division.blocks if name in block.layers), None)
            if block is None:
                groups.append(((name,), None))
            elif name == block.layers[0]:
                groups.append((block.layers, block))
        handed = [self._handed(names, block) for names, block in groups]
        most = 0
        for number, (names, block) in enumerate(groups):
            before = [value for earlier in handed[:number] for value in earlier]
            later = [name for names, _ in groups[number:] for name in names]
            kept = sum(self._whole(value, member) for value in before if self._is_kept(value, later, graph))
            tiles = (self.division,) if block is None else block.tiles
            inner = max(self._in_tile(names, handed[number], tile, member) for tile in tiles)
            ends = sum(self._whole(value, member) for value in handed[number]) if len(tiles) > 1 else 0
            most = max(most, kept + inner + ends + (0 if block is None else self._got(block, member)))
        return most

    def _handed(self, names: Sequence[str], block: BlockDivision | None) -> tuple[str, ...]:
        if block is not None:
            return block.ends
        outputs = len(self.division.layers[names[0]].layer.outputs)
        return (names[0], *(f"{names[0]}:{number}" for number in range(1, outputs)))

    def _is_kept(self, value: str, later: Sequence[str], graph: Graph) -> bool:
        """Whether somebody reads it who comes now or later, is outside of the stage, or judges by it."""
        loss = producer(graph.loss)
        mine = self.division.layers
        readers = [layer for layer in graph.layers if value in layer.inputs]
        is_judged = any(layer.kind == "loss" or layer.name == loss for layer in readers)
        is_read = any(layer.name in later or layer.name not in mine for layer in readers)
        return is_judged or is_read or (not readers and producer(value) == loss)

    def _in_tile(self, names: Sequence[str], ends: Sequence[str], tile: Division, member: int) -> int:
        most = 0
        for place, name in enumerate(names):
            layer = tile.layers[name]
            read = [boxes[member] for boxes in layer.needed]
            there = [self._there(value, names, tile, member) for value in layer.layer.inputs]
            needs = transient_bytes(self.sized[name], read, layer.done[member], there)
            for earlier in names[: place + 1]:
                for number, spec in enumerate(tile.layers[earlier].layer.outputs):
                    value = earlier if number == 0 else f"{earlier}:{number}"
                    is_read = any(value in tile.layers[other].layer.inputs for other in names[place:])
                    if earlier == name or is_read or value in ends:
                        needs += box_bytes(tile.layers[earlier].held[number][member], spec.dtype)
            most = max(most, needs)
        return most

    def _there(self, value: str, names: Sequence[str], tile: Division, member: int) -> Box:
        """What the tensor covers that a layer reads: what the tile made, or else all that the rank has of it."""
        return (tile if producer(value) in names else self.division).held(value)[member]

    def _got(self, block: BlockDivision, member: int) -> int:
        """What came of others, and the copy in which a tile has it together with its own rows."""
        received_bytes = 0
        for value, wanted in block.wanted.items():
            if producer(value) not in self.division.layers:
                continue
            held = self.division.held(value)[member]
            dtype = self._spec(value)
            there = [
                Interval(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(wanted[member], held, strict=True)
            ]
            missing = volume(wanted[member]) - volume(tuple(there))
            if missing > 0:
                received_bytes += missing * BYTES_PER_ELEMENT[dtype]
                received_bytes += max(box_bytes(tile.held(value)[member], dtype) for tile in block.tiles)
        return received_bytes

    def _whole(self, value: str, member: int) -> int:
        box: Box = self.division.held(value)[member]
        return box_bytes(box, self._spec(value))

    def _spec(self, value: str) -> str:
        name, output = output_of(value)
        return self.division.layers[name].layer.outputs[output].dtype


def tile_seconds(costs: Mapping[str, Array], block: BlockDivision) -> float:
    """Of a block: the slowest rank's sum over tiles and layers; ``costs``: by layer, ``[tiles, ranks]``."""
    slowest = 0.0
    for member in range(block.tiles[0].num_ranks):
        slowest = max(
            slowest, sum(float(costs[name][tile, member]) for tile in range(len(block.tiles)) for name in block.layers)
        )
    return slowest
