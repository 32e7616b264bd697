"""A stage's optimiser and its schedule: made by factories, stepped once an update, saved by the parameters' names.

A factory of optimisers takes the stage's parameters, as ``torch.optim.AdamW`` does.  One whose first argument is called
``named_parameters`` gets (name, parameter) pairs, so that it can make groups by name.  A factory of schedules takes the
optimiser, as ``torch.optim.lr_scheduler.CosineAnnealingLR`` does; every stage has a schedule of its own, in step with
the others.

Where the user gives an optimiser object, those of the stages *follow* it (:class:`Followed`).
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeGuard
from weakref import WeakKeyDictionary, WeakMethod

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.hooks import RemovableHandle

from cuda_ops._torch import has_step_hooks, note_step, optimizer_attributes, optimizer_like, times_written, tree_leaves
from planner.ir.errors import FactoryError, UnknownNameError, UsageError
from planner.ir.profile import Optimizer, spelled
from runtime.optim.sharding import (
    STEP,
    ParameterSlice,
    ShardedParameters,
    give_slices,
    require_apart,
    require_elementwise,
)

if TYPE_CHECKING:
    from runtime.spatial import Part, Parts

_Writes = dict[tuple[int, str], tuple[int, int]]

MakeOptimizer = Callable[[Iterable[Any]], torch.optim.Optimizer]
MakeScheduler = Callable[[torch.optim.Optimizer], LRScheduler] | LRScheduler
"""Makes a schedule; or the schedule of the optimiser that those of the stages follow."""

_NO_SETTINGS = ("params", "param_names")
_EMPTY = "optimizer got an empty parameter list"
"""What torch says where it is given no parameter."""


class StageOptimizer:
    """The optimiser of one stage on this rank.

    Args:
        parameters: by name; those that this stage updates.
        make: see the module; a parameter that it leaves out is not trained.
        sharded: some of the parameters in slices, of which the optimiser gets this rank's.
        parts: what this rank has of parameters, where it has not all of each; the factory sees these parts.
        is_alone: whether no other stage has parameters of the model.

    Attributes:
        optimizer: the user's.
        scheduler: None without one.
        tensors: what the optimiser steps on this rank, by the parameters' names: parameters, or slices of them.
        slices: by name, of those that are slices.
        parts: by name, of those that some rank has not all of.
        group_names: the names of each group's parameters, also where this rank has no slice of them.

    Raises:
        UsageError: the optimiser cannot be used: it asks for a closure, has foreign parameters, or has to be divided
            and looks at more than single elements.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        make: MakeOptimizer,
        sharded: ShardedParameters | None = None,
        parts: Parts | None = None,
        *,
        is_alone: bool = True,
    ) -> None:
        self.parts: Mapping[str, Part] = {name: part for name, part in (parts or {}).items() if part.is_divided}
        self._followed = make if isinstance(make, Followed) else None
        begun = make if self._followed is None else partial(self._followed, parts=self.parts)
        self.optimizer = _made(begun, parameters)
        self.scheduler: LRScheduler | None = None
        self._sharded = sharded
        names = {parameter: name for name, parameter in parameters.items()}
        _require_usable(self.optimizer, names)
        if not is_alone:
            require_apart(self.optimizer)
        groups = self.optimizer.param_groups
        self.group_names = tuple(tuple(names[parameter] for parameter in group["params"]) for group in groups)
        if self.parts:
            require_elementwise(self.optimizer, "a plan whose stages are cut along samples or space alone")
        self.slices: Mapping[str, ParameterSlice] = {}
        if sharded is not None:
            give_slices(self.optimizer, names, sharded)
            self.slices = sharded.slices
        trained = {parameter for group in groups for parameter in group["params"]}
        tensors = {**parameters, **{name: part.view for name, part in self.slices.items()}}
        self.tensors = {name: tensor for name, tensor in tensors.items() if tensor in trained}

    @property
    def state(self) -> Mapping[torch.Tensor, Any]:
        """What the optimiser keeps, by parameter or slice."""
        return self.optimizer.state

    def schedule(self, make: MakeScheduler) -> None:
        """Let a schedule set the learning rates from now on.

        Raises:
            UsageError: it follows a metric, which stages do not see.
        """
        scheduler = make if isinstance(make, LRScheduler) else make(self.optimizer)
        _require_counting(scheduler)
        self.scheduler = scheduler

    def step(self) -> None:
        """Update the parameters, then the learning rates; with slices, all ranks of the stage call this together."""
        if self._sharded is not None:
            self._sharded.follow()
        self.follow()
        self.optimizer.step()
        if self._sharded is not None:
            self._sharded.gather()
        if self.scheduler is not None and self._followed is None:
            self.scheduler.step()

    def follow(self) -> None:
        """Take over the settings of what is followed, as they are by now."""
        if self._followed is not None:
            self._followed.lead(self.optimizer)

    def loaded(self) -> None:
        """Call when groups were loaded from a checkpoint: what is followed gets their settings."""
        if self._followed is not None:
            self._followed.take(self.optimizer, [bool(names) for names in self.group_names])

    def learning_rates(self) -> tuple[float, ...]:
        """Of each group, for the next step; groups may have none."""
        self.follow()
        return tuple(float(group["lr"]) for group in self.optimizer.param_groups if "lr" in group)


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
        scheduler: made on ``optimizer``; stepped once an update (:meth:`updated`).

    Attributes:
        names: the model's parameters by all their names, once :meth:`recognise` was called.

    Raises:
        UsageError: it keeps more than groups and state by parameter, or hooks; or the schedule is another's, or follows
            a metric; or the ranks of an earlier run still have its state.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None = None) -> None:
        self.optimizer, self.scheduler = optimizer, scheduler
        self.names: Mapping[str, nn.Parameter] = {}
        self._kept: dict[torch.Tensor, Any] | None = None
        self._led: WeakKeyDictionary[torch.optim.Optimizer, list[dict[str, Any]]] = WeakKeyDictionary()
        self._state_was = _writes(optimizer)
        _require_divisible(optimizer)
        _require_counting(scheduler)
        reason, state_was = _LEFT_WITH_RANKS.get(optimizer, ("", None))
        if state_was == self._state_was:
            raise UsageError(
                f"the state of this {type(optimizer).__name__} stayed with the ranks of an earlier run",
                [reason],
                ["optimizer.load_state_dict(...)", "an optimiser object that is new"],
            )
        if scheduler is not None and scheduler.optimizer is not optimizer:
            raise UsageError(
                f"the {type(scheduler).__name__} was made on another optimiser than the {type(optimizer).__name__}",
                ["it would set learning rates that nothing uses"],
                ["give both: the optimiser, and the schedule that was made on it"],
            )

    def recognise(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Call before stages are made: the model's parameters by all their names.

        Raises:
            UsageError: the optimiser has others.
        """
        self.names = dict(parameters)
        known = {id(parameter) for parameter in parameters.values()}
        foreign = sum(id(p) not in known for group in self.optimizer.param_groups for p in group["params"])
        if foreign:
            raise UsageError(
                f"the {type(self.optimizer).__name__} has {foreign} parameters that are not the model's",
                [f"the model has {len(known)}"],
                ["make it of the parameters of the very module that is given"],
            )

    def as_it_is(self) -> Followed:
        """The same with a copy of what it keeps for each parameter, which later steps leave alone."""
        found = copy.copy(self)
        found._kept = {parameter: copy.deepcopy(state) for parameter, state in self.optimizer.state.items()}
        return found

    def __call__(
        self, named_parameters: Iterable[tuple[str, nn.Parameter]], parts: Parts = MappingProxyType({})
    ) -> torch.optim.Optimizer:
        """The optimiser of a stage, which has ``parts`` of some parameters."""
        here: dict[int, list[tuple[nn.Parameter, Part | None]]] = {}
        for name, parameter in named_parameters:
            here.setdefault(id(self.names.get(name)), []).append((parameter, parts.get(name)))
        state: dict[torch.Tensor, Any] = {}
        groups = []
        for group in self.optimizer.param_groups:
            own = [(given, *each) for given in group["params"] for each in here.get(id(given), ())]
            state.update((parameter, self._state(given, parameter, part)) for given, parameter, part in own)
            groups.append({**_without_parameters(group), "params": [parameter for _, parameter, _ in own]})
        kept: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        kept.update((parameter, each) for parameter, each in state.items() if each)
        found = optimizer_like(type(self.optimizer), optimizer_attributes(self.optimizer), groups, kept)
        self._led[found] = self.settings
        return found

    @property
    def settings(self) -> list[dict[str, Any]]:
        """Of each group."""
        return [_without_parameters(group) for group in self.optimizer.param_groups]

    @settings.setter
    def settings(self, settings: Sequence[Mapping[str, Any]]) -> None:
        for group, found in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(found)

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
        for settings, known, own in zip(now, before, follower.param_groups, strict=True):
            own.update(
                {key: value for key, value in settings.items() if key not in known or _differ(value, known[key])}
            )
        self._led[follower] = now

    def take(self, follower: torch.optim.Optimizer, has_names: Iterable[bool]) -> None:
        """Gets back the settings of those groups of which ``follower`` has parameters."""
        for group, own, is_there in zip(self.optimizer.param_groups, follower.param_groups, has_names, strict=True):
            if is_there:
                group.update(_without_parameters(own))
        self._led[follower] = self.settings

    def updated(self) -> None:
        """Call once after each update, on every rank: steps the schedule."""
        note_step(self.optimizer)
        if self.scheduler is not None:
            self.scheduler.step()

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

    def _state(self, given: nn.Parameter, parameter: nn.Parameter, part: Part | None) -> dict[str, Any]:
        """What was kept for ``given``, for what the stage has of it."""
        kept = self.optimizer.state if self._kept is None else self._kept
        found = dict(kept.get(given, {}))
        for key, value in found.items():
            if isinstance(value, torch.Tensor):
                found[key] = _moved(key, value, given, parameter, part)
        return found


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
    key: str, value: torch.Tensor, given: nn.Parameter, parameter: nn.Parameter, part: Part | None
) -> torch.Tensor:
    """What was kept for ``given``, for what a stage has of it."""
    if value.shape != given.shape or key == STEP:
        return value.clone()
    own = value if part is None else part.cut(value)
    return own.to(parameter.device, parameter.dtype if value.dtype == given.dtype else None, copy=True)


def maker_of(spec: Optimizer) -> MakeOptimizer:
    """Makes optimisers of the class of ``torch.optim`` and with the arguments that ``spec`` names.

    Raises:
        UnknownNameError: ``torch.optim`` has no such class.
        UsageError: when called: the class does not take the arguments.
    """
    cls = getattr(torch.optim, spec.name, None)
    if not isinstance(cls, type) or not issubclass(cls, torch.optim.Optimizer):
        raise UnknownNameError(
            f"torch.optim has no optimiser {spec.name!r}", [f"torch is {torch.__version__}"], ["SGD, Adam or AdamW"]
        )

    construct: Callable[..., torch.optim.Optimizer] = cls

    def make(parameters: Iterable[Any]) -> torch.optim.Optimizer:
        try:
            return construct(parameters, **spec.arguments)
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"torch.optim.{spec.name}({spelled(spec.arguments)}) cannot be made",
                [str(error)],
                [f"arguments of torch.optim.{spec.name}, as in {spec.name}:lr=0.01"],
            ) from error

    return make


def scheduler_maker_of(name: str, arguments: Mapping[str, Any]) -> MakeScheduler:
    """Makes schedules of the class of ``torch.optim.lr_scheduler`` that ``name`` says.

    Raises:
        UnknownNameError: there is no such class.
        UsageError: when called: the class does not take the arguments.
    """
    cls = getattr(torch.optim.lr_scheduler, name, None)
    if not _is_schedule(cls):
        known = [key for key, value in vars(torch.optim.lr_scheduler).items() if key[0] != "_" and _is_schedule(value)]
        raise UnknownNameError(f"torch.optim.lr_scheduler has no schedule {name!r}", [f"known: {', '.join(known)}"])

    construct: Callable[..., LRScheduler] = cls

    def make(optimizer: torch.optim.Optimizer) -> LRScheduler:
        try:
            return construct(optimizer, **arguments)
        except (TypeError, ValueError) as error:
            shown = ", ".join(f"{key}={value}" for key, value in arguments.items())
            raise UsageError(
                f"torch.optim.lr_scheduler.{name}({shown}) cannot be made",
                [str(error)],
                [f"its arguments, as in CosineAnnealingLR:T_max=100; those of {name} are in torch's manual"],
            ) from error

    return make


def _without_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _NO_SETTINGS}


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
    if beside and not _asks_for_closure(optimizer):
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


def _require_counting(scheduler: LRScheduler | None) -> None:
    if isinstance(scheduler, ReduceLROnPlateau):
        raise UsageError(
            "ReduceLROnPlateau follows a metric, which the ranks that do not make the loss do not have",
            remedies=[
                "a schedule that counts steps, such as CosineAnnealingLR:T_max=100",
                "in a script with an optimiser object of its own: leave it out, and call scheduler.step(loss) there",
            ],
        )


def _asks_for_closure(optimizer: torch.optim.Optimizer) -> bool:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _is_schedule(value: object) -> TypeGuard[type[LRScheduler]]:
    return isinstance(value, type) and issubclass(value, LRScheduler) and value is not LRScheduler


def _made(make: MakeOptimizer, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    given: list[Any] = list(parameters.items()) if takes_names(make) else list(parameters.values())
    try:
        optimizer = make(given)
    except (ValueError, FactoryError) as error:
        if _EMPTY not in f"{error} {error.__cause__}" or not given:
            raise
        raise UsageError(
            "the optimiser's factory chooses none of the parameters that it is given",
            [f"it was given {', '.join(parameters)}: each stage has an optimiser of its own", _EMPTY],
            [
                "make it of groups, which may be empty: torch.optim.AdamW([{'params': chosen}])",
                "in a script: an optimiser object, of parameters of the model",
            ],
        ) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"the optimiser's factory returned a {type(optimizer).__name__}",
            remedies=["return a torch.optim.Optimizer of the parameters that the factory is given"],
        )
    return optimizer


def takes_names(make: MakeOptimizer) -> bool:
    """Whether a factory is given (name, parameter) pairs."""
    try:
        return next(iter(inspect.signature(make).parameters), "") == "named_parameters"
    except (TypeError, ValueError):  # built in, without a signature
        return False


def _require_usable(optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]) -> None:
    name = type(optimizer).__name__
    if _asks_for_closure(optimizer):
        raise UsageError(
            f"{name} asks for a closure that computes the loss again, which a pipeline cannot give",
            [f"its step is {name}.step{inspect.signature(optimizer.step)}"],
            ["an optimiser that steps from gradients alone, such as SGD or AdamW"],
        )
    foreign = sum(parameter not in names for group in optimizer.param_groups for parameter in group["params"])
    if foreign:
        raise UsageError(
            f"{name} has {foreign} parameters that are not those the factory was given",
            ["the stage's gradients would not reach them"],
            ["make the optimiser of the factory's argument"],
        )
