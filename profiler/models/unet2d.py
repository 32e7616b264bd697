"""A small 2-D U-Net for segmentation of large images.

Ronneberger et al. 2015, "U-Net: convolutional networks for biomedical image segmentation", figure 1; padded, and with
batch norm, as the 3-D one beside it.

    depth 2:   w w --------------------> [w + 2w] w -> classes
                  2w 2w ------> [2w + 4w] 2w
                       4w 4w

It is fully convolutional: height and width vary from batch to batch, in multiples of ``2**depth``.  One class gives
logits of a mask and binary cross-entropy, a mean over pixels; more give cross-entropy.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from profiler.models.example import indices, normal, require_dims, require_multiple


def _pair(in_channels: int, out_channels: int) -> nn.Sequential:
    """Two padded 3x3 convolutions, each followed by batch norm and ReLU."""
    layers: list[nn.Module] = []
    for before in (in_channels, out_channels):
        layers += [nn.Conv2d(before, out_channels, 3, padding=1), nn.BatchNorm2d(out_channels), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet2D(nn.Module):
    """``depth`` halvings; level ``i`` has ``width * 2**i`` channels."""

    def __init__(self, *, in_channels: int, num_classes: int, width: int, depth: int) -> None:
        super().__init__()
        sizes = [width * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList(_pair(a, b) for a, b in zip([in_channels, *sizes], sizes, strict=False))
        self.pool = nn.MaxPool2d(2)
        levels = list(reversed(range(depth)))
        self.rise = nn.ModuleList(nn.ConvTranspose2d(sizes[k + 1], sizes[k + 1], 2, stride=2) for k in levels)
        self.up = nn.ModuleList(_pair(sizes[k] + sizes[k + 1], sizes[k]) for k in levels)
        self.head = nn.Conv2d(width, num_classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        """(sample, channel, height, width) to logits (sample, class, height, width)."""
        x = self.down[0](images)
        skipped: list[Tensor] = []
        for pair in self.down[1:]:
            skipped.append(x)
            x = pair(self.pool(x))
        for rise, up in zip(self.rise, self.up, strict=True):
            x = up(torch.cat((skipped.pop(), rise(x)), dim=1))
        logits: Tensor = self.head(x)
        return logits


def unet2d(
    *, input_shape: tuple[int, ...] = (1, 1, 128, 128), num_classes: int = 1, width: int = 8, depth: int = 2
) -> tuple[nn.Module, tuple[Tensor, Tensor], object, dict[str, list[tuple[str, int]]]]:
    """The network with an example; height and width may be others in every batch.

    Args:
        input_shape: samples, channels, height, width.
        num_classes: 1: a mask.
        width: channels of the first level.
        depth: how often height and width are halved.
    """
    require_dims("unet2d", input_shape, ("sample", "channel", "height", "width"))
    require_multiple("unet2d", input_shape, 2, 2**depth)
    samples, channels, *space = input_shape
    module = UNet2D(in_channels=channels, num_classes=num_classes, width=width, depth=depth)
    images = normal(input_shape, seed=0)
    last = len(input_shape) - 2
    varying = {
        "height": [("inputs", 2), ("targets", last if num_classes == 1 else 1)],
        "width": [("inputs", 3), ("targets", last + 1 if num_classes == 1 else 2)],
    }
    if num_classes == 1:
        mask = (normal((samples, 1, *space), seed=1) > 0).to(images.dtype)
        return module, (images, mask), functional.binary_cross_entropy_with_logits, varying
    return module, (images, indices(num_classes, (samples, *space), seed=1)), functional.cross_entropy, varying
