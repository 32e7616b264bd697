"""From a MODEL string to a module with example inputs and a loss.

MODEL is ``pkg.mod:factory`` or ``path/file.py:factory``, or a file that holds what a factory returns
(:mod:`profiler.source.saved`).  A factory is called with keyword arguments and returns one of

    module
    (module, inputs)
    (module, (inputs, targets), loss_fn)
    (module, ..., loss_fn, varying)                 loss_fn None: the module's own loss

``inputs`` and ``targets`` are tensors, samples first, and constants, in dicts, lists, tuples and dataclasses of any
depth (:mod:`profiler.source.structure`).  A tuple is ``module(*inputs)``, a dict whose keys ``forward`` takes
``module(**inputs)``, everything else ``module(inputs)``.  ``loss_fn(output, targets)`` is a mean over samples, or a
dict or tuple of such losses, which are summed; without one the module's own is trained
(:func:`profiler.source.losses.own_loss`).

A sparse network takes one ``SparseTensor``.  Its example is that, with targets one a sample or one a point in the order
in which points were given; or, as data sets have it, coordinates, features and counts with samples first, padded to the
largest cloud (:mod:`cuda_ops.sparse.preparation`).  What varies in it is known.

``varying`` says which other sizes than the number of samples differ from batch to batch (the length of sequences, the
number of points, the height and width of images), and where they are:

    {"time": [("inputs", 1), ("targets", 1)]}

is a size called ``time``, the extent of dim 1 of the inputs and of dim 1 of the targets.  Tensors are called by their
keys, ``input_ids``; those without ``inputs``, ``inputs_2``, ... and ``targets``, ``targets_2``, ..., as in the profile.
Within a batch all places of a name have one extent, and the example has at least 2 there.  Names are those of dims;
``time``, ``height``, ``width`` and ``depth`` are known to the planner.  Dims not named here have the example's extent
in every batch.

Finds the factory that a MODEL string names.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from cuda_ops.device.seeding import seed_generators, seeded
from planner.ir.codec import fingerprint
from planner.ir.errors import FactoryError, ModelNotFoundError
from planner.ir.files import parse_json
from planner.ir.profile import ModelSource
from profiler.source.model import LoadedModel, casts_to
from profiler.source.parts import cast_module, import_remedies, model_of, where

_FORMS = "MODEL is pkg.mod:factory or path/file.py:factory"
_PLACE = "go to the folder where it was profiled, if it is a plan's"


def find_factory(text: str) -> Callable[..., Any]:
    """The callable that ``text`` (``pkg.mod:factory`` or ``path/file.py:factory``) names.

    The working folder, and the file's own, are appended to the import path, so that they hide no installed package.

    Raises:
        ModelNotFoundError: says which part of ``text`` failed, and which factories there are.
    """
    place, colon, name = text.rpartition(":")
    if not colon or not place or not name:
        raise ModelNotFoundError(f"{text!r} names no factory", _listing(text), [_FORMS])
    module = _from_file(text, place) if place.endswith(".py") or os.sep in place else _from_name(text, place)
    value: Any = module
    for part in name.split("."):
        value = getattr(value, part, None)
    if value is None:
        near = difflib.get_close_matches(name, _factories(module), n=1)
        raise ModelNotFoundError(
            f"{place} has no {name!r}",
            [f"factories there: {', '.join(_factories(module)) or 'none'}"],
            [f"did you mean {place}:{match}?" for match in near],
        )
    if not callable(value) or isinstance(value, nn.Module):
        raise ModelNotFoundError(
            f"{name!r} of {place} is no factory", [f"it is a {type(value).__name__}"], ["a function or a class"]
        )
    factory: Callable[..., Any] = value
    return factory


def _append_to_path(folder: str) -> None:
    if folder not in sys.path:
        sys.path.append(folder)


def _from_file(text: str, place: str) -> ModuleType:
    path = Path(place)
    if not path.is_file():
        near = sorted(str(file) for file in path.parent.glob("*.py")) if path.parent.is_dir() else []
        detail = f"Python files there: {', '.join(near) or 'none'}" if path.parent.is_dir() else "nor is its folder"
        if path.is_absolute():
            raise ModelNotFoundError(f"{text!r}: {place} is not there", [detail])
        match = difflib.get_close_matches(place, near, n=1)
        raise ModelNotFoundError(
            f"{text!r}: {place} is not there",
            [detail, f"looked for from {os.getcwd()}, as the path is relative"],
            [*(f"did you mean {each}:{text.rpartition(':')[2]}?" for each in match), _FORMS, _PLACE],
        )
    _append_to_path(os.getcwd())
    _append_to_path(str(path.resolve().parent))
    name = f"halopipe_model_{path.stem}"
    try:
        module = _run(name, path.resolve(), path.read_bytes())
    except Exception as error:
        raise _broken(place, error) from error
    if module is None:
        raise ModelNotFoundError(f"{text!r}: {place} is no Python file", remedies=[_FORMS])
    sys.modules[name] = module
    return module


@lru_cache(maxsize=64)
def _run(name: str, path: Path, content: bytes) -> ModuleType | None:
    """The module of a file, which is run once as long as it stays as it is; None where Python cannot read it.

    An operator that it registers with torch would be taken from a captured model if it were registered again, as where
    the data are of the same file as the model.
    """
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up here
    try:
        spec.loader.exec_module(module)
    except Exception:
        del sys.modules[name]
        raise
    return module


def _from_name(text: str, place: str) -> ModuleType:
    _append_to_path(os.getcwd())
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if place != missing and not place.startswith(f"{missing}."):
            raise _broken(place, error) from error  # the module is there, what it imports is not
        parent = missing.rpartition(".")[0]
        detail = f"in package {parent}" if parent else f"neither installed nor in {os.getcwd()}"
        raise ModelNotFoundError(f"{text!r}: there is no module {missing!r}", [detail], [_FORMS]) from None
    except Exception as error:
        raise _broken(place, error) from error


def _broken(place: str, error: Exception) -> ModelNotFoundError:
    at = f"at {error.filename}:{error.lineno}" if isinstance(error, SyntaxError) else where(error)
    return ModelNotFoundError(
        f"{place} cannot be imported: {type(error).__name__}", [str(error), at], import_remedies(error)
    )


def _listing(text: str) -> list[str]:
    """The factories of the module that ``text`` may have meant, if there is one."""
    place = text.rstrip(":")
    try:
        module = _from_file(text, place) if place.endswith(".py") else _from_name(text, place)
    except (ModelNotFoundError, ValueError):
        return ["it has no ':'"] if ":" not in text else []
    return [f"factories in {place}: {', '.join(_factories(module)) or 'none'}"]


def _factories(module: ModuleType) -> list[str]:
    """Public functions and module classes that ``module`` itself defines."""
    return sorted(
        name
        for name, value in vars(module).items()
        if name[0] != "_"
        and callable(value)
        and getattr(value, "__module__", None) == module.__name__
        and (not isinstance(value, type) or issubclass(value, nn.Module))
    )


def load_model(source: ModelSource, seed: int = 0) -> LoadedModel:
    """The model that ``source`` names, the same for the same seed; the caller's random state is left alone.

    Every part of the module stays in the mode, training or evaluation, that the factory left it in.

    Raises:
        ModelNotFoundError: there is no such factory.
        FactoryError: the factory raised, or returned something that is not a model.
    """
    dtype = _float_dtype(source.dtype)
    autocast = _autocast_dtype(source)
    model = _saved(source) if source.is_file else _made(source, seed)
    own = _dtypes(model)
    if own != {dtype}:  # else buffers of other dtypes are meant to have them
        model = replace(model, casts=casts_to(dtype, own or {torch.get_default_dtype()}))
        for module in model.owners.values():
            cast_module(module, dtype)
    origin = fingerprint([replace(source, sizes={}), seed])
    model = replace(model.with_cast_example(), autocast=autocast, elementwise=frozenset(source.elementwise))
    return replace(model, origin=origin)


def _dtypes(model: LoadedModel) -> set[torch.dtype]:
    parameters = (each for module in model.owners.values() for each in module.parameters())
    return {each.dtype.to_real() for each in parameters if each.is_floating_point() or each.is_complex()}


def _made(source: ModelSource, seed: int) -> LoadedModel:
    """By a factory."""
    with seeded(seed):
        factory = find_factory(source.factory)
        arguments = _arguments(source, factory)
        torch.manual_seed(seed)  # accelerators' generators too
        seed_generators(seed)  # last, since importing the user's module may have drawn numbers
        shaped = "input_shape" in arguments
        made = _call(source, factory, arguments)
        if source.local_losses:
            from profiler.source.local_losses import with_local_losses  # late: few models have losses of their own

            made = with_local_losses(source.factory, made, source.local_losses)
        return model_of(source.factory, made, source.input_shape, is_shaped=shaped)


def _saved(source: ModelSource) -> LoadedModel:
    """From a file."""
    from profiler.source.saved import load_saved  # which needs cloudpickle, and reads the capture's precautions

    if source.arguments:
        raise FactoryError(
            f"{source.factory} takes no arguments",
            [f"given: {', '.join(source.arguments)}", "it holds a module as it is"],
            ["a factory makes one of arguments"],
        )
    return load_saved(source.factory, source.digest, source.input_shape)


def _float_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        return dtype
    raise FactoryError(f"{name!r} is no floating-point dtype", remedies=["float32, float64, bfloat16 or float16"])


def _autocast_dtype(source: ModelSource) -> torch.dtype | None:
    if source.autocast not in ("", "bfloat16"):
        raise FactoryError(f"autocast to {source.autocast!r} is not supported", remedies=["bfloat16, or none"])
    if source.autocast and source.dtype != "float32":
        raise FactoryError(
            f"autocast to {source.autocast} is for parameters in float32",
            [f"they are asked for in {source.dtype}"],
            ["--dtype float32 --autocast bfloat16", f"--dtype {source.dtype} without --autocast"],
        )
    return torch.bfloat16 if source.autocast else None


def _arguments(source: ModelSource, factory: Callable[..., Any]) -> dict[str, Any]:
    arguments = {name: _from_json(source, name, text) for name, text in source.arguments.items()}
    parameters = inspect.signature(factory).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    unknown = [name for name in arguments if name not in parameters and not takes_any]
    if unknown:
        close = [
            f"did you mean {match!r}?" for name in unknown for match in difflib.get_close_matches(name, parameters)
        ]
        takes = f"it takes: {', '.join(parameters) or 'no arguments'}"
        raise FactoryError(f"{source.factory} takes no argument {', '.join(map(repr, unknown))}", [takes], close)
    if source.input_shape and "input_shape" in parameters:
        arguments["input_shape"] = source.input_shape
    named = [each for each in parameters.values() if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    missing = [each.name for each in named if each.default is each.empty and each.name not in arguments]
    if missing:
        raise FactoryError(
            f"{source.factory} needs {', '.join(map(repr, missing))}, which is not given",
            [f"given: {', '.join(arguments) or 'nothing'}"],
            [
                " ".join(map(_asked, missing)),
                "give it a default",
                "name a function that returns a module and an example",
            ],
        )
    return arguments


def _asked(name: str) -> str:
    """How an argument of a factory is given on the command line."""
    return "--input 8,3,64,64" if name == "input_shape" else f"--arg {name}=VALUE"


def _from_json(source: ModelSource, name: str, text: str) -> Any:
    try:
        return _tuples(parse_json(text))
    except ValueError as error:
        raise FactoryError(
            f"argument {name!r} of {source.factory} is not JSON",
            [f"{text[:200]}: {error}"],
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
        arguments_text = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        raise FactoryError(
            f"{source.factory}({arguments_text}) raised {type(error).__name__}", [str(error), where(error)]
        ) from error
