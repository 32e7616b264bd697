"""Optimisers and schedules of learning rates, by name or of a script: read, made, and what ranks make of them."""

from __future__ import annotations

import copy
import math
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from halopipe.training.optimizer_spec import (
    _DEFAULTS,
    _UNUSABLE,
    OPTIMIZERS,
    SCHEDULES,
    Scheduler,
    make_optimizer_of,
    make_scheduler_of,
    parse_optimizer,
    parse_scheduler,
    require_arguments,
)
from halopipe.training.session import Execution
from planner.ir.errors import FactoryError, HalopipeError, ModelNotFoundError, UnknownNameError, UsageError
from planner.ir.profile import Optimizer
from runtime.numerics.finite import OnNan
from runtime.optim.followed import Followed
from runtime.optim.optimizer import StageOptimizer
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

HERE = __name__


def by_adamw(parameters: list[nn.Parameter], lr: float = 0.5) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr)


def by_name(named_parameters: list[tuple[str, nn.Parameter]], decay: float = 0.0) -> torch.optim.Optimizer:
    biases = [each for each in named_parameters if "bias" in each[0]]
    others = [each for each in named_parameters if "bias" not in each[0]]
    return torch.optim.SGD([{"params": biases}, {"params": others, "weight_decay": decay}], lr=1.0)


def broken(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    raise ZeroDivisionError("of course")


def halving(optimizer: torch.optim.Optimizer, every: int = 1) -> lr_scheduler.LRScheduler:
    return lr_scheduler.StepLR(optimizer, every, gamma=0.5)


def named() -> dict[str, nn.Parameter]:
    return {"weight": nn.Parameter(torch.zeros(3, 3)), "bias": nn.Parameter(torch.zeros(3))}


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("text", "optimizer"),
    [
        ("SGD", Optimizer("SGD", {"lr": 0.01, "momentum": 0.9}, 1.0)),
        ("SGD:lr=0.1", Optimizer("SGD", {"lr": 0.1}, 0.0)),
        ("SGD:lr=0.1, momentum=0.5", Optimizer("SGD", {"lr": 0.1, "momentum": 0.5}, 1.0)),
        ("AdamW", Optimizer("AdamW", {"lr": 0.001}, 2.0)),
        ("SGD:lr=1,momentum=0.9,nesterov=true", Optimizer("SGD", {"lr": 1, "momentum": 0.9, "nesterov": True}, 1.0)),
        ("AdamW:betas=(0.9, 0.95),amsgrad=False", Optimizer("AdamW", {"betas": (0.9, 0.95), "amsgrad": False}, 2.0)),
        (f"{HERE}:by_adamw", Optimizer(f"{HERE}:by_adamw", {}, 2.0)),
        (f"{HERE}:by_adamw:lr=0.25", Optimizer(f"{HERE}:by_adamw", {"lr": 0.25}, 2.0)),
        (f"{HERE}:by_name:decay=1", Optimizer(f"{HERE}:by_name", {"decay": 1.0}, 0.0)),
    ],
)
def test_an_optimiser_is_read_with_the_state_it_keeps(text: str, optimizer: Optimizer) -> None:
    assert parse_optimizer(text) == optimizer


@pytest.mark.parametrize(
    "text",
    [
        *_DEFAULTS,
        "SGD:lr=0.1",
        "SGD:lr=0.1,momentum=0.5,nesterov=true",
        "RMSprop:momentum=0.9,centered=true",
        "Adam:amsgrad=true",
        "AdamW:amsgrad=true,betas=(0.9,0.95)",
        "Muon:ns_steps=3,nesterov=false",
    ],
)
def test_the_state_is_what_torch_keeps(text: str) -> None:
    spelled = parse_optimizer(text)
    assert parse_optimizer(str(spelled)) == spelled
    weight = torch.nn.Parameter(torch.zeros(30, 32))
    bias = torch.nn.Parameter(torch.zeros(40))
    parameters = [weight] if spelled.name == "Muon" else [weight, bias]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = make_optimizer_of(spelled)(parameters)
    optimizer.step()
    values = [value for state in optimizer.state.values() for value in state.values()]
    kept = sum(value.numel() for value in values if torch.is_tensor(value) and value.numel() > 1)
    assert kept == pytest.approx(sum(map(torch.numel, parameters)) * spelled.state_bytes_per_parameter_byte)


NEAREST = r"no optimiser 'Adan'[\s\S]*Adam \(did you mean that\?\)"
BAD_NUMBERS = ("SGD:lr=nan", "AdamW:lr=inf", "Adam:lr=-1", "AdamW:betas=(0.9,1.5)", "SGD:momentum=-0.1")
BAD_TEXTS = ("SGD:", "SGD:lr", "SGD:lr=fast", "SGD:=1", "SGD:betas=(1,", "SGD:betas=()", f"{HERE}:by_adamw:lr")


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("parse", "text", "kind", "message"),
    [
        *((parse_optimizer, text, UnknownNameError, NEAREST) for text in ("Adan", "Adan:lr=0.1")),
        *((parse_optimizer, text, UsageError, "is not key=number") for text in (*BAD_TEXTS, f"{HERE}:by_adamw:")),
        *((parse_optimizer, text, UsageError, "cannot train with these numbers") for text in BAD_NUMBERS),
        (parse_optimizer, "LBFGS:lr=1", UsageError, "LBFGS asks for a closure"),
        (
            parse_optimizer,
            f"{HERE}:by_adamx",
            ModelNotFoundError,
            rf"has no 'by_adamx'[\s\S]*did you mean {HERE}:by_adamw\?",
        ),
        (parse_optimizer, f"{HERE}:broken", FactoryError, r"broken\(\) raised ZeroDivisionError"),
        (parse_optimizer, f"{HERE}:by_adamw:speed=3", FactoryError, r"by_adamw\(speed=3\) raised TypeError"),
        (parse_scheduler, "LambdaLR", UnknownNameError, "schedule of learning rates 'LambdaLR'"),
        (parse_scheduler, "Cosine", UnknownNameError, "schedule of learning rates 'Cosine'"),
        (parse_scheduler, "CosineAnnealingLR:T_max", UsageError, "is not key=number"),
    ],
)
def test_what_is_no_optimiser_or_schedule_is_refused_as_it_is_read(
    parse: Callable[[str], object], text: str, kind: type[HalopipeError], message: str
) -> None:
    with pytest.raises(kind) as caught:
        parse(text)
    assert re.search(message, "\n".join((caught.value.title, *caught.value.details, *caught.value.remedies)))


def test_every_optimiser_of_torch_is_known_or_said_why_not_and_can_be_made() -> None:
    found = {name for name, value in vars(torch.optim).items() if isinstance(value, type)} - {"Optimizer"}
    assert found == {*_DEFAULTS, *_UNUSABLE}
    for name in OPTIMIZERS:
        require_arguments(parse_optimizer(name))
    for text in ("SGD:lr=-1", "SGD:rl=0.1", "AdamW:betas=(2,3)"):  # known before anything is measured
        with pytest.raises(UsageError, match=r"cannot be made|cannot train with"):
            require_arguments(parse_optimizer(text))


def test_optimisers_and_schedules_are_made_by_class_or_factory() -> None:
    made = make_optimizer_of(parse_optimizer("SGD:lr=0.1"))(list(named().values()))
    assert (type(made), made.defaults["lr"]) == (torch.optim.SGD, 0.1)
    stage = StageOptimizer(named(), make_optimizer_of(parse_optimizer(f"{HERE}:by_name:decay=0.5")))
    assert stage.group_names == (("bias",), ("weight",))
    assert [group["weight_decay"] for group in stage.optimizer.param_groups] == [0.0, 0.5]
    assert all(issubclass(getattr(lr_scheduler, name), lr_scheduler.LRScheduler) for name in SCHEDULES)
    assert make_scheduler_of(parse_scheduler("StepLR:step_size=3"))(made).step_size == 3
    scheduler = make_scheduler_of(parse_scheduler(f"{HERE}:halving:every=2"))(made)
    assert (scheduler.step_size, scheduler.gamma) == (2, 0.5)


def test_a_schedule_is_read_with_numbers_as_they_are_written() -> None:
    found = parse_scheduler("MultiStepLR:milestones=(3,6),gamma=0.1")
    assert found == Scheduler("MultiStepLR", {"milestones": (3, 6), "gamma": 0.1})
    assert type(parse_scheduler("CosineAnnealingLR:T_max=100").arguments["T_max"]) is int
    assert parse_scheduler("recipes.py:warm_up") == Scheduler("recipes.py:warm_up")


def test_reading_names_that_are_known_needs_no_torch() -> None:
    code = (
        "import sys; from halopipe.training.optimizer_spec import *; "
        "parse_optimizer('AdamW'); parse_scheduler('StepLR:step_size=1'); parse_scheduler('a.py:b'); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def momentum(module: nn.Module) -> tuple[torch.optim.Optimizer, None]:
    """With a factor of the rate that its own steps raise, as optimisers of people's own do."""
    return torch.optim.SGD(module.parameters(), lr=0.2, momentum=0.9, foreach=True), None


def fused(module: nn.Module) -> tuple[torch.optim.Optimizer, LRScheduler]:
    """Counts its steps in tensors; the rate is one too."""
    optimizer = torch.optim.Adam(module.parameters(), lr=torch.tensor(0.1, dtype=torch.float64), fused=True)
    return optimizer, lr_scheduler.StepLR(optimizer, 1, 0.5)


@pytest.mark.cases(10)
@pytest.mark.parametrize("make", [adamw, stepped, momentum, fused])
@pytest.mark.parametrize("name", CALM_PLANS)
def test_the_users_own_optimiser_trains_as_in_the_users_own_loop_and_goes_on_in_it(name: str, make: Make) -> None:
    def run(execution: Execution) -> tuple[list[float], dict[str, Tensor], list[float]]:
        losses = steps(0, 2)(execution)
        weights = {name: tensor.clone() for name, tensor in execution.state_dict().items()}
        execution.optimizer_state_dict()
        module = execution.module
        followed = execution.followed
        assert followed is not None
        goes_on = one_device(lambda _: (followed.optimizer, followed.schedules), 2, first=2, module=module)
        return losses, weights, goes_on[0]

    expected, _ = one_device(make, 4)
    _, wanted = one_device(make, 2)
    for losses, weights, goes_on in together(CALM_PLANS[name](), run, make=make):
        assert [*losses, *goes_on] == pytest.approx(expected, rel=1e-10)
        require_close(weights, wanted)


@pytest.mark.parametrize("name", CALM_PLANS)
def test_the_users_own_schedule_goes_on_from_a_checkpoint_on_every_rank(name: str, tmp_path: Path) -> None:
    """Also of groups of which a rank trains nothing."""

    def begin(execution: Execution) -> None:
        steps(0, 2)(execution)
        execution.save(tmp_path)

    def go_on(execution: Execution) -> tuple[list[float], list[float]]:
        assert execution.followed is not None
        assert execution.load(tmp_path) == 2
        losses = steps(2, 4)(execution)
        return losses, [group["lr"] for group in execution.followed.optimizer.param_groups]

    expected, _ = one_device(adamw, 4)
    together(CALM_PLANS["two stages"](), begin, make=adamw)
    for losses, rates in together(CALM_PLANS[name](), go_on, make=adamw):
        assert losses == pytest.approx(expected[2:], rel=1e-10)
        assert rates == pytest.approx([0.1 / 5, 0.1 / 5, 0.03 / 5])


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
