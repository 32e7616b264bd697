"""Shapes of recurrent operators without a walk over time, against the operators themselves."""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from cuda_ops.dense.recurrent import RECURRENT_SHAPES, _lstm_in_float32, autocast, lacks_lstm, recurrence_by_shape
from tests.processes import Program

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
@pytest.mark.parametrize("kind", ["plain", "autocast", "float64"])
@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_shapes_and_dtypes_are_the_operators_own(make: Callable[[], nn.RNNBase], kind: str) -> None:
    module, x, calls = make(), torch.randn(2, 3, 4), _Calls()
    lowered = torch.bfloat16 if kind == "autocast" else None
    if kind == "float64":
        module, x = module.double(), x.double()
    with autocast("cpu", lowered), calls:
        module(x)
    operator, arguments = calls.found
    with autocast("cpu", lowered):
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


@pytest.mark.skipif(lacks_lstm(torch.bfloat16), reason="torch cannot run an LSTM in bfloat16 on this processor")
@pytest.mark.parametrize("reverse", [False, True])
def test_a_layer_in_float32_is_the_layer_in_bfloat16_but_for_the_order_of_sums(reverse: bool) -> None:
    torch.manual_seed(0)
    x, state, bias = torch.randn(5, 3, 4), torch.randn(3, 6), torch.randn(24)
    weights = torch.randn(24, 4), torch.randn(24, 6)
    options = (reverse, [], 2, 6, 1, True, False, False, True)

    def run(function: Callable[..., tuple[Tensor, ...]]) -> list[Tensor]:
        leaves = [each.clone().requires_grad_() for each in (x, *weights, bias, bias, state, state)]
        with torch.autocast("cpu", torch.bfloat16):
            y, *last = function(*leaves, *options)[:3]
        gradients = torch.autograd.grad((y * torch.sin(y.detach())).sum(), leaves)
        return [y, *last, *gradients]

    for found, expected in zip(run(_lstm_in_float32), run(torch.ops.aten.mkldnn_rnn_layer.default), strict=True):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02 * expected.abs().max().item())


_OLD_PROCESSOR = """
import torch
from torch import nn
from cuda_ops.dense.recurrent import lacks_lstm
from planner.ir.errors import UnsupportedModelError
from profiler.capture.graph import capture
from profiler.source.model import LoadedModel
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode():
    assert lacks_lstm(torch.bfloat16)  # of tensors without data nothing can be told

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.leave = nn.LSTM(4, 6, num_layers=2, batch_first=True), nn.Linear(6, 2)
    def forward(self, x):
        return self.leave(self.lstm(x)[0])

torch.manual_seed(0)
model = LoadedModel(Net(), (torch.randn(4, 5, 4),), (torch.randn(4, 5, 2),), lambda y, t: (y - t[0]).square().mean(),
                    autocast=torch.bfloat16)
loss = model.loss(model.inputs, model.targets)
loss.backward()
with torch.autocast("cpu", torch.bfloat16):
    assert torch.equal(capture(model).graph_module(4, *model.inputs, *model.targets), loss)
model.module.zero_grad()
exact = model.loss_fn(model.module(*model.inputs), model.targets)
torch.testing.assert_close(loss, exact, rtol=0.02, atol=0.02)
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the name of an older instruction set")
def test_a_processor_without_the_lstm_captures_and_trains_it_under_autocast(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_OLD_PROCESSOR)
    code, _, errors = Program.start(tmp_path / "train.py", ONEDNN_MAX_CPU_ISA="AVX2").end()  # read at its first use
    assert code == 0, errors
