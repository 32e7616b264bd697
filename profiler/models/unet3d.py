"""3-D U-Net (Cicek et al. 2016, "3D U-Net: learning dense volumetric segmentation from sparse annotation", figure 2).

    depth 3:   32 64 ---------------------------------> [64 + 128]  64 64 -> classes
                   64 128 ------------------> [128 + 256] 128 128
                       128 256 ---> [256 + 512] 256 256
                            256 512

Each level has two 3x3x3 convolutions with batch norm before the ReLU and doubles the channels in the second, before
the max-pool, against a bottleneck; 2x2x2 transposed convolutions lead up, and the down path's output is joined there.
The paper's convolutions are unpadded and crop the joined tensor; here they are padded by 1, so that voxels and labels
correspond. The parameters are those of the paper, and a scale and a shift for each batch-normalised channel, which its
count of 19,069,955 leaves out.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from profiler.models.example import Example, indices, normal, require_dims, require_multiple


class ConvPair(nn.Module):
    """Two padded 3x3x3 convolutions, each followed by batch norm and ReLU."""

    def __init__(self, in_channels: int, mid_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv3d(in_channels, mid_channels, 3, padding=1)
        self.bn1 = nn.BatchNorm3d(mid_channels)
        self.conv2 = nn.Conv3d(mid_channels, out_channels, 3, padding=1)
        self.bn2 = nn.BatchNorm3d(out_channels)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """(sample, in_channels, depth, height, width) to (sample, out_channels, depth, height, width)."""
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        return x


class Up(nn.Module):
    """Transposed convolution of the coarse tensor, joined with the fine one, then two convolutions."""

    def __init__(self, coarse_channels: int, fine_channels: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose3d(coarse_channels, coarse_channels, 2, stride=2, bias=False)
        self.pair = ConvPair(fine_channels + coarse_channels, fine_channels, fine_channels)

    def forward(self, coarse: Tensor, fine: Tensor) -> Tensor:
        """(sample, coarse channels, half the size) and (sample, fine channels, size) to the shape of the latter."""
        joined: Tensor = self.pair(torch.cat((fine, self.up(coarse)), dim=1))
        return joined


class UNet3D(nn.Module):
    """`depth` halvings; going down, level `i` has `width * 2**i`, then `width * 2**(i + 1)` channels."""

    def __init__(self, *, in_channels: int, num_classes: int, width: int, depth: int) -> None:
        super().__init__()
        outputs = [width * 2 ** (level + 1) for level in range(depth + 1)]
        inputs = [in_channels, *outputs[:-1]]
        self.down = nn.ModuleList(
            ConvPair(before, after // 2, after) for before, after in zip(inputs, outputs, strict=True)
        )
        self.pool = nn.MaxPool3d(2)
        self.up = nn.ModuleList(Up(outputs[level + 1], outputs[level]) for level in reversed(range(depth)))
        self.head = nn.Conv3d(outputs[0], num_classes, 1)

    def forward(self, volumes: Tensor) -> Tensor:
        """(sample, channel, depth, height, width) to logits (sample, class, depth, height, width)."""
        x = self.down[0](volumes)
        skipped: list[Tensor] = []
        for pair in self.down[1:]:
            skipped.append(x)
            x = pair(self.pool(x))
        for up in self.up:
            x = up(x, skipped.pop())
        logits: Tensor = self.head(x)
        return logits


def unet3d(
    *,
    input_shape: tuple[int, ...] = (2, 3, 64, 64, 64),
    num_classes: int = 3,
    width: int = 32,
    depth: int = 3,
) -> Example:
    """The paper's network as it stands: 19,074,627 parameters; every spatial size is a multiple of `2**depth`.

    The loss is the mean cross-entropy over all voxels.
    """
    require_dims("unet3d", input_shape, ("sample", "channel", "depth", "height", "width"))
    require_multiple("unet3d", input_shape, 2, 2**depth)
    module = UNet3D(in_channels=input_shape[1], num_classes=num_classes, width=width, depth=depth)
    volumes = normal(input_shape, seed=0)
    labels = indices(num_classes, (input_shape[0], *input_shape[2:]), seed=1)
    return module, (volumes, labels), functional.cross_entropy
