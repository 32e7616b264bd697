from __future__ import annotations

import torch
from torch import nn

from runtime.reduction import GradientBuckets


def parameters(*sizes: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    found = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes]
    for number, parameter in enumerate(found):
        parameter.grad = torch.full_like(parameter, number + 1)
    return found


def test_buckets_keep_the_order_the_dtype_and_the_bound() -> None:
    small = parameters(2, 2, 8, 1)
    double = parameters(3, dtype=torch.float64)
    buckets = GradientBuckets([*small, *double], bucket_bytes=16).buckets
    assert [[parameter.numel() for parameter in bucket] for bucket in buckets] == [[2, 2], [8], [1], [3]]


def test_every_gradient_is_summed_once_and_a_missing_one_is_zero() -> None:
    found = parameters(2, 3, 40)
    found[1].grad = None
    seen: list[int] = []

    def double(tensor: torch.Tensor) -> None:
        seen.append(tensor.numel())
        tensor.mul_(2).add_(1)

    GradientBuckets(found, bucket_bytes=32).reduce(double)
    assert seen == [5, 40]
    assert [parameter.grad.unique().tolist() for parameter in found] == [[3], [1], [7]]
    assert all(parameter.grad.shape == parameter.shape for parameter in found)


def test_a_gradient_of_odd_strides_is_summed_in_place() -> None:
    parameter = nn.Parameter(torch.zeros(3, 2))
    parameter.grad = torch.arange(6.0).view(2, 3).t()
    GradientBuckets([parameter]).reduce(lambda tensor: tensor.view(-1).mul_(2))
    assert parameter.grad.tolist() == [[0, 6], [2, 8], [4, 10]]


def test_no_parameters_need_no_sum() -> None:
    GradientBuckets([]).reduce(lambda tensor: 1 / 0)
