"""`torchsparse.backbones.modules`: the blocks that its backbones are built of."""

from __future__ import annotations

from profiler.models.sparse_blocks import ConvBlock as SparseConvBlock
from profiler.models.sparse_blocks import KernelSize
from profiler.models.sparse_blocks import ResidualBlock as SparseResBlock

__all__ = ["SparseConvBlock", "SparseConvTransposeBlock", "SparseResBlock"]


class SparseConvTransposeBlock(SparseConvBlock):
    """Back to the sites of the level above: transposed convolution without bias, batch norm, ReLU."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: KernelSize,
        stride: KernelSize = 1,
        dilation: KernelSize = 1,
    ) -> None:
        super().__init__(in_channels, out_channels, kernel_size, stride, dilation, transposed=True)
