"""Capture of models in mixed precision: torch's autocast to bfloat16, parameters in float32."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from cuda_ops.dense.recurrent import RECURRENT_SHAPES, autocast
from planner.ir.errors import UnsupportedModelError
from planner.ir.profile import ModelSource, Optimizer
from profiler import CapturedModule, LoadedModel
from profiler.capture.graph import capture
from profiler.capture.verify_capture import _own_result
from profiler.measure.job import MeasuringJob
from profiler.measure.timing import SegmentedPass, segments
from profiler.measure.worker import measure_model
from tests.profiler.capture.test_graph import Watched, loaded
from tests.profiler.test_models import TINY
from tests.profiler.varying_models import model_of

FACTORIES = [factory for factory in TINY if factory.__name__ in ("gpt", "resnet18", "gnmt")]

each_network = pytest.mark.parametrize("factory", FACTORIES, ids=lambda factory: factory.__name__)


@functools.cache
def captured(factory: Callable[..., Any]) -> tuple[CapturedModule, LoadedModel]:
    plain = loaded(factory, 2)
    model = LoadedModel(plain.module, plain.inputs, plain.targets, plain.loss_fn, autocast=torch.bfloat16)
    return capture(model), model


def dtypes_of(graph: CapturedModule, *tensors: Tensor) -> dict[str, str]:
    watched = Watched(graph.graph_module)
    with autocast("cpu", torch.bfloat16):
        watched.run(tensors[0].shape[0], *tensors)
    return {node: dtype for node, (_, dtype) in watched.found.items()}


@each_network
@pytest.mark.parametrize("samples", [2, 3])
def test_loss_gradients_and_buffers_equal_the_modules_to_the_bit(factory: Callable[..., Any], samples: int) -> None:
    graph, model = captured(factory)
    batch = loaded(factory, samples)
    twin = copy.deepcopy(model.module)
    exact = copy.deepcopy(model.module)
    with autocast("cpu", torch.bfloat16):
        expected = model.loss_fn(twin(*batch.inputs), batch.targets)
    with autocast("cpu", torch.bfloat16):
        found = graph.graph_module(samples, *batch.inputs, *batch.targets)
    assert torch.equal(found, expected)
    assert not torch.equal(found, model.loss_fn(exact(*batch.inputs), batch.targets))
    mine = torch.autograd.grad(found, list(model.module.parameters()))
    others = torch.autograd.grad(expected, list(twin.parameters()))
    for name, a, b in zip(dict(twin.named_parameters()), mine, others, strict=True):
        assert torch.equal(a, b), name
        assert a.dtype is torch.float32
    for a, b in zip(model.module.buffers(), twin.buffers(), strict=True):
        assert torch.equal(a, b)


@each_network
def test_every_value_has_the_dtype_that_its_spec_says(factory: Callable[..., Any]) -> None:
    graph, _ = captured(factory)
    batch = loaded(factory, 3)
    found = dtypes_of(graph, *batch.inputs, *batch.targets)
    specs = graph.graph.values()
    assert {value: specs[value].dtype for value in graph.node_of_value} == {
        value: found[node] for value, node in graph.node_of_value.items()
    }
    assert "bfloat16" in {spec.dtype for spec in specs.values()}
    assert {spec.dtype for spec in graph.graph.parameters.values()} == {"float32"}


@each_network
def test_layers_run_by_themselves_give_the_same_loss(factory: Callable[..., Any]) -> None:
    graph, model = captured(factory)
    tensors = dict(zip(graph.graph.inputs, (*model.inputs, *model.targets), strict=True))
    twin = copy.deepcopy(model)
    run = SegmentedPass(graph, tensors, 2)
    parts = segments(graph)
    for part in parts:
        run.forward(part)
    expected = twin.loss(twin.inputs, twin.targets)
    assert torch.equal(run.loss, expected)
    run.start_backward()
    for part in reversed(parts):
        run.backward(part)
    expected.backward()
    for mine, other in zip(model.module.parameters(), twin.module.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=0.05, atol=0.02 * other.grad.abs().max().item() + 1e-6)
        mine.grad = None


def test_a_model_is_measured_in_mixed_precision() -> None:
    arguments = {"vocabulary": "17", "width": "64", "layers": "1", "heads": "2", "context": "32"}
    measured = {}
    for lowered in ("", "bfloat16"):
        source = ModelSource("profiler.models.gpt:gpt", arguments, (4, 32), autocast=lowered)
        costs = measure_model(lambda report: None, MeasuringJob(source, Optimizer(), (4,), quick=True))
        measured[lowered] = {each.layer: each for each in costs.measurements}
        assert costs.iteration_s["4"] > 0
        assert all(each.forward_s > 0 for each in costs.measurements if each.layer.endswith("query"))
    plain, mixed = (found["blocks.0.gelu"] for found in measured.values())
    assert mixed.saved_bytes == plain.saved_bytes / 2  # its input, in half as many bytes


def autocast_model(function: Callable[..., Any], *inputs: Tensor, **parts: Any) -> LoadedModel:
    model = model_of(function, *inputs, varying={}, **parts)
    return LoadedModel(model.module, model.inputs, (), model.loss_fn, autocast=torch.bfloat16)


def test_code_that_asks_for_dtypes_is_told_those_of_autocast() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.layer(x)
        if y.dtype is torch.bfloat16:
            y = y * 2
        return torch.cat((y, torch.ones(x.shape[0], 1, dtype=y.dtype)), 1).float().softmax(-1)

    model = autocast_model(forward, torch.randn(3, 4), layer=nn.Linear(4, 4))
    graph = capture(model)
    dtypes = {name: spec.dtype for name, spec in graph.graph.values().items()}
    assert [dtypes[name] for name in ("layer", "mul", "cat", "to", "softmax")] == ["bfloat16"] * 3 + ["float32"] * 2
    with model.precision():
        found = graph.graph_module(3, *model.inputs)
    assert torch.equal(found, model.loss(model.inputs, ()))


def dtypes_of_gru_and_layer() -> tuple[str, str]:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.layer(m.gru(x)[0])

    parts = {"gru": nn.GRU(4, 5, batch_first=True), "layer": nn.Linear(5, 3)}
    graph = capture(autocast_model(forward, torch.randn(3, 6, 4), **parts))
    dtypes = {name: spec.dtype for name, spec in graph.graph.values().items()}
    return dtypes["gru"], dtypes["layer"]


def test_operators_that_autocast_passes_over_keep_their_dtype() -> None:
    assert dtypes_of_gru_and_layer() == ("float32", "bfloat16")


def test_a_dtype_that_torch_foresees_wrongly_is_corrected(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = RECURRENT_SHAPES[torch.ops.aten.rnn_tanh.input]  # says bfloat16
    monkeypatch.setitem(cast(dict[Any, Any], RECURRENT_SHAPES), torch.ops.aten.gru.input, wrong)
    assert dtypes_of_gru_and_layer() == ("float32", "bfloat16")


def test_batch_norms_and_their_statistics_stay_in_float32() -> None:
    parts = {"conv": nn.Conv2d(3, 4, 3), "norm": nn.BatchNorm2d(4)}
    model = autocast_model(lambda m, x: m.norm(m.conv(x)).relu(), torch.randn(2, 3, 6, 6), **parts)
    graph = capture(model)
    before = copy.deepcopy(dict(model.module.named_buffers()))
    assert dtypes_of(graph, *model.inputs)["batch_norm"] == graph.graph.values()["norm"].dtype
    assert not torch.equal(model.module.norm.running_mean, before["norm.running_mean"])
    assert model.module.norm.running_mean.dtype is torch.float32


class Picky(nn.Module):
    """Fails in lower precision, or on fewer than ``least`` samples."""

    def __init__(self, least: int, in_float32: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.least = least
        self.in_float32 = in_float32

    def forward(self, x: Tensor) -> Tensor:
        if len(x) < self.least or (torch.is_autocast_enabled("cpu") or not self.in_float32):
            raise RuntimeError("could not create a primitive")
        return x * self.weight


@pytest.mark.parametrize(
    ("least", "in_float32", "autocast_to", "advice"),
    [
        (4, True, None, "targets must be valid for each"),
        (1, True, torch.bfloat16, "leave out --autocast"),
        (1, False, torch.bfloat16, "in plain torch"),
        (9, True, None, "in plain torch"),
    ],
)
def test_what_fails_is_told_with_torchs_message_and_an_advice_that_fits(
    least: int, in_float32: bool, autocast_to: torch.dtype | None, advice: str
) -> None:
    x = torch.randn(4, 3)
    model = LoadedModel(Picky(least, in_float32), (x,), (x,), lambda y, t: (y - t[0]).square().mean())
    model = dataclasses.replace(model, autocast=autocast_to)
    with pytest.raises(UnsupportedModelError, match="RuntimeError: could not create a primitive") as caught:
        _own_result(model, {"inputs": x[:2], "targets": x[:2]}, 2)
    assert advice in caught.value.remedies[0]
    assert ("2 samples" in caught.value.title) == (least == 4)
