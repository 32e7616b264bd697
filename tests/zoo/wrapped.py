"""Modules as they are handed over: wrapped, logging, caching, with constants of their own."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.autograd import Network, classes
from tests.zoo.entries import network
from tests.zoo.frozen import images
from tests.zoo.losses import mlp


@network("nn.DataParallel around the module")
def data_parallel() -> Network:
    return nn.DataParallel(mlp()), classes(), F.cross_entropy


class Logged(nn.Module):
    """Numbers are read out and kept for a chart, in forward and in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.log = {}
        self.history: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.net(x)
        with torch.no_grad():
            self.log["norm"] = y.norm().item()
            self.history.append(y.abs().max().item())
        return y


class Looked(Logged):
    """The same by float(), which wants to know the number."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.net(x)
        self.history.append(float(y.detach().abs().max()))
        return y


@network("numbers read by float() and kept for a chart", refused=r"\.item\(\) instead of float")
def looked_at_numbers() -> Network:
    return Looked(), classes(), F.cross_entropy


@network("numbers read by item() and kept for a chart")
def logged_numbers() -> Network:
    kept: list[float] = []

    def loss(out: Tensor, y: Tensor) -> Tensor:
        found = F.cross_entropy(out, y)
        kept.append(found.detach().item())
        return found

    return Logged(), classes(), loss


class Cached(nn.Module):
    """Positions by numpy, cached in a dict by the length; a register that forward fills when it is first called."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(9, 6)
        self.fc = nn.Linear(6, 3)
        self.cache = {}

    def positions(self, length: int, like: Tensor) -> Tensor:
        if length not in self.cache:
            angles = np.arange(length)[:, None] / 100 ** (np.arange(0, 6, 2) / 6)
            table = np.stack([np.sin(angles), np.cos(angles)], -1).reshape(length, 6)
            self.cache[length] = torch.from_numpy(table).to(like)
        return self.cache[length]

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids) * math.sqrt(6)
        scale = torch.tensor([1.0, 0.5, 2.0], dtype=x.dtype)
        if not hasattr(self, "seen"):
            self.seen = torch.ones(1, dtype=x.dtype)
        return self.fc((x + self.positions(ids.size(1), x)).mean(1)) * scale * self.seen


@network("positions by numpy cached in a dict, constants by torch.tensor, an attribute made at the first call")
def cached_positions() -> Network:
    return Cached(), (torch.randint(9, (4, 5)), torch.randint(3, (4,))), F.cross_entropy


class Regularised(nn.Module):
    """A penalty on weights and one on activations, collected in attributes by the layers and read at the end."""

    class Layer(nn.Linear):
        penalty: Tensor

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            self.penalty = y.abs().mean() + 1e-2 * self.weight.abs().sum()
            return y

    def __init__(self) -> None:
        super().__init__()
        self.a = self.Layer(6, 8)
        self.b = self.Layer(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.b(torch.tanh(self.a(x)))
        return y, sum(m.penalty for m in self.modules() if isinstance(m, self.Layer))


@network("penalties kept as attributes by layers and summed by the network")
def collected_penalties() -> Network:
    return Regularised(), classes(), lambda out, y: F.cross_entropy(out[0], y) + 1e-2 * out[1]


class Chosen(nn.Module):
    """Blocks are chosen by a text and a number that are settings; sizes computed with Python in between."""

    def __init__(self, kind: str = "gated", repeats: int = 2) -> None:
        super().__init__()
        self.kinds = nn.ModuleDict({"plain": nn.Conv2d(4, 4, 3, padding=1), "gated": nn.Conv2d(4, 8, 3, padding=1)})
        self.stem = nn.Conv2d(3, 4, 1)
        self.kind = kind
        self.repeats = repeats
        self.head = nn.LazyLinear(3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for _ in range(self.repeats):
            y = self.kinds[self.kind](x)
            x = x + (F.glu(y, dim=1) if self.kind == "gated" else y)
        side = int(x.shape[-1] ** 0.5 * 2) // 2
        x = F.adaptive_max_pool2d(x, (side, side))
        return self.head(torch.flatten(x, start_dim=1))


@network("blocks chosen by settings, sizes computed in Python, a lazy head that saw a batch; channels last")
def chosen_by_settings() -> Network:
    net = Chosen()
    x, y = images()
    net(x)
    return (
        net.to(memory_format=torch.channels_last),
        (x.to(memory_format=torch.channels_last), y),
        nn.CrossEntropyLoss(label_smoothing=0.05),
    )


class Autocast(nn.Module):
    """A part that is guarded from autocast, as losses and softmaxes are; weights by mixed products."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.b = nn.Linear(8, 3)
        self.mix = nn.Bilinear(8, 8, 4)
        self.c = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.a(x))
        with torch.autocast("cpu", enabled=False):
            p = torch.softmax(self.b(h), -1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            q = self.c(self.mix(h, h))
        return p.log() + q.to(p.dtype)


@network("torch.autocast in forward, on for one part and off for another")
def autocast_inside() -> Network:
    return Autocast(), classes(), F.nll_loss
