"""Layers that keep or reduce sites, and losses, beside torch's on features and on dense grids."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from cuda_ops.sparse import nn as spnn
from cuda_ops.sparse.nn import (
    AvgPool3d,
    BatchNorm,
    Conv3d,
    GlobalAvgPool,
    GlobalMaxPool,
    GroupNorm,
    InstanceNorm,
    MaxPool3d,
    SampleMean,
    SiteCrossEntropy,
    SparseInputError,
    SparseTensor,
    ToDense,
    to_dense,
)
from tests.cuda_ops.sparse.nn.clouds import SIDE, at_sites, cloud, on_grid

WINDOWS = [(2, None), (3, 2), (3, 3), (3, 1), ((2, 1, 3), (2, 1, 1))]


def shifted(kernel: Any) -> list[int]:
    """Padding of the dense windows: in front (n - 1) / 2 of an odd size, and the rest behind."""
    sizes = (kernel,) * 3 if isinstance(kernel, int) else kernel
    pads = [((n - 1) // 2, (n - 1) // 2) if n % 2 else (0, n - 1) for n in sizes]
    return [each for pair in reversed(pads) for each in pair]


@pytest.mark.parametrize(("kernel", "stride"), WINDOWS)
def test_max_pooling_is_the_dense_one_over_the_sites_that_are_there(kernel: Any, stride: Any) -> None:
    x = cloud(sites=30)
    y = MaxPool3d(kernel, stride)(x)
    grid = on_grid(x)
    there = on_grid(x.with_feats(torch.ones_like(x.feats))) > 0
    dense = functional.max_pool3d(
        functional.pad(grid.masked_fill(~there, -torch.inf), shifted(kernel), value=-torch.inf), kernel, stride
    )
    torch.testing.assert_close(y.feats, at_sites(dense, y))
    assert torch.equal(y.coords, Conv3d(3, 1, kernel, stride or kernel).double()(x).coords)


@pytest.mark.parametrize(("kernel", "stride"), WINDOWS)
def test_average_pooling_divides_by_the_sites_that_are_there(kernel: Any, stride: Any) -> None:
    x = cloud(sites=30)
    y = AvgPool3d(kernel, stride)(x)
    sums, counts = (
        functional.avg_pool3d(functional.pad(grid, shifted(kernel)), kernel, stride)
        for grid in (on_grid(x), on_grid(x.with_feats(torch.ones_like(x.feats))))
    )
    torch.testing.assert_close(y.feats, at_sites(sums / counts, y))


@pytest.mark.parametrize("pool", [MaxPool3d(2), AvgPool3d(2), GlobalAvgPool(), GlobalMaxPool()], ids=repr)
def test_gradients_are_right(pool: torch.nn.Module) -> None:
    x = cloud(channels=2, sites=12)

    def of(feats: torch.Tensor) -> torch.Tensor:
        y = pool(x.with_feats(feats))
        return y.feats if isinstance(y, SparseTensor) else y

    assert torch.autograd.gradcheck(of, x.feats.requires_grad_())


def test_global_pooling_is_sample_by_sample_and_0_for_an_empty_one() -> None:
    x = cloud(samples=3, empty=1)
    mean = GlobalAvgPool()(x)
    largest = GlobalMaxPool()(x)
    for sample in (0, 2):
        rows = x.feats[x.coords[:, 0] == sample]
        torch.testing.assert_close(mean[sample], rows.mean(0))
        torch.testing.assert_close(largest[sample], rows.max(0).values)
    assert not mean[1].any()
    assert not largest[1].any()


def test_pooling_of_nothing_is_nothing() -> None:
    x = SparseTensor(torch.zeros(0, 3), torch.zeros(0, 4, dtype=torch.int32), num_samples=2)
    assert MaxPool3d(2)(x).feats.shape == AvgPool3d(2)(x).feats.shape == (0, 3)
    assert torch.equal(GlobalMaxPool()(x), torch.zeros(2, 3))


def test_windows_are_checked_and_shown() -> None:
    with pytest.raises(SparseInputError, match="MaxPool3d: kernel_size: found 0"):
        MaxPool3d(0)
    assert repr(MaxPool3d(2)) == "MaxPool3d(kernel_size=(2, 2, 2), stride=(2, 2, 2), dilation=(1, 1, 1))"


def empty(channels: int = 3) -> SparseTensor:
    return SparseTensor(torch.zeros(0, channels).double(), torch.zeros(0, 4, dtype=torch.int32), num_samples=2)


@pytest.mark.parametrize("keywords", [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}])
def test_batch_norm_is_torchs_on_the_features(keywords: dict[str, Any]) -> None:
    ours = BatchNorm(3, **keywords).double()
    theirs = nn.BatchNorm1d(3, **keywords).double()
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
    targets = targets_of(x)
    loss = SiteCrossEntropy()
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


MODULES = ["ReLU", "LeakyReLU", "SiLU", "GELU", "ELU", "Sigmoid", "Tanh"]


@pytest.mark.parametrize("name", MODULES)
def test_an_activation_is_torchs_on_the_features_and_on_plain_tensors(name: str) -> None:
    ours = getattr(spnn, name)()
    theirs = getattr(nn, name)()
    x = cloud()
    y = ours(x)
    assert y.geometry is x.geometry
    torch.testing.assert_close(y.feats, theirs(x.feats))
    torch.testing.assert_close(ours(x.feats), theirs(x.feats))


def test_layers_with_parameters_keep_torchs_names() -> None:
    x = cloud()
    linear = spnn.Linear(3, 5).double()
    plain = nn.Linear(3, 5).double()
    plain.load_state_dict(linear.state_dict())
    torch.testing.assert_close(linear(x).feats, plain(x.feats))
    torch.testing.assert_close(spnn.LayerNorm(3).double()(x).feats, nn.LayerNorm(3).double()(x.feats))


def test_dropout_drops_in_training_alone() -> None:
    x = cloud()
    drop = spnn.Dropout(0.5)
    assert (drop(x).feats == 0).any()
    torch.testing.assert_close(drop.eval()(x).feats, x.feats)


def test_functional_forms_agree_with_the_modules() -> None:
    x = cloud()
    for one, other in (
        (spnn.functional.relu(x), spnn.ReLU()(x)),
        (spnn.functional.leaky_relu(x, 0.2), spnn.LeakyReLU(0.2)(x)),
        (spnn.functional.silu(x), spnn.SiLU()(x)),
    ):
        torch.testing.assert_close(one.feats, other.feats)


def test_the_face_names_what_it_has() -> None:
    assert all(hasattr(spnn, name) for name in spnn.__all__)
    public = {
        name
        for name, value in vars(spnn).items()
        if isinstance(value, type) and value.__module__.startswith("cuda_ops")
    }
    assert public <= set(spnn.__all__)


def test_features_lie_at_their_sites_and_0_elsewhere() -> None:
    x = cloud(samples=3, empty=1)
    torch.testing.assert_close(to_dense(x, (SIDE, SIDE, SIDE)), on_grid(x))
    torch.testing.assert_close(ToDense((6, 6, 7), origin=(8, 8, 8))(x), on_grid(x)[:, :, 8:14, 8:14, 8:15])
    down = AvgPool3d(2)(x)
    torch.testing.assert_close(to_dense(down, (12, 12, 12)), on_grid(down)[:, :, :12, :12, :12])


def test_the_grid_has_gradients() -> None:
    x = cloud(channels=1, sites=5, samples=1)
    assert torch.autograd.gradcheck(
        lambda feats: to_dense(x.with_feats(feats), (6, 6, 6), (8, 8, 8)), x.feats.requires_grad_()
    )


def test_sites_outside_the_grid_are_refused() -> None:
    with pytest.raises(
        SparseInputError, match=r"sites outside the grid: found \[\d+, \d+, \d+\], expected below \[9, 20"
    ):
        to_dense(cloud(), (9, 20, 20))
    with pytest.raises(SparseInputError, match="outside the grid"):
        to_dense(cloud(), (20, 20, 20), origin=(9, 0, 0))
    assert repr(ToDense((1, 2, 3))) == "ToDense(shape=(1, 2, 3), origin=(0, 0, 0))"
