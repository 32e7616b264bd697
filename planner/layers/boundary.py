"""What stages hand to each other, derived from the access relations of the layers on both sides.

Planner, simulator, checker and runtime all get their messages here, so that what is priced is what is sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from planner.ir.box import Box, volume
from planner.ir.extras import extras, required
from planner.ir.graph import BYTES_PER_ELEMENT, Graph, Layer, TensorSpec, producer, spec_of_sites, value_name
from planner.ir.layout import Layout
from planner.ir.lazy import once
from planner.ir.plan import Block, Decision, Placement, Size, samples_in
from planner.ir.planner_extra import PlannerExtra
from planner.ir.program import Message, Part, Program, Route
from planner.ir.schedule import Edge, StageGraph
from planner.layers._samples import prepared_inputs
from planner.layers.boxes import as_tuples, boxes_of, transfers
from planner.layers.division import Division, layer_division, read_by, rows_read

_DETACH = "aten.detach.default"
_ADD = "aten.add.Tensor"
_BROADCAST = "aten.broadcast_tensors.default"


def loss_terms(graph: Graph) -> frozenset[str]:
    """Losses that are added up to the loss, each once, and their sums: their gradient is the loss's own.

    So the stage that makes one needs no message to begin its backward: losses that are local to stages.
    """
    makers = {layer.name: layer for layer in graph.layers}
    reads = Counter[str]()
    for layer in graph.layers:
        reads.update(layer.inputs)
    values = graph.values()
    summed = set[str]()
    left = [graph.loss]
    while left:
        maker = makers.get(producer(left.pop()))
        if maker is None or maker.attributes.get("op") != _ADD or "alpha" in maker.attributes:
            continue
        terms = [v for v in maker.inputs if reads[v] == 1 and _is_summed(makers.get(producer(v)), values[v])]
        summed.update(terms)
        left += terms
    return frozenset(summed)


def _is_summed(maker: Layer | None, value: TensorSpec) -> bool:
    is_kind = maker is not None and (maker.kind == "loss" or maker.attributes.get("op") == _ADD)
    return is_kind and value.is_float and not value.shape


def without_gradient(graph: Graph) -> frozenset[str]:
    """Values of which no stage sends a gradient back: detached ones, what is made of these alone, terms of the loss."""
    detached: set[str] = set()
    for layer in graph.layers:
        op = layer.attributes.get("op")
        inputs = layer.inputs
        if op == _BROADCAST and len(inputs) == len(layer.outputs):  # each output is one input: some may be targets
            silent = [value in detached or value in graph.inputs for value in inputs]
        else:
            is_made_of = bool(inputs) and not layer.parameters and all(value in detached for value in inputs)
            silent = [op == _DETACH or is_made_of] * len(layer.outputs)
        detached.update(value_name(layer.name, output) for output, is_silent in enumerate(silent) if is_silent)
    return frozenset(detached) | loss_terms(graph)


class OrderedAxis(Protocol):
    """An axis of the graph's values along which a rank works through a micro-batch part by part.

    A part reads what the parts before it made of a layer, and nothing of those after it.
    """

    def box_of(self, value: str, spec: TensorSpec, size: Size) -> Box:
        """What of a value, of ``spec`` at its number of samples, belongs to a part; all of it for whole samples."""

    def division(self, decision: Decision, stage: int, samples: int) -> Division:
        """How parts divide the layers of a stage of one rank, as if they were ranks."""

    def placement(self, layer: str, lengths: tuple[int, ...]) -> Placement:
        """How a layer's work is cut, likewise."""


def ordered_axis(graph: Graph, lengths: tuple[int, ...], ranks: Sequence[tuple[int, ...]]) -> OrderedAxis:
    """Along which micro-batches are cut into parts of these lengths, in stages on ``ranks``.

    Raises:
        UnsupportedModelError: they cannot be.
    """
    axes = (extra.ordered_axis(graph, lengths, ranks) for extra in extras(PlannerExtra))
    return required(axes, "planner", "an axis along which micro-batches are cut into parts")


@dataclass(frozen=True)
class Boundaries:
    """A graph with layers assigned to stages; answers who owns, needs and sends what.

    Attributes:
        stage_of: stage by layer name.
        layouts: layout by stage.
        ranks: ranks by stage.
        of_layer: layout by layer, where it is not its stage's.
        placed: placement by layer, where that says more than a layout.
        silent: values without a gradient that comes back, see :func:`without_gradient`.
        blocks: by stage, layers that are run in blocks.
        parts: into how many parts micro-batches are cut along an axis with an order.
        axis: where that lies, if they are.
        sites: of the micro-batch that is asked for, by the name of the number; empty: as many as the captured samples
            have on average.
    """

    graph: Graph
    stage_of: Mapping[str, int]
    layouts: tuple[Layout, ...]
    ranks: tuple[tuple[int, ...], ...]
    _values: Mapping[str, TensorSpec] = field(repr=False)
    _readers: Mapping[tuple[str, int], tuple[Layer, ...]] = field(repr=False)
    of_layer: Mapping[str, Layout] = field(default_factory=dict)
    placed: Mapping[str, Placement] = field(default_factory=dict)
    silent: frozenset[str] = frozenset()
    blocks: Mapping[int, tuple[Block, ...]] = field(default_factory=dict)
    parts: int = 1
    axis: OrderedAxis | None = None
    sites: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        graph: Graph,
        stage_of: Mapping[str, int],
        layouts: Iterable[Layout],
        ranks: Iterable[tuple[int, ...]],
        of_layer: Mapping[str, Layout] | None = None,
        placed: Mapping[str, Placement] | None = None,
        blocks: Mapping[int, tuple[Block, ...]] | None = None,
    ) -> Boundaries:
        """Index the graph once."""
        readers: dict[tuple[str, int], list[Layer]] = {}
        for layer in graph.layers:
            for value in dict.fromkeys(layer.inputs):
                readers.setdefault((value, stage_of[layer.name]), []).append(layer)
        readers_by_stage = {key: tuple(layers) for key, layers in readers.items()}
        return cls(
            graph,
            stage_of,
            tuple(layouts),
            tuple(ranks),
            graph.values(),
            readers_by_stage,
            of_layer or {},
            placed or {},
            without_gradient(graph),
            {stage: of_stage for stage, of_stage in (blocks or {}).items() if of_stage},
        )

    @classmethod
    def of_decision(cls, graph: Graph, decision: Decision) -> Boundaries:
        """The boundaries of a plan.

        Raises:
            UnsupportedModelError: it cuts micro-batches into parts, and the graph cannot be run in such.
        """
        stages = range(len(decision.stages))
        stage_of = {name: placement.stage for name, placement in decision.layers.items()}
        layouts = [decision.layout_of(stage) for stage in stages]
        own = {
            name: placed.layout for name, placed in decision.layers.items() if placed.layout != layouts[placed.stage]
        }
        placed = {name: each for name, each in decision.layers.items() if each.ways > 1 or each.margin}
        boundaries = cls.of(
            graph,
            stage_of,
            layouts,
            (stage.ranks for stage in decision.stages),
            own,
            placed,
            {number: stage.blocks for number, stage in enumerate(decision.stages)},
        )
        return boundaries.in_parts(decision.token_slices)

    def in_parts(self, lengths: tuple[int, ...]) -> Boundaries:
        """The same with micro-batches cut into parts of these lengths; as they are where there are none.

        Raises:
            UnsupportedModelError: as :func:`ordered_axis`.
        """
        if not lengths:
            return self
        return replace(self, parts=len(lengths), axis=ordered_axis(self.graph, lengths, self.ranks))

    def at_sites(self, sites: Mapping[str, int], layouts: tuple[Layout, ...]) -> Boundaries:
        """The same of a micro-batch with so many sites, which stages divide by ``layouts``."""
        return replace(self, sites=sites, layouts=layouts)

    def layout(self, layer: str) -> Layout:
        """How the layer is divided over the ranks of its stage."""
        return self.of_layer.get(layer) or self.layouts[self.stage_of[layer]]

    def edges(self) -> tuple[Edge, ...]:
        """Which values go from which stage to which, ordered by stages; values in order of making.

        Graph inputs are not among them: each rank loads its own part.
        """
        crossing: dict[tuple[int, int], dict[str, None]] = {}
        order = {value: index for index, value in enumerate(self._values)}
        for layer in self.graph.layers:
            for value in layer.inputs:
                src = self.stage_of.get(producer(value))
                dst = self.stage_of[layer.name]
                if src is not None and src != dst:
                    crossing.setdefault((src, dst), {})[value] = None
        return tuple(
            Edge(src, dst, values, any(map(self._is_answered, values)))
            for (src, dst), names in sorted(crossing.items())
            for values in [tuple(sorted(names, key=order.__getitem__))]
        )

    def prepares(self) -> tuple[int, ...]:
        """The stages that read inputs which a host prepares (:func:`planner.layers.prepared_inputs`)."""
        prepared = set(prepared_inputs(self.graph))
        reading = (layer.name for layer in self.graph.layers if prepared.intersection(layer.inputs))
        return tuple(sorted({self.stage_of[name] for name in reading}))

    def owned(self, value: str, samples: int) -> dict[int, Box]:
        """The box of ``value`` that each rank of its stage makes, for a micro-batch of ``samples``."""
        maker = producer(value)
        boxes = boxes_of(self.layout(maker), self.spec(value, samples), samples)
        return dict(zip(self.ranks[self.stage_of[maker]], as_tuples(boxes), strict=True))

    def needed(self, value: str, stage: int, samples: int) -> dict[int, Box]:
        """The box of ``value`` that each rank of ``stage`` reads (:func:`planner.layers.division.read_by`)."""
        ranks = self.ranks[stage]
        if stage in self.blocks:
            return dict(zip(ranks, self._division(stage, samples).held(value), strict=True))
        readers = self._readers.get((value, stage), ())
        if self._values[value].has_sites:
            spec = self.spec(value, samples)
            boxes = rows_read(spec, (self._placement(each).layout for each in readers), samples, len(ranks))
            return dict(zip(ranks, boxes, strict=True))
        layers = [
            layer_division(self.graph, each, self._values, self._placement(each), samples, self.sites)
            for each in readers
        ]
        return dict(zip(ranks, read_by(value, layers, len(ranks)), strict=True))

    def messages(self, edge: Edge, size: Size) -> tuple[Message, ...]:
        """What crosses ``edge`` for a micro-batch, or a part, of a ``size``, hand-overs inside a rank included."""
        parts: dict[tuple[int, int], list[Part]] = {}
        for value in edge.values:
            spec = self.spec(value, samples_in(size))
            if self.axis is None:
                owned = self.owned(value, samples_in(size))
                needed = self.needed(value, edge.dst, samples_in(size))
            else:  # between stages of one rank: what belongs to the part, all where nothing does
                box = self.axis.box_of(value, spec, size)
                owned, needed = (dict.fromkeys(self.ranks[stage], box) for stage in (edge.src, edge.dst))
            for move in transfers(owned, needed):
                num_bytes = volume(move.box) * BYTES_PER_ELEMENT[spec.dtype]
                part = Part(value, move.box, num_bytes, _is_apart(move.box, owned[move.src]))
                parts.setdefault((move.src, move.dst), []).append(part)
        return tuple(
            Message(src, dst, tuple(of_pair), tuple(part for part in of_pair if self._is_answered(part.value)))
            for (src, dst), of_pair in sorted(parts.items())
        )

    def program(self, decision: Decision) -> Program:
        """The decision's action lists, bound to the messages they move.

        Raises:
            ValueError: an entry of the program is not an action.
        """
        edges = self.edges()
        stages = self.stages(edges, decision.sizes)
        return Program(decision.rows(), stages, self.ranks, self.routes(edges, decision.sizes))

    def stages(self, edges: tuple[Edge, ...], sizes: tuple[Size, ...]) -> StageGraph:
        """The stages as a DAG, through which micro-batches, or parts, of these sizes pass."""
        return StageGraph(len(self.ranks), len(sizes), edges, self.prepares(), self.parts)

    def routes(self, edges: tuple[Edge, ...], sizes: tuple[Size, ...]) -> dict[Route, tuple[Message, ...]]:
        """The messages of every edge and micro-batch, or part."""
        by_size = {(edge.src, edge.dst, size): self.messages(edge, size) for edge in edges for size in set(sizes)}
        return {
            (edge.src, edge.dst, index): by_size[edge.src, edge.dst, size]
            for edge in edges
            for index, size in enumerate(sizes)
        }

    @once
    def _division(self, stage: int, samples: int) -> Division:
        """Of a stage with blocks."""
        placed = {
            layer.name: self._placement(layer) for layer in self.graph.layers if self.stage_of[layer.name] == stage
        }
        return Division.placed(self.graph, placed, len(self.ranks[stage]), samples, self.blocks[stage])

    def _placement(self, layer: Layer) -> Placement:
        placed = self.placed.get(layer.name)
        return placed or Placement(self.stage_of[layer.name], self.layout(layer.name).cuts)

    def _is_answered(self, value: str) -> bool:
        """Whether a gradient of it comes back."""
        return self._values[value].is_float and value not in self.silent

    @once
    def spec(self, value: str, samples: int) -> TensorSpec:
        """What ``value`` is in a micro-batch of ``samples``."""
        return spec_of_sites(self._values[value], samples, self.graph.samples, self.sites)


def _is_apart(part: Box, box: Box) -> bool:
    """Whether the elements of ``part`` do not follow one another in a tensor of ``box``, the last dim fastest."""
    cut = [dim for dim, (one, other) in enumerate(zip(part, box, strict=True)) if one != other]
    return bool(cut) and (len(cut) > 1 or any(len(interval) > 1 for interval in part[: cut[0]]))
