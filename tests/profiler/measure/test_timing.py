"""Structure and exactness of what is measured; no test here asserts a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from cuda_ops.dense.deferred_gradients import CurrentQueue, deferred
from planner.ir.errors import UnknownNameError, UsageError
from planner.ir.profile import Optimizer
from profiler.measure import beside_layers
from profiler.measure.beside_layers import action_overhead_s, parameter_costs, step_seconds, still_optimizer
from profiler.measure.devices import back_end_keys
from profiler.measure.memory import footprints
from profiler.measure.noise import CudaClock, ThreadClock
from profiler.measure.timing import QUICK, SegmentedPass, segments, spread, time_layers, trimmed_mean
from tests.profiler.capture.test_graph import captured, each_network, loaded
from tests.profiler.test_models import TINY

RESNET = next(factory for factory in TINY if factory.__name__ == "resnet18")
GNMT = next(factory for factory in TINY if factory.__name__ == "gnmt")


def tensors_of(factory: Callable[..., Any], samples: int) -> dict[str, Tensor]:
    batch = loaded(factory, samples)
    return dict(zip(captured(factory)[0].graph.inputs, (*batch.inputs, *batch.targets), strict=True))


def whole_gradients(factory: Callable[..., Any], samples: int) -> tuple[Tensor, dict[str, Tensor]]:
    graph, model = captured(factory)
    loss = graph.graph_module(samples, *tensors_of(factory, samples).values())
    names = dict(model.module.named_parameters())
    return loss, dict(zip(names, torch.autograd.grad(loss, list(names.values())), strict=True))


class FirstLapIsSlow(ThreadClock):
    """Each lap takes 1 s, the first one after a wait 3."""

    def __init__(self) -> None:
        self.waited = False

    def wait(self) -> None:
        self.waited = True

    def stop(self, started: float) -> float:
        seconds, self.waited = 3.0 if self.waited else 1.0, False
        return seconds


@pytest.mark.parametrize("factory", [RESNET, GNMT], ids=["resnet18", "gnmt"])
def test_by_how_much_actions_are_longer_after_a_wait(
    factory: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FirstLapIsSlow()
    monkeypatch.setattr(beside_layers, "_wait", clock.wait)
    graph, model = captured(factory)
    _, expected = whole_gradients(factory, 3)
    assert action_overhead_s(graph, tensors_of(factory, 3), 3, 2, clock) == 2.0
    found = {name: parameter.grad for name, parameter in model.module.named_parameters()}
    torch.testing.assert_close(found, expected)
    model.module.zero_grad(set_to_none=True)


def test_beside_a_gpu_nothing_is_said_of_waits() -> None:
    graph, _ = captured(RESNET)
    clock = CudaClock(torch.device("cuda:0"))
    assert action_overhead_s(graph, tensors_of(RESNET, 3), 3, 2, clock) is None


@each_network
@pytest.mark.parametrize("split", [False, True], ids=["both", "split"])
def test_a_segmented_pass_gives_the_gradients_of_the_whole_network(factory: Callable[..., Any], split: bool) -> None:
    graph, model = captured(factory)
    loss, expected = whole_gradients(factory, 3)
    model.module.zero_grad(set_to_none=True)
    run = SegmentedPass(graph, tensors_of(factory, 3), 3, split=split)
    parts = segments(graph)
    for part in parts:
        run.forward(part)
    run.start_backward()
    for part in reversed(parts):
        run.backward(part)
    times = run.times()
    assert torch.equal(run.loss, loss)
    for name, parameter in model.module.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-6)
    assert min(forward_s for forward_s, _ in times.values()) >= 0
    halves = {name for name, (_, backward) in times.items() if backward.weight_s > 0}
    operators = [node for node in graph.graph_module.graph.nodes if split and deferred(node, CurrentQueue())]
    assert halves == {graph.layer_of_node[node.name] for node in operators}
    model.module.zero_grad(set_to_none=True)


@each_network
def test_saved_bytes_add_up_to_what_autograd_holds(factory: Callable[..., Any]) -> None:
    graph, model = captured(factory)
    tensors = tensors_of(factory, 3)
    own = (*model.module.parameters(), *model.module.buffers())  # those too that no state dict holds
    known = {tensor.untyped_storage().data_ptr() for tensor in (*own, *tensors.values())}
    held: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        held.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = graph.graph_module(3, *tensors.values())
    expected = sum(t.untyped_storage().nbytes() for address, t in held.items() if address not in known)
    found = {name: each.saved_bytes for name, each in footprints(graph, tensors, 3).items()}
    assert loss.requires_grad
    assert list(found) == [layer.name for layer in graph.graph.layers]
    assert min(found.values()) >= 0
    assert sum(found.values()) == expected > 0


def test_a_convolution_keeps_its_input_unless_an_earlier_layer_does() -> None:
    graph, _ = captured(RESNET)
    found = {name: each.saved_bytes for name, each in footprints(graph, tensors_of(RESNET, 2), 2).items()}
    specs = graph.graph.values()
    assert found["conv1"] == 0  # its input is the batch itself
    assert found["bn1"] >= specs["conv1"].num_bytes
    assert found["relu"] == specs["bn1"].num_bytes
    assert found["stages.0.0.conv1"] == specs["maxpool"].num_bytes


def test_the_workspace_of_a_backward_holds_the_gradients_of_inputs_and_outputs() -> None:
    graph, _ = captured(RESNET)
    found = footprints(graph, tensors_of(RESNET, 2), 2)
    specs = graph.graph.values()
    for name in ("relu", "stages.0.0.conv1"):
        layer = graph.graph.by_name()[name]
        gradients = layer.outputs[0].num_bytes + specs[layer.inputs[0]].num_bytes
        assert found[name].workspace_bytes >= gradients
        assert found[name].workspace_bytes <= 6 * gradients + 100_000


def test_every_layer_is_timed() -> None:
    graph, model = captured(GNMT)
    seen: list[tuple[str, float, float]] = []
    found = time_layers(graph, tensors_of(GNMT, 2), 2, QUICK, lambda *slowest: seen.append(slowest))
    assert list(found) == [layer.name for layer in graph.graph.layers]
    assert len(seen) == QUICK.num_warm_ups + QUICK.min_runs + QUICK.split_runs + 1
    for layer in graph.graph.layers:
        times = found[layer.name]
        assert times.num_runs == QUICK.min_runs
        assert all(math.isfinite(value) and value >= 0 for value in (times.forward_s, times.backward_s, times.spread))
    for name in ("encoder.second", "encoder.add"):  # an LSTM's kernel has one backward
        assert (found[name].backward_input_s, found[name].backward_weight_s) == (found[name].backward_s, 0.0)
    (head,) = [layer.name for layer in graph.graph.layers if layer.kind == "linear"][-1:]
    assert min(found[head].backward_input_s, found[head].backward_weight_s) > 0
    assert found["encoder.embedding"].backward_weight_s > 0
    model.module.zero_grad(set_to_none=True)


@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_updates_add_up_and_leave_the_parameters_alone(name: str) -> None:
    graph, model = captured(RESNET)
    optimizer = Optimizer(name, {"lr": 0.1, "weight_decay": 0.1})
    before = [parameter.detach().clone() for parameter in model.module.parameters()]
    costs = parameter_costs(graph, optimizer, 2)
    batch = loaded(RESNET, 2)
    step = step_seconds(model, batch.inputs, batch.targets, optimizer, 2)
    assert 0 < step.passes_s < step.whole_s
    assert set(costs) == {layer.name for layer in graph.graph.layers if layer.parameters}
    assert all(cost.accumulate_s > 0 and cost.update_s > 0 for cost in costs.values())
    assert all(torch.equal(*pair) for pair in zip(model.module.parameters(), before, strict=True))
    assert all(parameter.grad is None for parameter in model.module.parameters())


def test_an_optimiser_that_does_not_exist_or_fit_is_refused() -> None:
    parameters = [torch.nn.Parameter(torch.ones(1))]
    with pytest.raises(UnknownNameError, match=r"no optimiser 'Adm'[\s\S]*did you mean Adam"):
        still_optimizer(Optimizer("Adm"), parameters)
    with pytest.raises(UsageError, match=r"SGD refuses its arguments[\s\S]*beta"):
        still_optimizer(Optimizer("SGD", {"beta": 1.0}), parameters)


def test_convolutions_alone_have_a_back_end() -> None:
    graph, _ = captured(RESNET)
    keys = back_end_keys(graph, 2)
    assert {layer.name for layer in graph.graph.layers if layer.kind == "conv"} == {n for n, key in keys.items() if key}


def test_the_trimmed_mean_drops_a_fifth_on_each_side() -> None:
    assert trimmed_mean([100.0, 1.0, 2.0, 3.0, -50.0]) == 2.0
    assert trimmed_mean([4.0]) == 4.0
    assert trimmed_mean([0.0] * 2 + [1.0] * 6 + [9.0] * 2) == 1.0


def test_the_spread_is_the_interquartile_range_over_the_median() -> None:
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(1.0)
    assert spread([2.0, 2.0, 2.0, 2.0]) == 0.0
    assert spread([0.0, 0.0, 0.0, 0.0]) == 0.0
    assert spread([1.0, 5.0]) == 0.0
