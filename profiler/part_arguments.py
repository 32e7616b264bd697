"""What an operator is called with to do a part of its layer, on inputs that hold just what the part reads.

convolution, pool       no padding along dims that are cut: what the window reads is there, zeros where it was padding
transposed convolution  padding that cuts the part out of what its inputs reach
grouped convolution     the groups of its filters
adaptive pool, upsample the part's output size
view                    the part's shape
any other               as for the whole
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from planner.ir.box import Box, Interval
from planner.ir.graph import Attribute, Layer

Arguments = dict[str, Any]


@dataclass(frozen=True, slots=True)
class LocalWork:
    """A part of a layer, for choosing arguments.

    Attributes:
        layer: with its outputs for the number of samples of the example it is cut from.
        box: the part of the work.
        cut: dims of the work along which it is less than all.
        shape: of the first input.
        reads: of the first input; may reach outside.
        arguments: of the operator for the whole layer, by name.
    """

    layer: Layer
    box: Box
    cut: frozenset[int]
    shape: tuple[int, ...]
    reads: Box
    arguments: Mapping[str, Any]

    def numbers(self, name: str) -> tuple[int, ...]:
        """An attribute with a number a dim of space."""
        found = self.layer.attributes.get(name, ())
        return found if isinstance(found, tuple) else ()

    @property
    def extents(self) -> list[int]:
        """Of the part."""
        return [len(interval) for interval in self.box]

    @property
    def first_of_space(self) -> int:
        """The first dim of space."""
        return len(self.box) - len(self.numbers("kernel"))

    def in_space(self, values: tuple[int, ...], instead: int) -> list[int]:
        """``values``, one a dim of space, with another number along those that are cut."""
        return [instead if self.first_of_space + k in self.cut else value for k, value in enumerate(values)]


def local_arguments(work: LocalWork) -> Arguments | None:
    """Arguments that differ from the whole layer's, by name; None where the operator cannot do the part alone."""
    rule = _RULES.get(work.layer.kind)
    return rule(work) if rule is not None else {}


def local_reads(work: LocalWork) -> Box:
    """What is put together of the first input: all of it along dims of space that are not cut, padding apart."""
    if work.layer.kind not in _WINDOWS:
        return work.reads
    first = work.first_of_space
    return tuple(
        interval if dim < first or dim in work.cut else Interval(0, extent)
        for dim, (interval, extent) in enumerate(zip(work.reads, work.shape, strict=True))
    )


def _conv(work: LocalWork) -> Arguments | None:
    groups = _groups(work)
    return None if groups is None else {"padding": work.in_space(work.numbers("padding"), 0), "groups": groups}


def _pool(work: LocalWork) -> Arguments | None:
    return {"padding": work.in_space(work.numbers("padding"), 0)}


def _transposed_conv(work: LocalWork) -> Arguments | None:
    groups = _groups(work)
    names = ("kernel", "stride", "padding", "dilation", "output_padding")
    paddings, more = [], []
    for k, (kernel, stride, padding, dilation, extra) in enumerate(zip(*map(work.numbers, names), strict=True)):
        dim = work.first_of_space + k
        if dim in work.cut:
            reached = (len(work.reads[dim]) - 1) * stride + dilation * (kernel - 1) + 1
            cropped = reached - len(work.box[dim])
            padding, extra = -(-cropped // 2), cropped % 2
            if cropped < 0 or extra >= max(stride, dilation):
                return None
        paddings.append(padding)
        more.append(extra)
    channel = work.first_of_space - 1
    if groups is None or (groups > 1 and channel in work.cut):
        return None
    return {"padding": paddings, "output_padding": more, "groups": groups}


def _adaptive_pool(work: LocalWork) -> Arguments | None:
    space = len(work.numbers("output_size"))
    return {"output_size": work.extents[len(work.box) - space :]} if space else None


def _upsample(work: LocalWork) -> Arguments | None:
    space = _number(work.layer.attributes.get("space", 0))
    if "output_size" not in work.arguments:
        return None
    factors = {"scale_factors": None} if "scale_factors" in work.arguments else {}
    return {"output_size": work.extents[len(work.box) - space :], **factors}


def _reshape(work: LocalWork) -> Arguments | None:
    return {name: work.extents for name in ("size", "shape") if name in work.arguments}


def _groups(work: LocalWork) -> int | None:
    """The groups that the part's filters make up; None where it ends inside of one."""
    groups, channel = work.layer.attributes.get("groups", 1), work.first_of_space - 1
    filters = work.layer.outputs[0].shape[channel] // _number(groups)
    if _number(groups) == 1 or channel not in work.cut:
        return _number(groups)
    return None if len(work.box[channel]) % filters else len(work.box[channel]) // filters


def _number(value: Attribute) -> int:
    return int(value) if isinstance(value, (int, float)) else 1


_RULES: Mapping[str, Callable[[LocalWork], Arguments | None]] = {
    "conv": _conv,
    "transposed_conv": _transposed_conv,
    "pool": _pool,
    "adaptive_pool": _adaptive_pool,
    "upsample": _upsample,
    "reshape": _reshape,
}
_WINDOWS = frozenset({"conv", "pool", "transposed_conv"})
