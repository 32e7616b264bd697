"""MinkUNet (Choy, Gwak and Savarese 2019, "4D spatio-temporal ConvNets", figure 4), in the size of MinkUNet-18.

    stem   c0 c0 ------------------------------------------------> [c8 + c0] c8 -> classes
      down   c0 c1 --------------------------------------> [c7 + c1] c7
        down   c1 c2 ----------------------------> [c6 + c2] c6
          down   c2 c3 ------------------> [c5 + c3] c5
            down   c3 c4

A step down is a convolution of kernel 2 and stride 2, a step up its inverse, back to the very sites of the level above,
where the way down is joined; two residual blocks follow each. Layers, channels and parameter names are those of
`torchsparse.backbones.SparseResUNet18`; the linear head is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import cast

from torch import nn

from cuda_ops.sparse import nn as spnn
from cuda_ops.sparse.nn import SparseTensor
from profiler.models.sparse_blocks import CloudExample, ConvBlock, ResidualBlock, shapes, site_labels

CHANNELS = (32, 32, 64, 128, 256, 256, 128, 96, 96)


class MinkUNet(nn.Module):
    """A segmentation network of ``(len(channels) - 1) / 2`` halvings.

    Args:
        in_channels: of the input's features.
        num_classes: of the logits.
        channels: of the stem, of each level down, then of each level up; an odd number of them.
        blocks: residual blocks a level.
    """

    def __init__(
        self, *, in_channels: int, num_classes: int, channels: Sequence[int] = CHANNELS, blocks: int = 2
    ) -> None:
        super().__init__()
        if len(channels) < 3 or len(channels) % 2 == 0:
            raise ValueError(f"minkunet: {len(channels)} channels, needs an odd number of at least 3: stem, down, up")
        depth = len(channels) // 2
        first = channels[0]
        self.stem = nn.Sequential(*ConvBlock(in_channels, first, 3), *ConvBlock(first, first, 3))
        self.downs = nn.ModuleList(
            nn.Sequential(ConvBlock(before, before, 2, 2), *_residuals(before, after, blocks))
            for before, after in pairwise(channels[: depth + 1])
        )
        joined = reversed(channels[:depth])
        self.ups = nn.ModuleList(
            nn.ModuleList(
                [
                    ConvBlock(before, after, 2, 2, transposed=True),
                    nn.Sequential(*_residuals(after + beside, after, blocks)),
                ]
            )
            for (before, after), beside in zip(pairwise(channels[depth:]), joined, strict=True)
        )
        self.head = spnn.Linear(channels[-1], num_classes)

    def forward(self, x: SparseTensor) -> SparseTensor:
        """Logits on the sites of the input."""
        x = self.stem(x)
        levels = [x]
        for down in self.downs:
            x = down(x)
            levels.append(x)
        levels.pop()
        for level in self.ups:
            up, refine = cast("nn.ModuleList", level)
            x = refine(spnn.cat([up(x), levels.pop()]))
        logits: SparseTensor = self.head(x)
        return logits


def minkunet(
    *,
    input_shape: tuple[int, ...] = (4, 20_000, 4),
    num_classes: int = 20,
    width: float = 1.0,
    channels: Sequence[int] = CHANNELS,
    blocks: int = 2,
) -> CloudExample:
    """MinkUNet-18; ``width`` multiplies all channels. The loss is the mean over samples of the mean over sites."""
    cloud = shapes("minkunet", input_shape)
    scaled = [max(1, int(width * each)) for each in channels]
    module = MinkUNet(in_channels=input_shape[2], num_classes=num_classes, channels=scaled, blocks=blocks)
    return module, (cloud, site_labels(num_classes, input_shape)), spnn.SiteCrossEntropy()


def minkunet_tiny(*, input_shape: tuple[int, ...] = (2, 200, 4), num_classes: int = 3) -> CloudExample:
    """Two halvings and one residual block a level: for tests and demonstrations."""
    return minkunet(input_shape=input_shape, num_classes=num_classes, channels=(8, 8, 12, 12, 8), blocks=1)


def _residuals(in_channels: int, out_channels: int, blocks: int) -> list[ResidualBlock]:
    return [ResidualBlock(in_channels if block == 0 else out_channels, out_channels) for block in range(blocks)]
