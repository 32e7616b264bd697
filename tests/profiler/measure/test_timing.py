"""Structure and exactness of what is timed, of all layers and of those that stand for others; no time is asserted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from cuda_ops.dense.deferred_gradients import CurrentQueue, deferred
from planner.ir.errors import UnknownNameError, UsageError
from planner.ir.profile import Optimizer
from profiler.capture.graph import capture
from profiler.measure import beside_layers, deduplicated
from profiler.measure.back_ends import back_end_keys
from profiler.measure.beside_layers import (
    action_overhead_s,
    parameter_costs,
    step_seconds,
    still_optimizer,
)
from profiler.measure.deduplicated import (
    FirstPasses,
    ShorterPass,
    StandIn,
    first_passes,
    stand_ins_of,
    time_deduplicated,
)
from profiler.measure.memory import footprints
from profiler.measure.noise import CudaClock, ThreadClock
from profiler.measure.timing import (
    QUICK,
    BackwardTimes,
    LayerSegment,
    SegmentedPass,
    run_pass,
    segments,
    spread,
    time_layers,
    trimmed_mean,
)
from profiler.source.model import LoadedModel
from profiler.source.parts import model_of
from runtime.captured import CapturedModule
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
        seconds = 3.0 if self.waited else 1.0
        self.waited = False
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
    step = step_seconds(model, (batch.inputs, batch.targets), optimizer, 2)
    assert 0 < step.passes_s < step.whole_s
    assert set(costs) == {layer.name for layer in graph.graph.layers if layer.parameters}
    assert all(cost.accumulate_s > 0 and cost.update_s > 0 for cost in costs.values())
    assert all(torch.equal(*pair) for pair in zip(model.module.parameters(), before, strict=True))
    assert all(parameter.grad is None for parameter in model.module.parameters())


class EqualLaps(ThreadClock):
    """Passes and updates take ``lap_s``."""

    def __init__(self, lap_s: float) -> None:
        self.lap_s = lap_s

    def seconds(self, lap: float) -> float:
        return self.lap_s


@pytest.mark.parametrize(
    ("lap_s", "has_run", "calls"),
    [(0.1, False, 6), (0.1, True, 5), (0.4, False, 2), (0.4, True, 2), (1.5, False, 2), (1.5, True, 1)],
    ids=["short", "short, warm", "longer", "longer, warm", "long", "long, warm"],
)
def test_how_often_a_whole_step_is_run(lap_s: float, has_run: bool, calls: int) -> None:
    """Four that count and two ahead of them, or one of a model that has run; but no more than 2 s take."""
    batch = loaded(RESNET, 2)
    before = [parameter.detach().clone() for parameter in batch.module.parameters()]
    called: list[object] = []
    hook = batch.module.register_forward_hook(lambda *_: called.append(None))
    optimizer = Optimizer("SGD", {"lr": 0.1})
    step = step_seconds(batch, (batch.inputs, batch.targets), optimizer, 4, EqualLaps(lap_s), has_run=has_run)
    hook.remove()
    assert len(called) == calls
    assert step == pytest.approx((lap_s, 2 * lap_s))
    assert all(torch.equal(*pair) for pair in zip(batch.module.parameters(), before, strict=True))
    assert all(parameter.grad is None for parameter in batch.module.parameters())


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


class Block(nn.Module):
    """A residual block, whose input is read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Of the shape of ``x``."""
        return x + self.down(self.up(self.norm(x)).relu())


class Net(nn.Module):
    """So many blocks; another layer lies ahead of one of them, if that is asked for."""

    def __init__(self, num_blocks: int, wide: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.head = nn.Linear(8, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        if wide:
            self.blocks[2].up = nn.Linear(8, 32)
            self.blocks[2].down = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Three numbers a sample."""
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


BATCH = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)), torch.arange(6) % 3


def captured_net(net: nn.Module) -> tuple[CapturedModule, LoadedModel, dict[str, Tensor]]:
    model = model_of("net", (net, BATCH, nn.functional.cross_entropy))
    graph = capture(model)
    return graph, model, dict(zip(graph.graph.inputs, BATCH, strict=True))


def passed(net: nn.Module, **seconds: float) -> tuple[CapturedModule, dict[str, Tensor], dict[str, StandIn]]:
    """The stand-ins where every layer takes a second, but for those that take ``seconds``."""
    graph, _, tensors = captured_net(net)
    parts = segments(graph)
    runs = list[SegmentedPass]()

    def start(split: bool) -> SegmentedPass:
        runs.append(SegmentedPass(graph, tensors, 6, None, split))
        return runs[0]

    run_pass(parts, start, split=False)
    times = {part.name: (seconds.get(part.name, 1.0), BackwardTimes()) for part in parts}
    return graph, tensors, stand_ins_of(graph, parts, runs[0], times)


def names(stand_ins: Mapping[str, StandIn], operation: str) -> dict[str, str]:
    return {name: each.nearer for name, each in stand_ins.items() if name.endswith(operation)}


@pytest.mark.parametrize("split", [False, True], ids=["both", "split"])
def test_layers_that_are_timed_run_as_in_a_network_without_the_others(split: bool) -> None:
    net = Net(6)
    graph, tensors, stand_ins = passed(net)
    parts = segments(graph)
    net.zero_grad(set_to_none=True)
    timed = [part for part in parts if part.name not in stand_ins]
    found = run_pass(timed, lambda halves: ShorterPass(parts, stand_ins, graph, tensors, 6, None, halves), split=split)
    assert set(found) == {part.name for part in timed}
    gradients = {name: each.grad for name, each in net.named_parameters()}
    net.blocks = nn.ModuleList([net.blocks[0], net.blocks[5]])
    net.zero_grad(set_to_none=True)
    nn.functional.cross_entropy(net(BATCH[0]), BATCH[1]).backward()
    for index, name in ((0, "blocks.0"), (1, "blocks.5")):
        for own, each in net.blocks[index].named_parameters():
            torch.testing.assert_close(gradients[f"{name}.{own}"], each.grad)
    for each in ("first.weight", "head.bias"):
        torch.testing.assert_close(gradients[each], net.get_parameter(each).grad)
    assert all(gradient is None for name, gradient in gradients.items() if name.split(".")[1] in {"1", "2", "3", "4"})


def test_the_nearer_of_the_first_and_the_last_counts() -> None:
    _, _, found = passed(Net(6))
    assert names(found, "up") == {
        **dict.fromkeys(("blocks.1.up", "blocks.2.up"), "blocks.0.up"),
        **dict.fromkeys(("blocks.3.up", "blocks.4.up"), "blocks.5.up"),
    }


def test_another_shape_is_another_class() -> None:
    _, _, found = passed(Net(6, wide=True))
    assert set(names(found, "up")) == {"blocks.1.up", "blocks.3.up", "blocks.4.up"}
    assert "blocks.2.norm" in found


def test_layers_that_do_not_take_alike_are_timed() -> None:
    _, _, found = passed(Net(6), **{"blocks.3.up": 9.0, **{f"blocks.{k}.down": 2.0 for k in (1, 2, 3, 4)}})
    assert set(names(found, "up")) == {"blocks.1.up", "blocks.2.up", "blocks.4.up"}
    assert not names(found, "down")


def test_every_layer_has_times_and_says_whose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deduplicated, "LEAST_PASS_S", 0.0)
    monkeypatch.setattr(deduplicated, "MOST_SUM", 1e9)
    monkeypatch.setattr(deduplicated, "_MATTERS", 1e9)
    graph, _, tensors = captured_net(Net(6))
    seen: list[Any] = []
    first = first_passes(graph, tensors, 6, None, deduplicates=True)
    found = time_deduplicated(graph, tensors, QUICK, lambda *slowest: seen.append(slowest), None, first)
    assert list(found) == list(first.footprints) == [layer.name for layer in graph.graph.layers]
    assert len(seen) == QUICK.min_runs + QUICK.split_runs  # the first passes warmed up
    assert found["blocks.2.up"].alike == "blocks.0.up"
    assert found["blocks.2.up"].raw_s == found["blocks.0.up"].raw_s
    assert not found["blocks.5.up"].alike
    assert not first_passes(graph, tensors, 6, None, deduplicates=False).stand_ins


@pytest.mark.parametrize("off", [1.0, 2.0], ids=["as the sum says", "another sum"])
def test_all_are_timed_where_the_sum_is_another_one(monkeypatch: pytest.MonkeyPatch, off: float) -> None:
    graph, _, tensors = captured_net(Net(6))
    asked: list[int] = []

    def timed(parts: list[LayerSegment], *_: object) -> dict[str, deduplicated.TimedLayer]:
        asked.append(len(parts))
        return {part.name: deduplicated.TimedLayer(off, 0.0, 0.0, 0.0, 1, 0.0) for part in parts}

    monkeypatch.setattr(deduplicated, "time_segments", timed)
    monkeypatch.setattr(
        deduplicated,
        "run_pass",
        lambda parts, start, split: (
            run_pass(parts, start, split) and {part.name: (1.0, BackwardTimes()) for part in parts}
        ),
    )
    _, _, stand_ins = passed(Net(6))
    first = FirstPasses(6, {}, float(len(graph.graph.layers)), stand_ins)
    found = time_deduplicated(graph, tensors, QUICK, lambda *_: None, None, first)
    every = len(graph.graph.layers)
    assert len(found) == every
    assert asked == ([every - 4 * 5] if off == 1.0 else [every - 4 * 5, every])
