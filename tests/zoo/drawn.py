"""Networks that draw random numbers in forward; one device is handed the numbers of the plan."""

from __future__ import annotations

import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.autograd import Network, classes
from tests.zoo.entries import WHOLE_BATCH, network
from tests.zoo.frozen import images


@network("nn.Dropout between linear layers", draws=True)
def dropout() -> Network:
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    return net, classes(), F.cross_entropy


class AlwaysOn(nn.Module):
    """F.dropout without its training flag, which is then always on."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.b = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(torch.relu(self.a(x)))
        return self.b(F.dropout(x, 0.2, training=self.training))


@network("F.dropout without training flag", draws=True)
def functional_dropout() -> Network:
    return AlwaysOn(), classes(), F.cross_entropy


@network("dropout of channels, dropout in place", draws=True)
def dropout2d() -> Network:
    net = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Dropout2d(0.3), nn.Conv2d(6, 4, 3, padding=1),
        nn.Dropout(0.2, inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
    )  # fmt: skip
    return net, images(), F.cross_entropy


class DropPath(nn.Module):
    """timm's stochastic depth: one number a sample."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        keep = 1 - self.rate
        shape = (x.shape[0],) + (1,) * (x.ndim - 1)
        mask = x.new_empty(shape).bernoulli_(keep)
        return x * mask.div_(keep)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.GELU()) for _ in range(3))
        self.drop = DropPath(0.3)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + self.drop(block(x))
        return self.head(x)


@network("stochastic depth: one bernoulli_ number a sample", draws=True)
def drop_path() -> Network:
    return Residual(), classes(), F.cross_entropy


class Rand(nn.Module):
    """The older drop path: floor of keep plus torch.rand."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.b = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.a(x))
        mask = torch.floor(0.8 + torch.rand((x.shape[0], 1), dtype=x.dtype, device=x.device))
        return self.b(h / 0.8 * mask)


@network("torch.rand of the batch's size, floored", draws=True)
def rand_floor() -> Network:
    return Rand(), classes(), F.cross_entropy


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mu = nn.Linear(6, 3)
        self.logvar = nn.Linear(6, 3)
        self.dec = nn.Linear(3, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mu = self.mu(x)
        logvar = self.logvar(x)
        z = mu + torch.exp(0.5 * logvar) * torch.randn_like(mu)
        return self.dec(z), mu, logvar


def vae_loss(out: tuple[Tensor, Tensor, Tensor], x: Tensor) -> Tensor:
    recon, mu, logvar = out
    kld = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1).mean()
    return F.mse_loss(recon, x) + 0.1 * kld


@network("a variational autoencoder: randn_like", draws=True)
def vae() -> Network:
    x = torch.randn(4, 6)
    return Noisy(), (x, x.clone()), vae_loss


class Gumbel(nn.Module):
    """Gumbel softmax written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 4)
        self.b = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.a(x)
        u = torch.rand_like(logits)
        g = -torch.log(-torch.log(u + 1e-9) + 1e-9)
        return self.b(F.softmax((logits + g) / 0.7, dim=-1))


@network("Gumbel softmax by rand_like", draws=True)
def gumbel_by_hand() -> Network:
    return Gumbel(), classes(), F.cross_entropy


class GumbelHard(Gumbel):
    """F.gumbel_softmax, hard: straight through."""

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.gumbel_softmax(self.a(x), tau=0.7, hard=True))


@network("F.gumbel_softmax, hard", draws=True)
def gumbel_softmax() -> Network:
    return GumbelHard(), classes(), F.cross_entropy


class WeightNoise(nn.Module):
    """DropConnect: the weights are dropped, not the activations."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 6) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, F.dropout(self.w, 0.4, self.training))


@network("DropConnect: dropout of a weight", draws=True)
def drop_connect() -> Network:
    return WeightNoise(), classes(), F.cross_entropy


class LayerDrop(nn.Module):
    """A layer is skipped by Python's own generator."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.training and random.random() < 0.3:
                continue
            x = torch.relu(block(x))
        return self.head(x)


@network("LayerDrop by random.random()", refused="random")
def layer_drop() -> Network:
    return LayerDrop(), classes(), F.cross_entropy


class NumpyNoise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        scale = 1 + 0.1 * np.random.randn()  # noqa: NPY002  # as people write it
        return self.fc(x * scale)


@network("a scale from numpy.random", refused="random|another loss")
def numpy_noise() -> Network:
    return NumpyNoise(), classes(), F.cross_entropy


class Permuted(nn.Module):
    """MixUp inside the model: a permutation of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        order = torch.randperm(x.size(0), device=x.device)
        return self.fc(0.6 * x + 0.4 * x[order])


@network("mixup by torch.randperm of the batch", draws=True, refused=WHOLE_BATCH)
def mixup_randperm() -> Network:
    return Permuted(), classes(), F.cross_entropy
