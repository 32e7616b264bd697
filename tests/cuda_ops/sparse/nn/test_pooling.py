from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from cuda_ops.sparse.nn import (
    AvgPool3d,
    Conv3d,
    GlobalAvgPool,
    GlobalMaxPool,
    MaxPool3d,
    SparseInputError,
    SparseTensor,
)
from tests.cuda_ops.sparse.nn.clouds import at_sites, cloud, on_grid

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
    mean, largest = GlobalAvgPool()(x), GlobalMaxPool()(x)
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
