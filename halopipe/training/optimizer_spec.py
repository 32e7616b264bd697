"""Optimisers and schedules as people write them.

    SGD    SGD:lr=0.1,momentum=0.9,nesterov=true    AdamW:lr=0.001,betas=(0.9,0.95),weight_decay=0.1
    recipes.py:adamw    pkg.recipes:adamw:lr=0.001,decay=0.1
    CosineAnnealingLR:T_max=100    MultiStepLR:milestones=(30,60)    recipes.py:warm_up:steps=500

Arguments are numbers, ``true``, ``false``, or several numbers in parentheses.  A factory is ``pkg.mod:function`` or
``path/file.py:function``; arguments may follow.  One of optimisers takes the parameters of a stage, or (name,
parameter) pairs if it calls them ``named_parameters``; one of schedules takes the optimiser.  Both are called once for
each stage, so what they do must depend on nothing else.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from halopipe.terminal import units
from planner.ir.errors import FactoryError, HalopipeError, UsageError
from planner.ir.profile import Argument, Optimizer, argument_faults, spelled

if TYPE_CHECKING:
    import torch

    from halopipe.run_spec.options import RunOptions
    from profiler.measure.child_process import Report
    from runtime.optim.optimizer import MakeOptimizer, MakeScheduler

_DEFAULTS: Mapping[str, Mapping[str, Argument]] = {
    "SGD": {"lr": 0.01, "momentum": 0.9},
    "Adam": {"lr": 0.001},
    "AdamW": {"lr": 0.001},
    "RMSprop": {"lr": 0.001},
    "Adagrad": {"lr": 0.01},
    "Adadelta": {"lr": 1.0},
    "Adafactor": {"lr": 0.01},
    "Adamax": {"lr": 0.002},
    "ASGD": {"lr": 0.01},
    "Muon": {"lr": 0.001},
    "NAdam": {"lr": 0.002},
    "RAdam": {"lr": 0.001},
    "Rprop": {"lr": 0.01},
}
OPTIMIZERS = tuple(_DEFAULTS)
"""Those of ``torch.optim`` that can be named; others need a factory."""

_STATE_PER_PARAMETER: Mapping[str, float] = {
    "SGD": 0.0,
    **dict.fromkeys(["ASGD", "Adagrad", "Muon", "RMSprop"], 1.0),
    **dict.fromkeys(["Adadelta", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Rprop"], 2.0),
}
"""Tensors of a parameter's size that ``torch.optim`` keeps for each (torch 2.13), without those of :data:`_ADDS`; that
of Adafactor depends on the shapes."""

_ADDS: Mapping[str, tuple[str, ...]] = {
    "SGD": ("momentum",),
    "RMSprop": ("momentum", "centered"),
    "Adam": ("amsgrad",),
    "AdamW": ("amsgrad",),
}
"""Arguments that add one more such tensor, unless they are 0 or false."""

_UNUSABLE: Mapping[str, tuple[str, str]] = {
    "LBFGS": ("asks for a closure that computes the loss again, which a pipeline cannot give", "SGD, AdamW"),
    "SparseAdam": ("takes sparse gradients, and those of stages are dense", "Adam"),
}
"""The others of ``torch.optim``: why they cannot be used, and what can."""

SCHEDULES = (
    "ConstantLR",
    "CosineAnnealingLR",
    "CosineAnnealingWarmRestarts",
    "CyclicLR",
    "ExponentialLR",
    "LinearLR",
    "MultiStepLR",
    "OneCycleLR",
    "PolynomialLR",
    "StepLR",
)
"""Those of ``torch.optim.lr_scheduler`` that numbers describe; others need a factory."""


@dataclass(frozen=True, slots=True)
class Scheduler:
    """A schedule of learning rates.

    Attributes:
        name: a class of ``torch.optim.lr_scheduler``, or a factory.
        arguments: of the class or factory; whole numbers are integers.
    """

    name: str
    arguments: Mapping[str, Argument] = field(default_factory=dict)


def parse_optimizer(text: str) -> Optimizer:
    """The optimiser that ``text`` spells; arguments that are given replace the defaults altogether.

    That of a factory is made and stepped once, to see how much state it keeps.

    Raises:
        UnknownNameError: it is neither a factory nor one of those whose state is known.
        UsageError: an argument is not ``key=number``, or the optimiser cannot be used.
        ModelNotFoundError: there is no such factory.
    """
    name, rest = _split(text, _DEFAULTS)
    if ":" in name:
        arguments = _parse_arguments(rest, text) if rest is not None else {}
        return Optimizer(name, arguments, _measured_state(make_optimizer_of(Optimizer(name, arguments))))
    if name in _UNUSABLE:
        reason, instead = _UNUSABLE[name]
        raise UsageError(f"{name} {reason}", [], [instead])
    units.require_known("optimiser", [name], list(_DEFAULTS))
    arguments = _parse_arguments(rest, "SGD:lr=0.1,nesterov=true") if rest is not None else dict(_DEFAULTS[name])
    require_meant(name, arguments)
    if name not in _STATE_PER_PARAMETER:
        return Optimizer(name, arguments, _measured_state(make_optimizer_of(Optimizer(name, arguments))))
    added = sum(bool(arguments.get(key)) for key in _ADDS.get(name, ()))
    return Optimizer(name, arguments, _STATE_PER_PARAMETER[name] + added)


def require_meant(name: str, arguments: Mapping[str, Any]) -> None:
    """Raises :class:`UsageError` where an optimiser's numbers cannot be meant: NaN, infinite, or out of range."""
    if faults := list(argument_faults(arguments)):
        example = spelled(_DEFAULTS.get(name, {"lr": 0.01}))
        raise UsageError(f"{name} cannot train with these numbers", faults, [f"{name}:{example}"])


def parse_scheduler(text: str) -> Scheduler:
    """The schedule that ``text`` spells.

    Raises:
        UnknownNameError: it is neither a factory nor one of :data:`SCHEDULES`.
        UsageError: an argument is not ``key=number``.
    """
    name, rest = _split(text, SCHEDULES)
    if ":" not in name:
        units.require_known("schedule of learning rates", [name], list(SCHEDULES))
    arguments = _parse_arguments(rest, "CosineAnnealingLR:T_max=100") if rest is not None else {}
    return Scheduler(name, {key: _whole(value) for key, value in arguments.items()})


def make_optimizer_of(spec: Optimizer) -> MakeOptimizer:
    """What makes the optimiser that ``spec`` names: a class of ``torch.optim``, or a factory.

    Raises:
        UnknownNameError, ModelNotFoundError: there is none.
        UsageError: when called: it does not take the arguments, or raises.
    """
    from runtime.optim.optimizer import maker_of

    return _calling(spec.name, spec.arguments) if ":" in spec.name else maker_of(spec)


def require_arguments(spec: Optimizer) -> None:
    """Makes the optimiser of a matrix once, so that arguments which it refuses are known before anything is measured.

    Raises:
        UsageError: it refuses them: names, or values such as a negative learning rate.
    """
    import torch

    require_meant(spec.name, spec.arguments if ":" not in spec.name else {})
    if ":" not in spec.name:  # a factory was tried when it was read
        make_optimizer_of(spec)([torch.nn.Parameter(torch.zeros(2, 2))])


def report_arguments(_: Report, spec: Optimizer) -> None:
    """:func:`require_arguments`, in a process of its own."""
    require_arguments(spec)


def spec_of(optimizer: str | torch.optim.Optimizer | MakeOptimizer) -> Optimizer:
    """What an optimiser is planned as: of ``torch.optim`` itself, else as AdamW with the state that it keeps."""
    import torch

    if isinstance(optimizer, str):
        return parse_optimizer(optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer):
        return replace(parse_optimizer("AdamW"), state_bytes_per_parameter_byte=_measured_state(optimizer))
    name = type(optimizer).__name__
    if getattr(torch.optim, name, None) is not type(optimizer) or name not in _DEFAULTS:
        return parse_optimizer("AdamW")
    accepted = inspect.signature(type(optimizer)).parameters
    arguments = {
        key: value
        for key, value in optimizer.defaults.items()
        if key in accepted and isinstance(value, (bool, int, float, tuple)) and value != accepted[key].default
    }
    return parse_optimizer(f"{name}:{spelled({'lr': float(optimizer.defaults['lr']), **arguments})}")


def make_scheduler_of(spec: Scheduler) -> MakeScheduler:
    """What makes the schedule that ``spec`` names; raises as :func:`make_optimizer_of`."""
    from runtime.optim.optimizer import scheduler_maker_of

    return _calling(spec.name, spec.arguments) if ":" in spec.name else scheduler_maker_of(spec.name, spec.arguments)


def makers_of(options: RunOptions, planned: Optimizer) -> tuple[MakeOptimizer, MakeScheduler | None]:
    """What makes the optimiser and the schedule of a run; the plan's optimiser unless another is asked for.

    Raises:
        UnknownNameError, ModelNotFoundError, UsageError: one of them is not known, or cannot be made.
    """
    spec = parse_optimizer(options.optimizer) if options.optimizer else planned
    schedule = make_scheduler_of(parse_scheduler(options.scheduler)) if options.scheduler else None
    return make_optimizer_of(spec), schedule


def _calling(name: str, arguments: Mapping[str, Argument]) -> Callable[[Any], Any]:
    from profiler.source.source import find_factory

    factory = functools.partial(find_factory(name), **arguments)

    @functools.wraps(factory)  # whoever looks at the signature sees the factory's
    def make(argument: Any) -> Any:
        try:
            return factory(argument)
        except HalopipeError:
            raise
        except Exception as error:
            raise FactoryError(
                f"{name}({spelled(arguments)}) raised {type(error).__name__}",
                [str(error)],
                ["mend it there; behind its name stand arguments: recipes.py:adamw:lr=0.001"],
            ) from error

    return make


def _measured_state(make: MakeOptimizer) -> float:
    """Bytes kept for each byte of a parameter, of a matrix and a vector of a thousand elements in all.

    Of a factory that chooses by other names than these two have, so much as of AdamW.
    """
    import torch

    from runtime.optim.optimizer import StageOptimizer, takes_names

    parameters = {"weight": torch.nn.Parameter(torch.zeros(30, 32)), "bias": torch.nn.Parameter(torch.zeros(40))}
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    try:
        optimizer = StageOptimizer(parameters, make)
    except UsageError:
        if not takes_names(make):
            raise
        return _STATE_PER_PARAMETER["AdamW"]
    if not optimizer.tensors:
        return _STATE_PER_PARAMETER["AdamW"]
    try:
        optimizer.step()
    except Exception as error:
        raise UsageError(
            f"{type(optimizer.optimizer).__name__} does not step from gradients alone",
            [f"its step raised {type(error).__name__}: {error}"],
            ["an optimiser whose step needs no closure and no parameters of its own, such as SGD or AdamW"],
        ) from error
    values = [value for state in optimizer.state.values() for value in state.values()]
    kept = sum(value.nbytes for value in values if isinstance(value, torch.Tensor) and value.numel() > 1)
    return float(kept / sum(parameter.nbytes for parameter in parameters.values()))


def _split(text: str, builtin: Mapping[str, Any] | tuple[str, ...]) -> tuple[str, str | None]:
    """Name (or ``place:function``) and arguments, None if there are none."""
    head, colon, rest = text.partition(":")
    if not colon or head in builtin or head in _UNUSABLE:
        return head, rest if colon else None
    function, colon, arguments = rest.partition(":")
    if "=" in function or not function:
        return head, rest
    return f"{head}:{function}", arguments if colon else None


_SEPARATOR = re.compile(r",(?![^(]*\))")
"""A comma that is not in parentheses."""


def _parse_arguments(text: str, example: str) -> dict[str, Argument]:
    arguments = {}
    for pair in _SEPARATOR.split(text):
        try:
            key, value = units.parse_pair(pair)
            if not key.isidentifier():
                raise ValueError(key)
            arguments[key] = _argument(value)
        except ValueError:
            raise UsageError(
                f"argument {pair!r} is not key=number", ["nor key=true, key=false, key=(number,number)"], [example]
            ) from None
    return arguments


def _argument(text: str) -> Argument:
    """Raises ValueError where it is none."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text.startswith("(") and text.endswith(")"):
        return tuple(float(each) for each in text[1:-1].rstrip(", ").split(","))
    return int(text) if text.isdecimal() else float(text)


def _whole(value: Argument) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_whole, value))
    return int(value) if isinstance(value, float) and value.is_integer() else value
