from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from cuda_ops.sparse.nn import BatchNorm, GroupNorm, InstanceNorm, SparseInputError, SparseTensor
from tests.cuda_ops.sparse.nn.clouds import cloud


def empty(channels: int = 3) -> SparseTensor:
    return SparseTensor(torch.zeros(0, channels).double(), torch.zeros(0, 4, dtype=torch.int32), num_samples=2)


@pytest.mark.parametrize("keywords", [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}])
def test_batch_norm_is_torchs_on_the_features(keywords: dict[str, Any]) -> None:
    ours, theirs = BatchNorm(3, **keywords).double(), nn.BatchNorm1d(3, **keywords).double()
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for training in (True, True, False):
        x = cloud(seed=int(training))
        torch.testing.assert_close(ours.train(training)(x).feats, theirs.train(training)(x.feats))
    for one, other in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other)


def test_no_sites_leave_the_running_statistics_alone() -> None:
    norm = BatchNorm(3).double()
    assert norm(empty()).feats.shape == (0, 3)
    assert norm.eval()(empty()).feats.shape == (0, 3)
    assert norm.running_mean.isfinite().all()
    assert torch.equal(norm.running_var, torch.ones(3).double())


def test_one_site_has_no_variance_to_train_with() -> None:
    x = SparseTensor(torch.ones(1, 3).double(), torch.zeros(1, 4, dtype=torch.int32))
    with pytest.raises(SparseInputError, match="one site in training: found 1, expected at least 2"):
        BatchNorm(3).double()(x)
    assert BatchNorm(3).double().eval()(x).feats.isfinite().all()


@pytest.mark.parametrize("norm", [BatchNorm(4), InstanceNorm(4), GroupNorm(2, 4)], ids=lambda norm: type(norm).__name__)
def test_another_number_of_channels_is_refused(norm: nn.Module) -> None:
    with pytest.raises(SparseInputError, match="number of channels: found 3, expected 4"):
        norm.double()(cloud())


def test_channels_fall_into_equal_groups() -> None:
    with pytest.raises(SparseInputError, match="found 5 channels in 2 groups"):
        GroupNorm(2, 5)


def test_instance_norm_is_torchs_sample_by_sample() -> None:
    x = cloud(samples=3, empty=1)
    y = InstanceNorm(3).double()(x)
    for sample in (0, 2):
        rows = x.coords[:, 0] == sample
        torch.testing.assert_close(y.feats[rows], functional.instance_norm(x.feats[rows].t()[None])[0].t())


def test_group_norm_is_torchs_sample_by_sample_with_its_gradient() -> None:
    x = cloud(channels=6, samples=3, empty=1)
    norm = GroupNorm(2, 6).double()
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    leaf = x.feats.requires_grad_()
    norm(x).feats.pow(3).sum().backward()
    wanted = 0
    for sample in (0, 2):
        part = leaf[x.coords[:, 0] == sample]
        wanted = wanted + functional.group_norm(part.t()[None], 2, norm.weight, norm.bias, norm.eps).pow(3).sum()
    for parameter, gradient in zip(
        (leaf, norm.weight, norm.bias), torch.autograd.grad(wanted, (leaf, norm.weight, norm.bias)), strict=True
    ):
        torch.testing.assert_close(parameter.grad, gradient)
    assert norm(empty(6)).feats.shape == (0, 6)
    assert "2, 6" in repr(norm)
