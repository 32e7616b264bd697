"""Blocks that the sparse networks share, with the parameter names of `torchsparse.backbones.modules`.

Example clouds for the sparse networks: voxelised shapes.

A sample is a ball's surface, squeezed by its own factor along each axis and cut to the number of voxels asked for, so
that sites have the neighbours that scanned surfaces have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from cuda_ops.sparse import nn as spnn
from cuda_ops.sparse.errors import SparseInputError
from cuda_ops.sparse.nn import SparseTensor
from profiler.models.example import indices, normal, require_dims

CloudExample = tuple[nn.Module, tuple[SparseTensor, Tensor], Callable[..., Tensor]]
"""What a sparse factory returns: the module, its example input and targets, and the loss.

A target is (sample,) for a classification, and (site,) in the order of the input's points for a segmentation.
"""

_DIMS = ("sample", "site", "channel")


def shapes(network: str, input_shape: tuple[int, ...], seed: int = 0) -> SparseTensor:
    """Clouds of exactly ``input_shape[1]`` sites each; raises `ValueError` for another number of dims.

    Features are standard normal numbers of torch's default dtype. Points are given in the order of the sites, so that
    targets are in that of both.
    """
    require_dims(network, input_shape, _DIMS)
    samples, sites, channels = input_shape
    clouds = [_surface(sites, seed + 7919 * sample) for sample in range(samples)]
    batch = torch.arange(samples, dtype=torch.int32, device="cpu").repeat_interleave(sites).unsqueeze(1)
    coords = torch.cat((batch, torch.cat(clouds)), 1).to(torch.get_default_device())
    return SparseTensor(normal((samples * sites, channels), seed), coords, num_samples=samples)


def site_labels(num_classes: int, input_shape: tuple[int, ...]) -> Tensor:
    """Uniform class numbers, int64 (site,), for the sites of all samples."""
    return indices(num_classes, (input_shape[0] * input_shape[1],), 1)


def _surface(sites: int, seed: int) -> Tensor:
    """int32 (sites, 3), each once and ascending: as many of the voxels of a squeezed sphere as are asked for."""
    generator = torch.Generator("cpu").manual_seed(seed)
    squeeze = 0.6 + 0.4 * torch.rand(3, generator=generator, device="cpu")
    radius = 1 + int(sites**0.5)
    while True:  # the voxels of a surface grow with the square of its radius
        points = torch.randn(40 * sites + 400, 3, generator=generator, device="cpu")
        ball = points / points.norm(dim=1, keepdim=True)
        voxels: Tensor = (ball * squeeze * radius).round().to(torch.int32).unique(dim=0)
        if len(voxels) >= sites:
            return voxels[:sites] + radius
        radius *= 2


KernelSize = int | Sequence[int]


class ConvBlock(nn.Sequential):
    """Convolution without bias, batch norm, ReLU; ``transposed``: back to the sites of the level above."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: KernelSize,
        stride: KernelSize = 1,
        dilation: KernelSize = 1,
        *,
        transposed: bool = False,
    ) -> None:
        super().__init__(
            spnn.Conv3d(in_channels, out_channels, kernel_size, stride, dilation=dilation, transposed=transposed),
            spnn.BatchNorm(out_channels),
            spnn.ReLU(),
        )


class ResidualBlock(nn.Module):
    """Two convolutions beside a shortcut, which is a convolution of kernel 1 where the channels change.

    Raises:
        SparseInputError: a stride.  A strided shortcut of kernel 1 has fewer sites than a kernel of 3: no sum of them.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: KernelSize = 3,
        stride: KernelSize = 1,
        dilation: KernelSize = 1,
    ) -> None:
        super().__init__()
        if stride not in (1, (1, 1, 1), [1, 1, 1]):
            raise SparseInputError(
                "stride of a residual block",
                where="SparseResBlock",
                actual=stride,
                expected=1,
                remedy="put the stride in a SparseConvBlock before it",
            )
        self.main = nn.Sequential(
            spnn.Conv3d(in_channels, out_channels, kernel_size, dilation=dilation),
            spnn.BatchNorm(out_channels),
            spnn.ReLU(),
            spnn.Conv3d(out_channels, out_channels, kernel_size, dilation=dilation),
            spnn.BatchNorm(out_channels),
        )
        self.shortcut: nn.Module = nn.Identity()
        if in_channels != out_channels:
            self.shortcut = nn.Sequential(spnn.Conv3d(in_channels, out_channels, 1), spnn.BatchNorm(out_channels))
        self.relu = spnn.ReLU()

    def forward(self, x: SparseTensor) -> SparseTensor:
        """The same sites."""
        result: SparseTensor = self.relu(self.main(x) + self.shortcut(x))
        return result
