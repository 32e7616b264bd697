"""Layers cut out of a captured graph: what one device computes, in evaluation too, and on no rows."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from cuda_ops._torch import OpOverload, TorchDispatchMode
from profiler.capture.graph import capture
from profiler.source.losses import mean_of_squares
from profiler.source.model import LoadedModel
from runtime.captured import CapturedModule
from runtime.stage.cut import FUNCTIONS, StageFunction, cut_stage
from runtime.stage.modes import in_evaluation
from runtime.stage.without_rows import without_rows


class Net(nn.Module):
    """Three layers; the last reshapes by the number of samples, and the second is normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.first(x))
        return self.last(y.view(x.shape[0] * 2, 3)).view(x.shape[0], 4)


def loaded(module: nn.Module, *shape: int) -> LoadedModel:
    """Of four samples, in float64."""
    inputs = (torch.randn(4, *shape, dtype=torch.float64),)
    return LoadedModel(module.double(), inputs, (), lambda found, _: mean_of_squares(found))


def captured_net() -> tuple[LoadedModel, CapturedModule]:
    model = loaded(Net(), 4)
    return model, capture(model)


def test_stages_one_after_another_compute_the_loss() -> None:
    model, captured = captured_net()
    names = [layer.name for layer in captured.graph.layers]
    maps = captured.layer_of_node, captured.node_of_value
    place = names.index("norm") + 1
    first = cut_stage(captured.graph_module, names[:place], *maps, ("norm",))
    second = cut_stage(captured.graph_module, names[place:], *maps, (captured.graph.loss,))
    assert first.inputs == tuple(captured.graph.inputs)
    assert second.inputs == ("norm",)
    assert sorted(first.parameters) == ["first.bias", "first.weight", "norm.bias", "norm.weight"]
    assert sorted(second.parameters) == ["last.bias", "last.weight"]
    assert first.mutated == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert first.attributes["first.weight"] is model.module.first.weight
    for rows in (4, 2, 3):
        x = torch.randn(rows, 4, dtype=torch.float64)
        expected = model.loss((x,), ())
        (middle,) = first.function(rows, x, *first.attributes.values())
        (loss,) = second.function(rows, middle, *second.attributes.values())
        assert torch.equal(loss, expected)


def test_a_rule_replaces_nodes_and_gets_their_own_arguments() -> None:
    _, captured = captured_net()
    seen = []

    def instead(x: torch.Tensor, *rest: object, scale: float) -> torch.Tensor:
        seen.append(rest)
        return x * scale

    def rule(node: fx.Node) -> Callable[..., torch.Tensor] | None:
        return partial(instead, scale=2.0) if node.target is torch.ops.aten.batch_norm.default else None

    maps = captured.layer_of_node, captured.node_of_value
    stage = cut_stage(captured.graph_module, ["norm"], *maps, ("norm",), rule)
    x = torch.randn(3, 6, dtype=torch.float64)
    (y,) = stage.function(3, x, *stage.attributes.values())
    assert torch.equal(2 * x, y)
    assert len(seen[0]) == 8
    assert seen[0][4:7] == (True, 0.1, 1e-5)


def test_sizes_that_vary_are_given_by_name() -> None:
    graph = fx.Graph()
    num_samples, time, x = (graph.placeholder(name) for name in ("num_samples", "time", "x"))
    twice = graph.call_function(operator.mul, (num_samples, time))
    flat = graph.call_function(torch.ops.aten.view.default, (x, [twice, 3]))
    graph.output(flat)
    module = fx.GraphModule(nn.Module(), graph)
    stage = cut_stage(module, ["flat"], {flat.name: "flat"}, {"x": "x", "flat": flat.name}, ("flat",), None, ["time"])
    assert (stage.sizes, stage.inputs) == (("time",), ("x",))
    for rows, length in ((2, 5), (4, 1)):
        (y,) = stage.function(rows, length, torch.ones(rows, length, 3))
        assert y.shape == (rows * length, 3)


@pytest.mark.parametrize(("rows", "num_operators"), [((4, 3), 1), ((1, 3), 4)])
def test_tensors_of_one_shape_are_not_broadcast_together(rows: tuple[int, ...], num_operators: int) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.placeholder("y")
    x.meta["val"] = torch.empty(4, 3)
    y.meta["val"] = torch.empty(rows)
    both = graph.call_function(torch.ops.aten.broadcast_tensors.default, ([x, y],))
    parts = [graph.call_function(operator.getitem, (both, place)) for place in (0, 1)]
    loss = graph.call_function(torch.ops.aten.mse_loss.default, tuple(parts))
    graph.output(loss)
    module = fx.GraphModule(nn.Module(), graph)
    layers = dict.fromkeys((both.name, parts[0].name, parts[1].name, loss.name), "loss")
    stage = cut_stage(module, ["loss"], layers, {"x": "x", "y": "y", "loss": loss.name}, ("loss",))
    assert sum(node.op == "call_function" for node in stage.traced.graph.nodes) == num_operators
    x = torch.randn(4, 3)
    y = torch.randn(rows)
    (found,) = stage.function(4, x, y)
    assert torch.equal(found, nn.functional.mse_loss(x, y.expand(4, 3)))


X = torch.randn(2, 4, 6, 6)
W = torch.randn(4, 4, 3, 3)
B = torch.randn(4)
ROWS = torch.randn(5, 4)
ARGUMENTS = {
    "add.Tensor": (ROWS, B),
    "batch_norm": (X, B, B, torch.zeros(4), torch.ones(4), True, 0.1, 1e-5, True),
    "cat": ([ROWS, ROWS], 1),
    "conv2d": (X, W, B, [2, 1], [1, 1], [1, 1], 1),
    "div.Tensor": (ROWS, B),
    "dropout": (ROWS, 0.0, True),
    "embedding": (ROWS, torch.tensor([1, 3]), 1, False, False),
    "flatten.using_ints": (X, 1, 2),
    "gelu": (ROWS,),
    "layer_norm": (ROWS, [4], B, B, 1e-5, True),
    "linear": (ROWS, W[0, :, :, 0].T.contiguous().repeat(2, 2)[:, :4], None),
    "matmul": (ROWS, ROWS.T),
    "max_pool2d": (X, [3, 3], [2, 2], [1, 1], [1, 1], True),
    "mul.Tensor": (ROWS, B),
    "permute": (X, [0, 2, 3, 1]),
    "relu": (ROWS,),
    "scaled_dot_product_attention": (X, X, X, None, 0.0, True),
    "softmax.int": (ROWS, -1, torch.float64),
    "sub.Tensor": (ROWS, B),
    "transpose.int": (X, 1, -1),
}


class Dispatched(TorchDispatchMode):
    """Notes the operators that arrive, and what they are given beside tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[object] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        plain = [tuple(each.shape) if isinstance(each, torch.Tensor) else repr(each) for each in args]
        self.calls.append((function, plain, kwargs))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("target", FUNCTIONS, ids=str)
def test_functions_that_stand_in_for_operators_call_just_these(target: OpOverload) -> None:
    name = str(target).removeprefix("aten.").removesuffix(".default")
    found = []
    for call in (target, FUNCTIONS[target]):
        with Dispatched() as dispatched:
            result = call(*ARGUMENTS[name])
        found.append((dispatched.calls, result))
    (wanted_calls, wanted), (calls, result) = found
    assert repr(calls) == repr(wanted_calls)
    assert torch.equal(result, wanted)


class Convolutional(nn.Module):
    """Normalisation with and without running statistics, and every dropout of nn."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.kept = nn.BatchNorm2d(4)
        self.unkept = nn.BatchNorm2d(4, track_running_stats=False)
        self.instance = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
        self.plain = nn.InstanceNorm2d(4)
        self.drops = nn.ModuleList([nn.Dropout(0.5), nn.Dropout2d(0.5), nn.AlphaDropout(0.5), nn.FeatureAlphaDropout()])
        self.random_slope = nn.RReLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.instance(self.unkept(self.kept(self.conv(x))))
        for drop in self.drops:
            y = drop(y)
        return self.random_slope(self.plain(y))


class Sequential(nn.Module):
    """Dropout inside a recurrent layer and inside attention."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 6, 2, batch_first=True, dropout=0.5)
        self.gru = nn.GRU(6, 6, 2, batch_first=True, dropout=0.5)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.lstm(x)
        z, _ = self.gru(y)
        return functional.scaled_dot_product_attention(y, z, z, dropout_p=0.5 if self.training else 0.0)


@pytest.mark.parametrize(("network", "shape"), [(Convolutional, (3, 6, 6)), (Sequential, (5, 4))])
def test_evaluation_is_that_of_the_module(network: type[nn.Module], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = loaded(network(), *shape)
    for buffer in model.module.buffers():
        if buffer.is_floating_point():
            buffer.copy_(torch.rand_like(buffer) + 0.5)
    captured = capture(model)
    names = [layer.name for layer in captured.graph.layers]
    maps = captured.layer_of_node, captured.node_of_value
    stage = cut_stage(captured.graph_module, names, *maps, (captured.graph.loss,), in_evaluation)
    x = torch.randn(3, *shape, dtype=torch.float64)
    state = tuple(
        tensor.clone() if key in stage.mutated else tensor for key, tensor in stage.attributes.items()
    )  # batches are counted nevertheless
    (found,) = stage.function(3, x, *state)
    model.module.eval()
    torch.testing.assert_close(found, model.loss((x,), ()), rtol=1e-14, atol=0)
    model.module.train()
    assert not torch.allclose(found, model.loss((x,), ()), rtol=1e-6)


class Refused(nn.Module):
    """A view with -1 (refused forward), a Fourier transform (likewise) and a shuffle (refused backward)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.last = nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.pixel_shuffle(self.conv(x), 2)
        z = torch.fft.fft2(y).real
        return self.last(z.view(2 * x.shape[0], -1)[:, :32])


def refusing(empty: bool) -> StageFunction:
    captured = capture(loaded(Refused(), 3, 4, 4))

    def rule(node: fx.Node) -> None:
        return None

    names = [layer.name for layer in captured.graph.layers if layer.name != captured.graph.loss]
    maps = captured.layer_of_node, captured.node_of_value
    return cut_stage(captured.graph_module, names, *maps, ("last",), without_rows(rule) if empty else rule)


def test_torch_refuses_such_layers() -> None:
    stage = refusing(empty=False)
    with pytest.raises(RuntimeError):
        stage.function(0, torch.empty(0, 3, 4, 4, dtype=torch.float64), *stage.attributes.values())


def test_results_without_rows_have_the_right_shapes_and_gradients_flow_back() -> None:
    stage = refusing(empty=True)
    x = torch.empty(0, 3, 4, 4, dtype=torch.float64, requires_grad=True)
    (y,) = stage.function(0, x, *stage.attributes.values())
    assert y.shape == (0, 2)
    y.sum().backward()
    assert x.grad.shape == x.shape
    assert all(parameter.grad.count_nonzero() == 0 for parameter in stage.parameters.values())


def test_with_rows_nothing_changes_and_errors_stay_errors() -> None:
    stage = refusing(empty=True)
    plain = refusing(empty=False)
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    state = tuple(plain.attributes.values())
    assert torch.equal(plain.function(2, x, *state)[0], stage.function(2, x, *state)[0])
    with pytest.raises(RuntimeError):
        stage.function(2, x[:, :2], *state)
