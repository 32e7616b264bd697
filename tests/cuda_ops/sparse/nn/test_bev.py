"""Crops, sums of clouds and views from above, held against dense grids and plain torch in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cuda_ops.sparse.nn import (
    AvgPool3d,
    Conv3d,
    SparseCrop,
    SparseInputError,
    SparseTensor,
    ToBEVConvolution,
    ToBEVHeightCompression,
    ToBEVReduction,
    ToDenseBEVConvolution,
    generative_add,
)
from tests.cuda_ops.sparse.nn.clouds import SIDE, cloud, on_grid

DIMS = pytest.mark.parametrize("dim", [0, 1, 2])


def there(x: SparseTensor) -> Tensor:
    """(samples, 1, side, side, side): 1 where there is a site."""
    return on_grid(x.with_feats(torch.ones(len(x), 1, dtype=torch.float64)))


def bounds(dim: int, extent: int) -> list[int]:
    """The shape of a map over all of the clouds, ``extent`` along ``dim``."""
    return [extent if axis == dim else SIDE for axis in range(3)]


def weighted(x: SparseTensor, kernel: Tensor, bias: Tensor | float, dim: int) -> Tensor:
    """(samples, out, ...): the sum along ``dim`` of each cell's features times the matrix of its height."""
    columns, sites = (each.movedim(2 + dim, 2)[:, :, : len(kernel)] for each in (on_grid(x), there(x)))
    return torch.einsum("bchuv,hcd->bduv", columns, kernel) + sites.sum(2) * torch.as_tensor(bias).reshape(1, -1, 1, 1)


def at_columns(view: Tensor, y: SparseTensor, dim: int) -> Tensor:
    """The cells of a view (samples, channels, ...) at the sites of ``y``."""
    left = [1 + axis for axis in range(3) if axis != dim]
    batch, u, v = (y.coords[:, axis].long() for axis in (0, *left))
    return view[batch, :, u, v]


@pytest.mark.parametrize("lowest", [None, (9, 8, 10)])
@pytest.mark.parametrize("above", [None, (13, 20, 12)])
def test_a_crop_keeps_the_sites_within_its_bounds(lowest: Any, above: Any) -> None:
    x = cloud(samples=3, empty=1)
    y = SparseCrop(lowest, above)(x)
    inside = torch.ones(len(x), dtype=torch.bool)
    for axis in range(3):
        inside &= x.coords[:, 1 + axis] >= (lowest or (-99,) * 3)[axis]
        inside &= x.coords[:, 1 + axis] < (above or (99,) * 3)[axis]
    assert torch.equal(y.coords, x.coords[inside])
    torch.testing.assert_close(y.feats, x.feats[inside])
    assert (y.num_samples, y.stride) == (3, (1, 1, 1))


def test_what_is_added_has_the_sites_of_both() -> None:
    x = cloud()
    low = SparseCrop(coords_max=(12, 99, 99))(x)
    high = SparseCrop((10, 0, 0))(x)
    strangers = generative_add(x, cloud(seed=5))
    for y, parts in ((generative_add(low, high), (low, high)), (strangers, (x, cloud(seed=5)))):
        torch.testing.assert_close(on_grid(y), sum(map(on_grid, parts)))
        assert torch.equal(there(y), torch.stack([there(part) for part in parts]).amax(0))
    torch.testing.assert_close(generative_add(x, x).feats, 2 * x.feats)
    with pytest.raises(SparseInputError, match=r"different strides: found \(2, 2, 2\)"):
        generative_add(x, AvgPool3d(2)(x))
    with pytest.raises(SparseInputError, match="channels: found 2, expected 3"):
        generative_add(x, x.with_feats(x.feats[:, :2]))


@DIMS
def test_a_reduction_is_the_mean_of_each_column(dim: int) -> None:
    x = cloud(samples=3, empty=1)
    sums, counts = (each.sum(2 + dim) for each in (on_grid(x), there(x)))
    for y in (ToBEVReduction(dim)(x), ToBEVReduction(dim, SIDE)(x)):
        assert torch.equal(there(y).squeeze(1).sum(1 + dim), (counts > 0).squeeze(1).double())
        assert not y.coords[:, 1 + dim].any()
        torch.testing.assert_close(y.feats, at_columns(sums / counts.clamp(min=1), y, dim))


@DIMS
@pytest.mark.parametrize("heights", [14, 15])
@pytest.mark.parametrize("bias", [False, True])
def test_a_convolution_has_a_matrix_for_each_height(dim: int, heights: int, bias: bool) -> None:
    x = cloud(samples=3, empty=1)
    layer = ToBEVConvolution(3, 4, heights, dim=dim, bias=bias).double()
    if bias:
        nn.init.normal_(layer.bias)
    y = layer(x)
    view = weighted(x, layer.kernel, layer.bias if bias else 0.0, dim)
    torch.testing.assert_close(y.feats, at_columns(view, y, dim))
    dense = ToDenseBEVConvolution(3, 4, torch.tensor(bounds(dim, heights)), dim=dim, bias=bias).double()
    dense.load_state_dict(layer.state_dict())
    torch.testing.assert_close(dense(x), view)


@DIMS
def test_heights_become_channels(dim: int) -> None:
    x = cloud(samples=3, empty=1)
    whole = on_grid(x).movedim(2 + dim, 1).flatten(1, 2)
    torch.testing.assert_close(ToBEVHeightCompression(3, bounds(dim, SIDE), dim=dim)(x), whole)
    few = ToBEVHeightCompression(3, bounds(dim, 3), offset=[10 if axis == dim else 0 for axis in range(3)], dim=dim)(x)
    columns = on_grid(x).movedim(2 + dim, 1)
    clamped = torch.stack([columns[:, :11].sum(1), columns[:, 11], columns[:, 12:].sum(1)], 1)
    torch.testing.assert_close(few, clamped.flatten(1, 2))


def test_an_offset_counts_in_the_inputs_units_and_cells_in_the_strides() -> None:
    x = cloud()
    down = AvgPool3d(2)(x)
    layer = ToDenseBEVConvolution(3, 2, (4, 8, 4), offset=(8, 99 * 2, 8)).double()
    torch.testing.assert_close(layer(down), weighted(down, layer.kernel, 0.0, 1)[:, :, 4:8, 4:8])
    high = ToBEVHeightCompression(3, (4, 3, 4), offset=(8, 8, 8))(down)
    cells = on_grid(down)[:, :, 4:8, 4:7, 4:8]
    torch.testing.assert_close(high, cells.movedim(3, 1).flatten(1, 2))
    with pytest.raises(SparseInputError, match=r"offset of the map: found \(9, 8, 8\), expected multiples"):
        ToBEVHeightCompression(3, (4, 3, 4), offset=(9, 8, 8))(down)


VIEWS: dict[str, Callable[[], nn.Module]] = {
    "crop": lambda: SparseCrop((9, 8, 8)),
    "reduction": lambda: ToBEVReduction(2),
    "convolution": lambda: ToBEVConvolution(2, 2, 14, bias=True),
    "dense convolution": lambda: ToDenseBEVConvolution(2, 2, (6, 14, 6), (8, 0, 8), bias=True),
    "compression": lambda: ToBEVHeightCompression(2, (6, 2, 6), (8, 9, 8)),
}


@pytest.mark.parametrize("name", VIEWS)
def test_gradients_are_right(name: str) -> None:
    x = cloud(channels=2, sites=12)
    layer = VIEWS[name]().double()
    parameters = [p.requires_grad_() for p in layer.parameters()]

    def of(feats: Tensor, *_: Tensor) -> Tensor:
        y = layer(x.with_feats(feats))
        return y.feats if isinstance(y, SparseTensor) else y

    assert torch.autograd.gradcheck(of, (x.feats.requires_grad_(), *parameters))


def test_a_sum_of_clouds_has_gradients() -> None:
    x = cloud(channels=1, sites=12)

    def of(one: Tensor, other: Tensor) -> Tensor:
        return generative_add(SparseCrop((10, 0, 0))(x.with_feats(one)), x.with_feats(other)).feats

    assert torch.autograd.gradcheck(of, (x.feats.requires_grad_(), x.feats.detach().clone().requires_grad_()))


def test_layers_go_on_behind_them() -> None:
    x = cloud()
    down = Conv3d(3, 4, 2, 2).double()
    flat = down(ToBEVReduction(1, SIDE)(SparseCrop((9, 9, 9))(x)))
    assert flat.stride == (2, 2, 2)
    assert not flat.coords[:, 2].any()
    with pytest.raises(SparseInputError, match="found a cropped layer"):
        Conv3d(3, 3, 2, 2, transposed=True).double()(SparseCrop((9, 9, 9))(x))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: ToBEVConvolution(3, 4, 12)(cloud().double()),
            "along y: .* outside the column .*expected 0..11 along y",
        ),
        (lambda: ToDenseBEVConvolution(3, 4, (12, 20, 24)).double()(cloud()), "sites outside the grid"),
        (lambda: ToBEVConvolution(3, 4, 9, stride=2), "expected at least 1, and a stride of 1"),
        (lambda: ToBEVReduction(3), "dim: found 3, expected 0, 1 or 2"),
        (lambda: SparseCrop((5, 5, 5), (5, 9, 9))(cloud()), "bounds of a crop"),
        (lambda: SparseCrop((5, 5))(cloud()), "coords_min: found"),
        (lambda: ToBEVHeightCompression(2, (30, 30, 30))(cloud()), "channels: found 3, expected 2"),
    ],
)
def test_what_does_not_fit_is_refused(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(SparseInputError, match=message):
        build()
