"""Pooling of parts: padding, divisors, bins and places are those of the whole tensor."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.runtime.spatial.checks import check_all, images, spatial
from tests.runtime.spatial.one_layer import OneLayer


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


POOLS = [
    (kernel, stride, padding, dilation, ceil)
    for kernel, stride, padding, dilation, ceil in product((2, 3, 5), (1, 2, 3), (0, 1, 2), (1, 2), (False, True))
    if padding <= kernel // 2
]


@pytest.mark.parametrize(("kernel", "stride", "padding", "dilation", "ceil"), POOLS)
def test_max_pooling_pads_at_the_tensor_s_edges_only(
    kernel: int, stride: int, padding: int, dilation: int, ceil: bool
) -> None:
    x = images(11, 9) - 5  # all below the zeros of ordinary padding
    one = spatial(lambda x: F.max_pool2d(x, kernel, stride, padding, dilation, ceil), x)
    check_all(one, "pool", seed=kernel, count=3)


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "ceil"), sorted({(k, s, p, c) for k, s, p, d, c in POOLS if d == 1})
)
@pytest.mark.parametrize("counted", [True, False])
def test_averages_divide_by_what_one_device_divides_by(
    kernel: int, stride: int, padding: int, ceil: bool, counted: bool
) -> None:
    one = spatial(lambda x: F.avg_pool2d(x, kernel, stride, padding, ceil, counted), images(11, 9))
    check_all(one, "pool", seed=kernel, count=3)


def test_pools_of_one_and_three_dims_and_with_a_divisor() -> None:
    for function in (
        lambda x: F.avg_pool2d(x, 3, 2, 1, divisor_override=5),
        lambda x: F.avg_pool2d(x, (3, 2), (1, 3), (1, 0), count_include_pad=False),
        lambda x: F.max_pool2d(x, (2, 5), (2, 1), (0, 2)),
    ):
        check_all(spatial(function, images(8, 10)), "pool")
    check_all(spatial(lambda x: F.avg_pool1d(x, 3, 2, 1, True, False), images(13)), "pool")
    check_all(spatial(lambda x: F.max_pool1d(x, 3, 2, 1), images(13)), "pool")
    check_all(spatial(lambda x: F.max_pool3d(x, 3, 2, 1), images(6, 5, 7)), "pool")
    check_all(spatial(lambda x: F.avg_pool3d(x, 2, 1, 1), images(4, 5, 3)), "pool")


@pytest.mark.parametrize("size", [(1, 1), (3, 4), (5, 2), (7, 11), (4, 12)])
def test_adaptive_pools_have_the_bins_of_the_whole_tensor(size: tuple[int, int]) -> None:
    x = images(8, 12)
    if size != (1, 1):  # which is another kind
        check_all(spatial(lambda x: F.adaptive_avg_pool2d(x, size), x), "adaptive_pool")
    check_all(spatial(lambda x: F.adaptive_max_pool2d(x, size, return_indices=True), x, outputs=2), "adaptive_pool")


def test_adaptive_pools_of_one_and_three_dims() -> None:
    check_all(spatial(lambda x: F.adaptive_avg_pool1d(x, 5), images(13)), "adaptive_pool")
    check_all(spatial(lambda x: F.adaptive_avg_pool3d(x, (2, 3, 2)), images(5, 6, 7)), "adaptive_pool")
    check_all(spatial(lambda x: F.adaptive_max_pool3d(x, (2, 3, 2)), images(5, 6, 7), outputs=2), "adaptive_pool")


def test_places_of_maxima_are_those_in_the_whole_tensor() -> None:
    x = images(9, 11)
    for numbers in ((3, 2, 1), (2, 2, 0), (3, 1, 1), (2, 3, 1, 2)):
        plain = spatial(lambda x, numbers=numbers: F.max_pool2d(x, *numbers), x).layer
        both = spatial(lambda x, numbers=numbers: F.max_pool2d(x, *numbers, return_indices=True), x, outputs=2)
        both = replace(both, layer=replace(both.layer, kind="pool", attributes={**plain.attributes, **_op(both)}))
        check_all(both, "pool", count=4)


def _op(one: OneLayer) -> dict[str, Any]:
    return {"op": one.layer.attributes["op"]}


def test_of_equal_numbers_the_gradient_goes_to_the_first() -> None:
    ties = images(9, 10).relu().round()
    check_all(spatial(lambda x: F.max_pool2d(x, 3, 2, 1), ties), "pool")
    check_all(spatial(lambda x: F.adaptive_max_pool2d(x, (4, 3)), ties, outputs=2), "adaptive_pool")
