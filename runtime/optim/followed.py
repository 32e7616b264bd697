"""An optimiser object of the user's, which the optimisers of all stages follow.

user's object     groups, attributes, state by parameter          learning rates, by a schedule or the script
begin               v            v              v (whole, a slice, a box)           v
stage's optimiser   its own parameters of each group, what was kept for them;  before each update: new settings
end                                             v
user's object                               state by parameter, once the run is over
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakMethod

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from cuda_ops._torch import (
    has_step_hooks,
    note_step,
    optimizer_attributes,
    optimizer_like,
    times_written,
    tree_leaves,
)
from planner.ir.errors import UsageError
from runtime.optim.schedules import Schedules, Settings, SteppedElsewhere
from runtime.optim.sharding import STEP

if TYPE_CHECKING:
    from runtime.spatial.parameters import ParameterPart, Parts

_NO_SETTINGS = ("params", "param_names")

_Writes = dict[tuple[int, str], tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Described:
    """An optimiser without its parameters, which are named instead.

    Attributes:
        attributes: what it has beside groups and state.
        groups: ``params`` are names.
        state: by name.
    """

    cls: type[torch.optim.Optimizer]
    attributes: Mapping[str, Any]
    groups: Sequence[Mapping[str, Any]]
    state: Mapping[str, Any]

    def made(self, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        """The same optimiser of these parameters."""
        groups = [{**group, "params": [parameters[name] for name in group["params"]]} for group in self.groups]
        state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        state.update((parameters[name], kept) for name, kept in self.state.items())
        return optimizer_like(self.cls, self.attributes, groups, state)


class Followed:
    """An optimiser object of the user's, which those of all stages follow; makes them.

    Each is of its class, with its attributes and all of its groups, of which it has the stage's own parameters, with
    what was kept for them so far.  Before each update it takes over what changed in the user's groups: whatever the
    script or a schedule did to them (learning rates) holds, and what its own steps write there, such as a number of
    steps, stays.  The user's object itself never steps; what the stages keep is written back into it
    (:func:`runtime.optim.optimizer_state.give_back`), so that another run or a loop of the user's own goes on with it.

    Args:
        schedules: made on ``optimizer``; stepped once an update (:meth:`updated`).

    Attributes:
        names: the model's parameters by all their names, once :meth:`recognise` was called.

    Raises:
        UsageError: it keeps more than groups and state by parameter, or hooks; or a schedule is another's; or the ranks
            of an earlier run still have its state.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, schedules: Schedules | SteppedElsewhere | None = None) -> None:
        self.optimizer, self.schedules = optimizer, schedules
        self.names: Mapping[str, nn.Parameter] = {}
        self._kept: dict[torch.Tensor, Any] | None = None
        self._led: WeakKeyDictionary[torch.optim.Optimizer, list[dict[str, Any]]] = WeakKeyDictionary()
        self._state_was = _writes(optimizer)
        _require_divisible(optimizer)
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
        """The same with a copy of what it keeps for each parameter, which later steps leave alone."""
        snapshot = copy.copy(self)
        snapshot._kept = {parameter: copy.deepcopy(state) for parameter, state in self.optimizer.state.items()}
        return snapshot

    def __call__(
        self, named_parameters: Iterable[tuple[str, nn.Parameter]], parts: Parts = MappingProxyType({})
    ) -> torch.optim.Optimizer:
        """The optimiser of a stage, which has ``parts`` of some parameters."""
        here: dict[int, list[tuple[nn.Parameter, ParameterPart | None]]] = {}
        for name, parameter in named_parameters:
            here.setdefault(id(self.names.get(name)), []).append((parameter, parts.get(name)))
        state: dict[torch.Tensor, Any] = {}
        groups = []
        for group in self.optimizer.param_groups:
            own = [(original, *each) for original in group["params"] for each in here.get(id(original), ())]
            state.update((parameter, self._state(original, parameter, part)) for original, parameter, part in own)
            groups.append({**_without_parameters(group), "params": [parameter for _, parameter, _ in own]})
        kept: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        kept.update((parameter, each) for parameter, each in state.items() if each)
        follower = optimizer_like(type(self.optimizer), optimizer_attributes(self.optimizer), groups, kept)
        self._led[follower] = _copied(self.settings)
        return follower

    @property
    def settings(self) -> list[dict[str, Any]]:
        """Of each group."""
        return [_without_parameters(group) for group in self.optimizer.param_groups]

    @settings.setter
    def settings(self, settings: Sequence[Mapping[str, Any]]) -> None:
        for group, own in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(own)

    @property
    def kept(self) -> Settings:
        """Settings, and what schedules keep: to be told to another process."""
        return self.settings, None if self.schedules is None else self.schedules.numbers()

    def take(self, kept: Settings) -> None:
        """What another process told: settings, and what schedules keep where that is told too."""
        self.settings, numbers = kept
        if self.schedules is not None and numbers is not None:
            self.schedules.load(numbers)

    def described(self) -> Described:
        """For another process, once parameters were recognised."""
        name_of = {id(parameter): name for name, parameter in self.names.items()}
        return Described(
            type(self.optimizer),
            optimizer_attributes(self.optimizer),
            [
                {**settings, "params": [name_of[id(parameter)] for parameter in group["params"]]}
                for settings, group in zip(self.settings, self.optimizer.param_groups, strict=True)
            ],
            {name_of[id(parameter)]: dict(state) for parameter, state in self.optimizer.state.items()},
        )

    def lead(self, follower: torch.optim.Optimizer) -> None:
        """Gives ``follower`` the settings of the user's groups that changed since it got them last.

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
        now = self.settings
        before = self._led.get(follower, [{}] * len(now))
        for settings, last, own in zip(now, before, follower.param_groups, strict=True):
            own.update({key: value for key, value in settings.items() if key not in last or _differ(value, last[key])})
        self._led[follower] = _copied(now)

    def forget(self, follower: torch.optim.Optimizer) -> None:
        """Call when the user's groups got other settings than ``follower`` was given: it is given all of them anew."""
        self._led.pop(follower, None)

    def updated(self) -> None:
        """Call once after each update, on every rank: steps the schedules."""
        note_step(self.optimizer)
        if self.schedules is not None:
            self.schedules.step()

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
                        if isinstance(value, torch.Tensor) and (is_counted_there or key != STEP)
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

    def _state(self, original: nn.Parameter, parameter: nn.Parameter, part: ParameterPart | None) -> dict[str, Any]:
        """What was kept for ``original``, for what the stage has of it."""
        kept = self.optimizer.state if self._kept is None else self._kept
        state = dict(kept.get(original, {}))
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                state[key] = _moved(key, value, original, parameter, part)
        return state


_LEFT_WITH_RANKS: WeakKeyDictionary[torch.optim.Optimizer, tuple[str, _Writes]] = WeakKeyDictionary()
"""Objects whose steps were made by ranks that have gone: why their state was not written back, and what they kept."""


def _writes(optimizer: torch.optim.Optimizer) -> _Writes:
    """Which values an optimiser keeps, and how often they were written."""
    return {
        (id(parameter), key): (id(value), times_written(value) if isinstance(value, torch.Tensor) else 0)
        for parameter, kept in optimizer.state.items()
        for key, value in kept.items()
    }


def _moved(
    key: str, value: torch.Tensor, original: nn.Parameter, parameter: nn.Parameter, part: ParameterPart | None
) -> torch.Tensor:
    """What was kept for ``original``, for what a stage has of it."""
    if value.shape != original.shape or key == STEP:
        return value.clone()
    own = value if part is None else part.cut(value)
    return own.to(parameter.device, parameter.dtype if value.dtype == original.dtype else None, copy=True)


def _without_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _NO_SETTINGS}


def _copied(settings: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """As they are now: a schedule writes into a learning rate that is a tensor."""
    return [
        {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in group.items()}
        for group in settings
    ]


def _differ(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return not torch.equal(one, other)
    return one is not other and bool(one != other)


def _require_divisible(optimizer: torch.optim.Optimizer) -> None:
    name, ours = type(optimizer).__name__, ("param_groups", "state", "defaults")
    beside = [
        key
        for key, value in vars(optimizer).items()
        if key not in ours
        and any(isinstance(each, torch.Tensor | nn.Module | torch.optim.Optimizer) for each in tree_leaves(value))
    ]
    if beside and not asks_for_closure(optimizer):
        raise UsageError(
            f"this {name} cannot be divided over stages",
            [f"it keeps {', '.join(beside)} beside its groups and the state of each parameter"],
            ["give a function that makes one of a stage's parameters: lambda parameters: ..."],
        )
    if has_step_hooks(optimizer):
        raise UsageError(
            f"this {name} has hooks around its steps, and each stage makes a step of its own",
            [],
            [
                "take the hooks off, and do after run.step(batch) what they do",
                f"what is to happen to gradients: a subclass of {name} whose step does it, then super().step()",
            ],
        )


def asks_for_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step cannot do without a function that computes the loss again."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
