"""Which layers are found to mix samples, and which are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from profiler import LoadedModel, capture, mean_of_squares
from profiler.source import Loss


@pytest.fixture(autouse=True)
def _one_thread_and_a_seed() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x)).sigmoid()


def mixing(function: Callable[[Tensor], Tensor], samples: int = 3) -> tuple[str, ...]:
    graph = capture(LoadedModel(Net(function), (torch.randn(samples, 3, 4),), (), Loss(mean_of_squares)))
    assert graph.polymorphic
    marked = tuple(layer.name for layer in graph.graph.layers if layer.attributes.get("mixes_samples"))
    assert marked == graph.mixing
    return graph.mixing


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize(
    ("function", "culprit"),
    [
        (lambda x: x - x.mean(0), ("sub",)),
        (lambda x: x.roll(1, 0), ("roll",)),
        (lambda x: x.flip(0), ("flip",)),
        (lambda x: x.softmax(0), ("softmax",)),
        (lambda x: x.cumsum(0), ("cumsum",)),
        (lambda x: x / x.abs().max(), ("max", "div")),
        (lambda x: x.flatten(1) @ x.flatten(1).t(), ("matmul",)),
    ],
    ids=["mean", "roll", "flip", "softmax", "cumsum", "max", "pairs"],
)
def test_a_layer_that_mixes_samples_is_named_and_none_after_it(
    function: Callable[[Tensor], Tensor], culprit: tuple[str, ...], samples: int
) -> None:
    found = mixing(function, samples)
    assert found in (culprit, culprit[:1], culprit[1:])
    assert found


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.softmax(1),
        lambda x: x.flatten(0, 1),
        lambda x: x.transpose(0, 1),
        lambda x: nn.functional.dropout(x, 0.5),
        lambda x: x + torch.rand_like(x),
        lambda x: nn.functional.batch_norm(x, None, None, training=True),
        lambda x: nn.functional.batch_norm(x, torch.zeros(3), torch.ones(3), training=True),
        lambda x: x * torch.arange(12.0).view(3, 4),
    ],
    ids=["softmax", "flatten", "transpose", "dropout", "noise", "batch norm", "running batch norm", "constant"],
)
def test_what_keeps_samples_apart_is_left_in_peace(function: Callable[[Tensor], Tensor]) -> None:
    assert mixing(function) == ()


def test_samples_in_several_pieces_are_told_from_mixed_ones() -> None:
    net = Net(lambda x: x.transpose(0, 1).reshape(-1, 4).relu().view(3, -1, 4))
    graph = capture(LoadedModel(net, (torch.randn(2, 3, 4),), (), Loss(mean_of_squares)))
    interleaved = [layer.name for layer in graph.graph.layers if layer.attributes.get("interleaves_samples")]
    assert (graph.mixing, interleaved) == ((), ["reshape", "relu"])


REDUCTIONS = {"sum": lambda output: output.square().sum(), "root": lambda output: output.square().mean().sqrt()}


@pytest.mark.parametrize("reduce", REDUCTIONS.values(), ids=REDUCTIONS)
def test_a_loss_that_is_no_mean_over_samples_is_named(reduce: Callable[[Tensor], Tensor]) -> None:
    model = LoadedModel(nn.Linear(4, 4), (torch.randn(3, 4),), (), Loss(lambda output, targets: reduce(output)))
    assert capture(model).mixing == ("loss",)


def test_memory_that_is_yet_to_be_filled_tells_no_samples_apart() -> None:
    def skipped(y: Tensor) -> Tensor:
        torch.full((64,), float("nan"))  # what the next tensor may find in its memory
        return y * y.new_empty(y.shape[0], 1, 1).bernoulli_(0.5)

    assert mixing(skipped) == ()


def test_what_mixes_samples_behind_a_draw_is_found() -> None:
    def dropped(y: Tensor) -> Tensor:
        return y * torch.rand(y.shape[0], 1, 1)

    assert mixing(lambda y: dropped(y).tanh()) == ()
    assert mixing(lambda y: dropped(y) - dropped(y).mean(0)) != ()
