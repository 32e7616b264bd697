from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from cuda_ops.sparse.nn import Conv3d, MaxPool3d, SparseInputError, SparseTensor
from cuda_ops.sparse.nn import functional as sparse_functional
from tests.cuda_ops.sparse.nn.clouds import SIDE, at_sites, cloud, on_grid

Triple = tuple[int, int, int]


def layer(*arguments: Any, **keywords: Any) -> Conv3d:
    return Conv3d(*arguments, **keywords).double()


def dense_weight(conv: Conv3d) -> Tensor:
    """(out, in, x, y, z)."""
    return conv.kernel.reshape(*conv.kernel_size, conv.in_channels, conv.out_channels).permute(4, 3, 0, 1, 2)


def padded(kernel: Triple, dilation: Triple) -> tuple[list[int], list[int]]:
    """What to pad in front and behind: an odd kernel is centred, an even one starts at its site."""
    field = [(n - 1) * d for n, d in zip(kernel, dilation, strict=True)]
    front = [f // 2 if n % 2 else 0 for n, f in zip(kernel, field, strict=True)]
    return front, [f - a for f, a in zip(field, front, strict=True)]


def dense_conv(conv: Conv3d, grid: Tensor, weight: Tensor | None = None) -> Tensor:
    front, behind = padded(conv.kernel_size, conv.dilation)
    pads = [each for pair in zip(reversed(front), reversed(behind), strict=True) for each in pair]
    weight = dense_weight(conv) if weight is None else weight
    bias = conv.bias if weight.shape[0] == conv.out_channels else None
    return functional.conv3d(functional.pad(grid, pads), weight, bias, conv.stride, 0, conv.dilation)


def dense_transposed(conv: Conv3d, grid: Tensor, weight: Tensor | None = None) -> Tensor:
    front, _ = padded(conv.kernel_size, conv.dilation)
    weight = dense_weight(conv) if weight is None else weight
    bias = conv.bias if weight.shape[0] == conv.out_channels else None
    flipped = weight.transpose(0, 1)
    return functional.conv_transpose3d(grid, flipped, bias, conv.stride, front, 0, 1, conv.dilation)


def sites(grid: Tensor) -> Tensor:
    """(sites, 4): where the first channel is not 0."""
    return grid[:, 0].nonzero().to(torch.int32)


@pytest.mark.parametrize("kernel", [3, 5, 2, 4, (3, 1, 2), (1, 3, 3)])
@pytest.mark.parametrize("dilation", [1, 2, (1, 2, 3)])
@pytest.mark.parametrize("bias", [False, True])
def test_at_stride_1_it_is_the_dense_convolution_at_the_sites(kernel: Any, dilation: Any, bias: bool) -> None:
    x = cloud()
    conv = layer(3, 4, kernel, dilation=dilation, bias=bias)
    y = conv(x)
    assert torch.equal(y.coords, x.coords)
    torch.testing.assert_close(y.feats, at_sites(dense_conv(conv, on_grid(x)), x))


@pytest.mark.parametrize(
    ("kernel", "stride", "dilation"),
    [(2, 2, 1), (3, 2, 1), (3, 3, 1), (1, 2, 1), (3, 2, 2), (4, 2, 1), (2, 3, 2), ((3, 2, 1), (2, 2, 1), 1)],
)
def test_strided_it_is_the_dense_convolution_wherever_its_field_holds_a_site(
    kernel: Any, stride: Any, dilation: Any
) -> None:
    x = cloud(sites=20)
    conv = layer(3, 4, kernel, stride, dilation=dilation, bias=True)
    y = conv(x)
    held = dense_conv(
        conv, on_grid(x.with_feats(torch.ones(20, 1).double())), torch.ones(1, 1, *conv.kernel_size).double()
    )
    assert torch.equal(y.coords, sites(held.round()))
    torch.testing.assert_close(y.feats, at_sites(dense_conv(conv, on_grid(x)), y))
    assert y.stride == conv.stride


@pytest.mark.parametrize(("kernel", "stride", "dilation"), [(2, 2, 1), (3, 2, 1), (3, 3, 2), ((3, 2, 1), (2, 2, 1), 1)])
@pytest.mark.parametrize("other_kernel", [None, 3])
def test_transposed_it_leads_back_to_the_very_sites(kernel: Any, stride: Any, dilation: Any, other_kernel: Any) -> None:
    x = cloud(sites=30)
    middle = layer(3, 4, kernel, stride, dilation=dilation)(x)
    up = layer(4, 2, other_kernel or kernel, stride, dilation=dilation, transposed=True, bias=True)
    y = up(middle)
    assert y.route == x.route
    assert torch.equal(y.coords, x.coords)
    torch.testing.assert_close(y.feats, at_sites(dense_transposed(up, on_grid(middle)), y))


def test_transposed_after_pooling_and_at_stride_1() -> None:
    x = cloud(sites=30)
    up = layer(3, 2, 2, 2, transposed=True)
    pooled = MaxPool3d(2)(x)
    torch.testing.assert_close(up(pooled).feats, at_sites(dense_transposed(up, on_grid(pooled)), x))
    same = layer(3, 2, 3, transposed=True)
    torch.testing.assert_close(same(x).feats, at_sites(dense_transposed(same, on_grid(x)), x))


@pytest.mark.parametrize(("kernel", "stride", "dilation"), [(2, 2, 1), (3, 2, 1), (3, 1, 1), ((3, 2, 1), (2, 2, 1), 2)])
def test_generative_it_makes_every_site_that_is_reached(kernel: Any, stride: Any, dilation: Any) -> None:
    x = cloud(sites=10)
    conv = layer(3, 4, kernel, stride, dilation=dilation, transposed=True, generative=True)
    y = conv(x)
    ones = on_grid(x.with_feats(torch.ones(10, 1).double()))
    assert torch.equal(
        y.coords, sites(dense_transposed(conv, ones, torch.ones(1, 1, *conv.kernel_size).double()).round())
    )
    torch.testing.assert_close(y.feats, at_sites(dense_transposed(conv, on_grid(x)), y))
    assert torch.equal(layer(4, 1, 2, 2)(y).coords[:, 0].unique(), x.coords[:, 0].unique())


def test_a_single_offset_is_a_matrix() -> None:
    x = cloud()
    conv = layer(3, 5, 1, bias=True)
    assert conv.kernel.shape == (3, 5)
    torch.testing.assert_close(conv(x).feats, x.feats @ conv.kernel + conv.bias)


def test_the_gradients_are_those_of_the_dense_convolution() -> None:
    x = cloud()
    leaf = x.feats.requires_grad_()
    down = layer(3, 4, 3, 2, bias=True)
    up = layer(4, 2, 3, 2, transposed=True)
    up(down(x)).feats.pow(2).sum().backward()
    found = [leaf.grad, *(parameter.grad for parameter in (*down.parameters(), *up.parameters()))]
    twin = leaf.detach().clone().requires_grad_()
    middle = dense_conv(down, on_grid(x.with_feats(twin)))
    held = on_grid(down(x).with_feats(torch.ones(len(down(x)), 1).double()))[
        ..., : middle.shape[2], : middle.shape[3], : middle.shape[4]
    ]
    grid = dense_transposed(up, middle * held)
    wanted = torch.autograd.grad(at_sites(grid, x).pow(2).sum(), [twin, *down.parameters(), *up.parameters()])
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("keywords", [{}, {"stride": 2}, {"stride": 2, "transposed": True, "generative": True}])
def test_an_empty_cloud_stays_empty(keywords: dict[str, Any]) -> None:
    x = SparseTensor(torch.zeros(0, 3).double(), torch.zeros(0, 4, dtype=torch.int32), num_samples=2)
    conv = layer(3, 4, 2, **keywords)
    y = conv(x)
    assert (y.feats.shape, y.num_samples) == ((0, 4), 2)
    y.feats.sum().backward()
    assert conv.kernel.grad is not None
    assert not conv.kernel.grad.any()


def test_an_empty_sample_changes_nothing_for_the_others() -> None:
    x = cloud(samples=3, empty=1)
    conv = layer(3, 4, 3, 2)
    there = x.coords.clone()
    there[:, 0] = there[:, 0] // 2
    torch.testing.assert_close(conv(x).feats, conv(SparseTensor(x.feats, there, num_samples=2)).feats)


def test_parameters_have_the_names_and_shapes_of_torchsparse() -> None:
    assert {name: tuple(p.shape) for name, p in Conv3d(3, 5, 3, bias=True).named_parameters()} == {
        "kernel": (27, 3, 5),
        "bias": (5,),
    }
    assert Conv3d(3, 5, (1, 2, 3)).kernel.shape == (6, 3, 5)
    assert Conv3d(3, 5, 1, 2).kernel.shape == (1, 3, 5)
    bound = 1 / math.sqrt(5 * 8)
    assert Conv3d(300, 5, 2, 2, transposed=True).kernel.abs().max() <= bound
    assert Conv3d(300, 5, 2, 2, transposed=True).kernel.abs().max() > 0.9 * bound


def test_a_padding_is_taken_only_where_it_is_the_built_in_one() -> None:
    Conv3d(1, 1, 3, 2, padding=1)
    Conv3d(1, 1, 3, 1, padding=0)
    Conv3d(1, 1, (3, 2, 1), 2, padding=(1, 0, 0))
    for wrong in (0, (1, 1), 2):
        with pytest.raises(SparseInputError, match=r"padding: found .*, expected \(1, 1, 1\)"):
            Conv3d(1, 1, 3, 2, padding=wrong)


def test_a_transposed_convolution_with_no_step_to_undo_names_the_strides() -> None:
    x = cloud()
    down = layer(3, 3, 2, 2)(x)
    with pytest.raises(SparseInputError, match=r"of stride \(2, 2, 2\) at stride \(1, 1, 1\) .*found no strided layer"):
        layer(3, 3, 2, 2, transposed=True)(x)
    with pytest.raises(
        SparseInputError, match=r"stride \(4, 4, 4\) at stride \(2, 2, 2\).*of stride \(2, 2, 2\) that led"
    ):
        layer(3, 3, 2, 4, transposed=True)(down)
    generated = layer(3, 3, 2, 2, transposed=True, generative=True)(down)
    with pytest.raises(SparseInputError, match="a generated layer"):
        layer(3, 3, 2, 2, transposed=True)(generated)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, 4, 0), "kernel_size: found 0"),
        ((3, 4, (3, 3)), r"kernel_size: found \(3, 3\)"),
        ((3, 4, 3, -1), "stride: found -1"),
        ((0, 4, 3), r"number of channels: found \(0, 4\)"),
    ],
)
def test_numbers_that_make_no_convolution_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(SparseInputError, match=message):
        Conv3d(*arguments)


def test_wrong_channels_weights_and_ways_are_refused_in_use() -> None:
    x = cloud()
    with pytest.raises(SparseInputError, match="number of channels: found 3, expected 4"):
        layer(4, 2, 3)(x)
    with pytest.raises(SparseInputError, match=r"shape of the weight: found \[8, 3, 2\], expected \[27, in, out\]"):
        sparse_functional.conv3d(x, torch.zeros(8, 3, 2).double(), 3)
    for refuse in (
        lambda: Conv3d(3, 2, 2, 2, generative=True),
        lambda: sparse_functional.conv3d(x, torch.zeros(8, 3, 2).double(), 2, stride=2, generative=True),
    ):
        with pytest.raises(SparseInputError, match="generative convolution that is not transposed"):
            refuse()


def test_layers_on_the_same_sites_share_one_map() -> None:
    x = cloud()
    y = layer(3, 3, 3)(layer(3, 3, 3)(x))
    assert y.geometry is x.geometry
    one = sparse_functional.conv_map(x, (3, 3, 3), (1, 1, 1), (1, 1, 1), False, False)[1]
    assert one is sparse_functional.conv_map(y, (3, 3, 3), (1, 1, 1), (1, 1, 1), False, False)[1]


def test_it_says_what_it_is() -> None:
    assert repr(Conv3d(3, 4)) == "Conv3d(3, 4, kernel_size=(3, 3, 3))"
    assert repr(Conv3d(3, 4, 2, 2, transposed=True, bias=True)) == (
        "Conv3d(3, 4, kernel_size=(2, 2, 2), stride=(2, 2, 2), transposed=True, bias=True)"
    )


def test_the_grid_of_these_tests_is_large_enough() -> None:
    assert int(cloud().coords[:, 1:].max()) * 1.5 < SIDE
