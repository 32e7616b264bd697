"""Networks that draw random numbers, divided in one stage and trained, draw what one device draws."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner.ir.profile import ModelSource
from profiler.capture.graph import capture
from profiler.source.model import LoadedModel
from profiler.source.source import load_model
from runtime.captured import CapturedModule
from runtime.numerics.single_device import serial_step
from runtime.stage.random.streams import CounterRng
from tests.runtime.divided import divided
from tests.runtime.engines import drawing_loss, trained
from tests.runtime.plans import Trained, assert_equal, batch_of, sgd

ROWS, SEED, STEPS = (3, 3), 5, 2


class Dropping(nn.Module):
    """Everything that drops something."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.drop, self.channels = nn.Conv2d(2, 4, 3, padding=1), nn.Dropout(0.4), nn.Dropout2d(0.4)
        self.slopes, self.alpha = nn.RReLU(), nn.AlphaDropout(0.2)
        self.project, self.head = nn.Linear(4, 24), nn.Linear(8, 3)
        self.lstm = nn.LSTM(8, 8, 2, dropout=0.3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.slopes(self.channels(self.drop(self.conv(x))))
        x = self.alpha(x + torch.rand_like(x)).flatten(2).transpose(1, 2)
        heads = (each.unflatten(2, (2, -1)).transpose(1, 2) for each in self.project(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(*heads, dropout_p=0.3, is_causal=True).transpose(1, 2).flatten(2)
        y = y * y.new_empty((y.shape[0], 1, 1)).bernoulli_(0.7)
        return self.head(self.lstm(y)[0])


def dropping() -> Any:
    return Dropping(), (torch.randn(4, 2, 5, 6), torch.randn(4, 30, 3)), F.mse_loss


@cache
def network() -> tuple[LoadedModel, CapturedModule]:
    model = load_model(ModelSource(f"{__name__}:dropping", {}, (), "float64"))
    return model, capture(model)


@cache
def alone() -> Trained:
    """One device, on a copy of the module and its graph."""
    model, captured = copy.deepcopy(network())
    draw, optimizer, losses = CounterRng(SEED), sgd(model.module.parameters()), []
    loss_of = drawing_loss(captured, draw)
    for step in range(STEPS):
        draw.step = step
        losses.append(serial_step(loss_of, optimizer, *batch_of(model, sum(ROWS), step), ROWS, draw))
    gradients = {name: parameter.grad for name, parameter in model.module.named_parameters()}
    return Trained(losses, gradients, model.module.state_dict())


@pytest.mark.parametrize(
    "cuts",
    [
        {"height": (0, 1, 5)},
        {"sample": (0, 1, 3), "channel": (0, 1, 4)},
        {"time": (0, 7, 30)},
        {"head": (0, 1, 2), "height": (0, 2, 5)},
        {"width": (0, 0, 2, 6)},
    ],
    ids=str,
)
def test_ranks_drop_what_one_device_drops(cuts: dict[str, tuple[int, ...]]) -> None:
    decision = divided(network()[1].graph, cuts, ROWS)
    assert_equal(trained(network(), decision, STEPS, seed=SEED), alone())
