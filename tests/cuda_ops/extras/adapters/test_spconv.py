from __future__ import annotations

import warnings
from typing import Any, Literal

import pytest
import torch
from torch import nn

from cuda_ops.extras.adapters.spconv import from_spconv, load_spconv_state_dict, to_spconv, to_spconv_state_dict
from cuda_ops.sparse import nn as spnn
from cuda_ops.sparse.nn import SparseInputError, SparseTensor
from tests.cuda_ops.sparse.nn.clouds import SIDE, cloud

Order = Literal["zyx", "xyz"]
SHAPE = (SIDE, SIDE - 2, SIDE - 4)
each_order = pytest.mark.parametrize("order", ["zyx", "xyz"])


@pytest.fixture(scope="module")
def library() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("spconv.pytorch")


def float_cloud(**keywords: Any) -> SparseTensor:
    return cloud(**keywords).float()


def turned(sizes: tuple[int, int, int], order: Order) -> tuple[int, ...]:
    return sizes[::-1] if order == "zyx" else sizes


@each_order
def test_a_tensor_goes_there_and_comes_back(library: Any, order: Order) -> None:
    x = float_cloud(samples=3, empty=1)
    there = to_spconv(x, SHAPE, order=order)
    assert (there.batch_size, tuple(there.spatial_shape)) == (3, turned(SHAPE, order))
    if order == "zyx":
        assert torch.equal(there.indices[:, 1], x.coords[:, 3])
    back = from_spconv(there, order=order)
    assert torch.equal(back.coords, x.coords)
    torch.testing.assert_close(back.feats, x.feats)
    assert back.num_samples == 3


def test_dense_grids_and_views_from_above_agree(library: Any) -> None:
    x = float_cloud(samples=3, empty=1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using a non-tuple sequence", UserWarning)  # spconv's
        grid = to_spconv(x, SHAPE, order="xyz").dense()
    torch.testing.assert_close(spnn.to_dense(x, SHAPE), grid)
    view = spnn.ToBEVHeightCompression(3, SHAPE, dim=2)(x)  # as detectors make it: channels of one height side by side
    torch.testing.assert_close(view, grid.permute(0, 4, 1, 2, 3).flatten(1, 2))


def test_the_shape_of_the_grid_is_found_or_given(library: Any) -> None:
    x = SparseTensor(torch.ones(2, 1), torch.tensor([[0, 4, 2, 0], [0, 1, 5, 0]], dtype=torch.int32))
    assert to_spconv(x).spatial_shape == [1, 6, 5]
    with pytest.raises(SparseInputError, match=r"found 0 to \[5, 6, 1\], expected 0 to \[5, 5, 5\]"):
        to_spconv(x, (5, 5, 5))
    below = SparseTensor(torch.ones(1, 1), torch.tensor([[0, -1, 0, 0]], dtype=torch.int32))
    with pytest.raises(SparseInputError, match="outside of the spatial shape"):
        to_spconv(below)


@each_order
@pytest.mark.parametrize(("kernel", "dilation"), [((3, 3, 3), 1), ((1, 3, 5), 1), ((3, 3, 3), 2), ((1, 1, 1), 1)])
def test_submanifold_convolutions_agree(library: Any, order: Order, kernel: Any, dilation: int) -> None:
    theirs = library.SubMConv3d(3, 4, turned(kernel, order), dilation=dilation, bias=True)
    ours = spnn.Conv3d(3, 4, kernel, dilation=dilation, bias=True)
    load_spconv_state_dict(ours, theirs.state_dict(), order=order)
    x = float_cloud()
    with torch.no_grad():
        wanted = from_spconv(theirs(to_spconv(x, SHAPE, order=order)), order=order)
        torch.testing.assert_close(ours(x).feats, wanted.feats)


@each_order
@pytest.mark.parametrize(("kernel", "stride"), [((2, 2, 2), 2), ((3, 3, 3), 2), ((3, 2, 1), (2, 2, 1)), ((3, 3, 3), 3)])
def test_strided_and_inverse_convolutions_agree(library: Any, order: Order, kernel: Any, stride: Any) -> None:
    padding = tuple((n - 1) // 2 if n % 2 else 0 for n in kernel)
    steps = turned(stride, order) if isinstance(stride, tuple) else stride
    theirs = nn.ModuleList(
        [
            library.SparseConv3d(
                3, 4, turned(kernel, order), steps, turned(padding, order), bias=False, indice_key="down"
            ),
            library.SparseInverseConv3d(4, 2, turned(kernel, order), indice_key="down", bias=True),
        ]
    )
    ours = nn.ModuleList(
        [spnn.Conv3d(3, 4, kernel, stride), spnn.Conv3d(4, 2, kernel, stride, transposed=True, bias=True)]
    )
    load_spconv_state_dict(ours, theirs.state_dict(), order=order)
    x = float_cloud(sites=40)
    with torch.no_grad():
        middle = theirs[0](to_spconv(x, SHAPE, order=order))
        wanted = from_spconv(middle, 2, order=order)
        down = ours[0](x)
        assert torch.equal(down.coords, wanted.coords)
        torch.testing.assert_close(down.feats, wanted.feats)
        back = from_spconv(theirs[1](middle), order=order)
        torch.testing.assert_close(ours[1](down).feats, back.feats)


@each_order
def test_weights_go_there_and_come_back(library: Any, order: Order) -> None:
    ours = nn.Sequential(spnn.Conv3d(3, 4, (1, 2, 3), bias=True), spnn.BatchNorm(4), spnn.Conv3d(4, 2, 1))
    theirs = nn.Sequential(
        library.SparseConv3d(3, 4, turned((1, 2, 3), order)), nn.BatchNorm1d(4), library.SubMConv3d(4, 2, 1, bias=False)
    )
    theirs.load_state_dict(to_spconv_state_dict(ours, order=order))
    twin = nn.Sequential(spnn.Conv3d(3, 4, (1, 2, 3), bias=True), spnn.BatchNorm(4), spnn.Conv3d(4, 2, 1))
    load_spconv_state_dict(twin, theirs.state_dict(), order=order)
    for one, other in zip(ours.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.equal(one, other)


def test_state_dicts_that_do_not_fit_are_refused() -> None:
    ours = nn.Sequential(spnn.Conv3d(3, 4, 3), spnn.BatchNorm(4))
    state = to_spconv_state_dict(ours)
    older = {**state, "0.weight": torch.zeros(3, 3, 3, 3, 4)}
    with pytest.raises(SparseInputError, match=r"found \[3, 3, 3, 3, 4\], expected \[4, 3, 3, 3, 3\]"):
        load_spconv_state_dict(ours, older)
    with pytest.raises(SparseInputError, match=r"found 1 unknown: extra, expected 1 missing: 1.running_var"):
        load_spconv_state_dict(
            ours, {**{k: v for k, v in state.items() if k != "1.running_var"}, "extra": state["1.bias"]}
        )
    with pytest.raises(SparseInputError, match=r"shape of 1.weight: found \[5\], expected \[4\], of 1.weight here"):
        load_spconv_state_dict(ours, {**state, "1.weight": torch.zeros(5)})
    load_spconv_state_dict(ours, {"0.weight": state["0.weight"]}, strict=False)
