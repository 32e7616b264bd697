from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from cuda_ops.sparse.nn import SampleMean, SiteCrossEntropy, SparseInputError, SparseTensor
from tests.cuda_ops.sparse.nn.clouds import cloud


def targets_of(x: SparseTensor, classes: int = 3) -> torch.Tensor:
    return torch.randint(classes, (len(x),), generator=torch.Generator().manual_seed(1))


def part(x: SparseTensor, first: int, stop: int) -> tuple[SparseTensor, torch.Tensor]:
    rows = (x.coords[:, 0] >= first) & (x.coords[:, 0] < stop)
    coords = x.coords[rows].clone()
    coords[:, 0] -= first
    return SparseTensor(x.feats[rows], coords, num_samples=stop - first), rows


def test_the_sample_mean_is_a_mean_of_means() -> None:
    x = cloud(samples=3, empty=1)
    means = [x.feats[x.coords[:, 0] == sample].mean() for sample in (0, 2)]
    torch.testing.assert_close(SampleMean()(x), sum(means) / 3)


@pytest.mark.parametrize("ignored", [-100, 1])
def test_cross_entropy_is_a_mean_over_samples_of_means_over_sites(ignored: int) -> None:
    x = cloud(samples=3, empty=1)
    targets = targets_of(x)
    means = []
    for sample in (0, 2):
        rows = x.coords[:, 0] == sample
        means.append(functional.cross_entropy(x.feats[rows], targets[rows], ignore_index=ignored))
    torch.testing.assert_close(SiteCrossEntropy(ignored)(x, targets), sum(means) / 3)


def test_a_batch_is_the_weighted_mean_of_its_parts_and_so_is_its_gradient() -> None:
    x = cloud(samples=5, sites=90)
    targets, loss = targets_of(x), SiteCrossEntropy()
    leaf = x.feats.requires_grad_()
    whole = loss(x, targets)
    parts = [(stop - first, part(x, first, stop)) for first, stop in ((0, 2), (2, 5))]
    split = sum(size * loss(piece, targets[rows]) for size, (piece, rows) in parts) / 5
    torch.testing.assert_close(whole, split)
    torch.testing.assert_close(torch.autograd.grad(whole, leaf), torch.autograd.grad(split, leaf))


def test_a_sample_with_all_its_targets_ignored_counts_as_0() -> None:
    x = cloud(samples=2)
    targets = torch.where(x.coords[:, 0] == 0, -100, targets_of(x))
    rows = x.coords[:, 0] == 1
    wanted = functional.cross_entropy(x.feats[rows], targets[rows]) / 2
    torch.testing.assert_close(SiteCrossEntropy()(x, targets), wanted)


def test_no_sites_at_all_are_a_loss_of_0() -> None:
    x = SparseTensor(torch.zeros(0, 3), torch.zeros(0, 4, dtype=torch.int32), num_samples=2)
    assert SiteCrossEntropy()(x, torch.zeros(0, dtype=torch.int64)) == 0
    assert SampleMean()(x.with_feats(torch.zeros(0, 1))) == 0


def test_targets_are_one_per_site() -> None:
    x = cloud()
    with pytest.raises(SparseInputError, match=r"shape of targets: found \[2\], expected \[60\]"):
        SiteCrossEntropy()(x, torch.zeros(2, dtype=torch.int64))
    assert repr(SiteCrossEntropy(255)) == "SiteCrossEntropy(ignore_index=255)"
