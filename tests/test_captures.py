from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from profiler.source.model import LoadedModel
from profiler.source.parts import model_of
from tests import captures


class Net(nn.Module):
    """Tied parameters, a buffer and one that no state dict holds."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)) + self.table)


def net(seed: int = 0, loss: Any = functional.cross_entropy, width: int = 4) -> LoadedModel:
    torch.manual_seed(seed)
    return model_of("net", (Net(), (torch.randn(6, width), torch.arange(6) % 3), loss))


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> list[LoadedModel]:
    """The models that were captured, none before."""
    found: list[LoadedModel] = []
    honest = captures.capture_anew

    def capture(model: LoadedModel, *rules: Any) -> Any:
        found.append(model)
        return honest(model, *rules)

    monkeypatch.setattr(captures, "capture_anew", capture)
    monkeypatch.setattr(captures, "_known", {})
    return found


def test_a_model_that_is_alike_gets_a_graph_of_its_own_module(asked: list[LoadedModel]) -> None:
    first = net()
    second = net()
    loss = captures.capture(first).graph_module(6, *first.inputs, *first.targets)
    loss.backward()
    with torch.no_grad():
        for parameter in first.module.parameters():
            parameter.sub_(parameter.grad)
    found = captures.capture(second)
    assert asked == [first]
    assert {id(each) for each in found.graph_module.parameters()} == set(map(id, second.module.parameters()))
    assert {id(each) for each in found.graph_module.buffers()} >= {id(second.module.norm.running_mean)}
    torch.testing.assert_close(found.graph_module(6, *second.inputs, *second.targets), loss, rtol=0, atol=0)
    assert int(second.module.norm.num_batches_tracked) == 1
    assert all(parameter.grad is None for parameter in second.module.parameters())
    anew = captures.capture_anew(net())
    assert anew.graph == found.graph
    assert anew.graph_module.code == found.graph_module.code


def eval_norm(model: LoadedModel) -> None:
    model.module.norm.eval()


def frozen(model: LoadedModel) -> None:
    model.module.first.bias.requires_grad_(False)


def untied(model: LoadedModel) -> None:
    model.module.last.weight = nn.Parameter(model.module.first.weight.detach().clone())


def of_numbers(model: LoadedModel) -> None:
    model.module.norm.eps = 1e-3


def other_values(model: LoadedModel) -> None:
    model.module.table[0] = 1.0


def of_a_test(model: LoadedModel) -> None:
    model.module.norm.forward = lambda x: x


def test_a_model_that_differs_in_anything_is_captured(asked: list[LoadedModel]) -> None:
    captures.capture(net())
    for change in (eval_norm, frozen, untied, of_numbers, other_values, of_a_test):
        changed = net()
        change(changed)
        captures.capture(changed)
        assert asked.pop() is changed, change.__name__
    assert len(asked) == 1


def test_another_loss_another_class_and_functions_of_a_test_are_captured(
    asked: list[LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    captures.capture(net())
    captures.capture(net(loss=functional.multi_margin_loss))
    monkeypatch.setattr(Net, "forward", lambda self, x: self.first(x))
    captures.capture(net())
    for _ in range(2):
        captures.capture(net(loss=lambda output, targets: functional.cross_entropy(output, targets)))
    assert len(asked) == 5
