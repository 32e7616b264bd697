from __future__ import annotations

from typing import Any

import pytest
import torch

from cuda_ops.sparse import operators, reference
from cuda_ops.sparse.checks import CHECKS
from cuda_ops.sparse.errors import SparseInputError
from cuda_ops.sparse.registrations import SCHEMAS
from tests.cuda_ops.sparse.clouds import ONES, cloud, maps, random, sites

OPS = torch.ops.halopipe
TWOS = (2, 2, 2)


def _arguments() -> dict[str, tuple[Any, ...]]:
    """Arguments of every operator, by its name."""
    keys = sites(30, extent=3)
    coarse = operators.strided_sites(keys, TWOS, TWOS, ONES)
    found = neighbours, reverse = maps(keys, coarse, TWOS, TWOS)
    x, dy = random(len(keys), 2, grad=True), random(len(coarse), 3, grad=True)
    segments = torch.tensor([3, 0]), torch.tensor([2, 3])
    index = torch.tensor([[0, 1, -1], [2, 2, 0]], dtype=torch.int32)
    weight, two = random(2, 3, grad=True), random(2, 2, seed=1, grad=True)
    rows = torch.tensor([1, 0, 1])
    boxes = [0, 2, 0, 1, 3, 4, 1, 2]
    return {
        "sorted_sites": (cloud(),),
        "strided_sites": (keys, TWOS, TWOS, ONES),
        "generated_sites": (keys, TWOS, TWOS, ONES),
        "kernel_map": (keys, coarse, TWOS, TWOS, ONES, False),
        "reversed_map": (neighbours, len(keys)),
        "sparse_conv": (x, random(8, 2, 3, grad=True), *found),
        "sparse_conv_weight": (x, dy, neighbours),
        "sparse_max_pool": (x, *found),
        "sparse_max_pool_backward": (
            dy[:, :2].detach().requires_grad_(),
            reference.sparse_max_pool(x.detach(), *found)[1],
            reverse,
        ),
        "sparse_sum_pool": (x, *found),
        "segment_sum": (x, *segments),
        "segment_max": (x, *segments),
        "segment_grid": (x, torch.arange(len(keys)) % 7, *segments, 7),
        "segment_expand": (two, *segments, 6),
        "interpolate": (x, index, weight),
        "interpolate_backward": (two, index, weight, 5),
        "interpolate_weight": (x, two, index),
        "pack_rows": (x, rows),
        "unpack_add": (x, rows, random(3, 2, seed=2, grad=True)),
        "pack_boxes": (x, boxes),
        "unpack_boxes": (random(3, grad=True), x, boxes, False),
    }


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("name", SCHEMAS)
def test_schema_fake_and_gradient_agree_with_the_kernel(name: str) -> None:
    torch.library.opcheck(getattr(OPS, name).default, _arguments()[name])


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("name", SCHEMAS)
def test_results_share_no_memory_with_arguments(name: str) -> None:
    arguments = _arguments()[name]
    results = getattr(OPS, name)(*arguments)
    given = {each.data_ptr() for each in arguments if isinstance(each, torch.Tensor)}
    for result in results if isinstance(results, tuple | list) else [results]:
        assert result.data_ptr() not in given
        assert result.is_contiguous()


def test_every_operator_has_a_check_and_a_reference() -> None:
    assert set(CHECKS) == set(SCHEMAS) == set(reference.__all__) == set(_arguments())


def test_tensors_in_another_order_of_memory_are_taken() -> None:
    arguments = _arguments()["sparse_conv"]
    turned = [each.transpose(0, 1).contiguous().transpose(0, 1) for each in arguments]
    assert not turned[2].is_contiguous()
    assert torch.equal(OPS.sparse_conv(*turned), OPS.sparse_conv(*arguments))


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("name", "position", "change", "message"),
    [
        ("sparse_conv", 0, lambda x: x.float(), r"dtypes that differ: found torch.float64, expected torch.float32"),
        ("sparse_conv", 0, lambda x: x.int(), "dtype of features: found torch.int32"),
        ("sparse_conv", 0, lambda x: x[1:], "rows of features against the map's inputs: found"),
        ("sparse_conv", 0, lambda x: x[:, :1], "channels of the features: found 1, expected 2"),
        ("sparse_conv", 1, lambda w: w[1:], "offsets of the weight: found 7, expected 8"),
        ("sparse_conv", 1, lambda w: w[0], "number of dimensions: found 2, expected 3"),
        ("sparse_conv", 2, lambda n: n.long(), r"dtype of indices: found torch.int64, expected torch.int32"),
        ("sparse_conv", 3, lambda r: r[1:], "offsets of reverse: found 7, expected 8"),
        ("sparse_conv_weight", 1, lambda dy: dy[1:], "rows of the gradient: found"),
        ("sparse_max_pool", 0, lambda x: x[1:], "rows of features against the map's inputs"),
        ("sparse_max_pool_backward", 0, lambda dy: dy[1:], "shape of the gradient"),
        ("segment_expand", 0, lambda y: y[1:], "rows against segments: found 1, expected 2"),
        ("segment_expand", 3, lambda rows: 2**31, "too many rows: found 2147483648"),
        ("interpolate", 1, lambda i: i.long(), "dtype of indices"),
        ("interpolate_backward", 0, lambda dy: dy[1:], "rows of the gradient: found 1, expected 2"),
        ("interpolate_weight", 1, lambda dy: dy[1:], "rows of the gradient: found 1, expected 2"),
        ("pack_rows", 1, lambda i: i.double(), "dtype of indices"),
        ("unpack_boxes", 0, lambda b: b.float(), "dtypes that differ"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(name: str, position: int, change: Any, message: str) -> None:
    arguments = list(_arguments()[name])
    arguments[position] = change(arguments[position])
    with pytest.raises(SparseInputError, match=f"{name}: {message}"):
        getattr(OPS, name)(*arguments)
