"""What a stage does whose layers are run in blocks (:class:`planner.ir.plan.Block`): the tiles of a rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from planner.ir.box import Box, Boxes, Interval, hull, volume, whole
from planner.ir.graph import Graph, TensorSpec, output_of, producer, value_name
from planner.ir.plan import Block, Placement
from planner.layers import kind
from planner.layers.boxes import BoxArray, as_boxes
from planner.layers.division import Division, LayerDivision, read_by
from planner.layers.receptive_field import read_back
from planner.layers.shards import Shards
from planner.layers.sized import SizedLayer


@dataclass(frozen=True, slots=True, eq=False)
class BlockDivision:
    """A block of a stage, for one number of samples.

    Attributes:
        layers: by name, in order.
        tiles: of each rank, one after the other; in the n-th division every rank is at its n-th tile.
        shards: by layer, the boxes of all its tiles: they are its options.
        ends: values that are handed on.
        summed: those of them that are sums over the tiles (of reductions, such as a loss).
        wanted: by value from outside of the block, what each rank reads of it for all its tiles.
    """

    layers: tuple[str, ...]
    tiles: tuple[Division, ...]
    shards: Mapping[str, Shards]
    ends: tuple[str, ...]
    summed: frozenset[str]
    wanted: Mapping[str, Boxes]


class BlockedDivision(Division):
    """The layers of a stage some of which are run in blocks.

    Attributes:
        blocks: of these layers, those that are run in blocks.
    """

    def __init__(
        self, layers: Mapping[str, LayerDivision], num_ranks: int, samples: int, blocks: tuple[BlockDivision, ...]
    ) -> None:
        super().__init__(layers, num_ranks, samples)
        self.blocks = blocks

    def parts_of(self, layer: str) -> Sequence[LayerDivision]:
        block = next((block for block in self.blocks if layer in block.layers), None)
        return super().parts_of(layer) if block is None else [tile.layers[layer] for tile in block.tiles]


def in_blocks(graph: Graph, plain: Division, blocks: Iterable[Block]) -> BlockedDivision:
    """``plain``, of which some layers are run in ``blocks``."""
    divided = dict(plain.layers)
    made = list[BlockDivision]()
    for block in blocks:
        made.append(_block_division(graph, block, divided, plain.samples, plain.num_ranks))
        divided |= {name: _hull_of(divided[name], [t.layers[name] for t in made[-1].tiles]) for name in block.layers}
    return BlockedDivision(divided, plain.num_ranks, plain.samples, tuple(made))


def ends_of(graph: Graph, names: Iterable[str]) -> tuple[str, ...]:
    """The values that layers of a block hand on: to others, to whoever judges by them, or as the loss."""
    inside = frozenset(names)
    loss = producer(graph.loss)
    outside = {
        v
        for layer in graph.layers
        if layer.name not in inside or layer.kind == "loss" or layer.name == loss
        for v in layer.inputs
    }
    return tuple(
        value
        for layer in graph.layers
        if layer.name in inside
        for value in (value_name(layer.name, index) for index in range(len(layer.outputs)))
        if value in outside or (layer.name == loss and value == graph.loss)
    )


class BlockReader:
    """What the tiles of a block of layers do, followed back from the block's ends.

    Args:
        names: of the layers, in the graph's order.
        plain: the layers of the stage, as their layouts divide them over the ranks.

    Attributes:
        ends: values that are handed on.
        summed: those of them that are sums over the tiles.
    """

    def __init__(self, graph: Graph, names: Iterable[str], plain: Mapping[str, LayerDivision], samples: int) -> None:
        self.layers = [plain[name] for name in names]
        values = graph.values()
        own = [value for each in self.layers for value in _made_by(each)]
        read = {value: None for each in self.layers for value in each.layer.inputs}
        self._specs = {value: values[value].at(samples, graph.samples) for value in (*read, *own)}
        self.ends = ends_of(graph, (each.layer.name for each in self.layers))
        self._reduced = [each for each in self.layers if kind(each.layer.kind).REDUCTION == "sum"]
        names_reduced = {each.layer.name for each in self._reduced}
        self.summed = frozenset(value for value in self.ends if producer(value) in names_reduced)
        self.outside = tuple(value for value in read if value not in own)
        self._plain = plain

    def done(self, position: int, grid: Mapping[str, int], at: Mapping[str, int]) -> Mapping[str, Box]:
        """By layer, what a rank does for the tile ``at`` a place of the ``grid`` of tiles; not what is not needed."""
        works = {each.layer.name: _tile(each.own[position], each.work.dims, grid, at) for each in self._reduced}
        wanted = {}
        for value in self.ends:
            if value not in self.summed:
                name, output = output_of(value)
                owned = self._plain[name].owned[output][position]
                wanted[value] = _tile(owned, self._specs[value].dims, grid, at)
        return read_back((each.layer for each in self.layers), self._specs, wanted, works).done


def _block_division(
    graph: Graph, block: Block, plain: Mapping[str, LayerDivision], samples: int, num_ranks: int
) -> BlockDivision:
    """The tiles of a block; ``plain``: how its layers' ends are divided over the ranks."""
    reader = BlockReader(graph, block.layers, plain, samples)
    grid = dict(block.tiles)
    places = [dict(zip(grid, place, strict=True)) for place in product(*(range(parts) for parts in grid.values()))]
    done = [[reader.done(position, grid, place) for position in range(num_ranks)] for place in places]
    shards = {each.layer.name: _tiled(each, done, grid) for each in reader.layers}
    tiles = tuple(
        Division({name: LayerDivision.view(of_layer, tile) for name, of_layer in shards.items()}, num_ranks, samples)
        for tile in range(len(places))
    )
    read = {value: [read_by(value, tile.layers.values(), num_ranks) for tile in tiles] for value in reader.outside}
    hulls = {value: tuple(_hull(column) for column in zip(*boxes, strict=True)) for value, boxes in read.items()}
    return BlockDivision(block.layers, tiles, shards, reader.ends, reader.summed, hulls)


def _made_by(each: LayerDivision) -> list[str]:
    return [value_name(each.layer.name, index) for index in range(len(each.layer.outputs))]


def _tile(box: Box, dims: tuple[str, ...], grid: Mapping[str, int], at: Mapping[str, int]) -> Box:
    """The part of ``box`` at a place of the grid of tiles."""
    intervals = []
    for dim, part in zip(dims, box, strict=True):
        parts = grid.get(dim, 1)
        place = at.get(dim, 0)
        intervals.append(
            Interval(part.start + len(part) * place // parts, part.start + len(part) * (place + 1) // parts)
        )
    return tuple(intervals)


def _tiled(plain: LayerDivision, tiles: Sequence[Sequence[Mapping[str, Box]]], grid: Mapping[str, int]) -> Shards:
    """A layer under each tile, as if these were options.

    Args:
        tiles: the boxes of each layer, by tile and rank.
    """
    layer = plain.layer
    nothing = (Interval(0, 0),) * len(plain.work.shape)
    sized = SizedLayer(layer, plain.inputs, (), plain.work, plain.samples, mixes_samples=False)
    boxes = [[done.get(layer.name, nothing) for done in ranks] for ranks in tiles]
    done = np.array(list(map(as_boxes, boxes)))
    if kind(layer.kind).REDUCTION == "sum":
        made = _for_each(plain.owned, len(tiles))
    else:
        made = tuple(
            np.array([as_boxes([made_box(box, plain.work, spec) for box in ranks]) for ranks in boxes])
            for spec in layer.outputs
        )
    cuts = {**plain.layout.cuts, **{dim: (0, 1) for dim in grid if dim not in plain.layout.cuts}}
    options = (Placement(0, cuts),) * len(tiles)
    weights = _for_each(plain.weights, len(tiles))
    return Shards(sized, options, done, done, made, made, sized.read(done)[0], weights, ((),) * len(tiles))


def _for_each(boxes: tuple[Boxes, ...], num_tiles: int) -> tuple[BoxArray, ...]:
    """The same boxes by rank for every tile."""
    return tuple(np.array([as_boxes(each)] * num_tiles) for each in boxes)


def made_box(done: Box, work: TensorSpec, spec: TensorSpec) -> Box:
    """What is made of an output by the work ``done``: the same place, all along dims in which the two differ."""
    if not volume(done) and done:
        return tuple(Interval(0, 0) for _ in spec.shape)
    if spec.dims != work.dims:
        return whole(spec.shape)
    pairs = zip(done, spec.shape, work.shape, strict=True)
    return tuple(part if extent == total else Interval(0, extent) for part, extent, total in pairs)


def _hull(boxes: Iterable[Box]) -> Box:
    """Of those that are not empty; the last one where all are."""
    enclosing: Box | None = None
    last: Box = ()
    for box in boxes:
        last = box
        enclosing = hull(enclosing, box) if volume(box) else enclosing
    return last if enclosing is None else enclosing


def _hull_of(plain: LayerDivision, tiles: list[LayerDivision]) -> LayerDivision:
    """A layer of a block as the rest of the stage sees it: what it does and reads for all tiles."""
    done = tuple(_hull(column) for column in zip(*(each.done for each in tiles), strict=True))
    needed = tuple(
        tuple(_hull(column) for column in zip(*(each.needed[index] for each in tiles), strict=True))
        for index in range(len(plain.inputs))
    )
    rows = tuple(max(column) for column in zip(*(each.rows for each in tiles), strict=True))
    return replace(plain, layout=tiles[0].layout, done=done, held=plain.owned, needed=needed, rows=rows)
