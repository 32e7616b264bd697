"""A module object as a file, so that other processes train that very module: its weights, its code, its example.

The file holds what a factory would return, ``(module, example)`` or ``(module, (inputs, targets), loss_fn)``, as
``torch.save`` writes it with cloudpickle: tensors that share memory share it again, parts that are one stay one, and
classes and functions of a notebook cell or of ``__main__`` are inside.  Those of other modules are imported again,
from the folders that the import path had.  (An exported program would be the graph instead of the module, and the
first step of a job is compared with the module.)  Like a factory it is code that is run: load files you trust.

Files are called by what they hold, ``Net-3f2a91c04d7e.pt``, the digits being the first of their SHA-256.
"""

from __future__ import annotations

import copyreg
import hashlib
import importlib.util
import io
import os
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any
from uuid import uuid4

import cloudpickle
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from cuda_ops.device.seeding import seeded
from planner.ir.errors import (
    FactoryError,
    MissingFileError,
    ModelNotFoundError,
    StaleFileError,
    UnsupportedModelError,
    UsageError,
)
from planner.ir.files import open_plain
from profiler.capture.user_module import kept_parameters, refuse_hooks, untouched
from profiler.source.model import LoadedModel, is_alike
from profiler.source.module_kinds import require_plain_modules, require_values
from profiler.source.parts import import_remedies, model_of, where
from profiler.source.structure import alone

FOLDER = ".halopipe"
"""In the working folder, where profiles and plans look for the paths of factories, too."""

_FORMAT = "halopipe module 1"
_NUM_DIGITS = 12
_RECORDED = "transformers.utils.output_capturing", "_CAN_RECORD_REGISTRY", "_can_record_outputs"
"""Module, mapping, and the attribute that it has of each model; transformers (5) has no public way to enter one."""

_SETTINGS: Mapping[str, tuple[Callable[[], Any], str]] = {
    "default_dtype": (
        torch.get_default_dtype,
        "give tensors that the module makes a dtype: torch.linspace(0, 1, 8, dtype=x.dtype)",
    ),
    "is_deterministic": (
        torch.are_deterministic_algorithms_enabled,
        "ask once, in __init__: self.exact = torch.are_deterministic_algorithms_enabled()",
    ),
}
"""What a module may ask of torch, by its name in files: who answers, and what to write instead."""


@dataclass(frozen=True, slots=True)
class SavedModule:
    """A file that holds a module.

    Attributes:
        path: relative to the working folder, where it is inside.
        digest: SHA-256 of the file.
        dtype: of the module's parameters.
    """

    path: str
    digest: str
    dtype: str


def save_module(result: Any, input_shape: tuple[int, ...] = ()) -> SavedModule:
    """Writes what a factory would have returned, the module as it is now; it is left as it was.

    Args:
        result: as of :func:`profiler.source.parts.model_of`.
        input_shape: as there.

    Raises:
        UsageError: the module has parameters of several dtypes, or cannot be written.
        FactoryError: it is no model, or does not run on its example.
        UnsupportedModelError: it has hooks on gradients, which would be lost.
        MissingFileError: ``.halopipe`` cannot be written to.
    """
    model = model_of("hp.profile", result, input_shape)
    dtype = _dtype(model.module)
    require_plain_modules(model.owners)
    for module in model.owners.values():
        refuse_hooks(module)
    if input_shape and isinstance(result, nn.Module):
        result = (result, model.inputs)
    elif model.clouds is None:
        result = (result[0], alone(result[1]), *result[2:])  # an example may be a slice of all there is
    held = {"format": _FORMAT, "folders": _Folders(), "result": result, "loss": _loss(model)}
    held |= {name: read() for name, (read, _) in _SETTINGS.items()}
    network = model.module if model.clouds is None else model.module.user_module
    name = type(network).__name__
    temporary = Path(FOLDER) / f".{name}-{uuid4().hex}.tmp"
    try:
        temporary.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("w+b") as stream, _by_value(model):
            torch.save(held, stream, pickle_module=SimpleNamespace(__name__=__name__, Pickler=_SavingPickler))
            stream.seek(0)
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        path = temporary.replace(temporary.with_name(f"{name}-{digest[:_NUM_DIGITS]}.pt"))
    except OSError as error:
        raise MissingFileError(f"cannot write to {FOLDER}", [error.strerror or str(error)]) from None
    except Exception as error:
        raise UsageError(
            f"this {name} cannot be written to a file, from which other processes would load it",
            [f"{type(error).__name__}: {error}"],
            [
                "give a factory, 'pkg.mod:factory' or 'path/file.py:factory', which each process calls",
                "keep out of the module what belongs to this process: open files, locks, generators, sockets",
            ],
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
    return SavedModule(str(path), digest, dtype)


def load_saved(path: str, digest: str = "", input_shape: tuple[int, ...] = ()) -> LoadedModel:
    """The model that a file holds.

    Args:
        digest: that the file must have; empty: any.
        input_shape: of the example, where the file holds a module alone.

    Raises:
        ModelNotFoundError: there is no such file, or what it holds cannot be loaded.
        StaleFileError: the file is another one, or its module computes something else here.
        UnsupportedModelError: it computes something else at each call.
        FactoryError: it holds no model.
    """
    held, _ = _read(path, digest)
    if not isinstance(held, Mapping) or held.get("format") != _FORMAT:
        return model_of(path, held, input_shape)
    model = model_of(path, held["result"], input_shape)
    _register(model.module)
    expected = held["loss"]
    loss_here = _loss(model)
    if expected is not None and loss_here is not None and not is_alike(expected, loss_here):
        second = _loss(model)
        if second is not None and not is_alike(loss_here, second):
            raise UnsupportedModelError(
                "the module and its loss compute something else at each call",
                [f"loss of the same example: {expected.item()}, then {loss_here.item()}, then {second.item()}"],
                ["keep what changes from call to call in buffers, written in place: self.count.add_(1)"],
            )
        details = [f"loss of its example: {expected.item()} there, {loss_here.item()} here"]
        remedy = (
            "code that it imports, or a class that was patched, is another one here: define it where it is profiled"
        )
        for name, (read, instead) in _SETTINGS.items():
            there = held.get(name)
            here = read()
            if there not in (None, here):  # processes of ours have torch's own
                details += [f"torch.{read.__name__}(): {there} there, {here} here"]
                remedy = instead
        raise StaleFileError(
            f"the module in {path} computes something else here than where it was saved", details, [remedy]
        )
    return model


def _register(module: nn.Module) -> None:
    """What transformers notes of a class when a model of it is made, in this process: which outputs it can record."""
    place, registry, outputs = _RECORDED
    recorded: Any = vars(sys.modules[place]).get(registry) if place in sys.modules else None
    for part in () if recorded is None else module.modules():
        if hasattr(part, outputs):
            recorded[part] = getattr(part, outputs)


def saved_as(path: str) -> SavedModule:
    """The file of a person's own that holds a module.

    Raises:
        ModelNotFoundError, FactoryError: as :func:`load_saved`.
    """
    held, digest = _read(path)
    result = held["result"] if isinstance(held, Mapping) and held.get("format") == _FORMAT else held
    module = result[0] if isinstance(result, tuple) and result else result
    return SavedModule(path, digest, _dtype(module) if isinstance(module, nn.Module) else "float32")


def _read(path: str, digest: str = "") -> tuple[Any, str]:
    """What a file holds, and its digest.

    It is read once: what is loaded, which is code that runs, are the very bytes that the digest is of.
    """
    try:
        with os.fdopen(open_plain(os.path.realpath(path)), "rb") as stream:  # no wait for who writes to a pipe
            content = stream.read()
    except OSError as error:
        raise ModelNotFoundError(
            f"{path} is not there: it holds the module that was profiled",
            [error.strerror or str(error), f"looked for in {os.getcwd()}"],
            ["go to the folder where it was profiled, or copy the file here", "profile the module again"],
        ) from None
    digest_now = hashlib.sha256(content).hexdigest()
    if digest and digest_now != digest:
        raise StaleFileError(
            f"{path} holds another module than was profiled",
            [f"profiled: sha256 {digest[:_NUM_DIGITS]}", f"now: sha256 {digest_now[:_NUM_DIGITS]}"],
            ["bring the file back", "profile it again"],
        )
    load = _exported if path.endswith(".pt2") else _unpickled
    try:
        return load(io.BytesIO(content)), digest_now
    except Exception as error:
        raise ModelNotFoundError(
            f"{path} cannot be loaded", [f"{type(error).__name__}: {error}", where(error)], import_remedies(error)
        ) from error


def _unpickled(content: io.BytesIO) -> Any:
    return torch.load(content, map_location="cpu", weights_only=False)


class _SavingPickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Of functions within functions, and of parametrised modules, what a process that imports their modules needs."""

    def reducer_override(self, obj: Any) -> Any:
        """As cloudpickle's, but for these two.

        Cloudpickle copies what such a function finds in its module, so that a hook of transformers, say, would write
        to a list that nobody reads.  And torch refuses parametrised modules, whose class is made at run time.
        """
        if isinstance(obj, nn.Module) and is_parametrized(obj):
            return copyreg.__newobj__, (type(obj),), obj.__dict__  # type: ignore[attr-defined]  # not in its types
        reduced = super().reducer_override(obj)
        name = getattr(obj, "__module__", None) or ""
        if reduced is NotImplemented or not isinstance(obj, FunctionType) or not _is_imported(obj, name):
            return reduced
        make, (code, _, *others), (own, slots), *rest = reduced
        return make, (code, _Globals(name), *others), (own, {**slots, "__globals__": {}}), *rest


def _is_imported(function: FunctionType, name: str) -> bool:
    """Whether another process finds the module that ``function`` is of, which is not written itself."""
    return (
        name != "__main__"
        and name not in cloudpickle.list_registry_pickle_by_value()
        and function.__globals__ is getattr(sys.modules.get(name), "__dict__", None)
        and _is_importable(name)
    )


@dataclass(frozen=True, slots=True)
class _Globals:
    """Of a module, which is imported where the file is read."""

    module: str

    def __reduce__(self) -> tuple[Any, ...]:
        return _globals_of, (self.module,)


def _globals_of(module: str) -> dict[str, Any]:
    return vars(importlib.import_module(module))


class _Folders:
    """Of the import path; they are on it again when what comes behind them in the file is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        own = sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platstdlib")
        folders = (os.path.abspath(folder) for folder in sys.path if not folder.endswith(".zip"))
        return _append_folders, tuple(dict.fromkeys(each for each in folders if not each.startswith(own)))


def _append_folders(*folders: str) -> tuple[str, ...]:
    sys.path.extend(folder for folder in folders if folder not in sys.path)
    return folders


@contextmanager
def _by_value(model: LoadedModel) -> Iterator[None]:
    """Within it, code of modules that another process could not import goes into the file, as that of cells does."""
    owned: list[Any] = [*model.module.modules(), getattr(model.loss_fn, "function", model.loss_fn)]
    names = {getattr(owner, "__module__", None) or "" for each in owned for owner in (each, *type(each).__mro__)}
    private = [sys.modules[name] for name in sorted(names) if name in sys.modules and not _is_importable(name)]
    for module in private:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in private:
            cloudpickle.unregister_pickle_by_value(module)


def _is_importable(name: str) -> bool:
    if name == "__main__":  # cloudpickle knows
        return True
    try:
        return importlib.util.find_spec(name) is not None and sys.modules[name].__name__ == name
    except (ImportError, ValueError):
        return False


def _loss(model: LoadedModel) -> Tensor | None:
    """Of the example, by the module itself, which is left as it was; None of one that is not on the processor."""
    modules = model.owners.values()
    if any(parameter.device.type != "cpu" for module in modules for parameter in module.parameters()):
        return None
    require_values(model)
    try:
        with suppress(RuntimeError):
            return _loss_within(model, torch.no_grad())  # activations of a whole batch may not fit
        return _loss_within(model, torch.enable_grad())  # forward takes gradients itself
    except Exception as error:
        raise FactoryError(
            f"the module does not run on its example: {type(error).__name__}", [str(error), where(error)]
        ) from error


def _loss_within(model: LoadedModel, gradients: AbstractContextManager[Any]) -> Tensor:
    with untouched(*model.stateful), kept_parameters(*model.owners.values()), seeded(0), _one_thread(), gradients:
        return model.loss(*(tuple(tensor.clone() for tensor in each) for each in model.fed)).detach()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Within it operators run on the calling thread alone, as in the process that loads the module.

    Threads of OpenMP that wait for one another use their cores meanwhile: on cores that others want, too, a forward of
    GPT-2 took four times the processor time by two threads.
    """
    number = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(number)


def _dtype(module: nn.Module) -> str:
    """Of the parameters.

    Raises:
        UsageError: they have several.
    """
    numbers = (
        (name, each) for name, each in module.named_parameters() if each.is_floating_point() or each.is_complex()
    )
    floats = ((name, each.dtype.to_real()) for name, each in numbers)
    name_of = {str(dtype).removeprefix("torch."): name for name, dtype in floats}
    if len(name_of) > 1:
        raise UsageError(
            f"parameters of this {type(module).__name__} have several dtypes",
            [f"{name}: {dtype}" for dtype, name in name_of.items()],
            ["module.to(torch.float32): operators that gain by another one run in it under autocast='bfloat16'"],
        )
    return next(iter(name_of), "float32")


def _exported(content: io.BytesIO) -> Any:
    """What ``torch.export.save`` wrote: its module, with the example that it was exported with."""
    with warnings.catch_warnings():
        # torch 2.11 has tensors read the bytes of the file in place; nobody else holds them
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        program = torch.export.load(content)
    module = program.module()
    if program.example_inputs is None:
        return module
    arguments, keywords = program.example_inputs
    return module, keywords if keywords and not arguments else tuple(arguments)
