"""Recurrent operators (LSTM, GRU, Elman): their shapes without a walk over time, and mixed precision on any processor.

    (time, sample, in)  ->  (time, sample, directions x out)  and the last states, shaped as the first ones

torch finds these shapes by running the recurrence step by step on tensors without data: slow for long sequences, and
under ``torch.export`` it fixes the number of steps.

Under autocast torch gives an LSTM to oneDNN in the lower precision whether or not oneDNN has it for the processor
(for bfloat16 it needs AVX-512), and raises where it has not.  :func:`autocast` sees to it that it runs.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from cuda_ops._torch import COMPOSITE_KEYS, FakeTensor, clear_dispatch_cache, disable_current_modes

_ATEN = torch.ops.aten


def _shaped(
    input: Tensor,
    hx: Tensor | Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    passes_over: bool = False,
) -> tuple[Tensor, ...]:
    """Of the result, and of the last states.

    Args:
        passes_over: whether autocast leaves it alone on processors.
    """
    device = input.device.type
    states = (hx,) if isinstance(hx, Tensor) else tuple(hx)
    is_lowered = torch.is_autocast_enabled(device) and input.dtype != torch.float64
    dtype = torch.get_autocast_dtype(device) if is_lowered and not (passes_over and device == "cpu") else input.dtype
    widths = [state.shape[-1] for state in states]
    # computed cell by cell then, where states are not cast
    last = states[-1].dtype if len({*widths}) > 1 and device == "cpu" else dtype
    output = input.new_empty((*input.shape[:-1], widths[0] * (2 if bidirectional else 1)), dtype=dtype)
    ends = zip(states, (dtype, last) if len(states) > 1 else (dtype,), strict=True)
    return output, *(state.new_empty(state.shape, dtype=each) for state, each in ends)


RECURRENT_SHAPES: Mapping[Any, Callable[..., tuple[Tensor, ...]]] = {
    _ATEN.lstm.input: _shaped,
    _ATEN.gru.input: functools.partial(_shaped, passes_over=True),
    _ATEN.rnn_tanh.input: _shaped,
    _ATEN.rnn_relu.input: _shaped,
}
"""By operator: takes its arguments, gives tensors of the shapes and dtypes of its results, of no particular values."""


@contextmanager
def recurrence_by_shape() -> Iterator[None]:
    """A context in which tensors without data go through recurrent operators by :data:`RECURRENT_SHAPES`.

    Tensors with data are computed as ever, on other threads as well.
    """
    before = {operator: dict(operator.py_kernels) for operator in RECURRENT_SHAPES}
    for operator, rule in RECURRENT_SHAPES.items():
        for key in COMPOSITE_KEYS:
            operator.py_kernels[key] = _for_fakes(rule, before[operator].get(key) or operator.decompose)
        clear_dispatch_cache(operator)
    try:
        yield
    finally:
        for operator, kernels in before.items():
            operator.py_kernels.clear()
            operator.py_kernels.update(kernels)
            clear_dispatch_cache(operator)


def _for_fakes(rule: Callable[..., Any], otherwise: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(rule)
    def kernel(input: Tensor, *arguments: Any, **names: Any) -> Any:
        chosen = rule if isinstance(input, FakeTensor) else otherwise
        return chosen(input, *arguments, **names)

    return kernel


def autocast(device_type: str, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """``torch.autocast``, under which LSTMs run on every processor; of no dtype: no autocast.

    Where oneDNN lacks the LSTM of this dtype, it is computed in float32 of tensors rounded to ``dtype``, and rounded
    again: what processors that have it compute, but for the order of sums.  That holds for the rest of the process,
    for the user's own calls as well.
    """
    if dtype is None:
        return nullcontext()
    if device_type == "cpu" and lacks_lstm(dtype):
        _compute_in_float32()
    return torch.autocast(device_type, dtype)


@functools.cache
def lacks_lstm(dtype: torch.dtype) -> bool:
    """Whether oneDNN has no LSTM of ``dtype`` for this processor: torch is asked by running one."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]  # torch's has no types
        return False  # torch takes its own then
    size = 2
    with disable_current_modes(), torch.inference_mode(False), torch.enable_grad():
        x = torch.zeros(1, 1, size)
        state = torch.zeros(1, size)
        bias = torch.zeros(4 * size)
        weight = torch.zeros(4 * size, size, requires_grad=True)
        tensors = [each.to(dtype) for each in (x, weight, weight, bias, bias, state, state)]
        options: tuple[Any, ...] = (False, [], _LSTM, size, 1, True, False, False, True)
        try:
            with torch.autocast("cpu", enabled=False):
                _ATEN.mkldnn_rnn_layer.default(*tensors, *options)[0].sum().backward()
        except RuntimeError:
            return True
    return False


_LSTM = 2  # the mode of ``aten::mkldnn_rnn_layer``; it knows no other


@functools.cache  # which keeps the library alive
def _compute_in_float32() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL", "AutocastCPU")  # type: ignore[no-untyped-call]  # no types
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*[Oo]verriding a previously registered kernel")
        library.impl("mkldnn_rnn_layer", _lstm_in_float32)  # type: ignore[no-untyped-call]  # nor has this
    return library


def _lstm_in_float32(*arguments: Any) -> tuple[Tensor, ...]:
    """A layer in one direction, called under autocast."""
    dtype = torch.get_autocast_dtype("cpu")

    def rounded(argument: Any) -> Any:
        is_lowered = isinstance(argument, Tensor) and argument.is_floating_point()
        return argument.to(dtype).float() if is_lowered else argument

    with torch.autocast("cpu", enabled=False):
        *states, workspace = _ATEN.mkldnn_rnn_layer.default(*map(rounded, arguments))
    return *(state.to(dtype) for state in states), workspace
