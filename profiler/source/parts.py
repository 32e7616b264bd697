"""What a factory returned, or a person gave, as a model that is ready to train.

For the forms that it may have see :mod:`profiler.source.source`.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from planner.ir.errors import FactoryError
from profiler.source.model import LoadedModel, Loss, mean_of_squares, parse_varying


def where(error: BaseException) -> str:
    """File, line and function of the innermost frame of ``error``."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"at {frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else "at an unknown place"


def model_of(name: str, result: Any, input_shape: Sequence[int] = (), *, is_shaped: bool = False) -> LoadedModel:
    """The model that ``result`` describes, in the dtypes that it has.

    Args:
        name: of the factory, the file or whatever ``result`` is from, for errors.
        input_shape: of the example, samples first; empty: that which ``result`` has.
        is_shaped: whether the factory was told ``input_shape``.

    Raises:
        FactoryError: it is no model, or says in another way what varies.
    """
    model, varying = _parts(name, result, tuple(input_shape), is_shaped)
    return replace(model, varying=parse_varying(name, varying, model.tensors))


def _is_clouds(network: nn.Module, inputs: Any) -> bool:
    """Whether a factory's inputs are clouds: not where nobody has imported the layers that take them."""
    if "cuda_ops.sparse.nn" not in sys.modules:
        return False
    from profiler.source.clouds import is_clouds

    return is_clouds(network, inputs)


def _load_clouds(factory: str, network: nn.Module, inputs: Any, targets: Any, loss: Loss) -> tuple[LoadedModel, Any]:
    from profiler.source.clouds import load_clouds

    return load_clouds(factory, network, inputs, targets, loss)


def _parts(name: str, result: Any, input_shape: tuple[int, ...], is_shaped: bool) -> tuple[LoadedModel, Any]:
    """The model, and what was said to vary."""
    default = Loss(mean_of_squares)
    varying: Any = {}
    match result:
        case nn.Module() as module:
            if not input_shape:
                raise FactoryError(
                    f"{name} returned a module and no example inputs", remedies=["give --input 8,3,64,64"]
                )
            dtype = next((each.dtype for each in module.parameters() if each.is_floating_point()), None)
            return LoadedModel(module, (torch.randn(input_shape, dtype=dtype),), (), default), varying
        case (nn.Module() as module, example, None, varying):
            return _parts(name, (module, example), input_shape, is_shaped)[0], varying
        case (nn.Module() as module, inputs) if _is_clouds(module, inputs):
            return _load_clouds(name, module, inputs, (), default)
        case (nn.Module() as module, (inputs, targets), loss_fn) if callable(loss_fn) and _is_clouds(module, inputs):
            loss = Loss(loss_fn, unpacked=isinstance(targets, Tensor))
            return _load_clouds(name, module, inputs, _tensors(name, "targets", targets), loss)
        case (nn.Module() as module, inputs):
            found = LoadedModel(module, _tensors(name, "inputs", inputs), (), default)
        case (nn.Module() as module, (inputs, targets), loss_fn, *rest) if callable(loss_fn) and len(rest) <= 1:
            loss = Loss(loss_fn, unpacked=isinstance(targets, Tensor))
            varying = rest[0] if rest else {}
            found = LoadedModel(module, _tensors(name, "inputs", inputs), _tensors(name, "targets", targets), loss)
        case _:
            raise FactoryError(
                f"{name} returned no model",
                [f"it returned {_describe(result)}"],
                ["return module, (module, inputs) or (module, (inputs, targets), loss_fn)"],
            )
    if not found.inputs:
        raise FactoryError(f"{name} returned no example inputs")
    shape = tuple(found.inputs[0].shape)
    if input_shape and not is_shaped and shape != input_shape:
        raise FactoryError(
            f"{name} cannot be given an input shape",
            [f"asked for {input_shape}, its example has {shape}"],
            ["give the factory a keyword argument input_shape"],
        )
    return found, varying


def _tensors(name: str, what: str, value: Any) -> tuple[Tensor, ...]:
    values = value if isinstance(value, tuple) else (value,)
    if not all(isinstance(item, Tensor) for item in values):
        raise FactoryError(
            f"{name} returned {what} that are no tensors",
            [f"{what}: {_describe(value)}"],
            ["a tensor or a tuple of tensors"],
        )
    return values


def _describe(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(_describe(item) for item in value)})"
    return type(value).__name__
