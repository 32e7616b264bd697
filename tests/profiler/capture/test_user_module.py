"""What a capture refuses of a model's own code, by name, and how it leaves the module."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from planner.ir.errors import UnsupportedModelError
from planner.ir.graph import MIXES_SAMPLES
from profiler.capture import first_calls, verify_capture
from profiler.capture.first_calls import FirstCall, change_weights
from profiler.capture.graph import capture
from profiler.source.losses import TrainedLoss, mean_of_squares
from profiler.source.model import LoadedModel
from runtime.captured import CapturedModule

WIDTH = 4


class Normalised(torch.autograd.Function):
    """A gradient divided by its norm over the whole batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g / g.norm()


class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class OfModule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        return module(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g, None


class Net(nn.Module):
    def __init__(self, between: Callable[[Net, Tensor], Tensor] = lambda net, x: x.tanh()) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 2)
        self.between = between
        self.calls = 0
        self.held = []

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self, self.first(x)))


def captured(module: nn.Module) -> CapturedModule:
    return capture(LoadedModel(module.double(), (torch.randn(4, WIDTH).double(),), (), TrainedLoss(mean_of_squares)))


def hooked(register: Callable[[Net], object]) -> Net:
    net = Net()
    register(net)
    return net


def doubled(x: Tensor) -> Tensor:
    return 2 * x


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (hooked(lambda net: net.first.register_full_backward_hook(lambda *_: None)), "module first .* backward hook"),
        (hooked(lambda net: net.last.register_full_backward_pre_hook(lambda *_: None)), "module last .* backward hook"),
        (hooked(lambda net: net.first.weight.register_hook(doubled)), "parameter first.weight has a hook"),
        (
            hooked(lambda net: net.last.bias.register_post_accumulate_grad_hook(lambda p: None)),
            "parameter last.bias has a hook",
        ),
        (Net(lambda net, x: (x.register_hook(doubled), x.tanh())[1]), "hook on the gradient of a tensor"),
        (Net(lambda net, x: Noisy.apply(x)), "Noisy draws random numbers"),
        (Net(lambda net, x: OfModule.apply(x, net.last) @ net.last.weight), "OfModule is given a module, Linear"),
        (nn.Sequential(nn.LazyLinear(WIDTH)), "0.weight has no shape yet"),
        (Net(lambda net, x: nn.functional.dropout(x[x[:, 0] > 0], 0.5).sum() + x), "rows that the data choose"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(module: nn.Module, words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words) as caught:
        captured(module)
    assert caught.value.remedies


def counting(net: Net, x: Tensor) -> Tensor:
    net.calls += 1
    return x * net.calls


def test_state_that_is_no_buffer_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="when it is called again"):
        captured(Net(counting))


def warming(net: Net, x: Tensor) -> Tensor:
    net.calls += 1
    return net.first(x) * (1 + min(1.0, net.calls / 1e15))


def noting(net: Net, x: Tensor) -> Tensor:
    net.calls += 1
    return net.first(x)


def test_a_schedule_so_slow_that_two_calls_are_alike_is_refused_and_a_mere_count_is_not() -> None:
    with pytest.raises(UnsupportedModelError, match=r"changes itself from call to call[\s\S]*calls, from \d to \d"):
        captured(Net(warming))
    net = Net(noting)
    captured(net)
    assert net.calls == 0


@pytest.mark.parametrize(("is_told_by_graph", "callers"), [(True, [False, True]), (False, [False, True, False])])
def test_a_module_that_counts_its_calls_is_called_once_more_only_where_its_graph_is_off_by_a_bit(
    monkeypatch: pytest.MonkeyPatch, is_told_by_graph: bool, callers: list[bool]
) -> None:
    by_graph: list[bool] = []
    call = FirstCall.call

    def noted(memory: FirstCall, *arguments: Any, loss_of: Any = None, **keywords: Any) -> Any:
        by_graph.append(loss_of is not None)
        return call(memory, *arguments, loss_of=loss_of, **keywords)

    monkeypatch.setattr(FirstCall, "call", noted)
    if not is_told_by_graph:
        monkeypatch.setattr(first_calls, "_is_identical", lambda a, b: False)
    captured(Net(noting))
    assert by_graph == callers


@pytest.mark.parametrize(
    ("told", "has_gradients"),
    [({}, [False]), ({"is_by_graph": False}, [False, True]), ({"gradients": frozenset()}, [False, True])],
)
def test_a_graph_whose_second_call_is_the_modules_to_the_last_bit_has_the_gradients_of_the_first(
    monkeypatch: pytest.MonkeyPatch, told: dict[str, Any], has_gradients: list[bool]
) -> None:
    asked: list[bool] = []
    later_call = FirstCall.later_call
    result = verify_capture._graph_result

    def noted(*arguments: Any, has_gradients: bool = True) -> Any:
        asked.append(has_gradients)
        return result(*arguments, has_gradients=has_gradients)

    monkeypatch.setattr(verify_capture, "_graph_result", noted)
    monkeypatch.setattr(FirstCall, "later_call", lambda *arguments: replace(later_call(*arguments), **told))
    captured(Net(noting))
    assert asked == has_gradients


def test_changed_weights_are_unlike_along_each_dim_and_from_weight_to_weight() -> None:
    net = nn.Sequential(nn.Linear(30_000, 8), nn.Linear(30_000, 8))
    for weight in net.parameters():
        nn.init.constant_(weight, -2.0)
    net[0].bias.data.zero_()
    change_weights(LoadedModel(net, (torch.zeros(1),), (), TrainedLoss(mean_of_squares)))
    one, other = (layer.weight.detach() / -2.0 for layer in net)
    assert 0.5 <= one.min() < 0.51 < 1.49 < one.max() < 1.5
    pairs = [(one[1:], one[:-1]), (one[:, 1:], one[:, :-1]), (one, other)]
    assert min((a != b).double().mean() for a, b in pairs) > 0.999
    assert (net[0].bias > 0).all()


def test_a_backward_over_the_whole_batch_mixes_samples() -> None:
    (layer,) = [
        layer for layer in captured(Net(lambda net, x: Normalised.apply(x))).graph.layers if "Norm" in layer.name
    ]
    assert layer.attributes[MIXES_SAMPLES]


def judged_by_frozen_weights(net: Net, x: Tensor) -> Tensor:
    """A GAN's generator, seen by a discriminator that is not to learn from it."""
    for p in net.last.parameters():
        p.requires_grad_(False)
    net.first.bias.requires_grad = False
    fooled = net.last(x).sum() + net.first(x).sum()
    for p in net.parameters():
        p.requires_grad = True
    return x.tanh() * fooled


def test_a_parameter_that_is_switched_off_for_a_while_has_no_gradient_of_that_while() -> None:
    net = Net(judged_by_frozen_weights).double()
    x = torch.randn(4, WIDTH).double()
    graph = capture(LoadedModel(net, (x,), (), TrainedLoss(mean_of_squares))).graph_module
    assert all(p.requires_grad for p in net.parameters())
    parameters = list(net.parameters())
    found = torch.autograd.grad(
        graph(*((4, x) if len(graph.graph.find_nodes(op="placeholder")) > 1 else (x,))), parameters
    )
    for a, b in zip(found, torch.autograd.grad(mean_of_squares(net(x), ()), parameters), strict=True):
        assert torch.allclose(a, b, rtol=1e-12)


def forgetful(net: Net, x: Tensor) -> Tensor:
    net.held.append(x)
    net.last_seen = x
    return net.norm(x)


def test_the_module_is_left_as_it_was() -> None:
    net = Net(forgetful).double()
    net.norm = nn.BatchNorm1d(WIDTH).double()
    net.drop = nn.Dropout().eval()
    net.first.bias.requires_grad_(False)
    net.first.weight.grad = torch.ones(WIDTH, WIDTH).double()
    handle = net.last.register_forward_hook(lambda module, given, made: made * 2)
    gradient = net.first.weight.grad
    state = copy.deepcopy(net.state_dict())
    random = torch.get_rng_state()
    modes = {name: part.training for name, part in net.named_modules()}
    capture(LoadedModel(net, (functional.one_hot(torch.arange(4)).double(),), (), TrainedLoss(mean_of_squares)))
    assert {name: part.training for name, part in net.named_modules()} == modes
    assert net.first.weight.grad is gradient
    assert torch.equal(gradient, torch.ones(WIDTH, WIDTH))
    assert not net.first.bias.requires_grad
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert handle.id in net.last._forward_hooks
    assert net.held == []
    assert not hasattr(net, "last_seen")


def test_modules_in_evaluation_mode_are_told() -> None:
    net = Net()
    net.first.eval()
    (remark,) = captured(net).remarks
    assert "1 modules are in evaluation mode, and stay in it: first" in remark


def test_code_that_depends_on_the_mode_is_told() -> None:
    (remark,) = captured(Net(lambda net, x: x * 2 if net.training else x)).remarks
    assert "not evaluate it" in remark
    assert captured(Net()).remarks == ()


class Counting(nn.Module):
    """A buffer that one layer reads and another one writes, beside one that is read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Of the shape of ``x``."""
        x = self.first(x * self.scale) * (1 + self.seen)
        self.seen += 1
        return self.last(x) * self.scale + self.seen


def test_layers_that_share_a_buffer_which_one_writes_say_so() -> None:
    layers = captured(Counting()).graph.layers
    shared = {layer.name: layer.attributes["shared_state"] for layer in layers if "shared_state" in layer.attributes}
    assert len(shared) == 3  # who reads it before, who writes it, and who reads it as it was written
    assert set(shared.values()) == {"seen"}
