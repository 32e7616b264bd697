"""An optimiser object of a script's for its ranks: pickled whole, but for its parameters, which are named instead."""

from __future__ import annotations

import io
import pickle
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch
from torch import nn

from cuda_ops._torch import optimizer_attributes, optimizer_like
from planner.ir.errors import UsageError
from runtime.optim.user_object import require_same_values, settings_of, values_read

_ITSELF = 0
"""In place of a parameter's name: the optimiser."""


@dataclass(frozen=True, slots=True)
class Packed:
    """An optimiser object for another process, without its parameters, which are named instead.

    Attributes:
        cls: its class, pickled.
        content: the rest of it, pickled.
        values: that its code reads in the script.
    """

    cls: bytes
    content: bytes
    values: Sequence[tuple[str, str]]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, names: Mapping[str, nn.Parameter]) -> Packed:
        """``optimizer``, whose parameters have these names.

        Raises:
            UsageError: it, or its class, cannot be pickled.
        """
        name_of: dict[int, Any] = {id(parameter): name for name, parameter in names.items()} | {id(optimizer): _ITSELF}
        content = (
            optimizer_attributes(optimizer),
            [{**settings_of(group), "params": group["params"]} for group in optimizer.param_groups],
            dict(optimizer.state),
            {name: vars(parameter) for name, parameter in names.items() if vars(parameter)},
        )
        try:
            return cls(_pickled(type(optimizer), {}), _pickled(content, name_of), values_read(optimizer))
        except Exception as error:
            raise UsageError(
                f"this {type(optimizer).__name__} cannot be given to the ranks, which are processes of their own",
                [f"{type(error).__name__}: {error}"],
                [
                    "define its class in a module that is imported, and keep what cannot be pickled out of it",
                    "torchrun, and hp.execute: each rank makes its own",
                ],
            ) from error

    def made(self, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        """The same object of these parameters."""
        cls = pickle.loads(self.cls)
        optimizer: torch.optim.Optimizer = cls.__new__(cls)
        objects: dict[Any, Any] = {**parameters, _ITSELF: optimizer}
        attributes, groups, state, of_parameters = _NamedUnpickler(io.BytesIO(self.content), objects).load()
        for name, own in of_parameters.items():
            vars(parameters[name]).update(own)
        optimizer_like(optimizer, attributes, groups, defaultdict(dict, state))
        require_same_values(type(optimizer).__name__, values_read(optimizer), self.values)
        return optimizer


def _pickled(value: Any, names: Mapping[int, Any]) -> bytes:
    file = io.BytesIO()
    _NamingPickler(file, names).dump(value)
    return file.getvalue()


class _NamingPickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    def __init__(self, file: io.BytesIO, names: Mapping[int, Any]) -> None:
        super().__init__(file)
        self._names = names

    def persistent_id(self, obj: Any) -> Any:
        return self._names.get(id(obj))


class _NamedUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, objects: Mapping[Any, Any]) -> None:
        super().__init__(file)
        self._objects = objects

    def persistent_load(self, pid: Any) -> Any:
        return self._objects[pid]
