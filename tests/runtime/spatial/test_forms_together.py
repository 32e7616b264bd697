"""Networks of many kinds of layers, divided in one stage and trained, give what one device gives."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner.ir.graph import Layer
from planner.ir.profile import ModelSource
from profiler.capture.graph import capture
from profiler.source.model import LoadedModel
from profiler.source.source import load_model
from runtime.captured import CapturedModule
from tests.runtime.divided import divided
from tests.runtime.engines import trained
from tests.runtime.plans import Trained, assert_equal, train_serially
from tests.runtime.spatial.checks import random_cuts

ROWS = (3, 3)


class Images(nn.Module):
    """Pools, interpolation, padding, slices, skips and normalisation inside a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm, self.instance = nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True)
        self.slope, self.scale = nn.PReLU(4), nn.Parameter(torch.randn(1, 4, 1, 11))
        self.head = nn.Linear(36, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.slope(self.first(x))
        down = self.norm(F.max_pool2d(x, 3, 2, 1))
        left, right = down.chunk(2, 1)
        down = torch.cat((right * 2, left.tanh()), 1)
        up = F.interpolate(down, size=x.shape[2:], mode="bilinear") * self.scale
        x = torch.cat((F.avg_pool2d(x, 3, 1, 1, count_include_pad=False), up), 2)
        x = self.instance(self.second(F.pad(x, (1, 2, 0, 3), mode="reflect")))[:, :, 1:-2:2]
        x = F.adaptive_avg_pool2d(x, 3).softmax(1)
        return self.head(x.flatten(1))


class Words(nn.Module):
    """A transformer's block."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(11, 8), nn.Parameter(torch.randn(6, 8))
        self.norm, self.project, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position
        heads = (each.unflatten(2, (2, -1)).transpose(1, 2) for each in self.project(self.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(x + y.transpose(1, 2).flatten(2))


class Loose(nn.Module):
    """Operators that leave an input alone, or all of them: backward takes the same way on every rank all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(2, 2, 3, padding=1) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        x, second, third, fourth, fifth = self.convs[0](x), *self.convs[1:]
        y = second(x).type_as(third(x)) + fourth(x).detach()
        return y * torch.ones_like(fifth(y))


def loose() -> Any:
    return Loose(), (torch.randn(4, 2, 6, 5), torch.randn(4, 2, 6, 5)), F.mse_loss


def images() -> Any:
    return Images(), (torch.randn(4, 2, 9, 11), torch.randn(4, 3)), F.mse_loss


def words() -> Any:
    tokens = torch.randint(11, (4, 6))
    return Words(), (tokens, torch.randn(4, 6, 5)), F.mse_loss


@cache
def network(name: str) -> tuple[LoadedModel, CapturedModule]:
    model = load_model(ModelSource(f"{__name__}:{name}", {}, (), "float64"))
    return model, capture(model)


@cache
def serial(name: str) -> Trained:
    found = train_serially(network(name)[0], ROWS)
    gradients = {key: g for key, g in found.gradients.items() if g is not None}
    graph = network(name)[1].graph_module
    used = {key for key, _ in (*graph.named_parameters(), *graph.named_buffers())}
    # Of what no operator reads (`type_as` reads a dtype) a rank has nothing; `hp.execute` adds it from the module.
    state = {key: tensor for key, tensor in found.state.items() if key in used or name != "loose"}
    return replace(found, gradients=gradients, state=state)


def check(name: str, cuts: Any) -> None:
    decision = divided(network(name)[1].graph, cuts, ROWS)
    assert_equal(trained(network(name), decision, 3), serial(name))


@pytest.mark.parametrize(
    "cuts",
    [
        {"height": (0, 1, 2)},
        {"height": (0, 2, 2, 9)},
        {"height": (0, 3, 9), "width": (0, 5, 11)},
        {"channel": (0, 1, 4)},
        {"sample": (0, 1, 3), "channel": (0, 3, 4)},
        {"replica": (0, 1, 2)},
    ],
    ids=str,
)
def test_images(cuts: dict[str, tuple[int, ...]]) -> None:
    check("images", cuts)


@pytest.mark.parametrize(
    "cuts",
    [{"time": (0, 1, 3, 6)}, {"feature": (0, 1, 4)}, {"head": (0, 1, 2), "time": (0, 2, 6)}, {"channel": (0, 1, 2)}],
    ids=str,
)
def test_words(cuts: dict[str, tuple[int, ...]]) -> None:
    check("words", cuts)


@pytest.mark.parametrize("name", ["images", "words", "loose"])
@pytest.mark.parametrize("seed", range(3))
def test_every_layer_cut_otherwise(name: str, seed: int) -> None:
    rng = random.Random(seed)

    def cuts(layer: Layer) -> dict[str, tuple[int, ...]]:
        dim = rng.choice(("sample", "channel", "height", "width", "time", "replica"))
        return {dim: random_cuts(rng, 12, 3)}

    check(name, cuts)
