"""Units of operators whose shapes follow from data, and torch.autograd.grad inside of a captured graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

from cuda_ops.dense.data_dependent import join
from cuda_ops.dense.derivatives import Derivatives, UnknownDerivativeError, differentiate


def test_who_reads_one_result_of_a_unit_runs_once_all_of_it_has() -> None:
    class Sums(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            rows = x[(x[:, 0] > 0).nonzero().squeeze(1)]
            return x + rows.sum() + rows.sum(0)

    x = torch.tensor([[1.0, 2.0], [-3.0, 4.0], [5.0, 6.0]])
    sums = Sums()
    exported = torch.export.export(sums, (x,), strict=False).module()
    (unit,) = join(
        exported.graph, lambda node: any(word in str(node.target) for word in ("nonzero", "squeeze", "index"))
    )
    exported.graph.lint()
    exported.recompile()
    assert torch.equal(exported(x), sums(x))
    assert {"aten.sum.default", "aten.sum.dim_IntList"} <= set(unit.meta["nodes"])


def captured(module: nn.Module, *inputs: Tensor) -> fx.GraphModule:
    """The graph of ``module``, whose parameters are the module's own."""
    with Derivatives():
        exported = torch.export.export(module, inputs, strict=False).module()
    differentiate(exported.graph)
    exported.graph.eliminate_dead_code()
    exported.recompile()
    return exported


def assert_equal(module: nn.Module, *inputs: Tensor) -> None:
    """Values and gradients of parameters."""
    exported = captured(module, *inputs)
    results = []
    for each in (module, exported):
        each.zero_grad()
        loss = each(*inputs)
        loss.backward()
        results.append(
            [loss.detach(), *(p.grad.clone() for _, p in sorted(each.named_parameters()) if p.grad is not None)]
        )
    assert len(results[0]) == len(results[1]) > 1
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


class Net(nn.Module):
    def __init__(self, of: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
        self.of = of

    def forward(self, x: Tensor) -> Tensor:
        return self.of(self.net, x)


X = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def first(net: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_(True)
    (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    return slope.pow(2).mean() + net(x).mean()


def second(net: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_(True)
    u = net(x)
    u_x = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)[0][:, :1]
    return torch.autograd.grad(u_x, x, grad_outputs=torch.ones_like(u_x), create_graph=True)[0].pow(2).mean()


def by_an_activation(net: nn.Module, x: Tensor) -> Tensor:
    h = net[0](x)
    (slope,) = torch.autograd.grad(
        [net[2](torch.tanh(h)).sum(), h.sum()], [h], [torch.tensor(2.0).double(), None], create_graph=True
    )
    return (slope * h).mean()


def by_parameters(net: nn.Module, x: Tensor) -> Tensor:
    """A step of gradient descent inside of forward (Finn et al. 2017)."""
    own = dict(net.named_parameters())
    found = torch.autograd.grad(net(x[:2]).pow(2).mean(), list(own.values()), create_graph=True)
    adapted = {name: p - 0.1 * g for (name, p), g in zip(own.items(), found, strict=True)}
    return torch.func.functional_call(net, adapted, (x[2:],)).pow(2).mean()


def without_a_graph(net: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_(True)
    (slope,) = torch.autograd.grad(net(x).sum(), x, retain_graph=True)
    return (slope.sum() * net(x)).mean()


@pytest.mark.parametrize("of", [first, second, by_an_activation, by_parameters, without_a_graph])
def test_a_derivative_and_its_own_gradient_are_those_of_the_module(of: Callable[[nn.Module, Tensor], Tensor]) -> None:
    assert_equal(Net(of), X)


def test_it_is_computed_where_no_gradients_are_kept() -> None:
    module = Net(first)
    expected = module(X)
    exported = captured(module, X)
    with torch.no_grad():
        assert torch.allclose(exported(X), expected, rtol=1e-12)
    with torch.inference_mode():
        assert torch.allclose(exported(X.clone()), expected, rtol=1e-12)


def test_what_does_not_depend_on_an_input_is_refused() -> None:
    def unrelated(net: nn.Module, x: Tensor) -> Tensor:
        other = torch.ones(2, dtype=x.dtype).requires_grad_(True)
        found = torch.autograd.grad(net(x).sum(), other, create_graph=True, allow_unused=True)[0]
        return net(x).mean() + (0 if found is None else found.sum())

    with pytest.raises(UnknownDerivativeError, match="does not depend"):
        captured(Net(unrelated), X)


def test_batched_gradients_are_refused() -> None:
    def batched(net: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_(True)
        u = net(x).squeeze(1)
        return torch.autograd.grad(u, x, torch.eye(4, dtype=x.dtype), is_grads_batched=True)[0].mean()

    with pytest.raises(Exception, match="is_grads_batched"):
        captured(Net(batched), X)
