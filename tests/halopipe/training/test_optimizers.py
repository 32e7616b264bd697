"""What optimisers and schedules of learning rates, by name or of a user's script, make of the steps of ranks."""

from __future__ import annotations

import copy
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
from runtime.optim.followed import Followed
from tests.halopipe import learners
from tests.halopipe.training.sessions import (
    CALM_PLANS,
    Make,
    adamw,
    batch,
    lone,
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


def momentum(module: nn.Module) -> tuple[torch.optim.Optimizer, None]:
    """With a factor of the rate that its own steps raise, as optimisers of people's own do."""
    return torch.optim.SGD(module.parameters(), lr=0.2, momentum=0.9, foreach=True), None


def fused(module: nn.Module) -> tuple[torch.optim.Optimizer, LRScheduler]:
    """Counts its steps in tensors; the rate is one too."""
    optimizer = torch.optim.Adam(module.parameters(), lr=torch.tensor(0.1, dtype=torch.float64), fused=True)
    return optimizer, lr_scheduler.StepLR(optimizer, 1, 0.5)


@pytest.mark.parametrize("make", [adamw, momentum, fused])
@pytest.mark.parametrize("name", CALM_PLANS)
def test_a_loop_of_the_users_own_goes_on_with_the_optimiser_that_ranks_stepped(name: str, make: Make) -> None:
    def run(execution: Execution) -> tuple[list[float], list[float]]:
        losses = steps(0, 2)(execution)
        execution.optimizer_state_dict()
        module, followed = execution.module, execution.followed
        assert followed is not None
        goes_on = one_device(lambda _: (followed.optimizer, followed.scheduler), 2, first=2, module=module)
        return losses, goes_on[0]

    expected, _ = one_device(make, 4)
    for losses, goes_on in together(CALM_PLANS[name](), run, make=make):
        assert [*losses, *goes_on] == pytest.approx(expected, rel=1e-10)


def test_an_optimiser_whose_state_is_elsewhere_is_refused() -> None:
    def run(execution: Execution) -> torch.optim.Optimizer:
        assert execution.followed is not None
        mine = execution.followed.optimizer
        execution.step(batch(6, 0))
        with pytest.raises(UsageError, match=r"has not what the ranks' keep[\s\S]*run.optimizer_state_dict\(\) first"):
            mine.state_dict()
        execution.optimizer_state_dict()
        kept = mine.state_dict()
        mine.load_state_dict(copy.deepcopy(kept))
        with pytest.raises(UsageError, match="the script has changed what its AdamW keeps"):
            execution.step(batch(6, 1))
        mine.state.clear()
        return mine

    def leave(execution: Execution) -> torch.optim.Optimizer:
        assert execution.followed is not None
        execution.step(batch(6, 0))
        return execution.followed.optimizer

    Followed(together(CALM_PLANS["two stages"](), run, make=adamw)[0])
    left = together(CALM_PLANS["two stages"](), leave, make=adamw)[0]
    with pytest.raises(UsageError, match=r"stayed with the ranks of an earlier run[\s\S]*was not called") as caught:
        Followed(left)
    assert caught.value.remedies[0] == "optimizer.load_state_dict(...)"
    left.load_state_dict(adamw_kept(left))
    Followed(left)


def adamw_kept(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """A checkpoint of one device: it has taken a step."""
    twin = copy.deepcopy(optimizer)
    for group in twin.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    twin.step()
    return twin.state_dict()


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
        together(lone(), run, make=lambda module: (torch.optim.SGD([nn.Parameter(torch.zeros(1))]), None))
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
