"""Pooling over windows of sites, and over whole samples (`torchsparse/nn/modules/pooling.py` has the latter)."""

from __future__ import annotations

from torch import Tensor, nn

from cuda_ops.sparse.nn import functional
from cuda_ops.sparse.nn.checks import triple
from cuda_ops.sparse.nn.functional import Size
from cuda_ops.sparse.nn.tensor import SparseTensor


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
