"""Capture of models whose inputs vary in other dims than samples: lengths, numbers of points, sizes of images."""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from planner.ir.errors import UnsupportedModelError
from profiler import CapturedModule, LoadedModel
from profiler.capture.graph import capture
from profiler.capture.sizes import require
from profiler.measure.timing import SegmentedPass, segments
from tests.profiler.varying_models import MODELS, VaryingModel, model_of

TIME = {"time": (("inputs", 1),)}

each_model = pytest.mark.parametrize("name", MODELS)


@functools.cache
def captured(name: str) -> tuple[CapturedModule, LoadedModel]:
    model = MODELS[name].load()
    return capture(model), model


def run(graph: CapturedModule, inputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> Tensor:
    """The graph's loss, its integers taken from the tensors."""
    tensors = dict(zip(graph.graph.inputs, (*inputs, *targets), strict=True))
    sizes = [tensors[tensor].shape[dim] for tensor, dim in graph.sizes.values()]
    return graph.graph_module(*([inputs[0].shape[0]] if graph.polymorphic else []), *sizes, *inputs, *targets)


def gradients(module: nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(module.parameters())))


@each_model
def test_loss_gradients_and_buffers_are_the_modules_at_every_size(name: str) -> None:
    graph, model = captured(name)
    varying: VaryingModel = MODELS[name]
    for sizes in varying.sizes:
        for samples in (1, 3):
            inputs, targets = varying.batch(samples, sizes)
            twin = copy.deepcopy(model.module)
            expected = model.loss_fn(twin(*inputs), targets)
            found = run(graph, inputs, targets)
            assert torch.equal(found, expected), (sizes, samples)
            for mine, other in zip(gradients(model.module, found), gradients(twin, expected), strict=True):
                assert torch.equal(mine, other)
            for mine, other in zip(model.module.buffers(), twin.buffers(), strict=True):
                assert torch.equal(mine, other)


@each_model
def test_sizes_are_placeholders_and_integers_follow_from_them_in_no_layer(name: str) -> None:
    graph, model = captured(name)
    placeholders = [node.target for node in graph.graph_module.graph.nodes if node.op == "placeholder"]
    assert placeholders == ["num_samples", *model.varying, *graph.graph.inputs]
    assert graph.sizes == {size: places[0] for size, places in model.varying.items()}
    nodes = {node.name: node for node in graph.graph_module.graph.nodes}
    free = [node for node in nodes.values() if node.op == "call_function" and node.name not in graph.layer_of_node]
    for node in free:
        for argument in node.all_input_nodes:
            assert argument in free or argument.target in ("num_samples", *graph.sizes)


@each_model
def test_samples_stay_apart_and_dims_bear_the_names_of_what_varies(name: str) -> None:
    graph, model = captured(name)
    assert graph.polymorphic
    assert graph.mixing == ()
    for tensor, spec in graph.graph.inputs.items():
        for dim, word in enumerate(spec.dims):
            assert (word in model.varying) == ((tensor, dim) in model.varying.get(word, ()))


@each_model
def test_layers_run_by_themselves_at_other_sizes(name: str) -> None:
    graph, _ = captured(name)
    inputs, targets = MODELS[name].batch(3, MODELS[name].sizes[1])
    tensors = dict(zip(graph.graph.inputs, (*inputs, *targets), strict=True))
    run_apart = SegmentedPass(graph, tensors, 3)
    for part in segments(graph):
        run_apart.forward(part)
    assert torch.equal(run_apart.loss, run(graph, inputs, targets))


def test_a_length_keeps_its_name_through_the_layers() -> None:
    layers = captured("gpt")[0].graph.by_name()
    assert layers["blocks.0.attention.scaled_dot_product_attention"].outputs[0].dims == (
        "sample",
        "head",
        "time",
        "feature",
    )
    assert layers["position"].outputs[0].dims == ("time", "dim1")
    assert layers["loss.flatten"].outputs[0].dims == ("sample", "feature")
    cloud = captured("pointnet")[0].graph
    assert cloud.inputs["inputs"].dims == ("sample", "points", "feature")
    assert cloud.by_name()["transpose"].outputs[0].dims == ("sample", "dim1", "points")


def test_an_lstm_stays_one_layer() -> None:
    layer = captured("gnmt")[0].graph.by_name()["encoder.bidirectional"]
    assert layer.kind == "lstm"
    assert layer.outputs[0].dims == ("sample", "source_time", "feature")


def test_sizes_may_be_computed_from_several() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        samples, time, width = x.shape
        heads = m.layer(x).view(samples, time, 2, 4).transpose(1, 2).reshape(samples * 2, time, 4)
        scores = heads @ heads.transpose(1, 2) + torch.ones(time, time).triu(1).mul(-9.0)
        y = (scores.softmax(-1) @ heads).view(samples, 2, time, 4).transpose(1, 2).reshape(samples * time, width)
        return y.view(samples, time, width)[:, : time - 1]

    model = model_of(forward, torch.randn(2, 6, 8), varying=TIME, layer=nn.Linear(8, 8))
    graph = capture(model)
    for samples, length in ((1, 2), (3, 5), (2, 11)):
        x = torch.randn(samples, length, 8)
        assert torch.equal(run(graph, (x,), ()), model.loss((x,), ()))
    computed = {
        node.target
        for node in graph.graph_module.graph.nodes
        if node.op == "call_function" and node.name not in graph.layer_of_node
    }
    assert operator.mul in computed
    assert graph.mixing == ()


def test_models_without_sizes_that_vary_are_captured_as_ever() -> None:
    model = MODELS["gpt"].load()
    plain = capture(LoadedModel(model.module, model.inputs, model.targets, model.loss_fn))
    other = captured("gpt")[0]
    assert plain.sizes == {}
    assert [layer.name for layer in plain.graph.layers] == [layer.name for layer in other.graph.layers]
    assert [n.target for n in plain.graph_module.graph.nodes if n.op == "placeholder"] == [
        "num_samples",
        "inputs",
        "targets",
    ]
    shapes = {name: spec.shape for name, spec in plain.graph.values().items()}
    assert shapes == {name: spec.shape for name, spec in other.graph.values().items()}


def test_attributes_that_hold_for_one_size_alone_make_a_layer_opaque() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = functional.adaptive_avg_pool2d(m.conv(x), (3, x.shape[3]))
        return functional.softmax(y, 1)

    varying = {"height": (("inputs", 2),), "width": (("inputs", 3),)}
    graph = capture(model_of(forward, torch.randn(2, 3, 8, 9), varying=varying, conv=nn.Conv2d(3, 4, 3)))
    kinds = {layer.name: layer.kind for layer in graph.graph.layers}
    assert (kinds["conv"], kinds["adaptive_avg_pool2d"], kinds["softmax"]) == ("conv", "opaque", "softmax")


def loop(m: Any, x: Tensor) -> Tensor:
    state = torch.zeros(x.shape[0], 4)
    for step in range(x.shape[1]):
        state = torch.tanh(m.layer(x[:, step]) + state)
    return state


FIXED = {
    "a loop over time": loop,
    "a view of a number": lambda m, x: m.layer(x).view(-1, 24),
    "a table of that length": lambda m, x: m.layer(x) + torch.ones(6, 4),
    "a pool over the whole": lambda m, x: functional.avg_pool1d(m.layer(x).transpose(1, 2), x.shape[1]),
}


@pytest.mark.parametrize("forward", FIXED.values(), ids=FIXED)
def test_a_model_that_fixes_a_size_is_refused_with_dim_and_number(forward: Callable[..., Any]) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        capture(model_of(forward, torch.randn(2, 6, 4), varying=TIME, layer=nn.Linear(4, 4)))
    text = caught.value.render()
    assert "time cannot vary: the model fixes it to 6" in text
    assert "dim 1 of inputs" in text
    assert "try: " in text
    if forward is loop:
        assert f"at {__file__}:" in text


CONDITIONS = {
    "a branch": (lambda m, x: m.layer(x) if x.shape[1] > 4 else x, "time > 4", 3),
    "a special size": (lambda m, x: m.layer(x) if x.shape[1] == 7 else m.layer(x) * 2, "time != 7", 7),
    "a table": (lambda m, x: m.layer(x) + m.table[: x.shape[1]], "time <= 9", 10),
}


@pytest.mark.parametrize(("forward", "condition", "broken"), CONDITIONS.values(), ids=CONDITIONS)
def test_what_the_code_assumed_of_a_size_is_checked_when_the_graph_runs(
    forward: Callable[..., Any], condition: str, broken: int
) -> None:
    parts = {"layer": nn.Linear(4, 4), "table": nn.Parameter(torch.randn(9, 4))}
    graph = capture(model_of(forward, torch.randn(2, 6, 4), varying=TIME, **parts))
    run(graph, (torch.randn(2, 8, 4),), ())
    with pytest.raises(UnsupportedModelError, match=rf"other sizes than time {broken}[\s\S]*holds for {condition}"):
        run(graph, (torch.randn(2, broken, 4),), ())


def test_sizes_that_follow_from_others_are_checked() -> None:
    def forward(m: Any, x: Tensor, y: Tensor) -> Tensor:
        return m.layer(x)[:, 1:] + y

    varying = {"time": (("inputs", 1),), "rest": (("inputs_2", 1),)}
    graph = capture(
        model_of(forward, torch.randn(2, 6, 4), torch.randn(2, 5, 4), varying=varying, layer=nn.Linear(4, 4))
    )
    run(graph, (torch.randn(3, 9, 4), torch.randn(3, 8, 4)), ())
    with pytest.raises(UnsupportedModelError, match="rest 1, time 3"):
        run(graph, (torch.randn(3, 3, 4), torch.randn(3, 1, 4)), ())


def test_a_model_that_does_something_else_for_one_step_is_found_by_running_it() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.layer(x) if x.shape[1] == 1 else m.layer(x) * 2

    with pytest.raises(UnsupportedModelError, match=r"another loss[\s\S]*where time is 1"):
        capture(model_of(forward, torch.randn(2, 6, 4), varying=TIME, layer=nn.Linear(4, 4)))


def test_a_fixed_number_of_samples_goes_with_sizes_that_vary() -> None:
    model = model_of(lambda m, x: m.layer(x).reshape(2, -1), torch.randn(2, 6, 4), varying=TIME, layer=nn.Linear(4, 4))
    graph = capture(model)
    assert not graph.polymorphic
    assert [node.target for node in graph.graph_module.graph.nodes if node.op == "placeholder"] == ["time", "inputs"]
    x = torch.randn(2, 3, 4)
    assert torch.equal(run(graph, (x,), ()), model.loss((x,), ()))


def test_a_model_that_cannot_be_exported_names_what_was_to_vary() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x

    with pytest.raises(UnsupportedModelError, match=r"cannot be captured with sizes that vary: time[\s\S]*leave out"):
        capture(model_of(forward, torch.randn(2, 6, 4), varying=TIME))


def test_a_condition_that_holds_says_nothing() -> None:
    require(True, "time > 4", time=5)
    with pytest.raises(UnsupportedModelError, match="time 3"):
        require(False, "time > 4", time=3)
