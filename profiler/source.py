"""From a MODEL string to a module with example inputs and a loss.

MODEL is ``pkg.mod:factory`` or ``path/file.py:factory``.  A factory is called with keyword arguments and returns one of

    module
    (module, inputs)
    (module, (inputs, targets), loss_fn)

with ``inputs`` and ``targets`` a tensor or a tuple of tensors, samples first, and ``output = module(*inputs)``.
``loss_fn(output, targets)`` is a mean over samples; without one it is :func:`mean_of_squares`.
"""

from __future__ import annotations

import difflib
import inspect
import json
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from planner.ir.errors import FactoryError
from planner.ir.profile import ModelSource
from profiler.factory import find_factory


@dataclass(frozen=True, slots=True)
class Loss:
    """The user's loss function, called the same way whether it wants one target or a tuple.

    Attributes:
        function: as the factory gave it.
        unpacked: the factory gave a bare tensor of targets, so that is what ``function`` gets.
    """

    function: Callable[..., Tensor]
    unpacked: bool = False

    def __call__(self, output: Any, targets: tuple[Tensor, ...]) -> Tensor:
        return self.function(output, targets[0] if self.unpacked else targets)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model, ready to train: ``loss_fn(module(*inputs), targets)`` is the loss of its example.

    Attributes:
        module: in training mode.
        inputs, targets: the example; samples first.
        loss_fn: takes the module's output and the tuple of targets; a mean over samples.
    """

    module: nn.Module
    inputs: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    loss_fn: Callable[[Any, tuple[Tensor, ...]], Tensor]

    def loss(self, inputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> Tensor:
        """The loss of a batch."""
        return self.loss_fn(self.module(*inputs), targets)

    @property
    def samples(self) -> int:
        """Number of samples of the example."""
        return self.inputs[0].shape[0] if self.inputs[0].ndim else 1


def mean_of_squares(output: Any, targets: tuple[Tensor, ...] = ()) -> Tensor:
    """The loss where a factory gives none: for each float tensor of ``output`` the mean of its squares, summed."""
    floats = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if not floats:
        raise TypeError("the module's output holds no float tensor, so a loss function is needed")
    total = floats[0].square().mean()
    for tensor in floats[1:]:
        total = total + tensor.square().mean()
    return total


def load_model(source: ModelSource, seed: int = 0) -> LoadedModel:
    """The model that ``source`` names, the same for the same seed; the caller's random state is left alone.

    A module in evaluation mode is put into training mode; parts of it that are in evaluation mode stay there.

    Raises:
        ModelNotFoundError: there is no such factory.
        FactoryError: the factory raised, or returned something that is not a model.
    """
    dtype = _float_dtype(source.dtype)
    with torch.random.fork_rng(devices=[]):
        factory = find_factory(source.factory)
        arguments = _arguments(source, factory)
        torch.manual_seed(seed)  # last, since importing the user's module may have drawn numbers
        result = _call(source, factory, arguments)
        module, inputs, targets, loss_fn = _parts(source, result, "input_shape" in arguments)
    if not module.training:
        module.train()
    module.to(dtype)
    return LoadedModel(module, _cast(inputs, dtype), _cast(targets, dtype), loss_fn)


def _float_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        return dtype
    raise FactoryError(f"{name!r} is no floating-point dtype", remedies=["float32, float64, bfloat16 or float16"])


def _arguments(source: ModelSource, factory: Callable[..., Any]) -> dict[str, Any]:
    arguments = {name: _from_json(source, name, text) for name, text in source.arguments.items()}
    parameters = inspect.signature(factory).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    unknown = [name for name in arguments if name not in parameters and not takes_any]
    if unknown:
        close = [
            f"did you mean {match!r}?" for name in unknown for match in difflib.get_close_matches(name, parameters)
        ]
        known = f"it takes: {', '.join(parameters) or 'no arguments'}"
        raise FactoryError(f"{source.factory} takes no argument {', '.join(map(repr, unknown))}", [known, *close])
    if source.input_shape and "input_shape" in parameters:
        arguments["input_shape"] = source.input_shape
    return arguments


def _from_json(source: ModelSource, name: str, text: str) -> Any:
    try:
        return _tuples(json.loads(text))
    except json.JSONDecodeError as error:
        raise FactoryError(
            f"argument {name!r} of {source.factory} is not JSON",
            [f"{text}: {error.msg} at character {error.pos}"],
            ['a text needs its quotes: {"name": "\\"text\\""}'],
        ) from None


def _tuples(value: Any) -> Any:
    """Arrays as tuples, which is what shapes and depths are in factories."""
    if isinstance(value, list):
        return tuple(_tuples(item) for item in value)
    return {key: _tuples(item) for key, item in value.items()} if isinstance(value, Mapping) else value


def _call(source: ModelSource, factory: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    try:
        return factory(**arguments)
    except Exception as error:
        given = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        raise FactoryError(
            f"{source.factory}({given}) raised {type(error).__name__}", [str(error), where(error)]
        ) from error


def where(error: BaseException) -> str:
    """File, line and function of the innermost frame of ``error``."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"at {frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else "at an unknown place"


def _parts(
    source: ModelSource, result: Any, shaped: bool
) -> tuple[nn.Module, tuple[Tensor, ...], tuple[Tensor, ...], Loss]:
    """Module, inputs, targets and loss of what a factory returned; ``shaped``: it was told the input shape."""
    default = Loss(mean_of_squares)
    match result:
        case nn.Module() as module:
            if not source.input_shape:
                raise FactoryError(
                    f"{source.factory} returned a module and no example inputs", remedies=["give --input 8,3,64,64"]
                )
            return module, (torch.randn(source.input_shape),), (), default
        case (nn.Module() as module, inputs):
            found = module, _tensors(source, "inputs", inputs), (), default
        case (nn.Module() as module, (inputs, targets), loss_fn) if callable(loss_fn):
            loss = Loss(loss_fn, unpacked=isinstance(targets, Tensor))
            found = module, _tensors(source, "inputs", inputs), _tensors(source, "targets", targets), loss
        case _:
            raise FactoryError(
                f"{source.factory} returned no model",
                [f"it returned {_describe(result)}"],
                ["return module, (module, inputs) or (module, (inputs, targets), loss_fn)"],
            )
    if not found[1]:
        raise FactoryError(f"{source.factory} returned no example inputs")
    if source.input_shape and not shaped and tuple(found[1][0].shape) != source.input_shape:
        raise FactoryError(
            f"{source.factory} cannot be given an input shape",
            [f"asked for {source.input_shape}, its example has {tuple(found[1][0].shape)}"],
            ["give the factory a keyword argument input_shape"],
        )
    return found


def _tensors(source: ModelSource, what: str, value: Any) -> tuple[Tensor, ...]:
    values = value if isinstance(value, tuple) else (value,)
    if not all(isinstance(item, Tensor) for item in values):
        raise FactoryError(
            f"{source.factory} returned {what} that are no tensors",
            [f"{what}: {_describe(value)}"],
            ["a tensor or a tuple of tensors"],
        )
    return values


def _describe(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(_describe(item) for item in value)})"
    return type(value).__name__


def _cast(tensors: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in tensors)
