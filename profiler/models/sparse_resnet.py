"""A sparse ResNet: the backbone of `torchsparse.backbones.SparseResNet21D` with a classifier.

Each stage is a convolution of kernel 3, which strides from the second stage on, and residual blocks; the last one
halves one axis alone, as detectors do with height. Outputs of a strided convolution are all sites whose field holds an
input, so clouds grow before they shrink. Parameter names are the backbone's.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional

from cuda_ops.sparse import nn as spnn
from cuda_ops.sparse.nn import SparseTensor
from profiler.models.example import indices
from profiler.models.sparse_blocks import CloudExample, ConvBlock, KernelSize, ResidualBlock, shapes

CHANNELS = (16, 32, 64, 128)
_LAST_KERNEL = (1, 3, 1)
_LAST_STRIDE = (1, 2, 1)


class SparseResNetClassifier(nn.Module):
    """A stem, a stage for each further number of channels, a last convolution, a mean over sites and a linear layer.

    Args:
        in_channels: of the input's features.
        num_classes: of the logits; None: no classifier, the last sparse tensor is returned.
        channels: of the stem and of each stage.
        blocks: residual blocks of each.
        last_kernel, last_stride: of the last convolution.
    """

    def __init__(
        self,
        *,
        in_channels: int,
        num_classes: int | None,
        channels: Sequence[int] = CHANNELS,
        blocks: Sequence[int] = (2, 2, 2, 2),
        last_kernel: KernelSize = _LAST_KERNEL,
        last_stride: KernelSize = _LAST_STRIDE,
    ) -> None:
        super().__init__()
        if not channels or len(blocks) != len(channels):
            raise ValueError(f"sparse_resnet: {len(channels)} channels, but {len(blocks)} numbers of blocks")
        self.stem = _stage(in_channels, channels[0], blocks[0], 1)
        self.num_stages = len(channels) - 1
        for index, (before, after) in enumerate(pairwise(channels), start=1):
            self.add_module(f"stage{index}", _stage(before, after, blocks[index], 2))
        self.last = ConvBlock(channels[-1], channels[-1], last_kernel, last_stride)
        self.pool = spnn.GlobalAvgPool()
        self.head = None if num_classes is None else nn.Linear(channels[-1], num_classes)

    def forward(self, x: SparseTensor) -> SparseTensor | Tensor:
        """Logits (sample, class), or the last sparse tensor where there is no classifier."""
        x = self.stem(x)
        for index in range(1, self.num_stages + 1):
            x = self.get_submodule(f"stage{index}")(x)
        x = self.last(x)
        return x if self.head is None else self.head(self.pool(x))


def sparse_resnet(
    *,
    input_shape: tuple[int, ...] = (8, 10_000, 4),
    num_classes: int = 40,
    width: float = 1.0,
    blocks: Sequence[int] = (2, 2, 2, 2),
) -> CloudExample:
    """The 21 layers; ``width`` multiplies all channels."""
    cloud = shapes("sparse_resnet", input_shape)
    channels = [max(1, int(width * each)) for each in CHANNELS[: len(blocks)]]
    module = SparseResNetClassifier(
        in_channels=input_shape[2], num_classes=num_classes, channels=channels, blocks=blocks
    )
    return module, (cloud, indices(num_classes, input_shape[:1], seed=1)), functional.cross_entropy


def sparse_resnet_tiny(*, input_shape: tuple[int, ...] = (2, 200, 4), num_classes: int = 5) -> CloudExample:
    """Three stages of one block: for tests and demonstrations."""
    return sparse_resnet(input_shape=input_shape, num_classes=num_classes, width=0.5, blocks=(1, 1, 1))


def _stage(in_channels: int, out_channels: int, blocks: int, stride: int) -> nn.Sequential:
    residuals = [ResidualBlock(out_channels, out_channels) for _ in range(blocks)]
    return nn.Sequential(ConvBlock(in_channels, out_channels, 3, stride), *residuals)
