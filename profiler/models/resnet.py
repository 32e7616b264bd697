"""ResNet-18 and ResNet-50 (He et al. 2016, "Deep residual learning for image recognition", table 1).

The stride of a bottleneck sits in its 3x3 convolution, as in torchvision, so parameter counts and costs are those of
the ResNet-50 that everybody measures. ReLUs are in place.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from profiler.models.example import Example, indices, normal, require_dims


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut; `in_channels` to `channels`, height and width divided by `stride`."""

    expansion = 1

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut = _shortcut(in_channels, channels, stride)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """(sample, in_channels, height, width) to (sample, channels, height / stride, width / stride)."""
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        result: Tensor = self.relu(y + self.shortcut(x))
        return result


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut; the output has `4 * channels` channels."""

    expansion = 4

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        out_channels = self.expansion * channels
        self.conv1 = nn.Conv2d(in_channels, channels, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, out_channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.shortcut = _shortcut(in_channels, out_channels, stride)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """(sample, in_channels, height, width) to (sample, 4 * channels, height / stride, width / stride)."""
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        result: Tensor = self.relu(y + self.shortcut(x))
        return result


class ResNet(nn.Module):
    """A stem, four stages of `depths` residual blocks that halve height and width from the second on, and a classifier.

    Stage `i` has `width * 2**i` channels times the block's expansion.
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        depths: tuple[int, ...],
        *,
        width: int,
        in_channels: int,
        num_classes: int,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        stages: list[nn.Module] = []
        channels = width
        for stage, depth in enumerate(depths):
            blocks: list[nn.Module] = []
            for index in range(depth):
                stride = 2 if stage > 0 and index == 0 else 1
                blocks.append(block(channels, width * 2**stage, stride))
                channels = block.expansion * width * 2**stage
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """(sample, channel, height, width) to logits (sample, class)."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        x = self.avgpool(self.stages(x))
        logits: Tensor = self.fc(x.flatten(1))
        return logits


def resnet50(
    *,
    input_shape: tuple[int, ...] = (8, 3, 224, 224),
    num_classes: int = 1000,
    width: int = 64,
    depths: tuple[int, ...] = (3, 4, 6, 3),
) -> Example:
    """ResNet-50: bottleneck blocks, 25,557,032 parameters at 1000 classes; `width` is the stem's channel count."""
    return _example("resnet50", Bottleneck, depths, input_shape, num_classes, width)


def resnet18(
    *,
    input_shape: tuple[int, ...] = (8, 3, 224, 224),
    num_classes: int = 1000,
    width: int = 64,
    depths: tuple[int, ...] = (2, 2, 2, 2),
) -> Example:
    """ResNet-18: basic blocks, 11,689,512 parameters at 1000 classes; `width` is the stem's channel count."""
    return _example("resnet18", BasicBlock, depths, input_shape, num_classes, width)


def _shortcut(in_channels: int, out_channels: int, stride: int) -> nn.Module:
    """The identity, or a strided 1x1 projection where the shapes differ (He et al., option B)."""
    if stride == 1 and in_channels == out_channels:
        return nn.Identity()
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 1, stride, bias=False),
        nn.BatchNorm2d(out_channels),
    )


def _example(
    network: str,
    block: type[BasicBlock] | type[Bottleneck],
    depths: tuple[int, ...],
    input_shape: tuple[int, ...],
    num_classes: int,
    width: int,
) -> Example:
    require_dims(network, input_shape, ("sample", "channel", "height", "width"))
    module = ResNet(block, depths, width=width, in_channels=input_shape[1], num_classes=num_classes)
    images = normal(input_shape, seed=0)
    labels = indices(num_classes, input_shape[:1], seed=1)
    return module, (images, labels), functional.cross_entropy
