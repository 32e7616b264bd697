"""What people do with schedules of learning rates in scripts: a habit a row (:mod:`benchmarks.robustness.habits`).

Each trains a small classifier for a few steps on two stages, beside the same loop on one device.  Most stop halfway,
and go on from what was saved in another run, under another plan, with objects made anew; the loop does not stop.
"""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

import halopipe as hp
from benchmarks.robustness.habits import Habit, Notes
from benchmarks.robustness.optimizers import SOURCE, batch, two_stages
from planner.ir.plan import Plan
from profiler.source.source import load_model
from tests.halopipe.plans import plan_of

NUM_STEPS = 6
HALF = 3
RATES = (0.05, 0.1)
HELD_OUT = 9
"""The step whose batch nobody trains on."""

Make = Callable[[torch.optim.Optimizer], Any]
"""Makes a schedule of an optimiser, or a list of them."""


def habits() -> list[Habit]:
    """All of them."""
    return [
        *(_resumed(name, make) for name, make in SCHEDULES.items()),
        _resumed("state dicts of the script's own objects", _one_cycle, goes_on=_by_state_dicts),
        _resumed("the checkpoint of a run is loaded by the same run", _one_cycle, goes_on=_back_again),
        _resumed("steps that are left out for NaN", _one_cycle, goes_on=_straight, spoilt=2),
        _resumed("rates that are tensors", _several, as_tensors=True),
        _by_hand("a schedule that the script steps", partial(lr_scheduler.StepLR, step_size=2), _step),
        _by_hand("ReduceLROnPlateau on a held-out loss", _plateau, _step_on_held_out),
        _by_hand("rates written into groups", lambda optimizer: optimizer, _halve),
        _refused("ReduceLROnPlateau", _plateau, "ReduceLROnPlateau follows a metric"),
        _refused("ReduceLROnPlateau among others", lambda it: [_one_cycle(it), _plateau(it)], "follows a metric"),
        _refused("an object that only looks like a schedule", _LooksLikeOne, "is no schedule of torch"),
    ]


class GradualWarmup(LRScheduler):
    """As many scripts bring it: rates rise, then another schedule, which it holds, goes on."""

    def __init__(self, optimizer: torch.optim.Optimizer, steps: int, after: LRScheduler) -> None:
        self.steps = steps
        self.after = after
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        if self.last_epoch > self.steps:
            return self.after.get_last_lr()
        return [rate * (self.last_epoch + 1) / (self.steps + 1) for rate in self.base_lrs]

    def step(self, epoch: int | None = None) -> None:
        if self.last_epoch >= self.steps:
            self.after.step()
        super().step(epoch)


class Counting:
    """A factor that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, _: int) -> float:
        self.calls += 1
        return 1 / self.calls


class _LooksLikeOne:
    """Has the methods of a schedule and is none."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        """Nothing."""


def _one_cycle(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return lr_scheduler.OneCycleLR(optimizer, max_lr=[0.2, 0.4], total_steps=NUM_STEPS + 1)


def _warm_up_then_cosine(optimizer: torch.optim.Optimizer) -> LRScheduler:
    parts = [
        lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2),
        lr_scheduler.CosineAnnealingLR(optimizer, T_max=NUM_STEPS),
    ]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])


def _chained(optimizer: torch.optim.Optimizer) -> LRScheduler:
    parts = [lr_scheduler.ExponentialLR(optimizer, 0.9), lr_scheduler.ConstantLR(optimizer, 0.5, total_iters=4)]
    return lr_scheduler.ChainedScheduler(parts)


def _several(optimizer: torch.optim.Optimizer) -> list[LRScheduler]:
    return [lr_scheduler.ExponentialLR(optimizer, 0.9), lr_scheduler.MultiStepLR(optimizer, milestones=[2, 4])]


def _holding_another(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return GradualWarmup(optimizer, 2, lr_scheduler.CosineAnnealingLR(optimizer, T_max=NUM_STEPS))


def _plateau(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.5)


SCHEDULES: Mapping[str, Make] = {
    "OneCycleLR": _one_cycle,
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "LambdaLR of factors that count": lambda optimizer: lr_scheduler.LambdaLR(optimizer, [Counting(), Counting()]),
    "SequentialLR": _warm_up_then_cosine,
    "ChainedScheduler": _chained,
    "several, stepped one after another": _several,
    "one that holds another": _holding_another,
}


@dataclass(frozen=True, slots=True)
class Setting:
    """What a script trains.

    Attributes:
        make: its schedules.
        spoilt: the step whose batch has NaN, which makes no update; -1: none.
        as_tensors: whether learning rates are tensors, which schedules write into.
    """

    make: Make
    spoilt: int = -1
    as_tensors: bool = False

    def objects(self) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        """A module as it is initialised, its optimiser with a group for each of its two stages, and schedules."""
        module = load_model(SOURCE).module
        rates: list[Any] = [torch.tensor(rate) for rate in RATES] if self.as_tensors else list(RATES)
        layers = [module[0], module[3]]
        groups = [{"params": layer.parameters(), "lr": rate} for layer, rate in zip(layers, rates, strict=True)]
        optimizer = torch.optim.SGD(groups, momentum=0.9)
        return module, optimizer, self.make(optimizer)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """The samples of a step."""
        inputs, targets = batch(step)
        return inputs * math.nan if step == self.spoilt else inputs, targets


def _one_stage() -> Plan:
    """Both layers on one rank."""
    return plan_of(SOURCE, [], (6,))


def _rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


Behind = Callable[[nn.Module, Any], None]
"""What a script does to its schedules behind an update."""


def _plain(setting: Setting, behind: Behind, notes: Notes) -> None:
    """All steps, by torch alone."""
    module, optimizer, schedules = setting.objects()
    for step in range(NUM_STEPS):
        inputs, targets = setting.batch(step)
        optimizer.zero_grad()
        loss = functional.cross_entropy(module(inputs), targets)
        if loss.isfinite():
            loss.backward()
            optimizer.step()
            behind(module, schedules)
            notes.numbers.append(loss.item())
        notes.numbers += _rates(optimizer)
    notes.parameters = module.state_dict()


GoesOn = Callable[[Setting, Notes], nn.Module]
"""Trains all steps, most with a pause, and gives the module."""


def _resumed(name: str, make: Make, goes_on: GoesOn | None = None, **options: Any) -> Habit:
    """Of a script that gives its schedules to the run."""
    setting = Setting(make, **options)

    def step(_: nn.Module, schedules: Any) -> None:
        for each in schedules if isinstance(schedules, list) else [schedules]:
            each.step()

    def ours(notes: Notes) -> None:
        notes.parameters = (goes_on or _by_checkpoint)(setting, notes).state_dict()

    return Habit(name, partial(_plain, setting, step), ours)


def _steps(run: Any, setting: Setting, optimizer: torch.optim.Optimizer, steps: range, notes: Notes) -> None:
    for step in steps:
        loss = run.step(setting.batch(step))
        notes.numbers += [loss] * math.isfinite(loss) + _rates(optimizer)


def _straight(setting: Setting, notes: Notes) -> nn.Module:
    """Without a pause."""
    module, optimizer, schedules = setting.objects()
    options = {"optimizer": optimizer, "scheduler": schedules, "on_nan": "skip"}
    with hp.parallelize(module, plan=two_stages(), **options) as run:
        _steps(run, setting, optimizer, range(NUM_STEPS), notes)
    return module


def _by_checkpoint(setting: Setting, notes: Notes) -> nn.Module:
    """A checkpoint, which another run loads."""
    with tempfile.TemporaryDirectory(prefix="halopipe-schedules-") as folder:
        module, optimizer, schedules = setting.objects()
        with hp.parallelize(module, plan=two_stages(), optimizer=optimizer, scheduler=schedules) as run:
            _steps(run, setting, optimizer, range(HALF), notes)
            run.save(folder)
        module, optimizer, schedules = setting.objects()
        with hp.parallelize(module, plan=_one_stage(), optimizer=optimizer, scheduler=schedules) as run:
            run.load(folder)
            _steps(run, setting, optimizer, range(HALF, NUM_STEPS), notes)
    return module


def _by_state_dicts(setting: Setting, notes: Notes) -> nn.Module:
    """What a script keeps of its own objects, as of a loop of torch's."""
    module, optimizer, schedule = setting.objects()
    with hp.parallelize(module, plan=two_stages(), optimizer=optimizer, scheduler=schedule) as run:
        _steps(run, setting, optimizer, range(HALF), notes)
        kept = copy.deepcopy([run.module.state_dict(), optimizer.state_dict(), schedule.state_dict()])
    objects = setting.objects()
    for each, state in zip(objects, kept, strict=True):
        each.load_state_dict(state)
    module, optimizer, schedule = objects
    with hp.parallelize(module, plan=_one_stage(), optimizer=optimizer, scheduler=schedule) as run:
        _steps(run, setting, optimizer, range(HALF, NUM_STEPS), notes)
    return module


def _back_again(setting: Setting, notes: Notes) -> nn.Module:
    """Steps that are made, taken back and made again."""
    module, optimizer, schedules = setting.objects()
    with (
        tempfile.TemporaryDirectory(prefix="halopipe-schedules-") as folder,
        hp.parallelize(module, plan=two_stages(), optimizer=optimizer, scheduler=schedules) as run,
    ):
        _steps(run, setting, optimizer, range(HALF), notes)
        run.save(folder)
        _steps(run, setting, optimizer, range(HALF, NUM_STEPS), Notes())
        run.load(folder)
        _steps(run, setting, optimizer, range(HALF, NUM_STEPS), notes)
    return module


Act = Callable[[Any, Callable[[], float]], None]
"""What a script does to a schedule of its own behind a step; the other is the loss of the held-out batch."""


def _step(schedule: Any, _: Callable[[], float]) -> None:
    schedule.step()


def _step_on_held_out(schedule: Any, loss: Callable[[], float]) -> None:
    schedule.step(loss())


def _halve(optimizer: Any, _: Callable[[], float]) -> None:
    for group in optimizer.param_groups:
        group["lr"] /= 2


def _by_hand(name: str, make: Make, act: Act) -> Habit:
    """Of a script that keeps its schedule to itself."""
    setting = Setting(make)

    def behind(module: nn.Module, schedule: Any) -> None:
        inputs, targets = batch(HELD_OUT)
        with torch.no_grad():
            act(schedule, lambda: functional.cross_entropy(module(inputs), targets).item())

    def ours(notes: Notes) -> None:
        module, optimizer, schedule = setting.objects()
        with hp.parallelize(module, plan=two_stages(), optimizer=optimizer) as run:
            for step in range(NUM_STEPS):
                loss = run.step(setting.batch(step))
                act(schedule, lambda: run.evaluate(batch(HELD_OUT)).loss)
                notes.numbers += [loss, *_rates(optimizer)]
        notes.parameters = module.state_dict()

    return Habit(name, partial(_plain, setting, behind), ours)


def _refused(name: str, make: Make, says: str) -> Habit:
    """Of a script whose schedule cannot be followed."""

    def ours(notes: Notes) -> None:
        _straight(Setting(make), notes)

    return Habit(name, lambda _: None, ours, says)
