"""Networks with batch normalisation, pools of all space and losses by pixel, divided and trained, as on one device."""

from __future__ import annotations

import copy
import random
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
from runtime.engine import Engine
from runtime.numerics.single_device import serial_step
from tests.runtime.divided import at_random, divided
from tests.runtime.engines import trained, trained_on
from tests.runtime.plans import Trained, assert_equal, batch_of, sgd, train_serially

ROWS = (3, 2)
CODES = 3
WEIGHTS = torch.tensor([0.5, 1.0, 2.5], dtype=torch.float64)


class Segments(nn.Module):
    """Normalised by the batch, with a gate that looks at all of space (Hu et al. 2018), and a class for each pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(2, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6, momentum=None)
        self.down, self.norm2 = nn.Conv2d(6, 6, 3, stride=2, padding=1), nn.BatchNorm2d(6, affine=False)
        self.frozen, self.gate = nn.BatchNorm2d(6), nn.Conv2d(6, 6, 1)
        self.head, self.norm3 = nn.Conv2d(6, CODES, 3, padding=1), nn.BatchNorm2d(CODES, track_running_stats=False)
        self.frozen.eval()
        self.frozen.num_batches_tracked = None  # which no layer reads: it would be in no stage

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(self.first(x)).relu()
        y = self.frozen(self.norm2(self.down(x)))
        y = y * self.gate(y.mean((2, 3), keepdim=True)).sigmoid() + F.adaptive_avg_pool2d(y, 1)
        return self.norm3(self.head(x + F.interpolate(y, size=x.shape[2:])))


def by_pixel(weights: Tensor, found: Tensor, target: Tensor) -> Tensor:
    """Classes weigh differently, and one is ignored."""
    return F.cross_entropy(found, target, weights, ignore_index=1, label_smoothing=0.1)


def made(loss: str) -> Any:
    x, target = torch.randn(5, 2, 9, 7), torch.randint(CODES, (5, 9, 7))
    if loss == "squares":
        return Segments(), (x, torch.randn(5, CODES, 9, 7)), F.mse_loss
    return Segments(), (x, target), F.cross_entropy if loss == "classes" else lambda y, t: by_pixel(WEIGHTS, y, t)


@cache
def network(loss: str) -> tuple[LoadedModel, CapturedModule]:
    torch.manual_seed(0)
    model = load_model(ModelSource(f"{__name__}:made", {"loss": f'"{loss}"'}, (), "float64"))
    return model, capture(model)


@cache
def serial(loss: str) -> Trained:
    if loss != "weighted classes":
        return train_serially(network(loss)[0], ROWS)
    twin = copy.deepcopy(network(loss)[0])
    optimizer, losses = sgd(twin.module.parameters()), []
    for step in range(3):
        inputs, targets = batch_of(network(loss)[0], sum(ROWS), step)
        weighed = by_terms(twin, _terms(targets[0]))
        losses.append(serial_step(weighed, optimizer, inputs, targets, ROWS))
    return Trained(losses, {n: p.grad for n, p in twin.module.named_parameters()}, twin.module.state_dict())


def by_terms(model: LoadedModel, total: Tensor) -> Any:
    """The loss of a micro-batch, which a step weighs by its rows, as its share in a mean over ``total`` terms."""

    def loss_of(inputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> Tensor:
        share = _terms(targets[0]) / total
        return model.loss(inputs, targets) * share * sum(ROWS) / len(targets[0])

    return loss_of


def _terms(target: Tensor) -> Tensor:
    return WEIGHTS[target[target != 1]].sum()


LOSSES = ["squares", "classes", "weighted classes"]
CUTS = [
    {"height": (0, 1, 2)},
    {"height": (0, 2, 2, 9)},
    {"sample": (0, 1, 3), "width": (0, 3, 7)},
    {"channel": (0, 1, 3), "height": (0, 4, 9)},
    {"replica": (0, 1, 2), "height": (0, 4, 9)},
]


@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("loss", LOSSES)
def test_every_layer_cut_alike(loss: str, cuts: dict[str, tuple[int, ...]]) -> None:
    decision = divided(network(loss)[1].graph, cuts, ROWS)
    assert_equal(trained(network(loss), decision, 3), serial(loss))


@pytest.mark.parametrize("seed", range(4))
def test_layouts_at_random_with_margins(seed: int) -> None:
    loss = LOSSES[seed % 3]
    families = ("sample", "spatial", "channel")
    decision = at_random(network(loss)[1].graph, 4, families, random.Random(seed), ROWS, halo_depth=2)
    assert_equal(trained(network(loss), decision, 3), serial(loss))


@pytest.mark.parametrize("cuts", CUTS[1:4], ids=str)
def test_evaluation_takes_the_running_statistics_of_all_parts(cuts: dict[str, tuple[int, ...]]) -> None:
    loaded, captured = network("classes")
    batch = batch_of(loaded, sum(ROWS), 0)

    def work(engine: Engine) -> list[float | None]:
        return [engine.step(*batch).loss, engine.evaluate(*batch).loss]

    found = trained_on((loaded, captured), divided(captured.graph, cuts, ROWS), work)
    twin = copy.deepcopy(loaded)
    first = serial_step(twin.loss, sgd(twin.module.parameters()), *batch, ROWS)
    twin.module.eval()
    parts = zip(*(each.split(ROWS) for each in (batch[0][0], batch[1][0])), strict=True)
    with torch.no_grad():
        second = sum(len(x) / sum(ROWS) * twin.loss((x,), (target,)).item() for x, target in parts)
    assert found.losses == pytest.approx([first, second], rel=1e-12)
