"""Optimiser objects of users: what goes along into copies of them, and what is refused by name."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from planner.ir.errors import UsageError
from runtime.optim.followed import Followed
from runtime.optim.user_object import Twin, copied, require_copies_alike, values_read

RATES: dict[int, float] = {}
FACTOR = 1.0


class Own(torch.optim.Optimizer):
    """Its rate is one of its methods, which it keeps; it counts its steps."""

    scale = 1.0

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.5})
        self.rule = self._rate
        self.counts = {"steps": 0}

    def _rate(self, parameter: torch.Tensor) -> float:
        return getattr(parameter, "lr_scale", 1.0) / self.counts["steps"] * self.scale * FACTOR

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        self.counts["steps"] += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("seen", []).append(1)
                parameter.add_(parameter.grad, alpha=-group["lr"] * self.rule(parameter))


class ById(Own):
    def _rate(self, parameter: torch.Tensor) -> float:
        return RATES.get(id(parameter), 1.0)


def network() -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).double()
    for place, parameter in enumerate(module.parameters()):
        nn.init.constant_(parameter, 1.0 + place)
        parameter.lr_scale = 0.5**place
    return module


def stepped(optimizer: torch.optim.Optimizer, times: int = 2) -> list[torch.Tensor]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for step in range(times):
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 1.0 + step)
        optimizer.step()
    return [parameter.detach().clone() for parameter in parameters]


def twins(original: nn.Module, module: nn.Module) -> dict[int, tuple[Twin]]:
    pairs = zip(original.parameters(), module.parameters(), strict=True)
    return {id(own): (Twin(parameter),) for own, parameter in pairs}


def test_a_copy_does_what_the_object_does_and_leaves_it_alone() -> None:
    module = network()
    optimizer = Own(module.parameters())
    stepped(optimizer, 1)
    other = network()
    other.load_state_dict(module.state_dict())
    by_copy = stepped(copied(optimizer, twins(module, other)))
    assert optimizer.counts == {"steps": 1}
    assert [len(each["seen"]) for each in optimizer.state.values()] == [1] * 4
    assert all(map(torch.equal, by_copy, stepped(optimizer)))


def replaced(optimizer: Own) -> None:
    optimizer.step = lambda closure=None: None


def bound(optimizer: Own) -> None:
    optimizer.step = MethodType(lambda self, closure=None: None, optimizer)


def bound_then_scheduled(optimizer: Own) -> None:
    bound(optimizer)
    lr_scheduler.StepLR(optimizer, 1)


def by_id(optimizer: Own) -> None:
    optimizer.rates = {"of": {id(optimizer.param_groups[0]["params"][1]): 0.5}}


def state_by_id(optimizer: Own) -> None:
    optimizer.state[id(optimizer.param_groups[0]["params"][0])] = {"rate": 0.5}


def settings_by_id(optimizer: Own) -> None:
    optimizer.param_groups[0]["rates"] = [id(optimizer.param_groups[0]["params"][0])]


def closes_over_itself(optimizer: Own) -> None:
    optimizer.rule = lambda _: 1.0 / optimizer.counts["steps"]


def closes_over_parameters(optimizer: Own) -> None:
    first = optimizer.param_groups[0]["params"][0]
    optimizer.rule = lambda _: first.norm()


def keeps_in_an_object(optimizer: Own) -> None:
    class Slow:
        def __init__(self) -> None:
            self.weights = [torch.zeros(2)]

    optimizer.slow = Slow()


def tensors_in_a_group(optimizer: Own) -> None:
    optimizer.param_groups[0]["anchors"] = [torch.zeros(2, 2)]


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (replaced, "step was replaced on the object of this Own"),
        (bound, "step was replaced on the object of this Own"),
        (bound_then_scheduled, "step was replaced on the object of this Own"),
        (by_id, "goes by ids of parameters[\\s\\S]*they are in rates"),
        (state_by_id, "goes by ids of parameters[\\s\\S]*the keys of its state"),
        (settings_by_id, r"goes by ids of parameters[\s\S]*param_groups\[0\]\['rates'\]"),
        (closes_over_itself, "it keeps optimizer, which closes_over_itself.<locals>.<lambda> reads"),
        (closes_over_parameters, "it keeps first, which"),
        (keeps_in_an_object, "it keeps slow.weights"),
        (tensors_in_a_group, r"it keeps param_groups\[0\]\['anchors'\]"),
    ],
)
def test_what_copies_would_do_otherwise_is_refused_by_name(change: Callable[[Own], None], says: str) -> None:
    optimizer = Own(network().parameters())
    require_copies_alike(optimizer)
    change(optimizer)
    with pytest.raises(UsageError, match=says):
        Followed(optimizer)


def test_ids_in_a_global_variable_and_a_class_that_was_patched_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = network()
    monkeypatch.setitem(RATES, id(module[1].weight), 0.5)
    with pytest.raises(UsageError, match=r"they are in RATES, which ById\._rate reads"):
        require_copies_alike(ById(module.parameters()))
    plain = torch.optim.SGD(module.parameters())
    lr_scheduler.StepLR(plain, 1)
    require_copies_alike(plain)
    monkeypatch.setattr(torch.optim.SGD, "step", lambda self, closure=None: None)
    with pytest.raises(UsageError, match=r"SGD\.step was replaced in its class"):
        require_copies_alike(torch.optim.SGD(module.parameters()))


def test_what_cannot_be_copied_is_refused_with_the_reason() -> None:
    optimizer = Own(network().parameters())
    optimizer.lock = threading.Lock()
    with pytest.raises(UsageError, match=r"this Own cannot be copied[\s\S]*cannot pickle '_thread.lock'"):
        copied(optimizer, {})


def test_a_value_that_its_code_reads_is_noticed_when_the_script_changes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    followed = Followed(Own(network().parameters()))
    assert {("Own.scale", "1.0"), ("FACTOR, which Own._rate reads", "1.0")} <= set(values_read(followed.optimizer))
    followed.require_values()
    monkeypatch.setattr(Own, "scale", 0.25)
    with pytest.raises(UsageError, match=r"Own\.scale: 0\.25 in the script, 1\.0 in the ranks"):
        followed.require_values()
