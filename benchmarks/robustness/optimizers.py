"""What people do with optimisers in their scripts: a habit a row (:mod:`benchmarks.robustness.habits`).

Each trains a small classifier for a few steps on two stages, beside the same loop on one device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

import halopipe as hp
from benchmarks.robustness.habits import Habit, Notes
from planner.ir.plan import Plan
from planner.ir.profile import ModelSource
from profiler.source.source import load_model
from tests.halopipe import learners
from tests.halopipe.plans import plan_of

SOURCE = ModelSource("tests.halopipe.learners:classifier", {"dropout": "0.0"}, (4, learners.WIDTH), "float64")
NUM_STEPS = 4
SAMPLES = 6

Make = Callable[[nn.Module], torch.optim.Optimizer]


def habits() -> list[Habit]:
    """All of them."""
    return [_habit("groups without decay", _groups)]


def batch(step: int) -> tuple[Tensor, Tensor]:
    """The samples of a step."""
    inputs, targets = learners.samples()
    return inputs[step : step + SAMPLES].double(), targets[step : step + SAMPLES]


def two_stages() -> Plan:
    """One linear layer on each."""
    return plan_of(SOURCE, [0.5], (3, 3))


def _habit(name: str, make: Make, says: str = "") -> Habit:
    """Of a script whose optimiser ``make`` makes of its module."""
    module = load_model(SOURCE).module

    def plain(notes: Notes) -> None:
        own = copy.deepcopy(module)
        optimizer = make(own)
        for step in range(NUM_STEPS):
            inputs, targets = batch(step)
            optimizer.zero_grad()
            loss = functional.cross_entropy(own(inputs), targets)
            loss.backward()
            optimizer.step()
            notes.numbers.append(loss.item())
        notes.parameters = own.state_dict()

    def ours(notes: Notes) -> None:
        own = copy.deepcopy(module)
        with hp.parallelize(own, plan=two_stages(), optimizer=make(own)) as run:
            for step in range(NUM_STEPS):
                notes.numbers.append(run.step(batch(step)))
        notes.parameters = own.state_dict()

    return Habit(name, plain, ours, says)


def _groups(module: nn.Module) -> torch.optim.Optimizer:
    biases = [parameter for parameter in module.parameters() if parameter.ndim == 1]
    weights = [parameter for parameter in module.parameters() if parameter.ndim > 1]
    return torch.optim.AdamW([{"params": biases, "weight_decay": 0.0}, {"params": weights}], lr=0.1, weight_decay=0.3)
