"""VGG-16 (Simonyan and Zisserman 2015, "Very deep convolutional networks", table 1, configuration D).

As in torchvision, an adaptive average pool brings any input to 7x7 before the classifier, so the network also takes
small images; at 224 pixels the pool is the identity. Dropout is off unless asked for, so that a run can be repeated.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from profiler.models.example import Example, indices, normal, require_dims

_STAGES = ((1, 2), (2, 2), (4, 3), (8, 3), (8, 3))
"""Configuration D: (channels over `width`, number of 3x3 convolutions) between two max-pools."""

_POOLED_SIZE = 7


class VGG16(nn.Module):
    """13 convolutions of 3x3 in five stages, then three fully connected layers; `width` channels in the first stage."""

    def __init__(self, *, in_channels: int, num_classes: int, width: int, hidden: int, dropout: float) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = in_channels
        for multiple, num_convolutions in _STAGES:
            for _ in range(num_convolutions):
                layers += [nn.Conv2d(channels, multiple * width, 3, padding=1), nn.ReLU(inplace=True)]
                channels = multiple * width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(_POOLED_SIZE)
        self.classifier = nn.Sequential(
            nn.Linear(channels * _POOLED_SIZE**2, hidden),
            nn.ReLU(inplace=True),
            _dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            _dropout(dropout),
            nn.Linear(hidden, num_classes),
        )
        for module in self.features:
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                assert module.bias is not None  # made above, with one
                nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        """(sample, channel, height, width) to logits (sample, class)."""
        x = self.avgpool(self.features(images))
        logits: Tensor = self.classifier(x.flatten(1))
        return logits


def vgg16(
    *,
    input_shape: tuple[int, ...] = (8, 3, 224, 224),
    num_classes: int = 1000,
    width: int = 64,
    hidden: int = 4096,
    dropout: float = 0.0,
) -> Example:
    """VGG-16: 138,357,544 parameters at 1000 classes; height and width at least 32."""
    require_dims("vgg16", input_shape, ("sample", "channel", "height", "width"))
    smallest = 2 ** len(_STAGES)
    if min(input_shape[2:]) < smallest:
        raise ValueError(
            f"vgg16: input_shape {input_shape} has a height or width of {min(input_shape[2:])}, "
            f"but five max-pools need at least {smallest}"
        )
    module = VGG16(in_channels=input_shape[1], num_classes=num_classes, width=width, hidden=hidden, dropout=dropout)
    images = normal(input_shape, seed=0)
    labels = indices(num_classes, input_shape[:1], seed=1)
    return module, (images, labels), functional.cross_entropy


def _dropout(probability: float) -> nn.Module:
    """No layer at all where there is nothing to drop; the names of the other layers stay the same."""
    return nn.Dropout(probability) if probability > 0 else nn.Identity()
