"""What optimisers and schedules of learning rates, by name or of a user's script, make of the steps of ranks."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from halopipe.training.optimizer_spec import _DEFAULTS, make_optimizer_of, parse_optimizer
from halopipe.training.session import Execution
from planner.ir.errors import UsageError
from runtime.numerics.finite import OnNan
from runtime.optim.optimizer import Followed
from tests.halopipe import learners
from tests.halopipe.training.sessions import (
    CALM_PLANS,
    PLAN,
    Make,
    adamw,
    batch,
    loss_of,
    no_number,
    one_device,
    require_close,
    stepped,
    steps,
    together,
)


@pytest.mark.parametrize("make", [adamw, stepped])
@pytest.mark.parametrize("name", CALM_PLANS)
def test_the_users_own_optimiser_and_schedule_train_as_in_the_users_own_loop(name: str, make: Make) -> None:
    def run(execution: Execution) -> tuple[list[float], dict[str, Tensor]]:
        return steps(0, 3)(execution), execution.state_dict()

    expected, weights = one_device(make, 3)
    for losses, state in together(CALM_PLANS[name](), run, make=make):
        assert losses == pytest.approx(expected, rel=1e-10)
        require_close(state, weights)


@pytest.mark.parametrize("name", [each for each in _DEFAULTS if each != "Muon"])
def test_every_optimiser_trains_as_that_of_torch(name: str) -> None:
    text = f"{name}:lr=0.02,weight_decay=0.1" if name != "Rprop" else "Rprop:lr=0.02"
    expected, _ = one_device(lambda module: (make_optimizer_of(parse_optimizer(text))(module.parameters()), None), 3)
    found = together(CALM_PLANS["two stages"](), steps(0, 3), text=text, scheduler=None)
    assert loss_of(found) == pytest.approx(expected, rel=1e-10)


def test_what_a_script_does_to_its_optimiser_holds_and_what_cannot_is_refused() -> None:
    made: dict[int, torch.optim.Optimizer] = {}

    def sgd(module: nn.Module) -> tuple[torch.optim.Optimizer, None]:
        made[threading.get_ident()] = optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        return optimizer, None

    def run(execution: Execution) -> tuple[float, ...]:
        mine = made[threading.get_ident()]
        plateau = lr_scheduler.ReduceLROnPlateau(mine, patience=0, factor=0.5, threshold=1e9)
        rates = []
        for step in range(3):
            result = execution.train(batch(6, step))
            plateau.step(result.loss)
            rates += result.learning_rates
        mine.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
        with pytest.raises(UsageError, match="has 2 groups of parameters by now"):
            execution.step(batch(6, 3))
        return tuple(rates)

    assert together(CALM_PLANS["two stages"](), run, make=sgd, scheduler=None) == [(0.5, 0.25, 0.125)] * 2
    with pytest.raises(UsageError, match="has 1 parameters that are not the model's"):
        together(PLAN, run, make=lambda module: (torch.optim.SGD([nn.Parameter(torch.zeros(1))]), None))
    hooked = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    hooked.register_step_pre_hook(lambda *_: None)
    with pytest.raises(UsageError, match="has hooks around its steps"):
        Followed(hooked)
    plain = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    with pytest.raises(UsageError, match="ReduceLROnPlateau follows a metric"):
        Followed(plain, lr_scheduler.ReduceLROnPlateau(plain))


def test_a_schedule_of_the_users_own_waits_where_an_update_is_skipped() -> None:
    def made(module: nn.Module) -> tuple[torch.optim.Optimizer, LRScheduler]:
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        return optimizer, lr_scheduler.StepLR(optimizer, 1, 0.5)

    def train(execution: Execution) -> tuple[float, int, float]:
        losses = [execution.step(each) for each in (batch(6, 0), no_number(6, 1), batch(6, 2))]
        assert math.isnan(losses[1])
        assert execution.followed is not None
        return execution.followed.optimizer.param_groups[0]["lr"], execution.num_steps, losses[2]

    found = together(learners.plan(), train, make=made, on_nan=OnNan.SKIP)
    assert [each[:2] for each in found] == [(0.25, 3)] * 2
    assert math.isfinite(found[0][2])
