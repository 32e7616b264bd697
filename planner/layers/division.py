"""How a stage of several ranks divides its layers: what every rank does, holds, reads and uses of each.  Pure integers.

A layer's placement says how its work is cut.  Everything else follows from its access relation:

    own      the part of the work that the layout gives a rank
    done     the part it does: ``own``, grown by the halo margin along the dims of space that are cut
    held     of each output, what ``done`` makes; ``owned`` is the part that others ask this rank for
    needed   of each input, what ``done`` reads; it may reach outside the tensor, where padding is
    weights  of each parameter, what ``done`` uses; ranks with equal boxes share its gradient

Values that come from outside of the stage (graph inputs, other stages) are held by each rank as far as its layers read
them, so that nothing of them moves inside the stage.  The planner's arrays (``planner.costs.shards.option``) say the
same for many layouts at once; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from planner.ir.box import Box, Interval, Transfer, hull, intersect, subtract, transfers, whole
from planner.ir.graph import SAMPLE, Graph, Layer, TensorSpec, producer
from planner.ir.layout import Layout
from planner.ir.plan import Decision, Placement
from planner.layers import kind
from planner.layers.contraction import contraction_of

SPACE = ("depth", "height", "width")
"""Dims along which a rank may work beyond its part."""

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


class Division:
    """The layers of one stage, divided over its ranks, for micro-batches of ``samples``.

    Attributes:
        layers: by name, in order.
        num_ranks: of the stage.
        sizes: by name, those of the graph that vary beside the number of samples.
        number: tells the divisions of a plan that are in use apart; the same on all ranks of the stage.
    """

    def __init__(
        self,
        layers: Mapping[str, LayerDivision],
        num_ranks: int,
        samples: int,
        sizes: Mapping[str, int] | None = None,
        number: int | None = None,
    ) -> None:
        self.layers, self.num_ranks, self.samples, self.sizes = layers, num_ranks, samples, sizes or {}
        self.number = number
        self._outside: dict[str, Boxes] = {}

    @classmethod
    def of(
        cls,
        graph: Graph,
        decision: Decision,
        stage: int,
        samples: int,
        sizes: Mapping[str, int] | None = None,
        number: int | None = None,
    ) -> Division:
        """The division that a plan says, of ``graph`` in the shapes of a micro-batch."""
        by_name, values = graph.by_name(), graph.values()
        found = {
            name: layer_division(graph, by_name[name], values, decision.layers[name], samples)
            for name in decision.layers_of(stage)
        }
        return cls(found, len(decision.stages[stage].ranks), samples, sizes, number)

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
        if not self.makes(value):
            return ()
        owned, held, wanted = self.owned(value), self.held(value), self.wanted(reader, index)
        found = transfers(dict(enumerate(owned)), dict(enumerate(wanted)))
        return tuple(
            Transfer(move.src, move.dst, part)
            for move in found
            if move.src != move.dst
            for part in subtract(move.box, held[move.dst])
        )

    def _maker(self, value: str) -> tuple[LayerDivision, int]:
        name, _, output = value.partition(":")
        return self.layers[name], int(output or 0)


def layer_division(
    graph: Graph, layer: Layer, values: Mapping[str, TensorSpec], placement: Placement, samples: int
) -> LayerDivision:
    """How ``placement`` divides ``layer`` of ``graph``, whose ``values`` are indexed once."""
    sized = replace(layer, outputs=tuple(spec.at(samples, graph.samples) for spec in layer.outputs))
    inputs = tuple(values[name].at(samples, graph.samples) for name in layer.inputs)
    parameters = tuple(graph.parameters[name] for name in layer.parameters)
    return LayerDivision.of(sized, inputs, parameters, placement, samples)


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
    a sum over its ranks.
    """
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
