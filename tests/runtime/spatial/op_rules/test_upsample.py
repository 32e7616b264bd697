"""Interpolation and padding of parts: outputs lie where they lie in the whole tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.runtime.spatial.checks import check, check_all, images, layouts, spatial


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


RESIZED: list[dict[str, Any]] = [
    *({"scale_factor": factor} for factor in (2, 3.0, 1.7, (2, 0.6), 0.5, 2.0000001)),
    *({"size": size} for size in ((14, 18), (5, 20), (21, 9), (7, 1), (3, 4))),
]


@pytest.mark.parametrize("how", RESIZED, ids=str)
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic"])
def test_interpolation_lies_where_it_lies_in_the_whole_tensor(mode: str, how: dict[str, Any]) -> None:
    for aligned in (False, True) if mode.startswith("bi") else (None,):
        one = spatial(
            lambda x, aligned=aligned: F.interpolate(x, mode=mode, align_corners=aligned, **how), images(7, 9)
        )
        check_all(one, "upsample", count=3)


def test_interpolation_of_one_and_three_dims() -> None:
    for aligned in (False, True):
        lin = {"scale_factor": 1.5, "align_corners": aligned}
        check_all(spatial(lambda x, lin=lin: F.interpolate(x, mode="linear", **lin), images(11)), "upsample")
        check_all(spatial(lambda x, lin=lin: F.interpolate(x, mode="trilinear", **lin), images(4, 5, 6)), "upsample")
    check_all(spatial(lambda x: F.interpolate(x, scale_factor=2), images(11)), "upsample")
    check_all(spatial(lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"), images(4, 5, 6)), "upsample")


@pytest.mark.parametrize("factor", [3, 7, 49, 0.1, 1.1])
def test_nearest_in_float32_rounds_as_one_device_does(factor: float) -> None:
    one = spatial(lambda x: F.interpolate(x, scale_factor=factor), images(50).float())
    for cuts in layouts(one, 1):
        check(one, cuts, tolerance=1e-5)


@pytest.mark.parametrize("mode", ["constant", "reflect", "replicate", "circular"])
def test_padding_is_that_of_the_whole_tensor(mode: str) -> None:
    for amounts in ((1, 2, 3, 0), (4, 4, 4, 4), (0, 1)):
        if mode != "constant" and len(amounts) == 2:
            continue
        check_all(spatial(lambda x, amounts=amounts: F.pad(x, amounts, mode=mode), images(6, 5)), "pad", count=8)
    if mode == "constant":
        check_all(spatial(lambda x: F.pad(x, (-1, 2, 9, -2), value=3.5), images(6, 5)), "pad", count=8)
        check_all(spatial(lambda x: F.pad(x, (-1, -1, -2, -2)), images(6, 5)), "pad")
    else:
        check_all(spatial(lambda x: F.pad(x, (2, 1), mode=mode), images(7)), "pad")
        check_all(spatial(lambda x: F.pad(x, (2, 1, 0, 1, 2, 2), mode=mode), images(4, 3, 5)), "pad")


def test_margins_are_the_neighbour_s_rows() -> None:
    x = images(12, 9)
    cuts = {"height": (0, 5, 6, 12), "width": (0, 4, 9)}
    for function in (
        lambda x: F.max_pool2d(x, 3, 1, 1),
        lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
        lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
        torch.tanh,
    ):
        for margin in (1, 3):
            check(spatial(function, x), cuts, margin)
