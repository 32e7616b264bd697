from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from runtime.optim.sharding import GradientBuckets, in_buckets


class Sums:
    """Stands in for a transport: a started sum doubles what it is given and adds one, when it is waited for."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.waited = 0

    def start(self, flat: torch.Tensor) -> Sums._Pending:
        self.sizes.append(flat.numel())
        return Sums._Pending(self, flat)

    class _Pending:
        def __init__(self, sums: Sums, flat: torch.Tensor) -> None:
            self.sums, self.flat = sums, flat

        def wait(self) -> None:
            self.flat.mul_(2).add_(1)
            self.sums.waited += 1


def parameters(*sizes: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    found = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes]
    for number, parameter in enumerate(found):
        parameter.grad = torch.full_like(parameter, number + 1)
    return found


def network() -> tuple[nn.Sequential, Callable[[], torch.Tensor]]:
    """Three layers with (12, 4), (20, 5) and (10, 2) elements of weight and bias, and a loss."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(5, 2))
    x = torch.randn(2, 3)
    return module, lambda: module(x).square().sum()


def test_buckets_begin_with_the_last_parameter_and_keep_the_dtype_and_the_bound() -> None:
    small = parameters(2, 2, 8, 1)
    double = parameters(3, dtype=torch.float64)
    buckets = in_buckets([*small, *double], bucket_bytes=16)
    assert [[parameter.numel() for parameter in bucket] for bucket in buckets] == [[3], [1], [8], [2, 2]]


def test_a_gradient_of_odd_strides_is_summed() -> None:
    parameter = nn.Parameter(torch.zeros(3, 2))
    parameter.grad = torch.arange(6.0).view(2, 3).t()
    GradientBuckets([parameter], Sums().start).reduce()
    assert parameter.grad.tolist() == [[1, 7], [3, 9], [5, 11]]


def test_a_gradient_alone_in_its_bucket_is_not_copied_and_others_are_views_of_it() -> None:
    found = parameters(40, 3, 2)
    alone = found[0].grad
    GradientBuckets(found, Sums().start, bucket_bytes=32).reduce()
    assert found[0].grad.data_ptr() == alone.data_ptr()
    assert found[1].grad.untyped_storage().data_ptr() == found[2].grad.untyped_storage().data_ptr()


def test_sums_start_within_the_last_backward_in_the_order_of_the_buckets() -> None:
    module, loss = network()
    sums = Sums()
    buckets = GradientBuckets(module.parameters(), sums.start, bucket_bytes=100)
    loss().backward()
    assert sums.sizes == []  # not armed: more is to come
    buckets.arm()
    loss().backward()
    assert (sums.sizes, sums.waited) == ([17, 24, 12], 0)
    expected = [2 * 2 * gradient + 1 for gradient in torch.autograd.grad(loss(), tuple(module.parameters()))]
    buckets.reduce()
    assert sums.sizes == [17, 24, 12]
    for parameter, gradient in zip(module.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    for end in (buckets.reduce, buckets.reset):  # after which nothing is left behind
        buckets.arm()
        loss().backward()
        end()
        assert not any(parameter._post_accumulate_grad_hooks for parameter in module.parameters())
    sums.sizes.clear()
    loss().backward()
    assert sums.sizes == []


def test_a_bucket_waits_for_all_earlier_ones() -> None:
    found, sums = parameters(10, 20, 30), Sums()
    buckets = GradientBuckets(found, sums.start, bucket_bytes=1)
    buckets.arm()
    buckets.note(found[0])
    assert sums.sizes == []
    buckets.note(found[2])
    assert sums.sizes == [30]
    buckets.note(found[1])
    assert sums.sizes == [30, 20, 10]


def test_a_gradient_that_comes_after_its_sum_has_started_is_refused() -> None:
    module, loss = network()
    buckets = GradientBuckets(module.parameters(), Sums().start, bucket_bytes=100)
    buckets.arm()
    loss().backward()
    with pytest.raises(RuntimeError, match="after its sum had been started"):
        loss().backward()


def test_parts_of_another_group_have_buckets_of_their_own_which_come_when_they_are_complete() -> None:
    found, ours, theirs = parameters(10, 20, 30, 40, 50), Sums(), Sums()
    order: list[str] = []

    def start(sums: Sums, name: str) -> Callable[[torch.Tensor], Sums._Pending]:
        def begin(flat: torch.Tensor) -> Sums._Pending:
            order.append(f"{name} {flat.numel()}")
            return sums.start(flat)

        return begin

    others = dict.fromkeys((found[1], found[3]), start(theirs, "theirs"))
    buckets = GradientBuckets(found, start(ours, "ours"), others={**others, found[4]: None})
    assert [[p.numel() for p in bucket] for bucket in buckets.buckets] == [[40, 20], [30, 10]]
    buckets.arm()
    for parameter in reversed(found):
        buckets.note(parameter)
    assert order == ["theirs 60", "ours 40"]
    buckets.reduce()
    assert (ours.waited, theirs.waited) == (1, 1)
    assert found[4].grad.unique().tolist() == [5]  # this rank is the only one that has it
    assert found[1].grad.unique().tolist() == [5]  # 2 * 2 + 1
