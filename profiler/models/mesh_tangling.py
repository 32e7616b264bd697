"""The mesh-tangling networks of Dryden et al. 2019.

From "Improving strong-scaling of CNN training by exploiting finer-grained parallelism"; the layer sizes are those of
the model files `model_mesh_{1024,2048,128}_fcn` that the authors published with LBANN.

They predict which cells of a 2-D simulation mesh will tangle, from 18 channels of state: groups of
`convolution (no bias) -> ReLU -> batch norm`, most of them halving height and width, then a 1x1 convolution and a
sigmoid. The output channels of a coarse cell are the mesh cells that it stands for, so the 1K network's 1024 channels
at 32x32 are its 1024x1024 answers; the model files flatten them, which the loss does not notice.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

from profiler.models.example import Example, normal, require_dims, require_multiple, uniform

_INPUT_CHANNELS = 18
_DIMS = ("sample", "channel", "height", "width")


@dataclass(frozen=True, slots=True)
class ConvolutionGroup:
    """Convolutions of 3x3 (the network's first is 5x5) with these output channels; the first has `stride`."""

    channels: tuple[int, ...]
    stride: int = 2


_GROUPS_1K = (
    ConvolutionGroup((128, *[256] * 4)),
    ConvolutionGroup((384,) * 5),
    ConvolutionGroup((512,) * 5),
    ConvolutionGroup((384,) * 5),
    ConvolutionGroup((384,) * 5),
    ConvolutionGroup((128,) * 5, stride=1),
)
_GROUPS_2K = tuple(ConvolutionGroup((channels,) * 3) for channels in (128, 256, 256, 384, 384, 128))
_GROUPS_128 = tuple(ConvolutionGroup((channels,) * 3) for channels in (128, 256, 256, 128))


class ConvReluNorm(nn.Module):
    """Convolution without bias, ReLU, batch norm, in the authors' order."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel, stride, padding=kernel // 2, bias=False)
        self.relu = nn.ReLU()
        self.bn = nn.BatchNorm2d(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        """(sample, in_channels, height, width) to (sample, out_channels, height / stride, width / stride)."""
        y: Tensor = self.bn(self.relu(self.conv(x)))
        return y


class MeshTangling(nn.Module):
    """The groups, then a 1x1 convolution to one channel for each mesh cell of a coarse cell, and a sigmoid.

    `width` multiplies every channel count but the input's and the output's (rounded, at least 1).
    """

    def __init__(self, groups: tuple[ConvolutionGroup, ...], width: float) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        in_channels = _INPUT_CHANNELS
        kernel = 5
        for group in groups:
            stride = group.stride
            for channels in group.channels:
                out_channels = max(1, round(width * channels))
                layers.append(ConvReluNorm(in_channels, out_channels, kernel, stride))
                in_channels = out_channels
                kernel = 3
                stride = 1
        self.features = nn.Sequential(*layers)
        self.head = nn.Conv2d(in_channels, _down_sampling(groups) ** 2, 1, bias=False)
        self.sigmoid = nn.Sigmoid()
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")

    def forward(self, states: Tensor) -> Tensor:
        """(sample, 18, height, width) to probabilities (sample, s * s, height / s, width / s), s the down-sampling."""
        probabilities: Tensor = self.sigmoid(self.head(self.features(states)))
        return probabilities


def mesh_tangling_1k(*, input_shape: tuple[int, ...] = (2, 18, 1024, 1024), width: float = 1.0) -> Example:
    """For 1024x1024 meshes: 31 convolutions, 34.4 M parameters, 2,365 GFLOP forward a sample; sizes multiples of 32."""
    return _example("mesh_tangling_1k", _GROUPS_1K, input_shape, width)


def mesh_tangling_2k(*, input_shape: tuple[int, ...] = (2, 18, 2048, 2048), width: float = 1.0) -> Example:
    """For 2048x2048 meshes: 19 convolutions, 12.4 M parameters, 1,895 GFLOP forward a sample; sizes multiples of 64."""
    return _example("mesh_tangling_2k", _GROUPS_2K, input_shape, width)


def mesh_tangling_128(*, input_shape: tuple[int, ...] = (8, 18, 128, 128), width: float = 1.0) -> Example:
    """For 128x128 meshes, the authors' small one: 13 convolutions, 4.2 M parameters; sizes multiples of 16."""
    return _example("mesh_tangling_128", _GROUPS_128, input_shape, width)


def _down_sampling(groups: tuple[ConvolutionGroup, ...]) -> int:
    """How many mesh cells a cell of the output spans in each of height and width."""
    factor = 1
    for group in groups:
        factor *= group.stride
    return factor


def _example(network: str, groups: tuple[ConvolutionGroup, ...], input_shape: tuple[int, ...], width: float) -> Example:
    factor = _down_sampling(groups)
    require_dims(network, input_shape, _DIMS)
    require_multiple(network, input_shape, 2, factor)
    samples, channels, height, width_cells = input_shape
    if channels != _INPUT_CHANNELS:
        raise ValueError(f"{network}: input_shape {input_shape} has {channels} channels, needs {_INPUT_CHANNELS}")
    module = MeshTangling(groups, width)
    states = normal(input_shape, seed=0)
    tangled = uniform((samples, factor**2, height // factor, width_cells // factor), seed=1)
    return module, (states, tangled), functional.mse_loss
