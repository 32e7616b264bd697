"""A model copied with what its functions hold.

``copy.deepcopy`` takes a function as it is.  A ``forward`` that is wrapped on the instance, a hook or a loss that reads
another layer, from its closure or a global variable, would go on with the layers of the model that was copied.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterable, Iterator, Mapping
from types import CellType, FunctionType, ModuleType
from typing import Any

from torch import Tensor

from profiler.capture.user_state import INSTALLED, names_in
from profiler.source.model import LoadedModel, named_parameters

_MOST_FOLLOWED = 10_000
"""Of a container: larger ones are data."""
_LEAVES = (type, ModuleType, Tensor, str, bytes, int, float, complex, type(None))


def copied(model: LoadedModel) -> LoadedModel:
    """A copy that shares no part with ``model``; what its functions hold beside parts of it they share.

    It has what people put on parameters, which torch's own copies of them lack.

    Raises:
        Exception: whatever an object of the user's raises that cannot be copied.
    """
    holders = _holders(model)
    functions = [each for each in holders.values() if isinstance(each, FunctionType)]
    spaces = {id(each.__globals__): dict(each.__globals__) for each in functions if _globals_held(each, holders)}
    unfilled = [_unfilled(each, spaces) for each in functions]
    memo: dict[int, Any] = {id(each): other for each, other in zip(functions, unfilled, strict=True)}

    def own(value: Any) -> Any:
        return copy.deepcopy(value, memo) if id(value) in holders else value

    for function, other in zip(functions, unfilled, strict=True):
        for cell, copied_cell in zip(function.__closure__ or (), other.__closure__ or (), strict=True):
            for content in _contents(cell):
                copied_cell.cell_contents = own(content)
        for name in _globals_held(function, holders):
            other.__globals__[name] = own(function.__globals__[name])
        other.__defaults__ = function.__defaults__ and tuple(map(own, function.__defaults__))
        other.__kwdefaults__ = function.__kwdefaults__ and {k: own(v) for k, v in function.__kwdefaults__.items()}
        other.__dict__.update({name: own(value) for name, value in function.__dict__.items()})
    twin = copy.deepcopy(model, memo)
    originals = named_parameters(model.owners)
    for name, parameter in named_parameters(twin.owners).items():
        vars(parameter).update(copy.deepcopy(vars(originals[name]), memo))
    return twin


def _holders(model: LoadedModel) -> dict[int, Any]:
    """By id what ``model`` reaches that leads to a part of it: modules, parameters, buffers."""
    modules = [part for owner in model.owners.values() for part in owner.modules()]
    tensors = [each for part in modules for each in (*part.parameters(False), *part.buffers(False))]
    visited: dict[int, Any] = {}
    held_by: dict[int, list[Any]] = {}
    waiting: list[Any] = [model]
    while waiting:
        holder = waiting.pop()
        if id(holder) in visited:
            continue
        visited[id(holder)] = holder
        for each in _held(holder):
            held_by.setdefault(id(each), []).append(holder)
            waiting.append(each)
    return _behind([*modules, *tensors], held_by)


def _behind(parts: Iterable[Any], held_by: Mapping[int, list[Any]]) -> dict[int, Any]:
    holders: dict[int, Any] = {}
    waiting = list(parts)
    while waiting:
        each = waiting.pop()
        if id(each) not in holders:
            holders[id(each)] = each
            waiting += held_by.get(id(each), [])
    return holders


def _held(value: Any) -> Iterator[Any]:
    """What ``value`` refers to, but for code and classes."""
    if isinstance(value, FunctionType):
        cells = (content for cell in value.__closure__ or () for content in _contents(cell))
        named = (value.__globals__[name] for name in _globals_read(value))
        referents: Iterable[Any] = (
            *cells,
            *named,
            *(value.__defaults__ or ()),
            *(value.__kwdefaults__ or {}).values(),
            *value.__dict__.values(),
        )
    elif isinstance(value, (list, tuple, dict, set)) and len(value) > _MOST_FOLLOWED:
        referents = ()
    else:
        referents = gc.get_referents(value)
    for each in referents:
        if isinstance(each, Tensor) or not isinstance(each, _LEAVES):
            yield each


def _globals_read(function: FunctionType) -> Iterator[str]:
    """The global variables that a function of the user's names."""
    if not any(part in function.__code__.co_filename for part in INSTALLED):
        yield from (name for name in names_in(function.__code__) if name in function.__globals__)


def _globals_held(function: FunctionType, holders: Mapping[int, Any]) -> list[str]:
    return [name for name in _globals_read(function) if id(function.__globals__[name]) in holders]


def _contents(cell: CellType) -> Iterator[Any]:
    try:
        yield cell.cell_contents
    except ValueError:  # it is empty: assigned to later
        return


def _unfilled(function: FunctionType, spaces: Mapping[int, dict[str, Any]]) -> FunctionType:
    """A function of the same code, whose cells are empty; functions that share global variables share them again."""
    space = spaces.get(id(function.__globals__), function.__globals__)
    cells = None if function.__closure__ is None else tuple(CellType() for _ in function.__closure__)
    twin = FunctionType(function.__code__, space, function.__name__, None, cells)
    for name in ("__module__", "__qualname__", "__doc__", "__annotations__"):
        setattr(twin, name, getattr(function, name))
    return twin
