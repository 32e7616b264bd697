"""Shapes of all values at sizes other than those of the capture, against real runs; stages run on batches of them."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from planner.ir.errors import UnsupportedModelError
from planner.ir.graph import Graph
from profiler import LoadedModel
from runtime.captured import CapturedModule
from runtime.stage.cut import StageFunction, cut_stage
from runtime.stage.shapes import graph_at, step_inputs, without_data
from tests.captures import capture
from tests.profiler.varying_models import MODELS, model_of

TIME = {"time": (("inputs", 1),)}
Tensors = tuple[Tensor, ...]

each_model = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(autouse=True)
def _one_thread_and_a_seed() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@functools.cache
def captured(name: str) -> tuple[CapturedModule, LoadedModel]:
    model = MODELS[name].load()
    return capture(model), model


def shapes_of(model: CapturedModule, tensors: Tensors) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in zip(model.graph.inputs, tensors, strict=True)}


def sizes_of(model: CapturedModule, tensors: Tensors) -> list[int]:
    shapes = shapes_of(model, tensors)
    return [shapes[name][dim] for name, dim in model.sizes.values()]


class Watched(fx.Interpreter):
    """A run of the captured graph that notes shape and dtype of what every node makes."""

    def __init__(self, model: CapturedModule) -> None:
        super().__init__(model.graph_module)
        self.found: dict[str, tuple[tuple[int, ...], str]] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, Tensor):
            self.found[n.name] = tuple(value.shape), str(value.dtype).removeprefix("torch.")
        return value


@each_model
def test_shapes_are_those_of_a_real_run(name: str) -> None:
    model, _ = captured(name)
    for sizes in MODELS[name].sizes:
        for samples in (1, 3):
            inputs, targets = MODELS[name].batch(samples, sizes)
            tensors = (*inputs, *targets)
            watched = Watched(model)
            with torch.no_grad():
                watched.run(samples, *sizes_of(model, tensors), *tensors)
            graph = graph_at(model, shapes_of(model, tensors))
            specs = graph.values()
            assert graph.samples == samples
            for value, node in model.node_of_value.items():
                assert (value, specs[value].shape, specs[value].dtype) == (value, *watched.found[node])
                assert specs[value].dims == model.graph.values()[value].dims


def test_at_the_sizes_of_the_capture_only_rows_change() -> None:
    model, _ = captured("pointnet")
    graph = graph_at(model, {"inputs": (5, 20, 3), "targets": (5, 20)})
    expected = {name: spec.at(5, 2) for name, spec in model.graph.values().items()}
    assert (graph.samples, graph.values()) == (5, expected)
    same = graph_at(model, {name: spec.shape for name, spec in model.graph.inputs.items()})
    assert same == model.graph


def test_outputs_that_nobody_reads_keep_a_shape() -> None:
    model, _ = captured("gnmt")
    graph = graph_at(model, {"inputs": (3, 5), "inputs_2": (3, 7), "targets": (3, 7)})
    outputs = graph.by_name()["encoder.bidirectional"].outputs
    assert [spec.shape for spec in outputs] == [(3, 5, 16), (2, 3, 8), (2, 3, 8)]


@each_model
def test_an_empty_copy_gives_the_same_and_keeps_nothing_alive(name: str) -> None:
    model = capture(MODELS[name].load())
    inputs, targets = MODELS[name].batch(3, MODELS[name].sizes[1])
    shapes = shapes_of(model, (*inputs, *targets))
    expected = graph_at(model, shapes)
    tensors = [weakref.ref(tensor) for tensor in (*model.graph_module.parameters(), *model.graph_module.buffers())]
    empty = without_data(model)
    del model
    gc.collect()
    assert [each for each in tensors if each() is not None] == []
    assert graph_at(empty, shapes) == expected


def test_buffers_and_random_numbers_stay() -> None:
    model, loaded = captured("convnet")
    before = copy.deepcopy(loaded.module.state_dict())
    state = torch.get_rng_state()
    graph_at(model, {"inputs": (3, 3, 30, 12), "targets": (3,)})
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in loaded.module.state_dict().items())


def test_a_long_sequence_takes_no_step_in_time() -> None:
    model, _ = captured("gnmt")
    graph = graph_at(model, {"inputs": (2, 100_000), "inputs_2": (2, 3), "targets": (2, 3)})
    assert graph.by_name()["encoder.second"].outputs[0].shape == (2, 100_000, 8)


def test_dims_that_vary_are_those_that_bear_the_name_of_a_size() -> None:
    assert step_inputs(captured("gpt")[0]).free == {("inputs", 1), ("targets", 1)}
    assert step_inputs(captured("convnet")[0]).free == {("inputs", 2), ("inputs", 3)}


REFUSED: dict[str, tuple[str, dict[str, tuple[int, ...]], str]] = {
    "a fixed dim": (
        "pointnet",
        {"inputs": (2, 9, 4), "targets": (2, 9)},
        r"dim 2 of inputs \(feature\) is 4, .* 3 only",
    ),
    "two lengths": (
        "gpt",
        {"inputs": (2, 5), "targets": (2, 6)},
        r"time differs[\s\S]*dim 1 of inputs says 5, dim 1 of",
    ),
    "two numbers of rows": ("gpt", {"inputs": (2, 5), "targets": (3, 5)}, r"sample differs[\s\S]*says 2, .* is 3"),
    "too few dims": ("gpt", {"inputs": (2,), "targets": (2, 5)}, r"inputs has shape \(2,\), .* \(2, 6\)"),
    "an input too few": ("gpt", {"inputs": (2, 5)}, r"targets has shape \(\)"),
    "too small an image": (
        "convnet",
        {"inputs": (2, 3, 1, 1), "targets": (2,)},
        r"layer 4 cannot run[\s\S]*\(2, 3, 1, 1\)",
    ),
}


@pytest.mark.parametrize(("name", "shapes", "message"), REFUSED.values(), ids=REFUSED)
def test_shapes_that_cannot_be_are_refused_with_dim_and_extents(
    name: str, shapes: dict[str, tuple[int, ...]], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        graph_at(captured(name)[0], shapes)


def test_a_dim_that_was_not_said_to_vary_says_how_to() -> None:
    model = capture(model_of(lambda m, x: m.layer(x), torch.randn(2, 6, 4), varying={}, layer=nn.Linear(4, 4)))
    with pytest.raises(
        UnsupportedModelError, match=r"dim 1 of inputs \(time\) is 7, .* 6 only[\s\S]*say that it varies"
    ):
        graph_at(model, {"inputs": (2, 7, 4)})


def test_a_condition_of_the_capture_is_an_error_here() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.layer(x) if x.shape[1] > 4 else x

    model = model_of(forward, torch.randn(2, 6, 4), varying=TIME, layer=nn.Linear(4, 4))
    with pytest.raises(UnsupportedModelError, match=r"time 3[\s\S]*holds for time > 4"):
        graph_at(without_data(capture(model)), {"inputs": (2, 3, 4)})


def test_a_model_of_fixed_samples_says_its_number() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.layer(x).view(2, -1)

    model = capture(model_of(forward, torch.randn(2, 6, 4), varying=TIME, layer=nn.Linear(4, 4)))
    assert graph_at(model, {"inputs": (2, 9, 4)}).values()["view"].shape == (2, 36)
    with pytest.raises(UnsupportedModelError, match=r"dim 0 of inputs \(sample\) is 3, .* for 2 only"):
        graph_at(model, {"inputs": (3, 9, 4)})


def test_under_autocast_dtypes_are_those_of_the_capture() -> None:
    loaded = MODELS["gnmt"].load(torch.bfloat16)
    model = capture(loaded)
    graph = graph_at(without_data(model), {"inputs": (3, 5), "inputs_2": (3, 7), "targets": (3, 7)})
    dtypes = {name: spec.dtype for name, spec in graph.values().items()}
    assert dtypes == {name: spec.dtype for name, spec in model.graph.values().items()}
    assert dtypes["decoder.classifier"] == "bfloat16"


# Two stages, micro-batches of other sizes one after another, messages of the shapes foreseen.


def cut(model: CapturedModule, at: float) -> tuple[StageFunction, StageFunction]:
    names = [layer.name for layer in model.graph.layers]
    place = round(at * len(names))
    maps = (model.layer_of_node, model.node_of_value)
    early = names[:place]
    late = names[place:]
    sent = tuple(value for value in model.graph.cut(place))
    first = cut_stage(model.graph_module, early, *maps, sent, None, tuple(model.sizes))
    return first, cut_stage(model.graph_module, late, *maps, (model.graph.loss,), None, tuple(model.sizes))


def run_stages(model: CapturedModule, stages: tuple[StageFunction, StageFunction], tensors: Tensors) -> Tensor:
    """The loss after forward and backward over both, by messages whose shapes are checked."""
    given: dict[str, Tensor] = dict(zip(model.graph.inputs, tensors, strict=True))
    rows = tensors[0].shape[0]
    sizes = dict(zip(model.sizes, sizes_of(model, tensors), strict=True))
    foreseen: Graph = graph_at(model, shapes_of(model, tensors))
    held: dict[str, tuple[Tensor, Tensor]] = {}
    for stage in stages:
        values = (given[name] for name in stage.inputs)
        found = stage.function(rows, *(sizes[name] for name in stage.sizes), *values, *stage.attributes.values())
        for name, value in zip(stage.outputs, found, strict=True):
            assert tuple(value.shape) == foreseen.values()[name].shape
            leaf = value.detach().requires_grad_(value.requires_grad)
            held[name] = (value, leaf)
            given[name] = leaf
    loss = held[model.graph.loss][0]
    loss.backward()
    sent = [(value, leaf.grad) for name, (value, leaf) in held.items() if leaf.grad is not None]
    torch.autograd.backward([value for value, _ in sent], [gradient for _, gradient in sent])
    return loss.detach()


@each_model
def test_micro_batches_of_several_sizes_train_two_stages_as_one_device(name: str) -> None:
    loaded = MODELS[name].load()
    loaded.module.double()
    batches = [_double(*MODELS[name].batch(2 + index, sizes)) for index, sizes in enumerate(MODELS[name].sizes)]
    exact = LoadedModel(loaded.module, *_double(loaded.inputs, loaded.targets), loaded.loss_fn, loaded.varying)
    twin = copy.deepcopy(exact)
    model = capture(exact)
    stages = cut(model, 0.4)
    for inputs, targets in batches:
        expected = twin.loss(inputs, targets)
        expected.backward()
        found = run_stages(model, stages, (*inputs, *targets))
        torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=0)
    for mine, other in zip(exact.module.parameters(), twin.module.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-10, atol=1e-14)
    for mine, other in zip(exact.module.buffers(), twin.module.buffers(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=0)


def _double(*groups: Tensors) -> tuple[Tensors, ...]:
    return tuple(tuple(t.double() if t.is_floating_point() else t for t in group) for group in groups)


def test_sizes_computed_in_one_stage_and_read_in_another() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        samples, time, _ = x.shape
        y = m.a(x).reshape(samples * time, 4)
        return m.b(y).view(samples, time, 4)[:, : time - 1]

    module = model_of(forward, torch.randn(2, 6, 4), varying=TIME, a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    model = capture(module)
    stages = cut(model, 0.4)
    assert stages[1].sizes == ("time",)
    x = torch.randn(3, 5, 4)
    assert torch.equal(run_stages(model, stages, (x,)), module.loss((x,), ()).detach())
