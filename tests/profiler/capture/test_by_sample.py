"""Operators that number the samples of a batch become others that do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from profiler.capture.graph import capture
from tests.profiler.capture.test_trace import checked, model_of


@pytest.fixture(autouse=True)
def _one_thread_and_a_seed() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def last(y: Tensor) -> Tensor:
    """The last place of each sample, counted from the end; one place a sample."""
    return y[torch.arange(y.shape[0]), y[:, :, 0].argmax(1) - 5]


def several(y: Tensor) -> Tensor:
    order = y[:, :, 0].argsort(1)[:, :3]
    return y[torch.arange(y.size(0)).unsqueeze(1), order]


def of_numbers(y: Tensor) -> Tensor:
    """A number a sample, as in a DQN."""
    q = y.sum(2)
    return q[torch.arange(q.size(0)), q.argmin(1)]


def of_matrices(y: Tensor) -> Tensor:
    rows = torch.arange(y.size(0), device=y.device)[:, None, None]
    return y[rows, (y[:, :2, :2] > 0).long()]


@pytest.mark.parametrize("function", [last, several, of_numbers, of_matrices], ids=lambda each: each.__name__)
def test_a_place_in_each_sample_needs_no_numbers_of_samples(function: Callable[[Tensor], Tensor]) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return function(m.layer(x))

    graph = checked(model_of(forward, torch.randn(2, 5, 4), layer=nn.Linear(4, 6)))
    assert graph.polymorphic
    assert graph.mixing == ()
    targets = {str(node.target) for node in graph.graph_module.graph.nodes}
    assert "aten.gather.default" in targets
    assert not any(target.startswith("aten.arange") for target in targets)


def test_a_place_beyond_a_sample_is_an_error_as_before() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.layer(x)[torch.arange(x.size(0)), (x[:, 0] > 10).long() * 7]

    graph = checked(model_of(forward, torch.zeros(2, 3), layer=nn.Linear(3, 6)))
    with pytest.raises((IndexError, RuntimeError), match=r"out of (bounds|range)"):
        graph.graph_module(2, torch.full((2, 3), 11.0))


def test_numbers_in_another_order_are_left_alone() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.layer(x)
        return y[torch.arange(y.size(0)).flip(0), y[:, :, 0].argmax(1)]

    assert checked(model_of(forward, torch.randn(2, 5, 4), layer=nn.Linear(4, 6))).mixing


def assert_bags(forward: Callable[[Any, Tensor], Tensor], ids: Tensor, **parts: Any) -> None:
    """Rounded otherwise than torch's kernel, the rows are those of the module, and none reads another."""
    model = model_of(forward, ids, **parts)
    graph = capture(model)
    assert graph.polymorphic
    assert graph.mixing == ()
    weights = list(model.module.parameters())
    found = graph.graph_module(3, torch.cat([ids, ids])[1:4])
    expected = model.loss_fn(model.module(torch.cat([ids, ids])[1:4]), ())
    for a, b in zip(torch.autograd.grad(found, weights), torch.autograd.grad(expected, weights), strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("padding", [None, 0, -2])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_of_rows_are_summed_row_by_row(mode: str, padding: int | None) -> None:
    ids = torch.tensor([[0, 3, 7, 0], [5, 5, 0, 7], [0, 0, 0, 0]])
    bag = nn.EmbeddingBag(9, 4, mode=mode, padding_idx=padding)
    with torch.no_grad():
        bag.weight.normal_()  # also the row of padding
    assert_bags(lambda m, x: m.bag(x), ids, bag=bag)


def test_bags_with_weights() -> None:
    def weighted(m: Any, x: Tensor) -> Tensor:
        return m.bag(x.long() % 9, per_sample_weights=x.float().sin())

    assert_bags(weighted, torch.arange(12).view(3, 4), bag=nn.EmbeddingBag(9, 4, mode="sum"))
