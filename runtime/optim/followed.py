"""An optimiser object of the user's, which the optimisers of all stages follow.

user's object     groups, attributes, state by parameter          learning rates, by a schedule or the script
begin               v            v              v (whole, a slice, a box)           v
stage's optimiser   its own parameters of each group, what was kept for them;  before each update: new settings
end                                             v
user's object                               state by parameter, once the run is over
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakMethod

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from cuda_ops._torch import note_step, times_written
from planner.ir.errors import UsageError
from runtime.optim.schedules import ScheduleNumbers, Schedules, SteppedElsewhere
from runtime.optim.sharding import STEP
from runtime.optim.user_object import (
    Twin,
    copied,
    is_plain,
    named_state,
    once,
    own_attributes,
    require_copies_alike,
    require_same_values,
    settings_of,
    values_read,
)

if TYPE_CHECKING:
    from runtime.spatial.parameters import ParameterParts

_Writes = dict[tuple[Any, str], tuple[int, int]]


@dataclass(frozen=True, slots=True)
class FollowedSettings:
    """What a script may change between steps.

    Attributes:
        groups: of each group.
        own: numbers and texts that are attributes of the optimiser.
        of_parameters: attributes of parameters, by the name of each that has some.
    """

    groups: list[dict[str, Any]]
    own: dict[str, Any]
    of_parameters: dict[str, dict[str, Any]]


KeptSettings = tuple[FollowedSettings, ScheduleNumbers | None]
"""And what schedules keep, None where it is not told."""


@dataclass(slots=True)
class _Led:
    """What is known of a follower.

    Attributes:
        twins: of the user's parameters, by name.
        stand_ins: by the number of a group of which it has no parameter.
        last: what it was given last.
    """

    twins: list[tuple[str, Twin]]
    stand_ins: dict[int, nn.Parameter]
    last: FollowedSettings
    stand_in_state: dict[Tensor, Any] = field(default_factory=dict)


class Followed:
    """An optimiser object of the user's, which those of all stages follow; makes them.

    Each is a copy of the object (:mod:`runtime.optim.user_object`) with all of its groups, of which it has the stage's
    own parameters, with what was kept for them so far.  Before each update it takes over what changed in the user's
    settings: whatever the script or a schedule did to them (learning rates) holds, and what its own steps write there,
    such as a number of steps, stays.  The user's object itself never steps; what the stages keep is written back into
    it (:func:`runtime.optim.optimizer_state.give_back`), so that another run or a loop of the user's own goes on with
    it.

    Args:
        schedules: made on ``optimizer``; stepped once an update (:meth:`updated`).

    Attributes:
        names: the model's parameters by all their names, once :meth:`recognise` was called.

    Raises:
        UsageError: copies of it would do something else; or a schedule is another's; or the ranks of an earlier run
            still have its state.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, schedules: Schedules | SteppedElsewhere | None = None) -> None:
        self.optimizer = optimizer
        self.schedules = schedules
        self.names: Mapping[str, nn.Parameter] = {}
        self._led: WeakKeyDictionary[torch.optim.Optimizer, _Led] = WeakKeyDictionary()
        self._state_was = _writes(optimizer)
        require_copies_alike(optimizer)
        self._values = values_read(optimizer)
        reason, state_was = _LEFT_WITH_RANKS.get(optimizer, ("", None))
        if state_was == self._state_was:
            raise UsageError(
                f"the state of this {type(optimizer).__name__} stayed with the ranks of an earlier run",
                [reason],
                ["optimizer.load_state_dict(...)", "an optimiser object that is new"],
            )
        if isinstance(schedules, Schedules):
            schedules.require_of(optimizer)

    def recognise(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Call before stages are made: the model's parameters by all their names.

        Raises:
            UsageError: the optimiser has others.
        """
        self.names = dict(parameters)
        ids = {id(parameter) for parameter in parameters.values()}
        foreign = sum(id(p) not in ids for group in self.optimizer.param_groups for p in group["params"])
        if foreign:
            raise UsageError(
                f"the {type(self.optimizer).__name__} has {foreign} parameters that are not the model's",
                [f"the model has {len(ids)}"],
                ["make it of the parameters of the very module that is given"],
            )

    def as_it_is(self) -> Followed:
        """The same with a copy of the object, which later steps leave alone."""
        snapshot = copy.copy(self)
        snapshot.optimizer = copied(self.optimizer, once(self.names.values()))
        return snapshot

    def whole(self, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        """The user's object itself, copied with all of its parameters, which are these: what one device steps."""
        name_of = {id(parameter): name for name, parameter in self.names.items() if name in parameters}
        return copied(self.optimizer, {number: (Twin(parameters[name]),) for number, name in name_of.items()})

    def __call__(
        self, named_parameters: Iterable[tuple[str, nn.Parameter]], parts: ParameterParts = MappingProxyType({})
    ) -> torch.optim.Optimizer:
        """The optimiser of a stage, which has ``parts`` of some parameters."""
        twins = [(name, Twin(parameter, parts.get(name))) for name, parameter in named_parameters]
        by_original: dict[int, list[Twin]] = {}
        for name, twin in twins:
            by_original.setdefault(id(self.names.get(name)), []).append(twin)
        follower = copied(self.optimizer, by_original)
        pairs = enumerate(zip(self.optimizer.param_groups, follower.param_groups, strict=True))
        stand_ins = {
            number: _stand_in(group["params"][0], twins)
            for number, (group, own) in pairs
            if group["params"] and twins and not own["params"]
        }
        self._led[follower] = _Led(twins, stand_ins, self.settings)
        return follower

    @contextmanager
    def filled(self, follower: torch.optim.Optimizer) -> Iterator[None]:
        """While ``follower`` steps, its groups that have no parameter of the stage have one of a single zero.

        The user's object has no empty groups, so its step may read the first parameter of each.
        """
        led = self._led[follower]
        for number, parameter in led.stand_ins.items():
            parameter.grad = torch.zeros_like(parameter)
            follower.param_groups[number]["params"].append(parameter)
        follower.state.update(led.stand_in_state)
        try:
            yield
        finally:
            for number, parameter in led.stand_ins.items():
                follower.param_groups[number]["params"].clear()
                if (kept := follower.state.pop(parameter, None)) is not None:
                    led.stand_in_state[parameter] = kept

    @property
    def settings(self) -> FollowedSettings:
        """As they are now."""
        of_parameters = {name: vars(parameter) for name, parameter in self.names.items() if vars(parameter)}
        own = {key: _snapshot(value) for key, value in own_attributes(self.optimizer).items() if is_plain(value)}
        groups = [_snapshot(settings_of(group)) for group in self.optimizer.param_groups]
        return FollowedSettings(groups, own, _snapshot(of_parameters))

    @settings.setter
    def settings(self, settings: FollowedSettings) -> None:
        vars(self.optimizer).update(settings.own)
        for group, own in zip(self.optimizer.param_groups, settings.groups, strict=True):
            group.update(own)
        for name, of_parameter in settings.of_parameters.items():
            vars(self.names[name]).update(of_parameter)

    @property
    def kept(self) -> KeptSettings:
        """Settings, and what schedules keep: to be told to another process."""
        return self.settings, None if self.schedules is None else self.schedules.numbers()

    def take(self, kept: KeptSettings) -> None:
        """What another process told: settings, and what schedules keep where that is told too."""
        self.settings, numbers = kept
        if self.schedules is not None and numbers is not None:
            self.schedules.load(numbers)

    def lead(self, follower: torch.optim.Optimizer) -> None:
        """Gives ``follower`` the settings of the user's that changed since it got them last.

        Raises:
            UsageError: there are others by now.
        """
        groups = self.optimizer.param_groups
        if len(groups) != len(follower.param_groups):
            raise UsageError(
                f"the {type(self.optimizer).__name__} has {len(groups)} groups of parameters by now",
                [f"it had {len(follower.param_groups)} when the stages were made"],
                ["add all groups before"],
            )
        led = self._led[follower]
        now = self.settings
        vars(follower).update(_changed(now.own, led.last.own))
        for settings, last, own in zip(now.groups, led.last.groups, follower.param_groups, strict=True):
            own.update(_changed(settings, last))
        for name, twin in led.twins:
            changed = _changed(now.of_parameters.get(name, {}), led.last.of_parameters.get(name, {}))
            vars(twin.parameter).update(
                {key: twin.moved(key, value, self.names[name]) for key, value in changed.items()}
            )
        led.last = now

    def forget(self, follower: torch.optim.Optimizer) -> None:
        """Call when the user's groups got other settings than ``follower`` was given: it is given all of them anew."""
        led = self._led[follower]
        led.last = FollowedSettings([{} for _ in led.last.groups], {}, {})

    def updated(self) -> None:
        """Call once after each update, on every rank: steps the schedules."""
        note_step(self.optimizer)
        if self.schedules is not None:
            self.schedules.step()

    def require_values(self) -> None:
        """Raises :class:`UsageError` where what its code reads is another now than the ranks, elsewhere, were told."""
        require_same_values(type(self.optimizer).__name__, self._values, values_read(self.optimizer))

    def require_state(self) -> None:
        """Raises :class:`UsageError` where the script wrote what its object keeps since the run began."""
        if _writes(self.optimizer) != self._state_was:
            raise UsageError(
                f"the script has changed what its {type(self.optimizer).__name__} keeps, which the ranks do not see",
                ["they took its state over when the run began, and go on with their own"],
                ["optimizer.load_state_dict(...) before the run begins", "run.load_optimizer_state_dict(state)"],
            )

    def write(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """The user's object keeps ``state``, by the parameters' names, in place of what it kept for these."""
        for group in self.optimizer.param_groups:
            is_counted_there = bool(group.get("fused") or group.get("capturable"))
            own = {id(parameter) for parameter in group["params"]}
            for name, kept in state.items():
                parameter = self.names[name]
                if id(parameter) in own:
                    self.optimizer.state[parameter] = {
                        key: value.to(parameter.device)
                        if isinstance(value, Tensor) and (is_counted_there or key != STEP)
                        else value
                        for key, value in kept.items()
                    }
        self._state_was = _writes(self.optimizer)
        _LEFT_WITH_RANKS.pop(self.optimizer, None)

    def before_state_dict(self, do: Callable[[], None]) -> RemovableHandle:
        """Has ``do``, a method, called when the script asks its object for its state dict; keeps nothing alive."""
        method = WeakMethod(do)

        def ask(_: torch.optim.Optimizer) -> None:
            if (call := method()) is not None:
                call()

        return self.optimizer.register_state_dict_pre_hook(ask)

    def leave_with_ranks(self, reason: str) -> None:
        """Call where a run ends and its state cannot be written back: no other run begins with what it was before."""
        _LEFT_WITH_RANKS[self.optimizer] = reason, self._state_was


_LEFT_WITH_RANKS: WeakKeyDictionary[torch.optim.Optimizer, tuple[str, _Writes]] = WeakKeyDictionary()
"""Objects whose steps were made by ranks that have gone: why their state was not written back, and what they kept."""


def _writes(optimizer: torch.optim.Optimizer) -> _Writes:
    """Which values an optimiser keeps, and how often they were written."""
    of_parameters = [
        (id(parameter), kept) for parameter, kept in optimizer.state.items() if isinstance(parameter, Tensor)
    ]
    return {
        (number, key): (id(value), times_written(value) if isinstance(value, Tensor) else 0)
        for number, kept in (*of_parameters, ("", named_state(optimizer)))
        for key, value in kept.items()
    }


def _changed(now: Mapping[str, Any], last: Mapping[str, Any]) -> dict[str, Any]:
    return {key: copy.deepcopy(each) for key, each in now.items() if key not in last or _differ(each, last[key])}


def _snapshot(value: Any) -> Any:
    """What later writes leave alone; objects of the user's are themselves."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _snapshot(each) for key, each in value.items()}
    return [_snapshot(each) for each in value] if isinstance(value, list) else value


def _differ(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape != other.shape or not torch.equal(one, other)
    is_compared = type(one) is not type(other) or "__eq__" in vars(type(one)) or not hasattr(one, "__dict__")
    if not is_compared:
        return one is not other and _differ(vars(one), vars(other))  # another process has a copy
    return one is not other and bool(one != other)


def _stand_in(original: nn.Parameter, twins: Iterable[tuple[str, Twin]]) -> nn.Parameter:
    """A single zero of as many dims, where the stage computes."""
    device = next(twin.parameter.device for _, twin in twins)
    return nn.Parameter(torch.zeros((1,) * original.ndim, dtype=original.dtype, device=device))
