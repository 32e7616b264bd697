"""Writes to parts of tensors, numbers of samples: the captured graph, without either, gives the module's gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from planner.ir.errors import UnsupportedModelError
from profiler.capture.graph import capture
from tests.profiler.capture.test_trace import checked, model_of


def slices(y: Tensor) -> Tensor:
    y[:, 0] += 1
    y[:, 1:3] = y[:, 3:5] * 2
    y[:, -1].copy_(y[:, 0])
    return y.tanh()


def through_views(y: Tensor) -> Tensor:
    turned = y.view(-1, 2, 3).transpose(1, 2)
    turned[:, 1, :] *= 3
    return torch.cat((y, turned.flatten(1)), 1)


def other_views(y: Tensor) -> Tensor:
    left = y[:, :3]
    right = y[:, 3:]
    first = y[:, 0]
    left.mul_(2)
    right += left
    return left.square().sum(1) + right.sum(1) + first


def divided(y: Tensor) -> Tensor:
    """Torch lets the parts of a split be written to where no gradient is asked for."""
    mask = y.detach() * 1
    rows = mask.view(-1, 2, 3).unbind(2)
    rows[1].zero_()
    head, tail = mask.split([2, 4], 1)
    tail.fill_(0.5)
    left, right = mask.chunk(2, 1)
    right += left
    return y * mask + head.sum(1, keepdim=True) + rows[2].sum(1, keepdim=True)


def permuted(y: Tensor) -> Tensor:
    turned = y.view(-1, 1, 2, 3).permute(3, 0, 2, 1).squeeze(3)
    turned[0] = 7.0
    turned.narrow(2, 0, 1).neg_()
    return y * 2


def whole_with_views(y: Tensor) -> Tensor:
    part = y[:, 2:]
    y.mul_(2)
    y[:, 2:4] += part[:, :2]
    return part * y[:, :4]


def filled(y: Tensor) -> Tensor:
    result = y.new_zeros(y.shape[0], 3, 6)
    for step in range(3):
        result[:, step] = y * step
    return result


def masked(y: Tensor) -> Tensor:
    y[:, :3].masked_fill_(y[:, 3:] > 0, 0.25)
    return y


def copies(y: Tensor) -> Tensor:
    """A reshape that copies is no view."""
    turned = y.view(-1, 2, 3).transpose(1, 2).reshape(-1, 6)
    turned[:, 0] += 1
    return turned * y


def several_results(y: Tensor) -> Tensor:
    """Results of one operator that share no memory."""
    values, order = y.topk(2, 1)
    values /= values.sum(1, keepdim=True)
    return values * order


def complex_parts(y: Tensor) -> Tensor:
    """As of Fourier layers: some modes are kept, of both ends, others are zero."""
    modes = torch.fft.rfft(y.view(-1, 2, 3), dim=1)
    kept = torch.zeros_like(modes)
    kept[:, :1, :2] = modes[:, :1, :2] * (1 + 2j)
    kept[:, -1:, 1:] = modes[:, -1:, 1:]
    kept[:, 1, 0] = modes[:, 0, 2]
    return torch.fft.irfft(kept, n=2, dim=1).flatten(1)


def narrow_dtype(y: Tensor) -> Tensor:
    half = y.to(torch.bfloat16)
    half += y
    half[:, :2] = y[:, 2:4]
    return half.float()


WRITES = [slices, through_views, other_views, divided, permuted, whole_with_views, filled, masked, copies]


@pytest.mark.parametrize(
    "function", [*WRITES, several_results, complex_parts, narrow_dtype], ids=lambda each: each.__name__
)
def test_a_write_to_a_part_is_seen_by_whoever_reads_the_whole(function: Callable[[Tensor], Tensor]) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return function(m.layer(x))

    graph = checked(model_of(forward, torch.randn(2, 4), layer=nn.Linear(4, 6)))
    assert graph.polymorphic
    assert graph.mixing == ()
    ops = [node.target for node in graph.graph_module.graph.nodes if node.op == "call_function"]
    assert not [op for op in ops if isinstance(op, torch._ops.OpOverload) and op._schema.is_mutable]


def test_a_write_that_nobody_sees_adds_nothing() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.layer(x)
        y[:, 0].mul_(2)
        return m.layer(x)

    graph = checked(model_of(forward, torch.randn(2, 4), layer=nn.Linear(4, 6)))
    assert [layer.name for layer in graph.graph.layers] == ["layer", "loss.square", "loss"]


def masked_data(m: Any, x: Tensor) -> Tensor:
    m.layer.weight.data *= m.mask
    return m.layer(x)


def data_in_place(m: Any, x: Tensor) -> Tensor:
    m.layer.weight.data[:, 0].mul_(m.mask[0])
    return m.layer(x)


def without_gradients(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.layer.weight.t().div_(m.layer.weight.norm())
    return m.layer(x)


@pytest.mark.parametrize("forward", [masked_data, data_in_place, without_gradients], ids=lambda each: each.__name__)
def test_writing_to_a_parameter_is_refused_by_its_name_or_line(forward: Callable[[Any, Tensor], Tensor]) -> None:
    model = model_of(forward, torch.randn(2, 4), layer=nn.Linear(4, 4), mask=torch.tensor([1.0, 0, 1, 1]))
    before = model.module.layer.weight.detach().clone()
    with pytest.raises(
        UnsupportedModelError, match=r"own parameter layer.weight|test_functional.py:\d+ in masked_data"
    ):
        capture(model)
    assert torch.equal(model.module.layer.weight, before)


def test_data_of_what_is_not_trained_is_written() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.layer(x)
        m.mean.data.mul_(0.5).add_(y.detach().sum())
        return y * m.mean

    checked(model_of(forward, torch.randn(2, 4), layer=nn.Linear(4, 4), mean=torch.ones(())))


def test_writing_to_a_view_that_cannot_be_undone_is_refused_with_both_places() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.layer(x)
        y.unfold(1, 2, 2).mul_(2)
        return y.tanh()

    with pytest.raises(UnsupportedModelError, match=r"mul_\.Tensor writes to a part[\s\S]*read by aten\.tanh"):
        capture(model_of(forward, torch.randn(2, 4), layer=nn.Linear(4, 4)))


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
