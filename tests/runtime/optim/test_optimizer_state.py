"""What an optimiser keeps is found again by name, whatever ranks and stages the parameters were on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from benchmarks.robustness.schedules import Counting, GradualWarmup
from planner.ir.box import whole as everything
from planner.ir.errors import UsageError
from planner.ir.layout import scaled_intervals
from runtime.checkpoint.state import RankState
from runtime.optim.followed import Followed
from runtime.optim.optimizer import StageOptimizer
from runtime.optim.optimizer_state import give_back, load_state, state_of
from runtime.optim.schedules import number_like
from runtime.optim.sharding import ELEMENTWISE
from runtime.spatial.parameters import ParameterPart
from runtime.transport import InProcessTransport
from tests.runtime.optim.test_sharding import sharded
from tests.runtime.ranks import on_ranks
from tests.runtime.saved import Saved

SHAPES = {"first.weight": (4, 3), "first.bias": (4,), "scale": (), "last.weight": (2, 4), "last.bias": (2,)}
Parameters = dict[str, nn.Parameter]
Make = Callable[..., torch.optim.Optimizer]


def new(*names: str) -> Parameters:
    generator = torch.Generator().manual_seed(3)
    whole = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}
    return {name: nn.Parameter(whole[name]) for name in names or SHAPES}


def gradients(parameters: Parameters, step: int) -> None:
    for name, parameter in parameters.items():
        generator = torch.Generator().manual_seed(1000 * step + list(SHAPES).index(name))
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)


def train(optimizer: StageOptimizer, parameters: Parameters, first: int, last: int) -> None:
    for step in range(first, last):
        gradients(parameters, step)
        optimizer.step()


def by_shape(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    deep = [parameter for parameter in parameters if parameter.ndim >= 2]
    flat = [parameter for parameter in parameters if parameter.ndim < 2]
    groups = [{"params": deep, "weight_decay": 0.5}, {"params": flat, "lr": 0.03}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=0.1)


def whole(make: Make, schedule: Callable[..., object] | None) -> Callable[[Parameters], StageOptimizer]:
    def made(parameters: Parameters) -> StageOptimizer:
        optimizer = StageOptimizer(parameters, make)
        if schedule is not None:
            optimizer.schedule(schedule)
        return optimizer

    return made


cosine = partial(lr_scheduler.CosineAnnealingLR, T_max=9)


def warm_up(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.5)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])


SCHEDULES = {
    "none": None,
    "cosine": cosine,
    "warm-up": warm_up,
    "one cycle": partial(lr_scheduler.OneCycleLR, max_lr=0.4, total_steps=12),
    "by lambda": partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 1 / (1 + step)),
    "steps": partial(lr_scheduler.MultiStepLR, milestones=[2, 4, 5], gamma=0.5),
    "restarts": partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=2),
    "factors that count": lambda optimizer: lr_scheduler.LambdaLR(
        optimizer, [Counting() for _ in optimizer.param_groups]
    ),
    "several": lambda optimizer: [cosine(optimizer), lr_scheduler.MultiStepLR(optimizer, [2, 4])],
    "chained": lambda optimizer: lr_scheduler.ChainedScheduler([cosine(optimizer), lr_scheduler.StepLR(optimizer, 2)]),
    "one that holds another": lambda optimizer: GradualWarmup(optimizer, 2, cosine(optimizer)),
}


def resumed(make: Callable[[Parameters], StageOptimizer], cuts: list[list[str]], again: list[list[str]]) -> Parameters:
    """Three steps with stages of the parameters in ``cuts``, then three with those in ``again``."""
    before = [new(*names) for names in cuts]
    optimizers = [make(parameters) for parameters in before]
    for optimizer, parameters in zip(optimizers, before, strict=True):
        train(optimizer, parameters, 0, 3)
    saved = Saved(*(state_of(each, frozenset(each.tensors)) for each in optimizers))
    values = dict(chain.from_iterable(parameters.items() for parameters in before))
    found: Parameters = {}
    for names in again:
        parameters = {name: nn.Parameter(values[name].detach().clone()) for name in names}
        optimizer = make(parameters)
        load_state(optimizer, saved)
        train(optimizer, parameters, 3, 6)
        found.update(parameters)
    return found


def expected(make: Callable[[Parameters], StageOptimizer]) -> Parameters:
    parameters = new()
    train(make(parameters), parameters, 0, 6)
    return parameters


def assert_same(found: Mapping[str, Tensor], there: Mapping[str, Tensor]) -> None:
    assert found.keys() == there.keys()
    for name, tensor in there.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=1e-12, msg=name)


NAMES = list(SHAPES)
CUTS = [(NAMES[:2], NAMES[2:]), (NAMES[:4], NAMES[4:])]


class Counts(torch.optim.Optimizer):
    """Descent of its own, which counts its steps on the object and under a name of its state."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.counts = {"steps": 0}
        self.seen = []
        self.state["k"] = torch.zeros(())

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        self.counts["steps"] += 1
        self.seen.append((self.counts["steps"], "seen"))
        self.state["k"] += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    rate = group["lr"] / self.counts["steps"] / len(self.seen) / float(self.state["k"])
                    parameter.add_(parameter.grad, alpha=-rate)


CASES = {f"schedule: {name}": (by_shape, schedule) for name, schedule in SCHEDULES.items()}
CASES |= {name: (partial(getattr(torch.optim, name), lr=0.1), None) for name in sorted({*ELEMENTWISE, "Adafactor"})}
CASES["counts on the object"] = Counts, None


@pytest.mark.cases(24)
@pytest.mark.parametrize("case", CASES)
def test_groups_schedules_and_states_go_on_under_another_cut(case: str) -> None:
    make = whole(*CASES[case])
    first, second = (list(map(list, cut)) for cut in CUTS)
    assert_same(resumed(make, first, second), expected(make))
    assert_same(resumed(make, [NAMES], first), expected(make))


def train_sharded(
    end: InProcessTransport, make: Make, parameters: Parameters, first: int, last: int, source: Saved | None
) -> RankState:
    shards = sharded(parameters, end, 100)
    optimizer = StageOptimizer(parameters, make, shards)
    optimizer.schedule(cosine)
    if source is not None:
        load_state(optimizer, source)
        assert all(state["step"].shape == () for state in optimizer.state.values())
    for step in range(first, last):
        gradients(parameters, step)
        for parameter in parameters.values():
            parameter.grad /= end.world_size
        shards.reduce()
        optimizer.step()
    return state_of(optimizer, frozenset(parameters) if end.rank == 0 else frozenset())


@pytest.mark.parametrize("make", [by_shape, partial(torch.optim.Adagrad, lr=0.1)])
def test_slices_are_found_again_on_another_number_of_ranks(make: Make) -> None:
    def begin(end: InProcessTransport) -> tuple[RankState, Parameters]:
        parameters = new()
        return train_sharded(end, make, parameters, 0, 3, None), parameters

    (first, values), *others = on_ranks(3, begin)
    saved = Saved(first, *(state for state, _ in others))

    def go_on(end: InProcessTransport) -> Parameters:
        parameters = {name: nn.Parameter(value.detach().clone()) for name, value in values.items()}
        train_sharded(end, make, parameters, 3, 6, saved)
        return parameters

    alone = whole(make, cosine)
    for num_ranks in (1, 2, 4):
        for found in on_ranks(num_ranks, go_on):
            assert_same(found, expected(alone))
    parameters = {name: nn.Parameter(value.detach().clone()) for name, value in values.items()}
    optimizer = alone(parameters)
    load_state(optimizer, saved)
    train(optimizer, parameters, 3, 6)
    assert_same(parameters, expected(alone))


def test_what_cannot_be_saved_is_named() -> None:
    parameters = new("scale")
    optimizer = StageOptimizer(parameters, torch.optim.SGD)
    optimizer.optimizer.state[parameters["scale"]]["history"] = []
    with pytest.raises(UsageError, match=r"SGD keeps a list \(history\) for scale"):
        state_of(optimizer, ())


def parts_by_rows(num_ranks: int, rank: int) -> dict[str, ParameterPart]:
    """Each rank has some rows of what has dims; where there are fewer than ranks, the first ones have none."""
    found = {}
    for name, shape in SHAPES.items():
        rows = scaled_intervals(tuple(range(num_ranks + 1)), shape[0]) if shape else ()
        boxes = tuple((interval, *everything(shape[1:])) for interval in rows) or ((),) * num_ranks
        found[name] = ParameterPart(shape, boxes, tuple(range(num_ranks)), rank)
    return found


def train_parts(
    make: Make, values: Parameters, num_ranks: int, first: int, last: int, source: Saved | None
) -> tuple[list[RankState], Parameters]:
    """What each rank has to save, and the whole parameters; ranks need no messages here."""
    states = []
    whole_ones = {name: torch.empty(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for rank in range(num_ranks):
        parts = parts_by_rows(num_ranks, rank)
        parameters = {name: nn.Parameter(part.cut(values[name]).detach().clone()) for name, part in parts.items()}
        optimizer = StageOptimizer(parameters, make, parts=parts)
        optimizer.schedule(cosine)
        if source is not None:
            load_state(optimizer, source)
        for step in range(first, last):
            all_gradients = new()
            gradients(all_gradients, step)
            for name, part in parts.items():
                parameters[name].grad = part.cut(all_gradients[name].grad).clone()
            optimizer.step()
        for name, part in parts.items():
            part.cut(whole_ones[name]).copy_(parameters[name].detach())
        states.append(state_of(optimizer, frozenset(name for name, part in parts.items() if part.is_first)))
    return states, whole_ones


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_parts_are_found_again_on_another_number_of_ranks(name: str) -> None:
    make = partial(getattr(torch.optim, name), lr=0.1)
    states, values = train_parts(make, new(), 3, 0, 3, None)
    saved = Saved(*states)
    there = expected(whole(make, cosine))
    for num_ranks in (2, 5):
        assert_same(train_parts(make, values, num_ranks, 3, 6, saved)[1], there)
    alone = {name: nn.Parameter(value.clone()) for name, value in values.items()}
    optimizer = whole(make, cosine)(alone)
    load_state(optimizer, saved)
    train(optimizer, alone, 3, 6)
    assert_same(alone, there)


def test_what_was_saved_whole_goes_on_in_parts() -> None:
    parameters = new()
    optimizer = whole(by_shape, cosine)(parameters)
    train(optimizer, parameters, 0, 3)
    saved = Saved(state_of(optimizer, frozenset(parameters)))
    found = train_parts(by_shape, parameters, 3, 3, 6, saved)[1]
    assert_same(found, expected(whole(by_shape, cosine)))


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_the_users_own_object_goes_on_in_parts_and_gets_back_what_they_keep(name: str) -> None:
    parameters = new()
    alone = new()
    user, own = (getattr(torch.optim, name)(each.values(), lr=0.1) for each in (parameters, alone))
    for step in range(6):
        gradients(alone, step)
        own.step()

    def loop(step: int) -> None:
        gradients(parameters, step)
        user.step()

    loop(0)
    followed = Followed(user)
    followed.recognise(parameters)
    states, values = train_parts(followed, parameters, 3, 1, 5, None)
    with torch.no_grad():
        for key, value in values.items():
            parameters[key].copy_(value)
    give_back(followed, Saved(*states))
    loop(5)
    assert_same(parameters, alone)


def test_the_users_own_object_gets_back_what_it_counts() -> None:
    parameters = new()
    alone = new()
    user = Counts(parameters.values())
    own = Counts(alone.values())
    followed = Followed(user)
    followed.recognise(parameters)
    stages = [{name: parameters[name] for name in names} for names in CUTS[0]]
    optimizers = [StageOptimizer(each, followed, is_alone=False) for each in stages]
    for optimizer, each in zip(optimizers, stages, strict=True):
        train(optimizer, each, 0, 3)
    give_back(followed, Saved(*(state_of(each, frozenset(each.tensors)) for each in optimizers)))
    assert (user.counts, user.state["k"]) == ({"steps": 3}, 3)
    assert user.seen == [(1, "seen"), (2, "seen"), (3, "seen")]
    for step in range(5):
        gradients(alone, step)
        own.step()
        gradients(parameters, step)
        if step > 2:
            user.step()
    assert_same(parameters, alone)


def test_an_optimiser_of_whole_tensors_may_not_have_parts() -> None:
    parts = parts_by_rows(2, 0)
    parameters = {name: nn.Parameter(parts[name].cut(value).detach()) for name, value in new().items()}
    with pytest.raises(UsageError, match="the state of Adafactor cannot be divided"):
        StageOptimizer(parameters, torch.optim.Adafactor, parts=parts)


@pytest.mark.parametrize("saved", ["fast", None])
def test_no_number_where_the_optimiser_keeps_a_tensor_is_refused(saved: str | None) -> None:
    assert number_like("slow", saved) == saved
    assert torch.equal(number_like(torch.zeros(2), 3), torch.full((2,), 3.0))
    with pytest.raises(UsageError, match=f"has {saved!r} where this optimiser keeps a tensor"):
        number_like(torch.zeros(()), saved)
