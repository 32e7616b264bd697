"""Slices, concatenation and views of parts."""

from __future__ import annotations

import pytest
import torch

from tests.runtime.spatial.checks import check_all, check_connected, images, spatial
from tests.runtime.spatial.one_layer import one_layer


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def test_slices_and_parts() -> None:
    x = images(12, 9, channels=6)
    for function in (
        lambda x: x[:, :, 3:],
        lambda x: x[:, :, 1:10:3],
        lambda x: x[:, -4:],
        lambda x: x.narrow(2, 4, 6),
    ):
        check_all(spatial(function, x), "slice")
    names = "sample channel height width"
    select = one_layer(lambda x: x[:, :, 5], [x], [names], ["sample channel width"])
    check_all(select, "slice")
    for function, ends in (
        (lambda x: x.chunk(2, 1), 2),
        (lambda x: x.chunk(4, 2), 4),
        (lambda x: x.split([6, 3], 3), 2),
    ):
        check_all(spatial(function, x, outputs=ends), "slice")
    check_all(one_layer(lambda x: x.unbind(1), [x], [names], ["sample height width"] * 6), "slice")
    check_all(spatial(lambda x: x.chunk(1, 1), x, outputs=1), "slice")


def test_concatenation_and_stacking() -> None:
    tensors = [images(5, 4, channels=channels) for channels in (2, 5, 1)]
    names = "sample channel height width"
    joined = one_layer(lambda a, b, c: torch.cat((a, b, c), 1), tensors, [names] * 3, [names])
    check_all(joined, "concat", count=12)
    check_connected(joined, {"channel": (0, 2, 4, 8)})
    rows = [images(5, 4), images(3, 4)]
    check_all(one_layer(lambda a, b: torch.cat((a, b, a), 2), rows, [names] * 2, [names]), "concat", count=12)
    stack = one_layer(
        lambda a, b: torch.stack((a, b), 2), [rows[0]] * 2, [names] * 2, ["sample channel dim2 height width"]
    )
    check_all(stack, "concat", count=12)


def test_views_permutations_and_expansion() -> None:
    x, names = images(4, 6), "sample channel height width"
    for function, result in (
        (lambda x: x.permute(0, 2, 3, 1), "sample height width channel"),
        (lambda x: x.transpose(1, -1), "sample width height channel"),
        (lambda x: x.flatten(1), "sample feature"),
        (lambda x: x.flatten(2), "sample channel dim2"),
        (lambda x: x.reshape(2, 3, 2, 2, 6), "sample channel dim2 dim3 width"),
        (lambda x: x.reshape(6, 4, 6), "sample height width"),
        (lambda x: x.unsqueeze(2), "sample channel dim2 height width"),
    ):
        check_all(one_layer(function, [x], [names], [result]), "reshape", count=8)
    thin = images(1, 6)
    check_all(one_layer(lambda x: x.squeeze(2), [thin], [names], ["sample channel width"]), "reshape")
    check_all(one_layer(lambda x: x.expand(2, 3, 5, 6), [thin], [names], [names]), "reshape", count=8)
