"""Networks of one operator each, with which a new row of :mod:`cuda_ops.operator_table` is shown to be right.

They are judged as those of the zoo are, under the same plans; a new operator is its row and a case here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.autograd import Network
from tests.zoo.entries import Entry, Factory
from tests.zoo.frozen import images

CASES: dict[str, Entry] = {}
"""By operator."""


def case(operator: str, habit: str) -> Callable[[Factory], Factory]:
    """Registers a network that draws numbers by ``operator``."""

    def register(factory: Factory) -> Factory:
        CASES[operator] = Entry(f"operators:{factory.__name__}", habit, factory, draws=True)
        return factory

    return register


class Glimpses(nn.Module):
    """Looks at places of a picture that it draws by its own attention."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Conv2d(3, 4, 3, padding=1)
        self.scores = nn.Conv2d(3, 1, 1)
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.multinomial(self.scores(x).flatten(1).softmax(-1), 3)
        features = self.features(x).flatten(2)
        return self.head(features.gather(2, places.unsqueeze(1).expand(-1, 4, -1)).flatten(1))


@case("multinomial", "three places of a picture, by attention")
def glimpses() -> Network:
    return Glimpses(), images(), F.cross_entropy


class NoiseLevels(nn.Module):
    """Denoises pictures of log-normal noise levels, one a picture (Karras et al. 2022)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.SiLU(), nn.Conv2d(6, 3, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        level = torch.empty_like(x[:, :1, :1, :1]).log_normal_(-1.2, 1.2)
        return ((self.net(x + level * torch.randn_like(x)) - x) / (1 + level)).pow(2).mean()


@case("log_normal", "noise levels of pictures")
def noise_levels() -> Network:
    return NoiseLevels(), images(), lambda out, _: out


class HeavyTails(nn.Module):
    """Noise of heavy tails in every place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.second(torch.tanh(h + torch.empty_like(h).cauchy_(0, 0.1))).mean((2, 3))


@case("cauchy", "noise in every place")
def heavy_tails() -> Network:
    return HeavyTails(), images(), F.cross_entropy
