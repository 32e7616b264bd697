"""Modules that are given to ``hp.profile``, and by a factory to ``profile``: trained, or refused by their kind."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao import quantization

import halopipe as hp
from halopipe.planning.measure import source_of
from planner.ir.errors import UnsupportedModelError
from planner.ir.profile import ModelSource
from profiler.capture.graph import capture
from profiler.source.source import load_model
from tests.halopipe.commands import call

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),  # some of what is refused is old
    pytest.mark.filterwarnings("ignore:.*torch.ao.quantization:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.quantize_per_tensor:UserWarning"),
]
BATCH = torch.linspace(2.0, 0.5, 12).view(4, 3), torch.randn(4, 3)
KINDS = """
import torch
from torch import nn
from torch.ao import quantization


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3))


def lazy():
    return nn.Sequential(nn.Linear(3, 4), nn.LazyLinear(3))


def frozen():
    return net().requires_grad_(False)


def without():
    return nn.ReLU()


def meta():
    return net().to("meta")


def scripted():
    return torch.jit.script(net())


def traced():
    return torch.jit.trace(net(), torch.randn(4, 3))


def scripted_part():
    return nn.Sequential(nn.Linear(3, 3), torch.jit.script(nn.ReLU()))


def replicated():
    wrapped = nn.DataParallel(net())
    wrapped.device_ids = [0]  # as where there is a GPU
    return wrapped


def quantised():
    return quantization.quantize_dynamic(net(), {nn.Linear}, dtype=torch.qint8)


def of_inference():
    with torch.inference_mode():
        return net()


def observed():
    return nn.Sequential(nn.Linear(3, 4), quantization.FakeQuantize(), nn.Linear(4, 3))


def factory(name):
    return globals()[name](), (torch.randn(4, 3), torch.randn(4, 3)), nn.MSELoss()
"""
REFUSED = {
    "lazy": ("1.weight has no shape yet", "run one batch through the module"),
    "frozen": ("nothing to train.*all 4 parameters are frozen", "requires_grad_"),
    "without": ("nothing to train.*neither the module nor its loss has a parameter", ""),
    "meta": ("0.weight is on the meta device", "to_empty"),
    "scripted": (r"the module is scripted.*made of Sequential", "torch.jit.script"),
    "traced": (r"the module is scripted.*made of Sequential", "torch.jit.trace"),
    "scripted_part": (r"1 is scripted.*made of ReLU", "torch.jit.script"),
    "replicated": ("the module is DataParallel", "model.module"),
    "quantised": (r"0 is quantised \(Linear\)", "before it was converted"),
    "of_inference": ("0.weight is an inference tensor", "no_grad"),
    "observed": ("cannot be captured", "FusedMovingAvgObsFakeQuantize"),
}


@pytest.fixture
def kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "kinds.py").write_text(KINDS)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(KINDS, names)
    return names


@pytest.mark.every_case
@pytest.mark.parametrize("name", REFUSED)
def test_a_module_object_that_cannot_be_trained_is_refused_by_its_kind(kinds: dict[str, Any], name: str) -> None:
    words, remedy = REFUSED[name]
    with pytest.raises(UnsupportedModelError, match=f"(?s){words}") as caught:
        hp.profile(kinds[name](), BATCH, loss_fn=nn.MSELoss(), quick=True, cluster=1)
    assert remedy in "\n".join(caught.value.remedies)


@pytest.mark.parametrize("name", REFUSED)
def test_a_factory_of_such_a_module_is_refused_alike(kinds: dict[str, Any], name: str) -> None:
    words, remedy = REFUSED[name]
    result = call("profile", "kinds.py:factory", "--arg", f'name="{name}"', "--quick")
    assert result.exit_code
    assert words.partition(".*")[0].replace("\\", "") in result.output
    assert remedy in result.output
    assert "error[H204]" in result.output


def descent(net: nn.Module, x: Tensor) -> Tensor:
    """Forces: the derivative of an energy with respect to the input."""
    x = x.detach().requires_grad_(True)
    (force,) = torch.autograd.grad(net.first(x).square().sum(), x, create_graph=True)
    return force


def resizing(net: nn.Module, x: Tensor) -> Tensor:
    """An observer: its buffer has the shape of what it was first given."""
    with torch.no_grad():
        if not net.largest.numel():
            net.largest.resize_(3).copy_(x.abs().amax(0))
        else:
            net.largest.copy_(torch.maximum(net.largest, x.abs().amax(0)))
    return net.first(x / net.largest)


class Net(nn.Module):
    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.function = function
        self.register_buffer("largest", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def source(module: nn.Module) -> ModelSource:
    return source_of(module, example=BATCH, loss_fn=nn.MSELoss())


def test_a_module_whose_forward_takes_gradients_is_taken_as_it_is(kinds: dict[str, Any]) -> None:
    model = load_model(source(Net(descent)))
    assert any(layer.parameters for layer in capture(model).graph.layers)


def test_a_buffer_that_the_first_call_resizes_is_as_it_was_and_the_remedy_works(kinds: dict[str, Any]) -> None:
    net = Net(resizing)
    model = load_model(source(net))
    with pytest.raises(UnsupportedModelError, match="when it is called again") as caught:
        capture(model)
    assert "call it, and the loss, once" in caught.value.remedies[0]
    assert net.largest.shape == model.module.largest.shape == (0,)
    net(BATCH[0])
    assert capture(load_model(source(net))).graph.layers


def in_place(net: nn.Module) -> nn.Module:
    net.compile(backend="eager")
    return net


@pytest.mark.parametrize("compiled", [lambda net: torch.compile(net, backend="eager"), in_place])
def test_a_module_that_torch_compiles_is_planned_as_what_it_compiles(
    kinds: dict[str, Any], compiled: Callable[[nn.Module], nn.Module]
) -> None:
    graphs = [capture(load_model(source(wrap(kinds["net"]())))).graph for wrap in (compiled, lambda net: net)]
    assert [layer.kind for layer in graphs[0].layers] == [layer.kind for layer in graphs[1].layers]


def test_fake_quantisation_whose_operator_reads_its_switches_is_captured(kinds: dict[str, Any]) -> None:
    fused = nn.Sequential(nn.Linear(3, 4), quantization.FusedMovingAvgObsFakeQuantize(), nn.Linear(4, 3))
    assert len(capture(load_model(source(fused))).graph.layers) > 2


def test_inference_tensors_as_an_example_are_numbers(kinds: dict[str, Any]) -> None:
    with torch.inference_mode():
        batch = torch.randn(4, 3), torch.randn(4, 3)
    made = source_of(kinds["net"](), example=batch, loss_fn=nn.MSELoss())
    assert capture(load_model(made)).graph.layers


class Weighted(nn.Module):
    """A loss with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, out: Tensor, target: Tensor) -> Tensor:
        return ((out - target).square() * self.weight).mean() + self.weight.square().mean()


def test_a_loss_that_a_module_keeps_is_not_taken_for_the_one_that_is_given(kinds: dict[str, Any]) -> None:
    """The remedy, followed to the letter, is taken."""
    net = kinds["net"]()
    net.loss_fn = Weighted()
    net.forward = lambda x: net[2](net[1](net[0](x)))
    with pytest.raises(UnsupportedModelError, match="two tensors of one name") as caught:
        source_of(net, example=BATCH, loss_fn=Weighted())
    assert "give that very loss: model.loss_fn" in caught.value.remedies
    made = source_of(net, example=BATCH, loss_fn=net.loss_fn)
    assert "loss_fn.weight" in capture(load_model(made)).graph.parameters
