"""The backbones of `torchsparse.backbones`, layer by layer, with its parameter names: they return every level.

`SparseResUNet42` and `SparseResNet21D` are used as torchsparse's are. To plan and run one, end it in a head and a loss,
as the factories here do.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import cast

from torch import Tensor, nn
from torch.nn import functional

from cuda_ops.sparse import nn as spnn
from cuda_ops.sparse.errors import SparseInputError
from cuda_ops.sparse.nn import SparseTensor
from profiler.models.example import indices
from profiler.models.sparse_blocks import CloudExample, ConvBlock, KernelSize, ResidualBlock, shapes, site_labels

BackboneStage = tuple[int, int, KernelSize, KernelSize]
"""Blocks, channels, kernel and stride."""


class SparseResNet(nn.ModuleList):
    """Stages of a convolution, strided or not, and residual blocks behind it; the result is that of every stage.

    Args:
        blocks: (number of blocks, out channels, kernel size, stride) of each stage.
        in_channels: of the input's features.
        width_multiplier: multiplies all channels.
    """

    def __init__(self, blocks: Sequence[BackboneStage], *, in_channels: int = 4, width_multiplier: float = 1.0) -> None:
        super().__init__()
        for number, channels, kernel, stride in blocks:
            width = int(channels * width_multiplier)
            residuals = (ResidualBlock(width, width, kernel) for _ in range(number - 1))
            self.append(nn.Sequential(ConvBlock(in_channels, width, kernel, stride), *residuals))
            in_channels = width

    def forward(self, x: SparseTensor) -> list[SparseTensor]:
        """The output of every stage, the finest first."""
        levels = []
        for stage in self:
            x = stage(x)
            levels.append(x)
        return levels


class SparseResNet21D(SparseResNet):
    """21 convolutions; the last halves one axis alone, as detectors do with height."""

    def __init__(self, *, in_channels: int = 4, width_multiplier: float = 1.0) -> None:
        stages: list[BackboneStage] = [(3, 16, 3, 1), (3, 32, 3, 2), (3, 64, 3, 2), (3, 128, 3, 2)]
        last: BackboneStage = (1, 128, (1, 3, 1), (1, 2, 1))
        super().__init__([*stages, last], in_channels=in_channels, width_multiplier=width_multiplier)


class SparseResUNet(nn.Module):
    """Steps down by a convolution of kernel 2 and stride 2, and back up, joined to what was there on the way down.

    Args:
        stem_channels: of the two convolutions at first.
        encoder_channels, decoder_channels: of each level down, and of as many up.
        in_channels: of the input's features.
        width_multiplier: multiplies all channels.

    Raises:
        SparseInputError: other numbers of levels down and up.
    """

    def __init__(
        self,
        stem_channels: int,
        encoder_channels: Sequence[int],
        decoder_channels: Sequence[int],
        *,
        in_channels: int = 4,
        width_multiplier: float = 1.0,
    ) -> None:
        super().__init__()
        if len(encoder_channels) != len(decoder_channels):
            raise SparseInputError(
                "levels of a U-Net",
                where="SparseResUNet",
                actual=f"{len(encoder_channels)} down, {len(decoder_channels)} up",
                expected="as many up as down",
                remedy="give encoder_channels and decoder_channels of one length",
            )
        down, up = ([int(width_multiplier * each) for each in c] for c in (encoder_channels, decoder_channels))
        down = [int(width_multiplier * stem_channels), *down]
        self.stem = nn.Sequential(*ConvBlock(in_channels, down[0], 3), *ConvBlock(down[0], down[0], 3))
        self.encoders = nn.ModuleList(
            nn.Sequential(ConvBlock(one, one, 2, 2), ResidualBlock(one, other), ResidualBlock(other, other))
            for one, other in pairwise(down)
        )
        self.decoders = nn.ModuleList(
            nn.ModuleDict(
                {
                    "upsample": ConvBlock(one, other, 2, 2, transposed=True),
                    "fuse": nn.Sequential(ResidualBlock(other + beside, other), ResidualBlock(other, other)),
                }
            )
            for (one, other), beside in zip(pairwise([down[-1], *up]), reversed(down[:-1]), strict=True)
        )

    def forward(self, x: SparseTensor) -> list[SparseTensor]:
        """The stem's output, that of each level down, and of each level up; the last has the sites of the input."""
        levels = [self.stem(x)]
        for encoder in self.encoders:
            levels.append(encoder(levels[-1]))
        depth = len(levels) - 1
        for number, decoder in enumerate(self.decoders, start=1):
            blocks = cast("nn.ModuleDict", decoder)
            levels.append(blocks["fuse"](spnn.cat([blocks["upsample"](levels[-1]), levels[depth - number]])))
        return levels


class SparseResUNet42(SparseResUNet):
    """42 convolutions, those of shortcuts not counted: four halvings and back."""

    def __init__(self, *, in_channels: int = 4, width_multiplier: float = 1.0) -> None:
        super().__init__(
            32, [32, 64, 128, 256], [256, 128, 96, 96], in_channels=in_channels, width_multiplier=width_multiplier
        )


class Headed(nn.Module):
    """The last level of a backbone, and a head on it."""

    def __init__(self, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

    def forward(self, x: SparseTensor) -> SparseTensor | Tensor:
        """What the head makes of it."""
        result: SparseTensor | Tensor = self.head(self.backbone(x)[-1])
        return result


def sparse_resunet42(
    *, input_shape: tuple[int, ...] = (4, 20_000, 4), num_classes: int = 20, width: float = 1.0
) -> CloudExample:
    """A class a site; ``width`` multiplies all channels."""
    cloud = shapes("sparse_resunet42", input_shape)
    backbone = SparseResUNet42(in_channels=input_shape[2], width_multiplier=width)
    module = Headed(backbone, spnn.Conv3d(int(width * 96), num_classes, 1, bias=True))
    return module, (cloud, site_labels(num_classes, input_shape)), spnn.SiteCrossEntropy()


def sparse_resnet21d(
    *, input_shape: tuple[int, ...] = (4, 10_000, 4), num_classes: int = 10, width: float = 1.0, side: int = 256
) -> CloudExample:
    """A class a sample, from the bird's-eye view of clouds of coordinates below ``side``, as a detector's head has it.

    The backbone halves x and z three times and y four times; heights become channels of a dense map, which two dense
    convolutions and a mean make logits of.
    """
    cloud = shapes("sparse_resnet21d", input_shape)
    channels = int(width * 128)
    cells = side // 8 + 1
    heights = side // 16 + 1
    bounds = (cells, heights, cells)
    head = nn.Sequential(
        spnn.SparseCrop((0, 0, 0), bounds),
        spnn.ToBEVHeightCompression(channels, bounds),
        nn.Conv2d(channels * heights, channels, 3, 2, 1, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(channels, num_classes),
    )
    module = Headed(SparseResNet21D(in_channels=input_shape[2], width_multiplier=width), head)
    return module, (cloud, indices(num_classes, input_shape[:1], seed=1)), functional.cross_entropy
