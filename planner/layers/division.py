"""How a stage of several ranks divides its layers: what every rank does, holds, reads and uses of each.

The boxes of a layer are those of :mod:`planner.layers.shards` under the placement that a plan gives it, as tuples of
intervals.  Values that come from outside of the stage (graph inputs, other stages) are held by each rank as far as its
layers read them, so that nothing of them moves inside the stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Self

from planner.ir.box import Box, Boxes, Interval, Transfer, hull, inside, subtract, volume
from planner.ir.extras import extras, required
from planner.ir.graph import SAMPLE, Graph, Layer, TensorSpec, output_of, producer
from planner.ir.layout import Layout
from planner.ir.plan import Block, Decision, Placement
from planner.ir.planner_extra import PlannerExtra
from planner.layers._kinds import kind
from planner.layers.boxes import as_tuples, boxes_of, transfers
from planner.layers.contraction import Contraction, refused
from planner.layers.shards import Shards, shards_of
from planner.layers.sized import SizedLayer


@dataclass(frozen=True, slots=True)
class LayerDivision:
    """One layer of a stage, for one number of samples; what is said by rank goes by its position in the stage.

    Attributes:
        layer: with the outputs it has for ``samples``.
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
        sized = shards.sized
        sharding = shards.options[option]
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


class Division:
    """The layers of one stage, divided over its ranks, for micro-batches of ``samples``.

    Attributes:
        layers: by name, in order.
        num_ranks: of the stage.
        sizes: by name, those of the graph that vary beside the number of samples.
        number: tells the divisions of a plan that are in use apart; the same on all ranks of the stage.
    """

    def __init__(self, layers: Mapping[str, LayerDivision], num_ranks: int, samples: int) -> None:
        self.layers = layers
        self.num_ranks = num_ranks
        self.samples = samples
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
        blocks: Sequence[Block] = (),
    ) -> Division:
        """That of a stage whose layers are ``placements``, in the graph's order, some of them run in ``blocks``.

        Raises:
            UnsupportedModelError: there are blocks, and no extra knows what a stage does in blocks.
        """
        by_name = graph.by_name()
        values = graph.values()
        divided = {
            name: layer_division(graph, by_name[name], values, each, samples) for name, each in placements.items()
        }
        plain = cls(divided, num_ranks, samples)
        if not blocks:
            return plain
        in_blocks = (extra.division_in_blocks(graph, plain, blocks) for extra in extras(PlannerExtra))
        return required(in_blocks, "planner", "the division of a stage in blocks")

    def in_use(self, sizes: Mapping[str, int], number: int | None) -> Self:
        """The same for batches of those ``sizes``; other divisions in use have other numbers."""
        division = copy(self)
        division.sizes = sizes
        division.number = number
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

    def parts_of(self, layer: str) -> Sequence[LayerDivision]:
        """What is run of a layer, one after the other: all of it at once, or a part for each part of its stage."""
        return (self.layers[layer],)

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


def overlap(graph: Graph, decision: Decision, stage: int) -> float:
    """What the ranks of a stage compute more than once, as a share of its work (floating-point operations) done once.

    Rows beyond a part (``Placement.margin``), and what parts of a stage and ranks compute each for themselves.
    """
    division = Division.of(graph, decision, stage, max(decision.micro_batches))
    once = done = 0.0
    for name, layer in division.layers.items():
        flops = float(kind(layer.layer.kind).forward_flops(layer.layer, layer.inputs))
        own = sum(volume(box) for box, first in zip(layer.own, layer.is_first, strict=True) if first)
        made = sum(
            volume(box)
            for part in division.parts_of(name)
            for box, counts in zip(part.done, layer.is_first, strict=True)
            if counts
        )
        once = once + flops
        done = done + flops * made / max(1, own)
    return done / once - 1 if once else 0.0


def layer_division(
    graph: Graph,
    layer: Layer,
    values: Mapping[str, TensorSpec],
    placement: Placement,
    samples: int,
    sites: Mapping[str, int] | None = None,
) -> LayerDivision:
    """How ``placement`` divides ``layer`` of ``graph``; ``values`` and ``sites`` as of :meth:`Graph.layer_at`."""
    return LayerDivision.of(*graph.layer_at(layer, samples, values, sites), placement, samples)


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
        if spec.has_sites:
            return rows_read(spec, (each.layout for each, _ in _readers(value, layers)), layer.samples, num_ranks)
        num_dims = len(spec.shape)
        for position, box in enumerate(layer.needed[index]):
            part = inside(box, spec.shape)
            if volume(part):
                hulls[position] = hull(hulls[position], _whole_but(layer, spec, part))
    return _filled(hulls, num_dims)


def rows_read(spec: TensorSpec, layouts: Iterable[Layout], samples: int, num_ranks: int) -> Boxes:
    """The hull of the rows of a sparse tensor that each rank's layers read, which are divided by ``layouts``."""
    hulls: list[Box | None] = [None] * num_ranks
    for layout in layouts:
        for position, box in enumerate(as_tuples(boxes_of(layout, spec, samples))):
            if volume(box):
                hulls[position] = hull(hulls[position], box)
    return _filled(hulls, len(spec.shape))


def _filled(hulls: Sequence[Box | None], num_dims: int) -> Boxes:
    """Nothing as an empty box."""
    nothing = tuple(Interval(0, 0) for _ in range(num_dims))
    return tuple(nothing if box is None else box for box in hulls)


def divides(decision: Decision, stage: int, graph: Graph) -> bool:
    """Whether the ranks of a stage divide its layers along other dims than samples, or each layer otherwise.

    A stage that is cut by samples alone is divided as well if it makes a term of a loss that other layers read: that is
    a sum over its ranks.  Where ranks divide gradients (ZeRO-2, 3) it is not: each has the terms of its own samples, as
    each micro-batch has.  One with blocks is divided, also on one rank.
    """
    own = decision.stages[stage]
    if len(own.ranks) < 2:
        return bool(own.blocks)
    return has_layouts(decision, stage) or (own.level <= 1 and _makes_term(decision, stage, graph))


def has_layouts(decision: Decision, stage: int) -> bool:
    """Whether the layers of ``stage`` are not all cut alike along samples, or some are run in blocks."""
    placed = [decision.layers[name] for name in decision.layers_of(stage)]
    return (
        bool(decision.stages[stage].blocks)
        or len({tuple(each.cuts.items()) for each in placed}) > 1
        or any(set(each.cuts) - {SAMPLE} or each.ways != 1 or each.margin for each in placed)
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
