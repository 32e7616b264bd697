"""How a stage of several ranks divides its layers: what every rank does, holds, reads and uses of each.

The boxes of a layer are those of :mod:`planner.layers.shards` under the placement that a plan gives it, as tuples of
intervals.  Values that come from outside of the stage (graph inputs, other stages) are held by each rank as far as its
layers read them, so that nothing of them moves inside the stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import product
from typing import Self

import numpy as np

from planner.ir.box import Box, Interval, Transfer, hull, inside, subtract, volume, whole
from planner.ir.graph import SAMPLE, Graph, Layer, TensorSpec, output_of, producer, value_name
from planner.ir.layout import Layout
from planner.ir.plan import Block, Decision, Placement
from planner.layers._kinds import kind
from planner.layers.boxes import Boxes as Arrays
from planner.layers.boxes import as_boxes, as_tuples, boxes_of, transfers
from planner.layers.contraction import Contraction, refused
from planner.layers.shards import Shards, shards_of
from planner.layers.sized import SizedLayer

Boxes = tuple[Box, ...]
"""One a rank, by its position in the stage."""


@dataclass(frozen=True, slots=True)
class LayerDivision:
    """One layer of a stage, for one number of samples; what is said by rank goes by its position in the stage.

    Attributes:
        layer: with the outputs it has for so many samples.
        inputs: specs of its inputs, likewise.
        samples: in all.
        work: the space that the layout divides.
        own, done: parts of the work.
        owned, held: by output.
        needed: by input.
        weights: by parameter.
        rows: samples of which a rank does a part.
        is_first: whether the rank is the first of those that have an equal own part; False where that is empty.
        contraction: where ranks share its input channels.
    """

    layer: Layer
    inputs: tuple[TensorSpec, ...]
    samples: int
    work: TensorSpec
    layout: Layout
    own: Boxes
    done: Boxes
    owned: tuple[Boxes, ...]
    held: tuple[Boxes, ...]
    needed: tuple[Boxes, ...]
    weights: tuple[Boxes, ...]
    rows: tuple[int, ...]
    is_first: tuple[bool, ...]
    contraction: Contraction | None = None

    @classmethod
    def of(
        cls,
        layer: Layer,
        inputs: tuple[TensorSpec, ...],
        parameters: tuple[TensorSpec, ...],
        placement: Placement,
        samples: int,
    ) -> LayerDivision:
        """The division of ``layer``, all specs being those for ``samples`` samples.

        Raises:
            UnsupportedModelError: ranks are to share its input channels, and cannot.
        """
        work = kind(layer.kind).work(layer, inputs)
        sized = SizedLayer(layer, inputs, parameters, work, samples, mixes_samples=False)
        shards = shards_of(sized, (placement,))
        if placement.ways > 1 and not shards.contractions[0]:
            raise refused(sized, placement.layout, placement.ways)
        return cls.view(shards, 0)

    @classmethod
    def view(cls, shards: Shards, option: int) -> LayerDivision:
        """One of the options of ``shards``."""
        sized, sharding = shards.sized, shards.options[option]
        contraction = shards.contractions[option][0] if sharding.ways > 1 else None
        arrays = (shards.own, shards.done), shards.owned, shards.held, shards.needed, shards.weights
        (own, done), owned, held, needed, weights = (
            tuple(as_tuples(array[option]) for array in group) for group in arrays
        )
        return cls(
            sized.layer,
            sized.inputs,
            sized.samples,
            sized.work,
            sharding.layout,
            own,
            done,
            owned,
            held,
            needed,
            weights if contraction is None else (as_tuples(contraction.weight), *weights[1:]),
            tuple(shards.samples[option].tolist()),
            tuple(own.index(box) == position and all(map(len, box)) for position, box in enumerate(own)),
            contraction,
        )

    @property
    def ways(self) -> int:
        """Ranks that share its input channels."""
        return 1 if self.contraction is None else self.contraction.ways


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


class Division:
    """The layers of one stage, divided over its ranks, for micro-batches of ``samples``.

    Attributes:
        layers: by name, in order.
        num_ranks: of the stage.
        sizes: by name, those of the graph that vary beside the number of samples.
        number: tells the divisions of a plan that are in use apart; the same on all ranks of the stage.
        blocks: of these layers, those that are run in blocks.
    """

    def __init__(
        self,
        layers: Mapping[str, LayerDivision],
        num_ranks: int,
        samples: int,
        blocks: tuple[BlockDivision, ...] = (),
    ) -> None:
        self.layers, self.num_ranks, self.samples, self.blocks = layers, num_ranks, samples, blocks
        self.sizes: Mapping[str, int] = {}
        self.number: int | None = None
        self._outside: dict[str, Boxes] = {}

    @classmethod
    def of(
        cls,
        graph: Graph,
        decision: Decision,
        stage: int,
        samples: int,
    ) -> Division:
        """The division that a plan says, of ``graph`` in the shapes of a micro-batch."""
        placed = {name: decision.layers[name] for name in decision.layers_of(stage)}
        each = decision.stages[stage]
        return cls.placed(graph, placed, len(each.ranks), samples, each.blocks)

    @classmethod
    def placed(
        cls,
        graph: Graph,
        placements: Mapping[str, Placement],
        num_ranks: int,
        samples: int,
        blocks: Iterable[Block] = (),
    ) -> Division:
        """That of a stage whose layers are ``placements``, in the graph's order; see the class for the others."""
        by_name, values = graph.by_name(), graph.values()
        divided = {
            name: layer_division(graph, by_name[name], values, each, samples) for name, each in placements.items()
        }
        in_blocks = []
        for block in blocks:
            in_blocks.append(_block_division(graph, block, divided, samples, num_ranks))
            divided |= {
                name: _hull_of(divided[name], [t.layers[name] for t in in_blocks[-1].tiles]) for name in block.layers
            }
        return cls(divided, num_ranks, samples, tuple(in_blocks))

    def in_use(self, sizes: Mapping[str, int], number: int | None) -> Self:
        """The same for batches of those ``sizes``; other divisions in use have other numbers."""
        division = copy(self)
        division.sizes, division.number = sizes, number
        return division

    def makes(self, value: str) -> bool:
        """Whether a layer of the stage makes ``value``."""
        return producer(value) in self.layers

    def owned(self, value: str) -> Boxes:
        """What each rank is asked for of a value that the stage makes."""
        layer, output = self._maker(value)
        return layer.owned[output]

    def held(self, value: str) -> Boxes:
        """What each rank has of a value: of one from outside, as much as its layers read."""
        if self.makes(value):
            layer, output = self._maker(value)
            return layer.held[output]
        if value not in self._outside:
            self._outside[value] = read_by(value, self.layers.values(), self.num_ranks)
        return self._outside[value]

    def wanted(self, reader: str, index: int) -> Boxes:
        """What each rank gets of input ``index`` of a layer: what it needs inside the tensor."""
        layer = self.layers[reader]
        return tuple(inside(box, layer.inputs[index].shape) for box in layer.needed[index])

    def moves(self, reader: str, index: int) -> tuple[Transfer, ...]:
        """What ranks (by position) send each other so that all have input ``index`` of layer ``reader``."""
        value = self.layers[reader].layer.inputs[index]
        return self.moves_to(value, self.wanted(reader, index))

    def moves_to(self, value: str, wanted: Boxes) -> tuple[Transfer, ...]:
        """The same so that all have what is ``wanted`` of ``value``; nothing of what comes from outside the stage."""
        if not self.makes(value):
            return ()
        return moves_between(self.owned(value), self.held(value), wanted)

    def _maker(self, value: str) -> tuple[LayerDivision, int]:
        name, output = output_of(value)
        return self.layers[name], output


def layer_division(
    graph: Graph, layer: Layer, values: Mapping[str, TensorSpec], placement: Placement, samples: int
) -> LayerDivision:
    """How ``placement`` divides ``layer`` of ``graph``, whose ``values`` are indexed once."""
    return LayerDivision.of(*graph.layer_at(layer, samples, values), placement, samples)


def moves_between(owned: Sequence[Box], held: Sequence[Box], wanted: Sequence[Box]) -> tuple[Transfer, ...]:
    """What ranks (by position) that have ``held`` send each other so that each has what is ``wanted``."""
    return tuple(
        Transfer(move.src, move.dst, part)
        for move in transfers(dict(enumerate(owned)), dict(enumerate(wanted)))
        if move.src != move.dst
        for part in subtract(move.box, held[move.dst])
    )


def read_by(value: str, layers: Iterable[LayerDivision], num_ranks: int) -> Boxes:
    """The hull of what each rank's ``layers`` read of ``value``; nothing is empty boxes.

    Along dims that a layer is not cut along it takes the value whole.  (A strided window may skip the last row: those
    few bytes are worth less than a contiguous message, and a tensor of the shape that layers were made for.)
    Of sparse tensors it is the rank's own rows, as its layout cuts that level: neighbours come from the stage.
    """
    hulls: list[Box | None] = [None] * num_ranks
    num_dims = 0
    for layer, index in _readers(value, layers):
        spec = layer.inputs[index]
        num_dims = len(spec.shape)
        of_sites = as_tuples(boxes_of(layer.layout, spec, layer.samples)) if spec.has_sites else None
        for position, box in enumerate(of_sites or layer.needed[index]):
            part = inside(box, spec.shape)
            if volume(part):
                hulls[position] = hull(hulls[position], _whole_but(layer, spec, part))
    nothing = tuple(Interval(0, 0) for _ in range(num_dims))
    return tuple(nothing if box is None else box for box in hulls)


def divides(decision: Decision, stage: int, graph: Graph) -> bool:
    """Whether the ranks of a stage divide its layers along other dims than samples, or each layer otherwise.

    A stage that is cut by samples alone is divided as well if it makes a term of a loss that other layers read: that is
    a sum over its ranks.  One with blocks is, also on one rank.
    """
    if decision.stages[stage].blocks:
        return True
    placements = [decision.layers[name] for name in decision.layers_of(stage)]
    if len(decision.stages[stage].ranks) < 2:
        return False
    first = tuple(placements[0].cuts.items()) if placements else ()
    return _makes_term(decision, stage, graph) or any(
        tuple(each.cuts.items()) != first or set(each.cuts) - {SAMPLE} or each.ways > 1 or each.margin
        for each in placements
    )


def _makes_term(decision: Decision, stage: int, graph: Graph) -> bool:
    terms = {
        layer.name for layer in graph.layers if layer.kind == "loss" and decision.layers[layer.name].stage == stage
    }
    terms.discard(producer(graph.loss))
    return bool(terms) and any(producer(value) in terms for layer in graph.layers for value in layer.inputs)


def _readers(value: str, layers: Iterable[LayerDivision]) -> Iterator[tuple[LayerDivision, int]]:
    return ((layer, index) for layer in layers for index, name in enumerate(layer.layer.inputs) if name == value)


def _whole_but(layer: LayerDivision, spec: TensorSpec, box: Box) -> Box:
    """``box`` along the dims that the layer is cut along, whole along others."""
    if layer.ways > 1 or spec.has_sites:  # its first input is cut along channels, whatever they are called there
        return box
    return tuple(
        interval if dim in layer.layout.cuts else Interval(0, extent)
        for dim, interval, extent in zip(spec.dims, box, spec.shape, strict=True)
    )


def ends_of(graph: Graph, names: Iterable[str]) -> tuple[str, ...]:
    """The values that layers of a block hand on: to others, to whoever judges by them, or as the loss."""
    inside, loss = frozenset(names), producer(graph.loss)
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
        values, own = graph.values(), [value for each in self.layers for value in _made_by(each)]
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
        from planner.layers.receptive_field import read_back  # late: few stages run in tiles

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
    reader, grid = BlockReader(graph, block.layers, plain, samples), dict(block.tiles)
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
        parts, place = grid.get(dim, 1), at.get(dim, 0)
        intervals.append(
            Interval(part.start + len(part) * place // parts, part.start + len(part) * (place + 1) // parts)
        )
    return tuple(intervals)


def _tiled(plain: LayerDivision, tiles: Sequence[Sequence[Mapping[str, Box]]], grid: Mapping[str, int]) -> Shards:
    """A layer under each tile, as if these were options.

    Args:
        tiles: the boxes of each layer, by tile and rank.
    """
    layer, nothing = plain.layer, (Interval(0, 0),) * len(plain.work.shape)
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
    options, weights = (Placement(0, cuts),) * len(tiles), _for_each(plain.weights, len(tiles))
    return Shards(sized, options, done, done, made, made, sized.read(done)[0], weights, ((),) * len(tiles))


def _for_each(boxes: tuple[Boxes, ...], num_tiles: int) -> tuple[Arrays, ...]:
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
