"""What moves data along dims: torch in float64 finds in the boxes all it needs, and needs all of it."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

from planner.ir.box import Interval, volume, whole
from planner.ir.graph import Attribute, Layer
from planner.layers import kind
from tests.planner.layers.oracle import assert_reads_no_more, random_boxes, spec_of

SPACE = {3: "width", 4: "height width", 5: "depth height width"}
NUMBERS = {
    "constant": (0, 1, 2, 7, -1),
    "reflect": (0, 1, 2, 4),
    "replicate": (0, 1, 3, 6, -1),
    "circular": (0, 1, 3, 5),
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def check(layer_kind, data, run, attributes: dict[str, Attribute], output_dims="", count=10) -> None:
    output = run([data], [])
    dims = f"sample channel {SPACE[data.dim()]}"
    layer = Layer("layer", layer_kind, ("x",), (spec_of(output, output_dims or dims),), (), attributes)
    for box in random_boxes(tuple(output.shape), random.Random(str(attributes)), count):
        assert_reads_no_more(layer, [data], (spec_of(data, dims),), [], run, box, is_smallest=True)


@pytest.mark.parametrize("mode", NUMBERS)
def test_a_padding_of_one_dim_reads_its_box(mode: str) -> None:
    data = torch.randn(2, 2, 5, dtype=torch.float64)
    for before in NUMBERS[mode]:
        for after in NUMBERS[mode]:
            attributes = {"before": (0, 0, before), "after": (0, 0, after), "mode": mode}
            check("pad", data, lambda x, _, pair=(before, after): F.pad(x[0], pair, mode), attributes)


@pytest.mark.parametrize("mode", NUMBERS)
@pytest.mark.parametrize("space", [2, 3])
def test_a_padding_of_more_dims_reads_its_box(mode: str, space: int) -> None:
    rng = random.Random(f"{mode} {space}")
    data = torch.randn(2, 2, *(5, 6, 5)[:space], dtype=torch.float64)
    for _ in range(6):
        pairs = [(rng.choice(NUMBERS[mode]), rng.choice(NUMBERS[mode])) for _ in range(space)]
        before, after = zip((0, 0), (0, 0), *pairs, strict=True)
        flat = [number for pair in reversed(pairs) for number in pair]
        attributes = {"before": before, "after": after, "mode": mode}
        check("pad", data, lambda x, _, flat=flat: F.pad(x[0], flat, mode), attributes)


def test_channels_may_be_padded_as_well() -> None:
    data = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    attributes = {"before": (0, 1, 0, 0), "after": (0, 2, 0, 0), "mode": "constant"}
    check("pad", data, lambda x, _: F.pad(x[0], (0, 0, 0, 0, 1, 2)), attributes)


def test_the_picture_of_paddings_in_the_docstring_is_right() -> None:
    spec, output = (spec_of(torch.empty(1, 1, extent), "sample channel width") for extent in (5, 9))
    found = {}
    for mode in ("reflect", "replicate", "circular"):
        attributes: dict[str, Attribute] = {"before": (0, 0, 2), "after": (0, 0, 2), "mode": mode}
        layer = Layer("pad", "pad", ("x",), (output,), (), attributes)
        box = (Interval(0, 1), Interval(0, 1), Interval(0, 4))
        found[mode] = kind("pad").input_boxes(layer, (spec,), box)[0][2]
    picture = "input {reflect}  reflected,  {replicate}  replicated,  {circular}  circular".format(**found)
    assert f"output [0, 4)  reads  {picture}" in (kind("pad").__doc__ or "")


@pytest.mark.parametrize("start", [0, 1, 3])
@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("dim", [1, 2, 3])
def test_a_slice_reads_its_box(start: int, step: int, dim: int) -> None:
    data = torch.randn(2, 5, 7, 6, dtype=torch.float64)
    attributes = {"dim": dim, "starts": (start,), "step": step, "drops": False}
    check("slice", data, lambda x, _: x[0][(slice(None),) * dim + (slice(start, 5, step),)], attributes)


@pytest.mark.parametrize(("dim", "names"), [(1, "sample height width"), (2, "sample channel width")])
def test_one_element_reads_its_box(dim: int, names: str) -> None:
    data = torch.randn(2, 5, 7, 6, dtype=torch.float64)
    attributes = {"dim": dim, "starts": (3,), "step": 1, "drops": True}
    check("slice", data, lambda x, _: x[0].select(dim, 3), attributes, names)


def test_parts_of_different_lengths_read_the_divided_dim_whole_and_others_by_place() -> None:
    source = spec_of(torch.empty(4, 7, 6), "sample channel width")
    outputs = tuple(spec_of(torch.empty(4, extent, 6), "sample channel width") for extent in (2, 5))
    attributes: dict[str, Attribute] = {"dim": 1, "starts": (0, 2), "step": 1, "drops": False}
    layer = Layer("split", "slice", ("x",), outputs, (), attributes)
    box = (Interval(1, 3), Interval(0, 1), Interval(2, 4))
    assert kind("slice").input_boxes(layer, (source,), box) == ((Interval(1, 3), Interval(0, 7), Interval(2, 4)),)
    dropped = {**attributes, "starts": (0, 1, 2, 3, 4, 5, 6), "drops": True}
    layer = Layer("unbind", "slice", ("x",), (spec_of(torch.empty(4, 6), "sample width"),) * 7, (), dropped)
    assert kind("slice").input_boxes(layer, (source,), (box[0], box[2])) == ((box[0], Interval(0, 7), box[2]),)


def test_a_mean_over_space_is_a_sum_of_what_its_input_is_cut_into() -> None:
    source = spec_of(torch.empty(4, 3, 6, 5), "sample channel height width")
    for output in (
        spec_of(torch.empty(4, 3), "sample channel"),
        spec_of(torch.empty(4, 3, 1, 1), " ".join(source.dims)),
    ):
        layer = Layer("pool", "global_pool", ("x",), (output,))
        assert kind("global_pool").work(layer, (source,)) == source
        box = (Interval(0, 2), Interval(1, 2), Interval(3, 6), Interval(0, 5))
        assert kind("global_pool").input_boxes(layer, (source,), box) == (box,)
        empty = (Interval(0, 2), Interval(1, 2), Interval(3, 3), Interval(0, 5))
        assert [volume(each) for each in kind("global_pool").input_boxes(layer, (source,), empty)] == [0]
        assert kind("global_pool").forward_flops(layer, (source,)) == volume(whole(source.shape))
    assert kind("global_pool").REDUCTION == "sum"
