"""Recurrent layers: shapes without a walk over time, packed sequences as one operator."""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from cuda_ops.dense.packed import PackedSequenceError, packed_as_padded
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
    module = make()
    x = torch.randn(2, 3, 4)
    calls = _Calls()
    lowered = torch.bfloat16 if kind == "autocast" else None
    if kind == "float64":
        module = module.double()
        x = x.double()
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
    module = nn.GRU(4, 5)
    x = torch.randn(3, 2, 4)
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
    x = torch.randn(5, 3, 4)
    state = torch.randn(3, 6)
    bias = torch.randn(24)
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


LENGTHS = torch.tensor([2, 5, 1, 4])
X = torch.randn(4, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self, layer: nn.RNNBase, value: float = 0.0, total: bool = True) -> None:
        super().__init__()
        self.layer = layer.double()
        self.value = value
        self.total = total

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        time = int(self.layer.batch_first)
        packed, ends = self.layer(pack_padded_sequence(x, lengths, self.layer.batch_first, enforce_sorted=False))
        total = x.size(time) if self.total else None
        padded, _ = pad_packed_sequence(packed, self.layer.batch_first, self.value, total_length=total)
        return (padded, *ends) if isinstance(ends, tuple) else (padded, ends)


def exported(module: nn.Module, *inputs: Tensor) -> nn.Module:
    with packed_as_padded():
        return torch.export.export(module, inputs, strict=False).module()


@pytest.mark.parametrize(
    "layer",
    [
        nn.LSTM(3, 4, batch_first=True),
        nn.LSTM(3, 4, num_layers=2, bidirectional=True, proj_size=2),
        nn.GRU(3, 4, num_layers=2, bias=False, bidirectional=True, batch_first=True),
        nn.RNN(3, 4, nonlinearity="relu"),
    ],
    ids=["lstm", "projected", "gru", "rnn"],
)
def test_results_and_gradients_are_those_of_the_packed_layer(layer: nn.RNNBase) -> None:
    module = Net(layer, value=-1.0)
    x = X if layer.batch_first else X.transpose(0, 1).contiguous()
    graph = exported(module, x, LENGTHS)
    other = torch.tensor([5, 3, 3, 2])
    for lengths in (LENGTHS, other):
        found = []
        for each in (module, graph):
            each.zero_grad()
            results = each(x, lengths)
            sum((value * value.sin()).sum() for value in results).backward()
            found.append([*results, *(p.grad for _, p in sorted(each.named_parameters()))])
        for expected, value in zip(*found, strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)


def test_a_rank_without_samples_takes_part() -> None:
    weights = [p.detach().requires_grad_(True) for p in nn.GRU(3, 4).double().parameters()]
    options = ("gru", [4], 1, True, True, False, True)
    padded, end = torch.ops.halopipe.packed_recurrence(X[:0], LENGTHS[:0], [], weights, *options)
    assert (padded.shape, end.shape) == ((0, 5, 4), (1, 0, 4))
    padded.sum().backward()
    assert all(not weight.grad.any() for weight in weights)


@pytest.mark.parametrize(
    ("module", "lengths", "words"),
    [
        (Net(nn.GRU(3, 4, batch_first=True), total=False), LENGTHS, r"total_length=x\.size\(1\)"),
        (Net(nn.GRU(3, 4, num_layers=2, dropout=0.5, batch_first=True)), LENGTHS, "drops values between its layers"),
    ],
    ids=["length", "dropout"],
)
def test_what_is_not_captured_is_refused(module: nn.Module, lengths: Tensor, words: str) -> None:
    with pytest.raises(PackedSequenceError, match=words):
        exported(module, X, lengths)


def test_lengths_in_a_list_and_looks_inside_are_refused() -> None:
    class Looks(nn.Module):
        def __init__(self, lengths: object, name: str) -> None:
            super().__init__()
            self.lengths = lengths
            self.name = name

        def forward(self, x: Tensor) -> Tensor:
            return getattr(pack_padded_sequence(x, self.lengths, True, False), self.name)

    with pytest.raises(PackedSequenceError, match="lengths as a list"):
        exported(Looks([5, 4, 3, 2], "data"), X)
    with pytest.raises(PackedSequenceError, match=r"reads \.data of a packed sequence"):
        exported(Looks(LENGTHS, "data"), X)


def test_torch_packs_as_ever_within_and_behind() -> None:
    with packed_as_padded():
        inside = pack_padded_sequence(X, LENGTHS, True, False)
    assert torch.equal(inside.data, pack_padded_sequence(X, LENGTHS, True, False).data)
    assert inside.batch_sizes.tolist() == [4, 3, 2, 2, 1]
    padded, lengths = pad_packed_sequence(inside, batch_first=True)
    assert torch.equal(lengths, LENGTHS)
    assert torch.equal(padded[1], X[1])
