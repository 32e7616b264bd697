"""Windows, paddings, slices, interpolations of every shape: torch finds in the box all it needs, and needs it all."""

from __future__ import annotations

import random
from fractions import Fraction
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from planner.ir.box import Interval, volume, whole
from planner.ir.graph import Attribute, Layer, TensorSpec
from planner.layers import kind
from tests.planner.layers.oracle import assert_reads_no_more, outside_spoilt, random_boxes, slices, spec_of

SPACE = {3: "width", 4: "height width", 5: "depth height width"}
CONVS = (F.conv1d, F.conv2d, F.conv3d)
TRANSPOSED = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
MAX_POOLS = (F.max_pool1d, F.max_pool2d, F.max_pool3d)
AVERAGE_POOLS = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)
EXTENT = {1: 13, 2: 9, 3: 7}
WINDOW = ("kernel", "stride", "padding", "dilation")
ONE = Interval(0, 1)


def numbers(rng: random.Random, low: int, high: int, space: int) -> tuple[int, ...]:
    return tuple(rng.randint(low, high) for _ in range(space))


def random_data(*shape: int) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(shape, dtype=torch.float64)


def row(extent: int) -> TensorSpec:
    """One channel of one sample along the width."""
    return spec_of(torch.empty(1, 1, extent), "sample channel width")


def read(layer_kind: str, attributes: dict[str, Attribute], extents: tuple[int, int], *box: int) -> Interval:
    """What of a row of the first extent elements [start, stop) of a row of the second read."""
    layer = Layer("layer", layer_kind, ("x",), (row(extents[1]),), (), attributes)
    return kind(layer_kind).input_boxes(layer, (row(extents[0]),), (ONE, ONE, Interval(*box)))[0][2]


def check(layer_kind, data, run, attributes, parameters=(), output_dims="", count=6, is_smallest=None) -> None:
    """Random boxes of the output, each beside torch; ``is_smallest``: of a box of the output (all of them if None)."""
    output = run([data], parameters)
    dims = f"sample channel {SPACE[data.dim()]}"
    layer = Layer("layer", layer_kind, ("x",), (spec_of(output, output_dims or dims),), (), attributes)
    for box in random_boxes(tuple(output.shape), random.Random(str(attributes)), count):
        smallest = is_smallest is None or is_smallest(box)
        assert_reads_no_more(layer, [data], (spec_of(data, dims),), list(parameters), run, box, smallest)


def check_conv(space, kernel, stride, padding, dilation, groups) -> None:
    def run(inputs, weights):
        return CONVS[space - 1](inputs[0], *weights, stride, padding, dilation, groups)

    attributes = {**dict(zip(WINDOW, (kernel, stride, padding, dilation), strict=True)), "groups": groups}
    parameters = random_data(6, 4 // groups, *kernel), random_data(6)
    check("conv", random_data(2, 4, *(EXTENT[space],) * space), run, attributes, parameters)


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("kernel", [1, 2, 3, 4, 5])
def test_a_convolution_in_one_dim_reads_its_box(kernel: int, stride: int) -> None:
    for padding, dilation, groups in product((0, 1, 2), (1, 2), (1, 2)):
        check_conv(1, (kernel,), (stride,), (padding,), (dilation,), groups)


@pytest.mark.parametrize("space", [2, 3])
@pytest.mark.parametrize("seed", range(8))
def test_a_convolution_in_more_dims_reads_its_box(space: int, seed: int) -> None:
    rng = random.Random(seed)
    kernel = numbers(rng, 1, 5 if space == 2 else 3, space)
    stride = numbers(rng, 1, 3, space)
    padding = numbers(rng, 0, 2, space)
    dilation = numbers(rng, 1, 2, space)
    check_conv(space, kernel, stride, padding, dilation, rng.choice((1, 2)))


@pytest.mark.parametrize("space", [1, 2, 3])
@pytest.mark.parametrize("seed", range(16))
def test_a_transposed_convolution_reads_its_box(space: int, seed: int) -> None:
    rng = random.Random(seed)
    kernel = numbers(rng, 1, 5, space)
    stride = numbers(rng, 1, 3, space)
    dilation = numbers(rng, 1, 2, space)
    groups = rng.choice((1, 2))
    padding = tuple(min(p, d * (k - 1)) for p, d, k in zip(numbers(rng, 0, 2, space), dilation, kernel, strict=True))
    extra = tuple(rng.randrange(max(s, d)) for s, d in zip(stride, dilation, strict=True))

    def run(inputs, weights):
        return TRANSPOSED[space - 1](inputs[0], *weights, stride, padding, extra, groups, dilation)

    attributes = dict(zip(WINDOW, (kernel, stride, padding, dilation), strict=True))
    attributes |= {"groups": groups, "output_padding": extra}
    parameters = random_data(4, 6 // groups, *kernel), random_data(6)
    check("transposed_conv", random_data(2, 4, *(4 + rng.randrange(3),) * space), run, attributes, parameters)


@pytest.mark.parametrize("stride", [1, 2, 3, 4])
@pytest.mark.parametrize("dilation", [1, 2, 3])
def test_a_transposed_convolution_reads_no_input_that_no_tap_carries_to_the_outputs(stride: int, dilation: int) -> None:
    for kernel in (1, 2, 3, 4):
        for padding in range(min(3, dilation * (kernel - 1)) + 1):
            extent = 5 * stride - 2 * padding + dilation * (kernel - 1) + 1
            attributes = {name: (n,) for name, n in zip(WINDOW, (kernel, stride, padding, dilation), strict=True)}
            for start in range(extent):
                for stop in range(start + 1, min(extent, start + 4) + 1):
                    reached = [
                        index
                        for index in range(-12, 18)
                        if any(start <= index * stride - padding + dilation * tap < stop for tap in range(kernel))
                    ]
                    expected = Interval(min(reached), max(reached) + 1) if reached else Interval(0, 0)
                    assert read("transposed_conv", {**attributes, "groups": 1}, (6, extent), start, stop) == expected


@pytest.mark.parametrize("space", [1, 2, 3])
@pytest.mark.parametrize("seed", range(12))
def test_a_pool_reads_its_box(space: int, seed: int) -> None:
    rng = random.Random(seed)
    kernel = numbers(rng, 1, 4, space)
    stride = numbers(rng, 1, 3, space)
    padding = tuple(rng.randint(0, k // 2) for k in kernel)
    is_max = seed % 2 == 0
    ceil_mode = rng.random() < 0.5
    dilation = numbers(rng, 1, 2, space) if is_max else (1,) * space

    def run(inputs, weights):
        if is_max:
            return MAX_POOLS[space - 1](inputs[0], kernel, stride, padding, dilation, ceil_mode)
        return AVERAGE_POOLS[space - 1](inputs[0], kernel, stride, padding, ceil_mode)

    attributes = {**dict(zip(WINDOW, (kernel, stride, padding, dilation), strict=True)), "ceil_mode": ceil_mode}
    check("pool", random_data(2, 3, *(EXTENT[space],) * space), run, attributes)


@pytest.mark.parametrize("pool", [F.adaptive_avg_pool2d, F.adaptive_max_pool2d])
@pytest.mark.parametrize("size", [(1, 1), (3, 5), (7, 7), (9, 2)])
def test_an_adaptive_pool_reads_its_bins(pool, size: tuple[int, int]) -> None:
    check("adaptive_pool", random_data(2, 3, 7, 9), lambda x, _: pool(x[0], size), {})


def test_a_mean_over_space_is_a_sum_of_what_its_input_is_cut_into() -> None:
    source = spec_of(torch.empty(4, 3, 6, 5), "sample channel height width")
    relation = kind("global_pool")
    for shape in ((4, 3), (4, 3, 1, 1)):
        layer = Layer("pool", "global_pool", ("x",), (TensorSpec(source.dims[: len(shape)], shape, "float32"),))
        assert relation.work(layer, (source,)) == source
        for rows, read in (((3, 6), 2 * 3 * 5), ((3, 3), 0)):
            box = (Interval(0, 2), Interval(1, 2), Interval(*rows), Interval(0, 5))
            assert [volume(each) for each in relation.input_boxes(layer, (source,), box)] == [read]
        assert relation.forward_flops(layer, (source,)) == volume(whole(source.shape))


PADDED = {
    "constant": (0, 1, 2, 7, -1),
    "reflect": (0, 1, 2, 4),
    "replicate": (0, 1, 3, 6, -1),
    "circular": (0, 1, 3, 5),
}


@pytest.mark.parametrize("mode", PADDED)
@pytest.mark.parametrize("space", [1, 2, 3])
def test_a_padding_reads_its_box(mode: str, space: int) -> None:
    rng = random.Random(f"{mode} {space}")
    every = [[pair] for pair in product(PADDED[mode], repeat=2)]
    some = [[(rng.choice(PADDED[mode]), rng.choice(PADDED[mode])) for _ in range(space)] for _ in range(6)]
    for pairs in every if space == 1 else some:
        before, after = zip((0, 0), (0, 0), *pairs, strict=True)
        flat = [number for pair in reversed(pairs) for number in pair]
        attributes = {"before": before, "after": after, "mode": mode}
        check("pad", random_data(2, 2, *(5, 6, 5)[:space]), lambda x, _, flat=flat: F.pad(x[0], flat, mode), attributes)


def test_channels_may_be_padded_as_well() -> None:
    attributes = {"before": (0, 1, 0, 0), "after": (0, 2, 0, 0), "mode": "constant"}
    check("pad", random_data(2, 3, 4, 4), lambda x, _: F.pad(x[0], (0, 0, 0, 0, 1, 2)), attributes)


@pytest.mark.parametrize("start", [0, 1, 3])
@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("dim", [1, 2, 3])
def test_a_slice_reads_its_box(start: int, step: int, dim: int) -> None:
    attributes = {"dim": dim, "starts": (start,), "step": step, "drops": False}
    check(
        "slice", random_data(2, 5, 7, 6), lambda x, _: x[0][(slice(None),) * dim + (slice(start, 5, step),)], attributes
    )


@pytest.mark.parametrize(("dim", "names"), [(1, "sample height width"), (2, "sample channel width")])
def test_one_element_reads_its_box(dim: int, names: str) -> None:
    attributes = {"dim": dim, "starts": (3,), "step": 1, "drops": True}
    check("slice", random_data(2, 5, 7, 6), lambda x, _: x[0].select(dim, 3), attributes, output_dims=names)


def test_parts_of_different_lengths_read_the_divided_dim_whole_and_others_by_place() -> None:
    source = spec_of(torch.empty(4, 7, 6), "sample channel width")
    box = (Interval(1, 3), ONE, Interval(2, 4))
    attributes: dict[str, Attribute] = {"dim": 1, "starts": (0, 2), "step": 1, "drops": False}
    outputs = tuple(TensorSpec(source.dims, (4, extent, 6), "float32") for extent in (2, 5))
    dropped = {**attributes, "starts": tuple(range(7)), "drops": True}
    elements = (TensorSpec(("sample", "width"), (4, 6), "float32"),) * 7
    for made, of_it, part in ((outputs, attributes, box), (elements, dropped, (box[0], box[2]))):
        layer = Layer("split", "slice", ("x",), made, (), of_it)
        assert kind("slice").input_boxes(layer, (source,), part) == ((box[0], Interval(0, 7), box[2]),)


MODES = ("nearest", "nearest-exact", "linear")


def interpolation(mode: str, space: int, aligned: bool, factors: tuple[float, ...] | None) -> dict[str, Attribute]:
    found: dict[str, Attribute] = {"mode": mode, "space": space, "align_corners": aligned}
    if factors:
        ratios = [factor.as_integer_ratio() for factor in factors]
        found["factor_numerators"], found["factor_denominators"] = (tuple(each) for each in zip(*ratios, strict=True))
    return found


def check_interpolation(mode, shape, aligned=None, size=None, factors=None) -> None:
    space = len(shape) - 2
    name = {"linear": {1: "linear", 2: "bilinear", 3: "trilinear"}[space], "cubic": "bicubic"}.get(mode, mode)

    def run(inputs, parameters):
        return F.interpolate(inputs[0], size, factors, mode=name, align_corners=aligned)

    data = random_data(*shape)
    output = tuple(run([data], []).shape)
    is_taken_for_whole = any(b in (a, 2 * a) for a, b in zip(shape[2:], output[2:], strict=True) if factors)
    extents = zip(shape[2:], output[2:], factors or (None,) * space, strict=True)
    steps = [step_of(mode, inputs, outputs, aligned, factor) for inputs, outputs, factor in extents]

    def is_smallest(box):
        is_exact = not any(is_rounded(o, *step) for o, step in zip(box[2:], steps, strict=True))
        return is_exact and (not is_taken_for_whole or set(factors) <= {1.0, 2.0})

    attributes = interpolation(mode, space, bool(aligned), factors)
    check("upsample", data, run, attributes, count=8, is_smallest=is_smallest)


def is_rounded(outputs: Interval, step: Fraction, before: Fraction, after: Fraction) -> bool:
    """Whether an end lies on an element, but for what floats make of the step: then two elements may be read."""
    is_exact = step.denominator & (step.denominator - 1) == 0
    ends = [(o + before) * step - after for o in (outputs.start, outputs.stop - 1)]
    return not is_exact and any(abs(end - round(end)) < 1e-4 for end in ends)


def step_of(mode, inputs, outputs, aligned, factor) -> tuple[Fraction, Fraction, Fraction]:
    """Of one dim, the distance of outputs, and what is added before and taken away after."""
    if aligned:
        return Fraction(inputs - 1, max(1, outputs - 1)), Fraction(0), Fraction(0)
    step = Fraction(inputs, outputs) if factor is None else 1 / Fraction(factor).limit_denominator(1000)
    before, after = {"nearest": (0, 0), "nearest-exact": (1, 0)}.get(mode, (1, 1))
    return step, Fraction(before, 2), Fraction(after, 2)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("extent", [1, 2, 5, 8])
def test_an_interpolation_to_any_size_reads_its_box(mode: str, extent: int) -> None:
    for size, aligned in product((1, 2, 3, 4, 7, 10, 16, 23), (None, True) if mode == "linear" else (None,)):
        check_interpolation(mode, (1, 1, extent), aligned, size=(size,))


@pytest.mark.parametrize("factor", [0.3, 0.5, 0.7, 1.1, 1.5, 2.0, 2.6, 3.0, 4.0])
@pytest.mark.parametrize("mode", MODES)
def test_an_interpolation_by_any_factor_reads_its_box(mode: str, factor: float) -> None:
    for extent, aligned in product((4, 7, 10), (None, True) if mode == "linear" else (None,)):
        check_interpolation(mode, (2, 1, extent), aligned, factors=(factor,))


@pytest.mark.parametrize(
    ("shape", "to"),
    [
        ((2, 2, 5, 6), {"size": (9, 4)}),
        ((2, 2, 5, 6), {"size": (10, 12)}),
        ((2, 2, 5, 6), {"factors": (2.0, 1.7)}),
        ((2, 2, 9, 7), {"factors": (0.4, 0.6)}),
        ((2, 2, 3, 4, 5), {"size": (7, 4, 9)}),
        ((2, 2, 3, 4, 5), {"factors": (2.0, 2.0, 2.0)}),
        ((2, 2, 3, 4, 5), {"factors": (1.3, 2.0, 2.5)}),
    ],
)
def test_an_interpolation_in_more_dims_reads_its_box(shape: tuple[int, ...], to: dict[str, tuple[float, ...]]) -> None:
    for mode in MODES if len(shape) == 5 else (*MODES, "cubic"):
        for aligned in (False, True) if mode in ("linear", "cubic") else (None,):
            check_interpolation(mode, shape, aligned, **to)


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
@pytest.mark.parametrize(("extent", "size"), [(54, 76), (62, 94), (81, 114), (997, 3001), (1000, 2100), (1021, 640)])
def test_every_element_is_in_the_box_however_floats_round_its_position(mode: str, extent: int, size: int) -> None:
    attributes = interpolation(mode, 1, False, None)
    boxes = [read("upsample", attributes, (extent, size), o, o + 1) for o in range(size)]
    assert max(map(len, boxes)) <= 2
    assert sum(map(len, boxes)) < 1.05 * size
    for dtype in (torch.float32, torch.float64):
        found = F.interpolate(torch.arange(extent, dtype=dtype)[None, None], size, mode=mode)[0, 0].tolist()
        assert all(box.start <= index < box.stop for index, box in zip(found, boxes, strict=True))


@pytest.mark.parametrize(("extent", "size"), [(62, 94), (81, 114), (997, 3001), (1021, 640), (700, 701)])
def test_lines_between_elements_are_in_the_box_in_either_precision(extent: int, size: int) -> None:
    rng = random.Random(size)
    attributes = interpolation("linear", 1, False, None)
    for dtype in (torch.float32, torch.float64):
        data = random_data(1, 1, extent).to(dtype)
        expected = F.interpolate(data, size, mode="linear")
        for _ in range(60):
            start = rng.randrange(size)
            part = Interval(start, min(size, start + rng.randint(1, 3)))
            box = (ONE, ONE, read("upsample", attributes, (extent, size), part.start, part.stop))
            found = F.interpolate(outside_spoilt(data, box), size, mode="linear")[slices((ONE, ONE, part))]
            assert torch.equal(found, expected[slices((ONE, ONE, part))]), (box, part)


def test_flops_of_an_interpolation_count_what_is_read() -> None:
    small, large = (spec_of(torch.empty(2, 3, extent, extent), "sample channel height width") for extent in (4, 8))
    layer = Layer("up", "upsample", ("x",), (large,), (), interpolation("linear", 2, False, None))
    assert kind("upsample").forward_flops(layer, (small,)) == 2 * 2 * 3 * 64 * 4


def test_flops_of_a_grouped_convolution_and_its_adjoint_are_equal() -> None:
    small, large = (spec_of(torch.empty(2, c, n), "sample channel width") for c, n in ((6, 4), (4, 9)))
    attributes = {"kernel": (3,), "stride": (2,), "padding": (0,), "dilation": (1,), "groups": 2}
    for name, source, made in (("conv", large, small), ("transposed_conv", small, large)):
        layer = Layer("conv", name, ("x",), (made,), attributes=attributes)
        assert kind(name).forward_flops(layer, (source,)) == 2 * (2 * 6 * 4) * (4 // 2) * 3
