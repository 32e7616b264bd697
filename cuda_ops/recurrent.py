"""Shapes of recurrent operators (LSTM, GRU, Elman) without a walk over time.

    (time, sample, in)  ->  (time, sample, directions x out)  and the last states, shaped as the first ones

torch finds these shapes by running the recurrence step by step on tensors without data: slow for long sequences, and
under ``torch.export`` it fixes the number of steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_ATEN = torch.ops.aten
_KEYS = (torch._C.DispatchKey.CompositeImplicitAutograd, torch._C.DispatchKey.Autograd)

ShapeRule = Callable[..., tuple[Tensor, ...]]


def _lstm(input: Tensor, hx: list[Tensor], *options: Any, **names: Any) -> tuple[Tensor, ...]:
    dtype = _dtype(input)
    is_projected = hx[0].shape[-1] != hx[1].shape[-1]  # computed cell by cell then, where states are not cast
    state_dtype = hx[1].dtype if is_projected and input.device.type == "cpu" else dtype
    return _sequence(input, hx[0], dtype, *options, **names), _like(hx[0], dtype), _like(hx[1], state_dtype)


def _elman(input: Tensor, hx: Tensor, *options: Any, **names: Any) -> tuple[Tensor, ...]:
    dtype = _dtype(input)
    return _sequence(input, hx, dtype, *options, **names), _like(hx, dtype)


def _gru(input: Tensor, hx: Tensor, *options: Any, **names: Any) -> tuple[Tensor, ...]:
    dtype = input.dtype if input.device.type == "cpu" else _dtype(input)  # autocast passes over it on processors
    return _sequence(input, hx, dtype, *options, **names), _like(hx, dtype)


def _sequence(
    input: Tensor,
    state: Tensor,
    dtype: torch.dtype,
    params: list[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Tensor:
    return input.new_empty((*input.shape[:-1], state.shape[-1] * (2 if bidirectional else 1)), dtype=dtype)


def _like(state: Tensor, dtype: torch.dtype) -> Tensor:
    return state.new_empty(state.shape, dtype=dtype)


def _dtype(input: Tensor) -> torch.dtype:
    device = input.device.type
    is_lowered = torch.is_autocast_enabled(device) and input.dtype != torch.float64
    return torch.get_autocast_dtype(device) if is_lowered else input.dtype


RECURRENT_SHAPES: Mapping[Any, ShapeRule] = {
    _ATEN.lstm.input: _lstm,
    _ATEN.gru.input: _gru,
    _ATEN.rnn_tanh.input: _elman,
    _ATEN.rnn_relu.input: _elman,
}
"""By operator: takes its arguments, gives tensors of the shapes and dtypes of its results, of no particular values."""


@contextmanager
def recurrence_by_shape() -> Iterator[None]:
    """A context in which tensors without data go through recurrent operators by :data:`RECURRENT_SHAPES`.

    Tensors with data are computed as ever, on other threads as well.
    """
    before = {operator: dict(operator.py_kernels) for operator in RECURRENT_SHAPES}
    for operator, rule in RECURRENT_SHAPES.items():
        for key in _KEYS:
            operator.py_kernels[key] = _for_fakes(rule, before[operator].get(key) or operator.decompose)
        operator._dispatch_cache.clear()
    try:
        yield
    finally:
        for operator, kernels in before.items():
            operator.py_kernels.clear()
            operator.py_kernels.update(kernels)
            operator._dispatch_cache.clear()


def _for_fakes(rule: ShapeRule, otherwise: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(rule)
    def kernel(input: Tensor, *arguments: Any, **names: Any) -> Any:
        chosen = rule if isinstance(input, FakeTensor) else otherwise
        return chosen(input, *arguments, **names)

    return kernel
