"""How a stage of several ranks divides its layers: what every rank does, holds, reads and uses of each.  Pure integers.

A layer's placement says how its work is cut.  Everything else follows from its access relation:

    own      the part of the work that the layout gives a rank
    done     the part it does: ``own``, grown by the halo margin along the dims of space that are cut
    held     of each output, what ``done`` makes; ``owned`` is the part that others ask this rank for
    needed   of each input, what ``done`` reads; it may reach outside the tensor, where padding is
    weights  of each parameter, what ``done`` uses; ranks with equal boxes share its gradient

Values that come from outside of the stage (graph inputs, other stages) are held by each rank as far as its layers read
them, so that nothing of them moves inside the stage.  The planner's arrays (``planner.costs.shards.sharding_spec``) say
the same for many layouts at once; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from itertools import product
from typing import Self

from planner.ir.box import Box, Interval, Transfer, hull, intersect, subtract, transfers, volume, whole
from planner.ir.graph import SAMPLE, Graph, Layer, TensorSpec, output_of, producer, value_name
from planner.ir.layout import Layout
from planner.ir.plan import Block, Decision, Placement
from planner.layers import kind
from planner.layers.sized import SPACE

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
        is_first: whether the rank is the first of those that have an equal own part; False where that is empty.
        needed: by input.
        weights: by parameter.
        ways: ranks that share the input channels of a contraction.
        margin: rows by which ``done`` exceeds ``own``, where the tensor does not end before.
    """

    layer: Layer
    inputs: tuple[TensorSpec, ...]
    samples: int
    work: TensorSpec
    layout: Layout
    own: Boxes
    done: Boxes
    is_first: tuple[bool, ...]
    needed: tuple[Boxes, ...]
    weights: tuple[Boxes, ...]
    ways: int = 1
    margin: int = 0

    @classmethod
    def of(
        cls,
        layer: Layer,
        inputs: tuple[TensorSpec, ...],
        parameters: tuple[TensorSpec, ...],
        placement: Placement,
        samples: int,
    ) -> LayerDivision:
        """The division of ``layer``, all specs being those for ``samples`` samples."""
        relation, layout = kind(layer.kind), placement.layout
        work = relation.work(layer, inputs)
        own = layout.boxes(work, samples)
        done = tuple(grown(box, work, layout, placement.margin) for box in own)
        read = [relation.input_boxes(layer, inputs, box) for box in done]
        used = [relation.weight_boxes(layer, parameters, box) for box in done]
        if placement.ways > 1:
            from planner.layers.contraction import contraction_of  # late: few layers share input channels

            contraction = contraction_of(layer, inputs, parameters, layout, placement.ways, own)
            read = [(first, *others[1:]) for first, others in zip(contraction.needed, read, strict=True)]
            used = list(contraction.weights)
        return cls(
            layer,
            inputs,
            samples,
            work,
            layout,
            own,
            done,
            tuple(own.index(box) == position and all(map(len, box)) for position, box in enumerate(own)),
            tuple(tuple(boxes[index] for boxes in read) for index in range(len(inputs))),
            tuple(tuple(boxes[index] for boxes in used) for index in range(len(parameters))),
            placement.ways,
            placement.margin,
        )

    def rows(self, position: int) -> int:
        """Samples of which a rank does a part."""
        if SAMPLE not in self.work.dims or not self.samples:
            return self.samples
        dim = self.work.dims.index(SAMPLE)
        return len(self.done[position][dim]) // max(1, self.work.shape[dim] // self.samples)

    def owned(self, output: int) -> Boxes:
        """What each rank is asked for of an output: disjoint or identical boxes."""
        return self.layout.boxes(self.layer.outputs[output], self.samples)

    def held(self, output: int) -> Boxes:
        """What each rank makes of an output."""
        spec = self.layer.outputs[output]
        return tuple(grown(box, spec, self.layout, self.margin) for box in self.owned(output))


@dataclass(frozen=True, slots=True)
class TileLayer(LayerDivision):
    """A layer of a block: what each rank does of it for one tile, or (the hull) for all of them.

    Attributes:
        made: by output, what each rank has of it; boxes may overlap, as nobody is asked for them.
    """

    made: tuple[Boxes, ...] = ()

    def owned(self, output: int) -> Boxes:
        """What each rank makes of an output."""
        return self.made[output]

    def held(self, output: int) -> Boxes:
        """The same."""
        return self.made[output]


@dataclass(frozen=True, slots=True, eq=False)
class BlockDivision:
    """A block of a stage, for one number of samples.

    Attributes:
        layers: by name, in order.
        tiles: of each rank, one after the other; in the n-th division every rank is at its n-th tile.
        ends: values that are handed on.
        summed: those of them that are sums over the tiles (of reductions, such as a loss).
        wanted: by value from outside of the block, what each rank reads of it for all its tiles.
    """

    layers: tuple[str, ...]
    tiles: tuple[Division, ...]
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
        return layer.owned(output)

    def held(self, value: str) -> Boxes:
        """What each rank has of a value: of one from outside, as much as its layers read."""
        if self.makes(value):
            layer, output = self._maker(value)
            return layer.held(output)
        if value not in self._outside:
            self._outside[value] = read_by(value, self.layers.values(), self.num_ranks)
        return self._outside[value]

    def wanted(self, reader: str, index: int) -> Boxes:
        """What each rank gets of input ``index`` of a layer: what it needs inside the tensor."""
        layer = self.layers[reader]
        return tuple(_inside(box, layer.inputs[index]) for box in layer.needed[index])

    def moves(self, reader: str, index: int) -> tuple[Transfer, ...]:
        """What ranks (by position) send each other so that all have input ``index`` of layer ``reader``."""
        value = self.layers[reader].layer.inputs[index]
        return self.moves_to(value, self.wanted(reader, index))

    def moves_to(self, value: str, wanted: Boxes) -> tuple[Transfer, ...]:
        """The same so that all have what is ``wanted`` of ``value``; nothing of what comes from outside the stage."""
        if not self.makes(value):
            return ()
        owned, held = self.owned(value), self.held(value)
        moves = transfers(dict(enumerate(owned)), dict(enumerate(wanted)))
        return tuple(
            Transfer(move.src, move.dst, part)
            for move in moves
            if move.src != move.dst
            for part in subtract(move.box, held[move.dst])
        )

    def _maker(self, value: str) -> tuple[LayerDivision, int]:
        name, output = output_of(value)
        return self.layers[name], output


def layer_division(
    graph: Graph, layer: Layer, values: Mapping[str, TensorSpec], placement: Placement, samples: int
) -> LayerDivision:
    """How ``placement`` divides ``layer`` of ``graph``, whose ``values`` are indexed once."""
    return LayerDivision.of(*graph.layer_at(layer, samples, values), placement, samples)


def read_by(value: str, layers: Iterable[LayerDivision], num_ranks: int) -> Boxes:
    """The hull of what each rank's ``layers`` read of ``value``; nothing is empty boxes.

    Along dims that a layer is not cut along it takes the value whole.  (A strided window may skip the last row: those
    few bytes are worth less than a contiguous message, and a tensor of the shape that layers were made for.)
    """
    hulls: list[Box | None] = [None] * num_ranks
    num_dims = 0
    for layer, index in _readers(value, layers):
        spec = layer.inputs[index]
        num_dims = len(spec.shape)
        for position, box in enumerate(layer.needed[index]):
            inside = intersect(box, whole(spec.shape))
            if inside is not None:
                hulls[position] = hull(hulls[position], _whole_but(layer, spec, inside))
    nothing = tuple(Interval(0, 0) for _ in range(num_dims))
    return tuple(nothing if box is None else box for box in hulls)


def grown(box: Box, spec: TensorSpec, layout: Layout, margin: int) -> Box:
    """``box`` with ``margin`` more rows on each side along the dims of space that are cut, inside the tensor."""
    if not margin or not all(map(len, box)):
        return box
    return tuple(
        Interval(max(0, interval.start - margin), min(extent, interval.stop + margin))
        if dim in SPACE and dim in layout.cuts
        else interval
        for dim, interval, extent in zip(spec.dims, box, spec.shape, strict=True)
    )


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
    if layer.ways > 1:  # its first input is cut along channels, whatever they are called there
        return box
    return tuple(
        interval if dim in layer.layout.cuts else Interval(0, extent)
        for dim, interval, extent in zip(spec.dims, box, spec.shape, strict=True)
    )


def _inside(box: Box, spec: TensorSpec) -> Box:
    inside = intersect(box, whole(spec.shape))
    return tuple(Interval(0, 0) for _ in spec.shape) if inside is None else inside


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
                owned = self._plain[name].owned(output)[position]
                wanted[value] = _tile(owned, self._specs[value].dims, grid, at)
        return read_back((each.layer for each in self.layers), self._specs, wanted, works).done


def _block_division(
    graph: Graph, block: Block, plain: Mapping[str, LayerDivision], samples: int, num_ranks: int
) -> BlockDivision:
    """The tiles of a block; ``plain``: how its layers' ends are divided over the ranks."""
    reader, grid, tiles = BlockReader(graph, block.layers, plain, samples), dict(block.tiles), []
    for place in product(*(range(parts) for parts in grid.values())):
        done_by_rank = [
            reader.done(position, grid, dict(zip(grid, place, strict=True))) for position in range(num_ranks)
        ]
        layers = {each.layer.name: _tile_layer(each, done_by_rank, grid) for each in reader.layers}
        tiles.append(Division(layers, num_ranks, samples))
    read = {value: [read_by(value, tile.layers.values(), num_ranks) for tile in tiles] for value in reader.outside}
    hulls = {value: tuple(_hull(column) for column in zip(*boxes, strict=True)) for value, boxes in read.items()}
    return BlockDivision(block.layers, tuple(tiles), reader.ends, reader.summed, hulls)


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


def _tile_layer(plain: LayerDivision, done_by_rank: list[Mapping[str, Box]], grid: Mapping[str, int]) -> TileLayer:
    """A layer for one tile; ``done_by_rank``: the boxes of each layer, by rank."""
    layer, relation = plain.layer, kind(plain.layer.kind)
    nothing = tuple(Interval(0, 0) for _ in plain.work.shape)
    done = tuple(each.get(layer.name, nothing) for each in done_by_rank)
    read = [relation.input_boxes(layer, plain.inputs, box) for box in done]
    return TileLayer(
        layer,
        plain.inputs,
        plain.samples,
        plain.work,
        Layout({**plain.layout.cuts, **{dim: (0, 1) for dim in grid if dim not in plain.layout.cuts}}),
        done,
        done,
        tuple(done.index(box) == position and volume(box) > 0 for position, box in enumerate(done)),
        tuple(tuple(boxes[index] for boxes in read) for index in range(len(plain.inputs))),
        plain.weights,
        made=tuple(
            plain.owned(index)
            if relation.REDUCTION == "sum"
            else tuple(made_box(box, plain.work, spec) for box in done)
            for index, spec in enumerate(layer.outputs)
        ),
    )


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


def _hull_of(plain: LayerDivision, tiles: list[LayerDivision]) -> TileLayer:
    """A layer of a block as the rest of the stage sees it: what it does and reads for all tiles."""
    done = tuple(_hull(column) for column in zip(*(each.done for each in tiles), strict=True))
    needed = tuple(
        tuple(_hull(column) for column in zip(*(each.needed[index] for each in tiles), strict=True))
        for index in range(len(plain.inputs))
    )
    made = tuple(plain.owned(index) for index in range(len(plain.layer.outputs)))
    return TileLayer(
        plain.layer,
        plain.inputs,
        plain.samples,
        plain.work,
        tiles[0].layout,
        plain.own,
        done,
        plain.is_first,
        needed,
        plain.weights,
        made=made,
    )
