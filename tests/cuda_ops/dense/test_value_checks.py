"""Branches on whether values are finite, and on what torch.distributions asks of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, distributions, fx, nn

from cuda_ops.dense.value_checks import VALID, ValueChecks, look_at_values


@pytest.fixture(autouse=True)
def validating() -> None:
    """As torch has it by default, which a test before that compiles turns off."""
    distributions.Distribution.set_default_validate_args(True)


def looking(module: nn.Module, *inputs: Tensor) -> fx.GraphModule:
    """The graph of ``module``, which looks at values itself; its parameters are the module's own."""
    with ValueChecks():
        exported = torch.export.export(module, inputs, strict=False).module()
    look_at_values(exported.graph, lambda node: str(node.target).startswith("lifted"))
    exported.graph.eliminate_dead_code()
    exported.recompile()
    return exported


def checks_of(exported: fx.GraphModule) -> list[fx.Node]:
    return [node for node in exported.graph.nodes if node.target is VALID]


class Clamped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        if not torch.isfinite(x).all():
            x = torch.zeros_like(x)
        if torch.isnan(x).any() or x.isinf().any():
            x = x + 1
        return x * 3


def test_the_graph_takes_the_branch_of_finite_values_and_looks() -> None:
    exported = looking(Clamped(), torch.ones(3))
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    result = exported(x)
    result.sum().backward()
    assert torch.equal(result, 6 * x)
    assert torch.equal(x.grad, torch.full((3,), 6.0))
    with pytest.raises(FloatingPointError, match="1 of 3 values are not finite"):
        exported(torch.tensor([1.0, torch.inf, 3.0]))


def test_other_branches_on_data_are_left_to_export() -> None:
    class Early(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if torch.isfinite(x).any() else -x

    with ValueChecks(), pytest.raises(Exception, match="data-dependent"):
        torch.export.export(Early(), (torch.ones(3),), strict=False)


class Likelihood(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return distributions.Normal(x, self.log_scale.exp()).log_prob(y).sum()


def test_the_graph_asks_of_values_what_a_distribution_asks() -> None:
    x = torch.randn(3, 2)
    y = torch.randn(3, 2)
    module = Likelihood()
    exported = looking(module, x, y)
    for each in (module, exported):
        module.log_scale.grad = None
        each(x, y).backward()
    assert torch.equal(exported(x, y), module(x, y))
    assert len(checks_of(exported)) == 3
    for bad in ((x.fill_(torch.nan), y), (x.fill_(0.0), y.fill_(torch.nan))):
        for each in (module, exported):
            with pytest.raises(ValueError, match="Normal"):
                each(*bad)


def test_gradients_pass_through_what_looks_at_values() -> None:
    x = torch.randn(3, 2)
    y = torch.randn(3, 2)
    module = Likelihood()
    exported = looking(module, x, y)
    gradients = [torch.autograd.grad(each(x, y), module.log_scale)[0] for each in (module, exported)]
    assert torch.equal(*gradients)


def test_one_answer_for_a_vector_stands_for_all_of_its_numbers() -> None:
    class Shares(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return distributions.Dirichlet(x.exp()).log_prob(y).sum()

    x = torch.randn(4, 3)
    y = torch.randn(4, 3).softmax(-1)
    exported = looking(Shares(), x, y)
    assert all(node.args[1].meta["val"].ndim == node.args[0].meta["val"].ndim for node in checks_of(exported))
    with pytest.raises(ValueError, match=r"refuses 4 of 4 values"):
        exported(x, 2 * y)


def test_of_constants_nothing_is_asked_again() -> None:
    class Prior(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return distributions.Normal(torch.zeros(3), 1.0).sample() * 2 + x.sum()

    assert not checks_of(looking(Prior(), torch.ones(3)))


def test_a_loop_until_all_are_drawn_is_left_to_export() -> None:
    class Angles(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return distributions.VonMises(x, torch.ones(3)).sample()

    with ValueChecks(), pytest.raises(Exception, match="data-dependent"):
        torch.export.export(Angles(), (torch.ones(3),), strict=False)
