"""The batches that a run trains on: of a data factory, or the model's own example again and again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from planner.ir.errors import FactoryError, UsageError
from profiler.factory import find_factory
from profiler.source import LoadedModel, where

Tensors = tuple[Tensor, ...]
Batch = tuple[Tensors, Tensors]
"""Inputs and targets, samples first."""


def batches(data: str, model: LoadedModel, global_batch: int, seed: int) -> Iterator[Batch]:
    """Batches of ``global_batch`` samples, the same on every rank; floats in the dtype of the model's example.

    Args:
        data: ``pkg.mod:factory`` or ``path/file.py:factory``; empty for the example.

    Raises:
        ModelNotFoundError, FactoryError: the factory is not there, or fails.
    """
    if not data:
        return _repeated(model, global_batch)
    return _made(data, model, global_batch, seed)


def take(stream: Iterator[Batch], step: int) -> Batch:
    """The next batch.

    Raises:
        UsageError: there is none.
    """
    batch = next(stream, None)
    if batch is None:
        raise UsageError(
            f"the data ended after {step} batches", ["one is needed for every step"], [f"--steps {max(step, 1)}"]
        )
    return batch


def _repeated(model: LoadedModel, global_batch: int) -> Iterator[Batch]:
    rows = torch.arange(global_batch) % model.samples
    inputs, targets = (
        tuple(t[rows] if t.ndim and t.shape[0] == model.samples else t for t in tensors)
        for tensors in (model.inputs, model.targets)
    )
    while True:
        yield inputs, targets


def _made(data: str, model: LoadedModel, global_batch: int, seed: int) -> Iterator[Batch]:
    factory = find_factory(data)
    floats = [tensor.dtype for tensor in model.module.parameters() if tensor.is_floating_point()]
    dtype = floats[0] if floats else torch.get_default_dtype()
    try:
        for item in factory(global_batch, tuple(model.inputs[0].shape), seed):
            yield _batch(data, item, dtype)
    except (FactoryError, UsageError):
        raise
    except Exception as error:
        raise FactoryError(f"{data} raised {type(error).__name__}", [str(error), where(error)]) from error


def _batch(data: str, item: Any, dtype: torch.dtype) -> Batch:
    match item:
        case (inputs, targets):
            return _tensors(data, inputs, dtype), _tensors(data, targets, dtype)
    raise FactoryError(f"{data} gave no (inputs, targets)", [f"it gave {type(item).__name__}"])


def _tensors(data: str, value: Any, dtype: torch.dtype) -> Tensors:
    values = value if isinstance(value, tuple) else (value,)
    if not all(isinstance(each, Tensor) for each in values):
        types = ", ".join(type(each).__name__ for each in values)
        raise FactoryError(f"{data} gave something else than tensors", [f"it gave {types}"])
    return tuple(each.to(dtype) if each.is_floating_point() else each for each in values)
