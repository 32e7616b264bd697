from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from planner.ir.errors import UnknownNameError, UsageError
from planner.ir.profile import Optimizer
from runtime.optim.followed import Followed
from runtime.optim.optimizer import StageOptimizer, maker_of, scheduler_maker_of

PARAMETERS = [nn.Parameter(torch.zeros(2))]


def named(*names: str) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.ones(2, dtype=torch.float64)) for name in names}


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


def test_the_class_and_its_arguments_are_those_named() -> None:
    made = maker_of(Optimizer("AdamW", {"lr": 0.5}))(PARAMETERS)
    assert type(made) is torch.optim.AdamW
    assert made.defaults["lr"] == 0.5


def test_a_schedule_is_made_by_name() -> None:
    made = scheduler_maker_of("CosineAnnealingLR", {"T_max": 7})(sgd(PARAMETERS))
    assert isinstance(made, lr_scheduler.CosineAnnealingLR)
    assert made.T_max == 7


def test_a_factory_may_make_groups_by_shape_or_by_name() -> None:
    def by_name(named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        decayed = [each for each in named_parameters if not each[0].endswith("bias")]
        others = [each for each in named_parameters if each[0].endswith("bias")]
        return torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0, "lr": 2.0}], lr=1.0)

    made = StageOptimizer(named("a.weight", "a.bias", "b.weight"), by_name)
    assert made.group_names == (("a.weight", "b.weight"), ("a.bias",))
    assert made.learning_rates() == (1.0, 2.0)


def test_a_factory_may_be_a_class_or_make_an_optimiser_of_its_own() -> None:
    class Sign(torch.optim.Optimizer):
        def __init__(self, parameters: list[nn.Parameter]) -> None:
            super().__init__(parameters, {})

        @torch.no_grad()
        def step(self) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.sub_(parameter.grad.sign())

    parameters = named("a")
    made = StageOptimizer(parameters, Sign)
    parameters["a"].grad = torch.tensor([3.0, -3.0], dtype=torch.float64)
    made.step()
    assert parameters["a"].tolist() == [0.0, 2.0]
    assert made.learning_rates() == ()


def test_parameters_that_the_factory_leaves_out_stay() -> None:
    parameters = named("a", "b")
    made = StageOptimizer(parameters, lambda given: sgd(given[:1]))
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    made.step()
    assert [parameter[0].item() for parameter in parameters.values()] == [0.0, 1.0]
    assert list(made.tensors) == ["a"]


def made_of(optimizer: str, **arguments: float) -> torch.optim.Optimizer:
    return maker_of(Optimizer(optimizer, arguments))(PARAMETERS)


REFUSED: list[tuple[Callable[[], object], type[UsageError], str]] = [
    *((partial(made_of, name), UnknownNameError, name) for name in ("Sdg", "Optimizer.step", "lr_scheduler")),
    (partial(made_of, "SGD", lr=-1.0), UsageError, r"lr=-1[\s\S]*Invalid learning rate"),
    (partial(made_of, "SGD", speed=3.0), UsageError, "speed=3"),
    *(
        (partial(scheduler_maker_of, name, {}), UnknownNameError, rf"{name}[\s\S]*CosineAnnealingLR")
        for name in ("Cosine", "LRScheduler", "Optimizer", "ReduceLROnPlateu")
    ),
    (
        lambda: scheduler_maker_of("CosineAnnealingLR", {"steps": 7})(sgd(PARAMETERS)),
        UsageError,
        r"CosineAnnealingLR\(steps=7\) cannot be made",
    ),
    (lambda: StageOptimizer(named("a"), torch.optim.LBFGS), UsageError, r"LBFGS asks for a closure[\s\S]*try: "),
    (lambda: StageOptimizer(named("a"), lambda given: None), UsageError, r"factory returned a NoneType[\s\S]*try: "),
    (
        lambda: StageOptimizer(named("a"), lambda given: sgd([*given, *PARAMETERS])),
        UsageError,
        r"1 parameters that are not those[\s\S]*try: ",
    ),
    (
        lambda: StageOptimizer(named("a"), sgd).schedule(lr_scheduler.ReduceLROnPlateau),
        UsageError,
        "ReduceLROnPlateau follows a metric",
    ),
]


@pytest.mark.every_case
@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_what_cannot_be_used_is_refused(case: int) -> None:
    makes, kind, message = REFUSED[case]
    with pytest.raises(kind, match=message):
        makes()


def test_a_schedule_is_stepped_with_the_updates() -> None:
    parameters = named("a")
    made = StageOptimizer(parameters, sgd)
    made.schedule(partial(lr_scheduler.StepLR, step_size=2, gamma=0.1))
    rates = []
    for _ in range(5):
        rates += made.learning_rates()
        parameters["a"].grad = torch.ones_like(parameters["a"])
        made.step()
    assert rates == pytest.approx([1.0, 1.0, 0.1, 0.1, 0.01])
    assert parameters["a"].tolist() == pytest.approx([1.0 - 2.21] * 2)


def test_a_factory_that_trains_a_part_of_the_model_makes_groups_which_may_be_empty_in_a_stage() -> None:
    def part(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.SGD([parameter for name, parameter in named_parameters if name == "b"], lr=1.0)

    def groups(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        chosen = [parameter for name, parameter in named_parameters if name == "b"]
        return torch.optim.SGD([{"params": chosen}], lr=1.0)

    assert list(StageOptimizer(named("a", "b"), part).tensors) == ["b"]
    with pytest.raises(UsageError, match="chooses none of the parameters") as caught:
        StageOptimizer(named("a"), part)
    assert "given a:" in caught.value.details[0]
    made = StageOptimizer(named("a"), groups)
    made.schedule(partial(lr_scheduler.StepLR, step_size=1))
    made.step()
    assert (made.tensors, made.group_names) == ({}, ((),))


class Counting(torch.optim.Optimizer):
    """Counts its steps in its groups, as some do, and takes smaller ones by and by; with ``clips`` it does more."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 0.1, clips: bool = False) -> None:
        super().__init__(parameters, {"lr": lr, "k": 0})
        self.clips = clips

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            if self.clips:
                torch.nn.utils.clip_grad_norm_(group["params"], 1.0)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"] / group["k"])


class Clipping(Counting):
    """Clips each value; reads the first parameter of each group."""

    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            torch.nn.utils.clip_grad_value_(group["params"], 0.5 if group["params"][0].is_floating_point() else 1.0)
        super().step()


def stepped(make: Callable[..., torch.optim.Optimizer], groups: int, steps: int = 3) -> list[torch.Tensor]:
    """Parameters after some steps of one optimiser, or of one for each of them that follow it."""
    parameters = named("a", "b")
    user = make(list(parameters.values()))
    followed = Followed(user)
    followed.recognise(parameters)
    owns = [parameters] if groups < 2 else [{name: each} for name, each in parameters.items()]
    stages = [StageOptimizer(own, followed, is_alone=groups < 2) for own in owns]
    for step in range(steps):
        for place, parameter in enumerate(parameters.values()):
            parameter.grad = torch.full_like(parameter, 1.0 + step + place)
        user.param_groups[0]["lr"] = 0.1 / (1 + step)  # as a schedule does
        for each in [user] if not groups else stages:
            each.step()
    return [parameter.detach() for parameter in parameters.values()]


def test_what_an_optimisers_own_steps_write_into_its_groups_stays() -> None:
    alone, followed, of_two_stages = (stepped(Counting, groups) for groups in (0, 1, 2))
    assert all(map(torch.equal, alone, followed))
    assert all(map(torch.equal, alone, of_two_stages))


def test_an_optimiser_that_joins_parameters_is_refused_where_other_stages_have_some() -> None:
    joins = partial(Counting, clips=True)
    assert all(map(torch.equal, stepped(joins, 0), stepped(joins, 1)))
    with pytest.raises(UsageError, match=r"Counting makes the update of one parameter of others[\s\S]*clip_norm"):
        stepped(joins, 2)
    assert all(map(torch.equal, stepped(Clipping, 0), stepped(Clipping, 2)))  # each value by itself
    assert len(stepped(torch.optim.AdamW, 2)) == 2


def test_a_group_of_which_a_stage_has_no_parameter_is_not_empty_while_it_steps() -> None:
    by_name = named("a", "b")
    grouped = lambda made: Clipping([{"params": [each]} for each in made], lr=0.1)  # noqa: E731
    followed = Followed(grouped(by_name.values()))
    followed.recognise(by_name)
    stage = StageOptimizer({"b": by_name["b"]}, followed, is_alone=False)
    by_name["b"].grad = torch.ones(2, dtype=torch.float64)
    stage.step()
    assert by_name["b"].tolist() == [1 - 0.1 * 0.5] * 2
    assert (stage.group_names, list(stage.tensors)) == (((), ("b",)), ["b"])
    assert [len(group["params"]) for group in stage.optimizer.param_groups] == [0, 1]
    assert [group["k"] for group in stage.optimizer.param_groups] == [1, 1]


def test_stages_of_one_rank_keep_apart_what_the_object_counts_and_follow_what_the_script_sets() -> None:
    parameters = named("a", "b")
    user = Counting(parameters.values())
    user.seen = []
    user.alpha = 0.5
    parameters["b"].lr_scale = 0.5
    followed = Followed(user)
    followed.recognise(parameters)
    stages = [StageOptimizer({name: each}, followed, is_alone=False) for name, each in parameters.items()]
    stages[0].optimizer.seen.append(1)
    stages[0].optimizer.alpha = 0.25  # as its own step does
    assert (stages[1].optimizer.seen, stages[1].optimizer.alpha, user.seen) == ([], 0.5, [])
    stages[0].follow()
    assert stages[0].optimizer.alpha == 0.25
    user.alpha = 1.5
    parameters["b"].lr_scale = 0.125
    for stage in stages:
        stage.follow()
    assert [stage.optimizer.alpha for stage in stages] == [1.5, 1.5]
    assert followed.settings.of_parameters == {"b": {"lr_scale": 0.125}}
    twin = named("a", "b")
    whole = followed.as_it_is().whole(twin)
    assert (vars(twin["b"]), whole.alpha) == ({"lr_scale": 0.125}, 1.5)
    assert whole.param_groups[0]["params"] == list(twin.values())


def test_a_rate_that_each_step_finds_by_itself_is_none_of_the_learning_rates() -> None:
    made = StageOptimizer(named("a"), lambda parameters: Counting(parameters, lr=None))
    assert made.learning_rates() == ()
