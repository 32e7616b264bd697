"""An optimiser object of the user's as a whole: what it holds on to, what of that can go along, and copies of it.

    object        groups and state by parameter; attributes; numbers under names in its state; attributes of parameters
    copied        the same of other parameters: all of them (one device), or those of a stage, whole or in part
    refused       by name: what would still be of the first object or of its parameters after that

Torch's own ``copy.deepcopy`` leaves out all but groups and state, and the attributes of parameters.
"""

from __future__ import annotations

import copy
import inspect
import os
import sys
import sysconfig
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from cuda_ops._torch import has_step_hooks, optimizer_attributes, optimizer_like
from planner.ir.errors import UsageError
from runtime.optim.sharding import STEP

NO_SETTINGS = ("params", "param_names")
"""What of a group says which parameters it has."""

_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}", sysconfig.get_path("stdlib"))
_NOT_FOLLOWED = frozenset({"torch", "numpy", *sys.stdlib_module_names} - {"__main__"})
_MOST_FOLLOWED = 10_000


class ParameterCut(Protocol):
    """A part of a parameter."""

    def cut(self, tensor: Tensor) -> Tensor:
        """The same part of a tensor of the parameter's shape."""


@dataclass(frozen=True, slots=True)
class Twin:
    """What stands for a parameter of the user's object in a copy of it.

    Attributes:
        part: of the whole that ``parameter`` is; None: all of it.
    """

    parameter: nn.Parameter
    part: ParameterCut | None = None

    def attributes(self, original: nn.Parameter) -> dict[str, Any]:
        """What people put on ``original``, for what there is of it here."""
        return {key: self.moved(key, copy.deepcopy(value), original) for key, value in vars(original).items()}

    def moved(self, key: str, value: Any, original: nn.Parameter) -> Any:
        """What was kept for ``original``, for what there is of it here."""
        if not isinstance(value, Tensor):
            return value
        if value.shape != original.shape or key == STEP:
            return value.clone()
        own = value if self.part is None else self.part.cut(value)
        dtype = self.parameter.dtype if value.dtype == original.dtype else None
        return own.to(self.parameter.device, dtype, copy=True)


Twins = Mapping[int, Sequence[Twin]]
"""By the ids of parameters."""


def copied(optimizer: torch.optim.Optimizer, twins: Twins) -> torch.optim.Optimizer:
    """The same object of other parameters; those without a twin leave their groups, with their state.

    Raises:
        UsageError: it holds on to what cannot be copied.
    """
    copy_of = type(optimizer).__new__(type(optimizer))
    memo: dict[int, Any] = {number: own[0].parameter for number, own in twins.items()}
    memo[id(optimizer)] = copy_of
    groups = []
    state: defaultdict[Any, Any] = defaultdict(dict)
    try:
        for group in optimizer.param_groups:
            own = [(original, twin) for original in group["params"] for twin in twins.get(id(original), ())]
            for original, twin in own:
                if twin.parameter is not original:
                    vars(twin.parameter).update(twin.attributes(original))
                if kept := optimizer.state.get(original):
                    state[twin.parameter] = {
                        key: twin.moved(key, copy.deepcopy(value, memo), original) for key, value in kept.items()
                    }
            groups.append({**copy.deepcopy(settings_of(group), memo), "params": [twin.parameter for _, twin in own]})
        state.update(copy.deepcopy(named_state(optimizer), memo))
        attributes = copy.deepcopy(optimizer_attributes(optimizer), memo)
    except Exception as error:
        raise UsageError(
            f"this {type(optimizer).__name__} cannot be copied, and each stage has one like it",
            [f"{type(error).__name__}: {error}"],
            ["keep numbers on it, and what is of a parameter in its state"],
        ) from error
    optimizer_like(copy_of, attributes, groups, state)
    return copy_of


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """All of a group but its parameters."""
    return {key: value for key, value in group.items() if key not in NO_SETTINGS}


def named_state(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    """What its state has under names, and not for a parameter."""
    return {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}


def own_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Those that a user gave it, beside the defaults of its groups and what torch notes on every optimiser."""
    attributes = optimizer_attributes(optimizer)
    return {key: value for key, value in attributes.items() if key != "defaults" and not key.startswith(_TORCHS)}


def is_plain(value: Any) -> bool:
    """Whether it is numbers and texts, which can be written down."""
    if isinstance(value, dict):
        return all(is_plain(key) and is_plain(each) for key, each in value.items())
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return isinstance(value, int | float | complex | str | None)


_TORCHS = ("_zero_grad_profile_name", "_warned_capturable", "_need_device_dtype_check", "_step_supports_amp")


def require_copies_alike(optimizer: torch.optim.Optimizer) -> None:
    """Refuses an object whose copies, of other parameters, would do something else.

    Raises:
        UsageError: methods were replaced, it keeps ids or tensors beside its state, or has hooks around its steps.
    """
    _require_own_methods(optimizer)
    _require_no_ids(optimizer)
    _require_state_by_parameter(optimizer)
    if has_step_hooks(optimizer):
        name = type(optimizer).__name__
        raise UsageError(
            f"this {name} has hooks around its steps, and each stage makes a step of its own",
            [],
            [
                "take the hooks off, and do after run.step(batch) what they do",
                f"what is to happen to gradients: a subclass of {name} whose step does it, then super().step()",
            ],
        )


def values_read(optimizer: torch.optim.Optimizer) -> list[tuple[str, str]]:
    """Numbers and texts that the code of its class reads: attributes of the class, global variables, closures."""
    reached = (each for each in _reached(optimizer) if each.is_code and not each.in_object)
    return sorted({(each.name, repr(each.value)) for each in reached if isinstance(each.value, int | float | str)})


def require_same_values(name: str, then: Sequence[tuple[str, str]], now: Sequence[tuple[str, str]]) -> None:
    """Raises :class:`UsageError` where the code of the optimiser ``name`` reads others in the script than in ranks."""
    if differing := [each for each in now if each not in then]:
        place, value = differing[0]
        there = [each for own, each in then if own == place]
        raise UsageError(
            f"the code of this {name} reads values that the script has changed, which the ranks do not see",
            [f"{place}: {value} in the script, {', '.join(there) or 'not there'} in the ranks"],
            ["an attribute of the optimiser, or a setting of its groups: both go along"],
        )


def _require_own_methods(optimizer: torch.optim.Optimizer) -> None:
    cls = type(optimizer)
    own = [key for key, value in vars(optimizer).items() if callable(value) and _is_replaced(cls, key, value)]
    patched = [
        f"{each.__name__}.{key}"
        for each in cls.__mro__
        for key, value in vars(each).items()
        if isinstance(value, FunctionType) and _module(value) != each.__module__ and _is_foreign(each, value)
    ]
    if own or patched:
        method = (own or patched)[0]
        where = "on the object" if own else "in its class"
        plain = method.rpartition(".")[2]
        raise UsageError(
            f"{method} was replaced {where} of this {cls.__name__}, and each stage has an object of its own",
            [f"replaced: {', '.join(own + patched)}"],
            [
                f"a subclass of {cls.__name__} whose {plain} does it to its groups' parameters, then super().{plain}()",
                "clip_norm=... in place of clip_grad_norm_ in a step",
            ],
        )


def _is_replaced(cls: type, key: str, value: Any) -> bool:
    of_class = inspect.getattr_static(cls, key, None)
    return isinstance(of_class, FunctionType) and _root(value) is not _root(of_class)


def _is_foreign(cls: type, function: FunctionType) -> bool:
    """Whether a script has put a method of its own into a class that is not the script's."""
    is_torchs = cls.__module__.partition(".")[0] == "torch" and _module(function).partition(".")[0] != "torch"
    return is_torchs or _module(function) == "__main__"


def _root(method: Any) -> Any:
    """What schedules, profilers and bound methods wrap."""
    return inspect.unwrap(getattr(method, "__func__", method))


def _module(function: FunctionType) -> str:
    return str(getattr(_root(function), "__module__", "") or "")


def _require_no_ids(optimizer: torch.optim.Optimizer) -> None:
    of_parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    places = [each.name for each in _reached(optimizer) if type(each.value) is int and each.value in of_parameters]
    if places:
        raise UsageError(
            f"this {type(optimizer).__name__} goes by ids of parameters, and those of the stages have others",
            [f"they are in {', '.join(dict.fromkeys(places))}"],
            [
                "an attribute of each parameter, which goes along: parameter.lr_scale = 0.5",
                "groups of parameters with settings of their own",
            ],
        )


def _require_state_by_parameter(optimizer: torch.optim.Optimizer) -> None:
    name = type(optimizer).__name__
    of_parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}

    def is_foreign(each: _Reached) -> bool:
        value = each.value
        if each.is_code:
            parameters = value.parameters() if isinstance(value, nn.Module) else (value,)
            return value is optimizer or any(id(one) in of_parameters for one in parameters)
        if isinstance(value, Tensor):
            return not (each.may_count and value.numel() == 1)
        return value is not optimizer and isinstance(value, nn.Module | torch.optim.Optimizer)

    foreign = list(dict.fromkeys(each.name for each in _reached(optimizer) if is_foreign(each)))
    if foreign and not asks_for_closure(optimizer):
        raise UsageError(
            f"this {name} cannot be divided over stages",
            [f"it keeps {', '.join(foreign)} beside its groups and the state of each parameter"],
            ["give a function that makes one of a stage's parameters: lambda parameters: ..."],
        )


def asks_for_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step cannot do without a function that computes the loss again."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


@dataclass(frozen=True, slots=True)
class _Reached:
    """What an optimiser holds on to.

    Attributes:
        name: how it is reached, as a user has it.
        is_code: whether by a function: its closure, or a global variable that it reads.
        may_count: whether a tensor here may be one number: a setting of a group, or one under a name in the state.
        in_object: whether it is an attribute of some other object.
    """

    name: str
    value: Any
    is_code: bool = False
    may_count: bool = False
    in_object: bool = False

    def inner(self, name: str, value: Any, *, is_code: bool = False, in_object: bool = False) -> _Reached:
        return _Reached(name, value, self.is_code or is_code, self.may_count, self.in_object or in_object)


def _reached(optimizer: torch.optim.Optimizer) -> Iterator[_Reached]:
    """All that its attributes, its groups' settings, names in its state, and the code of its class hold on to."""
    waiting = [_Reached(key, value) for key, value in own_attributes(optimizer).items()]
    for number, group in enumerate(optimizer.param_groups):
        settings = settings_of(group).items()
        waiting += [_Reached(f"param_groups[{number}][{key!r}]", value, may_count=True) for key, value in settings]
    for key, value in named_state(optimizer).items():
        waiting += [_Reached("the keys of its state", key), _Reached(f"state[{key!r}]", value, may_count=True)]
    waiting += [
        _Reached(f"{cls.__name__}.{key}", getattr(value, "__func__", getattr(value, "fget", value)), is_code=True)
        for cls in type(optimizer).__mro__
        if cls.__module__.partition(".")[0] not in ("torch", "builtins")
        for key, value in vars(cls).items()
        if not key.startswith("__") or isinstance(value, FunctionType)
    ]
    visited: dict[int, Any] = {id(optimizer): optimizer}  # by id; holds them, so that no id is used twice
    while waiting:
        each = waiting.pop()
        yield each
        is_plain = isinstance(each.value, str | bytes | int | float | type | ModuleType | Tensor | nn.Module)
        if not is_plain and id(each.value) not in visited and len(visited) < _MOST_FOLLOWED:
            visited[id(each.value)] = each.value
            waiting += _inside(each)


def _inside(each: _Reached) -> list[_Reached]:
    name = each.name
    value = each.value
    if isinstance(value, Mapping):
        return [one for key, own in value.items() for one in (each.inner(name, key), each.inner(name, own))]
    if isinstance(value, list | tuple | set | frozenset | deque):
        return [each.inner(name, own) for own in value]
    if isinstance(value, MethodType):
        return [each.inner(name, value.__self__), each.inner(name, value.__func__)]
    if isinstance(value, partial):
        return [each.inner(name, own) for own in (value.func, *value.args, *value.keywords.values())]
    if isinstance(value, FunctionType):
        return [each.inner(place, own, is_code=True) for place, own in _held_by(_root(value))]
    is_followed = type(value).__module__.partition(".")[0] not in _NOT_FOLLOWED
    own = getattr(value, "__dict__", {}) if is_followed else {}
    return [each.inner(f"{name}.{key}", one, in_object=True) for key, one in own.items()]


def _held_by(function: Any) -> Iterator[tuple[str, Any]]:
    """What a function of a user's has in its closure and defaults, and the global variables that it reads."""
    code = getattr(function, "__code__", None)
    if code is None or any(folder in code.co_filename for folder in _INSTALLED):
        return
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"{name}, which {function.__qualname__} reads", cell.cell_contents
        except ValueError:  # it is empty
            continue
    yield f"the defaults of {function.__qualname__}", (function.__defaults__, function.__kwdefaults__)
    variables = {name for each in _codes(code) for name in each.co_names} & function.__globals__.keys()
    for name in sorted(variables):
        yield f"{name}, which {function.__qualname__} reads", function.__globals__[name]


def _codes(code: CodeType) -> Iterator[CodeType]:
    """It, and that of functions inside."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def once(parameters: Iterable[nn.Parameter]) -> Twins:
    """Each stands for itself."""
    return {id(parameter): (Twin(parameter),) for parameter in parameters}
