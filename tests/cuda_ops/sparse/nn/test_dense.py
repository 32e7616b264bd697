from __future__ import annotations

import pytest
import torch

from cuda_ops.sparse.nn import AvgPool3d, SparseInputError, ToDense, to_dense
from tests.cuda_ops.sparse.nn.clouds import SIDE, cloud, on_grid


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
