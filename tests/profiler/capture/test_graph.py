"""Capture of the reference networks: the graph computes what the module does, and the planner's graph describes it."""

from __future__ import annotations

import copy
import functools
import operator
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from planner.ir.graph import TensorSpec
from planner.layers import kind, kinds
from profiler import CapturedModule, LoadedModel
from profiler.capture.graph import capture
from profiler.source.losses import TrainedLoss
from tests.profiler.test_models import TINY, as_tuple, tiny

each_network = pytest.mark.parametrize("factory", TINY, ids=lambda factory: factory.__name__)


@functools.cache
def captured(factory: Callable[..., Any]) -> tuple[CapturedModule, LoadedModel]:
    model = loaded(factory, 2)
    return capture(model), model


def loaded(factory: Callable[..., Any], samples: int) -> LoadedModel:
    torch.manual_seed(0)
    module, (inputs, targets), loss_fn = tiny(factory, samples)
    return LoadedModel(module, as_tuple(inputs), as_tuple(targets), TrainedLoss(loss_fn, isinstance(targets, Tensor)))


def gradients(module: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    named = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    found = torch.autograd.grad(loss, list(named.values()))
    return dict(zip(named, found, strict=True))


@each_network
@pytest.mark.parametrize("samples", [2, 3, 5])
def test_loss_gradients_and_buffers_equal_the_modules_to_the_bit(factory: Callable[..., Any], samples: int) -> None:
    graph, model = captured(factory)
    batch = loaded(factory, samples)
    reference = copy.deepcopy(model.module)
    expected = model.loss_fn(reference(*batch.inputs), batch.targets)
    actual = graph.graph_module(samples, *batch.inputs, *batch.targets)
    assert torch.equal(actual, expected)
    mine = gradients(model.module, actual)
    others = gradients(reference, expected)
    assert [name for name in others if not torch.equal(mine[name], others[name])] == []
    state = dict(model.module.named_buffers())
    expected_state = dict(reference.named_buffers())
    assert [name for name in expected_state if not torch.equal(state[name], expected_state[name])] == []


@each_network
def test_every_node_belongs_to_a_layer_and_every_parameter_is_the_users(factory: Callable[..., Any]) -> None:
    graph, model = captured(factory)
    nodes = [node for node in graph.graph_module.graph.nodes if node.op == "call_function"]
    tensors = [node for node in nodes if not isinstance(node.meta.get("val"), torch.SymInt) and _is_computed(node)]
    assert {node.name for node in tensors} == set(graph.layer_of_node)
    assert set(graph.layer_of_node.values()) == set(graph.graph.by_name())
    parameters = dict(model.module.named_parameters())
    assert set(graph.graph.parameters) == set(parameters)
    for name, parameter in parameters.items():
        assert graph.graph_module.get_parameter(name) is parameter
        assert graph.graph.parameters[name].shape == parameter.shape
    assert {name for layer in graph.graph.layers for name in layer.parameters} == set(parameters)
    buffers = dict(model.module.named_buffers())
    assert all(graph.graph_module.get_buffer(name) is buffer for name, buffer in buffers.items())
    readers = {name: set[str]() for name in buffers}
    for node in graph.graph_module.graph.nodes:
        if node.op == "get_attr" and node.target in buffers:
            readers[node.target] |= {graph.layer_of_node[user.name] for user in node.users}
    expected = sum(each.nbytes * len(readers[name]) for name, each in buffers.items())  # by layer that reads it
    assert sum(layer.buffer_bytes for layer in graph.graph.layers) == expected
    distinct = sum(each.nbytes for name, each in buffers.items() if readers[name])
    assert graph.graph.buffer_bytes(range(len(graph.graph.layers))) == distinct


def _is_computed(node: fx.Node) -> bool:
    return not (node.target is operator.mul and "val" not in node.meta)  # a size made of num_samples


@each_network
def test_layers_are_named_by_the_users_modules_once_and_in_order(factory: Callable[..., Any]) -> None:
    graph, model = captured(factory)
    layers = [layer.name for layer in graph.graph.layers]
    assert len(set(layers)) == len(layers)
    assert layers[-1] == graph.graph.loss == "loss"
    modules = model.module.named_modules()
    paths = {name for name, module in modules if [*module.parameters(recurse=False)]}
    assert paths <= set(layers)
    known = set(graph.graph.inputs)
    for layer in graph.graph.layers:
        assert set(layer.inputs) <= known
        known |= {layer.name if index == 0 else f"{layer.name}:{index}" for index in range(len(layer.outputs))}


@each_network
@pytest.mark.parametrize("samples", [1, 4])
def test_specs_tell_the_shapes_at_any_number_of_samples(factory: Callable[..., Any], samples: int) -> None:
    graph, _ = captured(factory)
    batch = loaded(factory, samples)
    watched = Watched(graph.graph_module)
    with torch.no_grad():
        watched.run(samples, *batch.inputs, *batch.targets)
    specs = graph.graph.values()
    for value, node in graph.node_of_value.items():
        spec = specs[value].at(samples, graph.graph.samples)
        assert (value, spec.shape, spec.dtype) == (value, *watched.found[node])
        assert len(spec.dims) == len(spec.shape)


class Watched(fx.Interpreter):
    """A run that notes the shape and the dtype of what every node makes."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.found: dict[str, tuple[tuple[int, ...], str]] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, Tensor):
            self.found[n.name] = tuple(value.shape), str(value.dtype).removeprefix("torch.")
        return value


@each_network
def test_the_access_relation_of_every_layer_answers(factory: Callable[..., Any]) -> None:
    graph, _ = captured(factory)
    specs = graph.graph.values()
    for layer in graph.graph.layers:
        assert layer.kind in kinds()
        inputs = tuple(specs[value] for value in layer.inputs)
        relation = kind(layer.kind)
        box = tuple(_interval(extent) for extent in relation.work(layer, inputs).shape)
        boxes = relation.input_boxes(layer, inputs, box)
        assert [len(found) for found in boxes] == [len(spec.shape) for spec in inputs], layer
        parameters = tuple(graph.graph.parameters[name] for name in layer.parameters)
        assert len(relation.weight_boxes(layer, parameters, box)) == len(parameters)
        assert relation.forward_flops(layer, inputs) >= 0


def _interval(extent: int) -> Any:
    from planner.ir.box import Interval

    return Interval(0, extent)


@each_network
def test_no_layer_mixes_samples(factory: Callable[..., Any]) -> None:
    graph, _ = captured(factory)
    assert graph.polymorphic
    assert graph.mixing == ()


def kinds_of(name: str) -> Counter[str]:
    factory = next(factory for factory in TINY if factory.__name__ == name)
    return Counter(layer.kind for layer in captured(factory)[0].graph.layers)


def test_a_resnet_is_convolutions_batch_norms_and_what_is_between() -> None:
    found = kinds_of("resnet50")
    assert (found["conv"], found["batch_norm"], found["linear"], found["loss"]) == (53, 53, 1, 1)
    assert found["pointwise"] == 49 + 16  # activations and shortcuts
    assert sum(found.values()) == 176


def test_an_lstm_is_one_layer_with_its_zeros() -> None:
    factory = next(factory for factory in TINY if factory.__name__ == "gnmt")
    layer = captured(factory)[0].graph.by_name()["encoder.bidirectional"]
    assert layer.kind == "lstm"
    assert layer.inputs == ("encoder.embedding",)
    assert [spec.dims[spec.dims.index("sample")] for spec in layer.outputs] == ["sample"] * 3
    assert layer.outputs[1].dims == ("dim0", "sample", "dim2")


def test_a_convolution_says_its_window_and_the_names_of_its_dims() -> None:
    factory = next(factory for factory in TINY if factory.__name__ == "resnet50")
    layer = captured(factory)[0].graph.by_name()["conv1"]
    assert layer.inputs == ("inputs",)
    assert layer.outputs == (TensorSpec(("sample", "channel", "height", "width"), (2, 4, 32, 32), "float32"),)
    assert dict(layer.attributes) == {
        "op": "aten.conv2d.default",
        "kernel": (7, 7),
        "stride": (2, 2),
        "padding": (3, 3),
        "dilation": (1, 1),
        "groups": 1,
    }


def test_capture_is_the_same_every_time_and_leaves_the_model_as_it_was() -> None:
    factory = next(factory for factory in TINY if factory.__name__ == "resnet18")
    model = loaded(factory, 2)
    before = copy.deepcopy(model.module.state_dict())
    random = torch.get_rng_state()
    first = capture(model)
    second = capture(model)
    assert first.graph == second.graph
    assert first.layer_of_node == second.layer_of_node
    assert torch.equal(torch.get_rng_state(), random)
    assert model.module.training
    assert all(torch.equal(value, before[name]) for name, value in model.module.state_dict().items())


def test_an_example_of_one_sample_is_repeated() -> None:
    factory = next(factory for factory in TINY if factory.__name__ == "gpt")
    graph = capture(loaded(factory, 1))
    assert graph.polymorphic
    assert graph.graph.samples == 2
    assert graph.mixing == ()


def test_an_example_whose_target_is_its_input_is_captured_as_two_inputs() -> None:
    """Torch's export takes a tensor that is given twice for one input."""
    torch.manual_seed(0)
    module = nn.Linear(4, 4)
    example = torch.randn(2, 4)
    found = capture(LoadedModel(module, (example,), (example,), TrainedLoss(nn.functional.mse_loss, True)))
    inputs, targets = torch.randn(2, 3, 4)
    expected = nn.functional.mse_loss(module(inputs), targets)
    torch.testing.assert_close(found.graph_module(3, inputs, targets), expected)


def test_an_example_of_one_sample_is_said_to_be_repeated() -> None:
    (said,) = capture(LoadedModel(nn.Linear(3, 2), (torch.randn(1, 3),), (torch.randn(1, 2),), _of_squares)).remarks
    assert said.startswith("the example has 1 sample, which is repeated to 2")


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 8)
        self.head = nn.Linear(8, 9)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        h = self.table(tokens)
        return self.head(nn.functional.scaled_dot_product_attention(h, h, h, attn_mask=mask))


def test_a_mask_over_as_many_tokens_as_samples_is_named_and_another_number_of_samples_helps() -> None:
    def remarks(samples: int) -> tuple[str, ...]:
        tokens = torch.randint(9, (samples, 4))
        mask = torch.zeros(4, 4)
        return capture(LoadedModel(Attending(), (tokens, mask), (torch.randn(samples, 4, 9),), _of_squares)).remarks

    fixed, square = remarks(4)
    assert "micro-batches have 4 samples" in fixed
    assert __file__ in fixed
    assert square.startswith("inputs, inputs_2, targets: of 4 along several dims, as many as the example has samples")
    assert not remarks(5)


def _of_squares(output: Tensor, targets: tuple[Tensor, ...]) -> Tensor:
    return nn.functional.mse_loss(output, *targets)
