"""What user code gives as data, checked: batches and micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from planner.ir.errors import FactoryError, HalopipeError
from profiler.source import where

Tensors = tuple[Tensor, ...]
Pair = tuple[Tensors, Tensors]
"""Inputs and targets, samples first."""

Item = Pair | list[Pair]
"""A global batch whole, or its micro-batches one by one."""


@dataclass(frozen=True, slots=True)
class Form:
    """Checks what user code gives.

    Attributes:
        name: of the factory.
        dtype: that floats are cast to.
    """

    name: str
    dtype: torch.dtype

    def item(self, found: Any) -> Item:
        """A batch, or a list of micro-batches, each an (inputs, targets) pair.

        Raises:
            FactoryError: it is neither.
        """
        if isinstance(found, list) and found and all(isinstance(each, tuple) for each in found):
            return [self.pair(each) for each in found]
        return self.pair(found)

    def pair(self, found: Any) -> Pair:
        """Inputs and targets."""
        match found:
            case (inputs, targets):
                return self._tensors(inputs), self._tensors(targets)
        raise FactoryError(f"{self.name} gave no (inputs, targets)", [f"it gave {type(found).__name__}"])

    @contextmanager
    def told(self) -> Iterator[None]:
        """Says of errors of user code where they come from."""
        try:
            yield
        except HalopipeError:
            raise
        except Exception as error:
            raise FactoryError(f"{self.name} raised {type(error).__name__}", [str(error), where(error)]) from error

    def _tensors(self, value: Any) -> Tensors:
        values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
        if not all(isinstance(each, Tensor) for each in values):
            types = ", ".join(type(each).__name__ for each in values)
            raise FactoryError(f"{self.name} gave something else than tensors", [f"it gave {types}"])
        return tuple(each.to(self.dtype) if each.is_floating_point() else each for each in values)
