"""Losses that are made of several layers, of whose terms ranks have parts, are those of one device."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from planner.ir.profile import ModelSource
from profiler.capture.graph import capture
from profiler.source.model import LoadedModel
from profiler.source.source import load_model
from runtime.captured import CapturedModule
from tests.runtime.divided import Cuts, by_stage, divided
from tests.runtime.engines import trained
from tests.runtime.plans import Trained, assert_equal, train_serially

LOSSES = {
    "two terms": lambda y, t: F.mse_loss(y, t) + 0.1 * y.abs().mean(),
    "a constant": lambda y, t: F.mse_loss(y, t) + 1.0,
    "a root": lambda y, t: F.mse_loss(y, t).sqrt(),
    "a product": lambda y, t: F.mse_loss(y, t) * y.square().mean().exp(),
    "mean of an expression": lambda y, t: (2 * (y - t) ** 2).mean(),
    "means of samples": lambda y, t: ((y - t) ** 2).flatten(1).mean(1).mean(),
    "weighted elements": lambda y, t: (F.mse_loss(y, t, reduction="none") * t.square()).mean(),
    "divergence over the batch": lambda y, t: F.kl_div(y.log_softmax(1), t.softmax(1), reduction="batchmean"),
    "sum": lambda y, t: F.mse_loss(y, t, reduction="sum") / y.shape[0],
    "overlap": lambda y, t: 1 - ((y * t).sum((1, 2, 3)) / (1 + (y.square() + t.square()).sum((1, 2, 3)))).mean(),
}
WHOLE = ("a root", "a product")
"""Those that need the whole batch."""
CUTS: list[Cuts] = [
    {"height": (0, 2, 6)},
    {"sample": (0, 1, 3), "width": (0, 3, 5)},
    {"channel": (0, 1, 3), "replica": (0, 1, 2)},
]


def made(loss: str) -> Any:
    module = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Tanh())
    return module, (torch.randn(5, 2, 6, 5), torch.randn(5, 3, 6, 5)), LOSSES[loss]


@cache
def network(loss: str) -> tuple[LoadedModel, CapturedModule]:
    torch.manual_seed(0)
    model = load_model(ModelSource(f"{__name__}:made", {"loss": f'"{loss}"'}, (), "float64"))
    return model, capture(model)


@cache
def serial(loss: str) -> Trained:
    return train_serially(network(loss)[0], rows(loss), 2)


def rows(loss: str) -> tuple[int, ...]:
    """Micro-batches."""
    return (5,) if loss in WHOLE else (3, 2)


@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("loss", LOSSES)
def test_in_one_stage(loss: str, cuts: Cuts) -> None:
    assert_equal(trained(network(loss), divided(network(loss)[1].graph, cuts, rows(loss))), serial(loss))


@pytest.mark.parametrize("after", [1, 2, 3, 4])
@pytest.mark.parametrize("loss", ["a root", "two terms", "overlap"])
def test_wherever_a_stage_ends(loss: str, after: int) -> None:
    """The number of layers after the boundary."""
    graph = network(loss)[1].graph
    cuts: list[Cuts] = [{"height": (0, 2, 6)}, {"width": (0, 2, 5)} if after % 2 else {}]
    decision = by_stage(graph, [graph.layers[-after].name], cuts, rows(loss))
    assert_equal(trained(network(loss), decision), serial(loss))
