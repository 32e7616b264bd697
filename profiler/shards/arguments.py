"""What an operator is called with to do a part of its layer, on inputs that hold just what the part reads.

convolution, pool       no padding along dims that are cut: what the window reads is there, zeros where it was padding
transposed convolution  padding that cuts the part out of what its inputs reach
grouped convolution     the groups of its filters
adaptive pool, upsample the part's output size
view                    the part's shape
any other               as for the whole

The pieces of tensors that a part of a layer reads and uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx
from torch.nn import functional

from planner.ir.box import Box, Interval, intersect, volume, whole
from planner.ir.graph import SAMPLE, Attribute, Graph, Layer, TensorSpec
from planner.ir.profile import PartShape
from planner.layers import kind

INPUT = "input"
PARAMETER = "parameter"
BUFFER = "buffer"
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
class PartReads:
    """What of each tensor a part reads.

    Attributes:
        layer: for the samples of the whole pass.
        box: of the work.
        cut: dims of the work along which it is less than all.
        reads, uses: of each input and parameter; reads may reach outside.
    """

    value_of: ValueOf
    layer: Layer
    work: TensorSpec
    box: Box
    reads: tuple[Box, ...]
    uses: dict[str, Box]
    turn: Iterator[int]
    cut: frozenset[int]
    operands: dict[tuple[fx.Node, Box], Operand] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: Graph, value_of: ValueOf, samples: int, name: str, shape: PartShape) -> PartReads:
        layer, inputs, parameters = graph.layer_at(graph.by_name()[name], samples, graph.values())
        relation = kind(layer.kind)
        work = relation.work(layer, inputs)
        box = part_box(work, samples, shape)
        uses = dict(zip(layer.parameters, relation.weight_boxes(layer, parameters, box), strict=True))
        reads = relation.input_boxes(layer, inputs, box)
        cut = frozenset(k for k, extent in enumerate(work.shape) if work.dims[k] != SAMPLE and len(box[k]) < extent)
        part = cls(value_of, layer, work, box, reads, uses, iter(range(len(reads))), cut)
        if layer.kind in _WINDOWS and inputs:  # all rows of the first input along dims that are not cut, padding apart
            whole_dims = enumerate(zip(reads[0], whole(inputs[0].shape), strict=True))
            first = tuple(each if k < part.first_of_space or k in cut else rows for k, (each, rows) in whole_dims)
            part.reads = (first, *reads[1:])
        return part

    def numbers(self, name: str) -> tuple[int, ...]:
        """An attribute with a number a dim of space."""
        attribute = self.layer.attributes.get(name, ())
        return attribute if isinstance(attribute, tuple) else ()

    @property
    def extents(self) -> list[int]:
        """Of the part."""
        return [len(interval) for interval in self.box]

    @property
    def first_of_space(self) -> int:
        """The first dim of space."""
        return len(self.box) - len(self.numbers("kernel"))

    @property
    def padding(self) -> list[int]:
        """By dim of space; none along those that are cut."""
        return [0 if self.first_of_space + k in self.cut else each for k, each in enumerate(self.numbers("padding"))]

    def operand(self, node: fx.Node) -> Any:
        """The piece of what ``node`` is; numbers as they are.  To be asked in the order of the layer's inputs."""
        value = self.value_of(node)
        if not isinstance(value, Tensor):
            return value
        role, box = self._place(node, value)
        key = node, box
        if key not in self.operands:
            piece = _piece(value, box) if volume(box) else self._nothing(value)
            self.operands[key] = Operand(piece, role)
        return self.operands[key]

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
    """The part of the work: in the middle along dims of space, behind ``before`` tokens, at the start along others."""
    extents = iter(shape.part)
    box = []
    for dim, extent in zip(work.dims, work.shape, strict=True):
        if dim == SAMPLE:
            box.append(Interval(0, shape.samples * max(1, extent // samples)))
            continue
        wanted = next(extents)
        start = (extent - wanted) // 2 if dim in _SPACE else shape.before if wanted < extent else 0
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


LocalArguments = dict[str, Any]


def local_arguments(work: PartReads, arguments: LocalArguments) -> LocalArguments | None:
    """Arguments that differ from the whole layer's, by name; None where the operator cannot do the part alone."""
    rule = _RULES.get(work.layer.kind)
    return {} if rule is None else rule(work, arguments)


def _conv(work: PartReads, arguments: LocalArguments) -> LocalArguments | None:
    groups = _groups(work)
    return None if groups is None else {"padding": work.padding, "groups": groups}


def _pool(work: PartReads, arguments: LocalArguments) -> LocalArguments | None:
    return {"padding": work.padding}


def _transposed_conv(work: PartReads, arguments: LocalArguments) -> LocalArguments | None:
    groups = _groups(work)
    names = ("kernel", "stride", "padding", "dilation", "output_padding")
    paddings = []
    more = []
    for k, (kernel, stride, padding, dilation, extra) in enumerate(zip(*map(work.numbers, names), strict=True)):
        dim = work.first_of_space + k
        if dim in work.cut:
            reached = (len(work.reads[0][dim]) - 1) * stride + dilation * (kernel - 1) + 1
            cropped = reached - len(work.box[dim])
            padding = -(-cropped // 2)
            extra = cropped % 2
            if cropped < 0 or extra >= max(stride, dilation):
                return None
        paddings.append(padding)
        more.append(extra)
    channel = work.first_of_space - 1
    if groups is None or (groups > 1 and channel in work.cut):
        return None
    return {"padding": paddings, "output_padding": more, "groups": groups}


def _adaptive_pool(work: PartReads, arguments: LocalArguments) -> LocalArguments | None:
    space = len(work.numbers("output_size"))
    return {"output_size": work.extents[len(work.box) - space :]} if space else None


def _upsample(work: PartReads, arguments: LocalArguments) -> LocalArguments | None:
    space = _number(work.layer.attributes.get("space", 0))
    if "output_size" not in arguments:
        return None
    factors = {"scale_factors": None} if "scale_factors" in arguments else {}
    return {"output_size": work.extents[len(work.box) - space :], **factors}


def _reshape(work: PartReads, arguments: LocalArguments) -> LocalArguments | None:
    return {name: work.extents for name in ("size", "shape") if name in arguments}


def _groups(work: PartReads) -> int | None:
    """The groups that the part's filters make up; None where it ends inside of one."""
    groups = work.layer.attributes.get("groups", 1)
    channel = work.first_of_space - 1
    filters = work.layer.outputs[0].shape[channel] // _number(groups)
    if _number(groups) == 1 or channel not in work.cut:
        return _number(groups)
    return None if len(work.box[channel]) % filters else len(work.box[channel]) // filters


def _number(value: Attribute) -> int:
    return int(value) if isinstance(value, (int, float)) else 1


_RULES: Mapping[str, Callable[[PartReads, LocalArguments], LocalArguments | None]] = {
    "conv": _conv,
    "transposed_conv": _transposed_conv,
    "pool": _pool,
    "adaptive_pool": _adaptive_pool,
    "upsample": _upsample,
    "reshape": _reshape,
}
_WINDOWS = frozenset({"conv", "pool", "transposed_conv"})
