"""Finds the factory that a MODEL string names."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from planner.ir.errors import ModelNotFoundError

_FORMS = "MODEL is pkg.mod:factory or path/file.py:factory"


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
    return value


def _append_to_path(folder: str) -> None:
    if folder not in sys.path:
        sys.path.append(folder)


def _from_file(text: str, place: str) -> ModuleType:
    path = Path(place)
    if not path.is_file():
        near = sorted(str(found) for found in path.parent.glob("*.py")) if path.parent.is_dir() else []
        detail = f"Python files there: {', '.join(near) or 'none'}" if path.parent.is_dir() else "nor is its folder"
        raise ModelNotFoundError(f"{text!r}: {place} is not there", [detail])
    _append_to_path(os.getcwd())
    _append_to_path(str(path.resolve().parent))
    name = f"halopipe_model_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ModelNotFoundError(f"{text!r}: {place} is no Python file", remedies=[_FORMS])
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up here
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise _broken(place, error) from error
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
    frames = traceback.extract_tb(error.__traceback__)
    at = f"at {frames[-1].filename}:{frames[-1].lineno}" if frames else "at an unknown place"
    if isinstance(error, SyntaxError):
        at = f"at {error.filename}:{error.lineno}"
    return ModelNotFoundError(f"{place} cannot be imported: {type(error).__name__}", [str(error), at])


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
