"""Blocks that the sparse networks share, with the parameter names of `torchsparse.backbones.modules`."""

from __future__ import annotations

from torch import nn

from cuda_ops.sparse import nn as spnn
from cuda_ops.sparse.nn import SparseTensor

Size = int | tuple[int, int, int]


class ConvBlock(nn.Sequential):
    """Convolution without bias, batch norm, ReLU; ``transposed``: back to the sites of the level above."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel: Size, stride: Size = 1, *, transposed: bool = False
    ) -> None:
        super().__init__(
            spnn.Conv3d(in_channels, out_channels, kernel, stride, transposed=transposed),
            spnn.BatchNorm(out_channels),
            spnn.ReLU(),
        )


class ResidualBlock(nn.Module):
    """Two convolutions beside a shortcut, which is a convolution of kernel 1 where the channels change."""

    def __init__(self, in_channels: int, out_channels: int, kernel: Size = 3) -> None:
        super().__init__()
        self.main = nn.Sequential(
            spnn.Conv3d(in_channels, out_channels, kernel),
            spnn.BatchNorm(out_channels),
            spnn.ReLU(),
            spnn.Conv3d(out_channels, out_channels, kernel),
            spnn.BatchNorm(out_channels),
        )
        self.shortcut: nn.Module = nn.Identity()
        if in_channels != out_channels:
            self.shortcut = nn.Sequential(spnn.Conv3d(in_channels, out_channels, 1), spnn.BatchNorm(out_channels))
        self.relu = spnn.ReLU()

    def forward(self, x: SparseTensor) -> SparseTensor:
        """The same sites."""
        return self.relu(self.main(x) + self.shortcut(x))
