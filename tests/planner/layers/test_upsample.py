"""Interpolations of every sort and size: torch finds in the input box all it needs, and needs all of it."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F

from planner.ir.box import Interval
from planner.ir.graph import Attribute, Layer
from planner.layers import kind
from tests.planner.layers.oracle import assert_reads_no_more, outside_spoilt, random_boxes, slices, spec_of

SPACE = {3: "width", 4: "height width", 5: "depth height width"}
LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def attributes_of(mode: str, space: int, aligned: bool, factors: tuple[float, ...] | None) -> dict[str, Attribute]:
    found: dict[str, Attribute] = {"mode": mode, "space": space, "align_corners": aligned}
    if factors:
        ratios = [factor.as_integer_ratio() for factor in factors]
        found["factor_numerators"], found["factor_denominators"] = (tuple(each) for each in zip(*ratios, strict=True))
    return found


def check(mode, shape, aligned=None, size=None, factors=None, count=8) -> None:
    space = len(shape) - 2
    data = torch.randn(shape, dtype=torch.float64)
    name = LINEAR[space] if mode == "linear" else "bicubic" if mode == "cubic" else mode

    def run(inputs, parameters):
        return F.interpolate(inputs[0], size, factors, mode=name, align_corners=aligned)

    dims = f"sample channel {SPACE[len(shape)]}"
    output = run([data], [])
    attributes = attributes_of(mode, space, bool(aligned), factors)
    layer = Layer("up", "upsample", ("x",), (spec_of(output, dims),), (), attributes)
    is_taken_for_whole = any(b in (a, 2 * a) for a, b in zip(shape[2:], output.shape[2:], strict=True) if factors)
    extents = zip(shape[2:], output.shape[2:], factors or (None,) * space, strict=True)
    steps = [step_of(mode, inputs, outputs, aligned, factor) for inputs, outputs, factor in extents]
    for box in random_boxes(tuple(output.shape), random.Random(f"{mode} {shape} {size} {factors}"), count):
        is_smallest = not any(is_rounded(o, *step) for o, step in zip(box[2:], steps, strict=True))
        is_smallest &= not is_taken_for_whole or set(factors) <= {1.0, 2.0}
        assert_reads_no_more(layer, [data], (spec_of(data, dims),), [], run, box, is_smallest)


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


@pytest.mark.parametrize("extent", [1, 2, 5, 8])
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "linear"])
def test_one_dim_to_any_size(mode: str, extent: int) -> None:
    for size in (1, 2, 3, 4, 7, 10, 16, 23):
        check(mode, (1, 1, extent), size=(size,))
        if mode == "linear":
            check(mode, (1, 1, extent), aligned=True, size=(size,))


@pytest.mark.parametrize("factor", [0.3, 0.5, 0.7, 1.1, 1.5, 2.0, 2.6, 3.0, 4.0])
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "linear"])
def test_one_dim_by_any_factor(mode: str, factor: float) -> None:
    for extent in (4, 7, 10):
        check(mode, (2, 1, extent), factors=(factor,))
        if mode == "linear":
            check(mode, (2, 1, extent), aligned=True, factors=(factor,))


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "linear", "cubic"])
@pytest.mark.parametrize("aligned", [False, True])
def test_two_dims(mode: str, aligned: bool) -> None:
    corners = (aligned,) if mode in ("linear", "cubic") else (None,)
    for corner in corners:
        check(mode, (2, 2, 5, 6), corner, size=(9, 4))
        check(mode, (2, 2, 5, 6), corner, size=(10, 12))
        check(mode, (2, 2, 5, 6), corner, factors=(2.0, 1.7))
        check(mode, (2, 2, 9, 7), corner, factors=(0.4, 0.6))


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "linear"])
def test_three_dims(mode: str) -> None:
    check(mode, (2, 2, 3, 4, 5), size=(7, 4, 9))
    check(mode, (2, 2, 3, 4, 5), factors=(2.0, 2.0, 2.0))
    check(mode, (2, 2, 3, 4, 5), True if mode == "linear" else None, factors=(1.3, 2.0, 2.5))


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
@pytest.mark.parametrize(("extent", "size"), [(54, 76), (62, 94), (81, 114), (997, 3001), (1000, 2100), (1021, 640)])
def test_every_element_is_in_the_box_however_floats_round_its_position(mode: str, extent: int, size: int) -> None:
    spec, output = (spec_of(torch.empty(1, 1, each), "sample channel width") for each in (extent, size))
    layer = Layer("up", "upsample", ("x",), (output,), (), attributes_of(mode, 1, False, None))
    one = Interval(0, 1)
    boxes = [kind("upsample").input_boxes(layer, (spec,), (one, one, Interval(o, o + 1)))[0][2] for o in range(size)]
    assert max(map(len, boxes)) <= 2
    assert sum(map(len, boxes)) < 1.05 * size
    for dtype in (torch.float32, torch.float64):
        read = F.interpolate(torch.arange(extent, dtype=dtype)[None, None], size, mode=mode)[0, 0].tolist()
        assert [
            o for o, (index, box) in enumerate(zip(read, boxes, strict=True)) if int(index) not in as_range(box)
        ] == []


def as_range(interval: Interval) -> range:
    return range(interval.start, interval.stop)


@pytest.mark.parametrize(("extent", "size"), [(62, 94), (81, 114), (997, 3001), (1021, 640), (700, 701)])
def test_lines_between_elements_are_in_the_box_in_either_precision(extent: int, size: int) -> None:
    spec, output = (spec_of(torch.empty(1, 1, each), "sample channel width") for each in (extent, size))
    layer = Layer("up", "upsample", ("x",), (output,), (), attributes_of("linear", 1, False, None))
    rng = random.Random(size)
    for dtype in (torch.float32, torch.float64):
        data = torch.randn(1, 1, extent, dtype=dtype)
        expected = F.interpolate(data, size, mode="linear")
        for _ in range(60):
            start = rng.randrange(size)
            box = (Interval(0, 1), Interval(0, 1), Interval(start, min(size, start + rng.randint(1, 3))))
            read = kind("upsample").input_boxes(layer, (spec,), box)[0]
            found = F.interpolate(outside_spoilt(data, read), size, mode="linear")[slices(box)]
            assert torch.equal(found, expected[slices(box)]), (box, read)


def test_the_picture_in_the_docstring_is_right() -> None:
    spec, output = (spec_of(torch.empty(1, 1, extent), "sample channel width") for extent in (5, 10))
    layer = Layer("up", "upsample", ("x",), (output,), (), attributes_of("linear", 1, False, (2.0,)))
    box = kind("upsample").input_boxes(layer, (spec,), (Interval(0, 1), Interval(0, 1), Interval(2, 4)))[0]
    assert f"output [2, 4)  reads  input {box[2]}" in (kind("upsample").__doc__ or "")


def test_flops_count_what_is_read() -> None:
    spec, output = (spec_of(torch.empty(2, 3, extent, extent), "sample channel height width") for extent in (4, 8))
    layer = Layer("up", "upsample", ("x",), (output,), (), attributes_of("linear", 2, False, None))
    assert kind("upsample").forward_flops(layer, (spec,)) == 2 * 2 * 3 * 64 * 4
