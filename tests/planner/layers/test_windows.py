"""Convolutions and pools of every shape: torch in float64 finds in the input box all it needs, and needs all of it."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

from planner.ir.box import Interval
from planner.ir.graph import Layer
from planner.layers import kind
from tests.planner.layers.oracle import assert_reads_no_more, random_boxes, spec_of

SPACE = ("width", "height width", "depth height width")
CONVS = (F.conv1d, F.conv2d, F.conv3d)
TRANSPOSED = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
MAX_POOLS = (F.max_pool1d, F.max_pool2d, F.max_pool3d)
AVERAGE_POOLS = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)
EXTENT = {1: 13, 2: 9, 3: 7}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def numbers(rng: random.Random, low: int, high: int, space: int) -> tuple[int, ...]:
    return tuple(rng.randint(low, high) for _ in range(space))


def check(layer_kind, op, data, attributes, run, parameters, rng, is_smallest=True, count=6):
    output = run([data], parameters)
    dims = f"sample channel {SPACE[data.dim() - 3]}"
    layer = Layer("layer", layer_kind, ("x",), (spec_of(output, dims),), attributes={**attributes, "op": op})
    for box in random_boxes(tuple(output.shape), rng, count):
        assert_reads_no_more(layer, [data], (spec_of(data, dims),), parameters, run, box, is_smallest)


def check_conv(space, kernel, stride, padding, dilation, groups, rng):
    data = torch.randn(2, 4, *(EXTENT[space],) * space, dtype=torch.float64)
    parameters = [torch.randn(6, 4 // groups, *kernel).double(), torch.randn(6).double()]

    def run(inputs, weights):
        return CONVS[space - 1](inputs[0], *weights, stride, padding, dilation, groups)

    attributes = {"kernel": kernel, "stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    check("conv", "aten.convolution.default", data, attributes, run, parameters, rng)


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("kernel", [1, 2, 3, 4, 5])
def test_a_convolution_in_one_dim_reads_its_box(kernel: int, stride: int) -> None:
    rng = random.Random(f"{kernel} {stride}")
    for padding in (0, 1, 2):
        for dilation in (1, 2):
            for groups in (1, 2):
                check_conv(1, (kernel,), (stride,), (padding,), (dilation,), groups, rng)


@pytest.mark.parametrize("space", [2, 3])
@pytest.mark.parametrize("seed", range(8))
def test_a_convolution_in_more_dims_reads_its_box(space: int, seed: int) -> None:
    rng = random.Random(seed)
    kernel, stride = numbers(rng, 1, 5 if space == 2 else 3, space), numbers(rng, 1, 3, space)
    padding, dilation = numbers(rng, 0, 2, space), numbers(rng, 1, 2, space)
    check_conv(space, kernel, stride, padding, dilation, rng.choice((1, 2)), rng)


@pytest.mark.parametrize("space", [1, 2, 3])
@pytest.mark.parametrize("seed", range(16))
def test_a_transposed_convolution_reads_its_box(space: int, seed: int) -> None:
    rng = random.Random(seed)
    kernel, stride = numbers(rng, 1, 5, space), numbers(rng, 1, 3, space)
    dilation, groups = numbers(rng, 1, 2, space), rng.choice((1, 2))
    padding = tuple(min(p, d * (k - 1)) for p, d, k in zip(numbers(rng, 0, 2, space), dilation, kernel, strict=True))
    extra = tuple(rng.randrange(max(s, d)) for s, d in zip(stride, dilation, strict=True))
    data = torch.randn(2, 4, *(4 + rng.randrange(3),) * space, dtype=torch.float64)
    parameters = [torch.randn(4, 6 // groups, *kernel).double(), torch.randn(6).double()]

    def run(inputs, weights):
        return TRANSPOSED[space - 1](inputs[0], *weights, stride, padding, extra, groups, dilation)

    attributes = {"kernel": kernel, "stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    attributes["output_padding"] = extra
    check("transposed_conv", "aten.convolution.default", data, attributes, run, parameters, rng)


@pytest.mark.parametrize("stride", [1, 2, 3, 4])
@pytest.mark.parametrize("dilation", [1, 2, 3])
def test_a_transposed_convolution_reads_no_input_that_no_tap_carries_to_the_outputs(stride: int, dilation: int) -> None:
    spec = spec_of(torch.empty(1, 1, 6), "sample channel width")
    for kernel in (1, 2, 3, 4):
        for padding in range(min(3, dilation * (kernel - 1)) + 1):
            extent = 5 * stride - 2 * padding + dilation * (kernel - 1) + 1
            numbers = {"kernel": kernel, "stride": stride, "padding": padding, "dilation": dilation}
            attributes = {**{name: (number,) for name, number in numbers.items()}, "groups": 1}
            output = spec_of(torch.empty(1, 1, extent), "sample channel width")
            layer = Layer("conv", "transposed_conv", ("x",), (output,), (), attributes)
            for start in range(extent):
                for stop in range(start + 1, min(extent, start + 4) + 1):
                    box = (Interval(0, 1), Interval(0, 1), Interval(start, stop))
                    reached = [
                        index
                        for index in range(-12, 18)
                        if any(start <= index * stride - padding + dilation * tap < stop for tap in range(kernel))
                    ]
                    expected = Interval(min(reached), max(reached) + 1) if reached else Interval(0, 0)
                    assert kind("transposed_conv").input_boxes(layer, (spec,), box)[0][2] == expected


@pytest.mark.parametrize("space", [1, 2, 3])
@pytest.mark.parametrize("seed", range(12))
def test_a_pool_reads_its_box(space: int, seed: int) -> None:
    rng = random.Random(seed)
    kernel, stride = numbers(rng, 1, 4, space), numbers(rng, 1, 3, space)
    padding = tuple(rng.randint(0, k // 2) for k in kernel)
    is_max, ceil_mode = seed % 2 == 0, rng.random() < 0.5
    dilation = numbers(rng, 1, 2, space) if is_max else (1,) * space
    data = torch.randn(2, 3, *(EXTENT[space],) * space, dtype=torch.float64)

    def run(inputs, weights):
        if is_max:
            return MAX_POOLS[space - 1](inputs[0], kernel, stride, padding, dilation, ceil_mode)
        return AVERAGE_POOLS[space - 1](inputs[0], kernel, stride, padding, ceil_mode)

    names = ("kernel", "stride", "padding", "dilation", "ceil_mode")
    attributes = dict(zip(names, (kernel, stride, padding, dilation, ceil_mode), strict=True))
    check("pool", "aten.pool.default", data, attributes, run, [], rng)


@pytest.mark.parametrize("pool", [F.adaptive_avg_pool2d, F.adaptive_max_pool2d])
@pytest.mark.parametrize("size", [(1, 1), (3, 5), (7, 7), (9, 2)])
def test_an_adaptive_pool_reads_its_bins(pool, size: tuple[int, int]) -> None:
    data = torch.randn(2, 3, 7, 9, dtype=torch.float64)
    check("adaptive_pool", "aten.pool", data, {}, lambda x, _: pool(x[0], size), [], random.Random(str(size)))


def test_the_pictures_in_the_docstrings_are_right() -> None:
    for name, stride, padding, kernel, picture in (
        ("conv", 2, 1, 3, "output [2, 4)  reads  input [3, 8)"),
        ("transposed_conv", 2, 1, 3, "output [2, 4)  reads  input [1, 3)"),
        ("pool", 2, 0, 2, "output [2, 4)  reads  input [4, 8)"),
    ):
        attributes = {"kernel": (kernel,), "stride": (stride,), "padding": (padding,), "dilation": (1,), "groups": 1}
        spec = spec_of(torch.empty(1, 1, 9), "sample channel width")
        layer = Layer(name, name, ("x",), (spec,), attributes=attributes)
        output = next(random_boxes((1, 1), random.Random(0), 0))
        box = kind(name).input_boxes(layer, (spec,), (*output, type(output[0])(2, 4)))[0]
        assert picture == f"output [2, 4)  reads  input {box[2]}"
        assert picture in (kind(name).__doc__ or "")


def test_grouped_channels_are_read_by_group() -> None:
    spec = spec_of(torch.empty(1, 8, 5), "sample channel width")
    attributes = {"kernel": (1,), "stride": (1,), "padding": (0,), "dilation": (1,), "groups": 4}
    layer = Layer("conv", "conv", ("x",), (spec_of(torch.empty(1, 12, 5), "sample channel width"),), (), attributes)
    interval = type(next(random_boxes((1,), random.Random(0), 0))[0])
    box = kind("conv").input_boxes(layer, (spec,), (interval(0, 1), interval(4, 7), interval(0, 5)))[0]
    assert box[1] == interval(2, 6)
