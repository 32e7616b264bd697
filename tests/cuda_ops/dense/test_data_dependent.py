"""Branches on whether values are finite."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from cuda_ops.dense.data_dependent import FiniteValues, join, look_for_finite


class Clamped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        if not torch.isfinite(x).all():
            x = torch.zeros_like(x)
        if torch.isnan(x).any() or x.isinf().any():
            x = x + 1
        return x * 3


def test_the_graph_takes_the_branch_of_finite_values_and_looks() -> None:
    with FiniteValues():
        exported = torch.export.export(Clamped(), (torch.ones(3),), strict=False).module()
    look_for_finite(exported.graph)
    exported.graph.eliminate_dead_code()
    exported.recompile()
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

    with FiniteValues(), pytest.raises(Exception, match="data-dependent"):
        torch.export.export(Early(), (torch.ones(3),), strict=False)


def test_who_reads_one_result_of_a_unit_runs_once_all_of_it_has() -> None:
    class Sums(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            rows = x[(x[:, 0] > 0).nonzero().squeeze(1)]
            return x + rows.sum() + rows.sum(0)

    x, sums = torch.tensor([[1.0, 2.0], [-3.0, 4.0], [5.0, 6.0]]), Sums()
    exported = torch.export.export(sums, (x,), strict=False).module()
    (unit,) = join(
        exported.graph, lambda node: any(word in str(node.target) for word in ("nonzero", "squeeze", "index"))
    )
    exported.graph.lint()
    exported.recompile()
    assert torch.equal(exported(x), sums(x))
    assert {"aten.sum.default", "aten.sum.dim_IntList"} <= set(unit.meta["nodes"])
