"""Shapes of recurrent operators without a walk over time, against the operators themselves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from cuda_ops.recurrent import RECURRENT_SHAPES, recurrence_by_shape

MODULES: dict[str, Callable[[], nn.RNNBase]] = {
    "lstm": lambda: nn.LSTM(4, 6),
    "two directions and layers": lambda: nn.LSTM(4, 6, num_layers=2, bidirectional=True, batch_first=True),
    "projected": lambda: nn.LSTM(4, 6, proj_size=2, bidirectional=True),
    "without biases": lambda: nn.LSTM(4, 6, bias=False),
    "gru": lambda: nn.GRU(4, 5, num_layers=2, batch_first=True),
    "tanh": lambda: nn.RNN(4, 3, bidirectional=True),
    "relu": lambda: nn.RNN(4, 3, nonlinearity="relu"),
}


class _Calls(torch.overrides.TorchFunctionMode):
    """Notes the recurrent operator that a module calls, with its arguments."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        operator = {"lstm": "lstm", "gru": "gru", "rnn_tanh": "rnn_tanh", "rnn_relu": "rnn_relu"}.get(func.__name__)
        if operator is not None:
            self.found = getattr(torch.ops.aten, operator).input, args
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:LSTM with projections")  # torch says that it takes its other implementation
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float64], ids=["plain", "autocast", "float64"])
@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_shapes_and_dtypes_are_the_operators_own(make: Callable[[], nn.RNNBase], dtype: torch.dtype | None) -> None:
    module, x, calls = make(), torch.randn(2, 3, 4), _Calls()
    if dtype is torch.float64:
        module, x = module.double(), x.double()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None), calls:
        module(x)
    operator, arguments = calls.found
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
        expected = operator(*arguments)
        found = RECURRENT_SHAPES[operator](*arguments)
    assert [(t.shape, t.dtype) for t in found] == [(t.shape, t.dtype) for t in expected]


def test_export_keeps_the_number_of_steps_free_and_leaves_nothing_behind() -> None:
    module = nn.LSTM(4, 6, batch_first=True)
    before = {operator: dict(operator.py_kernels) for operator in RECURRENT_SHAPES}
    with recurrence_by_shape():
        shapes = ({0: torch.export.Dim("samples"), 1: torch.export.Dim("time")},)
        exported = torch.export.export(_First(module), (torch.randn(2, 3, 4),), strict=False, dynamic_shapes=shapes)
    x = torch.randn(5, 7, 4)
    assert torch.equal(exported.module()(x), module(x)[0])
    assert {operator: dict(operator.py_kernels) for operator in RECURRENT_SHAPES} == before


class _First(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)[0]


def test_tensors_with_data_are_computed_as_ever() -> None:
    module, x = nn.GRU(4, 5), torch.randn(3, 2, 4)
    expected = module(x)[0]
    with recurrence_by_shape(), torch._dispatch.python.enable_python_dispatcher():
        torch.testing.assert_close(module(x)[0], expected)


def test_a_long_sequence_without_data_takes_no_time() -> None:
    with FakeTensorMode(), recurrence_by_shape(), torch._dispatch.python.enable_python_dispatcher():
        module = nn.LSTM(4, 6, batch_first=True)
        assert module(torch.empty(2, 1_000_000, 4))[0].shape == (2, 1_000_000, 6)
