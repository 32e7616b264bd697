"""Normalisation in all its ways, and parametrised weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, spectral_norm, weight_norm

from tests.zoo.autograd import Network, classes
from tests.zoo.entries import DATA, SPATIAL, WHOLE_BATCH, network
from tests.zoo.frozen import images


def normed(norm: nn.Module) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), norm, nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
    )  # fmt: skip


@network("batch norm with momentum None: a cumulative average", mixes=True)
def momentum_none() -> Network:
    return normed(nn.BatchNorm2d(4, momentum=None)), images(), F.cross_entropy


@network("batch norm without running statistics", mixes=True)
def no_running_stats() -> Network:
    return normed(nn.BatchNorm2d(4, track_running_stats=False)), images(), F.cross_entropy


@network("batch norm without affine, momentum 0.3, another eps", mixes=True)
def no_affine() -> Network:
    return normed(nn.BatchNorm2d(4, affine=False, momentum=0.3, eps=1e-3)), images(), F.cross_entropy


@network("group norm")
def group_norm() -> Network:
    return normed(nn.GroupNorm(2, 4)), images(), F.cross_entropy


_STATISTICS = "running_mean"


@network("instance norm with running statistics", mixes=True, refused={DATA: _STATISTICS, SPATIAL: _STATISTICS})
def instance_norm_running() -> Network:
    return normed(nn.InstanceNorm2d(4, affine=True, track_running_stats=True)), images(), F.cross_entropy


@network("instance norm without parameters")
def instance_norm() -> Network:
    return normed(nn.InstanceNorm2d(4)), images(), F.cross_entropy


@network("local response norm, ceil-mode pooling, AlexNet's way")
def alexnet_like() -> Network:
    net = nn.Sequential(
        nn.Conv2d(3, 4, 5, stride=2, padding=2), nn.ReLU(inplace=True), nn.LocalResponseNorm(3),
        nn.MaxPool2d(3, 2, ceil_mode=True), nn.Flatten(), nn.Linear(16, 3),
    )  # fmt: skip
    return net, images(), F.cross_entropy


@network("layer norm over channels last, with permutes (ConvNeXt)")
def channels_last_norm() -> Network:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dw = nn.Conv2d(3, 3, 7, padding=3, groups=3)
            self.norm = nn.LayerNorm(3, eps=1e-6)
            self.pw1 = nn.Linear(3, 12)
            self.pw2 = nn.Linear(12, 3)
            self.gamma = nn.Parameter(1e-1 * torch.ones(3))
            self.fc = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.dw(x).permute(0, 2, 3, 1)
            h = self.gamma * self.pw2(F.gelu(self.pw1(self.norm(h))))
            return self.fc((x + h.permute(0, 3, 1, 2)).mean([-2, -1]))

    return Block(), images(), F.cross_entropy


@network("weight_norm, the older hook", refused="weight_norm|hook")
def weight_norm_hook() -> Network:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net = nn.Sequential(weight_norm(nn.Linear(6, 8)), nn.ReLU(), weight_norm(nn.Linear(8, 3)))
    return net, classes(), F.cross_entropy


@network("weight_norm, the parametrisation")
def weight_norm_parametrised() -> Network:
    net = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(6, 8)), nn.ReLU(), parametrizations.weight_norm(nn.Linear(8, 3))
    )
    return net, classes(), F.cross_entropy


@network("spectral_norm, the older hook: forward writes the vectors of the power iteration", mixes=True)
def spectral_norm_hook() -> Network:
    net = nn.Sequential(spectral_norm(nn.Linear(6, 8)), nn.LeakyReLU(0.2), spectral_norm(nn.Linear(8, 3)))
    return net, classes(), F.cross_entropy


@network("spectral_norm, the parametrisation", mixes=True)
def spectral_norm_parametrised() -> Network:
    net = nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(6, 8)),
        nn.LeakyReLU(0.2),
        parametrizations.spectral_norm(nn.Linear(8, 3)),
    )
    return net, classes(), F.cross_entropy


class Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).transpose(-1, -2)


@network("a parametrisation of one's own: symmetric weights")
def symmetric_weights() -> Network:
    mid = nn.Linear(8, 8)
    parametrize.register_parametrization(mid, "weight", Symmetric())
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), mid, nn.Tanh(), nn.Linear(8, 3)), classes(), F.cross_entropy


class StandardisedConv(nn.Conv2d):
    """Weight standardisation (BiT)."""

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight
        v, m = torch.var_mean(w, dim=[1, 2, 3], keepdim=True, unbiased=False)
        w = (w - m) / torch.sqrt(v + 1e-6)
        return F.conv2d(x, w, self.bias, self.stride, self.padding, self.dilation, self.groups)


@network("weight standardisation")
def weight_standardised() -> Network:
    net = nn.Sequential(
        StandardisedConv(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), StandardisedConv(4, 4, 3, stride=2),
        nn.Flatten(), nn.Linear(36, 3),
    )  # fmt: skip
    return net, images(), F.cross_entropy


class BatchStd(nn.Module):
    """StyleGAN's mini-batch standard deviation as one more channel."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 4, 3, padding=1)
        self.b = nn.Conv2d(5, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        h = F.leaky_relu(self.a(x), 0.2)
        std = torch.sqrt(h.var(dim=0, unbiased=False) + 1e-8).mean()
        h = torch.cat([h, std.expand(h.size(0), 1, h.size(2), h.size(3))], 1)
        return self.b(h).mean(dim=(1, 2, 3))


@network("the mini-batch standard deviation as a channel", mixes=True, refused=WHOLE_BATCH)
def batch_std_channel() -> Network:
    x, _ = images()
    return BatchStd(), (x, torch.rand(4).round()), F.binary_cross_entropy_with_logits
