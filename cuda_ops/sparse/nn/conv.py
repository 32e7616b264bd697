"""The convolution module, named and shaped as torchsparse's (`torchsparse/nn/modules/conv.py` of 2.1).

Pooling over windows of sites, and over whole samples (`torchsparse/nn/modules/pooling.py` has the latter).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from cuda_ops.sparse.errors import SparseInputError
from cuda_ops.sparse.geometry import Triple
from cuda_ops.sparse.nn import functional
from cuda_ops.sparse.nn.checks import triple, volume
from cuda_ops.sparse.nn.functional import Size, conv3d
from cuda_ops.sparse.nn.tensor import SparseTensor


class Conv3d(nn.Module):
    """A sparse convolution: submanifold at stride 1, strided, transposed, or generative.

    The parameter ``kernel`` is (offsets, in channels, out channels), and (in, out) for a single offset at stride 1, as
    torchsparse has it, so that state dicts have the same names and shapes. The order of the offsets is ours, x slowest
    and z fastest; torchsparse's is that only where the number of offsets is even: load its checkpoints through
    :mod:`cuda_ops.sparse.adapters.torchsparse`.

    Args:
        in_channels, out_channels: of the features.
        kernel_size, stride, dilation: one number, or three for x, y and z.
        bias: add one number per output channel.
        transposed: go back to the sites that the strided layer before came from.
        generative: with ``transposed``: make every site that is reached.
        padding: torchsparse's, and checked only: an odd kernel is centred here and an even one starts at its site,
            which is padding (kernel - 1) / 2 and 0.

    Raises:
        SparseInputError: numbers that fit no convolution, and, in use, another number of channels.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size = 3,
        stride: Size = 1,
        *,
        dilation: Size = 1,
        bias: bool = False,
        transposed: bool = False,
        generative: bool = False,
        padding: Size | None = None,
    ) -> None:
        super().__init__()
        self.in_channels, self.out_channels = in_channels, out_channels
        self.kernel_size = triple(kernel_size, "kernel_size", "Conv3d")
        self.stride = triple(stride, "stride", "Conv3d")
        self.dilation = triple(dilation, "dilation", "Conv3d")
        self.transposed, self.generative = transposed, generative
        self.kernel_volume = volume(self.kernel_size)
        _require_channels(in_channels, out_channels)
        _require_transposed(transposed, generative)
        _require_padding(padding, self.kernel_size, self.stride, self.dilation)
        single = self.kernel_volume == 1 and self.stride == (1, 1, 1)
        shape = (in_channels, out_channels) if single else (self.kernel_volume, in_channels, out_channels)
        self.kernel = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(out_channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform in one over the root of the numbers that an output sums, as torchsparse draws them."""
        summed = (self.out_channels if self.transposed else self.in_channels) * self.kernel_volume
        bound = 1 / math.sqrt(summed)
        nn.init.uniform_(self.kernel, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, input: SparseTensor) -> SparseTensor:
        """See the class."""
        return conv3d(
            input,
            self.kernel,
            self.kernel_size,
            bias=self.bias,
            stride=self.stride,
            dilation=self.dilation,
            transposed=self.transposed,
            generative=self.generative,
        )

    def extra_repr(self) -> str:
        """Channels and kernel, and what differs from the defaults."""
        parts = [f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}"]
        parts += [f"{name}={value}" for name in ("stride", "dilation") if (value := getattr(self, name)) != (1, 1, 1)]
        parts += [f"{name}=True" for name in ("transposed", "generative") if getattr(self, name)]
        return ", ".join(parts if self.bias is None else [*parts, "bias=True"])


def _require_channels(in_channels: int, out_channels: int) -> None:
    if min(in_channels, out_channels) < 1:
        raise SparseInputError(
            "number of channels",
            where="Conv3d",
            found=(in_channels, out_channels),
            expected="at least 1 in and 1 out",
            remedy="give the channels of the features that come in and go out",
        )


def _require_transposed(transposed: bool, generative: bool) -> None:
    if generative and not transposed:
        raise SparseInputError(
            "a generative convolution that is not transposed",
            where="Conv3d",
            found="transposed=False",
            expected="transposed=True",
            remedy="strided convolutions make new sites by themselves",
        )


def _require_padding(padding: Size | None, kernel: Triple, stride: Triple, dilation: Triple) -> None:
    """Refuse what would move the kernel; at stride 1 torchsparse centres an odd one whatever it is given."""
    if padding is None:
        return
    given = (padding,) * 3 if isinstance(padding, int) else tuple(padding)
    built_in = tuple((n - 1) // 2 * d if n % 2 else 0 for n, d in zip(kernel, dilation, strict=True))
    free = tuple(n % 2 == 1 and s == 1 for n, s in zip(kernel, stride, strict=True))
    if len(given) != 3 or any(not ok and a != b for ok, a, b in zip(free, given, built_in, strict=True)):
        raise SparseInputError(
            "padding",
            where="Conv3d",
            found=padding,
            expected=f"{built_in} for a kernel of {kernel}",
            remedy="leave padding out: odd kernels are centred and even ones start at their site",
        )


class _Pool3d(nn.Module):
    """Holds a window: kernel, stride (the kernel's unless given) and dilation."""

    def __init__(self, kernel_size: Size, stride: Size | None = None, dilation: Size = 1) -> None:
        super().__init__()
        name = type(self).__name__
        self.kernel_size = triple(kernel_size, "kernel_size", name)
        self.stride = self.kernel_size if stride is None else triple(stride, "stride", name)
        self.dilation = triple(dilation, "dilation", name)

    def extra_repr(self) -> str:
        """The window."""
        return f"kernel_size={self.kernel_size}, stride={self.stride}, dilation={self.dilation}"


class MaxPool3d(_Pool3d):
    """The largest of the sites in each window that are there."""

    def forward(self, input: SparseTensor) -> SparseTensor:
        """See the class."""
        return functional.max_pool3d(input, self.kernel_size, self.stride, self.dilation)


class AvgPool3d(_Pool3d):
    """The mean of the sites in each window that are there."""

    def forward(self, input: SparseTensor) -> SparseTensor:
        """See the class."""
        return functional.avg_pool3d(input, self.kernel_size, self.stride, self.dilation)


class GlobalAvgPool(nn.Module):
    """(samples, channels): each sample's mean over its sites; 0 for an empty sample."""

    def forward(self, input: SparseTensor) -> Tensor:
        """See the class."""
        return functional.global_avg_pool(input)


class GlobalMaxPool(nn.Module):
    """(samples, channels): each sample's largest over its sites; 0 for an empty sample."""

    def forward(self, input: SparseTensor) -> Tensor:
        """See the class."""
        return functional.global_max_pool(input)
