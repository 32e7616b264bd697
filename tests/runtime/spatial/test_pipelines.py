"""Pipelines whose stages are divided each in its own way: boundaries are redistributed, under every schedule."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from planner.ir.plan import Decision
from planner.ir.schedule import Pipeline, Schedule
from planner.schedules import names, positions, schedule, traits
from profiler.capture.graph import capture
from profiler.models.example import normal
from profiler.source.model import LoadedModel
from tests.runtime.divided import by_stage
from tests.runtime.engines import Network, evaluated, trained
from tests.runtime.plans import Trained, assert_equal, batch_of, train_serially
from tests.runtime.versioned import train_on_versions

TRAINING = tuple(name for name in names() if traits(name).trains)
MICRO_BATCHES = (4, 3, 2, 4)
HEIGHT = {"height": (0, 1, 2)}
WIDTH = {"width": (0, 2, 5)}
BOTH = {"sample": (0, 1, 2)}


class Branched(nn.Module):
    """Convolutions with two skips, one of which passes over the stage in between, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        self.first = nn.Conv2d(4, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 4, 5, padding=2, groups=2)
        self.down = nn.Conv2d(4, 6, 3, 2, 1)
        self.skip = nn.Conv2d(4, 6, 1, 2)
        self.norm = nn.BatchNorm2d(6)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        y = self.second(self.first(x).tanh()) + x
        y = self.norm(self.down(y)).relu() + self.skip(x)
        return self.last(nn.functional.max_pool2d(y, 3, 1, 1).mean((2, 3)))


@cache
def network() -> Network:
    torch.manual_seed(0)
    with torch.device("cpu"):
        module = Branched().double()
    targets = torch.randint(3, (4,), generator=torch.Generator().manual_seed(1))
    model = LoadedModel(module, (normal((4, 2, 11, 9), 0).double(),), (targets,), _loss)
    return model, capture(model)


def _loss(output: Tensor, targets: tuple[Tensor, ...]) -> Tensor:
    return nn.functional.cross_entropy(output, *targets)


@cache
def serial() -> Trained:
    return train_serially(network()[0], MICRO_BATCHES, 2)


def decision_of(name: str) -> Decision:
    """Two groups of two ranks; two stages on each where the schedule allows it."""
    per_position = 1 if traits(name).stages_per_position == 1 else 2
    where = positions(name, 2, per_position)
    groups = ((0, 1), (2, 3))

    def order(pipeline: Pipeline) -> Schedule:
        return schedule(name)(replace(pipeline, positions=where))

    return by_stage(
        network()[1].graph,
        [cut / len(where) for cut in range(1, len(where))],
        [(HEIGHT, WIDTH, BOTH, HEIGHT)[stage] for stage in range(len(where))],
        MICRO_BATCHES,
        [groups[position] for position in where],
        schedule=order,
    )


@pytest.mark.parametrize("name", TRAINING)
def test_a_schedule_over_divided_stages_computes_what_one_device_computes(name: str) -> None:
    decision = decision_of(name)
    model, captured = network()
    expected = serial() if traits(name).synchronous else train_on_versions(model, captured.graph, decision, 2)
    assert_equal(trained((model, captured), decision, 2), expected)


@pytest.mark.parametrize(
    "cuts",
    [
        [{"sample": (0, 2, 4, 5, 6)}, HEIGHT],
        [HEIGHT, {"sample": (0, 1, 3)}, {"height": (0, 1, 2), "width": (0, 1, 3)}],
        [{}, {"sample": (0, 1, 2), "width": (0, 1, 2)}, {"channel": (0, 1, 2)}],
        [{"channel": (0, 1, 3)}, HEIGHT, {}],
    ],
    ids=["12-12-4-4 to 2", "between grids", "one to many", "channels first"],
)
def test_any_layout_hands_over_to_any(cuts: list[dict[str, tuple[int, ...]]]) -> None:
    places = [(k + 1) / len(cuts) for k in range(len(cuts) - 1)]
    decision = by_stage(network()[1].graph, places, cuts, MICRO_BATCHES)
    assert_equal(trained(network(), decision, 2), serial())


def test_recomputed_stages_exchange_again() -> None:
    decision = by_stage(network()[1].graph, [0.5], [HEIGHT, WIDTH], MICRO_BATCHES)
    stages = tuple(replace(stage, recompute=True) for stage in decision.stages)
    assert_equal(trained(network(), replace(decision, stages=stages), 2), serial())


def test_evaluation_of_divided_stages() -> None:
    model, _ = network()
    decision = by_stage(network()[1].graph, [0.5], [HEIGHT, {"sample": (0, 1, 2)}], MICRO_BATCHES)
    inputs, targets = batch_of(model, sum(MICRO_BATCHES), 0)
    loss, rows = evaluated(network(), decision, inputs, targets)
    twin = copy.deepcopy(model.module).eval()
    torch.testing.assert_close(rows, twin(*inputs), rtol=1e-12, atol=1e-14)
    assert loss == pytest.approx(_loss(rows, targets).item(), rel=1e-12)
