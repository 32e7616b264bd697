"""Schedules of learning rates: one of an optimiser, or several that are stepped one after another; what they keep.

What a schedule keeps is told as *numbers*: for each group of its optimiser a mapping from a place in its state dict to
a number, text or None, such as ``last_epoch``, ``_schedulers/0/last_epoch`` and, of lists with an element for each
group, ``base_lrs``.  Numbers are what checkpoints hold, and what the process that steps a schedule and the ranks that
save it tell one another.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from planner.ir.errors import UsageError
from runtime.checkpoint.state import Number

ScheduleNumbers = Sequence[Mapping[str, Number]]
"""By group, then by place."""

ReadNumber = Callable[[str, int | None], Number]
"""The number at a place; the other is the group, of lists with an element for each."""

_CONSTANTS = FunctionType, MethodType, BuiltinFunctionType, partial, type, enum.Enum, ref, torch.optim.Optimizer
"""Of these nothing is kept: a schedule made anew has them."""

_BY_GROUP = frozenset({"base_lrs", "_last_lr", "lr_lambdas", "max_lrs", "base_momentums", "max_momentums"})
"""Lists of torch's schedules (2.13) with an element for each group of the optimiser; others are read as they are."""


class Schedules:
    """Schedules of one optimiser, stepped one after another once an update.

    Raises:
        UsageError: one of them is no schedule, or follows a metric; or they are of several optimisers.
    """

    def __init__(self, schedules: Sequence[LRScheduler]) -> None:
        for each in schedules:
            if not isinstance(each, LRScheduler):
                raise no_schedule(each)
            require_counting(each)
        self._schedules = tuple(schedules)
        self.optimizer = schedules[0].optimizer
        self.require_of(self.optimizer)

    def require_of(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises :class:`UsageError` where one of them was made on another optimiser."""
        for each in self._schedules:
            if each.optimizer is not optimizer:
                raise UsageError(
                    f"the {type(each).__name__} was made on another optimiser than the {type(optimizer).__name__}",
                    ["it would set learning rates that nothing uses"],
                    ["give both: the optimiser, and the schedule that was made on it"],
                )

    def step(self) -> None:
        """Once an update."""
        for schedule in self._schedules:
            schedule.step()

    def numbers(self) -> ScheduleNumbers:
        """What they keep.

        Raises:
            UsageError: something else than numbers and text.
        """
        state = self._state
        return [dict(leaves(state, (), group)) for group in range(len(self.optimizer.param_groups))]

    def load(self, numbers: ScheduleNumbers) -> None:
        """Puts back what :meth:`numbers` gave.

        Raises:
            UsageError: it is not of such schedules.
        """
        whole: dict[str, Number] = {}
        for of_group in numbers:
            whole = {**of_group, **whole}
        unread = set(whole)
        if not whole:
            raise self._other("nothing was saved of any")

        def read(place: str, group: int | None) -> Number:
            of_group = whole if group is None else numbers[group]
            if place not in of_group:
                raise self._other(f"{place} is not there")
            unread.discard(place)
            return of_group[place]

        filled_state = filled(self._state, (), read)
        if unread:
            raise self._other(f"{min(unread)} has no place in these")
        for schedule, state in zip(self._schedules, _listed(filled_state), strict=True):
            schedule.load_state_dict(state)

    @property
    def _state(self) -> Any:
        states = [schedule.state_dict() for schedule in self._schedules]
        return states if len(states) > 1 else states[0]

    def _other(self, detail: str) -> UsageError:
        return UsageError(
            "what was saved is not the state of these schedules of learning rates",
            [", ".join(type(each).__name__ for each in self._schedules), detail],
            [
                "the schedules that it was saved with, made in the same way",
                "leave them out: in a script scheduler.step() behind run.step(batch)",
            ],
        )


class SteppedElsewhere:
    """Schedules that another process steps, as the ranks of a script know them: it tells them what they keep."""

    def __init__(self) -> None:
        self._numbers: ScheduleNumbers = []

    def step(self) -> None:
        """Nothing: that is done there."""

    def numbers(self) -> ScheduleNumbers:
        """What was told, or loaded, last; empty where nothing was."""
        return self._numbers

    def load(self, numbers: ScheduleNumbers) -> None:
        """Keeps them."""
        self._numbers = numbers


def schedules_of(made: object) -> Schedules:
    """Of a schedule, or of a list of them.

    Raises:
        UsageError: as of :class:`Schedules`.
    """
    several = _listed(made)
    if not several:
        raise UsageError("a list of schedules of learning rates is empty", [], ["None, where there is none"])
    return Schedules(several)


def no_schedule(value: object) -> UsageError:
    """Of something else in the place of a schedule."""
    return UsageError(
        f"a {type(value).__name__} is no schedule of torch's",
        [f"it is {value!r:.60}, not a torch.optim.lr_scheduler.LRScheduler"],
        [
            "leave it out, and do behind run.step(batch) what sets the rates of the script's optimiser object",
            "a schedule of torch.optim.lr_scheduler, a list of them, or a function that makes one of an optimiser",
        ],
    )


def require_counting(schedule: LRScheduler) -> None:
    """Raises :class:`UsageError` for a schedule that follows a metric, or holds one that does."""
    if any(isinstance(each, ReduceLROnPlateau) for each in _within(schedule)):
        raise UsageError(
            "ReduceLROnPlateau follows a metric, which the ranks that do not make the loss do not have",
            remedies=[
                "a schedule that counts steps, such as CosineAnnealingLR:T_max=100",
                "in a script with an optimiser object of its own: leave it out, and call scheduler.step(loss) there",
            ],
        )


def leaves(value: Any, path: tuple[str, ...], group: int) -> Iterator[tuple[str, Number]]:
    """The numbers in ``value`` by their places; of a list with one for each group, that of ``group``.

    Raises:
        UsageError: there is something that is neither a number nor known not to change.
    """
    if path and path[-1] in _BY_GROUP and isinstance(value, list):
        value = value[group]
    if is_leaf(value):
        yield "/".join(path), value.item() if isinstance(value, Tensor) else value
    elif isinstance(value, LRScheduler):
        yield from leaves(value.state_dict(), path, group)
    elif isinstance(value, Mapping | list | tuple):
        for key, each in _items(value):
            yield from leaves(each, (*path, str(key)), group)
    elif not _is_constant(value):
        raise UsageError(
            f"a schedule of learning rates keeps a {type(value).__name__} ({'/'.join(path)}), which cannot be saved",
            remedies=[
                "a schedule whose state_dict() has numbers, in lists and dicts",
                "leave it out: scheduler.step() behind run.step(batch), and keep scheduler.state_dict() in the script",
            ],
        )


def filled(fresh: Any, path: tuple[str, ...], read: ReadNumber, group: int | None = None) -> Any:
    """``fresh`` with every number read anew; schedules inside are loaded as they stand."""
    if path and path[-1] in _BY_GROUP and isinstance(fresh, list) and group is None:
        return [filled(each, path, read, index) for index, each in enumerate(fresh)]
    if is_leaf(fresh):
        return number_like(fresh, read("/".join(path), group))
    if isinstance(fresh, LRScheduler):
        fresh.load_state_dict(filled(fresh.state_dict(), path, read, group))
    if isinstance(fresh, Mapping):
        with_numbers: Any = copy.copy(fresh)
        for key, each in fresh.items():
            with_numbers[key] = filled(each, (*path, str(key)), read, group)
        return with_numbers
    if isinstance(fresh, list | tuple):
        return type(fresh)(filled(each, (*path, str(key)), read, group) for key, each in enumerate(fresh))
    return fresh


def is_leaf(value: Any) -> bool:
    """Whether it is a number, text or None, or a tensor of one number."""
    return isinstance(value, Number) or (isinstance(value, Tensor) and value.numel() == 1)


def _is_constant(value: Any) -> bool:
    return isinstance(value, _CONSTANTS)


def _items(value: Any) -> Any:
    return value.items() if isinstance(value, Mapping) else enumerate(value)


def _within(value: Any) -> Iterator[LRScheduler]:
    """A schedule, and those that it holds."""
    if isinstance(value, LRScheduler):
        yield value
        value = vars(value)
    if isinstance(value, Mapping | list | tuple):
        for _, each in _items(value):
            yield from _within(each)


def _listed(made: Any) -> list[Any]:
    return list(made) if isinstance(made, list | tuple) else [made]


def number_like(fresh: Any, number: Number) -> Any:
    """``number``, as a tensor where ``fresh`` is one.

    Raises:
        UsageError: ``fresh`` is of another sort.
    """
    if not isinstance(fresh, Tensor):
        if isinstance(fresh, int | float) and isinstance(number, str):
            raise UsageError(
                f"the saved state of the optimiser has {number!r} where this optimiser keeps a number",
                ["it was saved by an optimiser with other options, or the manifest was edited"],
                ["give the options that it was saved with"],
            )
        return number
    if not isinstance(number, int | float):
        raise UsageError(
            f"the saved state of the optimiser has {number!r} where this optimiser keeps a tensor of numbers",
            ["it was saved by an optimiser with other options"],
            ["give the options that it was saved with"],
        )
    return torch.full_like(fresh, number)
