"""The pieces of tensors that a part of a layer reads and uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, fx
from torch.nn import functional

from planner.ir.box import Box, Interval, intersect, volume, whole
from planner.ir.graph import SAMPLE, Graph, Layer, TensorSpec
from planner.ir.profile import PartShape
from planner.layers import kind
from profiler.part_arguments import LocalWork, local_reads

INPUT, PARAMETER, BUFFER = "input", "parameter", "buffer"
_SPACE = ("depth", "height", "width")

ValueOf = Callable[[fx.Node], Any]
"""What a node was in a pass over the whole network."""


class NoPieceError(Exception):
    """A part reads nothing of a tensor that its operator needs."""


@dataclass(frozen=True, slots=True, eq=False)
class Operand:
    """A piece of an input, parameter or buffer (``role``)."""

    value: Tensor
    role: str


@dataclass(eq=False)
class Pieces:
    """What of each tensor a part reads.

    Attributes:
        layer: for the samples of the whole pass.
        box: of the work.
        reads, uses: of each input and parameter.
    """

    value_of: ValueOf
    layer: Layer
    work: TensorSpec
    box: Box
    reads: tuple[Box, ...]
    uses: dict[str, Box]
    turn: Iterator[int]
    cut: frozenset[int]
    input_shapes: tuple[tuple[int, ...], ...]
    found: dict[tuple[fx.Node, Box], Operand] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: Graph, value_of: ValueOf, samples: int, name: str, shape: PartShape) -> Pieces:
        values, layer = graph.values(), graph.by_name()[name]
        layer = replace(layer, outputs=tuple(spec.at(samples, graph.samples) for spec in layer.outputs))
        inputs = tuple(values[each].at(samples, graph.samples) for each in layer.inputs)
        relation = kind(layer.kind)
        work = relation.work(layer, inputs)
        box = part_box(work, samples, shape)
        parameters = tuple(graph.parameters[each] for each in layer.parameters)
        uses = dict(zip(layer.parameters, relation.weight_boxes(layer, parameters, box), strict=True))
        reads = relation.input_boxes(layer, inputs, box)
        cut = frozenset(k for k, extent in enumerate(work.shape) if work.dims[k] != SAMPLE and len(box[k]) < extent)
        shapes = tuple(spec.shape for spec in inputs)
        return cls(value_of, layer, work, box, reads, uses, iter(range(len(reads))), cut, shapes)

    def local(self, arguments: dict[str, Any]) -> LocalWork:
        """For choosing arguments; afterwards the first input is read as these want it."""
        work = LocalWork(self.layer, self.box, self.cut, self.input_shapes[0], self.reads[0], arguments)
        self.reads = (local_reads(work), *self.reads[1:])
        return work

    def operand(self, node: fx.Node) -> Any:
        """The piece of what ``node`` is; numbers as they are.  To be asked in the order of the layer's inputs."""
        value = self.value_of(node)
        if not isinstance(value, Tensor):
            return value
        role, box = self._place(node, value)
        key = node, box
        if key not in self.found:
            piece = _piece(value, box) if volume(box) else self._nothing(value)
            self.found[key] = Operand(piece, role)
        return self.found[key]

    def _nothing(self, value: Tensor) -> Tensor:
        """Of an input whose part of a concatenation is another rank's."""
        dim = self.layer.attributes.get("dim")
        shape = [0 if k == dim else len(interval) for k, interval in enumerate(self.box)]
        return value.new_empty(shape).requires_grad_(value.requires_grad)

    def _place(self, node: fx.Node, value: Tensor) -> tuple[str, Box]:
        if node.op != "get_attr":
            return INPUT, self.reads[next(self.turn)]
        if node.target in self.uses:
            return PARAMETER, self.uses[node.target]
        channel = self.work.dims.index("channel") if "channel" in self.work.dims else 0
        if self.layer.kind == "batch_norm" and tuple(value.shape) == (self.work.shape[channel],):
            return BUFFER, (self.box[channel],)
        return BUFFER, whole(tuple(value.shape))


def part_box(work: TensorSpec, samples: int, shape: PartShape) -> Box:
    """The part of the work: in the middle along dims of space, at the start along others."""
    extents = iter(shape.part)
    box = []
    for dim, extent in zip(work.dims, work.shape, strict=True):
        if dim == SAMPLE:
            box.append(Interval(0, shape.samples * max(1, extent // samples)))
            continue
        wanted = next(extents)
        start = (extent - wanted) // 2 if dim in _SPACE else 0
        box.append(Interval(start, start + wanted))
    return tuple(box)


def _piece(value: Tensor, box: Box) -> Tensor:
    """``value`` in ``box``, with zeros where that lies outside."""
    inside = intersect(box, whole(tuple(value.shape)))
    if inside is None:
        raise NoPieceError(f"nothing of {tuple(value.shape)} lies in {box}")
    piece = value.detach()[tuple(slice(interval.start, interval.stop) for interval in inside)]
    margins = [(have.start - want.start, want.stop - have.stop) for have, want in zip(inside, box, strict=True)]
    if any(before or after for before, after in margins):
        piece = functional.pad(piece, [margin for pair in reversed(margins) for margin in pair])
    return piece.clone().requires_grad_(value.requires_grad)
