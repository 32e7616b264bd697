"""Schedules of learning rates are stepped one after another, and what they keep is told by numbers, or refused."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from benchmarks.robustness.schedules import SCHEDULES, GradualWarmup
from planner.ir.errors import UsageError
from runtime.optim.schedules import Schedules, SteppedElsewhere, schedules_of


def sgd() -> torch.optim.Optimizer:
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in (0.1, 0.4)]
    return torch.optim.SGD(groups, momentum=0.9)


def rates(schedules: Schedules, num_steps: int) -> list[tuple[float, ...]]:
    """Of each group after each step."""
    seen = []
    for _ in range(num_steps):
        schedules.optimizer.step()
        schedules.step()
        seen.append(tuple(group["lr"] for group in schedules.optimizer.param_groups))
    return seen


@pytest.mark.parametrize("make", SCHEDULES.values(), ids=SCHEDULES)
def test_numbers_that_another_process_kept_set_schedules_made_anew_where_they_were(
    make: Callable[[torch.optim.Optimizer], Any],
) -> None:
    whole = rates(schedules_of(make(sgd())), 6)
    first = schedules_of(make(sgd()))
    elsewhere = SteppedElsewhere()
    rates(first, 3)
    elsewhere.load(first.numbers())
    again = schedules_of(make(optimizer := sgd()))
    optimizer.load_state_dict(first.optimizer.state_dict())
    again.load(elsewhere.numbers())
    assert rates(again, 3) == whole[3:]
    assert again.numbers() != elsewhere.numbers()


class Own(LRScheduler):
    """A schedule that keeps what it is given."""

    def __init__(self, optimizer: torch.optim.Optimizer, **kept: Any) -> None:
        vars(self).update(kept)
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        return list(self.base_lrs)


@pytest.mark.parametrize("kept", [deque([1]), torch.zeros(2), object()], ids=lambda kept: type(kept).__name__)
def test_what_is_no_number_is_refused_when_it_is_saved_and_not_before(kept: object) -> None:
    schedules = Schedules([Own(sgd(), kept=[{"here": kept}])])
    rates(schedules, 1)
    with pytest.raises(UsageError, match=rf"keeps a {type(kept).__name__} \(kept/0/here\), which cannot be saved"):
        schedules.numbers()


def test_functions_of_a_schedule_are_its_own() -> None:
    numbers = Schedules([Own(optimizer := sgd(), rule=len, other=lambda: 1, held=optimizer)]).numbers()
    assert not {"rule", "other", "held"} & numbers[0].keys()


def lacking(numbers: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [{place: number for place, number in each.items() if place != "last_epoch"} for each in numbers]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda _: [{}, {}], "nothing was saved of any"),
        (lacking, "last_epoch is not there"),
        (lambda numbers: [{**each, "T_max": 3} for each in numbers], "T_max has no place in these"),
    ],
)
def test_the_state_of_other_schedules_is_refused(change: Callable[[Any], Any], says: str) -> None:
    schedules = Schedules([lr_scheduler.StepLR(sgd(), 2)])
    with pytest.raises(UsageError, match=rf"is not the state of these schedules[\s\S]*StepLR[\s\S]*{says}"):
        schedules.load(change(schedules.numbers()))


def test_what_is_no_schedule_or_follows_a_metric_or_is_anothers_is_refused() -> None:
    optimizer = sgd()
    with pytest.raises(UsageError, match="a SGD is no schedule of torch's"):
        schedules_of(optimizer)
    with pytest.raises(UsageError, match="a list of schedules of learning rates is empty"):
        schedules_of([])
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer)
    for each in (plateau, [lr_scheduler.StepLR(optimizer, 1), plateau], GradualWarmup(optimizer, 1, plateau)):
        with pytest.raises(UsageError, match="ReduceLROnPlateau follows a metric"):
            schedules_of(each)
    with pytest.raises(UsageError, match="StepLR was made on another optimiser"):
        schedules_of([lr_scheduler.StepLR(optimizer, 1), lr_scheduler.StepLR(sgd(), 1)])
