"""Micro-batches smaller than the ranks of a stage: ranks with an empty part take the same way, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from planner.ir.graph import Layer
from profiler.capture.graph import capture
from profiler.source.losses import TrainedLoss
from profiler.source.model import LoadedModel
from tests.runtime.cases import trained_alone
from tests.runtime.divided import Cuts, divided
from tests.runtime.engines import Network, trained_on
from tests.runtime.plans import assert_equal, decide, split_backward

Join = Callable[[Tensor, Tensor], Tensor]
"""Of two values [sample, 4, 6, 4], each made by a layer of its own, one [sample, ...] tensor."""

JOINS: dict[str, Join] = {
    "view as": lambda a, b: a.flatten(1).view_as(b.flatten(1)),
    "view as of another shape": lambda a, b: a.flatten(1).view_as(b) * 2,
    "expand as": lambda a, b: a.mean((2, 3), keepdim=True).expand_as(b),
    "type as": lambda a, b: a.type_as(b),
    "add": lambda a, b: a + b,
    "broadcast": lambda a, b: a * b.mean(1, keepdim=True),
    "where": lambda a, b: torch.where(b > 0, a, b),
    "masked": lambda a, b: a.masked_fill(b > 0, 0.5),
    "concat": lambda a, b: torch.cat([a, b], 1)[:, 1:6],
    "halves": lambda a, b: a.chunk(2, 1)[0] + b.chunk(2, 1)[1],
    "detached": lambda a, b: a * b.detach().sigmoid(),
    "softmax": lambda a, b: a.softmax(1) - b.softmax(3),
    "pools": lambda a, b: functional.max_pool2d(a, 2) + functional.adaptive_avg_pool2d(b, (3, 2)),
    "interpolation": lambda a, b: functional.interpolate(a, scale_factor=2) * functional.pad(b, (2, 2, 3, 3)),
    "attention": lambda a, b: functional.scaled_dot_product_attention(a, b, b),
    "products": lambda a, b: a.flatten(2) @ b.flatten(2).transpose(1, 2),
    "global pool": lambda a, b: a.mean((2, 3)) * b.amax((2, 3)),
    "moved": lambda a, b: a.transpose(1, 3).reshape(-1, 96).view_as(b.flatten(1)),
}


class Joined(nn.Module):
    """Two convolutions, batch norm on one side, layer norm on the other, what they are joined by, and a head."""

    def __init__(self, join: Join) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Tanh())
        self.right = nn.Sequential(nn.Conv2d(2, 4, 1), nn.LayerNorm(4))
        self.join = join
        self.head = nn.LazyLinear(3)

    def forward(self, x: Tensor) -> Tensor:
        left = self.left(x)
        right = self.right(x)
        return self.head((self.join(left, right)).flatten(1)) + 0.1 * right.mean()


def of_samples(layer: Layer, turn: int) -> Cuts:
    return {"sample": (0, 1, 2)}


def of_samples_or_channels(layer: Layer, turn: int) -> Cuts:
    """Neighbours are cut in different ways."""
    return {"sample": (0, 1, 2)} if turn % 2 else {"channel": (0, 1, 2)}


def of_channels_or_samples(layer: Layer, turn: int) -> Cuts:
    return of_samples_or_channels(layer, turn + 1)


def of_rows_or_samples(layer: Layer, turn: int) -> Cuts:
    return {"height": (0, 1, 3)} if turn % 2 else {"sample": (0, 2, 3)}


WAYS: dict[str, Callable[[Layer, int], Cuts]] = {
    "samples": of_samples,
    "samples, then channels": of_samples_or_channels,
    "channels, then samples": of_channels_or_samples,
    "rows, then samples": of_rows_or_samples,
}


@cache
def network(join: str) -> Network:
    torch.manual_seed(0)
    x = torch.randn(3, 2, 6, 4, dtype=torch.float64)
    module = Joined(JOINS[join]).double()
    with torch.no_grad():
        module(x)
    model = LoadedModel(module, (x,), (torch.tensor([0, 2, 1]),), TrainedLoss(_loss, unpacked=True))
    return model, capture(model)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output, target)


def small_batches(given: Network) -> list[tuple[Any, Any]]:
    """The last batches of epochs: of one sample, of two, and a whole one."""
    inputs, targets = given[0].fed
    return [(tuple(x[:n] for x in inputs), tuple(t[:n] for t in targets)) for n in (1, 2, 3)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("join", JOINS)
def test_layers_cut_in_different_ways_with_empty_parts(join: str, way: str) -> None:
    given = network(join)
    turns = {layer.name: turn for turn, layer in enumerate(given[1].graph.layers)}
    decision = divided(given[1].graph, lambda layer: WAYS[way](layer, turns[layer.name]), (3,), schedule=split_backward)
    require_equal(given, decision)


@pytest.mark.parametrize("join", JOINS)
def test_ranks_that_share_samples_with_empty_shares(join: str) -> None:
    given = network(join)
    require_equal(given, decide(given[1].graph, ["head"], (3,), [(0, 1, 2), (3, 4)], [(1, 1, 1), (1, 3)]))


def require_equal(given: Network, decision: Any) -> None:
    batches = small_batches(given)
    found = trained_on(given, decision, lambda engine: [engine.step(*batch).loss for batch in batches])
    assert_equal(found, trained_alone(given, batches, [(n,) for n in (1, 2, 3)]))
