"""What a factory returned, or a person gave, as a model that is ready to train.

For the forms that it may have see :mod:`profiler.source.source`.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from planner.ir.errors import FactoryError
from planner.ir.extras import extras
from profiler.capture.user_module import users_line_of
from profiler.extra import ProfilerExtra
from profiler.source.losses import TrainedLoss, own_loss
from profiler.source.model import WITH_COMPLEX, LoadedModel, parse_varying
from profiler.source.structure import BatchStructure, is_loader, require_samples_first


def import_remedies(error: BaseException) -> list[str]:
    """What to do about an import that fails; nothing where the error's own words say it.

    A package whose operators were compiled for another build of torch fails in whatever imports it first.
    """
    cause: BaseException | None = error
    while cause is not None:
        if match := re.search(r"operator (\w+)::\w+ does not exist", str(cause)):
            package = match[1]
            return [
                f"{package} was built for another torch: `halopipe doctor` says how to mend it",
                f"pip uninstall {package}",
            ]
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, ImportError):
        return ["put what it imports where Python finds it: PYTHONPATH"]
    return []


def where(error: BaseException) -> str:
    """File, line and function of the innermost frame of ``error`` in the user's code; where it met none, of any."""
    line, _ = users_line_of(error)
    if line:
        return line
    frames = traceback.extract_tb(error.__traceback__)
    return f"at {frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else "at an unknown place"


def cast_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Parameters and buffers in place to ``dtype``, complex ones to the complex numbers of its precision.

    ``nn.Module.to`` would leave of those the real parts alone.

    Raises:
        FactoryError: there are complex ones, and none of this precision.
    """
    tensors = (*module.parameters(), *module.buffers())
    if not any(each.is_complex() for each in tensors):
        module.to(dtype)
        return
    if dtype not in WITH_COMPLEX:
        raise FactoryError(
            f"the module has complex numbers, of which there are none in {dtype}", [], ["--dtype float32"]
        )

    def cast(tensor: Tensor) -> Tensor:
        return tensor.detach().to(dtype.to_complex() if tensor.is_complex() else dtype)

    for parameter in module.parameters():
        parameter.data = cast(parameter) if parameter.is_complex() or parameter.is_floating_point() else parameter.data
    buffers = {id(each): cast(each) for each in module.buffers() if each.is_complex() or each.is_floating_point()}
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, buffers.get(id(buffer), buffer))  # itself would stay a view of what it was made of


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


def _parts(name: str, result: Any, input_shape: tuple[int, ...], is_shaped: bool) -> tuple[LoadedModel, Any]:
    """The model, and what was said to vary."""
    if isinstance(result, nn.Module):
        if not input_shape:
            raise FactoryError(
                f"{name} returned a module and no example inputs",
                [],
                ["hp.profile(module, example)", "return (module, inputs)", "give --input 8,3,64,64"],
            )
        dtype = next((each.dtype for each in result.parameters() if each.is_floating_point()), None)
        result = (result, torch.randn(input_shape, dtype=dtype))
    module, example, loss_fn, varying = _unpacked(name, result)
    inputs = example
    targets = ()
    if loss_fn is not None:
        if not isinstance(example, (tuple, list)) or len(example) != _PAIR:
            raise FactoryError(
                f"{name} returned a loss function, and an example that is no (inputs, targets)",
                [f"the example is {_describe(example)}"],
                [
                    *(["next(iter(loader)), one batch of it"] if is_loader(example) else []),
                    "(module, (inputs, targets), loss_fn)",
                    "no loss function, where the module computes its own loss",
                ],
            )
        inputs, targets = example
    loss = TrainedLoss(own_loss if loss_fn is None else loss_fn, isinstance(targets, Tensor))
    if _is_clouds(module, inputs):
        from profiler.source.clouds import load_clouds

        return load_clouds(name, module, inputs, targets, loss)
    for extra in extras(ProfilerExtra):
        model = extra.loaded(name, module, inputs, targets, loss)
        if model is not None:
            return model
    if loss_fn is not None:
        require_samples_first(name, inputs, targets)
    structure, fed, compared = BatchStructure.of(name, module, inputs, targets, is_pair=loss_fn is not None)
    if not fed:
        raise FactoryError(f"{name} returned no example inputs", [f"no tensor is in {_describe(inputs)}"])
    shape = tuple(fed[0].shape)
    if input_shape and not is_shaped and shape != input_shape:
        raise FactoryError(
            f"{name} cannot be given an input shape",
            [f"asked for {input_shape}, its example has {shape}"],
            ["give the factory a keyword argument input_shape"],
        )
    return LoadedModel(module, fed, compared, loss, structure=structure), varying


def _unpacked(name: str, result: Any) -> tuple[nn.Module, Any, Any, Any]:
    """Module, example, loss function (or None) and what varies."""
    if isinstance(result, tuple) and 1 < len(result) <= 4 and isinstance(result[0], nn.Module):
        padded: tuple[Any, ...] = (*result, *(None, {})[len(result) - 2 :])
        module, example, loss_fn, varying = padded
        if isinstance(loss_fn, type):
            raise FactoryError(
                f"{name}: the loss is the class {loss_fn.__name__}", ["a function is needed"], [f"{loss_fn.__name__}()"]
            )
        if loss_fn is None or callable(loss_fn):
            return module, example, loss_fn, varying
    raise FactoryError(
        f"{name} returned no model",
        [f"it returned {_describe(result)}"],
        ["return module, (module, inputs) or (module, (inputs, targets), loss_fn)"],
    )


_PAIR = 2


def _describe(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(_describe(item) for item in value)})"
    return type(value).__name__
