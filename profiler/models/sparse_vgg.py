"""The sparse VGG-16 of SparsePipe (Zhai et al. 2020, arXiv 2012.13846), a classifier of voxelised shapes.

The graph is that of the authors' published profiles: 13 submanifold convolutions of kernel 3 without bias, each with
batch norm and ReLU, in five stages with a max-pool of 2 after each; the maximum over each sample's sites; linear layers
of 4096, 4096 and 40: 63,182,824 parameters with one channel in, as in the profiles. Dropout is off unless asked for, so
that a run can be repeated (theirs is 0.5).
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn
from torch.nn import functional

from cuda_ops.sparse import nn as spnn
from cuda_ops.sparse.nn import SparseTensor
from profiler.models.example import indices
from profiler.models.sparse_blocks import CloudExample, shapes

Between = Literal["pool", "convolution"]

_STAGES = ((1, 2), (2, 2), (4, 3), (8, 3), (8, 3))
"""(channels over `width`, number of convolutions) of each stage."""


class SparseVGG16(nn.Module):
    """13 submanifold convolutions in five stages, then three linear layers.

    Args:
        in_channels: of the input's features.
        num_classes: of the logits.
        width: channels of the first stage.
        hidden: numbers between the linear layers.
        dropout: of the classifier.
        between: what ends a stage: a max-pool of 2, or a convolution of kernel 2 and stride 2 with batch norm and ReLU.
    """

    def __init__(
        self,
        *,
        in_channels: int,
        num_classes: int,
        width: int = 64,
        hidden: int = 4096,
        dropout: float = 0.0,
        between: Between = "pool",
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = in_channels
        for multiple, num_convolutions in _STAGES:
            for _ in range(num_convolutions):
                layers += _convolution(channels, multiple * width, 3, 1)
                channels = multiple * width
            layers += [spnn.MaxPool3d(2)] if between == "pool" else _convolution(channels, channels, 2, 2)
        self.features = nn.Sequential(*layers)
        self.pool = spnn.GlobalMaxPool()
        self.classifier = nn.Sequential(
            nn.Linear(channels, hidden),
            nn.ReLU(),
            _dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            _dropout(dropout),
            nn.Linear(hidden, num_classes),
        )

    def forward(self, x: SparseTensor) -> Tensor:
        """Logits (sample, class)."""
        logits: Tensor = self.classifier(self.pool(self.features(x)))
        return logits


def sparse_vgg16(
    *,
    input_shape: tuple[int, ...] = (8, 3224, 1),
    num_classes: int = 40,
    width: int = 64,
    hidden: int = 4096,
    dropout: float = 0.0,
    between: Between = "pool",
) -> CloudExample:
    """SparsePipe's network, on clouds of the size of theirs."""
    cloud = shapes("sparse_vgg16", input_shape)
    module = SparseVGG16(
        in_channels=input_shape[2],
        num_classes=num_classes,
        width=width,
        hidden=hidden,
        dropout=dropout,
        between=between,
    )
    return module, (cloud, indices(num_classes, input_shape[:1], seed=1)), functional.cross_entropy


def sparse_vgg16_tiny(
    *, input_shape: tuple[int, ...] = (2, 200, 1), num_classes: int = 5, between: Between = "pool"
) -> CloudExample:
    """Four channels in the first stage: for tests and demonstrations."""
    return sparse_vgg16(input_shape=input_shape, num_classes=num_classes, width=4, hidden=16, between=between)


def _convolution(in_channels: int, out_channels: int, kernel: int, stride: int) -> list[nn.Module]:
    return [spnn.Conv3d(in_channels, out_channels, kernel, stride), spnn.BatchNorm(out_channels), spnn.ReLU()]


def _dropout(probability: float) -> nn.Module:
    """No layer at all where there is nothing to drop; the names of the other layers stay the same."""
    return nn.Dropout(probability) if probability > 0 else nn.Identity()
