from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial

import torch
from torch import fx, nn

from planner.ir.profile import ModelSource
from profiler.capture.graph import Captured, capture
from profiler.source.model import LoadedModel
from profiler.source.source import load_model
from runtime.stage.cut import cut_stage


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


def net(*, input_shape: tuple[int, ...] = (4, 4)) -> nn.Module:
    return Net()


def captured_net() -> tuple[LoadedModel, Captured]:
    model = load_model(ModelSource(f"{__name__}:net", {}, (4, 4), "float64"))
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
