"""Random convolutions that are divided at random, and what one device makes of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from planner.ir.box import Box, Interval, Transfer, intersect, whole
from planner.ir.graph import Layer, TensorSpec
from planner.ir.layout import Layout
from planner.layers import kind
from planner.layers.division import moves_between
from runtime.pipeline.routing import slices
from runtime.spatial.convolution.overlapped import ConvPart
from runtime.spatial.convolution.terms import ConvWindow
from tests.oracles.boxes import grown
from tests.oracles.boxes import parts as parts_of

SPACE = ("depth", "height", "width")


@dataclass(frozen=True)
class ConvCase:
    """A convolution, the layouts of its input and output, and how much more than their part ranks hold and make.

    Attributes:
        space: extents of the input.
        channels: of input and output.
    """

    window: ConvWindow
    output_padding: tuple[int, ...]
    space: tuple[int, ...]
    samples: int
    channels: tuple[int, int]
    layouts: tuple[Layout, Layout]
    margins: tuple[int, int] = (0, 0)
    seed: int = 0

    @property
    def options(self) -> tuple[Any, ...]:
        """Of ``aten::convolution``."""
        one = self.window
        return one.stride, one.padding, one.dilation, one.transposed, self.output_padding, one.groups

    @property
    def num_ranks(self) -> int:
        return self.layouts[0].num_parts

    @property
    def layer(self) -> Layer:
        one = self.window
        attributes = {
            "kernel": one.kernel,
            "stride": one.stride,
            "padding": one.padding,
            "dilation": one.dilation,
            "groups": one.groups,
        }
        name = "transposed_conv" if one.transposed else "conv"
        return Layer("conv", name, ("x",), (self._spec(self.output_shape),), ("conv.weight", "conv.bias"), attributes)

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (self.samples, self.channels[0], *self.space)

    @property
    def output_shape(self) -> tuple[int, ...]:
        return (self.samples, self.channels[1], *self.output_space)

    @property
    def output_space(self) -> tuple[int, ...]:
        one = self.window
        found = []
        for extent, k, s, p, d, more in zip(
            self.space, one.kernel, one.stride, one.padding, one.dilation, self.output_padding, strict=True
        ):
            if one.transposed:
                found.append((extent - 1) * s - 2 * p + d * (k - 1) + 1 + more)
            else:
                found.append((extent + 2 * p - d * (k - 1) - 1) // s + 1)
        return tuple(found)

    def owned(self) -> tuple[Box, ...]:
        return parts_of(self.layouts[0], self._spec(self.input_shape), self.samples)

    def held(self) -> tuple[Box, ...]:
        spec = self._spec(self.input_shape)
        return tuple(grown(box, spec, self.layouts[0], self.margins[0]) for box in self.owned())

    def done(self) -> tuple[Box, ...]:
        spec = self._spec(self.output_shape)
        own = parts_of(self.layouts[1], spec, self.samples)
        return tuple(grown(box, spec, self.layouts[1], self.margins[1]) for box in own)

    def needed(self) -> tuple[Box, ...]:
        layer = self.layer
        relation = kind(self.layer.kind)
        return tuple(relation.input_boxes(layer, (self._spec(self.input_shape),), box)[0] for box in self.done())

    def wanted(self) -> tuple[Box, ...]:
        nothing = tuple(Interval(0, 0) for _ in self.input_shape)
        return tuple(intersect(box, whole(self.input_shape)) or nothing for box in self.needed())

    def moves(self) -> tuple[Transfer, ...]:
        return moves_between(self.owned(), self.held(), self.wanted())

    def part(self, rank: int) -> ConvPart:
        return ConvPart(self.window, self.done()[rank], self.needed()[rank], self.channels)

    def weight_boxes(self, rank: int) -> tuple[Box, ...]:
        weight = self.weight_shape
        bias = (self.channels[1],)
        specs = tuple(TensorSpec(tuple(f"dim{dim}" for dim in range(len(s))), s, "float64") for s in (weight, bias))
        return tuple(kind(self.layer.kind).weight_boxes(self.layer, specs, self.done()[rank]))

    @property
    def weight_shape(self) -> tuple[int, ...]:
        first, second = self.channels[::-1] if not self.window.transposed else self.channels
        return (first, second // self.window.groups, *self.window.kernel)

    def _spec(self, shape: tuple[int, ...]) -> TensorSpec:
        return TensorSpec(("sample", "channel", *SPACE[-len(self.space) :]), shape, "float64")


@dataclass
class Tensors:
    """Of one case; ``dys`` is a gradient for what each rank makes, copies included."""

    x: Tensor
    weight: Tensor
    bias: Tensor
    dys: list[Tensor]

    @classmethod
    def of(cls, case: ConvCase, dtype: torch.dtype = torch.float64) -> Tensors:
        generator = torch.Generator().manual_seed(case.seed)

        def random_tensor(shape: Sequence[int]) -> Tensor:
            return torch.randn(tuple(shape), dtype=dtype, generator=generator)

        return cls(
            random_tensor(case.input_shape),
            random_tensor(case.weight_shape),
            random_tensor((case.channels[1],)),
            [random_tensor(tuple(map(len, box))) for box in case.done()],
        )

    def expected(self, case: ConvCase) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """y, dx, dweight and dbias on one device, where gradients of copies count together."""
        y = torch.ops.aten.convolution(self.x, self.weight, self.bias, *case.options)
        dy = torch.zeros_like(y)
        for box, part in zip(case.done(), self.dys, strict=True):
            dy[slices(box, whole(case.output_shape))] += part
        found = torch.ops.aten.convolution_backward(
            dy, self.x, self.weight, [case.channels[1]], *case.options, [True, True, True]
        )
        return (y, *found)


def random_case(numbers: random.Random, transposed: bool = False, largest: int = 14) -> ConvCase:
    """Of everything something: kernels 1 to 7, strides to 3, paddings to 3, dilations, groups, grids, cuts, margins."""
    while True:
        space = numbers.choice((1, 2, 2, 3))
        most = largest if space < 3 else 8
        draw = partial(_drawn, numbers, space)
        groups, width = numbers.choice(((1, 1), (1, 3), (2, 1), (2, 2), (4, 1), (3, 2)))
        channels = (groups * width, groups * numbers.choice((1, 2)))
        stride = draw((1, 1, 2, 3))
        dilation = draw((1, 1, 2))
        window = ConvWindow(draw((1, 2, 3, 3, 4, 5, 6, 7)), stride, draw((0, 1, 1, 2, 3)), dilation, groups, transposed)
        more = tuple(numbers.randrange(max(s, d)) if transposed else 0 for s, d in zip(stride, dilation, strict=True))
        extents = tuple(numbers.randint(1, most) for _ in range(space))
        samples = numbers.choice((1, 2, 3))
        layouts = _layouts(numbers, SPACE[-space:])
        margins = numbers.choice(((0, 0), (0, 0), (0, 0), (1, 0), (2, 1), (0, 2)))
        case = ConvCase(window, more, extents, samples, channels, layouts, margins, numbers.randrange(2**30))
        if all(extent > 0 for extent in case.output_space):
            return case


def _drawn(numbers: random.Random, count: int, options: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(numbers.choice(options) for _ in range(count))


def _layouts(numbers: random.Random, space: tuple[str, ...]) -> tuple[Layout, Layout]:
    ranks = numbers.choice((2, 2, 3, 4, 6, 8))
    first = _layout(numbers, ranks, space)
    if numbers.random() < 0.7:
        return first, first
    return first, _layout(numbers, ranks, (*space, "sample", "channel"))


def _layout(numbers: random.Random, ranks: int, dims: tuple[str, ...]) -> Layout:
    ways = []
    rest = ranks
    chosen = numbers.sample(dims, min(len(dims), numbers.choice((1, 1, 2, 3))))
    for _ in chosen[:-1]:
        ways.append(numbers.choice([k for k in range(1, rest + 1) if rest % k == 0]))
        rest //= ways[-1]
    ways.append(rest)
    cuts = {}
    for dim, parts in zip(chosen, ways, strict=True):
        if numbers.random() < 0.5:
            cuts[dim] = tuple(range(parts + 1))
        else:
            cuts[dim] = (0, *sorted(numbers.randint(0, 12) for _ in range(parts - 1)), 12)
    return Layout(cuts)
