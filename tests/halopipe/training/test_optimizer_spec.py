from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from halopipe.launch.execute import _maker
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
from planner.ir.errors import FactoryError, ModelNotFoundError, UnknownNameError, UsageError
from planner.ir.profile import Optimizer
from runtime.optim.optimizer import StageOptimizer
from tests.halopipe import learners

HERE = "tests.halopipe.training.test_optimizer_spec"


def adamw(parameters: list[nn.Parameter], lr: float = 0.5) -> torch.optim.Optimizer:
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


@pytest.mark.parametrize(
    ("text", "optimizer"),
    [
        ("SGD", Optimizer("SGD", {"lr": 0.01, "momentum": 0.9}, 1.0)),
        ("SGD:lr=0.1", Optimizer("SGD", {"lr": 0.1}, 0.0)),
        ("SGD:lr=0.1, momentum=0.5", Optimizer("SGD", {"lr": 0.1, "momentum": 0.5}, 1.0)),
        ("AdamW", Optimizer("AdamW", {"lr": 0.001}, 2.0)),
        ("SGD:lr=1,momentum=0.9,nesterov=true", Optimizer("SGD", {"lr": 1, "momentum": 0.9, "nesterov": True}, 1.0)),
        ("AdamW:betas=(0.9, 0.95),amsgrad=False", Optimizer("AdamW", {"betas": (0.9, 0.95), "amsgrad": False}, 2.0)),
        ("RMSprop:lr=1e-3,momentum=0.9", Optimizer("RMSprop", {"lr": 0.001, "momentum": 0.9}, 2.0)),
        (f"{HERE}:adamw", Optimizer(f"{HERE}:adamw", {}, 2.0)),
        (f"{HERE}:adamw:lr=0.25", Optimizer(f"{HERE}:adamw", {"lr": 0.25}, 2.0)),
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
    weight, bias = torch.nn.Parameter(torch.zeros(30, 32)), torch.nn.Parameter(torch.zeros(40))
    parameters = [weight] if spelled.name == "Muon" else [weight, bias]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = make_optimizer_of(spelled)(parameters)
    optimizer.step()
    values = [value for state in optimizer.state.values() for value in state.values()]
    kept = sum(value.numel() for value in values if torch.is_tensor(value) and value.numel() > 1)
    assert kept == pytest.approx(sum(map(torch.numel, parameters)) * spelled.state_bytes_per_parameter_byte)


def test_every_optimiser_of_torch_is_known_or_said_why_not() -> None:
    found = {name for name, value in vars(torch.optim).items() if isinstance(value, type)} - {"Optimizer"}
    assert found == {*_DEFAULTS, *_UNUSABLE}
    with pytest.raises(UsageError, match="LBFGS asks for a closure"):
        parse_optimizer("LBFGS:lr=1")


def test_an_unknown_optimiser_is_answered_with_the_nearest() -> None:
    for text in ("Adan", "Adan:lr=0.1"):
        with pytest.raises(UnknownNameError, match=r"no optimiser 'Adan'") as caught:
            parse_optimizer(text)
        assert caught.value.remedies == ("Adam (did you mean that?)",)


@pytest.mark.parametrize(
    "text",
    ["SGD:", "SGD:lr", "SGD:lr=fast", "SGD:=1", "SGD:betas=(1,", "SGD:betas=()", f"{HERE}:adamw:", f"{HERE}:adamw:lr"],
)
def test_an_argument_that_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not key=number"):
        parse_optimizer(text)


def test_an_optimiser_is_made_by_class_or_factory() -> None:
    made = make_optimizer_of(parse_optimizer("SGD:lr=0.1"))(list(named().values()))
    assert (type(made), made.defaults["lr"]) == (torch.optim.SGD, 0.1)
    made = StageOptimizer(named(), make_optimizer_of(parse_optimizer(f"{HERE}:by_name:decay=0.5")))
    assert made.group_names == (("bias",), ("weight",))
    assert [group["weight_decay"] for group in made.optimizer.param_groups] == [0.0, 0.5]


def test_a_factory_that_is_not_there_or_fails_is_named() -> None:
    with pytest.raises(ModelNotFoundError, match="has no 'adamx'") as caught:
        parse_optimizer(f"{HERE}:adamx")
    assert caught.value.remedies == (f"did you mean {HERE}:adamw?",)
    with pytest.raises(FactoryError, match=r"broken\(\) raised ZeroDivisionError"):
        parse_optimizer(f"{HERE}:broken")
    with pytest.raises(FactoryError, match=r"adamw\(speed=3\) raised TypeError"):
        parse_optimizer(f"{HERE}:adamw:speed=3")


@pytest.mark.parametrize(
    ("text", "scheduler"),
    [
        ("CosineAnnealingLR:T_max=100", Scheduler("CosineAnnealingLR", {"T_max": 100})),
        ("LinearLR:start_factor=0.1,total_iters=5", Scheduler("LinearLR", {"start_factor": 0.1, "total_iters": 5})),
        ("ExponentialLR:gamma=0.5", Scheduler("ExponentialLR", {"gamma": 0.5})),
        ("MultiStepLR:milestones=(3,6),gamma=0.1", Scheduler("MultiStepLR", {"milestones": (3, 6), "gamma": 0.1})),
        ("recipes.py:warm_up", Scheduler("recipes.py:warm_up")),
        (f"{HERE}:halving:every=2", Scheduler(f"{HERE}:halving", {"every": 2})),
    ],
)
def test_a_schedule_is_read(text: str, scheduler: Scheduler) -> None:
    found = parse_scheduler(text)
    assert found == scheduler
    assert [type(value) for value in found.arguments.values()] == [type(v) for v in scheduler.arguments.values()]


def test_schedules_are_made_by_class_or_factory() -> None:
    assert all(issubclass(getattr(lr_scheduler, name), lr_scheduler.LRScheduler) for name in SCHEDULES)
    optimizer = adamw(list(named().values()))
    assert make_scheduler_of(parse_scheduler("StepLR:step_size=3"))(optimizer).step_size == 3
    made = make_scheduler_of(parse_scheduler(f"{HERE}:halving:every=2"))(optimizer)
    assert (made.step_size, made.gamma) == (2, 0.5)


def test_a_schedule_that_numbers_do_not_describe_is_refused() -> None:
    for name in ("LambdaLR", "Cosine"):
        with pytest.raises(UnknownNameError, match=f"schedule of learning rates '{name}'"):
            parse_scheduler(name)
    with pytest.raises(UsageError, match="is not key=number"):
        parse_scheduler("CosineAnnealingLR:T_max")


def test_reading_names_that_are_known_needs_no_torch() -> None:
    code = (
        "import sys; from halopipe.training.optimizer_spec import *; "
        "parse_optimizer('AdamW'); parse_scheduler('StepLR:step_size=1'); parse_scheduler('a.py:b'); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("text", ["SGD:lr=-1", "SGD:rl=0.1", "AdamW:betas=(2,3)"])
def test_arguments_that_torch_refuses_are_known_before_anything_is_measured(text: str) -> None:
    with pytest.raises(UsageError, match=r"cannot be made|cannot train with"):
        require_arguments(parse_optimizer(text))


def test_every_optimiser_that_can_be_named_can_be_made() -> None:
    for name in OPTIMIZERS:
        require_arguments(parse_optimizer(name))


@pytest.mark.every_case
@pytest.mark.parametrize(
    "text", ["SGD:lr=nan", "AdamW:lr=inf", "Adam:lr=-1", "AdamW:betas=(0.9,1.5)", "SGD:momentum=-0.1"]
)
def test_numbers_that_cannot_be_meant_are_refused_as_they_are_read(text: str) -> None:
    with pytest.raises(UsageError, match="cannot train with these numbers"):
        parse_optimizer(text)


def test_an_optimiser_object_without_a_rate_is_refused_before_anything_starts() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2))]
    with pytest.raises(UsageError, match="lr=nan: a number that is finite is needed"):
        _maker(learners.plan(), torch.optim.SGD(parameters, lr=float("nan")), None)
