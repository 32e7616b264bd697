"""Means over all of space, of which ranks hold parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from planner.ir.box import whole
from runtime.pipeline.routing import slices
from runtime.spatial.deferred import DeferredGradients
from tests.runtime.spatial.op_rules.test_batch_norm import CUTS
from tests.runtime.spatial.threads import Case, Cuts, Part, added_up, case, close, gradient_of, run_on_threads

_ATEN = torch.ops.aten
FLAT = "sample channel"
IMAGE = "sample channel height width"
POOLS: dict[str, tuple[Callable[..., Tensor], dict[str, Any], str]] = {
    "mean": (_ATEN.mean.dim, {"dim": [2, 3]}, FLAT),
    "mean that keeps dims": (_ATEN.mean.dim, {"dim": [-1, -2], "keepdim": True}, IMAGE),
    "adaptive": (_ATEN.adaptive_avg_pool2d.default, {"output_size": [1, 1]}, IMAGE),
}


def pool(name: str, shape: tuple[int, ...] = (3, 5, 7, 6), dtype: torch.dtype = torch.float64) -> Case:
    torch.manual_seed(0)
    target, options, dims = POOLS[name]
    one = case(target, {"self": torch.randn(shape, dtype=dtype), **options}, {"self": IMAGE}, dims)
    assert one.layer.kind == "global_pool"
    return one


def check(one: Case, parts: list[Part]) -> None:
    result, tensors = one.whole()
    shape = tuple(result.shape)
    boxes = [part.step.division.owned[0][part.step.position] for part in parts]
    result.backward(added_up(shape, [(box, part.dy) for part, box in zip(parts, boxes, strict=True)]))
    for part, box in zip(parts, boxes, strict=True):
        assert part.reached
        close(part.result, result.detach()[slices(box, whole(shape))])
    close(gradient_of("self", one, parts), tensors["self"].grad)


@pytest.mark.parametrize("function", POOLS)
@pytest.mark.parametrize("cuts", CUTS)
def test_the_mean_is_whole_on_every_rank_and_gradients_of_its_copies_are_summed(cuts: str, function: str) -> None:
    layout, margin = CUTS[cuts]
    one = pool(function)
    check(one, run_on_threads(one, layout, margin))


def test_three_dims_of_space() -> None:
    dims = "sample channel depth height width"
    x = torch.randn(2, 3, 4, 5, 3, generator=torch.Generator().manual_seed(0)).double()
    one = case(_ATEN.mean.dim, {"self": x, "dim": [2, 3, 4]}, {"self": dims}, FLAT)
    cuts: Cuts = {"depth": (0, 1, 4), "width": (0, 2, 3)}
    check(one, run_on_threads(one, cuts))


def test_half_precision_is_summed_in_single() -> None:
    one = pool("mean", (1, 2, 300, 300), torch.bfloat16)
    parts = run_on_threads(one, {"height": (0, 150, 300)})
    exact = one.arguments["self"].double().mean((2, 3))
    assert parts[0].result.dtype == torch.bfloat16
    torch.testing.assert_close(parts[0].result.double(), exact, rtol=1e-2, atol=1e-4)


def test_what_was_put_off_is_done_while_the_sum_is_on_its_way() -> None:
    done: list[int] = []

    def later() -> DeferredGradients:
        found = DeferredGradients()
        found.put(lambda: done.append(1))
        return found

    one = pool("mean")
    check(one, run_on_threads(one, {"height": (0, 3, 7)}, later=later))
    assert done == [1, 1]
