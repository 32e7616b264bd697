"""Optimisers of people's own, tried on whether one parameter's update is made of others'."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from planner.ir.errors import UsageError
from runtime.optim.coupling import require_apart

CPU = torch.device("cpu")
COUPLED = "of one parameter of others"
BY_PLACE = "of its place"
DRAWS = "draws random numbers"
Change = Callable[["Own", list[nn.Parameter]], None]


class Own(torch.optim.Optimizer):
    """Descent, before which ``change`` is done to the gradients of all parameters; counts its steps everywhere."""

    def __init__(self, parameters: Iterable[Any], change: Change, lr: float = 1e-3) -> None:
        super().__init__(parameters, {"lr": lr, "k": 0})
        self.change = change
        self.count = {"steps": 0}
        self.state["k"] = torch.zeros(())

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        self.count["steps"] += 1
        self.state["k"] += 1
        every = [parameter for group in self.param_groups for parameter in group["params"]]
        for group in self.param_groups:
            group["k"] += 1
        for parameter in every:
            self.state[parameter]["step"] = self.state[parameter].get("step", 0) + 1
        self.change(self, every)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-group["lr"])


def norm_of(every: list[nn.Parameter]) -> float:
    return sum(parameter.grad.norm().item() ** 2 for parameter in every) ** 0.5


def scale(every: list[nn.Parameter], factor: float) -> None:
    for parameter in every:
        parameter.grad.mul_(factor)


def clips_from(largest: float) -> Change:
    return lambda _, every: nn.utils.clip_grad_norm_(every, largest)


def leaves_out_from(largest: float) -> Change:
    return lambda _, every: scale(every, float(norm_of(every) < largest))


def lifts_below(least: float) -> Change:
    return lambda _, every: scale(every, 2.0 if norm_of(every) < least else 1.0)


def warm(steps_of: Callable[[Own, nn.Parameter], float], after: int = 5_000) -> Change:
    def change(own: Own, every: list[nn.Parameter]) -> None:
        if steps_of(own, every[0]) > after:
            nn.utils.clip_grad_norm_(every, 0.1)

    return change


def by_place(_: Own, every: list[nn.Parameter]) -> None:
    for place, parameter in enumerate(every):
        parameter.grad.mul_(0.7**place)


def by_number(_: Own, every: list[nn.Parameter]) -> None:
    scale(every, 1 / len(every))


def by_norm_of_groups(own: Own, _: list[nn.Parameter]) -> None:
    for group in own.param_groups:
        nn.utils.clip_grad_norm_(group["params"], 1.0)


def adds_noise(_: Own, every: list[nn.Parameter]) -> None:
    for parameter in every:
        parameter.grad.add_(torch.randn_like(parameter))


def leaves_out_by_chance(_: Own, every: list[nn.Parameter]) -> None:
    scale(every, float(random.random() < 0.5))


def trusts(_: Own, every: list[nn.Parameter]) -> None:
    """As LARS."""
    for parameter in every:
        parameter.grad.mul_(parameter.norm() / (parameter.grad.norm() + 1e-9))


def clips_each(_: Own, every: list[nn.Parameter]) -> None:
    for parameter in every:
        nn.utils.clip_grad_norm_([parameter], 0.1)


def sizes_must_be_large(_: Own, every: list[nn.Parameter]) -> None:
    if any(len(parameter) < 8 for parameter in every):
        raise ValueError("too small")


def fails(*_: object) -> None:
    raise ValueError("this step cannot be taken")


def groups() -> list[dict[str, Any]]:
    sizes = ((8, 9), (8,), (8, 2, 2, 2)), ((8,),)
    return [{"params": [nn.Parameter(torch.ones(size)) for size in group]} for group in sizes]


REFUSED = {
    **{f"clips from {largest}": (clips_from(largest), COUPLED) for largest in (1e-5, 1.0, 1e3, 1e9)},
    **{f"leaves out from {largest}": (leaves_out_from(largest), COUPLED) for largest in (1e-5, 1.0, 1e5)},
    **{f"lifts below {least}": (lifts_below(least), COUPLED) for least in (1e-5, 1.0, 1e5)},
    "warm by an attribute": (warm(lambda own, _: own.count["steps"]), COUPLED),
    "warm by a name in the state": (warm(lambda own, _: float(own.state["k"])), COUPLED),
    "warm by a parameter": (warm(lambda own, parameter: own.state[parameter]["step"]), COUPLED),
    "warm by a group": (warm(lambda own, _: own.param_groups[0]["k"]), COUPLED),
    "norms of groups": (by_norm_of_groups, COUPLED),
    "place": (by_place, BY_PLACE),
    "number of parameters": (by_number, BY_PLACE),
    "noise": (adds_noise, DRAWS),
    "chance": (leaves_out_by_chance, DRAWS),
    "fails": (fails, "cannot be tried"),
}


@pytest.mark.every_case
@pytest.mark.parametrize("name", REFUSED)
def test_an_optimiser_that_joins_parameters_or_goes_by_chance_is_refused(name: str) -> None:
    change, says = REFUSED[name]
    state = torch.get_rng_state()
    with pytest.raises(UsageError, match=says) as caught:
        require_apart(Own(groups(), change, lr=0.0), CPU)
    assert torch.equal(state, torch.get_rng_state())
    assert says != COUPLED or "clip_norm=" in caught.value.remedies[0]


@pytest.mark.every_case
@pytest.mark.parametrize("change", [trusts, clips_each, sizes_must_be_large])
def test_an_optimiser_of_each_parameter_by_itself_is_taken(change: Change) -> None:
    own = Own(groups(), change)
    require_apart(own, CPU)
    assert own.count == {"steps": 0}
    assert all(parameter.grad is None for group in own.param_groups for parameter in group["params"])


def test_of_a_stage_with_one_parameter_others_are_thought_of() -> None:
    with pytest.raises(UsageError, match=COUPLED):
        require_apart(Own([nn.Parameter(torch.ones(3))], clips_from(1.0)), CPU)
    require_apart(Own([nn.Parameter(torch.ones(3))], trusts), CPU)


def test_where_a_stage_is_alone_chance_is_refused_all_the_same() -> None:
    require_apart(Own(groups(), clips_from(1.0)), CPU, is_alone=True)
    require_apart(Own(groups(), fails), CPU, is_alone=True)
    with pytest.raises(UsageError, match=DRAWS):
        require_apart(Own(groups(), adds_noise), CPU, is_alone=True)
