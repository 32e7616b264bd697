"""A stage's optimiser and its schedule: made by factories, stepped once an update, saved by the parameters' names.

A factory of optimisers takes the stage's parameters, as ``torch.optim.AdamW`` does.  One whose first argument is called
``named_parameters`` gets (name, parameter) pairs, so that it can make groups by name.  A factory of schedules takes the
optimiser, as ``torch.optim.lr_scheduler.CosineAnnealingLR`` does; every stage has a schedule of its own, in step with
the others.

Where the user gives an optimiser object, those of the stages *follow* it (:mod:`runtime.optim.followed`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from planner.ir.errors import FactoryError, UnknownNameError, UsageError
from planner.ir.profile import Optimizer, spelled
from runtime.optim.coupling import require_apart
from runtime.optim.followed import Followed
from runtime.optim.schedules import Schedules, SteppedElsewhere, schedules_of
from runtime.optim.sharding import ParameterSlice, ShardedParameters, give_slices, require_elementwise
from runtime.optim.user_object import asks_for_closure

if TYPE_CHECKING:
    from runtime.spatial import ParameterPart, ParameterParts

MakeOptimizer = Callable[[Iterable[Any]], torch.optim.Optimizer]
MakeScheduler = Callable[[torch.optim.Optimizer], LRScheduler | Sequence[LRScheduler]]
"""Makes a schedule, or several that are stepped one after another."""

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
        schedules: None without any; where an optimiser object is followed, that object's.
        followed: the user's optimiser object; None without one.
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
        parts: ParameterParts | None = None,
        *,
        is_alone: bool = True,
    ) -> None:
        self.parts: Mapping[str, ParameterPart] = {
            name: part for name, part in (parts or {}).items() if part.is_divided
        }
        self.followed = make if isinstance(make, Followed) else None
        begun = make if self.followed is None else partial(self.followed, parts=self.parts)
        self.optimizer = _made(begun, parameters)
        self.schedules: Schedules | SteppedElsewhere | None = None if self.followed is None else self.followed.schedules
        self._sharded = sharded
        names = {parameter: name for name, parameter in parameters.items()}
        _require_usable(self.optimizer, names)
        whole = self.optimizer if self.followed is None else self.followed.optimizer
        require_apart(whole, next(iter(parameters.values())).device, is_alone=is_alone)
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
    def state(self) -> Mapping[Tensor, Any]:
        """What the optimiser keeps, by parameter or slice."""
        return self.optimizer.state

    def schedule(self, make: MakeScheduler) -> None:
        """Let a schedule set the learning rates from now on.

        Raises:
            UsageError: it follows a metric, which stages do not see; or it is none.
        """
        self.schedules = schedules_of(make(self.optimizer))

    def step(self) -> None:
        """Update the parameters, then the learning rates; with slices, all ranks of the stage call this together."""
        if self._sharded is not None:
            self._sharded.follow()
        self.follow()
        with nullcontext() if self.followed is None else self.followed.filled(self.optimizer):
            self.optimizer.step()
        if self._sharded is not None:
            self._sharded.gather()
        if self.schedules is not None and self.followed is None:
            self.schedules.step()

    def follow(self) -> None:
        """Take over the settings of what is followed, as they are by now."""
        if self.followed is not None:
            self.followed.lead(self.optimizer)

    def loaded(self) -> None:
        """Call when groups were loaded from a checkpoint, and those of what is followed as well."""
        if self.followed is not None:
            self.followed.forget(self.optimizer)

    def learning_rates(self) -> tuple[float, ...]:
        """Of each group, for the next step; groups may have none, or one that each step finds by itself."""
        self.follow()
        rates = (group.get("lr") for group in self.optimizer.param_groups)
        return tuple(float(rate) for rate in rates if rate is not None)


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
        names = [key for key, value in vars(torch.optim.lr_scheduler).items() if key[0] != "_" and _is_schedule(value)]
        raise UnknownNameError(f"torch.optim.lr_scheduler has no schedule {name!r}", [f"known: {', '.join(names)}"])

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


def _is_schedule(value: object) -> TypeGuard[type[LRScheduler]]:
    return isinstance(value, type) and issubclass(value, LRScheduler) and value is not LRScheduler


def _made(make: MakeOptimizer, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    listed: list[Any] = list(parameters.items()) if takes_names(make) else list(parameters.values())
    try:
        optimizer = make(listed)
    except (ValueError, FactoryError) as error:
        if _EMPTY not in f"{error} {error.__cause__}" or not listed:
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
    if asks_for_closure(optimizer):
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
