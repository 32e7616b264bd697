"""Other ways to divide one layer cost what the stage costs with them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from planner.costs.cost_model import CostModel
from planner.costs.stages.layouts import LayoutPrices
from planner.costs.stages.stage_cost import stage_cost, with_ways
from planner.solvers.layouts.stage import NONE, Question, best_layouts, rivals
from tests.planner.networks import priced, residual
from tests.planner.solvers.laid_out_plans import EVERYTHING, MADE
from tests.planner.solvers.layouts.stage_memory import stage_bytes

FAR = 2**40


def asked(prices: LayoutPrices, **how: object) -> Question:
    limit = (FAR,) * len(prices.ranks)
    question = Question(tuple(range(len(prices.layers))), 3.0, 2, limit)
    return replace(question, **how)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(12))
def test_each_is_priced_as_the_stage_is_with_it(seed: int) -> None:
    draw = random.Random(seed)
    profile = priced(*draw.choice(MADE), speeds=[draw.choice([1.0, 2.0]) for _ in range(3)], latency_s=1e-6)
    prices = LayoutPrices(CostModel(profile), (0, 1, 2), 3, EVERYTHING, halo_depth=draw.choice([0, 1]))
    again = draw.random() < 0.4
    chosen = {k: replace(draw.choice(prices.options(k)), recompute=again) for k in range(len(prices.layers))}
    chosen = with_ways(prices, chosen)
    index = draw.randrange(len(prices.layers))
    question = asked(prices)
    found = rivals(prices, chosen, index, question)
    assert [rival.option for rival in found if rival.is_chosen] == [chosen[index]]
    assert len({(rival.option.cuts, rival.option.margin) for rival in found}) == len(prices.options(index))
    planned = next(rival for rival in found if rival.is_chosen)
    planned_s = stage_cost(prices, chosen).step_s(3.0)
    for rival in found:
        cost = stage_cost(prices, {**chosen, index: rival.option})
        assert rival.total_s - planned.total_s == pytest.approx(cost.step_s(3.0) - planned_s, abs=1e-12)
        state = profile.optimizer.state_bytes_per_parameter_byte
        assert rival.memory_bytes == pytest.approx(stage_bytes(cost, 2, state).max(), abs=1)
    assert [rival.total_s for rival in found] == sorted(rival.total_s for rival in found)


def test_in_the_best_layouts_no_rival_is_better() -> None:
    prices = LayoutPrices(CostModel(priced(*residual(), speeds=(1.0,) * 4)), (0, 1, 2, 3), 4, EVERYTHING)
    question = asked(prices)
    chosen = with_ways(prices, best_layouts(prices, question).chosen)
    for index in range(len(prices.layers)):
        found = rivals(prices, chosen, index, question)
        planned = next(rival for rival in found if rival.is_chosen)
        assert planned.total_s <= found[0].total_s * (1 + 1e-9)
        assert planned.fits


def test_what_does_not_fit_says_so_and_forward_passes_have_no_gradients() -> None:
    prices = LayoutPrices(CostModel(priced(*residual(), speeds=(1.0, 1.0))), (0, 1), 4, EVERYTHING)
    chosen = with_ways(prices, {k: prices.options(k)[0] for k in range(len(prices.layers))})
    tight = rivals(prices, chosen, 0, asked(prices, memory_limit_bytes=(1, 1)))
    assert not any(rival.fits for rival in tight)
    forward = rivals(prices, chosen, 0, asked(prices, backward=NONE))
    assert {(rival.reduction_s, rival.update_s) for rival in forward} == {(0.0, 0.0)}
    assert all(rival.compute_s > 0 for rival in forward)
