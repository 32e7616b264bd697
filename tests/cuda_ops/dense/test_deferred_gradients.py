"""Backward in halves gives what torch's whole backward gives, and the second half is nothing but weight gradients."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from cuda_ops.dense.deferred_gradients import CurrentQueue, WeightGradientQueue, accumulate, deferred
from cuda_ops.operator_table import OPERATORS, name_of

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")


class Case(nn.Module):
    """Calls ``function(x, *parameters)``."""

    def __init__(self, function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.function = function
        self.values = nn.ParameterList(
            nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in shapes
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.values)


def conv(name: str, **options: Any) -> Callable[..., Tensor]:
    return lambda x, w, b=None: getattr(functional, name)(x, w, b, **options)


def linear(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    return functional.linear(x, w, b)


CASES: dict[str, tuple[Case, tuple[int, ...]]] = {
    "linear": (Case(linear, (5, 3), (5,)), (4, 3)),
    "linear without bias, 3 dims": (Case(linear, (5, 3)), (4, 2, 3)),
    "linear of a vector": (Case(linear, (5, 3), (5,)), (3,)),
    "linear, no rows": (Case(linear, (5, 3), (5,)), (0, 3)),
    "linear, x not contiguous": (Case(lambda x, w, b: linear(x.transpose(0, 1), w, b), (5, 3), (5,)), (4, 2, 3)),
    "linear, dy not contiguous": (Case(lambda x, w: linear(x, w).transpose(1, 2) * 2, (5, 3)), (4, 2, 3)),
    "matmul": (Case(lambda x, w: x @ w, (3, 5)), (4, 2, 3)),
    "matmul of a vector": (Case(lambda x, w: x @ w, (3, 5)), (3,)),
    "mm": (Case(lambda x, w: x.mm(w), (3, 5)), (4, 3)),
    "addmm": (Case(lambda x, w, b: torch.addmm(b, x, w), (3, 5), (5,)), (4, 3)),
    "addmm, one number as bias": (Case(lambda x, w, b: torch.addmm(b, x, w), (3, 5), (1,)), (4, 3)),
    "one weight twice": (Case(lambda x, w: linear(linear(x, w).relu(), w), (3, 3)), (4, 3)),
    "one weight twice, in two ways": (Case(lambda x, w: linear(x, w) @ w, (3, 3)), (4, 3)),
    "one weight deferred and elsewhere": (Case(lambda x, w: linear(x, w) * w.sum(), (3, 3)), (4, 3)),
    "residual": (Case(lambda x, w: x + linear(x * 2, w), (3, 3)), (4, 3)),
    "residual of residual": (Case(lambda x, w, v: (y := x + linear(x, w)) + linear(y, v), (3, 3), (3, 3)), (4, 3)),
    "conv1d": (Case(conv("conv1d", padding=2), (4, 3, 3), (4,)), (2, 3, 7)),
    "conv1d, strided": (Case(conv("conv1d", stride=2), (4, 3, 3)), (2, 3, 7)),
    "conv2d": (Case(conv("conv2d", padding=1), (4, 3, 3, 3), (4,)), (2, 3, 6, 5)),
    "conv2d, groups, dilation": (
        Case(conv("conv2d", groups=2, dilation=(1, 2), padding="valid"), (4, 2, 3, 3), (4,)),
        (2, 4, 6, 7),
    ),
    "conv2d, depthwise": (Case(conv("conv2d", groups=4, padding="same"), (4, 1, 3, 3), (4,)), (2, 4, 6, 7)),
    "conv2d, same with an even kernel": (Case(conv("conv2d", padding="same"), (4, 3, 2, 4)), (2, 3, 6, 7)),
    "conv2d of one sample": (Case(conv("conv2d"), (4, 3, 3, 3), (4,)), (3, 6, 5)),
    "conv2d, no rows": (Case(conv("conv2d", padding=1), (4, 3, 3, 3), (4,)), (0, 3, 6, 5)),
    "conv2d, not contiguous": (Case(lambda x, w: functional.conv2d(x.mT, w).mT * 3, (4, 3, 3, 3)), (2, 3, 6, 5)),
    "conv3d": (Case(conv("conv3d", padding=1, stride=(1, 2, 1)), (4, 3, 3, 3, 3), (4,)), (2, 3, 4, 5, 4)),
    "conv_transpose1d": (Case(conv("conv_transpose1d", stride=2, output_padding=1), (3, 4, 3), (4,)), (2, 3, 5)),
    "conv_transpose2d": (Case(conv("conv_transpose2d", stride=2, groups=2), (4, 2, 3, 3), (4,)), (2, 4, 3, 4)),
    "conv_transpose3d": (Case(conv("conv_transpose3d", stride=2, dilation=2), (3, 2, 2, 2, 2)), (1, 3, 2, 2, 3)),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def traced(module: nn.Module, *inputs: Tensor) -> fx.GraphModule:
    return torch.export.export(module, inputs, strict=False).module(check_guards=False)


def halved(module: nn.Module, x: Tensor, current: CurrentQueue) -> fx.GraphModule:
    """The module's graph with deferred weight gradients."""
    graph_module = traced(module, x)
    for node in list(graph_module.graph.nodes):
        function = deferred(node, current)
        if function is not None:
            with graph_module.graph.inserting_after(node):
                node.replace_all_uses_with(graph_module.graph.call_function(function, node.args, node.kwargs))
            graph_module.graph.erase_node(node)
    graph_module.recompile()
    return graph_module


def data(shape: tuple[int, ...], requires_grad: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_(requires_grad)


def gradients(module: nn.Module, y: Tensor, x: Tensor) -> list[Tensor | None]:
    weight = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape)
    (y * weight).sum().backward()
    return [x.grad, *(parameter.grad for parameter in module.parameters())]


def both(case: nn.Module, x: Tensor) -> tuple[list[Tensor | None], list[Tensor | None], list[Tensor | None], Tensor]:
    """Gradients of torch, of the first half and of both halves; and how far the results are apart."""
    case.zero_grad(set_to_none=True)
    twin = x.detach().requires_grad_(x.requires_grad)
    whole = case(twin)
    expected = gradients(case, whole, twin)
    case.zero_grad(set_to_none=True)
    current = CurrentQueue()
    graph_module = halved(case, x.detach(), current)
    current.queue = queue = WeightGradientQueue()
    y = graph_module(x)
    first = gradients(case, y, x)
    queue.run()
    both = [x.grad, *(parameter.grad for parameter in case.parameters())]
    assert len(queue) == 0
    return expected, first, both, (y - whole).detach().abs().sum()


@each_case
@pytest.mark.parametrize("wants_x", [True, False], ids=["", "x without gradient"])
def test_both_halves_together_are_the_whole(case: tuple[Case, tuple[int, ...]], wants_x: bool) -> None:
    expected, _, found, distance = both(case[0], data(case[1], wants_x))
    assert distance <= 1e-12
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
            assert a.stride() == b.stride()


@each_case
def test_the_first_half_leaves_the_weights_alone(case: tuple[Case, tuple[int, ...]]) -> None:
    _, first, _, _ = both(case[0], data(case[1]))
    read_elsewhere = case is CASES["one weight deferred and elsewhere"]
    assert [gradient is None for gradient in first[1:]] == [not read_elsewhere] * (len(first) - 1)


def test_every_operator_with_a_rule_is_tested() -> None:
    found = set()
    for case, shape in CASES.values():
        graph_module = traced(case, data(shape, False))
        found |= {node.target for node in graph_module.graph.nodes if deferred(node, CurrentQueue())}
    missing = {row.name for row in OPERATORS.values() if row.halves} - {name_of(target) for target in found}
    assert missing == {"embedding", "convolution"}  # the next two tests


@pytest.mark.parametrize("padding", [None, 2])
def test_rows_of_an_embedding(padding: int | None) -> None:
    table = nn.Embedding(7, 3, padding_idx=padding, scale_grad_by_freq=True, dtype=torch.float64)
    indices = torch.tensor([[1, 2, 2], [6, 1, 1]])
    table(indices).square().sum().backward()
    expected = table.weight.grad
    table.weight.grad = None
    current = CurrentQueue()
    graph_module = halved(table, indices, current)
    current.queue = WeightGradientQueue()
    graph_module(indices).square().sum().backward()
    assert table.weight.grad is None
    current.queue.run()
    torch.testing.assert_close(table.weight.grad, expected, rtol=1e-12, atol=1e-12)


def test_a_convolution_written_out() -> None:
    def function(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return torch.ops.aten.convolution.default(x, w, b, [2], [1], [1], False, [0], 1)

    expected, first, found, _ = both(Case(function, (4, 3, 3, 3), (4,)), data((2, 3, 6, 5)))
    assert first[1] is None
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("frozen", [0, 1], ids=["weight", "bias"])
def test_what_is_frozen_gets_no_gradient(frozen: int) -> None:
    for name in ("linear", "conv2d"):
        case, shape = CASES[name]
        case.values[frozen].requires_grad_(False)
        try:
            expected, first, found, _ = both(case, data(shape))
        finally:
            case.values[frozen].requires_grad_(True)
        assert found[1 + frozen] is None
        assert first[1] is None
        assert (found[1] is None) == (frozen == 0)
        for a, b in zip(found, expected, strict=True):
            assert a is b or torch.allclose(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["linear", "conv2d", "matmul", "conv_transpose2d"])
def test_autocast_computes_in_its_own_precision_and_keeps_master_weights(name: str) -> None:
    case, shape = CASES[name]
    case = Case(case.function, *(tuple(value.shape) for value in case.values)).float()
    x = data(shape, False).float().requires_grad_()
    twin = x.detach().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = case(twin)
    expected = gradients(case, y, twin)
    case.zero_grad(set_to_none=True)
    current = CurrentQueue()
    graph_module = halved(case, x.detach(), current)
    current.queue = WeightGradientQueue()
    with torch.autocast("cpu", torch.bfloat16):
        halves = graph_module(x)
    found = gradients(case, halves, x)
    current.queue.run()
    found = [x.grad, *(parameter.grad for parameter in case.parameters())]
    assert torch.equal(halves, y)
    assert y.dtype == torch.bfloat16
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * b.abs().max().item())


def test_without_a_queue_or_a_gradient_the_operator_is_torch_s_own() -> None:
    case, shape = CASES["conv2d"]
    current = CurrentQueue()
    graph_module = halved(case, data(shape, False), current)
    x = data(shape)
    assert "Convolution" in type(graph_module(x).grad_fn).__name__
    current.queue = WeightGradientQueue()
    with torch.no_grad():
        assert torch.equal(graph_module(x), case(x))
    assert len(current.queue) == 0
    assert "_Deferred" in type(graph_module(x).grad_fn).__name__


def test_a_weight_that_is_no_parameter_is_not_deferred() -> None:
    def rule(module: nn.Module, target: Any, x: Tensor) -> Callable[..., Tensor] | None:
        (node,) = [node for node in traced(module, x).graph.nodes if node.target is target]
        return deferred(node, CurrentQueue())

    aten = torch.ops.aten
    x = data((4, 3), False)
    assert rule(Case(linear, (5, 3)), aten.linear.default, x) is not None
    assert rule(Case(lambda x, w: linear(x, w.t()), (3, 5)), aten.linear.default, x) is None
    assert rule(Case(lambda x, w: linear(x, x, w), (4,)), aten.linear.default, x) is None
    assert rule(Case(lambda x, w: torch.addmm(x, x, w), (3, 3)), aten.addmm.default, x[:3]) is None
    assert rule(Case(lambda x, w: w @ x, (3, 4)), aten.matmul.default, x) is None


def test_micro_batches_keep_their_queues_apart_and_let_go_what_they_needed() -> None:
    case, shape = CASES["one weight twice"]
    current = CurrentQueue()
    graph_module = halved(case, data(shape, False), current)
    inputs = [(data(shape, False) * k).requires_grad_() for k in (1, 2, 3)]
    queues = [WeightGradientQueue() for _ in inputs]
    outputs = []
    for queue, x in zip(queues, inputs, strict=True):
        current.queue = queue
        outputs.append(graph_module(x))
    current.queue = None
    case.zero_grad(set_to_none=True)
    for y in reversed(outputs):
        y.sum().backward()
    assert [len(queue) for queue in queues] == [2, 2, 2]
    alive = weakref.ref(queues[0]._notes[0][1].args[0])
    del outputs, y
    for queue in queues:
        queue.run()
    gc.collect()
    assert alive() is None
    found = case.values[0].grad
    case.values[0].grad = None
    for x in inputs:
        case(x).sum().backward()
    torch.testing.assert_close(found, case.values[0].grad, rtol=1e-12, atol=1e-12)


def test_gradients_go_where_they_are_told() -> None:
    case, shape = CASES["conv2d"]
    current = CurrentQueue()
    seen = []
    case.zero_grad(set_to_none=True)
    graph_module = halved(case, data(shape, False), current)
    current.queue = WeightGradientQueue(lambda parameter, gradient: seen.append((parameter, gradient)))
    graph_module(data(shape)).sum().backward()
    current.queue.run()
    assert [parameter is value for (parameter, _), value in zip(seen, case.values, strict=True)] == [True, True]
    assert all(value.grad is None for value in case.values)


def test_the_first_gradient_is_taken_in_the_parameters_layout_and_dtype() -> None:
    parameter = nn.Parameter(torch.ones(3, 2))
    gradient = torch.ones(3, 2)
    accumulate(parameter, gradient)
    assert parameter.grad is gradient
    accumulate(parameter, torch.ones(3, 2, dtype=torch.bfloat16))
    assert torch.equal(gradient, torch.full((3, 2), 2.0))
    parameter.grad = None
    accumulate(parameter, torch.ones(2, 3, dtype=torch.bfloat16).t())
    assert parameter.grad.is_contiguous()
    assert parameter.grad.dtype == torch.float32


def test_a_gradient_is_let_go_of_before_the_next_is_computed() -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    left = WeightGradientQueue(lambda target, gradient: None)

    def compute() -> tuple[torch.Tensor, None]:
        assert all(gradient() is None for gradient in made)
        found = torch.ones(3)
        made.append(weakref.ref(found))
        return found, None

    for _ in range(3):
        left.note((torch.zeros(3), None), compute)
    left.run()
    assert len(made) == 3
