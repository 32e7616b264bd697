"""A network like CosmoFlow: cosmological parameters from a 3-D map of dark matter.

After Mathuriya et al. 2018 ("CosmoFlow: using deep learning to learn the universe at scale"), much as MLPerf HPC has
it: groups of `3x3x3 convolution -> leaky ReLU -> 2x2x2 max pooling`, the channels doubling from 32, then
three linear layers with dropout.  A map of 512^3 has tens of GB of activations a sample: hence cuts in space.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from profiler.models.example import Example, normal, require_dims, require_multiple, uniform

_DIMS = ("sample", "channel", "depth", "height", "width")
_FEATURES = (128, 64)


class CosmoFlow(nn.Module):
    """`levels` groups that halve each side, then linear layers to `parameters` numbers in (-1.2, 1.2).

    Args:
        in_channels: of the map (the benchmark's has 4 red shifts).
        side: of the map, in voxels; a multiple of `2 ** levels`.
        width: channels of the first group.
    """

    def __init__(
        self, in_channels: int, side: int, *, levels: int, width: int, parameters: int, dropout: float
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = in_channels
        for level in range(levels):
            layers += [
                nn.Conv3d(channels, width * 2**level, 3, padding=1),
                nn.LeakyReLU(0.3),
                nn.MaxPool3d(2),
            ]
            channels = width * 2**level
        self.features = nn.Sequential(*layers)
        last = channels * (side // 2**levels) ** 3
        head: list[nn.Module] = []
        for features in _FEATURES:
            head += [nn.Linear(last, features), nn.LeakyReLU(0.3), nn.Dropout(dropout)]
            last = features
        self.head = nn.Sequential(*head, nn.Linear(last, parameters), nn.Tanh())

    def forward(self, maps: Tensor) -> Tensor:
        """(sample, channel, depth, height, width) to (sample, parameters)."""
        parameters: Tensor = 1.2 * self.head(self.features(maps).flatten(1))
        return parameters


def cosmoflow(
    *,
    input_shape: tuple[int, ...] = (2, 4, 64, 64, 64),
    levels: int = 5,
    width: int = 32,
    parameters: int = 4,
    dropout: float = 0.5,
) -> Example:
    """For cubic maps whose side is a multiple of `2 ** levels`; the benchmark's maps are 128^3 in 4 channels."""
    require_dims("cosmoflow", input_shape, _DIMS)
    require_multiple("cosmoflow", input_shape, 2, 2**levels)
    samples, channels, *sides = input_shape
    if len(set(sides)) > 1:
        raise ValueError(f"cosmoflow: input_shape {input_shape} has sides {sides}, needs equal ones")
    module = CosmoFlow(channels, sides[0], levels=levels, width=width, parameters=parameters, dropout=dropout)
    maps = normal(input_shape, seed=0)
    truth = uniform((samples, parameters), seed=1)
    return module, (maps, truth), functional.mse_loss
