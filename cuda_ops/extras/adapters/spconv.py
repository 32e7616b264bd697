"""Tensors and weights of spconv 2.

Its indices are (batch, z, y, x) by custom and its weight is (out, z, y, x, in) (`spconv/pytorch/conv.py`,
ALL_WEIGHT_IS_KRSC); with ``order="xyz"`` the axes are taken as they stand. It sums ``in[o * stride + k - padding]``, so
that ours is its padding of (n - 1) / 2 for odd sizes and 0 for even ones. It drops outputs outside of its spatial
shape; we have no shape and keep them. A trap: a convolution of kernel 1 and stride 1 reads its weight's memory as (in,
out), though its shape says (out, 1, 1, 1, in) (`_conv_forward`, conv1x1), and so do we.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any, Literal

from torch import Tensor, nn

from cuda_ops.extras.adapters import weights
from cuda_ops.extras.adapters.weights import WeightLayout
from cuda_ops.sparse.errors import SparseInputError
from cuda_ops.sparse.nn import Conv3d, SparseTensor

AxisOrder = Literal["zyx", "xyz"]


def from_spconv(tensor: Any, stride: int | Sequence[int] = 1, *, order: AxisOrder = "zyx") -> SparseTensor:
    """Ours of a ``SparseConvTensor``; rows are sorted, row ``i`` was row ``order[i]``.

    Args:
        tensor: the tensor.
        stride: of its indices, which spconv does not keep; in the order x, y, z.
        order: of its axes.
    """
    columns = [0, 3, 2, 1] if order == "zyx" else [0, 1, 2, 3]
    return SparseTensor(tensor.features, tensor.indices[:, columns], stride, num_samples=tensor.batch_size)


def to_spconv(x: SparseTensor, spatial_shape: Sequence[int] | None = None, *, order: AxisOrder = "zyx") -> Any:
    """A ``SparseConvTensor`` of ours.

    Args:
        x: its coordinates must not be negative.
        spatial_shape: of the grid along x, y and z; None: up to the largest coordinates.
        order: of the axes there.

    Raises:
        SparseInputError: a coordinate is negative or outside of the shape.
    """
    coords = x.coords
    extent = [0, 0, 0] if not len(x) else (coords[:, 1:].max(0).values + 1).tolist()
    shape = [max(each, 1) for each in extent] if spatial_shape is None else list(spatial_shape)
    lowest = 0 if not len(x) else int(coords[:, 1:].min())
    if lowest < 0 or any(a > b for a, b in zip(extent, shape, strict=True)):
        raise SparseInputError(
            "coordinates outside of the spatial shape",
            where="to_spconv",
            actual=f"{lowest} to {extent}",
            expected=f"0 to {shape}",
            remedy="move the cloud or give a larger spatial_shape",
        )
    columns = [0, 3, 2, 1] if order == "zyx" else [0, 1, 2, 3]
    return import_module("spconv.pytorch").SparseConvTensor(
        x.feats, coords[:, columns].contiguous(), shape[::-1] if order == "zyx" else shape, x.num_samples
    )


def load_spconv_state_dict(
    module: nn.Module, state: Mapping[str, Tensor], *, order: AxisOrder = "zyx", strict: bool = True
) -> None:
    """Loads an spconv network's state dict into the same network of ours; ``weight`` becomes ``kernel``.

    Raises:
        SparseInputError: entries do not fit.
    """
    weights.load(module, state, _layout(order), strict=strict)


def to_spconv_state_dict(module: nn.Module, *, order: AxisOrder = "zyx") -> dict[str, Tensor]:
    """The state dict of a network of ours for the same network of spconv."""
    return weights.dump(module, _layout(order))


def _layout(order: AxisOrder) -> WeightLayout:
    return WeightLayout("spconv", _rename, partial(_to_ours, order=order), partial(_to_theirs, order=order))


def _rename(module: nn.Module, name: str) -> str:
    return "weight" if isinstance(module, Conv3d) and name == "kernel" else name


def _to_ours(value: Tensor, convolution: Conv3d, name: str, *, order: AxisOrder) -> Tensor:
    if name != "kernel":
        return value
    sizes = convolution.kernel_size if order == "xyz" else convolution.kernel_size[::-1]
    shape = (convolution.out_channels, *sizes, convolution.in_channels)
    if tuple(value.shape) != shape:
        raise SparseInputError(
            "shape of a weight",
            where="state dict of spconv",
            actual=list(value.shape),
            expected=list(shape),
            remedy="save it with spconv 2.2 or later, whose weight is (out, z, y, x, in), from the same network",
        )
    if convolution.kernel.ndim == 2:
        return value.reshape(convolution.in_channels, convolution.out_channels)
    axes = (3, 2, 1) if order == "zyx" else (1, 2, 3)
    return value.permute(*axes, 4, 0).reshape(convolution.kernel.shape).contiguous()


def _to_theirs(value: Tensor, convolution: Conv3d, name: str, *, order: AxisOrder) -> Tensor:
    if name != "kernel":
        return value
    if value.ndim == 2:
        return value.reshape(convolution.out_channels, 1, 1, 1, convolution.in_channels)
    grid = value.reshape(*convolution.kernel_size, convolution.in_channels, convolution.out_channels)
    axes = (2, 1, 0) if order == "zyx" else (0, 1, 2)
    return grid.permute(4, *axes, 3).contiguous()
