"""Small sparse networks as factories, which between them have every kind of layer, and clouds of uneven sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cuda_ops.sparse import nn as spnn
from cuda_ops.sparse.nn import SparseTensor
from profiler.models.sparse_backbones import SparseResUNet

Example = tuple[nn.Module, tuple[SparseTensor, Tensor], Callable[..., Tensor]]
SAMPLES = 4


def clouds(points: int = 30, extent: int = 3, channels: int = 2) -> tuple[SparseTensor, Tensor]:
    """Four clouds, the third of two points alone, and a class for each site."""
    generator = torch.Generator().manual_seed(points)
    found = []
    for sample in range(SAMPLES):
        points_of = torch.randint(-extent, extent + 1, (points + 9 * sample, 3), generator=generator)
        sites = torch.tensor([[-3, 0, 2], [2, 1, 2]]) if sample == 2 else torch.unique(points_of, dim=0)
        found.append(torch.cat([torch.full((len(sites), 1), sample), sites], 1))
    coordinates = torch.cat(found).int()
    features = torch.randn(len(coordinates), channels, generator=generator)
    return SparseTensor(features, coordinates), torch.randint(0, 3, (len(coordinates),), generator=generator)


class Unet(nn.Module):
    """Down by a convolution of kernel 2 and back, joined to what was there."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(spnn.Conv3d(2, 4, 3), spnn.BatchNorm(4), spnn.ReLU())
        self.down = nn.Sequential(spnn.Conv3d(4, 5, 2, 2), spnn.BatchNorm(5), spnn.ReLU(), spnn.Conv3d(5, 5, 3))
        self.up = spnn.Conv3d(5, 4, 2, 2, transposed=True)
        self.last = spnn.Conv3d(8, 3, 1, bias=True)

    def forward(self, x: SparseTensor) -> SparseTensor:
        fine = self.first(x)
        return self.last(spnn.cat([self.up(self.down(fine)), fine]))


class Residual(nn.Module):
    """Kernels of 5, dilated ones and flat ones, overlapping strides and back, sums, linear layers, layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = spnn.Conv3d(2, 3, 5)
        self.dilated = spnn.Conv3d(3, 3, 3, dilation=2)
        self.flat = spnn.Conv3d(3, 3, (3, 1, 1), bias=True)
        self.down = spnn.Conv3d(3, 4, 3, (1, 2, 2))
        self.inner = nn.Sequential(spnn.LayerNorm(4), spnn.GELU(), spnn.Linear(4, 4))
        self.back = spnn.Conv3d(4, 3, 3, (1, 2, 2), transposed=True)

    def forward(self, x: SparseTensor) -> SparseTensor:
        x = self.wide(x)
        x = x + self.flat(spnn.functional.relu(self.dilated(x)))
        return x + self.back(self.inner(self.down(x)))


class Pooled(nn.Module):
    """Windows, then the mean or largest of each sample, then layers over samples."""

    def __init__(self, whole: nn.Module, window: nn.Module) -> None:
        super().__init__()
        self.first = nn.Sequential(spnn.Conv3d(2, 4, 3), spnn.BatchNorm(4), spnn.SiLU())
        self.window = window
        self.whole = whole
        self.second = nn.Sequential(spnn.Conv3d(4, 6, 3), spnn.BatchNorm(6), spnn.ReLU())
        self.head = nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 5))

    def forward(self, x: SparseTensor) -> Tensor:
        return self.head(self.whole(self.second(self.window(self.first(x)))))


class PerSample(nn.Module):
    """Sites that know of their whole sample: normalised by it, and weighted by it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(spnn.Conv3d(2, 4, 3), spnn.InstanceNorm(4, affine=True), spnn.ReLU())
        self.second = nn.Sequential(spnn.Conv3d(4, 4, 2, 2), spnn.GroupNorm(2, 4), spnn.Tanh())
        self.pool = spnn.GlobalMaxPool()
        self.gate = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid())

    def forward(self, x: SparseTensor) -> SparseTensor:
        x = self.second(self.first(x))
        gate = self.gate(self.pool(x))
        segments = x.segments
        spread = torch.ops.halopipe.segment_expand(gate, segments.starts, segments.lengths, x.feats.shape[0])
        return x.with_feats(x.feats * spread)


class Generated(nn.Module):
    """New sites around those given."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(spnn.Conv3d(2, 4, 3, 2), spnn.BatchNorm(4), spnn.ReLU())
        self.up = spnn.Conv3d(4, 3, 2, 2, transposed=True, generative=True)
        self.last = spnn.Conv3d(3, 3, 3)

    def forward(self, x: SparseTensor) -> SparseTensor:
        return self.last(spnn.functional.relu(self.up(self.down(x))))


class Above(nn.Module):
    """A part of each cloud, added to what a way down and up makes of it; seen from above, with dense layers behind."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(spnn.Conv3d(2, 4, 3), spnn.BatchNorm(4), spnn.ReLU())
        self.crop = spnn.SparseCrop((-2, -3, -2), (4, 3, 3))
        self.up = spnn.Conv3d(4, 4, 2, 2, transposed=True, generative=True)
        self.down = spnn.Conv3d(4, 4, 2, 2)
        self.inner = spnn.SparseCrop((-2, 0, -2), (4, 4, 4))
        self.dense = spnn.ToDenseBEVConvolution(4, 3, (6, 4, 6), offset=(-2, 0, -2), bias=True)
        self.high = spnn.ToBEVHeightCompression(4, (6, 2, 6), offset=(-2, 1, -2))
        self.flat = nn.Sequential(
            spnn.ToBEVConvolution(4, 3, 4, bias=True),
            spnn.BatchNorm(3),
            spnn.ToBEVReduction(2, 4),
            spnn.GlobalMaxPool(),
        )
        self.head = nn.Sequential(nn.Conv2d(11, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5))
        self.beside = nn.Linear(3, 5)

    def forward(self, x: SparseTensor) -> Tensor:
        x = self.first(x)
        x = self.inner(spnn.generative_add(self.up(self.down(x)), self.crop(x)))
        view = torch.cat([self.dense(x), self.high(x)], 1)
        return self.head(view) + self.beside(self.flat(spnn.SparseCrop((0, 0, 0), (4, 4, 4))(x)))


def levels() -> Any:
    """A backbone whose loss reads every level."""

    def loss(found: list[SparseTensor], targets: Tensor) -> Tensor:
        return sum((_site_loss(x, targets) for x in found), torch.zeros(()))

    return SparseResUNet(4, [5], [4], in_channels=2), (clouds()[0], torch.arange(SAMPLES)), loss


def above() -> Any:
    return Above(), (clouds()[0], torch.arange(SAMPLES)), nn.functional.cross_entropy


def unet() -> Example:
    x, targets = clouds()
    return Unet(), (x, targets), spnn.SiteCrossEntropy()


def residual() -> Example:
    x, targets = clouds()
    targets[::5] = -100
    return Residual(), (x, targets), spnn.SiteCrossEntropy()


def mean_pooled() -> Example:
    return _classifier(spnn.GlobalAvgPool(), spnn.MaxPool3d(3, 2))


def max_pooled() -> Example:
    return _classifier(spnn.GlobalMaxPool(), spnn.MaxPool3d(2))


def averaged() -> Example:
    return _classifier(spnn.GlobalAvgPool(), spnn.AvgPool3d((3, 2, 2), (1, 2, 2)))


def per_sample() -> Any:
    return PerSample(), (clouds()[0], torch.arange(SAMPLES)), _site_loss


def generated() -> Any:
    return Generated(), (clouds()[0], torch.arange(SAMPLES)), _site_loss


def site_mean() -> Example:
    """Whose loss is a mean over sites, and no mean over samples."""
    x, targets = clouds()
    return spnn.Conv3d(2, 3, 3), (x, targets), _mean_over_sites


def _classifier(whole: nn.Module, window: nn.Module) -> Example:
    return Pooled(whole, window), (clouds()[0], torch.arange(SAMPLES)), nn.functional.cross_entropy


def _site_loss(x: SparseTensor, targets: Tensor) -> Tensor:
    return spnn.SampleMean()(x.with_feats((x.feats - 0.3).square()))


def _mean_over_sites(x: SparseTensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(x.feats, targets)
