from __future__ import annotations

import operator

import pytest
import torch

from cuda_ops.sparse.nn import BatchNorm, Conv3d, SparseInputError, SparseTensor, cat
from tests.cuda_ops.sparse.nn.clouds import cloud


def test_rows_are_sorted_and_order_says_where_each_was() -> None:
    coords = torch.tensor([[1, 0, 0, 0], [0, 2, -1, 0], [0, 2, -3, 5]], dtype=torch.int32)
    feats = torch.arange(6.0).view(3, 2)
    x = SparseTensor(feats, coords)
    assert x.C.tolist() == [[0, 2, -3, 5], [0, 2, -1, 0], [1, 0, 0, 0]]
    torch.testing.assert_close(x.F, feats[[2, 1, 0]])
    assert x.order is not None
    assert x.order.tolist() == [2, 1, 0]
    assert (x.num_samples, x.s, len(x), x.coords.dtype) == (2, (1, 1, 1), 3, torch.int32)


def test_a_sample_may_be_empty_and_so_may_the_batch() -> None:
    x = cloud(samples=3, empty=1)
    assert x.segments.lengths[1] == 0
    assert x.segments.lengths.sum() == len(x)
    nothing = SparseTensor(torch.zeros(0, 4), torch.zeros(0, 4, dtype=torch.int32), num_samples=2)
    assert nothing.segments.lengths.tolist() == [0, 0]
    assert nothing.coords.shape == (0, 4)


def test_the_stride_is_the_inputs_times_that_of_the_layers() -> None:
    x = SparseTensor(torch.ones(1, 1), torch.zeros(1, 4, dtype=torch.int32), (1, 2, 4))
    down = Conv3d(1, 1, 2, stride=(2, 2, 1))(x)
    assert (x.stride, down.stride) == ((1, 2, 4), (2, 4, 4))
    assert down.order is None


@pytest.mark.parametrize(
    ("feats", "coords", "message"),
    [
        (torch.ones(2, 1), torch.zeros(2, 5, dtype=torch.int32), r"found \[2, 5\], expected \[sites, 4\]"),
        (torch.ones(1, 1), torch.zeros(1, 4), "found torch.float32, expected torch.int32"),
        (torch.ones(3, 1), torch.zeros(2, 4, dtype=torch.int32), "rows of features: found 3, expected 2"),
        (torch.ones(2, 1, 1), torch.zeros(2, 4, dtype=torch.int32), r"found \[2, 1, 1\], expected \[sites, channels\]"),
        (torch.ones(2, 1), torch.zeros(2, 4, dtype=torch.int32), "duplicate"),
        (torch.ones(1, 1), torch.tensor([[0, 1 << 17, 0, 0]], dtype=torch.int32), "131072"),
        (torch.ones(1, 1), torch.tensor([[0, 1 << 40, 0, 0]]), "out of range"),  # wraps to 0 in int32
        (torch.ones(1, 1), torch.tensor([[-1, 0, 0, 0]], dtype=torch.int32), "batch"),
    ],
)
def test_what_is_no_cloud_is_refused(feats: torch.Tensor, coords: torch.Tensor, message: str) -> None:
    with pytest.raises(SparseInputError, match=message):
        SparseTensor(feats, coords)


def test_a_batch_index_is_below_the_number_of_samples() -> None:
    with pytest.raises(SparseInputError):
        SparseTensor(torch.ones(1, 1), torch.tensor([[2, 0, 0, 0]], dtype=torch.int32), num_samples=2)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_features_that_are_not_finite_are_refused_where_a_check_is_asked_for(value: float) -> None:
    coords = torch.tensor([[0, 0, 0, 0], [0, 0, 0, 1]], dtype=torch.int32)
    feats = torch.tensor([[1.0, value], [0.0, 2.0]])
    assert len(SparseTensor(feats, coords)) == 2
    with pytest.raises(SparseInputError, match="NaN or infinite: found 1 of 4"):
        SparseTensor(feats, coords, check_finite=True)


@pytest.mark.parametrize("sign", [operator.add, operator.sub, operator.mul, operator.truediv])
def test_arithmetic_is_that_of_the_features(sign: object) -> None:
    x = cloud()
    y = cloud()
    assert x.geometry is not y.geometry
    for other, plain in ((y, y.feats), (2.5, 2.5), (x.feats + 3, x.feats + 3)):
        torch.testing.assert_close(sign(x, other).feats, sign(x.feats, plain))  # type: ignore[operator]
    torch.testing.assert_close((-x).feats, -x.feats)
    torch.testing.assert_close((2 * x + 1).feats, (1 + x * 2).feats)


def test_channels_of_tensors_on_one_site_set_are_joined() -> None:
    x = cloud()
    y = Conv3d(3, 2, 3).double()(x)
    joined = cat([x, y, x])
    assert joined.geometry is x.geometry
    torch.testing.assert_close(joined.feats, torch.cat((x.feats, y.feats, x.feats), 1))


def test_tensors_that_do_not_belong_together_are_neither_added_nor_joined() -> None:
    x = cloud()
    other = cloud(seed=1)
    down = Conv3d(3, 3, 2, 2).double()(x)
    wider = Conv3d(3, 3, 3, 2).double()(x)
    with pytest.raises(SparseInputError, match=r"different strides: found \(2, 2, 2\), expected \(1, 1, 1\)"):
        x + down
    with pytest.raises(SparseInputError, match="different sites"):
        cat([x, other])
    with pytest.raises(SparseInputError, match=r"by strided 3/2, expected .* by strided 2/2"):
        down + wider
    with pytest.raises(SparseInputError, match="number of channels: found 2, expected 3"):
        x + Conv3d(3, 2, 1).double()(x)
    with pytest.raises(SparseInputError, match="no tensors: found 0"):
        cat([])


def test_dtypes_and_devices_change_in_a_new_tensor() -> None:
    x = cloud()
    assert (x.half().dtype, x.float().dtype, x.bfloat16().dtype) == (torch.float16, torch.float32, torch.bfloat16)
    assert (x.dtype, x.double().dtype, x.cpu().device.type) == (torch.float64, torch.float64, "cpu")
    assert x.half().geometry is x.geometry
    x.feats.requires_grad_()
    assert not (x * 2).detach().feats.requires_grad
    assert x.half().order is x.order


@pytest.mark.cuda
def test_a_tensor_moves_to_a_gpu_with_its_route() -> None:
    x = BatchNorm(3).double()(cloud())
    moved = Conv3d(3, 4, 2, 2).double()(x).cuda()
    back = Conv3d(4, 3, 2, 2, transposed=True).double().cuda()(moved)
    torch.testing.assert_close(back.coords.cpu(), x.coords)


def test_it_says_what_it_is() -> None:
    assert repr(cloud()) == "SparseTensor(60 sites, 3 channels, stride (1, 1, 1), torch.float64, cpu)"
