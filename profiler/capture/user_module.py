"""The user's module as it was, whatever a capture made of it: modes, buffers, attributes, gradients, random state.

What ``torch.export`` would lose of a model's own code: autograd Functions, checkpoints, hooks on gradients.

Functions are captured as one operator each (:mod:`cuda_ops.dense.user_functions`), and so are the functions that a
model registers on its own tensors; checkpoints are captured as what they wrap, since plans say what is computed again.
Hooks on modules and parameters that act on gradients are refused: their gradients are those of a whole batch on one
device, and here come a micro-batch and a share of the weights at a time.
"""

from __future__ import annotations

import linecache
import random
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from cuda_ops._torch import (
    SingleLevelFunction,
    TorchDispatchMode,
    schema_of,
    storage_id,
    times_written,
    tree_flatten,
    tree_map,
)
from cuda_ops.dense.user_functions import USER_FUNCTION, PlacedArgument, UserFunction, apply, registered
from planner.ir.errors import UnsupportedModelError
from profiler.capture.user_state import OUTSIDE, UserState, is_users


@contextmanager
def untouched(*owners: Any, state: UserState | None = None) -> Iterator[None]:
    """Puts back what is done to ``owners`` within: whatever forward or ``eval()`` changes, and who draws numbers.

    Owners are modules and loss functions.  For what is put back of them see :mod:`profiler.capture.user_state`.

    Args:
        state: that they are in, for who knows it: it takes a while to find all that a large model keeps.
    """
    state = UserState(owners) if state is None else state
    modules = [owner for owner in owners if isinstance(owner, nn.Module)]
    gradients = [(p, p.grad, p.requires_grad) for module in modules for p in module.parameters()]
    drawn = _generators()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            state.restore()
            for parameter, gradient, is_trained in gradients:
                parameter.grad = gradient
                parameter.requires_grad_(is_trained)
            random.setstate(drawn[0])
            if drawn[1] is not None:
                sys.modules["numpy.random"].set_state(drawn[1])


def drawn_so_far() -> tuple[object, object]:
    """The states of the generators of Python and numpy, to be compared: user code between two of them may draw."""
    python, numpy = _generators()
    return python, None if numpy is None else (numpy[0], numpy[1].tobytes(), *numpy[2:])


def _generators() -> tuple[Any, Any]:
    """The states of the generators of Python and numpy; of the latter None while nobody has loaded it."""
    numpy: Any = sys.modules.get("numpy.random")
    return random.getstate(), None if numpy is None else numpy.get_state()


@contextmanager
def kept_state(*owners: Any, state: UserState | None = None) -> Iterator[None]:
    """:func:`untouched`, and the values of parameters put back."""
    with untouched(*owners, state=state), kept_parameters(*(owner for owner in owners if isinstance(owner, nn.Module))):
        yield


@contextmanager
def kept_parameters(*modules: nn.Module) -> Iterator[None]:
    """Puts back the values of parameters that are written within, as those of a teacher that follows its student."""
    aliases = [(parameter, parameter.detach()) for module in modules for parameter in module.parameters()]
    written = _Written({storage_id(alias): alias for _, alias in aliases})
    try:
        with written:
            yield
    finally:
        for alias, value in written.before:
            alias.copy_(value)
        for parameter, alias in aliases:
            if storage_id(parameter) != storage_id(alias):
                parameter.data = alias


class _Written(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not type it
    """Keeps what parameters held before they are written to.

    Attributes:
        before: parameters, and their values then.
    """

    def __init__(self, by_storage: dict[int, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not type it
        self._by_storage = by_storage
        self.before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = schema_of(func)
        for about, value in zip(schema.arguments if schema is not None else (), args, strict=False):
            if about.alias_info is not None and about.alias_info.is_write and isinstance(value, Tensor):
                parameter = self._by_storage.pop(storage_id(value), None)
                if parameter is not None:
                    self.before.append((parameter, parameter.clone()))
        return func(*args, **(kwargs or {}))


@contextmanager
def fresh_gradients(*modules: nn.Module) -> Iterator[None]:
    """Within it parameters have no gradients; those that they had come back."""
    kept = [(parameter, parameter.grad) for module in modules for parameter in module.parameters()]
    for parameter, _ in kept:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient


@contextmanager
def evaluating(*modules: nn.Module) -> Iterator[None]:
    """Within it ``modules`` are in evaluation mode; then each part is in its own again."""
    modes = [(part, part.training) for module in modules for part in module.modules()]
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


_AS_FUNCTION = "write it as a torch.autograd.Function that forward calls: its backward is kept"


def refuse_hooks(module: nn.Module) -> None:
    """Raises :class:`UnsupportedModelError` where a hook of ``module`` or its parameters acts on gradients."""
    for name, part in module.named_modules():
        for kind in ("_backward_hooks", "_backward_pre_hooks"):
            hooks: Mapping[int, Any] | None = getattr(part, kind, None)
            if hooks:
                raise UnsupportedModelError(
                    f"module {name or 'itself'} ({type(part).__name__}) has a backward hook",
                    [_described(hooks)],
                    ["remove it before the model is given", _AS_FUNCTION],
                )
    for name, parameter in module.named_parameters():
        for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            hooks = getattr(parameter, kind, None)
            if hooks:
                raise UnsupportedModelError(
                    f"parameter {name} has a hook on its gradient",
                    [_described(hooks), "a plan adds gradients up over micro-batches and ranks, whole only at the end"],
                    ["remove it before the model is given", "do it in the optimiser, which sees the whole gradient"],
                )


def _described(hooks: Mapping[int, Any]) -> str:
    names = (getattr(hook, "__qualname__", type(hook).__name__) for hook in hooks.values())
    return f"hooks: {', '.join(names)}"


@contextmanager
def kept_functions() -> Iterator[None]:
    """Within it a trace of this thread keeps user's Functions, and what it registers on its tensors' gradients."""
    functions: Any = SingleLevelFunction  # both as classes that one may change: torch's types do not know of it
    tensors: Any = Tensor
    thread = threading.get_ident()
    own = functions.__dict__.get("apply")
    register = tensors.register_hook

    def is_traced() -> bool:
        return threading.get_ident() == thread and get_proxy_mode() is not None

    def captured(cls: type[torch.autograd.Function], *arguments: Any, **keywords: Any) -> Any:
        if not is_traced() or keywords:
            return apply(cls, *arguments, **keywords)
        if cls is CheckpointFunction:
            function, _, *rest = arguments
            return function(*rest)
        if cls.__module__.split(".")[0] in OUTSIDE:
            return apply(cls, *arguments)
        return _captured(cls, arguments)

    def hooked(tensor: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Any:
        if not is_traced():
            return register(tensor, hook)
        raise UnsupportedModelError(
            "forward registers a hook on the gradient of a tensor", [users_line()], [_AS_FUNCTION]
        )

    functions.apply = classmethod(captured)
    tensors.register_hook = hooked
    try:
        yield
    finally:
        tensors.register_hook = register
        if own is None:
            del functions.apply
        else:
            functions.apply = own


@contextmanager
def inference_as_no_grad() -> Iterator[None]:
    """Within it ``torch.inference_mode`` is ``torch.no_grad``, which a trace keeps: gradients end at both."""
    mode: Any = torch.inference_mode
    own = mode.__enter__, mode.__exit__

    def enter(entered: Any) -> None:
        entered.instead = torch.set_grad_enabled(not entered.mode)

    def leave(entered: Any, *error: Any) -> None:
        instead = entered.__dict__.pop("instead", None)  # none where it was entered before
        own[1](entered, *error) if instead is None else instead.__exit__(*error)

    mode.__enter__ = enter
    mode.__exit__ = leave
    try:
        yield
    finally:
        mode.__enter__, mode.__exit__ = own


def _captured(cls: type[torch.autograd.Function], arguments: tuple[Any, ...]) -> Any:
    """What ``cls.apply(*arguments)`` gives, with one operator in the trace."""
    leaves, structure = tree_flatten(arguments)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    integers = [leaf for leaf in leaves if isinstance(leaf, torch.SymInt)]
    if not tensors:
        return apply(cls, *arguments)
    tensor_at = count()
    integer_at = count()
    template: list[Any] = []
    for leaf in leaves:
        _require_plain(cls, leaf)
        is_tensor = isinstance(leaf, Tensor)
        is_placed = is_tensor or isinstance(leaf, torch.SymInt)
        place = next(tensor_at if is_tensor else integer_at) if is_placed else 0
        template.append(PlacedArgument(place, is_tensor) if is_placed else leaf)
    call = UserFunction(cls, tuple(template), structure, frozenset(), ())
    with disable_proxy_modes_tracing(), _NoDraws(cls):
        copies = [tensor.clone() for tensor in tensors]
        versions = [times_written(tensor) for tensor in copies]
        returned = apply(cls, *call.arguments(copies, cast("list[int]", integers)))
    outputs = list(returned) if isinstance(returned, tuple) else [returned]
    written = [place for place, tensor in enumerate(copies) if times_written(tensor) != versions[place]]
    results = [place for place, value in enumerate(outputs) if isinstance(value, Tensor)]
    same = {k: place for k in results for place in written if outputs[k] is copies[place]}
    kept = tuple(place for place in written if place not in same.values())
    call = UserFunction(cls, tuple(template), structure, frozenset(written), tuple(results), kept)
    made = USER_FUNCTION(tensors, integers, registered(call))
    for k, tensor in zip(results, made, strict=False):
        if k in same:
            outputs[k] = tensors[same[k]].copy_(tensor)
        else:
            outputs[k] = tensor
    for place, tensor in zip(kept, made[len(results) :], strict=True):
        tensors[place].copy_(tensor)
    return tuple(outputs) if isinstance(returned, tuple) else outputs[0]


def _require_plain(cls: type[torch.autograd.Function], leaf: Any) -> None:
    """Raises :class:`UnsupportedModelError` for arguments that hide what the Function reads, or that vary."""
    bound = getattr(leaf, "__self__", leaf)
    if isinstance(bound, nn.Module):
        raise UnsupportedModelError(
            f"the autograd Function {cls.__qualname__} is given a module, {type(bound).__name__}",
            [users_line(), "which of its parameters it reads is not to be seen"],
            ["give it the tensors that it reads, as arguments"],
        )
    if isinstance(leaf, (torch.SymFloat, torch.SymBool)):
        raise UnsupportedModelError(
            f"the autograd Function {cls.__qualname__} is given a number that depends on sizes",
            [users_line()],
            ["give it the size itself, an integer, and compute with it inside"],
        )


class _NoDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not type it
    """Refuses random numbers inside a Function, which a plan cannot draw as one device does."""

    def __init__(self, cls: type[torch.autograd.Function]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not type it
        self._name = cls.__qualname__

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            raise UnsupportedModelError(
                f"the autograd Function {self._name} draws random numbers in its forward",
                [f"{func}", users_line()],
                ["draw them in the module's forward, torch.rand_like(x), and give them to the Function"],
            )
        return func(*args, **(kwargs or {}))


class StateChanges(TorchFunctionMode):
    """What forward does to parameters and buffers that ``torch.export`` does not see.

    A parameter whose ``requires_grad`` is switched off is detached where it is read, until that is on again: else the
    gradients of a GAN's discriminator would hold the generator's loss.  ``x.data`` shares the memory of ``x`` as
    ``x.detach()`` does, so that what is written to it is seen.  A parameter that a function holds itself, a hook by its
    closure, is what the module's attribute stands for while it is traced: else it would be a constant.

    Args:
        owners: whose parameters are traced.
    """

    def __init__(self, *owners: nn.Module) -> None:
        super().__init__()
        self._off: dict[int, Tensor] = {}
        parts = [part for owner in owners for part in owner.modules()]
        self._places = {id(p): (part, name) for part in parts for name, p in part.named_parameters(recurse=False)}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Notes switches and detaches what is switched off."""
        named = dict(kwargs or {})
        is_run = not torch.compiler.is_dynamo_compiling()  # code that is read has no ids
        if is_run and any(id(each) in self._places for each in _arguments(args, named)):
            args, named = tree_map(self._traced, (args, named))
        # torch's stub takes data for a plain attribute; that of an activation hides writes from autograd: refused later
        if func == Tensor.data.__get__ and args[0].grad_fn is None:  # type: ignore[attr-defined]
            return args[0].detach()
        is_parameter = len(args) > 0 and isinstance(args[0], nn.Parameter)
        if func == Tensor.data.__set__:  # type: ignore[attr-defined]
            if is_parameter and args[0].requires_grad:
                raise UnsupportedModelError(
                    "forward assigns to the data of a parameter", [users_line()], list(OF_PARAMETERS_WRITTEN)
                )
            return args[0].copy_(args[1].detach())
        if func in _SWITCHES and is_parameter:
            is_on = (*args[1:], *named.values(), True)[0]
            if is_on:
                self._off.pop(id(args[0]), None)
            elif args[0].requires_grad:
                self._off[id(args[0])] = args[0]
        elif self._off:
            args, named = tree_map(self._as_switched, (args, named))
        return func(*args, **named)

    def _traced(self, value: Any) -> Any:
        part, name = self._places.get(id(value), (None, ""))
        return value if part is None else getattr(part, name)

    def _as_switched(self, value: Any) -> Any:
        return value.detach() if id(value) in self._off else value


def _arguments(args: tuple[Any, ...], named: Mapping[str, Any]) -> Iterator[Any]:
    """Those of a call, and of lists among them."""
    for each in (*args, *named.values()):
        yield from each if isinstance(each, (tuple, list)) else (each,)


OF_PARAMETERS_WRITTEN = (
    "compute with what it would hold: F.linear(x, self.weight * self.mask), or a parametrization",
    "write to parameters between steps, or keep what is not trained as a buffer",
)
"""What to write instead of writes to parameters in forward."""
_SWITCHES = (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]  # as of .data


def users_line() -> str:
    """The innermost line of the user's code that is being run."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_users_frame(frame):
            return f"at {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return "at an unknown place"


def users_line_of(error: BaseException) -> tuple[str, str]:
    """The innermost line of the user's code that ``error`` went through, and its text; both empty if there is none."""
    link: BaseException | None = error
    while link is not None:
        lines = [(frame, line) for frame, line in traceback.walk_tb(link.__traceback__) if is_users_frame(frame)]
        if lines:
            frame, line = lines[-1]
            file = frame.f_code.co_filename
            code = frame.f_code
            return f"at {file}:{line} in {code.co_name}", linecache.getline(file, line, frame.f_globals).strip()
        link = link.__cause__ or link.__context__
    return "", ""


def is_users_frame(frame: FrameType) -> bool:
    """Whether it runs code of the user, or of a package of theirs."""
    return is_users(str(frame.f_globals.get("__name__", ""))) and not frame.f_code.co_filename.startswith("<")
