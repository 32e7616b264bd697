"""What people do with optimisers in their scripts: a habit a row (:mod:`benchmarks.robustness.habits`).

Each trains a small classifier for a few steps on two stages, beside the same loop on one device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

import halopipe as hp
from benchmarks.robustness.habits import Habit, Notes, Script
from planner.ir.plan import Plan
from planner.ir.profile import ModelSource
from profiler.source.source import load_model
from tests.halopipe import learners
from tests.halopipe.plans import plan_of

SOURCE = ModelSource("tests.halopipe.learners:classifier", {"dropout": "0.0"}, (4, learners.WIDTH), "float64")
NUM_STEPS = 4
SAMPLES = 6

Make = Callable[[nn.Module], Optimizer]
Between = Callable[[Optimizer, nn.Module, int], None]
"""What the script does after a step, by its number."""


def habits() -> list[Habit]:
    """All of them."""
    return [
        _habit("groups: biases without decay", _by_decay),
        _habit("groups: the step reads the first parameter of each", partial(_by_layer, ReadsFirst)),
        _habit("rates: the script divides them between steps", _sgd, between=_divide_rates),
        _habit("rates: none, which the step finds by itself", partial(_of, Relative)),
        _habit("rates: by an attribute of each parameter", _scaled),
        _habit("rates: by an attribute that the script changes between steps", _scaled, between=_rescale),
        _habit("rates: by a mask on each parameter", _masked),
        _habit("rates: by the parameters' ids", _by_id, "ids of parameters"),
        _habit("rates: by the parameters' ids, in a global variable", _by_global_id, "ids of parameters"),
        _habit("rates: by the place in the list", partial(_of, ByPlace), "place"),
        _habit("step: a subclass clips values", partial(_of, ClipsValues)),
        _habit("step: another one on the object clips values", _replaced_step, "step was replaced"),
        _habit("step: clips by the norm of all, which is seldom so large", partial(_of, ClipsLarge), "clip_norm="),
        _habit("step: clips by the norm of all once it is warm", partial(_of, ClipsLate), "clip_norm="),
        _habit("step: the rule is a method that the object keeps", partial(_of, KeepsRule)),
        _habit("step: adds noise", partial(_of, Noisy), "random numbers"),
        _habit("step: hooks around it", _hooked, "hooks around its steps"),
        _habit("state: a counter on the object, then a loop of one's own", partial(_of, Counts), goes_on=True),
        _habit(
            "state: a list that grows, and a dict that the script writes to",
            partial(_of, KeepsLists),
            between=_temper,
            goes_on=True,
        ),
        _habit("state: a tensor under a name", partial(_of, KeepsNamed), goes_on=True),
        _habit("state: tensors beside that of the parameters", partial(_of, KeepsBeside), "cannot be divided"),
        _habit("class: defined in a function", _local),
        _habit("scalars of the script's default dtype", _nadam, within=_in_double),
        _habit("a schedule made on the object", _warm, goes_on=True),
    ]


class OwnSGD(Optimizer):
    """Plain descent, as people write it."""

    def __init__(self, parameters: Any, lr: float | None = 0.1, **more: Any) -> None:
        super().__init__(parameters, {"lr": lr, **more})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-self.rate(group, parameter))

    def rate(self, group: dict[str, Any], parameter: Tensor) -> float:
        return float(group["lr"])


class ReadsFirst(OwnSGD):
    """Chooses by the dtype of each group."""

    def rate(self, group: dict[str, Any], parameter: Tensor) -> float:
        first = group["params"][0]
        return float(group["lr"]) * (0.5 if first.dtype is torch.float64 else 1.0)

    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            group["is_double"] = group["params"][0].dtype is torch.float64
        super().step()


class Relative(OwnSGD):
    """As Adafactor with relative steps."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=None)

    def rate(self, group: dict[str, Any], parameter: Tensor) -> float:
        state = self.state[parameter]
        state["step"] = state.get("step", 0) + 1
        return 0.1 / math.sqrt(state["step"])


class ByAttribute(OwnSGD):
    """Its rates are attributes of the parameters."""

    def rate(self, group: dict[str, Any], parameter: Tensor) -> float:
        return float(group["lr"]) * getattr(parameter, "lr_scale", 1.0)


class ByMask(OwnSGD):
    """Leaves out elements, by a tensor that is an attribute of each parameter."""

    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(parameter.mask)
        super().step()


class ById(OwnSGD):
    """Its rates are kept by the ids of parameters."""

    scales: dict[int, float]

    def rate(self, group: dict[str, Any], parameter: Tensor) -> float:
        return float(group["lr"]) * self.scales.get(id(parameter), 1.0)


SCALES: dict[int, float] = {}


class ByGlobalId(OwnSGD):
    """The same in a global variable."""

    def rate(self, group: dict[str, Any], parameter: Tensor) -> float:
        return float(group["lr"]) * SCALES.get(id(parameter), 1.0)


class ByPlace(OwnSGD):
    """Deeper layers learn more slowly."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for place, parameter in enumerate(group["params"]):
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"] * 0.7**place)


class ClipsValues(torch.optim.SGD):
    """Clips each value."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.5, momentum=0.9)

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            nn.utils.clip_grad_value_(group["params"], 0.02)
        return super().step(closure)


class ClipsLarge(OwnSGD):
    """Clips by the norm of all, which a short run does not reach."""

    largest = 200.0

    def step(self, closure: None = None) -> None:
        own = [parameter for group in self.param_groups for parameter in group["params"]]
        nn.utils.clip_grad_norm_(own, self.largest)
        super().step()


class ClipsLate(ClipsLarge):
    """As the larger norm would hide that it clips."""

    largest = 0.01

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.num_steps = 0

    def step(self, closure: None = None) -> None:
        self.num_steps += 1
        if self.num_steps > 300:
            super().step()
        else:
            OwnSGD.step(self)


class KeepsRule(OwnSGD):
    """Keeps one of its methods."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.rule = self._halving
        self.num_steps = 0

    def _halving(self) -> float:
        return 0.5**self.num_steps

    def rate(self, group: dict[str, Any], parameter: Tensor) -> float:
        return float(group["lr"]) * self.rule()

    def step(self, closure: None = None) -> None:
        super().step()
        self.num_steps += 1


class Noisy(OwnSGD):
    """As Langevin dynamics."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.add_(torch.randn_like(parameter), alpha=0.01)
        super().step()


class Counts(OwnSGD):
    """Learns more slowly with each step, which it counts itself."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.num_steps = 0

    def step(self, closure: None = None) -> None:
        self.num_steps += 1
        super().step()

    def rate(self, group: dict[str, Any], parameter: Tensor) -> float:
        return float(group["lr"]) / self.num_steps


class KeepsLists(OwnSGD):
    """Keeps its history, and settings of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.seen: list[float] = []
        self.own = {"temperature": 1.0}

    def step(self, closure: None = None) -> None:
        self.seen.append(float(self.param_groups[0]["lr"]))
        super().step()

    def rate(self, group: dict[str, Any], parameter: Tensor) -> float:
        return sum(self.seen) / len(self.seen) ** 2 * self.own["temperature"]


class KeepsNamed(OwnSGD):
    """Its counter is a tensor, in the state under a name."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.state["k"] = torch.zeros(())

    def step(self, closure: None = None) -> None:
        self.state["k"] += 1
        super().step()

    def rate(self, group: dict[str, Any], parameter: Tensor) -> float:
        return float(group["lr"]) / float(self.state["k"])


class KeepsBeside(OwnSGD):
    """As Lookahead keeps slow weights."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.slow = [parameter.detach().clone() for group in self.param_groups for parameter in group["params"]]


def _habit(
    name: str,
    make: Make | Callable[[nn.Module], tuple[Optimizer, LRScheduler]],
    says: str = "",
    between: Between = lambda *_: None,
    within: Callable[[], Any] | None = None,
    *,
    goes_on: bool = False,
) -> Habit:
    """Of a script whose optimiser ``make`` makes of its module.

    Args:
        within: a context of both scripts.
        goes_on: whether a plain loop takes the module and the optimiser over behind it.
    """

    def plain(notes: Notes) -> None:
        module = load_model(SOURCE).module
        optimizer, schedule = _both(make(module))
        _loop(notes, module, optimizer, schedule, 0, between)
        if goes_on:
            _loop(notes, module, optimizer, schedule, NUM_STEPS, between)
        notes.parameters = module.state_dict()

    def ours(notes: Notes) -> None:
        module = load_model(SOURCE).module
        optimizer, schedule = _both(make(module))
        with hp.parallelize(module, plan=two_stages(), optimizer=optimizer, scheduler=schedule) as run:
            for step in range(NUM_STEPS):
                notes.numbers.append(run.step(batch(step)))
                between(optimizer, module, step)
        if goes_on:
            _loop(notes, module, optimizer, schedule, NUM_STEPS, between)
        notes.parameters = module.state_dict()

    return Habit(name, *(script if within is None else _within(within, script) for script in (plain, ours)), says)


def _loop(
    notes: Notes, module: nn.Module, optimizer: Optimizer, schedule: LRScheduler | None, first: int, between: Between
) -> None:
    """Some steps as people write them."""
    for step in range(first, first + NUM_STEPS):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        loss = functional.cross_entropy(module(inputs), targets)
        loss.backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()
        notes.numbers.append(loss.item())
        between(optimizer, module, step)


def _both(made: Any) -> tuple[Optimizer, LRScheduler | None]:
    return made if isinstance(made, tuple) else (made, None)


def _within(context: Callable[[], Any], script: Script) -> Script:
    def inside(notes: Notes) -> None:
        with context():
            script(notes)

    return inside


def batch(step: int) -> tuple[Tensor, Tensor]:
    """The samples of a step."""
    inputs, targets = learners.samples()
    return inputs[step : step + SAMPLES].double(), targets[step : step + SAMPLES]


def two_stages() -> Plan:
    """One linear layer on each."""
    return plan_of(SOURCE, [0.5], (3, 3))


def _of(cls: Callable[[Any], Optimizer], module: nn.Module) -> Optimizer:
    return cls(module.parameters())


def _sgd(module: nn.Module) -> Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9, nesterov=True)


def _nadam(module: nn.Module) -> Optimizer:
    return torch.optim.NAdam(module.parameters(), lr=0.05)


def _by_decay(module: nn.Module) -> Optimizer:
    biases = [parameter for parameter in module.parameters() if parameter.ndim == 1]
    weights = [parameter for parameter in module.parameters() if parameter.ndim > 1]
    return torch.optim.AdamW([{"params": biases, "weight_decay": 0.0}, {"params": weights}], lr=0.1, weight_decay=0.3)


def _by_layer(cls: Callable[[Any], Optimizer], module: nn.Module) -> Optimizer:
    first = module[0]
    last = module[3]  # type: ignore[index]  # a Sequential
    return cls([{"params": first.parameters()}, {"params": last.parameters(), "lr": 0.05}])


def _scaled(module: nn.Module) -> Optimizer:
    for place, parameter in enumerate(module.parameters()):
        parameter.lr_scale = 0.5**place  # type: ignore[attr-defined]  # as people do
    return ByAttribute(module.parameters())


def _masked(module: nn.Module) -> Optimizer:
    for place, parameter in enumerate(module.parameters()):
        kept = torch.arange(parameter.numel()).view(parameter.shape) % (place + 2) > 0
        parameter.mask = kept.double()  # type: ignore[attr-defined]  # as people do
    return ByMask(module.parameters())


def _by_id(module: nn.Module) -> Optimizer:
    optimizer = ById(module.parameters())
    optimizer.scales = {id(parameter): 0.5**place for place, parameter in enumerate(module.parameters())}
    return optimizer


def _by_global_id(module: nn.Module) -> Optimizer:
    SCALES.update((id(parameter), 0.5**place) for place, parameter in enumerate(module.parameters()))
    return ByGlobalId(module.parameters())


def _replaced_step(module: nn.Module) -> Optimizer:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    plain = optimizer.step

    def step(closure: Any = None) -> Any:
        nn.utils.clip_grad_value_(module.parameters(), 0.02)
        return plain(closure)

    optimizer.step = step  # type: ignore[method-assign]  # as people do
    return optimizer


def _hooked(module: nn.Module) -> Optimizer:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


def _local(module: nn.Module) -> Optimizer:
    class Local(OwnSGD):
        def rate(self, group: dict[str, Any], parameter: Tensor) -> float:
            return 0.5 * super().rate(group, parameter)

    return Local(module.parameters())


def _warm(module: nn.Module) -> tuple[Optimizer, LRScheduler]:
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    return optimizer, LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))


def _divide_rates(optimizer: Optimizer, module: nn.Module, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] /= 2


def _rescale(optimizer: Optimizer, module: nn.Module, step: int) -> None:
    for parameter in module.parameters():
        parameter.lr_scale *= 0.5  # type: ignore[attr-defined]  # as people do


def _temper(optimizer: Optimizer, module: nn.Module, step: int) -> None:
    optimizer.own["temperature"] *= 0.5  # type: ignore[attr-defined]  # of KeepsLists


@contextmanager
def _in_double() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
