"""A copy of a model computes with its own parts, wherever functions hold them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from profiler.source.copies import copied
from profiler.source.model import LoadedModel
from profiler.source.parts import model_of

Parts = tuple[Any, ...]


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def wrapped(old: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *inputs: old(*inputs) * 2


def wraps_keeping_names(net: nn.Module) -> None:
    old = net.forward

    @functools.wraps(old)
    def forward(x: Tensor) -> Tensor:
        return old(x) + 1

    net.forward = forward


class Adapter:
    def __init__(self, layer: nn.Linear) -> None:
        self.layer = layer
        self.old = layer.forward
        layer.down = nn.Parameter(torch.ones(2, 6))
        layer.up = nn.Parameter(torch.ones(8, 2))

    def __call__(self, x: Tensor) -> Tensor:
        return self.old(x) + x @ self.layer.down.T @ self.layer.up.T


def assign(layer: Any, forward: Any) -> None:
    layer.forward = forward


HABITS: dict[str, Callable[[nn.Sequential], object]] = {
    "forward wrapped on the instance": lambda net: assign(net, wrapped(net.forward)),
    "forward wrapped twice": lambda net: assign(net, wrapped(wrapped(net.forward))),
    "forward of a layer wrapped": lambda net: assign(net[0], wrapped(net[0].forward)),
    "functools.wraps": wraps_keeping_names,
    "functools.partial": lambda net: assign(net, functools.partial(lambda k, old, x: old(x) * k, 2.0, net.forward)),
    "types.MethodType": lambda net: assign(net, MethodType(lambda self, x: self[2](self[1](self[0](x))), net)),
    "an object that is called": lambda net: assign(net[0], Adapter(net[0])),
    "torch.no_grad() around a layer": lambda net: assign(net[0], torch.no_grad()(net[0].forward)),
    "a checkpoint around a layer": lambda net: assign(
        net[0], lambda x, old=net[0].forward: checkpoint(old, x, use_reentrant=False)
    ),
    "a default argument": lambda net: assign(
        net[0], lambda x, *, layer=net[0], other=net[2]: F.linear(x, layer.weight) + other.weight.sum()
    ),
    "a hook that reads another layer": lambda net: net[0].register_forward_hook(
        lambda module, inputs, output: output + net[2].weight.sum()
    ),
    "a pre-hook that reads a parameter": lambda net: net[0].register_forward_pre_hook(
        lambda module, inputs, bias=net[2].bias: (inputs[0] + bias.sum(),)
    ),
}


def model(parts: Parts) -> LoadedModel:
    return model_of("a test", parts)


def loss_of(made: LoadedModel) -> Tensor:
    return made.loss(made.inputs, made.targets)


def require_apart(made: LoadedModel) -> None:
    """Fails where a copy computes with a tensor of the model that was copied."""
    twin = copied(made)
    expected = loss_of(made)
    assert torch.equal(loss_of(twin), expected)
    with torch.no_grad():
        for parameter in made.module.parameters():
            parameter.fill_(7.0)
    assert torch.equal(loss_of(twin), expected)
    assert not torch.equal(loss_of(made), expected)


@pytest.mark.parametrize("habit", HABITS.values(), ids=HABITS)
def test_a_copy_computes_with_its_own_layers(habit: Callable[[nn.Sequential], object]) -> None:
    net = mlp()
    habit(net)
    require_apart(model((net, (torch.randn(4, 6), torch.randint(3, (4,))), F.cross_entropy)))


def test_so_does_a_loss_that_reads_the_module() -> None:
    net = mlp()

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(output, targets) + net[0].weight.square().sum()

    require_apart(model((net, (torch.randn(4, 6), torch.randint(3, (4,))), loss)))


NETWORK = mlp()


def of_the_network() -> Tensor:
    return NETWORK[2].weight.sum()


def test_so_does_a_function_that_reads_global_variables() -> None:
    NETWORK[0].register_forward_hook(lambda module, inputs, output: output + of_the_network())
    require_apart(model((NETWORK, (torch.randn(4, 6), torch.randint(3, (4,))), F.cross_entropy)))


def test_what_is_no_part_of_the_model_is_shared() -> None:
    net = mlp()
    kept = open("/dev/null")  # noqa: SIM115 - a file cannot be copied
    with kept:
        net[0].register_forward_hook(lambda module, inputs, output: kept.readable() and output + net[2].weight.sum())
        twin = copied(model((net, (torch.randn(4, 6), torch.randint(3, (4,))), F.cross_entropy)))
        (hook,) = twin.module[0]._forward_hooks.values()
        assert isinstance(hook, FunctionType)
        assert kept in [cell.cell_contents for cell in hook.__closure__ or ()]
        assert twin.loss_fn.function is F.cross_entropy
